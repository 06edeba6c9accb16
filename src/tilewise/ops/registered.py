"""The two operators as registered operators of torch (`torch.library`), with their derivatives.

For each of `tilewise::pair_stats` and `tilewise::pair_loss`, with outputs S, incoming gradients g, and the leaves t
(features, scale, bias), there are three operators:

    forward     S
    _backward   t' = sum_k <g_k, dS_k / dt>       linear in g
    _jvp        dS_k = <dS_k / dt, v>             the derivatives along directions v of the leaves; linear in v

The gradient of ``_backward`` with respect to g is ``_jvp`` with the gradient of t' as v, and the gradient of ``_jvp``
with respect to v is ``_backward``. So a gradient can be differentiated with respect to ``grad_output``, any number of
times. Its derivative with respect to t would need second derivatives of S, and raises `GradientError`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tilewise.errors import GradientError
from tilewise.kernels.spec import Grads, Needs, stat_dtype
from tilewise.ops.call import LEAVES, TENSORS, Call, decode, encode, operator_schema
from tilewise.ops.operators import PAIR_LOSS, PAIR_STATS, Operator


def nothing_to_do(needs: Sequence[bool], group_name: str, grads: Sequence[Tensor | None]) -> bool:
    """Whether backward can return at once: no gradient is needed, or all incoming gradients are None.

    Over a group every rank takes part in backward, even if its own loss was not used.
    """
    if not any(needs):
        return True
    for grad in grads:  # every step comes here, and `all` of a generator costs a call for each gradient
        if grad is not None:
            return False
    return not group_name


def in_types(grads: Grads, leaves: Sequence[Any], needs: Needs) -> list[Tensor | None]:
    """The requested gradients, in the order and the dtypes of the leaves."""
    found: list[Tensor | None] = []
    for grad, leaf, need in zip((grads.a, grads.b, grads.scale, grads.bias), leaves, needs, strict=True):
        kept = grad if need else None
        found.append(kept if kept is None or kept.dtype == leaf.dtype else kept.to(leaf.dtype))
    return found


def registered_backward(
    operator: Operator, call: Call, saved: Sequence[Tensor], grads: Sequence[Tensor | None], needs: Needs
) -> list[Tensor | None]:
    """The gradients of the leaves. Without ``saved`` tensors, forward runs again inside."""
    leaves = call.tensors[: len(LEAVES)]
    if torch.is_grad_enabled():  # create_graph. Saved tensors depend on the leaves only, so they need no node.
        leaves = tuple(None if leaf is None else _FirstDerivativeOnly.apply(leaf) for leaf in leaves)
        saved = [value.detach() for value in saved]
    coming = [grad is not None for grad in grads]
    present = [grad for grad in grads if grad is not None]
    settings = encode(call.settings)
    found = _operator(f"{operator.name}_backward")(
        *leaves, *call.others, list(saved), present, coming, list(needs), settings
    )
    return [value if need else None for value, need in zip(found, needs, strict=True)]


class _FirstDerivativeOnly(torch.autograd.Function):
    """The tensor itself. Its gradient raises `GradientError`.

    This is a node of its own because torch does not tell a backward which of its gradients will be used. The node runs
    only if the gradient of the leaf is.
    """

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        return leaf.view_as(leaf)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        raise GradientError(
            "tilewise losses have first derivatives only. A second backward, through a gradient, reached the features, "
            "the scale or the bias. Only the derivative with respect to grad_output is available: name the tensors "
            "that need one in torch.autograd.grad(outputs, inputs). Otherwise detach the gradient, or use a dense loss "
            "for second-order methods"
        )


def _operator(name: str) -> Callable[..., list[Tensor]]:
    found: Callable[..., list[Tensor]] = getattr(torch.ops.tilewise, name)
    return found


def _call_of(arguments: Sequence[Any]) -> Call:
    """The call of a registered operator's first arguments."""
    return Call(tuple(arguments[: len(LEAVES)]), tuple(arguments[len(LEAVES) : len(TENSORS)]), decode(arguments[-1]))


def _nothing(call: Call) -> Tensor:
    """What a registered operator returns for a gradient that is not wanted."""
    return call.leaves[0].new_empty(0, dtype=stat_dtype(call.leaves[0].dtype))


def _spread(present: Sequence[Any], coming: Sequence[bool]) -> list[Any]:
    """``present`` at the outputs that are ``coming``, None at the others."""
    rest = iter(present)
    return [next(rest) if come else None for come in coming]


def _define(
    name: str,
    schema: str,
    function: Callable[..., Any],
    fake: Callable[..., Any],
    setup: Callable[..., None],
    pull_back: Callable[..., Any],
) -> None:
    made = torch.library.custom_op(f"tilewise::{name}", function, mutates_args=(), schema=schema)
    made.register_fake(fake)
    made.register_autograd(pull_back, setup_context=setup)


def _register_forward(operator: Operator) -> Callable[..., list[Tensor]]:
    """`tilewise::name`. Returns its function."""

    def forward(*arguments: Any) -> list[Tensor]:
        done = operator.forward(_call_of(arguments), eager=False)
        return [value.contiguous() for value in (*done.outputs, *done.saved)]  # as the fake promises

    def fake(*arguments: Any) -> list[Tensor]:
        call = _call_of(arguments)
        return [call.leaves[0].new_empty(size, dtype=dtype) for size, dtype in operator.like(call)]

    def setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
        ctx.set_materialize_grads(False)
        ctx.settings = inputs[-1]
        ctx.save_for_backward(*inputs[:-1], *output)

    def pull_back(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Any, ...]:
        saved = ctx.saved_tensors
        call, output = _call_of((*saved[: len(TENSORS)], ctx.settings)), saved[len(TENSORS) :]
        coming = list(grads[: operator.outputs(call)])
        needs = Needs(*(bool(need) for need in ctx.needs_input_grad[: len(LEAVES)]))
        if nothing_to_do(needs, call.settings.group_name, coming):
            return (None,) * (len(TENSORS) + 1)
        found = registered_backward(operator, call, output, coming, needs)
        return *found, *(None,) * (len(TENSORS) + 1 - len(LEAVES))

    _define(operator.name, operator_schema(), forward, fake, setup, pull_back)
    return forward


def _register_backward(operator: Operator, forward: Callable[..., list[Tensor]]) -> None:
    """`tilewise::name_backward`.

    Its list ``grads`` has only the gradients that are there, and ``coming`` says of which outputs they are. In a list
    that may hold None (``Tensor?[]``) torch would see no tensors, and the list would have no gradient.
    """

    def backward(*arguments: Any) -> list[Tensor]:
        call, (saved, grads, coming, needs) = _call_of(arguments), arguments[len(TENSORS) : -1]
        if not saved:
            saved = forward(*call.tensors, arguments[-1])
        found = operator.backward(call, saved, None, _spread(grads, coming), Needs(*needs), eager=False)
        assert found is not None
        values = in_types(found, call.leaves, Needs(*needs))
        return [_nothing(call) if value is None else value.contiguous() for value in values]

    def fake(*arguments: Any) -> list[Tensor]:
        call, needs = _call_of(arguments), arguments[-2]
        wanted = zip(call.leaves, needs, strict=True)
        return [leaf.new_empty(leaf.shape) if need and leaf is not None else _nothing(call) for leaf, need in wanted]

    def setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
        ctx.set_materialize_grads(False)
        saved, grads, ctx.coming, ctx.needs, ctx.settings = inputs[len(TENSORS) :]
        ctx.counts = len(saved), len(grads)
        ctx.save_for_backward(*inputs[: len(TENSORS)])

    def pull_back(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Any, ...]:
        saved, count = ctx.counts
        along = [grad if need else None for grad, need in zip(grads, ctx.needs, strict=True)]
        found: Sequence[Tensor | None] = [None] * count
        if any(ctx.needs_input_grad[len(TENSORS) + 1]):
            found = _operator(f"{operator.name}_jvp")(*ctx.saved_tensors, *along, ctx.coming, ctx.settings)
        return *(None,) * len(TENSORS), [None] * saved, found, None, None, None

    schema = operator_schema("Tensor[] saved, Tensor[] grads, bool[] coming, bool[] needs, ")
    _define(f"{operator.name}_backward", schema, backward, fake, setup, pull_back)


def _register_jvp(operator: Operator) -> None:
    """`tilewise::name_jvp`: the derivatives of the outputs that are ``coming``."""

    def jvp(*arguments: Any) -> list[Tensor]:
        call, (*along, coming) = _call_of(arguments), arguments[len(TENSORS) : -1]
        found = operator.jvp(call, Grads(**dict(zip(LEAVES, along, strict=True))), coming)
        return [value.contiguous() for value in found]

    def fake(*arguments: Any) -> list[Tensor]:
        call, coming = _call_of(arguments), arguments[-2]
        likes = zip(operator.like(call), coming, strict=False)
        return [call.leaves[0].new_empty(size, dtype=dtype) for (size, dtype), come in likes if come]

    def setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
        ctx.set_materialize_grads(False)
        ctx.coming, ctx.settings = inputs[-2:]
        ctx.save_for_backward(*inputs[: len(TENSORS)])

    def pull_back(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Any, ...]:
        call, coming = _call_of((*ctx.saved_tensors, ctx.settings)), _spread(grads, ctx.coming)
        needs = Needs(*ctx.needs_input_grad[len(TENSORS) : -2])
        found: Sequence[Tensor | None] = [None] * len(LEAVES)
        if not nothing_to_do(needs, call.settings.group_name, coming):
            found = registered_backward(operator, call, [], coming, needs)
        return *(None,) * len(TENSORS), *found, None, None

    along = "".join([f"Tensor? along_{leaf}, " for leaf in LEAVES])
    _define(f"{operator.name}_jvp", operator_schema(f"{along}bool[] coming, "), jvp, fake, setup, pull_back)


for _each in (PAIR_STATS, PAIR_LOSS):
    _register_backward(_each, _register_forward(_each))
    _register_jvp(_each)
