"""Whether the rounding of scores may be too large for a tolerance: see `filter_plan`.

If so, the exact passes run instead of the filter. Strides are in units of 16 bytes, UNIT numbers each, so that the
compiler knows the alignment of rows.
"""

import triton
import triton.language as tl

from tilewise.kernels.triton_impl.launch import kernel


@triton.jit
def largest_square(features, units, at, ok, D: tl.constexpr, UNIT: tl.constexpr, K: tl.constexpr):
    """The largest squared norm of the rows ``at`` of ``features``, of those that are ``ok``."""
    total = tl.zeros((at.shape[0], K), tl.float32)
    for start in range(0, D, K):
        k = start + tl.arange(0, K)
        place = features + at.to(tl.int64)[:, None] * units * UNIT + k[None, :]
        value = tl.load(place, mask=ok[:, None] & (k < D)[None, :], other=0.0).to(tl.float32)
        total += value * value
    return tl.max(tl.sum(total, 1), 0)


@kernel(dynamic=("n", "m", "a_units", "b_units"))
def norm_kernel(a, b, row_key, squares, n, m, a_units, b_units,
                D: tl.constexpr, UNIT: tl.constexpr, R: tl.constexpr, K: tl.constexpr):  # fmt: skip
    """squares[program] = the largest squared norm of R vectors.

    The first cdiv(n, R) programs have rows of a, without ignored ones, and the others rows of b.
    """
    program, row_programs = tl.program_id(0), tl.cdiv(n, R)
    if program < row_programs:
        at = program * R + tl.arange(0, R)
        counted = tl.load(row_key + at, mask=at < n, other=-1) >= 0
        largest = largest_square(a, a_units, at, counted, D, UNIT, K)
    else:
        at = (program - row_programs) * R + tl.arange(0, R)
        largest = largest_square(b, b_units, at, at < m, D, UNIT, K)
    tl.store(squares + program, largest)


@triton.jit
def largest_between(numbers, first, stop, BLOCK: tl.constexpr):
    """The largest of the numbers from ``first`` to ``stop``, at least 0."""
    high = tl.zeros((BLOCK,), tl.float32)
    for start in range(first, stop, BLOCK):
        at = start + tl.arange(0, BLOCK)
        high = tl.maximum(high, tl.load(numbers + at, mask=at < stop, other=0.0))
    return tl.max(high, 0)


@kernel(optional=("bias", "only_if"), dynamic=("m", "row_programs", "all_programs", "limit"))
def exceeds_kernel(squares, scale, bias, only_if, case, m, row_programs, all_programs, limit, BLOCK: tl.constexpr):
    """case = 1 if |scale| max |a_i| max |b_j| + max |bias_j| is above ``limit``, else 0. An infinite bias does not count.

    If ``only_if`` is not 1, case = 2.
    """
    rows = largest_between(squares, 0, row_programs, BLOCK)
    cols = largest_between(squares, row_programs, all_programs, BLOCK)
    size = tl.abs(tl.load(scale)) * tl.sqrt(rows) * tl.sqrt(cols)
    if bias is not None:
        high = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, m, BLOCK):
            at = start + tl.arange(0, BLOCK)
            value = tl.abs(tl.load(bias + at, mask=at < m, other=0.0))
            high = tl.maximum(high, tl.where(value == float("inf"), 0.0, value))
        size += tl.max(high, 0)
    found = (size > limit).to(tl.int32)
    if only_if is not None:
        found = tl.where(tl.load(only_if) == 1, found, 2)
    tl.store(case, found)
