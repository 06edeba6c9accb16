"""One ranking call: scores of the right answers, then counts of better items, one gallery block at a time.

Axes: n queries, m gallery items, d features, p right answers per query, e excluded items per query.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise._check import check_options, group_name
from tilewise.errors import ShapeError
from tilewise.kernels import ranks as kernel
from tilewise.kernels.registry import choose_scorer
from tilewise.options import TileOptions
from tilewise.retrieval.checks import check_features, check_ids, check_index, check_not_excluded
from tilewise.retrieval.gallery import Work, visit_gallery, visit_own
from tilewise.retrieval.progress import Progress, check_progress, reporter
from tilewise.ring.agree import agree, propagate_errors
from tilewise.ring.blocks import Field, Merge, Tensors
from tilewise.ring.exchange import Exchange, find_exchange
from tilewise.ring.schedule import Shards


class BothRanks(NamedTuple):
    """Ranks in both directions of one score matrix."""

    query_to_gallery: Tensor  #: (n,) or (n, p): rank of each right answer among the gallery items
    gallery_to_query: Tensor  #: (m,): rank of each item's best right query among the queries; -1 if it has none


@dataclass(frozen=True)
class RankingCall:
    """The checked arguments of a call, and its two steps: score the right answers, then count better items.

    Indices of items and queries are global, over all ranks. Gallery blocks are visited one at a time.
    """

    queries: Tensor
    gallery: Tensor
    index: Tensor | None  # (n, p) right answers, or None with ids
    paired: bool  # item i of this rank answers its query i
    flat: bool  # the ranks of the queries are returned as (n,), not (n, p)
    ids: tuple[Tensor, Tensor] | None
    exclude: Tensor | None  # (n, e)
    exchange: Exchange
    shards: Shards
    options: TileOptions
    progress: bool | Progress
    both: bool

    @classmethod
    def of(
        cls,
        queries: Tensor,
        gallery: Tensor,
        answers: tuple[Tensor | None, Tensor | None, Tensor | None],
        exclude: Tensor | None,
        group: Any | None,
        options: TileOptions | None,
        progress: bool | Progress,
        *,
        both: bool,
    ) -> RankingCall:
        """Check the arguments on all ranks. If one rank raises an error, all ranks do."""
        exchange = find_exchange(group_name(group))
        positives, query_ids, gallery_ids = answers
        with propagate_errors(exchange):
            options = check_options(options, rows_alone=True)
            check_progress(progress)
            check_features(queries, gallery, over_group=exchange.world > 1)
            ids = check_ids(query_ids, gallery_ids, positives, queries, gallery)
            own = ids is None and positives is None
            n, m = queries.shape[0], gallery.shape[0]
            if own and m < n:
                raise ShapeError(
                    f"without positives, gallery item i answers query i, but there are {n} queries and {m} "
                    "items. Pass positives=..., or query_ids=... and gallery_ids=..."
                )
        settings = {
            "call": "ranking in both directions" if both else "ranking",
            "answers": "item i" if own else "positives" if ids is None else "ids",
            "width": queries.shape[1],
            "type": str(queries.dtype).removeprefix("torch."),
            "options": " ".join(f"{name}={value}" for name, value in vars(options).items()),
        }
        shards = agree(exchange, n, m, settings, queries.device)
        with propagate_errors(exchange):
            if own:
                positives = torch.arange(n, device=queries.device) + shards.col_start(shards.rank)
            index = None if positives is None else check_index("positives", positives, queries, shards.all_cols)
            left_out = None if exclude is None else check_index("exclude", exclude, queries, shards.all_cols)
            if index is not None and left_out is not None:
                check_not_excluded(index, left_out)
        agree(exchange, n, m, {"call": "ranking, with indices that are in range"})  # receives errors of the last check
        flat = positives is None or positives.dim() == 1
        features = queries.detach(), gallery.detach()
        return cls(*features, index, own, flat, ids, left_out, exchange, shards, options, progress, both)

    @property
    def pairs(self) -> int:
        """The number of scores to compute: each pair once, or twice with ids."""
        return self.queries.shape[0] * self.shards.all_cols * (1 if self.ids is None else 2)

    def run(self) -> BothRanks:
        """Run both steps and return the ranks."""
        device, progress = self.queries.device, self.progress
        with kernel.rank_arithmetic(device, self.options.precision), reporter(progress, self.pairs, device) as advance:
            return self._run(advance)

    def _run(self, advance: kernel.Advance | None) -> BothRanks:
        queries = self.queries
        scorer = choose_scorer(queries.device, queries.shape[1], queries.dtype, self.options)
        excluded = None if self.exclude is None else kernel.Excluded(self.exclude, scorer.side)
        rows, best = self.answers(scorer, excluded, advance)
        block = {"gallery": self.gallery}
        if best is not None:
            block.update(score=best.score, index=best.index)
        counts = torch.zeros(len(rows), queries.shape[0], device=queries.device, dtype=torch.int64)

        def count(first: int, block: dict[str, Tensor]) -> dict[str, Tensor] | None:
            cols = _answers_of_best(kernel.Best(block["score"], block["index"]), scorer) if self.both else None
            row_counts, col_counts = scorer.count_better(self._block(first, block, excluded, advance), rows, cols)
            counts.add_(row_counts)
            return None if col_counts is None else {"count": col_counts}

        accumulators = [Field("count", torch.int64)] if self.both else []
        home = self._visit(block, count, accumulators, lambda held, added: held["count"].add_(added["count"]))
        index = torch.stack([answers.index for answers in rows]) if rows else counts
        ranks = torch.where(index < 0, -1, counts).T.contiguous()
        back = counts.new_zeros(0)
        if best is not None:
            back = torch.where(best.index == kernel.NO_INDEX, -1, home["count"])
        return BothRanks(ranks[:, 0] if self.flat else ranks, back)

    def answers(
        self, scorer: kernel.Scorer, excluded: kernel.Excluded | None, advance: kernel.Advance | None
    ) -> tuple[list[kernel.Answers], kernel.Best | None]:
        """The right answers of the queries with their scores; with ``both`` also the best right query of each item."""
        mine, first_row = kernel.no_best(self.queries.shape[0], scorer), self.shards.row_start
        index = torch.empty(0) if self.index is None else self.index.T.contiguous()
        scores = torch.full(index.shape, torch.inf, device=mine.score.device, dtype=mine.score.dtype)

        def find(first: int, block: dict[str, Tensor]) -> dict[str, Tensor] | None:
            pairs = self._block(first, block, excluded, advance)
            best = kernel.no_best(pairs.items.shape[0], scorer) if self.both else None
            if self.ids is not None:
                scorer.find_best(pairs, self.ids[0], block["ids"], mine, best)
            else:
                for which, score in zip(index, scores, strict=True):
                    scorer.pair_scores(pairs, which, score)
                    if best is not None:
                        _merge_right_queries(best, which - pairs.col_offset, score, first_row)
            return None if best is None else {"score": best.score, "index": best.index}

        block = {"gallery": self.gallery} if self.ids is None else {"gallery": self.gallery, "ids": self.ids[1]}
        if self.paired:  # all answers are in this rank's own block
            found = visit_own(block, self.queries.device, find, self.shards.col_start(self.shards.rank))
        else:
            accumulators = [Field("score", mine.score.dtype), Field("index", torch.int64)] if self.both else []
            found = self._visit(block, find, accumulators, lambda held, added: kernel.Best(**held).merge_(**added))
        rows = [kernel.answers_of(which, score, scorer.side) for which, score in zip(index, scores, strict=True)]
        if self.ids is not None:
            rows = [_answers_of_best(mine, scorer)]
        # Clones: the results are views of a larger buffer, which can then be freed.
        return rows, kernel.Best(found["score"].clone(), found["index"].clone()) if self.both else None

    def _visit(self, block: Tensors, work: Work, accumulators: list[Field], merge: Merge) -> dict[str, Tensor]:
        """Run ``work`` on the gallery blocks of all ranks, and return the merged accumulators of this rank's items."""
        return visit_gallery(self.exchange, self.shards, block, self.queries.device, work, accumulators, merge)

    def _block(
        self, first: int, block: dict[str, Tensor], excluded: kernel.Excluded | None, advance: kernel.Advance | None
    ) -> kernel.Block:
        """All queries of this rank and a block of gallery items, the first of which has the index ``first``."""
        return kernel.Block(self.queries, block["gallery"], self.shards.row_start, first, excluded, advance)


def _answers_of_best(best: kernel.Best, scorer: kernel.Scorer) -> kernel.Answers:
    return kernel.answers_of(torch.where(best.index == kernel.NO_INDEX, -1, best.index), best.score, scorer.side)


def _merge_right_queries(best: kernel.Best, item: Tensor, score: Tensor, first_row: int) -> None:
    """Merge the queries into the best right query of each item of this block.

    Query i is a right query of item[i], an index into the block; an index outside of the block is skipped. Each item
    keeps the right query with the highest score, on ties the first one.
    """
    keep = (item >= 0) & (item < best.score.shape[0])
    query = torch.arange(first_row, first_row + item.shape[0], device=item.device)[keep]
    item, score = item[keep], score[keep]
    top = torch.full_like(best.score, -torch.inf).scatter_reduce_(0, item, score, "amax")
    first = torch.full_like(best.index, kernel.NO_INDEX).scatter_reduce_(
        0, item, torch.where(score == top[item], query, kernel.NO_INDEX), "amin"
    )
    best.merge_(top, first)
