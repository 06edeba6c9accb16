"""Scores of given pairs, in O(n d): a row with its own column, or with its own K columns.

Axes: n rows, m columns, d features, k columns that belong to one row.
"""

# No `from __future__ import annotations` here: the operator's schema is read from the annotations.
from typing import Any, Optional

import torch
from torch import Tensor

from tilewise.kernels.spec import stat_dtype
from tilewise.ops.pair_stats import _no_second

OptTensor = Optional[Tensor]  # noqa: UP045 - torch.library reads this form only
CHUNK_ELEMENTS = 2**23  # 32 MiB of float32 at a time


def _chunks(rows: int, width: int) -> list[slice]:
    step = max(1, CHUNK_ELEMENTS // max(width, 1))
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


def near_scores(a: Tensor, b: Tensor, scale: Tensor, index: Tensor | None = None) -> Tensor | None:
    """About scale * <a_i, b_i>, or scale * <a_i, b_index[i]>: (n,), no gradient.

    A zero from which a row measures its scores: it need not be exact, only near the positive's score. None for half
    types, whose products are coarser than what a zero saves.
    """
    if a.dtype in (torch.float16, torch.bfloat16):
        return None
    return scale.detach() * torch.ops.tilewise.near_scores(a.detach(), b.detach(), index)


@torch.library.custom_op("tilewise::near_scores", mutates_args=())
def _near_scores(a: Tensor, b: Tensor, index: OptTensor) -> Tensor:
    out = a.new_empty(a.shape[0], dtype=stat_dtype(a.dtype))
    if b.shape[0] == 0:  # a rank's slice of the columns may be empty
        return out.zero_()
    for part in _chunks(a.shape[0], a.shape[1]):
        picked = b[part] if index is None else b[index[part].clamp(0, b.shape[0] - 1)]
        out[part] = (a[part] * picked).sum(1, dtype=out.dtype)
    return out


@_near_scores.register_fake
def _(a, b, index):  # type: ignore[no-untyped-def]
    return a.new_empty(a.shape[0], dtype=stat_dtype(a.dtype))


@torch.library.custom_op("tilewise::own_scores", mutates_args=())
def own_scores(a: Tensor, own: Tensor, keep: OptTensor) -> Tensor:
    """<a_i, own_ik> for the k columns of each row: (n, k), 0 where ``keep`` is False.

    What lies behind a False, NaN included, reaches neither the scores nor a gradient.
    """
    out = a.new_empty(own.shape[:2], dtype=stat_dtype(a.dtype))
    with torch.autocast(a.device.type, enabled=False):
        for part in _chunks(a.shape[0], own.shape[1] * own.shape[2]):
            out[part] = torch.bmm(_own(own, keep, part), a[part].to(out.dtype)[:, :, None]).squeeze(2)
    return out


def _own(own: Tensor, keep: Tensor | None, part: slice) -> Tensor:
    kept = own[part].to(stat_dtype(own.dtype))
    return kept if keep is None else torch.where(keep[part, :, None], kept, 0.0)


@own_scores.register_fake
def _(a, own, keep):  # type: ignore[no-untyped-def]
    return a.new_empty(own.shape[:2], dtype=stat_dtype(a.dtype))


@torch.library.custom_op("tilewise::own_grads", mutates_args=())
def _own_grads(a: Tensor, own: Tensor, keep: OptTensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    grad_a, grad_own = torch.empty_like(a), torch.empty_like(own)
    with torch.autocast(a.device.type, enabled=False):
        for part in _chunks(a.shape[0], own.shape[1] * own.shape[2]):
            g_nk = grad[part] if keep is None else torch.where(keep[part], grad[part], 0.0)
            grad_a[part] = torch.bmm(g_nk[:, None, :], _own(own, keep, part)).squeeze(1).to(a.dtype)
            grad_own[part] = (g_nk[:, :, None] * a[part, None, :].to(g_nk.dtype)).to(own.dtype)
    return grad_a, grad_own


@_own_grads.register_fake
def _(a, own, keep, grad):  # type: ignore[no-untyped-def]
    return torch.empty_like(a), torch.empty_like(own)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _pull_back(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    grad_a, grad_own = torch.ops.tilewise.own_grads(*ctx.saved_tensors, grad)
    needs_a, needs_own = ctx.needs_input_grad[:2]
    return grad_a if needs_a else None, grad_own if needs_own else None, None


own_scores.register_autograd(_pull_back, setup_context=_save)
_own_grads.register_autograd(_no_second, setup_context=lambda ctx, inputs, output: None)
