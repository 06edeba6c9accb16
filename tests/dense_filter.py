"""The filter with all scores in float64: the oracle of the kernels, and a filter for the torch backend in tests.

`tilewise.kernels.filter_plan` has the method. Axes: n rows of a, m rows of b, T tiles of W columns, K picked columns.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.kernels import filter_plan as plans
from tilewise.kernels.spec import FilterPlan, Grads, Pair, Stats, stat_dtype
from tilewise.kernels.torch_impl import two_pass
from tilewise.options import TileOptions


class DenseFilter:
    """The capability `filtered` of a backend. Statistics are those of the torch backend."""

    def forward(self, pair, spec, options):
        """The statistics, and the plan of what backward drops."""
        stats = two_pass.forward(pair, spec, options)
        tolerance = plans.tolerance_of(options, pair.a.dtype)
        if rounding_exceeds(pair, tolerance):
            return stats, plans.keep_everything(pair, spec)
        return stats, plan_of(pair, stats, spec, options, tolerance)

    def forward_saving(self, pair, spec, options):
        """`forward`. Nothing is saved."""
        return *self.forward(pair, spec, options), None

    def backward(self, pair, stats, plan, grad, needs, spec, options, *, saved=None):
        """The gradients, or None if all entries are kept."""
        if int(plan.keep_all):
            return None
        tolerance, valid = plans.tolerance_of(options, pair.a.dtype), (pair.row_key >= 0)[:, None]
        g = torch.where(valid, score_gradient(pair, stats, plan, grad, spec, tolerance), 0.0)
        a, b = torch.where(valid, pair.a, 0.0).double(), pair.b.double()
        return Grads(
            a=(pair.scale * g @ b).to(pair.a.dtype) if needs.a else None,
            b=(pair.scale * g.T @ a).to(pair.b.dtype) if needs.b else None,
            scale=(g * (a @ b.T)).sum().to(pair.stat_dtype) if needs.scale else None,
            bias=g.sum(0).to(pair.stat_dtype) if needs.bias else None,
        )


def scores_of(pair, spec) -> Tensor:
    """(n, m) float64."""
    x = pair.scale.double() * pair.a.double() @ pair.b.double().T
    if pair.bias is not None:
        x = x + pair.bias.double()
    return spec.softcap * torch.tanh(x / spec.softcap) if spec.softcap else x


def plan_of(pair, stats: Stats, spec, options, tolerance) -> FilterPlan:
    """What each row drops."""
    n, m = pair.a.shape[0], pair.b.shape[0]
    width, tiles = plans.tile_width(m), plans.tile_count(m)
    order = plans.order_columns(pair)
    shift = 0.0 if pair.row_shift is None else pair.row_shift.double()[:, None]
    x_nm = torch.nn.functional.pad(scores_of(pair, spec)[:, order.long()], (0, tiles * width - m), value=-torch.inf)
    x_ntw = (x_nm - shift).view(n, tiles, width)
    part_nt, entropy_tn = x_ntw.logsumexp(2), None
    if spec.row_entropy:
        log_p = torch.where(part_nt[:, :, None] == -torch.inf, 0.0, x_ntw - part_nt[:, :, None])
        entropy_tn = -(log_p.exp() * log_p.clamp(min=-1e30)).sum(2).T.to(pair.stat_dtype)
        entropy_tn = torch.where(-torch.inf == part_nt.T, 0.0, entropy_tn)
    part_tn, lse = part_nt.T.to(pair.stat_dtype), stats.row_lse.to(pair.stat_dtype)
    places = always_kept(order, pair)
    log_prob = None
    if spec.positive == "one":
        log_prob = torch.where(places[:, 0] >= 0, (stats.row_pos - stats.row_lse).to(lse.dtype), -torch.inf)
    most = limits(options, m, log_prob, stats.row_entropy)
    mass = choose(part_tn, lse, places, pair.row_key >= 0, tolerance, width, most, entropy_tn)
    surprise = lse.new_zeros(0)
    if entropy_tn is not None:
        surprise = mean_surprise(mass, part_tn - lse, entropy_tn)
    kept = (mass < 0).sum(1, dtype=torch.int32)
    b_md = pair.b.double()
    if pair.bias is not None:
        b_md = torch.where(pair.bias[:, None] > -torch.inf, b_md, 0.0)
    mean = b_md.new_zeros(tiles, b_md.shape[1]).index_add_(0, tiles_of_columns(order), b_md)
    return FilterPlan(
        order=order,
        mass=mass.to(pair.a.dtype),
        mean=(mean / plans.columns_of_tiles(order, pair.bias)[:, None]).to(pair.a.dtype),
        surprise=surprise,
        kept=kept,
        keep_all=plans.too_many(kept, mass.numel()),
    )


def tiles_of_columns(order: Tensor) -> Tensor:
    """The tile of each column: (m,)."""
    tile = torch.empty_like(order, dtype=torch.int64)
    tile[order.long()] = torch.arange(len(order), device=order.device) // plans.tile_width(len(order))
    return tile


def score_gradient(pair, stats: Stats, plan: FilterPlan, grad, spec, tolerance) -> Tensor:
    """G, with the mean of the tile for what is dropped: (n, m) float64."""
    x, tile = scores_of(pair, spec), tiles_of_columns(plan.order)
    lse = stats.row_lse.double() if pair.row_shift is None else stats.row_lse.double() + pair.row_shift
    value, h = torch.zeros_like(lse), torch.zeros_like(lse)
    if grad.row_lse is not None:
        value = grad.row_lse.double()
    dropped = value
    if grad.row_entropy is not None:
        h = grad.row_entropy.double()
        value = value - h * stats.row_entropy.double()
        dropped = value + h * plan.surprise
    below = (lse[:, None] - x).clamp(max=1e30)
    g = (x - lse[:, None]).exp() * (value[:, None] + h[:, None] * below)
    columns = torch.arange(x.shape[1], device=x.device)
    if grad.row_pos is not None:
        g = g + torch.where(columns == (pair.row_key - pair.col_start)[:, None], grad.row_pos.double()[:, None], 0.0)
    if grad.row_picked is not None:
        place = pair.pick - pair.col_start
        inside = (place >= 0) & (place < x.shape[1])
        coming = torch.where(inside, grad.row_picked.double(), 0.0)
        g = g.scatter_add(1, place.clamp(0, x.shape[1] - 1), coming)
    if spec.softcap:
        g = g * (1.0 - (x / spec.softcap).square())
    share = plan.mass.double().clamp(min=0.0) * tolerance / plans.columns_of_tiles(plan.order, pair.bias)[:, None]
    instead = share * dropped
    if spec.softcap:
        instead = instead * (1.0 - ((share.log() + lse) / spec.softcap).square()).clamp(min=0.0)
    instead_nm = torch.where(share > 0, instead, 0.0)[tile].T
    if pair.bias is not None:
        instead_nm = torch.where(pair.bias > -torch.inf, instead_nm, 0.0)
    return torch.where((plan.mass < 0)[tile].T, g, instead_nm)


class Limits(NamedTuple):
    """The most that a row may drop, as multiples of the tolerance: a number, or one for each row (n,)."""

    mass: Tensor | float = 1.0  # limit of the dropped probability
    entropy: Tensor | float = math.inf  # limit of the dropped entropy, in nats


def limits(options: TileOptions, m: int, log_prob_n: Tensor | None, entropy_n: Tensor | None) -> Limits:
    """What each row may drop, in units of the tolerance.

    With a number as tolerance: 1 of the probability, and log m of the entropy, the largest that m columns can have.
    With "rounding" a row with a small gradient drops less, because rounding G is relative to its size. With p the
    probability of the positive, the gradient of the loss has the size sum_j |G_ij| = 2 |g_i| (1 - p):

        probability  min(1, 2 (1 - p))        entropy  H_i / 2

    Args:
        log_prob_n: log p; None without positives.
        entropy_n: H_i, or None if it is no statistic of the call.
    """
    mass: Tensor | float = 1.0
    entropy: Tensor | float = math.log(m)
    if options.filter_tolerance == "rounding":
        if log_prob_n is not None:
            mass = (-2.0 * torch.expm1(log_prob_n)).clamp(plans.SMALLEST_LIMIT, 1.0)
        if entropy_n is not None:
            entropy = (entropy_n / 2.0).clamp(min=plans.SMALLEST_LIMIT)
    return Limits(mass, math.inf if entropy_n is None else entropy)


def rounding_exceeds(pair: Pair, tolerance: float) -> Tensor:
    """Whether the rounding of a score may exceed ROUNDING_SHARE of the tolerance: (1,) int32, on the device.

    Forward and backward multiply blocks of different shapes, and the order of sums in a product depends on the shape.
    So exp(x_ij - row_lse_i) in backward has a relative error of up to about

        eps * (|scale| max_i |a_i| max_j |b_j| + max_j |bias_j|)

    The exact strategy has no such error: both of its passes compute the same products.
    """
    size = pair.scale.abs() * _largest_norm(pair.a, pair.row_key >= 0) * _largest_norm(pair.b, None)
    if pair.bias is not None:
        size = size + torch.where(pair.bias.isinf(), 0.0, pair.bias).abs().amax()
    exceeds = torch.finfo(pair.stat_dtype).eps * size > plans.ROUNDING_SHARE * tolerance
    return exceeds.to(torch.int32).view(1)


def _largest_norm(x: Tensor, valid: Tensor | None) -> Tensor:
    """The largest norm of the rows of x, or of those that ``valid`` marks: 0-d."""
    norm = torch.linalg.vector_norm(x, dim=1, dtype=stat_dtype(x.dtype))
    return (norm if valid is None else torch.where(valid, norm, 0.0)).amax()


def places_of(order: Tensor, pair: Pair, columns: Tensor | None = None) -> Tensor:
    """The positions of ``columns``, by default of the positives, in the order: int64; -1 for a column outside."""
    m = order.shape[0]
    place_m = torch.empty(m, dtype=torch.int64, device=order.device)
    place_m[order.long()] = torch.arange(m, device=order.device)
    own = (pair.row_key if columns is None else columns) - pair.col_start
    return torch.where((own >= 0) & (own < m), place_m[own.clamp(0, m - 1)], -1)


def always_kept(order: Tensor, pair: Pair) -> Tensor:
    """The positions of the columns whose entries stay: the positive of each row and its K picks, (n, 1 + K)."""
    place = places_of(order, pair)[:, None]
    return place if pair.pick is None else torch.cat((place, places_of(order, pair, pair.pick)), 1)


def choose(
    part_tn: Tensor,
    lse_n: Tensor,
    kept_nk: Tensor,
    valid_n: Tensor,
    tolerance: float,
    width: int,
    most: Limits,
    entropy_tn: Tensor | None,
) -> Tensor:
    """The plan: (T, n), KEPT for a kept entry, else its mass / tolerance, in the type of ``part_tn``.

    A row drops the entries whose mass is below a threshold, which is found by bisection: their sum must stay below
    ``tolerance * most.mass``, and that of their E_ti below ``tolerance * most.entropy``. The bisection starts from a
    lower bound that is safe for every row: tolerance * most.mass / T. If entropy is limited, the bound is also at most
    y / (2 log(width / y)) with y = tolerance * most.entropy / T, because E_ti <= M_ti log(width / M_ti).

    Args:
        part_tn: the log-sum-exp of each row in each tile.
        lse_n: the log-sum-exp of each row over all tiles.
        kept_nk: the positions of the columns whose entries stay (`always_kept`), or -1.
        valid_n: False for an ignored row. It drops all its entries, and they are 0 in the result.
        most: what a row may drop, in units of the tolerance.
        entropy_tn: the entropy of each row's softmax over the columns of each tile, if entropy is limited.
    """
    tiles = part_tn.shape[0]
    # NaN < x is False, so entries with a mass of NaN are kept. The entries that must be kept are set to NaN. Entries
    # with NaN scores are kept too, so NaN reaches the gradient.
    tile_kn = torch.where(kept_nk >= 0, kept_nk // width, tiles).T
    stays = part_tn.new_zeros((tiles + 1, part_tn.shape[1]), dtype=torch.bool).scatter_(0, tile_kn, True)[:tiles]
    log_mass = (part_tn - lse_n[None, :]).masked_fill_(stays, torch.nan)
    mass = log_mass.exp()
    usable = torch.full_like(lse_n, tolerance * plans.MARGIN)
    usable, usable_entropy = usable * most.mass, usable * most.entropy
    low, high = (usable / tiles).log(), usable.log()
    entropy = None
    if entropy_tn is not None:
        entropy, each = dropped_entropy(log_mass, entropy_tn), usable_entropy / tiles
        low = torch.minimum(low, (each / (2.0 * (width / each).log())).log())
    for _ in range(plans.HALVINGS):
        middle = (low + high) / 2
        below = log_mass < middle
        fits = torch.where(below, mass, 0.0).sum(0) <= usable
        if entropy is not None:
            fits &= torch.where(below, entropy, 0.0).sum(0) <= usable_entropy
        low, high = torch.where(fits, middle, low), torch.where(fits, high, middle)
    plan = torch.where(log_mass < low, mass / tolerance, plans.KEPT)
    return torch.where(valid_n[None, :], plan, 0.0)


def dropped_entropy(log_mass_tn: Tensor, entropy_tn: Tensor) -> Tensor:
    """E_ti = M_ti (entropy over the tile - log M_ti): (T, n); 0 for an empty tile."""
    return torch.where(log_mass_tn == -torch.inf, 0.0, log_mass_tn.exp() * (entropy_tn - log_mass_tn))


def mean_surprise(mass_tn: Tensor, log_mass_tn: Tensor, entropy_tn: Tensor) -> Tensor:
    """E_i / D_i of the dropped entries, those that are not negative in ``mass_tn``: (n,); 0 if nothing is dropped."""
    dropped = (mass_tn >= 0) & (log_mass_tn > -torch.inf)
    entropy = torch.where(dropped, dropped_entropy(log_mass_tn, entropy_tn), 0.0).sum(0)
    mass = torch.where(dropped, log_mass_tn.exp(), 0.0).sum(0)
    return torch.where(mass > 0.0, entropy / mass, 0.0)
