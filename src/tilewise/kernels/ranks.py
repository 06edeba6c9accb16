"""The contract of retrieval: the rank of a right answer is the number of gallery items that score above it.

Axes: n queries (rows), c gallery items of one block (columns), d features, e excluded items per query.

A rank compares scores with one another, so all scores must be computed in the same way. A matrix product rounds
differently for different shapes, and two equal gallery rows would no longer tie. In a `Scorer`, a score depends only on
its two feature vectors, not on their positions, the number of other items, or the block. `torch_impl.ranks` runs on
every device; `triton_impl.ranks` stores no scores.

Each function works on one block of gallery items and its column offset. Results are added or merged over blocks:

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

#: Means "none yet". Larger than any index, so that the smallest index wins.
NO_INDEX = torch.iinfo(torch.int64).max

Advance = Callable[[int], None]


@dataclass(frozen=True)
class Answers:
    """One right answer for each row: its score, its index on the other side (-1: none), and the spans of the tiles.

    `spans` holds the smallest and the largest index in each tile of rows, on the host. A tile in which the order of
    ties does not matter needs only one comparison.
    """

    score: Tensor
    index: Tensor
    spans: list[tuple[int, int]]


def spans_of(index: Tensor, side: int) -> list[tuple[int, int]]:
    """(smallest, largest) index of each tile of rows; (NO_INDEX, -1) if there is none. One copy to the host.

    >>> spans_of(torch.tensor([4, -1, 2, -1]), side=3), spans_of(torch.tensor([4, -1, 2, -1]), side=0)
    ([(2, 4), (9223372036854775807, -1)], [])
    """
    if side == 0:
        return []
    flat = index.reshape(index.shape[0], -1) if index.numel() else index.new_full((index.shape[0], 1), -1)
    return ends_of(torch.where(flat < 0, NO_INDEX, flat).amin(1), flat.amax(1), side)


def ends_of(low: Tensor, high: Tensor, side: int) -> list[tuple[int, int]]:
    """The smallest value of `low` and the largest of `high` in each tile of rows."""
    ends = [
        torch.stack([below.amin(), above.amax()])
        for below, above in zip(low.split(side), high.split(side), strict=True)
        if below.numel()
    ]
    return [(first, last) for first, last in torch.stack(ends).tolist()] if ends else []


def answers_of(index: Tensor, score: Tensor, side: int) -> Answers:
    """Answers in the form that `count_better` takes. A row without an answer has no better items."""
    return Answers(torch.where(index < 0, torch.inf, score), index, spans_of(index, side))


@dataclass(frozen=True)
class Best:
    """The best right answer found so far: its score (-inf: none) and its index (NO_INDEX: none)."""

    score: Tensor
    index: Tensor

    def merge_(self, score: Tensor, index: Tensor) -> None:
        """Keep the higher score; on ties the lower index. The result does not depend on the order of blocks."""
        wins = (score > self.score) | ((score == self.score) & (score > -torch.inf) & (index < self.index))
        self.score.copy_(torch.where(wins, score, self.score))
        self.index.copy_(torch.where(wins, index, self.index))


def no_best(length: int, scorer: Scorer) -> Best:
    """A `Best` in which no answer has been found."""
    score = torch.full((length,), -torch.inf, device=scorer.device, dtype=scorer.dtype)
    return Best(score, torch.full((length,), NO_INDEX, device=score.device, dtype=torch.int64))


@dataclass(frozen=True)
class Nearest:
    """The k best items of each query so far: scores (-inf: none) and indices (NO_INDEX: none), (n, k), in any order."""

    score: Tensor
    index: Tensor

    def limit(self, first: int) -> Tensor:
        """(n,): of items from index `first` on, those with a higher score than this enter. One copy to the host.

        Of equal scores the lower index wins. So where all kept items come before `first`, an equal score loses.
        """
        lowest = self.score.amin(1)
        before = ((self.index < first) | (self.index == NO_INDEX)).all()
        return lowest if before else torch.nextafter(lowest, lowest.new_tensor(-torch.inf))

    def keep_(self, rows: Tensor | slice, score: Tensor, index: Tensor) -> None:
        """Replace the items of these queries by the k best of (r, c) others. On ties the lower index wins."""
        best, kept = best_of(score, index, self.index.shape[1])
        self.score[rows], self.index[rows] = best, kept.masked_fill_(best == -torch.inf, NO_INDEX)

    def sort_(self) -> None:
        """Order the items of each query, the best first."""
        score, index = in_order(self.score, self.index)
        self.score.copy_(score)
        self.index.copy_(index)


def best_of(score: Tensor, index: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k best of (r, c) items, in any order. On ties the lower index wins."""
    best, place = score.topk(k, dim=1, sorted=False)
    kept = index.gather(1, place)
    left_out = score.scatter(1, place, -torch.inf).amax(1)  # `topk` may take any of the scores that equal the last
    tied = ((left_out == best.amin(1)) & (left_out > -torch.inf)).nonzero().squeeze(1)
    if tied.numel():  # take all that are higher than the last, and the lowest indices of those that equal it
        score, index, last = score[tied], index[tied], best[tied].amin(1, keepdim=True)
        rest = torch.where(score == last, index, NO_INDEX)
        place = torch.where(score > last, -1, rest).topk(k, dim=1, largest=False, sorted=False).indices
        best[tied], kept[tied] = score.gather(1, place), index.gather(1, place)
    return best, kept


def in_order(score: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """The items of each row by falling score; of equal scores, by rising index."""
    index, order = index.sort(dim=1)
    score, order = score.gather(1, order).sort(dim=1, descending=True, stable=True)
    return score, index.gather(1, order)


def no_nearest(length: int, k: int, scorer: Scorer) -> Nearest:
    """A `Nearest` in which no item has been found."""
    score = torch.full((length, k), -torch.inf, device=scorer.device, dtype=scorer.dtype)
    return Nearest(score, torch.full((length, k), NO_INDEX, device=score.device, dtype=torch.int64))


@dataclass(frozen=True)
class Unwanted:
    """Pairs of a block that a search leaves out, in addition to those of ``Block.excluded``.

    Args:
        row_ids, col_ids: (n,) and (c,): a pair with equal ids. None: no ids.
        below: (n,) in the type of the scores: a pair that scores this or more. None: no limit.
    """

    row_ids: Tensor | None = None
    col_ids: Tensor | None = None
    below: Tensor | None = None

    def hide_(self, scores: Tensor, rows: slice, cols: slice) -> None:
        """Set the scores of these pairs to -inf."""
        if self.row_ids is not None and self.col_ids is not None:
            scores.masked_fill_(self.row_ids[rows, None] == self.col_ids[None, cols], -torch.inf)
        if self.below is not None:
            scores.masked_fill_(scores >= self.below[rows, None], -torch.inf)


class Excluded:
    """Gallery items excluded from the ranking of each query: (n, e), padded with -1, and their spans."""

    def __init__(self, index: Tensor, side: int) -> None:
        self.index, self.spans = index, spans_of(index, side)

    def hide_(self, scores: Tensor, rows: slice, side: int, first_col: int) -> None:
        """Set the scores of excluded pairs to -inf, below every finite score."""
        low, high = self.spans[rows.start // side]
        cols = scores.shape[1]
        if high < first_col or low >= first_col + cols:
            return
        local = self.index[rows] - first_col
        inside = (local >= 0) & (local < cols) & (self.index[rows] >= 0)
        # "amin": an item outside is clamped onto a column that another entry may exclude.
        lowest = torch.where(inside, -torch.inf, torch.inf).to(scores.dtype)
        scores.scatter_reduce_(1, local.clamp(0, cols - 1), lowest, "amin")


@dataclass(frozen=True)
class Block:
    """All queries and the current block of gallery items.

    Args:
        queries: (n, d), the rows `row_offset` to `row_offset + n`.
        items: (c, d), the gallery items `col_offset` to `col_offset + c`.
        row_offset, col_offset: global index of the first query and of the first item.
        excluded: pairs that are neither right answers nor counted as better.
        advance: called from time to time with the number of pairs completed since the last call.
    """

    queries: Tensor
    items: Tensor
    row_offset: int = 0
    col_offset: int = 0
    excluded: Excluded | None = None
    advance: Advance | None = None

    def answering(self, index: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        """The items with these indices, in the order of the queries `rows`, and which of them are in this block.

        An item outside of the block is replaced by one inside, so the block must not be empty.
        """
        count, local = self.items.shape[0], index[rows] - self.col_offset
        inside = (index[rows] >= 0) & (local >= 0) & (local < count)
        return self.items[local.clamp(0, count - 1)], inside

    def done(self, cols: slice) -> None:
        """Report that the scores of these items with all queries are done."""
        if self.advance is not None:
            self.advance(self.queries.shape[0] * (cols.stop - cols.start))


class Scorer(Protocol):
    """Computes all scores of a call with the same arithmetic.

    Attributes:
        device, dtype: device and type of the scores.
        side: side of the tiles whose spans the host needs; 0 if it needs none.
    """

    device: torch.device
    dtype: torch.dtype
    side: int

    def pair_scores(self, block: Block, index: Tensor, into: Tensor) -> None:
        """Write the score of query i with gallery item index_i to into_i, if that item is in this block."""

    def find_best(
        self, block: Block, row_ids: Tensor, col_ids: Tensor, rows_best: Best, cols_best: Best | None = None
    ) -> None:
        """Merge the best item of equal id for each query, and the best query for each item, into the arguments."""

    def count_better(
        self, block: Block, rows: Sequence[Answers], cols: Answers | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """The number of items that rank before each query's answers, and of queries before each item's answer.

        Item j ranks before the answer p of query i if ``x_ij > x_ip``, or ``x_ij == x_ip and j < p``.

        Args:
            block: the queries and the gallery items to compare.
            rows: answers of the queries, with global column indices.
            cols: answers of the block's items, with global row indices.

        Returns:
            (len(rows), n) and (c,) counts, int64, to be added over blocks. The second is None without `cols`.
        """


class Searcher(Scorer, Protocol):
    """A `Scorer` that also finds the nearest items."""

    def find_nearest(self, block: Block, unwanted: Unwanted, found: Nearest) -> None:
        """Merge the best items of this block into ``found``."""


@contextlib.contextmanager
def rank_arithmetic(device: torch.device, precision: Precision) -> Iterator[None]:
    """A context without gradients and autocast, which would round the operands, with the given precision."""
    with torch.no_grad(), torch.autocast(device.type, enabled=False), matmul_precision(precision):
        yield
