"""The operand G of the gradient products, for a macro-tile, in the type of the features.

    G_ij = e_ij (u_i + v_j) + g_pos_i [positive] + ...     e_ij = exp(x_ij - t)
    without columns exp(x_ij - row_lse_i) (g_i + the terms of the row's statistics), see `statistics`
    u_i = g_i exp(t - row_lse_i),  v_j = g_j exp(t - col_lse_j),  t = the largest log-sum-exp of all rows and columns

One exponential serves both directions. If the log-sum-exps span too much for that (``span``), each direction computes its
own. `share_kernel` computes u and v before the first tile. Everything is float32 until G is rounded at the end. The tiles
treat the only positive of a row like any other entry: `positive_gradient_kernel` overwrites its entry of G afterwards.
cuBLAS computes the products with G.

What is stored as G is ``factor`` times dL/dx. The factor is mostly the scale, so G @ B is dA already, and the gradient of
the scale is the sum of dA * A, divided by the scale.
"""

import triton
import triton.language as tl

from tilewise.kernels.triton_impl.bits import (
    BIAS_COLS,
    BIAS_TOTAL,
    COLS,
    MANY,
    MIRROR,
    ROW_SUM,
    ROWS,
    SOFTCAP,
    SOFTPLUS,
)
from tilewise.kernels.triton_impl.launch import SCORE_KEYS, TILE_NUMBERS, kernel
from tilewise.kernels.triton_impl.primitives import (
    LOG2E,
    ScoreInputs,
    positives,
    row_scales,
    row_stride,
    scored_tile,
    shifts,
    store_tile,
    tile_place,
)
from tilewise.kernels.triton_impl.statistics import GradRows, softmax_term

WIDEST_SPAN = tl.constexpr(60.0)
TINY_SCALE = tl.constexpr(1e-30)
# Terms of G that may be missing, with their statistics
OPTIONAL_TERMS = ("row_shift", "col_shift", "col_weight", "row_scale", "row_lse", "col_lse", "grad_row", "grad_col",
                  "grad_pos", "grad_pos_col", "grad_sum", "grad_entropy", "grad_square")  # fmt: skip


@triton.jit
def side(lse, shift, grad, at, ok, factor):
    """Log-sum-exp in units of log2 (+inf for an empty sum), its shift, and its gradient times ``factor``."""
    level = tl.load(lse + at, mask=ok, other=float("inf"))
    level = tl.where(level == float("-inf"), float("inf"), level) * LOG2E
    return level, shifts(shift, at, ok), tl.load(grad + at, mask=ok, other=0.0) * factor


@triton.jit
def nonzero_factor(factor):
    """The factor of G. A scale of exactly 0 is replaced, so that its gradient is not lost."""
    f = tl.load(factor)
    return tl.where(f == 0.0, TINY_SCALE, f)


@triton.jit
def sigmoid(x):
    """1 / (1 + 2**-x), for x in units of log2; an infinite power gives 0.

    The square of a reciprocal root takes two instructions, a division six.
    """
    root = tl.rsqrt(1.0 + tl.exp2(-x))
    return root * root


@triton.jit
def cap_slope(x, softcap):
    """The derivative of the soft cap at the capped scores x, in units of log2; 0 where a score is -inf."""
    ratio = x * (1.0 / (softcap * LOG2E))
    return tl.where(x == float("-inf"), 0.0, 1.0 - ratio * ratio)


@kernel(
    optional=(*SCORE_KEYS, *OPTIONAL_TERMS, "picked", "row_share", "col_share", "span", "bias_part"),
    dynamic=(*TILE_NUMBERS, "picks"),
)
def gradient_kernel(a_desc, b_desc, scale, bias, softcap,  # scores
                    row_key, col_key, row_skip, col_skip, row_shift, col_shift, col_weight, row_scale,  # keys, shifts, weights
                    picked, picks,  # columns to leave out
                    row_lse, col_lse, row_share, col_share, span,  # statistics
                    grad_row, grad_col, grad_pos, grad_pos_col, grad_sum, grad_entropy, grad_square, factor,  # their gradients
                    g_desc, bias_part,  # outputs
                    n, m, first, ahead,
                    D: tl.constexpr, TERMS: tl.constexpr, SCORE: tl.constexpr, POSITIVE: tl.constexpr, WIDE: tl.constexpr,
                    R: tl.constexpr, C: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, PROGRAMS: tl.constexpr,
                    EXACT: tl.constexpr, ROW_TERMS: tl.constexpr, CODE: tl.constexpr):  # fmt: skip
    """G of one macro-tile of n x m scores, every gradient of a statistic multiplied by ``factor``.

    For both directions it is launched twice, WIDE and not; the launch that does not suit the span returns at once.
    """
    row_tiles, col_tiles = tl.cdiv(n, R), tl.cdiv(m, C)
    tiles = row_tiles * col_tiles
    if span is not None:
        tiles = tl.where((tl.load(span) >= WIDEST_SPAN) == WIDE, tiles, 0)
    s = ScoreInputs(tl.load(scale), bias, softcap, row_key, col_key, row_skip, col_skip, n, m, first, ahead,
                    row_scale, picked, picks)  # fmt: skip
    f = nonzero_factor(factor)
    t = 0.0
    if (ROWS & TERMS) and (COLS & TERMS) and not WIDE:
        t = tl.load(span + 1)
    for tile in tl.range(tl.program_id(0), tiles, PROGRAMS, flatten=True):
        tile_row, tile_col = tile_place(tile, row_tiles, col_tiles, GROUP)
        rows, cols, x = scored_tile(a_desc, b_desc, s, tile_row, tile_col, D, SCORE, POSITIVE, R, C, K, EXACT, t)
        ok_rows, ok_cols = rows < n, cols < m
        g = tl.where(x == x, 0.0, 0.0)  # where none of these terms follows
        if SOFTPLUS & TERMS:
            g = sigmoid(x) * (tl.load(grad_row + rows, mask=ok_rows, other=0.0) * f)[:, None]
        elif (ROWS & TERMS) and (COLS & TERMS) and not WIDE:
            u = tl.load(row_share + rows, mask=ok_rows, other=0.0)
            v = tl.load(col_share + cols, mask=ok_cols, other=0.0)
            g = tl.exp2(x) * (u[:, None] + v[None, :])
        elif ROWS & TERMS:
            row_level, row_from, row_in = side(row_lse, row_shift, grad_row, rows, ok_rows, f)
            coming = row_in[:, None]  # after `below` it would take a register more
            below = (x - row_from[:, None]) - row_level[:, None]
            mine = GradRows(rows[:, None], ok_rows[:, None], f, grad_entropy, grad_square)
            g = softmax_term(coming, tl.exp2(below), below, mine, ROW_TERMS)
        if (COLS & TERMS) and (WIDE or not (ROWS & TERMS)):
            col_level, col_from, col_in = side(col_lse, col_shift, grad_col, cols, ok_cols, f)
            down = col_in[None, :] * tl.exp2((x - col_from[None, :]) - col_level[None, :])
            if ROWS & TERMS:
                g += down
            else:
                g = down
        if (MANY == POSITIVE) and (grad_pos is not None):
            hit = positives(rows, cols, s, SCORE, POSITIVE)
            value = (tl.load(grad_pos + rows, mask=ok_rows, other=0.0) * f)[:, None]
            if MIRROR & TERMS:
                value = value + (tl.load(grad_pos_col + cols, mask=ok_cols, other=0.0) * f)[None, :]
            g = tl.where(hit, g + value, g)  # g + where(..) would move the tile through shared memory
        if ROW_SUM & TERMS:
            weight = tl.load(col_weight + cols, mask=ok_cols, other=0.0)
            g += (tl.load(grad_sum + rows, mask=ok_rows, other=0.0) * f)[:, None] * weight[None, :]
        if row_scale is not None:
            each = row_scales(row_scale, rows, ok_rows)[:, None]
            g = g * each
            if SOFTCAP & SCORE:
                g = g * cap_slope((x + t) * (1.0 / each), softcap)
        elif SOFTCAP & SCORE:
            g = g * cap_slope(x + t, softcap)
        if BIAS_TOTAL & TERMS:
            tl.store(bias_part + tile_col * n + rows, tl.sum(g, 1), mask=ok_rows)
        if BIAS_COLS & TERMS:
            inside = tl.where(ok_rows[:, None], g, 0.0)
            tl.store(bias_part + tile_row * m + cols, tl.sum(inside, 0), mask=ok_cols)
        store_tile(g_desc, tile_row * R, tile_col * C, g)


@triton.jit
def extremes(values, shift, size, BLOCK: tl.constexpr):
    """Largest and smallest finite value + shift."""
    high = tl.full((BLOCK,), float("-inf"), tl.float32)
    low = tl.full((BLOCK,), float("inf"), tl.float32)
    for start in range(0, size, BLOCK):
        at = start + tl.arange(0, BLOCK)
        value = tl.load(values + at, mask=at < size, other=float("-inf"))
        ok = value > float("-inf")
        if shift is not None:
            value += tl.load(shift + at, mask=at < size, other=0.0)
        high = tl.maximum(high, tl.where(ok, value, float("-inf")))
        low = tl.minimum(low, tl.where(ok, value, float("inf")))
    return tl.max(high, 0), tl.min(low, 0)


@kernel(optional=("row_shift", "col_shift"), dynamic=("n", "m"))
def span_kernel(row_shift, col_shift, row_lse, col_lse, span, n, m, BLOCK: tl.constexpr):
    """How far apart the log-sum-exps of all rows and columns are, and t, the largest; in units of log2."""
    row_high, row_low = extremes(row_lse, row_shift, n, BLOCK)
    col_high, col_low = extremes(col_lse, col_shift, m, BLOCK)
    high = tl.maximum(row_high, col_high)
    tl.store(span, (high - tl.minimum(row_low, col_low)) * LOG2E)
    tl.store(span + 1, tl.where(high == float("-inf"), 0.0, high) * LOG2E)


@kernel(optional=("row_shift", "col_shift"), dynamic=("n", "m"))
def share_kernel(row_shift, col_shift, row_lse, col_lse, span, grad_row, grad_col, factor, row_share, col_share, n, m,
                 BLOCK: tl.constexpr):  # fmt: skip
    """u of all rows, and after them v of all columns."""
    program, row_blocks = tl.program_id(0), tl.cdiv(n, BLOCK)
    f, t = nonzero_factor(factor), tl.load(span + 1)
    if program < row_blocks:
        at = program * BLOCK + tl.arange(0, BLOCK)
        level, start, coming = side(row_lse, row_shift, grad_row, at, at < n, f)
        tl.store(row_share + at, coming * tl.exp2((t - start) - level), mask=at < n)
    else:
        at = (program - row_blocks) * BLOCK + tl.arange(0, BLOCK)
        level, start, coming = side(col_lse, col_shift, grad_col, at, at < m, f)
        tl.store(col_share + at, coming * tl.exp2((t - start) - level), mask=at < m)


@kernel(optional=("features", "factor", "out", "dots"), dynamic=("rows", "stride"))
def finish_kernel(
    total, features, factor, out, dots, rows, stride, D: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr
):
    """out = factor * total in the type of out, and for each program the sum of total * features in ``dots``.

    A missing ``factor`` is 1. ``stride`` is that of the features.
    """
    row = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)[:, None]
    f = 1.0
    if factor is not None:
        f = tl.load(factor)
    dot = tl.zeros((BLOCK, WIDTH), tl.float32)
    for k in range(0, D, WIDTH):
        col = (k + tl.arange(0, WIDTH))[None, :]
        ok = (row < rows) & (col < D)
        value = tl.load(total + row * D + col, mask=ok, other=0.0).to(tl.float32)
        if dots is not None:
            dot += value * tl.load(features + row * row_stride(features, stride) + col, mask=ok, other=0.0).to(
                tl.float32
            )
        if out is not None:
            tl.store(out + row * D + col, (value * f).to(out.dtype.element_ty), mask=ok)
    if dots is not None:
        tl.store(dots + tl.program_id(0), tl.sum(tl.sum(dot, 1), 0))


@kernel(dynamic=("count", "share"))
def scale_kernel(dots, factor, out, count, share, BLOCK: tl.constexpr):
    """The gradient of the scale: ``share`` times the sum of all dots, divided by the factor that G was multiplied by."""
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        total += tl.load(dots + at, mask=at < count, other=0.0)
    tl.store(out, tl.sum(total, 0) * (1.0 / nonzero_factor(factor)) * share)
