"""Arithmetic of the ring: the shards of all ranks, and which rank holds which block at which step.

Blocks of columns move to the next rank after each step and return to their owner after ``world`` hops. Nothing here
needs a process group.
"""

from __future__ import annotations

from dataclasses import dataclass


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


def column_chunks(columns: int, size: int | None) -> list[slice]:
    """At least one slice of at most ``size`` columns; None for all of them at once.

    >>> column_chunks(5, 3), column_chunks(5, None), column_chunks(0, 3)
    ([slice(0, 3, None), slice(3, 5, None)], [slice(0, 5, None)], [slice(0, 0, None)])
    """
    step = columns if size is None else size
    return [slice(first, min(first + step, columns)) for first in range(0, columns, max(step, 1))] or [slice(0, 0)]


@dataclass(frozen=True)
class Shards:
    """Row and column counts of every rank. Shards may be unequal or empty.

    >>> shards = Shards(rank=1, rows=(2, 3), cols=(4, 3))
    >>> shards.row_start, shards.col_start(1), shards.all_rows, shards.all_cols
    (2, 4, 5, 7)
    """

    rank: int
    rows: tuple[int, ...]
    cols: tuple[int, ...]

    @property
    def all_rows(self) -> int:
        """Total rows of all ranks."""
        return sum(self.rows)

    @property
    def all_cols(self) -> int:
        """Total columns of all ranks."""
        return sum(self.cols)

    @property
    def row_start(self) -> int:
        """Global index of this rank's first row."""
        return sum(self.rows[: self.rank])

    def col_start(self, owner: int) -> int:
        """Global index of the first column of a rank's block."""
        return sum(self.cols[:owner])
