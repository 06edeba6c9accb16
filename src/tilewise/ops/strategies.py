"""The strategies, between the operators and a backend: rows are dropped, the backend is called, results are widened."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.kernels import filter_plan as plans
from tilewise.kernels.backend import Backend, OnePass
from tilewise.kernels.registry import choose_backend
from tilewise.kernels.spec import Backward, FilterPlan, Grads, GradStats, Needs, Pair, Stats
from tilewise.ops.call import Call
from tilewise.ops.filter_report import is_recording, record
from tilewise.ops.route import TOO_SMALL, Route, is_capturing, route
from tilewise.ops.rows import KeptRows


class Found(NamedTuple):
    """The result of `two_pass` or `filtered` in forward, and what only an eager backward can use."""

    stats: Stats  # of all rows, unrounded
    plan: FilterPlan | None = None  # None where every pair is computed
    rows: KeptRows | None = None
    saved: object | None = None  # from the backend; used once
    backend: Backend | None = None  # that of `two_pass`

    def without_tensors(self) -> Found:
        """The part that `save_for_backward` cannot hold."""
        return self._replace(stats=Stats(), plan=None)


NOTHING = contextlib.nullcontext()


def without_autocast(features: Tensor) -> contextlib.AbstractContextManager[object]:
    """Products here choose their own types. Outside of an autocast region this costs nothing."""
    kind = features.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else NOTHING


def route_of(call: Call, *, scalar: bool, eager: bool) -> Route:
    """The route of a call. A registered operator decides without looking at CUDA graphs, as its fake does."""
    settings = call.settings
    capturing = eager and settings.options.filter_tolerance > 0.0 and is_capturing(call.leaves[0])
    return route(
        call.shape,
        settings.spec,
        settings.options,
        settings.needs,
        scalar=scalar,
        uniform=call.others[-2] is None,
        over_group=bool(settings.group_name),
        capturing=capturing,
    )


def find_stats(call: Call, pair: Pair, way: Route, *, eager: bool) -> Found:
    """Statistics by `two_pass` or `filtered`; ``pair`` is that of the call."""
    spec, options, group_name, needs = call.settings[:4]
    with without_autocast(pair.a):
        rows = KeptRows.find(pair, spec)
        fewer = pair if rows is None else rows.of_pair(pair)
        if group_name:
            from tilewise.ops.distributed.ring_stats import ring_forward

            found = Found(ring_forward(fewer, spec, options, group_name, needs, call.settings.compared))
        elif way.strategy == "filtered":
            found = _filtered(call, pair, fewer, rows, eager=eager)
        else:
            backend = way.backend if rows is None else choose_backend(fewer.shape, spec, options)
            found = _two_pass(backend, fewer, call, save=eager)
            if is_recording() and way.reason.endswith(TOO_SMALL):
                assert pair.row_key is not None
                record(plans.keep_everything(pair), pair.row_key >= 0, options.filter_tolerance)
        return found if rows is None else found._replace(stats=rows.widen(found.stats), rows=rows)


def _two_pass(backend: Backend, pair: Pair, call: Call, *, save: bool) -> Found:
    spec, options, _, needs = call.settings[:4]
    if save and needs.b and not needs.bias:
        stats, saved = backend.forward_saving(pair, spec, options)
        return Found(stats, saved=saved, backend=backend)
    return Found(backend.forward(pair, spec, options), backend=backend)


def _filtered(call: Call, pair: Pair, fewer: Pair, rows: KeptRows | None, *, eager: bool) -> Found:
    """``fewer`` is the pair without the rows that are dropped. With fewer rows the exact gradients may be faster."""
    spec, options, _, needs = call.settings[:4]
    assert pair.row_key is not None
    plan: FilterPlan | None
    way = route(fewer.shape, spec, options, needs)
    if way.strategy != "filtered":
        found = _two_pass(way.backend, fewer, call, save=eager)
        plan = plans.keep_everything(pair) if not eager or is_recording() else None
    else:
        chosen = way.backend.filtered
        assert chosen is not None
        if eager and needs.b and not needs.bias:
            stats, plan, saved = chosen.forward_saving(fewer, spec, options)
        else:
            (stats, plan), saved = chosen.forward(fewer, spec, options), None
        if rows is not None:
            mass = plan.mass.new_zeros((plan.mass.shape[0], pair.a.shape[0])).index_copy_(1, rows.index, plan.mass)
            plan = dataclasses.replace(plan, mass=mass)
        found = Found(stats, plan, saved=saved)
    if is_recording():
        assert plan is not None
        record(plan, pair.row_key >= 0, options.filter_tolerance)
    # What is saved must not depend on whether anybody records: checkpointing compares.
    return found if eager else found._replace(plan=plan)


def stats_backward(call: Call, found: Found, grad: GradStats, needs: Needs, rows_known: bool) -> Grads:
    """Gradients by `two_pass` or `filtered`. Unless ``rows_known``, it is looked up again which rows count."""
    spec, options, group_name = call.settings[:3]
    pair = call.pair()
    with without_autocast(pair.a):
        if found.plan is not None:
            chosen = choose_backend(pair.shape, spec, options).filtered
            assert chosen is not None
            grads = chosen.backward(pair, found.stats, found.plan, grad, needs, spec, options, saved=found.saved)
            if grads is not None:
                return grads
        rows = found.rows if rows_known else KeptRows.find(pair, spec)
        stats = found.stats
        if rows is not None:
            pair, stats, grad = rows.of_pair(pair), rows.pick(stats), rows.pick(grad)
        if group_name:
            from tilewise.ops.distributed.ring_stats import ring_backward

            grads = ring_backward(Backward(pair, stats, grad, needs, spec, options), group_name)
        else:
            backend = found.backend or choose_backend(pair.shape, spec, options)
            grads = backend.backward(pair, stats, grad, needs, spec, options, saved=found.saved)
        return grads if rows is None else rows.widen_grads(grads)


class OnePassFound(NamedTuple):
    """The result of `one_pass` in forward."""

    one_pass: OnePass
    pair: Pair  # of the rows that count
    saved: Sequence[Tensor | None]  # backward may overwrite it
    rows: KeptRows | None


def find_loss(call: Call, way: Route, *, eager: bool) -> tuple[Tensor, OnePassFound]:
    """A scalar loss, and what its backward needs, by `one_pass`. Eager calls save only the rows that count."""
    spec, options, _, needs = call.settings[:4]
    pair, weights, one_pass = call.pair(), call.weights(), way.backend.one_pass
    assert one_pass is not None
    with without_autocast(pair.a):
        rows = KeptRows.find(pair, spec)
        fewer = pair if rows is None else rows.of_pair(pair)
        if rows is not None:
            weights = weights.rows(rows.index)
        room = fewer.a.shape[0] if eager else pair.a.shape[0]
        loss, saved = one_pass.forward(fewer, weights, needs, spec, options, room)
        return loss, OnePassFound(one_pass, fewer, saved, rows)


def loss_backward(call: Call, found: OnePassFound, grad_output: Tensor, *, eager: bool) -> Grads:
    """The gradients that `find_loss` saved, multiplied by ``grad_output``."""
    spec, options, _, needs = call.settings[:4]
    one_pass, pair, saved, rows = found
    with without_autocast(pair.a):
        shape = pair.shape if eager else call.shape
        grads = one_pass.backward(saved, pair, grad_output, needs, spec, options, shape, overwrite=eager)
        return grads if rows is None else rows.widen_grads(grads)


def found_again(call: Call, way: Route, saved: Sequence[Tensor]) -> OnePassFound:
    """What `find_loss` found, from the tensors that a registered operator saved."""
    pair, one_pass = call.pair(), way.backend.one_pass
    assert one_pass is not None
    rows = KeptRows.find(pair, call.settings.spec)
    return OnePassFound(one_pass, pair if rows is None else rows.of_pair(pair), saved, rows)
