"""Kernels of the one-pass sigmoid loss: G of a macro-tile, and the loss from the same exponential.

    t = exp(x),   sigmoid(x) = t / (1 + t),   sum_j softplus(x_j) = log of the product of all 1 + t_j

with -x at a positive. The product less 1 is kept, so that small t are not lost. Where scores are so large that the product
leaves float32 (the mean softplus of 64 of them is above 1 nat, or one is above 69), ``needs_repair`` is set, and another
launch computes the loss again.
"""

import triton
import triton.language as tl

from tilewise.kernels.triton_impl.bits import BIAS_COLS, BIAS_TOTAL
from tilewise.kernels.triton_impl.launch import SCORE_KEYS, TILE_NUMBERS, kernel
from tilewise.kernels.triton_impl.primitives import (
    LN2,
    ScoreInputs,
    any_here,
    own_column,
    scored_tile,
    store_tile,
    tile_place,
)
from tilewise.kernels.triton_impl.two_pass.backward_kernels import nonzero_factor
from tilewise.kernels.triton_impl.two_pass.softplus_kernels import log1p, softplus_join, softplus_sum

LARGEST_SCORE = tl.constexpr(100.0)  # a sigmoid of more, in units of log2, is 1
JOINED = tl.constexpr(64)  # factors 1 + t in one product; for scores of 0 it is 2**64
LARGEST_JOINED = tl.constexpr(2.0**99)  # above, scores were clamped, or the product is out of range


@triton.jit
def log_of_two(one, other):
    """log((1 + one) (1 + other)), with one logarithm, where the product may be too large for float32."""
    large = tl.maximum(one, other) > 2.0**50
    scaled = (one * 2.0**-64) * other + (one + other) * 2.0**-64  # so large that + 1 has no effect
    joined = softplus_join(one, other)
    both = large & (tl.minimum(one, other) > 2.0**50)
    return log1p(tl.where(both, scaled, joined)) + tl.where(both, 64.0 * LN2, 0.0)


@triton.jit
def log_of_joined(t, R: tl.constexpr, C: tl.constexpr):
    """The sum of log(1 + t) over each row, and the largest product of JOINED factors, less 1."""
    if C <= JOINED:
        joined = tl.reduce(t, 1, softplus_join)
        logs = log1p(joined)
        largest = joined
    else:
        joined = tl.reduce(tl.reshape(t, (R, C // JOINED, JOINED)), 2, softplus_join)
        largest = tl.max(joined, 1)
        if C == 2 * JOINED:
            one, other = tl.split(joined)
            logs = log_of_two(one, other)
        else:
            logs = tl.sum(log1p(joined), 1)
    return logs, largest


@triton.jit
def tile_gradient(x, rows, cols, key, w, f, bias_part, needs_repair, n, m, tile_row, tile_col,
                  g_dtype: tl.constexpr, TERMS: tl.constexpr, MEETS: tl.constexpr, R: tl.constexpr, C: tl.constexpr):  # fmt: skip
    """The loss of each row of a tile, and G. MEETS: the tile may have positives, in the columns ``key``."""
    if MEETS:
        x = tl.where(key[:, None] == cols[None, :], -x, x)
    t = tl.exp2(tl.minimum(x, LARGEST_SCORE, propagate_nan=tl.PropagateNan.ALL))
    logs, largest = log_of_joined(t, R, C)
    fits = largest <= LARGEST_JOINED  # false for NaN, too
    tl.store(needs_repair + rows * 0, 1, mask=(rows < n) & (fits == 0))
    # 1 / (1 + t) as a square: a reciprocal root is one instruction, a division six.
    root = tl.rsqrt(1.0 + t)
    g = (t * (w * f)[:, None]) * (root * root)
    if MEETS:
        g = tl.where(key[:, None] == cols[None, :], -g, g)
    if BIAS_TOTAL & TERMS:
        tl.store(bias_part + tile_col * n + rows, tl.sum(g, 1), mask=rows < n)
    if BIAS_COLS & TERMS:
        tl.store(bias_part + tile_row * m + cols, tl.sum(g, 0), mask=cols < m)
    return logs, g.to(g_dtype)


@kernel(optional=(*SCORE_KEYS, "g_desc", "bias_part"), dynamic=TILE_NUMBERS)
def sigmoid_kernel(a_desc, b_desc, scale, bias, softcap,  # scores
                   row_key, col_key, row_skip, col_skip,  # keys
                   grad_row, factor,  # weights
                   g_desc, bias_part, loss_part, needs_repair,  # outputs
                   n, m, first, ahead,
                   D: tl.constexpr, TERMS: tl.constexpr, REPAIR: tl.constexpr, SCORE: tl.constexpr, POSITIVE: tl.constexpr,
                   R: tl.constexpr, C: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, PROGRAMS: tl.constexpr,
                   EXACT: tl.constexpr):  # fmt: skip
    """G of one macro-tile times ``factor``. Each program adds its share of the loss to its R numbers of loss_part.

    REPAIR: if ``needs_repair`` is set, the loss alone, again, by terms that cannot overflow.
    """
    row_tiles, col_tiles = tl.cdiv(n, R), tl.cdiv(m, C)
    tiles = row_tiles * col_tiles
    s = ScoreInputs(tl.load(scale), bias, softcap, row_key, col_key, row_skip, col_skip, n, m, first, ahead)
    f = nonzero_factor(factor)
    mine = loss_part + tl.program_id(0) * R + tl.arange(0, R)
    loss = tl.load(mine)
    if REPAIR:
        wanted = tl.load(needs_repair) != 0
        tiles, loss = tl.where(wanted, tiles, 0), tl.where(wanted, 0.0, loss)
    for tile in tl.range(tl.program_id(0), tiles, PROGRAMS, flatten=not REPAIR):
        tile_row, tile_col = tile_place(tile, row_tiles, col_tiles, GROUP)
        rows, cols, x = scored_tile(a_desc, b_desc, s, tile_row, tile_col, D, SCORE, POSITIVE, R, C, K, EXACT)
        meets = any_here(rows, s, tile_row * R, tile_col * C, R, C, POSITIVE)
        key = own_column(rows, n, m, row_key, first, ahead, SCORE, POSITIVE)
        w = tl.load(grad_row + rows, mask=rows < n, other=0.0)
        if REPAIR:
            if meets:
                x = tl.where(key[:, None] == cols[None, :], -x, x)
            loss += w * softplus_sum(x)
        else:
            # Two copies of the tile's arithmetic: one that changes signs only in some tiles would spill registers.
            if meets:
                logs, g = tile_gradient(x, rows, cols, key, w, f, bias_part, needs_repair, n, m,
                                        tile_row, tile_col, g_desc.dtype, TERMS, True, R, C)  # fmt: skip
            else:
                logs, g = tile_gradient(x, rows, cols, key, w, f, bias_part, needs_repair, n, m,
                                        tile_row, tile_col, g_desc.dtype, TERMS, False, R, C)  # fmt: skip
            loss += w * logs
            store_tile(g_desc, tile_row * R, tile_col * C, g)
    tl.store(mine, loss)
