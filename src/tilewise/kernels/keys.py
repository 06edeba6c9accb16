"""Functions of integer keys that need no scores. Cost: O((n + m) log m).

Axes: n rows, m columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise.kernels.spec import Pair, PairSpec


def match_counts(row_key: Tensor, col_key: Tensor) -> Tensor:
    """The number of columns with the key of each row: (n,) int64.

    >>> match_counts(torch.tensor([1, 2, 9]), torch.tensor([2, 1, 1]))
    tensor([2, 1, 0])
    """
    ordered = torch.sort(col_key).values
    return torch.searchsorted(ordered, row_key, right=True) - torch.searchsorted(ordered, row_key)


def num_positives(pair: Pair, spec: PairSpec) -> Tensor:
    """The number of positives of each row, without the sample itself: (n,), in `stat_dtype`."""
    count = match_counts(pair.row_key, pair.col_key)
    if spec.mask_self:
        own_col = torch.arange(pair.a.shape[0], device=count.device) + (pair.row_start - pair.col_start)
        count = count - self_matches(pair.row_key, pair.col_key, own_col)
    return count.to(pair.stat_dtype)


def dense_ranks(row_key: Tensor, col_key: Tensor) -> tuple[Tensor, Tensor]:
    """Keys renumbered as small int32 numbers, equal if and only if the keys are; -1 for a row without a match.

    >>> dense_ranks(torch.tensor([70, 10]), torch.tensor([90, 70, 70]))
    (tensor([ 0, -1], dtype=torch.int32), tensor([2, 0, 0], dtype=torch.int32))
    """
    if col_key.numel() == 0:
        return torch.full_like(row_key, -1, dtype=torch.int32), col_key.int()
    ordered = torch.sort(col_key).values
    place = torch.searchsorted(ordered, row_key).clamp_(max=col_key.numel() - 1)
    rows = torch.where(ordered[place] == row_key, place, -1)
    return rows.int(), torch.searchsorted(ordered, col_key).int()


def self_matches(row_key: Tensor, col_key: Tensor, col_of_row: Tensor) -> Tensor:
    """1 for each row whose own column is in the block and has the row's key: (n,) int64."""
    if col_key.numel() == 0:
        return torch.zeros_like(row_key)
    inside = (col_of_row >= 0) & (col_of_row < col_key.numel())
    own = col_key[col_of_row.clamp(0, col_key.numel() - 1)]
    return (inside & (own == row_key)).long()


def combined_picks(pick: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The distinct columns that each row picks, with the sum of the gradients of each: (n, K) each.

    Returns the columns, the place in ``pick`` that each comes from, and the sums. Where a column is a repetition, the
    first result is -1 and the sum is 0. Sums have a fixed order: no atomics.

    >>> combined_picks(torch.tensor([[7, 2, 7]]), torch.tensor([[1.0, 2.0, 4.0]]))
    (tensor([[ 2, -1,  7]]), tensor([[1, 0, 2]]), tensor([[2., 0., 5.]]))
    """
    cols, order = pick.sort(dim=1, stable=True)
    total, step = grad.gather(1, order), 1
    while step < pick.shape[1]:  # after each step, an entry holds the sum of up to 2 * step entries of its column
        same = cols[:, step:] == cols[:, :-step]
        total[:, step:] += torch.where(same, total[:, :-step], 0.0)
        step *= 2
    last = torch.ones_like(cols, dtype=torch.bool)
    last[:, :-1] = cols[:, 1:] != cols[:, :-1]
    last &= cols >= 0
    return torch.where(last, cols, -1), order, torch.where(last, total, 0.0)
