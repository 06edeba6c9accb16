"""Arithmetic of the ring: which rank holds which block at which step. Nothing here needs a process group.

Blocks of columns move to the next rank after each step and return to their owner after ``world`` hops.
"""

from __future__ import annotations


def held_block(rank: int, step: int, world: int) -> int:
    """Owner of the block that ``rank`` computes with at ``step``.

    >>> [held_block(0, step, 4) for step in range(4)]
    [0, 3, 2, 1]
    """
    return (rank - step) % world


def next_rank(rank: int, world: int) -> int:
    """Rank that this rank sends to."""
    return (rank + 1) % world


def previous_rank(rank: int, world: int) -> int:
    """Rank that this rank receives from."""
    return (rank - 1) % world


def starts(sizes: list[int]) -> list[int]:
    """Global index of the first element of each shard.

    >>> starts([3, 0, 5])
    [0, 3, 3]
    """
    found, total = [], 0
    for size in sizes:
        found.append(total)
        total += size
    return found
