"""The gradient of one side: products with G, added up in float32 and converted to their final type."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor

from tilewise.kernels.triton_impl.launch.call import Call, cdiv
from tilewise.kernels.triton_impl.two_pass.backward_kernels import finish_kernel
from tilewise.kernels.triton_impl.two_pass.products import product
from tilewise.kernels.triton_impl.two_pass.row_product import row_product

FINISH_ROWS = 16  # rows of one program of `finish_kernel`


class Sum:
    """The gradient of one side: products with G, added up and converted to their final type.

    ``whole``: the rows of all macro-tiles are accumulated at once; otherwise one block of rows after another.
    ``once``: each row has one macro-tile only, so its product is final and needs no float32 accumulator.
    ``dot``: the gradient of the scale is computed from this side.
    ``block``: the number of rows of a block.
    ``factor``: is multiplied at the end, or None.
    ``out``: memory in which the gradient may be written.
    """

    def __init__(
        self,
        call: Call,
        rows: int,
        dtype: torch.dtype,
        *,
        whole: bool,
        once: bool,
        dot: bool,
        block: int,
        factor: Tensor | None = None,
        out: Tensor | None = None,
    ) -> None:
        self.call, self.dtype, self.whole, self.dot, self.factor = call, dtype, whole, dot, factor
        self.width = call.a.shape[1]
        in_place = dtype == torch.float32 or (once and factor is None)
        held = rows if whole else min(rows, block)
        self.out = out if in_place else None
        if self.out is None and (in_place or not whole):
            self.out = call.empty(rows, self.width, dtype=dtype)
        self.total = None if in_place else call.empty(held, self.width, dtype=torch.float32)
        self.started: set[int] = set()
        self.dots: list[Tensor] = []

    def add(self, i: slice, left: Tensor, right: Tensor) -> None:
        """total[i] += left @ right."""
        first = i.start not in self.started
        self.started.add(i.start)
        if self.call.options.batch_invariant:
            row_product(self.call, self._held(i), left, right, first)
        else:
            self._do(product, i, left, right, first)

    def times(self, i: slice, each: Tensor) -> None:
        """total[i] *= each, a number for every row."""
        self._do(rows_times, i, each, each, True)

    def _do(self, run: Callable[[Tensor, Tensor, Tensor, bool], None], i: slice, *operands: Any) -> None:
        """Run it on the sums of the rows i; recorded, if the call is."""
        target = self._held(i)
        run(target, *operands)
        if self.call.recording is not None:
            self.call.recording.multiplied(run, target, *operands)

    def _held(self, i: slice) -> Tensor:
        """Where the rows i are added up."""
        held = self.out if self.total is None else self.total
        assert held is not None
        return held[: i.stop - i.start] if self.total is not None and not self.whole else held[i]

    def finish(self, i: slice, features: Tensor) -> None:
        """The final values of the rows ``i``, and their part of the scale's gradient."""
        if self.out is None:
            self.out = self.call.empty(i.stop, self.width, dtype=self.dtype)
        write = self.factor is not None or self.total is not None
        if not write and not self.dot:
            return
        dots = self.call.empty(cdiv(i.stop - i.start, FINISH_ROWS)) if self.dot else None
        out = self.out[i] if write else None
        finish(self.call, self._held(i), features[i], self.factor, out, dots)
        if dots is not None:
            self.dots.append(dots)
        if self.whole:
            self.total = None


def finish(
    call: Call, total: Tensor, features: Tensor, factor: Tensor | None, out: Tensor | None, dots: Tensor | None
) -> None:
    """Launch `finish_kernel`: out = factor * total, and parts of the sum of total * features."""
    rows, d = total.shape
    values: dict[str, Any] = {"total": total, "factor": factor, "out": out, "dots": dots, "rows": rows, "D": d}
    values |= {"features": None if dots is None else features, "stride": features.stride(0)}
    values |= {"BLOCK": FINISH_ROWS, "WIDTH": min(256, triton.next_power_of_2(d))}
    call.prepare(finish_kernel).put(values).launch(cdiv(rows, FINISH_ROWS))


def rows_times(target: Tensor, each: Tensor, _: Tensor, __: bool) -> None:
    """Multiply every row of target by its own number; has the arguments of `product`."""
    target.mul_(each[:, None])
