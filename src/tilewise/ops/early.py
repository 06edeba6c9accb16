"""A small symmetric loss whose gradients are launched in forward.

    loss = share * sum_i ((row_lse_i + col_lse_i) / 2 - pos_i)          share = 1, or 1 / n for a mean

A batch of a few thousand pairs is over on a GPU before Python has gone through autograd and into its thread. What each
row counts is known before, so forward launches the kernels of the gradients right after its own, and backward only
multiplies by what comes in. The gradients wait in float32: they are rounded once.

Eager mode only: a compiler has launches of its own. The first backward gives the gradients away; another one through
the same graph computes them anew.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilewise.kernels.select import choose_backend
from tilewise.kernels.spec import Grads, GradStats, Needs, Pair, PairSpec
from tilewise.ops.pair_stats import GRAD_NAMES, KNOWN, NAMES, _holds_numbers, _pair, without_autocast
from tilewise.ops.plan import encode
from tilewise.options import TileOptions

SPEC = PairSpec(row_lse=True, col_lse=True, positive="one")
MOST_ROWS = 16384  # beyond, a step takes the GPU longer than its host
NO_KEYS = (None,) * 7


def launches_early(a: Tensor, b: Tensor, scale: Tensor, options: TileOptions, group_name: str) -> bool:
    """Whether the host is the limit, and gradients are wanted: half types on a GPU, a small batch, no group."""
    if not a.is_cuda or group_name or options.gradients == "backward" or not torch.is_grad_enabled():
        return False
    if a.dtype not in (torch.float16, torch.bfloat16) or not 0 < a.shape[0] <= MOST_ROWS or a.shape[1] == 0:
        return False
    held = 4 * (a.numel() + b.numel())
    return held <= options.workspace_bytes / 2 and (a.requires_grad or b.requires_grad) and _holds_numbers(a)


def symmetric_loss(a: Tensor, b: Tensor, scale: Tensor, share: float, options: TileOptions) -> Tensor:
    """The loss above, differentiable in ``a``, ``b`` and ``scale``."""
    loss: Tensor = _Early.apply(a, b, scale, share, options)
    return loss


def _incoming(pair: Pair, share: float) -> GradStats:
    """What the loss says of each statistic."""
    n, stat = pair.a.shape[0], pair.stat_dtype
    aligned = -(-n // 4) * 4  # both halves at 16-byte addresses: a kernel then reads them as they are
    halves = torch.full((2, aligned), share / 2, dtype=stat, device=pair.a.device)[:, :n]
    minus = torch.full((n,), -share, dtype=stat, device=pair.a.device)
    return GradStats(row_lse=halves[0], col_lse=halves[1], row_pos=minus)


class _Early(torch.autograd.Function):
    """Loss and gradients in forward."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, scale: Tensor, share: float, options: TileOptions) -> Tensor:
        pair = _pair(a, b, scale, None, *NO_KEYS)
        with without_autocast(a):
            backend = choose_backend(pair, SPEC, options)
            stats = backend.forward(pair, SPEC, options)
            assert stats.row_lse is not None
            assert stats.col_lse is not None
            assert stats.row_pos is not None
            loss = torch.lerp(stats.row_lse, stats.col_lse, 0.5).sub_(stats.row_pos).sum().mul_(share)
            need_a, need_b, need_scale = ctx.needs_input_grad[:3]
            needs = Needs(a=need_a, b=need_b, scale=need_scale)
            coming = _incoming(pair, share)
            ctx.grads = backend.backward(pair, stats, coming, needs, SPEC, options, grad_dtype=pair.stat_dtype)
        ctx.share, ctx.options = share, options
        ctx.save_for_backward(a, b, scale)
        return loss

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor) -> Any:
        (upstream,) = incoming
        saved, held, ctx.grads = ctx.saved_tensors, ctx.grads, None
        needs = ctx.needs_input_grad[:3]
        grads: tuple[Tensor | None, ...]
        if held is None or torch.is_grad_enabled():
            grads = _again(saved, upstream, ctx.share, ctx.options, needs)
        else:
            grads = _times(held, upstream, saved)
        return *(grad if need else None for grad, need in zip(grads, needs, strict=True)), None, None


def _times(held: Grads, upstream: Tensor, inputs: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
    """The gradients times what comes in, in the types of the inputs."""

    def times(grad: Tensor | None, like: Tensor) -> Tensor | None:
        return None if grad is None else torch.mul(grad, upstream, out=torch.empty_like(grad, dtype=like.dtype))

    return tuple(times(grad, like) for grad, like in zip((held.a, held.b, held.scale), inputs, strict=True))


def _again(
    inputs: tuple[Tensor, ...], upstream: Tensor, share: float, options: TileOptions, needs: tuple[bool, ...]
) -> tuple[Tensor, ...]:
    """By the registered operators, which have no second derivative and say so."""
    plan, none = encode(SPEC, options, ""), (None,) * 8
    stats = torch.ops.tilewise.pair_stats(*(value.detach() for value in inputs), *none, plan)
    coming = _incoming(_pair(*inputs, None, *NO_KEYS), share)
    parts = [getattr(coming, name) for name in GRAD_NAMES]
    parts = [None if part is None else part * upstream for part in parts]
    known = (stats[NAMES.index(name)] for name in KNOWN)
    grads: tuple[Tensor, ...] = torch.ops.tilewise.pair_grads(*inputs, *none, *known, *parts, [*needs, False], plan)
    return grads[:3]
