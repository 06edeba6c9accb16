"""A scalar loss as one differentiable operator that forms its gradients in forward.

    forward    loss, dA, dB, dscale, dbias       three products
    backward   each of them times what comes in

or, where those would take too much memory until backward (`tilewise.kernels.direct.waits`),

    forward    loss, E, f, positives             one product
    backward   dA, dB, dscale, dbias             two, with what comes in as a part of f

Nothing is computed for a side that needs no gradient, and a call that needs none at all does not come here. The first
backward gives away what forward held; another one through the same graph computes it anew.
"""

# No `from __future__ import annotations` here: the operator's schema is read from the annotations.
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor

from tilewise.kernels import direct
from tilewise.kernels.spec import Grads, Needs, Pair, PairSpec, stat_dtype
from tilewise.ops.drop_rows import Asked, KeptRows
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


class _Held(NamedTuple):
    """What forward leaves to backward."""

    grads: Grads | direct.Exponentials  # exponentials of the rows that count only
    kept: KeptRows | None  # of exponentials: which rows those are


def _wanted(needs: list[bool]) -> Needs:
    """By name."""
    return Needs(a=needs[0], b=needs[1], scale=needs[2], bias=needs[3])


def _waits(inputs: tuple[Any, ...]) -> bool:
    """Whether exponentials wait instead of gradients: of the operator's inputs, whatever rows are ignored."""
    a, b, scale, *_, needs, plan = inputs
    spec, options, _ = decode(plan)
    return direct.waits(Pair(a=a, b=b, scale=scale), _wanted(needs), spec, options)


def _loss_and_held(inputs: tuple[Any, ...], rows: int | None = None) -> tuple[Tensor, _Held]:
    """Of the operator's inputs. Exponentials are in memory for ``rows`` rows, or for those that count."""
    *tensors, weight, square, needs, plan = inputs
    spec, options, _ = decode(plan)
    pair = _pair(*tensors, None, None)
    weights, wanted = direct.RowWeights(each=weight, square=square), _wanted(needs)
    with without_autocast(pair.a):
        if _waits(inputs):
            return _loss_and_exponentials(pair, weights, wanted, spec, options, rows)
        kept = KeptRows.find(pair, spec)
        if kept is not None:
            pair, weights = kept.of_pair(pair), weights.rows(kept.index)
        made = direct.direct(pair, weights, wanted, spec, options) if pair.a.shape[0] else _nothing(pair, wanted)
        return made[0], _Held(made[1] if kept is None else kept.widen_grads(made[1]), None)


def _loss_and_exponentials(
    pair: Pair, weights: direct.RowWeights, needs: Needs, spec: PairSpec, options: TileOptions, rows: int | None
) -> tuple[Tensor, _Held]:
    """As above. What is right if all rows count is launched before the host hears whether they do, so that the device
    works meanwhile; if they do not, those kernels return at once."""
    asked, kept = Asked.about(pair, spec), None
    if asked is not None:
        loss, held = direct.exponentials(pair, weights, spec, options, pair.a.shape[0], only_if=asked.all_stay())
        kept = asked.answer()
        if kept is None:
            return loss, _Held(held, None)
        del loss, held
        pair, weights = kept.of_pair(pair), weights.rows(kept.index)
        if pair.a.shape[0] == 0:
            loss, grads = _nothing(pair, needs)
            return loss, _Held(kept.widen_grads(grads), None)
    loss, held = direct.exponentials(pair, weights, spec, options, rows or pair.a.shape[0])
    return loss, _Held(held, kept)


def _nothing(pair: Pair, needs: Needs) -> tuple[Tensor, Grads]:
    """Of no rows at all."""
    zero, held = torch.zeros_like(pair.scale), direct.held_dtype(pair.a.dtype)
    return zero, Grads(
        a=torch.zeros_like(pair.a, dtype=held) if needs.a else None,
        b=torch.zeros_like(pair.b, dtype=held) if needs.b else None,
        scale=zero.clone() if needs.scale else None,
        bias=pair.scale.new_zeros(pair.b.shape[0]) if needs.bias else None,
    )


def _grads_of_held(held: _Held, inputs: tuple[Any, ...], upstream: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients times what comes in, in the types of the inputs."""
    grads, kept = held
    if isinstance(grads, Grads):
        return tuple(
            None if grad is None else _times(grad, upstream, value)
            for grad, value in zip((grads.a, grads.b, grads.scale, grads.bias), inputs, strict=False)
        )
    *tensors, _, _, needs, plan = inputs
    pair = _pair(*tensors, None, None)
    with without_autocast(pair.a):
        pair = pair if kept is None else kept.of_pair(pair)
        made = direct.gradients(grads, pair, upstream, _wanted(needs), decode(plan)[1])
        made = made if kept is None else kept.widen_grads(made)
    return tuple(
        None if grad is None else grad.to(value.dtype)
        for grad, value in zip((made.a, made.b, made.scale, made.bias), inputs, strict=False)
    )


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
    keys = row_key, col_key, row_skip, col_skip, row_zero
    loss, (held, _) = _loss_and_held((a, b, scale, bias, *keys, weight, square, needs, plan), rows=a.shape[0])
    if isinstance(held, direct.Exponentials):
        return loss, held.e, held.factor, held.entry, held.column
    return loss, *_present(held.a, held.b, held.scale, held.bias, like=a)


_pair_loss_op = torch.library.custom_op("tilewise::pair_loss", _compute_loss, mutates_args=())


@_pair_loss_op.register_fake
def _(a, b, scale, bias, row_key, col_key, row_skip, col_skip, row_zero, weight, square, needs, plan):  # type: ignore[no-untyped-def]
    stat, held = stat_dtype(a.dtype), direct.held_dtype(a.dtype)
    values = zip(needs, (a, b, scale, bias), (held, held, stat, stat), strict=True)
    shapes = [(value.shape, dtype) if need else ((0,), stat) for need, value, dtype in values]
    if _waits((a, b, scale, needs, plan)):
        e = (a.shape[0], direct.row_width(b.shape[0], a.dtype)), a.dtype
        shapes = [e, *(((a.shape[0],), dtype) for dtype in (stat, stat, torch.int32))]
    return a.new_empty((), dtype=stat), *(a.new_empty(shape, dtype=dtype) for shape, dtype in shapes)


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
    e: OptTensor,
    factor: OptTensor,
    entry: OptTensor,
    column: OptTensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    inputs = (a, b, scale, bias, row_key, col_key, row_skip, col_skip, row_zero, weight, square, needs, plan)
    if e is None or factor is None or entry is None or column is None:
        _, held = _loss_and_held(inputs)
    else:
        kept = KeptRows.find(_pair(*inputs[:9], None, None), decode(plan)[0])
        held = _Held(direct.Exponentials(e=e, factor=factor, entry=entry, column=column), kept)
    return _present(*_grads_of_held(held, inputs, upstream), like=a)


_pair_loss_grads_op = torch.library.custom_op("tilewise::pair_loss_grads", _compute_grads, mutates_args=())


@_pair_loss_grads_op.register_fake
def _(  # type: ignore[no-untyped-def]
    a, b, scale, bias, row_key, col_key, row_skip, col_skip, row_zero, weight, square, needs, plan, upstream,
    e, factor, entry, column
):  # fmt: skip
    empty = a.new_empty(0, dtype=stat_dtype(a.dtype))
    inputs = zip(needs, (a, b, scale, bias), strict=True)
    return tuple(value.new_empty(value.shape) if need else empty.clone() for need, value in inputs)


def _times(grad: Tensor, upstream: Tensor, like: Tensor) -> Tensor:
    """grad * upstream in the type of its input, in place where it has that type, and rounded once."""
    if grad.numel() == 0 or (not grad.is_cuda and upstream.item() == 1.0 and grad.dtype == like.dtype):
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
    *tensors, ctx.needs, ctx.plan = inputs
    ctx.waits, ctx.dtypes = _waits(inputs), [None if value is None else value.dtype for value in inputs[:4]]
    ctx.save_for_backward(*((*tensors, *output[1:]) if ctx.waits else output[1:]))


def _pull_back(ctx: Any, upstream: Tensor | None, *second: Tensor | None) -> tuple[Any, ...]:
    """Of the registered operator, which a compiler sees."""
    if any(grad is not None for grad in second):
        _no_second(ctx)
    if upstream is None:
        return (None,) * INPUTS
    saved = ctx.saved_tensors
    if ctx.waits:
        tensors, made = saved[:-4], saved[-4:]
        saved = torch.ops.tilewise.pair_loss_grads(*tensors, ctx.needs, ctx.plan, upstream, *made)
    else:
        held = zip(saved, ctx.needs, ctx.dtypes, strict=True)
        saved = [(grad.to(upstream.dtype) * upstream).to(dtype) if need else grad for grad, need, dtype in held]
    grads = (grad if need else None for grad, need in zip(saved, ctx.needs, strict=True))
    return *grads, *(None,) * (INPUTS - 4)


_pair_loss_op.register_autograd(_pull_back, setup_context=_setup)
_pair_loss_grads_op.register_autograd(_no_second, setup_context=lambda ctx, inputs, output: None)


class _Eager(torch.autograd.Function):
    """The same operator without the dispatcher; what waits is held once."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        loss, ctx.held = _loss_and_held(inputs)
        *tensors, ctx.needs, ctx.plan = inputs
        ctx.save_for_backward(*tensors)
        return loss

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor) -> Any:
        (upstream,) = incoming
        inputs = *ctx.saved_tensors, ctx.needs, ctx.plan
        held, ctx.held = ctx.held, None
        # With create_graph a second derivative may be asked for; the registered operator answers that with an error.
        # A compiler of backward passes takes it as it is, instead of looking into kernels.
        if held is None or torch.is_grad_enabled() or not _holds_numbers(upstream):
            grads = torch.ops.tilewise.pair_loss_grads(*inputs, upstream, *(None,) * 4)
        else:
            grads = _grads_of_held(held, inputs, upstream)
        wanted = (
            grad if need and asked else None
            for grad, need, asked in zip(grads, ctx.needs, ctx.needs_input_grad[:4], strict=True)
        )
        return *wanted, *(None,) * (INPUTS - 4)
