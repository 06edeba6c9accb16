"""Small batches: a scalar loss from the scores of all pairs at once, with as little work on the host as possible.

A batch of up to a few thousand rows takes longer on the host than on a GPU. So all that depends on sizes, types and
settings is found once for each kind of call (`Calls.job`): the route, and a job of the backend.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.kernels.backend import SmallJob, SmallStatsJob
from tilewise.kernels.registry import forget_with_backends
from tilewise.kernels.spec import STATISTICS, GradStats, Needs, Pair, PairSpec, RowWeights
from tilewise.ops.call import NO_KEYS, Call, Function, PairKeys, Settings, holds_numbers, needs_of
from tilewise.ops.limits import forget_with_limits
from tilewise.ops.operators import PAIR_LOSS, PAIR_STATS
from tilewise.ops.registered import in_types, nothing_to_do, registered_backward
from tilewise.ops.strategies import route_of, small_facts, small_job
from tilewise.options import TileOptions

NO_FACTS = (None,) * 6
NO_GRADIENT = (*(stat.name for stat in STATISTICS if not stat.gradient), "row_shift")
is_present = functools.partial(operator.is_not, None)


class Job(NamedTuple):
    """The work of one operator call of a loss, in all calls of one key."""

    place: int  # among the operator calls of the loss
    spec: PairSpec  # may depend on values, such as whether a target is ignored
    number: bool  # whether the scale is a number
    work: SmallJob | SmallStatsJob | None  # None: the strategy is another


def forget_jobs_with(clear: Callable[[], None]) -> None:
    """Call ``clear``, which empties a cache of jobs, whenever backends or limits change."""
    forget_with_backends(clear)
    forget_with_limits(clear)


class Calls:
    """The operator calls of one call of a loss.

    ``jobs``: what earlier calls with the same key have found, and this one adds to; None if the call has no key.
    ``checked``: all that the key determines has been checked, and no argument is converted.
    """

    __slots__ = ("checked", "jobs", "place")

    def __init__(self, jobs: list[Job] | None = None, *, checked: bool = False) -> None:
        self.jobs, self.checked, self.place = jobs, checked, 0

    def job(
        self,
        a: Tensor,
        b: Tensor | None,
        scale: Any,
        bias: Tensor | None,
        weights: RowWeights | None,
        keys: PairKeys,
        spec: PairSpec,
        options: TileOptions,
    ) -> Any:
        """The `SmallJob` of the next operator call, or without ``weights`` its `SmallStatsJob`.

        None if its strategy is not `small`. On a CPU, rows that may be ignored are counted and dropped first, which
        `strategies` does.
        """
        place, number = self.place, type(scale) is float
        self.place = place + 1
        for known in self.jobs or ():
            if known.place == place and known.number is number and (known.spec is spec or known.spec == spec):
                return known.work
        scalar, given = weights is not None, weights or RowWeights()
        settings = Settings(spec, options, "", needs_of(a, b, scale, bias), kept=given.kept)
        call = Call((a, b, scale, bias), (*keys, given.each, given.square), settings)
        way, work = route_of(call, scalar=scalar, eager=True), None
        if way.strategy == "small" and not (spec.drop_rows and a.device.type == "cpu"):
            work = small_job(way, call.pair(), call, scalar=scalar)
        if self.jobs is not None:
            self.jobs.append(Job(place, spec, number, work))
        return work


class Rest(NamedTuple):
    """A call without its leaves: one argument of the autograd function."""

    job: Any  # `SmallJob` or `SmallStatsJob`
    number: float | None  # the scale, if it is no tensor
    keys: PairKeys
    weights: Any  # `RowWeights`, for a scalar loss
    spec: PairSpec
    options: TileOptions
    own_shift: bool = False  # of statistics: whether each row gets the score of its positive as a shift


class SmallLoss(Function):
    """A loss of a small batch. Forward also computes the gradients, and the first backward returns them."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor | None, scale: Any, bias: Tensor | None, rest: Rest) -> Tensor:
        """The loss."""
        job, number, keys, weights, *_ = rest
        facts = NO_FACTS
        if keys is not NO_KEYS or weights.each is not None or weights.square is not None:
            facts = small_facts(keys[:4], weights)
        if torch.is_autocast_enabled(a.device.type):
            with torch.autocast(a.device.type, enabled=False):
                return SmallLoss.forward(ctx, a, b, scale, bias, rest)
        loss, ctx.once = job.forward(a, b, scale if number is None else number, bias, facts, weights.share)
        ctx.rest = rest
        ctx.save_for_backward(a, b, scale, bias)
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """The gradients of the leaves."""
        leaves: Sequence[Any] = ctx.saved_tensors  # also checks that none was changed in place
        once, ctx.once = ctx.once, None
        rest: Rest = ctx.rest
        if once is not None and not torch.is_grad_enabled() and holds_numbers(leaves[0]):
            found = rest.job.backward(once, grads[0], overwrite=True)
        else:  # a second backward, or one that may be differentiated: forward runs again, as a registered operator
            scale = leaves[2] if rest.number is None else rest.number
            weights, (a, b, _, bias) = rest.weights, leaves
            needs = Needs(*ctx.needs_input_grad[:4])  # gradients are switched off here
            settings = Settings(rest.spec, rest.options, "", needs, weights.share, weights.kept)
            call = Call((a, b, scale, bias), (*rest.keys, weights.each, weights.square), settings)
            found = registered_backward(PAIR_LOSS, call, [], grads, needs)
        typed = []
        for grad, leaf in zip(found, leaves, strict=True):
            typed.append(grad if grad is None or grad.dtype is leaf.dtype else grad.to(leaf.dtype))
        return *typed, None


class SmallStats(Function):
    """Statistics of a small batch, and the shift of each row. Backward computes the scores again."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor | None, scale: Any, bias: Tensor | None, rest: Rest) -> Any:
        """The statistics in the order of `wanted_stats`, and the shift; None for one that is not computed."""
        if torch.is_autocast_enabled(a.device.type):
            with torch.autocast(a.device.type, enabled=False):
                return SmallStats.forward(ctx, a, b, scale, bias, rest)
        ctx.rest = rest
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(a, b, scale, bias)
        found = rest.job.forward(pair_of(a, b, scale, bias, rest), own_shift=rest.own_shift).__dict__
        ctx.mark_non_differentiable(*filter(is_present, map(found.get, NO_GRADIENT)))
        return *map(found.get, rest.job.names), found["row_shift"]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """The gradients of the leaves."""
        leaves: Sequence[Any] = ctx.saved_tensors
        rest, needs = ctx.rest, Needs(*ctx.needs_input_grad[:4])
        if nothing_to_do(needs, "", grads):
            return (None,) * 5
        a, b, scale, bias = leaves
        if torch.is_grad_enabled() or not holds_numbers(a):  # it may be differentiated again
            scale = scale if rest.number is None else rest.number
            call = Call((a, b, scale, bias), (*rest.keys, None, None), Settings(rest.spec, rest.options, "", needs))
            return *registered_backward(PAIR_STATS, call, [], grads[:-1], needs), None
        coming = dict(zip(rest.job.names, grads, strict=False))
        found = rest.job.backward(pair_of(a, b, scale, bias, rest), GradStats(**coming), needs)
        return *in_types(found, leaves, needs), None


def pair_of(a: Tensor, b: Tensor | None, scale: Any, bias: Tensor | None, rest: Rest) -> Pair:
    """The tensors of a call; a scale that is a number stays one."""
    return Pair(a, a if b is None else b, scale if rest.number is None else rest.number, bias, *rest.keys)
