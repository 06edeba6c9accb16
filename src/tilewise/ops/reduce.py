"""From losses of rows to the number that is returned."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tilewise.kernels.spec import RowWeights, stat_dtype
from tilewise.ops.call import holds_numbers
from tilewise.ops.distributed.collectives import row_weight
from tilewise.ops.explain import is_explaining


def reduce_rows(loss_n: Tensor, reduction: str, group_name: str = "") -> Tensor:
    """The rows' losses as they are, their sum, or their mean.

    Over a group each rank returns ``W / N`` times the sum over its own rows ("mean", with N the rows of all
    ranks) or ``W`` times that sum ("sum"), so that after DDP's averaging over the W ranks the parameters have
    the gradient of the global mean or sum.
    """
    if reduction == "none":
        return loss_n
    if group_name:
        loss: Tensor = row_weight(loss_n.detach(), reduction, group_name) * loss_n.sum()
        return loss
    return loss_n.sum() if reduction == "sum" else loss_n.mean()


def row_weights(a: Tensor, reduction: str, *, checked: bool = False) -> RowWeights:
    """The weights of a sum or a mean over the rows of ``a``. A mean over no rows is NaN. ``checked``: see `Calls`."""
    if reduction == "sum":
        return RowWeights()
    if a.shape[0] == 0:
        return RowWeights(share=math.nan)
    if checked or holds_numbers(a) or (not torch.compiler.is_compiling() and is_explaining()):
        return RowWeights(share=1.0 / a.shape[0])
    # A tensor, not a number: a number would make the compiled graph one for this batch size only.
    return RowWeights(each=torch.full(a.shape[:1], 1.0 / a.shape[0], dtype=stat_dtype(a.dtype), device=a.device))
