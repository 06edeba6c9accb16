"""Consecutive slices, for loops over blocks of rows."""

from __future__ import annotations


def slices(length: int, step: int, start: int = 0) -> list[slice]:
    """Slices of at most ``step`` that cover ``start`` to ``length``.

    >>> slices(5, 2)
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    return [slice(first, min(first + step, length)) for first in range(start, length, max(step, 1))]
