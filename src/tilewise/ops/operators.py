"""Forward and backward of the two operators that all losses use. `autograd` makes them differentiable.

    pair_stats    vectors: the statistics that a spec requests
    pair_loss     a scalar: a loss with known row weights (`RowWeights`), whose gradients may be formed in forward

Both take the same steps: route the call, run the strategy in forward, save tensors, run it in backward. Saved are the
features, the keys and vectors of statistics, never a tile; or, in one pass, gradients. An eager call saves the
statistics unrounded, and objects for the first backward. A registered operator returns tensors only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.kernels import filter_plan as plans
from tilewise.kernels.backend import Like
from tilewise.kernels.scalar_loss import fixed_slopes, loss_of_stats
from tilewise.kernels.spec import (
    STATISTICS,
    FilterPlan,
    Grads,
    GradStats,
    Needs,
    PairSpec,
    Stats,
    saved_names,
    stat_dtype,
    wanted_names,
    wanted_stats,
)
from tilewise.ops import strategies
from tilewise.ops.call import Call
from tilewise.ops.explain import is_explaining, note
from tilewise.ops.strategies import Found, OnePassFound

PLAN = tuple(field.name for field in dataclasses.fields(FilterPlan))


class Done(NamedTuple):
    """The result of an operator's forward."""

    outputs: Sequence[Tensor]
    saved: Sequence[Tensor]  # tensors for backward, in addition to the arguments
    once: Any = None  # eager only: what the first backward uses up
    constants: Sequence[Tensor] = ()  # eager only: the outputs without a gradient


class PairStats:
    """`two_pass` or `filtered`. Saved: the statistics, and the filter's plan."""

    name = "pair_stats"

    def forward(self, call: Call, *, eager: bool) -> Done:
        """Outputs and what to save."""
        spec = call.settings.spec
        way = strategies.route_of(call, scalar=False, eager=eager)
        found = strategies.find_stats(call, call.pair(), way, eager=eager)
        wanted, kind = wanted_stats(spec), stat_dtype(call.leaves[0].dtype)
        values = [getattr(found.stats, stat.name) for stat in wanted]
        values = [call.leaves[0].new_ones(call.shape.rows) if value is None else value for value in values]  # positives
        outputs = [v if stat.integer else v.to(kind) for stat, v in zip(wanted, values, strict=True)]
        if not eager:
            return Done(outputs, _plan_tensors(found.plan))
        constants = [value for stat, value in zip(wanted, outputs, strict=True) if not stat.gradient]
        return Done(outputs, (*values, *_plan_tensors(found.plan)), found.without_stats_and_plan(), constants)

    def like(self, call: Call) -> list[Like]:
        """Sizes and types of outputs and saved tensors of the registered operator."""
        way = strategies.route_of(call, scalar=False, eager=False)
        if is_explaining():
            note(self.name, call, way)
        vectors = _stats_like(call, wanted_names(call.settings.spec))
        return vectors + (_plan_like(call) if way.strategy == "filtered" else [])

    def outputs(self, call: Call) -> int:
        """How many of them are outputs."""
        return len(wanted_names(call.settings.spec))

    def backward(
        self, call: Call, saved: Sequence[Any], once: Any, grads: Sequence[Tensor | None], needs: Needs, *, eager: bool
    ) -> Grads | None:
        """Gradients of the four leaves; None if ``once`` has been used up and the registered operator must run."""
        wanted = wanted_stats(call.settings.spec)
        coming = {stat.name: grad for stat, grad in zip(wanted, grads, strict=False) if stat.gradient}
        found = _found(once, wanted_names(call.settings.spec), saved)
        way = strategies.route_of(call, scalar=False, eager=eager)
        small = way if way.strategy == "small" else None
        return strategies.stats_backward(call, found, GradStats(**coming), needs, once is not None, small)

    def jvp(self, call: Call, along: Grads, coming: Sequence[bool]) -> list[Tensor]:
        """The derivatives of the outputs that are ``coming``, along directions of the four leaves."""
        spec, kind = call.settings.spec, stat_dtype(call.leaves[0].dtype)
        names = [name for name, come in zip(wanted_names(spec), coming, strict=True) if come]
        _, change = strategies.stats_jvp(call, along, names)
        return [getattr(change, name).to(kind) for name in names]


class PairLoss:
    """Any strategy.

    Saved: with gradients in forward, what the backend saves; otherwise statistics, their gradients, and the plan.

    With `fixed_slopes` those gradients are not saved: backward makes them from the weights. That takes five launches
    fewer, which limit the speed of a small batch. The methods are those of `PairStats`.
    """

    name = "pair_loss"

    def forward(self, call: Call, *, eager: bool) -> Done:
        """The loss and what to save."""
        way = strategies.route_of(call, scalar=True, eager=eager)
        if way.forms_gradients:
            loss, one = strategies.find_loss(call, way, eager=eager)
            if eager:
                return Done((loss,), (), one)
            return Done((loss,), tuple(loss.new_empty(0) if value is None else value for value in one.saved))
        pair, weights, spec = call.pair(), call.weights(), call.settings.spec
        found = strategies.find_stats(call, pair, way, eager=eager)
        equal = weights.each is None and fixed_slopes(spec)
        weight = weights.share if equal else weights.full(pair)
        loss, grad = loss_of_stats(weight, weights.square, found.stats, pair.row_shift, spec)
        loss = weights.nan_if_none(loss, pair)
        # The gradients of unit weights are saved: backward multiplies them by grad_output.
        coming = [getattr(grad, name) for name in _saved_gradients(spec)]
        stats = found.stats
        if not eager:  # the outputs of a registered operator may not share memory
            coming, stats = [value.clone() for value in coming], stats.rounded(pair.stat_dtype)
        known = [getattr(stats, name) for name in saved_names(spec)]
        once = found.without_stats_and_plan() if eager else None
        return Done((loss.to(pair.stat_dtype),), (*known, *coming, *_plan_tensors(found.plan)), once)

    def like(self, call: Call) -> list[Like]:
        """Sizes and types of the loss and the saved tensors of the registered operator."""
        spec, needs = call.settings.spec, call.settings.needs
        way = strategies.route_of(call, scalar=True, eager=False)
        if is_explaining():
            note(self.name, call, way)
        loss: list[Like] = [((), stat_dtype(call.leaves[0].dtype))]
        if way.forms_gradients:
            return loss + way.saved_like(call.shape, needs, spec, call.options)
        vectors = _stats_like(call, (*saved_names(spec), *_saved_gradients(spec)))
        return loss + vectors + (_plan_like(call) if way.strategy == "filtered" else [])

    def outputs(self, call: Call) -> int:
        """The loss."""
        return 1

    def backward(
        self, call: Call, saved: Sequence[Any], once: Any, grads: Sequence[Tensor | None], needs: Needs, *, eager: bool
    ) -> Grads | None:
        """See `PairStats`."""
        (grad_output,) = grads
        assert grad_output is not None
        if isinstance(once, OnePassFound):
            return strategies.loss_backward(call, once, grad_output, eager=True)
        if once is None:  # a registered operator, or used up by an earlier backward; otherwise it is a `Found`
            way = strategies.route_of(call, scalar=True, eager=eager)
            if way.forms_gradients and eager:
                return None
            if way.forms_gradients:
                one = strategies.found_again(call, way, saved[1:])
                return strategies.loss_backward(call, one, grad_output, eager=False)
        spec = call.settings.spec
        names, gradients = saved_names(spec), _saved_gradients(spec)
        first = 0 if eager else 1  # the loss itself
        second, third = first + len(names), first + len(names) + len(gradients)
        grad = {name: g * grad_output for name, g in zip(gradients, saved[second:third], strict=True)}
        slopes, share, each = fixed_slopes(spec), call.settings.share, call.row_weight
        if slopes:
            weighted = grad_output.expand(call.shape.rows) if each is None else each * grad_output
            grad = {name: weighted * (share * slope) for name, slope in slopes.items()}
        found = _found(once, names, (*saved[first:second], *saved[third:]))
        return strategies.stats_backward(call, found, GradStats(**grad), needs, once is not None)

    def jvp(self, call: Call, along: Grads, coming: Sequence[bool]) -> list[Tensor]:
        """See `PairStats`."""
        spec, pair, weights = call.settings.spec, call.pair(), call.weights()
        names = [stat.name for stat in wanted_stats(spec) if stat.gradient]
        stats, change = strategies.stats_jvp(call, along, names)
        _, grad = loss_of_stats(weights.full(pair), weights.square, stats, pair.row_shift, spec)
        total = sum((getattr(grad, name) * getattr(change, name)).sum() for name in names)
        return [torch.as_tensor(total).to(pair.stat_dtype)]


Operator = PairStats | PairLoss
PAIR_STATS, PAIR_LOSS = PairStats(), PairLoss()


def _saved_gradients(spec: PairSpec) -> tuple[str, ...]:
    """The statistics for which a scalar loss saves its gradient."""
    return () if fixed_slopes(spec) else ("row_lse", "row_pos")


def _found(once: Found | None, names: Sequence[str], saved: Sequence[Any]) -> Found:
    """The result of `find_stats`, from the saved statistics of these names and the plan, if any."""
    stats = Stats(**dict(zip(names, saved, strict=False)))
    plan = FilterPlan(**dict(zip(PLAN, saved[len(names) :], strict=True))) if len(saved) > len(names) else None
    return Found(stats, plan) if once is None else Found(stats, plan, *once[2:])


def _plan_tensors(plan: FilterPlan | None) -> tuple[Tensor, ...]:
    return () if plan is None else tuple(getattr(plan, name) for name in PLAN)


def _stats_like(call: Call, names: Sequence[str]) -> list[Like]:
    shape, stat = call.shape, stat_dtype(call.leaves[0].dtype)
    table = {entry.name: entry for entry in STATISTICS}
    return [(table[name].size(shape), torch.int64 if table[name].integer else stat) for name in names]


def _plan_like(call: Call) -> list[Like]:
    """In the order of `FilterPlan`."""
    shape = call.shape
    tiles = plans.tile_count(shape.cols)
    surprise = shape.rows if call.settings.spec.row_entropy else 0
    sizes = (shape.cols,), (tiles, shape.rows), (tiles, shape.width), (surprise,), (tiles,), (1,)
    types = torch.int32, shape.dtype, shape.dtype, stat_dtype(shape.dtype), torch.int32, torch.int32
    return list(zip(sizes, types, strict=True))
