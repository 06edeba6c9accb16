"""Forward of the Triton backend: the statistics of all macro-tiles, merged."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilewise.kernels.spec import Stats, wanted_stats
from tilewise.kernels.triton_impl import bits as bit
from tilewise.kernels.triton_impl.launch.call import POSITIVE_ROWS, Call, bit_sum, cdiv, pieces, tile_descriptor
from tilewise.kernels.triton_impl.launch.prepared import Prepared
from tilewise.kernels.triton_impl.sizes import multiprocessors
from tilewise.kernels.triton_impl.two_pass import forward_kernels as kernels
from tilewise.kernels.triton_impl.two_pass.macro_tile import macro_tile
from tilewise.kernels.triton_impl.two_pass.positive_kernels import positive_kernel
from tilewise.kernels.triton_impl.two_pass.saved import FULL_TILES, SavedColumns, column_pieces

MERGE_BLOCK = 16  # rows of one program; divides every tile


class Forward:
    """The statistics of all macro-tiles, merged; the arguments are those of `strategy.forward`."""

    def __init__(self, call: Call, saved: SavedColumns | None = None, beside_plan: bool = False) -> None:
        self.call, self.spec, self.sizes, self.only_if = call, call.spec, call.forward_sizes, call.pair.only_if
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
                more = 0 if beside_plan else self._room(saved)
                saved.allocate(max(cols, more), call.empty)
        rows, cols = min(self.n, self.row_step), min(self.m, self.col_step)
        row_tiles, col_tiles = cdiv(rows, self.sizes.rows), cdiv(cols, self.sizes.cols)
        self.row_part = call.empty(self._row_statistics() * col_tiles * rows)
        self.col_part: Tensor | None = None
        if spec.col_lse or (spec.symmetric and rows < self.n):
            self.col_part = call.empty(self._col_statistics() * row_tiles * cols)
        self.tops = call.empty(row_tiles * col_tiles)
        # `positive_kernel`, where it is launched, runs first and clears this flag.
        cleared = spec.positive == "one" and not spec.softplus
        self.needs_repair = call.empty(1, dtype=torch.int32, zero=not cleared)
        self.peaks: Tensor | None = None
        self.merges: dict[Any, Prepared] = {}
        self.seen_rows: set[int] = set()
        self.seen_cols: set[int] = self.seen_rows if spec.symmetric else set()

    def _room(self, saved: SavedColumns) -> int:
        """The number of columns that fit the workspace next to the partial sums of forward and the row gradients of backward."""
        parts = self._row_statistics() * cdiv(min(self.m, self.col_step), self.sizes.cols)
        references = cdiv(self.m, self.sizes.cols) if saved.relative else 0
        numbers = self.n * (max(parts, self.call.a.shape[1]) + references)
        left = max(0, self.call.options.workspace_bytes - 4 * numbers)
        return left // (self.n * saved.memory.element_size()) // FULL_TILES * FULL_TILES

    def _row_statistics(self) -> int:
        """How many numbers a tile writes for each of its rows, at least 1."""
        spec = self.spec
        return 1 + (spec.positive == "many") + spec.row_sum + spec.row_entropy + spec.row_sum_sq + 2 * spec.row_top

    def _col_statistics(self) -> int:
        """How many numbers a strip of tiles writes for each of its columns, if it writes any."""
        return 1 + (self.spec.symmetric and self.spec.positive == "many")

    def _macro(self) -> tuple[int, int]:
        """Rows and columns of a macro-tile whose parts take at most half the workspace, a quarter beside saved columns."""
        spec, sizes = self.spec, self.sizes
        both = spec.col_lse or spec.symmetric
        rows, cols = min(self.n, 65536), min(self.m, 65536 if both else 2**20)
        if spec.symmetric:
            rows = cols = min(16384, max(2048, self.n // 6))  # small, so that most of the lower half is not computed
        per_entry = self._row_statistics() / sizes.cols + both * self._col_statistics() / sizes.rows
        most = self.call.options.workspace_bytes / (2 if self.saved is None else 4)
        while 4 * rows * cols * per_entry > most and max(rows, cols) > 256:
            if spec.symmetric:
                rows = cols = rows // 2
            else:
                rows, cols = (rows, cdiv(cols, 2)) if cols >= rows else (cdiv(rows, 2), cols)
        tile = max(sizes.rows, sizes.cols)
        return cdiv(rows, tile) * tile, cdiv(cols, tile) * tile

    def run(self) -> Stats:
        """All macro-tiles; with symmetric scores those on and above the diagonal."""
        spec, out = self.spec, {}
        for stat in wanted_stats(spec):
            if not (stat.name == "num_positives" and spec.positive == "many"):  # many positives are counted elsewhere
                dtype = torch.int64 if stat.integer else None
                out[stat.name] = self.call.empty(*stat.size(self.call.pair.shape), dtype=dtype)
        if spec.has_positive_scores and spec.positive == "one":
            self._positives(out["row_pos"], out["num_positives"])
        if spec.row_picked:
            every = slice(0, self.n)
            self.call.run_positive(
                positive_kernel, every, slice(0, self.m), **self.call.picks(every, row_pos=out["row_picked"])
            )
        for i, j in self._macro_tiles():
            mirrored = spec.symmetric and i != j
            self._tiles(i, j, mirrored)
            self._merge(i, j, mirrored, out)
        if self.saved is not None and not self.saved.relative:
            self.saved.check(self.call, self.peaks, self.needs_repair, out["row_lse"])
        return Stats(**out)

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

    def _switches(self, i: slice, j: slice, mirrored: bool) -> dict[str, int]:
        """STATS and STRIP of the kernels for the macro-tile (i, j)."""
        spec, columns = self.spec, self.spec.col_lse or mirrored
        stats = bit_sum(
            (bit.ROWS, spec.row_lse),
            (bit.COLS, columns),
            (bit.SOFTPLUS, spec.softplus),
            (bit.ROW_SUM, spec.row_sum),
            (bit.MIRROR, mirrored),
            (bit.ENTROPY, spec.row_entropy),
            (bit.SUM_SQ, spec.row_sum_sq),
            (bit.TOP, spec.row_top),
        )
        return {"STATS": stats, "STRIP": self._strip(i, j, columns)}

    def _tiles(self, i: slice, j: slice, mirrored: bool) -> None:
        """The parts of the macro-tile (i, j)."""
        shared: dict[str, Any] = {"row_part": self.row_part, "col_part": self.col_part, "tops": self.tops}
        shared |= {"needs_repair": self.needs_repair} | self._switches(i, j, mirrored)
        e = None if self.saved is None else self.saved.chunk(j)
        more: dict[str, Any] = {"e_desc": None if e is None else tile_descriptor(e[i], self.sizes)}
        if e is not None and self.saved is not None:
            more["reference"] = self.saved.references(j)
        more |= {"peaks": self.peaks, "peak_count": 0 if self.peaks is None else self.peaks.numel()}
        self.call.run(kernels.forward_kernel, i, j, self.sizes, only_if=self.only_if, **more, **shared)
        if not self.spec.token_stats:
            self.call.run(kernels.repair_kernel, i, j, self.sizes, **shared)

    def _positives(self, pos: Tensor, num_positives: Tensor) -> None:
        """The score of each row's only positive, and whether it has one: 0 or 1."""
        # Float32 uses the maximum of each tile instead of an estimate, for its last digits.
        if (self.call.a.element_size() == 2 or self.saved is not None) and not self.spec.token_stats:
            self.peaks = self.call.empty(cdiv(self.n, POSITIVE_ROWS))
        values = {"row_pos": pos, "num_positives": num_positives, "peaks": self.peaks}
        values["needs_repair"] = self.needs_repair
        self.call.run_positive(positive_kernel, slice(0, self.n), slice(0, self.m), **values)

    def _merge(self, i: slice, j: slice, mirrored: bool, out: dict[str, Tensor]) -> None:
        """Fold the parts of the macro-tile (i, j) into the statistics of its rows and columns."""
        sizes, columns = self.sizes, self.spec.col_lse or mirrored
        n, m, block = i.stop - i.start, j.stop - j.start, min(MERGE_BLOCK, sizes.rows, sizes.cols)
        fixed = self._switches(i, j, mirrored) | {
            "ROW_FIRST": i.start not in self.seen_rows,
            "COL_FIRST": columns and j.start not in self.seen_cols,
            "LAST": self.spec.row_top and j.stop == self.m,
        }
        self.seen_rows.add(i.start)
        if columns:
            self.seen_cols.add(j.start)
        merge = self.merges.get(tuple(fixed.values()))
        if merge is None:
            merge = self.merges[tuple(fixed.values())] = self.call.prepare(kernels.merge_kernel, warps=2).put(fixed)
            merge.offer(self.call.fixed).put({"row_part": self.row_part, "tops": self.tops, "only_if": self.only_if})
            merge.put({"R": sizes.rows, "C": sizes.cols, "BLOCK": block})
        merge.put({"col_part": self.col_part if columns else None})
        merge.offer({name: value[i] for name, value in out.items() if name != "col_lse"})
        if columns:
            pos = out["row_pos"][j] if mirrored and "row_pos" in out else None
            merge.put({"col_lse": out["row_lse" if mirrored else "col_lse"][j], "col_pos": pos})
        merge.put({"row_parts": cdiv(m, sizes.cols), "col_parts": cdiv(n, sizes.rows * fixed["STRIP"])})
        merge.offer(self.call.rows(i, sizes)).offer(self.call.cols(j, sizes))
        merge.launch(cdiv(n, block) + (cdiv(m, block) if columns else 0))
