"""What a loss asks of its group besides the op: a weight, where a slice begins, a sum. Operators, which compile."""

# No `from __future__ import annotations` here: the operators' schemas are read from the annotations.
from typing import Any

import torch
from torch import Tensor

from tilewise.ring.agree import agree
from tilewise.ring.exchange import find_exchange


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
