"""The filter of the torch backend: products of gathered rows and columns. See `filter_plan` for the method.

Axes: n rows of a, m rows of b, d features; r, c the current rows and columns, t the tiles among them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from tilewise.kernels import filter_plan as plans
from tilewise.kernels.keys import combined_picks
from tilewise.kernels.precision import matmul_precision
from tilewise.kernels.slices import slices
from tilewise.kernels.spec import (
    Backward,
    FilterPlan,
    Grads,
    Pair,
    PairSpec,
    Stats,
    largest_gradient,
    merged_entropy,
    merged_top,
)
from tilewise.kernels.torch_impl import two_pass
from tilewise.kernels.torch_impl.tile_scores import TileScores
from tilewise.kernels.torch_impl.tile_softmax import NO_SHARE, SideWeights, TokenWeights, tile_moments
from tilewise.options import TileOptions

ROWS = 1024  # rows of one product
CHOOSE_ROWS = 128  # rows whose thresholds are searched together
PROBED_NUMBERS = 2**21  # elements of the columns that are multiplied with the sample at a time
WORTH_PROBING = 2**28  # multiply-adds of one product; for fewer, a sample costs more than it saves


class TorchFilter:
    """The capability `filtered` of the torch backend."""

    def forward(self, pair: Pair, spec: PairSpec, options: TileOptions) -> tuple[Stats, FilterPlan]:
        """The statistics of all pairs, and the plan of what backward drops."""
        with matmul_precision(options.precision), torch.no_grad():
            if plans.rounding_exceeds(pair, plans.tolerance_of(options, pair.a.dtype)):
                return two_pass.forward(pair, spec, options), plans.keep_everything(pair, spec)
            order, too_many = _order_and_sample(pair, spec, options)
            if too_many:
                return two_pass.forward(pair, spec, options), plans.keep_everything(pair, spec, order)
            return _Forward(pair, spec, options, order).run()

    def forward_saving(self, pair: Pair, spec: PairSpec, options: TileOptions) -> tuple[Stats, FilterPlan, None]:
        """`forward`. The third result is always None."""
        return *self.forward(pair, spec, options), None

    def backward(self, pair: Pair, stats: Stats, plan: FilterPlan, *args: Any, **more: Any) -> Grads | None:
        """The gradients, or None if the caller must compute the exact ones."""
        job = Backward(pair, stats, *args)
        if pair.a.is_cuda and torch.cuda.is_current_stream_capturing():
            return None
        if int(plan.keep_all):
            return None
        with matmul_precision(job.options.precision), torch.no_grad():
            return _Backward(job, plan).run()


def _order_and_sample(pair: Pair, spec: PairSpec, options: TileOptions) -> tuple[Tensor, bool]:
    """The order of the columns, and whether a sample of the rows keeps so many entries that computing all is faster.

    The scores of the mean row determine the order. It replaces row 0 of the sample, so that one product over the
    columns serves both; its entries are not counted. Only large calls on a CPU take a sample.
    """
    n, m = pair.a.shape[0], pair.b.shape[0]
    rows = 0
    if pair.a.device.type == "cpu" and n * m * pair.a.shape[1] >= WORTH_PROBING:
        # Scores in both orders, their exponentials, and for the entropy products with them.
        column_bytes = (6 if spec.row_entropy else 4) * pair.stat_dtype.itemsize
        rows = plans.sample_size(n, m, column_bytes, options)
    if rows == 0:
        return plans.order_columns(pair), False
    chosen = plans.sample_of(n, rows)
    scores, sample = TileScores(pair, spec), pair.a[chosen].clone()
    sample[0] = plans.mean_row(pair)
    sample_dr = scores.operand(sample).T.contiguous()
    x_mr = sample_dr.new_empty((m, rows))
    for j in range(0, m, step := max(1, PROBED_NUMBERS // pair.b.shape[1])):
        torch.mm(scores.operand(pair.b[j : j + step]), sample_dr, out=x_mr[j : j + step])
    order = plans.order_by(x_mr[:, 0], pair)
    width, tiles = plans.tile_width(m), plans.tile_count(m)
    bias = None if pair.bias is None else pair.bias[order.long(), None]
    x_mr = scores.finish_(x_mr.index_select(0, order).mul_(scores.scale), bias)
    x_mr = torch.nn.functional.pad(x_mr, (0, 0, 0, tiles * width - m), value=-torch.inf)
    top = x_mr.amax(0)  # over all tiles; a tile whose terms underflow has no mass
    x_mr.sub_(torch.where(top == -torch.inf, 0.0, top))
    few = dataclasses.replace(pair, row_key=pair.row_key[chosen], pick=None if pair.pick is None else pair.pick[chosen])
    place, valid = plans.places_of(order, few), few.row_key >= 0
    own = x_mr.gather(0, place.clamp(min=0)[None]).squeeze(0)
    entropy_tr = entropy = None
    if spec.row_entropy:
        below_mr = x_mr.clamp(min=NO_SHARE).mul_(x_mr.exp_())
        total_tr = x_mr.view(tiles, width, rows).sum(1)
        # log S - sum e (x - top) / S, see `tile_moments`
        entropy_tr = total_tr.log() - below_mr.view(tiles, width, rows).sum(1) / total_tr
        entropy_tr = torch.where(total_tr > 0.0, entropy_tr, 0.0)
        part_tr = total_tr.log()
    else:
        part_tr = x_mr.exp_().view(tiles, width, rows).sum(1).log_()
    lse = part_tr.logsumexp(0)
    if entropy_tr is not None:
        entropy = plans.dropped_entropy(part_tr - lse, entropy_tr).sum(0)
    log_prob = _log_prob(own, lse, place) if spec.positive == "one" else None
    most = plans.limits(options, m, log_prob, entropy)
    tolerance = plans.tolerance_of(options, pair.a.dtype)
    kept = plans.always_kept(order, few)
    mass = plans.choose(part_tr, lse, kept, valid, tolerance, width, most, entropy_tr)[:, 1:]
    return order, bool(plans.too_many(mass < 0, mass.numel(), plans.PROBED_SHARE))


def _log_prob(pos: Tensor, lse: Tensor, place: Tensor) -> Tensor:
    """The log-probability of the positives; -inf for a row without one."""
    return torch.where(place >= 0, pos - lse, -torch.inf)


class _Forward:
    """One pass over the ordered columns for each block of rows whose masses fit the workspace."""

    def __init__(self, pair: Pair, spec: PairSpec, options: TileOptions, order: Tensor) -> None:
        self.pair, self.spec, self.options = pair, spec, options
        self.n, self.m = pair.a.shape[0], pair.b.shape[0]
        self.width, self.tiles = plans.tile_width(self.m), plans.tile_count(self.m)
        self.scores = TileScores(pair, spec)
        self.order = order
        self.places = plans.always_kept(self.order, pair)  # of the positive, then of the picked columns
        self.place = self.places[:, 0]
        self.count = plans.columns_of_tiles(self.order, pair.bias)
        self.bounded = two_pass.is_bounded(pair, spec)
        # The statistics of the tiles so far. Except for the largest score, they are relative to the shifts.
        self.lse = torch.full((self.n,), -torch.inf, dtype=torch.float64, device=pair.a.device)
        self.entropy = torch.zeros_like(self.lse)
        self.own = self.lse.new_zeros(self.places.shape)  # the scores at `places`, relative to the shifts
        self.top, self.top_col = self.lse.clone(), torch.full_like(self.place, pair.col_start)

    def run(self) -> tuple[Stats, FilterPlan]:
        """The statistics and the plan."""
        pair, spec = self.pair, self.spec
        mass = pair.a.new_empty((self.tiles, self.n))
        mean = pair.a.new_empty((self.tiles, pair.b.shape[1]))
        surprise = pair.scale.new_zeros(self.n if spec.row_entropy else 0)
        for i in slices(self.n, plans.rows_per_step(self.n, self.tiles, self.options, 1 + spec.row_entropy)):
            part_tr, entropy_tr = self._rows(i, mean)
            for r in slices(i.stop, CHOOSE_ROWS, i.start):
                here = slice(r.start - i.start, r.stop - i.start)
                self._choose(r, part_tr[:, here], None if entropy_tr is None else entropy_tr[:, here], mass, surprise)
        kept = (mass < 0).sum(1, dtype=torch.int32)
        keep_all = plans.too_many(kept, mass.numel())
        plan = FilterPlan(order=self.order, mass=mass, mean=mean, surprise=surprise, kept=kept, keep_all=keep_all)
        return self._stats(), plan

    def _stats(self) -> Stats:
        spec, stat, found = self.spec, self.pair.stat_dtype, {"row_lse": self.lse}
        if spec.has_positive_scores:
            found |= {"row_pos": self.own[:, 0].to(stat), "num_positives": (self.place >= 0).to(stat)}
        if spec.row_picked:
            found["row_picked"] = self.own[:, 1:].to(stat)
        if spec.row_entropy:
            found["row_entropy"] = self.entropy.to(stat)
        if spec.row_top:
            top = self.top if self.pair.row_shift is None else self.top - self.pair.row_shift
            found |= {"row_top": top.to(stat), "row_top_col": self.top_col}
        return Stats(**found)

    def _choose(self, r: slice, part_tr: Tensor, entropy_tr: Tensor | None, mass: Tensor, surprise: Tensor) -> None:
        """Fill the columns r of the plan."""
        lse, place, valid = self.lse[r].to(part_tr.dtype), self.place[r], self.pair.row_key[r] >= 0
        log_prob = _log_prob(self.own[r, 0], self.lse[r], place).to(lse.dtype) if self.spec.positive == "one" else None
        entropy = self.entropy[r].to(lse.dtype) if self.spec.row_entropy else None
        most = plans.limits(self.options, self.m, log_prob, entropy)
        tolerance = plans.tolerance_of(self.options, self.pair.a.dtype)
        found = plans.choose(part_tr, lse, self.places[r], valid, tolerance, self.width, most, entropy_tr)
        mass[:, r] = found
        if entropy_tr is not None:
            surprise[r] = plans.mean_surprise(found, part_tr - lse, entropy_tr)

    def _rows(self, i: slice, mean: Tensor) -> tuple[Tensor, Tensor | None]:
        """Log-sum-exp of each row in each tile, relative to its shift, and its entropy: (T, r). Fills ``mean``."""
        pair, stat = self.pair, self.pair.stat_dtype
        part_tr = torch.empty((self.tiles, i.stop - i.start), dtype=stat, device=pair.a.device)
        entropy_tr = torch.empty_like(part_tr) if self.spec.row_entropy else None
        for t in self._chunks():
            cols = self.order[t.start * self.width : t.stop * self.width].long()
            b_cd = self.scores.operand(pair.b.index_select(0, cols))
            bias = None if pair.bias is None else pair.bias[cols]
            mean[t] = self._means(b_cd, cols, t).to(mean.dtype)
            for r in slices(i.stop, ROWS, i.start):
                here = slice(r.start - i.start, r.stop - i.start)
                x_rc = self.scores.finish_(self.scores.scaled_product(self.scores.scaled(pair.a[r]), b_cd), bias)
                shift = self.lse.new_zeros(1) if pair.row_shift is None else pair.row_shift[r].double()
                place = self.places[r] - t.start * self.width
                inside = (place >= 0) & (place < cols.shape[0])
                found = x_rc.gather(1, place.clamp(0, cols.shape[0] - 1)).double() - shift[:, None]
                self.own[r] += torch.where(inside, found, 0.0)
                if self.spec.row_top:
                    self._add_top(x_rc, cols, r)
                log_rt, entropy_rt = self._tile_sums(x_rc, t.stop - t.start)
                log_rt = log_rt - shift[:, None]
                part_tr[t, here] = log_rt.T.to(stat)
                if entropy_tr is None:
                    self.lse[r] = torch.logaddexp(self.lse[r], log_rt.logsumexp(1))
                else:
                    entropy_tr[t, here] = entropy_rt.T.to(stat)
                    lse = log_rt.logsumexp(1)
                    chunk = lse, plans.dropped_entropy(log_rt - lse[:, None], entropy_rt).sum(1)
                    self.lse[r], self.entropy[r] = merged_entropy((self.lse[r], self.entropy[r]), chunk)
        return part_tr, entropy_tr

    def _add_top(self, x_rc: Tensor, cols: Tensor, r: slice) -> None:
        """Merge the largest scores of these columns. The lowest column wins a tie; NaN is larger than any number."""
        top = x_rc.amax(1, keepdim=True)
        best = (x_rc == top) | (x_rc.isnan() & top.isnan())
        col = torch.where(best, cols.to(torch.int32), self.m).amin(1).long() + self.pair.col_start
        self.top[r], self.top_col[r] = merged_top((self.top[r], self.top_col[r]), (top.squeeze(1).double(), col))

    def _chunks(self) -> list[slice]:
        """Ranges of tiles whose columns and scores fit half the workspace."""
        item = self.scores.compute_dtype.itemsize
        tensors = 3 + self.spec.row_entropy + self.spec.row_top
        column = 2 * self.pair.b.shape[1] * item + tensors * min(ROWS, self.n) * item
        return slices(self.tiles, max(1, min(self.options.workspace_bytes // 2, 2**26) // (column * self.width)))

    def _tile_sums(self, x_rc: Tensor, tiles: int) -> tuple[Tensor, Tensor]:
        """Log-sum-exp and, if wanted, entropy of each row in each tile: (r, t), float64. Overwrites the scores."""
        missing = tiles * self.width - x_rc.shape[1]
        if missing:
            x_rc = torch.nn.functional.pad(x_rc, (0, missing), value=-torch.inf)
        x_rtw = x_rc.view(x_rc.shape[0], tiles, self.width)
        if self.spec.row_entropy:
            x_ew = x_rtw.view(-1, self.width)
            log, entropy, _ = tile_moments(x_ew, torch.empty_like(x_ew), entropies=True, squares=False)
            return log.view(-1, tiles), entropy.view(-1, tiles)
        if self.bounded:
            total_rt = x_rtw.exp_().sum(2)
            return total_rt.double().log(), total_rt
        top_rt = x_rtw.amax(2)
        shift = torch.where(top_rt == -torch.inf, 0.0, top_rt)
        total_rt = x_rtw.sub_(shift[:, :, None]).exp_().sum(2)
        return total_rt.double().log() + shift.double(), total_rt

    def _means(self, b_cd: Tensor, cols: Tensor, t: slice) -> Tensor:
        """The mean column of each tile, without columns that a bias of -inf excludes: (t, d)."""
        b_cd = b_cd.to(self.scores.compute_dtype)
        if self.pair.bias is not None:
            b_cd = torch.where((self.pair.bias[cols] > -torch.inf)[:, None], b_cd, 0.0)
        tiles, missing = t.stop - t.start, (t.stop - t.start) * self.width - b_cd.shape[0]
        if missing:  # in the last tile
            b_cd = torch.nn.functional.pad(b_cd, (0, 0, 0, missing))
        total = b_cd.view(tiles, self.width, b_cd.shape[1]).sum(1)
        return total / self.count[t, None].to(total.dtype)


class _Backward:
    """For each tile: exact gradients of the rows that keep it, and the tile's mean for the other rows."""

    def __init__(self, job: Backward, plan: FilterPlan) -> None:
        pair, stats, grad, needs, spec, options = job
        self.pair, self.plan, self.needs, self.options, self.spec = pair, plan, needs, options, spec
        self.scores = TileScores(pair, spec)
        compute, n = self.scores.compute_dtype, pair.a.shape[0]
        # G is divided by the largest gradient of a statistic, so that it stays near 1; multiplied back at the end.
        self.size = largest_gradient(grad).to(pair.a.device)
        nothing = pair.a.new_zeros(n, dtype=pair.stat_dtype)
        grad_lse = nothing if grad.row_lse is None else grad.row_lse
        self.tokens = None
        if grad.row_entropy is not None:
            grad_lse = grad_lse - grad.row_entropy.double() * stats.row_entropy.double()
        self.weights = SideWeights(stats.row_lse, pair.row_shift, grad_lse / self.size)
        self.dropped_grad = self.weights.grad  # gradient of a row's dropped probability
        if grad.row_entropy is not None:
            entropy = (grad.row_entropy / self.size).double()
            self.tokens = TokenWeights(self.weights, entropy, None)
            self.dropped_grad = self.dropped_grad + entropy * plan.surprise
        self.grad_pos = ((nothing if grad.row_pos is None else grad.row_pos) / self.size).to(compute)
        self.picked: tuple[Tensor, Tensor] | None = None  # positions of distinct picked columns, and their gradients
        if grad.row_picked is not None:
            pick, _, total = combined_picks(pair.pick, grad.row_picked / self.size)
            self.picked = plans.places_of(plan.order, pair, pick), total.to(compute)
        self.count = plans.columns_of_tiles(plan.order, pair.bias).to(compute)
        need_a = needs.a or (needs.scale and not needs.b)
        self.a = pair.a.new_zeros(pair.a.shape, dtype=compute) if need_a else None
        self.b = pair.a.new_empty(pair.b.shape) if needs.b else None
        self.bias = pair.a.new_zeros(pair.b.shape[0], dtype=torch.float64) if needs.bias else None
        self.scale = torch.zeros((), dtype=torch.float64, device=pair.a.device)

    def run(self) -> Grads:
        """The gradients of all tiles."""
        pair, width, m = self.pair, plans.tile_width(self.pair.b.shape[0]), self.pair.b.shape[0]
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
                        self.scale += (total_cd * pair.b[cols].to(total_cd.dtype)).sum()
                    self.b[cols] = total_cd.mul_(factor.to(total_cd.dtype)).to(self.b.dtype)
        return self._grads(factor)

    def _chunks(self) -> list[slice]:
        """Ranges of tiles whose dropped masses are converted together."""
        tiles, n = self.plan.mass.shape
        numbers = min(self.options.workspace_bytes // 16, 2**24) // 4
        return slices(tiles, max(1, numbers // max(n, self.pair.a.shape[1])))

    def _dropped(self, t: slice) -> Tensor:
        """The dropped masses multiplied by the gradient of a row's dropped probability: (t, n)."""
        tolerance = plans.tolerance_of(self.options, self.pair.a.dtype)
        mass_tn = self.plan.mass[t].to(self.scores.compute_dtype).clamp(min=0.0) * tolerance
        dropped = mass_tn * self.dropped_grad.to(mass_tn.dtype)
        if self.spec.softcap:
            # The slope of the soft cap at the score whose exponential is the mean of the tile's.
            x_tn = (mass_tn / self.count[t, None]).log() + self.weights.lse.to(mass_tn.dtype)
            dropped *= self.scores.softcap_slope(x_tn)
        # Where nothing is dropped, 0 * inf would be NaN.
        return torch.where(mass_tn > 0, dropped, 0.0)

    def _rows(self, r: slice, dtype: torch.dtype) -> Tensor:
        """Rows of a, with zeros for ignored rows: an ignored row may hold NaN, and 0 * NaN would reach the columns."""
        return torch.where(self.pair.row_key[r, None] >= 0, self.pair.a[r].to(dtype), 0.0)

    def _add_means(self, dropped_tn: Tensor, t: slice) -> None:
        """dA_i += the mass that row i drops in each tile * the tile's mean column."""
        assert self.a is not None
        mean_td = self.plan.mean[t].to(dropped_tn.dtype)
        for r in slices(self.a.shape[0], 4 * ROWS):
            self.a[r].addmm_(dropped_tn[:, r].T, mean_td)

    def _share(self, dropped_tn: Tensor, t: slice) -> Tensor:
        """The gradient of each column of a tile from the rows that drop the tile: (t, d)."""
        total = dropped_tn.new_zeros((dropped_tn.shape[0], self.pair.a.shape[1]))
        for r in slices(dropped_tn.shape[1], 4 * ROWS):
            total.addmm_(dropped_tn[:, r], self._rows(r, total.dtype))
        return total / self.count[t, None]

    def _tile(self, tile: int, cols: Tensor, total_cd: Tensor | None) -> None:
        """Add the gradients of the rows that keep this tile."""
        pair = self.pair
        b_cd = self.scores.operand(pair.b.index_select(0, cols))
        bias = None if pair.bias is None else pair.bias[cols]
        rows = (self.plan.mass[tile] < 0).nonzero().squeeze(1)
        for r in rows.split(4 * ROWS):
            a_rd = pair.a.index_select(0, r)
            x_rc = self.scores.finish_(self.scores.scaled_product(self.scores.scaled(a_rd), b_cd), bias)
            slope = self.scores.softcap_slope(x_rc) if self.spec.softcap else None
            if self.tokens is None:
                g_rc = self.weights.softmax_(x_rc, r, 1)
            else:
                g_rc = self.tokens.gradient_(x_rc, torch.empty_like(x_rc), r)
            positive = cols[None, :] == (pair.row_key[r] - pair.col_start)[:, None]
            g_rc += torch.where(positive, self.grad_pos[r, None], 0.0)
            if self.picked is not None:
                place = self.picked[0][r] - tile * plans.tile_width(pair.b.shape[0])
                here = (place >= 0) & (place < cols.shape[0])
                g_rc.scatter_add_(1, place.clamp(0, cols.shape[0] - 1), torch.where(here, self.picked[1][r], 0.0))
            if slope is not None:
                g_rc *= slope
            if self.bias is not None:
                self.bias[cols] += g_rc.double().sum(0)
            g_rc = self.scores.operand(g_rc)
            if self.a is not None:
                self.a.index_add_(0, r, self.scores.product(g_rc, b_cd))  # deterministic: each row occurs once
            if total_cd is not None:
                self.scores.add_product(total_cd, g_rc.T, self.scores.operand(a_rd))

    def _grads(self, factor: Tensor) -> Grads:
        pair, stat = self.pair, self.pair.stat_dtype
        if self.needs.scale and self.a is not None:
            for r in slices(self.a.shape[0], 4 * ROWS):
                self.scale += (self.a[r] * self._rows(r, self.a.dtype)).sum(dtype=torch.float64)
        return Grads(
            a=self.a.mul_(factor.to(self.a.dtype)).to(pair.a.dtype) if self.a is not None and self.needs.a else None,
            b=self.b,
            scale=(self.scale * self.size).to(stat) if self.needs.scale else None,
            bias=None if self.bias is None else (self.bias * self.size).to(stat),
        )
