"""The sigmoid loss of SigLIP."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilewise import _check
from tilewise.kernels.spec import PairSpec, stat_dtype
from tilewise.losses.entry import entry
from tilewise.losses.module import LossModule
from tilewise.losses.sharded import Pairs
from tilewise.ops.autograd import pair_loss, pair_stats
from tilewise.ops.call import call_settings
from tilewise.ops.reduce import reduce_rows, row_weights
from tilewise.ops.small import Calls
from tilewise.options import DEFAULT_OPTIONS, TileOptions

NAMES = ("image_features", "text_features")
SPEC = PairSpec(softplus=True, positive="one")


@entry(Pairs(NAMES, scalars=("logit_scale", "logit_bias")))
def siglip_loss(
    calls: Calls,
    image_features: Tensor,
    text_features: Tensor,
    logit_scale: float | Tensor,
    logit_bias: float | Tensor,
    *,
    reduction: _check.Reduction = "mean",
    group: torch.distributed.ProcessGroup | None = None,
    options: TileOptions | None = None,
) -> Tensor:
    """Sigmoid loss: binary cross entropy of every pair of an image and a text.

    Equals, without building the (n, n) logits::

        logits = logit_scale * image_features @ text_features.T + logit_bias
        sign = 2 * eye(n) - 1
        -F.logsigmoid(sign * logits).sum() / n

    Args:
        image_features, text_features: (n, d) each. They are not normalized; normalize them first.
        logit_scale, logit_bias: numbers, or 0-d tensors that get their exact gradient.
        reduction: "none" returns (n,), for each image the sum over all texts.
        group: a process group over whose ranks the pairs are sharded; see docs/concepts/ring.md.
        options: how the loss is computed; see `TileOptions`. No option changes its value beyond rounding.

    Memory: the features, their gradients, O(n) statistics, and a workspace. Cost: three products with the one-pass
    strategy or for a small batch, otherwise four; see `TileOptions`.

    >>> x = torch.eye(2)
    >>> round(siglip_loss(x, x, 10.0, -5.0).item(), 4)
    0.0134
    """
    name, a, b = "", image_features, text_features
    options = DEFAULT_OPTIONS if options is None else options
    if not calls.checked:
        _check.check_reduction(reduction)
        options, name = _check.check_options(options), _check.group_name(group)
        a, b = _check.check_sides(NAMES, a, b, paired=True)
    rows = "multiply the rows of image_features by it"
    scale = _check.check_scale("logit_scale", logit_scale, a, rows=rows, checked=calls.checked)
    # Not a half type: the gradient of the bias is the sum of the columns' gradients, which must not be rounded first.
    bias = _check.check_scalar("logit_bias", logit_bias, a).to(stat_dtype(a.dtype)).expand(b.shape[0])
    if reduction != "none" and not name:
        weights = row_weights(a, reduction, checked=calls.checked)
        return pair_loss(a, b, scale, bias, weights=weights, spec=SPEC, options=options, calls=calls)
    must_match = call_settings(name, reduction=reduction, logit_scale=logit_scale, logit_bias=logit_bias)
    how: dict[str, Any] = {"options": options, "group_name": name, "must_match": must_match, "calls": calls}
    stats = pair_stats(a, b, scale, bias, spec=SPEC, **how)
    return reduce_rows(stats.row_softplus, reduction, name)


class SigLipLoss(LossModule):
    """`siglip_loss` as a Module that stores the settings."""

    function = staticmethod(siglip_loss)

    def __init__(
        self,
        *,
        reduction: _check.Reduction = "mean",
        group: torch.distributed.ProcessGroup | None = None,
        options: TileOptions | None = None,
    ) -> None:
        super().__init__(locals())
