"""Adds up ``G @ features``, the gradient of one side, in float32, and converts it to its final type.

G is the gradient of the loss with respect to the scores. Backward computes it one macro-tile at a time: a large
rectangle of scores that fits the workspace.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from tilewise.kernels.triton_impl.launch.call import Call, cdiv
from tilewise.kernels.triton_impl.two_pass.backward_kernels import finish_kernel
from tilewise.kernels.triton_impl.two_pass.products import product
from tilewise.kernels.triton_impl.two_pass.row_product import row_product

FINISH_ROWS = 16  # rows of one program of `finish_kernel`


class GradientSum:
    """The gradient of the features of one side.

    Args:
        call: the call.
        rows: the number of rows of this side.
        dtype: the type of the gradient.
        whole: whether the accumulator holds all rows, and `finish` is called once. If not, it holds one block of rows,
            and `finish` is called after each block.
        once: whether each row is in one macro-tile only. Its product is then final and needs no float32 accumulator.
        dot: whether the gradient of the scale is computed from this side.
        block: the number of rows of a block.
        factor: multiplies the sum in `finish`; None for 1.
        out: memory for the gradient. Used only where sums are formed in place, without another accumulator.
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
        self.call, self.dtype, self.whole, self.factor = call, dtype, whole, factor
        self.width = call.a.shape[1]
        # The gradient itself is the accumulator where its type allows. Otherwise there is a float32 accumulator, and for
        # a whole side the gradient is allocated in `finish`, after the macro-tiles are freed.
        in_place = dtype == torch.float32 or (once and factor is None)
        size = rows if whole else min(rows, block)
        self.out = out if in_place else None
        if self.out is None and (in_place or not whole):
            self.out = call.empty(rows, self.width, dtype=dtype)
        self.total = None if in_place else call.empty(size, self.width, dtype=torch.float32)
        self.started: set[int] = set()
        # Parts of the scale's gradient, one for each program of `finish`
        self.dots = call.empty(cdiv(rows, FINISH_ROWS)) if dot else None

    def add(self, i: slice, left: Tensor, right: Tensor) -> None:
        """total[i] += left @ right."""
        first = i.start not in self.started
        self.started.add(i.start)
        if self.call.options.batch_invariant:
            row_product(self.call, self._accumulator(i), left, right, first)
        else:
            self.call.step(product, self._accumulator(i), left, right, first)

    def scale_rows(self, i: slice, row_factor: Tensor) -> None:
        """total[i] *= row_factor, a number for each row."""
        self.call.step(scale_rows_, self._accumulator(i), row_factor, row_factor)

    @property
    def sums(self) -> Tensor:
        """The accumulator."""
        sums = self.out if self.total is None else self.total
        assert sums is not None
        return sums

    def _accumulator(self, i: slice) -> Tensor:
        """The rows i of the accumulator."""
        sums = self.sums
        return sums[: i.stop - i.start] if self.total is not None and not self.whole else sums[i]

    def finish(self, i: slice, features: Tensor) -> None:
        """The final values of the rows ``i``, and their part of the scale's gradient."""
        if self.out is None:
            self.out = self.call.empty(i.stop, self.width, dtype=self.dtype)
        write = self.factor is not None or self.total is not None
        if not write and self.dots is None:
            return
        dots = None if self.dots is None else self.dots[i.start // FINISH_ROWS :]
        out = self.out[i] if write else None
        launch_finish(self.call, self._accumulator(i), features[i], self.factor, out, dots)
        if self.whole:
            self.total = None


def launch_finish(
    call: Call, total: Tensor, features: Tensor, factor: Tensor | None, out: Tensor | None, dots: Tensor | None
) -> None:
    """Launch `finish_kernel`: out = factor * total, and for each program a part of the sum of total * features."""
    rows, d = total.shape
    values: dict[str, Any] = {"total": total, "factor": factor, "out": out, "dots": dots, "rows": rows, "D": d}
    values |= {"features": None if dots is None else features, "stride": features.stride(0)}
    values |= {"BLOCK": FINISH_ROWS, "WIDTH": min(256, triton.next_power_of_2(d))}
    call.prepare(finish_kernel).put(values).launch(cdiv(rows, FINISH_ROWS))


def scale_rows_(target: Tensor, row_factor: Tensor, _: Tensor, __: bool) -> None:
    """Multiply each row by its own number."""
    target.mul_(row_factor[:, None])
