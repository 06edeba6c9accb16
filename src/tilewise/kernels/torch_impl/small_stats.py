"""Statistics of a small batch from the scores of all pairs at once, and their gradients from the scores again.

    l = log_softmax(x),  p = exp(l)              for each row; with ``col_lse`` also for each column
    G = g_lse p + g_pos [positive] + g_col p_col + g_entropy p (-l - entropy) + 2 g_sum_sq (p^2 / sum p^2 - p) + ...

`Backend.backward` has the equation. Axes: n rows of a, m rows of b, K picked columns of each row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise.kernels.backend import SmallKey
from tilewise.kernels.precision import matmul_precision
from tilewise.kernels.spec import Grads, GradStats, Needs, Pair, PairShape, PairSpec, Stats, wanted_names
from tilewise.kernels.torch_impl.small_scores import Block, score_block

LOWEST = -1e30  # in place of -inf


def why_not_stats(shape: PairShape, spec: PairSpec) -> str | None:
    """Why these statistics cannot be computed from one block of scores, or None."""
    if spec.divergence:
        return "it has divergences from a guide"
    if spec.row_picked and shape.device.type == "cuda":
        return "a GPU would add gradients of a column that a row picks twice in any order"
    if spec.positive == "one" and not shape.has_row_key and shape.rows > shape.cols:
        return "some rows have no positive"
    if spec.col_lse and (spec.positive != "one" or shape.has_row_key):
        return "columns have a log-sum-exp, and their positives are not on the diagonal"
    return None


class TorchStatsJob:
    """See `SmallStatsJob`. Its methods run with gradients switched off, in an autograd function or an operator."""

    def __init__(self, key: SmallKey) -> None:
        self.key, self.names = key, wanted_names(key.spec)

    def forward(self, pair: Pair, *, own_shift: bool) -> Stats:
        """The statistics."""
        with matmul_precision(self.key.precision):
            return statistics(pair, self.key.spec, own_shift)

    def backward(self, pair: Pair, grad: GradStats, needs: Needs) -> Grads:
        """The gradients of the leaves."""
        spec = self.key.spec
        with matmul_precision(self.key.precision):
            block = score_block(pair, spec)
            return block.gradients(score_gradient(block, pair, grad, spec), 1.0, needs, spec)


def statistics(pair: Pair, spec: PairSpec, own_shift: bool) -> Stats:
    """The statistics, relative to the shifts of the pair, or with ``own_shift`` to the score of the positive."""
    block, found = score_block(pair, spec), Stats()
    x_nm, positives = block.x_nm, block.positives
    if spec.softplus:
        positives.flip_(x_nm)
        return Stats(row_softplus=torch.logaddexp(x_nm, x_nm.new_zeros(())).sum(1))
    shift, col_shift = pair.row_shift, pair.col_shift
    pos = None
    if spec.has_positive_scores:
        pos, count = positives.values(x_nm), positives.number(x_nm.dtype)
        if own_shift:
            shift = pos.clone() if positives.place is None else pos
            if pair.bias is not None:  # a bias of -inf excludes the positive
                shift = torch.where(shift == -torch.inf, 0.0, shift)
            found.row_shift = col_shift = shift
        if shift is None:
            pos = pos.clone()
        else:  # the rounding of a mean over several large scores must not stay in the difference
            pos = pos - shift if positives.mask is None else positives.values(x_nm - shift[:, None])
        found.row_pos, found.num_positives = pos if count is None else pos * count, count
    if spec.row_sum:
        found.row_sum = torch.mv(x_nm, pair.col_weight.to(x_nm.dtype))
    if spec.col_lse:
        found.col_lse = torch.logsumexp(x_nm if col_shift is None else x_nm - col_shift, 0)
    if spec.row_top:
        top, found.row_top_col = x_nm.max(1)  # the first of equal scores
        found.row_top = top if shift is None else top - shift
    if spec.row_picked:
        place, inside = picks_of(pair)
        picked = x_nm.gather(1, place)
        found.row_picked = torch.where(inside, picked if shift is None else picked - shift[:, None], 0.0)
        if spec.skip_picked:
            exclude_picks_(x_nm, pair)
    if spec.row_lse:
        row_softmax_into(found, x_nm, pos, shift, block, pair, spec)
    return found


def row_softmax_into(
    found: Stats, x_nm: Tensor, pos: Tensor | None, shift: Tensor | None, block: Block, pair: Pair, spec: PairSpec
) -> None:
    """Add the statistics of the softmax of each row; ``pos``: the scores of the positives, less the shift."""
    # Where a positive has a finite score, its logarithmic probability gives the log-sum-exp.
    from_positive = spec.positive == "one" and pair.bias is None and not spec.skip_picked
    l_nm = torch.log_softmax(x_nm, 1) if from_positive or spec.row_moments else x_nm
    if from_positive and pos is not None:
        found.row_lse = pos - block.positives.values(l_nm)
    else:
        found.row_lse = torch.logsumexp(x_nm if shift is None else x_nm - shift[:, None], 1)
    if spec.row_entropy:
        found.row_entropy = l_nm.exp().mul_(l_nm.clamp_(min=LOWEST)).sum(1).neg_()
    if spec.row_sum_sq:
        found.row_sum_sq = torch.logsumexp(l_nm.mul_(2.0), 1)


def score_gradient(block: Block, pair: Pair, grad: GradStats, spec: PairSpec) -> Tensor:
    """G, from the gradients of the statistics."""
    x_nm, positives = block.x_nm, block.positives
    if spec.softplus:
        positives.flip_(x_nm)
        g_nm = x_nm.sigmoid_()
        positives.flip_(g_nm)
        return g_nm.mul_(grad.row_softplus[:, None])
    by_col = None if grad.col_lse is None else torch.softmax(x_nm, 0).mul_(grad.col_lse)
    if spec.skip_picked:
        exclude_picks_(x_nm, pair)
    # A row whose pairs are all excluded has the log-sum-exp -inf and no gradient.
    excludes = spec.mask_self or pair.bias is not None or pair.row_skip is not None or spec.guide == "mask"
    may_be_empty = spec.positive != "one" and excludes
    empty = x_nm.amax(1) == -torch.inf if may_be_empty or spec.skip_picked else None
    if grad.row_entropy is not None or grad.row_sum_sq is not None:
        g_nm = moment_gradient(torch.log_softmax(x_nm, 1), grad)
    elif grad.row_lse is not None:
        g_nm = torch.softmax(x_nm, 1).mul_(grad.row_lse[:, None])
    else:
        g_nm = torch.zeros_like(x_nm)
    if empty is not None:
        g_nm.masked_fill_(empty[:, None], 0.0)
    if by_col is not None:
        g_nm.add_(by_col)
    if grad.row_pos is not None:
        count = positives.number(g_nm.dtype)
        positives.subtract_(g_nm, grad.row_pos.neg() if count is None else grad.row_pos * -count)
    if grad.row_sum is not None:
        g_nm.addr_(grad.row_sum, pair.col_weight.to(g_nm.dtype))
    if grad.row_picked is not None:
        place, inside = picks_of(pair)
        g_nm.scatter_add_(1, place, torch.where(inside, grad.row_picked, 0.0))
    return g_nm


def moment_gradient(l_nm: Tensor, grad: GradStats) -> Tensor:
    """The terms of G of log-sum-exp, entropy and sum of squares, from the logarithmic softmax, which it overwrites."""
    p_nm = l_nm.exp()
    weight: Tensor | None = grad.row_lse
    square_nm: Tensor | None = None
    if grad.row_sum_sq is not None:
        twice, square_nm = 2.0 * grad.row_sum_sq, p_nm.square()
        square_nm.mul_((twice / square_nm.sum(1))[:, None])
        weight = -twice if weight is None else weight - twice
    if grad.row_entropy is not None:
        l_nm.clamp_(min=LOWEST)  # 0 * -inf is NaN
        change = (p_nm * l_nm).sum(1).mul_(grad.row_entropy)  # the entropy is minus this sum
        weight = change if weight is None else weight + change
        p_nm.mul_(l_nm.mul_(grad.row_entropy.neg()[:, None]).add_(weight[:, None]))
    else:
        assert weight is not None
        p_nm.mul_(weight[:, None])
    return p_nm if square_nm is None else p_nm.add_(square_nm)


def picks_of(pair: Pair) -> tuple[Tensor, Tensor]:
    """The picked columns, and whether they are there: negative ones are none."""
    inside = (pair.pick >= 0) & (pair.pick < pair.b.shape[0])
    return torch.where(inside, pair.pick, 0), inside


def exclude_picks_(x_nm: Tensor, pair: Pair) -> None:
    """Set the scores of the picked columns to -inf."""
    place, inside = picks_of(pair)
    x_nm.scatter_add_(1, place, torch.where(inside, -torch.inf, 0.0).to(x_nm.dtype))
