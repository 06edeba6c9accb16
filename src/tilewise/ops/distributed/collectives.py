"""Small operators over a group, which a compiler can trace: a weight, where a shard starts, a sum.

Without a group they are plain arithmetic. Eager calls do not go through torch's dispatcher: it would import the
compiler, and with it a module of torch that holds the default process group for ever.
"""

# No `from __future__ import annotations` here: the operators' schemas are read from the annotations.
from typing import Any

import torch
from torch import Tensor

from tilewise.ops.call import holds_numbers
from tilewise.ring.agree import agree
from tilewise.ring.exchange import find_exchange


def shard_of_columns(columns: Tensor, settings: str, group_name: str) -> tuple[int | Tensor, int | Tensor]:
    """Where this rank's shard of the columns starts, and how many columns all ranks have together.

    Over a group these are 0-d tensors, which a compiled graph can hold. Ranks whose ``settings``, "name=value
    name=value", differ raise an error.
    """
    if not group_name:
        return 0, columns.shape[0]
    find = _group_shard if holds_numbers(columns) else torch.ops.tilewise.group_shard
    start, total = find(columns.detach(), settings, group_name).unbind()
    return start, total


def sum_over_ranks(values: Tensor, group_name: str) -> Tensor:
    """The sum of each rank's ``values``, without a gradient; in one process the values themselves."""
    if not group_name:
        return values.detach()
    find = _group_sum if holds_numbers(values) else torch.ops.tilewise.group_sum
    total: Tensor = find(values.detach(), group_name)
    return total


def reduce_over_group(loss_n: Tensor, reduction: str, group_name: str) -> Tensor:
    """``W / N`` ("mean") or ``W`` ("sum") times the sum over this rank's rows: see `tilewise.ops.reduce`."""
    find = _row_weight if holds_numbers(loss_n) else torch.ops.tilewise.row_weight
    weight: Tensor = find(loss_n.detach(), reduction, group_name)
    return weight * loss_n.sum()


def _row_weight(loss_n: Tensor, reduction: str, group_name: str) -> Tensor:
    exchange = find_exchange(group_name)
    weight = float(exchange.world)
    if reduction == "mean":
        rows = agree(exchange, loss_n.shape[0], 0, {"call": "mean of a loss"}).all_rows
        weight = weight / rows if rows else float("nan")
    return loss_n.new_full((), weight)


_row_weight_op = torch.library.custom_op("tilewise::row_weight", _row_weight, mutates_args=())


@_row_weight_op.register_fake
def _(loss_n, reduction, group_name):  # type: ignore[no-untyped-def]
    return loss_n.new_empty(())


def _group_shard(columns: Tensor, settings: str, group_name: str) -> Tensor:
    exchange = find_exchange(group_name)
    call = {"call": "shards of a classifier", "width": columns.shape[1], "type": columns.dtype, "loss": settings}
    shards = agree(exchange, 0, columns.shape[0], call)
    return torch.tensor([shards.col_start(shards.rank), shards.all_cols], device=columns.device)


_group_shard_op = torch.library.custom_op("tilewise::group_shard", _group_shard, mutates_args=())


@_group_shard_op.register_fake
def _(columns, settings, group_name):  # type: ignore[no-untyped-def]
    return columns.new_empty(2, dtype=torch.int64)


def _group_sum(values: Tensor, group_name: str) -> Tensor:
    exchange = find_exchange(group_name)
    call: dict[str, Any] = {"call": "sum over shards", "shape": list(values.shape), "type": values.dtype}
    agree(exchange, 0, 0, call)
    total = values.clone(memory_format=torch.contiguous_format)
    if exchange.world > 1:
        exchange.sum_(total)
    return total


_group_sum_op = torch.library.custom_op("tilewise::group_sum", _group_sum, mutates_args=())


@_group_sum_op.register_fake
def _(values, group_name):  # type: ignore[no-untyped-def]
    return torch.empty_like(values, memory_format=torch.contiguous_format)
