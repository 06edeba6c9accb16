"""Backward of the filter: the gradients of the kept pairs, and of the tile means that replace the others."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator

import torch
import triton
from torch import Tensor

from tilewise.kernels import filter_plan as plans
from tilewise.kernels.filter_plan import columns_of_tiles, tile_count
from tilewise.kernels.spec import FilterPlan, Grads, GradStats, Needs, Pair, PairSpec, Stats, largest_gradient
from tilewise.kernels.triton_impl.filtered import kernels
from tilewise.kernels.triton_impl.filtered.forward import units
from tilewise.kernels.triton_impl.launch.call import Call, cdiv, vector
from tilewise.kernels.triton_impl.sizes import pair_sizes
from tilewise.kernels.triton_impl.two_pass.backward import FINISH_ROWS, finish, product
from tilewise.kernels.triton_impl.two_pass.backward_kernels import finish_kernel
from tilewise.kernels.triton_impl.two_pass.saved import SavedColumns
from tilewise.options import TileOptions

LIST_BLOCK = 1024


class FilterBackward:
    """The kept pairs, a group of tiles at a time; the means of the tiles for the others."""

    def __init__(
        self,
        pair: Pair,
        stats: Stats,
        plan: FilterPlan,
        grad: GradStats,
        needs: Needs,
        spec: PairSpec,
        options: TileOptions,
        saved: SavedColumns | None = None,
    ) -> None:
        self.pair, self.plan, self.grad, self.needs, self.saved = pair, plan, grad, needs, saved
        self.spec, self.options, self.stats = spec, options, stats
        self.n, self.m, self.d = pair.a.shape[0], pair.b.shape[0], pair.a.shape[1]
        self.width, self.tiles, self.device = plans.tile_width(self.m), tile_count(self.m), pair.a.device
        self.need_a, self.need_b = needs.a or needs.scale, needs.b or needs.bias

    def run(self) -> Grads | None:
        """The gradients, or None if too many pairs are kept."""
        kept, keep_all = self.plan.kept, self.plan.keep_all
        if kept.is_cuda:
            host = torch.empty(self.tiles + 1, dtype=kept.dtype, device="cpu", pin_memory=True)
            host[: self.tiles].copy_(kept, non_blocking=True)
            host[self.tiles :].copy_(keep_all, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
        # All that does not depend on the number of pairs is launched or prepared before the host waits.
        self._start()
        self._prepare()
        if kept.is_cuda:
            copied.synchronize()
            kept, keep_all = host[: self.tiles], host[self.tiles :]
        counts = kept.tolist()
        if keep_all.item() or sum(counts) > self.most_pairs:
            return None
        if self.saved is not None:
            self.saved.buffer = None
        self._pairs(Blocks(counts, self.sizes.rows))
        return self._finish()

    def _start(self) -> None:
        """The dropped pairs: tile means for the rows, a share of each tile for the columns."""
        pair, scale = self.pair, self.pair.scale
        self.call = Call(pair, self.spec, self.options)
        nothing = None
        if self.grad.row_lse is None or self.grad.row_pos is None:
            nothing = scale.new_zeros(self.n)
        self.grad_row = vector(nothing if self.grad.row_lse is None else self.grad.row_lse)
        self.grad_pos = vector(nothing if self.grad.row_pos is None else self.grad.row_pos)
        self.size = torch.ones_like(scale)
        if pair.a.dtype == torch.float16:  # G must stay near 1 in float16
            self.size = largest_gradient(self.grad).to(scale)
        self.inside, self.outside = 1.0 / self.size, scale * self.size
        self.count = columns_of_tiles(self.plan.order, pair.bias)
        # In float16 the tolerance is multiplied last: masses of a millionth would lose their digits.
        tolerance, half = self.options.filter_tolerance, pair.a.dtype == torch.float16
        dropped = self._dropped(self.inside if half else self.inside * tolerance)
        new = scale.new_empty
        self.total: Tensor | None = None
        self.share: Tensor | None = None
        self.bias_share: Tensor | None = None
        if self.need_a:
            self.total = new((self.n, self.d))
            product(self.total, dropped.T, self.plan.mean, True)
            if half:
                self.total *= tolerance
        if self.need_b:
            self.share = new((self.tiles, self.d))
            product(self.share, dropped, self.call.a, True)
            if half:
                self.share *= tolerance
        if self.needs.bias:
            self.bias_share = dropped.sum(1, dtype=torch.float32) * (tolerance if half else 1.0)

    def _dropped(self, factor: Tensor) -> Tensor:
        """The dropped masses times the gradient of the log-sum-exp and the factor: (T, n)."""
        out = torch.empty_like(self.plan.mass)
        drop = self.call.prepare(kernels.drop_kernel)
        drop.put({"mass": self.plan.mass, "grad_row": self.grad_row, "factor": factor, "count": self.count, "out": out})
        drop.put({"row_shift": vector(self.pair.row_shift), "row_lse": vector(self.stats.row_lse), "n": self.n})
        drop.put({"tolerance": self.options.filter_tolerance, "softcap": self.spec.softcap, "BLOCK": LIST_BLOCK})
        drop.put({"SCORE": self.call.score_bits}).launch(self.tiles * cdiv(self.n, LIST_BLOCK))
        return out

    def _prepare(self) -> None:
        """The list of kept pairs, and their kernels with all arguments except the pairs."""
        pair, call, plan, item = self.pair, self.call, self.plan, self.pair.a.element_size()
        self.sizes = sizes = pair_sizes(self.device, pair.a.dtype)
        self.most_pairs = plans.most_kept(self.tiles * self.n)
        most_blocks = self.tiles + self.most_pairs // sizes.rows
        starts, firsts = (torch.zeros(self.tiles + 1, dtype=torch.int32, device=self.device) for _ in range(2))
        torch.cumsum(plan.kept, 0, dtype=torch.int32, out=starts[1:])
        torch.cumsum((plan.kept + (sizes.rows - 1)) // sizes.rows, 0, dtype=torch.int32, out=firsts[1:])
        self.rows = torch.empty(max(1, self.most_pairs), dtype=torch.int32, device=self.device)
        table = torch.empty(3 * most_blocks, dtype=torch.int32, device=self.device)
        listing = call.prepare(kernels.list_kernel)
        listing.put({"mass": plan.mass, "starts": starts, "firsts": firsts, "rows": self.rows, "table": table})
        listing.put({"n": self.n, "room": self.most_pairs, "blocks": most_blocks, "R": sizes.rows, "BLOCK": LIST_BLOCK})
        listing.launch(self.tiles)
        bias, shape = vector(pair.bias), {"D": self.d, "W": self.width, "UNIT": 16 // item, "R": sizes.rows}
        score = call.prepare(kernels.pair_kernel, sizes.warps, sizes.stages).put(shape)
        score.put({"a": call.a, "b": call.b, "order": plan.order, "rows": self.rows, "table": table})
        score.put({"scale": pair.scale, "factor": self.inside, "bias": bias, "softcap": self.spec.softcap})
        score.put({"row_key": vector(pair.row_key), "row_shift": vector(pair.row_shift)})
        score.put({"row_lse": vector(self.stats.row_lse), "grad_row": self.grad_row, "grad_pos": self.grad_pos})
        score.put({"m": self.m, "col_start": pair.col_start, "blocks": most_blocks})
        score.put({"a_units": units(call.a), "b_units": units(call.b), "K": sizes.depth})
        self.score = score.put({"SCORE": call.score_bits, "EXACT": call.exact})
        self.out = None
        if self.need_b:
            self.out = pair.a.new_empty((self.m, self.d)) if self.saved is None else self.saved.memory
        self.bias_out = pair.scale.new_empty(self.m) if self.needs.bias else None
        column = call.prepare(kernels.column_kernel, sizes.column_warps, sizes.stages).put(shape)
        column.put({"a": call.a, "order": plan.order, "rows": self.rows, "starts": starts, "share": self.share})
        column.put({"count": self.count, "bias": bias, "bias_share": self.bias_share, "factor": self.outside})
        column.put({"bias_factor": self.size, "out": self.out, "bias_out": self.bias_out, "m": self.m})
        self.features = min(sizes.columns, max(16, triton.next_power_of_2(self.d)))
        self.column = column.put({"a_units": units(call.a), "K": self.features, "EXACT": call.exact})
        self.added = min(1024, triton.next_power_of_2(self.d))
        add = call.prepare(kernels.add_rows_kernel)
        self.add = add.put({"total": self.total, "n": self.n, "D": self.d, "K": self.added})
        self.marks = torch.arange(self.n + 1, dtype=torch.int32, device=self.device)

    def _pairs(self, blocks: Blocks) -> None:
        """The gradients of the kept pairs, group by group."""
        pair, budget = self.pair, self.options.workspace_bytes
        most_g = max(*blocks.counts, budget // 8 // (self.width * pair.a.element_size()))
        most_u = max(self.sizes.rows, budget // 2 // (4 * self.d)) if self.need_a else max(1, blocks.pairs)
        g = pair.a.new_empty((max(1, min(most_g, blocks.pairs)), self.width)) if self.need_b else None
        u = pair.scale.new_empty((max(1, min(most_u, blocks.pairs)), self.d)) if self.need_a else None
        self.score.put({"g": g, "u": u})
        self.column.put({"g": g})
        self.add.put({"u": u})
        for t in blocks.groups(most_g):
            first_g = blocks.starts[t.start]
            for block, part in blocks.batches(t, most_u):
                self.score.put({"first_block": block.start, "first_g": first_g, "first_u": part.start})
                self.score.launch(block.stop - block.start)
                if u is not None:
                    self._add_rows(self.rows[part])
            if self.need_b:
                self.column.put({"first_tile": t.start, "first_g": first_g})
                self.column.launch((t.stop - t.start) * cdiv(self.d, self.features))

    def _add_rows(self, rows: Tensor) -> None:
        """total[row] += u[pair], for the pairs of each row in the order of their tiles."""
        ordered, pairs = torch.sort(rows, stable=True)
        starts = torch.searchsorted(ordered, self.marks, out_int32=True)
        self.add.put({"pairs": pairs, "starts": starts}).launch(self.n * cdiv(self.d, self.added))

    def _finish(self) -> Grads:
        """Into their final types."""
        pair, out, dots = self.pair, None, None
        if self.total is not None:
            if self.needs.a:
                out = self.total if pair.a.dtype == torch.float32 else pair.a.new_empty((self.n, self.d))
            dots = pair.scale.new_empty(cdiv(self.n, FINISH_ROWS)) if self.needs.scale else None
            finish(self.call.prepare(finish_kernel), self.total, self.call.a, self.outside, out, dots)
        return Grads(
            a=out,
            b=self.out if self.needs.b else None,
            scale=None if dots is None else dots.sum() * self.size,
            bias=self.bias_out,
        )


class Blocks:
    """Kept pairs, tile by tile, divided into blocks of at most ``step`` rows; plain numbers on the host.

    >>> blocks = Blocks([3, 0, 5, 1], 4)
    >>> blocks.pairs
    9
    >>> [(t.start, t.stop) for t in blocks.groups(5)]
    [(0, 2), (2, 3), (3, 4)]
    >>> [(b.start, b.stop, p.start, p.stop) for b, p in blocks.batches(slice(0, 4), 7)]
    [(0, 2, 0, 7), (2, 4, 7, 9)]
    """

    def __init__(self, counts: list[int], step: int) -> None:
        self.counts, self.step = counts, step
        self.starts = [0, *itertools.accumulate(counts)]
        self.firsts = [0, *itertools.accumulate(cdiv(count, step) for count in counts)]
        self.pairs = self.starts[-1]

    def groups(self, most: int) -> Iterator[slice]:
        """Tiles with at most ``most`` pairs together; no tile has more."""
        first, tiles = 0, len(self.counts)
        while first < tiles:
            stop = bisect.bisect_right(self.starts, self.starts[first] + most) - 1
            stop = min(max(stop, first + 1), tiles)
            yield slice(first, stop)
            first = stop

    def batches(self, tiles: slice, most: int) -> Iterator[tuple[slice, slice]]:
        """Blocks of these tiles with at most ``most`` pairs together (at least a block's), and those pairs."""
        block = first_block = self.firsts[tiles.start]
        pair = first_pair = self.starts[tiles.start]
        for count in self.counts[tiles]:
            left = count
            while left:
                room = most - (pair - first_pair)
                fit = left if left <= room else room // self.step * self.step
                if fit == 0:
                    yield slice(first_block, block), slice(first_pair, pair)
                    first_block, first_pair = block, pair
                    continue
                block, pair, left = block + cdiv(fit, self.step), pair + fit, left - fit
        if pair > first_pair:
            yield slice(first_block, block), slice(first_pair, pair)
