"""One ranking call: scores of the right answers, then counts of better items, one gallery block at a time.

Axes: n queries, m gallery items, d features, p right answers per query, e excluded items per query.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.errors import ShapeError
from tilewise.kernels import ranks as kernel
from tilewise.ops.distributed.ring_loop import Field, RingLoop, choose_scorer
from tilewise.options import TileOptions
from tilewise.retrieval.checks import check_features, check_ids, check_index, check_not_excluded


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
    own: bool  # item i of this rank answers its query i
    flat: bool  # the ranks of queries are (n,)
    ids: tuple[Tensor, Tensor] | None
    exclude: Tensor | None  # (n, e)
    ring: RingLoop
    options: TileOptions
    both: bool

    @classmethod
    def of(
        cls,
        queries: Tensor,
        gallery: Tensor,
        answers: tuple[Tensor | None, Tensor | None, Tensor | None],
        exclude: Tensor | None,
        ring: RingLoop,
        options: TileOptions,
        both: bool,
    ) -> RankingCall:
        """Check the arguments on all ranks. If one rank raises an error, all ranks do."""
        positives, query_ids, gallery_ids = answers
        with ring.propagate_errors():
            check_features(queries, gallery, over_group=ring.exchange.world > 1)
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
            "device": queries.device.type,
            "options": " ".join(f"{name}={value}" for name, value in vars(options).items()),
        }
        ring.meet(n, m, queries.device, settings)
        with ring.propagate_errors():
            if own:
                positives = torch.arange(n, device=queries.device) + ring.col_start
            index = None if positives is None else check_index("positives", positives, queries, ring.all_cols)
            out = None if exclude is None else check_index("exclude", exclude, queries, ring.all_cols)
            if index is not None and out is not None:
                check_not_excluded(index, out)
        ring.meet(n, m, queries.device, {"call": "ranking, with indices that are in range"})
        flat = positives is None or positives.dim() == 1
        return cls(queries.detach(), gallery.detach(), index, own, flat, ids, out, ring, options, both)

    @property
    def pairs(self) -> int:
        """The number of scores to compute: each pair once, or twice with ids."""
        return self.queries.shape[0] * self.ring.all_cols * (1 if self.ids is None else 2)

    def arithmetic(self) -> Any:
        """A context without gradients and autocast, with the precision of the options."""
        return kernel.rank_arithmetic(self.queries.device, self.options.precision)

    def run(self, advance: kernel.Advance | None) -> BothRanks:
        """Run both steps and return the ranks."""
        queries = self.queries
        scorer = choose_scorer(queries.device, queries.shape[1], queries.dtype, self.options)
        excluded = None if self.exclude is None else kernel.excluded_of(self.exclude, scorer.side)
        rows, best = self.answers(scorer, excluded, advance)
        block = {"gallery": self.gallery}
        if best is not None:
            block.update(score=best.score, index=best.index)
        counts = torch.zeros(len(rows), queries.shape[0], device=queries.device, dtype=torch.int64)

        def count(first: int, block: dict[str, Tensor]) -> dict[str, Tensor] | None:
            cols = _answers_of_best(kernel.Best(block["score"], block["index"]), scorer) if self.both else None
            pairs = kernel.Block(queries, block["gallery"], self.ring.row_start, first, excluded, advance)
            row_counts, col_counts = scorer.count_better(pairs, rows, cols)
            counts.add_(row_counts)
            return None if col_counts is None else {"count": col_counts}

        accumulators = [Field("count", torch.int64)] if self.both else []
        home = self.ring.visit(block, count, accumulators=accumulators, merge=_add)
        index = torch.stack([answers.index for answers in rows]) if rows else counts
        ranks = torch.where(index < 0, -1, counts).T.contiguous()
        back = self.gallery.new_zeros(0, dtype=torch.int64)
        if best is not None:
            back = torch.where(best.index == kernel.NO_INDEX, -1, home["count"])
        return BothRanks(ranks[:, 0] if self.flat else ranks, back)

    def answers(
        self, scorer: kernel.Scorer, excluded: kernel.Excluded | None, advance: kernel.Advance | None
    ) -> tuple[list[kernel.Answers], kernel.Best | None]:
        """The right answers of the queries, with their scores, and with ``both`` those of the gallery items."""
        n, ring = self.queries.shape[0], self.ring
        mine = kernel.no_best(n, scorer)
        index = torch.empty(0) if self.index is None else self.index.T.contiguous()
        scores = torch.full(index.shape, torch.inf, device=mine.score.device, dtype=mine.score.dtype)

        def find(first: int, block: dict[str, Tensor]) -> dict[str, Tensor] | None:
            pairs = kernel.Block(self.queries, block["gallery"], ring.row_start, first, excluded, advance)
            best = kernel.no_best(pairs.items.shape[0], scorer) if self.both else None
            if self.ids is not None:
                scorer.find_best(pairs, self.ids[0], block["ids"], mine, best)
            else:
                for which, score in zip(index, scores, strict=True):
                    scorer.pair_scores(pairs, which, score)
                    if best is not None:
                        _merge_back(best, which - first, score, ring.row_start)
            return None if best is None else {"score": best.score, "index": best.index}

        block = {"gallery": self.gallery} if self.ids is None else {"gallery": self.gallery, "ids": self.ids[1]}
        if self.own:  # all answers are in this rank's own block
            found = find(ring.col_start, block) or {}
        else:
            accumulators = [Field("score", mine.score.dtype), Field("index", torch.int64)] if self.both else []
            found = ring.visit(block, find, accumulators=accumulators, merge=_keep_best)
        rows = [kernel.answers_of(which, score, scorer.side) for which, score in zip(index, scores, strict=True)]
        if self.ids is not None:
            rows = [_answers_of_best(mine, scorer)]
        # Clones: the results are views of a larger buffer, which can then be freed.
        return rows, kernel.Best(found["score"].clone(), found["index"].clone()) if self.both else None


def _add(held: dict[str, Tensor], added: Mapping[str, Tensor]) -> None:
    held["count"].add_(added["count"])


def _keep_best(held: dict[str, Tensor], added: Mapping[str, Tensor]) -> None:
    kernel.Best(held["score"], held["index"]).merge_(added["score"], added["index"])


def _answers_of_best(best: kernel.Best, scorer: kernel.Scorer) -> kernel.Answers:
    return kernel.answers_of(torch.where(best.index == kernel.NO_INDEX, -1, best.index), best.score, scorer.side)


def _merge_back(best: kernel.Best, item: Tensor, score: Tensor, first_row: int) -> None:
    """Query i is a right query of item item_i of the block. Keep each item's highest score; on ties the first query."""
    keep = (item >= 0) & (item < best.score.shape[0])
    query = torch.arange(first_row, first_row + item.shape[0], device=item.device)[keep]
    item, score = item[keep], score[keep]
    top = torch.full_like(best.score, -torch.inf).scatter_reduce_(0, item, score, "amax")
    first = torch.full_like(best.index, kernel.NO_INDEX).scatter_reduce_(
        0, item, torch.where(score == top[item], query, kernel.NO_INDEX), "amin"
    )
    best.merge_(top, first)
