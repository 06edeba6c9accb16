"""A scalar loss as one differentiable operator that forms its gradients in forward.

    forward    loss, dA, dB, dscale, dbias       three products
    backward   each of them times what comes in

Nothing is computed for a side that needs no gradient, and a call that needs none at all does not come here. The first
backward multiplies the gradients in place and gives them away; another one through the same graph computes them anew.
"""

# No `from __future__ import annotations` here: the operator's schema is read from the annotations.
from typing import Any, Optional

import torch
from torch import Tensor

from tilewise.kernels import direct
from tilewise.kernels.spec import Grads, Needs, PairSpec, stat_dtype
from tilewise.ops.drop_rows import KeptRows
from tilewise.ops.pair_stats import NO_KEYS, PairKeys, _holds_numbers, _no_second, _pair, _present, without_autocast
from tilewise.ops.plan import decode, encode
from tilewise.options import TileOptions

OptTensor = Optional[Tensor]  # noqa: UP045 - torch.library reads this form only
INPUTS = 13  # of the operator
MULTIPLY_ROWS = 4096  # at a time, where a product of two types makes a copy


def pair_loss(
    a: Tensor,
    b: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    *,
    weight: Tensor,
    square: Tensor | None = None,
    keys: PairKeys = NO_KEYS,
    spec: PairSpec,
    options: TileOptions,
) -> Tensor:
    """sum_i weight_i (lse_i - pos_i) + sum_i square_i lse_i^2, or sum_i weight_i softplus_i; ask `forms_early` before.

    Args:
        a, b: (n, d) rows and (m, d) columns.
        scale: 0-d tensor.
        bias: (m,) or None.
        weight, square: (n,), without gradient; 0 for a row that does not count.
        keys: integer keys and the zeros from which scores are measured.
    """
    needs = _needs(a, b, scale, bias)
    inputs = (
        *(a, b, scale, bias, keys.row_key, keys.col_key, keys.row_skip, keys.col_skip, keys.row_zero),
        *(weight, square, needs, encode(spec, options, "")),
    )
    if _holds_numbers(a):
        loss: Tensor = _Eager.apply(*inputs)
        return loss
    return torch.ops.tilewise.pair_loss(*inputs)[0]


def forms_early(
    a: Tensor,
    b: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    *,
    spec: PairSpec,
    options: TileOptions,
    group_name: str = "",
) -> bool:
    """Whether a scalar loss forms its gradients in forward: what `TileOptions.gradients` says, and if any is needed."""
    if options.gradients == "backward" or group_name or options.filter_tolerance or not direct.serves(spec):
        return False
    if not any(_needs(a, b, scale, bias)) or a.shape[0] == 0 or b.shape[0] == 0 or a.shape[1] == 0:
        return False
    # Exponentials before their sum is known leave the range of float16.
    if a.is_cuda and a.dtype == torch.float16 and not spec.softplus and options.backend != "torch":
        return False
    if options.gradients == "forward":
        return True
    return direct.pays((a.shape[0], b.shape[0], b.shape[1]), a.dtype, a.device.type, spec, options)


def _needs(a: Tensor, b: Tensor, scale: Tensor, bias: Tensor | None) -> list[bool]:
    """Which of the four want a gradient."""
    if not torch.is_grad_enabled():
        return [False, False, False, False]
    return [a.requires_grad, b.requires_grad, scale.requires_grad, bias is not None and bias.requires_grad]


def _compute_loss(
    a: Tensor,
    b: Tensor,
    scale: Tensor,
    bias: OptTensor,
    row_key: OptTensor,
    col_key: OptTensor,
    row_skip: OptTensor,
    col_skip: OptTensor,
    row_zero: OptTensor,
    weight: Tensor,
    square: OptTensor,
    needs: list[bool],
    plan: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    spec, options, _ = decode(plan)
    pair = _pair(a, b, scale, bias, row_key, col_key, row_skip, col_skip, row_zero, None, None)
    weights = direct.RowWeights(each=weight, square=square)
    wanted = Needs(a=needs[0], b=needs[1], scale=needs[2], bias=needs[3])
    with without_autocast(a):
        kept = KeptRows.find(pair, spec)
        if kept is not None:
            pair, weights = kept.of_pair(pair), weights.rows(kept.index)
        if pair.a.shape[0] == 0:
            loss, grads = _nothing(pair.a, pair.b, pair.scale, wanted)
        else:
            loss, grads = direct.direct(pair, weights, wanted, spec, options)
        if kept is not None:
            grads = kept.widen_grads(grads)
    # Fewer rows, or another backend than usual, may have chosen other types than those that were announced.
    held_a, held_b = _held(a, b, plan)
    grads = Grads(
        a=None if grads.a is None else grads.a.to(held_a),
        b=None if grads.b is None else grads.b.to(held_b),
        scale=grads.scale,
        bias=grads.bias,
    )
    return loss, *_present(grads.a, grads.b, grads.scale, grads.bias, like=pair.scale)


def _held(a: Tensor, b: Tensor, plan: str) -> tuple[torch.dtype, torch.dtype]:
    """The types in which the gradients of a and b wait for backward."""
    spec, options, _ = decode(plan)
    return direct.held_dtypes((a.shape[0], b.shape[0], b.shape[1]), a.dtype, a.device.type, spec, options)


def _nothing(a: Tensor, b: Tensor, scale: Tensor, needs: Needs) -> tuple[Tensor, Grads]:
    """Of no rows at all."""
    zero = torch.zeros_like(scale)
    return zero, Grads(
        a=torch.zeros_like(a) if needs.a else None,
        b=torch.zeros_like(b) if needs.b else None,
        scale=zero.clone() if needs.scale else None,
        bias=scale.new_zeros(b.shape[0]) if needs.bias else None,
    )


_pair_loss_op = torch.library.custom_op("tilewise::pair_loss", _compute_loss, mutates_args=())


@_pair_loss_op.register_fake
def _(a, b, scale, bias, row_key, col_key, row_skip, col_skip, row_zero, weight, square, needs, plan):  # type: ignore[no-untyped-def]
    stat = stat_dtype(a.dtype)
    dtypes = *_held(a, b, plan), stat, stat
    shapes = [value.shape if need else (0,) for need, value in zip(needs, (a, b, scale, bias), strict=True)]
    grads = [
        a.new_empty(shape, dtype=dtype if need else stat)
        for need, shape, dtype in zip(needs, shapes, dtypes, strict=True)
    ]
    return a.new_empty((), dtype=stat), *grads


def _compute_grads(
    a: Tensor,
    b: Tensor,
    scale: Tensor,
    bias: OptTensor,
    row_key: OptTensor,
    col_key: OptTensor,
    row_skip: OptTensor,
    col_skip: OptTensor,
    row_zero: OptTensor,
    weight: Tensor,
    square: OptTensor,
    needs: list[bool],
    plan: str,
    upstream: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    keys = row_key, col_key, row_skip, col_skip, row_zero
    grads = _compute_loss(a, b, scale, bias, *keys, weight, square, needs, plan)[1:]
    return tuple(_times(grad, upstream, value) for grad, value in zip(grads, (a, b, scale, bias), strict=True))  # type: ignore[return-value]


_pair_loss_grads_op = torch.library.custom_op("tilewise::pair_loss_grads", _compute_grads, mutates_args=())


@_pair_loss_grads_op.register_fake
def _(a, b, scale, bias, row_key, col_key, row_skip, col_skip, row_zero, weight, square, needs, plan, upstream):  # type: ignore[no-untyped-def]
    empty = a.new_empty(0, dtype=stat_dtype(a.dtype))
    inputs = zip(needs, (a, b, scale, bias), strict=True)
    return tuple(value.new_empty(value.shape) if need else empty.clone() for need, value in inputs)


def _times(grad: Tensor, upstream: Tensor, like: Tensor | None) -> Tensor:
    """grad * upstream in the type of its input, in place where it has that type, and rounded once."""
    if grad.numel() == 0 or like is None or (not grad.is_cuda and upstream.item() == 1.0 and grad.dtype == like.dtype):
        return grad
    if grad.dim() < 2:
        return (grad * upstream).to(like.dtype)
    out = grad if grad.dtype == like.dtype else torch.empty_like(grad, dtype=like.dtype)
    if grad.is_cuda and grad.dtype != torch.float64 and grad.is_contiguous():
        try:
            from tilewise.kernels.triton_impl.direct import multiply
        except ImportError:  # no Triton on this platform
            pass
        else:
            multiply(grad, upstream, out)
            return out
    # Two dimensions against two: one number would be rounded to the type of a half gradient first.
    for start in range(0, grad.shape[0], MULTIPLY_ROWS):
        part = slice(start, start + MULTIPLY_ROWS)
        out[part] = grad[part] * upstream.reshape(1, 1)
    return out


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    ctx.needs, ctx.dtypes = inputs[-2], [value.dtype if isinstance(value, Tensor) else None for value in inputs[:4]]
    ctx.save_for_backward(*output[1:])


def _pull_back(ctx: Any, upstream: Tensor | None, *second: Tensor | None) -> tuple[Any, ...]:
    """Of the registered operator, which a compiler sees."""
    if any(grad is not None for grad in second):
        _no_second(ctx)
    if upstream is None:
        return (None,) * INPUTS
    grads = [
        (grad.to(upstream.dtype) * upstream).to(dtype) if need else None
        for grad, need, dtype in zip(ctx.saved_tensors, ctx.needs, ctx.dtypes, strict=True)
    ]
    return *grads, *(None,) * (INPUTS - 4)


_pair_loss_op.register_autograd(_pull_back, setup_context=_setup)
_pair_loss_grads_op.register_autograd(_no_second, setup_context=lambda ctx, inputs, output: None)


class _Eager(torch.autograd.Function):
    """The same operator without the dispatcher; its gradients are held once."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        loss, *ctx.grads = _compute_loss(*inputs)
        *tensors, ctx.needs, ctx.plan = inputs
        ctx.save_for_backward(*tensors)
        return loss

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor) -> Any:
        (upstream,) = incoming
        saved, grads, ctx.grads = ctx.saved_tensors, ctx.grads, None
        # With create_graph a second derivative may be asked for; the registered operator answers that with an error.
        if grads is None or torch.is_grad_enabled():
            grads = torch.ops.tilewise.pair_loss_grads(*saved, ctx.needs, ctx.plan, upstream)
        else:
            grads = [_times(grad, upstream, value) for grad, value in zip(grads, saved[:4], strict=True)]
        wanted = (
            grad if need and asked else None
            for grad, need, asked in zip(grads, ctx.needs, ctx.needs_input_grad[:4], strict=True)
        )
        return *wanted, *(None,) * (INPUTS - 4)
