"""Log-sum-exp of one tile in both directions, and its gradient, with one exponential per score if that is safe.

Axes: r, c rows and columns of one tile.

With one shift t for the whole tile,

    e_ij = exp(x_ij - t)        rows: log sum_j e_ij + t        columns: log sum_i e_ij + t
    G_ij = e_ij * (u_i + v_j)   u_i = g_i exp(t - row_lse_i)    v_j = g_j exp(t - col_lse_j)

If a sum is too small or a factor too large (exponentials that span more than float32's range), the tile is computed
again with a shift for each row and each column. Vectors are float64, because t and lse may be large.
"""

from __future__ import annotations

import math
from typing import NamedTuple, cast

import torch
from torch import Tensor

SAFE_SCORE = 60.0  # exp(+-60) and sums of 1e9 such terms are normal float32 numbers: no shift is needed
# exp flushes terms below 2**-126 to zero. Over the columns of a tile they are less than 1e-9 of a sum of this size.
SMALLEST_SUM = 2.0**-80
LARGEST_EXPONENT = 60.0
NO_SHARE = -1000.0  # its exponential is 0 in every type


def tile_log_sums(x_rc: Tensor, scratch: Tensor, *, rows: bool, cols: bool, bounded: bool) -> tuple[Tensor, Tensor]:
    """Log-sum-exp over each row (r,) and each column (c,) of the tile, float64; 0-d for a direction that is not wanted.

    Args:
        x_rc: scores; overwritten.
        scratch: a buffer of the same shape.
        bounded: no absolute score is larger than SAFE_SCORE.
    """
    nothing = x_rc.new_zeros(())
    on_cpu = x_rc.device.type == "cpu"  # on other devices, .item() would synchronize
    if bounded or (on_cpu and rows and cols and x_rc.numel()):
        top = 0.0 if bounded else x_rc.max().item()
        if math.isfinite(top):
            e_rc = (x_rc if bounded else torch.sub(x_rc, top, out=scratch)).exp_()
            row = e_rc.sum(1) if rows else nothing
            col = e_rc.sum(0) if cols else nothing
            if bounded or min(row.min().item(), col.min().item()) >= SMALLEST_SUM:
                return row.double().log() + top, col.double().log() + top
    return (
        _log_sum(x_rc, 1, scratch) if rows else nothing,
        _log_sum(x_rc, 0, scratch) if cols else nothing,
    )


def _log_sum(x_rc: Tensor, dim: int, scratch: Tensor) -> Tensor:
    """logsumexp along ``dim``, float64, with the maximum of each row (column) as its shift."""
    top = x_rc.amax(dim, keepdim=True)
    shift = torch.where(top == -torch.inf, 0.0, top)
    total = torch.sub(x_rc, shift, out=scratch).exp_().sum(dim)
    return total.double().log() + shift.squeeze(dim).double()


def tile_moments(x_rc: Tensor, scratch: Tensor, *, entropies: bool, squares: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Log-sum-exp, entropy and log sum p^2 of the softmax of each row of the tile: (r,), float64; 0 if not wanted.

    The shift t is the row's largest score. With e_j = exp(x_j - t) and S = sum_j e_j >= 1, nothing cancels in

        lse = t + log S        entropy = log S + sum_j e_j (t - x_j) / S        log sum p^2 = log sum e_j^2 - 2 log S

    The scores are overwritten.
    """
    top = x_rc.amax(1, keepdim=True)
    shift = torch.where(top == -torch.inf, 0.0, top)
    e_rc = torch.exp(x_rc.sub_(shift), out=scratch)
    total = e_rc.sum(1).double()
    log_total = total.log()
    empty = log_total == -torch.inf
    entropy = square = torch.zeros_like(log_total)
    if squares:
        norm = torch.linalg.vector_norm(e_rc, dim=1).double()
        square = torch.where(empty, 0.0, 2.0 * (norm.log() - log_total))
    if entropies:
        below = e_rc.mul_(x_rc.clamp_(min=NO_SHARE)).sum(1).double()  # 0 * -inf would be NaN
        entropy = torch.where(empty, 0.0, log_total - below / total)
    return log_total + shift.squeeze(1).double(), entropy, square


class SideWeights:
    """Log-sum-exps of one direction and their gradients, float64. ``lse`` is given relative to ``shift``."""

    def __init__(self, lse: Tensor, shift: Tensor | None, grad: Tensor) -> None:
        self.grad = grad.double()
        total = lse.double() if shift is None else lse.double() + shift.double()
        # A row whose pairs are all excluded has lse = -inf and no gradient. exp(x - inf) = 0 gives that without NaN.
        self.lse = torch.where(total == -torch.inf, torch.inf, total)

    def factor(self, rows: slice, top: float, dtype: torch.dtype) -> Tensor | None:
        """grad * exp(top - lse), or None if that could overflow."""
        exponent = top - self.lse[rows]
        if not exponent.max().item() <= LARGEST_EXPONENT:
            return None
        return (self.grad[rows] * exponent.exp()).to(dtype)

    def softmax_(self, x_rc: Tensor, rows: slice | Tensor, dim: int) -> Tensor:
        """x := grad * exp(x - lse), in place. ``dim`` is the axis over which lse was summed."""
        return self.log_softmax_(x_rc, rows, dim).exp_().mul_(self.grad[rows].unsqueeze(dim).to(x_rc.dtype))

    def log_softmax_(self, x_rc: Tensor, rows: slice | Tensor, dim: int = 1) -> Tensor:
        """x := x - lse, in place."""
        lse = self.lse[rows].unsqueeze(dim)
        # Two steps: first lse rounded to the type of x, then the remainder.
        coarse = lse.to(x_rc.dtype)
        rest = torch.where(lse.isfinite(), lse - coarse, 0.0)
        return x_rc.sub_(coarse).sub_(rest.to(x_rc.dtype))


class TokenWeights(NamedTuple):
    """v, h and c of each row, (n,), float64: the gradient of a score is p (v + h (lse - x) + c p).

    The entropy H and q = log sum p^2, with gradients h and g, and the gradient of the log-sum-exp, make
    v = grad_lse - h H - 2 g  and  c = 2 g exp(-q). v is the gradient of ``rows``.
    """

    rows: SideWeights
    entropy: Tensor | None  # h
    square: Tensor | None  # c

    def gradient_(self, x_rc: Tensor, scratch: Tensor, i: slice | Tensor) -> Tensor:
        """The gradient of the scores of the rows i, in place of the scores."""
        self.rows.log_softmax_(x_rc, i)
        p_rc = torch.exp(x_rc, out=scratch)
        if self.entropy is None:
            x_rc.zero_()
        else:
            x_rc.clamp_(min=NO_SHARE).mul_(-self.entropy[i, None].to(x_rc.dtype))
        x_rc.add_(self.rows.grad[i, None].to(x_rc.dtype))
        if self.square is not None:
            x_rc.addcmul_(p_rc, self.square[i, None].to(x_rc.dtype))
        return x_rc.mul_(p_rc)


def tile_softmax_(
    x_rc: Tensor,
    scratch: Tensor,
    i: slice,
    j: slice,
    rows: SideWeights | None,
    cols: SideWeights | None,
    *,
    bounded: bool,
    one_shift: bool = True,
) -> Tensor:
    """g_i exp(x_ij - row_lse_i) + g_j exp(x_ij - col_lse_j), in place of the scores.

    ``one_shift``: all scores of the tile may have the same shift.
    """
    if rows is None and cols is None:
        return x_rc.zero_()
    if one_shift and (bounded or x_rc.device.type == "cpu"):
        top = 0.0 if bounded else x_rc.max().item()
        row = None if rows is None else rows.factor(i, top, x_rc.dtype)
        col = None if cols is None else cols.factor(j, top, x_rc.dtype)
        if math.isfinite(top) and (rows is None or row is not None) and (cols is None or col is not None):
            e_rc = (x_rc if bounded else x_rc.sub_(top)).exp_()
            if row is not None and col is not None:
                return e_rc.mul_(torch.add(row[:, None], col[None, :], out=scratch))
            return e_rc.mul_(row[:, None] if row is not None else cast(Tensor, col)[None, :])
    other = scratch.copy_(x_rc) if rows is not None and cols is not None else x_rc
    if rows is not None:
        rows.softmax_(x_rc, i, 1)
    if cols is not None:
        cols.softmax_(other, j, 0)
    return x_rc if other is x_rc else x_rc.add_(other)
