"""The sum of softplus over each row of a tile: the statistic of sigmoid losses, for scores x in units of log2.

softplus(x) = max(x, 0) + log(1 + exp(-|x|)),   with -x at a positive
"""

import triton
import triton.language as tl

from tilewise.kernels.triton_impl.primitives import LN2

LARGEST_PRODUCT = tl.constexpr(2.0**100)


@triton.jit
def softplus_join(a, b):
    """(1 + a)(1 + b) - 1: sums of log(1 + e) as one product, without losing small e."""
    return a + b + a * b


@triton.jit
def log1p(x):
    """log(1 + x) for x >= 0, accurate where x is small."""
    u = 1.0 + x
    return tl.where(u == 1.0, x, tl.log(u) * (x / tl.where(u == 1.0, 1.0, u - 1.0)))


@triton.jit
def softplus_sum(x):
    """The sum over each row, for scores of any size: a logarithm for each."""
    return tl.sum(tl.maximum(x, 0.0) * LN2 + log1p(tl.exp2(-tl.abs(x))), 1)


@triton.jit
def softplus_product(x):
    """The same by one logarithm for each row: that of (1 + e_1)(1 + e_2)...; +inf where this product leaves float32."""
    joined = tl.reduce(tl.exp2(-tl.abs(x)), 1, softplus_join)
    total = tl.sum(tl.maximum(x, 0.0), 1) * LN2 + log1p(joined)
    return tl.where(joined > LARGEST_PRODUCT, float("inf"), total)
