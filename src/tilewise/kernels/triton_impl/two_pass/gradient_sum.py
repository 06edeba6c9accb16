"""Adds up ``G @ features``, the gradient of one side, in float32, and converts it to its final type.

G is the gradient of the loss with respect to the scores, times a factor: see `backward_kernels`. Backward computes it one macro-tile at a time: a large
rectangle of scores that fits the workspace.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from tilewise.kernels.triton_impl.buffers import Buffer
from tilewise.kernels.triton_impl.scores import Scores, cdiv
from tilewise.kernels.triton_impl.two_pass.backward_kernels import finish_kernel
from tilewise.kernels.triton_impl.two_pass.row_product import row_product

FINISH_ROWS = 16  # rows of one program of `finish_kernel`


class GradientSum:
    """The gradient of the features of one side.

    Args:
        scores: the scores.
        name: of the gradient.
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
        scores: Scores,
        name: str,
        rows: int,
        dtype: torch.dtype,
        *,
        whole: bool,
        once: bool,
        dot: bool,
        block: int,
        factor: Buffer | None = None,
        out: Buffer | None = None,
    ) -> None:
        self.scores, self.whole, self.factor, self.width = scores, whole, factor, scores.d
        # The gradient itself is the accumulator where its type allows. Otherwise there is a float32 accumulator.
        in_place = dtype == torch.float32 or (once and factor is None)
        size = rows if whole else min(rows, block)
        self.out = out if in_place and out is not None else scores.empty(name, rows, self.width, dtype=dtype)
        self.total = None if in_place else scores.empty(f"sum of {name}", size, self.width, dtype=torch.float32)
        # Parts of the scale's gradient, one for each program of `finish`
        self.dots = scores.empty(f"dots of {name}", cdiv(rows, FINISH_ROWS)) if dot else None

    def add(self, i: slice, left: Buffer, right: Buffer, *, first: bool) -> None:
        """total[i] += left @ right; ``first``: these rows have no sum yet."""
        if self.scores.options.batch_invariant:
            row_product(self.scores, self._accumulator(i), left, right, first)
        else:
            self.scores.program.product(self._accumulator(i), left, right, add=not first)

    def scale_rows(self, i: slice, row_factor: Buffer) -> None:
        """total[i] *= row_factor, a number for each row."""
        self.scores.program.call(scale_rows_, self._accumulator(i), row_factor)

    @property
    def sums(self) -> Buffer:
        """The accumulator."""
        return self.out if self.total is None else self.total

    def _accumulator(self, i: slice) -> Buffer:
        """The rows i of the accumulator."""
        if self.total is not None and not self.whole:
            return self.total[: i.stop - i.start]
        return self.sums if i.stop - i.start == len(self.sums) else self.sums[i]

    def finish(self, i: slice, features: Buffer) -> None:
        """The final values of the rows ``i``, and their part of the scale's gradient."""
        write = self.factor is not None or self.total is not None
        if not write and self.dots is None:
            return
        dots = None if self.dots is None else self.dots[i.start // FINISH_ROWS : cdiv(i.stop, FINISH_ROWS)]
        values = finish_arguments(self._accumulator(i), features[i], self.factor, self.out[i] if write else None, dots)
        self.scores.launch(finish_kernel, cdiv(i.stop - i.start, FINISH_ROWS), **values)


def finish_arguments(total: Any, features: Any, factor: Any, out: Any, dots: Any) -> dict[str, Any]:
    """Of `finish_kernel`: out = factor * total, and for each program a part of the sum of total * features."""
    rows, d = total.shape
    values: dict[str, Any] = {"total": total, "factor": factor, "out": out, "dots": dots, "rows": rows, "D": d}
    values |= {"features": None if dots is None else features, "stride": features.stride(0)}
    return values | {"BLOCK": FINISH_ROWS, "WIDTH": min(256, triton.next_power_of_2(d))}


def scale_rows_(target: Tensor, row_factor: Tensor) -> None:
    """Multiply each row by its own number."""
    target.mul_(row_factor[:, None])
