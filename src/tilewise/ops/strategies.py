"""The strategies, between the operators and a backend.

Each strategy drops the ignored rows, calls the backend, and scatters the results back to all rows.

A call is *eager* if an autograd function (`torch.autograd.Function`) runs it directly. Otherwise it runs inside a
registered operator (`torch.library`). The sizes of such an operator's outputs must be those that its fake predicts, so
they may not depend on values in tensors.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.errors import GradientError
from tilewise.kernels import filter_plan as plans
from tilewise.kernels.backend import Backend, OnePass, SmallJob, SmallKey, SmallStatsJob
from tilewise.kernels.registry import choose_backend, directional_derivatives, forget_with_backends
from tilewise.kernels.scalar_loss import padded
from tilewise.kernels.spec import Backward, FilterPlan, Grads, GradStats, Needs, Pair, RowWeights, Stats, may_save
from tilewise.ops.call import Call
from tilewise.ops.filter_report import is_recording, record
from tilewise.ops.route import Route, is_capturing, route
from tilewise.ops.row_blocks import in_blocks
from tilewise.ops.rows import KeptRows, PendingRows
from tilewise.options import TileOptions

NO_STATS = Stats()


class Found(NamedTuple):
    """The result of `two_pass` or `filtered` in forward. Only an eager backward can use the last three fields."""

    stats: Stats  # of all rows, unrounded
    # None for `two_pass`. With `filtered`, a registered operator always returns a plan; an eager call returns None if
    # backward computes every pair.
    plan: FilterPlan | None = None
    rows: KeptRows | None = None  # None if no row was dropped
    saved: object | None = None  # from the backend; used once
    backend: Backend | None = None  # that of `two_pass`

    def without_stats_and_plan(self) -> Found:
        """The part for the first eager backward. Statistics and plan are saved with `save_for_backward` instead."""
        return Found(NO_STATS, None, *self[2:])


NOTHING = contextlib.nullcontext()


def without_autocast(features: Tensor) -> contextlib.AbstractContextManager[object]:
    """Products here choose their own types. Outside of an autocast region this costs nothing."""
    kind = features.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else NOTHING


def route_of(call: Call, *, scalar: bool, eager: bool) -> Route:
    """The route of a call. A registered operator ignores CUDA graph capture, because its fake cannot see it."""
    settings = call.settings
    capturing = eager and settings.options.filter_tolerance != 0.0 and is_capturing(call.leaves[0])
    return route(
        call.shape,
        settings.spec,
        settings.options,
        settings.needs,
        scalar=scalar,
        over_group=bool(settings.group_name),
        capturing=capturing,
    )


def find_stats(call: Call, pair: Pair, way: Route, *, eager: bool) -> Found:
    """Statistics by `two_pass` or `filtered`; ``pair`` is that of the call."""
    spec, _, group_name, needs = call.settings[:4]
    with without_autocast(pair.a):
        pending = PendingRows.of(pair, spec)
        guess = None
        if pending is not None and pending.likely_all and _may_guess(call, way):
            # Launched before the host waits; see `rows`.
            guess = _without_group(call, dataclasses.replace(pair, only_if=pending.all_stay()), None, way, eager=eager)
        rows = None if pending is None else pending.wait()
        if guess is not None and rows is None:
            return guess
        guess = None  # frees its memory
        if group_name:
            from tilewise.ops.distributed.ring_stats import ring_forward

            fewer = pair if rows is None else rows.of_pair(pair)
            settings = call.settings
            how = settings.options, group_name, needs, settings.must_match
            save = eager and may_save(needs, spec)
            given, filtered = pair.a.shape[0], way.strategy == "filtered"
            stats, plan, saved = ring_forward(fewer, spec, *how, rows_given=given, save=save, filtered=filtered)
            if filtered:
                plan = _plan_of_call(plan, pair, rows, call, eager=eager)
            found = Found(stats, plan, saved=saved)
        else:
            found = _without_group(call, pair, rows, way, eager=eager)
        return found if rows is None else found._replace(stats=rows.scatter_back(found.stats), rows=rows)


def _may_guess(call: Call, way: Route) -> bool:
    """Whether forward may run for all rows before it is known which of them are ignored."""
    return way.backend.can_skip(call.settings.spec) and not call.settings.group_name and not is_recording()


def _without_group(call: Call, pair: Pair, rows: KeptRows | None, way: Route, *, eager: bool) -> Found:
    """Statistics of the rows that stay, of this process alone."""
    spec, options = call.settings.spec, call.options
    fewer = pair if rows is None else rows.of_pair(pair)
    if way.strategy == "filtered":
        return _filtered(call, pair, fewer, rows, eager=eager)
    if way.strategy == "small":
        job = small_job(way, fewer, call, scalar=False)
        return Found(job.forward(fewer, own_shift=False))
    backend = way.backend if rows is None else in_blocks(choose_backend(fewer.shape, spec, options), options)
    found = _two_pass(backend, fewer, call, save=eager)
    if is_recording() and way.unfiltered:
        _record(plans.keep_everything(pair, spec), pair, options)
    return found


def _two_pass(backend: Backend, pair: Pair, call: Call, *, save: bool) -> Found:
    spec, options, needs = call.settings.spec, call.options, call.settings.needs
    if save and may_save(needs, spec):
        stats, saved = backend.forward_saving(pair, spec, options)
        return Found(stats, saved=saved, backend=backend)
    return Found(backend.forward(pair, spec, options), backend=backend)


def _filtered(call: Call, pair: Pair, fewer: Pair, rows: KeptRows | None, *, eager: bool) -> Found:
    """``fewer`` is the pair without the rows that are dropped. With fewer rows the exact gradients may be faster."""
    spec, options, needs = call.settings.spec, call.options, call.settings.needs
    plan: FilterPlan | None
    way = route(fewer.shape, spec, options, needs)
    if way.strategy != "filtered":
        found, plan = _two_pass(way.backend, fewer, call, save=eager), None
    else:
        chosen = way.backend.filtered
        assert chosen is not None
        if eager and may_save(needs, spec):
            stats, plan, saved = chosen.forward_saving(fewer, spec, options)
        else:
            (stats, plan), saved = chosen.forward(fewer, spec, options), None
        found = Found(stats, saved=saved)
    return found._replace(plan=_plan_of_call(plan, pair, rows, call, eager=eager))


def _plan_of_call(
    plan: FilterPlan | None, pair: Pair, rows: KeptRows | None, call: Call, *, eager: bool
) -> FilterPlan | None:
    """The plan to save, for all rows of the pair, and its record. ``plan`` is that of the rows that stay, or None."""
    spec, made = call.settings.spec, None
    if plan is None and (not eager or is_recording()):
        made = plans.keep_everything(pair, spec)
    elif plan is not None and rows is not None:
        plan = rows.scatter_back_plan(plan)
    if is_recording():
        known = made if plan is None else plan
        assert known is not None
        _record(known, pair, call.options)
    # Eager calls must save the same tensors with and without recording. Otherwise torch.utils.checkpoint reports a
    # mismatch.
    return made if plan is None and not eager else plan


def _record(plan: FilterPlan, pair: Pair, options: TileOptions) -> None:
    record(plan, pair.row_key >= 0, plans.tolerance_of(options, pair.a.dtype))


def stats_backward(
    call: Call, found: Found, grad: GradStats, needs: Needs, rows_known: bool, small: Route | None = None
) -> Grads:
    """Gradients by `two_pass` or `filtered`, or with its route by `small`.

    Without ``rows_known``, the rows to drop are determined again.
    """
    spec, options, group_name = call.settings[:3]
    pair = call.pair()
    options, rows_given = options if group_name else call.options, pair.a.shape[0]
    with without_autocast(pair.a):
        if found.plan is not None and not group_name:
            chosen = choose_backend(pair.shape, spec, options).filtered
            assert chosen is not None
            grads = chosen.backward(pair, found.stats, found.plan, grad, needs, spec, options, saved=found.saved)
            if grads is not None:
                return grads
            # None: the plan has `keep_all`, or a CUDA graph is being captured. The exact gradients are computed below.
        rows = found.rows if rows_known else KeptRows.find(pair, spec)
        stats = found.stats
        if rows is not None:
            pair, stats, grad = rows.of_pair(pair), rows.pick(stats), rows.pick(grad)
        if group_name:
            from tilewise.ops.distributed.ring_stats import ring_backward

            job = Backward(pair, stats, grad, needs, spec, options)
            kept = None if rows is None else rows.index
            plan = found.plan if rows is None or found.plan is None else rows.pick_plan(found.plan)
            grads = ring_backward(job, group_name, rows_given=rows_given, kept=kept, plan=plan, saved=found.saved)
        elif small is not None:
            grads = small_job(small, pair, call, scalar=False).backward(pair, grad, needs)
        else:
            backend = found.backend or in_blocks(choose_backend(pair.shape, spec, options), options)
            grads = backend.backward(pair, stats, grad, needs, spec, options, saved=found.saved)
        return grads if rows is None else rows.scatter_back_grads(grads)


def stats_jvp(call: Call, along: Grads, names: Sequence[str]) -> tuple[Stats, Stats]:
    """The statistics, and the derivatives of those in ``names`` along directions of the leaves: see `registry`."""
    spec, options = call.settings.spec, call.options
    if call.settings.group_name:
        raise GradientError(
            "over a process group, tilewise losses have first derivatives only: a gradient has no derivative, not even "
            "with respect to grad_output. Detach the gradient, or call the loss without group="
        )
    pair = call.pair()
    with without_autocast(pair.a):
        rows = KeptRows.find(pair, spec)
        if rows is None:
            return directional_derivatives(pair, along, names, spec, options)
        found = directional_derivatives(rows.of_pair(pair), rows.pick_grads(along), names, spec, options)
        return rows.scatter_back(found[0]), rows.scatter_back(found[1])


class OnePassFound(NamedTuple):
    """The result of `small` or `one_pass` in forward."""

    work: OnePass | SmallJob
    pair: Pair  # of the rows that count
    saved: Sequence[Tensor | None]  # an eager backward may overwrite it
    rows: KeptRows | None  # None if no row was dropped


def find_loss(call: Call, way: Route, *, eager: bool) -> tuple[Tensor, OnePassFound]:
    """A scalar loss, and what its backward needs, by `small` or `one_pass`.

    Eager calls save only the rows that count.
    """
    spec, options, needs = call.settings.spec, call.options, call.settings.needs
    pair, weights = call.pair(), call.weights()
    with without_autocast(pair.a):
        rows = KeptRows.find(pair, spec)
        fewer = pair if rows is None else rows.of_pair(pair)
        if rows is not None:
            weights = weights.rows(rows.index)
        saved_rows = fewer.a.shape[0] if eager else pair.a.shape[0]
        if way.strategy == "small":
            job = small_job(way, fewer, call)
            facts = small_facts((fewer.row_key, fewer.col_key, fewer.row_skip, fewer.col_skip), weights)
            b = None if spec.symmetric else fewer.b
            loss, (a_grad, *others) = job.forward(fewer.a, b, fewer.scale, fewer.bias, facts, weights.share)
            return loss, OnePassFound(job, fewer, (padded(a_grad, saved_rows), *others), rows)
        loss, saved = way.one_pass.forward(fewer, weights, needs, spec, options, saved_rows)
        return weights.nan_if_none(loss, pair), OnePassFound(way.one_pass, fewer, saved, rows)


def small_facts(keys: Sequence[Any], weights: RowWeights) -> tuple[Any, ...]:
    """The argument ``facts`` of `SmallJob.forward`."""
    square = weights.square
    return *keys, weights.each, square if square is None or weights.share == 1.0 else square / weights.share


def small_job(way: Route, pair: Pair, call: Call, *, scalar: bool = True) -> Any:
    """The backend's `SmallJob` for a small call of this pair, or without ``scalar`` its `SmallStatsJob`."""
    small: Any = way.backend.small  # mypy takes no protocol for hashable
    return _job(small, call.small_key(pair.shape, scalar=scalar))


@functools.lru_cache(maxsize=1024)
def _job(small: Any, key: SmallKey) -> SmallJob | SmallStatsJob:
    """Eager and registered calls share a job: kernels that an eager call has loaded are there in a captured one."""
    return small.job(key)


forget_with_backends(_job.cache_clear)


def loss_backward(call: Call, found: OnePassFound, grad_output: Tensor, *, eager: bool) -> Grads:
    """The gradients that `find_loss` saved, multiplied by ``grad_output``."""
    spec, options, needs = call.settings.spec, call.options, call.settings.needs
    work, pair, saved, rows = found
    with without_autocast(pair.a):
        if isinstance(work, OnePass):
            shape = pair.shape if eager else call.shape
            grads = work.backward(saved, pair, grad_output, needs, spec, options, shape, overwrite=eager)
        else:
            a, b, scale, bias = work.backward(saved, grad_output, overwrite=eager)
            grads = Grads(a=a, b=b, scale=scale, bias=bias)
        return grads if rows is None else rows.scatter_back_grads(grads)


def found_again(call: Call, way: Route, saved: Sequence[Tensor]) -> OnePassFound:
    """What `find_loss` found, from the tensors that a registered operator saved."""
    pair = call.pair()
    rows = KeptRows.find(pair, call.settings.spec)
    fewer = pair if rows is None else rows.of_pair(pair)
    if way.strategy != "small":
        return OnePassFound(way.one_pass, fewer, saved, rows)
    values = [value if need else None for value, need in zip(saved, call.settings.needs, strict=False)]
    if values[0] is not None and rows is not None:
        values[0] = values[0][: fewer.a.shape[0]]
    return OnePassFound(small_job(way, fewer, call), fewer, (*values, *saved[len(values) :]), rows)
