"""The filter of the torch backend: the same products over gathered rows and columns, on any device and in any type.

Axes: n rows of a, m rows of b, d features; r rows and c columns at hand, t the tiles of W columns among them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor

from tilewise.kernels import filter_plan as plans
from tilewise.kernels.filter_plan import (
    choose,
    columns_of_tiles,
    order_columns,
    places_of,
    row_steps,
    tile_count,
    tile_width,
)
from tilewise.kernels.precision import matmul_precision
from tilewise.kernels.spec import FilterPlan, Grads, GradStats, Needs, Pair, PairSpec, Stats, largest_gradient
from tilewise.kernels.torch_impl import two_pass
from tilewise.kernels.torch_impl.tile_softmax import SAFE_SCORE
from tilewise.kernels.torch_impl.tiles import score_bound
from tilewise.options import TileOptions

ROWS = 1024  # at a time
CHOOSE_ROWS = 128  # whose thresholds are found together
PROBED_NUMBERS = 2**21  # of the columns, whose scores with a sample are taken at once
WORTH_PROBING = 2**28  # multiply-adds of one product; below, asking a sample costs more than it saves


class TorchFilter:
    """Plain PyTorch."""

    def forward(self, pair: Pair, spec: PairSpec, options: TileOptions) -> tuple[Stats, FilterPlan]:
        """Statistics of all pairs, and which of them backward may drop."""
        with matmul_precision(options.precision), torch.no_grad():
            order, too_many = _order_and_sample(pair, spec, options)
            if too_many:
                return two_pass.forward(pair, spec, options), plans.keep_everything(pair, order)
            return _Forward(pair, spec, options, order).run()

    def forward_saving(self, pair: Pair, spec: PairSpec, options: TileOptions) -> tuple[Stats, FilterPlan, None]:
        """`forward`; nothing more is saved."""
        return *self.forward(pair, spec, options), None

    def backward(
        self,
        pair: Pair,
        stats: Stats,
        plan: FilterPlan,
        grad: GradStats,
        needs: Needs,
        spec: PairSpec,
        options: TileOptions,
        *,
        saved: object | None = None,
    ) -> Grads | None:
        """Gradients, tile by tile, of the rows that keep it."""
        if pair.a.is_cuda and torch.cuda.is_current_stream_capturing():
            return None
        if int(plan.keep_all):
            return None
        with matmul_precision(options.precision), torch.no_grad():
            return _Backward(pair, stats, plan, grad, needs, spec, options).run()


def _order_and_sample(pair: Pair, spec: PairSpec, options: TileOptions) -> tuple[Tensor, bool]:
    """The order of the columns, and whether a sample of the rows keeps so many pairs that computing all is faster.

    The mean row, by which the columns are ordered, is one of the sample: it has no say, but the columns are read once.
    Only the rows of a large call are asked, and only on a CPU.
    """
    n, m = pair.a.shape[0], pair.b.shape[0]
    rows = 0
    if pair.a.device.type == "cpu" and n * m * pair.a.shape[1] >= WORTH_PROBING:
        rows = plans.sample_size(
            n, m, 4 * pair.stat_dtype.itemsize, options
        )  # scores, in both orders, and what exp takes
    if rows == 0:
        return order_columns(pair), False
    assert pair.row_key is not None
    asked = plans.sample_of(n, rows)
    scores, sample = _Scores(pair, spec), pair.a[asked].clone()
    sample[0] = plans.mean_row(pair)
    sample_dr = scores.features(sample).T.contiguous()
    x_mr = sample_dr.new_empty((m, rows))
    for j in range(0, m, step := max(1, PROBED_NUMBERS // pair.b.shape[1])):
        torch.mm(scores.features(pair.b[j : j + step]), sample_dr, out=x_mr[j : j + step])
    order = plans.order_by(x_mr[:, 0], pair)
    width, tiles = tile_width(m), tile_count(m)
    x_mr = scores.finished(x_mr.index_select(0, order).mul_(pair.scale.to(x_mr.dtype)), order.long()[:, None])
    x_mr = torch.nn.functional.pad(x_mr, (0, 0, 0, tiles * width - m), value=-torch.inf)
    top = x_mr.amax(0)  # of a row in all tiles: what underflows has no say
    x_mr.sub_(torch.where(top == -torch.inf, 0.0, top)).exp_()
    part_tr = x_mr.view(tiles, width, rows).sum(1).log_()
    few = dataclasses.replace(pair, row_key=pair.row_key[asked])
    assert few.row_key is not None
    tolerance = options.filter_tolerance
    mass = choose(part_tr, part_tr.logsumexp(0), places_of(order, few), few.row_key >= 0, tolerance, width)[:, 1:]
    return order, bool(plans.too_many(mass < 0, mass.numel(), plans.PROBED_SHARE))


class _Scores:
    """Scores of gathered rows and columns."""

    def __init__(self, pair: Pair, spec: PairSpec) -> None:
        self.pair, self.spec = pair, spec
        half = pair.a.dtype in (torch.float16, torch.bfloat16)
        self.upcast = half and not pair.a.is_cuda
        self.compute_dtype = torch.float32 if half else pair.a.dtype

    def features(self, rows: Tensor) -> Tensor:
        """Rows or columns in the type in which they are multiplied."""
        return rows.to(self.compute_dtype) if self.upcast else rows

    def product(self, left: Tensor, right: Tensor) -> Tensor:
        """left @ right, accumulated and returned in `compute_dtype`."""
        left, right = self.features(left), self.features(right)
        if left.dtype == self.compute_dtype:
            return left @ right
        return torch.mm(left, right, out_dtype=self.compute_dtype)

    def tile(self, a_rd: Tensor, b_cd: Tensor, cols: Tensor) -> Tensor:
        """(r, c); ``cols`` are the indices of the columns."""
        scale = self.pair.scale.to(self.compute_dtype)
        if self.upcast or a_rd.dtype == self.compute_dtype:
            x_rc = self.product(self.features(a_rd) * scale, b_cd.T)  # fewer numbers to multiply than scores
        else:
            x_rc = self.product(a_rd, b_cd.T).mul_(scale)
        return self.finished(x_rc, cols)

    def finished(self, x_rc: Tensor, cols: Tensor) -> Tensor:
        """Scaled products moved by the bias and capped, in place; ``cols`` are the indices of the columns."""
        if self.pair.bias is not None:
            x_rc += self.pair.bias[cols].to(self.compute_dtype)
        if self.spec.softcap:
            x_rc.div_(self.spec.softcap).tanh_().mul_(self.spec.softcap)
        return x_rc


class _Forward:
    """One pass over the columns in their new order, for as many rows as their masses have room."""

    def __init__(self, pair: Pair, spec: PairSpec, options: TileOptions, order: Tensor) -> None:
        self.pair, self.spec, self.options = pair, spec, options
        self.n, self.m = pair.a.shape[0], pair.b.shape[0]
        self.width, self.tiles = tile_width(self.m), tile_count(self.m)
        self.scores = _Scores(pair, spec)
        self.order = order
        self.place = places_of(self.order, pair)
        self.count = columns_of_tiles(self.order, pair.bias)
        # Whether exp of a score needs no shift. Only a CPU is asked: elsewhere the answer would have to be waited for.
        self.bounded = pair.a.device.type == "cpu" and score_bound(pair, spec) <= SAFE_SCORE

    def run(self) -> tuple[Stats, FilterPlan]:
        """Everything."""
        pair = self.pair
        assert pair.row_key is not None
        mass = pair.a.new_empty((self.tiles, self.n))
        mean = pair.a.new_empty((self.tiles, pair.b.shape[1]))
        lse, pos = (torch.empty(self.n, dtype=torch.float64, device=pair.a.device) for _ in range(2))
        for start in range(0, self.n, step := row_steps(self.n, self.tiles, self.options)):
            i = slice(start, min(start + step, self.n))
            part_tr = self._rows(i, lse, pos, mean)
            for start_r in range(i.start, i.stop, CHOOSE_ROWS):
                r = slice(start_r, min(start_r + CHOOSE_ROWS, i.stop))
                mass[:, r] = choose(
                    part_tr[:, r.start - i.start : r.stop - i.start],
                    lse[r].to(part_tr.dtype),
                    self.place[r],
                    pair.row_key[r] >= 0,
                    self.options.filter_tolerance,
                    self.width,
                )
        hits = (self.place >= 0).to(pair.stat_dtype)
        stats = Stats(row_lse=lse, row_pos=pos.to(pair.stat_dtype), num_positives=hits)
        kept = (mass < 0).sum(1, dtype=torch.int32)
        keep_all = plans.too_many(kept, mass.numel())
        return stats, FilterPlan(order=self.order, mass=mass, mean=mean, kept=kept, keep_all=keep_all)

    def _rows(self, i: slice, lse: Tensor, pos: Tensor, mean: Tensor) -> Tensor:
        """The log-sum-exp of the rows in each tile, from their zeros; on the way, in all, and the positives' scores."""
        pair, stat = self.pair, self.pair.stat_dtype
        part_tr = torch.empty((self.tiles, i.stop - i.start), dtype=stat, device=pair.a.device)
        lse[i], pos[i] = -torch.inf, 0.0
        for t in self._chunks():
            cols = self.order[t.start * self.width : t.stop * self.width].long()
            b_cd = self.scores.features(pair.b.index_select(0, cols))
            mean[t] = self._means(b_cd, cols, t).to(mean.dtype)
            for start in range(i.start, i.stop, ROWS):
                r = slice(start, min(start + ROWS, i.stop))
                x_rc = self.scores.tile(pair.a[r], b_cd, cols)
                zero = lse.new_zeros(1) if pair.row_shift is None else pair.row_shift[r].double()
                place = (self.place[r] - t.start * self.width)[:, None]
                inside = (place >= 0) & (place < cols.shape[0])
                found = x_rc.gather(1, place.clamp(0, cols.shape[0] - 1)).double().squeeze(1) - zero
                pos[r] += torch.where(inside.squeeze(1), found, 0.0)
                top_rt, sum_rt = self._tile_sums(x_rc, t.stop - t.start)
                log_rt = sum_rt.double().log() + (top_rt.double() - zero[:, None])
                part_tr[t, r.start - i.start : r.stop - i.start] = log_rt.T.to(stat)
                lse[r] = torch.logaddexp(lse[r], log_rt.logsumexp(1))
        return part_tr

    def _chunks(self) -> Iterator[slice]:
        """Tiles at a time, such that their columns and scores take half the workspace."""
        item = torch.empty((), dtype=self.scores.compute_dtype).element_size()
        column = 2 * self.pair.b.shape[1] * item + 3 * min(ROWS, self.n) * item
        step = max(1, min(self.options.workspace_bytes // 2, 2**26) // (column * self.width))
        for start in range(0, self.tiles, step):
            yield slice(start, min(start + step, self.tiles))

    def _tile_sums(self, x_rc: Tensor, tiles: int) -> tuple[Tensor, Tensor]:
        """A shift for each row in each tile, such as its largest score, and the sum of exp(x - shift): (r, t)."""
        missing = tiles * self.width - x_rc.shape[1]
        if missing:
            x_rc = torch.nn.functional.pad(x_rc, (0, missing), value=-torch.inf)
        x_rtw = x_rc.view(x_rc.shape[0], tiles, self.width)
        if self.bounded:
            total_rt = x_rtw.exp_().sum(2)
            return torch.zeros_like(total_rt), total_rt
        top_rt = x_rtw.amax(2)
        shift = torch.where(top_rt == -torch.inf, 0.0, top_rt)
        return shift, x_rtw.sub_(shift[:, :, None]).exp_().sum(2)

    def _means(self, b_cd: Tensor, cols: Tensor, t: slice) -> Tensor:
        """The mean column of each tile, of those that any row can meet: (t, d)."""
        b_cd = b_cd.to(self.scores.compute_dtype)
        if self.pair.bias is not None:
            b_cd = torch.where((self.pair.bias[cols] > -torch.inf)[:, None], b_cd, 0.0)
        tile = torch.arange(b_cd.shape[0], device=b_cd.device) // self.width
        total = b_cd.new_zeros((t.stop - t.start, b_cd.shape[1]))
        whole = b_cd.shape[0] // self.width
        total[:whole] = b_cd[: whole * self.width].view(whole, self.width, b_cd.shape[1]).sum(1)
        if whole < total.shape[0]:
            total[whole] = b_cd[tile == whole].sum(0)
        return total / self.count[t, None].to(total.dtype)


class _Backward:
    """Tile by tile: the rows that keep it, and the mean for the others."""

    def __init__(
        self,
        pair: Pair,
        stats: Stats,
        plan: FilterPlan,
        grad: GradStats,
        needs: Needs,
        spec: PairSpec,
        options: TileOptions,
    ) -> None:
        self.pair, self.plan, self.needs, self.options, self.spec = pair, plan, needs, options, spec
        self.scores = _Scores(pair, spec)
        compute, n = self.scores.compute_dtype, pair.a.shape[0]
        # Divided by its size, so that G stays near 1 whatever the loss was multiplied by; restored at the end.
        self.size = largest_gradient(grad).to(pair.a.device)
        nothing = pair.a.new_zeros(n, dtype=pair.stat_dtype)
        self.grad_lse = ((nothing if grad.row_lse is None else grad.row_lse) / self.size).to(compute)
        self.grad_pos = ((nothing if grad.row_pos is None else grad.row_pos) / self.size).to(compute)
        assert stats.row_lse is not None
        lse = stats.row_lse.double() if pair.row_shift is None else stats.row_lse.double() + pair.row_shift.double()
        # A row in which nothing may meet has lse = -inf and no gradient: exp(x - inf) = 0 says so without NaN.
        self.lse = torch.where(lse == -torch.inf, torch.inf, lse)
        self.count = columns_of_tiles(plan.order, pair.bias).to(compute)
        need_a = needs.a or (needs.scale and not needs.b)
        self.a = pair.a.new_zeros(pair.a.shape, dtype=compute) if need_a else None
        self.b = pair.a.new_empty(pair.b.shape) if needs.b else None
        self.bias = pair.a.new_zeros(pair.b.shape[0], dtype=torch.float64) if needs.bias else None
        self.scale = torch.zeros((), dtype=torch.float64, device=pair.a.device)

    def run(self) -> Grads:
        """All of them."""
        pair, width, m = self.pair, tile_width(self.pair.b.shape[0]), self.pair.b.shape[0]
        factor = pair.scale * self.size
        counts = self.plan.kept.tolist()
        for t in self._chunks():
            dropped_tn = self._dropped(t)
            if self.a is not None:
                self._add_means(dropped_tn, t)
            shared_td = self._share(dropped_tn, t) if self.b is not None else None
            for tile in range(t.start, t.stop):
                cols = self.plan.order[tile * width : min((tile + 1) * width, m)].long()
                live = None if pair.bias is None else (pair.bias[cols] > -torch.inf)
                total_cd = None
                if shared_td is not None:
                    total_cd = shared_td[tile - t.start].expand(cols.shape[0], -1).clone()
                    if live is not None:
                        total_cd *= live[:, None]
                if self.bias is not None and live is not None:
                    self.bias[cols] += live * (dropped_tn[tile - t.start].double().sum() / self.count[tile])
                if counts[tile]:
                    self._tile(tile, cols, total_cd)
                if self.b is not None and total_cd is not None:
                    if self.needs.scale and self.a is None:
                        self.scale += (total_cd * self.scores.features(pair.b[cols]).to(total_cd.dtype)).sum()
                    self.b[cols] = total_cd.mul_(factor.to(total_cd.dtype)).to(self.b.dtype)
        return self._grads(factor)

    def _chunks(self) -> Iterator[slice]:
        """Tiles whose dropped masses are unpacked together."""
        tiles, n = self.plan.mass.shape
        step = max(1, min(self.options.workspace_bytes // 16, 2**24) // (4 * max(n, self.pair.a.shape[1])))
        for start in range(0, tiles, step):
            yield slice(start, min(start + step, tiles))

    def _dropped(self, t: slice) -> Tensor:
        """What is dropped, times the incoming gradient: (t, n)."""
        mass_tn = self.plan.mass[t].to(self.scores.compute_dtype).clamp(min=0.0) * self.options.filter_tolerance
        dropped = mass_tn * self.grad_lse
        if self.spec.softcap:
            # The derivative of the soft cap, taken where the score is that of the tile's mean exponential.
            x_tn = (mass_tn / self.count[t, None]).log() + self.lse.to(mass_tn.dtype)
            dropped *= (1.0 - (x_tn / self.spec.softcap).square()).clamp(min=0.0)
        # A row that drops nothing must not meet 0 * inf.
        return torch.where(mass_tn > 0, dropped, 0.0)

    def _rows(self, r: slice, dtype: torch.dtype) -> Tensor:
        """Rows of a, and zeros for those that do not count, whatever they hold: 0 times NaN would reach the columns."""
        assert self.pair.row_key is not None
        return torch.where(self.pair.row_key[r, None] >= 0, self.pair.a[r].to(dtype), 0.0)

    def _add_means(self, dropped_tn: Tensor, t: slice) -> None:
        """dA_i += the mass that row i drops in a tile times the tile's mean column."""
        assert self.a is not None
        mean_td = self.plan.mean[t].to(dropped_tn.dtype)
        for start in range(0, self.a.shape[0], 4 * ROWS):
            r = slice(start, start + 4 * ROWS)
            self.a[r].addmm_(dropped_tn[:, r].T, mean_td)

    def _share(self, dropped_tn: Tensor, t: slice) -> Tensor:
        """What each column of a tile gets from the rows that drop the tile: (t, d)."""
        total = dropped_tn.new_zeros((dropped_tn.shape[0], self.pair.a.shape[1]))
        for start in range(0, dropped_tn.shape[1], 4 * ROWS):
            r = slice(start, start + 4 * ROWS)
            total.addmm_(dropped_tn[:, r], self._rows(r, total.dtype))
        return total / self.count[t, None]

    def _tile(self, tile: int, cols: Tensor, total_cd: Tensor | None) -> None:
        """The rows that keep this tile."""
        pair = self.pair
        assert pair.row_key is not None
        b_cd = pair.b.index_select(0, cols)
        rows = (self.plan.mass[tile] < 0).nonzero().squeeze(1)
        for r in rows.split(4 * ROWS):
            a_rd = pair.a.index_select(0, r)
            x_rc = self.scores.tile(a_rd, b_cd, cols)
            slope = None
            if self.spec.softcap:
                slope = (x_rc / self.spec.softcap).square_().neg_().add_(1.0)
            g_rc = self._softmax(x_rc, r)
            hit = cols[None, :] == (pair.row_key[r] - pair.col_start)[:, None]
            g_rc += torch.where(hit, self.grad_pos[r, None], 0.0)
            if slope is not None:
                g_rc *= slope
            if self.bias is not None:
                self.bias[cols] += g_rc.double().sum(0)
            g_rc = self.scores.features(g_rc.to(pair.a.dtype)) if not self.scores.upcast else g_rc
            if self.a is not None:
                self.a.index_add_(0, r, self.scores.product(g_rc, b_cd))  # each row once: no order to depend on
            if total_cd is not None:
                total_cd += self.scores.product(g_rc.T, a_rd)

    def _softmax(self, x_rc: Tensor, r: Tensor) -> Tensor:
        """grad * exp(x - lse), in place; subtracted in two steps, what x's type can hold of lse and then the rest."""
        lse = self.lse[r, None]
        coarse = lse.to(x_rc.dtype)
        rest = torch.where(lse.isfinite(), lse - coarse, 0.0).to(x_rc.dtype)
        return x_rc.sub_(coarse).sub_(rest).exp_().mul_(self.grad_lse[r, None])

    def _grads(self, factor: Tensor) -> Grads:
        pair, stat = self.pair, self.pair.stat_dtype
        if self.needs.scale and self.a is not None:
            for start in range(0, self.a.shape[0], 4 * ROWS):
                r = slice(start, start + 4 * ROWS)
                self.scale += (self.a[r] * self._rows(r, self.a.dtype)).sum(dtype=torch.float64)
        return Grads(
            a=self.a.mul_(factor.to(self.a.dtype)).to(pair.a.dtype) if self.a is not None and self.needs.a else None,
            b=self.b,
            scale=(self.scale * self.size).to(stat) if self.needs.scale else None,
            bias=None if self.bias is None else (self.bias * self.size).to(stat),
        )
