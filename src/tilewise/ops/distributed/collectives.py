"""Small operators over a group, which a compiler can trace: a weight, where a shard starts, a sum.

Without a group they are plain arithmetic.
"""

# No `from __future__ import annotations` here: the operators' schemas are read from the annotations.
from typing import Any

import torch
from torch import Tensor

from tilewise.ops.call import plain_operator
from tilewise.ring.agree import agree
from tilewise.ring.exchange import ROWS, TOKENS, find_exchange


class RowsGroup:
    """A group for a loss with a classifier, whose ranks have different rows: the classifier's shards move in a ring.

    The group of such a loss otherwise means that all ranks have the same rows.
    """

    def __init__(self, group_name: str) -> None:
        self.group_name = ROWS + group_name


class TokensGroup:
    """A group whose ranks have the same rows, of which each needs the gradients of its own tokens only.

    The rows are (..., tokens, inner), flattened. Rank r needs those of the tokens from r * each to (r + 1) * each. The
    other gradients of the rows are then zeros.
    """

    def __init__(self, group_name: str, tokens: int, inner: int, each: int) -> None:
        self.group_name = f"{TOKENS}{tokens} {inner} {each} of {group_name}"


def same_rows(group_name: str) -> bool:
    """Whether all ranks of the group of a loss with a classifier have the same rows. No for "", which is no group."""
    return bool(group_name) and not group_name.startswith(ROWS)


def shard_of_columns(columns: Tensor, settings: str, group_name: str) -> tuple[int | Tensor, int | Tensor]:
    """Where this rank's shard of the columns starts, and how many columns all ranks have together.

    Over a group these are 0-d tensors, which a compiled graph can hold. Ranks whose ``settings``, "name=value
    name=value", differ raise an error.
    """
    if not group_name:
        return 0, columns.shape[0]
    start, total = _group_shard(columns.detach(), settings, group_name).unbind()
    return start, total


def sum_over_ranks(values: Tensor, group_name: str) -> Tensor:
    """The sum of each rank's ``values``, without a gradient; in one process the values themselves."""
    total: Tensor = _group_sum(values.detach(), group_name) if group_name else values.detach()
    return total


def _row_weight(loss_n: Tensor, reduction: str, group_name: str) -> Tensor:
    """``W / N`` ("mean") or ``W`` ("sum"): see `tilewise.ops.reduce`."""
    exchange = find_exchange(group_name)
    weight = float(exchange.world)
    if reduction == "mean":
        rows = agree(exchange, loss_n.shape[0], 0, {"call": "mean of a loss"}).all_rows
        weight = weight / rows if rows else float("nan")
    return loss_n.new_full((), weight)


def _find_shard(columns: Tensor, settings: str, group_name: str) -> Tensor:
    exchange = find_exchange(group_name)
    call = {"call": "shards of a classifier", "width": columns.shape[1], "type": columns.dtype, "loss": settings}
    shards = agree(exchange, 0, columns.shape[0], call)
    return torch.tensor([shards.col_start(shards.rank), shards.all_cols], device=columns.device)


def _find_sum(values: Tensor, group_name: str) -> Tensor:
    exchange = find_exchange(group_name)
    call: dict[str, Any] = {"call": "sum over shards", "shape": list(values.shape), "type": values.dtype}
    agree(exchange, 0, 0, call)
    total = values.clone(memory_format=torch.contiguous_format)
    if exchange.world > 1:
        exchange.sum_(total)
    return total


row_weight = plain_operator("row_weight", _row_weight, lambda loss_n, *more: loss_n.new_empty(()))
_group_shard = plain_operator(
    "group_shard", _find_shard, lambda columns, *more: columns.new_empty(2, dtype=torch.int64)
)
_group_sum = plain_operator(
    "group_sum", _find_sum, lambda values, group: torch.empty_like(values, memory_format=torch.contiguous_format)
)
