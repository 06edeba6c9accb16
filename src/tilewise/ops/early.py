"""A small symmetric loss whose gradients are launched in forward.

    loss = share * sum_i ((row_lse_i + col_lse_i) / 2 - pos_i)          share = 1, or 1 / n for a mean

A batch of a few thousand pairs is over on a GPU before Python has gone through autograd and into its thread. What each
row counts is known before, so forward launches the kernels of the gradients right after its own, and backward only
multiplies by what comes in. The gradients wait in float32: they are rounded once.

Eager mode and Triton only: a compiler has launches of its own. The first backward gives the gradients away; another
one through the same graph computes them anew.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilewise.kernels.select import why_not
from tilewise.kernels.spec import Needs, Pair, PairSpec
from tilewise.ops.pair_stats import GRAD_NAMES, KNOWN, NAMES, _holds_numbers, without_autocast
from tilewise.ops.plan import encode
from tilewise.options import TileOptions

SPEC = PairSpec(row_lse=True, col_lse=True, positive="one")
MOST_ROWS = 16384  # beyond, a step takes the GPU longer than its host
_served: dict[Any, bool] = {}  # whether the kernels can serve features of this device and width


def launches_early(a: Tensor, b: Tensor, scale: Tensor, options: TileOptions, group_name: str) -> bool:
    """Whether the host is the limit, and gradients are wanted: half types on a GPU, a small batch, no group."""
    if not a.is_cuda or group_name or options.gradients == "backward" or not torch.is_grad_enabled():
        return False
    if a.dtype not in (torch.float16, torch.bfloat16) or not 0 < a.shape[0] <= MOST_ROWS or a.shape[1] == 0:
        return False
    held = 4 * (a.numel() + b.numel())
    if held > options.workspace_bytes / 2 or not (a.requires_grad or b.requires_grad) or not _holds_numbers(a):
        return False
    kind = a.device, a.dtype, a.shape[1], options.backend
    if kind not in _served:
        pair = Pair(a=a.detach(), b=b.detach(), scale=scale.detach())
        _served[kind] = options.backend != "torch" and why_not("triton", pair, SPEC, options) is None
    return _served[kind]


def symmetric_loss(a: Tensor, b: Tensor, scale: Tensor, share: float, options: TileOptions) -> Tensor:
    """The loss above, differentiable in ``a``, ``b`` and ``scale``."""
    loss: Tensor = _Early.apply(a, b, scale, share, options)
    return loss


class _Early(torch.autograd.Function):
    """Loss and gradients in forward."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, scale: Tensor, share: float, options: TileOptions) -> Tensor:
        from tilewise.kernels.triton_impl.backend import TritonBackend  # which imports Triton

        need_a, need_b, need_scale = ctx.needs_input_grad[:3]
        needs = Needs(a=need_a, b=need_b, scale=need_scale)
        with without_autocast(a):
            loss, ctx.grads = TritonBackend.loss_and_gradients(a, b, scale, share, needs, SPEC, options)
        ctx.share, ctx.options = share, options
        ctx.save_for_backward(a, b, scale)
        return loss

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor) -> Any:
        from tilewise.kernels.triton_impl.backend import TritonBackend

        (upstream,) = incoming
        (a, b, scale), held, ctx.grads = ctx.saved_tensors, ctx.grads, None
        needs = ctx.needs_input_grad[:3]
        grads: tuple[Tensor | None, ...]
        if held is None or torch.is_grad_enabled() or not _holds_numbers(upstream):
            # A compiler of backward passes gets the registered operators, instead of looking into kernels.
            grads = _again((a, b, scale), upstream, ctx.share, ctx.options, needs)
        else:
            grads = TritonBackend.times(held, upstream, (a.dtype, b.dtype, scale.dtype))
        return *(grad if need else None for grad, need in zip(grads, needs, strict=True)), None, None


def _again(
    inputs: tuple[Tensor, ...], upstream: Tensor, share: float, options: TileOptions, needs: tuple[bool, ...]
) -> tuple[Tensor, ...]:
    """By the registered operators, which have no second derivative and say so."""
    plan, none = encode(SPEC, options, ""), (None,) * 8
    stats = torch.ops.tilewise.pair_stats(*(value.detach() for value in inputs), *none, plan)
    whole = (share * upstream).expand(inputs[0].shape[0])
    coming = {"row_lse": whole / 2, "col_lse": whole / 2, "row_pos": -whole}
    known = (stats[NAMES.index(name)] for name in KNOWN)
    parts = (coming.get(name) for name in GRAD_NAMES)
    grads: tuple[Tensor, ...] = torch.ops.tilewise.pair_grads(*inputs, *none, *known, *parts, [*needs, False], plan)
    return grads[:3]
