"""`NTXentLoss` and `SupConLoss` with the signatures of PyTorch Metric Learning, which normalizes inside.

    - from pytorch_metric_learning.losses import NTXentLoss, SupConLoss
    + from tilewise.integrations.pytorch_metric_learning import NTXentLoss, SupConLoss

All pairs that the labels make are used. Pairs chosen by a miner (``indices_tuple``), other distances, reducers and
regularizers are refused.

Axes: n rows, m reference rows, d features, p positive pairs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tilewise.errors import ConfigError, DtypeError, ShapeError
from tilewise.losses.info_nce import info_nce
from tilewise.losses.logsumexp import linear_logsumexp
from tilewise.losses.supcon import supcon_loss
from tilewise.options import TileOptions


class _LabelLoss(nn.Module):
    """What both losses share: settings, and the check of what is asked for."""

    def __init__(self, temperature: float | Tensor, options: TileOptions | None, refused: dict[str, Any]) -> None:
        super().__init__()
        if named := [name for name, value in refused.items() if value is not None]:
            raise ConfigError(
                f"{', '.join(named)}: only cosine similarity with the default reducer is computed here. "
                "For others keep the loss of pytorch-metric-learning"
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
        """The loss of ``embeddings`` (n, d) by ``labels`` (n,), among themselves or against ``ref_emb`` (m, d)."""
        if indices_tuple is not None:
            raise ConfigError(
                "indices_tuple chooses single pairs, and this loss takes all that the labels make. "
                "Leave it out, or keep the loss of pytorch-metric-learning"
            )
        if labels is None:
            raise ConfigError("labels are needed: they say which pairs are positive")
        given, labels = labels, _labels("labels", labels, embeddings)
        z = F.normalize(embeddings, dim=1)
        if ref_emb is None:
            ref, ref_y = None, labels
        else:
            if ref_labels is None:
                raise ConfigError("ref_emb needs ref_labels: they say which pairs are positive")
            if ref_labels is given:
                raise ConfigError(
                    "ref_labels is the very tensor of labels, by which pytorch-metric-learning means that row i of "
                    "both is one sample that never meets itself. Pass labels.clone() if they are different samples, "
                    "or leave ref_emb out if they are the same"
                )
            ref, ref_y = F.normalize(ref_emb, dim=1), _labels("ref_labels", ref_labels, ref_emb)
        if not _has_negatives(labels, ref_y):
            return (embeddings * 0).sum()
        return self._loss(z, labels, ref, ref_y)

    def _loss(self, z: Tensor, labels: Tensor, ref: Tensor | None, ref_labels: Tensor) -> Tensor:
        raise NotImplementedError


class NTXentLoss(_LabelLoss):
    """PyTorch Metric Learning's ``NTXentLoss``: the mean over all positive pairs (i, p) of

        -log(exp(x_ip) / (exp(x_ip) + sum over the negatives j of row i of exp(x_ij)))

    with x the cosines divided by the temperature. Other positives of row i are not in the sum.

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

    def _loss(self, z: Tensor, labels: Tensor, ref: Tensor | None, ref_labels: Tensor) -> Tensor:
        row, answer = positive_pairs(labels, ref_labels, itself=ref is None)
        if row.numel() == 0:
            return (z * 0).sum()
        if ref is None and row.numel() == z.shape[0] and bool((row.bincount(minlength=z.shape[0]) == 1).all()):
            # One positive for each row: then all others are negatives, and both losses are the same.
            return supcon_loss(z, labels, temperature=self.temperature, options=self.options)
        keys = z if ref is None else ref
        return info_nce(
            z[row],
            keys[answer],
            keys,
            temperature=self.temperature,
            in_batch=False,
            query_ids=labels[row],
            key_ids=torch.cat([labels[row], ref_labels]),
            options=self.options,
        )


class SupConLoss(_LabelLoss):
    """PyTorch Metric Learning's ``SupConLoss``: `tilewise.supcon_loss`, averaged over the rows with a loss above 0.

    That leaves out rows without a positive, which `tilewise.supcon_loss` counts as zeros.

    >>> import torch
    >>> round(SupConLoss(temperature=1.0)(torch.eye(5), torch.tensor([0, 0, 1, 1, 2])).item(), 4)
    1.3863
    """

    def __init__(
        self, temperature: float | Tensor = 0.1, *, options: TileOptions | None = None, **refused: Any
    ) -> None:
        super().__init__(temperature, options, refused)

    def _loss(self, z: Tensor, labels: Tensor, ref: Tensor | None, ref_labels: Tensor) -> Tensor:
        if ref is None:
            loss_n = supcon_loss(z, labels, temperature=self.temperature, reduction="none", options=self.options)
        else:
            loss_n = self._against(z, labels, ref, ref_labels)
        counts = loss_n > 0
        return torch.where(counts, loss_n, 0.0).sum() / counts.sum().clamp(min=1)

    def _against(self, z: Tensor, labels: Tensor, ref: Tensor, ref_labels: Tensor) -> Tensor:
        """lse of each row over all references, less the mean score of its positives: (n,), 0 without positives."""
        scale = 1.0 / self.temperature
        lse = linear_logsumexp(z, ref, scale=scale, options=self.options)
        classes, of_ref = torch.unique(ref_labels, return_inverse=True)
        wide = lse.dtype
        total = torch.zeros(classes.numel(), ref.shape[1], dtype=wide, device=ref.device)
        total = total.index_add(0, of_ref, ref.to(wide))
        count = of_ref.bincount(minlength=classes.numel())
        own = torch.searchsorted(classes, labels).clamp(max=classes.numel() - 1)
        mean = total[own] / count[own, None]
        positive = scale * (z.to(wide) * mean).sum(1)
        return torch.where(classes[own] == labels, lse - positive, 0.0)


def positive_pairs(labels: Tensor, ref_labels: Tensor, *, itself: bool) -> tuple[Tensor, Tensor]:
    """All (row, reference) of equal label, in the order of the rows; without (i, i) if ``itself``. O(n log m + p).

    >>> import torch
    >>> y = torch.tensor([5, 7, 5])
    >>> positive_pairs(y, y, itself=True)
    (tensor([0, 2]), tensor([2, 0]))
    """
    ordered, order = torch.sort(ref_labels, stable=True)
    first = torch.searchsorted(ordered, labels)
    count = torch.searchsorted(ordered, labels, right=True) - first
    row = torch.repeat_interleave(torch.arange(labels.numel(), device=labels.device), count)
    within = torch.arange(row.numel(), device=labels.device) - (count.cumsum(0) - count)[row]
    answer = order[first[row] + within]
    if not itself:
        return row, answer
    keep = row != answer
    return row[keep], answer[keep]


def _has_negatives(labels: Tensor, ref_labels: Tensor) -> bool:
    """Whether any row differs in label from any reference."""
    if labels.numel() == 0 or ref_labels.numel() == 0:
        return False
    return bool((ref_labels != labels[0]).any() or (labels != ref_labels[0]).any())


def _labels(name: str, labels: Tensor, embeddings: Tensor) -> Tensor:
    if not isinstance(labels, Tensor):
        raise DtypeError(f"{name} is a tensor of integers, got {type(labels).__name__}. Use torch.as_tensor()")
    if labels.is_floating_point():
        raise DtypeError(f"{name} holds integers, got {labels.dtype}. Convert it with .long()")
    if embeddings.dim() != 2 or labels.shape != embeddings.shape[:1]:
        raise ShapeError(
            f"{name} has one entry for each row of (rows, features), "
            f"got {tuple(labels.shape)} for {tuple(embeddings.shape)}"
        )
    return labels.to(embeddings.device).long()
