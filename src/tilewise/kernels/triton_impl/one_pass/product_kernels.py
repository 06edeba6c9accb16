"""Kernels of the one-pass softmax loss that run in addition to its two products of matrices.

E_ij are the exponentials and f_i the factor of row i, so that the gradient of the scores is f_i E_ij (`softmax_kernels`):

    dA_i = scale f_i sum_j E_ij b_j     dB_j = sum_i E_ij (scale f_i a_i)     dbias_j = sum_i f_i E_ij

With features of a half type, the term of the positive contains two roundings: of E_ij and of f_i a_i. That term may be
most of the gradient, or all of it where scores are flat. A dense loss rounds the positive's entry of G, about minus the
weight of the row, without an error. So the positive's entry of E is also kept unrounded, and both roundings are corrected
in float32 after the products: by `finish_rows_kernel` in dA, by `rounded_positives` in dB.
"""

import triton
import triton.language as tl

from tilewise.kernels.triton_impl.launch import kernel
from tilewise.kernels.triton_impl.primitives import in_units, row_stride


@kernel(optional=("b", "total", "entry", "column", "out", "scaled", "dots"), dynamic=("a_stride", "b_stride", "n"))
def finish_rows_kernel(a, b, scale, total, factor, entry, column, out, scaled, dots, a_stride, b_stride, n,
                       D: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    """out_i = scale f_i total_i, scaled_i = scale f_i a_i, and for each program the sum of f_i <total_i, a_i>.

    That sum is the program's part of the scale's gradient. With ``entry``, the rounding of the positive's entry is
    corrected: total_i += (entry - rounded entry) b_pos. Without ``total``, only scaled_i is written.
    """
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at, ok = rows.to(tl.int64)[:, None], rows < n
    f = tl.load(factor + rows, mask=ok, other=0.0)[:, None]
    s = tl.load(scale)
    if total is not None and entry is not None:
        exact = tl.load(entry + rows, mask=ok, other=0.0)
        lost = (exact - exact.to(b.dtype.element_ty).to(tl.float32))[:, None]
        pos = tl.load(column + rows, mask=ok, other=-1).to(tl.int64)[:, None]
    dot = tl.zeros((BLOCK, WIDTH), tl.float32)
    for k in range(0, D, WIDTH):
        col = k + tl.arange(0, WIDTH)
        here = ok[:, None] & (col < D)[None, :]
        if total is not None:
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


@kernel(dynamic=("g_stride", "n", "m"))
def bias_kernel(g, factor, out, g_stride, n, m, FIRST: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """The gradient of the bias, sum_i f_i E_ij for each column; ``g`` is E. Without FIRST it is added to ``out``."""
    cols = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    ok = cols < m
    # Rows of E are padded to a multiple of 16 bytes. The padding may be read; it is not stored.
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
    """out = values * factor, in float32 up to the last rounding. In place, nothing is done for a factor of 1."""
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
