"""The two differentiable operators under all losses, and the autograd code that they share.

    pair_stats    vectors: the statistics that a spec asks for
    pair_loss     a scalar: a loss with known row weights (`RowWeights`), whose gradients may be formed in forward

Eager calls go through one `torch.autograd.Function`. A compiler, an exporter or the meta device sees registered
operators instead (`tilewise::pair_stats`, `tilewise::pair_loss` and their ``_backward``), which return tensors only.
Both take the same steps: route the call, run the strategy in forward, save tensors, run it in backward. Saved are the
features, the keys and vectors of statistics, never a tile; or, in one pass, gradients.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from tilewise.errors import GradientError
from tilewise.kernels import filter_plan as plans
from tilewise.kernels.scalar_loss import loss_of_stats
from tilewise.kernels.spec import (
    STATISTICS,
    FilterPlan,
    Grads,
    GradStats,
    Needs,
    PairSpec,
    RowWeights,
    Stats,
    stat_dtype,
    wanted_stats,
)
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
from tilewise.ops.explain import is_explaining, note
from tilewise.ops.strategies import (
    Found,
    OnePassFound,
    find_loss,
    find_stats,
    found_again,
    loss_backward,
    route_of,
    saved_names,
    stats_backward,
)
from tilewise.options import TileOptions

PLAN = tuple(field.name for field in dataclasses.fields(FilterPlan))


def pair_stats(
    a: Tensor,
    b: Tensor | None,
    scale: Tensor,
    bias: Tensor | None = None,
    *,
    keys: PairKeys = NO_KEYS,
    spec: PairSpec,
    options: TileOptions,
    group_name: str = "",
    compared: str = "",
) -> Stats:
    """The statistics that ``spec`` asks for, differentiable in ``a``, ``b``, ``scale`` and ``bias``.

    Args:
        a: (n, d) rows.
        b: (m, d) columns, or None when they are the rows themselves (``spec.symmetric``).
        scale: 0-d tensor.
        bias: (m,) or None.
        keys: integer keys and shifts.
        group_name: the process group over which the columns are sharded, "" for this process alone.
        compared: over a group, the loss's own settings (`call_settings`), which must be equal on every rank.
    """
    assert spec.symmetric == (b is None)
    settings = Settings(spec, options, group_name, needs_of(a, b, scale, bias), compared=compared)
    values = _apply(_PAIR_STATS, (a, b, scale, bias), keys, None, None, settings)
    names = [stat.name for stat in STATISTICS if stat.wanted(spec)]
    return Stats(**dict(zip(names, values, strict=False)))


def pair_loss(
    a: Tensor,
    b: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    *,
    weights: RowWeights,
    keys: PairKeys = NO_KEYS,
    spec: PairSpec,
    options: TileOptions,
) -> Tensor:
    """The scalar loss that `RowWeights` describes, differentiable in ``a``, ``b``, ``scale`` and ``bias``.

    Arguments as in `pair_stats`; in this process alone.
    """
    settings = Settings(spec, options, "", needs_of(a, b, scale, bias), weights.share)
    return _apply(_PAIR_LOSS, (a, b, scale, bias), keys, weights.each, weights.square, settings)[0]


def _apply(
    operator: Operator,
    leaves: tuple[Any, ...],
    keys: PairKeys,
    weight: Tensor | None,
    square: Tensor | None,
    settings: Settings,
) -> Sequence[Any]:
    named = keys.row_key, keys.col_key, keys.row_skip, keys.col_skip, keys.row_shift, keys.col_shift, keys.col_weight
    others = *named, weight, square
    if holds_numbers(leaves[0]):
        values: Sequence[Any] = _Eager.apply(*leaves, _Rest(operator, others, settings))
        return values
    registered = getattr(torch.ops.tilewise, operator.name)
    found: Sequence[Any] = registered(*leaves, *others, encode(settings))
    return found


# What the two operators do ------------------------------------------------------------------------------------------


class Done(NamedTuple):
    """The result of an operator's forward."""

    outputs: tuple[Tensor, ...]
    saved: tuple[Tensor | None, ...]  # tensors for backward, beside the arguments
    once: Any = None  # eager only: what the first backward uses up
    # Eager only: where each tensor that the registered operator returns is among ``saved``, -1 for one that its
    # backward does not read. Without it that backward computes everything again.
    order: tuple[int, ...] = ()


class Operator(Protocol):
    """What an operator computes; the autograd code below is the same for both."""

    name: str

    def forward(self, call: Call, *, eager: bool) -> Done:
        """Outputs and what to save."""

    def like(self, call: Call) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Sizes and types of outputs and saved tensors of a registered operator."""

    def outputs(self, call: Call) -> int:
        """How many of them are outputs."""

    def constants(self, call: Call) -> list[int]:
        """Which outputs have no gradient."""

    def backward(
        self, call: Call, saved: Sequence[Any], once: Any, grads: Sequence[Tensor | None], needs: Needs, *, eager: bool
    ) -> Grads | None:
        """Gradients of the four leaves; None if ``once`` has been used up and the registered operator must run."""


class _PairStats:
    """`two_pass` or `filtered`. Saved: the statistics that backward needs, and the filter's plan."""

    name = "pair_stats"

    def forward(self, call: Call, *, eager: bool) -> Done:
        way = route_of(call, scalar=False, eager=eager)
        found = find_stats(call, way, eager=eager)
        stat = stat_dtype(call.leaves[0].dtype)
        shown = found.stats.rounded(stat)
        outputs = tuple(getattr(shown, stat.name) for stat in wanted_stats(call.settings.spec))
        if not eager:
            return Done(outputs, _plan_tensors(found.plan) if found.plan is not None else ())
        names = saved_names(call)
        known = tuple(getattr(found.stats, name) for name in names)
        wanted = [stat.name for stat in wanted_stats(call.settings.spec)]
        order = tuple(names.index(name) if name in names else -1 for name in wanted)
        order = () if way.strategy == "filtered" else order
        return Done(outputs, (*known, *_plan_tensors(found.plan)), found.without_tensors(), order)

    def like(self, call: Call) -> list[tuple[tuple[int, ...], torch.dtype]]:
        sizes = _stats_like(call, [stat.name for stat in wanted_stats(call.settings.spec)])
        way = route_of(call, scalar=False, eager=False)
        if is_explaining():
            note(self.name, call, way)
        return sizes + (_plan_like(call) if way.strategy == "filtered" else [])

    def outputs(self, call: Call) -> int:
        return len(wanted_stats(call.settings.spec))

    def constants(self, call: Call) -> list[int]:
        return [index for index, stat in enumerate(wanted_stats(call.settings.spec)) if not stat.gradient]

    def backward(
        self, call: Call, saved: Sequence[Any], once: Any, grads: Sequence[Tensor | None], needs: Needs, *, eager: bool
    ) -> Grads | None:
        wanted, names = wanted_stats(call.settings.spec), saved_names(call)
        if eager:
            known, plan = saved[: len(names)], saved[len(names) :]
        else:  # the outputs themselves, then the plan
            named = dict(zip([stat.name for stat in wanted], saved, strict=False))
            known, plan = [named[name] for name in names], saved[len(wanted) :]
        found = once or Found(Stats())
        stats = Stats(**dict(zip(names, known, strict=True)))
        found = found._replace(stats=stats, plan=_plan_of(plan))
        coming = {stat.name: grad for stat, grad in zip(wanted, grads, strict=False) if stat.gradient}
        return stats_backward(call, found, GradStats(**coming), needs, rows_known=once is not None)


class _PairLoss:
    """Any strategy. Saved: in one pass, what the backend saves; otherwise statistics, plan, and their gradients."""

    name = "pair_loss"

    def forward(self, call: Call, *, eager: bool) -> Done:
        way = route_of(call, scalar=True, eager=eager)
        if way.strategy == "one_pass":
            one = find_loss(call, way, eager=eager)
            assert one.loss is not None
            if eager:
                return Done((one.loss,), (), one.without_loss())
            nothing = one.loss.new_empty(0)
            return Done((one.loss,), tuple(nothing.clone() if value is None else value for value in one.saved))
        found = find_stats(call, way, eager=eager)
        pair, weights, spec = call.pair(), call.weights(), call.settings.spec
        loss, grad = loss_of_stats(weights.full(pair), weights.square, found.stats, pair.row_shift, spec)
        if math.isnan(weights.share):  # a mean over no rows
            loss = loss + weights.share
        # The gradients of unit weights are saved: backward multiplies them by grad_output.
        coming = tuple(getattr(grad, name) for name in _loss_gradients(spec))
        if not eager:  # the outputs of a registered operator may not share memory
            coming = tuple(value.clone() for value in coming)
        stats = found.stats if eager else found.stats.rounded(pair.stat_dtype)
        known = tuple(getattr(stats, name) for name in saved_names(call))
        plan = _plan_tensors(found.plan) if eager or found.plan is not None else ()
        outputs = (loss.to(pair.stat_dtype),)
        order = (-1, *range(len(known) + len(coming))) if way.strategy == "two_pass" else ()
        return Done(outputs, (*known, *coming, *plan), found.without_tensors() if eager else None, order)

    def like(self, call: Call) -> list[tuple[tuple[int, ...], torch.dtype]]:
        spec, options, needs = call.settings.spec, call.settings.options, call.settings.needs
        way = route_of(call, scalar=True, eager=False)
        if is_explaining():
            note(self.name, call, way)
        loss = [((), stat_dtype(call.leaves[0].dtype))]
        if way.strategy == "one_pass":
            assert way.backend.one_pass is not None
            return loss + way.backend.one_pass.saved_like(call.shape, needs, spec, options)
        vectors = _stats_like(call, [*saved_names(call), *_loss_gradients(spec)])
        return loss + vectors + (_plan_like(call) if way.strategy == "filtered" else [])

    def outputs(self, call: Call) -> int:
        return 1

    def constants(self, call: Call) -> list[int]:
        return []

    def backward(
        self, call: Call, saved: Sequence[Any], once: Any, grads: Sequence[Tensor | None], needs: Needs, *, eager: bool
    ) -> Grads | None:
        (grad_output,) = grads
        assert grad_output is not None
        if isinstance(once, OnePassFound):
            return loss_backward(call, once, grad_output, eager=True)
        way, spec = route_of(call, scalar=True, eager=eager), call.settings.spec
        if way.strategy == "one_pass":
            if eager:  # used up by an earlier backward
                return None
            return loss_backward(call, found_again(call, way, saved), grad_output, eager=False)
        names, gradients = saved_names(call), _loss_gradients(spec)
        saved = saved if eager else saved[1:]
        known, coming = saved[: len(names)], saved[len(names) : len(names) + len(gradients)]
        found = (once or Found(Stats()))._replace(
            stats=Stats(**dict(zip(names, known, strict=True))), plan=_plan_of(saved[len(names) + len(gradients) :])
        )
        grad = GradStats(**{name: value * grad_output for name, value in zip(gradients, coming, strict=True)})
        return stats_backward(call, found, grad, needs, rows_known=once is not None)


_PAIR_STATS, _PAIR_LOSS = _PairStats(), _PairLoss()


def _loss_gradients(spec: PairSpec) -> tuple[str, ...]:
    """The statistics that a scalar loss depends on."""
    if spec.softplus:
        return ("row_softplus",)
    return ("row_lse", "col_lse", "row_pos") if spec.col_lse else ("row_lse", "row_pos")


def _plan_tensors(plan: FilterPlan | None) -> tuple[Tensor | None, ...]:
    return tuple(None if plan is None else getattr(plan, name) for name in PLAN)


def _plan_of(tensors: Sequence[Any]) -> FilterPlan | None:
    return FilterPlan(**dict(zip(PLAN, tensors, strict=True))) if tensors and tensors[0] is not None else None


def _stats_like(call: Call, names: Sequence[str]) -> list[tuple[tuple[int, ...], torch.dtype]]:
    shape, stat = call.shape, stat_dtype(call.leaves[0].dtype)
    table = {entry.name: entry for entry in STATISTICS}
    return [
        ((shape.cols if table[name].of_columns else shape.rows,), torch.int64 if table[name].integer else stat)
        for name in names
    ]


def _plan_like(call: Call) -> list[tuple[tuple[int, ...], torch.dtype]]:
    shape = call.shape
    tiles = plans.tile_count(shape.cols)
    return [
        ((shape.cols,), torch.int32),
        ((tiles, shape.rows), shape.dtype),
        ((tiles, shape.width), shape.dtype),
        ((tiles,), torch.int32),
        ((1,), torch.int32),
    ]


# Autograd, the same for both ----------------------------------------------------------------------------------------


class _Rest(NamedTuple):
    """A call without its four leaves: to autograd one object instead of ten arguments."""

    operator: Operator
    others: tuple[Tensor | None, ...]
    settings: Settings


def _nothing_to_do(needs: Sequence[bool], group_name: str, grads: Sequence[Tensor | None]) -> bool:
    """Over a group every rank takes part in backward, even one whose own loss is not used."""
    return not any(needs) or (all(grad is None for grad in grads) and not group_name)


def _in_types(grads: Grads, leaves: Sequence[Any]) -> tuple[Tensor | None, ...]:
    """In the order and the types of the leaves."""
    values = grads.a, grads.b, grads.scale, grads.bias
    return tuple(
        None if grad is None or leaf is None else grad.to(leaf.dtype) for grad, leaf in zip(values, leaves, strict=True)
    )


class _Eager(torch.autograd.Function):
    """Without the dispatcher, which takes a small batch longer than its products."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor | None, scale: Tensor, bias: Tensor | None, rest: _Rest) -> Any:
        call = Call((a, b, scale, bias), rest.others, rest.settings)
        done = rest.operator.forward(call, eager=True)
        ctx.set_materialize_grads(False)
        ctx.rest, ctx.once, ctx.order = rest, done.once, done.order
        ctx.save_for_backward(*call.tensors, *done.saved)
        constants = rest.operator.constants(call)
        if constants:
            ctx.mark_non_differentiable(*(done.outputs[index] for index in constants))
        return done.outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        rest: _Rest = ctx.rest
        needs = Needs(*(bool(need) for need in ctx.needs_input_grad[:4]))
        if _nothing_to_do(needs, rest.settings.group_name, grads):
            return (None,) * 5
        tensors = ctx.saved_tensors  # read once: checkpointing recomputes them at each access
        call = Call(tensors[: len(LEAVES)], tensors[len(LEAVES) : len(TENSORS)], rest.settings)
        saved, (once, ctx.once) = tensors[len(TENSORS) :], (ctx.once, None)
        found = None
        # With create_graph a second derivative may follow; the registered operator raises an error there. A compiler of
        # backward passes takes that operator as it is, instead of tracing into kernels.
        if not torch.is_grad_enabled() and holds_numbers(tensors[0]):
            found = rest.operator.backward(call, saved, once, grads, needs, eager=True)
        if found is None:
            again = [torch.empty(0) if place < 0 else saved[place] for place in ctx.order]
            values: Sequence[Tensor | None] = _registered_backward(rest.operator, call, again, grads, needs)
        else:
            values = _in_types(found, call.leaves)
        return *(value if need else None for value, need in zip(values, needs, strict=True)), None


def _registered_backward(
    operator: Operator, call: Call, saved: Sequence[Tensor], grads: Sequence[Tensor | None], needs: Needs
) -> Sequence[Tensor]:
    """Without ``saved`` tensors, forward runs again inside."""
    registered = getattr(torch.ops.tilewise, f"{operator.name}_backward")
    found: Sequence[Tensor] = registered(*call.tensors, list(saved), list(grads), list(needs), encode(call.settings))
    return found


def _call_of(arguments: Sequence[Any]) -> Call:
    """The call of a registered operator's first arguments."""
    return Call(tuple(arguments[: len(LEAVES)]), tuple(arguments[len(LEAVES) : len(TENSORS)]), decode(arguments[-1]))


def _register(operator: Operator) -> None:
    """Make the operator and its backward known to torch: `torch.ops.tilewise`."""

    def forward(*arguments: Any) -> list[Tensor]:
        done = operator.forward(_call_of(arguments), eager=False)
        return [*done.outputs, *(value for value in done.saved if value is not None)]

    def forward_fake(*arguments: Any) -> list[Tensor]:
        call = _call_of(arguments)
        return [call.leaves[0].new_empty(size, dtype=dtype) for size, dtype in operator.like(call)]

    def backward(*arguments: Any) -> list[Tensor]:
        call, (saved, grads, needs) = _call_of(arguments), arguments[len(TENSORS) : -1]
        if not saved:
            saved = forward(*call.tensors, arguments[-1])
        found = operator.backward(call, saved, None, grads, Needs(*needs), eager=False)
        assert found is not None
        nothing = call.leaves[0].new_empty(0, dtype=stat_dtype(call.leaves[0].dtype))
        values = _in_types(found, call.leaves)
        return [
            value if need and value is not None else nothing.clone() for value, need in zip(values, needs, strict=True)
        ]

    def backward_fake(*arguments: Any) -> list[Tensor]:
        call, needs = _call_of(arguments), arguments[-2]
        stat = stat_dtype(call.leaves[0].dtype)
        return [
            leaf.new_empty(leaf.shape) if need and leaf is not None else call.leaves[0].new_empty(0, dtype=stat)
            for leaf, need in zip(call.leaves, needs, strict=True)
        ]

    def setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
        ctx.set_materialize_grads(False)
        ctx.settings = inputs[-1]
        ctx.save_for_backward(*inputs[:-1], *output)

    def pull_back(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Any, ...]:
        saved = ctx.saved_tensors
        arguments, output = saved[: len(TENSORS)], saved[len(TENSORS) :]
        call = Call(arguments[: len(LEAVES)], arguments[len(LEAVES) :], decode(ctx.settings))
        count = operator.outputs(call)
        if any(grad is not None for grad in grads[count:]):
            no_second_derivative(ctx)
        coming, needs = list(grads[:count]), Needs(*(bool(need) for need in ctx.needs_input_grad[:4]))
        if _nothing_to_do(needs, call.settings.group_name, coming):
            return (None,) * (len(TENSORS) + 1)
        values = _registered_backward(operator, call, output, coming, needs)
        found = (value if need else None for value, need in zip(values, needs, strict=True))
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
    """The backward of a backward."""
    raise GradientError(
        "tilewise losses have first derivatives only, and a second backward ran through a gradient. "
        "Detach the gradient, or use a dense loss for second-order methods"
    )


_register(_PAIR_STATS)
_register(_PAIR_LOSS)
