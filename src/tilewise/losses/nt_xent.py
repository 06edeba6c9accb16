"""NT-Xent, the loss of SimCLR, for two stacked views."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from tilewise import _check
from tilewise.errors import ShapeError
from tilewise.kernels.spec import PairSpec
from tilewise.losses.module import settings_of
from tilewise.losses.sharded import takes_shards
from tilewise.losses.supcon import supcon_loss
from tilewise.ops.autograd import pair_loss, pair_stats
from tilewise.ops.call import PairKeys, call_settings
from tilewise.ops.distributed.dtensors import is_sharded, wrapped
from tilewise.ops.paired_scores import positive_shift
from tilewise.ops.reduce import reduce_rows, row_weights
from tilewise.options import TileOptions

SPEC = PairSpec(row_lse=True, positive="one", mask_self=True, symmetric=True, in_range=True)


def _over_shards(loss: Callable[..., Tensor], values: dict[str, Any]) -> Tensor:
    """Over sharded rows the two views of a sample are on two ranks: labels name them, as in `supcon_loss`."""
    features: Any = values.pop("features")
    if not is_sharded(features):
        return loss(features, **values)  # it refuses the others
    _check_views(features)
    labels = torch.arange(features.shape[0], device=features.device) % max(features.shape[0] // 2, 1)
    mesh = features.device_mesh
    return supcon_loss(features, wrapped(labels, mesh, "R" * mesh.ndim, labels.shape), **values)


def _check_views(features: Tensor) -> None:
    if features.shape[0] % 2:
        raise ShapeError(
            f"features stacks two views of each sample, so it needs an even number of rows, got "
            f"{tuple(features.shape)}. Use torch.cat([first_views, second_views])"
        )


@takes_shards(_over_shards)
def nt_xent(
    features: Tensor,
    *,
    temperature: float | Tensor = 0.5,
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
        reduction: "none" returns (2B,).
        group: a process group over whose ranks the samples are sharded, with both views of a sample on one rank.
        options: how the loss is computed; see `TileOptions`. No option changes its value beyond rounding.

    Memory: the features, their gradient, O(B) statistics, and a workspace. Cost: half a product in
    forward and 1.5 in backward, because the scores are symmetric; for a small batch, both products in forward.

    >>> round(nt_xent(torch.eye(2).repeat(2, 1)).item(), 4)
    0.2395
    """
    _check.check_reduction(reduction)
    options, name = _check.check_options(options), _check.group_name(group)
    z = _check.check_features("features", features)
    rows = z.shape[0]
    _check_views(z)
    scale = _check.check_temperature(temperature, z)
    index = torch.arange(rows, device=z.device)
    other = torch.roll(index, rows // 2)

    def full_keys() -> PairKeys:
        return PairKeys(row_key=other, row_shift=positive_shift(z, z, scale, other, options))

    if reduction != "none" and not name:
        keys, weights = PairKeys(row_key=other), row_weights(z, reduction)
        return pair_loss(z, None, scale, weights=weights, keys=keys, full_keys=full_keys, spec=SPEC, options=options)
    stats = pair_stats(
        z,
        None,
        scale,
        keys=full_keys(),
        spec=replace(SPEC, local_keys=True, in_range=False),
        options=options,
        group_name=name,
        must_match=call_settings(name, reduction=reduction, temperature=temperature),
    )
    return reduce_rows(stats.row_lse - stats.row_pos, reduction, name)


class NTXentLoss(nn.Module):
    """`nt_xent` as a Module that stores the settings."""

    def __init__(
        self,
        *,
        temperature: float | Tensor = 0.5,
        reduction: _check.Reduction = "mean",
        group: torch.distributed.ProcessGroup | None = None,
        options: TileOptions | None = None,
    ) -> None:
        super().__init__()
        self.temperature = temperature  # attribute assignment registers an nn.Parameter, which is then learned
        self.settings = settings_of(locals(), "temperature")

    def forward(self, features: Tensor) -> Tensor:
        """See `nt_xent`."""
        return nt_xent(features, temperature=self.temperature, **self.settings)
