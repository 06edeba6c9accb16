"""A scalar loss and its gradients in one pass: what a row counts is known before, so G need not wait for backward.

    L = sum_i w_i (lse_i - pos_i) + sum_i z_i lse_i^2                    or    L = sum_i w_i softplus_i
    G_ij = (w_i + 2 z_i lse_i) exp(x_ij - lse_i) - w_i [positive]        or    w_i (sigmoid(x_ij) - [positive])
    dA = scale G B,   dB = scale G' A,   dscale = sum_ij G_ij <a_i, b_j>,   dbias = column sums of G

Three products instead of four. For a softmax the scores of a block of rows with ALL columns are held until the sums of
the rows are known; a sigmoid needs nothing but the score itself, and goes tile by tile.

`direct` gives the gradients, which wait until it is known what they are multiplied by. Where they would take too much
memory for that, `exponentials` gives what they are made of, and `gradients` makes them.

Axes: n rows of a, m rows of b, d features; r rows of one block; i, j slices of rows and columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tilewise.kernels.precision import matmul_precision
from tilewise.kernels.select import choose_backend
from tilewise.kernels.spec import Backend, Grads, GradStats, Needs, Pair, PairSpec, Stats, incoming_size
from tilewise.kernels.tile_softmax import SAFE_SCORE
from tilewise.kernels.tiled import _GradSums
from tilewise.kernels.tiles import Tiles, score_bound
from tilewise.options import TileOptions

LARGEST_BLOCK = 1024  # rows; more gains nothing
SMALLEST_BLOCK = 64  # with fewer the products are thin, and the scores are better computed twice
WORTH_IT = 2**34  # multiply-adds of one product from which a CUDA device is busy for longer than its host
ONE_MACRO = 16384  # up to here the ordinary path on CUDA needs no float32 accumulator for the columns
SMALLEST_CUDA_BLOCK = 2048  # rows, if there are several blocks: each adds to a float32 accumulator


@dataclass(frozen=True, kw_only=True)
class RowWeights:
    """What each row counts: ``each`` of lse - pos or of softplus, ``square`` of lse^2. Zero for a row that does not."""

    each: Tensor  # (n,), in the type of the statistics
    square: Tensor | None = None  # (n,)

    def rows(self, part: slice | Tensor) -> RowWeights:
        """Those of some rows."""
        return RowWeights(each=self.each[part], square=None if self.square is None else self.square[part])


def serves(spec: PairSpec) -> bool:
    """Whether the gradient of such scores can be formed in one pass: rows only, at most one positive in each."""
    if spec.col_lse or spec.symmetric or spec.row_sum or spec.of_tokens or spec.itself or spec.positive != "one":
        return False
    return spec.row_lse != spec.softplus and not (spec.softplus and spec.softcap)


def pays(shape: tuple[int, int, int], dtype: torch.dtype, device: str, spec: PairSpec, options: TileOptions) -> bool:
    """Whether "auto" forms the gradients in forward. Plain arithmetic: a compiler traces it.

    Args:
        shape: n, m, d.
        device: the type of it.
    """
    n, m, d = shape
    budget = options.workspace_bytes
    if device != "cuda":
        return spec.softplus or block_rows(shape, dtype, device, spec, budget) >= min(n, SMALLEST_BLOCK)
    if n * m * d < WORTH_IT:
        return False
    if spec.softplus or one_block(shape, dtype, budget):
        return True
    accumulator = 0 if min(n, m) > ONE_MACRO else 4 * m * d
    return (budget - accumulator) // ((m + d) * dtype.itemsize) >= SMALLEST_CUDA_BLOCK


def one_block(shape: tuple[int, int, int], dtype: torch.dtype, budget: int) -> bool:
    """Whether the Triton backend holds the scores of all rows at once: they, a copy of the rows, and partial sums."""
    n, m, d = shape
    return n * ((m + d) * dtype.itemsize + m // 32) <= budget


def block_rows(shape: tuple[int, int, int], dtype: torch.dtype, device: str, spec: PairSpec, budget: int) -> int:
    """Rows whose scores with all columns fit the workspace, in the torch backend; 0 if not one does."""
    n, m, d = shape
    half, item = dtype in (torch.float16, torch.bfloat16), 8 if dtype == torch.float64 else 4
    whole = m * d * item if half and device != "cuda" else 0  # all columns in the type of the products
    more = 8 if half and device == "cuda" else 2  # masks; G in the type of the features
    row = m * (item * (1 + bool(spec.softcap)) + more) + 4 * d * item
    return max(0, min(n, LARGEST_BLOCK, (budget - whole) // row))


def held_dtype(features: torch.dtype) -> torch.dtype:
    """The type in which gradients wait for backward: that of the products, so that they are rounded once, after what
    comes in is multiplied. A loss scale lifts gradients that float16 could not hold without it."""
    return torch.float32 if features in (torch.float16, torch.bfloat16) else features


def waits(pair: Pair, needs: Needs, spec: PairSpec, options: TileOptions) -> bool:
    """Whether exponentials wait for backward instead of gradients.

    The gradient of a large bfloat16 classifier would wait as float32, twice the memory that it takes in the end. Where
    one block holds all rows, `Exponentials` take none that the call has not had already, and the products that make
    gradients of them know what comes in: these too are rounded once.
    """
    n, m, d = pair.a.shape[0], pair.b.shape[0], pair.b.shape[1]
    budget = options.workspace_bytes
    if not needs.b or spec.softplus or pair.a.dtype != torch.bfloat16 or 4 * m * d <= budget // 4:
        return False
    return one_block((n, m, d), pair.a.dtype, budget) and choose_backend(pair, spec, options).name == "triton"


@dataclass(frozen=True, kw_only=True)
class Exponentials:
    """What gradients are made of: G_ij = factor_i E_ij.

    The positive's entry of E is there as it was before it was rounded too: it may be all that counts.
    """

    e: Tensor  # (n or more, `row_width` or more), in the type of the features; columns from m on mean nothing
    factor: Tensor  # (n or more,), in the type of the statistics
    entry: Tensor  # (n or more,), in the type of the statistics
    column: Tensor  # (n or more,), int32: where it is; -1 in a row without

    @property
    def rounded(self) -> bool:
        """Whether E has fewer digits than the entries."""
        return self.e.dtype != self.entry.dtype


def row_width(m: int, features: torch.dtype) -> int:
    """Numbers from one row of E to the next, so that each starts at a 16-byte address."""
    step = 16 // features.itemsize
    return (m + step - 1) // step * step


def exponentials(
    pair: Pair, weights: RowWeights, spec: PairSpec, options: TileOptions, rows: int, only_if: Tensor | None = None
) -> tuple[Tensor, Exponentials]:
    """The loss, a number, and what waits for `gradients`, in memory for ``rows`` rows; ask `waits` before.

    With ``only_if``, a number of type int32 on the device, only if that is not 0: the results mean nothing otherwise.
    """
    from tilewise.kernels.triton_impl import direct as fused

    return fused.exponentials(pair, weights, spec, options, rows, only_if)


def gradients(held: Exponentials, pair: Pair, upstream: Tensor, needs: Needs, options: TileOptions) -> Grads:
    """The gradients of the loss times ``upstream``, those of the features in their own type."""
    from tilewise.kernels.triton_impl import direct as fused

    return fused.gradients(held, pair, upstream, needs, options)


def direct(pair: Pair, weights: RowWeights, needs: Needs, spec: PairSpec, options: TileOptions) -> tuple[Tensor, Grads]:
    """The loss, a number, and its gradients, those of the features in `held_dtype`."""
    assert serves(spec)
    backend = choose_backend(pair, spec, options)
    shape = pair.a.shape[0], pair.b.shape[0], pair.b.shape[1]
    if backend.name == "triton":
        from tilewise.kernels.triton_impl import direct as fused

        if fused.why_not(pair, spec, options) is None:
            return fused.direct(pair, weights, needs, spec, options)
    else:
        rows = block_rows(shape, pair.a.dtype, pair.a.device.type, spec, options.workspace_bytes)
        if spec.softplus or rows >= 1:
            with matmul_precision(options.precision), torch.no_grad():
                return _Blocks(pair, weights, needs, spec, options, rows).run()
    return two_passes(backend, pair, weights, needs, spec, options)


def two_passes(
    backend: Backend, pair: Pair, weights: RowWeights, needs: Needs, spec: PairSpec, options: TileOptions
) -> tuple[Tensor, Grads]:
    """The same from the ordinary statistics and their gradients: four products."""
    stats = backend.forward(pair, spec, options)
    if spec.softplus:
        assert stats.row_softplus is not None
        loss = (weights.each.double() * stats.row_softplus).sum()
        grad = GradStats(row_softplus=weights.each)
    else:
        assert stats.row_lse is not None
        assert stats.row_pos is not None
        lse = stats.row_lse if pair.row_zero is None else stats.row_lse + pair.row_zero
        loss, grad = _softmax_loss(weights, stats, lse)
    held = held_dtype(pair.a.dtype)
    return loss.to(pair.stat_dtype), backend.backward(pair, stats, grad, needs, spec, options, grad_dtype=held)


def _softmax_loss(weights: RowWeights, stats: Stats, lse: Tensor) -> tuple[Tensor, GradStats]:
    """The loss of some rows, float64, and the gradient of their statistics. ``lse`` is measured from 0."""
    assert stats.row_lse is not None
    assert stats.row_pos is not None
    assert stats.row_hits is not None
    counts, lse_grad = weights.each != 0, weights.each
    # A target that no column has leaves 0 hits, and 0 / 0 says so; a row that does not count is no error.
    hits = torch.where(counts, stats.row_hits, 1.0)
    loss = torch.where(counts, weights.each.double() * (stats.row_lse - stats.row_pos / hits), 0.0).sum()
    if weights.square is not None:
        squared = weights.square != 0
        loss = loss + torch.where(squared, weights.square.double() * lse.square(), 0.0).sum()
        lse_grad = lse_grad + torch.where(squared, 2.0 * weights.square * lse, 0.0).to(lse_grad.dtype)
    return loss, GradStats(row_lse=lse_grad, row_pos=-weights.each / hits)


class _Blocks:
    """The torch backend: scores of a block, its loss, G in place of the scores, two products."""

    def __init__(
        self, pair: Pair, weights: RowWeights, needs: Needs, spec: PairSpec, options: TileOptions, rows: int
    ) -> None:
        self.pair, self.weights, self.spec = pair, weights, spec
        self.tiles = Tiles(pair, spec, options)
        if not spec.softplus:
            self.tiles.rows, self.tiles.cols = rows, max(pair.b.shape[0], 1)
        # Divided by its size, so that G stays near 1 whatever the loss was multiplied by; restored at the end.
        self.size = incoming_size(GradStats(row_lse=weights.each, row_pos=weights.square)).to(pair.a.device)
        self.sums = _GradSums(self.tiles, needs, self.size, held_dtype(pair.a.dtype))
        self.loss = pair.a.new_zeros((), dtype=torch.float64)
        bounded = pair.a.device.type == "cpu" and not spec.softplus and score_bound(pair, spec) <= SAFE_SCORE
        self.shifted = not bounded
        self.hits = self.tiles.keys.hits()
        self.at_positive = torch.zeros_like(weights.each)

    def run(self) -> tuple[Tensor, Grads]:
        """All blocks."""
        for i, j in self.tiles:
            g_rc = self._sigmoid(i, j) if self.spec.softplus else self._softmax(i, j)
            self.sums.add(g_rc, i, j)
        return self.loss.to(self.pair.stat_dtype), self.sums.grads()

    def _softmax(self, i: slice, j: slice) -> Tensor:
        """The loss of the rows i is added, and their G returned."""
        pair, keys = self.pair, self.tiles.keys
        x_rc = self.tiles.scores(i, j)
        slope = self.tiles.softcap_slope(x_rc) if self.spec.softcap else None
        pos, _ = keys.positive_sums(x_rc, i, j, x_rc)
        top = x_rc.new_zeros((i.stop - i.start, 1))
        if self.shifted:
            top = x_rc.amax(1, keepdim=True)
            top = torch.where(top == -torch.inf, 0.0, top)
            x_rc.sub_(top)
        total = x_rc.exp_().sum(1).double()
        lse = total.log() + top.squeeze(1).double()
        start = 0.0 if pair.row_zero is None else pair.row_zero[i].double()
        stats = Stats(row_lse=lse - start, row_pos=pos, row_hits=self.hits[i])
        loss, grad = _softmax_loss(self.weights.rows(i), stats, lse)
        self.loss += loss
        assert grad.row_lse is not None
        assert grad.row_pos is not None
        factor = torch.where(total > 0, grad.row_lse / self.size / total, 0.0)
        x_rc.mul_(factor.to(x_rc.dtype)[:, None])
        self.at_positive[i] = (grad.row_pos / self.size).to(self.at_positive.dtype)
        keys.add_at_positives_(x_rc, self.at_positive, i, j, x_rc)
        return x_rc if slope is None else x_rc.mul_(slope)

    def _sigmoid(self, i: slice, j: slice) -> Tensor:
        """The same of one tile of a sigmoid loss."""
        keys, weight = self.tiles.keys, self.weights.each[i]
        x_rc = self.tiles.scores(i, j)
        keys.flip_positives_(x_rc, i, j)
        spare = self.tiles.spare(x_rc)
        self.loss += (weight * torch.logaddexp(x_rc, x_rc.new_zeros(()), out=spare).sum(1)).sum(dtype=torch.float64)
        g_rc = x_rc.sigmoid_()
        keys.flip_positives_(g_rc, i, j)
        return g_rc.mul_((weight / self.size).to(g_rc.dtype)[:, None])
