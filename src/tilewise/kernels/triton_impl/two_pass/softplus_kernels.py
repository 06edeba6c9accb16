"""The sum of softplus over each row of a macro-tile: the statistic of sigmoid losses.

    softplus(x) = max(x, 0) + log(1 + exp(-|x|)),   with -x at a positive

The logarithms of a row of a tile are taken together: log(1 + e_1) + log(1 + e_2) + ... = log((1 + e_1)(1 + e_2)...).
Where that product leaves float32, the part is +inf and ``needs_repair`` is set. `softplus_repair_kernel` then computes
the tile again with a logarithm for each score.
"""

import triton
import triton.language as tl

from tilewise.kernels.triton_impl.launch.prepared import SCORE_KEYS, TILE_NUMBERS, kernel
from tilewise.kernels.triton_impl.primitives import LN2, any_here, positives, scored_tile, tile_place

LARGEST_PRODUCT = tl.constexpr(2.0**100)


@triton.jit
def softplus_join(a, b):
    """(1 + a)(1 + b) - 1: sums of log(1 + e) as one product, without losing small e."""
    return a + b + a * b


@triton.jit
def log1p(x):
    """log(1 + x) for x >= 0, accurate where x is small."""
    u = 1.0 + x
    return tl.where(u == 1.0, x, tl.log(u) * (x / tl.where(u == 1.0, 1.0, u - 1.0)))


@triton.jit
def softplus_sum(x):
    """The sum over each row, for scores of any size in units of log2."""
    return tl.sum(tl.maximum(x, 0.0) * LN2 + log1p(tl.exp2(-tl.abs(x))), 1)


@kernel(optional=SCORE_KEYS, dynamic=TILE_NUMBERS)
def softplus_forward_kernel(a_desc, b_desc, scale, bias, softcap,  # scores
                            row_key, col_key, row_skip, col_skip,  # keys
                            row_part, needs_repair,  # outputs
                            n, m, first, ahead,
                            D: tl.constexpr, SCORE: tl.constexpr, POSITIVE: tl.constexpr,
                            R: tl.constexpr, C: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr,
                            PROGRAMS: tl.constexpr, EXACT: tl.constexpr):  # fmt: skip
    """One macro-tile of n x m scores; row_part is (column tiles, n)."""
    row_tiles, col_tiles = tl.cdiv(n, R), tl.cdiv(m, C)
    s = tl.load(scale)
    for tile in tl.range(tl.program_id(0), row_tiles * col_tiles, PROGRAMS, flatten=True):
        tile_row, tile_col = tile_place(tile, row_tiles, col_tiles, GROUP)
        rows, cols, x = scored_tile(a_desc, b_desc, s, bias, softcap, row_key, col_key, row_skip, col_skip, tile_row, tile_col,
                                    n, m, first, ahead, D, SCORE, POSITIVE, R, C, K, EXACT)  # fmt: skip
        ok_rows = rows < n
        if POSITIVE != 0:
            if any_here(rows, n, m, row_key, first, ahead, tile_row * R, tile_col * C, R, C, POSITIVE):
                hit = positives(rows, cols, n, m, row_key, col_key, first, ahead, SCORE, POSITIVE)
                x = tl.where(hit, -x, x)
        joined = tl.reduce(tl.exp2(-tl.abs(x)), 1, softplus_join)
        total = tl.sum(tl.maximum(x, 0.0), 1) * LN2 + log1p(joined)
        large = joined > LARGEST_PRODUCT
        tl.store(row_part + tile_col * n + rows, tl.where(large, float("inf"), total), mask=ok_rows)
        tl.store(needs_repair + rows * 0, 1, mask=ok_rows & large)


@kernel(optional=SCORE_KEYS, dynamic=TILE_NUMBERS)
def softplus_repair_kernel(a_desc, b_desc, scale, bias, softcap,  # scores
                           row_key, col_key, row_skip, col_skip,  # keys
                           row_part, needs_repair,  # in and out
                           n, m, first, ahead,
                           D: tl.constexpr, SCORE: tl.constexpr, POSITIVE: tl.constexpr,
                           R: tl.constexpr, C: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr,
                           PROGRAMS: tl.constexpr, EXACT: tl.constexpr):  # fmt: skip
    """Compute tiles with infinite parts again, with a logarithm for each score. Mostly there are none."""
    row_tiles, col_tiles = tl.cdiv(n, R), tl.cdiv(m, C)
    s = tl.load(scale)
    for tile in range(tl.program_id(0), tl.where(tl.load(needs_repair) != 0, row_tiles * col_tiles, 0), PROGRAMS):
        tile_row, tile_col = tile_place(tile, row_tiles, col_tiles, GROUP)
        rows = tile_row * R + tl.arange(0, R)
        part = tl.load(row_part + tile_col * n + rows, mask=rows < n, other=0.0)
        if tl.max((part == float("inf")).to(tl.int32), 0) > 0:
            rows, cols, x = scored_tile(a_desc, b_desc, s, bias, softcap, row_key, col_key, row_skip, col_skip, tile_row, tile_col,
                                        n, m, first, ahead, D, SCORE, POSITIVE, R, C, K, EXACT)  # fmt: skip
            if POSITIVE != 0:
                hit = positives(rows, cols, n, m, row_key, col_key, first, ahead, SCORE, POSITIVE)
                x = tl.where(hit, -x, x)
            tl.store(row_part + tile_col * n + rows, softplus_sum(x), mask=rows < n)
