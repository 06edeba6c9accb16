"""Gradients of a softmax loss from its exponentials: two products, and a correction for the rounding of positives."""

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
    """Gradients from E, one block of rows at a time. Feature gradients are ``dtype``; a half type needs one block.

    dA_i = scale f_i sum_j E_ij b_j,   dB_j = sum_i E_ij (scale f_i a_i),   dbias_j = sum_i f_i E_ij

    Each of them is corrected for the rounding of the positives' entries of E and of their rows.
    """

    def __init__(self, call: Call, needs: Needs, dtype: torch.dtype) -> None:
        self.call, self.needs, self.dtype = call, needs, dtype
        self.n, self.m, self.d = call.a.shape[0], call.b.shape[0], call.a.shape[1]
        self.grad_a = call.empty(self.n, self.d, dtype=dtype) if needs.a else None
        self.grad_b: Tensor | None = None
        self.bias = call.empty(self.m) if needs.bias else None
        self.dots: list[Tensor] = []

    def add(self, held: Exponentials, i: slice, scaled: Tensor | None = None) -> None:
        """Add the rows i, of which E, f_i, and possibly scale f_i a_i are given."""
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
        """The gradients, after all rows were added."""
        scale = sum_parts(self.dots) if self.needs.scale else None
        return Grads(a=self.grad_a, b=self.grad_b, scale=scale, bias=self.bias)

    def _rows(self, held: Exponentials, i: slice, scaled: Tensor | None) -> None:
        """The gradients of the rows i, their part of the scale's, and scale f_i a_i into ``scaled``, if given."""
        call, rows, out = self.call, i.stop - i.start, None if self.grad_a is None else self.grad_a[i]
        in_place = out is not None and out.dtype == torch.float32
        total = out if in_place else call.empty(rows, self.d, dtype=torch.float32)
        assert total is not None
        product(total, held.e, call.b, True)
        a, programs = call.a[i], cdiv(rows, FINISH_BLOCK)
        dots = call.empty(programs) if self.needs.scale else None
        if dots is not None:
            self.dots.append(dots)
        values: dict[str, Any] = {"total": total, "out": out, "scaled": scaled, "dots": dots}
        values |= {"a": a, "a_stride": a.stride(0), "b_stride": call.b.stride(0), "factor": held.factor}
        if held.rounded:
            values |= {"entry": held.entry, "column": held.column, "b": call.b}
        values |= {"scale": call.pair.scale, "n": rows, "D": self.d, "BLOCK": FINISH_BLOCK}
        values["WIDTH"] = min(FINISH_WIDTH, triton.next_power_of_2(self.d))
        call.prepare(product_kernels.finish_rows_kernel).put(values).launch(programs)

    def _positives(self, held: Exponentials, a: Tensor, scaled: Tensor, out: Tensor) -> None:
        """The columns' gradients, corrected where they are the positive of a row."""
        column, order = torch.sort(held.column, stable=True)
        width = min(POSITIVES_WIDTH, triton.next_power_of_2(self.d))
        chunks, runs = cdiv(self.d, width), cdiv(len(a), POSITIVES_RUN)
        eps = 0.0 if out.dtype == torch.float32 else torch.finfo(out.dtype).eps
        values: dict[str, Any] = {"a": a, "scaled": scaled, "column": column, "order": order, "n": len(a)}
        values |= {"factor": held.factor, "entry": held.entry, "scale": self.call.pair.scale}
        values |= {"exacts": self.call.empty(runs, self.d), "helds": self.call.empty(runs, self.d)}
        values |= {"D": self.d, "STRIDE": a.stride(0), "RUN": POSITIVES_RUN, "BLOCK": POSITIVES_BLOCK, "WIDTH": width}
        if runs > 1:
            self.call.prepare(product_kernels.runs_kernel, POSITIVES_WARPS).put(values).launch((runs - 1) * chunks)
        last = self.call.prepare(product_kernels.positives_kernel, POSITIVES_WARPS).put(values)
        last.put({"grad": out, "EPS": eps}).launch(len(a) * chunks)

    def _bias(self, held: Exponentials, out: Tensor, *, first: bool) -> None:
        """Set or add the share of these rows in the gradient of the bias."""
        e, factor = held.e, held.factor
        values = {"g": e, "g_stride": e.stride(0), "factor": factor, "out": out, "n": len(e), "m": self.m}
        prepared = self.call.prepare(product_kernels.bias_kernel).put(values)
        prepared.put({"FIRST": first, "BLOCK": BIAS_ROWS, "WIDTH": BIAS_COLS}).launch(cdiv(self.m, BIAS_COLS))
        if held.rounded:
            lost = torch.where(held.column >= 0, factor * (held.entry - held.entry.to(e.dtype)), 0.0)
            out.index_put_((held.column.clamp(min=0).long(),), lost, accumulate=True)  # sorts: no atomics


def sum_parts(parts: list[Tensor]) -> Tensor:
    """The sum of many small numbers: ()."""
    whole = parts[0] if len(parts) == 1 else torch.cat(parts)
    return whole.sum(dtype=torch.float64).to(whole.dtype)
