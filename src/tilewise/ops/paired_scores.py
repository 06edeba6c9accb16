"""Scores of given pairs, in O(n d): a row with its own column, or with its own K columns.

Axes: n rows, m columns, d features, k columns that belong to one row.
"""

# No `from __future__ import annotations` here: the operators' schemas are read from the annotations.
from collections.abc import Callable
from typing import Any, Optional

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewise.kernels.precision import matmul_precision
from tilewise.kernels.slices import full_blocks, slices
from tilewise.kernels.spec import HALF_TYPES, stat_dtype
from tilewise.ops.call import Function, holds_numbers, plain_operator
from tilewise.ops.row_blocks import block_rows
from tilewise.ops.strategies import without_autocast
from tilewise.options import DEFAULT_OPTIONS, TileOptions

OptTensor = Optional[Tensor]  # noqa: UP045 - torch.library reads this form only
CHUNK_ELEMENTS = 2**23  # 32 MiB of float32 at a time


def _chunks(rows: int, width: int, elements: int = 0) -> list[slice]:
    return slices(rows, max(1, (elements or CHUNK_ELEMENTS) // max(width, 1)))


def positive_shift(
    a: Tensor, b: Tensor, scale: Tensor | float, index: Tensor | None = None, options: TileOptions = DEFAULT_OPTIONS
) -> Tensor | None:
    """About scale * <a_i, b_i>, or scale * <a_i, b_index[i]>: (n,), without gradient. The shift of each row.

    It need not be exact, only near the positive's score. None for half types, whose products are coarser than what a
    shift saves. The workspace is not in use yet: the picked columns and their products may take half of it.
    """
    if a.dtype in HALF_TYPES:
        return None
    elements = min(CHUNK_ELEMENTS, options.workspace_bytes // (4 * a.dtype.itemsize))
    block = block_rows(a.device, options)
    factor = scale.detach() if isinstance(scale, Tensor) else scale
    shift: Tensor = factor * _row_products(a.detach(), b.detach(), index, block, elements)
    return shift


def _find_row_products(a: Tensor, b: Tensor, index: OptTensor, block: int, elements: int) -> Tensor:
    """In blocks of ``block`` rows, or, if it is 0, of about ``elements`` numbers."""
    out = a.new_empty(a.shape[0], dtype=stat_dtype(a.dtype))
    if b.shape[0] == 0:  # a rank's shard of the columns may be empty
        return out.zero_()
    if block:
        for rows, used in full_blocks(a.shape[0], block, a.device):
            picked = b[rows if index is None else index[rows].clamp(0, b.shape[0] - 1)]
            out[rows[:used]] = (a[rows] * picked).sum(1, dtype=out.dtype)[:used]
        return out
    for part in _chunks(a.shape[0], a.shape[1], elements):
        picked = b[part] if index is None else b[index[part].clamp(0, b.shape[0] - 1)]
        out[part] = (a[part] * picked).sum(1, dtype=out.dtype)
    return out


_row_products = plain_operator(
    "row_products", _find_row_products, lambda a, *more: a.new_empty(a.shape[0], dtype=stat_dtype(a.dtype))
)


def _find_cosines(a: Tensor, b: Tensor, index: Tensor) -> Tensor:
    out = torch.zeros(a.shape[0], dtype=torch.float64, device=a.device)
    if b.shape[0] == 0:  # a rank's shard of the columns may be empty
        return out
    for part in _chunks(a.shape[0], a.shape[1]):
        at = index[part]
        cosine = F.cosine_similarity(a[part].double(), b[at.clamp(0, b.shape[0] - 1)].double(), eps=1e-12)
        out[part] = torch.where((at >= 0) & (at < b.shape[0]), cosine, 0.0)
    return out


_cosines = plain_operator("cosines", _find_cosines, lambda a, *more: a.new_empty(a.shape[0], dtype=torch.float64))


def target_cosines(a: Tensor, b: Tensor, index: Tensor) -> Tensor:
    """The cosine of each row and its column ``index``, in float64, without gradient; 0 for an index that is not here.

    In float64, because an angle near 0 has half of the digits of its cosine.
    """
    cosine: Tensor = _cosines(a.detach(), b.detach(), index)
    return cosine


def own_scores(a: Tensor, own: Tensor, keep: Tensor | None, precision: str) -> Tensor:
    """<a_i, own_ik> for the k columns of each row: (n, k), 0 where ``keep`` is False. See `TileOptions.precision`.

    On a GPU the products are in full float32 even if TF32 is permitted, because memory limits their speed. Columns with
    False affect neither the scores nor a gradient, even if they are NaN.
    """
    if holds_numbers(a):
        scores: Tensor = _OwnScores.apply(a, own, keep, precision)
        return scores
    return torch.ops.tilewise.own_scores(a, own, keep, precision)


def _own_scores(a: Tensor, own: Tensor, keep: OptTensor, precision: str) -> Tensor:
    with without_autocast(a), matmul_precision("highest" if a.is_cuda else precision):
        if own.numel() <= CHUNK_ELEMENTS:
            return _some_scores(a, own, keep)
        out = a.new_empty(own.shape[:2], dtype=stat_dtype(a.dtype))
        for part in _chunks(a.shape[0], own.shape[1] * own.shape[2]):
            out[part] = _some_scores(a[part], own[part], None if keep is None else keep[part])
    return out


def _some_scores(a: Tensor, own: Tensor, keep: Tensor | None) -> Tensor:
    kept = _kept(own, keep)
    return torch.bmm(kept, a.to(kept.dtype)[:, :, None])[:, :, 0]


def _kept(own: Tensor, keep: Tensor | None) -> Tensor:
    kept = own.to(stat_dtype(own.dtype))
    return kept if keep is None else torch.where(keep[:, :, None], kept, 0.0)


def _own_grads(a: Tensor, own: Tensor, keep: OptTensor, precision: str, grad: Tensor) -> tuple[Tensor, Tensor]:
    with without_autocast(a), matmul_precision("highest" if a.is_cuda else precision):
        if own.numel() <= CHUNK_ELEMENTS:
            return _some_grads(a, own, keep, grad)
        grad_a, grad_own = torch.empty_like(a), torch.empty_like(own)
        for part in _chunks(a.shape[0], own.shape[1] * own.shape[2]):
            found = _some_grads(a[part], own[part], None if keep is None else keep[part], grad[part])
            grad_a[part], grad_own[part] = found
    return grad_a, grad_own


def _some_grads(a: Tensor, own: Tensor, keep: Tensor | None, grad: Tensor) -> tuple[Tensor, Tensor]:
    g_nk = grad if keep is None else torch.where(keep, grad, 0.0)
    grad_a = torch.bmm(g_nk[:, None, :], _kept(own, keep))[:, 0]
    grad_own = g_nk[:, :, None] * a[:, None, :].to(g_nk.dtype)
    return grad_a.to(a.dtype), grad_own.to(own.dtype)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.precision = inputs
    ctx.save_for_backward(*tensors)


def _pull_back(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
    saved = ctx.saved_tensors
    # With create_graph the gradients may be differentiated again, as those of the registered operator can be.
    eager = holds_numbers(saved[0]) and not torch.is_grad_enabled()
    compute: Callable[..., tuple[Tensor, Tensor]] = _own_grads if eager else torch.ops.tilewise.own_grads
    grad_a, grad_own = compute(*saved, ctx.precision, grad)
    needs_a, needs_own = ctx.needs_input_grad[:2]
    return grad_a if needs_a else None, grad_own if needs_own else None, None, None


def _save_grads(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    a, own, keep, ctx.precision, grad = inputs
    ctx.save_for_backward(a, own, keep, grad)


def _pull_back_grads(ctx: Any, along_a: Tensor, along_own: Tensor) -> tuple[Tensor, Tensor, None, None, Tensor]:
    """The gradients of a' = sum_k g_ik own_ik and own'_ik = g_ik a_i, which are linear in g, in a and in own."""
    a, own, keep, grad = ctx.saved_tensors
    scores, grads = torch.ops.tilewise.own_scores, torch.ops.tilewise.own_grads
    for_grad = scores(along_a, own, keep, ctx.precision) + scores(a, along_own, keep, ctx.precision)
    for_a, for_own = grads(along_a, along_own, keep, ctx.precision, grad)
    return for_a, for_own, None, None, for_grad


plain_operator("own_scores", _own_scores, lambda a, own, *_: a.new_empty(own.shape[:2], dtype=stat_dtype(a.dtype)))
plain_operator("own_grads", _own_grads, lambda a, own, *_: (torch.empty_like(a), torch.empty_like(own)))
torch.library.register_autograd("tilewise::own_scores", _pull_back, setup_context=_save)
torch.library.register_autograd("tilewise::own_grads", _pull_back_grads, setup_context=_save_grads)


class _OwnScores(Function):
    """`own_scores` without the dispatcher."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, own: Tensor, keep: Tensor | None, precision: str) -> Tensor:
        _save(ctx, (a, own, keep, precision), a)
        return _own_scores(a, own, keep, precision)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _pull_back(ctx, *grads)
