"""Kernels for a pair with a guide: two products in each tile, x of the pair and y of the guide.

    p_ij = exp(x_ij - row_lse_i)        q_ij = exp(y_ij - guide_lse_i)

Statistics of rows are relative to the largest scores of each row of a tile, so no sum overflows or underflows. Inside the kernels
scores, logarithms and divergences are in units of log2. Each tile writes its part of each statistic to a place of its
own; `guide.py` merges the parts. Inside of a tile, with e = exp(x - max x), S its sum, f = exp(y - max y), T its sum:

    kl = sum_j f_j d_j / T - log T + log S        d_j = (y_j - max y) - (x_j - max x)
    reverse_kl = -sum_j e_j d_j / S - log S + log T
"""

import triton
import triton.language as tl

from tilewise.kernels.triton_impl.bits import BIAS_COLS, ENTROPY, HOT, JSD, KL, MASK, REVERSE_KL, ROWS, SOFTCAP
from tilewise.kernels.triton_impl.launch import SCORE_KEYS, TILE_NUMBERS, kernel
from tilewise.kernels.triton_impl.primitives import (
    LN2,
    LOG2E,
    NO_SHARE,
    ScoreInputs,
    finite,
    in_units,
    own_column,
    score_tile,
    shifts,
    store_tile,
    tile_dot,
    tile_place,
)
from tilewise.kernels.triton_impl.two_pass.backward_kernels import cap_slope, nonzero_factor

GUIDE_NUMBERS = (*TILE_NUMBERS, "guide_softcap", "hot", "beta", "rest")


@triton.jit
def guided_tile(a_desc, b_desc, s, ga_desc, gb_desc, guide, row_limit, tile_row, tile_col, D: tl.constexpr, E: tl.constexpr,
                GUIDE: tl.constexpr, SCORE: tl.constexpr, GUIDE_SCORE: tl.constexpr, POSITIVE: tl.constexpr,
                R: tl.constexpr, C: tl.constexpr, K: tl.constexpr, EXACT: tl.constexpr):  # fmt: skip
    """Rows and columns of a tile, its scores x (with MASK those above the limit are -inf), and the guide's scores y."""
    rows = tile_row * R + tl.arange(0, R)
    cols = tile_col * C + tl.arange(0, C)
    acc = tile_dot(ga_desc, gb_desc, tile_row * R, tile_col * C, E, R, C, K, EXACT)
    y = score_tile(acc, rows, cols, guide, GUIDE_SCORE, 0)
    acc = tile_dot(a_desc, b_desc, tile_row * R, tile_col * C, D, R, C, K, EXACT)
    x = score_tile(acc, rows, cols, s, SCORE, POSITIVE)
    if MASK == GUIDE:
        above = y > (tl.load(row_limit + rows, mask=rows < s.n, other=0.0) * LOG2E)[:, None]
        if POSITIVE != 0:
            own = own_column(rows, s.n, s.m, s.row_key, s.first, s.ahead, SCORE, POSITIVE)
            above = above & (own[:, None] != cols[None, :])
        x = tl.where(above, float("-inf"), x)
    return rows, cols, x, y


@triton.jit
def times(weight, values):
    """weight * values, and 0 where the weight is 0 and a value is infinite or NaN."""
    return tl.where(weight == 0.0, 0.0, weight * values)


@triton.jit
def uncovered(of, other):
    """Whether a score of a row is -inf in ``other`` and not in ``of``: the divergence of ``of`` is infinite.

    The products of `times` do not tell: a weight that underflows is 0.
    """
    return tl.max(tl.where(other == float("-inf"), of, float("-inf")), 1) > float("-inf")


@triton.jit
def over_mixture(log_p, log_q, beta, rest):
    """log2(p / m) and log2(q / m), m = rest p + beta q, rest = 1 - beta; NaN if both are 0, which `times` replaces by 0.

    With the larger of p and q as h, d = log q - log p, and s the share of the other one,

        m / h = 1 + s (exp2(-|d|) - 1) = (1 - s) + s exp2(-|d|)

    The first form keeps the digits if p is close to q, the second one if they are far apart and s is close to 1.
    Only differences of logarithms occur, so large logarithms lose no digits.
    """
    d = log_q - log_p
    share, own = tl.where(d > 0, rest, beta), tl.where(d > 0, beta, rest)
    smaller = tl.exp2(-tl.abs(d))
    larger = -tl.log2(tl.where(smaller < 0.5, own + share * smaller, 1.0 + share * (smaller - 1.0)))
    return larger - tl.maximum(d, 0.0), larger + tl.minimum(d, 0.0)


@triton.jit
def log_shares(x, shift, level, at, ok):
    """x - shift - level of each row, for scores in units of log2 and natural vectors; -inf for an empty sum.

    A ``level`` in float64 is subtracted in two steps: rounded to float32, then the rest.
    """
    norm = tl.load(level + at, mask=ok, other=float("inf"))
    norm = tl.where(norm == float("-inf"), float("inf"), norm) * LOG2E
    coarse = norm.to(tl.float32)
    below = (x - shifts(shift, at, ok)[:, None]) - coarse[:, None]
    if norm.dtype == tl.float64:
        below -= tl.where(norm == float("inf"), 0.0, norm - coarse).to(tl.float32)[:, None]
    return below


@kernel(
    optional=(*SCORE_KEYS, "row_shift", "guide_bias", "row_limit", "row_norm", "guide_norm", "x_desc", "y_desc"),
    dynamic=GUIDE_NUMBERS,
)
def guided_forward_kernel(a_desc, b_desc, scale, bias, softcap,  # scores
                          ga_desc, gb_desc, guide_scale, guide_bias, guide_softcap,  # scores of the guide
                          row_key, col_key, row_skip, col_skip, row_shift,  # keys and shifts
                          row_limit, row_norm, guide_norm, hot, beta, rest,  # settings of the guide
                          row_part, x_desc, y_desc,  # outputs
                          n, m, first, ahead,
                          D: tl.constexpr, E: tl.constexpr, GUIDE: tl.constexpr, STATS: tl.constexpr,
                          SCORE: tl.constexpr, GUIDE_SCORE: tl.constexpr, POSITIVE: tl.constexpr,
                          R: tl.constexpr, C: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr,
                          PROGRAMS: tl.constexpr, EXACT: tl.constexpr):  # fmt: skip
    """Parts of one macro-tile: row_part is (numbers, column tiles, n), in the order of this code.

    A log-sum-exp is two numbers, the largest score and the log of the sum relative to it: large scores keep their digits.
    The largest score stays in units of log2, because a factor would round it.
    With ``x_desc`` and ``y_desc`` the scores are also stored. JSD needs the log-sum-exps over all columns, ``row_norm``
    and ``guide_norm``; without them its parts are not computed.
    """
    row_tiles, col_tiles = tl.cdiv(n, R), tl.cdiv(m, C)
    s = ScoreInputs(tl.load(scale), bias, softcap, row_key, col_key, row_skip, col_skip, n, m, first, ahead)
    guide = ScoreInputs(tl.load(guide_scale), guide_bias, guide_softcap, None, None, None, None, n, m, first, ahead)
    # One stage: narrow features leave no inner loop, and pipelining this one would take twice the shared memory.
    for tile in tl.range(tl.program_id(0), row_tiles * col_tiles, PROGRAMS, num_stages=1):
        tile_row, tile_col = tile_place(tile, row_tiles, col_tiles, GROUP)
        rows, _, x, y = guided_tile(a_desc, b_desc, s, ga_desc, gb_desc, guide, row_limit, tile_row, tile_col, D, E, GUIDE,
                                    SCORE, GUIDE_SCORE, POSITIVE, R, C, K, EXACT)  # fmt: skip
        if x_desc is not None:
            store_tile(x_desc, tile_row * R, tile_col * C, x)
            store_tile(y_desc, tile_row * R, tile_col * C, y)
        ok, at, step = rows < n, row_part + tile_col * n + rows, col_tiles * n
        if KL == GUIDE:
            infinite = uncovered(y, x)
        if REVERSE_KL == GUIDE:
            infinite = uncovered(x, y)
        high = finite(tl.max(x, 1))
        x_below = x - high[:, None]
        e = tl.exp2(x_below)
        total = tl.sum(e, 1)
        shift = shifts(row_shift, rows, ok)
        tl.store(at, high - shift, mask=ok)
        at += step
        tl.store(at, tl.log2(total) * LN2, mask=ok)
        if MASK != GUIDE:
            guide_high = finite(tl.max(y, 1))
            y_below = y - guide_high[:, None]
            f = tl.exp2(y_below)
            guide_total = tl.sum(f, 1)
            at += step
            tl.store(at, guide_high, mask=ok)
            at += step
            tl.store(at, tl.log2(guide_total) * LN2, mask=ok)
            apart = tl.log2(total) - tl.log2(guide_total)
            if (JSD != GUIDE) or (row_norm is not None):
                at += step
            if KL == GUIDE:
                gap = tl.sum(times(f, y_below - x_below), 1) / guide_total
                gap += tl.where(infinite, float("inf"), apart)
                tl.store(at, tl.where(guide_total == 0.0, 0.0, gap) * LN2, mask=ok)
            if REVERSE_KL == GUIDE:
                gap = tl.sum(times(e, x_below - y_below), 1) / total
                gap += tl.where(infinite, float("inf"), -apart)
                tl.store(at, tl.where(total == 0.0, 0.0, gap) * LN2, mask=ok)
            if (JSD == GUIDE) and (row_norm is not None):
                log_p = log_shares(x, row_shift, row_norm, rows, ok)
                log_q = log_shares(y, None, guide_norm, rows, ok)
                over_p, over_q = over_mixture(log_p, log_q, beta, rest)
                mix = tl.sum(times(tl.exp2(log_p), over_p), 1)
                other = tl.sum(times(tl.exp2(log_q), over_q), 1)
                tl.store(at, (beta * other + rest * mix) * LN2, mask=ok)
                at += step
                tl.store(at, mix * LN2, mask=ok)
        if ENTROPY & STATS:
            at += step
            gap = tl.sum(e * tl.maximum(x_below, NO_SHARE), 1)
            tl.store(at, tl.where(total == 0.0, 0.0, tl.log2(total) - gap / total) * LN2, mask=ok)
        if HOT & STATS:
            at += step
            hot_high = finite(tl.max(x * hot, 1))
            hot_total = tl.sum(tl.exp2(x * hot - hot_high[:, None]), 1)
            tl.store(at, hot_high - hot * shift, mask=ok)
            at += step
            tl.store(at, tl.log2(hot_total) * LN2, mask=ok)


@kernel(optional=("row_shift",), dynamic=("m", "stride", "beta", "rest"))
def stored_jsd_kernel(x, y, row_shift, row_norm, guide_norm, beta, rest, row_jsd, row_mix_kl, m, stride,
                      BLOCK: tl.constexpr):  # fmt: skip
    """The Jensen-Shannon divergence and sum_j p_j log(p_j / m_j) of one row, whose scores x and y are stored."""
    row = tl.program_id(0)
    one = row + tl.arange(0, 1)
    start = row.to(tl.int64) * in_units(stride, 4)
    mix, other = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for first in range(0, m, BLOCK):
        cols = first + tl.arange(0, BLOCK)
        inside = cols < m
        log_p = tl.load(x + start + cols, mask=inside, other=float("-inf"))[None, :]
        log_q = tl.load(y + start + cols, mask=inside, other=float("-inf"))[None, :]
        log_p = log_shares(log_p, row_shift, row_norm, one, one >= 0)
        log_q = log_shares(log_q, None, guide_norm, one, one >= 0)
        over_p, over_q = over_mixture(log_p, log_q, beta, rest)
        mix += tl.sum(times(tl.exp2(log_p), over_p), 0)
        other += tl.sum(times(tl.exp2(log_q), over_q), 0)
    own = tl.sum(mix, 0)
    tl.store(row_jsd + row, (beta * tl.sum(other, 0) + rest * own) * LN2)
    tl.store(row_mix_kl + row, own * LN2)


@kernel(
    optional=(*SCORE_KEYS, "row_shift", "guide_bias", "row_limit", "guide_lse", "row_level", "row_hot_lse")
    + ("grad_row", "grad_pos", "grad_entropy", "grad_guide", "grad_hot", "bias_part", "x", "y"),
    dynamic=(*GUIDE_NUMBERS, "stored_stride"),
)
def guided_gradient_kernel(a_desc, b_desc, scale, bias, softcap,  # scores
                           ga_desc, gb_desc, guide_scale, guide_bias, guide_softcap,  # scores of the guide
                           row_key, col_key, row_skip, col_skip, row_shift,  # keys and shifts
                           row_limit, hot, beta, rest,  # settings of the guide
                           x, y, stored_stride,  # saved scores
                           row_lse, guide_lse, row_level, row_hot_lse,  # statistics
                           grad_row, grad_pos, grad_entropy, grad_guide, grad_hot, factor,  # their gradients
                           g_desc, bias_part,  # outputs
                           n, m, first, ahead,
                           D: tl.constexpr, E: tl.constexpr, GUIDE: tl.constexpr, TERMS: tl.constexpr,
                           SCORE: tl.constexpr, GUIDE_SCORE: tl.constexpr, POSITIVE: tl.constexpr,
                           R: tl.constexpr, C: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr,
                           PROGRAMS: tl.constexpr, EXACT: tl.constexpr):  # fmt: skip
    """G of one macro-tile of n x m scores, every gradient of a statistic multiplied by ``factor``.

    G = p (v - h log p) + the term of the guide + hot t exp(hot x - row_hot_lse) + g_pos [positive]
        k (p - q)                           KL
        k p (log(p / q) - l)                REVERSE_KL, l is the divergence
        (1 - beta) k p (log(p / m) - l)     JSD, m is the mixture, l is sum_j p_j log(p_j / m_j)

    v is ``grad_row``, from which h * row_entropy was subtracted (`folded_gradients`), h ``grad_entropy``,
    k ``grad_guide``, l ``row_level``, t ``grad_hot``. Scores ``x`` and ``y`` that forward saved are not computed again.
    """
    row_tiles, col_tiles = tl.cdiv(n, R), tl.cdiv(m, C)
    s = ScoreInputs(tl.load(scale), bias, softcap, row_key, col_key, row_skip, col_skip, n, m, first, ahead)
    guide = ScoreInputs(tl.load(guide_scale), guide_bias, guide_softcap, None, None, None, None, n, m, first, ahead)
    f = nonzero_factor(factor)
    # One stage: narrow features leave no inner loop, and pipelining this one would take twice the shared memory.
    for tile in tl.range(tl.program_id(0), row_tiles * col_tiles, PROGRAMS, num_stages=1):
        tile_row, tile_col = tile_place(tile, row_tiles, col_tiles, GROUP)
        if x is None:
            rows, cols, own, other = guided_tile(a_desc, b_desc, s, ga_desc, gb_desc, guide, row_limit, tile_row, tile_col,
                                                 D, E, GUIDE, SCORE, GUIDE_SCORE, POSITIVE, R, C, K, EXACT)  # fmt: skip
        else:
            rows, cols = tile_row * R + tl.arange(0, R), tile_col * C + tl.arange(0, C)
            at = rows.to(tl.int64)[:, None] * in_units(stored_stride, 4) + cols[None, :]
            inside = (rows < n)[:, None] & (cols < m)[None, :]
            own = tl.load(x + at, mask=inside, other=float("-inf"))
            other = tl.load(y + at, mask=inside, other=float("-inf"))
        ok_rows, ok_cols = rows < n, cols < m
        log_p = log_shares(own, row_shift, row_lse, rows, ok_rows)
        p = tl.exp2(log_p)
        value = tl.zeros((R,), tl.float32)
        if ROWS & TERMS:
            value += tl.load(grad_row + rows, mask=ok_rows, other=0.0) * f
        g = p * value[:, None]
        if grad_entropy is not None:
            h = tl.load(grad_entropy + rows, mask=ok_rows, other=0.0) * (f * LN2)
            g -= h[:, None] * p * tl.maximum(log_p, NO_SHARE)
        if grad_guide is not None:
            k = (tl.load(grad_guide + rows, mask=ok_rows, other=0.0) * f)[:, None]
            log_q = log_shares(other, None, guide_lse, rows, ok_rows)
            if KL == GUIDE:
                g += k * (p - tl.exp2(log_q))
            else:
                level = (tl.load(row_level + rows, mask=ok_rows, other=0.0) * LOG2E)[:, None]
                if JSD == GUIDE:
                    apart, _ = over_mixture(log_p, log_q, beta, rest)
                    k = k * rest
                else:
                    apart = log_p - log_q
                g += (k * LN2) * times(p, apart - level)
        if HOT & TERMS:
            t = tl.load(grad_hot + rows, mask=ok_rows, other=0.0) * (f * hot)
            norm = tl.load(row_hot_lse + rows, mask=ok_rows, other=float("inf")) * LOG2E
            below = (own - shifts(row_shift, rows, ok_rows)[:, None]) * hot - norm[:, None]
            g += t[:, None] * tl.exp2(below)
        if (POSITIVE != 0) and (grad_pos is not None):
            place = own_column(rows, n, m, row_key, first, ahead, SCORE, POSITIVE)
            add = (tl.load(grad_pos + rows, mask=ok_rows, other=0.0) * f)[:, None]
            g = tl.where(place[:, None] == cols[None, :], g + add, g)
        if SOFTCAP & SCORE:
            g = g * cap_slope(own, softcap)
        if BIAS_COLS & TERMS:
            tl.store(bias_part + tile_row * m + cols, tl.sum(tl.where(ok_rows[:, None], g, 0.0), 0), mask=ok_cols)
        store_tile(g_desc, tile_row * R, tile_col * C, g)
