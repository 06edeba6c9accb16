"""The guide's scores of a tile, divergences of both softmaxes, and their gradients.

Axes: r, c rows and columns of one tile; i, j their slices. x are the scores, y those of the guide.

With e_j = exp(x_j - max x), S = sum_j e_j and likewise f_j, T of y, the divergences inside of a tile are

    kl = sum_j f_j d_j / T - log T + log S        d_j = (y_j - max y) - (x_j - max x)
    reverse_kl = -sum_j e_j d_j / S - log S + log T

The Jensen-Shannon divergence needs the log-sum-exps over all columns (``row_norm``, ``guide_norm``).
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise.kernels.spec import GradStats, Pair, PairSpec, Stats
from tilewise.kernels.torch_impl.tile_scores import TileScores
from tilewise.kernels.torch_impl.tile_softmax import NO_SHARE, SideWeights


class GuideTiles:
    """The guide of a pair, tile by tile."""

    def __init__(self, pair: Pair, spec: PairSpec) -> None:
        self.pair, self.spec = pair, spec
        guide = Pair(a=pair.guide_a, b=pair.guide_b, scale=pair.guide_scale, bias=pair.guide_bias)
        self.guide, self.how = guide, TileScores(guide, PairSpec(softcap=spec.guide_softcap))

    def scores(self, i: slice, j: slice) -> Tensor:
        """The guide's scores of one tile: (r, c)."""
        how, guide = self.how, self.guide
        y_rc = how.scaled_product(how.scaled(how.operand(guide.a[i])), how.operand(guide.b[j]))
        return how.finish_(y_rc, None if guide.bias is None else guide.bias[j])

    def above_limit(self, i: slice, j: slice) -> Tensor:
        """Which pairs of one tile the guide excludes, unless they are positive: (r, c) bool."""
        return self.scores(i, j) > self.pair.row_limit[i, None]

    def stats(self, x_rc: Tensor, i: slice, j: slice) -> Stats:
        """The statistics of one tile except the positive's: (r,) each, float64, without shifts."""
        spec, found = self.spec, {}
        if spec.hot:
            found["row_hot_lse"] = torch.logsumexp(x_rc * spec.hot, 1).double()
        y_rc = self.scores(i, j)
        x, e, log_s = _exponentials(x_rc)
        if spec.row_entropy:
            found["row_entropy"] = torch.where(log_s == -torch.inf, 0.0, log_s - _mean(e, x[0], log_s))
        y, f, log_t = _exponentials(y_rc)
        found["row_lse"], found["guide_lse"] = log_s + x[1].double(), log_t + y[1].double()
        if spec.guide == "kl":
            found["row_kl"] = _inside(f, y[0], x[0], log_t, log_s)
        elif spec.guide == "reverse_kl":
            found["row_reverse_kl"] = _inside(e, x[0], y[0], log_s, log_t)
        else:
            del x, e, y, f
            found |= self._jsd(x_rc, y_rc, i)
        return Stats(**found)

    def _jsd(self, x_rc: Tensor, y_rc: Tensor, i: slice) -> dict[str, Tensor]:
        """This tile's part of the Jensen-Shannon divergence. Both scores are overwritten."""
        pair, beta = self.pair, self.spec.beta
        one = torch.ones_like(pair.row_norm)
        log_p = SideWeights(pair.row_norm, pair.row_shift, one).log_softmax_(x_rc, i)
        log_q = SideWeights(pair.guide_norm, None, one).log_softmax_(y_rc, i)
        over_p, over_q = over_mixture(log_p, log_q, beta)
        mix_kl = _times(log_p.exp_(), over_p).sum(1, dtype=torch.float64)
        other = _times(log_q.exp_(), over_q).sum(1, dtype=torch.float64)
        return {"row_mix_kl": mix_kl, "row_jsd": beta * other + (1.0 - beta) * mix_kl}


class GuideWeights:
    """Gradients of the statistics divided by ``size``, and the tiles of G computed from them.

    G = p (v + h (lse - x)) + k (p - q) + r p (log(p / q) - row_reverse_kl)
        + (1 - beta) s p (log(p / m) - row_mix_kl) + hot t exp(hot x - row_hot_lse)

    with h, k, r, s and t the gradients of the entropy, both divergences, the Jensen-Shannon divergence and the hot
    log-sum-exp, and v = grad_lse - h row_entropy.
    """

    def __init__(self, pair: Pair, stats: Stats, grad: GradStats, size: Tensor, spec: PairSpec) -> None:
        self.spec, self.guide, self.stats = spec, GuideTiles(pair, spec), stats
        self.grad = GradStats(**{name: v if v is None else v.double() / size for name, v in vars(grad).items()})
        value = torch.zeros_like(stats.row_lse, dtype=torch.float64)
        if self.grad.row_lse is not None:
            value = value + self.grad.row_lse
        if self.grad.row_entropy is not None:
            value = value - self.grad.row_entropy * stats.row_entropy
        self.p = SideWeights(stats.row_lse, pair.row_shift, value)
        self.q = SideWeights(stats.guide_lse, None, value)
        self.hot: SideWeights | None = None
        if self.grad.row_hot_lse is not None:
            shift = None if pair.row_shift is None else spec.hot * pair.row_shift
            self.hot = SideWeights(stats.row_hot_lse, shift, spec.hot * self.grad.row_hot_lse)

    def gradient_(self, x_rc: Tensor, i: slice, j: slice) -> Tensor:
        """The gradient of the scores, in place of the scores."""
        grad, stats = self.grad, self.stats

        def column(values: Tensor) -> Tensor:
            return values[i, None].to(x_rc.dtype)

        hot_rc = None if self.hot is None else self.hot.softmax_(x_rc * self.spec.hot, i, 1)
        log_p = self.p.log_softmax_(x_rc, i)
        log_q = self.q.log_softmax_(self.guide.scores(i, j), i)
        p_rc = log_p.exp()
        g_rc = p_rc * column(self.p.grad)
        if grad.row_entropy is not None:
            g_rc.sub_(_times(p_rc, log_p) * column(grad.row_entropy))
        if grad.row_kl is not None:
            g_rc.addcmul_(p_rc - log_q.exp(), column(grad.row_kl))
        if grad.row_reverse_kl is not None:
            g_rc.addcmul_(_times(p_rc, log_p - log_q - column(stats.row_reverse_kl)), column(grad.row_reverse_kl))
        if grad.row_jsd is not None:
            apart, _ = over_mixture(log_p, log_q, self.spec.beta)
            apart.sub_(column(stats.row_mix_kl))
            g_rc.addcmul_(_times(p_rc, apart), column((1.0 - self.spec.beta) * grad.row_jsd))
        if hot_rc is not None:
            g_rc.add_(hot_rc)
        return x_rc.copy_(g_rc)


def over_mixture(log_p: Tensor, log_q: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """log(p / m) and log(q / m), m = (1 - beta) p + beta q.

    With h the larger of p and q, and d = log q - log p:

        m / h = 1 + s expm1(-|d|) = (1 - s) + s exp(-|d|)     s is the share of the other one in m: beta if p is larger

    The first form keeps the digits if p is close to q, the second one if they are far apart and s is close to 1.
    Only differences of logarithms occur, so large logarithms lose no digits.
    """
    d = log_q - log_p
    share = torch.full_like(d, beta).masked_fill_(d > 0, 1.0 - beta)
    rest = torch.full_like(d, 1.0 - beta).masked_fill_(d > 0, beta)
    apart = d.abs().neg_()
    far = rest.addcmul_(share, apart.exp()).log_()
    larger = torch.where(apart < -1.0, far, apart.expm1_().mul_(share).log1p_()).neg_()
    return larger - d.clamp(min=0.0), larger.add_(d.clamp_(max=0.0))


def _exponentials(x_rc: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor, Tensor]:
    """((x - max, max), exp(x - max), the log of its sums): (r, c) or (r,)."""
    top = x_rc.amax(1)
    shift = torch.where(top == -torch.inf, 0.0, top)
    below = x_rc - shift[:, None]
    e_rc = below.exp()
    return (below, shift), e_rc, e_rc.sum(1).double().log()


def _times(weight: Tensor, values: Tensor) -> Tensor:
    """weight * values, and 0 where the weight is 0 and a value is infinite."""
    return torch.where(weight == 0.0, 0.0, weight * values)


def _mean(e_rc: Tensor, values: Tensor, log_sum: Tensor) -> Tensor:
    """sum_j e_j values_j / sum_j e_j."""
    return _times(e_rc, values.clamp(min=NO_SHARE)).sum(1).double() / log_sum.exp()


def _inside(e_rc: Tensor, of: Tensor, other: Tensor, log_sum: Tensor, log_other: Tensor) -> Tensor:
    """The divergence inside of a tile: of exp(of) from exp(other), both relative to their largest score.

    It is infinite if ``other`` is -inf where ``of`` is not, even if exp(of) underflows: otherwise it would depend on
    the largest score of the tile.
    """
    gap = of - other
    total = torch.where(gap == torch.inf, gap, _times(e_rc, gap)).sum(1).double() / log_sum.exp()
    apart = torch.where(total == torch.inf, 0.0, log_other - log_sum)
    return torch.where(log_sum == -torch.inf, 0.0, total + apart)
