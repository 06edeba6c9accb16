"""Consecutive slices, for loops over blocks of rows."""

from __future__ import annotations

import torch
from torch import Tensor


def slices(length: int, step: int, start: int = 0) -> list[slice]:
    """Slices of at most ``step`` that cover ``start`` to ``length``.

    >>> slices(5, 2)
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    return [slice(first, min(first + step, length)) for first in range(start, length, max(step, 1))]


def full_blocks(length: int, step: int, device: torch.device) -> list[tuple[Tensor, int]]:
    """Blocks of exactly ``step`` row indices that cover ``length``, each with the number of rows that are in use.

    The last block is filled up with its last row.

    >>> full_blocks(5, 3, torch.device("cpu"))
    [(tensor([0, 1, 2]), 3), (tensor([3, 4, 4]), 2)]
    """
    blocks = [(torch.arange(at.start, at.start + step, device=device), at) for at in slices(length, step)]
    return [(index.clamp_(max=length - 1), at.stop - at.start) for index, at in blocks]
