"""Hard negatives: items that are close to a query, but wrong.

Axes: n queries, m gallery items, d features, p right answers per query, k negatives of each query.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeVar, get_args

import torch
from torch import Tensor

from tilewise._check import check_index, check_number, group_name
from tilewise.errors import RangeError, ShapeError
from tilewise.kernels import ranks as kernel
from tilewise.kernels.registry import choose_scorer
from tilewise.options import TileOptions, check_choice
from tilewise.retrieval.call import RankingCall
from tilewise.retrieval.nearest import nearest
from tilewise.retrieval.progress import Progress
from tilewise.ring.agree import propagate_errors
from tilewise.ring.exchange import find_exchange

Sampling = Literal["top", "random"]
OutputFormat = Literal["triplet", "n-tuple", "labeled-pair", "labeled-list"]
POOL = 10  # times num_negatives items are sampled from, unless range_max says how many
T = TypeVar("T")


class HardNegatives(NamedTuple):
    """The hard negatives of each query, the closest first, and its right answers."""

    indices: Tensor  #: (n, k) int64: gallery indices; -1 where there are fewer than k negatives
    scores: Tensor  #: (n, k): their scores; -inf where there are fewer
    positives: Tensor  #: (n, p) int64: gallery indices of the right answers; -1 for none
    positive_scores: Tensor  #: (n, p): their scores; inf for none

    def columns(
        self,
        queries: Sequence[T],
        gallery: Sequence[T],
        output_format: OutputFormat = "triplet",
        *,
        output_scores: bool = False,
    ) -> dict[str, list[Any]]:
        """Columns of a training set, for ``datasets.Dataset.from_dict``. sentence-transformers trains on each format.

        There is a row for each right answer; in "triplet" for each right answer and negative, in "labeled-pair" for
        each of both. "n-tuple" leaves out queries with fewer than k negatives.

        Args:
            queries: the n texts (or images) of the queries.
            gallery: the m texts (or images) of the whole gallery.
            output_format: "triplet" (anchor, positive, negative), "n-tuple" (anchor, positive, negative_1, ...),
                "labeled-pair" (anchor, positive, label) or "labeled-list" (anchor, positive, labels), in which the
                column "positive" has right answers (1) and negatives (0).
            output_scores: whether to add scores, of the right answer first. They take the place of labels.
        """
        check_choice("output_format", output_format, get_args(OutputFormat))
        if len(queries) != len(self.indices):
            raise ShapeError(
                f"queries must have one entry for each of the {len(self.indices)} rows that were mined, got "
                f"{len(queries)}. Pass those whose features were given"
            )
        rows: list[dict[str, Any]] = []
        for query, *found in zip(queries, *(values.tolist() for values in self), strict=True):
            indices, scores, positives, positive_scores = found
            wrong = [(gallery[i], score) for i, score in zip(indices, scores, strict=True) if i >= 0]
            right = [(gallery[i], score) for i, score in zip(positives, positive_scores, strict=True) if i >= 0]
            rows += _rows(query, right, wrong, output_format, output_scores, self.indices.shape[1])
        return {name: [row[name] for row in rows] for name in (rows[0] if rows else ())}


def _rows(
    query: T, right: list[tuple[T, float]], wrong: list[tuple[T, float]], form: str, scored: bool, k: int
) -> list[dict[str, Any]]:
    """The rows of one query."""
    if form == "labeled-pair":
        pairs = [(item, score, 1) for item, score in right] + [(item, score, 0) for item, score in wrong]
        last = [{"score": score} if scored else {"label": label} for _, score, label in pairs]
        return [{"anchor": query, "positive": pair[0]} | more for pair, more in zip(pairs, last, strict=True)]
    rows: list[dict[str, Any]] = []
    for positive, own in right:
        row: dict[str, Any] = {"anchor": query, "positive": positive}
        scores = [own, *(score for _, score in wrong)]
        if form == "triplet":
            more = [{"negative": item} | ({"scores": [own, score]} if scored else {}) for item, score in wrong]
            rows += [row | columns for columns in more]
        elif form == "n-tuple" and len(wrong) == k:
            row |= {f"negative_{i}": item for i, (item, _) in enumerate(wrong, 1)}
            rows.append(row | ({"scores": scores} if scored else {}))
        elif form == "labeled-list" and wrong:
            row["positive"] = [positive, *(item for item, _ in wrong)]
            rows.append(row | ({"scores": scores} if scored else {"labels": [1] + [0] * len(wrong)}))
    return rows


def mine_hard_negatives(
    queries: Tensor,
    gallery: Tensor,
    positives: Tensor | None = None,
    *,
    query_ids: Tensor | None = None,
    gallery_ids: Tensor | None = None,
    range_min: int = 0,
    range_max: int | None = None,
    max_score: float | None = None,
    min_score: float | None = None,
    absolute_margin: float | None = None,
    relative_margin: float | None = None,
    num_negatives: int = 3,
    sampling_strategy: Sampling = "top",
    seed: int = 0,
    progress: bool | Progress = False,
    group: Any | None = None,
    options: TileOptions | None = None,
) -> HardNegatives:
    """Gallery items that are close to a query but wrong, for training. The (n, m) scores are not stored.

    With ``x = queries @ gallery.T``, P_i the right answers of query i and l_i the lowest of their scores, item j is a
    candidate if it is not in P_i and

        x_ij <= l_i - absolute_margin,    x_ij <= l_i - relative_margin * |l_i|,    min_score <= x_ij <= max_score

    Candidates are ranked by their scores, on ties by their indices. Those of the ranks `range_min` to `range_max` - 1
    are used: the first `num_negatives` of them, or a random choice. The names are those of
    ``sentence_transformers.util.mine_hard_negatives``, which looks for candidates among the nearest items only. Here
    all items of the gallery are considered.

    Args:
        queries: (n, d), float16, bfloat16, float32 or float64.
        gallery: (m, d), same type and device. Normalize both outside for cosine scores. It may stay on the CPU, as in
            `nearest`.
        positives: gallery indices of the right answers, (n,) or (n, p) padded with -1, or a bool mask (n, m). None:
            item i answers query i.
        query_ids, gallery_ids: (n,) and (m,) integers. Items with the query's id are no candidates either.
        range_min: how many candidates to leave out, those with the highest scores.
        range_max: the number of candidates to rank. None: as many as are needed; for "random", 10 for each negative.
        max_score, min_score: limits of the scores.
        absolute_margin, relative_margin: how much lower than every right answer a candidate scores. A query without a
            right answer has no such limit.
        num_negatives: k, how many to find for each query.
        sampling_strategy: "top" takes the closest, "random" any of the range, each with the same probability.
        seed: of the random choice. Over a group, another number of ranks gives another choice.
        progress: as in `nearest`.
        group: as in `nearest`. Indices are those of the whole gallery.
        options: how the scores are computed; see `TileOptions`.

    Memory: O(n (range_max + p)) and one tile. Cost: one product of 2 n m d operations; over a group with `positives`
    the gallery moves around the ring twice.

    >>> queries, gallery = torch.eye(2), torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.9, 0.4], [0.5, 0.8]])
    >>> mine_hard_negatives(queries, gallery, num_negatives=2).indices
    tensor([[2, 3],
            [3, 2]])
    >>> mine_hard_negatives(queries, gallery, num_negatives=2, absolute_margin=0.2).indices
    tensor([[3, 1],
            [3, 2]])
    """
    with propagate_errors(find_exchange(group_name(group))):
        first, last = _check_range(range_min, range_max, num_negatives, sampling_strategy)
        given = {"max_score": max_score, "min_score": min_score}
        given |= {"absolute_margin": absolute_margin, "relative_margin": relative_margin}
        limits = {name: check_number(name, value) for name, value in given.items() if value is not None}
        lowest = limits.pop("min_score", -torch.inf)
        seed = check_index("seed", seed, "It starts the random choice")
    call = RankingCall.of(queries, gallery, (positives, None, None), None, group, options, False, both=False)
    assert call.index is not None
    with kernel.rank_arithmetic(call.queries.device, call.options.precision):
        scorer = choose_scorer(call.queries.device, call.queries.shape[1], call.queries.dtype, call.options)
        answers, _ = call.answers(scorer, None, None)
    right = torch.stack([one.score for one in answers], 1) if answers else queries.new_empty(len(queries), 0)
    below = None
    if limits:
        limit = _limit(right, **limits)
        below = torch.nextafter(limit, torch.full_like(limit, torch.inf))  # a score that equals the limit is allowed
    found = nearest(
        queries, gallery, last, query_ids=query_ids, gallery_ids=gallery_ids, exclude=call.index, below=below,
        progress=progress, group=group, options=options,
    )  # fmt: skip
    scores, indices = found.scores[:, first:], found.indices[:, first:]
    low = scores < lowest
    scores, indices = scores.masked_fill(low, -torch.inf), indices.masked_fill(low, -1)
    if sampling_strategy == "random":
        generator = torch.Generator().manual_seed((seed + call.shards.row_start) % 2**63)
        lots = torch.rand(scores.shape, generator=generator).to(scores.device)
        chosen = lots.masked_fill(indices < 0, -1.0).topk(num_negatives, dim=1).indices.sort(dim=1).values
        scores, indices = scores.gather(1, chosen), indices.gather(1, chosen)
    return HardNegatives(indices[:, :num_negatives], scores[:, :num_negatives], call.index, right)


def _limit(
    right: Tensor,
    max_score: float = torch.inf,
    absolute_margin: float | None = None,
    relative_margin: float | None = None,
) -> Tensor:
    """The highest score of a candidate, (n,): below all right answers by both margins."""
    lowest = torch.cat([right, right.new_full((len(right), 1), torch.inf)], 1).amin(1)
    limit = torch.full_like(lowest, max_score)
    if absolute_margin is not None:
        limit = torch.minimum(limit, lowest - absolute_margin)
    if relative_margin is not None:
        margin = torch.where(lowest.isinf(), 0.0, lowest.abs() * relative_margin)
        limit = torch.minimum(limit, lowest - margin)
    return limit


def _check_range(first: int, last: int | None, number: int, sampling: str) -> tuple[int, int]:
    """Both ends of the ranks to use."""
    check_choice("sampling_strategy", sampling, get_args(Sampling))
    number = check_index("num_negatives", number, "It is how many negatives to find for each query")
    first = check_index("range_min", first, "It is how many of the closest candidates to leave out")
    if last is None:
        last = first + number * (POOL if sampling == "random" else 1)
    last = check_index("range_max", last, "It is the number of candidates to rank")
    if number < 1 or first < 0 or last - first < number:
        raise RangeError(
            "num_negatives must be 1 or more, range_min 0 or more, and range_max - range_min at least num_negatives, "
            f"got {number}, {first} and {last}. Increase range_max, or leave it out"
        )
    return first, last
