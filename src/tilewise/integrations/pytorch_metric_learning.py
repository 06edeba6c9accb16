"""Losses with the signatures of PyTorch Metric Learning. Like that package, they normalize.

    - from pytorch_metric_learning.losses import ArcFaceLoss, CosFaceLoss, NTXentLoss, SupConLoss
    + from tilewise.integrations.pytorch_metric_learning import ArcFaceLoss, CosFaceLoss, NTXentLoss, SupConLoss

`NTXentLoss` and `SupConLoss` use all pairs that the labels define, also inside of the package's ``CrossBatchMemory``.
Pairs selected by a miner, other distances, reducers and regularizers are refused.

Axes: n rows, m reference rows, d features, p positive pairs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tilewise import _check
from tilewise.errors import ConfigError, DtypeError, ShapeError
from tilewise.integrations._margin_losses import ArcFaceLoss as ArcFaceLoss
from tilewise.integrations._margin_losses import CosFaceLoss as CosFaceLoss
from tilewise.losses.info_nce import info_nce
from tilewise.losses.logsumexp import linear_logsumexp
from tilewise.losses.supcon import supcon_loss
from tilewise.options import TileOptions


class MemoryPairs(NamedTuple):
    """Positive pairs of a batch with a memory that already contains the batch."""

    row: Tensor  # (p,) ascending
    column: Tensor  # (p,)
    own: Tensor  # (n,) the column that is the row itself, or -1


class _LabelLoss(nn.Module):
    """Base class of both losses: the settings and the checks of the arguments."""

    def __init__(self, temperature: float | Tensor, options: TileOptions | None, refused: dict[str, Any]) -> None:
        super().__init__()
        if named := [name for name, value in refused.items() if value is not None]:
            raise ConfigError(
                f"{', '.join(named)}: only cosine similarity with the default reducer is supported. "
                "For others use the loss of pytorch-metric-learning"
            )
        self.temperature = temperature  # an nn.Parameter registers itself and is learned
        self.options = options

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor | None = None,
        indices_tuple: Any = None,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
    ) -> Tensor:
        """The loss of ``embeddings`` (n, d) with ``labels`` (n,), among themselves or against ``ref_emb`` (m, d).

        ``indices_tuple`` is None, or the pairs that ``CrossBatchMemory`` passes: all pairs of rows and references,
        except the pair of each row with its own entry in the memory.
        """
        if labels is None:
            raise ConfigError("labels are needed, got None: they define which pairs are positive. Pass labels")
        given, labels = labels, _labels("labels", labels, embeddings)
        z = F.normalize(embeddings, dim=1)
        if ref_emb is None:
            ref, ref_y = None, labels
        else:
            if ref_labels is None:
                raise ConfigError("ref_emb needs ref_labels, got None: they define which pairs are positive. Pass both")
            if ref_labels is given:
                raise ConfigError(
                    "ref_labels is the same tensor as labels. In pytorch-metric-learning this means that row i of both "
                    "is one sample, which is not compared with itself. Pass labels.clone() if they are different "
                    "samples, or omit ref_emb if they are the same"
                )
            ref, ref_y = F.normalize(ref_emb, dim=1), _labels("ref_labels", ref_labels, ref_emb)
        pairs = None if indices_tuple is None else _memory_pairs(indices_tuple, labels, None if ref is None else ref_y)
        if not _has_negatives(labels, ref_y) or (pairs is not None and _is_empty(indices_tuple)):
            return (embeddings * 0).sum()
        return self._loss(z, labels, ref, ref_y, pairs)

    def _loss(
        self, z: Tensor, labels: Tensor, ref: Tensor | None, ref_labels: Tensor, pairs: MemoryPairs | None
    ) -> Tensor:
        raise NotImplementedError


class NTXentLoss(_LabelLoss):
    """PyTorch Metric Learning's ``NTXentLoss``: the mean over all positive pairs (i, p) of

        -log(exp(x_ip) / (exp(x_ip) + sum over the negatives j of row i of exp(x_ij)))

    with x the cosines divided by the temperature. The sum does not contain the other positives of row i.

    Cost: one product of p x m where p is the number of positive pairs, and half a product of n x n when every label
    occurs twice. Memory: O((p + m) d), never p x m.

    >>> import torch
    >>> x = torch.eye(2).repeat(2, 1)
    >>> round(NTXentLoss(temperature=0.5)(x, torch.tensor([0, 1, 0, 1])).item(), 4)
    0.2395
    """

    def __init__(
        self, temperature: float | Tensor = 0.07, *, options: TileOptions | None = None, **refused: Any
    ) -> None:
        super().__init__(temperature, options, refused)

    def _loss(
        self, z: Tensor, labels: Tensor, ref: Tensor | None, ref_labels: Tensor, pairs: MemoryPairs | None
    ) -> Tensor:
        if pairs is None:
            row, column = positive_pairs(labels, ref_labels, mask_self=ref is None)
        else:
            row, column, _ = pairs
        if row.numel() == 0:
            return (z * 0).sum()
        if ref is None and row.numel() == z.shape[0] and bool((row.bincount(minlength=z.shape[0]) == 1).all()):
            # One positive per row: all other rows are negatives, and both losses are equal.
            return supcon_loss(z, labels, temperature=self.temperature, options=self.options)
        keys = z if ref is None else ref
        return info_nce(
            z[row],
            keys[column],
            keys,
            temperature=self.temperature,
            in_batch=False,
            query_ids=labels[row],
            key_ids=torch.cat([labels[row], ref_labels]),
            options=self.options,
        )


class SupConLoss(_LabelLoss):
    """PyTorch Metric Learning's ``SupConLoss``: `tilewise.supcon_loss`, averaged over the rows with a loss above 0.

    This excludes rows without a positive, which `tilewise.supcon_loss` counts as zeros.

    >>> import torch
    >>> round(SupConLoss(temperature=1.0)(torch.eye(5), torch.tensor([0, 0, 1, 1, 2])).item(), 4)
    1.3863
    """

    def __init__(
        self, temperature: float | Tensor = 0.1, *, options: TileOptions | None = None, **refused: Any
    ) -> None:
        super().__init__(temperature, options, refused)

    def _loss(
        self, z: Tensor, labels: Tensor, ref: Tensor | None, ref_labels: Tensor, pairs: MemoryPairs | None
    ) -> Tensor:
        if ref is None:
            loss_n = supcon_loss(z, labels, temperature=self.temperature, reduction="none", options=self.options)
        elif pairs is None:
            loss_n = self._against(z, labels, ref, ref_labels)
        elif pairs.row.numel() == 0:
            return (z * 0).sum()
        else:
            loss_n = self._against_memory(z, labels, ref, ref_labels, pairs)
        counts = loss_n > 0
        return torch.where(counts, loss_n, 0.0).sum() / counts.sum().clamp(min=1)

    def _against(self, z: Tensor, labels: Tensor, ref: Tensor, ref_labels: Tensor) -> Tensor:
        """Log-sum-exp of each row over all references minus the mean score of its positives: (n,), 0 without any."""
        scale = _check.scale_tensor(_check.check_temperature(self.temperature, z), z)
        lse = linear_logsumexp(z, ref, scale=scale, options=self.options)
        total, count = _label_sums(labels, ref, ref_labels, lse.dtype)
        positive = scale * (z.to(lse.dtype) * total / count.clamp(min=1)[:, None]).sum(1)
        return torch.where(count > 0, lse - positive, 0.0)

    def _against_memory(self, z: Tensor, labels: Tensor, ref: Tensor, ref_labels: Tensor, pairs: MemoryPairs) -> Tensor:
        """`_against` without the row's own entry in the memory, for the rows that have positives.

        With k one positive of a row and S the sum of exp(x) over all its entries, `info_nce` gives
        ``l = log(exp(x_k) + S) - x_k``. Since S contains exp(x_k), ``log S - x_k = log(exp(l) - 1)`` with exp(l) >= 2.
        """
        count = pairs.row.bincount(minlength=z.shape[0])
        rows = count.nonzero().squeeze(1)
        key = pairs.column[(count.cumsum(0) - count)[rows]]
        has_own = (pairs.own >= 0).nonzero().squeeze(1)
        owner = torch.full(ref.shape[:1], -1, device=z.device)  # for each column: the row that is the same sample
        owner[pairs.own[has_own]] = has_own
        log_sum = info_nce(
            z[rows],
            ref[key],
            ref,
            temperature=self.temperature,
            in_batch=False,
            query_ids=rows,
            key_ids=torch.cat([rows, owner]),
            reduction="none",
            options=self.options,
        )
        log_sum = log_sum + torch.log1p(-torch.exp(-log_sum))
        total, _ = _label_sums(labels, ref, ref_labels, log_sum.dtype)
        total = total.index_add(0, has_own, ref[pairs.own[has_own]].to(log_sum.dtype), alpha=-1.0)
        # Subtract the mean before the product: the log-sum-exp is measured from x_k.
        apart = ref[key].to(log_sum.dtype) - total[rows] / count[rows, None]
        return log_sum + (z[rows].to(log_sum.dtype) * apart).sum(1) / self.temperature


def _label_sums(labels: Tensor, ref: Tensor, ref_labels: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """For each row, the sum of the references of its label, (n, d), and their number, (n,)."""
    classes, class_of = torch.unique(ref_labels, return_inverse=True)
    total = torch.zeros(classes.numel(), ref.shape[1], dtype=dtype, device=ref.device)
    total = total.index_add(0, class_of, ref.to(dtype))
    number = class_of.bincount(minlength=classes.numel())
    found = torch.searchsorted(classes, labels).clamp(max=classes.numel() - 1)
    count = torch.where(classes[found] == labels, number[found], 0)
    return torch.where((count > 0)[:, None], total[found], 0.0), count


def positive_pairs(labels: Tensor, ref_labels: Tensor, *, mask_self: bool) -> tuple[Tensor, Tensor]:
    """All (row, column) of equal label in ascending order, without (i, i) if ``mask_self``. O(n log m + p).

    >>> import torch
    >>> y = torch.tensor([5, 7, 5])
    >>> positive_pairs(y, y, mask_self=True)
    (tensor([0, 2]), tensor([2, 0]))
    """
    ordered, order = torch.sort(ref_labels, stable=True)
    first = torch.searchsorted(ordered, labels)
    count = torch.searchsorted(ordered, labels, right=True) - first
    row = torch.repeat_interleave(torch.arange(labels.numel(), device=labels.device), count)
    within = torch.arange(row.numel(), device=labels.device) - (count.cumsum(0) - count)[row]
    column = order[first[row] + within]
    if not mask_self:
        return row, column
    keep = row != column
    return row[keep], column[keep]


def _memory_pairs(indices_tuple: Any, labels: Tensor, ref_labels: Tensor | None) -> MemoryPairs:
    """Check that the tuple contains all pairs but at most one positive per row, and return the positive ones.

    The tuple is (row, positive, row, negative), as ``CrossBatchMemory`` makes it. It excludes the pair of each row with
    its own entry in the memory.
    """
    refusal = ConfigError(
        "indices_tuple selects single pairs, and this loss uses all pairs that the labels define. Only the pairs that "
        "CrossBatchMemory passes without a miner are supported. Omit indices_tuple, or use the loss of "
        "pytorch-metric-learning"
    )
    if ref_labels is None or not isinstance(indices_tuple, tuple | list) or len(indices_tuple) != 4:
        raise refusal
    row, column, negative_row, negative = (part.to(labels.device) for part in indices_tuple)
    m = ref_labels.numel()
    all_row, all_column = positive_pairs(labels, ref_labels, mask_self=False)
    if negative.numel() != labels.numel() * m - all_row.numel() or bool(
        (labels[negative_row] == ref_labels[negative]).any()
    ):
        raise refusal
    if not _all_different(negative_row * m + negative):
        raise refusal
    listed = row * m + column
    present = torch.isin(all_row * m + all_column, listed)
    missing_row, missing_column = all_row[~present], all_column[~present]
    if listed.numel() != int(present.sum()) or not _all_different(listed):
        raise refusal
    if not _all_different(missing_row) or not _all_different(missing_column):
        raise refusal
    own = torch.full_like(labels, -1).scatter(0, missing_row, missing_column)
    return MemoryPairs(all_row[present], all_column[present], own)


def _all_different(values: Tensor) -> bool:
    """Whether no value occurs twice. Fast for ascending values."""
    return bool((values.diff() > 0).all()) or values.unique().numel() == values.numel()


def _is_empty(indices_tuple: Any) -> bool:
    """The condition under which pytorch-metric-learning returns 0."""
    return all(len(part) <= 1 for part in indices_tuple)


def _has_negatives(labels: Tensor, ref_labels: Tensor) -> bool:
    """Whether any row differs in label from any reference."""
    if labels.numel() == 0 or ref_labels.numel() == 0:
        return False
    return bool((ref_labels != labels[0]).any() or (labels != ref_labels[0]).any())


def _labels(name: str, labels: Tensor, embeddings: Tensor) -> Tensor:
    if not isinstance(labels, Tensor):
        raise DtypeError(f"{name} is a tensor of integers, got {type(labels).__name__}. {_check.tensor_of(labels)}")
    if labels.is_floating_point():
        raise DtypeError(f"{name} contains integers, got {labels.dtype}. {_check.WHOLE}")
    if embeddings.dim() != 2 or labels.shape != embeddings.shape[:1]:
        raise ShapeError(
            f"{name} has one entry for each row of (rows, features), "
            f"got {tuple(labels.shape)} for {tuple(embeddings.shape)}. "
            f"{_check.reshape_advice(labels, embeddings.shape[0])}"
        )
    return labels.to(embeddings.device).long()
