"""NT-Xent, the loss of SimCLR, for two stacked views."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tilewise import _check
from tilewise.errors import ConfigError, ShapeError
from tilewise.kernels.spec import PairSpec
from tilewise.losses.entry import entry
from tilewise.losses.logsumexp import joined_logsumexp
from tilewise.losses.module import LossModule
from tilewise.losses.supcon import supcon_loss
from tilewise.ops.autograd import pair_loss, pair_stats
from tilewise.ops.call import PairKeys, call_settings
from tilewise.ops.distributed.collectives import shard_of_columns
from tilewise.ops.distributed.dtensors import is_sharded, wrapped
from tilewise.ops.paired_scores import own_scores, positive_shift
from tilewise.ops.reduce import reduce_rows, row_weights
from tilewise.ops.small import Calls
from tilewise.options import DEFAULT_OPTIONS, TileOptions, check_flag

SPEC = PairSpec(row_lse=True, positive="one", mask_self=True, symmetric=True, in_range=True)
OTHERS = PairSpec(row_lse=True, mask_self=True, symmetric=True)


def _over_shards(loss: Callable[..., Tensor], values: dict[str, Any]) -> Tensor:
    """Over sharded rows the two views of a sample are on two ranks: labels name them, as in `supcon_loss`."""
    features: Any = values.pop("features")
    if not is_sharded(features):
        return loss(features, **values)  # it refuses the others
    _check_views(features)
    decoupled, queue = values.pop("decoupled"), values.pop("queue")
    if decoupled or queue is not None:
        raise ConfigError(
            "decoupled=True and queue= take plain features of this rank, got a DTensor. Pass features.to_local() and "
            "group=mesh.get_group()"
        )
    labels = torch.arange(features.shape[0], device=features.device) % max(features.shape[0] // 2, 1)
    mesh = features.device_mesh
    return supcon_loss(features, wrapped(labels, mesh, "R" * mesh.ndim, labels.shape), **values)


def _check_views(features: Tensor) -> None:
    if features.shape[0] % 2:
        raise ShapeError(
            f"features stacks two views of each sample, so it needs an even number of rows, got "
            f"{tuple(features.shape)}. Use torch.cat([first_views, second_views])"
        )


@entry(_over_shards)
def nt_xent(
    calls: Calls,
    features: Tensor,
    *,
    temperature: float | Tensor = 0.5,
    decoupled: bool = False,
    queue: Tensor | None = None,
    reduction: _check.Reduction = "mean",
    group: torch.distributed.ProcessGroup | None = None,
    options: TileOptions | None = None,
) -> Tensor:
    """Cross entropy of each view against all other views. The other view of its sample is the target.

    Equals, without building the (2B, 2B) logits::

        logits = (features @ features.T / temperature).fill_diagonal_(-inf)
        F.cross_entropy(logits, (arange(2 * B) + B) % (2 * B))

    Args:
        features: (2B, d), the first views of all samples, then the second views. They are not normalized; normalize
            them first.
        temperature: divides the scores; a tensor that requires grad gets its exact gradient.
        decoupled: leave the target out of the sum over the views (decoupled contrastive loss, DCL). The loss may then
            be negative. It is computed without the target, not by subtracting it, so it is exact late in training too.
            A view without negatives has a loss of 0.
        queue: (M, d), more negatives for all views, such as the views of the last batches.
        reduction: "none" returns (2B,).
        group: a process group over whose ranks the samples are sharded, with both views of a sample on one rank. A
            queue is sharded too: each rank passes its own part, of any size.
        options: how the loss is computed; see `TileOptions`. No option changes its value beyond rounding.

    Memory: the features, their gradient, O(B + M) statistics, and a workspace. Cost: half a product in
    forward and 1.5 in backward, because the scores are symmetric; for a small batch, both products in forward.

    >>> round(nt_xent(torch.eye(2).repeat(2, 1)).item(), 4)
    0.2395
    """
    name, z = "", features
    options = DEFAULT_OPTIONS if options is None else options
    if not calls.checked:
        _check.check_reduction(reduction)
        options, name = _check.check_options(options), _check.group_name(group)
        z = _check.check_features("features", z)
        _check_views(z)
        check_flag("decoupled", decoupled)
        if queue is not None:
            queue = _check.check_features("queue", queue)
            _check.check_together(("features", "queue"), z, queue)
    rows = z.shape[0]
    scale = _check.check_temperature(temperature, z)
    index = torch.arange(rows, device=z.device)
    other = torch.roll(index, rows // 2)

    def full_keys() -> PairKeys:
        return PairKeys(row_key=other, row_shift=positive_shift(z, z, scale, other, options))

    if reduction != "none" and not name and not decoupled and queue is None:
        keys, weights = PairKeys(row_key=other), row_weights(z, reduction, checked=calls.checked)
        how: dict[str, Any] = {"full_keys": full_keys, "spec": SPEC, "options": options, "calls": calls}
        return pair_loss(z, None, scale, weights=weights, keys=keys, **how)
    must_match = call_settings(
        name, reduction=reduction, temperature=temperature, decoupled=decoupled, queue=queue is not None
    )
    how = {"options": options, "group_name": name, "must_match": must_match, "calls": calls}
    if decoupled:  # both views of a sample are excluded
        keys = full_keys()
        shift = keys.row_shift
        sample = shard_of_columns(z, must_match, name)[0] + index % max(rows // 2, 1)
        apart = keys._replace(row_key=None, row_skip=sample, col_skip=sample)
        stats = pair_stats(z, None, scale, keys=apart, spec=OTHERS, **how)
        pos = scale * own_scores(z, z.roll(rows // 2, 0)[:, None, :], None, options.precision).squeeze(1)
        pos = pos if shift is None else pos - shift
    else:
        spec = replace(SPEC, local_keys=True, in_range=False) if name else SPEC
        stats = pair_stats(z, None, scale, keys=PairKeys(row_key=other), full_keys=full_keys, spec=spec, **how)
        pos, shift = stats.row_pos, stats.row_shift
    lse = with_queue(stats.row_lse, z, queue, scale, shift, **how)
    loss_n = (lse - pos).to(pos.dtype)
    return reduce_rows(torch.where(lse == -torch.inf, 0.0, loss_n) if decoupled else loss_n, reduction, name)


def with_queue(
    lse: Tensor, z: Tensor, queue: Tensor | None, scale: Tensor | float, shift: Tensor | None, **how: Any
) -> Tensor:
    """The log-sum-exp over the batch, ``lse``, and over the queue: (n,)."""
    if queue is None:
        return lse
    more = pair_stats(z, queue, scale, keys=PairKeys(row_shift=shift), spec=PairSpec(row_lse=True), **how).row_lse
    return joined_logsumexp([lse[:, None], more[:, None]])


class NTXentLoss(LossModule):
    """`nt_xent` as a Module that stores the settings."""

    function = staticmethod(nt_xent)
    attributes = ("temperature",)

    def __init__(
        self,
        *,
        temperature: float | Tensor = 0.5,
        decoupled: bool = False,
        reduction: _check.Reduction = "mean",
        group: torch.distributed.ProcessGroup | None = None,
        options: TileOptions | None = None,
    ) -> None:
        super().__init__(locals())
