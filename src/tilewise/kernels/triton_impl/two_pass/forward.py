"""Forward of the Triton backend: the statistics of all macro-tiles, merged."""

from __future__ import annotations

from typing import Any

import torch

from tilewise.kernels.spec import wanted_stats
from tilewise.kernels.triton_impl import bits as bit
from tilewise.kernels.triton_impl.buffers import Buffer
from tilewise.kernels.triton_impl.scores import POSITIVE_ROWS, Scores, bit_sum, cdiv, pieces, tile_descriptor
from tilewise.kernels.triton_impl.sizes import multiprocessors
from tilewise.kernels.triton_impl.statistics import forward_functions, wanted_parts
from tilewise.kernels.triton_impl.two_pass import forward_kernels as kernels
from tilewise.kernels.triton_impl.two_pass.macro_tile import macro_tile
from tilewise.kernels.triton_impl.two_pass.positive_kernels import positive_kernel
from tilewise.kernels.triton_impl.two_pass.saved import FULL_TILES, SavedColumns, breaks, column_pieces

MERGE_BLOCK = 16  # rows of one program; divides every tile


class Forward:
    """Writes the steps of forward; the arguments are those of `strategy.forward`."""

    def __init__(self, scores: Scores, saved: SavedColumns | None = None, beside_plan: bool = False) -> None:
        self.scores, self.spec, self.sizes = scores, scores.spec, scores.forward_sizes
        self.n, self.m = scores.n, scores.m
        spec = self.spec
        self.saved = saved
        self.row_step, self.col_step = self._macro()
        if saved is not None:
            rows, cols = macro_tile(scores.shape, spec, scores.gradient_sizes, scores.options)
            # Saved columns have macro-tiles of their own, and backward reads them with all rows at once. If the
            # workspace is too small for that, nothing is saved.
            if saved.cols > self.col_step or rows < self.n:
                self.saved = None
            else:
                more = 0 if beside_plan else self._room(saved)
                saved.allocate(max(cols, more), scores.empty)
        rows, cols = min(self.n, self.row_step), min(self.m, self.col_step)
        row_tiles, col_tiles = cdiv(rows, self.sizes.rows), cdiv(cols, self.sizes.cols)
        scores.fixed |= forward_functions(spec)
        self.row_part = scores.empty("row_part", self._row_statistics() * col_tiles * rows)
        self.col_part: Buffer | None = None
        if spec.col_lse or (spec.symmetric and rows < self.n):
            self.col_part = scores.empty("col_part", self._col_statistics() * row_tiles * cols)
        self.tops = scores.empty("tops", row_tiles * col_tiles)
        # `positive_kernel`, where it is launched, runs first and clears this flag.
        cleared = spec.positive == "one" and not spec.softplus
        flag = scores.empty if cleared else scores.zeros
        self.needs_repair = flag("needs_repair", 1, dtype=torch.int32)
        self.peaks: Buffer | None = None

    def _room(self, saved: SavedColumns) -> int:
        """The number of columns that fit the workspace next to the partial sums of forward and the row gradients of backward."""
        parts = self._row_statistics() * cdiv(min(self.m, self.col_step), self.sizes.cols)
        references = cdiv(self.m, self.sizes.cols) if saved.relative else 0
        numbers = self.n * (max(parts, self.scores.d) + references)
        left = max(0, self.scores.options.workspace_bytes - 4 * numbers)
        return left // (self.n * saved.memory.element_size()) // FULL_TILES * FULL_TILES

    def _row_statistics(self) -> int:
        """How many numbers a tile writes for each of its rows, at least 1."""
        more = sum(one.numbers for one in wanted_parts(self.spec))
        return 1 + (self.spec.positive == "many") + self.spec.row_sum + more

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
        most = self.scores.options.workspace_bytes / (2 if self.saved is None else 4)
        while 4 * rows * cols * per_entry > most and max(rows, cols) > 256:
            if spec.symmetric:
                rows = cols = rows // 2
            else:
                rows, cols = (rows, cdiv(cols, 2)) if cols >= rows else (cdiv(rows, 2), cols)
        tile = max(sizes.rows, sizes.cols)
        return cdiv(rows, tile) * tile, cdiv(cols, tile) * tile

    def run(self) -> dict[str, Buffer]:
        """All macro-tiles; with symmetric scores those on and above the diagonal. Returns the statistics."""
        spec, scores, out = self.spec, self.scores, {}
        for stat in wanted_stats(spec):
            if not (stat.name == "num_positives" and spec.positive == "many"):  # many positives are counted elsewhere
                dtype = torch.int64 if stat.integer else None
                shape = scores.shape._replace(picks=0 if scores.pick is None else scores.pick.shape[1])
                out[stat.name] = scores.empty(stat.name, *stat.size(shape), dtype=dtype)
        if spec.has_positive_scores and spec.positive == "one":
            self._positives(out["row_pos"], out["num_positives"])
        if spec.row_picked:
            every = slice(0, self.n)
            picks = scores.picks(every, row_pos=out["row_picked"])
            scores.positives(positive_kernel, every, slice(0, self.m), **picks)
        rows, cols = pieces(self.n, self.row_step), column_pieces(self.m, self.col_step, self.saved)
        over = scores.program.over
        if not spec.symmetric:

            def row(i: slice) -> None:
                first = i.start == 0
                over(cols, lambda j: self._macro_tile(i, j, out, first=(j.start == 0, first)), breaks(self.saved))

            over(rows, row)
        else:
            over(rows, lambda i: self._on_diagonal(i, len(rows) > 1, out))
            scores.program.above_diagonal(rows, lambda i, j: self._macro_tile(i, j, out, mirrored=True))
        if self.saved is not None and not self.saved.relative:
            self.saved.check(scores, self.peaks, self.needs_repair, out["row_lse"])
        return out

    def _on_diagonal(self, i: slice, several: bool, out: dict[str, Buffer]) -> None:
        """The macro-tiles of the rows i with themselves.

        Half of the work on the diagonal is done twice, so these macro-tiles are smaller. They come first, so that the
        statistics of every row exist when the others are added.
        """
        half = cdiv(self.row_step // 2, self.sizes.rows) * self.sizes.rows if several else self.row_step
        parts = [slice(i.start + part.start, i.start + part.stop) for part in pieces(i.stop - i.start, half)]
        for left in parts:
            for right in parts:
                if left.start <= right.start:
                    first = left is right is parts[0], left is parts[0] and left is not right
                    self._macro_tile(left, right, out, first=first, mirrored=left is not right)

    def _macro_tile(
        self,
        i: slice,
        j: slice,
        out: dict[str, Buffer],
        *,
        first: tuple[bool, bool] = (False, False),
        mirrored: bool = False,
    ) -> None:
        """Parts and their sums. ``first``: whether the rows, and the columns, have no statistics yet."""
        self._tiles(i, j, mirrored)
        self._merge(i, j, mirrored, first, out)

    def _strip(self, i: slice, j: slice, columns: bool) -> int:
        """How many row tiles of a macro-tile one program computes in sequence. Their columns must have one shift."""
        rows, cols = cdiv(i.stop - i.start, self.sizes.rows), cdiv(j.stop - j.start, self.sizes.cols)
        programs = multiprocessors(self.scores.device) * self.sizes.programs
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
        )
        return {"STATS": stats, "STRIP": self._strip(i, j, columns)}

    def _tiles(self, i: slice, j: slice, mirrored: bool) -> None:
        """The parts of the macro-tile (i, j)."""
        shared: dict[str, Any] = {"row_part": self.row_part, "col_part": self.col_part, "tops": self.tops}
        shared |= {"needs_repair": self.needs_repair} | self._switches(i, j, mirrored)
        more: dict[str, Any] = {"peaks": self.peaks, "peak_count": 0 if self.peaks is None else self.peaks.numel()}
        e = None if self.saved is None else self.saved.chunk(j)
        if e is not None and self.saved is not None:
            more |= {"e_desc": tile_descriptor(e[i], self.sizes), "reference": self.saved.references(j)}
        self.scores.tiles(kernels.forward_kernel, i, j, self.sizes, **more, **shared)
        if not self.spec.token_stats:
            self.scores.tiles(kernels.repair_kernel, i, j, self.sizes, **shared)

    def _positives(self, pos: Buffer, num_positives: Buffer) -> None:
        """The score of each row's only positive, and whether it has one: 0 or 1."""
        # Float32 uses the maximum of each tile instead of an estimate, for its last digits.
        if (self.scores.dtype.itemsize == 2 or self.saved is not None) and not self.spec.token_stats:
            self.peaks = self.scores.empty("peaks", cdiv(self.n, POSITIVE_ROWS))
        values: dict[str, Any] = {"row_pos": pos, "num_positives": num_positives, "peaks": self.peaks}
        values["needs_repair"] = self.needs_repair
        self.scores.positives(positive_kernel, slice(0, self.n), slice(0, self.m), **values)

    def _merge(self, i: slice, j: slice, mirrored: bool, first: tuple[bool, bool], out: dict[str, Buffer]) -> None:
        """Fold the parts of the macro-tile (i, j) into the statistics of its rows and columns."""
        scores, sizes, columns = self.scores, self.sizes, self.spec.col_lse or mirrored
        n, m, block = i.stop - i.start, j.stop - j.start, min(MERGE_BLOCK, sizes.rows, sizes.cols)
        values: dict[str, Any] = self._switches(i, j, mirrored) | {
            "ROW_FIRST": first[0],
            "COL_FIRST": columns and first[1],
            "LAST": bool(scores.fixed["FOLDS"]) and j.stop == self.m,
        }
        values |= {"row_part": self.row_part, "col_part": self.col_part if columns else None, "tops": self.tops}
        values |= {"R": sizes.rows, "C": sizes.cols, "BLOCK": block}
        values |= {"row_parts": cdiv(m, sizes.cols), "col_parts": cdiv(n, sizes.rows * values["STRIP"])}
        if columns:
            values["col_lse"] = out["row_lse" if mirrored else "col_lse"][j]
            values["col_pos"] = out["row_pos"][j] if mirrored and "row_pos" in out else None
        of_rows = {name: value[i] for name, value in out.items() if name != "col_lse"}
        bundles = scores.fixed, of_rows, scores.rows(i, sizes), scores.cols(j, sizes)
        programs = cdiv(n, block) + (cdiv(m, block) if columns else 0)
        scores.launch(kernels.merge_kernel, programs, *bundles, warps=2, **values)
