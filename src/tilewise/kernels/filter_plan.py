"""The plan of the filter: which entries backward drops, and what replaces them. An *entry* is one row and one tile.

Axes: n rows, m columns in a new order, T = ceil(m / width) tiles of ``width`` columns, d features.

    forward    order the columns by their mean score, largest first
               M_ti = sum over the columns j of tile t of exp(x_ij - row_lse_i)        the mass of the entry (t, i)
               row i drops its entries of least mass, as many as together stay below the tolerance; never an entry
               with its positive or a picked column
    backward   g_i = dL / d row_lse_i
               G_ij = g_i exp(x_ij - row_lse_i) + the terms of positives and picked columns    if (t, i) is kept
               G_ij = g_i M_ti / live columns of the tile                if (t, i) is dropped

A column is live if its bias is not -inf. The last tile may have fewer columns than the others. With a soft cap, G_ij of
a dropped entry is multiplied by the cap's derivative at y, where exp(y) is the tile's mean exponential.

A large call first tests a sample of its rows. If they keep too much, the exact forward and backward run. The exact
passes also run if score rounding is too large for the tolerance.

Let D_i <= tolerance be the mass that row i drops. Then

    sum_j |error of G_ij|  <=  2 |g_i| D_i
    sum_j error of G_ij     =  0                                                           without a soft cap
    |error of dA_i|        <=  |scale g_i| D_i max_j |b_j - mean of its tile|              without a soft cap

If the loss depends on the entropy H_i of row i, with h_i = dL / dH_i, then G_ij has one more term,
h_i p_ij (row_lse_i - x_ij - H_i) with p_ij = exp(x_ij - row_lse_i). So an entry also has an entropy E_ti, and row i
drops the entropy E_i:

    E_ti = sum over the columns j of tile t of p_ij (row_lse_i - x_ij)          E_i = sum of the dropped E_ti
    E_i <= tolerance log m                 a second condition for dropping; log m is the largest entropy of a row
    G_ij = (v_i + h_i E_i / D_i) M_ti / live columns of the tile       if (t, i) is dropped, v_i = g_i - h_i H_i

In each row, the replacements have the same sum as the numbers that they replace. So, without a soft cap, the errors of
a row of G sum to 0, and

    sum_j |error of G_ij|  <=  2 (|v_i| D_i + |h_i| E_i)
    |error of dA_i|        <=  |scale| (|v_i| D_i + |h_i| E_i) max_jk |b_j - b_k|

Over a vocabulary group each of W ranks has tiles of its own columns. The masses refer to the log-sum-exp over the
columns of all ranks, which is known before a rank chooses. A rank may drop 1/W of the tolerance, so the bounds hold for
D_i and E_i summed over the ranks; m is then the number of all columns. If all columns of a rank together have no more
mass in a row than the rank may drop, it drops all of them.

With ``filter_tolerance="rounding"`` the tolerance is that of `tolerance_of`, and a row with a small gradient drops
less, because rounding G is relative to its size. With p the probability of the positive, the gradient of the loss has
the size sum_j |G_ij| = 2 |g_i| (1 - p), and with H_i the entropy of the row:

    D_i <= tolerance min(1, 2 (1 - p))        E_i <= tolerance H_i / 2        each at least `SMALLEST_LIMIT` tolerances

A row's threshold is found by bisection. Nothing is dropped where the rounding of a score may exceed `ROUNDING_SHARE` of
the tolerance: forward and backward multiply blocks of different shapes, and the order of sums in a product depends on
the shape. So exp(x_ij - row_lse_i) in backward has a relative error of up to about

    eps (|scale| max_i |a_i| max_j |b_j| + max_j |bias_j|)

The kernels do all of this. `tests/dense_filter.py` does it in plain PyTorch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise.kernels.slices import slices
from tilewise.kernels.spec import HALF_TYPES, FilterPlan, Pair, PairSpec
from tilewise.options import TileOptions

KEPT = -1.0  # value of a kept entry in `FilterPlan.mass`
WIDEST_TILE, NARROWEST_TILE = 256, 16
FEWEST_TILES = 128  # a small vocabulary gets narrower tiles, so that there are enough to choose from
SMALLEST_TOLERANCE = 2.0**-100  # below it, dropped masses would be subnormal float32 numbers with too few digits
MARGIN = 1.0 - 2.0**-8  # fraction of the tolerance that is used; allows for the rounding of float32 sums
HALVINGS = 12  # bisection steps for a row's threshold; its first interval spans a factor of T, or more with an entropy
DENSE_SHARE = 0.17  # if more than this fraction of the entries is kept, computing all is faster (tiles of 256 columns)
PROBED_SHARE = 0.88  # of DENSE_SHARE: the filter is not used if the sampled rows keep more than 0.15 of their entries
ROUNDING_SHARE = 0.25  # fraction of the tolerance that the rounding of a score may reach
# A sample has one in 64 rows, rounded down to a power of 2, at least 16 and at most 128.
MOST_PROBED, FEWEST_PROBED, ROWS_PROBED = 128, 16, 64
SMALLEST_LIMIT = 2.0**-23  # with "rounding", in tolerances: float32 cannot distinguish a smaller 1 - p from 0


def tolerance_of(options: TileOptions, dtype: torch.dtype) -> float:
    """``filter_tolerance`` as a number. "rounding" is the eps of a half type, and 0 for float32 and float64.

    A dense path in a half type rounds its logits and their gradient G, each by up to eps / 2 of its size.

    >>> tolerance_of(TileOptions(filter_tolerance="rounding"), torch.bfloat16)
    0.0078125
    """
    if isinstance(options.filter_tolerance, str):
        return torch.finfo(dtype).eps if dtype in HALF_TYPES else 0.0
    return options.filter_tolerance


def tile_width(m: int) -> int:
    """The number of columns of a tile, for m columns.

    >>> [tile_width(m) for m in (100, 1000, 32064, 256000)]
    [16, 16, 128, 256]
    """
    width = NARROWEST_TILE
    while width < WIDEST_TILE and width * 2 * FEWEST_TILES <= m:
        width *= 2
    return width


def tile_count(m: int) -> int:
    """The number of tiles of m columns."""
    return -(-m // tile_width(m))


def mean_row(pair: Pair) -> Tensor:
    """The sum of all rows that are not ignored, divided by n: (d,).

    Ignored rows stay in the divisor. The mean only orders the columns. Without a bias, a positive factor cannot change
    the order. With a bias the factor may change it. Then the filter may drop fewer entries; the bounds hold for every
    order.
    """
    valid = (pair.row_key >= 0).to(pair.a.dtype)
    if pair.a.is_cuda and pair.a.dtype in HALF_TYPES:
        total = torch.mm(valid[None, :], pair.a, out_dtype=torch.float32).squeeze(0)
    else:
        total = torch.zeros(pair.a.shape[1], dtype=pair.stat_dtype, device=pair.a.device)
        for rows in slices(pair.a.shape[0], 4096):
            total += valid[rows].to(total.dtype) @ pair.a[rows].to(total.dtype)
    return total / pair.a.shape[0]


def order_by(product_m: Tensor, pair: Pair) -> Tensor:
    """The columns ordered by scale * product + bias, largest first: (m,) int32."""
    score = product_m.to(pair.stat_dtype) * pair.scale
    if pair.bias is not None:
        score = score + pair.bias
    return torch.argsort(score, descending=True, stable=True).to(torch.int32)


def order_columns(pair: Pair) -> Tensor:
    """The columns ordered by their score with the mean row, largest first: (m,) int32."""
    return order_by(torch.mv(pair.b, mean_row(pair).to(pair.b.dtype)), pair)


def sample_size(n: int, m: int, score_bytes: int, options: TileOptions) -> int:
    """The number of rows of a sample whose scores fit half the workspace, a power of 2; 0 if it would be too small.

    >>> [sample_size(n, 256_000, 2, TileOptions()) for n in (40, 300, 2048, 8192, 65536)]
    [0, 16, 32, 128, 128]
    """
    fits = min(MOST_PROBED, max(n // ROWS_PROBED, FEWEST_PROBED), options.workspace_bytes // 2 // (m * score_bytes))
    if fits < FEWEST_PROBED or n < 4 * FEWEST_PROBED:
        return 0
    return 1 << (fits.bit_length() - 1)


def sample_of(n: int, rows: int) -> slice:
    """A slice of ``rows`` evenly spaced rows of n.

    >>> list(range(100))[sample_of(100, 4)]
    [0, 25, 50, 75]
    """
    return slice(0, rows * (n // rows), n // rows)


def too_many(kept: Tensor, entries: int | Tensor, share: float = 1.0) -> Tensor:
    """Whether the kept fraction of the entries exceeds share * DENSE_SHARE: (1,) int32, on the device of ``kept``.

    ``entries`` may be a tensor on the device.
    """
    limit = min(1.0, share * DENSE_SHARE)  # tests set DENSE_SHARE above 1, so that the filter is always used
    most = int(limit * entries) if isinstance(entries, int) else (limit * entries.double()).long()
    return (kept.sum() > most).to(torch.int32).view(1)


def most_kept(entries: int) -> int:
    """An upper bound on the kept entries of a call that uses the filter."""
    return int(min(1.0, DENSE_SHARE) * entries)  # see `too_many`


def keep_everything(pair: Pair, spec: PairSpec) -> FilterPlan:
    """The plan of a call that drops nothing. The order of the columns does not matter."""
    valid, tiles = pair.row_key >= 0, tile_count(pair.b.shape[0])
    order = torch.arange(pair.b.shape[0], dtype=torch.int32, device=pair.a.device)
    mass = torch.where(valid, KEPT, 0.0).to(pair.a.dtype).expand(tiles, -1).contiguous()
    mean = pair.a.new_zeros((tiles, pair.b.shape[1]))
    kept = valid.sum(dtype=torch.int32).expand(tiles).contiguous()
    surprise = pair.scale.new_zeros(pair.a.shape[0] if spec.row_entropy else 0)
    keep_all = torch.ones_like(kept[:1])
    return FilterPlan(order=order, mass=mass, mean=mean, surprise=surprise, kept=kept, keep_all=keep_all)


def columns_of_tiles(order: Tensor, bias: Tensor | None) -> Tensor:
    """The number of columns of each tile, without those with a bias of -inf: (T,) float32, at least 1."""
    m, width = order.shape[0], tile_width(order.shape[0])
    tiles = tile_count(m)
    if bias is None:
        count = torch.full((tiles,), float(width), device=order.device)
        count[-1:].fill_(float(m - (tiles - 1) * width))  # an assignment would synchronize
        return count
    live = torch.zeros(tiles * width, device=order.device)
    live[:m] = (bias[order.long()] > -torch.inf).float()
    return live.view(tiles, width).sum(1).clamp_(min=1.0)


def masses(spec: PairSpec) -> int:
    """How many float32 values forward keeps for each row and tile."""
    return 1 + spec.row_entropy + 2 * spec.row_top


def fits_at_once(n: int, m: int, spec: PairSpec, options: TileOptions) -> bool:
    """Whether the `masses` of all rows and tiles fit a quarter of the workspace.

    Over a group, those of all rows are needed at once.
    """
    return 4 * n * tile_count(m) * masses(spec) <= options.workspace_bytes // 4


def rows_per_step(n: int, tiles: int, options: TileOptions, numbers: int = 1) -> int:
    """The number of rows that fit a quarter of the workspace, with ``numbers`` float32 values for each row and tile.

    A multiple of 64, and at least 64.
    """
    return max(64, min(n, options.workspace_bytes // 4 // (4 * tiles * numbers)) // 64 * 64)
