"""Ranks and recall of retrieval without the matrix of scores.

Axes: n queries, m gallery items, d features, p right answers per query, e excluded items per query.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise._check import FLOATS, INTEGERS, check_options, group_name
from tilewise.errors import BackendError, DeviceError, DtypeError, RangeError, ShapeError
from tilewise.kernels import ranks as kernel
from tilewise.ops.spread import Field, Spread
from tilewise.options import TileOptions

Progress = Callable[[int, int], None]


class BothRanks(NamedTuple):
    """Ranks in the two directions of one matrix of scores."""

    query_to_gallery: Tensor  #: (n,) or (n, p): of each right answer among the gallery
    gallery_to_query: Tensor  #: (m,): of the best right query of each gallery item; -1 for an item without one


def retrieval_ranks(
    queries: Tensor,
    gallery: Tensor,
    positives: Tensor | None = None,
    *,
    query_ids: Tensor | None = None,
    gallery_ids: Tensor | None = None,
    exclude: Tensor | None = None,
    progress: bool | Progress = False,
    group: Any | None = None,
    options: TileOptions | None = None,
) -> Tensor:
    """Exact 0-based rank of each query's right answer among all gallery items.

    With ``x = queries @ gallery.T`` and p the right answer of query i::

        rank_i = #{j : x_ij > x_ip}  +  #{j < p : x_ij == x_ip}

    which is where p stands in ``x_i.argsort(descending=True, stable=True)``, without building (n, m) scores.
    Equal scores are ranked by gallery index, so a model that scores everything alike ranks at chance, not at
    the top.

    Args:
        queries: (n, d), float16, bfloat16, float32 or float64.
        gallery: (m, d), same type and device. Normalize both outside for cosine scores.
        positives: the index of the right answer(s). None: item i answers query i. (n,): one each. (n, p):
            several each, ranked separately, rows padded with -1. -1 stands for no answer and has rank -1.
        query_ids: (n,) integers, with `gallery_ids` and instead of `positives`: every item with the query's
            id is right, and the best-placed one is ranked; a query whose id is not in the gallery has rank
            -1.
        gallery_ids: (m,) integers.
        exclude: (n,) or (n, e) gallery indices padded with -1: items that are no candidates for that query.
            With ``gallery is queries`` and ids, ``exclude=torch.arange(n)`` keeps a query from finding
            itself.
        progress: True shows a bar if the package rich is installed; a function is called with (pairs done,
            pairs in all) now and then. On an accelerator this synchronizes at each call.
        group: a process group over whose ranks queries and gallery are spread, in rank order and in shards of
            any size. Each rank gets the ranks of its own queries among the gallery of all. `positives` and
            `exclude` are then indices into the whole gallery, ids are compared across ranks, and without
            either item i of a rank answers query i of that rank.
        options: how; `workspace_mib` bounds the scratch memory.

    Returns:
        int64 ranks, (n,), or (n, p) if `positives` is.

    Memory: O(n + m) integers and scores, and one tile. Time: one product of 2 n m d operations; two with ids,
    since the best answer must be known before its rivals can be counted (ids in ascending order save most of
    the second).

    All scores come from products of one and the same shape, so equal gallery rows tie exactly, and neither n,
    m nor `workspace_mib` changes a rank (as long as the workspace holds a full tile: 10.3 MiB on the CPU and
    92 MiB on CUDA at a width of 1,024 in float32). NaN, infinities, and scores that would overflow are
    refused.

    >>> x = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.6, 0.8]])
    >>> retrieval_ranks(x, x.flip(0))          # item i answers query i
    tensor([1, 0, 2])
    >>> retrieval_ranks(x, x.flip(0), torch.tensor([2, 1, 0]))
    tensor([0, 0, 0])
    >>> retrieval_ranks(x, x, query_ids=torch.tensor([5, 6, 6]), gallery_ids=torch.tensor([5, 6, 6]),
    ...                 exclude=torch.arange(3))
    tensor([-1,  0,  0])
    """
    answers = (positives, query_ids, gallery_ids)
    return _ranks(queries, gallery, answers, exclude, progress, group, options, both=False).query_to_gallery


def retrieval_ranks_both(
    queries: Tensor,
    gallery: Tensor,
    positives: Tensor | None = None,
    *,
    query_ids: Tensor | None = None,
    gallery_ids: Tensor | None = None,
    exclude: Tensor | None = None,
    progress: bool | Progress = False,
    group: Any | None = None,
    options: TileOptions | None = None,
) -> BothRanks:
    """`retrieval_ranks`, and the ranks of queries for each gallery item, from one pass over the scores.

    The right queries of item j are those that have j as a right answer; the best-placed of them is ranked,
    among the queries, by the same rule::

        rank_j = #{i : x_ij > x_qj}  +  #{i < q : x_ij == x_qj}        q: the right query of the highest score

    With images as queries and texts as gallery these are image-to-text and text-to-image retrieval.
    Arguments, cost and memory are those of `retrieval_ranks`; an excluded pair is excluded in both
    directions.

    >>> captions = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0], [0.6, 0.8]])
    >>> images = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    >>> ranks = retrieval_ranks_both(captions, images, torch.tensor([0, 1, 1, 0]))
    >>> ranks.query_to_gallery, ranks.gallery_to_query
    (tensor([0, 1, 0, 1]), tensor([0, 0]))
    """
    answers = (positives, query_ids, gallery_ids)
    return _ranks(queries, gallery, answers, exclude, progress, group, options, both=True)


def recall_at_k(ranks: Tensor, ks: Sequence[int] = (1, 5, 10)) -> dict[int, float]:
    """Share of queries with a right answer among the first k: ``mean_i [min_p rank_ip < k]``.

    Args:
        ranks: (n,) or (n, p), 0-based, as `retrieval_ranks` returns them. Of several answers the best counts.
            A query whose ranks are all -1 has no right answer to find and is left out of the mean.
        ks: positive, any order.

    >>> recall_at_k(torch.tensor([0, 3, 12, -1]), ks=(1, 5))
    {1: 0.3333333333333333, 5: 0.6666666666666666}
    """
    if ranks.dtype not in INTEGERS:
        raise DtypeError(f"ranks must be integers, got {ranks.dtype}. Pass what retrieval_ranks returns, not scores")
    if ranks.dim() not in (1, 2):
        raise ShapeError(f"ranks must be (n,) or (n, p), got {tuple(ranks.shape)}")
    wrong = [k for k in ks if isinstance(k, bool) or not isinstance(k, int) or k < 1]
    if wrong or not ks:
        raise RangeError(f"ks must be whole numbers from 1 up, and at least one, got {tuple(ks)}")
    best = ranks.long() if ranks.dim() == 2 else ranks.long()[:, None]
    found = (best >= 0).any(dim=1)
    if not found.any():
        raise RangeError(
            f"recall needs a query with a right answer, but all {ranks.shape[0]} have rank -1. Do the ids of "
            "queries and gallery match?"
        )
    first = torch.where(best < 0, kernel.NO_INDEX, best)[found].amin(dim=1)
    return {k: (first < k).sum().item() / first.shape[0] for k in ks}


def _ranks(
    queries: Tensor,
    gallery: Tensor,
    answers: tuple[Tensor | None, Tensor | None, Tensor | None],
    exclude: Tensor | None,
    progress: bool | Progress,
    group: Any | None,
    options: TileOptions | None,
    *,
    both: bool,
) -> BothRanks:
    options = check_options(options)
    _refuse_backend(options)
    call = _Call.of(queries, gallery, answers, exclude, Spread(group_name(group)), options, both)
    with call.arithmetic(), _reporter(progress, call.pairs, call.queries.device) as advance:
        return call.run(advance)


@dataclass(frozen=True)
class _Call:
    """Arguments of a call, checked; then the two steps: scores of the right answers, then their rivals.

    Indices of items and queries count over all ranks, blocks of the gallery come one by one.
    """

    queries: Tensor
    gallery: Tensor
    index: Tensor | None  # (n, p) right answers, or None with ids
    own: bool  # item i of this rank answers its query i
    flat: bool  # the ranks of queries are (n,)
    ids: tuple[Tensor, Tensor] | None
    exclude: Tensor | None  # (n, e)
    spread: Spread
    options: TileOptions
    both: bool

    @classmethod
    def of(
        cls,
        queries: Tensor,
        gallery: Tensor,
        answers: tuple[Tensor | None, Tensor | None, Tensor | None],
        exclude: Tensor | None,
        spread: Spread,
        options: TileOptions,
        both: bool,
    ) -> _Call:
        positives, query_ids, gallery_ids = answers
        with spread.telling():
            _check_features(queries, gallery)
            ids = _check_ids(query_ids, gallery_ids, positives, queries, gallery)
            own = ids is None and positives is None
            n, m = queries.shape[0], gallery.shape[0]
            if own and m < n:
                raise ShapeError(
                    f"without positives, gallery item i answers query i, but there are {n} queries and {m} "
                    "items. Pass positives=..., or query_ids=... and gallery_ids=..."
                )
        told = {
            "call": "ranking in both directions" if both else "ranking",
            "answers": "item i" if own else "positives" if ids is None else "ids",
            "width": queries.shape[1],
            "type": str(queries.dtype).removeprefix("torch."),
            "device": queries.device.type,
            "options": " ".join(f"{name}={value}" for name, value in vars(options).items()),
        }
        spread.meet(n, m, queries.device, told)
        with spread.telling():
            if own:
                positives = torch.arange(n, device=queries.device) + spread.col_start
            index = None if positives is None else _check_index("positives", positives, queries, spread.all_cols)
            out = None if exclude is None else _check_index("exclude", exclude, queries, spread.all_cols)
            if index is not None and out is not None:
                _check_not_excluded(index, out)
        spread.meet(n, m, queries.device, {"call": "ranking, with indices that are in range"})
        flat = positives is None or positives.dim() == 1
        return cls(queries.detach(), gallery.detach(), index, own, flat, ids, out, spread, options, both)

    @property
    def pairs(self) -> int:
        """Scores to compute: every pair once, or twice with ids."""
        return self.queries.shape[0] * self.spread.all_cols * (1 if self.ids is None else 2)

    def arithmetic(self) -> Any:
        return kernel.rank_arithmetic(self.queries.device, self.options.precision)

    def run(self, advance: kernel.Advance | None) -> BothRanks:
        queries = self.queries
        tile = kernel.ScoreTile(queries.device, queries.shape[1], queries.dtype, self.options.workspace_bytes)
        excluded = None if self.exclude is None else kernel.excluded_of(self.exclude, tile.side)
        rows, best = self.answers(tile, excluded, advance)
        block = {"gallery": self.gallery}
        if best is not None:
            block.update(score=best.score, index=best.index)
        counts = torch.zeros(len(rows), queries.shape[0], device=queries.device, dtype=torch.int64)

        def count(first: int, block: dict[str, Tensor]) -> dict[str, Tensor] | None:
            cols = _answers_of_best(kernel.Best(block["score"], block["index"]), tile) if self.both else None
            row_counts, col_counts = kernel.count_better(
                tile,
                queries,
                block["gallery"],
                rows,
                cols,
                row_offset=self.spread.row_start,
                col_offset=first,
                excluded=excluded,
                advance=advance,
            )
            counts.add_(row_counts)
            return None if col_counts is None else {"count": col_counts}

        credits = [Field("count", torch.int64)] if self.both else []
        home = self.spread.visit(block, count, credits=credits, join=_add)
        index = torch.stack([answers.index for answers in rows]) if rows else counts
        ranks = torch.where(index < 0, -1, counts).T.contiguous()
        back = self.gallery.new_zeros(0, dtype=torch.int64)
        if best is not None:
            back = torch.where(best.index == kernel.NO_INDEX, -1, home["count"])
        return BothRanks(ranks[:, 0] if self.flat else ranks, back)

    def answers(
        self, tile: kernel.ScoreTile, excluded: kernel.Excluded | None, advance: kernel.Advance | None
    ) -> tuple[list[kernel.Answers], kernel.Best | None]:
        """The right answers of the queries and, if asked, of the gallery items, with their scores."""
        n, spread = self.queries.shape[0], self.spread
        mine = kernel.no_best(n, tile)
        index = torch.empty(0) if self.index is None else self.index.T.contiguous()
        scores = torch.full(index.shape, torch.inf, device=mine.score.device, dtype=mine.score.dtype)

        def find(first: int, block: dict[str, Tensor]) -> dict[str, Tensor] | None:
            items = block["gallery"]
            best = kernel.no_best(items.shape[0], tile) if self.both else None
            if self.ids is not None:
                kernel.find_best(
                    tile,
                    self.queries,
                    items,
                    self.ids[0],
                    block["ids"],
                    mine,
                    best,
                    row_offset=spread.row_start,
                    col_offset=first,
                    excluded=excluded,
                    advance=advance,
                )
            else:
                for which, score in zip(index, scores, strict=True):
                    kernel.pair_scores(tile, self.queries, items, which, col_offset=first, into=score)
                    if best is not None:
                        _merge_back(best, which - first, score, spread.row_start)
            return None if best is None else {"score": best.score, "index": best.index}

        block = {"gallery": self.gallery} if self.ids is None else {"gallery": self.gallery, "ids": self.ids[1]}
        if self.own:  # no other rank's block has an answer
            found = find(spread.col_start, block) or {}
        else:
            credits = [Field("score", mine.score.dtype), Field("index", torch.int64)] if self.both else []
            found = spread.visit(block, find, credits=credits, join=_keep_best)
        rows = [kernel.answers_of(which, score, tile.side) for which, score in zip(index, scores, strict=True)]
        if self.ids is not None:
            rows = [_answers_of_best(mine, tile)]
        # A view of a buffer that held other credits too: the answers outlive it.
        return rows, kernel.Best(found["score"].clone(), found["index"].clone()) if self.both else None


def _add(held: dict[str, Tensor], added: Mapping[str, Tensor]) -> None:
    held["count"].add_(added["count"])


def _keep_best(held: dict[str, Tensor], added: Mapping[str, Tensor]) -> None:
    kernel.Best(held["score"], held["index"]).merge_(added["score"], added["index"])


def _answers_of_best(best: kernel.Best, tile: kernel.ScoreTile) -> kernel.Answers:
    return kernel.answers_of(torch.where(best.index == kernel.NO_INDEX, -1, best.index), best.score, tile.side)


def _merge_back(best: kernel.Best, item: Tensor, score: Tensor, first_row: int) -> None:
    """Query i is right for item item_i of the block: keep each item's highest score and, of equals, the first query."""
    keep = (item >= 0) & (item < best.score.shape[0])
    query = torch.arange(first_row, first_row + item.shape[0], device=item.device)[keep]
    item, score = item[keep], score[keep]
    top = torch.full_like(best.score, -torch.inf).scatter_reduce_(0, item, score, "amax")
    first = torch.full_like(best.index, kernel.NO_INDEX).scatter_reduce_(
        0, item, torch.where(score == top[item], query, kernel.NO_INDEX), "amin"
    )
    best.merge_(top, first)


@contextmanager
def _reporter(progress: bool | Progress, total: int, device: torch.device) -> Iterator[kernel.Advance | None]:
    """Turn the user's wish into the function that the tile loops call."""
    if progress is False or (progress is True and importlib.util.find_spec("rich") is None):
        yield None
        return
    done = 0

    def report(pairs: int) -> None:
        nonlocal done
        done += pairs
        if device.type != "cpu":  # what was launched is not yet done
            torch.accelerator.synchronize(device)
        show(done, total)

    if callable(progress):
        show = progress
        yield report
        return
    from rich.progress import Progress as RichProgress

    with RichProgress() as bar:
        task = bar.add_task("ranking", total=total)

        def show(done: int, total: int) -> None:
            bar.update(task, completed=done)

        yield report


def _refuse_backend(options: TileOptions) -> None:
    if options.backend == "triton":
        raise BackendError(
            'retrieval has only the torch backend, which runs on any device, got backend="triton". Use '
            '"auto" or "torch"'
        )


def _check_features(queries: Tensor, gallery: Tensor) -> None:
    for name, features in (("queries", queries), ("gallery", gallery)):
        if not isinstance(features, Tensor):
            raise DtypeError(f"{name} is a tensor, got {type(features).__name__}. Use torch.as_tensor")
    if queries.dim() != 2 or gallery.dim() != 2 or queries.shape[1] != gallery.shape[1]:
        raise ShapeError(
            "queries and gallery must be (n, d) and (m, d) with the same width d, "
            f"got {tuple(queries.shape)} and {tuple(gallery.shape)}"
        )
    if queries.dtype != gallery.dtype or queries.dtype not in FLOATS:
        raise DtypeError(
            "queries and gallery must have one type out of float16, bfloat16, float32 and float64, "
            f"got {queries.dtype} and {gallery.dtype}. Convert one of them"
        )
    if queries.device != gallery.device:
        raise DeviceError(
            f"queries and gallery must be on one device, got {queries.device} and {gallery.device}. Move one of them"
        )
    if 0 in (queries.shape[0], gallery.shape[0], queries.shape[1]):
        return
    ends = torch.stack([end.double() for side in (queries, gallery) for end in torch.aminmax(side.detach())])
    low_q, high_q, low_g, high_g = ends.tolist()
    bound = max(-low_q, high_q) * max(-low_g, high_g) * queries.shape[1]
    limit = torch.finfo(torch.float64 if queries.dtype == torch.float64 else torch.float32).max
    if not bound < limit:  # also true for NaN
        raise RangeError(
            "queries and gallery must be finite, and no score may overflow, but queries lie in "
            f"[{low_q}, {high_q}] and gallery in [{low_g}, {high_g}]. A NaN has no rank; normalize the "
            "features"
        )


def _check_index(name: str, index: Tensor, queries: Tensor, items: int) -> Tensor:
    """As (n, columns) int64 on the device of the queries, every entry -1 or a gallery index."""
    n = queries.shape[0]
    if index.dim() not in (1, 2) or index.shape[0] != n:
        raise ShapeError(f"{name} must be ({n},) or ({n}, any), one row per query, got {tuple(index.shape)}")
    if index.dtype not in INTEGERS:
        raise DtypeError(f"{name} are gallery indices and must be integers, got {index.dtype}. Call .long() on them")
    if index.device != queries.device:
        raise DeviceError(f"{name} must be on {queries.device} like the queries, got {index.device}. Move them")
    index = index.long() if index.dim() == 2 else index.long()[:, None]
    if index.numel():
        low, high = torch.stack(torch.aminmax(index)).tolist()
        if low < -1 or high >= items:
            raise RangeError(
                f"{name} must be gallery indices from 0 to {items - 1}, or -1 for none, got values from {low} to {high}"
            )
    return index


def _check_ids(
    query_ids: Tensor | None,
    gallery_ids: Tensor | None,
    positives: Tensor | None,
    queries: Tensor,
    gallery: Tensor,
) -> tuple[Tensor, Tensor] | None:
    if query_ids is None and gallery_ids is None:
        return None
    if query_ids is None or gallery_ids is None or positives is not None:
        raise ShapeError(
            "right answers are named by positives, or by query_ids and gallery_ids together, but "
            f"positives is {_given(positives)}, query_ids {_given(query_ids)}, gallery_ids "
            f"{_given(gallery_ids)}"
        )
    for name, ids, features in (("query_ids", query_ids, queries), ("gallery_ids", gallery_ids, gallery)):
        if ids.shape != features.shape[:1]:
            raise ShapeError(f"{name} must be ({features.shape[0]},), one id per row, got {tuple(ids.shape)}")
        if ids.dtype not in INTEGERS:
            raise DtypeError(f"{name} must be integers, got {ids.dtype}. Number the ids first")
        if ids.device != features.device:
            raise DeviceError(f"{name} must be on {features.device} like the features, got {ids.device}. Move them")
    return query_ids.long(), gallery_ids.long()


def _given(argument: Tensor | None) -> str:
    return "missing" if argument is None else "given"


def _check_not_excluded(index: Tensor, exclude: Tensor) -> None:
    clash = torch.zeros(index.shape[0], dtype=torch.bool, device=index.device)
    for column in exclude.T:
        clash |= ((index == column[:, None]) & (index >= 0)).any(dim=1)
    if clash.any():
        query = int(clash.nonzero()[0, 0])
        raise RangeError(
            f"query {query} excludes its own right answer: positives {index[query].tolist()}, exclude "
            f"{exclude[query].tolist()}. An answer that is no candidate has no rank; take it out of one of "
            "them"
        )
