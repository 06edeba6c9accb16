"""Kernels of the one-pass softmax loss: one fused product here, then two plain ones.

A block of rows with all columns. With a shift t_i for each row,

    e_ij = exp(x_ij - t_i)        S_i = sum_j e_ij        lse_i = t_i + log S_i        f_i = (w_i + 2 z_i lse_i) / S_i
    G_ij = f_i (e_ij - [positive] S_i w_i / (w_i + 2 z_i lse_i)) = f_i E_ij
    dA_i = f_i sum_j E_ij b_j     dB_j = sum_i E_ij (f_i a_i)

`exponent_kernel` stores E in the type of the features before S is known. No second pass over E is needed, since f_i is
applied to the rows of A and of dA. `rows_kernel` overwrites the entry of the positive, computed in float32: near the end
of training e and S differ in their last digits only. The rounding of that entry is corrected after the products: see
`product_kernels`.

The shift is the score of the row's positive, so S_i = exp(loss_i) is never less than about 1. With a loss above 55 nats E
and its products could overflow. Then a tile sets ``needs_repair``, and the block is computed again with the maximum of
each row as its shift. The host does not wait for the flag.
"""

import triton.language as tl

from tilewise.kernels.triton_impl.bits import SOFTCAP
from tilewise.kernels.triton_impl.launch import SCORE_KEYS, TILE_NUMBERS, kernel
from tilewise.kernels.triton_impl.primitives import (
    LN2,
    LOG2E,
    ScoreInputs,
    own_column,
    scored_tile,
    store_tile,
    tile_place,
)

LARGEST_SUM = tl.constexpr(2.0**80)  # of a row in a tile; above, needs_repair is set
SMALLEST_SHARE = tl.constexpr(2.0**-20)  # |w_i + 2 z_i lse_i| is at least this share of |w_i|

# Bits of MODE: what exponent_kernel does
REPAIR = tl.constexpr(1)  # return unless needs_repair is set
MAXIMA = tl.constexpr(2)  # the maximum of each row in each tile, instead of exponentials


@kernel(optional=("square",), dynamic=("n",))
def start_kernel(own, weight, square, shift, n, BLOCK: tl.constexpr):
    """t_i: the score of the positive in log2; +inf (all exponentials 0) for ignored rows."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = at < n
    x = tl.load(own + at, mask=ok, other=0.0) * LOG2E
    counts = tl.load(weight + at, mask=ok, other=0.0) != 0.0
    if square is not None:
        counts = counts | (tl.load(square + at, mask=ok, other=0.0) != 0.0)
    start = tl.where(tl.abs(x) < 1e30, x, 0.0)  # a bias may make the positive -inf
    tl.store(shift + at, tl.where(counts, start, float("inf")), mask=ok)


@kernel(optional=SCORE_KEYS, dynamic=TILE_NUMBERS)
def exponent_kernel(a_desc, b_desc, scale, bias, softcap,  # scores
                    row_key, col_key, row_skip, col_skip, shift,  # keys, shift
                    g_desc, row_part, needs_repair,  # outputs
                    n, m, first, ahead,
                    D: tl.constexpr, MODE: tl.constexpr, SCORE: tl.constexpr, POSITIVE: tl.constexpr,
                    R: tl.constexpr, C: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, PROGRAMS: tl.constexpr,
                    EXACT: tl.constexpr):  # fmt: skip
    """E of a block of n rows and all m columns, in the type of the features; row_part is (column tiles, n)."""
    row_tiles, col_tiles = tl.cdiv(n, R), tl.cdiv(m, C)
    tiles = row_tiles * col_tiles
    if REPAIR & MODE:
        tiles = tl.where(tl.load(needs_repair) != 0, tiles, 0)
    s = ScoreInputs(tl.load(scale), bias, softcap, row_key, col_key, row_skip, col_skip, n, m, first, ahead)
    for tile in tl.range(tl.program_id(0), tiles, PROGRAMS, flatten=True):
        tile_row, tile_col = tile_place(tile, row_tiles, col_tiles, GROUP)
        rows, _, x = scored_tile(a_desc, b_desc, s, tile_row, tile_col, D, SCORE, POSITIVE, R, C, K, EXACT)
        ok_rows = rows < n
        if MAXIMA & MODE:
            tl.store(row_part + tile_col * n + rows, tl.max(x, 1), mask=ok_rows)
        else:
            e = tl.exp2(x - tl.load(shift + rows, mask=ok_rows, other=float("inf"))[:, None])
            total = tl.sum(e, 1)
            tl.store(row_part + tile_col * n + rows, total, mask=ok_rows)
            if not (REPAIR & MODE):
                tl.store(needs_repair + rows * 0, 1, mask=ok_rows & (total > LARGEST_SUM))
            if SOFTCAP & SCORE:
                ratio = x * (1.0 / (softcap * LOG2E))
                e = e * tl.where(x == float("-inf"), 0.0, 1.0 - ratio * ratio)
            store_tile(g_desc, tile_row * R, tile_col * C, e)


@kernel(dynamic=("n", "parts"))
def shift_kernel(row_part, shift, needs_repair, n, parts, MANY_PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """If ``needs_repair`` is set: the largest score of each row becomes its shift."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = at < n
    high = tl.full((BLOCK,), float("-inf"), tl.float32)
    for start in range(0, tl.where(tl.load(needs_repair) != 0, parts, 0), MANY_PARTS):
        p = start + tl.arange(0, MANY_PARTS)
        here = (p < parts)[:, None] & ok[None, :]
        part = tl.load(row_part + p.to(tl.int64)[:, None] * n + at[None, :], mask=here, other=float("-inf"))
        high = tl.maximum(high, tl.max(part, 0))
    before = tl.load(shift + at, mask=ok, other=0.0)
    high = tl.where(tl.abs(high) < float("inf"), high, 0.0)  # +inf is reserved for ignored rows
    change = (before < float("inf")) & (tl.load(needs_repair) != 0)
    tl.store(shift + at, tl.where(change, high, before), mask=ok)


@kernel(optional=("row_key", "square"), dynamic=(*TILE_NUMBERS, "parts", "g_stride"))
def rows_kernel(softcap, row_key, shift,  # scores, keys, shift
                row_part, own, weight, square,  # sums, scores of positives, weights
                g, factor, entry, column, loss_part, needs_repair,  # outputs
                g_stride, parts, n, m, first, ahead,
                SCORE: tl.constexpr, POSITIVE: tl.constexpr, MANY_PARTS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """After all tiles of the rows: their loss, f_i, and the entry of the positive in E.

    The entry is also written to ``entry``, before it is rounded, and its column to ``column``, -1 in a row without one.
    """
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = rows < n
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, parts, MANY_PARTS):
        p = start + tl.arange(0, MANY_PARTS)
        here = (p < parts)[:, None] & ok[None, :]
        total += tl.sum(tl.load(row_part + p.to(tl.int64)[:, None] * n + rows[None, :], mask=here, other=0.0), 0)
    t = tl.load(shift + rows, mask=ok, other=float("inf"))
    counts = t < float("inf")
    t = tl.where(counts, t, 0.0)
    x = tl.load(own + rows, mask=ok, other=0.0) * LOG2E
    w = tl.load(weight + rows, mask=ok, other=0.0)
    level = tl.log2(tl.where(counts, total, 1.0))
    away = x - t
    key = own_column(rows, n, m, row_key, first, ahead, SCORE, POSITIVE)
    place = g + rows.to(tl.int64) * g_stride + key
    if (g.dtype.element_ty == tl.float32) and not (SOFTCAP & SCORE):
        # With the arithmetic of the tile for the positive, S - e is exact, and a loss is never negative.
        e = tl.load(place, mask=ok & (key >= 0), other=0.0)
        away = tl.where(e > 2.0**-60, tl.log2(e), away)
    loss = w * ((level - away) * LN2)
    lse_grad = w
    invalid = w != 0.0
    if square is not None:
        z = tl.load(square + rows, mask=ok, other=0.0)
        lse = (level + t) * LN2
        loss += z * lse * lse
        lse_grad += 2.0 * z * lse
        invalid = invalid | (z != 0.0)
    least = tl.abs(w) * SMALLEST_SHARE  # tensor first: the interpreter of Triton 3.7 cannot compare the other order
    lse_grad = tl.where(tl.abs(lse_grad) < least, least, lse_grad)
    # A row that counts without a positive has a target out of range: its loss is NaN. So is that of a score of +inf.
    invalid = invalid & ((key < 0) | (total == float("inf")))
    loss = tl.where(invalid, float("nan"), tl.where(counts, loss, 0.0))
    f = tl.where(invalid, float("nan"), tl.where(counts, lse_grad / total, 0.0))
    tl.store(factor + rows, f, mask=ok)
    tl.store(loss_part + tl.program_id(0), tl.sum(loss, 0))
    tl.store(needs_repair + rows * 0, 0, mask=rows == 0)  # clear the flag for the next block
    share = w / tl.where(lse_grad == 0.0, 1.0, lse_grad)
    exact = total * (tl.exp2(away - level) - share)
    if SOFTCAP & SCORE:
        ratio = x * (1.0 / (softcap * LOG2E))
        exact = exact * (1.0 - ratio * ratio)
    exact = tl.where(counts, exact, 0.0)
    tl.store(place, exact.to(g.dtype.element_ty), mask=ok & (key >= 0))
    tl.store(entry + rows, exact, mask=ok)
    tl.store(column + rows, tl.where(counts, key, -1), mask=ok)
