"""Kernels for a scalar loss whose gradients are formed in forward: one fused product, then two plain ones.

Softmax, a block of rows with all columns. With a shift t_i for each row,

    e_ij = exp(x_ij - t_i)        S_i = sum_j e_ij        lse_i = t_i + log S_i        f_i = (w_i + 2 z_i lse_i) / S_i
    G_ij = f_i (e_ij - [positive] S_i w_i / (w_i + 2 z_i lse_i)) = f_i E_ij
    dA_i = f_i sum_j E_ij b_j     dB_j = sum_i E_ij (f_i a_i)

`exponent_kernel` stores E in the type of the features as soon as a tile's product is there, when S is not yet known; no
second pass over E is needed, since f_i is applied to the rows of A and of dA. `rows_kernel` overwrites the positive's
entry, in float32 up to the same rounding: near the end of training e and S differ in their last digits only.

Where the features are a half type, two roundings are still in the positive's term: E_ij, and f_i a_i. A term that is
most of the gradient, or all of it where scores are flat, is worth better: a dense loss rounds G, which is then -w_i, to
itself. So the entry is also kept as it was before, and what the roundings changed is made good when the products are
done, in float32 and for the positives alone: `finish_rows_kernel` in dA, `positives_kernel` in dB.

The shift is the score of the row's positive, so that S_i = exp(loss_i) is never less than about 1. A loss above 55 (in
nats) would leave the range in which E and its products are safe: then a tile casts doubt, and the block is done again
with each row's maximum as its shift, without the host hearing of it.

Sigmoid, a macro-tile: G is a function of the score alone, and the same exponential gives the loss.

    t = exp(x),   sigmoid(x) = t / (1 + t),   sum_j softplus(x_j) = log of the product of all 1 + t_j

with -x at a positive. The product is kept less 1, so that many small t lose nothing. Where scores are so large that it
leaves float32 (64 of them have a softplus above 1 nat in the mean, or one is above 69), doubt is cast, and
`softplus_kernel` computes the loss again.
"""

import triton
import triton.language as tl

from tilewise.kernels.triton_impl.backward import BIAS_COLS, BIAS_TOTAL, outer_factor
from tilewise.kernels.triton_impl.forward import log1p, softplus_join
from tilewise.kernels.triton_impl.parts import (
    LN2,
    LOG2E,
    SOFTCAP,
    any_here,
    own_column,
    score_tile,
    tile_dot,
    tile_place,
)

LARGEST_SUM = tl.constexpr(2.0**80)  # of a row in a tile, before doubt is cast
SMALLEST_SHARE = tl.constexpr(2.0**-20)  # of w_i in w_i + 2 z_i lse_i: closer to 0 it is taken for this
LARGEST_SCORE = tl.constexpr(100.0)  # a sigmoid of more, in units of log2, is 1
JOINED = tl.constexpr(64)  # factors 1 + t that are multiplied before a logarithm is taken; of scores of 0, 2**64
LARGEST_JOINED = tl.constexpr(2.0**99)  # beyond, scores were cut, or the product is out of range

# What exponent_kernel does (bits of TERMS)
GATED = tl.constexpr(1)  # only if there is doubt
MAXIMA = tl.constexpr(2)  # the maximum of each row in each tile, instead of exponentials


@triton.jit(do_not_specialize=["n"])
def start_kernel(own, row_zero, row_hits, weight, square, own_at, shift, doubt, n, BLOCK: tl.constexpr):
    """The positive's score from 0, in log2; the shift of each row, +inf (all exponentials 0) for one that does not count."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = at < n
    x = tl.load(own + at, mask=ok, other=0.0) * LOG2E
    if row_zero is not None:
        x += tl.load(row_zero + at, mask=ok, other=0.0) * LOG2E
    counts = tl.load(weight + at, mask=ok, other=0.0) != 0.0
    if square is not None:
        counts = counts | (tl.load(square + at, mask=ok, other=0.0) != 0.0)
    counts = counts & (tl.load(row_hits + at, mask=ok, other=0.0) > 0.0)
    tl.store(own_at + at, x, mask=ok)
    start = tl.where(tl.abs(x) < 1e30, x, 0.0)  # a positive that a bias of -inf rules out is no place to start from
    tl.store(shift + at, tl.where(counts, start, float("inf")), mask=ok)
    tl.store(doubt + at * 0, 0, mask=at == 0)


@triton.jit(do_not_specialize=["softcap", "n", "m", "first", "ahead"])
def exponent_kernel(a_desc, b_desc, g_desc, scale, bias, softcap, row_key, col_key, row_skip, col_skip, shift, row_part, doubt,
                    n, m, first, ahead,
                    D: tl.constexpr, TERMS: tl.constexpr, SCORE: tl.constexpr, POSITIVE: tl.constexpr,
                    R: tl.constexpr, C: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, PROGRAMS: tl.constexpr,
                    EXACT: tl.constexpr):  # fmt: skip
    """E of a block of n rows and all m columns, in the type of the features; row_part is (column tiles, n)."""
    row_tiles, col_tiles = tl.cdiv(n, R), tl.cdiv(m, C)
    tiles = row_tiles * col_tiles
    if GATED & TERMS:
        tiles = tl.where(tl.load(doubt) != 0, tiles, 0)
    s = tl.load(scale)
    for tile in tl.range(tl.program_id(0), tiles, PROGRAMS, flatten=True):
        tile_row, tile_col = tile_place(tile, row_tiles, col_tiles, GROUP)
        acc = tile_dot(a_desc, b_desc, tile_row * R, tile_col * C, D, R, C, K, EXACT)
        rows = tile_row * R + tl.arange(0, R)
        cols = tile_col * C + tl.arange(0, C)
        ok_rows = rows < n
        x = score_tile(
            acc, rows, cols, n, m, s, bias, softcap, row_skip, col_skip, row_key, col_key, first, ahead, SCORE, POSITIVE
        )
        if MAXIMA & TERMS:
            tl.store(row_part + tile_col * n + rows, tl.max(x, 1), mask=ok_rows)
        else:
            e = tl.exp2(x - tl.load(shift + rows, mask=ok_rows, other=float("inf"))[:, None])
            total = tl.sum(e, 1)
            tl.store(row_part + tile_col * n + rows, total, mask=ok_rows)
            if not (GATED & TERMS):
                tl.store(doubt + rows * 0, 1, mask=ok_rows & (total > LARGEST_SUM))
            if SOFTCAP & SCORE:
                ratio = x * (1.0 / (softcap * LOG2E))
                e = e * tl.where(x == float("-inf"), 0.0, 1.0 - ratio * ratio)
            g_desc.store([tile_row * R, tile_col * C], e.to(g_desc.dtype))


@triton.jit(do_not_specialize=["n", "parts"])
def shift_kernel(row_part, shift, doubt, n, parts, MANY_PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """If there is doubt: the largest score of each row becomes its shift."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = at < n
    high = tl.full((BLOCK,), float("-inf"), tl.float32)
    for start in range(0, tl.where(tl.load(doubt) != 0, parts, 0), MANY_PARTS):
        p = start + tl.arange(0, MANY_PARTS)
        here = (p < parts)[:, None] & ok[None, :]
        part = tl.load(row_part + p.to(tl.int64)[:, None] * n + at[None, :], mask=here, other=float("-inf"))
        high = tl.maximum(high, tl.max(part, 0))
    before = tl.load(shift + at, mask=ok, other=0.0)
    high = tl.where(tl.abs(high) < float("inf"), high, 0.0)  # +inf is for rows that do not count
    change = (before < float("inf")) & (tl.load(doubt) != 0)
    tl.store(shift + at, tl.where(change, high, before), mask=ok)


@triton.jit(do_not_specialize=["softcap", "n", "m", "first", "ahead", "parts", "a_stride", "g_stride", "scaled_stride"])
def rows_kernel(row_part, parts, shift, own_at, row_hits, weight, square, scale, softcap, row_key, doubt, g, g_stride, a, a_stride,
                scaled, scaled_stride, factor, entry, column, loss_part, n, m, first, ahead,
                D: tl.constexpr, SCORE: tl.constexpr, POSITIVE: tl.constexpr,
                MANY_PARTS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """When all tiles of the rows are done: their loss, f_i, the positive's entry of E, and f_i a_i for the columns.

    The entry goes to ``entry`` too, before it is rounded, and where it is to ``column``, -1 in a row that has none.
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
    own = tl.load(own_at + rows, mask=ok, other=0.0)
    w = tl.load(weight + rows, mask=ok, other=0.0)
    level = tl.log2(tl.where(counts, total, 1.0))
    away = own - t
    key = own_column(rows, n, m, row_key, first, ahead, SCORE, POSITIVE)
    place = g + rows.to(tl.int64) * g_stride + key
    if (g.dtype.element_ty == tl.float32) and not (SOFTCAP & SCORE):
        # The tile's own arithmetic for the positive: what is left of S - e is then exact, and a loss never negative.
        e = tl.load(place, mask=ok & (key >= 0), other=0.0)
        away = tl.where(e > 2.0**-60, tl.log2(e), away)
    loss = w * ((level - away) * LN2)
    coming = w
    missed = w != 0.0
    if square is not None:
        z = tl.load(square + rows, mask=ok, other=0.0)
        lse = (level + t) * LN2
        loss += z * lse * lse
        coming += 2.0 * z * lse
        missed = missed | (z != 0.0)
    coming = tl.where(tl.abs(coming) < SMALLEST_SHARE * tl.abs(w), SMALLEST_SHARE * tl.abs(w), coming)
    # A row that counts but whose positive is nowhere: a target out of range, and NaN says so.
    missed = missed & (tl.load(row_hits + rows, mask=ok, other=1.0) == 0.0)
    loss = tl.where(missed, float("nan"), tl.where(counts, loss, 0.0))
    f = tl.where(missed, float("nan"), tl.where(counts, coming / total, 0.0))
    tl.store(factor + rows, f, mask=ok)
    tl.store(loss_part + tl.program_id(0), tl.sum(loss, 0))
    tl.store(doubt + rows * 0, 0, mask=rows == 0)  # the next block starts without
    share = w / tl.where(coming == 0.0, 1.0, coming)
    exact = total * (tl.exp2(away - level) - share)
    if SOFTCAP & SCORE:
        ratio = own * (1.0 / (softcap * LOG2E))
        exact = exact * (1.0 - ratio * ratio)
    exact = tl.where(counts, exact, 0.0)
    tl.store(place, exact.to(g.dtype.element_ty), mask=ok & (key >= 0))
    tl.store(entry + rows, exact, mask=ok)
    tl.store(column + rows, tl.where(counts, key, -1), mask=ok)
    if scaled is not None:
        f = f * tl.load(scale)
        at = rows.to(tl.int64)[:, None]
        for k in range(0, D, WIDTH):
            col = k + tl.arange(0, WIDTH)
            here = ok[:, None] & (col < D)[None, :]
            value = tl.load(a + at * a_stride + col[None, :], mask=here, other=0.0).to(tl.float32) * f[:, None]
            tl.store(scaled + at * scaled_stride + col[None, :], value.to(scaled.dtype.element_ty), mask=here)


@triton.jit(do_not_specialize=["n", "a_stride", "b_stride"])
def finish_rows_kernel(total, out, scaled, factor, entry, column, scale, a, a_stride, b, b_stride, dots, n, D: tl.constexpr,
                       BLOCK: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    """out_i = scale f_i total_i, scaled_i = scale f_i a_i, and for each program the sum of f_i <total_i, a_i>.

    That sum is the program's part of the scale's gradient. Where there are entries, what rounding took from the
    positive's is put back: total_i += (entry - its rounding) b_pos.
    """
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at, ok = rows.to(tl.int64)[:, None], rows < n
    f = tl.load(factor + rows, mask=ok, other=0.0)[:, None]
    s = tl.load(scale)
    if entry is not None:
        exact = tl.load(entry + rows, mask=ok, other=0.0)
        lost = (exact - exact.to(b.dtype.element_ty).to(tl.float32))[:, None]
        pos = tl.load(column + rows, mask=ok, other=-1).to(tl.int64)[:, None]
    dot = tl.zeros((BLOCK, WIDTH), tl.float32)
    for k in range(0, D, WIDTH):
        col = k + tl.arange(0, WIDTH)
        here = ok[:, None] & (col < D)[None, :]
        value = tl.load(total + at * D + col[None, :], mask=here, other=0.0)
        if entry is not None:
            value += lost * tl.load(b + pos * b_stride + col[None, :], mask=here & (pos >= 0), other=0.0).to(tl.float32)
        value = f * value
        if dots is not None or scaled is not None:
            row = tl.load(a + at * a_stride + col[None, :], mask=here, other=0.0).to(tl.float32)
        if dots is not None:
            dot += value * row
        if scaled is not None:
            tl.store(scaled + at * D + col[None, :], (row * (f * s)).to(scaled.dtype.element_ty), mask=here)
        if out is not None:
            tl.store(out + at * D + col[None, :], (value * s).to(out.dtype.element_ty), mask=here)
    if dots is not None:
        tl.store(dots + tl.program_id(0), tl.sum(tl.sum(dot, 1), 0))


@triton.jit
def positives_of(row, here, col, a, scaled, factor, entry, s, D: tl.constexpr, STRIDE: tl.constexpr):
    """Of one row or several: scale f_i entry_i a_i, and v_i s_i, v and s rounded."""
    e = tl.load(entry + row)
    f = s * tl.load(factor + row)
    x = tl.load(a + row * STRIDE + col, mask=here, other=0.0).to(tl.float32)
    y = tl.load(scaled + row * D + col, mask=here, other=0.0).to(tl.float32)
    v = e.to(scaled.dtype.element_ty).to(tl.float32)
    return tl.where(here, (f * e) * x, 0.0), tl.where(here, v * y, 0.0)  # what is not here may be infinite


@triton.jit
def positives_from(place, stop, mine, col, a, scaled, factor, entry, order, column, s, D: tl.constexpr, STRIDE: tl.constexpr,
                   RUN: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    """Of the rows whose column is mine, at sorted places up to ``stop``, at most RUN of them."""
    all_places = place + tl.arange(0, RUN)
    found = tl.load(column + all_places, mask=all_places < stop, other=-2) == mine
    end = place + tl.sum(found.to(tl.int32), 0)
    exact = tl.zeros((WIDTH,), tl.float32)
    held = tl.zeros((WIDTH,), tl.float32)
    for start in range(place, end, BLOCK):
        at = start + tl.arange(0, BLOCK)
        rows = tl.load(order + at, mask=at < end, other=0)[:, None]
        here = (at < end)[:, None] & (col < D)[None, :]
        one, other = positives_of(rows, here, col[None, :], a, scaled, factor, entry, s, D, STRIDE)
        exact += tl.sum(one, 0)
        held += tl.sum(other, 0)
    return exact, held


@triton.jit(do_not_specialize=["n"])
def runs_kernel(a, scaled, factor, entry, order, column, scale, exacts, helds, n, D: tl.constexpr, STRIDE: tl.constexpr, RUN: tl.constexpr,
                BLOCK: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    """For `positives_kernel`, of a column that many rows have: what those from each RUN-th sorted place up to the next add."""
    chunks = tl.cdiv(D, WIDTH)
    run = tl.program_id(0) // chunks + 1
    col = tl.program_id(0) % chunks * WIDTH + tl.arange(0, WIDTH)
    mine = tl.load(column + run * RUN)
    goes = (mine >= 0) & (mine == tl.load(column + run * RUN - 1))
    stop = tl.where(goes, tl.minimum(n, run * RUN + RUN), 0)
    s = tl.load(scale)
    exact, held = positives_from(
        run * RUN, stop, mine, col, a, scaled, factor, entry, order, column, s, D, STRIDE, RUN, BLOCK, WIDTH
    )
    here = goes & (col < D)
    tl.store(exacts + run * D + col, exact, mask=here)
    tl.store(helds + run * D + col, held, mask=here)


@triton.jit(do_not_specialize=["n"])
def positives_kernel(grad, a, scaled, factor, entry, order, column, scale, exacts, helds, n, D: tl.constexpr, STRIDE: tl.constexpr,
                     EPS: tl.constexpr, RUN: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    """grad_j += sum over the rows i whose positive is j of scale f_i entry_i a_i - v_i s_i, v and s rounded: what dB holds.

    ``column`` is sorted, ``order`` says which row has it. A program has WIDTH features of one sorted place; the first of
    a column takes all its rows, in order, and the others return. Most columns have one row, which is taken by itself;
    from the next RUN-th place on, `runs_kernel` has added up what a column's rows add.

    A ``grad`` of a half type (EPS: from 1 to the next number) was rounded before, and is rounded once more. What it holds
    besides sum v_i s_i is the negatives' share, and an error of which the size is known, ulp^2 / 12 in the mean of its
    square. So that the first rounding leaves no more than it must, the sum of both is multiplied by the negatives' part of
    its squares (Stein's estimate), where it is not more than a rounding can be. A share that drowns in the rounding comes
    to nothing, as it does where a dense gradient is rounded, and the positives' is then rounded once.
    """
    chunks = tl.cdiv(D, WIDTH)
    place = tl.program_id(0) // chunks
    col = tl.program_id(0) % chunks * WIDTH + tl.arange(0, WIDTH)
    mine = tl.load(column + place)
    first = mine != tl.load(column + place - 1, mask=place > 0, other=-1)  # never of -1: these are the lowest
    where = grad + mine.to(tl.int64) * D + col
    here = first & (col < D)
    before = tl.load(where, mask=here, other=0.0).to(tl.float32)
    s = tl.load(scale)
    row = tl.load(order + place, mask=first, other=0)
    exact, held = positives_of(row, here, col, a, scaled, factor, entry, s, D, STRIDE)
    run = place // RUN + 1
    stop = tl.where(first, tl.minimum(n, run * RUN), 0)
    more, more_held = positives_from(
        place + 1, stop, mine, col, a, scaled, factor, entry, order, column, s, D, STRIDE, RUN, BLOCK, WIDTH
    )
    exact += more
    held += more_held
    goes = first & (tl.load(column + run * RUN, mask=run * RUN < n, other=-1) == mine)
    while goes:
        exact += tl.load(exacts + run * D + col, mask=here, other=0.0)
        held += tl.load(helds + run * D + col, mask=here, other=0.0)
        run += 1
        goes = tl.load(column + run * RUN, mask=run * RUN < n, other=-1) == mine
    rest = tl.where(tl.abs(before) < float("inf"), before - held, before)
    if EPS > 0.0:
        ulp = EPS * (before.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        seen = tl.sum(rest * rest, 0)
        rounding = tl.sum(ulp * ulp, 0) * (1.0 / 12.0)
        share = 1.0 - rounding / tl.where(seen == 0.0, 1.0, seen)
        drowns = (tl.abs(rest) <= ulp) & (ulp < float("inf"))
        rest = tl.where(drowns, rest * tl.where(share > 0.0, share, 0.0), rest)
    tl.store(where, (exact + rest).to(grad.dtype.element_ty), mask=here)


@triton.jit(do_not_specialize=["n", "m", "g_stride"])
def bias_kernel(g, g_stride, factor, out, n, m, FIRST: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """The gradient of the bias: sum_i f_i E_ij for each column."""
    cols = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    ok = cols < m
    total = tl.zeros((BLOCK, WIDTH), tl.float32)
    for start in range(0, n, BLOCK):
        rows = start + tl.arange(0, BLOCK)
        f = tl.load(factor + rows, mask=rows < n, other=0.0)
        here = (rows < n)[:, None] & ok[None, :]
        value = tl.load(g + rows.to(tl.int64)[:, None] * g_stride + cols[None, :], mask=here, other=0.0)
        total += value.to(tl.float32) * f[:, None]
    sums = tl.sum(total, 0)
    if not FIRST:
        sums += tl.load(out + cols, mask=ok, other=0.0)
    tl.store(out + cols, sums, mask=ok)


@triton.jit(do_not_specialize=["count"])
def multiply_kernel(values, out, by, count, IN_PLACE: tl.constexpr, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr):
    """out = values * by, in float32 up to the last rounding; in place, nothing to do for the usual 1."""
    f = tl.load(by).to(tl.float32)
    blocks = tl.cdiv(count, BLOCK)
    if IN_PLACE:
        blocks = tl.where(f == 1.0, 0, blocks)
    for block in range(tl.program_id(0), blocks, PROGRAMS):
        at = tl.full((BLOCK,), BLOCK, tl.int64) * block + tl.arange(0, BLOCK)
        value = tl.load(values + at, mask=at < count, other=0.0).to(tl.float32) * f
        tl.store(out + at, value.to(out.dtype.element_ty), mask=at < count)


@triton.jit
def log_of_two(one, other):
    """log((1 + one) (1 + other)), with one logarithm, where the product may be too large for float32."""
    large = tl.maximum(one, other) > 2.0**50
    scaled = (one * 2.0**-64) * other + (
        one + other
    ) * 2.0**-64  # a product above 2**50 / 2**64, and 1 is nothing to it
    joined = softplus_join(one, other)
    both = large & (tl.minimum(one, other) > 2.0**50)
    return log1p(tl.where(both, scaled, joined)) + tl.where(both, 64.0 * LN2, 0.0)


@triton.jit
def log_of_joined(t, R: tl.constexpr, C: tl.constexpr):
    """The sum of log(1 + t) over each row, and the largest product of JOINED factors, less 1, that was met."""
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


@triton.jit(do_not_specialize=["softcap", "n", "m", "first", "ahead"])
def sigmoid_kernel(a_desc, b_desc, g_desc, scale, factor, bias, softcap, row_key, col_key, row_skip, col_skip, grad_row, bias_part,
                   loss_part, doubt, n, m, first, ahead,
                   D: tl.constexpr, TERMS: tl.constexpr, SCORE: tl.constexpr, POSITIVE: tl.constexpr,
                   R: tl.constexpr, C: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, PROGRAMS: tl.constexpr,
                   EXACT: tl.constexpr):  # fmt: skip
    """G of one macro-tile times ``factor``; what each program finds of the loss is added to its R numbers of loss_part."""
    row_tiles, col_tiles = tl.cdiv(n, R), tl.cdiv(m, C)
    s = tl.load(scale)
    f = outer_factor(factor)
    mine = loss_part + tl.program_id(0) * R + tl.arange(0, R)
    loss = tl.load(mine)
    for tile in tl.range(tl.program_id(0), row_tiles * col_tiles, PROGRAMS, flatten=True):
        tile_row, tile_col = tile_place(tile, row_tiles, col_tiles, GROUP)
        acc = tile_dot(a_desc, b_desc, tile_row * R, tile_col * C, D, R, C, K, EXACT)
        rows = tile_row * R + tl.arange(0, R)
        cols = tile_col * C + tl.arange(0, C)
        x = score_tile(
            acc, rows, cols, n, m, s, bias, softcap, row_skip, col_skip, row_key, col_key, first, ahead, SCORE, POSITIVE
        )
        meets = any_here(rows, n, m, row_key, first, ahead, tile_row * R, tile_col * C, R, C, POSITIVE)
        if meets:
            key = own_column(rows, n, m, row_key, first, ahead, SCORE, POSITIVE)
            x = tl.where(key[:, None] == cols[None, :], -x, x)
        w = tl.load(grad_row + rows, mask=rows < n, other=0.0)
        t = tl.exp2(tl.minimum(x, LARGEST_SCORE, propagate_nan=tl.PropagateNan.ALL))
        logs, largest = log_of_joined(t, R, C)
        loss += w * logs
        tl.store(doubt + rows * 0, 1, mask=(rows < n) & (largest > LARGEST_JOINED))
        # 1 / (1 + t) as a square: the root's reciprocal is one instruction, a division is six.
        root = tl.rsqrt(1.0 + t)
        g = (t * (w * f)[:, None]) * (root * root)
        key = own_column(rows, n, m, row_key, first, ahead, SCORE, POSITIVE)
        if meets:
            g = tl.where(key[:, None] == cols[None, :], -g, g)
        # Who adds up the bias's gradient takes it that tiles know nothing of positives: sigmoid(x) = 1 - sigmoid(-x).
        if BIAS_TOTAL & TERMS:
            own = tl.where((key >= tile_col * C) & (key < tile_col * C + C), w * f, 0.0)
            tl.store(bias_part + tile_col * n + rows, tl.sum(g, 1) + own, mask=rows < n)
        if BIAS_COLS & TERMS:
            whole = g + tl.where(key[:, None] == cols[None, :], (w * f)[:, None], 0.0)
            tl.store(bias_part + tile_row * m + cols, tl.sum(whole, 0), mask=cols < m)
        g_desc.store([tile_row * R, tile_col * C], g.to(g_desc.dtype))
    tl.store(mine, loss)


@triton.jit(do_not_specialize=["softcap", "n", "m", "first", "ahead"])
def softplus_kernel(a_desc, b_desc, scale, bias, softcap, row_key, col_key, row_skip, col_skip, grad_row, loss_part, doubt,
                    n, m, first, ahead,
                    D: tl.constexpr, SCORE: tl.constexpr, POSITIVE: tl.constexpr,
                    R: tl.constexpr, C: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, PROGRAMS: tl.constexpr,
                    EXACT: tl.constexpr):  # fmt: skip
    """If there is doubt: the loss alone, from numbers that no score can make too large."""
    row_tiles, col_tiles = tl.cdiv(n, R), tl.cdiv(m, C)
    s = tl.load(scale)
    tiles = tl.where(tl.load(doubt) != 0, row_tiles * col_tiles, 0)
    loss = tl.zeros((R,), tl.float32)
    for tile in range(tl.program_id(0), tiles, PROGRAMS):
        tile_row, tile_col = tile_place(tile, row_tiles, col_tiles, GROUP)
        acc = tile_dot(a_desc, b_desc, tile_row * R, tile_col * C, D, R, C, K, EXACT)
        rows = tile_row * R + tl.arange(0, R)
        cols = tile_col * C + tl.arange(0, C)
        x = score_tile(
            acc, rows, cols, n, m, s, bias, softcap, row_skip, col_skip, row_key, col_key, first, ahead, SCORE, POSITIVE
        )
        key = own_column(rows, n, m, row_key, first, ahead, SCORE, POSITIVE)
        x = tl.where(key[:, None] == cols[None, :], -x, x)
        total = tl.sum(tl.maximum(x, 0.0) * LN2 + log1p(tl.exp2(-tl.abs(x))), 1)
        loss += tl.load(grad_row + rows, mask=rows < n, other=0.0) * total
    tl.store(loss_part + tl.program_id(0) * R + tl.arange(0, R), loss)
