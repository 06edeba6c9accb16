"""Statistics and gradients over a group: a backend's kernels, block by block of the ring.

Axes: n rows and m columns of this rank, d features, W ranks.

Ring (each rank has its own rows and its own columns): rows stay, blocks of columns move.

    forward    rows:     stats_r = merge over blocks q of kernel.forward(rows_r, block_q)
               columns:  every rank merges its part into the column statistics of the block, which return to their owner
    backward   rows:     dA_r = sum over q;   every rank adds its part of dB_q and dbias_q, which return to their owner

Where every rank has all rows and a shard of the columns (``spec.same_rows``), see `vocab_parallel`.
"""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tilewise.kernels.registry import choose_backend
from tilewise.kernels.spec import (
    Backward,
    FilterPlan,
    Grads,
    GradStats,
    Needs,
    Pair,
    PairSpec,
    Stats,
    wanted_stats,
)
from tilewise.kernels.tensors import COL_TENSORS, ROW_TENSORS
from tilewise.ops.budget import column_chunk, ring_team, sized
from tilewise.ops.distributed.vocab_parallel import (
    filtered_forward,
    local_backward,
    local_forward,
    merged_forward,
    sum_rows,
    summed_backward,
)
from tilewise.ops.route import route
from tilewise.options import TileOptions
from tilewise.ring.agree import agree
from tilewise.ring.blocks import Field, rotate_blocks
from tilewise.ring.exchange import Exchange, find_exchange
from tilewise.ring.schedule import Shards

PAYLOAD = ("b", *COL_TENSORS)  # the fields of `Pair` that are sent with a block of columns
LEAF_NAMES = ("rows", "columns", "scale", "bias")  # for messages, in the order of `Needs`
TARGETS = "targets (every rank has all tokens; data parallelism needs no group)"
SAME = {"row_key": TARGETS, "pick": "picked ids", "row_scale": "temperature of each token"}


def ring_forward(
    pair: Pair,
    spec: PairSpec,
    options: TileOptions,
    group_name: str,
    needs: Needs,
    must_match: str = "",
    *,
    rows_given: int | None = None,
    save: bool = False,
    filtered: bool = False,
) -> tuple[Stats, FilterPlan | None, object | None]:
    """Statistics of this rank's rows over all columns, and of its columns over all rows; and the filter's plan, if any.

    ``must_match``: the loss's own settings, which must be equal on every rank. ``rows_given``: the number of rows
    before ignored ones were dropped. The default workspace depends on it, and on the largest shard of the columns.
    ``save``: also return what `Backend.forward_saving` does, where the columns stay on their rank. ``filtered``: use
    the filter, unless the columns of some rank are not suited for it.
    """
    exchange = find_exchange(group_name)
    if exchange.world == 1:
        stats, saved = local_forward(pair, spec, _sized(options, pair, spec, needs, rows_given), save=save)
        return stats, None, saved
    shards = _agree(exchange, "forward", pair, spec, options, needs, must_match)
    options = _sized(options, pair, spec, needs, rows_given, max(shards.cols))
    pair = _placed(pair, spec, shards)
    if spec.same_rows:
        if filtered and all(_is_filtered(pair, spec, options, needs, cols) for cols in set(shards.cols)):
            return filtered_forward(exchange, list(shards.cols), pair, spec, options, save=save)
        stats, saved = merged_forward(exchange, pair, spec, options, save=save)
        return stats, None, saved
    total, of_columns, begun = Stats(), _column_stats(spec), False
    team, options = ring_team(options, pair.shape, max(shards.cols), exchange.world)

    def work(owner: int, block: dict[str, Tensor]) -> Mapping[str, Tensor] | None:
        nonlocal total, begun
        part, how = _pair_with_block(pair, spec, shards, owner, block)
        first, begun = not begun, True
        if not first and 0 in (part.a.shape[0], part.b.shape[0]):
            nothing = torch.full((part.b.shape[0],), -torch.inf, dtype=torch.float64, device=part.b.device)
            return dict.fromkeys(of_columns, nothing) or None  # the log of a sum over no rows
        stats = choose_backend(part.shape, how, options).forward(part, how, options)
        # In float64, so that the number of blocks costs no accuracy; these are vectors.
        total = total.merge(stats.rows().rounded(torch.float64))
        return {name: getattr(stats, name).double() for name in of_columns} or None

    how_to_add: dict[str, Any] = {"accumulators": [Field(name, torch.float64) for name in of_columns], "team": team}
    home = rotate_blocks(exchange, shards.cols, _payload(pair), work, merge=_merge_stats, **how_to_add)
    return dataclasses.replace(total, **home).rounded(pair.stat_dtype), None, None


def _is_filtered(pair: Pair, spec: PairSpec, options: TileOptions, needs: Needs, cols: int) -> bool:
    """Whether a rank with so many columns may filter."""
    return route(pair.shape._replace(cols=cols), spec, options, needs, over_group=True).strategy == "filtered"


def ring_backward(
    job: Backward,
    group_name: str,
    *,
    rows_given: int | None = None,
    kept: Tensor | None = None,
    plan: FilterPlan | None = None,
    saved: object | None = None,
) -> Grads:
    """Gradients of this rank's rows over all columns, and of its columns over all rows; the caller rounds them.

    ``kept``: which of the rows given these are; None for all. ``plan`` and ``saved``: from `ring_forward`.

    The gradient of the scale is this rank's share (its own rows); with ``same_rows`` it is whole on every rank.
    """
    exchange = find_exchange(group_name)
    pair, stats, grad, needs, spec, options = job = job._replace(grad=_fill(job.grad, job.spec, job.pair))
    if exchange.world == 1:
        return local_backward(job._replace(options=_sized(options, pair, spec, needs, rows_given)), None, saved)
    shards = _agree(exchange, "backward", pair, spec, options, needs)
    pair, options = _placed(pair, spec, shards), _sized(options, pair, spec, needs, rows_given, max(shards.cols))
    if spec.same_rows:
        job, rows = job._replace(pair=pair, options=options), rows_given or pair.a.shape[0]
        sum_up = functools.partial(sum_rows, exchange, job=job, group_name=group_name, rows=rows, kept=kept)
        return summed_backward(exchange, job, sum_up, plan, saved)
    of_columns = _column_stats(spec)
    grad_a: Tensor | None = None  # those of the rows and of the scale stay here
    scale = torch.zeros((), dtype=torch.float64, device=pair.a.device)
    cols_wanted = needs.a if spec.symmetric else needs.b
    team, options = ring_team(options, pair.shape, max(shards.cols), exchange.world)
    chunk = None
    if cols_wanted and team == 1 and not spec.symmetric:
        chunk, options = column_chunk(options, pair.b.shape[1] * pair.stat_dtype.itemsize, max(shards.cols))
    travelling = pair.stat_dtype if options.ring_gradients == "float32" else pair.a.dtype

    def work(owner: int, block: dict[str, Tensor], first: int = 0) -> Mapping[str, Tensor] | None:
        nonlocal grad_a
        part, how = _pair_with_block(pair, spec, shards, owner, block, first)
        if 0 in (part.a.shape[0], part.b.shape[0]):
            return None
        known = dataclasses.replace(stats, **{name: block[name] for name in of_columns})
        coming = dataclasses.replace(grad, **{name: block[f"grad_{name}"] for name in of_columns})
        wanted = needs if how.symmetric else needs._replace(b=cols_wanted)
        backend = choose_backend(part.shape, how, options)
        grads = backend.backward(part, known, coming, wanted, how, options, grad_dtype=pair.stat_dtype)
        if grads.a is not None:
            grad_a = grads.a if grad_a is None else grad_a.add_(grads.a)
        if grads.scale is not None:
            scale.add_(grads.scale)
        owed = {"grad": grads.b, "bias": grads.bias}
        return None if how.symmetric else {name: value for name, value in owed.items() if value is not None}

    accumulators = [Field("grad", travelling, pair.b.shape[1])] if cols_wanted else []
    accumulators += [Field("bias", pair.stat_dtype)] if needs.bias else []
    payload = _payload(pair)
    for name in of_columns:
        payload |= {name: getattr(stats, name), f"grad_{name}": getattr(grad, name)}
    how_to_add: dict[str, Any] = {"accumulators": accumulators, "merge": _merge_sum, "chunk": chunk, "team": team}
    home = rotate_blocks(exchange, shards.cols, payload, work, **how_to_add)
    grad_b = home.get("grad")
    if grad_a is None and needs.a:
        grad_a = torch.zeros(pair.a.shape, dtype=pair.stat_dtype, device=pair.a.device)
    if spec.symmetric and grad_a is not None and grad_b is not None:
        grad_a, grad_b = grad_a.add_(grad_b), None
    return Grads(a=grad_a, b=grad_b, scale=scale if needs.scale else None, bias=home.get("bias"))


def _sized(
    options: TileOptions, pair: Pair, spec: PairSpec, needs: Needs, rows: int | None, cols: int | None = None
) -> TileOptions:
    """The options with the workspace for these numbers of rows and columns; by default those of the pair."""
    shape = pair.shape
    shape = shape._replace(rows=shape.rows if rows is None else rows, cols=shape.cols if cols is None else cols)
    return sized(options, shape, spec, needs)


def _agree(
    exchange: Exchange,
    phase: str,
    pair: Pair,
    spec: PairSpec,
    options: TileOptions,
    needs: Needs,
    must_match: str = "",
) -> Shards:
    """Sizes of all shards, or a `GroupError` on every rank."""
    present = [name for name in (*ROW_TENSORS, *COL_TENSORS) if getattr(pair, name) is not None]
    changed = {name: value for name, value in vars(spec).items() if value != getattr(PairSpec(), name)}
    call = {
        "call": f"{phase} of a loss",
        "width": pair.a.shape[1],
        "width of the guide": pair.shape.guide_width,
        "type": str(pair.a.dtype).removeprefix("torch."),
        "loss": " ".join([*(f"{name}={value}" for name, value in changed.items()), must_match]).strip() or "none",
        "keys": " ".join(present) or "none",
        "options": " ".join(f"{name}={value}" for name, value in vars(options).items()),
        "requires_grad": " ".join(name for name, need in zip(LEAF_NAMES, needs, strict=True) if need) or "none",
    }
    if spec.same_rows:
        call["rows"] = pair.a.shape[0]
        call["picks"] = pair.shape.picks
        for name, words in SAME.items():
            values = getattr(pair, name)
            if values is not None and values.device.type == "cpu":  # elsewhere, looking would wait
                call[words] = f"checksum {zlib.crc32(values.numpy().tobytes()):08x}"
    return agree(exchange, pair.a.shape[0], pair.b.shape[0], call, pair.a.device)


def _placed(pair: Pair, spec: PairSpec, shards: Shards) -> Pair:
    """The pair with global indices: the start of its rows and columns, and keys that are valid on every rank.

    A negative key means none and is not changed.
    """
    first = shards.col_start(shards.rank)
    key = pair.row_key
    if spec.local_keys and key is not None:
        key = torch.where(key < 0, key, key + first)
    return dataclasses.replace(pair, row_key=key, row_start=shards.row_start, col_start=first)


def _payload(pair: Pair) -> dict[str, Tensor]:
    """The tensors that are sent with a block of columns."""
    return {name: getattr(pair, name) for name in PAYLOAD if getattr(pair, name) is not None}


def _pair_with_block(
    pair: Pair, spec: PairSpec, shards: Shards, owner: int, block: dict[str, Tensor], first: int = 0
) -> tuple[Pair, PairSpec]:
    """The pair of this rank's rows with columns of one block. The scores can be symmetric only for its own block.

    ``owner``: the first of the ranks whose columns these are.
    """
    if owner == shards.rank and block["b"].shape[0] == pair.b.shape[0]:
        return pair, spec
    columns: dict[str, Any] = {name: block.get(name) for name in PAYLOAD}
    part = dataclasses.replace(pair, col_start=shards.col_start(owner) + first, **columns)
    return part, dataclasses.replace(spec, symmetric=False)


def _fill(grad: GradStats, spec: PairSpec, pair: Pair) -> GradStats:
    """Fill in zeros for statistics that the ring needs and that this rank's loss does not depend on."""

    def zeros(like: Tensor) -> Tensor:
        return torch.zeros(like.shape[0], dtype=pair.stat_dtype, device=like.device)

    missing = {
        stat.name: zeros(pair.b if stat.of_columns else pair.a)
        for stat in wanted_stats(spec)
        if (stat.of_columns or stat.name == "row_softplus") and getattr(grad, stat.name) is None
    }
    return dataclasses.replace(grad, **missing)


def _column_stats(spec: PairSpec) -> tuple[str, ...]:
    """The names of the statistics of columns, which every rank merges into the block."""
    return tuple(stat.name for stat in wanted_stats(spec) if stat.of_columns)


def _merge_stats(held: dict[str, Tensor], added: Mapping[str, Tensor]) -> None:
    merged = Stats(**held).merge(Stats(**added))
    for name, value in held.items():
        value.copy_(getattr(merged, name))


def _merge_sum(held: dict[str, Tensor], added: Mapping[str, Tensor]) -> None:
    for name, value in held.items():
        if value.dtype == added[name].dtype:
            value.add_(added[name])
        else:
            value.copy_(added[name].add_(value))
