"""Merge row statistics of several blocks of columns, for statistics that are not sums.

``folded_*`` takes the statistics of all blocks, (blocks, n) each; ``merged_*`` those of two blocks, (n,) each.
"""

from __future__ import annotations

import torch
from torch import Tensor


def folded_entropy(lse: Tensor, entropy: Tensor) -> tuple[Tensor, Tensor]:
    """The log-sum-exp and the entropy over all blocks, given those of each block k: (blocks, n).

    H = sum_k w_k (H_k + lse - lse_k),   w_k = exp(lse_k - lse).

    No term is negative, so nothing cancels.
    """
    total = torch.logsumexp(lse, 0)
    gap = total - lse  # -log w_k
    return total, torch.where(lse == -torch.inf, 0.0, torch.exp(-gap) * (entropy + gap)).sum(0)


def merged_entropy(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """`folded_entropy` of two blocks, each given as (log-sum-exp, entropy)."""
    return folded_entropy(*map(torch.stack, zip(one, other, strict=True)))


def merged_sum_sq(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The log-sum-exp and s = log sum_j p_j^2 over two blocks, each given as (log-sum-exp, s):

    s = log(w_1^2 exp(s_1) + w_2^2 exp(s_2)),   w_k = exp(lse_k - lse);   0, which is finite, if both are empty.
    """
    lse = torch.logaddexp(one[0], other[0])

    def share(block_lse: Tensor, log_sum_sq: Tensor) -> Tensor:
        return torch.where(block_lse == -torch.inf, -torch.inf, log_sum_sq + 2.0 * (block_lse - lse))

    return lse, torch.where(lse == -torch.inf, 0.0, torch.logaddexp(share(*one), share(*other)))


def merged_top(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The larger of two scores and its column, each given as (score, column); of equal ones the lower column.

    NaN is larger than every number, as in `torch.argmax`.
    """
    (x, i), (y, j) = one, other
    same = (x == y) | (x.isnan() & y.isnan())
    col = torch.where(same, torch.minimum(i, j), torch.where((y > x) | (y.isnan() & ~x.isnan()), j, i))
    return torch.maximum(x, y), col


def folded_kl(lse_p: Tensor, lse_q: Tensor, kl: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Both log-sum-exps and K = KL(q || p) over all blocks, given those of each block k: (blocks, n).

    K = sum_k w_k (K_k + log(w_k / v_k)),   v_k = exp(lse_p_k - lse_p),  w_k = exp(lse_q_k - lse_q).

    K_k is the divergence inside of a block, of probabilities that sum to 1 there: 0 if q has no column there, and
    infinite if q has a column there that p has not. K is then infinite too, however small w_k is.
    """
    p, q = torch.logsumexp(lse_p, 0), torch.logsumexp(lse_q, 0)
    log_w = lse_q - q
    gap = kl + (log_w - torch.where(lse_p == p, 0.0, lse_p - p))  # both are -inf until p has a column
    shares = torch.where(gap == torch.inf, gap, torch.exp(log_w) * gap)
    return p, q, torch.where(lse_q == -torch.inf, 0.0, shares).sum(0)


def merged_kl(one: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """`folded_kl` of two blocks, each given as (lse of p, lse of q, K)."""
    return folded_kl(*map(torch.stack, zip(one, other, strict=True)))
