"""Backward of the filter: gradients of the kept entries, and the means of tiles in place of the dropped ones.

An *entry* is one row and one tile. In the names of this file (`pair_kernel`, ``pair``, ``pairs``), a pair is an entry.

    plan_kernel        the list of kept entries, and the factor of each dropped one
    pair_kernel        G of the kept entries, and G B, their terms of dA
    add_rows_kernel    adds these terms to dA
    column_kernel      dB and the gradient of the bias

`forward_kernels` says what places, units and the axes are. Every number is computed by one program here too.
"""

import triton.language as tl

from tilewise.kernels.triton_impl.bits import SOFTCAP
from tilewise.kernels.triton_impl.launch import kernel
from tilewise.kernels.triton_impl.primitives import LN2, NO_SHARE, ScoreInputs, score_tile
from tilewise.kernels.triton_impl.tf32 import computed_operand, operand
from tilewise.kernels.triton_impl.two_pass.backward_kernels import cap_slope, nonzero_factor, side


@kernel(optional=("row_shift",), dynamic=("softcap", "tolerance", "n", "room", "blocks"))
def plan_kernel(softcap, row_shift, row_lse, mass, count, grad_row, factor, starts, firsts, dropped, rows, table,
                tolerance, n, room, blocks, SCORE: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """For each tile t: dropped[t], (n,), and the list of the rows that keep the tile. One program for each tile.

    dropped = the dropped mass times ``grad_row``, the gradient of a row's dropped probability, and ``factor``; 0 where an
    entry is kept. The rows that keep tile t are rows[starts[t] : starts[t + 1]], in ascending order. They are divided into
    blocks of up to R rows, which are the columns firsts[t] to firsts[t + 1] of ``table``; see `pair_kernel`.

    The list has memory for ``room`` entries and ``blocks`` blocks; what is beyond is not written. If more are kept, the
    host does not use the list and computes the exact gradients.
    """
    tile = tl.program_id(0)
    start, stop = tl.load(starts + tile), tl.load(starts + tile + 1)
    f = tl.load(factor)
    at = start
    for first in range(0, n, BLOCK):
        row = first + tl.arange(0, BLOCK)
        ok, here = row < n, tile.to(tl.int64) * n + row
        share = tl.load(mass + here, mask=ok, other=0.0).to(tl.float32)
        value = share * tl.load(grad_row + row, mask=ok, other=0.0) * f
        if SOFTCAP & SCORE:
            # The derivative of the soft cap at the score x whose exponential is the tile's mean exponential.
            x = tl.log(share * (tolerance / tl.load(count + tile))) + tl.load(row_lse + row, mask=ok, other=0.0)
            if row_shift is not None:
                x += tl.load(row_shift + row, mask=ok, other=0.0)
            value = value * tl.maximum(1.0 - (x / softcap) * (x / softcap), 0.0)
        # ``share`` is 0 for an ignored row and negative for a kept entry; ``value`` may then be NaN or inf.
        tl.store(dropped + here, tl.where(share > 0.0, value, 0.0).to(dropped.dtype.element_ty), mask=ok)
        keep = (share < 0.0).to(tl.int32)
        place = at + tl.cumsum(keep, 0) - 1
        tl.store(rows + place, row, mask=(keep != 0) & (place < room))
        at += tl.sum(keep, 0)
    block, last = tl.load(firsts + tile), tl.load(firsts + tile + 1)
    for first in range(block, last, BLOCK):
        index = first + tl.arange(0, BLOCK)
        ok = (index < last) & (index < blocks)
        begin = start + (index - block) * R
        tl.store(table + index, tl.zeros((BLOCK,), tl.int32) + tile, mask=ok)
        tl.store(table + blocks + index, begin, mask=ok)
        tl.store(table + 2 * blocks + index, tl.minimum(begin + R, stop), mask=ok)


@kernel(
    optional=("bias", "row_shift", "grad_entropy", "pick", "grad_picked", "g", "u"),
    dynamic=("softcap", "m", "col_start", "first_block", "blocks", "first_g", "first_u", "a_units", "b_units", "picks"),
)
def pair_kernel(a, b, scale, bias, softcap, row_key, pick, row_shift, row_lse, grad_row, grad_pos, grad_entropy,
                grad_picked, factor, order, rows, table, g, u,
                m, col_start, first_block, blocks, first_g, first_u, a_units, b_units, picks,
                D: tl.constexpr, UNIT: tl.constexpr, SCORE: tl.constexpr, W: tl.constexpr, R: tl.constexpr, K: tl.constexpr,
                EXACT: tl.constexpr):  # fmt: skip
    """G of one block of entries (up to R rows that keep one tile), and the product G B of each entry.

    table is (3, blocks); a column holds the tile of a block, its first entry in ``rows``, and the end of its entries.
    g[entry - first_g] = G, (W,), and u[entry - first_u] = G B, (D,); None if they are not needed.
    """
    block = first_block + tl.program_id(0)
    tile = tl.load(table + block)
    pair = tl.load(table + blocks + block) + tl.arange(0, R)
    ok = pair < tl.load(table + 2 * blocks + block)
    row = tl.load(rows + pair, mask=ok, other=0).to(tl.int64)
    place = tile * W + tl.arange(0, W)
    ok_col = place < m
    col = tl.load(order + place, mask=ok_col, other=0)
    row_at = a + row[:, None] * a_units * UNIT
    col_at = b + col.to(tl.int64)[:, None] * b_units * UNIT
    acc = tl.zeros((R, W), tl.float32)
    for k in range(0, (D + K - 1) // K):
        at = k * K + tl.arange(0, K)
        left = tl.load(row_at + at[None, :], mask=(at < D)[None, :], other=0.0)
        right = tl.load(col_at + at[None, :], mask=(at < D)[None, :], other=0.0)
        acc = tl.dot(operand(left, EXACT), operand(right, EXACT).T, acc, input_precision=EXACT)
    # A column past the end gets the index m and scores -inf.
    s = ScoreInputs(tl.load(scale), bias, softcap, None, None, None, None, 0, m, 0, 0)
    x = score_tile(acc, row, tl.where(ok_col, col, m), s, SCORE, 0)
    f = nonzero_factor(factor)
    level, start, coming = side(row_lse, row_shift, grad_row, row, ok, f)
    below = (x - start[:, None]) - level[:, None]
    value = coming[:, None]
    if grad_entropy is not None:
        value = value - (tl.load(grad_entropy + row) * f * LN2)[:, None] * tl.maximum(below, NO_SHARE)
    value = value * tl.exp2(below)
    hit = ((tl.load(row_key + row) - col_start)[:, None] == col.to(tl.int64)[None, :]) & ok_col[None, :]
    value += tl.where(hit, (tl.load(grad_pos + row) * f)[:, None], 0.0)
    if grad_picked is not None:
        for k in range(0, picks):  # a column that is picked twice gets both gradients
            hit = ((tl.load(pick + row * picks + k) - col_start)[:, None] == col.to(tl.int64)[None, :]) & ok_col[
                None, :
            ]
            value += tl.where(hit, (tl.load(grad_picked + row * picks + k) * f)[:, None], 0.0)
    if SOFTCAP & SCORE:
        value = value * cap_slope(x, softcap)
    value = computed_operand(tl.where(ok[:, None], value, 0.0).to(a.dtype.element_ty), EXACT)
    if g is not None:
        entry = (pair - first_g).to(tl.int64)[:, None] * W + tl.arange(0, W)[None, :]
        tl.store(g + entry, value, mask=ok[:, None])
    if u is not None:
        to = u + (pair - first_u).to(tl.int64)[:, None] * D
        for k in range(0, (D + K - 1) // K):
            at = k * K + tl.arange(0, K)
            right = tl.load(col_at + at[None, :], mask=(at < D)[None, :], other=0.0)
            product = tl.dot(value, operand(right, EXACT), input_precision=EXACT)
            tl.store(to + at[None, :], product, mask=ok[:, None] & (at < D)[None, :])


@kernel(optional=("bias", "bias_share", "bias_out"), dynamic=("m", "first_tile", "first_g", "a_units"))
def column_kernel(a, bias, factor, bias_factor, g, share, bias_share, count, order, rows, starts, out, bias_out,
                  m, first_tile, first_g, a_units,
                  D: tl.constexpr, UNIT: tl.constexpr, W: tl.constexpr, R: tl.constexpr, K: tl.constexpr, EXACT: tl.constexpr):  # fmt: skip
    """out[column] = factor * (G' A + the term of the dropped entries): dB of the columns of a tile, in their old order.

    G' is the transposed G of the tile's kept entries. The term of the dropped entries, share[tile] / count[tile], is the
    same for all live columns of the tile. bias_out: the same sums with ones instead of A. A program handles K features of
    one tile.
    """
    tile = first_tile + tl.program_id(0) // ((D + K - 1) // K)
    part = tl.program_id(0) % ((D + K - 1) // K)
    at = part * K + tl.arange(0, K)
    place = tile * W + tl.arange(0, W)
    ok_col = place < m
    col = tl.load(order + place, mask=ok_col, other=0).to(tl.int64)
    width = tl.load(count + tile)
    mean = tl.load(share + tile.to(tl.int64) * D + at, mask=at < D, other=0.0) / width
    live = tl.full((W,), 1.0, tl.float32)
    if bias is not None:
        live = tl.where(tl.load(bias + col, mask=ok_col, other=0.0) > float("-inf"), 1.0, 0.0)
    acc = live[:, None] * mean[None, :]
    sums = tl.zeros((W,), tl.float32)
    stop = tl.load(starts + tile + 1)
    for first in range(tl.load(starts + tile), stop, R):
        pair = first + tl.arange(0, R)
        ok = pair < stop
        row = tl.load(rows + pair, mask=ok, other=0).to(tl.int64)
        from_g = (pair - first_g).to(tl.int64)[:, None] * W + tl.arange(0, W)[None, :]
        value = tl.load(g + from_g, mask=ok[:, None], other=0.0)
        right = tl.load(a + row[:, None] * a_units * UNIT + at[None, :], mask=(at < D)[None, :], other=0.0)
        acc = tl.dot(value.T, operand(right, EXACT), acc, input_precision=EXACT)
        if bias_out is not None:
            if part == 0:
                sums += tl.sum(value.to(tl.float32), 0)
    to = out + col[:, None] * D + at[None, :]
    tl.store(to, (acc * tl.load(factor)).to(out.dtype.element_ty), mask=ok_col[:, None] & (at < D)[None, :])
    if bias_out is not None:
        if part == 0:
            sums += live * (tl.load(bias_share + tile) / width)
            tl.store(bias_out + col, sums * tl.load(bias_factor), mask=ok_col)


@kernel(dynamic=("first",))
def add_rows_kernel(total, u, pairs, starts, first, D: tl.constexpr, K: tl.constexpr):
    """total[row] += u[entry - first] for the entries of the row: pairs[first + starts[row] : first + starts[row + 1]]."""
    row = tl.program_id(0) // ((D + K - 1) // K)
    at = (tl.program_id(0) % ((D + K - 1) // K)) * K + tl.arange(0, K)
    start, stop = tl.load(starts + row), tl.load(starts + row + 1)
    if start < stop:
        here = total + row.to(tl.int64) * D + at
        value = tl.load(here, mask=at < D, other=0.0)
        for index in range(start, stop):
            pair = (tl.load(pairs + first + index) - first).to(tl.int64)
            value += tl.load(u + pair * D + at, mask=at < D, other=0.0)
        tl.store(here, value, mask=at < D)
