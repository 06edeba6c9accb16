"""Whether scores may be rounded too coarsely for the filter: `filter_plan.rounding_exceeds` in two launches."""

import triton
import triton.language as tl

from tilewise.kernels.triton_impl.launch.prepared import kernel


@triton.jit
def largest_square(features, units, at, ok, D: tl.constexpr, UNIT: tl.constexpr, K: tl.constexpr):
    """The largest squared norm of those features ``at`` that are ``ok``."""
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
    """squares[program] = the largest squared norm of R rows that count; in the programs after those, of R columns."""
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
def largest(numbers, first, stop, BLOCK: tl.constexpr):
    """The largest of the numbers from ``first`` to ``stop``, at least 0."""
    high = tl.zeros((BLOCK,), tl.float32)
    for start in range(first, stop, BLOCK):
        at = start + tl.arange(0, BLOCK)
        high = tl.maximum(high, tl.load(numbers + at, mask=at < stop, other=0.0))
    return tl.max(high, 0)


@kernel(optional=("bias",), dynamic=("m", "row_programs", "programs", "most"))
def exceeds_kernel(squares, scale, bias, exceeds, m, row_programs, programs, most, BLOCK: tl.constexpr):
    """exceeds = 1 if |scale| max |a_i| max |b_j| + max |bias_j| is above ``most``, else 0. An infinite bias does not count."""
    rows, cols = largest(squares, 0, row_programs, BLOCK), largest(squares, row_programs, programs, BLOCK)
    size = tl.abs(tl.load(scale)) * tl.sqrt(rows) * tl.sqrt(cols)
    if bias is not None:
        high = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, m, BLOCK):
            at = start + tl.arange(0, BLOCK)
            value = tl.abs(tl.load(bias + at, mask=at < m, other=0.0))
            high = tl.maximum(high, tl.where(value == float("inf"), 0.0, value))
        size += tl.max(high, 0)
    tl.store(exceeds, (size > most).to(tl.int32))
