"""The only positive of each row: its score, and its entry of G. Also given columns of each row, several for one row.

A block of rows is multiplied by the gathered columns of their positives, with the same arithmetic as a tile. The diagonal
of that product holds the scores. n / P small products take the place of a search in every tile.

With POSITIVE = PICKED, each row has ``picks`` columns. Then ``n`` counts entries, of which entry ``at`` belongs to the
row at // picks, and ``row_key``, ``row_pos``, ``own`` and ``grad_pos`` have one number for each entry.
"""

import triton
import triton.language as tl

from tilewise.kernels.triton_impl.bits import (
    BIAS,
    COLS,
    MIRROR,
    ONE_BIAS,
    PICKED,
    ROW_SUM,
    ROWS,
    SOFTCAP,
    SOFTPLUS,
)
from tilewise.kernels.triton_impl.launch import TILE_NUMBERS, kernel
from tilewise.kernels.triton_impl.primitives import LN2, LOG2E, own_column, row_scales, row_stride, shifts, tanh
from tilewise.kernels.triton_impl.statistics import GradRows, softmax_term
from tilewise.kernels.triton_impl.tf32 import operand
from tilewise.kernels.triton_impl.two_pass.backward_kernels import (
    OPTIONAL_TERMS,
    cap_slope,
    nonzero_factor,
    side,
    sigmoid,
)


@triton.jit
def entries(n, picks, POSITIVE: tl.constexpr, P: tl.constexpr):
    """The entries of this program, their rows, and which of them exist."""
    at = tl.program_id(0) * P + tl.arange(0, P)
    rows = at
    if PICKED == POSITIVE:
        at = tl.program_id(0).to(tl.int64) * P + tl.arange(0, P)
        rows = at // picks
    return at, rows, at < n


@triton.jit
def own_scores(a, b, a_stride, b_stride, rows, ok, key, scale, bias, softcap, row_scale,
               D: tl.constexpr, SCORE: tl.constexpr, P: tl.constexpr, K: tl.constexpr, EXACT: tl.constexpr):  # fmt: skip
    """The score of each row with its own column, in units of log2, undefined where key is -1; and the largest score."""
    acc = tl.zeros((P, P), dtype=tl.float32)
    row_at = a + rows.to(tl.int64)[:, None] * row_stride(a, a_stride)
    col_at = b + tl.maximum(key, 0).to(tl.int64)[:, None] * row_stride(b, b_stride)
    for k in range(0, (D + K - 1) // K):
        at = k * K + tl.arange(0, K)
        left = tl.load(row_at + at[None, :], mask=ok[:, None] & (at < D)[None, :], other=0.0)
        right = tl.load(col_at + at[None, :], mask=(key >= 0)[:, None] & (at < D)[None, :], other=0.0)
        acc = tl.dot(operand(left, EXACT), operand(right, EXACT).T, acc, input_precision=EXACT)
    place = tl.arange(0, P)
    if row_scale is not None:
        each = row_scales(row_scale, rows, ok)
        sample = acc * scale
        if SOFTCAP & SCORE:
            sample = tl.minimum(sample, softcap)
        peak = tl.max(tl.max(sample * each[:, None], 1), 0)
    else:
        peak = tl.max(tl.max(acc * scale, 1), 0)
    x = tl.sum(tl.where(place[:, None] == place[None, :], acc, 0.0), 1) * scale
    if BIAS & SCORE:
        x += tl.load(bias + key, mask=key >= 0, other=0.0)
    if ONE_BIAS & SCORE:
        x += tl.load(bias)
    if SOFTCAP & SCORE:
        x = softcap * tanh(x / softcap)
        if row_scale is None:
            peak = tl.minimum(peak, softcap)
    if row_scale is not None:
        x = x * each
    return x * LOG2E, peak * LOG2E


@kernel(
    optional=("bias", "row_key", "row_shift", "row_scale", "num_positives", "peaks", "needs_repair"),
    dynamic=(*TILE_NUMBERS, "a_stride", "b_stride", "picks"),
)
def positive_kernel(a, b, scale, bias, softcap, row_key, row_shift, row_scale,  # scores, keys, shift, weights
                    row_pos, num_positives, peaks, needs_repair,  # outputs
                    a_stride, b_stride, n, m, first, ahead, picks,
                    D: tl.constexpr, SCORE: tl.constexpr, POSITIVE: tl.constexpr, P: tl.constexpr, K: tl.constexpr,
                    EXACT: tl.constexpr):  # fmt: skip
    """Score of the positive, less the shift of the row, and the number of positives; 0 and 0 without one.

    Each program computes P * P scores. It stores the largest of them (in log2) in ``peaks``: a sample of all scores. It
    runs before all tiles, so it also clears the repair flag.
    """
    if needs_repair is not None:
        tl.store(needs_repair, 0)
    at, rows, here = entries(n, picks, POSITIVE, P)
    key = own_column(at, n, m, row_key, first, ahead, SCORE, POSITIVE)
    x, peak = own_scores(a, b, a_stride, b_stride, rows, here, key, tl.load(scale), bias, softcap, row_scale,
                         D, SCORE, P, K, EXACT)  # fmt: skip
    if peaks is not None:
        tl.store(peaks + tl.program_id(0), peak)
    x -= shifts(row_shift, rows, here)
    tl.store(row_pos + at, tl.where(key >= 0, x * LN2, 0.0), mask=here)
    if num_positives is not None:
        tl.store(num_positives + at, tl.where(key >= 0, 1.0, 0.0), mask=here)


@kernel(optional=(*OPTIONAL_TERMS, "row_key", "row_factor"), dynamic=(*TILE_NUMBERS, "g_stride", "picks"))
def positive_gradient_kernel(own, softcap, row_key, row_shift, col_shift, col_weight, row_scale,  # scores, keys, shifts, weights
                             row_lse, col_lse,  # statistics
                             grad_row, grad_col, grad_pos, grad_pos_col, grad_sum, grad_entropy, grad_square, factor,  # gradients
                             row_factor, g,  # see below; output
                             g_stride, n, m, first, ahead, picks,
                             TERMS: tl.constexpr, SCORE: tl.constexpr, POSITIVE: tl.constexpr, P: tl.constexpr,
                             ROW_TERMS: tl.constexpr, CODE: tl.constexpr):  # fmt: skip
    """Overwrite the entry of G of each row's positive, whose score less the shift of the row is ``own``.

    With ``row_factor``, the rows of G are multiplied by it later, so the entry is divided by it. The columns of a row
    must be distinct, or -1.
    """
    at, rows, _ = entries(n, picks, POSITIVE, P)
    key = own_column(at, n, m, row_key, first, ahead, SCORE, POSITIVE)
    ok = key >= 0
    f = nonzero_factor(factor)
    from_shift = tl.load(own + at, mask=ok, other=0.0) * LOG2E
    x = from_shift + shifts(row_shift, rows, ok)
    value = tl.zeros((P,), tl.float32)
    if SOFTPLUS & TERMS:
        value = -sigmoid(-x) * tl.load(grad_row + rows, mask=ok, other=0.0) * f
    if ROWS & TERMS:
        level, _, coming = side(row_lse, row_shift, grad_row, rows, ok, f)
        below = from_shift - level
        mine = GradRows(rows, ok, f, grad_entropy, grad_square)
        value += softmax_term(coming, tl.exp2(below), below, mine, ROW_TERMS)
    if COLS & TERMS:
        level, start, coming = side(col_lse, col_shift, grad_col, key, ok, f)
        value += coming * tl.exp2((x - start) - level)
    if grad_pos is not None:
        value += tl.load(grad_pos + at, mask=ok, other=0.0) * f
        if MIRROR & TERMS:
            value += tl.load(grad_pos_col + key, mask=ok, other=0.0) * f
    if ROW_SUM & TERMS:
        weight = tl.load(col_weight + key, mask=ok, other=0.0)
        value += tl.load(grad_sum + rows, mask=ok, other=0.0) * f * weight
    if row_scale is not None:
        each = row_scales(row_scale, rows, ok)
        value = value * each
        x = x * (1.0 / each)
    if SOFTCAP & SCORE:
        value = value * cap_slope(x, softcap)
    if row_factor is not None:
        later = tl.load(row_factor + rows, mask=ok, other=1.0)
        value = tl.where(later == 0.0, 0.0, value / later)
    tl.store(g + rows.to(tl.int64) * g_stride + key, value.to(g.dtype.element_ty), mask=ok)
