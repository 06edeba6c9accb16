"""Statistics of a macro-tile: one product, one exponential per score for both directions.

    x_ij = scale <a_i, b_j> + bias_j,   t = max over the tile,   e_ij = exp(x_ij - t)
    row part: log sum_j e_ij + t - row_zero_i        column part: log sum_i e_ij + t - col_zero_j

Each tile writes its part of each row and column to a place of its own (no atomics); `merge_kernel` folds the parts in
a fixed order into the running statistics. Where t is too far above a row for its sum to be an ordinary float32 number,
the tile is flagged, and `repair_kernel` does it again with the maximum of each row and column.
"""

import triton
import triton.language as tl

from tilewise.kernels.triton_impl.parts import (
    LN2,
    LOG2E,
    MANY,
    ONE,
    SMALLEST_SUM,
    any_here,
    own_column,
    positives,
    score_tile,
    tile_dot,
    tile_place,
)

# What is asked for (bits of STATS)
ROWS = tl.constexpr(1)
COLS = tl.constexpr(2)
SOFTPLUS = tl.constexpr(4)
ROW_SUM = tl.constexpr(8)
MIRROR = tl.constexpr(16)  # scores are symmetric: a column is a row too, and gets its positives


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
def forward_kernel(a_desc, b_desc, scale, bias, softcap, row_key, col_key, row_skip, col_skip, row_zero, col_zero,
                   col_weight, row_part, col_part, row_pos, col_pos, pos_part, pos_col_part, sum_part, flags, n, m, first, ahead,
                   D: tl.constexpr, STATS: tl.constexpr, SCORE: tl.constexpr, POSITIVE: tl.constexpr,
                   R: tl.constexpr, C: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, PROGRAMS: tl.constexpr,
                   EXACT: tl.constexpr):  # fmt: skip
    """One macro-tile of n x m scores; row_part is (column tiles, n), col_part (row tiles, m)."""
    row_tiles, col_tiles = tl.cdiv(n, R), tl.cdiv(m, C)
    s = tl.load(scale)
    for tile in tl.range(tl.program_id(0), row_tiles * col_tiles, PROGRAMS, flatten=True):
        tile_row, tile_col = tile_place(tile, row_tiles, col_tiles, GROUP)
        acc = tile_dot(a_desc, b_desc, tile_row * R, tile_col * C, D, R, C, K, EXACT)
        rows = tile_row * R + tl.arange(0, R)
        cols = tile_col * C + tl.arange(0, C)
        x = score_tile(
            acc, rows, cols, n, m, s, bias, softcap, row_skip, col_skip, row_key, col_key, first, ahead, SCORE, POSITIVE
        )
        ok_rows, ok_cols = rows < n, cols < m
        if ONE == POSITIVE:
            if any_here(rows, n, m, row_key, first, tile_col * C, C):
                hit = positives(rows, cols, n, m, row_key, col_key, first, ahead, SCORE, POSITIVE)
                if SOFTPLUS & STATS:
                    x = tl.where(hit, -x, x)
                else:
                    found = tl.sum(tl.where(hit, x, 0.0), 1)
                    if row_zero is not None:
                        found -= tl.load(row_zero + rows, mask=ok_rows, other=0.0) * LOG2E
                    key = own_column(row_key, rows, n, m, first)
                    here = (key >= tile_col * C) & (key < tile_col * C + C)
                    tl.store(row_pos + rows, found * LN2, mask=ok_rows & here)
                    if MIRROR & STATS:
                        found = tl.sum(tl.where(hit, x, 0.0), 0)
                        if col_zero is not None:
                            found -= tl.load(col_zero + cols, mask=ok_cols, other=0.0) * LOG2E
                        tl.store(col_pos + cols, found * LN2, mask=ok_cols & (tl.max(hit.to(tl.int32), 0) > 0))
        if MANY == POSITIVE:
            hit = positives(rows, cols, n, m, row_key, col_key, first, ahead, SCORE, POSITIVE)
            zero = tl.zeros((R,), tl.float32)
            if row_zero is not None:
                zero = tl.load(row_zero + rows, mask=ok_rows, other=0.0) * LOG2E
            found = tl.sum(tl.where(hit, x - zero[:, None], 0.0), 1)
            tl.store(pos_part + tile_col * n + rows, found * LN2, mask=ok_rows)
            if MIRROR & STATS:
                zero_col = tl.zeros((C,), tl.float32)
                if col_zero is not None:
                    zero_col = tl.load(col_zero + cols, mask=ok_cols, other=0.0) * LOG2E
                found = tl.sum(tl.where(hit, x - zero_col[None, :], 0.0), 0)
                tl.store(pos_col_part + tile_row * m + cols, found * LN2, mask=ok_cols)
        if ROW_SUM & STATS:
            weight = tl.load(col_weight + cols, mask=ok_cols, other=0.0)
            weighted = tl.sum(tl.where(ok_cols[None, :], x * weight[None, :], 0.0), 1)
            tl.store(sum_part + tile_col * n + rows, weighted * LN2, mask=ok_rows)
        if SOFTPLUS & STATS:
            e = tl.exp2(-tl.abs(x))
            joined = tl.reduce(e, 1, softplus_join)
            total = tl.sum(tl.maximum(x, 0.0), 1) * LN2 + log1p(joined)
            bad = ok_rows & (joined > 2.0**100)
            tl.store(row_part + tile_col * n + rows, total, mask=ok_rows)
            tl.store(flags + tile, tl.max(bad.to(tl.int32), 0))
        if (ROWS + COLS) & STATS:
            top = tl.max(tl.max(x, 1), 0)
            top = tl.where(top == float("-inf"), 0.0, top)
            # Rows past the end take part in column sums unless their shift is -inf.
            e = tl.exp2(x + tl.where(ok_rows, -top, float("-inf"))[:, None])
            bad = tl.zeros((), tl.int32)
            if ROWS & STATS:
                row_total = tl.sum(e, 1)
                bad = tl.max((ok_rows & (row_total < SMALLEST_SUM)).to(tl.int32), 0)
                shift = tl.full((R,), 0.0, tl.float32) + top
                if row_zero is not None:
                    shift -= tl.load(row_zero + rows, mask=ok_rows, other=0.0) * LOG2E
                tl.store(row_part + tile_col * n + rows, tl.log2(row_total) + shift, mask=ok_rows)
            if COLS & STATS:
                col_total = tl.sum(e, 0)
                bad = tl.maximum(bad, tl.max((ok_cols & (col_total < SMALLEST_SUM)).to(tl.int32), 0))
                shift = tl.full((C,), 0.0, tl.float32) + top
                if col_zero is not None:
                    shift -= tl.load(col_zero + cols, mask=ok_cols, other=0.0) * LOG2E
                tl.store(col_part + tile_row * m + cols, tl.log2(col_total) + shift, mask=ok_cols)
            tl.store(flags + tile, bad)


@triton.jit
def repair_kernel(a_desc, b_desc, scale, bias, softcap, row_key, col_key, row_skip, col_skip, row_zero, col_zero,
                  row_part, col_part, flags, n, m, first, ahead,
                  D: tl.constexpr, STATS: tl.constexpr, SCORE: tl.constexpr, POSITIVE: tl.constexpr,
                  R: tl.constexpr, C: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, PROGRAMS: tl.constexpr,
                  EXACT: tl.constexpr):  # fmt: skip
    """Tiles that were flagged, again, each row and column with a maximum of its own."""
    row_tiles, col_tiles = tl.cdiv(n, R), tl.cdiv(m, C)
    s = tl.load(scale)
    for tile in range(tl.program_id(0), row_tiles * col_tiles, PROGRAMS):
        if tl.load(flags + tile) != 0:
            tile_row, tile_col = tile_place(tile, row_tiles, col_tiles, GROUP)
            acc = tile_dot(a_desc, b_desc, tile_row * R, tile_col * C, D, R, C, K, EXACT)
            rows = tile_row * R + tl.arange(0, R)
            cols = tile_col * C + tl.arange(0, C)
            x = score_tile(
                acc,
                rows,
                cols,
                n,
                m,
                s,
                bias,
                softcap,
                row_skip,
                col_skip,
                row_key,
                col_key,
                first,
                ahead,
                SCORE,
                POSITIVE,
            )
            ok_rows, ok_cols = rows < n, cols < m
            if SOFTPLUS & STATS:
                if ONE == POSITIVE:
                    x = tl.where(positives(rows, cols, n, m, row_key, col_key, first, ahead, SCORE, POSITIVE), -x, x)
                total = tl.sum(tl.maximum(x, 0.0) * LN2 + log1p(tl.exp2(-tl.abs(x))), 1)
                tl.store(row_part + tile_col * n + rows, total, mask=ok_rows)
            if ROWS & STATS:
                top = tl.max(x, 1)
                safe = tl.where(top == float("-inf"), 0.0, top)
                part = tl.log2(tl.sum(tl.exp2(x - safe[:, None]), 1))
                if row_zero is not None:
                    safe -= tl.load(row_zero + rows, mask=ok_rows, other=0.0) * LOG2E
                tl.store(row_part + tile_col * n + rows, part + safe, mask=ok_rows)
            if COLS & STATS:
                x = tl.where(ok_rows[:, None], x, float("-inf"))
                top = tl.max(x, 0)
                safe = tl.where(top == float("-inf"), 0.0, top)
                part = tl.log2(tl.sum(tl.exp2(x - safe[None, :]), 0))
                if col_zero is not None:
                    safe -= tl.load(col_zero + cols, mask=ok_cols, other=0.0) * LOG2E
                tl.store(col_part + tile_row * m + cols, part + safe, mask=ok_cols)


@triton.jit
def merge_kernel(part, out, size, parts, FIRST: tl.constexpr, LOG: tl.constexpr, BLOCK: tl.constexpr):
    """Fold (parts, size) into out, in order: log-sum-exp of values in log2 units, or a sum."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    ok = at < size
    if LOG:
        top = tl.full((BLOCK,), float("-inf"), tl.float32)
        if not FIRST:
            top = tl.load(out + at, mask=ok, other=float("-inf")) * LOG2E
        total = tl.where(top == float("-inf"), 0.0, 1.0)
        for p in range(parts):
            value = tl.load(part + p * size + at, mask=ok, other=float("-inf"))
            higher = tl.maximum(top, value)
            safe = tl.where(higher == float("-inf"), 0.0, higher)
            total = total * tl.exp2(top - safe) + tl.exp2(value - safe)
            # NaN in a part must survive the maximum.
            top = tl.where(value != value, value, higher)
        tl.store(out + at, (top + tl.log2(total)) * LN2, mask=ok)
    else:
        total = tl.zeros((BLOCK,), tl.float32)
        if not FIRST:
            total = tl.load(out + at, mask=ok, other=0.0)
        for p in range(parts):
            total += tl.load(part + p * size + at, mask=ok, other=0.0)
        tl.store(out + at, total, mask=ok)
