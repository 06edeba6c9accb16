"""Columns that are spread over a group while every rank has all rows: small sums over the slices."""

from __future__ import annotations

from torch import Tensor


def column_spread(columns: Tensor, settings: str, group_name: str) -> tuple[int | Tensor, int | Tensor]:
    """Where this rank's slice of the columns starts, and how many columns all ranks have together.

    Over a group these are 0-d tensors, which a graph can hold before the ranks have met. Ranks whose ``settings``,
    "name=value name=value", differ do not go on.
    """
    if not group_name:
        return 0, columns.shape[0]
    from tilewise.ops.group_ops import spread_over_group

    return spread_over_group(columns, settings, group_name)


def column_sum(values: Tensor, group_name: str) -> Tensor:
    """The sum of each rank's ``values``, without a gradient; in one process the values themselves."""
    if not group_name:
        return values.detach()
    from tilewise.ops.group_ops import sum_over_group

    return sum_over_group(values.detach(), group_name)
