"""Liger's fused linear cross entropy and JSD, with our losses inside: functions, modules, and autograd functions."""

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


def liger_fused_linear_jsd(
    student_input: Tensor,
    student_weight: Tensor,
    teacher_input: Tensor,
    teacher_weight: Tensor,
    shift_labels: Tensor | None = None,
    jsd_beta: float = 0.5,
    ignore_index: int = -100,
    temperature: float = 1.0,
    accum_dtype: torch.dtype | None = None,
) -> Tensor:
    """The divergence alone. Labels say which tokens count."""
    mask = None if shift_labels is None else shift_labels != ignore_index
    heads = (student_input, student_weight, teacher_input, teacher_weight)
    return tw.linear_distillation_loss(*heads, mask=mask, beta=jsd_beta, temperature=temperature)


def chunked_fused_linear_jsd(
    student_input: Tensor,
    student_weight: Tensor,
    teacher_input: Tensor,
    teacher_weight: Tensor,
    true_labels: Tensor,
    student_bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    weight_hard_loss: float = 0.5,
    weight_soft_loss: float = 0.5,
    beta: float = 0.5,
    ignore_index: int = -100,
    temperature: float = 1.0,
) -> Tensor:
    """Cross entropy and divergence from one pass."""
    heads = (student_input, student_weight, teacher_input, teacher_weight, true_labels)
    settings: dict[str, Any] = {"beta": beta, "temperature": temperature, "ignore_index": ignore_index}
    stats = tw.linear_distillation_stats(*heads, linear_bias=student_bias, teacher_bias=teacher_bias, **settings)
    each = weight_soft_loss * stats.divergence - weight_hard_loss * stats.log_prob  # type: ignore[operator]
    return each.sum() / (true_labels != ignore_index).sum().clamp(min=1)


class LigerFusedLinearJSD(nn.Module):
    """A function with its settings kept."""

    function = staticmethod(liger_fused_linear_jsd)

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.settings = settings

    def forward(self, *tensors: Any) -> Tensor:
        """See the function."""
        return self.function(*tensors, **self.settings)  # type: ignore[misc]


class LigerFusedLinearJSDLoss(LigerFusedLinearJSD):
    """The same for the chunked function."""

    function = staticmethod(chunked_fused_linear_jsd)


class LigerFusedLinearJSDFunction:
    """The peer's autograd function."""

    apply = staticmethod(liger_fused_linear_jsd)


class ChunkedFunction:
    """The peer's other autograd function of the same name."""

    apply = staticmethod(chunked_fused_linear_jsd)


module("liger_kernel")
module("liger_kernel.utils", infer_device=lambda: "cuda" if torch.cuda.is_available() else "cpu", is_npu_available=bool)
module("liger_kernel.ops.utils", is_hip=bool)
module("liger_kernel.ops.cross_entropy", liger_cross_entropy_kernel=None)
module(
    "liger_kernel.ops",
    LigerFusedLinearCrossEntropyFunction=LigerFusedLinearCrossEntropyFunction,
    LigerFusedLinearJSDFunction=LigerFusedLinearJSDFunction,
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
    liger_jsd=None,
    liger_fused_linear_jsd=liger_fused_linear_jsd,
    liger_fused_linear_cross_entropy=liger_fused_linear_cross_entropy,
)
module("liger_kernel.transformers.jsd", LigerJSD=None, LigerJSDFunction=None)
module("liger_kernel.transformers.fused_linear_jsd", LigerFusedLinearJSD=LigerFusedLinearJSD)
module("liger_kernel.chunked_loss", LigerFusedLinearJSDLoss=LigerFusedLinearJSDLoss)
module("liger_kernel.chunked_loss.functional", liger_fused_linear_jsd=chunked_fused_linear_jsd)
module("liger_kernel.chunked_loss.jsd_loss", LigerFusedLinearJSDFunction=ChunkedFunction)
