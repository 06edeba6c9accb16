"""Questions about integer keys that need no scores, in O((n + m) log m).

Axes: n rows, m columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise.kernels.spec import Pair, PairSpec


def only_match(row_key: Tensor, col_key: Tensor) -> Tensor:
    """For each row the column of equal key, or -1: (n,) int64. Of several, the first.

    >>> only_match(torch.tensor([7, 3, 5]), torch.tensor([3, 4, 5]))
    tensor([-1,  0,  2])
    """
    if col_key.numel() == 0:
        return torch.full_like(row_key, -1)
    ordered, position = torch.sort(col_key, stable=True)
    place = torch.searchsorted(ordered, row_key).clamp_(max=col_key.numel() - 1)
    return torch.where(ordered[place] == row_key, position[place], -1)


def match_counts(row_key: Tensor, col_key: Tensor) -> Tensor:
    """For each row the number of columns of equal key: (n,) int64.

    >>> match_counts(torch.tensor([1, 2, 9]), torch.tensor([2, 1, 1]))
    tensor([2, 1, 0])
    """
    ordered = torch.sort(col_key).values
    return torch.searchsorted(ordered, row_key, right=True) - torch.searchsorted(ordered, row_key)


def hits(pair: Pair, spec: PairSpec) -> Tensor:
    """The number of positives of each row, the sample itself aside: (n,), in the type of the statistics."""
    assert pair.row_key is not None
    assert pair.col_key is not None
    count = match_counts(pair.row_key, pair.col_key)
    if spec.itself and spec.positive == "many":
        here = torch.arange(pair.a.shape[0], device=count.device) + (pair.row_start - pair.col_start)
        count = count - itself_matches(pair.row_key, pair.col_key, here)
    return count.to(pair.stat_dtype)


def itself_matches(row_key: Tensor, col_key: Tensor, col_of_row: Tensor) -> Tensor:
    """1 for each row whose own column is in the block and has the row's key: (n,) int64."""
    if col_key.numel() == 0:
        return torch.zeros_like(row_key)
    inside = (col_of_row >= 0) & (col_of_row < col_key.numel())
    own = col_key[col_of_row.clamp(0, col_key.numel() - 1)]
    return (inside & (own == row_key)).long()
