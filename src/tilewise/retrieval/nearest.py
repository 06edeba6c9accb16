"""The nearest gallery items of each query: exact search, and hard negatives for training.

Axes: n queries, m gallery items, d features, k items found for each query, e excluded items per query.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise._check import check_device, check_number, check_options, check_tensor, group_name, reshape_advice
from tilewise._check import check_index as check_whole
from tilewise.errors import DtypeError, RangeError, ShapeError
from tilewise.kernels import ranks as kernel
from tilewise.kernels.registry import choose_searcher
from tilewise.options import TileOptions
from tilewise.retrieval.checks import check_features, check_ids, check_index
from tilewise.retrieval.gallery import visit_gallery
from tilewise.retrieval.progress import Progress, check_progress, reporter
from tilewise.ring.agree import agree, propagate_errors
from tilewise.ring.exchange import find_exchange


class Nearest(NamedTuple):
    """The best items of each query, best first."""

    scores: Tensor  #: (n, k) float32 (float64 for float64 features); -inf where there are fewer than k items
    indices: Tensor  #: (n, k) int64: gallery indices; -1 where there are fewer than k items


def nearest(
    queries: Tensor,
    gallery: Tensor,
    k: int,
    *,
    query_ids: Tensor | None = None,
    gallery_ids: Tensor | None = None,
    exclude: Tensor | None = None,
    below: float | Tensor | None = None,
    progress: bool | Progress = False,
    group: Any | None = None,
    options: TileOptions | None = None,
) -> Nearest:
    """The k gallery items with the highest scores for each query. The (n, m) scores are not stored.

    With ``x = queries @ gallery.T``, the first k of ``x_i.argsort(descending=True, stable=True)``: of equal scores the
    one with the lower gallery index comes first.

    To find hard negatives, leave out the right answers (by ids or ``exclude``) and what is suspiciously close
    (``below``)::

        found = nearest(queries, gallery, 5, query_ids=ids, gallery_ids=gallery_ids, below=positive_scores - 0.05)
        info_nce(queries, positives, gallery[found.indices], negative_mask=found.indices >= 0)

    Args:
        queries: (n, d), float16, bfloat16, float32 or float64.
        gallery: (m, d), same type and device. Normalize both outside for cosine scores. A gallery that is larger than
            the memory of the GPU may stay on the CPU, in one process, and may be a memory-mapped file. It is read in
            blocks.
        k: how many items to find for each query.
        query_ids, gallery_ids: (n,) and (m,) integers. An item with the query's id is left out.
        exclude: (n,) or (n, e) gallery indices padded with -1: items that are left out for that query. Or a bool mask,
            (n, m), which is converted to such indices: indices need less memory.
        below: a number, or (n,), one for each query. Items that score this or more are left out.
        progress: True shows a progress bar if the package rich is installed. A function is called with (pairs done,
            all pairs) from time to time; on an accelerator each of these calls synchronizes.
        group: a process group over whose ranks queries and gallery are sharded, in rank order and in shards of any
            size. Each rank gets the items of its own queries, as indices into the whole gallery, as in ``exclude``.
        options: how the scores are computed; see `TileOptions`. `workspace_mib` limits the scratch memory.

    Memory: O(n k) scores and indices, and one tile. Cost: one product of 2 n m d operations.

    Scores come from products of one shape, so equal gallery rows tie exactly. NaN, infinities, and scores that would
    overflow raise an error. There is no gradient.

    >>> x = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.6, 0.8]])
    >>> nearest(x, x, 2).indices
    tensor([[0, 2],
            [1, 2],
            [2, 1]])
    >>> nearest(x, x, 2, exclude=torch.arange(3), below=0.7).indices
    tensor([[ 2,  1],
            [ 0, -1],
            [ 0, -1]])
    """
    exchange = find_exchange(group_name(group))
    with propagate_errors(exchange):
        options = check_options(options, rows_alone=True)
        k = _check_k(k)
        check_progress(progress)
        check_features(queries, gallery, over_group=exchange.world > 1)
        if (query_ids is None) != (gallery_ids is None):
            missing = "query_ids" if query_ids is None else "gallery_ids"
            raise ShapeError(f"an item with the id of a query is left out, but {missing} is None. Pass both or neither")
        ids = check_ids(query_ids, gallery_ids, None, queries, gallery)
        limit = _check_below(below, queries)
    settings = {
        "call": "search",
        "k": k,
        "ids": ids is not None,
        "width": queries.shape[1],
        "type": str(queries.dtype).removeprefix("torch."),
        "options": " ".join(f"{name}={value}" for name, value in vars(options).items()),
    }
    n, m = queries.shape[0], gallery.shape[0]
    shards = agree(exchange, n, m, settings, queries.device)
    with propagate_errors(exchange):
        left_out = None if exclude is None else check_index("exclude", exclude, queries, shards.all_cols)
    agree(exchange, n, m, {"call": "search, with indices that are in range"})  # receives errors of the last check
    device, queries, gallery = queries.device, queries.detach(), gallery.detach()
    pairs = n * shards.all_cols
    with (
        kernel.rank_arithmetic(device, options.precision),
        reporter(progress, pairs, device, "searching") as advance,
    ):
        searcher = choose_searcher(device, queries.shape[1], queries.dtype, options)
        excluded = None if left_out is None else kernel.Excluded(left_out, searcher.side)
        found = kernel.no_nearest(n, k, searcher)
        below_n = None if limit is None else limit.to(searcher.dtype)

        def visit(first: int, block: dict[str, Tensor]) -> None:
            pair = kernel.Block(queries, block["gallery"], shards.row_start, first, excluded, advance)
            row_ids = None if ids is None else ids[0]
            searcher.find_nearest(pair, kernel.Unwanted(row_ids, block.get("ids"), below_n), found)

        block = {"gallery": gallery} if ids is None else {"gallery": gallery, "ids": ids[1]}
        visit_gallery(exchange, shards, block, device, visit)
    return Nearest(found.score, found.index.masked_fill_(found.index == kernel.NO_INDEX, -1))


def _check_k(k: int) -> int:
    k = check_whole("k", k, "It is how many items to find for each query")
    if k < 1:
        raise RangeError(f"k must be 1 or more, got {k}. It is how many items to find for each query")
    return k


def _check_below(below: float | Tensor | None, queries: Tensor) -> Tensor | None:
    """The limit of each query, (n,), or None."""
    n = queries.shape[0]
    if below is None:
        return None
    if not isinstance(below, Tensor):
        check_number("below", below, dtype=torch.float64, per=f"({n},)")
        return torch.full((n,), float(below), device=queries.device, dtype=torch.float64)
    check_tensor("below", below)
    if not below.is_floating_point():
        raise DtypeError(f"below holds scores, which are floating point, got {below.dtype}. Convert it with .float()")
    if below.shape != (n,):
        raise ShapeError(
            f"below is a number or ({n},), one for each query, got {tuple(below.shape)}. {reshape_advice(below, n)}"
        )
    check_device(("below", "queries"), below, queries)
    if below.isnan().any():
        raise RangeError(f"below holds NaN, for query {int(below.isnan().nonzero()[0, 0])}. Check how it was computed")
    return below.detach()
