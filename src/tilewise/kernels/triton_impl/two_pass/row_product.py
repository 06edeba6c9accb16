"""The product G B with sums in a fixed order, for batch invariance.

A program computes one tile of R rows and W features of the result, and adds up the columns of G in their order, K at a
time. So a row of the result depends neither on the number of rows nor on the row's place. cuBLAS, which computes this
product otherwise, chooses its algorithm by the sizes, and may split the sum of some tiles and not of others.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from tilewise.kernels.triton_impl.buffers import Buffer, Descriptor
from tilewise.kernels.triton_impl.launch import kernel
from tilewise.kernels.triton_impl.scores import Scores, cdiv


def row_product(scores: Scores, out: Buffer, g: Buffer, b: Buffer, first: bool) -> None:
    """out = g @ b, or out += g @ b, added up in float32; ``out`` is contiguous."""
    sizes = scores.gradient_sizes  # the tiles of both operands take as much shared memory as those of the scores
    (n, m), d = g.shape, b.shape[1]
    values: dict[str, Any] = {"out": out, "n": n, "m": m, "D": d, "FIRST": first}
    g = scores.operand(g, in_place=True)
    values |= {"g_desc": Descriptor(g, (sizes.rows, sizes.depth), scores.exact)}
    values |= {"b_desc": Descriptor(b, (sizes.depth, sizes.cols), scores.exact)}
    values |= {"R": sizes.rows, "W": sizes.cols, "K": sizes.depth, "EXACT": scores.exact}
    programs = cdiv(n, sizes.rows) * cdiv(d, sizes.cols)
    scores.launch(row_product_kernel, programs, warps=sizes.warps, stages=sizes.stages, **values)


@triton.jit
def tile_of(out, row, col, n, D: tl.constexpr, R: tl.constexpr, W: tl.constexpr):
    """The addresses of a tile of ``out``, which is (n, D), and which of them lie inside."""
    down, right = tl.arange(0, R)[:, None], tl.arange(0, W)[None, :]
    # 64 bits for the tile, 32 inside of it, and D as a constant: otherwise the addresses take all registers.
    return out + (row.to(tl.int64) * D + col) + (down * D + right), (row + down < n) & (col + right < D)


@kernel(dynamic=("n", "m"))
def row_product_kernel(g_desc, b_desc, out, n, m, D: tl.constexpr, FIRST: tl.constexpr,
                       R: tl.constexpr, W: tl.constexpr, K: tl.constexpr, EXACT: tl.constexpr):  # fmt: skip
    """One tile of g @ b. Rows, columns and features out of bounds are read as zeros."""
    across = tl.cdiv(D, W)
    row, col = tl.program_id(0) // across * R, tl.program_id(0) % across * W
    acc = tl.zeros((R, W), dtype=tl.float32)
    if not FIRST:
        at, inside = tile_of(out, row, col, n, D, R, W)
        acc += tl.load(at, mask=inside, other=0.0)
    for k in range(0, m, K):
        acc = tl.dot(g_desc.load([row, k]), b_desc.load([k, col]), acc, input_precision=EXACT)
    at, inside = tile_of(out, row, col, n, D, R, W)
    tl.store(at, acc.to(out.dtype.element_ty), mask=inside)
