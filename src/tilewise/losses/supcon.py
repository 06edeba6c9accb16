"""The supervised contrastive loss."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tilewise import _check
from tilewise.kernels.spec import PairSpec
from tilewise.ops.autograd import pair_stats
from tilewise.ops.call import PairKeys
from tilewise.ops.paired_scores import positive_shift
from tilewise.ops.reduce import reduce_rows
from tilewise.options import TileOptions

HALF = (torch.float16, torch.bfloat16)  # their scores are measured from 0


def supcon_loss(
    features: Tensor,
    labels: Tensor,
    *,
    temperature: float | Tensor = 0.07,
    reduction: _check.Reduction = "mean",
    group: torch.distributed.ProcessGroup | None = None,
    options: TileOptions | None = None,
) -> Tensor:
    """For each row the mean over the other rows of its label of their negative log-probability.

    Equals, without building the (n, n) logits::

        logits = (features @ features.T / temperature).fill_diagonal_(-inf)
        positive = (labels[:, None] == labels[None, :]).fill_diagonal_(False)
        -(log_softmax(logits) on positive).sum(1) / positive.sum(1)

    A row whose label no other row has contributes zero, and counts in the mean.

    Args:
        features: (n, d); normalize outside. For several views of a sample, stack them and repeat the labels.
        labels: (n,) integers.
        temperature: divides the scores; a tensor that requires grad gets its exact gradient.
        reduction: "none" gives (n,).
        group: a process group over whose ranks the rows are spread; labels are compared across ranks.
        options: how, never what.

    Memory: the features, their gradient, O(n) statistics, and a workspace. Cost: scores are symmetric, so half a
    product forward and 1.5 backward.

    >>> x = torch.eye(4)
    >>> round(supcon_loss(x, torch.tensor([0, 0, 1, 1]), temperature=1.0).item(), 4)
    1.0986
    """
    _check.check_reduction(reduction)
    options, name = _check.check_options(options), _check.group_name(group)
    z = _check.check_features("features", features)
    key = _check.check_ids("labels", labels, (z.shape[0],), z)
    scale = _check.check_temperature(temperature, z)
    shift = positive_shift(z, z, scale, None if z.dtype in HALF else _next_of_label(key))
    stats = pair_stats(
        z,
        None,
        scale,
        keys=PairKeys(row_key=key, col_key=key, row_shift=shift),
        spec=PairSpec(row_lse=True, positive="many", mask_self=True, symmetric=True),
        options=options,
        group_name=name,
    )
    assert stats.row_lse is not None
    assert stats.row_pos is not None
    assert stats.num_positives is not None
    count = stats.num_positives.detach()
    loss_n = torch.where(count > 0, stats.row_lse - stats.row_pos / count.clamp(min=1), 0.0)
    return reduce_rows(loss_n, reduction, name)


def _next_of_label(label: Tensor) -> Tensor:
    """For each row the next one of its label, the first after the last; itself if it is the only one: (n,) int64.

    Near the score with one positive a row measures its scores; that with itself may be far from all others.
    """
    ordered, index = torch.sort(label, stable=True)
    after = torch.arange(1, label.shape[0] + 1, device=label.device)
    last = after == torch.searchsorted(ordered, ordered, right=True)
    after = torch.where(last, torch.searchsorted(ordered, ordered), after)
    return index.scatter(0, index, index[after])


class SupConLoss(nn.Module):
    """`supcon_loss` with its settings kept."""

    def __init__(
        self,
        *,
        temperature: float | Tensor = 0.07,
        reduction: _check.Reduction = "mean",
        group: torch.distributed.ProcessGroup | None = None,
        options: TileOptions | None = None,
    ) -> None:
        super().__init__()
        self.temperature = temperature  # an nn.Parameter registers itself and is learned
        self.reduction, self.group, self.options = reduction, group, options

    def forward(self, features: Tensor, labels: Tensor) -> Tensor:
        """See `supcon_loss`."""
        return supcon_loss(
            features,
            labels,
            temperature=self.temperature,
            reduction=self.reduction,
            group=self.group,
            options=self.options,
        )
