"""The strategy `one_pass` of the Triton backend: a scalar loss and its gradients from one pass over the scores.

What a call allocates above inputs and gradients, with w the workspace. Softmax: E of a block of rows, a copy of those
rows and their partial sums (at most w together, one row of tiles at the least). Sigmoid: as the backward of two passes.
Both directions (`small_batch`): as the backward of two passes. Gradients are saved in float32; for a large bfloat16
classifier whose rows are one block, E is saved in their place (`exponentials`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tilewise.kernels.precision import matmul_precision
from tilewise.kernels.scalar_loss import NOT_ONE_SIDED, gradients_like, gradients_of, is_one_sided, saved_gradients
from tilewise.kernels.spec import Grads, Needs, Pair, PairShape, PairSpec, RowWeights
from tilewise.kernels.triton_impl.launch.call import Call, launch_settings, on_device, tensors_of, unit_of
from tilewise.kernels.triton_impl.launch.prepared import Prepared
from tilewise.kernels.triton_impl.launch.replay import Recording, replay_key, replay_or_record
from tilewise.kernels.triton_impl.one_pass import product_kernels, small_batch
from tilewise.kernels.triton_impl.one_pass.exponentials import (
    Exponentials,
    exponentials_like,
    one_block,
    saves_exponentials,
)
from tilewise.kernels.triton_impl.one_pass.products import Products, sum_parts
from tilewise.kernels.triton_impl.one_pass.sigmoid import Sigmoid
from tilewise.kernels.triton_impl.one_pass.softmax import Softmax
from tilewise.kernels.triton_impl.sizes import multiprocessors
from tilewise.options import TileOptions

MULTIPLY_BLOCK = 4096
BOTH_DIRECTIONS = PairSpec(row_lse=True, col_lse=True, positive="one")


class TritonOnePass:
    """The capability `one_pass` of the Triton backend."""

    def why_not(self, shape: PairShape, spec: PairSpec, options: TileOptions) -> str | None:
        """Losses of rows with at most one positive, and the plain loss of both directions."""
        if spec == BOTH_DIRECTIONS and not shape.has_skips:
            return None if shape.rows == shape.cols else "both directions need as many rows as columns"
        if not is_one_sided(spec):
            return NOT_ONE_SIDED
        if not spec.softplus and shape.dtype == torch.float16:
            return "exponentials without their sum leave the range of float16"
        return None

    def rows_that_fit(self, shape: PairShape, spec: PairSpec, memory: int) -> int:
        """Rows of E; only a softmax of rows keeps it."""
        if spec.softplus or spec.col_lse or one_block(shape, memory):
            return shape.rows
        return max(0, min(shape.rows, memory // ((shape.cols + shape.width) * shape.dtype.itemsize)))

    def saved_like(
        self, shape: PairShape, needs: Needs, spec: PairSpec, options: TileOptions
    ) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Exponentials or gradients."""
        if not spec.col_lse and saves_exponentials(shape, needs, spec, options):
            return exponentials_like(shape)
        return gradients_like(shape, needs)

    def forward(
        self, pair: Pair, weights: RowWeights, needs: Needs, spec: PairSpec, options: TileOptions, rows: int
    ) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        """The loss, and exponentials or gradients."""
        if spec.col_lse:
            assert weights.each is None
            assert weights.square is None
            with on_device(pair.a):
                loss, grads = small_batch.loss_and_gradients(pair, weights.share, needs, spec, options)
            return loss, saved_gradients(grads, rows)
        if saves_exponentials(pair.shape._replace(rows=rows), needs, spec, options):
            loss, made = exponentials(pair, weights, spec, options, rows)
            return loss, (made.e, made.factor, made.entry, made.column)
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
        if not spec.col_lse and saves_exponentials(shape, needs, spec, options):
            e, factor, entry, column = saved
            made = Exponentials(e=e, factor=factor, entry=entry, column=column)
            return gradients(made, pair, grad_output, needs, options)
        grads = gradients_of(saved, needs, pair.a.shape[0])
        if spec.col_lse:
            with on_device(pair.a):
                return small_batch.times(grads, grad_output, pair.a.dtype, pair.b.dtype)
        return Grads(
            a=None if grads.a is None else multiplied(grads.a, grad_output, pair.a.dtype, overwrite),
            b=None if grads.b is None else multiplied(grads.b, grad_output, pair.b.dtype, overwrite),
            scale=None if grads.scale is None else grads.scale * grad_output,
            bias=None if grads.bias is None else grads.bias * grad_output,
        )


def loss_and_gradients(
    pair: Pair, weights: RowWeights, needs: Needs, spec: PairSpec, options: TileOptions
) -> tuple[Tensor, Grads]:
    """The loss and its gradients, those of the features in `saved_dtype`."""
    with on_device(pair.a), torch.no_grad(), matmul_precision(options.precision):
        call = Call.of(pair, spec, options)
        if spec.softplus:
            return Sigmoid(call, weights, needs).loss_and_grads()
        return Softmax(call, weights).loss_and_grads(needs)


def exponentials(
    pair: Pair, weights: RowWeights, spec: PairSpec, options: TileOptions, rows: int
) -> tuple[Tensor, Exponentials]:
    """The loss, and what gradients are made of, with room for ``rows`` rows."""
    weights = RowWeights(each=weights.full(pair), square=weights.square)

    def run(recording: Recording | None) -> tuple[Tensor | None, ...]:
        losses, made = Softmax(Call.of(pair, spec, options, recording), weights).losses_and_exponentials(rows)
        return losses, made.e, made.factor, made.entry, made.column

    with on_device(pair.a), torch.no_grad():
        inputs = [*tensors_of(pair, spec), weights.each, weights.square]
        key = replay_key(("exponentials", rows, *launch_settings(pair, spec, options)), inputs)
        losses, e, *vectors = replay_or_record(key, inputs, run, pair.a.device)
        more = rows - pair.a.shape[0]
        factor, entry, column = (torch.nn.functional.pad(v, (0, more)) for v in vectors) if more else vectors
        return sum_parts([losses]), Exponentials(e=e, factor=factor, entry=entry, column=column)


def gradients(saved: Exponentials, pair: Pair, grad_output: Tensor, needs: Needs, options: TileOptions) -> Grads:
    """Two products. ``grad_output`` is part of f_i, so that a gradient is rounded once, after the multiplication."""
    with on_device(pair.a), torch.no_grad(), matmul_precision(options.precision):
        # Keys, bias and soft cap are in E already.
        plain = Pair(a=pair.a, b=pair.b, scale=pair.scale)
        call = Call.of(plain, PairSpec(row_lse=True), options)
        n, m = call.a.shape[0], call.b.shape[0]
        products = Products(call, needs, pair.a.dtype)
        e, factor = saved.e[:n, :m], saved.factor[:n] * grad_output
        products.add(Exponentials(e=e, factor=factor, entry=saved.entry[:n], column=saved.column[:n]), slice(0, n))
        return products.grads()


def multiplied(values: Tensor, by: Tensor, dtype: torch.dtype, overwrite: bool) -> Tensor:
    """values * by in ``dtype``, rounded once; with ``overwrite``, in place, where a factor of 1 costs nothing."""
    out = values if overwrite and values.dtype == dtype else torch.empty_like(values, dtype=dtype)
    with on_device(values):
        programs, count = 8 * multiprocessors(values.device), values.numel()
        prepared = Prepared(product_kernels.multiply_kernel, values.device, 4, 2)
        prepared.put({"values": values, "out": out, "by": by, "count": count, "UNIT": unit_of(count)})
        prepared.put({"IN_PLACE": out is values, "PROGRAMS": programs, "BLOCK": MULTIPLY_BLOCK}).launch(programs)
    return out
