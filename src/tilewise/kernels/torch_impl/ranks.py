"""Ranks counted tile by tile, on any device. See `tilewise.kernels.ranks` for the contract.

Axes: n queries (rows), c gallery items of one block (columns), d features; s the side of a tile.

Every product has the shape (s, d) @ (d, s) and reads the same two buffers. A tile at a ragged edge is multiplied in
full; the extra scores are discarded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tilewise.errors import ConfigError
from tilewise.kernels.ranks import NO_INDEX, Answers, Best, Block, Nearest, Unwanted, best_of, ends_of
from tilewise.kernels.slices import slices
from tilewise.kernels.torch_impl.tile_scores import product_types

LARGEST_SIDE = {"cpu": 512}  # of a tile, so that its scores fit the cache
LARGEST_SIDE_ELSEWHERE = 2048  # larger: accelerators prefer few large launches
SMALLEST_SIDE = 16
SQUARE_BUFFERS = 4  # scores, better, ties, before
GROUP = 32  # scores of which a search compares the largest first
STRIP = 8  # tiles that are searched together, at least
GROUPS = 4  # times k: groups of a strip
MERGED_SHARE = 4  # where more than a quarter of the scores that are read enter, all of them are merged


def scratch_bytes(side: int, width: int, feature_bytes: int, score_bytes: int) -> int:
    """Memory of a loop over tiles: four square buffers of scores, a mask, and three blocks of features."""
    return (SQUARE_BUFFERS * score_bytes + 1) * side * side + 3 * side * width * feature_bytes


def tile_side(device: torch.device, width: int, dtype: torch.dtype, workspace_bytes: int) -> int:
    """The largest power of two up to the device's limit whose buffers fit the workspace. Independent of n and m.

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
                f"ranking features of width {width} needs at least {-(-need // 2**20)} MiB of scratch memory, "
                f"but workspace_mib is {workspace_bytes // 2**20}. Increase TileOptions(workspace_mib=...)"
            )
    return side


class ScoreTile:
    """A `Searcher` that allocates the buffers of one tile once per call.

    ``multiply(queries, items, out)`` replaces the matrix product by scores of another backend.
    """

    def __init__(
        self,
        device: torch.device,
        width: int,
        dtype: torch.dtype,
        workspace_bytes: int,
        multiply: Callable[[Tensor, Tensor, Tensor], None] | None = None,
    ) -> None:
        self.multiply = multiply
        self.side = tile_side(device, width, dtype, workspace_bytes)
        self.group = min(GROUP, self.side)
        feature, score = product_types(device, dtype)
        self.device, self.dtype = device, score
        self.rest = workspace_bytes - scratch_bytes(self.side, width, feature.itemsize, score.itemsize)
        self.queries = torch.zeros(self.side, width, device=device, dtype=feature)
        self.gallery = torch.zeros(self.side, width, device=device, dtype=feature)
        self.squares = torch.zeros(SQUARE_BUFFERS, self.side, self.side, device=device, dtype=score)
        self.scores, self.better, self.ties, self.before = self.squares
        self.ones = torch.ones(self.side, device=device, dtype=score)
        self.places = torch.arange(self.side, device=device, dtype=score)  # exact, since a side is below 2**24

    def product(self, rows: int, cols: int, scores: Tensor | None = None) -> Tensor:
        """Scores of the queries and items in the buffers: (rows, cols). Old values behind the end are discarded."""
        scores = self.scores if scores is None else scores
        if self.multiply is not None:
            self.multiply(self.queries, self.gallery[:cols], scores[:, :cols])
        elif self.queries.dtype == scores.dtype:
            torch.mm(self.queries, self.gallery.T, out=scores)
        else:
            torch.mm(self.queries, self.gallery.T, out_dtype=scores.dtype, out=scores)
        return scores[:rows, :cols]

    def pair_scores(self, block: Block, index: Tensor, into: Tensor) -> None:
        """See `Scorer`.

        The items are gathered in the order of their queries. A full tile is multiplied and only its diagonal is used,
        so that the arithmetic is that of every other tile. This costs s products per pair instead of one.
        """
        for rows in slices(block.queries.shape[0] if block.items.shape[0] else 0, self.side):
            items, inside = block.answering(index, rows)
            count = rows.stop - rows.start
            self.queries[:count], self.gallery[:count] = block.queries[rows], items
            scores = self.product(count, count).diagonal()
            into[rows] = torch.where(inside, scores, into[rows])

    def find_best(
        self, block: Block, row_ids: Tensor, col_ids: Tensor, rows_best: Best, cols_best: Best | None = None
    ) -> None:
        """See `Scorer`. A tile is skipped if the ranges of its row ids and column ids do not overlap.

        With ids in ascending order this pass is nearly free.
        """
        row_ends, col_ends = ends_of(row_ids, row_ids, self.side), ends_of(col_ids, col_ids, self.side)
        for cols, (low, high) in zip(slices(block.items.shape[0], self.side), col_ends, strict=True):
            self.gallery[: cols.stop - cols.start] = block.items[cols]
            for rows, (first, last) in zip(slices(block.queries.shape[0], self.side), row_ends, strict=True):
                if last < low or high < first:
                    continue
                scores = self._scores(block, rows, cols)
                scores.masked_fill_(row_ids[rows, None] != col_ids[None, cols], -torch.inf)
                top = scores.max(dim=1)  # the first of equal scores
                Best(rows_best.score[rows], rows_best.index[rows]).merge_(
                    top.values, top.indices + (block.col_offset + cols.start)
                )
                if cols_best is not None:
                    top = scores.max(dim=0)
                    Best(cols_best.score[cols], cols_best.index[cols]).merge_(
                        top.values, top.indices + (block.row_offset + rows.start)
                    )
            block.done(cols)

    def count_better(
        self, block: Block, rows: Sequence[Answers], cols: Answers | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """See `Scorer`."""
        n, c = block.queries.shape[0], block.items.shape[0]
        row_counts = torch.zeros(len(rows), n, device=self.device, dtype=torch.int64)
        col_counts = None if cols is None else torch.zeros(c, device=self.device, dtype=torch.int64)
        for j in slices(c, self.side):
            self.gallery[: j.stop - j.start] = block.items[j]
            for i in slices(n, self.side):
                scores = self._scores(block, i, j)
                for counts, answers in zip(row_counts, rows, strict=True):
                    counts[i] += self._count_along_columns(scores, answers, i, block.col_offset + j.start)
                if cols is not None and col_counts is not None:
                    col_counts[j] += self._count_along_columns(scores.T, cols, j, block.row_offset + i.start)
            block.done(j)
        return row_counts, col_counts

    def find_nearest(self, block: Block, unwanted: Unwanted, found: Nearest) -> None:
        """See `Searcher`. One strip of tiles at a time, so that few of its groups are among the best."""
        n, c, k = *block.queries.shape[:1], *block.items.shape[:1], found.index.shape[1]
        tiles = min(max(STRIP, GROUPS * k * self.group // self.side), -(-c // self.side))
        tiles = max(SQUARE_BUFFERS, min(tiles, self.rest // 2 // self.squares[0].nbytes))
        strip = self.squares if tiles == SQUARE_BUFFERS else self.squares.new_empty(tiles, self.side, self.side)
        for i in slices(n if c else 0, self.side):
            best = Nearest(found.score[i], found.index[i])
            self.queries[: i.stop - i.start] = block.queries[i]
            for cols in slices(c, tiles * self.side):
                self._search(block, unwanted, i, slices(cols.stop, self.side, cols.start), best, strip)
            best.sort_()
            if block.advance is not None:
                block.advance((i.stop - i.start) * c)

    def _search(
        self, block: Block, unwanted: Unwanted, rows: slice, tiles: list[slice], best: Nearest, strip: Tensor
    ) -> None:
        """Merge the items of a strip of tiles into ``best``, which has the queries ``rows``.

        The k best items are in the k groups with the largest scores; of groups with equal ones, in the first.
        """
        count, k = best.index.shape
        tops = strip.new_empty(count, len(tiles), self.side // self.group)
        for square, top, j in zip(strip, tops.unbind(1), tiles, strict=False):
            self.gallery[: j.stop - j.start] = block.items[j]
            scores = self.product(count, j.stop - j.start, square)
            if block.excluded is not None:
                block.excluded.hide_(scores, rows, self.side, block.col_offset + j.start)
            unwanted.hide_(scores, rows, j)
            square[:count, j.stop - j.start :] = -torch.inf
            torch.amax(square[:count].unflatten(1, (-1, self.group)), 2, out=top)
        first, tops = block.col_offset + tiles[0].start, tops.flatten(1)
        limit = best.limit(first)
        entering = min(k, int((tops > limit[:, None]).sum(1).amax()))  # groups of a row, at most
        if entering == 0:
            return
        groups = torch.arange(tops.shape[1], device=self.device).expand(count, -1)
        if entering < tops.shape[1]:
            top, groups = best_of(tops, groups, entering)
            if entering == k:  # k items score as much as the lowest of these groups
                limit = limit.maximum(torch.nextafter(top.amin(1), limit.new_tensor(-torch.inf)))
        for part in slices(count, max(1, self.rest // 2 // (32 * (k + entering * self.group)))):
            self._merge(
                Nearest(best.score[part], best.index[part]), strip, part.start, groups[part], limit[part], first
            )

    def _merge(self, best: Nearest, strip: Tensor, row: int, groups: Tensor, limit: Tensor, first: int) -> None:
        """Merge the items above the limits in these groups, (r, c), of a strip that starts at the item ``first``.

        ``row`` is the first of these r queries in the tile.
        """
        count, k = best.index.shape
        per_row = self.side // self.group
        rows = torch.arange(row, row + count, device=self.device)[:, None]
        place = (groups // per_row * self.side + rows) * per_row + groups % per_row
        scores = strip.view(-1, self.group).index_select(0, place.flatten()).view(count, -1)
        row_of, at = (scores > limit[:, None]).nonzero().unbind(1)
        if len(row_of) * MERGED_SHARE > scores.numel():  # many items enter
            index = (
                groups[:, :, None] * self.group + torch.arange(first, first + self.group, device=self.device)
            ).flatten(1)
            best.keep_(slice(None), torch.cat([best.score, scores], 1), torch.cat([best.index, index], 1))
            return
        width = row_of.bincount(minlength=count)
        longest = k + int(width.amax())
        start = torch.arange(k, count * longest, longest, device=self.device) - (width.cumsum(0) - width)
        into = start.index_select(0, row_of) + torch.arange(len(row_of), device=self.device)
        score = scores.new_full((count, longest), -torch.inf)
        index = groups.new_full((count, longest), NO_INDEX)
        score[:, :k], index[:, :k] = best.score, best.index
        score.view(-1).scatter_(0, into, scores[row_of, at])
        index.view(-1).scatter_(0, into, groups[row_of, at // self.group] * self.group + at % self.group + first)
        best.keep_(slice(None), score, index)

    def _scores(self, block: Block, rows: slice, cols: slice) -> Tensor:
        """Scores of these queries and the loaded items; -inf for an excluded pair."""
        count = rows.stop - rows.start
        self.queries[:count] = block.queries[rows]
        scores = self.product(count, cols.stop - cols.start)
        if block.excluded is not None:
            block.excluded.hide_(scores, rows, self.side, block.col_offset + cols.start)
        return scores

    def _count_along_columns(self, scores: Tensor, answers: Answers, rows: slice, first: int) -> Tensor:
        """The number of the tile's columns that rank before each row's answer: int64. `first` is their first index.

        Masks are 0.0 and 1.0 in the type of the scores and are summed by a product with ones. This is exact up to
        2**24 and several times as fast on the CPU as sums of booleans.
        """
        low, high = answers.spans[rows.start // self.side]
        answer = answers.score[rows, None]
        better = _oriented(self.better, scores)
        if first + scores.shape[1] <= low:  # all columns come before every answer and win ties
            torch.ge(scores, answer, out=better)
        else:
            torch.gt(scores, answer, out=better)
            if first < high:  # some columns come before an answer, some after it
                ties, before = _oriented(self.ties, scores), _oriented(self.before, scores)
                place = (answers.index[rows, None] - first).clamp(0, scores.shape[1]).to(scores.dtype)
                torch.eq(scores, answer, out=ties)
                torch.lt(self.places[: scores.shape[1]], place, out=before)
                better.addcmul_(ties, before)
        return (better @ self.ones[: scores.shape[1]]).to(torch.int64)


def _oriented(buffer: Tensor, scores: Tensor) -> Tensor:
    """A view of `buffer` with the shape and the memory order of `scores`, which may be transposed."""
    rows, cols = scores.shape
    return buffer[:rows, :cols] if scores.stride(1) == 1 else buffer[:cols, :rows].T
