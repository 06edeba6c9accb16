"""Gradients of a softmax loss from its exponentials: two products, and a correction for the rounding of positives.

    G_ij = f_i E_ij        dA = scale G B        dB = scale G^T A        dbias_j = sum_i G_ij

E holds exponentials, f_i a factor for each row; G = dL/dx is not formed. `product_kernels` has the equations in full.

The products run in forward, and the gradients are saved; or forward saves E and f, and the products run in backward
(`saves_exponentials`). Saving E suits a large bfloat16 classifier. Its gradient would be saved as float32, twice the
memory of the final gradient. If one block holds all rows, E takes no memory that forward does not use anyway. The
products then include ``grad_output``, so that gradients are still rounded only once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from tilewise.kernels.spec import Needs, PairShape, PairSpec, stat_dtype
from tilewise.kernels.triton_impl.buffers import Buffer
from tilewise.kernels.triton_impl.one_pass import product_kernels
from tilewise.kernels.triton_impl.scores import Scores, cdiv, row_width
from tilewise.kernels.triton_impl.two_pass.macro_tile import ONE_MACRO
from tilewise.kernels.triton_impl.two_pass.rounded_positives import correct_positives
from tilewise.options import TileOptions

FINISH_BLOCK, FINISH_WIDTH = 8, 256  # rows and features of `finish_rows_kernel`; four times as many spill registers
BIAS_ROWS, BIAS_COLS = 32, 128  # rows and columns of `bias_kernel`


class Exponentials(NamedTuple):
    """E, f and the entries of the positives, for a block of rows: G_ij = factor_i E_ij.

    The positive's entry of a row, E_ij with j its positive, is also kept unrounded: it may be most of the gradient.
    Tensors may have more rows than the block has.
    """

    e: Buffer  # (n or more, `row_width` or more), in the type of the features; columns from m on are undefined
    factor: Buffer  # (n or more,), in the type of the statistics: f_i
    entry: Buffer  # (n or more,), in the type of the statistics: the positive's entry
    column: Buffer  # (n or more,), int32: the column of the positive; -1 in a row without one

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

    def __init__(self, scores: Scores, needs: Needs, dtype: torch.dtype) -> None:
        self.scores, self.needs, self.dtype = scores, needs, dtype
        n, m, d = scores.n, scores.m, scores.d
        self.grad_a = scores.empty("dA", n, d, dtype=dtype) if needs.a else None
        self.grad_b = scores.empty("dB", m, d, dtype=dtype) if needs.b else None
        self.bias = scores.empty("dbias", m) if needs.bias else None
        # Parts of the scale's gradient, one for each program of `finish_rows_kernel`
        self.dots = scores.empty("dots", cdiv(n, FINISH_BLOCK)) if needs.scale else None

    def add(self, block: Exponentials, i: slice) -> None:
        """Compute dA of the rows i from their E and f, and add their terms to the other gradients."""
        scores, a, first = self.scores, self.scores.a[i], i.start == 0
        scaled = scores.empty("f a", *a.shape, dtype=a.dtype) if self.needs.b else None
        self._rows(block, i, scaled)
        if self.bias is not None:
            self._bias(block, self.bias, first=first)
        if scaled is not None and self.grad_b is not None:
            scores.program.product(self.grad_b, block.e.T, scaled, add=not first)
            if block.rounded:
                given = {"a": a, "scaled": scaled, "factor": block.factor, "entry": block.entry}
                column = scores.empty("sorted column", len(a), dtype=block.column.dtype)
                order = scores.empty("order", len(a), dtype=torch.int64)
                scores.program.call(sort_stably, column, order, block.column)
                correct_positives(scores, self.grad_b, (column, order), **given, scale=scores.scale)

    def grads(self) -> tuple[Buffer | None, ...]:
        """The gradients in the order of `Needs`, after all rows were added; that of the scale in parts."""
        return self.grad_a, self.grad_b, self.dots, self.bias

    def _rows(self, block: Exponentials, i: slice, scaled: Buffer | None) -> None:
        """dA of the rows i, and their part of the scale's gradient. Writes scale f_i a_i to ``scaled``, if given."""
        scores, a, out = self.scores, self.scores.a[i], None if self.grad_a is None else self.grad_a[i]
        dots = None if self.dots is None else self.dots[i.start // FINISH_BLOCK : cdiv(i.stop, FINISH_BLOCK)]
        total = out
        if out is None and dots is None:
            if scaled is None:
                return
        else:
            if total is None or total.dtype != torch.float32:
                total = scores.empty("dA in float32", len(a), scores.d, dtype=torch.float32)
            scores.program.product(total, block.e, scores.b)
        values: dict[str, Any] = {"a": a, "n": len(a), "total": total, "out": out, "scaled": scaled, "dots": dots}
        values |= {"factor": block.factor, "BLOCK": FINISH_BLOCK}
        values |= {"WIDTH": min(FINISH_WIDTH, triton.next_power_of_2(scores.d))}
        if block.rounded:
            values |= {"entry": block.entry, "column": block.column, "b": scores.b}
        scores.launch(product_kernels.finish_rows_kernel, cdiv(len(a), FINISH_BLOCK), scores.fixed, **values)

    def _bias(self, block: Exponentials, out: Buffer, *, first: bool) -> None:
        """Write the terms of these rows to the bias's gradient ``out``, or add them if they are not the first rows."""
        e, factor, m = block.e, block.factor, self.scores.m
        values: dict[str, Any] = {"g": e, "g_stride": e.stride(0), "factor": factor, "out": out, "n": len(e), "m": m}
        values |= {"FIRST": first, "BLOCK": BIAS_ROWS, "WIDTH": BIAS_COLS}
        self.scores.launch(product_kernels.bias_kernel, cdiv(m, BIAS_COLS), **values)
        if block.rounded:
            self.scores.program.call(add_lost, out, block.e, block.column, factor, block.entry)


def add_lost(out: Tensor, e: Tensor, column: Tensor, factor: Tensor, entry: Tensor) -> None:
    """Add what the entries of the positives lost when they were rounded."""
    lost = torch.where(column >= 0, factor * (entry - entry.to(e.dtype)), 0.0)
    out.index_put_((column.clamp(min=0).long(),), lost, accumulate=True)  # torch sorts the indices and uses no atomics


def sort_stably(column: Tensor, order: Tensor, unsorted: Tensor) -> None:
    """Write the sorted numbers to ``column``, and their places to ``order``."""
    torch.sort(unsorted, stable=True, out=(column, order))


def total_of(parts: Tensor) -> Tensor:
    """The sum of all parts, added in float64: ()."""
    return parts.sum(dtype=torch.float64).to(parts.dtype)
