"""Exponentials that forward saves for backward, in memory that backward needs anyway.

The memory of dB (m x d) is unused between the passes. Forward fills it with

    e_ij = exp(x_ij - t)        of as many columns j as fit,  t a shift for all of them,

so backward needs no product for G_ij = f_i E_ij, with f_i = g_i exp(t - lse_i) and E = e except for the entry of the
positive, which is always written separately. It does not multiply E either: f_i is applied to the rows of A and of dA.

    dA_i = f_i sum_j E_ij b_j + the terms of other columns        dB_j = sum_i E_ij (f_i a_i)     j saved

The saved columns come first and lie at the end of the memory, so that dB is written in front of what is still to be read:

    dB     | 0 | 1 | 2 | 3 |                                       columns of chunk k, W_k <= W rows of d numbers
    e      |            | chunk 0 | chunk 1 | chunk 2 | chunk 3 |  n x W_k numbers each

    (W_0 + .. + W_k) d + (W_k + .. + W_K) n <= m d   for every k <= K,   so sum W_k <= (m - W) d / max(n, d)

The next columns are saved in the memory in which backward keeps G of one macro-tile at a time: they are its first G.

``needs_repair`` is set if the shift suits some row badly: forward had to repair a sum, or the log-sum-exp of the row is so
far below t that its exponentials underflow. Then G is computed again and overwrites the exponentials, and every f_i is 1;
the host does not need to know. Decision 0019 has the costs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from tilewise.kernels.host_scalar import HostScalar
from tilewise.kernels.spec import Pair, PairSpec
from tilewise.kernels.triton_impl.launch.call import Call, cdiv, pieces
from tilewise.kernels.triton_impl.launch.prepared import kernel
from tilewise.kernels.triton_impl.primitives import LOG2E, own_column, row_stride
from tilewise.kernels.triton_impl.two_pass.backward_kernels import outer_factor, side
from tilewise.kernels.triton_impl.two_pass.forward_kernels import BELOW_PEAK, estimated_top

DTYPES = (torch.bfloat16,)  # float16 lacks the range of exponentials that are not normalized yet
NARROWEST = 1024  # features; with fewer, the store leaves shared memory for one program instead of two: no gain
MOST_ROWS = 16384  # one macro-tile: the product with G is then the gradient, and needs no accumulator
WORTH_IT = 2**38  # multiply-adds of one product; below, launches cost more than they save
COLS = 8192  # of a chunk, at least
SCORES = 2**26  # of a chunk: with few rows chunks are wide, since a small product does not fill the card
FULL_TILES = 256  # divides the number of columns of a last, narrower chunk
ALIGNED = 8  # numbers of a half type in 16 bytes
# Largest log2 of exp(t - lse): probabilities down to 2**-36 are then normal numbers, and f_i a_i is finite
FARTHEST = tl.constexpr(90.0)
# Smallest |g| relative to |g_pos|: a smaller g is replaced by it, so that E can represent the entry of g_pos
SMALLEST_SHARE = tl.constexpr(2.0**-20)
ROUNDING = tl.constexpr(2.0**-7)  # more than the rounding of any type
FACTOR_ROWS, WIDTH = 32, 256
CHECKED_ROWS = 1024  # at a time


@dataclass
class SavedColumns:
    """The exponentials of some columns, in the future memory of the gradient of all columns and of G."""

    memory: Tensor  # (m, d)
    rows: int
    cols: int  # of a chunk, at most
    inside: int  # columns whose exponentials lie in the memory
    buffer: Tensor | None = None  # the future memory of G, flat
    behind: int = 0  # columns whose exponentials lie there, following the others
    peaks: Tensor | None = None  # from which the shift is estimated
    needs_repair: Tensor | None = None  # (1,) float32: 0, or a number above every span
    probed_exact: HostScalar | None = None  # of a filtered call: 1 if its probe found the exact case faster

    @staticmethod
    def of(pair: Pair, spec: PairSpec) -> SavedColumns | None:
        """Memory for some columns; None for calls that cannot use it or are too small to gain."""
        n, m, d = pair.a.shape[0], pair.b.shape[0], pair.b.shape[1]
        if pair.a.dtype not in DTYPES or n > MOST_ROWS or n * m * d < WORTH_IT:
            return None
        if spec != PairSpec(row_lse=True, positive="one", drop_rows=spec.drop_rows):
            return None
        if pair.row_skip is not None or pair.row_shift is not None or d < NARROWEST or d % ALIGNED or m <= COLS:
            return None
        room = m * d // max(n, d)  # columns, with narrow chunks; wide chunks leave less
        cols = max(COLS, min(SCORES // n, room // 4) // FULL_TILES * FULL_TILES)
        inside = (m - cols) * d // max(n, d) // FULL_TILES * FULL_TILES
        if inside < cols:
            return None
        return SavedColumns(pair.b.new_empty((m, d)), n, cols, inside)

    @property
    def end(self) -> int:
        """The first column that is not saved."""
        return self.inside + self.behind

    def allocate_g(self, cols: int, empty: Callable[..., Tensor]) -> None:
        """Allocate G of ``cols`` columns for backward, and save as many more columns in it."""
        self.behind = min(cols, self.memory.shape[0] - self.inside)
        if self.behind > 0:
            self.buffer = empty(self.rows * aligned(self.behind), dtype=self.memory.dtype)

    def columns(self) -> list[slice]:
        """The columns of each chunk."""
        first, last = pieces(self.inside, self.cols), pieces(self.behind, self.cols)
        return first + [slice(self.inside + j.start, self.inside + j.stop) for j in last]

    def chunk(self, j: slice) -> Tensor | None:
        """The memory of the exponentials of the columns j, one of `columns`: (n, W); None for columns not saved."""
        n, width = self.rows, j.stop - j.start
        if j.start >= self.end:
            return None
        if j.start < self.inside:
            end = self.memory.numel() - n * (self.inside - j.stop)
            return self.memory.view(-1)[end - n * width : end].view(n, width)
        assert self.buffer is not None
        start, stride = n * (j.start - self.inside), aligned(width)
        return self.buffer[start : start + n * stride].view(n, stride)[:, :width]

    def g(self, rows: int, cols: int) -> Tensor | None:
        """The memory of G, once its exponentials are used: (rows, cols); None if it is too small."""
        if self.buffer is None or self.buffer.numel() < rows * cols:
            return None
        return self.buffer[: rows * cols].view(rows, cols)

    def check(
        self, call: Call, peaks: Tensor | None, repaired: Tensor, row_lse: Tensor | None, only_if: Tensor | None
    ) -> None:
        """At the end of forward: set ``needs_repair`` if the shift, estimated from ``peaks``, suits some row badly.

        It is also set if ``only_if`` is 0 on the device: nothing was saved then.
        """
        assert peaks is not None
        assert row_lse is not None
        self.peaks, self.needs_repair = peaks, call.empty(1)
        values: dict[str, Any] = {"peaks": peaks, "peak_count": peaks.numel(), "row_lse": row_lse, "n": self.rows}
        values |= {"repaired": repaired, "only_if": only_if, "needs_repair": self.needs_repair, "BLOCK": CHECKED_ROWS}
        call.prepare(check_kernel, warps=8).put(values).launch(1)

    def factors(self, call: Call, factor: Tensor, place: Tensor | None) -> tuple[Tensor, Tensor]:
        """f_i: (n,), and f_i a_i: (n, d), which may be written to ``place``. ``factor`` is that of all gradients."""
        assert self.peaks is not None
        n, d = call.a.shape
        each, scaled = call.empty(n), call.empty(n, d, dtype=call.a.dtype) if place is None else place
        start = call.pair.col_start
        values: dict[str, Any] = {"a": call.a, "factor": factor, "needs_repair": self.needs_repair}
        values |= {"peaks": self.peaks, "peak_count": self.peaks.numel(), "first": start, "n": n, "m": self.end}
        values |= {"each": each, "scaled": scaled, "ahead": call.pair.row_start - start, "BLOCK": FACTOR_ROWS}
        prepared = call.prepare(factor_kernel).offer(call.fixed).offer(call.by_row).put(values)
        prepared.put({"WIDTH": WIDTH}).launch(cdiv(n, FACTOR_ROWS))
        return each, scaled


def aligned(cols: int) -> int:
    """``cols`` rounded up, so that every row of a matrix starts at a 16-byte address."""
    return cdiv(cols, ALIGNED) * ALIGNED


def column_pieces(cols: int, step: int, saved: SavedColumns | None) -> list[slice]:
    """The columns of each macro-tile; saved columns come first."""
    if saved is None:
        return pieces(cols, step)
    start = saved.end
    return saved.columns() + [slice(start + j.start, start + j.stop) for j in pieces(cols - start, step)]


@kernel(optional=("only_if",), dynamic=("peak_count", "n"))
def check_kernel(peaks, row_lse, repaired, only_if, needs_repair, peak_count, n, BLOCK: tl.constexpr):
    """Write 0, or a number above every span if a sum was repaired, nothing was saved, or t is too far above a row."""
    top = estimated_top(peaks, peak_count) + BELOW_PEAK
    far = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, n, BLOCK):
        rows = first + tl.arange(0, BLOCK)
        level = tl.load(row_lse + rows, mask=rows < n, other=float("-inf")) * LOG2E
        far |= ((top - level > FARTHEST) & (level > float("-inf"))).to(tl.int32)
    wrong = tl.max(far, 0) | (tl.load(repaired) != 0).to(tl.int32)
    if only_if is not None:
        wrong |= (tl.load(only_if) == 0).to(tl.int32)
    tl.store(needs_repair, tl.where(wrong != 0, 1e9, 0.0))


@kernel(optional=("own", "row_key", "grad_pos"), dynamic=("peak_count", "n", "m", "first", "ahead", "a_stride"))
def factor_kernel(a, row_key, own, row_lse, peaks, grad_row, grad_pos, factor, needs_repair,  # in
                  each, scaled,  # outputs
                  peak_count, a_stride, n, m, first, ahead,
                  D: tl.constexpr, POSITIVE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """f_i = g_i exp(t - lse_i) and f_i a_i; 1 and a_i if ``needs_repair`` is set. A row without columns has 0.

    The entry of the positive is the largest of its row in E, and often most of its gradient. If it is among the m saved
    columns, the last digits of f_i are changed, so that the entry is G / f_i before and after rounding.
    """
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = rows < n
    outer = outer_factor(factor)
    level, _, coming = side(row_lse, None, grad_row, rows, ok, outer)
    lift = tl.exp2((estimated_top(peaks, peak_count) + BELOW_PEAK) - level)
    f = coming * lift
    if grad_pos is not None:
        worth = tl.load(grad_pos + rows, mask=ok, other=0.0) * outer
        least = tl.abs(worth) * SMALLEST_SHARE
        f = tl.where(tl.abs(coming) < least, least, coming) * lift
        value = coming * tl.exp2(tl.load(own + rows, mask=ok, other=0.0) * LOG2E - level) + worth
        entry = (value / f).to(a.dtype.element_ty).to(tl.float32)
        there = own_column(rows, n, m, row_key, first, ahead, 0, POSITIVE) >= 0
        fits = value / tl.where(entry == 0.0, 1.0, entry)
        f = tl.where(there & (tl.abs(fits - f) < tl.abs(f) * ROUNDING), fits, f)
    f = tl.where(tl.load(needs_repair) < 1.0, f, 1.0)
    tl.store(each + rows, f, mask=ok)
    for k in range(0, D, WIDTH):
        at = k + tl.arange(0, WIDTH)
        inside = ok[:, None] & (at < D)[None, :]
        row_at = a + rows.to(tl.int64)[:, None] * row_stride(a, a_stride)
        row = tl.load(row_at + at[None, :], mask=inside, other=0.0).to(tl.float32)
        place = scaled + rows.to(tl.int64)[:, None] * D + at[None, :]
        tl.store(place, (row * f[:, None]).to(scaled.dtype.element_ty), mask=inside)
