"""The two-pass strategy of the torch backend: a loop of matrix products over tiles.

Axes: n rows of a, m rows of b, d features; r, c rows and columns of one tile; i, j their slices.

    forward     for each tile: compute the scores, update the statistics of its rows and columns
    backward    for each tile: compute the scores again, replace them by their gradient G, add G B and G' A
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise.kernels.precision import matmul_precision
from tilewise.kernels.spec import (
    Grads,
    GradStats,
    Needs,
    Pair,
    PairSpec,
    Stats,
    largest_gradient,
    merged_entropy,
    merged_top,
)
from tilewise.kernels.torch_impl.tile_softmax import (
    SAFE_SCORE,
    SideWeights,
    tile_entropies,
    tile_entropy_gradient_,
    tile_log_sums,
    tile_softmax_,
)
from tilewise.kernels.torch_impl.tiles import Tiles, score_bound
from tilewise.options import TileOptions


def forward(pair: Pair, spec: PairSpec, options: TileOptions) -> Stats:
    """The statistics of ``spec``, tile by tile."""
    with matmul_precision(options.precision), torch.no_grad():
        running = _RunningStats(pair, spec)
        tiles = Tiles(pair, spec, options)
        for i, j in tiles:
            running.add(tiles, i, j)
        return running.stats(tiles)


def backward(
    pair: Pair,
    stats: Stats,
    grad: GradStats,
    needs: Needs,
    spec: PairSpec,
    options: TileOptions,
    grad_dtype: torch.dtype,
) -> Grads:
    """Gradients, tile by tile. The scores are computed a second time."""
    with matmul_precision(options.precision), torch.no_grad():
        tiles = Tiles(pair, spec, options)
        # G is divided by the largest gradient of a statistic, so that it stays near 1. `GradSums` multiplies it back.
        size = largest_gradient(grad).to(pair.a.device)
        weights = _TileWeights(pair, stats, grad, size, spec)
        sums = GradSums(tiles, needs, size, grad_dtype)
        for i, j in tiles:
            sums.add(weights.gradient(tiles, i, j), i, j)
        return sums.grads()


def is_bounded(pair: Pair, spec: PairSpec) -> bool:
    """Whether exp of a score needs no shift. False on other devices than a CPU, where reading it would synchronize.

    A row with a single score is always shifted, so that its log-sum-exp is that score and its loss exactly 0.
    """
    if pair.a.device.type != "cpu" or pair.b.shape[0] <= 1 + spec.mask_self:
        return False
    return score_bound(pair, spec) <= SAFE_SCORE


class _RunningStats:
    """Statistics of the tiles added so far, float64."""

    def __init__(self, pair: Pair, spec: PairSpec) -> None:
        self.pair, self.spec = pair, spec
        n, m = pair.a.shape[0], pair.b.shape[0]

        def vector(wanted: bool, size: int, fill: float) -> Tensor | None:
            return pair.a.new_full((size,), fill, dtype=torch.float64) if wanted else None

        self.row_lse = vector(spec.row_lse, n, -torch.inf)
        self.col_lse = vector(spec.col_lse, m, -torch.inf)
        self.row_pos = vector(spec.has_positive_scores, n, 0.0)
        self.row_softplus = vector(spec.softplus, n, 0.0)
        self.row_sum = vector(spec.row_sum, n, 0.0)
        assert not spec.token_stats or (spec.row_lse and not spec.col_lse and not spec.symmetric and not spec.softplus)
        self.row_entropy = vector(spec.row_entropy, n, 0.0)
        self.row_top = vector(spec.row_top, n, -torch.inf)
        self.row_top_col = pair.a.new_full((n,), pair.col_start, dtype=torch.int64) if spec.row_top else None
        self.bounded = (spec.row_lse or spec.col_lse) and not spec.row_entropy and is_bounded(pair, spec)

    def add(self, tiles: Tiles, i: slice, j: slice) -> None:
        """Add the tile of the rows i and the columns j."""
        x_rc = tiles.scores(i, j)
        scratch = tiles.scratch(x_rc)
        if self.row_pos is not None:
            row, mirror = tiles.keys.positive_sums(x_rc, i, j, scratch)
            self.row_pos[i] += row
            if mirror is not None:
                self.row_pos[j] += mirror
        if self.row_sum is not None:
            assert self.pair.col_weight is not None
            self.row_sum[i] += x_rc @ self.pair.col_weight[j].to(x_rc.dtype)
        if self.row_softplus is not None:
            tiles.keys.flip_positives_(x_rc, i, j)
            self.row_softplus[i] += torch.logaddexp(x_rc, x_rc.new_zeros(()), out=scratch).sum(1)
        if self.row_top is not None and self.row_top_col is not None and x_rc.shape[1]:
            top = x_rc.max(1)  # the first of equal scores
            tile = top.values.double(), top.indices + (self.pair.col_start + j.start)
            self.row_top[i], self.row_top_col[i] = merged_top((self.row_top[i], self.row_top_col[i]), tile)
        if self.row_entropy is not None and self.row_lse is not None:
            running, tile = (self.row_lse[i], self.row_entropy[i]), tile_entropies(x_rc, scratch)
            lse = torch.logaddexp(running[0], tile[0])
            self.row_entropy[i] = merged_entropy(running, tile, lse)
            self.row_lse[i] = lse
        elif self.row_lse is not None or self.col_lse is not None:
            self._add_exponentials(x_rc, scratch, i, j)

    def _add_exponentials(self, x_rc: Tensor, scratch: Tensor, i: slice, j: slice) -> None:
        mirrored = self.spec.symmetric and i != j
        row, col = tile_log_sums(
            x_rc, scratch, rows=self.spec.row_lse, cols=self.spec.col_lse or mirrored, bounded=self.bounded
        )
        if self.row_lse is not None:
            self.row_lse[i] = torch.logaddexp(self.row_lse[i], row)
            if mirrored:
                self.row_lse[j] = torch.logaddexp(self.row_lse[j], col)
        if self.col_lse is not None:
            self.col_lse[j] = torch.logaddexp(self.col_lse[j], col)

    def stats(self, tiles: Tiles) -> Stats:
        """The wanted statistics, relative to the shifts, in `stat_dtype`; log-sum-exps in float64."""

        def wide(vector: Tensor | None, shift: Tensor | None) -> Tensor | None:
            return vector if vector is None or shift is None else vector - shift

        def out(vector: Tensor | None, shift: Tensor | None = None) -> Tensor | None:
            vector = wide(vector, shift)
            return None if vector is None else vector.to(self.pair.stat_dtype)

        return Stats(
            row_lse=wide(self.row_lse, self.pair.row_shift),
            row_pos=out(self.row_pos),
            num_positives=None if self.row_pos is None else tiles.keys.num_positives(),
            row_softplus=out(self.row_softplus),
            row_sum=out(self.row_sum),
            row_entropy=out(self.row_entropy),
            row_top=out(self.row_top, self.pair.row_shift),
            row_top_col=self.row_top_col,
            col_lse=wide(self.col_lse, self.pair.col_shift),
        )


class _TileWeights:
    """Gradients of the statistics divided by ``size``, and the tiles of G computed from them."""

    def __init__(self, pair: Pair, stats: Stats, grad: GradStats, size: Tensor, spec: PairSpec) -> None:
        self.pair, self.spec = pair, spec
        self.rows = self.cols = self.entropy = self.grad_entropy = None
        grad_lse = grad.row_lse
        if grad.row_entropy is not None:
            assert stats.row_entropy is not None
            self.entropy, self.grad_entropy = stats.row_entropy.double(), (grad.row_entropy / size).double()
            grad_lse = torch.zeros_like(grad.row_entropy) if grad_lse is None else grad_lse
        if grad_lse is not None:
            assert stats.row_lse is not None
            self.rows = SideWeights(stats.row_lse, pair.row_shift, grad_lse / size)
            if spec.symmetric:  # x_ij is also x_ji
                self.cols = self.rows
        if grad.col_lse is not None:
            assert stats.col_lse is not None
            self.cols = SideWeights(stats.col_lse, pair.col_shift, grad.col_lse / size)
        self.pos = None if grad.row_pos is None else grad.row_pos / size
        self.sum = None if grad.row_sum is None else grad.row_sum / size
        self.softplus = None if grad.row_softplus is None else grad.row_softplus / size
        exponentials = self.entropy is None and (self.rows is not None or self.cols is not None)
        self.bounded = exponentials and is_bounded(pair, spec)

    def gradient(self, tiles: Tiles, i: slice, j: slice) -> Tensor:
        """The tile of G, the gradient of the scores before the soft cap, divided by ``size``: (r, c)."""
        x_rc = tiles.scores(i, j)
        scratch = tiles.scratch(x_rc)
        slope = tiles.softcap_slope(x_rc) if self.spec.softcap else None
        if self.softplus is not None:
            tiles.keys.flip_positives_(x_rc, i, j)
            g_rc = x_rc.sigmoid_()
            tiles.keys.flip_positives_(g_rc, i, j)
            g_rc.mul_(self.softplus[i, None].to(g_rc.dtype))
        elif self.entropy is not None and self.grad_entropy is not None and self.rows is not None:
            g_rc = tile_entropy_gradient_(x_rc, scratch, i, self.rows, self.entropy, self.grad_entropy)
        else:
            g_rc = tile_softmax_(x_rc, scratch, i, j, self.rows, self.cols, bounded=self.bounded)
        if self.pos is not None:
            tiles.keys.add_at_positives_(g_rc, self.pos, i, j, scratch)
        if self.sum is not None:
            assert self.pair.col_weight is not None
            g_rc.addr_(self.sum[i].to(g_rc.dtype), self.pair.col_weight[j].to(g_rc.dtype))
        return g_rc if slope is None else g_rc.mul_(slope)


class GradSums:
    """Gradients of the tiles added so far. Those of rows are finished block by block, those of columns at the end.

    With symmetric scores row and column of a pair are both rows of ``a``, so everything is finished at the end.
    """

    def __init__(self, tiles: Tiles, needs: Needs, size: Tensor, grad_dtype: torch.dtype) -> None:
        self.tiles, self.needs, self.size, self.grad_dtype = tiles, needs, size, grad_dtype
        pair, compute = tiles.pair, tiles.compute_dtype
        self.symmetric = tiles.spec.symmetric
        need_b = needs.b and not self.symmetric
        # The gradient of the scale is <A, dA> / scale or <B, dB> / scale, so it needs one of the two products.
        need_a = needs.a or (needs.scale and not need_b)
        self.a = pair.a.new_zeros(pair.a.shape, dtype=compute if self.symmetric else grad_dtype) if need_a else None
        self.b = pair.a.new_zeros(pair.b.shape, dtype=compute) if need_b else None
        self.bias = pair.a.new_zeros(pair.b.shape[0], dtype=torch.float64) if needs.bias else None
        self.scale = pair.a.new_zeros((), dtype=torch.float64) if needs.scale else None
        self._block: Tensor | None = None  # gradient of the current rows, before scale and size

    def add(self, g_rc: Tensor, i: slice, j: slice) -> None:
        """Add the tile of G of the rows i and the columns j."""
        tiles = self.tiles
        if self.bias is not None:
            self.bias[j] += g_rc.sum(0)
        g_rc = tiles.operand(g_rc)
        if self.a is not None and self.symmetric:
            tiles.add_product(self.a[i], g_rc, tiles.b_block(j))
            if i != j:
                tiles.add_product(self.a[j], g_rc.T, tiles.a_block(i))
        elif self.a is not None:
            self._add_to_rows(self.a, g_rc, i, j)
        if self.b is not None:
            tiles.add_product(self.b[j], g_rc.T, tiles.a_block(i))

    def _add_to_rows(self, grad_a: Tensor, g_rc: Tensor, i: slice, j: slice) -> None:
        tiles = self.tiles
        if self._block is None:
            self._block = grad_a.new_zeros((i.stop - i.start, grad_a.shape[1]), dtype=tiles.compute_dtype)
        tiles.add_product(self._block, g_rc, tiles.b_block(j))
        if j.stop == tiles.pair.b.shape[0]:
            if self.scale is not None:
                self.scale += _dot(self._block, tiles.a_block(i))
            grad_a[i] = self._block.mul_(tiles.pair.scale * self.size)
            self._block = None

    def grads(self) -> Grads:
        """The finished gradients."""
        pair, stat = self.tiles.pair, self.tiles.pair.stat_dtype
        if self.scale is not None and self.symmetric and self.a is not None:
            self.scale += _dot(self.a, pair.a) / 2  # each pair was counted twice
        elif self.scale is not None and self.a is None and self.b is not None:
            self.scale += _dot(self.b, pair.b)
        factor = pair.scale * self.size
        if self.symmetric and self.a is not None:
            self.a = self.a.mul_(factor).to(self.grad_dtype)
        return Grads(
            a=self.a if self.needs.a else None,
            b=None if self.b is None else self.b.mul_(factor).to(self.grad_dtype),
            scale=None if self.scale is None else (self.scale * self.size).to(stat),
            bias=None if self.bias is None else (self.bias * self.size).to(stat),
        )


def _dot(total: Tensor, features: Tensor) -> Tensor:
    """Sum of products of two (n, d) tensors, float64, a block of rows at a time."""
    out = total.new_zeros((), dtype=torch.float64)
    for start in range(0, total.shape[0], 4096):
        rows = slice(start, start + 4096)
        out += (total[rows] * features[rows].to(total.dtype)).sum(dtype=torch.float64)
    return out
