"""Checks of the arguments of a ranking.

Axes: n queries, m gallery items, d features, p right answers per query, e excluded items per query.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tilewise._check import (
    FLOATS,
    check_device,
    check_has_float64,
    check_integers,
    check_tensor,
    reshape_advice,
)
from tilewise.errors import DeviceError, DtypeError, RangeError, ShapeError

NUMBERED = (
    "Number the ids of both sides together: torch.unique(torch.cat([query_ids, gallery_ids]), return_inverse=True)[1]"
    ".split([len(query_ids), len(gallery_ids)])"
)


def check_features(queries: Tensor, gallery: Tensor, *, over_group: bool = False) -> None:
    """Check shapes, types and devices, and that all scores are finite, over a group also those with other ranks."""
    check_tensor("queries", queries)
    check_tensor("gallery", gallery)
    if queries.dim() != 2 or gallery.dim() != 2 or queries.shape[1] != gallery.shape[1]:
        how = "Did one encoder skip its projection head?"
        if min(queries.dim(), gallery.dim()) == 1:
            how = "Make one vector a matrix with .unsqueeze(0)"
        elif max(queries.dim(), gallery.dim()) > 2:
            how = "Make more dimensions two with .flatten(0, -2)"
        elif queries.dim() == gallery.dim() == 2 and queries.shape[1] == gallery.shape[0]:
            how = "Pass gallery.T, if it is transposed"
        raise ShapeError(
            "queries and gallery must be (n, d) and (m, d) with the same width d, "
            f"got {tuple(queries.shape)} and {tuple(gallery.shape)}. {how}"
        )
    if queries.dtype != gallery.dtype or queries.dtype not in FLOATS:
        how = "both with .float()"
        if queries.dtype in FLOATS and gallery.dtype in FLOATS:
            how = "one of them with .to()"
        raise DtypeError(
            "queries and gallery must have one type: float16, bfloat16, float32 or float64, got "
            f"{queries.dtype} and {gallery.dtype}. Convert {how}"
        )
    if over_group or not streams(queries, gallery):
        check_device(("queries", "gallery"), queries, gallery)
    if queries.is_meta:
        raise DeviceError(
            "queries and gallery need values to be ranked, got tensors on the meta device. Use another device"
        )
    check_has_float64("queries", queries)
    (low_q, high_q), (low_g, high_g) = torch.stack([_ends(queries), _ends(gallery).to(queries.device)]).tolist()
    top_q, top_g = max(-low_q, high_q), max(-low_g, high_g)
    # The values of other ranks are unknown. If q * q and g * g do not overflow on any rank, no q * g does.
    largest = (top_q * top_q, top_g * top_g) if over_group else (top_q * top_g,)
    limit = torch.finfo(torch.float64 if queries.dtype == torch.float64 else torch.float32).max
    if not all(product * queries.shape[1] < limit for product in largest):  # also true for NaN
        finite = math.isfinite(top_q) and math.isfinite(top_g)
        how = "Remove the rows with NaN or infinity"
        if finite:  # torch.nn.functional.normalize would overflow, too
            how = "Divide each by its .abs().max(), which changes no rank"
        raise RangeError(
            "queries and gallery must be finite, and no score may overflow, but queries lie in "
            f"[{low_q}, {high_q}] and gallery in [{low_g}, {high_g}]. {how}"
        )


def streams(queries: Tensor, gallery: Tensor) -> bool:
    """Whether the gallery is on the host and the queries are on a GPU. It is then copied block by block."""
    return gallery.device.type == "cpu" and queries.device.type == "cuda"


def _ends(features: Tensor) -> Tensor:
    """The smallest and the largest value, or zeros for an empty tensor: (2,) float64."""
    if features.numel() == 0:
        return torch.zeros(2, dtype=torch.float64, device=features.device)
    return torch.stack(torch.aminmax(features.detach())).double()


def check_index(name: str, index: Tensor, queries: Tensor, items: int) -> Tensor:
    """Check gallery indices, or a bool mask (n, items). Returns (n, columns) int64, where -1 means none."""
    n = queries.shape[0]
    check_tensor(name, index, "a tensor of integers, or a bool mask")
    if index.dtype == torch.bool:
        if index.shape != (n, items):
            raise ShapeError(
                f"{name} is a bool mask, which has one entry for each query and item, ({n}, {items}), got "
                f"{tuple(index.shape)}. Pass gallery indices instead, padded with -1"
            )
        check_device((name, "queries"), index, queries)
        return _listed(index)
    if index.dim() not in (1, 2) or index.shape[0] != n:
        raise ShapeError(
            f"{name} must be ({n},) or ({n}, any), one row per query, got {tuple(index.shape)}. Did a filter drop some "
            "queries?"
        )
    check_integers(name, index)
    check_device((name, "queries"), index, queries)
    index = index.long() if index.dim() == 2 else index.long()[:, None]
    if index.numel():
        low, high = torch.stack(torch.aminmax(index)).tolist()
        if low < -1 or high >= items:
            allowed, question = "-1 for none", "Is the gallery empty?"
            if items:
                allowed = f"gallery indices from 0 to {items - 1}, or {allowed}"
                question = "Are they indices into the whole gallery?"
            raise RangeError(f"{name} must be {allowed}, got values from {low} to {high}. {question}")
    return index


def _listed(mask: Tensor) -> Tensor:
    """The columns of the True entries of each row in ascending order, padded with -1: (n, most in a row)."""
    count = mask.sum(1)
    row, col = mask.nonzero(as_tuple=True)
    listed = col.new_full((mask.shape[0], int(count.max()) if count.numel() else 0), -1)
    first = count.cumsum(0) - count  # where the entries of each row begin in col
    listed[row, torch.arange(col.shape[0], device=col.device) - first[row]] = col
    return listed


def check_ids(
    query_ids: Tensor | None,
    gallery_ids: Tensor | None,
    positives: Tensor | None,
    queries: Tensor,
    gallery: Tensor,
) -> tuple[Tensor, Tensor] | None:
    """Check the ids. Returns both as int64, or None if there are no ids."""
    if query_ids is None and gallery_ids is None:
        return None
    if query_ids is None or gallery_ids is None or positives is not None:
        raise ShapeError(
            "define the right answers by positives, or by query_ids and gallery_ids together, but "
            f"positives is {_given(positives)}, query_ids {_given(query_ids)}, gallery_ids "
            f"{_given(gallery_ids)}. Pass one of the two"
        )
    for name, ids, features in (("query_ids", query_ids, queries), ("gallery_ids", gallery_ids, gallery)):
        check_tensor(name, ids, "a tensor of integers")
        if ids.shape != features.shape[:1]:
            raise ShapeError(
                f"{name} must be ({features.shape[0]},), one id per row, got {tuple(ids.shape)}. "
                f"{reshape_advice(ids, features.shape[0])}"
            )
        check_integers(name, ids, NUMBERED)
        if not streams(queries, ids):
            check_device((name, "the features"), ids, queries)
    return query_ids.to(queries.device).long(), gallery_ids.to(queries.device).long()


def _given(argument: Tensor | None) -> str:
    return "missing" if argument is None else "given"


def check_not_excluded(index: Tensor, exclude: Tensor) -> None:
    """Check that no right answer, (n, p), is an excluded item, (n, e)."""
    clash = torch.zeros(index.shape[0], dtype=torch.bool, device=index.device)
    for column in exclude.T:
        clash |= ((index == column[:, None]) & (index >= 0)).any(dim=1)
    if clash.any():
        query = int(clash.nonzero()[0, 0])
        raise RangeError(
            f"query {query} excludes its own right answer: positives {index[query].tolist()}, exclude "
            f"{exclude[query].tolist()}. An excluded item has no rank. Remove it from one of them"
        )
