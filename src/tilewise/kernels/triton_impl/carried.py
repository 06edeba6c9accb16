"""Exponentials that forward carries over to backward, in the memory that the gradient of the columns will take.

An exact loss that stores no scores computes them twice: four products against the three of a loss that stores all of
them. But between the passes the memory of dB (m x d) lies idle. Forward fills it with

    e_ij = exp(x_ij - t)        of as many columns j as fit,  t a shift for all of them,

and backward makes G of them without a product: G_ij = e_ij g_i exp(t - lse_i), and the positive's entry, as always, by
itself. The carried columns come first and lie at the end of the memory, so that dB is written in front of what is still
to be read:

    dB     | 0 | 1 | 2 | 3 |                                       columns of chunk k, W rows of d numbers
    e      |            | chunk 0 | chunk 1 | chunk 2 | chunk 3 |  n x W numbers each

    (k + 1) W d + (K - k) n W <= m d   for every k < K,   so K <= (m - W) d / (W max(n, d))

If the shift was no good guess for some row (`doubt`: forward had to repair a sum, or the row's log-sum-exp lies so far
below t that what matters of its exponentials underflows), the exponentials are left alone and these chunks are computed
like all others; the host does not hear of it. The peak of one loss is that of backward, as
before, only taken earlier; several losses that wait for one backward each hold their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewise.kernels.spec import Pair, PairSpec
from tilewise.kernels.triton_impl.backward import outer_factor
from tilewise.kernels.triton_impl.forward import BELOW_PEAK, guess_top
from tilewise.kernels.triton_impl.launch import Call, cdiv, pieces
from tilewise.kernels.triton_impl.parts import LOG2E

DTYPES = (torch.bfloat16,)  # float16 has not the range of exponentials that are not normalized yet
NARROWEST = (
    1024  # features; with fewer, the store leaves room for one program instead of two, which costs what it saves
)
MOST_ROWS = 16384  # one macro-tile: the product with G is then the gradient, and needs no accumulator
WORTH_IT = 2**38  # multiply-adds of one product; below, launches cost more than is saved
COLS = 8192  # of a chunk
ALIGNED = 8  # numbers of a half type in 16 bytes
FARTHEST = 100.0  # log2 of exp(t - lse): probabilities down to 2**-26 are then normal numbers, and the factor is finite
BLOCK_ROWS, BLOCK_COLS = 4, 2048


@dataclass
class Carried:
    """The exponentials of some columns, in what will be the gradient of all of them."""

    memory: Tensor  # (m, d)
    rows: int
    cols: int  # of a chunk
    chunks: int
    peaks: Tensor | None = None  # from which the shift is guessed
    doubt: Tensor | None = None

    @staticmethod
    def of(pair: Pair, spec: PairSpec) -> Carried | None:
        """Room for some, or None if this is no call for it. Only the columns' gradient and the rows' are wanted."""
        n, m, d = pair.a.shape[0], pair.b.shape[0], pair.b.shape[1]
        if pair.a.dtype not in DTYPES or n > MOST_ROWS or n * m * d < WORTH_IT:
            return None
        if spec != PairSpec(row_lse=True, positive="one", drop_rows=spec.drop_rows):
            return None
        if pair.row_skip is not None or pair.row_zero is not None or d < NARROWEST or d % ALIGNED or m <= COLS:
            return None
        chunks = (m - COLS) * d // (COLS * max(n, d))
        if chunks < 1:
            return None
        return Carried(pair.b.new_empty((m, d)), n, COLS, chunks)

    def chunk(self, j: slice) -> Tensor | None:
        """Where the exponentials of the columns j are: (n, W); None for columns that are not carried."""
        k, size = j.start // self.cols, self.rows * self.cols
        if k >= self.chunks:
            return None
        end = self.memory.numel() - (self.chunks - k - 1) * size
        return self.memory.view(-1)[end - size : end].view(self.rows, self.cols)

    def settle(self, peaks: Tensor, doubt: Tensor, row_lse: Tensor) -> None:
        """After forward: whether the shift, as `guess_top` takes it from the peaks, suits every row that meets a column."""
        below = BELOW_PEAK.value
        top = peaks.nan_to_num(nan=-torch.inf, neginf=-torch.inf, posinf=torch.inf).amax() - below
        top = torch.where(top.abs() < 1e30, top, 0.0) + below
        far = ((top - row_lse * LOG2E.value > FARTHEST) & (row_lse > -torch.inf)).any()
        self.peaks, self.doubt = peaks, (far | (doubt != 0)).to(torch.float32).mul_(1e9)

    def to_gradient(self, call: Call, g: Tensor, factor: Tensor) -> None:
        """G in place of the exponentials, a positive left out; nothing if there is doubt."""
        assert self.peaks is not None
        values: dict[str, Any] = {
            "g": g,
            "row_lse": call.by_row["row_lse"],
            "grad_row": call.by_row["grad_row"],
            "factor": factor,
        }
        values |= {"peaks": self.peaks, "peak_count": self.peaks.numel(), "doubt": self.doubt}
        shape = {"n": g.shape[0], "m": g.shape[1], "R": BLOCK_ROWS, "C": BLOCK_COLS}
        programs = cdiv(g.shape[0], BLOCK_ROWS) * cdiv(g.shape[1], BLOCK_COLS)
        call.prepare(carried_kernel, 4, 1, (g.dtype,)).put(values).put(shape).launch(programs)


def column_pieces(cols: int, step: int, carried: Carried | None) -> list[slice]:
    """The columns of each macro-tile, those first that are carried."""
    if carried is None:
        return pieces(cols, step)
    first = [slice(k * carried.cols, (k + 1) * carried.cols) for k in range(carried.chunks)]
    start = first[-1].stop
    return first + [slice(start + j.start, start + j.stop) for j in pieces(cols - start, step)]


@triton.jit(do_not_specialize=["peak_count", "n", "m"])
def carried_kernel(g, row_lse, grad_row, factor, peaks, peak_count, doubt, n, m, R: tl.constexpr, C: tl.constexpr):
    """G_ij = e_ij g_i exp(t - lse_i), in place."""
    if tl.load(doubt) < 1.0:
        col_blocks = tl.cdiv(m, C)
        rows = (tl.program_id(0) // col_blocks) * R + tl.arange(0, R)
        cols = (tl.program_id(0) % col_blocks) * C + tl.arange(0, C)
        ok = rows < n
        level = tl.load(row_lse + rows, mask=ok, other=float("inf"))
        level = tl.where(level == float("-inf"), float("inf"), level) * LOG2E
        share = tl.load(grad_row + rows, mask=ok, other=0.0) * outer_factor(factor)
        share = share * tl.exp2((guess_top(peaks, peak_count) + BELOW_PEAK) - level)
        at = g + rows.to(tl.int64)[:, None] * m + cols[None, :]
        inside = ok[:, None] & (cols < m)[None, :]
        e = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        tl.store(at, (e * share[:, None]).to(g.dtype.element_ty), mask=inside)
