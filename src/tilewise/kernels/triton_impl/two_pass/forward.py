"""Forward of the Triton backend: the statistics of all macro-tiles, merged."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilewise.kernels.spec import Stats
from tilewise.kernels.triton_impl import bits as bit
from tilewise.kernels.triton_impl.launch.call import POSITIVE_ROWS, Call, bit_sum, cdiv, pieces, tile_descriptor
from tilewise.kernels.triton_impl.launch.prepared import Prepared
from tilewise.kernels.triton_impl.sizes import multiprocessors
from tilewise.kernels.triton_impl.two_pass import forward_kernels as kernels
from tilewise.kernels.triton_impl.two_pass.backward import macro_tile
from tilewise.kernels.triton_impl.two_pass.positive_kernels import positive_kernel
from tilewise.kernels.triton_impl.two_pass.saved import SavedColumns, column_pieces
from tilewise.kernels.triton_impl.two_pass.softplus_kernels import softplus_forward_kernel, softplus_repair_kernel

MERGE_BLOCK = 16  # rows of one program; divides every tile
MERGE_PARTS = 64  # parts that it reads at once
Parts = tuple[Tensor | None, Tensor | None]  # partial sums, and the statistic that they are folded into


class Forward:
    """The statistics of all macro-tiles, merged.

    ``only_if``: (1,) int32 on the device, or None. If it holds 0, only the scores of the positives are computed, nothing
    is saved, and the log-sum-exps of the rows are not written.
    """

    def __init__(self, call: Call, saved: SavedColumns | None = None, only_if: Tensor | None = None) -> None:
        self.call, self.spec, self.sizes, self.only_if = call, call.spec, call.forward_sizes, only_if
        self.n, self.m = call.a.shape[0], call.b.shape[0]
        spec = self.spec
        self.saved = saved
        self.row_step, self.col_step = self._macro()
        if saved is not None:
            rows, cols = macro_tile(call.pair.shape, spec, call.gradient_sizes, call.options)
            # Saved columns have macro-tiles of their own, and backward reads them with all rows at once. If the
            # workspace is too small for that, nothing is saved.
            if saved.cols > self.col_step or rows < self.n:
                self.saved = None
            else:
                saved.allocate_g(cols, call.empty)
        rows, cols = min(self.n, self.row_step), min(self.m, self.col_step)
        row_tiles, col_tiles = cdiv(rows, self.sizes.rows), cdiv(cols, self.sizes.cols)
        many = spec.positive == "many"

        def buffer(wanted: bool, size: int) -> Tensor | None:
            return call.empty(size) if wanted else None

        self.row_part = buffer(spec.row_lse or spec.softplus, col_tiles * rows)
        self.col_part = buffer(spec.col_lse or (spec.symmetric and rows < self.n), row_tiles * cols)
        self.pos_part = buffer(many, col_tiles * rows)
        self.pos_col_part = buffer(many and spec.symmetric, row_tiles * cols)
        self.sum_part = buffer(spec.row_sum, col_tiles * rows)
        self.tops = buffer(True, row_tiles * col_tiles)
        # `positive_kernel`, where it is launched, runs first and clears this flag.
        cleared = spec.positive == "one" and not spec.softplus
        self.needs_repair = call.empty(1, dtype=torch.int32, zero=not cleared)
        self.peaks: Tensor | None = None
        self.merges: dict[Any, Prepared] = {}

    def _macro(self) -> tuple[int, int]:
        """Rows and columns of a macro-tile whose parts take at most half the workspace, a quarter beside saved columns."""
        spec, sizes = self.spec, self.sizes
        both = spec.col_lse or spec.symmetric
        rows, cols = min(self.n, 65536), min(self.m, 65536 if both else 2**20)
        if spec.symmetric:
            rows = cols = min(16384, max(2048, self.n // 6))  # small, so that most of the lower half is not computed
        tall = 1 + (spec.positive == "many") + spec.row_sum + spec.row_entropy + 2 * spec.row_top

        def bytes_of(rows: int, cols: int) -> float:
            return 4 * rows * cols * (tall / sizes.cols + both * (1 + (spec.positive == "many")) / sizes.rows)

        most = self.call.options.workspace_bytes / (2 if self.saved is None else 4)
        while bytes_of(rows, cols) > most and max(rows, cols) > 256:
            if spec.symmetric:
                rows = cols = rows // 2
            else:
                rows, cols = (rows, cdiv(cols, 2)) if cols >= rows else (cdiv(rows, 2), cols)
        tile = max(sizes.rows, sizes.cols)
        return cdiv(rows, tile) * tile, cdiv(cols, tile) * tile

    def run(self) -> Stats:
        """All macro-tiles; with symmetric scores those on and above the diagonal."""
        spec, new = self.spec, self.call.empty
        row = new(self.n) if self.row_part is not None else None
        col = new(self.m) if spec.col_lse else None
        pos = new(self.n) if spec.has_positive_scores else None
        total = new(self.n) if spec.row_sum else None
        stats = Stats(
            row_lse=row if spec.row_lse else None,
            row_softplus=row if spec.softplus else None,
            col_lse=col,
            row_pos=pos,
            num_positives=self._positives(pos),
            row_sum=total,
        )
        seen: set[tuple[str, int]] = set()
        for i, j in self._macro_tiles():
            mirrored = spec.symmetric and i != j
            self._tiles(i, j, mirrored)
            below = row if mirrored else col
            across = self.col_part if below is not None else None
            self._merge(seen, "lse", i, j, (self.row_part, row), (across, below), log=not spec.softplus)
            if spec.positive == "many":
                across = self.pos_col_part if mirrored else None
                self._merge(seen, "pos", i, j, (self.pos_part, pos), (across, pos), log=False)
            if spec.row_sum:
                self._merge(seen, "sum", i, j, (self.sum_part, total), (None, None), log=False)
        if self.saved is not None:
            self.saved.check(self.call, self.peaks, self.needs_repair, row, self.only_if)
        return stats

    def _macro_tiles(self) -> list[tuple[slice, slice]]:
        """The rows and columns of each macro-tile.

        Of symmetric scores those on and above the diagonal. On it half of the work is done twice, so they are smaller.
        They come first, so that the statistics of every row exist when the others are added.
        """
        rows, cols = pieces(self.n, self.row_step), column_pieces(self.m, self.col_step, self.saved)
        if not self.spec.symmetric:
            return [(i, j) for i in rows for j in cols]
        half = cdiv(self.row_step // 2, self.sizes.rows) * self.sizes.rows if len(rows) > 1 else self.row_step
        found = []
        for i in rows:
            parts = [slice(i.start + part.start, i.start + part.stop) for part in pieces(i.stop - i.start, half)]
            found += [(left, right) for left in parts for right in parts if left.start <= right.start]
        return found + [(i, j) for i in rows for j in rows if i.start < j.start]

    def _strip(self, i: slice, j: slice, columns: bool) -> int:
        """How many row tiles of a macro-tile one program computes in sequence. Their columns must have one shift."""
        rows, cols = cdiv(i.stop - i.start, self.sizes.rows), cdiv(j.stop - j.start, self.sizes.cols)
        programs = multiprocessors(self.call.a.device) * self.sizes.programs
        long = self.sizes.strip
        steps = long * cdiv(cdiv(rows, long) * cols, programs)  # of the program with the most work
        return long if columns and self.peaks is not None and steps <= 1.05 * cdiv(rows * cols, programs) else 1

    def _tiles(self, i: slice, j: slice, mirrored: bool) -> None:
        """The parts of the macro-tile (i, j)."""
        spec, run, sums = self.spec, self.call.run, {"row_part": self.row_part, "needs_repair": self.needs_repair}
        if spec.softplus:
            run(softplus_forward_kernel, i, j, self.sizes, **sums)
            run(softplus_repair_kernel, i, j, self.sizes, **sums)
        columns = spec.col_lse or mirrored
        stats = bit_sum(
            (bit.ROWS, spec.row_lse), (bit.COLS, columns), (bit.ROW_SUM, spec.row_sum), (bit.MIRROR, mirrored)
        )
        if spec.softplus and not stats:
            return
        e = None if self.saved is None else self.saved.chunk(j)
        shared = {**sums, "col_part": self.col_part, "tops": self.tops, "STATS": stats}
        shared["STRIP"] = self._strip(i, j, columns)
        more: dict[str, Any] = {"pos_part": self.pos_part, "pos_col_part": self.pos_col_part, "sum_part": self.sum_part}
        more |= {"peaks": self.peaks, "peak_count": 0 if self.peaks is None else self.peaks.numel()}
        more |= {"only_if": self.only_if, "e_desc": None if e is None else tile_descriptor(e[i], self.sizes)}
        run(kernels.forward_kernel, i, j, self.sizes, SAVE=e is not None, **shared, **more)
        run(kernels.repair_kernel, i, j, self.sizes, **shared)

    def _positives(self, pos: Tensor | None) -> Tensor | None:
        """The number of positives of each row, 0 or 1; their scores are written to ``pos``.

        Many positives are counted elsewhere.
        """
        if pos is None or self.spec.positive == "many":
            return None
        num_positives = self.call.empty(self.n)
        # Float32 uses the maximum of each tile instead of an estimate, for its last digits.
        if self.call.a.element_size() == 2 or self.saved is not None:
            self.peaks = self.call.empty(cdiv(self.n, POSITIVE_ROWS))
        values = {"row_pos": pos, "num_positives": num_positives, "peaks": self.peaks}
        values["needs_repair"] = self.needs_repair
        self.call.run_positive(positive_kernel, slice(0, self.n), slice(0, self.m), **values)
        return num_positives

    def _merge(
        self, seen: set[tuple[str, int]], name: str, i: slice, j: slice, of_rows: Parts, of_cols: Parts, *, log: bool
    ) -> None:
        """Fold the parts of the macro-tile (i, j) into the statistics of its rows and columns."""
        (row_part, row_out), (col_part, col_out) = of_rows, of_cols
        n, m = i.stop - i.start, j.stop - j.start
        strip = self._strip(i, j, col_part is not None)
        below = name if self.spec.symmetric else name + " of columns"
        row_first, col_first = (name, i.start) not in seen, (below, j.start) not in seen
        seen.update({(name, i.start)} | ({(below, j.start)} if col_part is not None else set()))
        block = min(MERGE_BLOCK, self.sizes.rows, self.sizes.cols)
        blocks = cdiv(n, block) * (row_part is not None) + cdiv(m, block) * (col_part is not None)
        key = row_first, col_first, log, strip, row_part is None, col_part is None
        merge = self.merges.get(key)
        if merge is None:
            fixed: dict[str, Any] = {
                "R": self.sizes.rows,
                "C": self.sizes.cols,
                "STRIP": strip,
                "MANY_PARTS": MERGE_PARTS,
            }
            fixed |= {"ROW_FIRST": row_first, "COL_FIRST": col_first, "LOG": log, "BLOCK": block}
            fixed |= {"tops": self.tops, "only_if": self.only_if}
            merge = self.merges[key] = self.call.prepare(kernels.merge_kernel, warps=2).put(fixed)
        rows, cols = self.call.rows(i, self.sizes), self.call.cols(j, self.sizes)
        values: dict[str, Any] = {"row_part": row_part, "n": n, "row_parts": cdiv(m, self.sizes.cols)}
        values |= {"col_part": col_part, "m": m, "col_parts": cdiv(n, self.sizes.rows * strip)}
        values["row_shift"] = rows["row_shift"] if log else None
        values["col_shift"] = cols["col_shift"] if log and col_part is not None else None
        values["row_out"] = None if row_part is None or row_out is None else row_out[i]
        values["col_out"] = None if col_part is None or col_out is None else col_out[j]
        merge.put(values).launch(blocks)
