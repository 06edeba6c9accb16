"""Sizes and start indices of the row and column shards of a group."""

from __future__ import annotations

from dataclasses import dataclass

from tilewise.ring.schedule import starts


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
    def world(self) -> int:
        """The number of ranks."""
        return len(self.rows)

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
        return starts(list(self.rows))[self.rank]

    def col_start(self, owner: int) -> int:
        """Global index of the first column of a rank's block."""
        return starts(list(self.cols))[owner]
