"""Statistics of a macro-tile: one product, one exponential per score for both directions.

    x_ij = scale <a_i, b_j> + bias_j,   e_ij = exp(x_ij - t),   t = max over the tile, or a guess for all tiles
    row part: sum_j e_ij        column part: sum_i e_ij        both stand for log(part) + t

Each tile writes t and its part of each row, each strip of tiles its part of each column, to a place of its own (no
atomics); `merge_kernel` folds the parts in a fixed order into the running statistics, less the zeros. The maximum costs a
tenth of the time; a guess does as well, since sums from 2**-80 to 2**120 are ordinary float32 numbers: the largest score
of a sample, less BELOW_PEAK. Where t is too far from a row for that, the tile casts needs_repair, and `repair_kernel` does its
strip again with the maximum of each row and column, and writes logarithms instead of sums, with t = +inf as the sign of it.
"""

import triton
import triton.language as tl

from tilewise.kernels.triton_impl.primitives import (
    LARGEST_SUM,
    LN2,
    LOG2E,
    MANY,
    SMALLEST_SUM,
    any_here,
    near_sums,
    positives,
    score_tile,
    store_tile,
    tile_dot,
    tile_place,
)

BELOW_PEAK = tl.constexpr(90.0)  # unsampled scores may be 2**30 times the sample's largest before they overflow

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
def untrusted(total):
    """Sums that are too small or too large to be exact; NaN is neither."""
    return (total < SMALLEST_SUM) | (total > LARGEST_SUM)


@triton.jit
def untrusted_column(total):
    """The same, or NaN: a row past the end counts 0 times its exponential, which may be infinite."""
    return ((total >= SMALLEST_SUM) & (total <= LARGEST_SUM)) == 0


@triton.jit
def guess_top(peaks, count):
    """A shift for all tiles: the largest score of a sample, less BELOW_PEAK; 0 if that is no number."""
    high = tl.full((1024,), float("-inf"), tl.float32)
    for start in range(0, count, 1024):
        at = start + tl.arange(0, 1024)
        high = tl.maximum(high, tl.load(peaks + at, mask=at < count, other=float("-inf")))
    top = tl.max(high, 0) - BELOW_PEAK
    return tl.where((top > -1e30) & (top < 1e30), top, 0.0)


@triton.jit(do_not_specialize=["softcap", "peak_count", "n", "m", "first", "ahead"])
def forward_kernel(a_desc, b_desc, scale, bias, softcap, row_key, col_key, row_skip, col_skip, row_shift, col_shift,
                   col_weight, row_part, col_part, pos_part, pos_col_part, sum_part, tops, needs_repair, peaks, peak_count, e_desc, only_if, n, m, first, ahead,
                   D: tl.constexpr, STATS: tl.constexpr, SCORE: tl.constexpr, POSITIVE: tl.constexpr,
                   R: tl.constexpr, C: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, PROGRAMS: tl.constexpr,
                   EXACT: tl.constexpr, CARRY: tl.constexpr, STRIP: tl.constexpr):  # fmt: skip
    """One macro-tile of n x m scores; row_part is (column tiles, n), col_part (strips, m).

    A program walks down a strip of STRIP tiles, and adds up their columns before threads exchange anything. With CARRY the
    exponentials are stored too, measured from the sample's largest score. If only_if is 0, nobody wants them.
    """
    strips, col_tiles = tl.cdiv(n, R * STRIP), tl.cdiv(m, C)
    steps = tl.cdiv(strips * col_tiles - tl.program_id(0), PROGRAMS) * STRIP
    if only_if is not None:
        steps = tl.where(tl.load(only_if) != 0, steps, 0)
    s = tl.load(scale)
    top = 0.0
    if peaks is not None:
        top = guess_top(peaks, peak_count)
    BELOW: tl.constexpr = (peaks is not None) and not (ROW_SUM & STATS)  # whether scores are wanted from top only
    ABREAST: tl.constexpr = max(1, GROUP // STRIP)
    near = tl.zeros((32 if R >= 64 else R, C), tl.float32)
    for step in tl.range(0, steps, flatten=True):
        strip, tile_col = tile_place(tl.program_id(0) + step // STRIP * PROGRAMS, strips, col_tiles, ABREAST)
        tile_row = strip * STRIP + step % STRIP
        acc = tile_dot(a_desc, b_desc, tile_row * R, tile_col * C, D, R, C, K, EXACT)
        rows = tile_row * R + tl.arange(0, R)
        cols = tile_col * C + tl.arange(0, C)
        ok_rows, ok_cols = rows < n, cols < m
        x = score_tile(acc, rows, cols, n, m, s, bias, softcap, row_skip, col_skip, row_key, col_key, first, ahead, SCORE, POSITIVE,
                       top if BELOW else 0.0)  # fmt: skip
        if MANY == POSITIVE:
            hit = positives(rows, cols, n, m, row_key, col_key, first, ahead, SCORE, POSITIVE)
            zero = tl.zeros((R,), tl.float32)
            if row_shift is not None:
                zero = tl.load(row_shift + rows, mask=ok_rows, other=0.0) * LOG2E
            found = tl.sum(tl.where(hit, x - zero[:, None], 0.0), 1)
            tl.store(pos_part + tile_col * n + rows, found * LN2, mask=ok_rows)
            if MIRROR & STATS:
                zero_col = tl.zeros((C,), tl.float32)
                if col_shift is not None:
                    zero_col = tl.load(col_shift + cols, mask=ok_cols, other=0.0) * LOG2E
                found = tl.sum(tl.where(hit, x - zero_col[None, :], 0.0), 0)
                tl.store(pos_col_part + tile_row * m + cols, found * LN2, mask=ok_cols)
        if ROW_SUM & STATS:
            weight = tl.load(col_weight + cols, mask=ok_cols, other=0.0)
            weighted = tl.sum(tl.where(ok_cols[None, :], x * weight[None, :], 0.0), 1)
            tl.store(sum_part + tile_col * n + rows, weighted * LN2, mask=ok_rows)
        if SOFTPLUS & STATS:
            if POSITIVE != 0:
                if any_here(rows, n, m, row_key, first, ahead, tile_row * R, tile_col * C, R, C, POSITIVE):
                    hit = positives(rows, cols, n, m, row_key, col_key, first, ahead, SCORE, POSITIVE)
                    x = tl.where(hit, -x, x)
            joined = tl.reduce(tl.exp2(-tl.abs(x)), 1, softplus_join)
            total = tl.sum(tl.maximum(x, 0.0), 1) * LN2 + log1p(joined)
            tl.store(row_part + tile_col * n + rows, tl.where(joined > 2.0**100, float("inf"), total), mask=ok_rows)
            tl.store(needs_repair + rows * 0, 1, mask=ok_rows & (joined > 2.0**100))
        if (ROWS + COLS) & STATS:
            if peaks is None:
                top = tl.max(tl.max(x, 1), 0)
                top = tl.where(top == float("-inf"), 0.0, top)
            if not BELOW:
                x = x - top
            e = tl.exp2(x)
            if ROWS & STATS:
                total = tl.sum(e, 1)
                tl.store(row_part + tile_col * n + rows, total, mask=ok_rows)
                tl.store(needs_repair + rows * 0, 1, mask=ok_rows & untrusted(total))
            if CARRY:
                store_tile(e_desc, tile_row * R, tile_col * C, e * 2.0**-BELOW_PEAK)
            if COLS & STATS:
                here = near_sums(e * ok_rows.to(tl.float32)[:, None])  # the factor rides on the additions
                if STRIP == 1:
                    near = here
                else:
                    near = tl.where(step % STRIP == 0, here, near + here)
                if step % STRIP == STRIP - 1:
                    below = tl.sum(near, 0)
                    tl.store(col_part + strip * m + cols, below, mask=ok_cols)
                    tl.store(needs_repair + cols * 0, 1, mask=ok_cols & untrusted_column(below))
            tl.store(tops + tile_row * col_tiles + tile_col, top, mask=tile_row * R < n)


@triton.jit
def raised(high, total, x, axis: tl.constexpr):
    """A running log-sum-exp, high + log2(total), with the scores x along an axis added."""
    higher = tl.maximum(high, tl.max(x, axis))
    safe = tl.where(higher == float("-inf"), 0.0, higher)
    return higher, total * tl.exp2(high - safe) + tl.sum(tl.exp2(x - tl.expand_dims(safe, axis)), axis)


@triton.jit(do_not_specialize=["softcap", "n", "m", "first", "ahead"])
def repair_kernel(a_desc, b_desc, scale, bias, softcap, row_key, col_key, row_skip, col_skip,
                  row_part, col_part, tops, needs_repair, n, m, first, ahead,
                  D: tl.constexpr, STATS: tl.constexpr, SCORE: tl.constexpr, POSITIVE: tl.constexpr,
                  R: tl.constexpr, C: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, PROGRAMS: tl.constexpr,
                  EXACT: tl.constexpr, STRIP: tl.constexpr):  # fmt: skip
    """Strips whose sums cannot be trusted, again, each row and column with a maximum of its own. Mostly there are none."""
    strips, col_tiles = tl.cdiv(n, R * STRIP), tl.cdiv(m, C)
    ABREAST: tl.constexpr = max(1, GROUP // STRIP)
    s = tl.load(scale)
    work = tl.where(tl.load(needs_repair) != 0, strips * col_tiles, 0)
    for unit in range(tl.program_id(0), work, PROGRAMS):
        strip, tile_col = tile_place(unit, strips, col_tiles, ABREAST)
        cols = tile_col * C + tl.arange(0, C)
        ok_cols = cols < m
        again = 0
        if (ROWS + SOFTPLUS) & STATS:
            of_strip = strip * STRIP * R + tl.arange(0, STRIP * R)
            across = tl.load(row_part + tile_col * n + of_strip, mask=of_strip < n, other=1.0)
            if SOFTPLUS & STATS:
                again = tl.max((across == float("inf")).to(tl.int32), 0)
            else:
                again = tl.max(untrusted(across).to(tl.int32), 0)
        high, below = tl.full((C,), float("-inf"), tl.float32), tl.zeros((C,), tl.float32)
        if COLS & STATS:
            down = tl.load(col_part + strip * m + cols, mask=ok_cols, other=1.0)
            again = tl.maximum(again, tl.max(untrusted_column(down).to(tl.int32), 0))
        for step in range(0, tl.where(again != 0, STRIP, 0)):
            tile_row = strip * STRIP + step
            rows = tile_row * R + tl.arange(0, R)
            ok_rows = rows < n
            acc = tile_dot(a_desc, b_desc, tile_row * R, tile_col * C, D, R, C, K, EXACT)
            x = score_tile(acc, rows, cols, n, m, s, bias, softcap, row_skip, col_skip, row_key, col_key, first, ahead, SCORE,
                           POSITIVE)  # fmt: skip
            if SOFTPLUS & STATS:
                if POSITIVE != 0:
                    hit = positives(rows, cols, n, m, row_key, col_key, first, ahead, SCORE, POSITIVE)
                    x = tl.where(hit, -x, x)
                total = tl.sum(tl.maximum(x, 0.0) * LN2 + log1p(tl.exp2(-tl.abs(x))), 1)
                tl.store(row_part + tile_col * n + rows, total, mask=ok_rows)
            if ROWS & STATS:
                top, total = raised(tl.full((R,), float("-inf"), tl.float32), tl.zeros((R,), tl.float32), x, 1)
                tl.store(row_part + tile_col * n + rows, top + tl.log2(total), mask=ok_rows)
            if COLS & STATS:
                high, below = raised(high, below, tl.where(ok_rows[:, None], x, float("-inf")), 0)
                tl.store(col_part + strip * m + cols, high + tl.log2(below), mask=ok_cols)
            if (ROWS + COLS) & STATS:
                tl.store(tops + tile_row * col_tiles + tile_col, float("inf"), mask=tile_row * R < n)


@triton.jit
def fold(part, tops, top_step, zero, out, at, ok, size, parts, FIRST: tl.constexpr, LOG: tl.constexpr,
         MANY_PARTS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Fold (parts, size) into out, in order: a log-sum-exp, of sums that lie t above zero, or a plain sum."""
    start = tl.zeros((BLOCK,), tl.float32)
    high = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    if LOG:
        if zero is not None:
            start = tl.load(zero + at, mask=ok, other=0.0) * LOG2E
        if not FIRST:
            high = tl.load(out + at, mask=ok, other=float("-inf")) * LOG2E
        total = tl.where(high == float("-inf"), 0.0, 1.0)
    elif not FIRST:
        total = tl.load(out + at, mask=ok, other=0.0)
    for first in range(0, parts, MANY_PARTS):
        p = first + tl.arange(0, MANY_PARTS)
        here = (p < parts)[:, None] & ok[None, :]
        value = tl.load(part + p.to(tl.int64)[:, None] * size + at[None, :], mask=here, other=0.0)
        if LOG:
            top = tl.load(tops + p * top_step, mask=p < parts, other=0.0)[:, None]
            value = tl.where(top == float("inf"), value - start[None, :], tl.log2(value) + (top - start[None, :]))
            value = tl.where(here, value, float("-inf"))
            higher = tl.maximum(high, tl.max(value, 0))
            safe = tl.where(higher == float("-inf"), 0.0, higher)
            total = total * tl.exp2(high - safe) + tl.sum(tl.exp2(value - safe[None, :]), 0)
            # NaN in a part must survive the maximum.
            lost = tl.max((value != value).to(tl.int32), 0) > 0
            high = tl.where(lost, float("nan"), higher)
        else:
            total += tl.sum(value, 0)
    if LOG:
        total = (high + tl.log2(total)) * LN2
    tl.store(out + at, total, mask=ok)


@triton.jit(do_not_specialize=["n", "row_parts", "m", "col_parts"])
def merge_kernel(row_part, row_shift, row_out, n, row_parts, col_part, col_shift, col_out, m, col_parts, tops, only_if,
                 ROW_FIRST: tl.constexpr, COL_FIRST: tl.constexpr, LOG: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
                 STRIP: tl.constexpr, MANY_PARTS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Fold the parts of the rows, and behind them those of the columns, into the running statistics.

    If only_if is 0, there are no parts; it is asked only where no columns are summed.
    """
    program = tl.program_id(0)
    if only_if is not None:
        n = tl.where(tl.load(only_if) != 0, n, 0)
    row_blocks = tl.cdiv(n, BLOCK) if row_part is not None else 0
    # BLOCK divides R and C: a program's rows lie in one row of tiles.
    if row_part is not None:
        if program < row_blocks:
            at = program * BLOCK + tl.arange(0, BLOCK)
            mine = tops + (program * BLOCK // R) * row_parts
            fold(row_part, mine, 1, row_shift, row_out, at, at < n, n, row_parts, ROW_FIRST, LOG, MANY_PARTS, BLOCK)
    if col_part is not None:
        if program >= row_blocks:
            first = (program - row_blocks) * BLOCK
            at = first + tl.arange(0, BLOCK)
            fold(
                col_part,
                tops + first // C,
                row_parts * STRIP,
                col_shift,
                col_out,
                at,
                at < m,
                m,
                col_parts,
                COL_FIRST,
                LOG,
                MANY_PARTS,
                BLOCK,
            )
