"""The strategy `one_pass` of the Triton backend: a scalar loss and its gradients from one pass over the scores.

What a call allocates above inputs and gradients, with w the workspace. Softmax: E of a block of rows, a copy of those
rows and their partial sums (at most w together, one row of tiles at the least). Sigmoid: as the backward of two passes.
Gradients are saved in float32; for a large bfloat16
classifier whose rows are one block, E is saved in their place (`products`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tilewise.kernels.precision import matmul_precision
from tilewise.kernels.scalar_loss import NOT_ONE_SIDED, gradients_like, gradients_of, is_one_sided, saved_gradients
from tilewise.kernels.spec import Grads, GradStats, Needs, Pair, PairShape, PairSpec, RowWeights
from tilewise.kernels.triton_impl.launch.call import Call, on_device, replayed, unit_of, without_graph
from tilewise.kernels.triton_impl.launch.prepared import Prepared
from tilewise.kernels.triton_impl.launch.replay import Recording, allocate, replay_or_record
from tilewise.kernels.triton_impl.one_pass.product_kernels import times_kernel
from tilewise.kernels.triton_impl.one_pass.products import (
    Exponentials,
    Products,
    block_rows,
    exponentials_like,
    saves_exponentials,
    total_of,
)
from tilewise.kernels.triton_impl.one_pass.sigmoid import Sigmoid
from tilewise.kernels.triton_impl.one_pass.softmax import Softmax
from tilewise.kernels.triton_impl.sizes import multiprocessors
from tilewise.kernels.triton_impl.two_pass.backward import factors_of, spread
from tilewise.options import TileOptions

TIMES_BLOCK, PROGRAMS_EACH = 4096, 8  # programs of each multiprocessor


class TritonOnePass:
    """The capability `one_pass` of the Triton backend."""

    def why_not(self, shape: PairShape, spec: PairSpec, options: TileOptions) -> str | None:
        """Why this call cannot take one pass, or None: losses of rows with one positive can."""
        if not is_one_sided(spec):
            return NOT_ONE_SIDED
        if not spec.softplus and shape.dtype == torch.float16:
            return "exponentials without their sum leave the range of float16"
        return None

    def rows_that_fit(self, shape: PairShape, spec: PairSpec, memory: int) -> int:
        """How many rows of E fit the memory. Only a softmax needs E; a sigmoid fits always."""
        return shape.rows if spec.softplus else block_rows(shape, memory)

    def saved_like(
        self, shape: PairShape, needs: Needs, spec: PairSpec, options: TileOptions
    ) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Sizes and types of what forward saves: exponentials or gradients."""
        if saves_exponentials(shape, needs, spec, options):
            return exponentials_like(shape)
        return gradients_like(shape, needs)

    def forward(
        self, pair: Pair, weights: RowWeights, needs: Needs, spec: PairSpec, options: TileOptions, rows: int
    ) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        """The loss, and exponentials or gradients."""
        if saves_exponentials(pair.shape._replace(rows=rows), needs, spec, options):
            return exponentials(pair, weights, spec, options, rows)
        loss, grads = loss_and_gradients(pair, weights, needs, spec, options)
        return loss, saved_gradients(grads, rows)

    def backward(
        self,
        saved: Sequence[Any],
        pair: Pair,
        grad_output: Tensor,
        needs: Needs,
        spec: PairSpec,
        options: TileOptions,
        shape: PairShape,
        *,
        overwrite: bool = False,
    ) -> Grads:
        """Two products, or the saved gradients multiplied by ``grad_output``."""
        if saves_exponentials(shape, needs, spec, options):
            return gradients(Exponentials(*saved), pair, grad_output, needs, options)
        return times(gradients_of(saved, needs, pair.a.shape[0]), grad_output, pair.a.dtype, overwrite)


def loss_and_gradients(
    pair: Pair, weights: RowWeights, needs: Needs, spec: PairSpec, options: TileOptions
) -> tuple[Tensor, Grads]:
    """The loss and its gradients, those of the features in `saved_dtype`."""
    weights = RowWeights(each=weights.full(pair), square=weights.square)

    def run(call: Call) -> tuple[Tensor | None, ...]:
        if spec.softplus:
            losses, grads = Sigmoid(call, weights, needs, factors).losses_and_grads()
        else:
            losses, grads = Softmax(call, weights).losses_and_grads(needs)
        return losses, grads.a, grads.b, grads.scale, grads.bias

    with on_device(pair.a), without_graph(), matmul_precision(options.precision):
        factors: tuple[Tensor | None, Tensor | None] = (None, None)
        if spec.softplus:
            factors = factors_of(pair, GradStats(row_softplus=weights.each), options)
        known = weights.each, weights.square, *factors
        losses, a, b, scale, bias = replayed(("one pass", needs), pair, spec, options, known, run)
        scale = None if scale is None else total_of(scale)
        return total_of(losses), Grads(a=a, b=b, scale=scale, bias=spread(bias, pair.b.shape[0]))


def exponentials(
    pair: Pair, weights: RowWeights, spec: PairSpec, options: TileOptions, rows: int
) -> tuple[Tensor, Exponentials]:
    """The loss, and the exponentials from which backward computes gradients, with room for ``rows`` rows."""
    weights = RowWeights(each=weights.full(pair), square=weights.square)

    def run(call: Call) -> tuple[Tensor, ...]:
        losses, made = Softmax(call, weights).losses_and_exponentials(rows)
        return losses, *made

    with on_device(pair.a), without_graph():
        tensors = weights.each, weights.square
        losses, e, *vectors = replayed(("exponentials", rows), pair, spec, options, tensors, run)
        more = rows - pair.a.shape[0]
        return total_of(losses), Exponentials(
            e, *(torch.nn.functional.pad(v, (0, more)) if more else v for v in vectors)
        )


def gradients(saved: Exponentials, pair: Pair, grad_output: Tensor, needs: Needs, options: TileOptions) -> Grads:
    """Two products. ``grad_output`` is part of f_i, so that a gradient is rounded once, after the multiplication."""
    with on_device(pair.a), without_graph(), matmul_precision(options.precision):
        # Keys, bias and soft cap are in E already.
        call = Call(Pair(a=pair.a, b=pair.b, scale=pair.scale), PairSpec(row_lse=True), options)
        n, m = call.a.shape[0], call.b.shape[0]
        products = Products(call, needs, pair.a.dtype)
        factor = saved.factor[:n] * grad_output
        products.add(Exponentials(saved.e[:n, :m], factor, saved.entry[:n], saved.column[:n]), slice(0, n))
        grads = products.grads()
        return dataclasses.replace(grads, scale=None if grads.scale is None else total_of(grads.scale))


def times(grads: Grads, grad_output: Tensor, dtype: torch.dtype, overwrite: bool) -> Grads:
    """The gradients multiplied by ``grad_output``, those of the features in ``dtype``, each rounded once.

    With ``overwrite``, in place where the types are equal.
    """
    inputs = grads.a, grads.b, grads.scale, grad_output

    def run(recording: Recording | None) -> tuple[Tensor | None, ...]:
        def out(value: Tensor | None, dtype: torch.dtype) -> Tensor | None:
            if value is None or (overwrite and value.dtype == dtype):
                return value
            return allocate(recording, value, value.shape, dtype)

        outs = out(grads.a, dtype), out(grads.b, dtype), out(grads.scale, torch.float32)
        sizes = [0 if value is None else value.numel() for value in inputs[:2]]
        programs = PROGRAMS_EACH * multiprocessors(grad_output.device)
        values: dict[str, Any] = dict(zip(("a", "b", "scale", "grad_output"), inputs, strict=True))
        values |= dict(zip(("a_out", "b_out", "scale_out"), outs, strict=True))
        values |= {"a_size": sizes[0], "b_size": sizes[1], "UNIT": unit_of(*sizes), "BLOCK": TIMES_BLOCK}
        values |= {"IN_PLACE": overwrite and dtype == torch.float32, "PROGRAMS": programs}
        Prepared(times_kernel, grad_output.device, 4, 2, recording).put(values).launch(programs)
        return outs

    with on_device(grad_output):
        a, b, scale = replay_or_record(("times", dtype, overwrite), inputs, run, grad_output.device)
    return Grads(a=a, b=b, scale=scale, bias=None if grads.bias is None else grads.bias * grad_output)
