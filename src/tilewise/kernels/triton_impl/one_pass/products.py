"""Gradients of a softmax loss from its exponentials: two products, and what rounding took from the positives."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from tilewise.kernels.spec import Grads, Needs
from tilewise.kernels.triton_impl.launch.call import Call, cdiv
from tilewise.kernels.triton_impl.one_pass import product_kernels
from tilewise.kernels.triton_impl.one_pass.exponentials import Exponentials
from tilewise.kernels.triton_impl.two_pass.backward import product

FINISH_BLOCK, FINISH_WIDTH = 8, 256  # four times as many numbers are too many for the registers
BIAS_ROWS, BIAS_COLS = 32, 128
POSITIVES_BLOCK, POSITIVES_WIDTH, POSITIVES_WARPS = 4, 512, 2
POSITIVES_RUN = 64  # rows of one column that are added up one after another


class Products:
    """Gradients from E, a block of rows after another. Those of the features are ``dtype``; a half type takes one block.

    dA_i = scale f_i sum_j E_ij b_j,   dB_j = sum_i E_ij (scale f_i a_i),   dbias_j = sum_i f_i E_ij

    What rounding did to the positives' entries of E, and to their rows, is made good in each of them.
    """

    def __init__(self, call: Call, needs: Needs, dtype: torch.dtype) -> None:
        self.call, self.needs, self.dtype = call, needs, dtype
        self.n, self.m, self.d = call.a.shape[0], call.b.shape[0], call.a.shape[1]
        self.grad_a = call.empty(self.n, self.d, dtype=dtype) if needs.a else None
        self.grad_b: Tensor | None = None
        self.bias = call.empty(self.m) if needs.bias else None
        self.dots: list[Tensor] = []

    def add(self, held: Exponentials, i: slice, scaled: Tensor | None = None) -> None:
        """The rows i, of which E, f_i, and perhaps scale f_i a_i are known."""
        made, a = scaled is not None, self.call.a[i]
        if self.needs.b and scaled is None:
            scaled = self.call.empty(*a.shape, dtype=a.dtype)
        if self.needs.a or self.needs.scale:
            self._rows(held, i, None if made else scaled)
        elif scaled is not None and not made:
            torch.mul(a, (held.factor * self.call.pair.scale)[:, None], out=scaled)
        if self.bias is not None:
            self._bias(held, self.bias, first=i.start == 0)
        if scaled is not None:
            if self.grad_b is None:
                self.grad_b = self.call.empty(self.m, self.d, dtype=self.dtype)
            product(self.grad_b, held.e.T, scaled, i.start == 0)
            if held.rounded:
                self._positives(held, a, scaled, self.grad_b)

    def grads(self) -> Grads:
        """When all rows were added."""
        scale = sum_parts(self.dots) if self.needs.scale else None
        return Grads(a=self.grad_a, b=self.grad_b, scale=scale, bias=self.bias)

    def _rows(self, held: Exponentials, i: slice, scaled: Tensor | None) -> None:
        """The gradients of the rows i, their part of the scale's, and, where it is asked for, scale f_i a_i."""
        call, rows, out = self.call, i.stop - i.start, None if self.grad_a is None else self.grad_a[i]
        in_place = out is not None and out.dtype == torch.float32
        total = out if in_place else call.empty(rows, self.d, dtype=torch.float32)
        assert total is not None
        product(total, held.e, call.b, True)
        a, programs = call.a[i], cdiv(rows, FINISH_BLOCK)
        dots = call.empty(programs) if self.needs.scale else None
        if dots is not None:
            self.dots.append(dots)
        values: dict[str, Any] = {
            "total": total,
            "out": out,
            "scaled": scaled,
            "factor": held.factor,
            "scale": call.pair.scale,
        }
        values |= {"a": a, "a_stride": a.stride(0), "dots": dots, "n": rows, "D": self.d}
        if held.rounded:
            values |= {"entry": held.entry, "column": held.column, "b": call.b, "b_stride": call.b.stride(0)}
        key = self.d, a.dtype, self.dtype, a.data_ptr() % 16, total.data_ptr() % 16
        last = call.prepare(product_kernels.finish_rows_kernel, 4, 2, key).put(values)
        last.put({"BLOCK": FINISH_BLOCK, "WIDTH": min(FINISH_WIDTH, triton.next_power_of_2(self.d))}).launch(programs)

    def _positives(self, held: Exponentials, a: Tensor, scaled: Tensor, out: Tensor) -> None:
        """The columns' gradients, corrected where they are the positive of a row."""
        column, order = torch.sort(held.column, stable=True)
        width = min(POSITIVES_WIDTH, triton.next_power_of_2(self.d))
        chunks, runs = cdiv(self.d, width), cdiv(len(a), POSITIVES_RUN)
        eps = 0.0 if out.dtype == torch.float32 else torch.finfo(out.dtype).eps
        key = self.d, a.stride(0), a.dtype, out.dtype, a.data_ptr() % 16, out.data_ptr() % 16
        values: dict[str, Any] = {"grad": out, "a": a, "scaled": scaled, "column": column, "order": order}
        values |= {"factor": held.factor, "entry": held.entry, "scale": self.call.pair.scale}
        values |= {"exacts": self.call.empty(runs, self.d), "helds": self.call.empty(runs, self.d)}
        values |= {"n": len(a), "D": self.d, "STRIDE": a.stride(0), "RUN": POSITIVES_RUN}
        values |= {"EPS": eps, "BLOCK": POSITIVES_BLOCK, "WIDTH": width}
        steps = (product_kernels.runs_kernel, runs - 1), (product_kernels.positives_kernel, len(a))
        for kernel, places in steps:
            if places:
                self.call.prepare(kernel, POSITIVES_WARPS, 2, key).put(values).launch(places * chunks)

    def _bias(self, held: Exponentials, out: Tensor, *, first: bool) -> None:
        """The bias's part of these rows, set or added."""
        e, factor = held.e, held.factor
        values = {"g": e, "g_stride": e.stride(0), "factor": factor, "out": out, "n": len(e), "m": self.m}
        prepared = self.call.prepare(product_kernels.bias_kernel, 4, 2, (first, e.dtype)).put(values)
        prepared.put({"FIRST": first, "BLOCK": BIAS_ROWS, "WIDTH": BIAS_COLS}).launch(cdiv(self.m, BIAS_COLS))
        if held.rounded:
            lost = torch.where(held.column >= 0, factor * (held.entry - held.entry.to(e.dtype)), 0.0)
            out.index_put_((held.column.clamp(min=0).long(),), lost, accumulate=True)  # sorts: no atomics


def sum_parts(parts: list[Tensor]) -> Tensor:
    """The sum of many small numbers: ()."""
    whole = parts[0] if len(parts) == 1 else torch.cat(parts)
    return whole.sum(dtype=torch.float64).to(whole.dtype)
