"""The one-pass softmax loss: for one block of rows after another, its losses and its exponentials E."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilewise.kernels.scalar_loss import saved_dtype
from tilewise.kernels.spec import Grads, Needs, RowWeights
from tilewise.kernels.triton_impl.launch.call import Call, cdiv, pieces, row_width, tile_descriptor, vector
from tilewise.kernels.triton_impl.one_pass import softmax_kernels as kernels
from tilewise.kernels.triton_impl.one_pass.products import Exponentials, Products, block_rows
from tilewise.kernels.triton_impl.two_pass.positive_kernels import positive_kernel

START_BLOCK = 1024
ROWS_BLOCK = 32  # rows of one program of `rows_kernel`
MANY_PARTS = 64


class Softmax:
    """The loss of one call. E of a block is used by `Products` before the next block overwrites it."""

    def __init__(self, call: Call, weights: RowWeights) -> None:
        self.call, self.pair, self.sizes = call, call.pair, call.gradient_sizes
        self.n, self.m, self.d = call.a.shape[0], call.b.shape[0], call.a.shape[1]
        self.row_step = self._block_rows()
        self.all_cols, self.col_tiles = slice(0, self.m), cdiv(self.m, self.sizes.cols)
        own, self.needs_repair = call.empty(self.n), call.empty(1, dtype=torch.int32)
        call.by_row["row_shift"] = None  # whole scores
        values: dict[str, Any] = {"row_pos": own, "needs_repair": self.needs_repair}
        call.run_positive(positive_kernel, slice(0, self.n), self.all_cols, **values)
        rows = {"own": own, "weight": vector(weights.full(call.pair)), "square": vector(weights.square)}
        rows |= {"shift": call.empty(self.n)}
        values = {"n": self.n, "BLOCK": START_BLOCK}
        call.prepare(kernels.start_kernel).put(rows).put(values).launch(cdiv(self.n, START_BLOCK))
        call.by_row |= rows
        call.row_cuts.clear()
        self.row_part = call.empty(self.col_tiles * min(self.n, self.row_step))
        self.losses = call.empty(cdiv(self.n, ROWS_BLOCK))  # parts of the loss, one for each program of `rows_kernel`

    def _block_rows(self) -> int:
        """Rows of a block: E, the scaled rows and the partial sums fit the workspace, one row of tiles at the least."""
        tile, fits = self.sizes.rows, block_rows(self.pair.shape, self.call.options.workspace_bytes)
        if fits == self.n:
            return cdiv(self.n, tile) * tile
        fits = max(tile, fits // tile * tile)
        return min(fits, cdiv(cdiv(self.n, cdiv(self.n, fits)), tile) * tile)

    def losses_and_grads(self, needs: Needs) -> tuple[Tensor, Grads]:
        """Parts of the loss, and the gradients, that of the scale in parts."""
        e = self._memory(min(self.n, self.row_step))
        products = Products(self.call, needs, saved_dtype(self.pair.a.dtype))
        for i in pieces(self.n, self.row_step):
            products.add(self._exponentials(e[: i.stop - i.start, : self.m], i), i)  # before the next takes its memory
        return self.losses, products.grads()

    def losses_and_exponentials(self, rows: int) -> tuple[Tensor, Exponentials]:
        """Parts of the loss, and E of all rows, which are one block, in memory for ``rows`` of them."""
        assert self.n <= min(rows, self.row_step)
        e = self._memory(rows)
        made = self._exponentials(e[: self.n, : self.m], slice(0, self.n))
        return self.losses, made._replace(e=e)

    def _memory(self, rows: int) -> Tensor:
        """For E."""
        return self.call.empty(rows, row_width(self.m, self.pair.a.dtype), dtype=self.pair.a.dtype)

    def _exponentials(self, e: Tensor, i: slice) -> Exponentials:
        """Of the rows i, with E in ``e``."""
        call, n = self.call, len(e)
        rows, cols = call.rows(i, self.sizes), call.cols(self.all_cols, self.sizes)
        shared = {"row_part": self.row_part, "needs_repair": self.needs_repair}
        desc, programs = tile_descriptor(e, self.sizes), cdiv(n, ROWS_BLOCK)
        blocks = {"parts": self.col_tiles, "MANY_PARTS": MANY_PARTS, "BLOCK": ROWS_BLOCK}
        repair, maxima = kernels.REPAIR.value, kernels.MAXIMA.value
        for mode in (0, repair + maxima, repair):
            call.run(kernels.exponent_kernel, i, self.all_cols, self.sizes, MODE=mode, g_desc=desc, **shared)
            if mode & maxima:
                call.prepare(kernels.shift_kernel).offer(rows).put(shared).put(blocks).launch(programs)
        made = Exponentials(e, call.empty(n), call.empty(n), call.empty(n, dtype=torch.int32))
        last = call.prepare(kernels.rows_kernel).offer(call.fixed).offer(rows).offer(cols).put(shared).put(blocks)
        last.put({"g": e, "g_stride": e.stride(0), "factor": made.factor, "entry": made.entry, "column": made.column})
        last.put({"loss_part": self.losses[i.start // ROWS_BLOCK :], "ahead": call.ahead(i, self.all_cols)})
        last.launch(programs)
        return made
