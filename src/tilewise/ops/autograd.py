"""The two differentiable operators under all losses: `pair_stats` and `pair_loss`. `operators` has what they compute.

Eager calls go through one `torch.autograd.Function`. For a compiler, an exporter or the meta device, and for a backward
with ``create_graph``, the calls are registered operators instead: see `registered`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.kernels.spec import STATISTICS, Needs, PairSpec, RowWeights, Stats, wanted_names
from tilewise.ops.budget import with_budget
from tilewise.ops.call import (
    LEAVES,
    NO_KEYS,
    TENSORS,
    Call,
    Function,
    PairKeys,
    Settings,
    encode,
    holds_numbers,
    needs_of,
)
from tilewise.ops.operators import PAIR_LOSS, PAIR_STATS, Operator
from tilewise.ops.registered import in_types, nothing_to_do, registered_backward
from tilewise.ops.small import Calls, Rest, SmallLoss, SmallStats
from tilewise.options import TileOptions


def pair_stats(
    a: Tensor,
    b: Tensor | None,
    scale: Tensor | float,
    bias: Tensor | None = None,
    *,
    keys: PairKeys = NO_KEYS,
    full_keys: Callable[[], PairKeys] | None = None,
    spec: PairSpec,
    options: TileOptions,
    group_name: str = "",
    must_match: str = "",
    calls: Calls | None = None,
) -> Stats:
    """The statistics that ``spec`` requests, differentiable in ``a``, ``b``, ``scale`` and ``bias``.

    `Stats.row_shift` of the result is the shift of each row; None for no shift.

    Args:
        a: (n, d) rows.
        b: (m, d) columns, or None when they are the rows themselves (``spec.symmetric``).
        scale: 0-d tensor, or a number, which gets no gradient.
        bias: (m,) or None.
        keys: integer keys and shifts.
        full_keys: makes the keys with the shifts of rows and columns. Then small calls have shifts of their own;
            without it, the shifts are those of ``keys``.
        group_name: the process group over which the columns are sharded, "" for this process alone.
        must_match: over a group, the loss's own settings (`call_settings`), which must be equal on every rank.
        calls: those of the loss, see `tilewise.losses.entry`.
    """
    assert spec.symmetric == (b is None)
    job = None
    if group_name or options.workspace_mib == "auto":
        options, calls = with_budget(options, a.device, group_name), None  # free memory is in no key
    if (calls is not None and calls.jobs is not None) or (not group_name and holds_numbers(a)):
        job = (calls or Calls()).job(a, b, scale, bias, None, keys, spec, options)
    if job is not None:
        tensor, number = (None, scale) if type(scale) is float else (scale, None)
        own_shift = full_keys is not None and keys.row_shift is None
        rest = Rest(job, number, keys, None, spec, options, own_shift)
        *values, shift = SmallStats.apply(a, b, tensor, bias, rest)
        shift = keys.row_shift if shift is None else shift
        return Stats(**dict(zip(job.names, values, strict=True)), row_shift=shift)
    if full_keys is not None:
        keys = full_keys()
    settings = Settings(spec, options, group_name, needs_of(a, b, scale, bias), must_match=must_match)
    values = _apply(PAIR_STATS, (a, b, scale, bias), keys, None, None, settings)
    if torch.compiler.is_compiling():  # a compiler cannot trace a cached function
        names: Sequence[str] = [stat.name for stat in STATISTICS if stat.wanted(spec)]
    else:
        names = wanted_names(spec)
    return Stats(**dict(zip(names, values, strict=False)), row_shift=keys.row_shift)


def pair_loss(
    a: Tensor,
    b: Tensor | None,
    scale: Tensor | float,
    bias: Tensor | None = None,
    *,
    weights: RowWeights,
    keys: PairKeys = NO_KEYS,
    full_keys: Callable[[], PairKeys] | None = None,
    spec: PairSpec,
    options: TileOptions,
    calls: Calls | None = None,
) -> Tensor:
    """The scalar loss that `RowWeights` describes, differentiable in ``a``, ``b``, ``scale`` and ``bias``.

    Arguments as in `pair_stats`; in this process alone.

    Args:
        full_keys: makes the keys with the shifts of rows and columns, which small calls do not need.
    """
    if options.workspace_mib == "auto":
        options, calls = with_budget(options, a.device, ""), None
    if (calls is not None and calls.jobs is not None) or holds_numbers(a):
        job = (calls or Calls()).job(a, b, scale, bias, weights, keys, spec, options)
        if job is not None:
            tensor, number = (None, scale) if type(scale) is float else (scale, None)
            loss: Tensor = SmallLoss.apply(a, b, tensor, bias, Rest(job, number, keys, weights, spec, options))
            return loss
    if full_keys is not None:
        keys = full_keys()
    leaves = a, b, scale, bias
    settings = Settings(spec, options, "", needs_of(*leaves), weights.share, weights.kept)
    return _apply(PAIR_LOSS, leaves, keys, weights.each, weights.square, settings)[0]


def _apply(
    operator: Operator,
    leaves: tuple[Any, ...],
    keys: PairKeys,
    weight: Tensor | None,
    square: Tensor | None,
    settings: Settings,
) -> Sequence[Any]:
    others = *keys, weight, square
    if holds_numbers(leaves[0]):
        a, b, scale, bias = leaves
        number = None if isinstance(scale, Tensor) else scale
        rest = _Rest(operator, others, settings, number)
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


class _Eager(Function):
    """The operator in eager calls. It avoids torch's dispatcher, which is slower than the products of a small batch."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor | None, scale: Any, bias: Tensor | None, rest: _Rest) -> Any:
        call = Call((a, b, scale if rest.number is None else rest.number, bias), rest.others, rest.settings)
        done = rest.operator.forward(call, eager=True)
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
        if nothing_to_do(needs, rest.settings.group_name, grads):
            return (None,) * 5
        tensors = ctx.saved_tensors  # read once: checkpointing recomputes them at each access
        a, b, scale, bias = tensors[: len(LEAVES)]
        leaves = a, b, scale if rest.number is None else rest.number, bias
        call = Call(leaves, tensors[len(LEAVES) : len(TENSORS)], rest.settings)
        saved, (once, ctx.once) = tensors[len(TENSORS) :], (ctx.once, None)
        found = None
        # With create_graph the gradient may be differentiated again, as the registered operator can be. A compiler of
        # backward passes takes that operator as it is, instead of tracing into kernels.
        if not torch.is_grad_enabled() and holds_numbers(tensors[0]):
            found = rest.operator.backward(call, saved, once, grads, needs, eager=True)
        if found is not None:
            return *in_types(found, call.leaves, needs), None
        return *registered_backward(rest.operator, call, [], grads, needs), None
