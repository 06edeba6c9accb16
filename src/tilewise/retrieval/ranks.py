"""Ranks and recall of retrieval: the functions.

Axes: n queries, m gallery items, d features, p right answers per query, e excluded items per query.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tilewise._check import INTEGERS, check_options, group_name
from tilewise.errors import DtypeError, RangeError, ShapeError
from tilewise.kernels import ranks as kernel
from tilewise.ops.distributed.ring_loop import RingLoop
from tilewise.options import TileOptions
from tilewise.retrieval.call import BothRanks, RankingCall
from tilewise.retrieval.checks import check_tensor
from tilewise.retrieval.progress import Progress, reporter


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
    the second; on a GPU, any order does).

    All scores come from products of one and the same shape, so equal gallery rows tie exactly, and neither n,
    m nor `workspace_mib` changes a rank (as long as the workspace holds a full tile: 10.3 MiB on the CPU at a
    width of 1,024 in float32). NaN, infinities, and scores that would overflow are
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
    check_tensor("ranks", ranks)
    if ranks.dtype not in INTEGERS:
        raise DtypeError(f"ranks must be integers, got {ranks.dtype}. Pass what retrieval_ranks returns, not scores")
    if ranks.dim() not in (1, 2):
        raise ShapeError(f"ranks must be (n,) or (n, p), got {tuple(ranks.shape)}")
    if not isinstance(ks, Sequence):
        raise DtypeError(f"ks is a sequence of whole numbers, got {ks!r}. For one number write ks=(5,)")
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
    call = RankingCall.of(queries, gallery, answers, exclude, RingLoop(group_name(group)), options, both)
    with call.arithmetic(), reporter(progress, call.pairs, call.queries.device) as advance:
        return call.run(advance)
