"""Metrics of a ranking with several right answers, and files for trec_eval, ir-measures and BEIR.

Axes: n queries, m gallery items, p right answers per query, k results per query.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from tilewise._check import check_device, check_tensor
from tilewise.errors import DtypeError, RangeError, ShapeError
from tilewise.kernels.ranks import NO_INDEX
from tilewise.retrieval.nearest import Nearest
from tilewise.retrieval.ranks import check_ks, check_ranks


def retrieval_metrics(
    ranks: Tensor, relevance: Tensor | None = None, *, ks: Sequence[int] = (1, 5, 10)
) -> dict[str, float]:
    """Means over queries of the usual metrics, from the exact ranks of the right answers.

    With r_1 < r_2 < ... the 0-based ranks of the R right answers of a query and g(r) the relevance of the item of rank
    r (0 for wrong items)::

        mrr          = 1 / (r_1 + 1)
        map          = sum_i i / (r_i + 1) / R
        ndcg@k       = sum_{r < k} g(r) / log2(r + 2), divided by that of the best order
        precision@k  = #{i : r_i < k} / k
        recall@k     = #{i : r_i < k} / R
        success@k    = 1 if r_1 < k, otherwise 0; its mean is that of `recall_at_k`

    They are those of trec_eval and ir-measures (RR, AP, nDCG, P, R, Success). Those break ties by the names of the
    items, and `retrieval_ranks` by their indices.

    Args:
        ranks: (n, p), 0-based, padded with -1, as returned by `retrieval_ranks` for ``positives`` of the same shape; or
            (n,). The right answers of a query are different items. A query without a right answer is left out.
        relevance: (n, p) graded relevance of the right answers; 0 or less is wrong. None: 1 for each.
        ks: positive integers, in any order.

    >>> round(retrieval_metrics(torch.tensor([[0, 3], [1, -1]]), ks=(2,))["ndcg@2"], 4)
    0.622
    """
    ranks = check_ranks(ranks)
    ks = check_ks(ks)
    gains = _check_relevance(relevance, ranks)
    real = (ranks >= 0) & (gains > 0)
    some = real.any(1)
    if not some.any():
        raise RangeError(
            f"metrics need a query with a right answer, but none of the {ranks.shape[0]} has one. Do the ids of "
            "queries and gallery match, and is the relevance of right answers above 0?"
        )
    gains, ranks = gains.masked_fill(~real, 0.0)[some], torch.where(real, ranks, NO_INDEX)[some]
    total = real[some].sum(1).double()
    ranks, order = ranks.sort(dim=1)
    gains, place = gains.gather(1, order), ranks.clamp(max=2**52).double()  # the padding adds nothing
    best, spots = gains.sort(dim=1, descending=True).values, torch.arange(ranks.shape[1], device=ranks.device).double()
    held = torch.arange(1, ranks.shape[1] + 1, device=ranks.device) * (gains > 0)
    found = {"mrr": 1 / (place[:, 0] + 1), "map": (held / (place + 1)).sum(1) / total}
    for k in ks:
        within = (ranks < k).double()
        ideal = (best / torch.log2(spots + 2) * (spots < k)).sum(1)
        found[f"ndcg@{k}"] = (gains * within / torch.log2(place + 2)).sum(1) / ideal
        found[f"precision@{k}"] = within.sum(1) / k
        found[f"recall@{k}"] = within.sum(1) / total
        found[f"success@{k}"] = within[:, 0]
    return {name: float(values.mean()) for name, values in found.items()}


def write_trec(
    folder: str | Path,
    query_names: Sequence[str],
    gallery_names: Sequence[str],
    found: Nearest,
    positives: Tensor,
    relevance: Tensor | None = None,
    *,
    tag: str = "tilewise",
) -> tuple[Path, Path]:
    """Write ``run.txt`` and ``qrels.txt`` in the formats of TREC, which trec_eval and ir-measures read.

    Scores of the run fall by one with each rank, so that readers keep the order of equal scores.

    Args:
        folder: an existing folder.
        query_names, gallery_names: names of the n queries and the m items, without spaces.
        found: the result of `nearest`.
        positives: (n,) or (n, p) gallery indices of the right answers, padded with -1.
        relevance: (n, p) whole numbers; None: 1 for each.
        tag: the name of the run.
    """
    right = _judgements(query_names, gallery_names, positives, relevance, len(found.indices), tag)
    run = []
    for query, items in zip(query_names, found.indices.tolist(), strict=True):
        held = [item for item in items if item >= 0]
        run += [f"{query} Q0 {gallery_names[item]} {r + 1} {len(held) - r} {tag}" for r, item in enumerate(held)]
    qrels = [f"{query} 0 {item} {grade}" for query, item, grade in right]
    return _write(Path(folder) / "run.txt", run), _write(Path(folder) / "qrels.txt", qrels)


def write_beir(
    folder: str | Path,
    query_names: Sequence[str],
    gallery_names: Sequence[str],
    queries: Sequence[str],
    gallery: Sequence[str],
    positives: Tensor,
    relevance: Tensor | None = None,
    *,
    split: str = "test",
) -> tuple[Path, Path, Path]:
    """Write ``corpus.jsonl``, ``queries.jsonl`` and ``qrels/test.tsv`` in the layout of BEIR.

    Args:
        folder: an existing folder.
        query_names, gallery_names: names of the n queries and the m items, without spaces.
        queries, gallery: their texts.
        positives, relevance: as in `write_trec`.
        split: name of the file of relevance.
    """
    right = _judgements(query_names, gallery_names, positives, relevance, len(queries), split)
    qrels = ["query-id\tcorpus-id\tscore", *(f"{query}\t{item}\t{grade}" for query, item, grade in right)]
    items = ({"_id": name, "title": "", "text": text} for name, text in zip(gallery_names, gallery, strict=True))
    asked = ({"_id": name, "text": text} for name, text in zip(query_names, queries, strict=True))
    (Path(folder) / "qrels").mkdir(exist_ok=True)
    return (
        _write(Path(folder) / "corpus.jsonl", map(json.dumps, items)),
        _write(Path(folder) / "queries.jsonl", map(json.dumps, asked)),
        _write(Path(folder) / "qrels" / f"{split}.tsv", qrels),
    )


def _judgements(
    query_names: Sequence[str],
    gallery_names: Sequence[str],
    positives: Tensor,
    relevance: Tensor | None,
    rows: int,
    tag: str,
) -> Iterator[tuple[str, str, int]]:
    """Check the arguments of a file, and return the query, the item and the relevance of each right answer."""
    index = positives if positives.dim() == 2 else positives[:, None]
    grades = torch.ones_like(index) if relevance is None else relevance
    if not len(query_names) == rows == len(index) or grades.shape != index.shape:
        raise ShapeError(
            "query_names, their results or texts, positives and relevance need one row for each query, got "
            f"{len(query_names)}, {rows}, {tuple(positives.shape)} and {tuple(grades.shape)}. Did a filter drop some "
            "queries?"
        )
    for name in (*query_names, *gallery_names, tag):
        if not name or len(name.split()) != 1:
            raise RangeError(
                f"a name in a file of TREC or BEIR has no spaces and is not empty, got {name!r:.60}. Replace spaces"
            )
    return (
        (query, gallery_names[item], int(grade))
        for query, items, some in zip(query_names, index.tolist(), grades.tolist(), strict=True)
        for item, grade in zip(items, some, strict=True)
        if item >= 0
    )


def _write(path: Path, lines: Iterable[str]) -> Path:
    """Write lines to a file."""
    with path.open("w", encoding="utf-8") as file:
        file.writelines(f"{line}\n" for line in lines)
    return path


def _check_relevance(relevance: Tensor | None, ranks: Tensor) -> Tensor:
    """Graded relevance as float64, (n, p)."""
    if relevance is None:
        return torch.ones(ranks.shape, dtype=torch.float64, device=ranks.device)
    check_tensor("relevance", relevance)
    if relevance.is_complex():
        raise DtypeError(f"relevance holds real numbers, got {relevance.dtype}. Pass its .real")
    if relevance.shape != ranks.shape and (ranks.shape[1] != 1 or relevance.shape != ranks.shape[:1]):
        raise ShapeError(
            f"relevance must be {tuple(ranks.shape)}, one for each right answer, got {tuple(relevance.shape)}. Pad it "
            "with 0 where positives are -1"
        )
    check_device(("relevance", "ranks"), relevance, ranks)
    if not relevance.isfinite().all():
        raise RangeError("relevance must be finite, got NaN or infinity. Check how it was computed")
    return relevance.reshape(ranks.shape).double()
