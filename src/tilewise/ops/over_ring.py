"""The one op over a group: kernels x ring.

Axes: n rows and m columns of this rank, d features, W ranks.

Ring (each rank has its own rows and its own columns): rows stay, blocks of columns travel.

    forward    rows:     stats_r = merge over blocks q of kernel.forward(rows_r, block_q)
               columns:  each host adds its rows' share to the block's col_lse, which comes home
    backward   rows:     dA_r = sum over q;   the block collects dB_q and dbias_q from every host and brings them home

Same rows (``spec.same_rows``: every rank has all rows and a slice of the columns): nothing travels but vectors.

    forward    row_lse = log sum_r exp(row_lse_r),  row_pos = sum_r row_pos_r, ...
               row_entropy = sum_r w_r (row_entropy_r + row_lse - row_lse_r),  w_r = exp(row_lse_r - row_lse)
    backward   dA = sum_r dA_r, on every rank;   dB_r and dbias_r stay
"""

# No `from __future__ import annotations` here: the operators' schemas are read from the annotations.
import dataclasses
import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tilewise.errors import GroupError
from tilewise.kernels.select import choose_backend
from tilewise.kernels.spec import Grads, GradStats, Needs, Pair, PairSpec, Stats
from tilewise.ops.plan import named_inputs, read_wanted
from tilewise.options import TileOptions
from tilewise.ring.agree import agree
from tilewise.ring.blocks import Field, Guard, go_round
from tilewise.ring.exchange import Exchange, find_exchange
from tilewise.ring.shards import Shards

CARGO = ("bias", "col_key", "col_skip", "col_zero", "col_weight")  # beside the features, in `Pair`
ROWS = ("row_key", "row_skip", "row_zero")
TARGETS = "targets (every rank has all tokens; data parallelism needs no group)"


def ring_forward(pair: Pair, spec: PairSpec, options: TileOptions, group_name: str) -> Stats:
    """Statistics of this rank's rows over all columns, and of its columns over all rows."""
    name, wanted = read_wanted(group_name)
    exchange = find_exchange(name)
    if exchange.world == 1:
        return choose_backend(pair, spec, options).forward(pair, spec, options)
    shards = _agree(exchange, "forward", pair, spec, options, wanted)
    pair = _placed(pair, spec, shards)
    if spec.same_rows:
        return _merge_slices(exchange, pair, spec, options)
    total = Stats()

    def work(owner: int, block: dict[str, Tensor]) -> Mapping[str, Tensor] | None:
        nonlocal total
        part, how = _meet(pair, spec, shards, owner, block)
        if owner != shards.rank and 0 in (part.a.shape[0], part.b.shape[0]):
            return None if not spec.col_lse else {"col_lse": _nothing(part)}
        stats = choose_backend(part, how, options).forward(part, how, options)
        # In float64, so that the number of blocks costs no accuracy; these are vectors.
        total = total.merge(stats.rows().rounded(torch.float64))
        return None if stats.col_lse is None else {"col_lse": stats.col_lse.double()}

    credits = [Field("col_lse", torch.float64)] if spec.col_lse else []
    home = go_round(exchange, shards.cols, _cargo(pair), work, credits=credits, join=_join_lse)
    return dataclasses.replace(total, col_lse=home.get("col_lse")).rounded(pair.stat_dtype)


def ring_backward(
    pair: Pair,
    stats: Stats,
    grad: GradStats,
    needs: Needs,
    spec: PairSpec,
    options: TileOptions,
    group_name: str,
) -> Grads:
    """Gradients of this rank's rows over all columns, and of its columns over all rows.

    The gradient of the scale is this rank's share (its own rows); with ``same_rows`` it is whole on every rank.
    """
    exchange = find_exchange(read_wanted(group_name)[0])
    grad = _fill(grad, spec, pair)
    if exchange.world == 1:
        return choose_backend(pair, spec, options).backward(pair, stats, grad, needs, spec, options)
    shards = _agree(exchange, "backward", pair, spec, options, named_inputs(needs.a, needs.b, needs.scale, needs.bias))
    pair = _placed(pair, spec, shards)
    if spec.same_rows:
        return _sum_slices(exchange, pair, stats, grad, needs, spec, options)
    sums = _RowSums(pair)
    cols_wanted = needs.a if spec.symmetric else needs.b
    travelling = pair.stat_dtype if options.ring_gradients == "float32" else pair.a.dtype

    def work(owner: int, block: dict[str, Tensor]) -> Mapping[str, Tensor] | None:
        part, how = _meet(pair, spec, shards, owner, block)
        if 0 in (part.a.shape[0], part.b.shape[0]):
            return None
        known = Stats(row_lse=stats.row_lse, row_entropy=stats.row_entropy, col_lse=block.get("col_lse"))
        coming = dataclasses.replace(grad, col_lse=block.get("grad_col_lse"))
        wanted = needs if how.symmetric else dataclasses.replace(needs, b=cols_wanted)
        backend = choose_backend(part, how, options)
        grads = backend.backward(part, known, coming, wanted, how, options, grad_dtype=pair.stat_dtype)
        sums.add(grads)
        owed = {"grad": grads.b, "bias": grads.bias}
        return None if how.symmetric else {name: value for name, value in owed.items() if value is not None}

    credits = [Field("grad", travelling, pair.b.shape[1])] if cols_wanted else []
    credits += [Field("bias", pair.stat_dtype)] if needs.bias else []
    cargo = _cargo(pair)
    if spec.col_lse:
        assert stats.col_lse is not None
        assert grad.col_lse is not None
        cargo.update(col_lse=stats.col_lse, grad_col_lse=grad.col_lse)
    home = go_round(exchange, shards.cols, cargo, work, credits=credits, join=_join_sum)
    return sums.finish(needs, spec, home)


class _RowSums:
    """Gradients that stay: those of the rows, and of the scale."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.a: Tensor | None = None
        self.scale = torch.zeros((), dtype=torch.float64, device=pair.a.device)

    def add(self, grads: Grads) -> None:
        """Those of one more block. The first one's memory is taken over."""
        if grads.a is not None:
            self.a = grads.a if self.a is None else self.a.add_(grads.a)
        if grads.scale is not None:
            self.scale += grads.scale

    def finish(self, needs: Needs, spec: PairSpec, home: dict[str, Tensor]) -> Grads:
        """All gradients, in the types of their inputs."""
        pair = self.pair
        grad_a, grad_b = self.a, home.get("grad")
        if grad_a is None and needs.a:
            grad_a = torch.zeros(pair.a.shape, dtype=pair.stat_dtype, device=pair.a.device)
        if spec.symmetric and grad_a is not None and grad_b is not None:
            grad_a, grad_b = grad_a.add_(grad_b), None
        return Grads(
            a=None if grad_a is None else grad_a.to(pair.a.dtype),
            b=None if grad_b is None else grad_b.to(pair.b.dtype),
            scale=self.scale.to(pair.stat_dtype) if needs.scale else None,
            # A view into a buffer that also held other credits; an operator's output owns its memory.
            bias=home["bias"].clone() if needs.bias else None,
        )


def _agree(exchange: Exchange, phase: str, pair: Pair, spec: PairSpec, options: TileOptions, wanted: str) -> Shards:
    """Sizes of all shards, or a `GroupError` on every rank."""
    present = [name for name in (*ROWS, *CARGO) if getattr(pair, name) is not None]
    asked = {name: value for name, value in vars(spec).items() if value != getattr(PairSpec(), name)}
    call = {
        "call": f"{phase} of a loss",
        "width": pair.a.shape[1],
        "type": str(pair.a.dtype).removeprefix("torch."),
        "loss": " ".join(f"{name}={value}" for name, value in asked.items()) or "none",
        "keys": " ".join(present) or "none",
        "options": " ".join(f"{name}={value}" for name, value in vars(options).items()),
        "device": pair.a.device.type if exchange.refuses(pair.a.device) is None else "one that cannot travel",
        "requires_grad": wanted or "none",
    }
    if spec.same_rows:
        call["rows"] = pair.a.shape[0]
        if pair.row_key is not None and pair.row_key.device.type == "cpu":  # elsewhere, looking would wait
            call[TARGETS] = f"checksum {zlib.crc32(pair.row_key.numpy().tobytes()):08x}"
    shards = agree(exchange, pair.a.shape[0], pair.b.shape[0], call)
    if reason := exchange.refuses(pair.a.device):
        raise GroupError(f"features on {pair.a.device} cannot travel through this group: {reason}")
    return shards


def _placed(pair: Pair, spec: PairSpec, shards: Shards) -> Pair:
    """The pair at its place in the whole: where it starts, and keys that mean the same on every rank.

    A negative key, which stands for none, stays.
    """
    first = shards.col_start(shards.rank)
    key = pair.row_key
    if spec.local_keys and key is not None:
        key = torch.where(key < 0, key, key + first)
    return dataclasses.replace(pair, row_key=key, row_start=shards.row_start, col_start=first)


def _cargo(pair: Pair) -> dict[str, Tensor]:
    """What a block of columns carries."""
    named = {"features": pair.b, **{name: getattr(pair, name) for name in CARGO}}
    return {name: value for name, value in named.items() if value is not None}


def _meet(pair: Pair, spec: PairSpec, shards: Shards, owner: int, block: dict[str, Tensor]) -> tuple[Pair, PairSpec]:
    """This rank's rows with one block of columns. Only with its own block can the scores be symmetric."""
    if owner == shards.rank:
        return pair, spec
    part = dataclasses.replace(
        pair,
        b=block["features"],
        col_start=shards.col_start(owner),
        bias=block.get("bias"),
        col_key=block.get("col_key"),
        col_skip=block.get("col_skip"),
        col_zero=block.get("col_zero"),
        col_weight=block.get("col_weight"),
    )
    return part, dataclasses.replace(spec, symmetric=False)


def _fill(grad: GradStats, spec: PairSpec, pair: Pair) -> GradStats:
    """Zeros where a rank's loss did not depend on a statistic that its part in the ring needs."""

    def zeros(like: Tensor) -> Tensor:
        return torch.zeros(like.shape[0], dtype=pair.stat_dtype, device=like.device)

    if spec.softplus and grad.row_softplus is None:
        grad = dataclasses.replace(grad, row_softplus=zeros(pair.a))
    if spec.col_lse and grad.col_lse is None:
        grad = dataclasses.replace(grad, col_lse=zeros(pair.b))
    return grad


def _nothing(part: Pair) -> Tensor:
    """The log of a sum over no rows."""
    return torch.full((part.b.shape[0],), -torch.inf, dtype=torch.float64, device=part.b.device)


def _join_lse(held: dict[str, Tensor], added: Mapping[str, Tensor]) -> None:
    torch.logaddexp(held["col_lse"], added["col_lse"], out=held["col_lse"])


def _join_sum(held: dict[str, Tensor], added: Mapping[str, Tensor]) -> None:
    for name, value in held.items():
        if value.dtype == added[name].dtype:
            value.add_(added[name])
        else:
            value.copy_(added[name].add_(value))


def _merge_slices(exchange: Exchange, pair: Pair, spec: PairSpec, options: TileOptions) -> Stats:
    """Row statistics over the slices of all ranks: one maximum and one sum of vectors, and one more for the columns."""
    guard = Guard()  # the others wait for this rank's part: if it fails, they get NaN
    local = guard.run(lambda: choose_backend(pair, spec, options).forward(pair, spec, options))
    merged = _merge(exchange, local or _spoilt(pair, spec), pair.stat_dtype)
    guard.check()
    return merged


def _spoilt(pair: Pair, spec: PairSpec) -> Stats:
    """In place of statistics that could not be computed: what nobody takes for a number."""
    nan = torch.full((pair.a.shape[0],), torch.nan, dtype=torch.float64, device=pair.a.device)
    has_pos = None if spec.positive == "none" else nan
    return Stats(
        row_lse=nan if spec.row_lse else None,
        row_pos=has_pos,
        row_hits=has_pos,
        row_sum=nan if spec.row_sum else None,
        row_entropy=nan if spec.row_entropy else None,
        # A maximum may pass over NaN, and takes infinity for the largest score.
        row_top=torch.full_like(nan, torch.inf) if spec.row_top else None,
        row_top_col=torch.full_like(nan, -1.0) if spec.row_top else None,
    )


def _merge(exchange: Exchange, local: Stats, dtype: torch.dtype) -> Stats:
    """The statistics of all slices; those of this rank are ``local``."""
    stats = {name: value.double() for name, value in vars(local).items() if value is not None}
    best, col = stats.pop("row_top", None), stats.pop("row_top_col", None)
    if "row_lse" in stats:
        top, own = stats["row_lse"].clone(), stats["row_lse"]
        exchange.max_(top)
        top = torch.where(top == -torch.inf, 0.0, top)
        stats["row_lse"] = (own - top).exp_()
        if "row_entropy" in stats:
            above = torch.where(own == -torch.inf, 0.0, top - own)
            stats["row_entropy"] = stats["row_lse"] * (stats["row_entropy"] + above)
    if stats:
        packed = torch.stack(list(stats.values()))
        exchange.sum_(packed)
        stats = dict(zip(stats, packed, strict=True))
    if "row_lse" in stats:
        total, log_total = stats["row_lse"], stats["row_lse"].log()
        if "row_entropy" in stats:
            entropy = stats["row_entropy"] / total + log_total
            stats["row_entropy"] = torch.where(total == 0.0, 0.0, entropy)
        stats["row_lse"] = log_total + top
    if "row_hits" in stats:
        # A row has one target. Found on two ranks, it was another one on each of them.
        stats["row_pos"] = torch.where(stats["row_hits"] > 1.5, torch.nan, stats["row_pos"])
    # Rows of one packed tensor; an operator's outputs own their memory.
    merged = {name: value.to(dtype, copy=True) for name, value in stats.items()}
    if best is not None and col is not None:
        merged["row_top"], merged["row_top_col"] = _merge_tops(exchange, best, col, dtype)
    return Stats(**merged)


def _merge_tops(exchange: Exchange, best: Tensor, col: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The largest score over the slices of all ranks and its column, the lowest of equal ones. All float64."""
    top = best.clone()
    exchange.max_(top)
    first = torch.where(best == top, -col, -torch.inf)
    exchange.max_(first)
    return top.to(dtype), torch.where(first == -torch.inf, 0.0, -first).long()


def _sum_slices(
    exchange: Exchange,
    pair: Pair,
    stats: Stats,
    grad: GradStats,
    needs: Needs,
    spec: PairSpec,
    options: TileOptions,
) -> Grads:
    """This rank's slice with the statistics of all; what belongs to the rows is added up over the ranks."""

    def work() -> Grads:
        backend = choose_backend(pair, spec, options)
        return backend.backward(pair, stats, grad, needs, spec, options, grad_dtype=pair.stat_dtype)

    guard = Guard()  # the others wait for this rank's part: if it fails, they get NaN
    grads = guard.run(work)
    if grads is None:
        nan = torch.full((), torch.nan, dtype=pair.stat_dtype, device=pair.a.device)
        grads = Grads(a=nan.expand(pair.a.shape).clone() if needs.a else None, scale=nan if needs.scale else None)
    if grads.a is not None:
        exchange.sum_(grads.a)
    scale = None if grads.scale is None else grads.scale.double()
    if scale is not None:
        exchange.sum_(scale)
    guard.check()
    return Grads(
        a=None if grads.a is None else grads.a.to(pair.a.dtype),
        b=None if grads.b is None else grads.b.to(pair.b.dtype),
        scale=None if scale is None else scale.to(pair.stat_dtype),
        bias=grads.bias,
    )


def reduce_over_group(loss_n: Tensor, reduction: str, group_name: str) -> Tensor:
    """``W / N`` ("mean") or ``W`` ("sum") times the sum over this rank's rows: see `tilewise.ops.reduce`."""
    weight: Tensor = torch.ops.tilewise.row_weight(loss_n.detach(), reduction, group_name)
    return weight * loss_n.sum()


@torch.library.custom_op("tilewise::row_weight", mutates_args=())
def _row_weight(loss_n: Tensor, reduction: str, group_name: str) -> Tensor:
    exchange = find_exchange(group_name)
    weight = float(exchange.world)
    if reduction == "mean":
        rows = agree(exchange, loss_n.shape[0], 0, {"call": "mean of a loss"}).all_rows
        weight = weight / rows if rows else float("nan")
    return loss_n.new_full((), weight)


@_row_weight.register_fake
def _(loss_n, reduction, group_name):  # type: ignore[no-untyped-def]
    return loss_n.new_empty(())


def spread_over_group(columns: Tensor, settings: str, group_name: str) -> tuple[Tensor, Tensor]:
    """Where this rank's slice of the columns starts, and how many columns there are in all: 0-d tensors."""
    start, total = torch.ops.tilewise.group_spread(columns.detach(), settings, group_name).unbind()
    return start, total


@torch.library.custom_op("tilewise::group_spread", mutates_args=())
def _group_spread(columns: Tensor, settings: str, group_name: str) -> Tensor:
    exchange = find_exchange(group_name)
    call = {"call": "slices of a classifier", "width": columns.shape[1], "type": columns.dtype, "loss": settings}
    shards = agree(exchange, 0, columns.shape[0], call)
    return torch.tensor([shards.col_start(shards.rank), shards.all_cols], device=columns.device)


@_group_spread.register_fake
def _(columns, settings, group_name):  # type: ignore[no-untyped-def]
    return columns.new_empty(2, dtype=torch.int64)


def sum_over_group(values: Tensor, group_name: str) -> Tensor:
    """The sum of each rank's ``values``; no gradient."""
    total: Tensor = torch.ops.tilewise.group_sum(values, group_name)
    return total


@torch.library.custom_op("tilewise::group_sum", mutates_args=())
def _group_sum(values: Tensor, group_name: str) -> Tensor:
    exchange = find_exchange(group_name)
    call: dict[str, Any] = {"call": "sum over slices", "shape": list(values.shape), "type": values.dtype}
    agree(exchange, 0, 0, call)
    total = values.clone(memory_format=torch.contiguous_format)
    if exchange.world > 1:
        exchange.sum_(total)
    return total


@_group_sum.register_fake
def _(values, group_name):  # type: ignore[no-untyped-def]
    return torch.empty_like(values, memory_format=torch.contiguous_format)
