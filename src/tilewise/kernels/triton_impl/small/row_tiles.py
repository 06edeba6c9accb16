"""What the kernels of small batches do with their rows: sums over all columns, and then G. See `kernels`.

Axes: n rows, m columns; R, C rows and columns of one tile.
"""

import triton
import triton.language as tl

from tilewise.kernels.triton_impl.bits import ENTROPY, ROW_BIAS, SOFTCAP, TOP
from tilewise.kernels.triton_impl.primitives import LN2, LOG2E, positives, score_tile, with_rank

# Values of LOSS
STATS = tl.constexpr(0)  # the softmax of each row, without G
SOFTMAX = tl.constexpr(1)
SIGMOID = tl.constexpr(2)


@triton.jit
def factor_of(scale, number):
    """The factor of the scores: the number that ``scale`` points to, or without it ``number``."""
    return tl.load(scale).to(tl.float32) if scale is not None else number


@triton.jit
def safe(top):
    """The shift of exponentials: 0 where all scores are -inf."""
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def cap_factor(x, softcap):
    """The derivative of the soft cap, from capped scores in units of log2; 0 for an excluded pair."""
    t = x * (1.0 / LOG2E) / softcap
    return tl.where(x == float("-inf"), 0.0, 1.0 - t * t)


@triton.jit
def loaded_tile(at, rows, cols, s, col_step, SCORE: tl.constexpr, POSITIVE: tl.constexpr):
    """Products, scores, positives, and which pairs exist, of one tile; ``at``: where its rows start, (R, 1)."""
    here = (rows < s.n)[:, None] & (cols < s.m)[None, :]
    acc = tl.load(at + cols.to(tl.int64)[None, :] * col_step, mask=here, other=0.0)
    v = score_tile(acc, rows, cols, s, SCORE, POSITIVE)
    if ROW_BIAS & SCORE:
        v += tl.load(s.bias + rows, mask=rows < s.n, other=0.0)[:, None] * LOG2E
    if POSITIVE == 0:
        hit = here & (cols < 0)[None, :]
    else:
        hit = here & positives(rows, cols, s, SCORE, POSITIVE)
    return acc, v, hit, here


@triton.jit
def row_sums(at, rows, s, col_step, R: tl.constexpr, C: tl.constexpr, SCORE: tl.constexpr, POSITIVE: tl.constexpr,
             LOSS: tl.constexpr, MORE: tl.constexpr):  # fmt: skip
    """Of each row: the largest score, the sum of exp(score - largest) or of softplus, scores and number of positives;

    and with the bits of MORE the sum of exp(score - largest) (score - largest), and the largest score's rank and column.
    """
    top = tl.full((R,), float("-inf"), tl.float32)
    total, moment = tl.zeros((R,), tl.float32), tl.zeros((R,), tl.float32)
    at_positive, count = tl.zeros((R,), tl.float32), tl.zeros((R,), tl.float32)
    best, best_col = tl.full((R,), float("-inf"), tl.float32), tl.zeros((R,), tl.int32)
    for start in range(0, s.m, C):
        cols = start + tl.arange(0, C)
        _acc, v, hit, here = loaded_tile(at, rows, cols, s, col_step, SCORE, POSITIVE)
        count += tl.sum(hit.to(tl.float32), 1)
        if SIGMOID == LOSS:
            v = tl.where(hit, -v, v)
            plus = tl.maximum(v, 0.0) + tl.log2(1.0 + tl.exp2(-tl.abs(v)))
            total += tl.sum(tl.where(here, plus, 0.0), 1)
        else:
            at_positive += tl.sum(tl.where(hit, v, 0.0), 1)
            high = tl.maximum(top, tl.max(v, 1))
            less, e = tl.exp2(top - safe(high)), tl.exp2(v - safe(high)[:, None])
            if ENTROPY & MORE:
                moment = less * (moment + total * tl.where(total > 0.0, top - high, 0.0))
                moment += tl.sum(e * tl.where(e > 0.0, v - high[:, None], 0.0), 1)
            total = total * less + tl.sum(e, 1)
            top = high
        if TOP & MORE:
            rank = with_rank(v)
            first = tl.max(rank, 1)
            col = tl.min(tl.where(rank == first[:, None], cols[None, :], s.m), 1)  # the lowest of equal ones
            best, best_col = tl.maximum(best, first), tl.where(first > best, col, best_col)
    return top, total, at_positive, count, moment, best, best_col


@triton.jit
def write_gradient(at, rows, s, col_step, top, total, f, h, entropy, times, g, dot, bias_dot,
                   R: tl.constexpr, C: tl.constexpr, SCORE: tl.constexpr, POSITIVE: tl.constexpr, LOSS: tl.constexpr):  # fmt: skip
    """G times ``times``, and the rows' sums of G: with the products for the scale, and alone for one bias.

    G_ij = exp(l_ij) (f_i - entropy_i l_ij) - h_i [positive], where l is the logarithmic softmax; f_i sigmoid(+-x_ij)
    for a sigmoid loss. ``top`` and ``total`` are those of `row_sums`; without ``entropy`` it is 0.
    """
    ok = rows < s.n
    none = (f == 0.0) & (h == 0.0)
    if entropy is not None:
        none = none & (entropy == 0.0)
    for_scale, for_bias = tl.zeros((R,), tl.float32), tl.zeros((R,), tl.float32)
    for start in range(0, s.m, C):
        cols = start + tl.arange(0, C)
        acc, v, hit, here = loaded_tile(at, rows, cols, s, col_step, SCORE, POSITIVE)
        if SIGMOID == LOSS:
            signed = tl.where(hit, -v, v)
            e = tl.exp2(-tl.abs(signed))
            p = tl.where(signed > 0.0, 1.0, e) / (1.0 + e) * f[:, None]
            grad = tl.where(hit, -p, p)
        else:
            less = v - safe(top)[:, None]
            if entropy is not None:
                log = tl.where(v == float("-inf"), 0.0, less - tl.log2(total)[:, None]) * LN2
                each = (f[:, None] - entropy[:, None] * log) / total[:, None]
            else:
                each = (f / total)[:, None]
            grad = tl.exp2(less) * each - tl.where(hit, h[:, None], 0.0)
        if SOFTCAP & SCORE:
            grad = grad * cap_factor(v, s.softcap)
        grad = tl.where(none[:, None], 0.0, grad)
        for_scale += tl.sum(tl.where(here, grad * acc, 0.0), 1)
        for_bias += tl.sum(tl.where(here, grad, 0.0), 1)
        grad = grad * times
        tl.store(g + rows.to(tl.int64)[:, None] * s.m + cols[None, :], grad.to(g.dtype.element_ty), mask=here)
    if dot is not None:
        tl.store(dot + rows, for_scale, mask=ok)
    if bias_dot is not None:
        tl.store(bias_dot + rows, for_bias, mask=ok)
