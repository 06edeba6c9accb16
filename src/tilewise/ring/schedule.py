"""Arithmetic of the ring: the shards of all ranks, and which rank holds which block at which step.

Blocks of columns move to the next rank after each step and return to their owner after ``world`` hops. Where blocks are
small, teams of consecutive ranks gather their blocks first, and the blocks of whole teams move around a ring of teams.
Nothing here needs a process group.
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


def team_size(world: int, most: int) -> int:
    """The largest number of ranks of a team: a power of two that divides ``world`` and is at most ``most``.

    >>> [team_size(world, 8) for world in (1024, 12, 6, 7, 4)], team_size(1024, 0)
    ([8, 4, 2, 1, 4], 1)
    """
    team = 1
    while 2 * team <= most and world % (2 * team) == 0:
        team *= 2
    return team


def partners(rank: int, team: int) -> list[tuple[int, range, range]]:
    """The exchanges by which a team gathers its blocks: (partner, ranks whose blocks are held, those of the partner).

    The distance doubles: first neighbours, which are in one node. Backwards, they are those of a reduce-scatter.

    >>> partners(6, 4)
    [(7, range(6, 7), range(7, 8)), (4, range(6, 8), range(4, 6))]
    """
    found, have = [], 1
    while have < team:
        partner = rank ^ have
        held, theirs = (range(one // have * have, one // have * have + have) for one in (rank, partner))
        found.append((partner, held, theirs))
        have *= 2
    return found


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
