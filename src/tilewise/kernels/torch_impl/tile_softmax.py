"""Log-sum-exp of one tile in both directions, and its gradient, with one exponential per score where that is safe.

Axes: r, c rows and columns of one tile.

With a shift t that suits the whole tile,

    e_ij = exp(x_ij - t)        rows: log sum_j e_ij + t        columns: log sum_i e_ij + t
    G_ij = e_ij * (u_i + v_j)   u_i = g_i exp(t - row_lse_i)    v_j = g_j exp(t - col_lse_j)

When a sum is too small or a factor too large for that (scores that spread over more than float32's range), the tile
is done again with a shift for each row and each column. Vectors are float64, so that t and lse, which may be large,
cost no accuracy.
"""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor

SAFE_SCORE = 60.0  # exp(+-60) and sums of 1e9 of them are ordinary float32 numbers: no shift is needed
# What exp flushes to zero is below 2**-126: of a sum of this size, over the columns of a tile, less than 1e-9.
SMALLEST_SUM = 2.0**-80
LARGEST_EXPONENT = 60.0
NO_SHARE = -1000.0  # exp of it is 0 in every type


def tile_log_sums(x_rc: Tensor, spare: Tensor, *, rows: bool, cols: bool, bounded: bool) -> tuple[Tensor, Tensor]:
    """Log-sum-exp over each row (r,) and each column (c,) of the tile, float64; a direction not asked for is 0-d.

    Args:
        x_rc: scores; destroyed.
        spare: a buffer of the same shape.
        bounded: no score is larger than SAFE_SCORE in size.
    """
    nothing = x_rc.new_zeros(())
    on_cpu = x_rc.device.type == "cpu"  # elsewhere, looking at a number means waiting for it
    if bounded or (on_cpu and rows and cols and x_rc.numel()):
        top = 0.0 if bounded else x_rc.max().item()
        if math.isfinite(top):
            e_rc = (x_rc if bounded else torch.sub(x_rc, top, out=spare)).exp_()
            row = e_rc.sum(1) if rows else nothing
            col = e_rc.sum(0) if cols else nothing
            if bounded or min(row.min().item(), col.min().item()) >= SMALLEST_SUM:
                return row.double().log() + top, col.double().log() + top
    return (
        _log_sum(x_rc, 1, spare) if rows else nothing,
        _log_sum(x_rc, 0, spare) if cols else nothing,
    )


def _log_sum(x_rc: Tensor, dim: int, spare: Tensor) -> Tensor:
    """logsumexp along ``dim``, float64, with the maximum of each row (column) as its shift."""
    top = x_rc.amax(dim, keepdim=True)
    shift = torch.where(top == -torch.inf, 0.0, top)
    total = torch.sub(x_rc, shift, out=spare).exp_().sum(dim)
    return total.double().log() + shift.squeeze(dim).double()


def tile_entropies(x_rc: Tensor, spare: Tensor) -> tuple[Tensor, Tensor]:
    """Log-sum-exp and entropy of the softmax of each row of the tile: (r,), float64. Scores are destroyed.

    With the row's largest score t as the shift, e_j = exp(x_j - t) and S = sum_j e_j >= 1, nothing cancels in

        lse = t + log S        entropy = log S + sum_j e_j (t - x_j) / S
    """
    top = x_rc.amax(1, keepdim=True)
    shift = torch.where(top == -torch.inf, 0.0, top)
    e_rc = torch.exp(x_rc.sub_(shift), out=spare)
    total = e_rc.sum(1).double()
    below = e_rc.mul_(x_rc.clamp_(min=NO_SHARE)).sum(1).double()  # 0 times -inf would be NaN
    log_total = total.log()
    entropy = torch.where(log_total == -torch.inf, 0.0, log_total - below / total)
    return log_total + shift.squeeze(1).double(), entropy


class SideWeights:
    """What one direction of the softmax gradient needs: its log-sum-exp and its incoming gradient, float64."""

    def __init__(self, lse: Tensor, zero: Tensor | None, grad: Tensor) -> None:
        self.grad = grad.double()
        total = lse.double() if zero is None else lse.double() + zero.double()
        # A row in which nothing may meet has lse = -inf and no gradient: exp(x - inf) = 0 says so without NaN.
        self.lse = torch.where(total == -torch.inf, torch.inf, total)

    def factor(self, part: slice, top: float, dtype: torch.dtype) -> Tensor | None:
        """grad * exp(top - lse), or None where that would overflow."""
        exponent = top - self.lse[part]
        if not exponent.max().item() <= LARGEST_EXPONENT:
            return None
        return (self.grad[part] * exponent.exp()).to(dtype)

    def softmax_(self, x_rc: Tensor, part: slice, dim: int) -> None:
        """x := grad * exp(x - lse), in place, ``dim`` being the axis that the sum ran over."""
        self.below_(x_rc, part, dim).exp_().mul_(self.grad[part].unsqueeze(dim).to(x_rc.dtype))

    def below_(self, x_rc: Tensor, part: slice, dim: int = 1) -> Tensor:
        """x := x - lse, in place."""
        lse = self.lse[part].unsqueeze(dim)
        # Subtract in two steps: the part of lse that x's type can hold, then the rest.
        coarse = lse.to(x_rc.dtype)
        rest = torch.where(lse.isfinite(), lse - coarse, 0.0)
        return x_rc.sub_(coarse).sub_(rest.to(x_rc.dtype))


def tile_entropy_gradient_(
    x_rc: Tensor, spare: Tensor, i: slice, rows: SideWeights, entropy: Tensor, grad_entropy: Tensor
) -> Tensor:
    """p_ij (g_i + h_i (row_lse_i - x_ij - entropy_i)), p_ij = exp(x_ij - row_lse_i), in place of the scores.

    Args:
        rows: the log-sum-exps and their incoming gradient g.
        entropy, grad_entropy: (n,), of all rows: the entropies and their incoming gradient h, float64.
    """
    rows.below_(x_rc, i)
    p_rc = torch.exp(x_rc, out=spare)
    coming = grad_entropy[i, None]
    level = (rows.grad[i, None] - coming * entropy[i, None]).to(x_rc.dtype)
    return x_rc.clamp_(min=NO_SHARE).mul_(-coming.to(x_rc.dtype)).add_(level).mul_(p_rc)


def tile_softmax_(
    x_rc: Tensor,
    spare: Tensor,
    i: slice,
    j: slice,
    rows: SideWeights | None,
    cols: SideWeights | None,
    *,
    bounded: bool,
) -> Tensor:
    """g_i exp(x_ij - row_lse_i) + g_j exp(x_ij - col_lse_j), in place of the scores."""
    if rows is None and cols is None:
        return x_rc.zero_()
    if bounded or x_rc.device.type == "cpu":
        top = 0.0 if bounded else x_rc.max().item()
        row = None if rows is None else rows.factor(i, top, x_rc.dtype)
        col = None if cols is None else cols.factor(j, top, x_rc.dtype)
        if math.isfinite(top) and (rows is None or row is not None) and (cols is None or col is not None):
            e_rc = (x_rc if bounded else x_rc.sub_(top)).exp_()
            if row is not None and col is not None:
                return e_rc.mul_(torch.add(row[:, None], col[None, :], out=spare))
            return e_rc.mul_(row[:, None] if row is not None else cast(Tensor, col)[None, :])
    other = spare.copy_(x_rc) if rows is not None and cols is not None else x_rc
    if rows is not None:
        rows.softmax_(x_rc, i, 1)
    if cols is not None:
        cols.softmax_(other, j, 0)
    return x_rc if other is x_rc else x_rc.add_(other)
