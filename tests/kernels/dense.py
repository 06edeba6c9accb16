"""The oracle: stores all scores and follows the definitions.

Gradients come from autograd. The type of the computation is that of the inputs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewise.kernels.spec import Pair, PairSpec, Stats


def dense_scores(pair: Pair, spec: PairSpec) -> tuple[Tensor, Tensor]:
    """All scores (n, m), -inf for an excluded pair, and the mask of the positives: (n, m) bool."""
    x_nm = pair.scale * (pair.a @ pair.b.T)
    if pair.bias is not None:
        x_nm = x_nm + pair.bias
    if spec.softcap:
        x_nm = spec.softcap * torch.tanh(x_nm / spec.softcap)
    if pair.row_scale is not None:
        x_nm = pair.row_scale[:, None] * x_nm
    rows = torch.arange(x_nm.shape[0], device=x_nm.device)[:, None] + pair.row_start
    cols = torch.arange(x_nm.shape[1], device=x_nm.device)[None, :] + pair.col_start
    positive = torch.zeros(x_nm.shape, dtype=torch.bool, device=x_nm.device)
    if spec.positive == "one":
        positive = (rows if pair.row_key is None else pair.row_key[:, None]) == cols
    elif pair.row_key is not None and pair.col_key is not None and spec.positive == "many":
        positive = pair.row_key[:, None] == pair.col_key[None, :]
    if pair.row_skip is not None and pair.col_skip is not None:
        excluded = (pair.row_skip[:, None] == pair.col_skip[None, :]) & ~positive
        x_nm = x_nm.masked_fill(excluded, -torch.inf)
    if spec.mask_self:
        x_nm = x_nm.masked_fill(rows == cols, -torch.inf)
        positive = positive & (rows != cols)
    if spec.guide == "mask":
        assert pair.row_limit is not None
        excluded = (guide_scores(pair, spec) > pair.row_limit[:, None]) & ~positive
        x_nm = x_nm.masked_fill(excluded, -torch.inf)
    return x_nm, positive


def guide_scores(pair: Pair, spec: PairSpec) -> Tensor:
    """All scores of the guide: (n, m)."""
    assert pair.guide_a is not None
    assert pair.guide_b is not None
    assert pair.guide_scale is not None
    y_nm = pair.guide_scale * (pair.guide_a @ pair.guide_b.T)
    if pair.guide_bias is not None:
        y_nm = y_nm + pair.guide_bias
    return spec.guide_softcap * torch.tanh(y_nm / spec.guide_softcap) if spec.guide_softcap else y_nm


def dense_stats(pair: Pair, spec: PairSpec) -> Stats:
    """The statistics of `Stats`, computed by their definitions."""
    x_nm, positive = dense_scores(pair, spec)
    row_shift = 0 if pair.row_shift is None else pair.row_shift[:, None]
    col_shift = 0 if pair.col_shift is None else pair.col_shift[None, :]
    row_pos = torch.where(positive, x_nm - row_shift, torch.zeros_like(x_nm)).sum(1)
    signed = torch.where(positive, -x_nm, x_nm)
    has_pos = spec.positive != "none" and not spec.softplus
    top = F.pad(x_nm, (0, int(x_nm.shape[1] == 0)), value=-torch.inf).max(1) if spec.row_top else None
    return Stats(
        row_lse=torch.logsumexp(left_scores(x_nm, pair, spec) - row_shift, 1) if spec.row_lse else None,
        row_pos=row_pos if has_pos else None,
        num_positives=positive.sum(1).to(x_nm.dtype) if has_pos else None,
        row_softplus=-F.logsigmoid(-signed).sum(1) if spec.softplus else None,
        row_sum=None if pair.col_weight is None else x_nm @ pair.col_weight.to(x_nm.dtype),
        row_entropy=_entropy(x_nm) if spec.row_entropy else None,
        row_sum_sq=_sum_sq(x_nm) if spec.row_sum_sq else None,
        row_top=None if top is None else (top.values - (0 if pair.row_shift is None else pair.row_shift)).detach(),
        row_top_col=None if top is None else top.indices + pair.col_start,
        row_picked=_picked(x_nm - row_shift, pair) if spec.row_picked else None,
        col_lse=torch.logsumexp(x_nm - col_shift, 0) if spec.col_lse else None,
        row_hot_lse=torch.logsumexp(spec.hot * (x_nm - row_shift), 1) if spec.hot else None,
        **(_divergences(x_nm, guide_scores(pair, spec), spec) if spec.divergence else {}),
    )


def _divergences(x_nm: Tensor, y_nm: Tensor, spec: PairSpec) -> dict[str, Tensor]:
    """Divergences of q = softmax(y) from p = softmax(x), by their definitions."""
    log_p, log_q = torch.log_softmax(x_nm, 1), torch.log_softmax(y_nm, 1)
    found = {"guide_lse": torch.logsumexp(y_nm, 1)}
    if spec.guide == "kl":
        found["row_kl"] = _kl(log_q, log_p)
    elif spec.guide == "reverse_kl":
        found["row_reverse_kl"] = _kl(log_p, log_q)
    else:
        p, q = (1.0 - spec.beta) * log_p.exp(), spec.beta * log_q.exp()
        log_m = (p + q).log()
        found["row_mix_kl"] = _kl(log_p, log_m)
        found["row_jsd"] = spec.beta * _kl(log_q, log_m) + (1.0 - spec.beta) * found["row_mix_kl"]
    return found


def _kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """sum_j p_ij log(p_ij / q_ij), over the columns with p_ij > 0: (n,)."""
    return torch.where(log_p == -torch.inf, 0.0, log_p.exp() * (log_p - log_q)).sum(1)


def _picked(x_nm: Tensor, pair: Pair) -> Tensor:
    """x_ij of each picked column j: (n, K), 0 for a column that is not in the block."""
    assert pair.pick is not None
    place = pair.pick - pair.col_start
    inside = (pair.pick >= 0) & (place >= 0) & (place < x_nm.shape[1])
    x_nm = F.pad(x_nm, (0, int(x_nm.shape[1] == 0)))
    return torch.where(inside, x_nm.gather(1, place.clamp(0, x_nm.shape[1] - 1)), 0.0)


def left_scores(x_nm: Tensor, pair: Pair, spec: PairSpec) -> Tensor:
    """The scores, with ``skip_picked`` -inf in the picked columns."""
    if not spec.skip_picked:
        return x_nm
    assert pair.pick is not None
    cols = torch.arange(x_nm.shape[1], device=x_nm.device) + pair.col_start
    return x_nm.masked_fill((pair.pick[:, :, None] == cols).any(1), -torch.inf)


def _entropy(x_nm: Tensor) -> Tensor:
    """-sum_j p_ij log p_ij of p = softmax(x): (n,), 0 for a row whose pairs are all excluded."""
    empty = (x_nm == -torch.inf).all(1, keepdim=True)
    log_p = torch.log_softmax(x_nm.masked_fill(empty, 0.0), 1)
    terms = log_p.exp() * torch.where(log_p == -torch.inf, 0.0, log_p)
    return -terms.masked_fill(empty, 0.0).sum(1)


def _sum_sq(x_nm: Tensor) -> Tensor:
    """log sum_j p_ij^2 of p = softmax(x): (n,), 0 for a row whose pairs are all excluded."""
    empty = (x_nm == -torch.inf).all(1, keepdim=True)
    log_p = torch.log_softmax(x_nm.masked_fill(empty, 0.0), 1)
    return torch.logsumexp(2.0 * log_p, 1).masked_fill(empty[:, 0], 0.0)
