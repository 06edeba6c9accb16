"""The two-pass strategy of the torch backend: a loop of matrix products over tiles.

Axes: n rows of a, m rows of b, d features; r, c rows and columns of one tile; i, j their slices.

    forward     for each tile: compute the scores, update the statistics of its rows and columns
    backward    for each tile: compute the scores again, replace them by their gradient G, add G B and G' A
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from tilewise.kernels.keys import combined_picks
from tilewise.kernels.merging import merged_entropy, merged_sum_sq, merged_top
from tilewise.kernels.precision import matmul_precision
from tilewise.kernels.slices import slices
from tilewise.kernels.spec import (
    Backward,
    Grads,
    Needs,
    Pair,
    PairSpec,
    Statistic,
    Stats,
    largest_gradient,
    wanted_stats,
)
from tilewise.kernels.torch_impl.guide import GuideTiles, GuideWeights
from tilewise.kernels.torch_impl.tile_softmax import (
    SAFE_SCORE,
    SideWeights,
    TokenWeights,
    tile_log_sums,
    tile_moments,
    tile_softmax_,
)
from tilewise.kernels.torch_impl.tiles import Tiles, score_bound
from tilewise.options import DEFAULT_OPTIONS, TileOptions


def forward(pair: Pair, spec: PairSpec, options: TileOptions) -> Stats:
    """The statistics of ``spec``, tile by tile."""
    with matmul_precision(options.precision), torch.no_grad():
        tiles = Tiles(_with_norms(pair, spec, options), spec, options)
        running = _RunningStats(tiles, options)
        for i, j in tiles:
            running.add(i, j)
        return running.stats()


def _with_norms(pair: Pair, spec: PairSpec, options: TileOptions) -> Pair:
    """For "jsd", the pair with the log-sum-exps of both scores. If they are not given, another pass computes them."""
    if spec.guide != "jsd" or pair.row_norm is not None:
        return pair
    first = forward(pair, dataclasses.replace(spec, guide="kl", hot=0.0, row_entropy=False, positive="none"), options)
    return dataclasses.replace(pair, row_norm=first.row_lse, guide_norm=first.guide_lse)


def backward(job: Backward, grad_dtype: torch.dtype | None = None) -> Grads:
    """Gradients, tile by tile. The scores are computed a second time."""
    pair, _, grad, needs, spec, options = job
    with matmul_precision(options.precision), torch.no_grad():
        tiles = Tiles(pair, spec, options)
        # G is divided by the largest gradient of a statistic, so that it stays near 1. `GradSums` multiplies it back.
        size = largest_gradient(grad, options).to(pair.a.device)
        weights = TileWeights(job, size)
        sums = GradSums(tiles, needs, size, grad_dtype or pair.a.dtype)
        for i, j in tiles:
            sums.add(weights.gradient(tiles, i, j), i, j)
        return sums.grads()


def is_bounded(pair: Pair, spec: PairSpec, options: TileOptions = DEFAULT_OPTIONS) -> bool:
    """Whether exp of a score needs no shift. False on other devices than a CPU, where reading it would synchronize.

    A row with a single score is always shifted, so that its log-sum-exp is that score and its loss exactly 0. With
    ``batch_invariant`` every row is shifted, because the bound depends on all rows.
    """
    if options.batch_invariant or pair.a.device.type != "cpu" or pair.b.shape[0] <= 1 + spec.mask_self:
        return False
    return score_bound(pair, spec) <= SAFE_SCORE


class _RunningStats:
    """Statistics of the tiles added so far, without the shifts, float64."""

    def __init__(self, tiles: Tiles, options: TileOptions) -> None:
        self.tiles, self.pair, self.spec = tiles, tiles.pair, tiles.spec
        pair, spec, low = self.pair, self.spec, -torch.inf
        assert not spec.token_stats or (spec.row_lse and not spec.col_lse and not spec.symmetric and not spec.softplus)
        assert spec.guide == "none" or (spec.row_lse and not spec.col_lse and not spec.symmetric and not spec.softplus)
        assert not spec.row_picked or not (spec.col_lse or spec.symmetric or spec.softplus or spec.mask_self)
        assert pair.row_scale is None or not (spec.symmetric or spec.guide != "none")
        first = {"row_lse": low, "col_lse": low, "row_top": low, "row_top_col": pair.col_start}  # 0 for the others
        first |= {"row_hot_lse": low, "guide_lse": low}
        self.guide = GuideTiles(pair, spec) if spec.divergence else None

        def vector(stat: Statistic) -> Tensor:
            dtype = torch.int64 if stat.integer else torch.float64
            return pair.a.new_full(stat.size(pair.shape), first.get(stat.name, 0.0), dtype=dtype)

        counted = "num_positives"  # from the keys, at the end
        self.now = Stats(**{stat.name: vector(stat) for stat in wanted_stats(spec) if stat.name != counted})
        self.bounded = (spec.row_lse or spec.col_lse) and not spec.row_moments and is_bounded(pair, spec, options)

    def add(self, i: slice, j: slice) -> None:
        """Add the tile of the rows i and the columns j."""
        tiles, now = self.tiles, self.now
        x_rc = tiles.scores(i, j)
        scratch = tiles.scratch(x_rc)
        if now.row_pos is not None:
            row, mirror = tiles.keys.positive_sums(x_rc, i, j, scratch)
            now.row_pos[i] += row
            if mirror is not None:
                now.row_pos[j] += mirror
        if now.row_picked is not None:
            now.row_picked[i] += tiles.keys.picked_scores(x_rc, i, j)
            if self.spec.skip_picked:
                tiles.keys.exclude_picks_(x_rc, i, j)
        if now.row_sum is not None:
            # Not x @ weight: the order of its sums may depend on the row's place.
            now.row_sum[i] += torch.mul(x_rc, self.pair.col_weight[j].to(x_rc.dtype), out=scratch).sum(1)
        if now.row_softplus is not None:
            tiles.keys.flip_positives_(x_rc, i, j)
            now.row_softplus[i] += torch.logaddexp(x_rc, x_rc.new_zeros(()), out=scratch).sum(1)
        if now.row_top is not None and x_rc.shape[1]:
            top = x_rc.max(1)  # the first of equal scores
            tile = top.values.double(), top.indices + (self.pair.col_start + j.start)
            now.row_top[i], now.row_top_col[i] = merged_top((now.row_top[i], now.row_top_col[i]), tile)
        if self.guide is not None:
            added = self.guide.stats(x_rc, i, j)
            held = Stats(**{name: getattr(now, name)[i] for name, value in vars(added).items() if value is not None})
            for name, value in vars(held.merge(added)).items():
                if value is not None:
                    getattr(now, name)[i] = value
        elif now.row_lse is not None and self.spec.row_moments:
            wanted = {"entropies": self.spec.row_entropy, "squares": self.spec.row_sum_sq}
            running, (here, entropy, square) = now.row_lse[i], tile_moments(x_rc, scratch, **wanted)
            if now.row_entropy is not None:
                lse, now.row_entropy[i] = merged_entropy((running, now.row_entropy[i]), (here, entropy))
            if now.row_sum_sq is not None:
                lse, now.row_sum_sq[i] = merged_sum_sq((running, now.row_sum_sq[i]), (here, square))
            now.row_lse[i] = lse
        elif now.row_lse is not None or now.col_lse is not None:
            self._add_exponentials(x_rc, scratch, i, j)

    def _add_exponentials(self, x_rc: Tensor, scratch: Tensor, i: slice, j: slice) -> None:
        spec, row_lse, col_lse = self.spec, self.now.row_lse, self.now.col_lse
        mirrored = spec.symmetric and i != j
        row, col = tile_log_sums(x_rc, scratch, rows=spec.row_lse, cols=spec.col_lse or mirrored, bounded=self.bounded)
        if row_lse is not None:
            row_lse[i] = torch.logaddexp(row_lse[i], row)
            if mirrored:
                row_lse[j] = torch.logaddexp(row_lse[j], col)
        if col_lse is not None:
            col_lse[j] = torch.logaddexp(col_lse[j], col)

    def stats(self) -> Stats:
        """The requested statistics, relative to the shifts, in `stat_dtype`; log-sum-exps in float64."""
        pair, found = self.pair, {name: value for name, value in vars(self.now).items() if value is not None}
        for name, shift in (("row_lse", pair.row_shift), ("row_top", pair.row_shift), ("col_lse", pair.col_shift)):
            if name in found and shift is not None:
                found[name] = found[name] - shift
        if "row_hot_lse" in found and pair.row_shift is not None:
            found["row_hot_lse"] = found["row_hot_lse"] - self.spec.hot * pair.row_shift.double()
        if self.spec.has_positive_scores:
            found["num_positives"] = self.tiles.keys.num_positives()
        exact = ("row_lse", "row_hot_lse", "guide_lse", "col_lse", "row_top_col")
        return Stats(**{name: v if name in exact else v.to(pair.stat_dtype) for name, v in found.items()})


class TileWeights:
    """Gradients of the statistics divided by ``size``, and the tiles of G computed from them."""

    def __init__(self, job: Backward, size: Tensor) -> None:
        pair, stats, grad, _, spec, options = job
        self.pair, self.spec, self.one_shift = pair, spec, not options.batch_invariant
        self.rows = self.cols = self.tokens = h = c = None
        self.guide: GuideWeights | None = None
        grad_lse = grad.row_lse
        if spec.divergence:
            self.guide = GuideWeights(pair, stats, grad, size, spec)
        elif grad.row_entropy is not None or grad.row_sum_sq is not None:
            value = torch.zeros_like(stats.row_lse, dtype=torch.float64) if grad_lse is None else grad_lse.double()
            if grad.row_entropy is not None:
                value, h = value - grad.row_entropy * stats.row_entropy.double(), (grad.row_entropy / size).double()
            if grad.row_sum_sq is not None:
                twice = 2.0 * grad.row_sum_sq.double()
                value, c = value - twice, twice / size * torch.exp(-stats.row_sum_sq.double())
            self.tokens = TokenWeights(SideWeights(stats.row_lse, pair.row_shift, value / size), h, c)
        elif grad_lse is not None:
            self.rows = SideWeights(stats.row_lse, pair.row_shift, grad_lse / size)
            if spec.symmetric:  # x_ij is also x_ji
                self.cols = self.rows
        if grad.col_lse is not None:
            self.cols = SideWeights(stats.col_lse, pair.col_shift, grad.col_lse / size)
        self.pos = None if grad.row_pos is None else grad.row_pos / size
        self.picked: tuple[Tensor, Tensor] | None = None
        if grad.row_picked is not None:
            pick, _, total = combined_picks(pair.pick, grad.row_picked / size)
            self.picked = pick - pair.col_start, total
        self.sum = None if grad.row_sum is None else grad.row_sum / size
        self.softplus = None if grad.row_softplus is None else grad.row_softplus / size
        exponentials = self.rows is not None or self.cols is not None
        self.bounded = exponentials and is_bounded(pair, spec, options)

    def gradient(self, tiles: Tiles, i: slice, j: slice) -> Tensor:
        """The tile of G, the gradient of the scores before soft cap and row scale, divided by ``size``: (r, c)."""
        x_rc = tiles.scores(i, j)
        scratch = tiles.scratch(x_rc)
        slope = tiles.score_slope(x_rc, i)
        if self.spec.skip_picked:
            tiles.keys.exclude_picks_(x_rc, i, j)
        if self.softplus is not None:
            tiles.keys.flip_positives_(x_rc, i, j)
            g_rc = x_rc.sigmoid_()
            tiles.keys.flip_positives_(g_rc, i, j)
            g_rc.mul_(self.softplus[i, None].to(g_rc.dtype))
        elif self.guide is not None:
            g_rc = self.guide.gradient_(x_rc, i, j)
        elif self.tokens is not None:
            g_rc = self.tokens.gradient_(x_rc, scratch, i)
        else:
            how = {"bounded": self.bounded, "one_shift": self.one_shift}
            g_rc = tile_softmax_(x_rc, scratch, i, j, self.rows, self.cols, **how)
        if self.pos is not None:
            tiles.keys.add_at_positives_(g_rc, self.pos, i, j, scratch)
        if self.picked is not None:
            tiles.keys.add_at_picks_(g_rc, *self.picked, i, j)
        if self.sum is not None:
            # Not `addr_`: on a CPU it rounds an entry twice or once, depending on where the shares of its threads end.
            row, col = self.sum[i, None].to(g_rc.dtype), self.pair.col_weight[None, j].to(g_rc.dtype)
            g_rc.add_(torch.mul(row, col, out=scratch))
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
    for rows in slices(total.shape[0], 4096):
        out += (total[rows] * features[rows].to(total.dtype)).sum(dtype=torch.float64)
    return out
