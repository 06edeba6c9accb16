"""The supervised contrastive loss."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tilewise import _check
from tilewise.errors import ConfigError
from tilewise.kernels.spec import HALF_TYPES, PairSpec
from tilewise.losses.entry import entry
from tilewise.losses.logsumexp import joined_logsumexp
from tilewise.losses.module import LossModule
from tilewise.losses.sharded import Pairs
from tilewise.ops.autograd import pair_loss, pair_stats
from tilewise.ops.call import PairKeys, call_settings
from tilewise.ops.paired_scores import positive_shift
from tilewise.ops.reduce import reduce_rows, row_weights
from tilewise.ops.small import Calls
from tilewise.options import DEFAULT_OPTIONS, TileOptions

SPEC = PairSpec(row_lse=True, positive="many", mask_self=True, symmetric=True)


@entry(Pairs(("features", "labels", "queue", "queue_labels"), scalars=("temperature",)))
def supcon_loss(
    calls: Calls,
    features: Tensor,
    labels: Tensor,
    *,
    temperature: float | Tensor = 0.07,
    queue: Tensor | None = None,
    queue_labels: Tensor | None = None,
    reduction: _check.Reduction = "mean",
    group: torch.distributed.ProcessGroup | None = None,
    options: TileOptions | None = None,
) -> Tensor:
    """Supervised contrastive loss: mean negative log-probability of the other rows with the same label.

    Equals, without building the (n, n) logits::

        logits = (features @ features.T / temperature).fill_diagonal_(-inf)
        positive = (labels[:, None] == labels[None, :]).fill_diagonal_(False)
        -(log_softmax(logits) on positive).sum(1) / positive.sum(1)

    A row whose label occurs only once contributes zero and counts in the mean.

    Args:
        features: (n, d). They are not normalized; normalize them first. For several views of a sample, stack the
            views and repeat the labels.
        labels: (n,) integers.
        temperature: divides the scores; a tensor that requires grad gets its exact gradient.
        queue, queue_labels: (M, d) and (M,), more rows for the features to be compared with, such as those of the last
            batches. They have no loss of their own: n x (n + M) scores are computed, not (n + M) x (n + M).
        reduction: "none" returns (n,).
        group: a process group over whose ranks the rows are sharded. Labels are compared across ranks. A
            queue is sharded too: each rank passes its own part, of any size.
        options: how the loss is computed; see `TileOptions`. No option changes its value beyond rounding.

    Memory: the features, their gradient, O(n + M) statistics, and a workspace. Cost: half a product in
    forward and 1.5 in backward, because the scores are symmetric; for a small batch, both products in forward.

    >>> x = torch.eye(4)
    >>> round(supcon_loss(x, torch.tensor([0, 0, 1, 1]), temperature=1.0).item(), 4)
    1.0986
    """
    name, z, key = "", features, labels
    options = DEFAULT_OPTIONS if options is None else options
    if not calls.checked:
        _check.check_reduction(reduction)
        options, name = _check.check_options(options), _check.group_name(group)
        z = _check.check_features("features", z)
        _check.check_ids("labels", key, (z.shape[0],), z)
    key = key.long()
    scale = _check.check_temperature(temperature, z)
    if (queue is None) != (queue_labels is None):
        missing, given = ("queue", "queue_labels") if queue is None else ("queue_labels", "queue")
        raise ConfigError(f"queue and queue_labels belong together, got {given} alone. Pass {missing} too")
    queue_key = None
    if queue is not None and queue_labels is not None:
        queue = _check.check_features("queue", queue)
        _check.check_together(("features", "queue"), z, queue)
        queue_key = _check.check_ids("queue_labels", queue_labels, (queue.shape[0],), z)
    keys = PairKeys(row_key=key, col_key=key)

    def full_keys() -> PairKeys:
        index = None if z.dtype in HALF_TYPES else _next_of_label(key)
        return keys._replace(row_shift=positive_shift(z, z, scale, index, options))

    if queue is None and reduction != "none" and not name:
        weights = row_weights(z, reduction, checked=calls.checked)
        how: dict[str, Any] = {"full_keys": full_keys, "spec": SPEC, "options": options, "calls": calls}
        return pair_loss(z, None, scale, weights=weights, keys=keys, **how)
    must_match = call_settings(name, reduction=reduction, temperature=temperature, queue=queue is not None)
    how = {"options": options, "group_name": name, "must_match": must_match, "calls": calls}
    stats = pair_stats(z, None, scale, keys=keys, full_keys=full_keys, spec=SPEC, **how)
    lse, pos, count = stats.row_lse, stats.row_pos, stats.num_positives.detach()
    if queue is not None:
        keys = keys._replace(col_key=queue_key, row_shift=stats.row_shift)
        more = pair_stats(z, queue, scale, keys=keys, spec=replace(SPEC, mask_self=False, symmetric=False), **how)
        lse = joined_logsumexp([lse[:, None], more.row_lse[:, None]])
        pos, count = pos + more.row_pos, count + more.num_positives.detach()
    loss_n = torch.where(count > 0, lse - pos / count.clamp(min=1), 0.0).to(pos.dtype)
    return reduce_rows(loss_n, reduction, name)


def _next_of_label(label: Tensor) -> Tensor:
    """The next row with the same label, cyclically; the row itself if there is no other: (n,) int64.

    The score with this positive is the row's shift. The score of a row with itself may be far from all others.
    """
    ordered, index = torch.sort(label, stable=True)
    following = torch.arange(1, label.shape[0] + 1, device=label.device)
    last = following == torch.searchsorted(ordered, ordered, right=True)
    following = torch.where(last, torch.searchsorted(ordered, ordered), following)
    return index.scatter(0, index, index[following])


class SupConLoss(LossModule):
    """`supcon_loss` as a Module that stores the settings."""

    function = staticmethod(supcon_loss)
    attributes = ("temperature",)

    def __init__(
        self,
        *,
        temperature: float | Tensor = 0.07,
        reduction: _check.Reduction = "mean",
        group: torch.distributed.ProcessGroup | None = None,
        options: TileOptions | None = None,
    ) -> None:
        super().__init__(locals())
