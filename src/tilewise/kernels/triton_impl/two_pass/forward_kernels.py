"""Statistics of a macro-tile: one product, and one exponential per score for rows and columns.

    x_ij = scale <a_i, b_j> + bias_j        e_ij = exp(x_ij - t)
    row part: sum_j e_ij        column part: sum_i e_ij        both stand for log(part) + t

t is the *reference* of a tile: its largest score, or one estimate for all tiles. It is not the shift of a row or column
(``row_shift``, ``col_shift``), which a loss passes and which is subtracted from the merged statistics. In the code,
scores are multiplied by log2(e), and exp and log become exp2 and log2; ``tops`` (the references) and BELOW_PEAK are in
units of log2.

Each tile writes t and its part of each row to a place of its own, each strip of tiles its part of each column; there are
no atomics. `merge_kernel` adds the parts in a fixed order to the running statistics and subtracts the shifts.

Finding the largest score of a tile costs a tenth of the time. An estimate is as good: the largest score of a sample,
less BELOW_PEAK. Sums relative to it may range from 2**-80 to 2**120, all of them normal float32 numbers. A sum outside
of that range is bad. Any bad sum sets one flag for the whole launch, ``needs_repair``. `repair_kernel` then finds the
strips with bad sums and recomputes them with the maximum of each row and column. It writes logarithms instead of sums
and marks them with t = +inf.

The statistics of `statistics.TABLE`, such as the entropy, need the maximum t_i of each row of a tile. With them t_i is
the reference of the row, nothing needs repair, and parts are logarithms, also marked with t = +inf:

    e_ij = exp(x_ij - t_i),  S_i = sum_j e_ij >= 1
"""

import triton
import triton.language as tl

from tilewise.kernels.triton_impl.bits import COLS, MANY, MIRROR, ROW_SUM, ROWS, SOFTPLUS
from tilewise.kernels.triton_impl.launch import SCORE_KEYS, TILE_NUMBERS, kernel
from tilewise.kernels.triton_impl.primitives import (
    LARGEST_SCORE,
    LARGEST_SUM,
    LN2,
    LOG2E,
    SMALLEST_SUM,
    ScoreInputs,
    any_here,
    finite,
    near_sums,
    positives,
    scored_tile,
    shifts,
    store_tile,
    tile_place,
)
from tilewise.kernels.triton_impl.statistics import MANY_PARTS, Rows, RowTile, Step
from tilewise.kernels.triton_impl.two_pass.softplus_kernels import softplus_product, softplus_sum

# The exponential of the sample's largest score becomes 2**90. A sum may be 2**30 times that before it exceeds 2**120.
BELOW_PEAK = tl.constexpr(90.0)


@triton.jit
def untrusted(total):
    """Whether sums are too small or too large to be exact, or NaN.

    Rows past the end are multiplied by 0 before columns are summed. 0 * inf is NaN, so NaN also triggers repair.
    """
    return ((total >= SMALLEST_SUM) & (total <= LARGEST_SUM)) == 0


@triton.jit
def estimated_top(peaks, count):
    """The reference for all tiles: the largest score of a sample, less BELOW_PEAK; 0 if that is not finite."""
    high = tl.full((1024,), float("-inf"), tl.float32)
    for start in range(0, count, 1024):
        at = start + tl.arange(0, 1024)
        high = tl.maximum(high, tl.load(peaks + at, mask=at < count, other=float("-inf")))
    top = tl.max(high, 0) - BELOW_PEAK
    return tl.where((top > -1e30) & (top < 1e30), top, 0.0)


@triton.jit
def raised(high, total, x, axis: tl.constexpr):
    """A running log-sum-exp, high + log2(total), with the scores x along an axis added."""
    higher = tl.maximum(high, tl.max(x, axis))
    safe = finite(higher)
    return higher, total * tl.exp2(high - safe) + tl.sum(tl.exp2(x - tl.expand_dims(safe, axis)), axis)


@kernel(
    optional=(
        *SCORE_KEYS,
        "row_shift",
        "col_shift",
        "col_weight",
        "row_scale",
        "picked",
        "peaks",
        "only_if",
        "col_part",
        "e_desc",
        "reference",
    ),
    dynamic=(*TILE_NUMBERS, "peak_count", "picks"),
)
def forward_kernel(a_desc, b_desc, scale, bias, softcap,  # scores
                   row_key, col_key, row_skip, col_skip, row_shift, col_shift, col_weight, row_scale,  # keys, shifts, weights
                   picked, picks,  # columns to leave out
                   peaks, peak_count, only_if,  # a sample of scores; a flag, see below
                   row_part, col_part, tops, e_desc, reference, needs_repair,  # outputs
                   n, m, first, ahead,
                   D: tl.constexpr, STATS: tl.constexpr, SCORE: tl.constexpr, POSITIVE: tl.constexpr,
                   R: tl.constexpr, C: tl.constexpr, K: tl.constexpr, STRIP: tl.constexpr, GROUP: tl.constexpr,
                   PROGRAMS: tl.constexpr, EXACT: tl.constexpr, PARTS: tl.constexpr, CODE: tl.constexpr):  # fmt: skip
    """One macro-tile of n x m scores; row_part is (statistics, column tiles, n), col_part (statistics, strips, m).

    The sums of exponentials or softplus come first among the statistics; the others follow in the order of this code.

    A program computes the STRIP tiles of a strip from top to bottom. It keeps partial column sums in ``near`` and reduces
    them across threads once per strip. With ``e_desc`` it also stores the exponentials, relative to the largest score of
    the sample, or, if each row of a tile has a reference t_i, relative to t_i, which it writes to ``reference``. If
    ``only_if`` is not 1, it computes nothing.

    ``first`` is the index of the macro-tile's first column, ``ahead`` that of its first row less that of its first column.
    MIRROR: the scores are symmetric, so the columns of this macro-tile are rows too, and have positives.
    """
    # The tiles of a strip add to the same column sums, which need one reference. Positives of columns are stored per tile.
    tl.static_assert((STRIP == 1) or ((peaks is not None) and (MANY != POSITIVE)))
    strips, col_tiles = tl.cdiv(n, R * STRIP), tl.cdiv(m, C)
    steps = tl.cdiv(strips * col_tiles - tl.program_id(0), PROGRAMS) * STRIP
    if only_if is not None:
        steps = tl.where(tl.load(only_if) == 1, steps, 0)
    s = ScoreInputs(tl.load(scale), bias, softcap, row_key, col_key, row_skip, col_skip, n, m, first, ahead,
                    row_scale, picked, picks)  # fmt: skip
    top = 0.0
    if peaks is not None:
        top = estimated_top(peaks, peak_count)
    BELOW: tl.constexpr = (peaks is not None) and not (ROW_SUM & STATS)  # scored_tile already subtracts top
    STRIP_GROUP: tl.constexpr = max(1, GROUP // STRIP)
    near = tl.zeros((32 if R >= 64 else R, C), tl.float32)
    for step in tl.range(0, steps, flatten=True):
        strip, tile_col = tile_place(tl.program_id(0) + step // STRIP * PROGRAMS, strips, col_tiles, STRIP_GROUP)
        tile_row = strip * STRIP + step % STRIP
        rows, cols, x = scored_tile(
            a_desc, b_desc, s, tile_row, tile_col, D, SCORE, POSITIVE, R, C, K, EXACT, top if BELOW else 0.0
        )
        ok_rows, ok_cols = rows < n, cols < m
        totals = row_part + tile_col * n
        at = totals  # parts of the next statistic
        if (ROWS + SOFTPLUS) & STATS:
            at += col_tiles * n
        if SOFTPLUS & STATS:
            y = x
            if POSITIVE != 0:
                if any_here(rows, s, tile_row * R, tile_col * C, R, C, POSITIVE):
                    y = tl.where(positives(rows, cols, s, SCORE, POSITIVE), -x, x)
            total = softplus_product(y)
            tl.store(totals + rows, total, mask=ok_rows)
            # Every lane writes the same address, here and below.
            tl.store(needs_repair + rows * 0, 1, mask=ok_rows & (total == float("inf")))
        if MANY == POSITIVE:
            hit = positives(rows, cols, s, SCORE, POSITIVE)
            found = tl.sum(tl.where(hit, x - shifts(row_shift, rows, ok_rows)[:, None], 0.0), 1)
            tl.store(at + rows, found * LN2, mask=ok_rows)
            at += col_tiles * n
            if MIRROR & STATS:
                found = tl.sum(tl.where(hit, x - shifts(col_shift, cols, ok_cols)[None, :], 0.0), 0)
                tl.store(col_part + (strips + strip) * m + cols, found * LN2, mask=ok_cols)
        if ROW_SUM & STATS:
            weight = tl.load(col_weight + cols, mask=ok_cols, other=0.0)
            weighted = tl.sum(tl.where(ok_cols[None, :], x * weight[None, :], 0.0), 1)
            tl.store(at + rows, weighted * LN2, mask=ok_rows)
            at += col_tiles * n
        if len(PARTS) > 0:
            high = tl.max(x, 1)
            # Relative to a finite number inf stays inf, and NaN is found again: see `part_top`.
            high = tl.where(high < LARGEST_SCORE, high, LARGEST_SCORE)
            safe = finite(high)
            below = x - safe[:, None]
            e = tl.exp2(below)
            total = tl.sum(e, 1)
            if e_desc is not None:
                store_tile(e_desc, tile_row * R, tile_col * C, e)
                tl.store(reference + tile_col * n + rows, safe, mask=ok_rows)
            # The shift is close to the largest scores of the row: subtracted first, it leaves more digits to the sum.
            tl.store(totals + rows, (safe - shifts(row_shift, rows, ok_rows)) + tl.log2(total), mask=ok_rows)
            softmax = RowTile(x, cols, high, safe, below, e, total)
            for i in tl.static_range(len(PARTS)):
                numbers = PARTS[i](softmax)
                for k in tl.static_range(len(numbers)):
                    tl.store(at + rows, numbers[k], mask=ok_rows)
                    at += col_tiles * n
            tl.store(tops + tile_row * col_tiles + tile_col, float("inf"), mask=tile_row * R < n)
        elif (ROWS + COLS) & STATS:
            if peaks is None:
                top = finite(tl.max(tl.max(x, 1), 0))
            if not BELOW:
                x = x - top
            e = tl.exp2(x)
            if ROWS & STATS:
                total = tl.sum(e, 1)
                tl.store(totals + rows, total, mask=ok_rows)
                tl.store(needs_repair + rows * 0, 1, mask=ok_rows & untrusted(total))
            if e_desc is not None:
                store_tile(e_desc, tile_row * R, tile_col * C, e * 2.0**-BELOW_PEAK)
            if COLS & STATS:
                here = near_sums(e * ok_rows.to(tl.float32)[:, None])  # the compiler fuses mask and sum
                near = tl.where(step % STRIP == 0, here, near + here)
                if step % STRIP == STRIP - 1:
                    down = tl.sum(near, 0)
                    tl.store(col_part + strip * m + cols, down, mask=ok_cols)
                    tl.store(needs_repair + cols * 0, 1, mask=ok_cols & untrusted(down))
            tl.store(tops + tile_row * col_tiles + tile_col, top, mask=tile_row * R < n)


@kernel(optional=(*SCORE_KEYS, "row_scale", "picked", "col_part"), dynamic=(*TILE_NUMBERS, "picks"))
def repair_kernel(a_desc, b_desc, scale, bias, softcap,  # scores
                  row_key, col_key, row_skip, col_skip, row_scale, picked, picks,  # keys, weights, columns to leave out
                  row_part, col_part, tops, needs_repair,  # in and out
                  n, m, first, ahead,
                  D: tl.constexpr, STATS: tl.constexpr, SCORE: tl.constexpr, POSITIVE: tl.constexpr,
                  R: tl.constexpr, C: tl.constexpr, K: tl.constexpr, STRIP: tl.constexpr, GROUP: tl.constexpr,
                  PROGRAMS: tl.constexpr, EXACT: tl.constexpr):  # fmt: skip
    """Recompute the strips with bad sums. Mostly there are none.

    Exponentials are then relative to the maximum of each row and column; softplus takes a logarithm of each score.
    """
    strips, col_tiles = tl.cdiv(n, R * STRIP), tl.cdiv(m, C)
    STRIP_GROUP: tl.constexpr = max(1, GROUP // STRIP)
    s = ScoreInputs(tl.load(scale), bias, softcap, row_key, col_key, row_skip, col_skip, n, m, first, ahead,
                    row_scale, picked, picks)  # fmt: skip
    work = tl.where(tl.load(needs_repair) != 0, strips * col_tiles, 0)
    for unit in range(tl.program_id(0), work, PROGRAMS):
        strip, tile_col = tile_place(unit, strips, col_tiles, STRIP_GROUP)
        cols = tile_col * C + tl.arange(0, C)
        ok_cols = cols < m
        again = 0
        if (ROWS + SOFTPLUS) & STATS:
            of_strip = strip * STRIP * R + tl.arange(0, STRIP * R)
            across = tl.load(row_part + tile_col * n + of_strip, mask=of_strip < n, other=1.0)
            wrong = across == float("inf") if SOFTPLUS & STATS else untrusted(across)
            again = tl.max(wrong.to(tl.int32), 0)
        high, col_total = tl.full((C,), float("-inf"), tl.float32), tl.zeros((C,), tl.float32)
        if COLS & STATS:
            down = tl.load(col_part + strip * m + cols, mask=ok_cols, other=1.0)
            again = tl.maximum(again, tl.max(untrusted(down).to(tl.int32), 0))
        for step in range(0, tl.where(again != 0, STRIP, 0)):
            tile_row = strip * STRIP + step
            rows, _, x = scored_tile(a_desc, b_desc, s, tile_row, tile_col, D, SCORE, POSITIVE, R, C, K, EXACT)
            ok_rows = rows < n
            if SOFTPLUS & STATS:
                y = x
                if POSITIVE != 0:
                    y = tl.where(positives(rows, cols, s, SCORE, POSITIVE), -x, x)
                tl.store(row_part + tile_col * n + rows, softplus_sum(y), mask=ok_rows)
            if ROWS & STATS:
                top, total = raised(tl.full((R,), float("-inf"), tl.float32), tl.zeros((R,), tl.float32), x, 1)
                tl.store(row_part + tile_col * n + rows, top + tl.log2(total), mask=ok_rows)
            if COLS & STATS:
                high, col_total = raised(high, col_total, tl.where(ok_rows[:, None], x, float("-inf")), 0)
                tl.store(col_part + strip * m + cols, high + tl.log2(col_total), mask=ok_cols)
            tl.store(tops + tile_row * col_tiles + tile_col, float("inf"), mask=tile_row * R < n)


@triton.jit
def fold_sum(part, out, rows, FIRST: tl.constexpr):
    """out = the sum of (parts, size), added to out unless these parts are the first."""
    at, ok, size, parts = rows.at, rows.ok, rows.size, rows.parts
    total = tl.zeros(at.shape, tl.float32)
    if not FIRST:
        total = tl.load(out + at, mask=ok, other=0.0)
    for first in range(0, parts, MANY_PARTS):
        p = first + tl.arange(0, MANY_PARTS)
        here = (p < parts)[:, None] & ok[None, :]
        total += tl.sum(tl.load(part + p.to(tl.int64)[:, None] * size + at[None, :], mask=here, other=0.0), 0)
    tl.store(out + at, total, mask=ok)


@triton.jit
def fold_log(part, tops, top_step, shift, out, shares_part, rows, SHARES: tl.constexpr, FIRST: tl.constexpr):
    """out = the log-sum-exp over all parts. A part is a sum relative to its reference in ``tops``, or, if that is +inf, a
    logarithm. Each of SHARES merges its own parts, one after another from ``shares_part`` on. Returns where these end.
    """
    at, ok, size, parts = rows.at, rows.ok, rows.size, rows.parts
    start = shifts(shift, at, ok)
    high = tl.full(at.shape, float("-inf"), tl.float32)
    if not FIRST:
        high = tl.load(out + at, mask=ok, other=float("-inf")) * LOG2E
    total = tl.where(high == float("-inf"), 0.0, 1.0)
    states = ()
    for i in tl.static_range(len(SHARES)):
        states = states + (tl.zeros(at.shape, tl.float32) if FIRST else SHARES[i][0](rows, total),)  # type: ignore[assignment]
    for first in range(0, parts, MANY_PARTS):
        p = first + tl.arange(0, MANY_PARTS)
        here = (p < parts)[:, None] & ok[None, :]
        where = p.to(tl.int64)[:, None] * size + at[None, :]
        value = tl.load(part + where, mask=here, other=0.0)
        top = tl.load(tops + p * top_step, mask=p < parts, other=0.0)[:, None]
        value = tl.where(top == float("inf"), value - start[None, :], tl.log2(value) + (top - start[None, :]))
        value = tl.where(here, value, float("-inf"))
        higher = tl.maximum(high, tl.max(value, 0))
        safe = finite(higher)
        share, kept = tl.exp2(value - safe[None, :]), tl.exp2(high - safe)
        step = Step(value, where, here, share, kept, high, safe, total)
        found = ()
        for i in tl.static_range(len(SHARES)):
            found = found + (SHARES[i][1](states[i], shares_part + i * parts * size, step),)  # type: ignore[assignment]
        states = found
        total = total * kept + tl.sum(share, 0)
        # NaN in a part must survive the maximum.
        lost = tl.max((value != value).to(tl.int32), 0) > 0
        high = tl.where(lost, float("nan"), higher)
    tl.store(out + at, (high + tl.log2(total)) * LN2, mask=ok)
    for i in tl.static_range(len(SHARES)):
        SHARES[i][2](rows, states[i], total)
    return shares_part + len(SHARES) * parts * size


@kernel(
    optional=("row_shift", "col_part", "col_shift", "only_if", "row_lse", "row_softplus", "row_pos", "row_sum")
    + ("row_top", "row_top_col", "row_entropy", "row_sum_sq", "col_lse", "col_pos"),
    dynamic=("n", "row_parts", "m", "col_parts", "first"),
)
def merge_kernel(row_shift, col_shift, row_part, col_part, tops, only_if,  # in
                 row_lse, row_softplus, row_pos, row_sum, row_top, row_top_col, row_entropy, row_sum_sq, col_lse,
                 col_pos,  # in and out
                 n, row_parts, m, col_parts, first,
                 STATS: tl.constexpr, POSITIVE: tl.constexpr,
                 ROW_FIRST: tl.constexpr, COL_FIRST: tl.constexpr, LAST: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
                 STRIP: tl.constexpr, BLOCK: tl.constexpr, SHARES: tl.constexpr, FOLDS: tl.constexpr,
                 CODE: tl.constexpr):  # fmt: skip
    """Fold the parts of the rows, and after them those of the columns, into the running statistics.

    ROW_FIRST, COL_FIRST: these rows or columns have no statistics yet. LAST: this is the last macro-tile of these rows.
    If ``only_if`` is not 1, nothing is merged; it is never used together with column sums.
    """
    program = tl.program_id(0)
    if only_if is not None:
        n = tl.where(tl.load(only_if) == 1, n, 0)
    row_blocks = tl.cdiv(n, BLOCK)
    # BLOCK divides R and C, so the rows of a program lie in one row of tiles.
    if program < row_blocks:
        at = program * BLOCK + tl.arange(0, BLOCK)
        ok = at < n
        part, size = row_part, row_parts * n
        of_rows = Rows(at, ok, n, row_parts, first, row_shift, row_entropy, row_sum_sq, row_top, row_top_col)
        if (ROWS + SOFTPLUS) & STATS:
            part += size
        if SOFTPLUS & STATS:
            fold_sum(row_part, row_softplus, of_rows, ROW_FIRST)
        if MANY == POSITIVE:
            fold_sum(part, row_pos, of_rows, ROW_FIRST)
            part += size
        if ROW_SUM & STATS:
            fold_sum(part, row_sum, of_rows, ROW_FIRST)
            part += size
        if ROWS & STATS:
            shift = row_shift
            if len(SHARES) + len(FOLDS) > 0:  # subtracted already
                shift = None
            top = tops + (program * BLOCK // R) * row_parts
            part = fold_log(row_part, top, 1, shift, row_lse, part, of_rows, SHARES, ROW_FIRST)
            for i in tl.static_range(len(FOLDS)):
                part = FOLDS[i](of_rows, part, ROW_FIRST, LAST)
    elif col_part is not None:
        begin = (program - row_blocks) * BLOCK
        at = begin + tl.arange(0, BLOCK)
        of_cols = Rows(at, at < m, m, col_parts, first, col_shift, None, None, None, None)
        fold_log(col_part, tops + begin // C, row_parts * STRIP, col_shift, col_lse, col_part, of_cols, (), COL_FIRST)
        if (MANY == POSITIVE) and (MIRROR & STATS):
            fold_sum(col_part + col_parts * m, col_pos, of_cols, COL_FIRST)
