"""Row statistics of a macro-tile with entropies and largest scores, as a language model needs them for its tokens.

    t_i = max_j x_ij,   e_ij = exp(x_ij - t_i),   S_i = sum_j e_ij >= 1
    lse_i = t_i + log S_i        entropy_i = log S_i + sum_j e_ij (t_i - x_ij) / S_i        top_i = t_i, and its column

The shift of each row of a tile is its own maximum, which is needed anyway: nothing can overflow, and no two large
numbers are subtracted. Parts p of a row merge into

    lse = log sum_p exp(lse_p)        entropy = sum_p w_p (entropy_p + lse - lse_p),   w_p = exp(lse_p - lse)

All of it is in units of log2 until a statistic is finished.
"""

import triton.language as tl

from tilewise.kernels.triton_impl.bits import ENTROPY, TOP
from tilewise.kernels.triton_impl.launch.prepared import SCORE_KEYS, TILE_NUMBERS, kernel
from tilewise.kernels.triton_impl.primitives import LN2, LOG2E, NO_SHARE, scored_tile, tile_place

NO_COLUMN = tl.constexpr(2**31 - 1)


@kernel(optional=(*SCORE_KEYS, "entropy_part", "top_part", "place_part"), dynamic=TILE_NUMBERS)
def token_kernel(a_desc, b_desc, scale, bias, softcap,  # scores
                 row_key, col_key, row_skip, col_skip,  # keys
                 lse_part, entropy_part, top_part, place_part,  # outputs
                 n, m, first, ahead,
                 D: tl.constexpr, STATS: tl.constexpr, SCORE: tl.constexpr, POSITIVE: tl.constexpr,
                 R: tl.constexpr, C: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, PROGRAMS: tl.constexpr,
                 EXACT: tl.constexpr):  # fmt: skip
    """One macro-tile of n x m scores; every part is (column tiles, n)."""
    row_tiles, col_tiles = tl.cdiv(n, R), tl.cdiv(m, C)
    s = tl.load(scale)
    for tile in tl.range(tl.program_id(0), row_tiles * col_tiles, PROGRAMS, flatten=True):
        tile_row, tile_col = tile_place(tile, row_tiles, col_tiles, GROUP)
        rows, cols, x = scored_tile(a_desc, b_desc, s, bias, softcap, row_key, col_key, row_skip, col_skip, tile_row, tile_col,
                                    n, m, first, ahead, D, SCORE, POSITIVE, R, C, K, EXACT)  # fmt: skip
        at, ok = tile_col.to(tl.int64) * n + rows, rows < n
        top = tl.max(x, 1)
        if TOP & STATS:
            place = tl.min(tl.where(x == top[:, None], cols[None, :], NO_COLUMN), 1)
            tl.store(top_part + at, top, mask=ok)
            tl.store(place_part + at, place, mask=ok)
        safe = tl.where(top == float("-inf"), 0.0, top)
        below = x - safe[:, None]
        e = tl.exp2(below)
        total = tl.sum(e, 1)
        tl.store(lse_part + at, tl.log2(total) + safe, mask=ok)
        if ENTROPY & STATS:
            gap = tl.sum(e * tl.maximum(below, NO_SHARE), 1)  # 0 times -inf would be NaN
            entropy = tl.where(total == 0.0, 0.0, tl.log2(total) - gap / total)
            tl.store(entropy_part + at, entropy, mask=ok)


@kernel(
    optional=("entropy_part", "top_part", "place_part", "row_shift", "row_entropy", "row_top", "row_top_col"),
    dynamic=("n", "parts", "first"),
)
def merge_tokens_kernel(lse_part, entropy_part, top_part, place_part, row_shift,  # in
                        row_lse, row_entropy, row_top, row_top_col,  # in and out
                        n, parts, first,
                        BEGIN: tl.constexpr, END: tl.constexpr, STATS: tl.constexpr,
                        MANY_PARTS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Fold the parts of a macro-tile, whose columns start at ``first``, into the statistics of its rows.

    From the first macro-tile (BEGIN) to the last (END) the largest score of a row includes its shift, so that equal
    scores stay equal; then the shift is subtracted.
    """
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = at < n
    start = tl.zeros((BLOCK,), tl.float32)
    if row_shift is not None:
        start = tl.load(row_shift + at, mask=ok, other=0.0) * LOG2E
    high = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    gap = tl.zeros((BLOCK,), tl.float32)  # of the entropy: sum of 2**(lse_p - high) (entropy_p + high - lse_p)
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    place = tl.full((BLOCK,), NO_COLUMN, tl.int64)
    if not BEGIN:
        high = tl.load(row_lse + at, mask=ok, other=0.0) * LOG2E
        total = tl.where(high == float("-inf"), 0.0, 1.0)
        if ENTROPY & STATS:
            gap = tl.load(row_entropy + at, mask=ok, other=0.0) * LOG2E
        if TOP & STATS:
            best = tl.load(row_top + at, mask=ok, other=0.0)
            place = tl.load(row_top_col + at, mask=ok, other=0)
    for begin in range(0, parts, MANY_PARTS):
        p = begin + tl.arange(0, MANY_PARTS)
        here = (p < parts)[:, None] & ok[None, :]
        where = p.to(tl.int64)[:, None] * n + at[None, :]
        value = tl.load(lse_part + where, mask=here, other=float("-inf")) - start[None, :]
        higher = tl.maximum(high, tl.max(value, 0))
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        share, kept = tl.exp2(value - safe[None, :]), tl.exp2(high - safe)
        if ENTROPY & STATS:
            each = tl.load(entropy_part + where, mask=here, other=0.0)
            each += tl.where(value == float("-inf"), 0.0, safe[None, :] - value)
            raised = tl.where(high == float("-inf"), 0.0, safe - high)
            gap = kept * (gap + raised * total) + tl.sum(share * each, 0)
        total = kept * total + tl.sum(share, 0)
        high = higher
        if TOP & STATS:
            score = tl.load(top_part + where, mask=here, other=float("-inf"))
            column = tl.load(place_part + where, mask=here, other=NO_COLUMN)
            top = tl.max(score, 0)
            column = tl.min(tl.where(score == top[None, :], column, NO_COLUMN), 0)
            # NaN equals nothing and finds no column; any column will do.
            column = tl.minimum(column, NO_COLUMN - 1).to(tl.int64) + first
            place = tl.where(top > best, column, tl.where(top == best, tl.minimum(place, column), place))
            best = tl.maximum(best, top)
    tl.store(row_lse + at, (high + tl.log2(total)) * LN2, mask=ok)
    if ENTROPY & STATS:
        entropy = tl.where(total == 0.0, 0.0, gap / total + tl.log2(total))
        tl.store(row_entropy + at, entropy * LN2, mask=ok)
    if TOP & STATS:
        if END:
            best = (best - start) * LN2
        tl.store(row_top + at, best, mask=ok)
        tl.store(row_top_col + at, place, mask=ok)
