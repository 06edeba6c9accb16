"""The losses that tilewise is compared with: dense (CLIP) and local (OpenCLIP's local loss).

Both store scores: b x b on every rank, or b / W x b in each direction. On every rank they return
``W / N * (sum of this rank's losses)``, as the tilewise losses do. The average of the gradients over ranks is then
the gradient of the global mean.

Axes: n rows of this rank, b rows of all ranks, d features.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


class _Gather(torch.autograd.Function):
    """Gather the rows of all ranks in the order of ranks. The gradient is summed over ranks."""

    @staticmethod
    def forward(ctx: Any, rows_nd: Tensor, sizes: list[int], group: Any) -> Tensor:
        rank = dist.get_rank(group)
        ctx.first, ctx.rows, ctx.group = sum(sizes[:rank]), sizes[rank], group
        padded = rows_nd.new_zeros(max(sizes), *rows_nd.shape[1:])
        padded[: len(rows_nd)] = rows_nd
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded, group=group)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        total = grads[0].contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total[ctx.first : ctx.first + ctx.rows], None, None


def shard_sizes(rows: int, device: torch.device, group: Any) -> list[int]:
    """Rows of every rank."""
    if group is None:
        return [rows]
    sizes = torch.zeros(dist.get_world_size(group), dtype=torch.int64, device=device)
    sizes[dist.get_rank(group)] = rows
    dist.all_reduce(sizes, group=group)
    return sizes.tolist()


def gather(rows: Tensor, sizes: list[int], group: Any) -> Tensor:
    """Rows of all ranks, differentiable."""
    return rows if group is None else _Gather.apply(rows, sizes, group)


def masked_scores(rows: Tensor, cols: Tensor, scale: Tensor, ids: tuple[Tensor, Tensor] | None, first: int) -> Tensor:
    """``scale * rows @ cols.T`` in float32; pairs with the same id that are not the pair itself are -inf.

    The pair of row i is column ``first + i``.
    """
    scores = scale * (rows @ cols.T).float()
    if ids is None:
        return scores
    same = ids[0][:, None] == ids[1][None, :]
    own = torch.arange(len(rows), device=rows.device)
    same[own, first + own] = False
    return scores.masked_fill(same, float("-inf"))


def dense_clip_loss(
    image: Tensor, text: Tensor, scale: Tensor, *, ids: Tensor | None = None, group: Any = None
) -> Tensor:
    """CLIP's own loss: every rank builds all b x b scores.

    Equals ``(cross_entropy(x, arange) + cross_entropy(x.T, arange)) / 2`` with ``x = scale * image @ text.T``.
    """
    sizes = shard_sizes(len(image), image.device, group)
    all_ids = gather(ids, sizes, group) if ids is not None else None
    image_bd, text_bd = gather(image, sizes, group), gather(text, sizes, group)
    masks = (all_ids, all_ids) if all_ids is not None else None
    scores = masked_scores(image_bd, text_bd, scale, masks, 0)
    target = torch.arange(len(scores), device=scores.device)
    return (F.cross_entropy(scores, target) + F.cross_entropy(scores.T, target)) / 2


def local_clip_loss(
    image: Tensor, text: Tensor, scale: Tensor, *, ids: Tensor | None = None, group: Any = None
) -> Tensor:
    """OpenCLIP's local loss: every rank scores its own rows against all columns, in both directions."""
    sizes = shard_sizes(len(image), image.device, group)
    first = sum(sizes[: dist.get_rank(group)]) if group is not None else 0
    all_ids = gather(ids, sizes, group) if ids is not None else None
    masks = (ids, all_ids) if ids is not None and all_ids is not None else None
    target = first + torch.arange(len(image), device=image.device)
    by_image = masked_scores(image, gather(text, sizes, group), scale, masks, first)
    by_text = masked_scores(text, gather(image, sizes, group), scale, masks, first)
    total = F.cross_entropy(by_image, target, reduction="sum") + F.cross_entropy(by_text, target, reduction="sum")
    return total * len(sizes) / (2 * sum(sizes))


def dense_siglip_loss(image: Tensor, text: Tensor, scale: Tensor, bias: Tensor, *, group: Any = None) -> Tensor:
    """The sigmoid loss over all b x b scores: ``sum_ij softplus(-z_ij x_ij) / b``."""
    sizes = shard_sizes(len(image), image.device, group)
    return _sigmoid(gather(image, sizes, group), gather(text, sizes, group), scale, bias, 0) / sum(sizes)


def local_siglip_loss(image: Tensor, text: Tensor, scale: Tensor, bias: Tensor, *, group: Any = None) -> Tensor:
    """The sigmoid loss of this rank's images against all texts."""
    sizes = shard_sizes(len(image), image.device, group)
    first = sum(sizes[: dist.get_rank(group)]) if group is not None else 0
    return _sigmoid(image, gather(text, sizes, group), scale, bias, first) * len(sizes) / sum(sizes)


def _sigmoid(image: Tensor, text: Tensor, scale: Tensor, bias: Tensor, first: int) -> Tensor:
    scores = scale * (image @ text.T).float() + bias
    own = torch.arange(len(image), device=image.device)
    sign = torch.full_like(scores, -1.0)
    sign[own, first + own] = 1.0
    return F.softplus(-sign * scores).sum()
