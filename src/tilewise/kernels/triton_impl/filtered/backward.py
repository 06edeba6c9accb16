"""Backward of the filter: the gradients of the kept entries, and of the tile means that replace the others."""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from typing import Any

import torch
import triton
from torch import Tensor

from tilewise.kernels import filter_plan as plans
from tilewise.kernels.filter_plan import columns_of_tiles
from tilewise.kernels.host_scalar import HostScalar
from tilewise.kernels.spec import FilterPlan, Grads, GradStats, Needs, Stats, largest_gradient
from tilewise.kernels.triton_impl.filtered import backward_kernels as kernels
from tilewise.kernels.triton_impl.filtered.forward import FilterCall, multiply
from tilewise.kernels.triton_impl.scores import cdiv, vector
from tilewise.kernels.triton_impl.sizes import kind_of, row_of
from tilewise.kernels.triton_impl.two_pass.backward import folded_gradients
from tilewise.kernels.triton_impl.two_pass.backward_kernels import finish_kernel
from tilewise.kernels.triton_impl.two_pass.gradient_sum import FINISH_ROWS, finish_arguments
from tilewise.kernels.triton_impl.two_pass.saved import SavedColumns

LIST_BLOCK = 1024


class FilterBackward(FilterCall):
    """The kept entries, a group of tiles at a time; the means of the tiles for the others."""

    def run(
        self,
        stats: Stats,
        plan: FilterPlan,
        grad: GradStats,
        needs: Needs,
        saved: SavedColumns | None = None,
        grad_dtype: torch.dtype | None = None,
    ) -> Grads | None:
        """The gradients, or None if too many entries are kept."""
        self.stats, self.plan, self.grad, self.needs, self.saved = stats, plan, grad, needs, saved
        self.row_dtype = grad_dtype or self.pair.a.dtype
        self.need_a, self.need_b = needs.a or needs.scale, needs.b or needs.bias
        found = HostScalar(torch.cat((plan.kept, plan.keep_all)))
        # Work that does not depend on the number of entries is launched before the host waits for that number.
        self._start()
        self._kernels()
        known = found.tensor()
        blocks = Blocks(known[:-1], self.sizes.rows)
        if known[-1] or blocks.pairs > self.most_pairs:
            return None
        if self.saved is not None:
            self.saved.buffer = None
        self._pairs(blocks)
        return self._finish()

    def _start(self) -> None:
        """The list of kept entries, and the dropped ones: tile means for the rows, a share of each tile for the columns."""
        pair, plan, kept, scale = self.pair, self.plan, self.plan.kept, self.pair.scale
        self.sizes = row_of(self.device, kind_of(pair.a.dtype, self.exact)).filter_pairs
        step = self.sizes.rows
        self.most_pairs = plans.most_kept(self.tiles * self.n)
        most_blocks = self.tiles + self.most_pairs // step
        self.rows = kept.new_empty(max(1, self.most_pairs))
        starts, firsts = kept.new_zeros(self.tiles + 1), kept.new_zeros(self.tiles + 1)
        torch.cumsum(kept, 0, dtype=torch.int32, out=starts[1:])
        torch.cumsum((kept + (step - 1)) // step, 0, dtype=torch.int32, out=firsts[1:])
        folded = folded_gradients(self.stats, self.grad)  # with an entropy, v of `filter_plan`
        grad_row, grad_pos = (
            scale.new_zeros(self.n) if grad is None else grad for grad in (folded.row_lse, folded.row_pos)
        )
        dropped_grad, grad_entropy = grad_row, folded.row_entropy
        if grad_entropy is not None:
            dropped_grad = grad_row + grad_entropy * plan.surprise
        # G must stay near 1 in float16, and the tolerance is multiplied last: masses of a millionth would lose their digits.
        half, tolerance = pair.a.dtype == torch.float16, self.tolerance
        self.size = largest_gradient(self.grad).to(scale) if half else torch.ones_like(scale)
        early, late = (1.0, tolerance) if half else (tolerance, 1.0)
        self.g_factor, self.product_factor = 1.0 / self.size, scale * self.size
        self.known |= {"grad_row": vector(grad_row), "grad_pos": vector(grad_pos), "R": step, "blocks": most_blocks}
        others = {"grad_entropy": grad_entropy, "grad_picked": folded.row_picked}
        self.known |= {name: vector(value) for name, value in others.items() if value is not None}
        self.known |= {"row_lse": vector(self.stats.row_lse), "order": plan.order, "rows": self.rows, "starts": starts}
        self.known |= {"count": columns_of_tiles(plan.order, pair.bias), "table": kept.new_empty(3 * most_blocks)}
        dropped = torch.empty_like(plan.mass)
        listing: dict[str, Any] = {
            "firsts": firsts,
            "room": self.most_pairs,
            "BLOCK": LIST_BLOCK,
            "grad_row": vector(dropped_grad),
        }
        factor = self.g_factor * early
        self.launch(kernels.plan_kernel, self.tiles, mass=plan.mass, dropped=dropped, factor=factor, **listing)
        self.total = self._product(self.need_a, dropped.T, plan.mean, late)
        self.share = self._product(self.need_b, dropped, self.a, late)
        self.bias_share = dropped.sum(1, dtype=torch.float32) * late if self.needs.bias else None

    def _product(self, needed: bool, left: Tensor, right: Tensor, factor: float) -> Tensor | None:
        """factor * left @ right in float32, if needed."""
        if not needed:
            return None
        out = self.pair.scale.new_empty((left.shape[0], self.d))
        multiply(out, left, right)
        return out if factor == 1.0 else out.mul_(factor)

    def _kernels(self) -> None:
        """Results, and the arguments of the kernels of the kept entries that do not depend on the entries."""
        pair, sizes = self.pair, self.sizes
        self.out = None
        if self.need_b:
            self.out = pair.a.new_empty((self.m, self.d)) if self.saved is None else self.saved.memory
        self.bias_out = pair.scale.new_empty(self.m) if self.needs.bias else None
        self.features = min(sizes.columns, max(16, triton.next_power_of_2(self.d)))
        self.column = {"out": self.out, "K": self.features, "factor": self.product_factor, "share": self.share}
        self.column |= {"bias_factor": self.size, "bias_share": self.bias_share, "bias_out": self.bias_out}
        self.added = min(1024, triton.next_power_of_2(self.d))
        self.marks = torch.arange(self.n + 1, dtype=torch.int32, device=self.device)

    def _pairs(self, blocks: Blocks) -> None:
        """The gradients of the kept entries, group by group."""
        pair, budget = self.pair, self.options.workspace_bytes
        most_g = max(blocks.largest, budget // 8 // (self.width * pair.a.element_size()))
        most_u = max(self.sizes.rows, budget // 2 // (4 * self.d)) if self.need_a else max(1, blocks.pairs)
        groups = [(t, list(blocks.batches(t, most_u))) for t in blocks.groups(most_g)]
        parts = [part for _, batches in groups for _, part in batches]
        rows, pairs = self._by_row(parts) if self.need_a and parts else (None, None)
        g = pair.a.new_empty((max(1, min(most_g, blocks.pairs)), self.width)) if self.need_b else None
        u = pair.scale.new_empty((max(1, min(most_u, blocks.pairs)), self.d)) if self.need_a else None
        sizes = self.sizes
        score = {"g": g, "u": u, "factor": self.g_factor, "K": sizes.depth}
        for t, batches in groups:
            first_g = blocks.starts[t.start]
            for block, part in batches:
                here = {"first_block": block.start, "first_g": first_g, "first_u": part.start} | score
                how = {"warps": sizes.warps, "stages": sizes.stages}
                self.launch(kernels.pair_kernel, block.stop - block.start, **how, **here)
                if rows is not None:
                    starts = torch.searchsorted(rows[part], self.marks, out_int32=True)
                    here = {"total": self.total, "u": u, "pairs": pairs, "starts": starts, "first": part.start}
                    self.launch(kernels.add_rows_kernel, self.n * cdiv(self.d, self.added), K=self.added, **here)
            if self.need_b:
                here = {"g": g, "first_tile": t.start, "first_g": first_g} | self.column
                how = {"warps": sizes.column_warps, "stages": sizes.stages}
                self.launch(kernels.column_kernel, (t.stop - t.start) * cdiv(self.d, self.features), **how, **here)

    def _by_row(self, parts: list[slice]) -> tuple[Tensor, Tensor]:
        """The rows of all entries, sorted inside each part, and the entries in that order; those of a row by their tiles.

        One sort of all entries is much less work for the host than one for each part.
        """
        entries, cuda = parts[-1].stop, self.device.type == "cuda"
        ends = torch.tensor([part.stop for part in parts], dtype=torch.int32, device="cpu", pin_memory=cuda)
        entry = torch.arange(entries, dtype=torch.int32, device=self.device)
        part = torch.bucketize(entry, ends.to(self.device, non_blocking=True), right=True)
        pairs = torch.sort(part * self.n + self.rows[:entries], stable=True).indices
        return self.rows[pairs], pairs.to(torch.int32)

    def _finish(self) -> Grads:
        """Convert the gradients to their final dtypes."""
        pair, out, dots = self.pair, None, None
        if self.total is not None:
            if self.needs.a:
                kind = self.row_dtype
                out = self.total if kind == torch.float32 else pair.a.new_empty((self.n, self.d), dtype=kind)
            dots = pair.scale.new_empty(cdiv(self.n, FINISH_ROWS)) if self.needs.scale else None
            values = finish_arguments(self.total, self.a, self.product_factor, out, dots)
            self.launch(finish_kernel, cdiv(self.n, FINISH_ROWS), **values)
        return Grads(
            a=out,
            b=self.out if self.needs.b else None,
            scale=None if dots is None else dots.sum() * self.size,
            bias=self.bias_out,
        )


class Blocks:
    """Kept entries, tile by tile, divided into blocks of at most ``step`` rows; plain numbers on the host.

    >>> blocks = Blocks(torch.tensor([3, 0, 5, 1]), 4)
    >>> blocks.pairs
    9
    >>> [(t.start, t.stop) for t in blocks.groups(5)]
    [(0, 2), (2, 3), (3, 4)]
    >>> [(b.start, b.stop, p.start, p.stop) for b, p in blocks.batches(slice(0, 4), 7)]
    [(0, 2, 0, 7), (2, 4, 7, 9)]
    """

    def __init__(self, counts: Tensor, step: int) -> None:
        """``counts`` is a tensor on the host. Tensors are summed instead of lists, because the device idles meanwhile."""
        self.step, self.counts, self.largest = step, counts.tolist(), int(counts.max())
        self.starts: list[int] = [0, *counts.cumsum(0).tolist()]
        self.firsts: list[int] = [0, *((counts + (step - 1)) // step).cumsum(0).tolist()]
        self.pairs = self.starts[-1]

    def groups(self, most: int) -> Iterator[slice]:
        """Tiles with at most ``most`` entries together; no tile has more."""
        first, tiles = 0, len(self.counts)
        while first < tiles:
            stop = bisect.bisect_right(self.starts, self.starts[first] + most) - 1
            stop = min(max(stop, first + 1), tiles)
            yield slice(first, stop)
            first = stop

    def batches(self, tiles: slice, most: int) -> Iterator[tuple[slice, slice]]:
        """Blocks of these tiles with at most ``most`` entries together (at least a block's), and those entries."""
        block = first_block = self.firsts[tiles.start]
        pair = first_pair = self.starts[tiles.start]
        tile = tiles.start
        while tile < tiles.stop:
            # As many whole tiles as there is room for, then a part of the next one.
            after = min(bisect.bisect_right(self.starts, first_pair + most) - 1, tiles.stop)
            if after > tile:
                tile, block, pair = after, self.firsts[after], self.starts[after]
                continue
            left, room = self.starts[tile + 1] - pair, most - (pair - first_pair)
            fit = min(left, room // self.step * self.step)
            if fit == 0:
                yield slice(first_block, block), slice(first_pair, pair)
                first_block, first_pair = block, pair
                continue
            block, pair = block + cdiv(fit, self.step), pair + fit
            tile += fit == left
        if pair > first_pair:
            yield slice(first_block, block), slice(first_pair, pair)
