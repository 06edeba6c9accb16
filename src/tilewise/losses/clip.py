"""The symmetric contrastive loss of CLIP."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilewise import _check
from tilewise.kernels.spec import PairSpec
from tilewise.losses.entry import entry
from tilewise.losses.module import LossModule
from tilewise.losses.sharded import Pairs
from tilewise.ops.autograd import pair_loss, pair_stats
from tilewise.ops.call import PairKeys, call_settings
from tilewise.ops.paired_scores import positive_shift
from tilewise.ops.reduce import reduce_rows, row_weights
from tilewise.ops.small import Calls
from tilewise.options import DEFAULT_OPTIONS, TileOptions

NAMES = ("image_features", "text_features")
SPEC = PairSpec(row_lse=True, col_lse=True, positive="one")


@entry(Pairs(NAMES, scalars=("logit_scale", "logit_bias")))
def clip_loss(
    calls: Calls,
    image_features: Tensor,
    text_features: Tensor,
    logit_scale: float | Tensor,
    logit_bias: float | Tensor | None = None,
    *,
    reduction: _check.Reduction = "mean",
    group: torch.distributed.ProcessGroup | None = None,
    options: TileOptions | None = None,
) -> Tensor:
    """Mean of the cross entropies of each image against all texts and of each text against all images.

    Equals, without building the (n, n) logits::

        logits = logit_scale * image_features @ text_features.T
        (F.cross_entropy(logits, arange(n)) + F.cross_entropy(logits.T, arange(n))) / 2

    Args:
        image_features, text_features: (n, d) each. They are not normalized; normalize them first.
        logit_scale: multiplies the scores; a tensor that requires grad gets its exact gradient.
        logit_bias: accepted for compatibility. It cancels in the softmax, so its gradient is zero.
        reduction: "none" returns (n,), ``(nll of row i + nll of column i) / 2``.
        group: a process group over whose ranks the pairs are sharded; see docs/concepts/ring.md.
        options: how the loss is computed; see `TileOptions`. No option changes its value beyond rounding.

    Memory: the features, their gradients, O(n) statistics, and a workspace. Cost: one product in forward, three in
    backward; for a small batch, three in all.

    >>> x = torch.eye(4)
    >>> round(clip_loss(x, x, 1.0).item(), 4)
    0.7437
    """
    name, a, b = "", image_features, text_features
    options = DEFAULT_OPTIONS if options is None else options
    if not calls.checked:
        _check.check_reduction(reduction)
        options, name = _check.check_options(options), _check.group_name(group)
        a, b = _check.check_sides(NAMES, a, b, paired=True)
    rows = "multiply the rows of image_features by it"
    scale = _check.check_scale("logit_scale", logit_scale, a, rows=rows, checked=calls.checked)

    def keys() -> PairKeys:
        shift = positive_shift(a, b, scale, options=options)
        return PairKeys(row_shift=shift, col_shift=shift)

    if reduction == "none" or name:
        must_match = call_settings(name, reduction=reduction, logit_scale=logit_scale)
        how: dict[str, Any] = {"options": options, "group_name": name, "must_match": must_match, "calls": calls}
        stats = pair_stats(a, b, scale, full_keys=keys, spec=SPEC, **how)
        loss = reduce_rows(torch.lerp(stats.row_lse, stats.col_lse, 0.5) - stats.row_pos, reduction, name)
    else:
        weights = row_weights(a, reduction, checked=calls.checked)
        loss = pair_loss(a, b, scale, weights=weights, full_keys=keys, spec=SPEC, options=options, calls=calls)
    if logit_bias is not None:
        loss = loss + 0.0 * _check.check_scalar("logit_bias", logit_bias, a).to(loss.dtype)
    return loss


class ClipLoss(LossModule):
    """`clip_loss` as a Module that stores the settings."""

    function = staticmethod(clip_loss)

    def __init__(
        self,
        *,
        reduction: _check.Reduction = "mean",
        group: torch.distributed.ProcessGroup | None = None,
        options: TileOptions | None = None,
    ) -> None:
        super().__init__(locals())
