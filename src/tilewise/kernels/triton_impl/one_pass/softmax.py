"""The one-pass softmax loss: for one block of rows after another, its losses and its exponentials E."""

from __future__ import annotations

from typing import Any

import torch

from tilewise.kernels.scalar_loss import saved_dtype
from tilewise.kernels.spec import Needs
from tilewise.kernels.triton_impl.buffers import Buffer
from tilewise.kernels.triton_impl.one_pass import softmax_kernels as kernels
from tilewise.kernels.triton_impl.one_pass.products import Exponentials, Products, block_rows
from tilewise.kernels.triton_impl.scores import Scores, cdiv, pieces, row_width, tile_descriptor
from tilewise.kernels.triton_impl.two_pass.positive_kernels import positive_kernel

START_BLOCK = 1024
ROWS_BLOCK = 32  # rows of one program of `rows_kernel`
MANY_PARTS = 64


class Softmax:
    """Writes the steps of one call. E of a block is used by `Products` before the next block overwrites it."""

    def __init__(self, scores: Scores, more: dict[str, Buffer]) -> None:
        self.scores, self.sizes = scores, scores.gradient_sizes
        self.n, self.m = scores.n, scores.m
        self.row_step = self._block_rows()
        self.all_cols, self.col_tiles = slice(0, self.m), cdiv(self.m, self.sizes.cols)
        own, self.needs_repair = scores.empty("own", self.n), scores.empty("needs_repair", 1, dtype=torch.int32)
        scores.by_row["row_shift"] = None  # whole scores
        values: dict[str, Any] = {"row_pos": own, "needs_repair": self.needs_repair}
        scores.positives(positive_kernel, slice(0, self.n), self.all_cols, **values)
        rows: dict[str, Any] = {
            "own": own,
            "weight": more["weight"],
            "square": more.get("square"),
            "shift": scores.empty("shift", self.n),
        }
        values = {"n": self.n, "BLOCK": START_BLOCK}
        scores.launch(kernels.start_kernel, cdiv(self.n, START_BLOCK), **rows, **values)
        scores.by_row |= rows
        self.row_part = scores.empty("row_part", self.col_tiles * min(self.n, self.row_step))
        # Parts of the loss, one for each program of `rows_kernel`
        self.losses = scores.empty("losses", cdiv(self.n, ROWS_BLOCK))

    def _block_rows(self) -> int:
        """Rows of a block: E, the scaled rows and the partial sums fit the workspace, one row of tiles at the least."""
        tile, fits = self.sizes.rows, block_rows(self.scores.shape, self.scores.options.workspace_bytes)
        if fits == self.n:
            return cdiv(self.n, tile) * tile
        fits = max(tile, fits // tile * tile)
        return min(fits, cdiv(cdiv(self.n, cdiv(self.n, fits)), tile) * tile)

    def losses_and_grads(self, needs: Needs) -> tuple[Buffer | None, ...]:
        """Parts of the loss, and the gradients, that of the scale in parts."""
        e = self._memory(min(self.n, self.row_step))
        products = Products(self.scores, needs, saved_dtype(self.scores.dtype))

        def block(i: slice) -> None:
            products.add(self._exponentials(e[: i.stop - i.start, : self.m], i), i)  # before the next takes its memory

        self.scores.program.over(pieces(self.n, self.row_step), block)
        return self.losses, *products.grads()

    def losses_and_exponentials(self, rows: int) -> tuple[Buffer, ...]:
        """Parts of the loss, and E of all rows, which are one block, in memory for ``rows`` of them."""
        assert self.n <= min(rows, self.row_step)
        e = self._memory(rows)
        made = self._exponentials(e[: self.n, : self.m], slice(0, self.n))
        return self.losses, *made._replace(e=e)

    def _memory(self, rows: int) -> Buffer:
        """For E."""
        return self.scores.empty("E", rows, row_width(self.m, self.scores.dtype), dtype=self.scores.dtype)

    def _exponentials(self, e: Buffer, i: slice) -> Exponentials:
        """Of the rows i, with E in ``e``."""
        scores, n = self.scores, len(e)
        rows, cols = scores.rows(i, self.sizes), scores.cols(self.all_cols, self.sizes)
        shared: dict[str, Any] = {"row_part": self.row_part, "needs_repair": self.needs_repair}
        desc, programs = tile_descriptor(e, self.sizes), cdiv(n, ROWS_BLOCK)
        blocks: dict[str, Any] = {"parts": self.col_tiles, "MANY_PARTS": MANY_PARTS, "BLOCK": ROWS_BLOCK}
        repair, maxima = kernels.REPAIR.value, kernels.MAXIMA.value
        for mode in (0, repair + maxima, repair):
            scores.tiles(kernels.exponent_kernel, i, self.all_cols, self.sizes, MODE=mode, g_desc=desc, **shared)
            if mode & maxima:
                scores.launch(kernels.shift_kernel, programs, rows, **shared, **blocks)
        factor, entry = scores.empty("f", n), scores.empty("entry", n)
        made = Exponentials(e, factor, entry, scores.empty("column", n, dtype=torch.int32))
        last: dict[str, Any] = {
            "g": e,
            "g_stride": e.stride(0),
            "factor": factor,
            "entry": entry,
            "column": made.column,
        }
        last |= {
            "loss_part": self.losses[i.start // ROWS_BLOCK : cdiv(i.stop, ROWS_BLOCK)],
            "ahead": scores.ahead(i, self.all_cols),
        }
        scores.launch(kernels.rows_kernel, programs, scores.fixed, rows, cols, **shared, **blocks, **last)
        return made
