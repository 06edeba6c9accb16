"""Statistics of a macro-tile: one product, and one exponential per score for rows and columns.

    x_ij = scale <a_i, b_j> + bias_j,   e_ij = exp(x_ij - t),   t = max over the tile, or an estimate for all tiles
    row part: sum_j e_ij        column part: sum_i e_ij        both stand for log(part) + t

Each tile writes t and its part of each row to a place of its own, each strip of tiles its part of each column; there are
no atomics. `merge_kernel` adds the parts in a fixed order to the running statistics and subtracts the shifts.

The maximum of a tile costs a tenth of the time. An estimate is as good, since sums from 2**-80 to 2**120 are normal
float32 numbers: the largest score of a sample, less BELOW_PEAK. Where t is too far from a row for that, the tile sets
``needs_repair``. `repair_kernel` then computes that strip again with the maximum of each row and column. It writes
logarithms instead of sums and marks them with t = +inf.
"""

import triton
import triton.language as tl

from tilewise.kernels.triton_impl.bits import COLS, MANY, MIRROR, ROW_SUM, ROWS
from tilewise.kernels.triton_impl.launch.prepared import SCORE_KEYS, TILE_NUMBERS, kernel
from tilewise.kernels.triton_impl.primitives import (
    LARGEST_SUM,
    LN2,
    LOG2E,
    SMALLEST_SUM,
    near_sums,
    positives,
    scored_tile,
    store_tile,
    tile_place,
)

BELOW_PEAK = tl.constexpr(90.0)  # other scores may be 2**30 times the largest of the sample before they overflow


@triton.jit
def untrusted(total):
    """Whether sums are too small or too large to be exact; NaN is neither."""
    return (total < SMALLEST_SUM) | (total > LARGEST_SUM)


@triton.jit
def untrusted_column(total):
    """The same, or NaN: a row past the end adds 0 times its exponential, which may be infinite."""
    return ((total >= SMALLEST_SUM) & (total <= LARGEST_SUM)) == 0


@triton.jit
def estimated_top(peaks, count):
    """A shift for all tiles: the largest score of a sample, less BELOW_PEAK; 0 if that is not finite."""
    high = tl.full((1024,), float("-inf"), tl.float32)
    for start in range(0, count, 1024):
        at = start + tl.arange(0, 1024)
        high = tl.maximum(high, tl.load(peaks + at, mask=at < count, other=float("-inf")))
    top = tl.max(high, 0) - BELOW_PEAK
    return tl.where((top > -1e30) & (top < 1e30), top, 0.0)


@kernel(
    optional=(*SCORE_KEYS, "row_shift", "col_shift", "col_weight", "row_part", "col_part", "pos_part", "pos_col_part")
    + ("sum_part", "peaks", "e_desc", "only_if"),
    dynamic=(*TILE_NUMBERS, "peak_count"),
)
def forward_kernel(a_desc, b_desc, scale, bias, softcap,  # scores
                   row_key, col_key, row_skip, col_skip, row_shift, col_shift, col_weight,  # keys, shifts, weights
                   peaks, peak_count, only_if,  # a sample of scores; a flag, see below
                   row_part, col_part, pos_part, pos_col_part, sum_part, tops, e_desc, needs_repair,  # outputs
                   n, m, first, ahead,
                   D: tl.constexpr, STATS: tl.constexpr, SCORE: tl.constexpr, POSITIVE: tl.constexpr, SAVE: tl.constexpr,
                   R: tl.constexpr, C: tl.constexpr, K: tl.constexpr, STRIP: tl.constexpr, GROUP: tl.constexpr,
                   PROGRAMS: tl.constexpr, EXACT: tl.constexpr):  # fmt: skip
    """One macro-tile of n x m scores; row_part is (column tiles, n), col_part (strips, m).

    A program computes the STRIP tiles of a strip from top to bottom, and adds up their columns before threads exchange
    anything. With SAVE it also stores the exponentials, relative to the largest score of the sample. If ``only_if`` is
    0, it computes nothing.
    """
    strips, col_tiles = tl.cdiv(n, R * STRIP), tl.cdiv(m, C)
    steps = tl.cdiv(strips * col_tiles - tl.program_id(0), PROGRAMS) * STRIP
    if only_if is not None:
        steps = tl.where(tl.load(only_if) != 0, steps, 0)
    s = tl.load(scale)
    top = 0.0
    if peaks is not None:
        top = estimated_top(peaks, peak_count)
    BELOW: tl.constexpr = (peaks is not None) and not (ROW_SUM & STATS)  # whether every score is needed less top
    STRIP_GROUP: tl.constexpr = max(1, GROUP // STRIP)
    near = tl.zeros((32 if R >= 64 else R, C), tl.float32)
    for step in tl.range(0, steps, flatten=True):
        strip, tile_col = tile_place(tl.program_id(0) + step // STRIP * PROGRAMS, strips, col_tiles, STRIP_GROUP)
        tile_row = strip * STRIP + step % STRIP
        rows, cols, x = scored_tile(a_desc, b_desc, s, bias, softcap, row_key, col_key, row_skip, col_skip, tile_row, tile_col,
                                    n, m, first, ahead, D, SCORE, POSITIVE, R, C, K, EXACT, top if BELOW else 0.0)  # fmt: skip
        ok_rows, ok_cols = rows < n, cols < m
        if MANY == POSITIVE:
            hit = positives(rows, cols, n, m, row_key, col_key, first, ahead, SCORE, POSITIVE)
            shift = tl.zeros((R,), tl.float32)
            if row_shift is not None:
                shift = tl.load(row_shift + rows, mask=ok_rows, other=0.0) * LOG2E
            found = tl.sum(tl.where(hit, x - shift[:, None], 0.0), 1)
            tl.store(pos_part + tile_col * n + rows, found * LN2, mask=ok_rows)
            if MIRROR & STATS:
                shift_col = tl.zeros((C,), tl.float32)
                if col_shift is not None:
                    shift_col = tl.load(col_shift + cols, mask=ok_cols, other=0.0) * LOG2E
                found = tl.sum(tl.where(hit, x - shift_col[None, :], 0.0), 0)
                tl.store(pos_col_part + tile_row * m + cols, found * LN2, mask=ok_cols)
        if ROW_SUM & STATS:
            weight = tl.load(col_weight + cols, mask=ok_cols, other=0.0)
            weighted = tl.sum(tl.where(ok_cols[None, :], x * weight[None, :], 0.0), 1)
            tl.store(sum_part + tile_col * n + rows, weighted * LN2, mask=ok_rows)
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
            if SAVE:
                store_tile(e_desc, tile_row * R, tile_col * C, e * 2.0**-BELOW_PEAK)
            if COLS & STATS:
                here = near_sums(e * ok_rows.to(tl.float32)[:, None])  # one multiply-add with the additions
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


@kernel(optional=(*SCORE_KEYS, "row_part", "col_part"), dynamic=TILE_NUMBERS)
def repair_kernel(a_desc, b_desc, scale, bias, softcap,  # scores
                  row_key, col_key, row_skip, col_skip,  # keys
                  row_part, col_part, tops, needs_repair,  # in and out
                  n, m, first, ahead,
                  D: tl.constexpr, STATS: tl.constexpr, SCORE: tl.constexpr, POSITIVE: tl.constexpr,
                  R: tl.constexpr, C: tl.constexpr, K: tl.constexpr, STRIP: tl.constexpr, GROUP: tl.constexpr,
                  PROGRAMS: tl.constexpr, EXACT: tl.constexpr):  # fmt: skip
    """Compute strips with untrusted sums again, with the maximum of each row and column. Mostly there are none."""
    strips, col_tiles = tl.cdiv(n, R * STRIP), tl.cdiv(m, C)
    STRIP_GROUP: tl.constexpr = max(1, GROUP // STRIP)
    s = tl.load(scale)
    work = tl.where(tl.load(needs_repair) != 0, strips * col_tiles, 0)
    for unit in range(tl.program_id(0), work, PROGRAMS):
        strip, tile_col = tile_place(unit, strips, col_tiles, STRIP_GROUP)
        cols = tile_col * C + tl.arange(0, C)
        ok_cols = cols < m
        again = 0
        if ROWS & STATS:
            of_strip = strip * STRIP * R + tl.arange(0, STRIP * R)
            across = tl.load(row_part + tile_col * n + of_strip, mask=of_strip < n, other=1.0)
            again = tl.max(untrusted(across).to(tl.int32), 0)
        high, below = tl.full((C,), float("-inf"), tl.float32), tl.zeros((C,), tl.float32)
        if COLS & STATS:
            down = tl.load(col_part + strip * m + cols, mask=ok_cols, other=1.0)
            again = tl.maximum(again, tl.max(untrusted_column(down).to(tl.int32), 0))
        for step in range(0, tl.where(again != 0, STRIP, 0)):
            tile_row = strip * STRIP + step
            rows, _, x = scored_tile(a_desc, b_desc, s, bias, softcap, row_key, col_key, row_skip, col_skip, tile_row, tile_col,
                                        n, m, first, ahead, D, SCORE, POSITIVE, R, C, K, EXACT)  # fmt: skip
            ok_rows = rows < n
            if ROWS & STATS:
                top, total = raised(tl.full((R,), float("-inf"), tl.float32), tl.zeros((R,), tl.float32), x, 1)
                tl.store(row_part + tile_col * n + rows, top + tl.log2(total), mask=ok_rows)
            if COLS & STATS:
                high, below = raised(high, below, tl.where(ok_rows[:, None], x, float("-inf")), 0)
                tl.store(col_part + strip * m + cols, high + tl.log2(below), mask=ok_cols)
            tl.store(tops + tile_row * col_tiles + tile_col, float("inf"), mask=tile_row * R < n)


@triton.jit
def fold(part, tops, top_step, shift, out, at, ok, size, parts,
         FIRST: tl.constexpr, LOG: tl.constexpr, MANY_PARTS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Fold (parts, size) into out, in order: a log-sum-exp, of sums relative to their top, or a plain sum."""
    start = tl.zeros((BLOCK,), tl.float32)
    high = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    if LOG:
        if shift is not None:
            start = tl.load(shift + at, mask=ok, other=0.0) * LOG2E
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


@kernel(
    optional=("row_part", "row_shift", "row_out", "col_part", "col_shift", "col_out", "only_if"),
    dynamic=("n", "row_parts", "m", "col_parts"),
)
def merge_kernel(row_part, row_shift, col_part, col_shift, tops, only_if, row_out, col_out, n, row_parts, m, col_parts,
                 ROW_FIRST: tl.constexpr, COL_FIRST: tl.constexpr, LOG: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
                 STRIP: tl.constexpr, MANY_PARTS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Fold the parts of the rows, and after them those of the columns, into the running statistics.

    If ``only_if`` is 0, there are no parts. It is given only where no columns are summed.
    """
    program = tl.program_id(0)
    if only_if is not None:
        n = tl.where(tl.load(only_if) != 0, n, 0)
    row_blocks = tl.cdiv(n, BLOCK) if row_part is not None else 0
    # BLOCK divides R and C, so the rows of a program lie in one row of tiles.
    if row_part is not None:
        if program < row_blocks:
            at = program * BLOCK + tl.arange(0, BLOCK)
            mine = tops + (program * BLOCK // R) * row_parts
            fold(row_part, mine, 1, row_shift, row_out, at, at < n, n, row_parts, ROW_FIRST, LOG, MANY_PARTS, BLOCK)
    if col_part is not None:
        if program >= row_blocks:
            begin = (program - row_blocks) * BLOCK
            at, mine, step = begin + tl.arange(0, BLOCK), tops + begin // C, row_parts * STRIP
            fold(col_part, mine, step, col_shift, col_out, at, at < m, m, col_parts, COL_FIRST, LOG, MANY_PARTS, BLOCK)
