"""The two differentiable operators under all losses: `pair_stats` and `pair_loss`. `operators` has what they compute.

Eager calls go through one `torch.autograd.Function`. For a compiler, an exporter or the meta device, the
calls are registered operators instead (`tilewise::pair_stats`, `tilewise::pair_loss` and their ``_backward``), which
return tensors only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.errors import GradientError
from tilewise.kernels.spec import STATISTICS, Grads, Needs, PairSpec, RowWeights, Stats, stat_dtype, wanted_names
from tilewise.ops.budget import with_budget
from tilewise.ops.call import (
    LEAVES,
    NO_KEYS,
    TENSORS,
    Call,
    PairKeys,
    Settings,
    decode,
    encode,
    holds_numbers,
    needs_of,
    operator_schema,
)
from tilewise.ops.route import Route
from tilewise.ops.strategies import route_of
from tilewise.ops.operators import PAIR_LOSS, PAIR_STATS, Operator
from tilewise.options import TileOptions


def pair_stats(
    a: Tensor,
    b: Tensor | None,
    scale: Tensor | float,
    bias: Tensor | None = None,
    *,
    keys: PairKeys = NO_KEYS,
    spec: PairSpec,
    options: TileOptions,
    group_name: str = "",
    must_match: str = "",
) -> Stats:
    """The statistics that ``spec`` requests, differentiable in ``a``, ``b``, ``scale`` and ``bias``.

    Args:
        a: (n, d) rows.
        b: (m, d) columns, or None when they are the rows themselves (``spec.symmetric``).
        scale: 0-d tensor, or a number, which gets no gradient.
        bias: (m,) or None.
        keys: integer keys and shifts.
        group_name: the process group over which the columns are sharded, "" for this process alone.
        must_match: over a group, the loss's own settings (`call_settings`), which must be equal on every rank.
    """
    assert spec.symmetric == (b is None)
    options = with_budget(options, a.device, group_name)
    settings = Settings(spec, options, group_name, needs_of(a, b, scale, bias), must_match=must_match)
    values = _apply(PAIR_STATS, (a, b, scale, bias), keys, None, None, settings)
    if torch.compiler.is_compiling():  # a compiler cannot trace a cached function
        names: Sequence[str] = [stat.name for stat in STATISTICS if stat.wanted(spec)]
    else:
        names = wanted_names(spec)
    return Stats(**dict(zip(names, values, strict=False)))


def pair_loss(
    a: Tensor,
    b: Tensor | None,
    scale: Tensor | float,
    bias: Tensor | None = None,
    *,
    weights: RowWeights,
    keys: PairKeys = NO_KEYS,
    shift: Callable[[], Tensor | None] | None = None,
    spec: PairSpec,
    options: TileOptions,
) -> Tensor:
    """The scalar loss that `RowWeights` describes, differentiable in ``a``, ``b``, ``scale`` and ``bias``.

    Arguments as in `pair_stats`; in this process alone.

    Args:
        shift: makes the shift of each row, which the strategy `small` does not need.
    """
    leaves = a, b, scale, bias
    settings = Settings(spec, with_budget(options, a.device, ""), "", needs_of(*leaves), weights.share, weights.kept)
    way, others = None, (*keys, weights.each, weights.square)
    if holds_numbers(a):
        way = route_of(Call(leaves, others, settings), scalar=True, eager=True)
    if shift is not None and (way is None or way.strategy != "small"):
        values = shift()
        keys = keys._replace(row_shift=values, col_shift=values if spec.col_lse else None)
    return _apply(PAIR_LOSS, leaves, keys, weights.each, weights.square, settings, way)[0]


def _apply(
    operator: Operator,
    leaves: tuple[Any, ...],
    keys: PairKeys,
    weight: Tensor | None,
    square: Tensor | None,
    settings: Settings,
    way: Route | None = None,
) -> Sequence[Any]:
    others = *keys, weight, square
    if way is not None or holds_numbers(leaves[0]):
        a, b, scale, bias = leaves
        number = None if isinstance(scale, Tensor) else scale
        rest = _Rest(operator, others, settings, number, way)
        values: Sequence[Any] = _Eager.apply(a, b, scale if number is None else None, bias, rest)
        return values
    registered = getattr(torch.ops.tilewise, operator.name)
    found: Sequence[Any] = registered(*Call(leaves, others, settings).tensors, encode(settings))
    return found


class _Rest(NamedTuple):
    """A call without its four leaves: one argument of the autograd function instead of ten."""

    operator: Operator
    others: tuple[Tensor | None, ...]
    settings: Settings
    number: float | None  # the scale, if it is no tensor
    way: Route | None  # if it is known


def _nothing_to_do(needs: Sequence[bool], group_name: str, grads: Sequence[Tensor | None]) -> bool:
    """Whether backward can return at once: no gradient is needed, or all incoming gradients are None.

    Over a group every rank takes part in backward, even if its own loss was not used.
    """
    if not any(needs):
        return True
    for grad in grads:  # every step comes here, and `all` of a generator costs a call for each gradient
        if grad is not None:
            return False
    return not group_name


def _in_types(grads: Grads, leaves: Sequence[Any], needs: Needs) -> list[Tensor | None]:
    """The requested gradients, in the order and the dtypes of the leaves."""
    found: list[Tensor | None] = []
    for grad, leaf, need in zip((grads.a, grads.b, grads.scale, grads.bias), leaves, needs, strict=True):
        kept = grad if need else None
        found.append(kept if kept is None or kept.dtype == leaf.dtype else kept.to(leaf.dtype))
    return found


class _Eager(torch.autograd.Function):
    """The operator in eager calls. It avoids torch's dispatcher, which is slower than the products of a small batch."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor | None, scale: Any, bias: Tensor | None, rest: _Rest) -> Any:
        call = Call((a, b, scale if rest.number is None else rest.number, bias), rest.others, rest.settings)
        done = rest.operator.forward(call, eager=True, way=rest.way)
        ctx.set_materialize_grads(False)
        ctx.rest, ctx.once = rest, done.once
        ctx.save_for_backward(a, b, scale, bias, *rest.others, *done.saved)
        if done.constants:
            ctx.mark_non_differentiable(*done.constants)
        return tuple(done.outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        rest: _Rest = ctx.rest
        needs = Needs(*ctx.needs_input_grad[:4])
        if _nothing_to_do(needs, rest.settings.group_name, grads):
            return (None,) * 5
        tensors = ctx.saved_tensors  # read once: checkpointing recomputes them at each access
        a, b, scale, bias = tensors[: len(LEAVES)]
        leaves = a, b, scale if rest.number is None else rest.number, bias
        call = Call(leaves, tensors[len(LEAVES) : len(TENSORS)], rest.settings)
        saved, (once, ctx.once) = tensors[len(TENSORS) :], (ctx.once, None)
        found = None
        # With create_graph a second derivative may follow; the registered operator raises an error there. A compiler of
        # backward passes takes that operator as it is, instead of tracing into kernels.
        if not torch.is_grad_enabled() and holds_numbers(tensors[0]):
            found = rest.operator.backward(call, saved, once, grads, needs, eager=True)
        if found is not None:
            return *_in_types(found, call.leaves, needs), None
        return *_registered_backward(rest.operator, call, [], grads, needs), None


def _registered_backward(
    operator: Operator, call: Call, saved: Sequence[Tensor], grads: Sequence[Tensor | None], needs: Needs
) -> list[Tensor | None]:
    """The gradients of the leaves. Without ``saved`` tensors, forward runs again inside."""
    registered = getattr(torch.ops.tilewise, f"{operator.name}_backward")
    found = registered(*call.tensors, list(saved), list(grads), list(needs), encode(call.settings))
    return [value if need else None for value, need in zip(found, needs, strict=True)]


def _call_of(arguments: Sequence[Any]) -> Call:
    """The call of a registered operator's first arguments."""
    return Call(tuple(arguments[: len(LEAVES)]), tuple(arguments[len(LEAVES) : len(TENSORS)]), decode(arguments[-1]))


def _nothing(call: Call) -> Tensor:
    """What a registered operator returns for a gradient that is not wanted."""
    return call.leaves[0].new_empty(0, dtype=stat_dtype(call.leaves[0].dtype))


def _register(operator: Operator) -> None:
    """Make the operator and its backward known to torch: `torch.ops.tilewise`."""

    def forward(*arguments: Any) -> list[Tensor]:
        done = operator.forward(_call_of(arguments), eager=False)
        return [value.contiguous() for value in (*done.outputs, *done.saved)]  # as the fake promises

    def forward_fake(*arguments: Any) -> list[Tensor]:
        call = _call_of(arguments)
        return [call.leaves[0].new_empty(size, dtype=dtype) for size, dtype in operator.like(call)]

    def backward(*arguments: Any) -> list[Tensor]:
        call, (saved, grads, needs) = _call_of(arguments), arguments[len(TENSORS) : -1]
        if not saved:
            saved = forward(*call.tensors, arguments[-1])
        found = operator.backward(call, saved, None, grads, Needs(*needs), eager=False)
        assert found is not None
        values = _in_types(found, call.leaves, Needs(*needs))
        return [_nothing(call) if value is None else value.contiguous() for value in values]

    def backward_fake(*arguments: Any) -> list[Tensor]:
        call, needs = _call_of(arguments), arguments[-2]
        wanted = zip(call.leaves, needs, strict=True)
        return [leaf.new_empty(leaf.shape) if need and leaf is not None else _nothing(call) for leaf, need in wanted]

    def setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
        ctx.set_materialize_grads(False)
        ctx.settings = inputs[-1]
        ctx.save_for_backward(*inputs[:-1], *output)

    def pull_back(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Any, ...]:
        saved = ctx.saved_tensors
        call, output = _call_of((*saved[: len(TENSORS)], ctx.settings)), saved[len(TENSORS) :]
        count = operator.outputs(call)
        if any(grad is not None for grad in grads[count:]):
            no_second_derivative(ctx)
        coming, needs = list(grads[:count]), Needs(*(bool(need) for need in ctx.needs_input_grad[:4]))
        if _nothing_to_do(needs, call.settings.group_name, coming):
            return (None,) * (len(TENSORS) + 1)
        found = _registered_backward(operator, call, output, coming, needs)
        return *found, *(None,) * (len(TENSORS) + 1 - len(LEAVES))

    made = torch.library.custom_op(f"tilewise::{operator.name}", forward, mutates_args=(), schema=operator_schema())
    made.register_fake(forward_fake)
    made.register_autograd(pull_back, setup_context=setup)
    made = torch.library.custom_op(
        f"tilewise::{operator.name}_backward",
        backward,
        mutates_args=(),
        schema=operator_schema("Tensor[] saved, Tensor?[] grads, bool[] needs, "),
    )
    made.register_fake(backward_fake)
    made.register_autograd(no_second_derivative, setup_context=lambda ctx, inputs, output: None)


def no_second_derivative(ctx: Any, *grads: Any) -> None:
    """Raise `GradientError`: the backward of a backward is not supported."""
    raise GradientError(
        "tilewise losses have first derivatives only, and a second backward ran through a gradient. "
        "Detach the gradient, or use a dense loss for second-order methods"
    )


_register(PAIR_STATS)
_register(PAIR_LOSS)
