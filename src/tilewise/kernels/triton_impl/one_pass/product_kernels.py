"""Kernels beside the two products of the one-pass softmax loss; `softmax_kernels` computes E and f_i.

    dA_i = scale f_i sum_j E_ij b_j     dB_j = sum_i E_ij (scale f_i a_i)     dbias_j = sum_i f_i E_ij

With features of a half type, the term of the positive contains two roundings: of E_ij and of f_i a_i. That term may be
most of the gradient, or all of it where scores are flat, and a dense loss rounds G, which is then -w_i, exactly. So the
entry is also kept unrounded, and the roundings are corrected after the products, in float32 and for the positives alone:
by `finish_rows_kernel` in dA, by `positives_kernel` in dB.
"""

import triton
import triton.language as tl

from tilewise.kernels.triton_impl.launch.prepared import kernel
from tilewise.kernels.triton_impl.primitives import in_units, row_stride


@kernel(optional=("b", "entry", "column", "out", "scaled", "dots"), dynamic=("a_stride", "b_stride", "n"))
def finish_rows_kernel(a, b, scale, total, factor, entry, column, out, scaled, dots, a_stride, b_stride, n,
                       D: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    """out_i = scale f_i total_i, scaled_i = scale f_i a_i, and for each program the sum of f_i <total_i, a_i>.

    That sum is the program's part of the scale's gradient. With ``entry``, the rounding of the positive's entry is
    corrected: total_i += (entry - rounded entry) b_pos.
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
            own = b + pos * row_stride(b, b_stride) + col[None, :]
            value += lost * tl.load(own, mask=here & (pos >= 0), other=0.0).to(tl.float32)
        value = f * value
        if dots is not None or scaled is not None:
            row = tl.load(a + at * row_stride(a, a_stride) + col[None, :], mask=here, other=0.0).to(tl.float32)
        if dots is not None:
            dot += value * row
        if scaled is not None:
            tl.store(scaled + at * D + col[None, :], (row * (f * s)).to(scaled.dtype.element_ty), mask=here)
        if out is not None:
            tl.store(out + at * D + col[None, :], (value * s).to(out.dtype.element_ty), mask=here)
    if dots is not None:
        tl.store(dots + tl.program_id(0), tl.sum(tl.sum(dot, 1), 0))


@triton.jit
def positives_from(place, stop, mine, col, a, scale, scaled, factor, entry, order, column, D: tl.constexpr,
                   STRIDE: tl.constexpr, RUN: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    """Sums of scale f_i entry_i a_i and of v_i s_i (v and s rounded), over the rows i whose column is mine.

    Their sorted places are ``place`` up to ``stop``, at most RUN of them.
    """
    all_places = place + tl.arange(0, RUN)
    found = tl.load(column + all_places, mask=all_places < stop, other=-2) == mine
    end = place + tl.sum(found.to(tl.int32), 0)
    s = tl.load(scale)
    exact = tl.zeros((WIDTH,), tl.float32)
    held = tl.zeros((WIDTH,), tl.float32)
    for start in range(place, end, BLOCK):
        at = start + tl.arange(0, BLOCK)
        row = tl.load(order + at, mask=at < end, other=0)[:, None]
        here = (at < end)[:, None] & (col < D)[None, :]
        e = tl.load(entry + row)
        x = tl.load(a + row * STRIDE + col[None, :], mask=here, other=0.0).to(tl.float32)
        y = tl.load(scaled + row * D + col[None, :], mask=here, other=0.0).to(tl.float32)
        v = e.to(scaled.dtype.element_ty).to(tl.float32)
        # Elsewhere values may be infinite.
        exact += tl.sum(tl.where(here, (s * tl.load(factor + row) * e) * x, 0.0), 0)
        held += tl.sum(tl.where(here, v * y, 0.0), 0)
    return exact, held


@kernel(dynamic=("n",))
def runs_kernel(a, scale, scaled, factor, entry, column, order, exacts, helds, n,
                D: tl.constexpr, STRIDE: tl.constexpr, RUN: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    """Partial sums for `positives_kernel`, of a column with many rows: from each RUN-th sorted place to the next."""
    chunks = tl.cdiv(D, WIDTH)
    run = tl.program_id(0) // chunks + 1
    col = tl.program_id(0) % chunks * WIDTH + tl.arange(0, WIDTH)
    mine = tl.load(column + run * RUN)
    goes = (mine >= 0) & (mine == tl.load(column + run * RUN - 1))
    stop = tl.where(goes, tl.minimum(n, run * RUN + RUN), 0)
    exact, held = positives_from(
        run * RUN, stop, mine, col, a, scale, scaled, factor, entry, order, column, D, STRIDE, RUN, BLOCK, WIDTH
    )
    here = goes & (col < D)
    tl.store(exacts + run * D + col, exact, mask=here)
    tl.store(helds + run * D + col, held, mask=here)


@kernel(dynamic=("n",))
def positives_kernel(a, scale, scaled, factor, entry, column, order, exacts, helds, grad, n,
                     D: tl.constexpr, STRIDE: tl.constexpr, EPS: tl.constexpr, RUN: tl.constexpr, BLOCK: tl.constexpr,
                     WIDTH: tl.constexpr):  # fmt: skip
    """grad_j += sum of scale f_i entry_i a_i - v_i s_i over the rows i whose positive is j; dB holds the rounded v_i s_i.

    ``column`` is sorted; ``order`` has the row of each place. A program has WIDTH features of one sorted place. The first
    program of a column adds all its rows, in order; the others return. From the next RUN-th place on, `runs_kernel` has
    added up the rows of a column.

    A ``grad`` of a half type (EPS: from 1 to the next number) was rounded before and is rounded again. Besides sum v_i s_i
    it holds the share of the negatives and a rounding error, whose mean square is known: ulp^2 / 12. To reduce that error,
    the sum of both is multiplied by the negatives' part of its squares (Stein's estimate), where it is no larger than a
    rounding can be. A share of the negatives below the rounding vanishes, as in a rounded dense gradient, and the share of
    the positives is then rounded once.
    """
    chunks = tl.cdiv(D, WIDTH)
    place = tl.program_id(0) // chunks
    col = tl.program_id(0) % chunks * WIDTH + tl.arange(0, WIDTH)
    mine = tl.load(column + place)
    first = mine != tl.load(column + place - 1, mask=place > 0, other=-1)  # false for -1, which sorts first
    where = grad + mine.to(tl.int64) * D + col
    here = first & (col < D)
    before = tl.load(where, mask=here, other=0.0).to(tl.float32)
    run = place // RUN + 1
    stop = tl.where(first, tl.minimum(n, run * RUN), 0)
    exact, held = positives_from(
        place, stop, mine, col, a, scale, scaled, factor, entry, order, column, D, STRIDE, RUN, BLOCK, WIDTH
    )
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
        rounding_only = (tl.abs(rest) <= ulp) & (ulp < float("inf"))
        rest = tl.where(rounding_only, rest * tl.where(share > 0.0, share, 0.0), rest)
    tl.store(where, (exact + rest).to(grad.dtype.element_ty), mask=here)


@kernel(dynamic=("g_stride", "n", "m"))
def bias_kernel(g, factor, out, g_stride, n, m, FIRST: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """The gradient of the bias: sum_i f_i E_ij for each column."""
    cols = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    ok = cols < m
    # Rows are padded to this length.
    read = cols < row_stride(g, m + (128 // g.dtype.element_ty.primitive_bitwidth - 1))
    total = tl.zeros((BLOCK, WIDTH), tl.float32)
    for start in range(0, n, BLOCK):
        rows = start + tl.arange(0, BLOCK)
        f = tl.load(factor + rows, mask=rows < n, other=0.0)
        here = (rows < n)[:, None] & read[None, :]
        place = g + rows.to(tl.int64)[:, None] * row_stride(g, g_stride) + cols[None, :]
        value = tl.load(place, mask=here, other=0.0)
        total += value.to(tl.float32) * f[:, None]
    sums = tl.sum(total, 0)
    if not FIRST:
        sums += tl.load(out + cols, mask=ok, other=0.0)
    tl.store(out + cols, sums, mask=ok)


@triton.jit
def times(values, out, factor, count, UNIT: tl.constexpr, IN_PLACE: tl.constexpr, PROGRAMS: tl.constexpr,
          BLOCK: tl.constexpr):  # fmt: skip
    """out = values * factor, in float32 up to the last rounding. In place, the usual factor of 1 costs nothing."""
    count = in_units(count, UNIT)
    blocks = tl.cdiv(count, BLOCK)
    if IN_PLACE:
        blocks = tl.where(factor == 1.0, 0, blocks)
    for block in range(tl.program_id(0), blocks, PROGRAMS):
        at = tl.full((BLOCK,), BLOCK, tl.int64) * block + tl.arange(0, BLOCK)
        value = tl.load(values + at, mask=at < count, other=0.0).to(tl.float32) * factor
        tl.store(out + at, value.to(out.dtype.element_ty), mask=at < count)


@kernel(optional=("a", "b", "scale", "a_out", "b_out", "scale_out"), dynamic=("a_size", "b_size"))
def times_kernel(a, b, scale, grad_output, a_out, b_out, scale_out, a_size, b_size,
                 UNIT: tl.constexpr, IN_PLACE: tl.constexpr, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Every gradient times ``grad_output``; a gradient that is not needed is None. UNIT divides the sizes."""
    factor = tl.load(grad_output).to(tl.float32)
    if a is not None:
        times(a, a_out, factor, a_size, UNIT, IN_PLACE, PROGRAMS, BLOCK)
    if b is not None:
        times(b, b_out, factor, b_size, UNIT, IN_PLACE, PROGRAMS, BLOCK)
    if scale is not None:
        if tl.program_id(0) == 0:
            tl.store(scale_out, tl.load(scale) * factor)
