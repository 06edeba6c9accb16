"""Liger's fused linear cross entropy, with our loss inside: the function, the module, and the autograd function."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from tools.peer_adapters.stand_in import module
from torch import Tensor, nn

import tilewise as tw


@dataclass
class CrossEntropyOutput:
    """The peer's result with more than a loss."""

    loss: Tensor
    z_loss: Tensor | None = None
    token_accuracy: Tensor | None = None
    predicted_tokens: Tensor | None = None


def liger_fused_linear_cross_entropy(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    ce_weight: Tensor | None = None,
    ignore_index: int = -100,
    lse_square_scale: float = 0.0,
    label_smoothing: float = 0.0,
    reduction: Any = "mean",
    softcap: float | None = None,
    return_z_loss: bool = False,
    accum_dtype: torch.dtype | None = None,  # sums are in float32 in any case
    use_token_scaling: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
) -> Any:
    """Loss and z-loss come from one pass; accuracy and predictions from `linear_token_stats`."""
    head = {"linear_bias": bias, "ignore_index": ignore_index, "softcap": softcap}
    settings: dict[str, Any] = {"weight": ce_weight, "label_smoothing": label_smoothing, **head}
    valid = target != ignore_index
    if use_token_scaling:
        each = tw.linear_cross_entropy(input, weight, target, reduction="none", **settings)
        probability = tw.linear_token_stats(input.detach(), weight, target, want="log_prob", **head).log_prob.exp()  # type: ignore[arg-type, union-attr]
        each = each * probability.detach()
        loss = each if reduction == "none" else each.sum() / (valid.sum() if reduction == "mean" else 1)
        lse = torch.zeros_like(each)
    else:
        loss, lse = tw.linear_cross_entropy(input, weight, target, reduction=reduction, return_lse=True, **settings)
    z_loss = lse_square_scale * lse.square()
    if reduction != "none":
        z_loss = z_loss.sum() / (valid.sum() if reduction == "mean" else 1)
    found = CrossEntropyOutput(loss + z_loss, z_loss if return_z_loss else None)
    if return_token_accuracy or return_predicted_tokens:
        with torch.no_grad():
            stats = tw.linear_token_stats(input, weight, target, want=("argmax", "correct"), **head)  # type: ignore[arg-type]
        found.token_accuracy = stats.accuracy if return_token_accuracy else None
        found.predicted_tokens = stats.argmax if return_predicted_tokens else None
    return found if return_z_loss or return_token_accuracy or return_predicted_tokens else found.loss


class LigerFusedLinearCrossEntropyLoss(nn.Module):
    """The function with its settings kept. The classifier comes first, as in the peer."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.settings = settings

    def forward(self, lin_weight: Tensor, _input: Tensor, target: Tensor, bias: Tensor | None = None) -> Any:
        """See `liger_fused_linear_cross_entropy`."""
        return liger_fused_linear_cross_entropy(_input, lin_weight, target, bias, **self.settings)


class LigerFusedLinearCrossEntropyFunction:
    """The peer's autograd function: all arguments by position, four results."""

    @staticmethod
    def apply(*arguments: Any) -> tuple[Any, ...]:
        """See `liger_fused_linear_cross_entropy`."""
        found = liger_fused_linear_cross_entropy(*arguments)
        if isinstance(found, Tensor):
            return found, None, None, None
        return found.loss, found.z_loss, found.token_accuracy, found.predicted_tokens


module("liger_kernel")
module("liger_kernel.utils", infer_device=lambda: "cuda" if torch.cuda.is_available() else "cpu", is_npu_available=bool)
module("liger_kernel.ops.utils", is_hip=bool)
module("liger_kernel.ops.cross_entropy", liger_cross_entropy_kernel=None)
module(
    "liger_kernel.ops",
    LigerFusedLinearCrossEntropyFunction=LigerFusedLinearCrossEntropyFunction,
    LigerCrossEntropyFunction=None,
)
module("liger_kernel.transformers")
module("liger_kernel.transformers.cross_entropy", LigerCrossEntropyLoss=None)
module(
    "liger_kernel.transformers.fused_linear_cross_entropy",
    LigerFusedLinearCrossEntropyLoss=LigerFusedLinearCrossEntropyLoss,
)
module(
    "liger_kernel.transformers.functional",
    CrossEntropyOutput=CrossEntropyOutput,
    liger_cross_entropy=None,
    liger_fused_linear_cross_entropy=liger_fused_linear_cross_entropy,
)
