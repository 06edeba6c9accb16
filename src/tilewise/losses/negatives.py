"""Checks of the negatives of `info_nce`: their shape, ids, and sampling probabilities."""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise import _check
from tilewise.errors import ConfigError, DtypeError, RangeError, ShapeError
from tilewise.kernels.spec import stat_dtype

NO_ID = -(2**63)  # id of a negative that is never excluded: no query has it


def check_negatives(a: Tensor, negative_keys: Tensor | None, mask: Tensor | None) -> Tensor | None:
    """Check the negatives and the mask of their padding. Returns the negatives, in autocast's type."""
    if negative_keys is None:
        if mask is not None:
            raise ConfigError("negative_mask marks padding in negative_keys, but there are none. Pass both")
        return None
    if not isinstance(negative_keys, Tensor) or negative_keys.dim() not in (2, 3):
        got = tuple(negative_keys.shape) if isinstance(negative_keys, Tensor) else type(negative_keys).__name__
        number = isinstance(negative_keys, (int, float)) or (
            isinstance(negative_keys, Tensor) and not negative_keys.dim()
        )
        advice = "Reshape them" if isinstance(negative_keys, Tensor) else _check.tensor_of(negative_keys)
        if number:
            advice = "Pass a temperature by keyword, temperature=..."
        raise ShapeError(
            f"negative_keys must be (M, d), shared, or (n, K, d), one set for each query, got {got}. {advice}"
        )
    negatives = _check.check_features("negative_keys", negative_keys, negative_keys.dim())
    _check.check_together(("query", "negative_keys"), a, negatives)
    if negatives.dim() == 3:
        _check.check_same_rows(("query", "negative_keys"), a, negatives)
    if mask is not None:
        _check.check_tensor("negative_mask", mask, "a bool tensor")
        if mask.dtype != torch.bool:
            raise DtypeError(
                f"negative_mask is a bool tensor, False for padding, got {mask.dtype}. Convert it with .bool()"
            )
        if mask.shape != negatives.shape[:-1]:
            raise ShapeError(
                f"negative_mask has one entry for each negative, {tuple(negatives.shape[:-1])}, "
                f"got {tuple(mask.shape)}. {_check.reshape_advice(mask, negatives.shape[:-1].numel())}"
            )
        _check.check_device(("negative_mask", "query"), mask, a)
    return negatives


def check_negative_ids(
    a: Tensor,
    negatives: Tensor | None,
    query_ids: Tensor | None,
    key_ids: Tensor | None,
    *,
    over_group: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Ids of the queries, of the keys, and of the shared negatives; None for those that exclude nothing."""
    if query_ids is None and key_ids is None:
        return None, None, None
    n = a.shape[0]
    shared = negatives.shape[0] if negatives is not None and negatives.dim() == 2 else 0
    key_id = None if key_ids is None else _check.check_ids("key_ids", key_ids, (n, n + shared), a)
    query_id = None if query_ids is None else _check.check_ids("query_ids", query_ids, (n,), a)
    if query_id is None:
        assert key_id is not None
        query_id = key_id[:n]
    if key_id is None:
        key_id = query_id
    negative_id = key_id[n:] if shared and key_id.shape[0] == n + shared else None
    if over_group and negative_id is None and negatives is not None and negatives.dim() == 2:
        # A rank without negatives does not know whether the negatives of other ranks have ids, so all ranks send ids.
        if _check.can_read(query_id) and (query_id == NO_ID).any():
            raise RangeError(f"over a group, an id of {NO_ID} means none. Use other ids")
        negative_id = torch.full((shared,), NO_ID, device=a.device)
    return query_id, key_id[:n], negative_id


def check_log_q(log_q: Tensor | None, a: Tensor, negatives: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """What the sampling probabilities add to the scores of the keys, (n,), and of the shared negatives, (M,)."""
    if log_q is None:
        return None, None
    n = a.shape[0]
    shared = negatives.shape[0] if negatives is not None and negatives.dim() == 2 else 0
    _check.check_floating("log_q", log_q, 1)
    _check.check_device(("log_q", "query"), log_q, a)
    if log_q.shape[0] != n + shared:
        raise ShapeError(
            f"log_q has one entry for each key, then one for each shared negative, so its shape is ({n + shared},), "
            f"got {tuple(log_q.shape)}. Pass 0 for a negative without one"
        )
    _check.check_constant("log_q", log_q)
    if _check.can_read(log_q) and not log_q.isfinite().all():
        worst = log_q[~log_q.isfinite()][0].item()
        raise RangeError(
            f"log_q holds finite logarithms of probabilities, got {worst}. Count each item at least once: "
            "log_q = counts.clamp(min=1).log() - counts.sum().log()"
        )
    bias = -log_q.to(stat_dtype(a.dtype))
    return bias[:n], bias[n:] if negatives is not None and negatives.dim() == 2 else None
