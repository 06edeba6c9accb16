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

Entropies, sums of squared probabilities and the statistic TOP (the largest score of a row) need the maximum t_i of each
row of a tile. With them t_i is the reference of the row, nothing needs repair, and parts are logarithms, also marked
with t = +inf:

    e_ij = exp(x_ij - t_i),  S_i = sum_j e_ij >= 1
    entropy_i = log S_i + sum_j e_ij (t_i - x_ij) / S_i        sum_sq_i = log sum_j e_ij^2 - 2 log S_i

A further statistic of rows takes a line in `forward_kernel`, which stores its part of a tile, and one in `merge_kernel`.
"""

import triton
import triton.language as tl

from tilewise.kernels.triton_impl.bits import COLS, ENTROPY, MANY, MIRROR, ROW_SUM, ROWS, SOFTPLUS, SUM_SQ, TOP
from tilewise.kernels.triton_impl.launch import SCORE_KEYS, TILE_NUMBERS, kernel
from tilewise.kernels.triton_impl.primitives import (
    LARGEST_SCORE,
    LARGEST_SUM,
    LN2,
    LOG2E,
    NO_SHARE,
    SMALLEST_SUM,
    any_here,
    near_sums,
    positives,
    scored_tile,
    store_tile,
    tile_place,
    with_rank,
    without_picks,
    without_rank,
)
from tilewise.kernels.triton_impl.two_pass.softplus_kernels import softplus_product, softplus_sum

# The exponential of the sample's largest score becomes 2**90. A sum may be 2**30 times that before it exceeds 2**120.
BELOW_PEAK = tl.constexpr(90.0)
MANY_PARTS = tl.constexpr(64)  # parts that `merge_kernel` reads at once
NO_COLUMN = tl.constexpr(2.0**24)  # a macro-tile has fewer columns, so float32 holds their indices


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
def shifts(shift, at, ok):
    """The shifts of rows or columns in units of log2; 0 without shifts."""
    start = tl.zeros_like(at).to(tl.float32)
    if shift is not None:
        start = tl.load(shift + at, mask=ok, other=0.0) * LOG2E
    return start


@triton.jit
def finite(top):
    """A maximum that can be subtracted: 0 instead of -inf, the maximum of no scores."""
    return tl.where(top == float("-inf"), 0.0, top)


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
                   PROGRAMS: tl.constexpr, EXACT: tl.constexpr):  # fmt: skip
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
    s = tl.load(scale)
    top = 0.0
    if peaks is not None:
        top = estimated_top(peaks, peak_count)
    BELOW: tl.constexpr = (peaks is not None) and not (ROW_SUM & STATS)  # scored_tile already subtracts top
    STRIP_GROUP: tl.constexpr = max(1, GROUP // STRIP)
    near = tl.zeros((32 if R >= 64 else R, C), tl.float32)
    for step in tl.range(0, steps, flatten=True):
        strip, tile_col = tile_place(tl.program_id(0) + step // STRIP * PROGRAMS, strips, col_tiles, STRIP_GROUP)
        tile_row = strip * STRIP + step % STRIP
        rows, cols, x = scored_tile(a_desc, b_desc, s, bias, softcap, row_key, col_key, row_skip, col_skip, tile_row, tile_col,
                                    n, m, first, ahead, D, SCORE, POSITIVE, R, C, K, EXACT, top if BELOW else 0.0, row_scale)  # fmt: skip
        ok_rows, ok_cols = rows < n, cols < m
        if picked is not None:
            x = without_picks(x, rows, cols, n, first, tile_col * C, picked, picks, C)
        totals = row_part + tile_col * n
        at = totals  # parts of the next statistic
        if (ROWS + SOFTPLUS) & STATS:
            at += col_tiles * n
        if SOFTPLUS & STATS:
            y = x
            if POSITIVE != 0:
                if any_here(rows, n, m, row_key, first, ahead, tile_row * R, tile_col * C, R, C, POSITIVE):
                    y = tl.where(positives(rows, cols, n, m, row_key, col_key, first, ahead, SCORE, POSITIVE), -x, x)
            total = softplus_product(y)
            tl.store(totals + rows, total, mask=ok_rows)
            # Every lane writes the same address, here and below.
            tl.store(needs_repair + rows * 0, 1, mask=ok_rows & (total == float("inf")))
        if MANY == POSITIVE:
            hit = positives(rows, cols, n, m, row_key, col_key, first, ahead, SCORE, POSITIVE)
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
        if (ENTROPY + SUM_SQ + TOP) & STATS:
            high = tl.max(x, 1)
            if TOP & STATS:
                # Relative to a finite number inf stays inf, and NaN is found again: see below.
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
            if ENTROPY & STATS:
                gap = tl.sum(e * tl.maximum(below, NO_SHARE), 1)  # 0 times -inf would be NaN
                tl.store(at + rows, tl.where(total == 0.0, 0.0, tl.log2(total) - gap / total), mask=ok_rows)
                at += col_tiles * n
            if SUM_SQ & STATS:
                square = tl.log2(tl.sum(e * e, 1)) - 2.0 * tl.log2(total)
                tl.store(at + rows, tl.where(total == 0.0, 0.0, square), mask=ok_rows)
                at += col_tiles * n
            if TOP & STATS:
                # Last, and from `below`, which the other statistics need too: fewer tiles are live at once.
                high = tl.where(total == total, high, float("inf"))  # the rank of NaN
                hit = with_rank(below) >= (high - safe)[:, None]
                place = tl.min(tl.where(hit, cols[None, :].to(tl.float32), NO_COLUMN), 1)
                tl.store(at + rows, high, mask=ok_rows)
                tl.store(at + col_tiles * n + rows, place, mask=ok_rows)
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
    s = tl.load(scale)
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
            rows, _, x = scored_tile(a_desc, b_desc, s, bias, softcap, row_key, col_key, row_skip, col_skip, tile_row, tile_col,
                                        n, m, first, ahead, D, SCORE, POSITIVE, R, C, K, EXACT, 0.0, row_scale)  # fmt: skip
            ok_rows = rows < n
            if picked is not None:
                x = without_picks(x, rows, cols, n, first, tile_col * C, picked, picks, C)
            if SOFTPLUS & STATS:
                y = x
                if POSITIVE != 0:
                    y = tl.where(positives(rows, cols, n, m, row_key, col_key, first, ahead, SCORE, POSITIVE), -x, x)
                tl.store(row_part + tile_col * n + rows, softplus_sum(y), mask=ok_rows)
            if ROWS & STATS:
                top, total = raised(tl.full((R,), float("-inf"), tl.float32), tl.zeros((R,), tl.float32), x, 1)
                tl.store(row_part + tile_col * n + rows, top + tl.log2(total), mask=ok_rows)
            if COLS & STATS:
                high, col_total = raised(high, col_total, tl.where(ok_rows[:, None], x, float("-inf")), 0)
                tl.store(col_part + strip * m + cols, high + tl.log2(col_total), mask=ok_cols)
            tl.store(tops + tile_row * col_tiles + tile_col, float("inf"), mask=tile_row * R < n)


@triton.jit
def fold_sum(part, out, at, ok, size, parts, FIRST: tl.constexpr):
    """out = the sum of (parts, size), added to out unless these parts are the first."""
    total = tl.zeros(at.shape, tl.float32)
    if not FIRST:
        total = tl.load(out + at, mask=ok, other=0.0)
    for first in range(0, parts, MANY_PARTS):
        p = first + tl.arange(0, MANY_PARTS)
        here = (p < parts)[:, None] & ok[None, :]
        total += tl.sum(tl.load(part + p.to(tl.int64)[:, None] * size + at[None, :], mask=here, other=0.0), 0)
    tl.store(out + at, total, mask=ok)


@triton.jit
def fold_log(part, tops, top_step, shift, out, entropy_part, entropy, square_part, square, at, ok, size, parts,
             FIRST: tl.constexpr):  # fmt: skip
    """out = the log-sum-exp over all parts. A part is a sum relative to its reference in ``tops``, or, if that is +inf, a
    logarithm. With w_p = exp(lse_p - lse):

    entropy = sum_p w_p (entropy_p + lse - lse_p)        square = log sum_p w_p^2 exp(square_p)
    """
    start = shifts(shift, at, ok)
    high = tl.full(at.shape, float("-inf"), tl.float32)
    gap = tl.zeros(at.shape, tl.float32)  # of the entropy: sum of 2**(lse_p - high) (entropy_p + high - lse_p)
    if not FIRST:
        high = tl.load(out + at, mask=ok, other=float("-inf")) * LOG2E
        if entropy is not None:
            gap = tl.load(entropy + at, mask=ok, other=0.0) * LOG2E
    total = tl.where(high == float("-inf"), 0.0, 1.0)
    squares = tl.zeros(at.shape, tl.float32)  # sum of (2**(lse_p - high))**2 2**square_p
    if (square is not None) and not FIRST:
        squares = total * tl.exp2(tl.load(square + at, mask=ok, other=0.0) * LOG2E)
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
        if entropy is not None:
            each = tl.load(entropy_part + where, mask=here, other=0.0)
            each += tl.where(value == float("-inf"), 0.0, safe[None, :] - value)
            rise = tl.where(high == float("-inf"), 0.0, safe - high)
            gap = kept * (gap + rise * total) + tl.sum(share * each, 0)
        if square is not None:
            each = tl.exp2(tl.load(square_part + where, mask=here, other=0.0))
            squares = kept * kept * squares + tl.sum(share * share * each, 0)
        total = total * kept + tl.sum(share, 0)
        # NaN in a part must survive the maximum.
        lost = tl.max((value != value).to(tl.int32), 0) > 0
        high = tl.where(lost, float("nan"), higher)
    tl.store(out + at, (high + tl.log2(total)) * LN2, mask=ok)
    if entropy is not None:
        tl.store(entropy + at, tl.where(total == 0.0, 0.0, gap / total + tl.log2(total)) * LN2, mask=ok)
    if square is not None:
        found = tl.where(total == 0.0, 0.0, tl.log2(squares) - 2.0 * tl.log2(total))
        tl.store(square + at, found * LN2, mask=ok)


@triton.jit
def fold_top(part, shift, top, top_col, at, ok, size, parts, first, FIRST: tl.constexpr, LAST: tl.constexpr):
    """The largest of (parts, size) and its column, whose index in the macro-tile is in the parts that follow.

    The shift is subtracted after the last macro-tile of the row (LAST). Earlier subtraction could break ties.
    """
    best = tl.full(at.shape, float("-inf"), tl.float32)
    place = tl.full(at.shape, 2**31 - 1, tl.int64)
    if not FIRST:
        best = tl.load(top + at, mask=ok, other=0.0)
        place = tl.load(top_col + at, mask=ok, other=0)
    for begin in range(0, parts, MANY_PARTS):
        p = begin + tl.arange(0, MANY_PARTS)
        here = (p < parts)[:, None] & ok[None, :]
        where = part + p.to(tl.int64)[:, None] * size + at[None, :]
        score = tl.load(where, mask=here, other=float("-inf"))
        column = tl.load(where + parts * size, mask=here, other=NO_COLUMN)
        high = tl.max(score, 0)
        column = tl.min(tl.where(score == high[None, :], column, NO_COLUMN), 0).to(tl.int64) + first
        place = tl.where(high > best, column, tl.where(high == best, tl.minimum(place, column), place))
        best = tl.maximum(best, high)
    if LAST:
        best = without_rank(best, (best - shifts(shift, at, ok)) * LN2)
    tl.store(top + at, best, mask=ok)
    tl.store(top_col + at, place, mask=ok)


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
                 STRIP: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
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
        if (ROWS + SOFTPLUS) & STATS:
            part += size
        if SOFTPLUS & STATS:
            fold_sum(row_part, row_softplus, at, ok, n, row_parts, ROW_FIRST)
        if MANY == POSITIVE:
            fold_sum(part, row_pos, at, ok, n, row_parts, ROW_FIRST)
            part += size
        if ROW_SUM & STATS:
            fold_sum(part, row_sum, at, ok, n, row_parts, ROW_FIRST)
            part += size
        if ROWS & STATS:
            mine, shift = tops + (program * BLOCK // R) * row_parts, row_shift
            square_part = part
            if (ENTROPY + SUM_SQ + TOP) & STATS:  # subtracted already
                shift = None
            if ENTROPY & STATS:
                square_part += size
            fold_log(row_part, mine, 1, shift, row_lse, part, row_entropy, square_part, row_sum_sq, at, ok, n, row_parts,
                     ROW_FIRST)  # fmt: skip
            if TOP & STATS:
                part = square_part
                if SUM_SQ & STATS:
                    part += size
                fold_top(part, row_shift, row_top, row_top_col, at, ok, n, row_parts, first, ROW_FIRST, LAST)
    elif col_part is not None:
        begin = (program - row_blocks) * BLOCK
        at, mine, step = begin + tl.arange(0, BLOCK), tops + begin // C, row_parts * STRIP
        ok = at < m
        fold_log(col_part, mine, step, col_shift, col_lse, None, None, None, None, at, ok, m, col_parts, COL_FIRST)
        if (MANY == POSITIVE) and (MIRROR & STATS):
            fold_sum(col_part + col_parts * m, col_pos, at, ok, m, col_parts, COL_FIRST)
