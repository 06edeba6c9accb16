"""Corrects the gradient of the columns for the roundings in the terms of the positives.

A gradient computed from exponentials is the product dB_j = sum_i E_ij s_i, with s_i = f_i a_i; `saved` defines E and f_i.
With features of a half type, the term of a positive has two rounded factors: v_i, which is its entry e_i of E after
rounding, and s_i. The term may be most of the gradient, or all of it where scores are flat, and a dense loss rounds it
only once. So for the positives alone

    dB_j += sum of f_i e_i a_i - v_i s_i    over the rows i whose positive is j

is added after the product, in float32. Rows are sorted by the column of their positive, so that the rows of one column are
added in a fixed order, without atomics.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from tilewise.kernels.triton_impl.buffers import Buffer
from tilewise.kernels.triton_impl.launch import kernel
from tilewise.kernels.triton_impl.scores import Scores, cdiv

ROWS, MOST_WIDTH, WARPS = 4, 512, 2  # rows, features and warps of a program
LONGEST_RUN = 64  # most rows with the same positive that one program reads


def correct_positives(
    scores: Scores,
    grad: Buffer,
    positives: tuple[Buffer, Buffer],
    *,
    a: Buffer,
    scaled: Buffer,
    factor: Buffer,
    entry: Buffer,
    scale: Buffer | None = None,
) -> None:
    """Correct ``grad``, the gradient of the columns.

    Args:
        scores: the scores.
        grad: (m, d), float32 or the type of the features.
        positives: of `torch.sort`: the column of each row's positive in ascending order, -1 for none, and the rows.
        a, scaled: (n, d) a_i and s_i.
        factor, entry: (n,) f_i and e_i.
        scale: multiplies every f_i; None for 1.
    """
    n, d = a.shape
    column, order = positives
    width = min(MOST_WIDTH, triton.next_power_of_2(d))
    chunks, runs = cdiv(d, width), cdiv(n, LONGEST_RUN)
    values: dict[str, Any] = {"a": a, "scaled": scaled, "column": column, "order": order, "n": n, "scale": scale}
    values |= {"factor": factor, "entry": entry}
    values |= {name: scores.empty(name, runs, d) for name in ("exact_parts", "rounded_parts")}
    values |= {"D": d, "STRIDE": a.stride(0), "RUN": LONGEST_RUN, "BLOCK": ROWS, "WIDTH": width}
    if runs > 1:
        scores.launch(runs_kernel, (runs - 1) * chunks, warps=WARPS, **values)
    assert grad.dtype is not None
    eps = 0.0 if grad.dtype == torch.float32 else torch.finfo(grad.dtype).eps
    scores.launch(positives_kernel, n * chunks, warps=WARPS, grad=grad, EPS=eps, **values)


@triton.jit
def positives_from(place, stop, mine, col, a, scale, scaled, factor, entry, order, column, D: tl.constexpr,
                   STRIDE: tl.constexpr, RUN: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    """Sums of f_i e_i a_i and of v_i s_i over the rows i whose column is mine; f_i is ``factor`` times ``scale``, if given.

    Their sorted places are ``place`` up to ``stop``, at most RUN of them.
    """
    all_places = place + tl.arange(0, RUN)
    found = tl.load(column + all_places, mask=all_places < stop, other=-2) == mine
    end = place + tl.sum(found.to(tl.int32), 0)
    s = 1.0
    if scale is not None:
        s = tl.load(scale)
    exact = tl.zeros((WIDTH,), tl.float32)
    rounded = tl.zeros((WIDTH,), tl.float32)
    for start in range(place, end, BLOCK):
        at = start + tl.arange(0, BLOCK)
        row = tl.load(order + at, mask=at < end, other=0)[:, None]
        here = (at < end)[:, None] & (col < D)[None, :]
        e = tl.load(entry + row)
        x = tl.load(a + row * STRIDE + col[None, :], mask=here, other=0.0).to(tl.float32)
        y = tl.load(scaled + row * D + col[None, :], mask=here, other=0.0).to(tl.float32)
        v = e.to(scaled.dtype.element_ty).to(tl.float32)
        # Masked places may hold infinite numbers, so the products are set to 0 there.
        exact += tl.sum(tl.where(here, (s * tl.load(factor + row) * e) * x, 0.0), 0)
        rounded += tl.sum(tl.where(here, v * y, 0.0), 0)
    return exact, rounded


@kernel(optional=("scale",), dynamic=("n",))
def runs_kernel(a, scale, scaled, factor, entry, column, order, exact_parts, rounded_parts, n,
                D: tl.constexpr, STRIDE: tl.constexpr, RUN: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    """Partial sums for `positives_kernel`, of a column with many rows: from each RUN-th sorted place to the next."""
    chunks = tl.cdiv(D, WIDTH)
    run = tl.program_id(0) // chunks + 1
    col = tl.program_id(0) % chunks * WIDTH + tl.arange(0, WIDTH)
    mine = tl.load(column + run * RUN)
    continues = (mine >= 0) & (mine == tl.load(column + run * RUN - 1))
    stop = tl.where(continues, tl.minimum(n, run * RUN + RUN), 0)
    exact, rounded = positives_from(
        run * RUN, stop, mine, col, a, scale, scaled, factor, entry, order, column, D, STRIDE, RUN, BLOCK, WIDTH
    )
    here = continues & (col < D)
    tl.store(exact_parts + run * D + col, exact, mask=here)
    tl.store(rounded_parts + run * D + col, rounded, mask=here)


@kernel(optional=("scale",), dynamic=("n",))
def positives_kernel(a, scale, scaled, factor, entry, column, order, exact_parts, rounded_parts, grad, n,
                     D: tl.constexpr, STRIDE: tl.constexpr, EPS: tl.constexpr, RUN: tl.constexpr, BLOCK: tl.constexpr,
                     WIDTH: tl.constexpr):  # fmt: skip
    """grad_j += sum of f_i e_i a_i - v_i s_i over the rows i whose positive is j.

    ``column`` is sorted; ``order`` has the row of each place. A program has WIDTH features of one sorted place. The first
    program of a column adds its rows up to the next RUN-th place, and then the partial sums of `runs_kernel`. The other
    programs of the column return.

    A ``grad`` of a half type (EPS: from 1 to the next number) was rounded before and is rounded again. Besides sum v_i s_i
    it holds the share of the negatives and a rounding error, whose mean square is known: ulp^2 / 12. Call the sum of both
    r. To reduce the error, r is multiplied by max(0, 1 - sum of ulp^2 / 12 / sum of r^2), its estimated share of negatives
    (Stein), where |r| is at most one ulp. A share of the negatives below the rounding vanishes, as in a rounded dense
    gradient, and the share of the positives is then rounded once.
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
    exact, rounded = positives_from(
        place, stop, mine, col, a, scale, scaled, factor, entry, order, column, D, STRIDE, RUN, BLOCK, WIDTH
    )
    continues = first & (tl.load(column + run * RUN, mask=run * RUN < n, other=-1) == mine)
    while continues:
        exact += tl.load(exact_parts + run * D + col, mask=here, other=0.0)
        rounded += tl.load(rounded_parts + run * D + col, mask=here, other=0.0)
        run += 1
        continues = tl.load(column + run * RUN, mask=run * RUN < n, other=-1) == mine
    rest = tl.where(tl.abs(before) < float("inf"), before - rounded, before)
    if EPS > 0.0:
        ulp = EPS * (before.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        seen = tl.sum(rest * rest, 0)
        rounding = tl.sum(ulp * ulp, 0) * (1.0 / 12.0)
        share = 1.0 - rounding / tl.where(seen == 0.0, 1.0, seen)
        rounding_only = (tl.abs(rest) <= ulp) & (ulp < float("inf"))
        rest = tl.where(rounding_only, rest * tl.where(share > 0.0, share, 0.0), rest)
    tl.store(where, (exact + rest).to(grad.dtype.element_ty), mask=here)
