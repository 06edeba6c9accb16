"""The strategy `small` of the Triton backend: a scalar loss and its gradients as one program for each kind of call.

    x = a @ b'                             cuBLAS, in float32
    rows_kernel                            losses of rows, and G; for two directions, and for symmetric scores:
    rows_kernel, twice, and both_kernel
    finish_kernel                          the loss
    dA = G @ b, dB = G' @ a                cuBLAS; multiplied by grad_output in backward

A call allocates, above its results: x in float32 and G in the type of the features. `programs` has the steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from tilewise.kernels.backend import Like, SmallKey
from tilewise.kernels.scalar_loss import why_not_small
from tilewise.kernels.spec import Needs, PairShape, PairSpec, stat_dtype
from tilewise.kernels.triton_impl.small.programs import (
    given_values,
    gradient_program,
    is_whole,
    loss_program,
    run_small,
    saved_type,
)
from tilewise.kernels.triton_impl.small.stats import TritonStatsJob, programs_of, why_not_stats
from tilewise.options import TileOptions


class TritonSmall:
    """The capability `small` of the Triton backend."""

    def why_not(self, shape: PairShape, spec: PairSpec, options: TileOptions, *, scalar: bool = True) -> str | None:
        """See `Small`."""
        return why_not_small(shape, spec) if scalar else why_not_stats(shape, spec)

    def block_bytes(self, shape: PairShape, spec: PairSpec) -> int:
        """Scores, and G in the type of the features."""
        return shape.rows * shape.cols * (4 + shape.dtype.itemsize)

    def saved_like(self, shape: PairShape, needs: Needs) -> list[Like]:
        """The gradients, and the factor that they still need, if `saved_type` is wider than the features."""
        stat, saved = stat_dtype(shape.dtype), saved_type(shape.dtype, needs)
        sizes = (
            ((shape.rows, shape.width), saved),
            ((shape.cols, shape.width), saved),
            ((), stat),
            ((shape.cols,), stat),
        )
        found = [like if need else ((0,), stat) for need, like in zip(needs, sizes, strict=True)]
        return [*found, ((0,) if is_whole(shape.dtype, needs) else (), stat)]

    def job(self, key: SmallKey) -> TritonJob | TritonStatsJob:
        """The work for calls of one kind."""
        return TritonJob(key) if key.scalar else TritonStatsJob(key)

    def describe(self, key: SmallKey) -> tuple[str, int]:
        """The program of forward, of statistics also that of backward, and their memory."""
        programs = [loss_program(key)] if key.scalar else programs_of(key)
        return "\n".join(map(str, programs)), max(program.scratch_bytes for program in programs)


class TritonJob:
    """Programs for calls of one kind: see `SmallJob`."""

    def __init__(self, key: SmallKey) -> None:
        self.key, shape, needs = key, key.shape, key.needs
        self.program = loss_program(key)
        self.cols = shape.cols
        sizes = (shape.rows, shape.width) if needs.a else None, (shape.cols, shape.width) if needs.b else None
        # Of a first backward, which may overwrite the saved gradients, and of any other one
        self.gradients = {
            overwrite: gradient_program(sizes, shape.dtype, needs, overwrite=overwrite) for overwrite in (True, False)
        }
        self.in_place = saved_type(shape.dtype, needs) == shape.dtype
        # Of the four gradients and the factor among the outputs, of which the loss is the first; -1 for none
        present = [*needs, not is_whole(shape.dtype, needs)]
        self.places = [1 + sum(present[:place]) if here else -1 for place, here in enumerate(present)]

    def forward(
        self, a: Tensor, b: Tensor | None, scale: Any, bias: Tensor | None, facts: Sequence[Any], share: float
    ) -> tuple[Tensor, Sequence[Any]]:
        """The loss, and what `saved_like` lists."""
        key = self.key
        if key.spec.col_lse:  # the loss is the mean of two directions
            share *= 0.5
        given = given_values(key, a, b, scale, bias, facts)
        given.append(share)
        found: list[Any] = [*run_small(self.program, key, given), None]
        a_place, b_place, scale_place, bias_place, factor_place = self.places
        bias_grad = found[bias_place]
        if key.one_bias and bias_grad is not None:
            bias_grad = (bias_grad / self.cols).expand(self.cols)
        return found[0], (found[a_place], found[b_place], found[scale_place], bias_grad, found[factor_place])

    def backward(self, saved: Sequence[Any], grad_output: Tensor, *, overwrite: bool) -> list[Tensor | None]:
        """The four gradients."""
        a, b, scale, bias, factor = saved
        needs = self.key.needs
        if needs.a or needs.b or needs.scale:
            made = run_small(self.gradients[overwrite], self.key, (a, b, scale, factor, grad_output))
            if needs.scale:
                scale = made.pop()
            if not (overwrite and self.in_place):
                a = made.pop(0) if needs.a else None
                b = made.pop(0) if needs.b else None
        return [a, b, scale, None if bias is None else bias * grad_output]
