"""The strategy `one_pass` of the Triton backend: a scalar loss and its gradients from one pass over the scores.

What a call allocates above inputs and gradients, with w the workspace. Softmax: E of a block of rows, a copy of those
rows and their partial sums (at most w together, one row of tiles at the least). Sigmoid: as the backward of two passes.
Gradients are saved in float32; for a large bfloat16
classifier whose rows are one block, E is saved in their place (`products`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tilewise.kernels.precision import matmul_precision
from tilewise.kernels.scalar_loss import NOT_ONE_SIDED, gradients_like, gradients_of, is_one_sided, saved_gradients
from tilewise.kernels.spec import Grads, GradStats, Needs, Pair, PairShape, PairSpec, RowWeights
from tilewise.kernels.triton_impl.buffers import Buffer
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
from tilewise.kernels.triton_impl.program import Program
from tilewise.kernels.triton_impl.scores import (
    Scores,
    described,
    has_memory,
    known_program,
    on_device,
    run_program,
    unit_of,
    vector,
    without_graph,
)
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
            return gradients(saved, pair, grad_output, needs, options)
        return times(gradients_of(saved, needs, pair.a.shape[0]), grad_output, pair.a.dtype, overwrite)


def loss_and_gradients(
    pair: Pair, weights: RowWeights, needs: Needs, spec: PairSpec, options: TileOptions
) -> tuple[Tensor, Grads]:
    """The loss and its gradients, those of the features in `saved_dtype`."""

    def build(scores: Scores, more: dict[str, Buffer]) -> tuple[Buffer | None, ...]:
        if scores.spec.softplus:
            return Sigmoid(scores, more, needs).losses_and_grads()
        return Softmax(scores, more).losses_and_grads(needs)

    with on_device(pair.a), without_graph(), matmul_precision(options.precision):
        more = weights_of(pair, weights)
        if spec.softplus:
            factors = factors_of(pair, GradStats(row_softplus=more["weight"]), options)
            more |= zip(("g_factor", "product_factor"), factors, strict=True)
        losses, a, b, scale, bias = run_program(("one pass", needs), pair, spec, options, more, build)
        scale = None if scale is None else total_of(scale)
        return total_of(losses), Grads(a=a, b=b, scale=scale, bias=spread(bias, pair.b.shape[0]))


def weights_of(pair: Pair, weights: RowWeights) -> dict[str, Tensor | None]:
    """The weights of all rows as kernels can read them."""
    square = None if weights.square is None else vector(weights.square)
    return {"weight": vector(weights.full(pair)), "square": square}


def exponentials(
    pair: Pair, weights: RowWeights, spec: PairSpec, options: TileOptions, rows: int
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The loss, and the exponentials from which backward computes gradients, with room for ``rows`` rows."""

    def build(scores: Scores, more: dict[str, Buffer]) -> tuple[Buffer, ...]:
        return Softmax(scores, more).losses_and_exponentials(rows)

    with on_device(pair.a), without_graph():
        more = weights_of(pair, weights)
        losses, e, *vectors = run_program(("exponentials", rows), pair, spec, options, more, build)
        missing = rows - pair.a.shape[0]
        return total_of(losses), (e, *(torch.nn.functional.pad(v, (0, missing)) if missing else v for v in vectors))


def gradients(saved: Sequence[Any], pair: Pair, grad_output: Tensor, needs: Needs, options: TileOptions) -> Grads:
    """Two products. ``grad_output`` is part of f_i, so that a gradient is rounded once, after the multiplication."""

    def build(scores: Scores, more: dict[str, Buffer]) -> tuple[Buffer | None, ...]:
        products = Products(scores, needs, scores.dtype)
        block = Exponentials(more["e"][:, : scores.m], more["factor"], more["entry"], more["column"])
        products.add(block, slice(0, scores.n))
        return products.grads()

    with on_device(pair.a), without_graph(), matmul_precision(options.precision):
        e, factor, entry, column = (value[: pair.a.shape[0]] for value in saved)
        more = {"e": e, "factor": factor * grad_output, "entry": entry, "column": column}
        # Keys, bias and soft cap are in E already.
        plain = Pair(a=pair.a, b=pair.b, scale=pair.scale)
        a, b, scale, bias = run_program(("gradients", needs), plain, PairSpec(row_lse=True), options, more, build)
        return Grads(a=a, b=b, scale=None if scale is None else total_of(scale), bias=bias)


def times(grads: Grads, grad_output: Tensor, dtype: torch.dtype, overwrite: bool) -> Grads:
    """The gradients multiplied by ``grad_output``, those of the features in ``dtype``, each rounded once.

    With ``overwrite``, in place where the types are equal.
    """
    device = grad_output.device

    def build(program: Program, given: dict[str, Buffer]) -> list[Buffer | None]:
        kinds = {"a": dtype, "b": dtype, "scale": torch.float32}
        values: dict[str, Any] = {"grad_output": given["grad_output"]}
        for name, kind in kinds.items():
            value = given.get(name)
            out = value
            if value is not None and not (overwrite and value.dtype == kind):
                out = program.scratch(f"{name}_out", value.shape, kind)
            values |= {name: value, f"{name}_out": out}
        sizes = [0 if values[name] is None else values[name].numel() for name in ("a", "b")]
        programs = PROGRAMS_EACH * multiprocessors(device)
        values |= {"a_size": sizes[0], "b_size": sizes[1], "UNIT": unit_of(*sizes), "BLOCK": TIMES_BLOCK}
        values |= {"IN_PLACE": overwrite and dtype == torch.float32, "PROGRAMS": programs}
        program.launch(times_kernel, programs, stages=2, **values)
        return [values[f"{name}_out"] for name in kinds]

    with on_device(grad_output):
        inputs = {"a": grads.a, "b": grads.b, "scale": grads.scale, "grad_output": grad_output}
        program, given = known_program(("times", dtype, overwrite), inputs, device, build)
        a, b, scale = program.run(device, *given) if has_memory(grad_output) else described(program, grad_output)
    return Grads(a=a, b=b, scale=scale, bias=None if grads.bias is None else grads.bias * grad_output)
