"""Ranks of right answers: how many gallery items score above them.

Axes: n queries (rows), c gallery items of one block (columns), d features, e excluded items per query.

A rank compares scores with one another, so all of them must come out of the same arithmetic: a matrix product
rounds differently for other shapes, and two equal gallery rows would no longer tie. A `Scorer` has one arithmetic,
in which a score depends on its two feature vectors alone, not on where they stand, how many others there are, or
which block they came with: `ranks_tiled` runs everywhere, `triton_impl.ranks` stores no scores.

Everything works on one block of gallery items with its column offset, and adds up (or merges) over blocks:

    for block in blocks:  scorer.pair_scores(block, index, score)
    answers = answers_of(index, score, scorer.side)
    for block in blocks:  ranks += scorer.count_better(block, [answers])[0]
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from tilewise.kernels.precision import matmul_precision
from tilewise.options import Precision

#: Larger than any index: stands for "none yet" where the smallest index wins.
NO_INDEX = torch.iinfo(torch.int64).max

Advance = Callable[[int], None]


@dataclass(frozen=True)
class Answers:
    """One right answer for each row: its score, its index on the other side (-1: none), its span per tile.

    `spans` holds, for each tile of rows, the smallest and largest index in it. It tells on the host which
    tiles can hold a tie whose order matters, so that the others take a single comparison.
    """

    score: Tensor
    index: Tensor
    spans: list[tuple[int, int]]


def spans_of(index: Tensor, side: int) -> list[tuple[int, int]]:
    """(smallest, largest) index of each tile of rows; (NO_INDEX, -1) without any. One transfer to the host.

    >>> spans_of(torch.tensor([4, -1, 2, -1]), side=3), spans_of(torch.tensor([4, -1, 2, -1]), side=0)
    ([(2, 4), (9223372036854775807, -1)], [])
    """
    if side == 0:
        return []
    flat = index.reshape(index.shape[0], -1) if index.numel() else index.new_full((index.shape[0], 1), -1)
    return ends_of(torch.where(flat < 0, NO_INDEX, flat).amin(1), flat.amax(1), side)


def ends_of(low: Tensor, high: Tensor, side: int) -> list[tuple[int, int]]:
    """Smallest of `low` and largest of `high` in each tile of rows."""
    ends = [
        torch.stack([below.amin(), above.amax()])
        for below, above in zip(low.split(side), high.split(side), strict=True)
        if below.numel()
    ]
    return [(first, last) for first, last in torch.stack(ends).tolist()] if ends else []


def answers_of(index: Tensor, score: Tensor, side: int) -> Answers:
    """Bring answers into the form that `count_better` reads. No answer: nothing is better."""
    return Answers(torch.where(index < 0, torch.inf, score), index, spans_of(index, side))


@dataclass(frozen=True)
class Best:
    """The best right answer found so far: its score (-inf: none) and its index (NO_INDEX: none)."""

    score: Tensor
    index: Tensor

    def merge_(self, score: Tensor, index: Tensor) -> None:
        """Keep the higher score and, of equals, the lower index, whatever order blocks come in."""
        wins = (score > self.score) | ((score == self.score) & (score > -torch.inf) & (index < self.index))
        self.score.copy_(torch.where(wins, score, self.score))
        self.index.copy_(torch.where(wins, index, self.index))


def no_best(length: int, scorer: Scorer) -> Best:
    """Nothing found yet."""
    score = torch.full((length,), -torch.inf, device=scorer.device, dtype=scorer.dtype)
    return Best(score, torch.full((length,), NO_INDEX, device=score.device, dtype=torch.int64))


@dataclass(frozen=True)
class Excluded:
    """Gallery items that are left out of a query's ranking: (n, e), padded with -1, and their spans."""

    index: Tensor
    spans: list[tuple[int, int]]

    def hide_(self, scores: Tensor, rows: slice, side: int, first_col: int) -> None:
        """Set the scores of excluded pairs to -inf; no finite score is below that."""
        low, high = self.spans[rows.start // side]
        cols = scores.shape[1]
        if high < first_col or low >= first_col + cols:
            return
        local = self.index[rows] - first_col
        inside = (local >= 0) & (local < cols) & (self.index[rows] >= 0)
        # A minimum, because an item outside is clamped onto one that may be inside for another entry.
        lowest = torch.where(inside, -torch.inf, torch.inf).to(scores.dtype)
        scores.scatter_reduce_(1, local.clamp(0, cols - 1), lowest, "amin")


def excluded_of(index: Tensor, side: int) -> Excluded:
    """Bring (n, e) exclusions into the form that the tile loops read."""
    return Excluded(index, spans_of(index, side))


@dataclass(frozen=True)
class Block:
    """All queries, and the gallery items that they meet now.

    Args:
        queries: (n, d), the rows `row_offset` to `row_offset + n`.
        items: (c, d), the gallery items `col_offset` to `col_offset + c`.
        row_offset, col_offset: global index of the first query and of the first item.
        excluded: pairs that are right for nothing and go before nothing.
        advance: called now and then with the number of pairs done since.
    """

    queries: Tensor
    items: Tensor
    row_offset: int = 0
    col_offset: int = 0
    excluded: Excluded | None = None
    advance: Advance | None = None

    def answering(self, index: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        """The items of these indices, in the order of the queries `rows`, and which of them are in this block.

        Another item stands for one that is not here, so there must be one.
        """
        here, local = self.items.shape[0], index[rows] - self.col_offset
        inside = (index[rows] >= 0) & (local >= 0) & (local < here)
        return self.items[local.clamp(0, here - 1)], inside

    def done(self, cols: slice) -> None:
        """These items have met all queries."""
        if self.advance is not None:
            self.advance(self.queries.shape[0] * (cols.stop - cols.start))


class Scorer(Protocol):
    """One arithmetic for all scores of a call.

    Args:
        device, dtype: of the scores.
        side: of the tiles that the host sees, 0 where it sees none.
    """

    device: torch.device
    dtype: torch.dtype
    side: int

    def pair_scores(self, block: Block, index: Tensor, into: Tensor) -> None:
        """Score of (query i, gallery item index_i), written into `into` where that item is in this block."""

    def find_best(
        self, block: Block, row_ids: Tensor, col_ids: Tensor, rows_best: Best, cols_best: Best | None = None
    ) -> None:
        """Best item of equal id for each query, and best query for each item; merged into the arguments."""

    def count_better(
        self, block: Block, rows: Sequence[Answers], cols: Answers | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """How many items go before each query's answers, and how many queries before each item's answer.

        Item j goes before the answer p of query i if ``x_ij > x_ip``, or ``x_ij == x_ip and j < p``.

        Args:
            block: who meets whom.
            rows: answers of the queries, with global column indices.
            cols: answers of the block's items, with global row indices.

        Returns:
            (len(rows), n) and (c,) counts, int64, to be added over blocks. The second is None without `cols`.
        """


@contextlib.contextmanager
def rank_arithmetic(device: torch.device, precision: Precision) -> Iterator[None]:
    """No gradients, no autocast (it would round the operands), and float32 products as the options say."""
    with torch.no_grad(), torch.autocast(device.type, enabled=False), matmul_precision(precision):
        yield
