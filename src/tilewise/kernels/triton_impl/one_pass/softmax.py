"""The loss of a softmax and its exponentials E, a block of rows after another."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from tilewise.kernels.scalar_loss import saved_dtype
from tilewise.kernels.spec import Grads, Needs, RowWeights
from tilewise.kernels.triton_impl.launch.call import Call, cdiv, pieces, tile_descriptor, vector
from tilewise.kernels.triton_impl.one_pass import softmax_kernels
from tilewise.kernels.triton_impl.one_pass.exponentials import Exponentials, one_block, row_width
from tilewise.kernels.triton_impl.one_pass.products import Products, sum_parts
from tilewise.kernels.triton_impl.two_pass import positive_kernels

START_BLOCK = 1024
ROWS_BLOCK = 32  # rows of one program of `rows_kernel`
MANY_PARTS = 64
WIDTH = 128


class Softmax:
    """The loss of a softmax and E, a block of rows after another."""

    def __init__(self, call: Call, weights: RowWeights) -> None:
        self.call, self.pair, self.sizes = call, call.pair, call.gradient_sizes
        self.n, self.m, self.d = call.a.shape[0], call.b.shape[0], call.a.shape[1]
        self.row_step = self._blocks()
        self.col_tiles = cdiv(self.m, self.sizes.cols)
        self.all_cols = slice(0, self.m)
        own, hits = call.empty(self.n), call.empty(self.n)
        call.run_positive(
            positive_kernels.positive_kernel,
            slice(0, self.n),
            self.all_cols,
            row_pos=own,
            num_positives=hits,
            peaks=None,
        )
        self.needs_repair = call.empty(1, dtype=torch.int32)
        rows = {"num_positives": hits, "weight": vector(weights.full(call.pair)), "square": vector(weights.square)}
        rows |= {"own_at": call.empty(self.n), "shift": call.empty(self.n)}
        values: dict[str, Any] = {
            "own": own,
            "row_shift": call.by_row["row_shift"],
            "needs_repair": self.needs_repair,
            "n": self.n,
        }
        start = call.prepare(softmax_kernels.start_kernel, 4, 2, ())
        start.put(rows).put(values).put({"BLOCK": START_BLOCK}).launch(cdiv(self.n, START_BLOCK))
        call.by_row |= rows
        call.row_cuts.clear()
        self.losses: list[Tensor] = []

    def _blocks(self) -> int:
        """Rows of a block: E, the scaled rows and the partial sums fit the workspace, one row of tiles at the least."""
        budget, item, tile = self.call.options.workspace_bytes, self.pair.a.element_size(), self.sizes.rows
        if one_block(self.pair.shape, budget):
            return cdiv(self.n, tile) * tile
        row = self.m * item + 4 * cdiv(self.m, self.sizes.cols) + self.d * item
        fits = max(tile, budget // row // tile * tile)
        return min(fits, cdiv(cdiv(self.n, cdiv(self.n, fits)), tile) * tile)

    def loss_and_grads(self, needs: Needs) -> tuple[Tensor, Grads]:
        """All blocks, and the products of each before the next takes its memory."""
        call, rows = self.call, min(self.n, self.row_step)
        e_all, row_part = self._memory(rows), call.empty(self.col_tiles * rows)
        products = Products(call, needs, saved_dtype(self.pair.a.dtype))
        for i in pieces(self.n, self.row_step):
            e = e_all[: i.stop - i.start, : self.m]
            scaled = call.empty(len(e), self.d, dtype=self.pair.a.dtype) if needs.b else None
            products.add(self._exponentials(e, row_part, i, scaled), i, scaled)
            del scaled
        del e_all, e, row_part
        return sum_parts(self.losses), products.grads()

    def losses_and_exponentials(self, rows: int) -> tuple[Tensor, Exponentials]:
        """Parts of the loss, and E of all rows, which are one block, in memory for ``rows`` of them."""
        assert self.n <= min(rows, self.row_step)
        e, everything = self._memory(rows), slice(0, self.n)
        made = self._exponentials(e[: self.n, : self.m], self.call.empty(self.col_tiles * self.n), everything)
        return self.losses[0], dataclasses.replace(made, e=e)

    def _memory(self, rows: int) -> Tensor:
        """For E."""
        return self.call.empty(rows, row_width(self.m, self.pair.a.dtype), dtype=self.pair.a.dtype)

    def _exponentials(self, e: Tensor, row_part: Tensor, i: slice, scaled: Tensor | None = None) -> Exponentials:
        """Of the rows i, with E in ``e``; and into ``scaled``, if it is there, scale f_i a_i."""
        call, n = self.call, i.stop - i.start
        desc = tile_descriptor(e, self.sizes)
        shared = {"g_desc": desc, "row_part": row_part, "needs_repair": self.needs_repair}
        gated, maxima = softmax_kernels.GATED.value, softmax_kernels.MAXIMA.value
        for terms in (0, gated + maxima, gated):
            call.run(softmax_kernels.exponent_kernel, i, self.all_cols, self.sizes, TERMS=terms, **shared)
            if terms & maxima:
                again = call.prepare(softmax_kernels.shift_kernel, 4, 2, ())
                again.put(call.rows(i, self.sizes)).put(shared).put({"parts": self.col_tiles})
                again.put({"MANY_PARTS": MANY_PARTS, "BLOCK": ROWS_BLOCK}).launch(cdiv(n, ROWS_BLOCK))
        vectors = {"factor": call.empty(n), "entry": call.empty(n), "column": call.empty(n, dtype=torch.int32)}
        programs = cdiv(n, ROWS_BLOCK)
        self.losses.append(call.empty(programs))
        a = call.rows(i, self.sizes)["a"]
        key = self.d, call.score_bits, call.positive, a.dtype, a.data_ptr() % 16
        last = call.prepare(softmax_kernels.rows_kernel, 4, 2, key)
        last.put(call.fixed).put(call.rows(i, self.sizes)).put(call.cols(self.all_cols, self.sizes)).put(shared)
        last.put({"parts": self.col_tiles, "g": e, "g_stride": e.stride(0), "scaled": scaled}).put(vectors)
        last.put({"loss_part": self.losses[-1], "MANY_PARTS": MANY_PARTS})
        last.put({"ahead": self.pair.row_start + i.start - self.pair.col_start, "WIDTH": WIDTH, "BLOCK": ROWS_BLOCK})
        last.launch(programs)
        return Exponentials(e=e, **vectors)
