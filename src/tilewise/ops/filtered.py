"""Statistics of all pair scores as a differentiable operator whose backward leaves out what carries no probability.

    forward    exact statistics, and a plan: which (row, tile) pairs matter         (`tilewise.kernels.filter`)
    backward   only those pairs; or, when most of them matter, everything

Saved for backward: the features, the keys, the log-sum-exps and the plan. A backend may carry more over to the exact
backward, in the memory of a gradient; a compiled graph, which holds tensors only, does without.
"""

# No `from __future__ import annotations` here: the operator's schema is read from the annotations.
import dataclasses
from collections.abc import Callable
from typing import Any, Optional

import torch
from torch import Tensor

from tilewise.kernels import filter as plans
from tilewise.kernels.filter import FilterPlan, filter_for, why_exact
from tilewise.kernels.select import choose_backend
from tilewise.kernels.spec import GradStats, Needs, Pair, PairSpec, Stats, stat_dtype
from tilewise.ops.drop_rows import Asked, KeptRows
from tilewise.ops.filter_report import is_recording, record
from tilewise.ops.pair_stats import (
    PairKeys,
    _backward,
    _holds_numbers,
    _no_second,
    _pair,
    pair_stats,
)
from tilewise.ops.plan import decode, encode
from tilewise.options import TileOptions

OptTensor = Optional[Tensor]  # noqa: UP045 - torch.library reads this form only
STATS = ("row_lse", "row_pos", "row_hits")
KNOWN = STATS[:2]  # what backward needs
PLAN = tuple(field.name for field in dataclasses.fields(FilterPlan))
MOST_KINDS = 256  # remembered


def filtered_stats(
    a: Tensor,
    b: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    *,
    keys: PairKeys,
    spec: PairSpec,
    options: TileOptions,
    group_name: str = "",
) -> Stats:
    """`pair_stats`, whose backward may leave out ``options.filter_tolerance`` of each row's probability.

    The statistics are exact. Where nothing can be left out (`tilewise.kernels.filter.why_exact`), over a group, when no
    gradient is asked for, or while a CUDA graph is captured, it is `pair_stats` itself.
    """
    wanted = [t for t in (a, b, scale, bias) if t is not None and t.requires_grad]
    exact = group_name or not wanted or not torch.is_grad_enabled()
    if exact or keys.row_key is None or why_exact(a.shape[0], b.shape[0], a.dtype, spec, options) or _capturing(a):
        return pair_stats(a, b, scale, bias, keys=keys, spec=spec, options=options, group_name=group_name)
    inputs = (a, b, scale, bias, keys.row_key, keys.row_zero, encode(spec, options, ""))
    values = _Eager.apply(*inputs) if _holds_numbers(a) else torch.ops.tilewise.filtered_stats(*inputs)
    return Stats(row_lse=values[0], row_pos=values[1], row_hits=values[2])


def _capturing(a: Tensor) -> bool:
    """Whether a CUDA graph is being captured, in which the host may not look at numbers."""
    return not torch.compiler.is_compiling() and a.is_cuda and torch.cuda.is_current_stream_capturing()


# The operator -------------------------------------------------------------------------------------------------------


# Kinds of calls of which so many rows were ignored the last time that nothing was left out: to begin early was in vain.
_in_vain: set[tuple[Any, ...]] = set()


def _ask(pair: Pair, spec: PairSpec, options: TileOptions) -> tuple[KeptRows | None, object | None]:
    """Which rows stay, and what was begun before the host knew, so that the device has work while it hears of it."""
    asked = Asked.about(pair, spec)
    if asked is None:
        return None, None
    begun = None if _kind_of(pair) in _in_vain else filter_for(pair, spec, options).begin(pair, spec, options)
    return asked.answer(), begun


def _kind_of(pair: Pair) -> tuple[Any, ...]:
    return pair.a.shape, pair.b.shape[0], pair.a.dtype, pair.a.device


def _remember(kind: tuple[Any, ...], in_vain: bool) -> None:
    """Whether the next call of the kind had better ask later."""
    if not in_vain:
        _in_vain.discard(kind)
    elif kind not in _in_vain:
        if len(_in_vain) >= MOST_KINDS:
            _in_vain.clear()
        _in_vain.add(kind)


def _plan_forward(
    pair: Pair,
    spec: PairSpec,
    options: TileOptions,
    kept: KeptRows | None,
    begun: object | None,
    carry: bool,
    planned: bool,
) -> tuple[Stats, FilterPlan | None, object | None, bool]:
    """Statistics, plan, what is carried, and whether the host knows already that nothing is left out.

    Rows that do not count are taken out first, and drop everything. A call that leaves nothing out has a plan only if
    one is wanted (``planned``).
    """
    if kept is not None and kept.index.shape[0] == 0:
        n, m, tiles = pair.a.shape[0], pair.b.shape[0], plans.tile_count(pair.b.shape[0])
        stats = Stats(**{name: pair.a.new_zeros(n, dtype=pair.stat_dtype) for name in STATS})
        order = torch.arange(m, dtype=torch.int32, device=pair.a.device)
        mass, mean = pair.a.new_zeros((tiles, n)), pair.a.new_zeros((tiles, pair.b.shape[1]))
        none = order.new_zeros(tiles)
        return stats, FilterPlan(order=order, mass=mass, mean=mean, kept=none, dense=order.new_zeros(1)), None, False
    fewer = pair if kept is None else kept.of_pair(pair)
    chosen, carried = filter_for(fewer, spec, options), None
    if not chosen.leaves_out(fewer):
        backend, plan = choose_backend(fewer, spec, options), plans.keep_everything(pair) if planned else None
        if carry:
            stats, carried = backend.forward_carrying(fewer, spec, options)
        else:
            stats = backend.forward(fewer, spec, options)
        return stats if kept is None else kept.widen_stats(stats), plan, carried, True
    # If nothing was begun, it is done now, and with all rows: the result is the same as if it was done earlier.
    if begun is None and kept is not None:
        begun = filter_for(pair, spec, options).begin(pair, spec, options)
    if carry:
        stats, plan, carried = chosen.forward_carrying(fewer, spec, options, begun)
    else:
        stats, plan = chosen.forward(fewer, spec, options, begun)
    if kept is None:
        return stats, plan, carried, False
    mass = plan.mass.new_zeros((plan.mass.shape[0], pair.a.shape[0])).index_copy_(1, kept.index, plan.mass)
    return kept.widen_stats(stats), dataclasses.replace(plan, mass=mass), carried, False


def _values(
    inputs: tuple[Any, ...], carry: bool = False, planned: bool = True
) -> tuple[tuple[Tensor, ...], FilterPlan | None, KeptRows | None, object | None, bool]:
    """Statistics as tensors, the plan, the rows that were looked at, what is carried, and whether nothing is left out.

    A loss sees `_rounded`. Unless ``planned``, there is no plan where nothing is left out and nobody records it.
    """
    a, b, scale, bias, row_key, row_zero, plan = inputs
    spec, options, _ = decode(plan)
    pair = _pair(a, b, scale, bias, row_key, None, None, None, row_zero, None, None)
    with torch.autocast(a.device.type, enabled=False):
        kept, begun = _ask(pair, spec, options)
        planned = planned or is_recording()
        stats, made, carried, exact = _plan_forward(pair, spec, options, kept, begun, carry, planned)
        _remember(_kind_of(pair), in_vain=exact and kept is not None)
    if is_recording():
        assert made is not None
        record(made, row_key >= 0, options.filter_tolerance)
    assert stats.row_lse is not None
    assert stats.row_pos is not None
    assert stats.row_hits is not None
    return (stats.row_lse, stats.row_pos, stats.row_hits), made, kept, carried, exact


def _tensors_of(plan: FilterPlan | None) -> tuple[Any, ...]:
    """In the order of the operator's outputs."""
    return tuple(None if plan is None else getattr(plan, name) for name in PLAN)


def _rounded(output: tuple[Tensor, ...], like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The statistics in their type: a backend may give log-sum-exps in float64, for backward."""
    lse, pos, hits = (value.to(stat_dtype(like.dtype)) for value in output)
    return lse, pos, hits


def _compute_stats(
    a: Tensor, b: Tensor, scale: Tensor, bias: OptTensor, row_key: Tensor, row_zero: OptTensor, plan: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    found, made, *_ = _values((a, b, scale, bias, row_key, row_zero, plan))
    order, mass, mean, kept, dense = _tensors_of(made)
    return *_rounded(found, a), order, mass, mean, kept, dense


_stats_op = torch.library.custom_op("tilewise::filtered_stats", _compute_stats, mutates_args=())


@_stats_op.register_fake
def _(a, b, scale, bias, row_key, row_zero, plan):  # type: ignore[no-untyped-def]
    tiles = plans.tile_count(b.shape[0])
    return (
        *(a.new_empty(a.shape[0], dtype=stat_dtype(a.dtype)) for _ in STATS),
        a.new_empty(b.shape[0], dtype=torch.int32),
        a.new_empty((tiles, a.shape[0])),
        a.new_empty((tiles, a.shape[1])),
        a.new_empty(tiles, dtype=torch.int32),
        a.new_empty(1, dtype=torch.int32),
    )


def _gradients(
    tensors: tuple[Any, ...],
    stats: Stats,
    made: FilterPlan | None,
    grad: GradStats,
    needs: list[bool],
    plan: str,
    rows: Callable[[Pair, PairSpec], KeptRows | None],
    carried: object | None = None,
) -> tuple[Tensor | None, ...]:
    """Of the kept pairs, or of all, if many are kept or there is no plan: then it is asked which rows count."""
    a, b, scale, bias, row_key, row_zero = tensors
    spec, options, _ = decode(plan)
    pair = _pair(a, b, scale, bias, row_key, None, None, None, row_zero, None, None)
    wanted = Needs(a=needs[0], b=needs[1], scale=needs[2], bias=needs[3])
    with torch.autocast(a.device.type, enabled=False):
        grads = None
        if made is not None:
            chosen = filter_for(pair, spec, options)
            grads = chosen.backward(pair, stats, made, grad, wanted, spec, options, carried=carried)
        if grads is None:
            grads = _backward(pair, stats, grad, wanted, spec, options, "", rows(pair, spec), carried)
    grad_scale = None if grads.scale is None else grads.scale.to(scale.dtype)
    grad_bias = None if grads.bias is None or bias is None else grads.bias.to(bias.dtype)
    return grads.a, grads.b, grad_scale, grad_bias


def _compute_grads(
    a: Tensor,
    b: Tensor,
    scale: Tensor,
    bias: OptTensor,
    row_key: Tensor,
    row_zero: OptTensor,
    row_lse: Tensor,
    row_pos: Tensor,
    order: Tensor,
    mass: Tensor,
    mean: Tensor,
    kept: Tensor,
    dense: Tensor,
    grad_row_lse: OptTensor,
    grad_row_pos: OptTensor,
    needs: list[bool],
    plan: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tensors = (a, b, scale, bias, row_key, row_zero)
    grad = GradStats(row_lse=grad_row_lse, row_pos=grad_row_pos)
    made = FilterPlan(order=order, mass=mass, mean=mean, kept=kept, dense=dense)
    stats = Stats(row_lse=row_lse, row_pos=row_pos)
    parts = _gradients(tensors, stats, made, grad, needs, plan, KeptRows.find)
    # An operator returns tensors only: an empty one for each gradient that nobody needs.
    first, second, third, fourth = (a.new_empty(0) if part is None else part for part in parts)
    return first, second, third, fourth


_grads_op = torch.library.custom_op("tilewise::filtered_grads", _compute_grads, mutates_args=())


@_grads_op.register_fake
def _(  # type: ignore[no-untyped-def]
    a, b, scale, bias, row_key, row_zero, row_lse, row_pos, order, mass, mean, kept, dense, grad_row_lse, grad_row_pos,
    needs, plan,
):  # fmt: skip
    def shaped(needed: bool, like: Tensor | None) -> Tensor:
        return a.new_empty(0) if like is None or not needed else like.new_empty(like.shape)

    return shaped(needs[0], a), shaped(needs[1], b), shaped(needs[2], scale), shaped(needs[3], bias)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    *tensors, ctx.plan = inputs
    ctx.save_for_backward(*tensors, *output[: len(KNOWN)], *output[len(STATS) :])


def _pull_back(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
    if not _asked(ctx, grads):
        return (None,) * 7
    return _by_operator(ctx, ctx.saved_tensors, grads)


def _asked(ctx: Any, grads: tuple[Tensor | None, ...]) -> bool:
    """Whether there is anything to do."""
    return any(ctx.needs_input_grad[:4]) and not (grads[0] is None and grads[1] is None)


def _by_operator(ctx: Any, saved: tuple[Tensor, ...], grads: tuple[Tensor | None, ...]) -> tuple[Any, ...]:
    needs = [bool(need) for need in ctx.needs_input_grad[:4]]
    return _wanted(torch.ops.tilewise.filtered_grads(*saved, grads[0], grads[1], needs, ctx.plan), needs)


def _wanted(values: tuple[Tensor | None, ...], needs: list[bool]) -> tuple[Any, ...]:
    """One for each input."""
    return *(value if need else None for value, need in zip(values, needs, strict=True)), None, None, None


_stats_op.register_autograd(_pull_back, setup_context=_save)
_grads_op.register_autograd(_no_second, setup_context=lambda ctx, inputs, output: None)


class _Eager(torch.autograd.Function):
    """The same operator without the dispatcher, which remembers which rows count, and what forward carries over."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Any:
        needs = ctx.needs_input_grad
        carry = needs[1] and not needs[3]
        found, made, ctx.rows, ctx.carried, ctx.exact = _values(inputs, carry, planned=False)
        # Whether anybody records must not change what is saved: checkpointing compares.
        _save(ctx, inputs, (*found, *_tensors_of(None if ctx.exact else made)))
        shown = _rounded(found, inputs[0])
        ctx.mark_non_differentiable(shown[STATS.index("row_hits")])
        return shown

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        if not _asked(ctx, grads):
            return (None,) * 7
        carried, ctx.carried = ctx.carried, None  # given away: another backward does without
        saved = ctx.saved_tensors  # once: checkpointing computes them anew each time
        if torch.is_grad_enabled() or not _holds_numbers(saved[0]):
            # With create_graph a second derivative may be asked for; the registered operator answers it with an error.
            del carried
            if saved[-1] is None:  # no plan was made, and the operator takes one
                pair = _pair(*saved[:5], None, None, None, saved[5], None, None)
                saved = *saved[: -len(PLAN)], *_tensors_of(plans.keep_everything(pair))
            return _by_operator(ctx, saved, grads)
        needs = [bool(need) for need in ctx.needs_input_grad[:4]]
        tensors, known, made = saved[:6], saved[6 : 6 + len(KNOWN)], saved[6 + len(KNOWN) :]
        stats = Stats(**dict(zip(KNOWN, known, strict=True)))
        plan = None if ctx.exact else FilterPlan(**dict(zip(PLAN, made, strict=True)))
        grad = GradStats(row_lse=grads[0], row_pos=grads[1])
        found = _gradients(tensors, stats, plan, grad, needs, ctx.plan, lambda *_: ctx.rows, carried)
        return _wanted(found, needs)
