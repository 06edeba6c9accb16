"""Gradients of a softmax loss from its exponentials: two products, and a correction for the rounding of positives.

    G_ij = f_i E_ij        dA = scale G B        dB = scale G^T A        dbias_j = sum_i G_ij

E holds exponentials, f_i a factor for each row; G = dL/dx is not formed. `product_kernels` has the equations in full.

The products run in forward, and the gradients are saved; or forward saves E and f, and the products run in backward
(`saves_exponentials`). Saving E suits a large bfloat16 classifier. Its gradient would be saved as float32, twice the
memory of the final gradient. If one block holds all rows, E takes no memory that forward does not use anyway. The
products then include ``grad_output``, so that gradients are still rounded only once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from tilewise.kernels.spec import Grads, Needs, PairShape, PairSpec, stat_dtype
from tilewise.kernels.triton_impl.launch.call import Call, cdiv, row_width
from tilewise.kernels.triton_impl.one_pass import product_kernels
from tilewise.kernels.triton_impl.two_pass.macro_tile import ONE_MACRO
from tilewise.kernels.triton_impl.two_pass.products import product
from tilewise.kernels.triton_impl.two_pass.rounded_positives import correct_positives
from tilewise.options import TileOptions

FINISH_BLOCK, FINISH_WIDTH = 8, 256  # rows and features of `finish_rows_kernel`; four times as many spill registers
BIAS_ROWS, BIAS_COLS = 32, 128  # rows and columns of `bias_kernel`


class Exponentials(NamedTuple):
    """E, f and the entries of the positives, for a block of rows: G_ij = factor_i E_ij.

    The positive's entry of a row, E_ij with j its positive, is also kept unrounded: it may be most of the gradient.
    Tensors may have more rows than the block has.
    """

    e: Tensor  # (n or more, `row_width` or more), in the type of the features; columns from m on are undefined
    factor: Tensor  # (n or more,), in the type of the statistics: f_i
    entry: Tensor  # (n or more,), in the type of the statistics: the positive's entry
    column: Tensor  # (n or more,), int32: the column of the positive; -1 in a row without one

    @property
    def rounded(self) -> bool:
        """Whether E has fewer digits than ``entry``, so that gradients need the correction."""
        return self.e.dtype != self.entry.dtype


def one_block(shape: PairShape, memory: int) -> bool:
    """Whether ``memory`` bytes hold the exponentials of all rows, a copy of their features, and partial sums."""
    row = (shape.cols + shape.width) * shape.dtype.itemsize + shape.cols // 32
    return shape.rows * row <= memory


def block_rows(shape: PairShape, memory: int) -> int:
    """Rows whose exponentials, features and partial sums fit ``memory`` bytes, beside a float32 sum of dB.

    The sum is not counted if two passes would need it too, which is so beyond ONE_MACRO rows and columns.
    """
    if one_block(shape, memory):
        return shape.rows
    if min(shape.rows, shape.cols) <= ONE_MACRO:
        memory -= 4 * shape.cols * shape.width
    row = (shape.cols + shape.width) * shape.dtype.itemsize + shape.cols // 32
    return max(0, min(shape.rows, memory // row))


def saves_exponentials(shape: PairShape, needs: Needs, spec: PairSpec, options: TileOptions) -> bool:
    """Whether forward saves exponentials instead of float32 gradients.

    True if one block holds all rows and exponentials take less memory than the gradients, or a float32 dB takes over a
    quarter of the workspace.
    """
    memory, gradients = options.workspace_bytes, 4 * (shape.rows + shape.cols) * shape.width
    if not needs.b or spec.softplus or shape.dtype != torch.bfloat16:
        return False
    smaller = shape.rows * shape.cols * shape.dtype.itemsize < gradients
    return (smaller or 4 * shape.cols * shape.width > memory // 4) and one_block(shape, memory)


def exponentials_like(shape: PairShape) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Sizes and types of the fields of `Exponentials`."""
    stat = stat_dtype(shape.dtype)
    e = (shape.rows, row_width(shape.cols, shape.dtype)), shape.dtype
    return [e, *(((shape.rows,), dtype) for dtype in (stat, stat, torch.int32))]


class Products:
    """Gradients from E, one block of rows at a time; `product_kernels` has the equations.

    dA and dB have the type ``dtype``. With a half type, all rows must be one block: dB is not accumulated in it.
    """

    def __init__(self, call: Call, needs: Needs, dtype: torch.dtype) -> None:
        self.call, self.needs, self.dtype = call, needs, dtype
        self.n, self.m, self.d = call.a.shape[0], call.b.shape[0], call.a.shape[1]
        self.grad_a = call.empty(self.n, self.d, dtype=dtype) if needs.a else None
        self.grad_b: Tensor | None = None
        self.bias = call.empty(self.m) if needs.bias else None
        # Parts of the scale's gradient, one for each program of `finish_rows_kernel`
        self.dots = call.empty(cdiv(self.n, FINISH_BLOCK)) if needs.scale else None

    def add(self, block: Exponentials, i: slice) -> None:
        """Compute dA of the rows i from their E and f, and add their terms to the other gradients."""
        call, a = self.call, self.call.a[i]
        scaled = call.empty(*a.shape, dtype=a.dtype) if self.needs.b else None
        self._rows(block, i, scaled)
        if self.bias is not None:
            self._bias(block, self.bias, first=i.start == 0)
        if scaled is not None:
            if self.grad_b is None:
                self.grad_b = call.empty(self.m, self.d, dtype=self.dtype)
            call.step(product, self.grad_b, block.e.T, scaled, i.start == 0)
            if block.rounded:
                given = {"a": a, "scaled": scaled, "factor": block.factor, "entry": block.entry}
                column, order = (call.empty(len(a), dtype=dtype) for dtype in (block.column.dtype, torch.int64))
                call.step(sort_stably, column, block.column, order)
                correct_positives(call, self.grad_b, (column, order), **given, scale=call.pair.scale)

    def grads(self) -> Grads:
        """The gradients, after all rows were added; that of the scale in parts."""
        return Grads(a=self.grad_a, b=self.grad_b, scale=self.dots, bias=self.bias)

    def _rows(self, block: Exponentials, i: slice, scaled: Tensor | None) -> None:
        """dA of the rows i, and their part of the scale's gradient. Writes scale f_i a_i to ``scaled``, if given."""
        call, a, out = self.call, self.call.a[i], None if self.grad_a is None else self.grad_a[i]
        dots = None if self.dots is None else self.dots[i.start // FINISH_BLOCK :]
        total = out
        if out is None and dots is None:
            if scaled is None:
                return
        else:
            if total is None or total.dtype != torch.float32:
                total = call.empty(len(a), self.d, dtype=torch.float32)
            call.step(product, total, block.e, call.b)
        finish = call.prepare(product_kernels.finish_rows_kernel).offer(call.fixed)
        finish.put({"a": a, "n": len(a), "total": total, "out": out, "scaled": scaled, "dots": dots})
        finish.put(
            {"factor": block.factor, "BLOCK": FINISH_BLOCK, "WIDTH": min(FINISH_WIDTH, triton.next_power_of_2(self.d))}
        )
        if block.rounded:
            finish.put({"entry": block.entry, "column": block.column, "b": call.b})
        finish.launch(cdiv(len(a), FINISH_BLOCK))

    def _bias(self, block: Exponentials, out: Tensor, *, first: bool) -> None:
        """Write the terms of these rows to the bias's gradient ``out``, or add them if they are not the first rows."""
        self.call.do_not_record()
        e, factor = block.e, block.factor
        values = {"g": e, "g_stride": e.stride(0), "factor": factor, "out": out, "n": len(e), "m": self.m}
        values |= {"FIRST": first, "BLOCK": BIAS_ROWS, "WIDTH": BIAS_COLS}
        self.call.prepare(product_kernels.bias_kernel).put(values).launch(cdiv(self.m, BIAS_COLS))
        if block.rounded:
            lost = torch.where(block.column >= 0, factor * (block.entry - block.entry.to(e.dtype)), 0.0)
            out.index_put_(
                (block.column.clamp(min=0).long(),), lost, accumulate=True
            )  # torch sorts the indices here and uses no atomics


def sort_stably(column: Tensor, unsorted: Tensor, order: Tensor, _: bool) -> None:
    """Write the sorted numbers to ``column``, and their places to ``order``."""
    torch.sort(unsorted, stable=True, out=(column, order))


def total_of(parts: Tensor) -> Tensor:
    """The sum of all parts, added in float64: ()."""
    return parts.sum(dtype=torch.float64).to(parts.dtype)
