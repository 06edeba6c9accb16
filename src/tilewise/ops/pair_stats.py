"""Statistics of all pair scores as one differentiable operator, over this process or over a group.

    forward    stats = merge of kernel.forward(rows, block) over the blocks of columns
    backward   the same loop: row gradients stay, column gradients belong to their block

Saved for backward: the features, the keys and the statistics. Never a tile.
"""

# No `from __future__ import annotations` here: the operator's schema is read from the annotations.
import contextlib
import dataclasses
from dataclasses import dataclass
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor

from tilewise.errors import GradientError
from tilewise.kernels.select import choose_backend
from tilewise.kernels.spec import Grads, GradStats, Needs, Pair, PairSpec, Stats, stat_dtype
from tilewise.ops.drop_rows import KeptRows
from tilewise.ops.plan import decode, encode, with_wanted
from tilewise.options import TileOptions

OptTensor = Optional[Tensor]  # noqa: UP045 - torch.library reads this form only
GRAD_NAMES = ("row_lse", "row_pos", "row_softplus", "row_sum", "row_entropy", "col_lse")
CONSTANT = ("row_hits", "row_top", "row_top_col")  # statistics without a gradient
NAMES = (*GRAD_NAMES, *CONSTANT)
KNOWN = ("row_lse", "row_entropy", "col_lse")  # what backward needs to know of all blocks


@dataclass(frozen=True, kw_only=True)
class PairKeys:
    """What a loss says about its rows and columns, beside their features: see `tilewise.kernels.spec`."""

    row_key: Tensor | None = None
    col_key: Tensor | None = None
    row_skip: Tensor | None = None
    col_skip: Tensor | None = None
    row_zero: Tensor | None = None
    col_zero: Tensor | None = None
    col_weight: Tensor | None = None


NO_KEYS = PairKeys()
KEY_NAMES = tuple(field.name for field in dataclasses.fields(PairKeys))


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
) -> Stats:
    """The statistics that ``spec`` asks for, differentiable in ``a``, ``b``, ``scale`` and ``bias``.

    Args:
        a: (n, d) rows.
        b: (m, d) columns, or None when they are the rows themselves (``spec.symmetric``).
        scale: 0-d tensor.
        bias: (m,) or None.
        keys: integer keys and the zeros from which scores are measured.
        group_name: the process group over which the columns are spread, "" for this process alone.
    """
    assert spec.symmetric == (b is None)
    group_name = with_wanted(group_name, a, b, scale, bias)
    named = keys.row_key, keys.col_key, keys.row_skip, keys.col_skip, keys.row_zero, keys.col_zero, keys.col_weight
    if _holds_numbers(a):
        values = _Eager.apply(a, b, scale, bias, _Plan(named, spec, options, group_name, torch.is_grad_enabled()))
    else:
        values = torch.ops.tilewise.pair_stats(a, b, scale, bias, *named, encode(spec, options, group_name))
    wanted = wanted_stats(spec)
    return Stats(**{name: value for name, value in zip(NAMES, values, strict=True) if name in wanted})


class _Plan(NamedTuple):
    """What a call has beside its four differentiable tensors: to autograd one object instead of eight arguments."""

    keys: tuple[Tensor | None, ...]  # in the order of PairKeys
    spec: PairSpec
    options: TileOptions
    group_name: str
    recorded: bool  # whether a backward may follow: an autograd function is told only what its inputs require

    @property
    def choices(self) -> tuple[PairSpec, TileOptions, str]:
        """As `encode` takes them."""
        return self.spec, self.options, self.group_name


def wanted_stats(spec: PairSpec) -> tuple[str, ...]:
    """The names of the statistics that ``spec`` asks for."""
    has_pos = spec.positive != "none" and not spec.softplus
    asked = [spec.row_lse, has_pos, spec.softplus, spec.row_sum, spec.row_entropy, spec.col_lse]
    asked += [has_pos, spec.row_top, spec.row_top]
    return tuple(name for name, on in zip(NAMES, asked, strict=True) if on)


def _forward(pair: Pair, spec: PairSpec, options: TileOptions, group_name: str, kept: KeptRows | None = None) -> Stats:
    if kept is not None:
        return kept.widen_stats(_forward(kept.of_pair(pair), spec, options, group_name))
    if group_name:
        from tilewise.ops.over_ring import ring_forward

        return ring_forward(pair, spec, options, group_name)
    return choose_backend(pair, spec, options).forward(pair, spec, options)


def _backward(
    pair: Pair,
    stats: Stats,
    grad: GradStats,
    needs: Needs,
    spec: PairSpec,
    options: TileOptions,
    group_name: str,
    kept: KeptRows | None = None,
    carried: object | None = None,
) -> Grads:
    if kept is not None:
        stats, grad = kept.of_stats(stats), kept.of_grad(grad)
        pair = kept.of_pair(pair)
        return kept.widen_grads(_backward(pair, stats, grad, needs, spec, options, group_name, carried=carried))
    if group_name:
        from tilewise.ops.over_ring import ring_backward

        return ring_backward(pair, stats, grad, needs, spec, options, group_name)
    return choose_backend(pair, spec, options).backward(pair, stats, grad, needs, spec, options, carried=carried)


def without_autocast(features: Tensor) -> contextlib.AbstractContextManager[object]:
    """Products here have types of their own. Outside of a region there is nothing to leave, which saves its cost."""
    kind = features.device.type
    if torch.is_autocast_enabled(kind):
        return torch.autocast(kind, enabled=False)
    return contextlib.nullcontext()


def _pair(a: Tensor, b: Tensor | None, scale: Tensor, bias: Tensor | None, *keys: Tensor | None) -> Pair:
    """The tensors of an operator, without their graph; keys in the order of `PairKeys`."""
    stat = stat_dtype(a.dtype)
    named: dict[str, Any] = dict(zip(KEY_NAMES, keys, strict=True))
    return Pair(
        a=a.detach(),
        b=(a if b is None else b).detach(),
        scale=scale.detach().to(stat),
        bias=None if bias is None else bias.detach().to(stat),
        **named,
    )


def _compute_stats(
    a: Tensor,
    b: OptTensor,
    scale: Tensor,
    bias: OptTensor,
    row_key: OptTensor,
    col_key: OptTensor,
    row_skip: OptTensor,
    col_skip: OptTensor,
    row_zero: OptTensor,
    col_zero: OptTensor,
    col_weight: OptTensor,
    plan: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    tensors = (a, b, scale, bias, row_key, col_key, row_skip, col_skip, row_zero, col_zero, col_weight)
    stats = _stats_and_kept(tensors, *decode(plan))[0]
    return _present(*_shown(stats.rounded(stat_dtype(a.dtype))), like=a)


def _stats_and_kept(
    tensors: tuple[Any, ...], spec: PairSpec, options: TileOptions, group_name: str
) -> tuple[Stats, KeptRows | None]:
    """The statistics, and which rows were looked at, so that backward need not find out again."""
    pair = _pair(*tensors)
    with without_autocast(pair.a):
        kept = KeptRows.find(pair, spec)
        stats = _forward(pair, spec, options, group_name, kept)
    return stats, kept


def _stats_and_carried(
    tensors: tuple[Any, ...], plan: _Plan, columns_only: bool
) -> tuple[Stats, KeptRows | None, object | None]:
    """The same, and what a backend carries over to backward where the gradient of the columns will be asked for."""
    if plan.group_name or not columns_only:
        return *_stats_and_kept(tensors, *plan.choices), None
    pair = _pair(*tensors)
    with without_autocast(pair.a):
        kept = KeptRows.find(pair, plan.spec)
        pair = pair if kept is None else kept.of_pair(pair)
        stats, carried = choose_backend(pair, plan.spec, plan.options).forward_carrying(pair, plan.spec, plan.options)
        stats = stats if kept is None else kept.widen_stats(stats)
    return stats, kept, carried


def _shown(stats: Stats) -> tuple[Tensor | None, ...]:
    """In the order of the operator's outputs."""
    return tuple(getattr(stats, name) for name in NAMES)


_pair_stats_op = torch.library.custom_op("tilewise::pair_stats", _compute_stats, mutates_args=())


def _present(*values: Tensor | None, like: Tensor) -> Any:
    """The same values with an empty tensor for each None: an operator returns tensors only."""
    dtype = stat_dtype(like.dtype)
    return tuple(like.new_empty(0, dtype=dtype) if value is None else value for value in values)


@_pair_stats_op.register_fake
def _(a, b, scale, bias, row_key, col_key, row_skip, col_skip, row_zero, col_zero, col_weight, plan):  # type: ignore[no-untyped-def]
    spec, _, _ = decode(plan)
    dtype, wanted = stat_dtype(a.dtype), wanted_stats(spec)
    cols = a.shape[0] if b is None else b.shape[0]

    def shaped(name: str) -> Tensor:
        if name not in wanted:
            return a.new_empty(0, dtype=dtype)
        size = cols if name == "col_lse" else a.shape[0]
        return a.new_empty(size, dtype=torch.int64 if name == "row_top_col" else dtype)

    return tuple(shaped(name) for name in NAMES)


def _compute_grads(
    a: Tensor,
    b: OptTensor,
    scale: Tensor,
    bias: OptTensor,
    row_key: OptTensor,
    col_key: OptTensor,
    row_skip: OptTensor,
    col_skip: OptTensor,
    row_zero: OptTensor,
    col_zero: OptTensor,
    col_weight: OptTensor,
    row_lse: Tensor,
    row_entropy: Tensor,
    col_lse: Tensor,
    grad_row_lse: OptTensor,
    grad_row_pos: OptTensor,
    grad_row_softplus: OptTensor,
    grad_row_sum: OptTensor,
    grad_row_entropy: OptTensor,
    grad_col_lse: OptTensor,
    needs: list[bool],
    plan: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tensors = (a, b, scale, bias, row_key, col_key, row_skip, col_skip, row_zero, col_zero, col_weight)
    coming = (grad_row_lse, grad_row_pos, grad_row_softplus, grad_row_sum, grad_row_entropy, grad_col_lse)
    kept = KeptRows.find(_pair(*tensors), decode(plan)[0])
    spec = decode(plan)[0]
    known = {"row_lse": row_lse, "row_entropy": row_entropy, "col_lse": col_lse}
    known = {name: value for name, value in known.items() if getattr(spec, name)}
    return _present(*_grads_of_kept(tensors, known, coming, needs, decode(plan), kept), like=a)


def _grads_of_kept(
    tensors: tuple[Any, ...],
    known: dict[str, Any],
    coming: tuple[OptTensor, ...],
    needs: list[bool],
    plan: tuple[PairSpec, TileOptions, str],
    kept: KeptRows | None,
    carried: object | None = None,
) -> Any:
    """Gradients, when it is known which rows count."""
    pair = _pair(*tensors)
    a, _, scale, bias = tensors[:4]
    stats, grad = Stats(**known), GradStats(**dict(zip(GRAD_NAMES, coming, strict=True)))
    wanted = Needs(a=needs[0], b=needs[1], scale=needs[2], bias=needs[3])
    with without_autocast(a):
        grads = _backward(pair, stats, grad, wanted, *plan, kept, carried)
    grad_scale = None if grads.scale is None else grads.scale.to(scale.dtype)
    grad_bias = None if grads.bias is None or bias is None else grads.bias.to(bias.dtype)
    return grads.a, grads.b, grad_scale, grad_bias


_pair_grads_op = torch.library.custom_op("tilewise::pair_grads", _compute_grads, mutates_args=())


@_pair_grads_op.register_fake
def _(  # type: ignore[no-untyped-def]
    a, b, scale, bias, row_key, col_key, row_skip, col_skip, row_zero, col_zero, col_weight, row_lse, row_entropy,
    col_lse, grad_row_lse, grad_row_pos, grad_row_softplus, grad_row_sum, grad_row_entropy, grad_col_lse, needs, plan,
):  # fmt: skip
    def shaped(needed: bool, like: Tensor | None) -> Tensor:
        return a.new_empty(0, dtype=dtype) if like is None or not needed else like.new_empty(like.shape)

    dtype = stat_dtype(a.dtype)
    return shaped(needs[0], a), shaped(needs[1], b), shaped(needs[2], scale), shaped(needs[3], bias)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    *tensors, plan = inputs
    ctx.plan = plan
    ctx.save_for_backward(*tensors, *(output[NAMES.index(name)] for name in KNOWN))


def _pull_back(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
    saved = ctx.saved_tensors  # once: checkpointing computes them anew each time
    tensors, known = saved[: -len(KNOWN)], saved[-len(KNOWN) :]
    spec, _, group_name = decode(ctx.plan)
    parts = _incoming(ctx, spec, group_name, grads)
    if parts is None:
        return (None,) * 12
    needs = [bool(needed) for needed in ctx.needs_input_grad[:4]]
    values = torch.ops.tilewise.pair_grads(*tensors, *known, *parts, needs, ctx.plan)
    return *(value if need else None for value, need in zip(values, needs, strict=True)), *(None,) * 8


def _incoming(
    ctx: Any, spec: PairSpec, group_name: str, grads: tuple[Tensor | None, ...]
) -> list[Tensor | None] | None:
    """What reaches each statistic, or None if nothing is to be done."""
    wanted = wanted_stats(spec)
    parts = [grad if name in wanted else None for name, grad in zip(GRAD_NAMES, grads, strict=False)]
    # Over a group every rank takes part in backward, whatever reached this one.
    idle = not any(ctx.needs_input_grad[:4]) or (all(part is None for part in parts) and not group_name)
    return None if idle else parts


def _no_second(ctx: Any, *grads: Tensor | None) -> None:
    raise GradientError(
        "tilewise losses have first derivatives only, and a second backward ran through a gradient. "
        "Detach the gradient, or use a dense loss for second-order methods"
    )


_pair_stats_op.register_autograd(_pull_back, setup_context=_save)
_pair_grads_op.register_autograd(_no_second, setup_context=lambda ctx, inputs, output: None)


def _holds_numbers(a: Tensor) -> bool:
    """Whether this is no stand-in, of a compiler, an exporter or the meta device: those see the registered operator."""
    return not torch.compiler.is_compiling() and type(a) in (Tensor, torch.nn.Parameter) and not a.is_meta


class _Eager(torch.autograd.Function):
    """The same operator without the dispatcher, whose detour costs a small batch more than its products."""

    @staticmethod
    def forward(
        ctx: Any, a: Tensor, b: Tensor | None, scale: Tensor, bias: Tensor | None, plan: _Plan
    ) -> tuple[Tensor | None, ...]:
        tensors = a, b, scale, bias, *plan.keys
        need_columns = plan.recorded and ctx.needs_input_grad[1] and not ctx.needs_input_grad[3]
        stats, ctx.kept, ctx.carried = _stats_and_carried(tensors, plan, need_columns)
        output = _shown(stats.rounded(stat_dtype(a.dtype)))
        ctx.set_materialize_grads(False)
        ctx.plan = plan
        known = (getattr(stats, name) for name in (*KNOWN, "row_pos"))
        ctx.save_for_backward(*tensors, *known)
        ctx.mark_non_differentiable(*(value for value in output[len(GRAD_NAMES) :] if value is not None))
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        plan: _Plan = ctx.plan
        parts = _incoming(ctx, plan.spec, plan.group_name, grads)
        if parts is None:
            return (None,) * 5
        saved = ctx.saved_tensors
        tensors, known = saved[: -len(KNOWN) - 1], saved[-len(KNOWN) - 1 :]
        needs = [bool(needed) for needed in ctx.needs_input_grad[:4]]
        carried, ctx.carried = ctx.carried, None  # given away: another backward does without
        if torch.is_grad_enabled() or not _holds_numbers(tensors[0]):
            # With create_graph a second derivative may be asked for; the registered operator answers it with an error.
            # A compiler of backward passes takes it as it is, instead of looking into kernels.
            known = _present(*known[: len(KNOWN)], like=tensors[0])
            values = torch.ops.tilewise.pair_grads(*tensors, *known, *parts, needs, encode(*plan.choices))
        else:
            named = dict(zip((*KNOWN, "row_pos"), known, strict=True))
            values = _grads_of_kept(tensors, named, tuple(parts), needs, plan.choices, ctx.kept, carried)
        return *(value if need else None for value, need in zip(values, needs, strict=True)), None
