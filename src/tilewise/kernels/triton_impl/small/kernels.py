"""Kernels of small batches, whose scores lie in memory. `programs` puts them together.

``x`` holds the products <a_i, b_j> of all pairs, in float32. Scores are in units of log2 inside of a kernel.

    rows_kernel       the loss of each row; with one softmax in each row, or a sigmoid, also G
    both_kernel       G where rows and columns have a softmax each, or where scores are symmetric
    columns_kernel    the gradient of a bias of each column
    share_kernel      the common weight of the rows that are not ignored
    finish_kernel     sums: the loss and the gradient of the scale
    gradient_kernel   gradients multiplied by ``grad_output``

    G_ij = f_i exp(x_ij - lse_i) - h_i [positive]         f_i = w_i + 2 z_i lse_i,   h_i = w_i / number of positives

Axes: n rows, m columns; R, C rows and columns of one tile.
"""

import triton
import triton.language as tl

from tilewise.kernels.triton_impl.bits import DIAGONAL, MANY, SOFTCAP
from tilewise.kernels.triton_impl.primitives import LN2, ScoreInputs
from tilewise.kernels.triton_impl.small.row_tiles import (
    SIGMOID,
    STATS,
    cap_factor,
    factor_of,
    loaded_tile,
    row_sums,
    safe,
    write_gradient,
)

# Values of KEPT
IGNORED = tl.constexpr(1)
COUNTED = tl.constexpr(2)


@triton.jit
def weight_of(kept_share, share):
    """The common weight of all rows: the number that ``kept_share`` points to, or without it ``share``."""
    return tl.load(kept_share) if kept_share is not None else share * 1.0


@triton.jit
def kept_weight(share, row_key, ignored, n, BLOCK: tl.constexpr):
    """``share`` divided by the number of rows whose key is not ``ignored``; inf if there are none."""
    kept = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, n, BLOCK):
        at = start + tl.arange(0, BLOCK)
        kept += (tl.load(row_key + at, mask=at < n, other=ignored) != ignored).to(tl.float32)
    return share / tl.sum(kept, 0)


@triton.jit
def finite(weight):
    """0 for the weight of a mean over no rows, whose gradients are 0."""
    return tl.where(weight == float("inf"), 0.0, weight)


@triton.jit
def row_weights(rows, ok, count, row_key, weight, ignored, POSITIVE: tl.constexpr, KEPT: tl.constexpr):
    """w_i: NaN for a positive out of range, and 0 for an ignored row, or for a row of several without any."""
    w = tl.load(weight + rows, mask=ok, other=0.0) if weight is not None else tl.where(ok, 1.0, 0.0)
    if MANY == POSITIVE:
        w = tl.where(count > 0.0, w, 0.0)
    elif DIAGONAL != POSITIVE:
        if KEPT != 0:
            w = tl.where(tl.load(row_key + rows, mask=ok, other=0) == ignored, 0.0, w)
        w = tl.where((count == 0.0) & (w != 0.0), float("nan"), w)
    return w


@triton.jit
def rows_kernel(x, scale, number, bias, softcap, row_key, col_key, row_skip, col_skip, weight, square, kept_share, share, ignored,
                top_out, log_out, factor_out, hit_out, loss, dot, bias_dot, g, n, m, row_step, col_step,
                R: tl.constexpr, C: tl.constexpr, SCORE: tl.constexpr, POSITIVE: tl.constexpr,
                LOSS: tl.constexpr, KEPT: tl.constexpr, WHOLE: tl.constexpr, TOTAL: tl.constexpr):  # fmt: skip
    """The loss of R rows, and either their statistics for `both_kernel` or G and the rows' part of the scale's gradient.

    WHOLE: G is multiplied by the scale and the common weight; TOTAL: so are the losses by that weight.
    KEPT: a row whose key is ``ignored`` has the weight 0; with COUNTED, the common weight is `kept_weight`.
    With other steps of ``x`` the columns of the scores are the rows of this kernel.
    """
    rows = tl.program_id(0) * R + tl.arange(0, R)
    ok = rows < n
    s = ScoreInputs(factor_of(scale, number), bias, softcap, row_key, col_key, row_skip, col_skip, n, m, 0, 0)
    at = x + rows.to(tl.int64)[:, None] * row_step
    top, total, at_positive, count, _, _, _ = row_sums(at, rows, s, col_step, R, C, SCORE, POSITIVE, LOSS, 0)
    w = row_weights(rows, ok, count, row_key, weight, ignored, POSITIVE, KEPT)
    if SIGMOID == LOSS:
        value = total
        f = w
        h = w
    else:
        each = tl.where(count > 0.0, count, 1.0)
        value = tl.log2(total) + (safe(top) - at_positive / each)
        f = w
        h = w / each
    value = tl.where(w == 0.0, 0.0, w * value * LN2)
    if COUNTED == KEPT:
        common = kept_weight(share, row_key, ignored, n, 1024)
    else:
        common = weight_of(kept_share, share)
    if square is not None:
        z = tl.load(square + rows, mask=ok, other=0.0)
        lse = (tl.log2(total) + top) * LN2
        value += tl.where(z == 0.0, 0.0, z * lse * lse)
        f += tl.where(z == 0.0, 0.0, 2.0 * z * lse)
    if TOTAL:
        value = value * common
    tl.store(loss + rows, value, mask=ok)
    if STATS == LOSS:
        tl.store(top_out + rows, safe(top), mask=ok)
        tl.store(log_out + rows, tl.log2(total), mask=ok)
        tl.store(factor_out + rows, f, mask=ok)
        tl.store(hit_out + rows, h, mask=ok)
    elif g is not None:
        times = finite(common) * s.scale if WHOLE else 1.0
        write_gradient(
            at, rows, s, col_step, top, total, f, h, None, times, g, dot, bias_dot, R, C, SCORE, POSITIVE, LOSS
        )


@triton.jit
def both_kernel(x, scale, number, bias, softcap, row_key, col_key, row_skip, col_skip,
                row_top, row_log, row_factor, row_hit, col_top, col_log, col_factor, col_hit, share, dot, g, n, m,
                R: tl.constexpr, C: tl.constexpr, SCORE: tl.constexpr, POSITIVE: tl.constexpr,
                WHOLE: tl.constexpr):  # fmt: skip
    """G of one tile: the terms of the rows' softmax and of the columns', and the tile's part of the scale's gradient."""
    col_tiles = tl.cdiv(m, C)
    rows = tl.program_id(0) // col_tiles * R + tl.arange(0, R)
    cols = tl.program_id(0) % col_tiles * C + tl.arange(0, C)
    ok_row, ok_col = rows < n, cols < m
    place = rows.to(tl.int64)[:, None] * m
    s = ScoreInputs(factor_of(scale, number), bias, softcap, row_key, col_key, row_skip, col_skip, n, m, 0, 0)
    acc, v, hit, here = loaded_tile(x + place, rows, cols, s, 1, SCORE, POSITIVE)
    f_row, f_col = (
        tl.load(row_factor + rows, mask=ok_row, other=0.0),
        tl.load(col_factor + cols, mask=ok_col, other=0.0),
    )
    h_row, h_col = tl.load(row_hit + rows, mask=ok_row, other=0.0), tl.load(col_hit + cols, mask=ok_col, other=0.0)
    top, log = tl.load(row_top + rows, mask=ok_row, other=0.0), tl.load(row_log + rows, mask=ok_row, other=0.0)
    by_row = tl.exp2((v - top[:, None]) - log[:, None]) * f_row[:, None]
    top, log = tl.load(col_top + cols, mask=ok_col, other=0.0), tl.load(col_log + cols, mask=ok_col, other=0.0)
    by_col = tl.exp2((v - top[None, :]) - log[None, :]) * f_col[None, :]
    # A lone row has no scores and the weight 0.
    by_row, by_col = tl.where((f_row == 0.0)[:, None], 0.0, by_row), tl.where((f_col == 0.0)[None, :], 0.0, by_col)
    grad = by_row + by_col - tl.where(hit, h_row[:, None] + h_col[None, :], 0.0)
    if SOFTCAP & SCORE:
        grad = grad * cap_factor(v, softcap)
    if dot is not None:
        tl.store(dot + tl.program_id(0), tl.sum(tl.sum(tl.where(here, grad * acc, 0.0), 1), 0))
    if WHOLE:
        grad = grad * (s.scale * share)
    tl.store(g + place + cols[None, :], grad.to(g.dtype.element_ty), mask=here)


@triton.jit
def share_kernel(share, row_key, ignored, out, n, BLOCK: tl.constexpr):
    """`kept_weight`, for more rows than each program of `rows_kernel` should count."""
    tl.store(out, kept_weight(share, row_key, ignored, n, BLOCK))


@triton.jit
def finish_kernel(row_loss, col_loss, dot, bias_dot, scale, number, kept_share, share,
                  loss_out, scale_out, bias_out, unit_out, factor_out, n, dots,
                  HALF: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """The loss, the gradients of the scale and of one bias of all columns, and the factor of the features' gradients.

    HALF: each pair of symmetric scores was counted twice in ``dot``. A mean over no rows is NaN: 0 times inf.
    """
    w = weight_of(kept_share, share)
    total = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, n, BLOCK):
        at = start + tl.arange(0, BLOCK)
        total += tl.load(row_loss + at, mask=at < n, other=0.0).to(tl.float64)
        if col_loss is not None:
            total += tl.load(col_loss + at, mask=at < n, other=0.0).to(tl.float64)
    tl.store(loss_out, (tl.sum(total, 0) * w).to(tl.float32))
    w = finite(w)
    if factor_out is not None:
        tl.store(unit_out, w)
        tl.store(factor_out, w * factor_of(scale, number))
    if dot is not None:
        total = tl.zeros((BLOCK,), tl.float64)
        for start in range(0, dots, BLOCK):
            at = start + tl.arange(0, BLOCK)
            total += tl.load(dot + at, mask=at < dots, other=0.0).to(tl.float64)
        found = tl.sum(total, 0) * w
        if HALF:
            found = 0.5 * found
        tl.store(scale_out, found.to(tl.float32))
    if bias_dot is not None:
        total = tl.zeros((BLOCK,), tl.float64)
        for start in range(0, n, BLOCK):
            at = start + tl.arange(0, BLOCK)
            total += tl.load(bias_dot + at, mask=at < n, other=0.0).to(tl.float64)
        tl.store(bias_out, (tl.sum(total, 0) * w).to(tl.float32))


@triton.jit
def columns_kernel(g, weight, out, n, m, R: tl.constexpr, C: tl.constexpr):
    """The gradient of the bias of each column: the sums of G, times the common weight of the rows."""
    cols = tl.program_id(0) * C + tl.arange(0, C)
    total = tl.zeros((R, C), tl.float32)
    for start in range(0, n, R):
        rows = start + tl.arange(0, R)
        here = (rows < n)[:, None] & (cols < m)[None, :]
        total += tl.load(g + rows.to(tl.int64)[:, None] * m + cols[None, :], mask=here, other=0.0).to(tl.float32)
    tl.store(out + cols, tl.sum(total, 0) * tl.load(weight), mask=cols < m)


@triton.jit
def scaled(values, out, factor, size, IN_PLACE: tl.constexpr, BLOCK: tl.constexpr):
    """out = values * factor, for this program's block; rounded once. IN_PLACE: nothing is done for a factor of 1."""
    if IN_PLACE:
        size = tl.where(factor == 1.0, 0, size)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(values + at, mask=at < size, other=0.0).to(tl.float32) * factor
    tl.store(out + at, value.to(out.dtype.element_ty), mask=at < size)


@triton.jit
def gradient_kernel(a, b, scale, factor, grad_output, a_out, b_out, scale_out, a_size, b_size,
                    IN_PLACE: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Every gradient times ``grad_output``, and those of the features times ``factor``, if there is one.

    A gradient that is not needed is None.
    """
    times = tl.load(grad_output).to(tl.float32)
    if scale is not None:
        if tl.program_id(0) == 0:
            tl.store(scale_out, tl.load(scale) * times)
    if factor is not None:
        times = times * tl.load(factor)
    if a is not None:
        scaled(a, a_out, times, a_size, IN_PLACE, BLOCK)
    if b is not None:
        scaled(b, b_out, times, b_size, IN_PLACE, BLOCK)
