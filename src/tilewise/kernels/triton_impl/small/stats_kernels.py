"""Kernels of the statistics of small batches, whose scores lie in memory. See `kernels` for the names.

stats_kernel            statistics of rows, relative to a shift
stats_gradient_kernel   G, from the gradients of the statistics

G_ij = p_ij (g_lse_i - g_entropy_i (l_ij + entropy_i)) + g_pos_i [positive]        l = log_softmax(x),  p = exp(l)
"""

import triton
import triton.language as tl

from tilewise.kernels.triton_impl.bits import ENTROPY
from tilewise.kernels.triton_impl.primitives import LN2, LOG2E, ScoreInputs, without_rank
from tilewise.kernels.triton_impl.small.row_tiles import factor_of, row_sums, safe, write_gradient


@triton.jit
def stats_kernel(x, scale, number, bias, softcap, row_key, col_key, row_skip, col_skip, row_shift,
                 shift_out, lse_out, pos_out, count_out, entropy_out, softplus_out, top_out, top_col_out, n, m,
                 R: tl.constexpr, C: tl.constexpr, SCORE: tl.constexpr, POSITIVE: tl.constexpr, LOSS: tl.constexpr,
                 MORE: tl.constexpr):  # fmt: skip
    """The statistics of R rows: those whose output is given.

    With ``shift_out`` they are relative to the score of the positive, which is written there.
    """
    rows = tl.program_id(0) * R + tl.arange(0, R)
    ok = rows < n
    at = x + rows.to(tl.int64)[:, None] * m
    s = ScoreInputs(factor_of(scale, number), bias, softcap, row_key, col_key, row_skip, col_skip, n, m, 0, 0)
    top, total, at_positive, count, moment, best, best_col = row_sums(at, rows, s, 1, R, C, SCORE, POSITIVE, LOSS, MORE)
    if softplus_out is not None:
        tl.store(softplus_out + rows, total * LN2, mask=ok)
    shift = tl.zeros((R,), tl.float32)
    if shift_out is not None:
        shift = tl.where(at_positive == float("-inf"), 0.0, at_positive)  # a bias of -inf excludes the positive
        tl.store(shift_out + rows, shift * LN2, mask=ok)
    elif row_shift is not None:
        shift = tl.load(row_shift + rows, mask=ok, other=0.0) * LOG2E
    if lse_out is not None:
        tl.store(lse_out + rows, (tl.log2(total) + (safe(top) - shift)) * LN2, mask=ok)
    if pos_out is not None:
        tl.store(pos_out + rows, (at_positive - count * shift) * LN2, mask=ok)
        tl.store(count_out + rows, count, mask=ok)
    if entropy_out is not None:
        tl.store(entropy_out + rows, (tl.log2(total) - moment / total) * LN2, mask=ok)
    if top_out is not None:
        tl.store(top_out + rows, (without_rank(best, best) - shift) * LN2, mask=ok)
        tl.store(top_col_out + rows, best_col.to(tl.int64), mask=ok)


@triton.jit
def stats_gradient_kernel(x, scale, number, bias, softcap, row_key, col_key, row_skip, col_skip,
                          lse, pos, entropy, softplus, size, g, dot, bias_dot, n, m, R: tl.constexpr, C: tl.constexpr,
                          SCORE: tl.constexpr, POSITIVE: tl.constexpr, LOSS: tl.constexpr,
                          WHOLE: tl.constexpr):  # fmt: skip
    """G of R rows from the gradients ``lse``, ``pos``, ``entropy`` and ``softplus``: those that are given.

    WHOLE: G is multiplied by the scale, otherwise divided by ``size``, the largest gradient.
    """
    rows = tl.program_id(0) * R + tl.arange(0, R)
    ok = rows < n
    s = ScoreInputs(factor_of(scale, number), bias, softcap, row_key, col_key, row_skip, col_skip, n, m, 0, 0)
    at = x + rows.to(tl.int64)[:, None] * m
    MORE: tl.constexpr = 0 if entropy is None else ENTROPY
    top, total, _, _, moment, _, _ = row_sums(at, rows, s, 1, R, C, SCORE, POSITIVE, LOSS, MORE)
    total = tl.where(total == 0.0, 1.0, total)  # a row without scores has no gradient
    f, h, of_entropy = tl.zeros((R,), tl.float32), tl.zeros((R,), tl.float32), None
    if lse is not None:
        f += tl.load(lse + rows, mask=ok, other=0.0)
    if softplus is not None:
        f += tl.load(softplus + rows, mask=ok, other=0.0)
    if pos is not None:
        h -= tl.load(pos + rows, mask=ok, other=0.0)
    if entropy is not None:
        of_entropy = tl.load(entropy + rows, mask=ok, other=0.0)
        f -= of_entropy * (tl.log2(total) - moment / total) * LN2
    times = s.scale if WHOLE else 1.0 / tl.load(size)
    write_gradient(at, rows, s, 1, top, total, f, h, of_entropy, times, g, dot, bias_dot, R, C, SCORE, POSITIVE, LOSS)
