"""Ranks of right answers, counted tile by tile: how many gallery items score above them.

Axes: n queries (rows), m gallery items (columns), d features, e excluded items per query; s the side of a
tile.

A rank compares scores with one another, so all of them must come out of the same arithmetic: a matrix product
rounds differently for other shapes, and two equal gallery rows would no longer tie. Every product here
therefore has one shape, (s, d) @ (d, s), out of the same two buffers; a ragged edge is multiplied in full and
cut afterwards. A score then depends on its two feature vectors alone, not on where they stand, how many
others there are, or which block they came with.

Everything works on one block of gallery items with its column offset, and adds up (or merges) over blocks:

    for offset, block in blocks:  scorer.pair_scores(queries, block, index, col_offset=offset, into=score)
    answers = answers_of(index, score, scorer.side)
    for offset, block in blocks:  ranks += scorer.count_better(queries, block, [answers], col_offset=offset)[0]

`ScoreTile` is the scorer that runs everywhere; on a GPU `triton_impl.ranks` counts without storing a tile.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from tilewise.errors import BackendError, ConfigError
from tilewise.kernels.precision import matmul_precision
from tilewise.kernels.select import installed
from tilewise.options import Precision, TileOptions

#: Larger than any index: stands for "none yet" where the smallest index wins.
NO_INDEX = torch.iinfo(torch.int64).max
LARGEST_SIDE = {"cpu": 512}  # of a tile; the scores of a tile stay in the cache
LARGEST_SIDE_ELSEWHERE = 2048  # fewer, larger launches for accelerators
SMALLEST_SIDE = 16
SQUARE_BUFFERS = 4  # scores, hits, ties, before
LARGEST_FUSED_WIDTH = 8192

Advance = Callable[[int], None]


class Scorer(Protocol):
    """One arithmetic for all scores of a call.

    Args:
        device, dtype: of the scores.
        side: of the tiles that the host sees, 0 where it sees none.
    """

    device: torch.device
    dtype: torch.dtype
    side: int

    def pair_scores(self, queries: Tensor, block: Tensor, index: Tensor, *, col_offset: int, into: Tensor) -> None:
        """Score of (query i, gallery item index_i), written into `into` where that item is in this block."""

    def find_best(
        self,
        queries: Tensor,
        block: Tensor,
        row_ids: Tensor,
        col_ids: Tensor,
        rows_best: Best,
        cols_best: Best | None = None,
        *,
        row_offset: int = 0,
        col_offset: int = 0,
        excluded: Excluded | None = None,
        advance: Advance | None = None,
    ) -> None:
        """Best item of equal id for each query, and best query for each item; merged into the arguments."""

    def count_better(
        self,
        queries: Tensor,
        block: Tensor,
        rows: Sequence[Answers],
        cols: Answers | None = None,
        *,
        row_offset: int = 0,
        col_offset: int = 0,
        excluded: Excluded | None = None,
        advance: Advance | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """How many items go before each query's answers, and how many queries before each item's answer.

        Item j goes before the answer p of query i if ``x_ij > x_ip``, or ``x_ij == x_ip and j < p``.

        Args:
            queries: (n, d), the rows `row_offset` to `row_offset + n`.
            block: (c, d), the gallery items `col_offset` to `col_offset + c`.
            rows: answers of the queries, with global column indices.
            cols: answers of the block's items, with global row indices.
            row_offset: global index of the first query.
            col_offset: global index of the block's first item.
            excluded: pairs that go before nothing.
            advance: called now and then with the number of pairs done since.

        Returns:
            (len(rows), n) and (c,) counts, int64, to be added over blocks. The second is None without `cols`.
        """


def why_not_fused(device: torch.device, width: int, dtype: torch.dtype) -> str | None:
    """Why `triton_impl.ranks` cannot serve this call, or None: by what is the same on all ranks of a group."""
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return "it needs a CUDA device (or TRITON_INTERPRET=1, for tests)"
    if not installed("triton"):
        return "the package triton is not installed"
    if dtype == torch.float64:
        return "it multiplies float16, bfloat16 and float32, not torch.float64"
    if not 0 < width <= LARGEST_FUSED_WIDTH:
        return f"it takes 1 to {LARGEST_FUSED_WIDTH} features, not {width}"
    if device.type != "cuda":
        return "the interpreter gets bfloat16 products wrong" if dtype == torch.bfloat16 else None
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        return f"it needs compute capability 8.0, and this card has {capability[0]}.{capability[1]}"
    return None


def choose_scorer(queries: Tensor, options: TileOptions) -> Scorer:
    """What counts the ranks of these queries."""
    device, width, dtype = queries.device, queries.shape[1], queries.dtype
    reason = why_not_fused(device, width, dtype)
    if options.backend == "triton" and reason is not None:
        raise BackendError(f'backend "triton" cannot rank {dtype} features on {device}: {reason}. Use backend="auto"')
    if reason is None and options.backend != "torch" and (device.type == "cuda" or options.backend == "triton"):
        from tilewise.kernels.triton_impl.ranks import FusedScorer

        return FusedScorer(device, width, dtype, options)
    return ScoreTile(device, width, dtype, options.workspace_bytes)


def scratch_bytes(side: int, width: int, feature_bytes: int, score_bytes: int) -> int:
    """The most a loop over tiles takes: four squares of scores, a mask, three sets of features."""
    return (SQUARE_BUFFERS * score_bytes + 1) * side * side + 3 * side * width * feature_bytes


def tile_side(device: torch.device, width: int, dtype: torch.dtype, workspace_bytes: int) -> int:
    """The largest power of two up to the device's own side whose buffers fit; n and m do not matter.

    >>> tile_side(torch.device("cpu"), 256, torch.float32, 256 * 2**20)
    512
    >>> tile_side(torch.device("cpu"), 256, torch.float32, 1 * 2**20)
    128
    """
    feature, score = product_types(device, dtype)
    side = LARGEST_SIDE.get(device.type, LARGEST_SIDE_ELSEWHERE)
    while scratch_bytes(side, width, feature.itemsize, score.itemsize) > workspace_bytes:
        side //= 2
        if side < SMALLEST_SIDE:
            need = scratch_bytes(SMALLEST_SIDE, width, feature.itemsize, score.itemsize)
            raise ConfigError(
                f"ranking features of width {width} takes at least {-(-need // 2**20)} MiB of scratch "
                f"memory, but workspace_mib allows {workspace_bytes // 2**20}. Raise "
                "TileOptions(workspace_mib=...)"
            )
    return side


def product_types(device: torch.device, dtype: torch.dtype) -> tuple[torch.dtype, torch.dtype]:
    """(type of the operands, type of the scores): half types accumulate and are compared in float32."""
    if dtype in (torch.float16, torch.bfloat16):
        # Only CUDA multiplies half operands into a float32 result; elsewhere they are widened, which is
        # exact.
        return (dtype if device.type == "cuda" else torch.float32), torch.float32
    return dtype, dtype


class ScoreTile:
    """A `Scorer` with the buffers of one tile, allocated once for a whole call."""

    def __init__(self, device: torch.device, width: int, dtype: torch.dtype, workspace_bytes: int):
        self.side = tile_side(device, width, dtype, workspace_bytes)
        feature, score = product_types(device, dtype)
        self.device, self.dtype = device, score
        self.queries = torch.zeros(self.side, width, device=device, dtype=feature)
        self.gallery = torch.zeros(self.side, width, device=device, dtype=feature)
        squares = torch.zeros(SQUARE_BUFFERS, self.side, self.side, device=device, dtype=score)
        self.scores, self.hits, self.ties, self.before = squares
        self.ones = torch.ones(self.side, device=device, dtype=score)
        self.places = torch.arange(self.side, device=device, dtype=score)  # exact: a side is far below 2**24
        self.scratch_bytes = scratch_bytes(self.side, width, feature.itemsize, score.itemsize)

    def ranges(self, length: int) -> list[slice]:
        """Cut `length` rows into tiles."""
        return [slice(first, min(first + self.side, length)) for first in range(0, length, self.side)]

    def load(self, buffer: Tensor, features: Tensor) -> None:
        """Fill a side of the tile. What is left behind the end from before meets no score that is kept."""
        buffer[: features.shape[0]].copy_(features)

    def product(self, rows: int, cols: int) -> Tensor:
        """Scores of the loaded queries and gallery items: (rows, cols), a view of the tile's buffer."""
        if self.queries.dtype == self.scores.dtype:
            torch.mm(self.queries, self.gallery.T, out=self.scores)
        else:
            torch.mm(self.queries, self.gallery.T, out_dtype=self.scores.dtype, out=self.scores)
        return self.scores[:rows, :cols]

    def pair_scores(self, queries: Tensor, block: Tensor, index: Tensor, *, col_offset: int, into: Tensor) -> None:
        """Score of (query i, gallery item index_i), written into `into` where that item is in this block.

        The items are gathered in the order of their queries and multiplied as a full tile, of which the diagonal
        is kept: the tile's own arithmetic, for s products per pair instead of one.
        """
        if block.shape[0] == 0:
            return
        for rows in self.ranges(queries.shape[0]):
            local = index[rows] - col_offset
            inside = (index[rows] >= 0) & (local >= 0) & (local < block.shape[0])
            self.load(self.queries, queries[rows])
            self.load(self.gallery, block[local.clamp(0, block.shape[0] - 1)])
            count = rows.stop - rows.start
            scores = self.product(count, count).diagonal()
            into[rows] = torch.where(inside, scores, into[rows])

    def find_best(
        self,
        queries: Tensor,
        block: Tensor,
        row_ids: Tensor,
        col_ids: Tensor,
        rows_best: Best,
        cols_best: Best | None = None,
        *,
        row_offset: int = 0,
        col_offset: int = 0,
        excluded: Excluded | None = None,
        advance: Advance | None = None,
    ) -> None:
        """As a `Scorer` does. A tile whose rows and columns have no id in common, by their smallest and largest, is not
        computed: ids in ascending order make this pass nearly free.
        """
        row_ends, col_ends = _ends(row_ids, row_ids, self.side), _ends(col_ids, col_ids, self.side)
        for cols, (low, high) in zip(self.ranges(block.shape[0]), col_ends, strict=True):
            self.load(self.gallery, block[cols])
            for rows, (first, last) in zip(self.ranges(queries.shape[0]), row_ends, strict=True):
                if last < low or high < first:
                    continue
                self.load(self.queries, queries[rows])
                scores = self.product(rows.stop - rows.start, cols.stop - cols.start)
                if excluded is not None:
                    excluded.hide_(scores, rows, self.side, col_offset + cols.start)
                scores.masked_fill_(row_ids[rows, None] != col_ids[None, cols], -torch.inf)
                top = scores.max(dim=1)  # of equals, the first
                Best(rows_best.score[rows], rows_best.index[rows]).merge_(
                    top.values, top.indices + (col_offset + cols.start)
                )
                if cols_best is not None:
                    top = scores.max(dim=0)
                    Best(cols_best.score[cols], cols_best.index[cols]).merge_(
                        top.values, top.indices + (row_offset + rows.start)
                    )
            if advance is not None:
                advance(queries.shape[0] * (cols.stop - cols.start))

    def count_better(
        self,
        queries: Tensor,
        block: Tensor,
        rows: Sequence[Answers],
        cols: Answers | None = None,
        *,
        row_offset: int = 0,
        col_offset: int = 0,
        excluded: Excluded | None = None,
        advance: Advance | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """As a `Scorer` does, a tile at a time."""
        row_counts = torch.zeros(len(rows), queries.shape[0], device=queries.device, dtype=torch.int64)
        col_counts = None if cols is None else torch.zeros(block.shape[0], device=queries.device, dtype=torch.int64)
        for here in self.ranges(block.shape[0]):
            self.load(self.gallery, block[here])
            first_col = col_offset + here.start
            for mine in self.ranges(queries.shape[0]):
                self.load(self.queries, queries[mine])
                scores = self.product(mine.stop - mine.start, here.stop - here.start)
                if excluded is not None:
                    excluded.hide_(scores, mine, self.side, first_col)
                for counts, answers in zip(row_counts, rows, strict=True):
                    counts[mine] += self._count_along_columns(scores, answers, mine, first_col)
                if cols is not None and col_counts is not None:
                    first_row = row_offset + mine.start
                    col_counts[here] += self._count_along_columns(scores.T, cols, here, first_row)
            if advance is not None:
                advance(queries.shape[0] * (here.stop - here.start))
        return row_counts, col_counts

    def _count_along_columns(self, scores: Tensor, answers: Answers, rows: slice, first: int) -> Tensor:
        """Of the tile's columns (global indices from `first`), how many go before each row's answer: int64.

        Masks are 0.0 and 1.0 in the type of the scores and summed by a product with ones: exact up to 2**24, and
        several times as fast on the CPU as booleans.
        """
        low, high = answers.spans[rows.start // self.side]
        answer = answers.score[rows, None]
        hits = _oriented(self.hits, scores)
        if first + scores.shape[1] <= low:  # all columns stand before every answer, and win ties
            torch.ge(scores, answer, out=hits)
        else:
            torch.gt(scores, answer, out=hits)
            if first < high:  # some stand before an answer, some behind
                ties, before = _oriented(self.ties, scores), _oriented(self.before, scores)
                place = (answers.index[rows, None] - first).clamp(0, scores.shape[1]).to(scores.dtype)
                torch.eq(scores, answer, out=ties)
                torch.lt(self.places[: scores.shape[1]], place, out=before)
                hits.addcmul_(ties, before)
        return (hits @ self.ones[: scores.shape[1]]).to(torch.int64)


@contextlib.contextmanager
def rank_arithmetic(device: torch.device, precision: Precision) -> Iterator[None]:
    """No gradients, no autocast (it would round the operands), and float32 products as the options say."""
    with torch.no_grad(), torch.autocast(device.type, enabled=False), matmul_precision(precision):
        yield


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
    return _ends(torch.where(flat < 0, NO_INDEX, flat).amin(1), flat.amax(1), side)


def _ends(low: Tensor, high: Tensor, side: int) -> list[tuple[int, int]]:
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


def _oriented(buffer: Tensor, scores: Tensor) -> Tensor:
    """A view of `buffer` with the shape and the memory order of `scores`, which may be transposed."""
    rows, cols = scores.shape
    return buffer[:rows, :cols] if scores.stride(1) == 1 else buffer[:cols, :rows].T
