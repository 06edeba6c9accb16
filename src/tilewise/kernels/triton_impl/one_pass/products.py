"""Gradients of a softmax loss from its exponentials: two products, and a correction for the rounding of positives.

Exponentials may also be saved instead of gradients. The gradient of a large bfloat16 classifier would be saved as
float32, twice the memory of the final gradient. Where one block holds all rows, `Exponentials` take no memory that the
call has not used already, and the products include ``grad_output``, so that gradients are rounded once, too.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from tilewise.kernels.spec import Grads, Needs, PairShape, PairSpec, stat_dtype
from tilewise.kernels.triton_impl.launch.call import Call, cdiv, row_width
from tilewise.kernels.triton_impl.one_pass import product_kernels
from tilewise.kernels.triton_impl.two_pass.backward import product
from tilewise.options import TileOptions

FINISH_BLOCK, FINISH_WIDTH = 8, 256  # four times as many numbers are too many for the registers
BIAS_ROWS, BIAS_COLS = 32, 128
POSITIVES_BLOCK, POSITIVES_WIDTH, POSITIVES_WARPS = 4, 512, 2
POSITIVES_RUN = 64  # rows of one column that are added up one after another


class Exponentials(NamedTuple):
    """What gradients are made of: G_ij = factor_i E_ij.

    The positive's entry of E is also kept unrounded, since it may be most of the gradient.
    """

    e: Tensor  # (n or more, `row_width` or more), in the type of the features; columns from m on are undefined
    factor: Tensor  # (n or more,), in the type of the statistics
    entry: Tensor  # (n or more,), in the type of the statistics
    column: Tensor  # (n or more,), int32: the column of the entry; -1 in a row without

    @property
    def rounded(self) -> bool:
        """Whether E has fewer digits than the entries."""
        return self.e.dtype != self.entry.dtype


def one_block(shape: PairShape, memory: int) -> bool:
    """Whether ``memory`` bytes hold the exponentials of all rows, a copy of the rows, and partial sums."""
    row = (shape.cols + shape.width) * shape.dtype.itemsize + shape.cols // 32
    return shape.rows * row <= memory


def saves_exponentials(shape: PairShape, needs: Needs, spec: PairSpec, options: TileOptions) -> bool:
    """Whether exponentials are saved instead of gradients."""
    memory = options.workspace_bytes
    if not needs.b or spec.softplus or spec.col_lse or shape.dtype != torch.bfloat16:
        return False
    return 4 * shape.cols * shape.width > memory // 4 and one_block(shape, memory)


def exponentials_like(shape: PairShape) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Sizes and types of the fields of `Exponentials`."""
    stat = stat_dtype(shape.dtype)
    e = (shape.rows, row_width(shape.cols, shape.dtype)), shape.dtype
    return [e, *(((shape.rows,), dtype) for dtype in (stat, stat, torch.int32))]


class Products:
    """Gradients from E, one block of rows at a time. Feature gradients are ``dtype``; a half type needs one block.

    `product_kernels` has the equations.
    """

    def __init__(self, call: Call, needs: Needs, dtype: torch.dtype) -> None:
        self.call, self.needs, self.dtype = call, needs, dtype
        self.n, self.m, self.d = call.a.shape[0], call.b.shape[0], call.a.shape[1]
        self.grad_a = call.empty(self.n, self.d, dtype=dtype) if needs.a else None
        self.grad_b: Tensor | None = None
        self.bias = call.empty(self.m) if needs.bias else None
        self.dots: list[Tensor] = []

    def add(self, held: Exponentials, i: slice) -> None:
        """Add the rows i, of which E and f_i are given."""
        call, a = self.call, self.call.a[i]
        scaled = call.empty(*a.shape, dtype=a.dtype) if self.needs.b else None
        if self.needs.a or self.needs.scale:
            self._rows(held, i, scaled)
        elif scaled is not None:
            torch.mul(a, (held.factor * call.pair.scale)[:, None], out=scaled)
        if self.bias is not None:
            self._bias(held, self.bias, first=i.start == 0)
        if scaled is not None:
            if self.grad_b is None:
                self.grad_b = call.empty(self.m, self.d, dtype=self.dtype)
            product(self.grad_b, held.e.T, scaled, i.start == 0)
            if held.rounded:
                self._positives(held, a, scaled, self.grad_b)

    def grads(self) -> Grads:
        """The gradients, after all rows were added."""
        scale = sum_parts(self.dots) if self.needs.scale else None
        return Grads(a=self.grad_a, b=self.grad_b, scale=scale, bias=self.bias)

    def _rows(self, held: Exponentials, i: slice, scaled: Tensor | None) -> None:
        """The gradients of the rows i, their part of the scale's, and scale f_i a_i into ``scaled``, if given."""
        call, a, out = self.call, self.call.a[i], None if self.grad_a is None else self.grad_a[i]
        total = out
        if total is None or total.dtype != torch.float32:
            total = call.empty(len(a), self.d, dtype=torch.float32)
        product(total, held.e, call.b, True)
        programs = cdiv(len(a), FINISH_BLOCK)
        dots = call.empty(programs) if self.needs.scale else None
        if dots is not None:
            self.dots.append(dots)
        finish = call.prepare(product_kernels.finish_rows_kernel).offer(call.fixed)
        finish.put({"a": a, "n": len(a), "total": total, "out": out, "scaled": scaled, "dots": dots})
        finish.put({"factor": held.factor, "BLOCK": FINISH_BLOCK, "WIDTH": power_of_two(self.d, FINISH_WIDTH)})
        if held.rounded:
            finish.put({"entry": held.entry, "column": held.column, "b": call.b})
        finish.launch(programs)

    def _positives(self, held: Exponentials, a: Tensor, scaled: Tensor, out: Tensor) -> None:
        """The columns' gradients, corrected where they are the positive of a row."""
        call, width = self.call, power_of_two(self.d, POSITIVES_WIDTH)
        column, order = torch.sort(held.column, stable=True)
        chunks, runs = cdiv(self.d, width), cdiv(len(a), POSITIVES_RUN)
        values: dict[str, Any] = {"a": a, "scaled": scaled, "column": column, "order": order, "n": len(a)}
        values |= {"factor": held.factor, "entry": held.entry, "scale": call.pair.scale}
        values |= {"exacts": call.empty(runs, self.d), "helds": call.empty(runs, self.d)}
        values |= {"D": self.d, "STRIDE": a.stride(0), "RUN": POSITIVES_RUN, "BLOCK": POSITIVES_BLOCK, "WIDTH": width}
        if runs > 1:
            call.prepare(product_kernels.runs_kernel, POSITIVES_WARPS).put(values).launch((runs - 1) * chunks)
        values |= {"grad": out, "EPS": 0.0 if out.dtype == torch.float32 else torch.finfo(out.dtype).eps}
        call.prepare(product_kernels.positives_kernel, POSITIVES_WARPS).put(values).launch(len(a) * chunks)

    def _bias(self, held: Exponentials, out: Tensor, *, first: bool) -> None:
        """Set or add the share of these rows in the gradient of the bias."""
        e, factor = held.e, held.factor
        values = {"g": e, "g_stride": e.stride(0), "factor": factor, "out": out, "n": len(e), "m": self.m}
        values |= {"FIRST": first, "BLOCK": BIAS_ROWS, "WIDTH": BIAS_COLS}
        self.call.prepare(product_kernels.bias_kernel).put(values).launch(cdiv(self.m, BIAS_COLS))
        if held.rounded:
            lost = torch.where(held.column >= 0, factor * (held.entry - held.entry.to(e.dtype)), 0.0)
            out.index_put_((held.column.clamp(min=0).long(),), lost, accumulate=True)  # sorts: no atomics


def power_of_two(size: int, most: int) -> int:
    """The size rounded up to a power of two, at most ``most``."""
    return min(most, triton.next_power_of_2(size))


def sum_parts(parts: list[Tensor]) -> Tensor:
    """The sum of many small numbers: ()."""
    whole = parts[0] if len(parts) == 1 else torch.cat(parts)
    return whole.sum(dtype=torch.float64).to(whole.dtype)
