"""Mean of columns weighted by a fixed softmax of pair scores, for distillation. Computed in blocks of rows.

Axes: n rows, m columns, r rows of one block, e features of the teacher, d of the student.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from tilewise import _check

COPIES = 3  # of a block of scores in memory at once: scores, exponentials, softmax


def expected_columns(t_ne: Tensor, u_me: Tensor, scale: Tensor, v_md: Tensor, workspace_bytes: int) -> Tensor:
    """``softmax(scale * t @ u.T, dim=1) @ v``: (n, d), float32 (float64 for float64). Differentiable in v only.

    Memory: a block of scores within the workspace, and copies of the features in that dtype.
    """
    mean: Tensor = _Expected.apply(t_ne.detach(), u_me.detach(), scale.detach(), v_md, workspace_bytes)
    return mean


class _Expected(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: Tensor, u: Tensor, scale: Tensor, v: Tensor, workspace_bytes: int) -> Tensor:
        ctx.save_for_backward(t, u, scale)
        ctx.dtype, ctx.workspace_bytes = v.dtype, workspace_bytes
        wide = torch.promote_types(v.dtype, torch.float32)
        mean_nd = v.new_empty(t.shape[0], v.shape[1], dtype=wide)
        with _without_autocast(v):
            columns = v.to(wide)
            for rows, p_rm in _softmax(t, u, scale, workspace_bytes, wide):
                torch.mm(p_rm, columns, out=mean_nd[rows])
        return mean_nd

    @staticmethod
    def backward(ctx: Any, grad_nd: Tensor) -> Any:
        t, u, scale = ctx.saved_tensors
        grad_md = grad_nd.new_zeros(u.shape[0], grad_nd.shape[1])
        with _without_autocast(grad_nd):
            for rows, p_rm in _softmax(t, u, scale, ctx.workspace_bytes, grad_nd.dtype):
                grad_md.addmm_(p_rm.T, grad_nd[rows])
        return None, None, None, grad_md.to(ctx.dtype), None


def _softmax(t: Tensor, u: Tensor, scale: Tensor, workspace_bytes: int, wide: torch.dtype) -> Iterator[Any]:
    """Yield blocks of rows and their probabilities, within the workspace."""
    step = max(1, workspace_bytes // max(1, COPIES * wide.itemsize * u.shape[0]))
    columns = u.to(wide)
    for start in range(0, t.shape[0], step):
        rows = slice(start, start + step)
        yield rows, torch.mm(t[rows].to(wide) * scale.to(wide), columns.T).softmax(dim=1)


def _without_autocast(features: Tensor) -> AbstractContextManager[object]:
    kind = features.device.type
    return torch.autocast(kind, enabled=False) if kind in _check.AUTOCAST_DEVICES else nullcontext()
