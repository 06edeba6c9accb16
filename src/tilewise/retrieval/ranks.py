"""The public functions of retrieval: ranks and recall.

Axes: n queries, m gallery items, d features, p right answers per query, e excluded items per query.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tilewise._check import check_integers, check_tensor
from tilewise.errors import DtypeError, RangeError, ShapeError
from tilewise.kernels import ranks as kernel
from tilewise.options import TileOptions
from tilewise.retrieval.call import BothRanks, RankingCall
from tilewise.retrieval.progress import Progress


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

    which is the position of p in ``x_i.argsort(descending=True, stable=True)``. The (n, m) scores are not stored.
    Equal scores are ranked by gallery index, so a model that gives all pairs the same score ranks at chance, not
    at the top.

    Args:
        queries: (n, d), float16, bfloat16, float32 or float64.
        gallery: (m, d), same type and device. Normalize both outside for cosine scores. It may stay on the CPU, as in
            `nearest`.
        positives: the gallery index of the right answer(s). None: item i answers query i. (n,): one per query.
            (n, p): several per query, ranked separately, rows padded with -1. An index of -1 means no answer; its
            rank is -1. A bool mask, (n, m), is converted to such indices in ascending order; p is the largest number
            of right answers of a query.
        query_ids: (n,) integers, together with `gallery_ids` and instead of `positives`. Every item with the query's
            id is a right answer, and the best of them is ranked. A query whose id is not in the gallery has rank -1.
        gallery_ids: (m,) integers.
        exclude: (n,) or (n, e) gallery indices padded with -1: items that are not candidates for that query. Or a
            bool mask, (n, m), which is converted to such indices: indices need less memory. If queries and gallery
            are the same tensor and ids are used, ``exclude=torch.arange(n)`` excludes each query itself.
        progress: True shows a progress bar if the package rich is installed. A function is called with (pairs done,
            all pairs) from time to time; on an accelerator each of these calls synchronizes.
        group: a process group over whose ranks queries and gallery are sharded, in rank order and in shards of
            any size. Each rank gets the ranks of its own queries among the whole gallery. `positives` and
            `exclude` are then indices into the whole gallery, ids are compared across ranks, and without
            either item i of a rank answers query i of that rank.
        options: how the ranks are computed; see `TileOptions`. `workspace_mib` limits the scratch memory.

    Returns:
        int64 ranks: (n, p) if `positives` is (n, p) or a mask, otherwise (n,).

    Memory: O(n + m) integers and scores, and one tile. Cost: one product of 2 n m d operations. With ids there are
    two, because the best answer must be known before better items can be counted. On the CPU, ids in ascending order
    save most of the second product; on a GPU, ids in any order do.

    All scores come from products of the same shape, so equal gallery rows tie exactly, and n, m and `workspace_mib`
    do not change a rank, provided that the workspace holds a full tile (10.3 MiB on the CPU at a width of 1,024 in
    float32). NaN, infinities, and scores that would overflow raise an error.

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
    call = RankingCall.of(queries, gallery, answers, exclude, group, options, progress, both=False)
    return call.run().query_to_gallery


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
    """Ranks in both directions, queries to gallery and gallery to queries, from one pass over the scores.

    The right queries of item j are those with j as a right answer. The best of them is ranked among all queries, by
    the same rule::

        rank_j = #{i : x_ij > x_qj}  +  #{i < q : x_ij == x_qj}        q: the right query with the highest score

    With images as queries and texts as gallery these are image-to-text and text-to-image retrieval.
    Arguments, cost and memory are those of `retrieval_ranks`. An excluded pair is excluded in both directions.

    >>> captions = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0], [0.6, 0.8]])
    >>> images = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    >>> ranks = retrieval_ranks_both(captions, images, torch.tensor([0, 1, 1, 0]))
    >>> ranks.query_to_gallery, ranks.gallery_to_query
    (tensor([0, 1, 0, 1]), tensor([0, 0]))
    """
    answers = (positives, query_ids, gallery_ids)
    return RankingCall.of(queries, gallery, answers, exclude, group, options, progress, both=True).run()


def recall_at_k(ranks: Tensor, ks: Sequence[int] = (1, 5, 10)) -> dict[int, float]:
    """Fraction of queries with a right answer among the first k items: ``mean_i [min_p rank_ip < k]``.

    Args:
        ranks: (n,) or (n, p), 0-based, as returned by `retrieval_ranks`. The best of several answers counts.
            A query whose ranks are all -1 has no right answer and is not part of the mean.
        ks: positive integers, in any order.

    >>> recall_at_k(torch.tensor([0, 3, 12, -1]), ks=(1, 5))
    {1: 0.3333333333333333, 5: 0.6666666666666666}
    """
    best, ks = check_ranks(ranks), check_ks(ks)
    found = (best >= 0).any(dim=1)
    if not found.any():
        raise RangeError(
            f"recall needs a query with a right answer, but all {ranks.shape[0]} have rank -1. Do the ids of "
            "queries and gallery match?"
        )
    first = torch.where(best < 0, kernel.NO_INDEX, best)[found].amin(dim=1)
    return {k: (first < k).sum().item() / first.shape[0] for k in ks}


def check_ranks(ranks: Tensor) -> Tensor:
    """Check ranks. Returns them as int64, (n, p)."""
    check_tensor("ranks", ranks, "a tensor of integers")
    check_integers("ranks", ranks, "Pass the result of retrieval_ranks, not scores")
    if ranks.dim() not in (1, 2):
        raise ShapeError(f"ranks must be (n,) or (n, p), got {tuple(ranks.shape)}. Reshape them: .flatten(1)")
    return ranks.long() if ranks.dim() == 2 else ranks.long()[:, None]


def check_ks(ks: Sequence[int]) -> Sequence[int]:
    """Check a list of k."""
    if not isinstance(ks, Sequence):
        how = "Convert it with .tolist()" if hasattr(ks, "tolist") else "For one number write ks=(5,)"
        raise DtypeError(f"ks is a sequence of whole numbers, got {ks!r:.60}. {how}")
    wrong = [k for k in ks if isinstance(k, bool) or not isinstance(k, int) or k < 1]
    if wrong or not ks:
        raise RangeError(
            f"ks must be whole numbers from 1 up, and at least one, got {tuple(ks)}. Recall at 1 is the first"
        )
    return ks
