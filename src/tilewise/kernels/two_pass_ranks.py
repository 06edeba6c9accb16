"""Ranks for a backend that offers none: scores from its `forward`, one gallery item at a time.

The log-sum-exp of a single score is that score, so a block with one column gives the scores of all queries with one
item. This is slow, but every score is computed by the backend itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from tilewise.kernels.ranks import Answers, Best, Block
from tilewise.kernels.spec import Backend, Pair, PairSpec, stat_dtype
from tilewise.options import TileOptions

SPEC = PairSpec(row_lse=True)


class TwoPassScorer:
    """A `Scorer` over the statistics of any backend."""

    side = 0

    def __init__(self, backend: Backend, device: torch.device, dtype: torch.dtype, options: TileOptions) -> None:
        self.backend, self.options = backend, options
        self.device, self.dtype = device, stat_dtype(dtype)

    def pair_scores(self, block: Block, index: Tensor, into: Tensor) -> None:
        """See `Scorer`."""
        for item, scores in self._columns(block, excluded=False):
            into.copy_(torch.where(index == item, scores, into))

    def find_best(
        self, block: Block, row_ids: Tensor, col_ids: Tensor, rows_best: Best, cols_best: Best | None = None
    ) -> None:
        """See `Scorer`."""
        queries = torch.arange(block.queries.shape[0], device=self.device) + block.row_offset
        for item, scores in self._columns(block):
            place = item - block.col_offset
            right = torch.where(row_ids == col_ids[place], scores, -torch.inf)
            rows_best.merge_(right, torch.full_like(queries, item))
            if cols_best is not None and right.numel():
                best = right.argmax()  # the first of equal scores
                col = slice(place, place + 1)
                Best(cols_best.score[col], cols_best.index[col]).merge_(right[best][None], queries[best][None])

    def count_better(
        self, block: Block, rows: Sequence[Answers], cols: Answers | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """See `Scorer`."""
        n, c = block.queries.shape[0], block.items.shape[0]
        counts = torch.zeros(len(rows), n, device=self.device, dtype=torch.int64)
        col_counts = None if cols is None else torch.zeros(c, device=self.device, dtype=torch.int64)
        queries = torch.arange(n, device=self.device) + block.row_offset
        for item, scores in self._columns(block):
            for count, answers in zip(counts, rows, strict=True):
                count += (scores > answers.score) | ((scores == answers.score) & (item < answers.index))
            if cols is not None and col_counts is not None:
                place = item - block.col_offset
                answer = cols.score[place]
                col_counts[place] = ((scores > answer) | ((scores == answer) & (queries < cols.index[place]))).sum()
        return counts, col_counts

    def _columns(self, block: Block, excluded: bool = True) -> Iterator[tuple[int, Tensor]]:
        """Each item's global index, and its scores with all queries: (n,); -inf for an excluded pair."""
        scale = torch.ones((), dtype=self.dtype, device=self.device)
        for place in range(block.items.shape[0]):
            item = block.col_offset + place
            pair = Pair(a=block.queries, b=block.items[place : place + 1], scale=scale)
            scores = self.backend.forward(pair, SPEC, self.options).row_lse
            assert scores is not None
            scores = scores.to(self.dtype)
            if excluded and block.excluded is not None:
                scores = scores.masked_fill((block.excluded.index == item).any(1), -torch.inf)
            yield item, scores
            block.done(slice(place, place + 1))
