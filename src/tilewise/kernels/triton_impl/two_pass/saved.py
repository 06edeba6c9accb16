"""Exponentials, or scores, that forward saves for backward: first in the memory of dB, then in a buffer of unused workspace.

A is (n, d), B is (m, d), x are their scores, lse_i is the log-sum-exp of row i. The memory of dB (m x d) is unused between
the passes. Forward fills it with the exponentials of as many columns as fit:

    e_ij = exp(x_ij - t)        t: the largest score of a sample, for all rows and columns (`estimated_top`)

Backward then does not compute the scores of these columns again. With G = dL/dx and g_i = dL / d lse_i,

    G_ij = f_i E_ij,   f_i = g_i exp(t - lse_i),   E_ij = e_ij except in the positive's entry, which backward writes

G of these columns is not formed: f_i multiplies the rows of A and of dA instead:

    dA_i = f_i sum_j E_ij b_j + the terms of columns that are not saved        dB_j = sum_i E_ij (f_i a_i)    j saved

E and f_i a_i are rounded to the type of the features. For the positives, whose term may be all of dB_j, both roundings
are corrected afterwards (`rounded_positives`).

The first columns are saved, in chunks k = 0 .. K of c_k <= c columns. The chunks lie at the end of the memory. So dB can
be written from the start of the memory, chunk by chunk, and never overwrites exponentials that are still to be read:

    dB     | 0 | 1 | 2 | 3 |                                       chunk k: c_k rows of d numbers
    e      |            | chunk 0 | chunk 1 | chunk 2 | chunk 3 |  chunk k: n x c_k numbers

    (c_0 + .. + c_k) d + (c_k + .. + c_K) n <= m d   for every k <= K;   sum c_k <= (m - c) d / max(n, d) is enough

The columns that follow are saved in another buffer, which takes what the workspace has left. Backward later keeps G of
one macro-tile at a time in it. So a larger workspace saves more columns, up to all of them.

With the statistics of tokens (entropy, sum of squares, largest score) each row of a tile has a reference of its own, its
largest score there. The references are saved beside the exponentials (`reference`), every t suits its row, and
`saved_gradient_kernel` replaces the exponentials by G, since G is then not a multiple of e:

    x_ij = t_i + log e_ij        G_ij = p_ij (v_i + h_i (lse_i - x_ij) + s_i p_ij), see `statistics`

Without them there is one t for all rows, and it may be too far from the scores of a row: a sum overflowed or underflowed
and forward computed it again (`repair_kernel`), or lse_i is so far below t that probabilities would underflow or f_i a_i
overflow. Then ``needs_repair`` is set. Backward computes the scores of the saved columns again, writes G in place of the
exponentials, and every f_i is 1. The flag stays on the device, and the host does not wait for it. Decision 0019 has the
costs.

A Kullback-Leibler divergence from a guide saves both scores of an entry in float32, four times the memory: p - q of two
rounded numbers would lose its digits where student and teacher agree. G gets memory of its own, beside the buffer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from tilewise.kernels.host_scalar import HostScalar
from tilewise.kernels.spec import GradStats, Pair, PairSpec
from tilewise.kernels.triton_impl.buffers import Buffer
from tilewise.kernels.triton_impl.launch import kernel
from tilewise.kernels.triton_impl.primitives import LOG2E, own_column, row_stride
from tilewise.kernels.triton_impl.scores import Scores, cdiv, pieces
from tilewise.kernels.triton_impl.sizes import forward_sizes, whole_rounds
from tilewise.kernels.triton_impl.statistics import GradRows, softmax_term
from tilewise.kernels.triton_impl.two_pass.backward_kernels import nonzero_factor, side
from tilewise.kernels.triton_impl.two_pass.forward_kernels import BELOW_PEAK, estimated_top
from tilewise.kernels.triton_impl.two_pass.rounded_positives import correct_positives

GUIDES = ("kl", "reverse_kl")  # a Jensen-Shannon divergence needs the memory of dB in forward
DTYPES = (torch.bfloat16,)  # float16 lacks the range of exponentials that are not normalized yet
# Features. With fewer, storing e takes so much shared memory that a multiprocessor runs one program instead of two.
NARROWEST = 1024
MOST_ROWS = 16384  # all rows are then one macro-tile, so one product gives dB of a chunk, without an accumulator
WORTH_IT = 2**38  # multiply-adds of one product; below, the additional launches cost more time than saving gains
COLS = 8192  # a full chunk has at least so many columns, unless the workspace is too small for their G
# Rows x columns of a chunk: with few rows chunks are wide, since a small product does not fill the card.
CHUNK_ENTRIES = 2**26
FULL_TILES = 256  # divides the number of columns of every chunk in the memory of dB
ALIGNED = 8  # numbers of a half type in 16 bytes
# Largest log2 of exp(t - lse_i). Probabilities down to 2**-36 are then normal numbers in E, and f_i a_i is finite.
FARTHEST = tl.constexpr(90.0)
# Smallest |g_i| in f_i, relative to |g_pos_i|, the gradient of the positive's score, and to those of picked columns; a
# smaller g_i is replaced. Otherwise the positive's entry of E, about g_pos_i / f_i, could overflow.
SMALLEST_SHARE = tl.constexpr(2.0**-20)
ROUNDING = tl.constexpr(2.0**-7)  # larger than the relative rounding error of bfloat16
FACTOR_ROWS, WIDTH = 32, 256  # rows of one program of `factor_kernel`, and its features at a time
GRADIENT_ROWS = 32  # rows of one program of `saved_gradient_kernel`
CHECKED_ROWS = 1024  # rows that `check_kernel` reads at a time


class RowFactors(NamedTuple):
    """f_i of all rows, by which exponentials are multiplied."""

    each: Buffer  # (n,) f_i
    scaled: Buffer  # (n, d) f_i a_i, rounded
    entry: Buffer | None  # (n,) the positive's entry of E, unrounded; None if positives are not corrected


@dataclass
class SavedColumns:
    """The exponentials of some columns, in the memory that becomes dB and in a buffer.

    Between the passes it holds tensors; while a program is written, `in_program` makes one that holds buffers.
    """

    memory: Any  # (m, d), later dB
    rows: int  # n
    cols: int  # most columns of a chunk
    inside: int  # number of columns whose exponentials lie in `memory`; the first columns
    buffer: Any = None  # flat, later G of a macro-tile
    behind: int = 0  # number of columns whose exponentials lie in `buffer`; they follow those in `memory`
    peaks: Any = None  # the largest scores of a sample, from which t is estimated
    reference: Any = None  # (tiles, n) float32: t of each row in each tile of saved columns
    tile: int = 0  # columns of such a tile; 0 if all rows have the same reference
    scores: bool = False  # whether both scores of an entry are saved, in float32, instead of an exponential
    # (1,) float32: 0, or 1e9 if the exponentials cannot be used, and backward must compute G of the saved columns. The
    # flag of `forward_kernels` with this name is one of the reasons.
    needs_repair: Any = None
    positives: Any = None  # see `sort_positives`
    # In a filtered call: not 0 if forward chose the exact case (because of its probe, or of the rounding of the scores),
    # or if its results are not used.
    probed_exact: HostScalar | None = None

    @staticmethod
    def of(pair: Pair, spec: PairSpec) -> SavedColumns | None:
        """Memory for some columns; None for calls that cannot use it or are too small to gain."""
        n, m, d = pair.a.shape[0], pair.b.shape[0], pair.b.shape[1]
        if pair.a.dtype not in DTYPES or n > MOST_ROWS or n * m * d < WORTH_IT:
            return None
        scores = spec.guide in GUIDES
        if not (scores or _suits(pair, spec)) or d < NARROWEST or d % ALIGNED or m <= COLS:
            return None
        numbers = n * (8 // pair.b.element_size() if scores else 1)  # of the type of dB, for one column
        room = m * d // max(numbers, d)  # upper bound on the saved columns, reached if chunks are very narrow
        cols = max(COLS, min(CHUNK_ENTRIES // n, room // 4) // FULL_TILES * FULL_TILES)
        tiles = forward_sizes(pair.a.device, pair.a.dtype, d, columns=False)
        if not scores:
            cols = whole_rounds(cols, FULL_TILES, n, pair.a.device, tiles)
        inside = (m - cols) * d // max(numbers, d) // FULL_TILES * FULL_TILES
        if inside < cols and not scores:  # less than one chunk fits: no gain. Saved scores may still use the buffer
            return None
        tile = tiles.cols if spec.token_stats and not scores else 0
        return SavedColumns(pair.b.new_empty((m, d)), n, cols, inside, tile=tile, scores=scores)

    @property
    def relative(self) -> bool:
        """Whether each row of a tile has a reference of its own."""
        return self.tile > 0

    @property
    def column_numbers(self) -> int:
        """Numbers of the type of dB that one saved column takes."""
        return self.rows * (8 // self.memory.element_size() if self.scores else 1)

    @property
    def end(self) -> int:
        """The first column that is not saved."""
        return self.inside + self.behind

    @property
    def tensors(self) -> dict[str, Tensor | None]:
        """What a program is given, by name."""
        column, order = self.positives or (None, None)
        found = {name: getattr(self, name) for name in ("memory", "buffer", "peaks", "needs_repair", "reference")}
        return {f"saved_{name}": value for name, value in found.items()} | {"pos_column": column, "pos_order": order}

    def in_program(self, given: dict[str, Buffer]) -> SavedColumns:
        """The same with the buffers for `tensors`."""
        names = ("memory", "buffer", "peaks", "needs_repair", "reference")
        found: dict[str, Any] = {name: given.get(f"saved_{name}") for name in names}
        positives = (given["pos_column"], given["pos_order"]) if "pos_column" in given else None
        return dataclasses.replace(self, **found, positives=positives)

    def allocate(self, cols: int, empty: Callable[..., Buffer]) -> None:
        """Allocate `buffer`: forward saves ``cols`` columns there, and backward then keeps G of other columns in it.

        Also `reference`, if it is needed.
        """
        self.behind = min(cols, self.memory.shape[0] - self.inside)
        if self.behind > 0:
            self.buffer = empty("saved", self.column_numbers * aligned(self.behind), dtype=self.memory.dtype)
        if self.relative:
            self.reference = empty("reference", cdiv(self.inside, self.tile) + cdiv(self.behind, self.tile), self.rows)

    def forget(self) -> None:
        """Mark all columns as not saved. `memory` is still used for dB."""
        self.inside = self.behind = 0

    def references(self, j: slice) -> Buffer | None:
        """t of the rows in the tiles of a chunk.

        Each chunk starts with a whole tile. Tiles are counted from 0 in `memory`, and again from 0 in `buffer`.
        """
        if self.reference is None:
            return None
        first, tiles = (0, 0) if j.start < self.inside else (self.inside, cdiv(self.inside, self.tile))
        start = tiles + (j.start - first) // self.tile
        return self.reference[start : start + cdiv(j.stop - j.start, self.tile)]

    def write_gradient(self, scores: Scores, j: slice, factor: Buffer) -> None:
        """Replace the exponentials of a chunk by G, multiplied by ``factor``."""
        e = self.chunk(j)
        assert e is not None
        values: dict[str, Any] = {"e": e, "e_stride": e.stride(0), "reference": self.references(j)}
        values |= {"n": self.rows, "m": aligned(e.shape[1]), "R": GRADIENT_ROWS, "C": self.tile}
        programs = cdiv(self.rows, GRADIENT_ROWS) * cdiv(e.shape[1], self.tile)
        scores.launch(saved_gradient_kernel, programs, scores.fixed, scores.by_row, **values, factor=factor)

    def columns(self) -> list[slice]:
        """The columns of each chunk, first those in `memory`, then those in `buffer`."""
        first, last = pieces(self.inside, self.cols), pieces(self.behind, self.cols)
        return first + [slice(self.inside + j.start, self.inside + j.stop) for j in last]

    def chunk(self, j: slice) -> Buffer | None:
        """The place of the exponentials of the columns j, a chunk of `columns`: (n, len(j)); None if j is not saved."""
        if j.start >= self.end or self.scores:
            return None
        return self._place(j).view(self.rows, -1)[:, : j.stop - j.start]

    def saved_scores(self, j: slice) -> tuple[Buffer, Buffer] | None:
        """The places of both scores of the columns j, a chunk of `columns`: (n, len(j)) each, or None as in `chunk`."""
        if j.start >= self.end or not self.scores:
            return None
        both = self._place(j).as_type(torch.float32).view(2 * self.rows, -1)[:, : j.stop - j.start]
        return both[: self.rows], both[self.rows :]

    def _place(self, j: slice) -> Buffer:
        """The memory of the columns j, a chunk of `columns`; in `buffer` their number is rounded up (`aligned`)."""
        numbers, width = self.column_numbers, j.stop - j.start
        if j.start < self.inside:
            end = self.memory.numel() - numbers * (self.inside - j.stop)
            return self.memory.view(-1)[end - numbers * width : end]
        assert self.buffer is not None
        start = numbers * (j.start - self.inside)
        return self.buffer[start : start + numbers * aligned(width)]

    def g(self, rows: int, cols: int) -> Any:
        """`buffer` as (rows, cols), for use after the exponentials in it were read; None if it cannot be used so."""
        if self.buffer is None or self.scores or self.buffer.numel() < rows * cols:
            return None
        return self.buffer[: rows * cols].view(rows, cols)

    def check(self, scores: Scores, peaks: Buffer | None, repaired: Buffer, row_lse: Buffer) -> None:
        """At the end of forward: set ``needs_repair`` if t, estimated from ``peaks``, does not suit some row.

        It is also set if ``repaired`` is set, or if ``pair.only_if`` is not 1, because then nothing was saved.
        """
        assert peaks is not None
        self.peaks, self.needs_repair = peaks, scores.empty("exponentials need repair", 1)
        values: dict[str, Any] = {"peaks": peaks, "peak_count": peaks.numel(), "row_lse": row_lse, "n": self.rows}
        values |= {"repaired": repaired, "needs_repair": self.needs_repair, "BLOCK": CHECKED_ROWS}
        scores.launch(check_kernel, 1, scores.fixed, warps=8, **values)

    def sort_positives(self, pair: Pair, grad: GradStats) -> None:
        """Set `positives`, for `correct_positives`: the saved columns that are a row's positive, and their rows.

        They stay None if exponentials of these columns are not multiplied by f_i, or the positives have no gradient.
        """
        if grad.row_pos is None or self.relative or self.scores or not self.end:
            return
        key = pair.row_key
        if key is None:
            key = torch.arange(pair.row_start, pair.row_start + self.rows, device=self.memory.device)
        here = (key - pair.col_start).int()
        self.positives = torch.sort(torch.where((here >= 0) & (here < self.end), here, -1), stable=True)

    def factors(self, scores: Scores, factor: Buffer, place: Buffer | None) -> RowFactors:
        """The factors of all rows, f_i a_i written to ``place`` if given. ``factor`` multiplies all gradients."""
        assert self.peaks is not None
        n, d = scores.n, scores.d
        each = scores.empty("f", n)
        scaled = scores.empty("f a", n, d, dtype=scores.dtype) if place is None else place
        entry = None if self.positives is None else scores.empty("entry", n)
        values: dict[str, Any] = {"a": scores.a, "factor": factor, "needs_repair": self.needs_repair}
        values |= {"peaks": self.peaks, "peak_count": self.peaks.numel(), "n": n, "m": self.end}
        values |= {"first": scores.given["first"], "ahead": scores.given["ahead"], "WIDTH": WIDTH}
        values |= {"each": each, "scaled": scaled, "entry": entry, "BLOCK": FACTOR_ROWS}
        scores.launch(factor_kernel, cdiv(n, FACTOR_ROWS), scores.fixed, scores.by_row, **values)
        return RowFactors(each, scaled, entry)

    def correct_positives(self, scores: Scores, grad: Buffer, factors: RowFactors) -> None:
        """Correct ``grad``, the gradient of the saved columns, for the rounding of f_i a_i in the terms of positives."""
        if self.positives is not None:
            assert factors.entry is not None
            given = {"a": scores.a, "scaled": factors.scaled, "factor": factors.each, "entry": factors.entry}
            correct_positives(scores, grad, self.positives, **given)


def _suits(pair: Pair, spec: PairSpec) -> bool:
    """Whether backward can compute G from exponentials.

    It can if the call has a log-sum-exp of the rows, one positive for each, at most the statistics in ``names``, and no
    scales, shifts or skip keys of the rows.
    """
    names = ["row_picked", "skip_picked", "row_entropy", "row_sum_sq", "row_top", "drop_rows", "ignored", "in_range"]
    names.append("same_rows")  # a shard of the columns: the positive of a row may be on another rank
    if spec != PairSpec(row_lse=True, positive="one", **{name: getattr(spec, name) for name in names}):
        return False
    return pair.row_scale is None and pair.row_skip is None and pair.row_shift is None


def breaks(saved: SavedColumns | None) -> tuple[int, ...]:
    """For `Program.over`: where columns that are saved in one way end."""
    return () if saved is None else (saved.inside, saved.end)


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
    """Write 0, or 1e9 if a sum was repaired, nothing was saved, or t is too far above the log-sum-exp of a row.

    Backward passes this number to `gradient_kernel` as ``span``. The kernel computes G if it is at least WIDEST_SPAN, and
    returns at once for 0.
    """
    top = estimated_top(peaks, peak_count) + BELOW_PEAK
    far = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, n, BLOCK):
        rows = first + tl.arange(0, BLOCK)
        level = tl.load(row_lse + rows, mask=rows < n, other=float("-inf")) * LOG2E
        far |= ((top - level > FARTHEST) & (level > float("-inf"))).to(tl.int32)
    wrong = tl.max(far, 0) | (tl.load(repaired) != 0).to(tl.int32)
    if only_if is not None:
        wrong |= (tl.load(only_if) != 1).to(tl.int32)
    tl.store(needs_repair, tl.where(wrong != 0, 1e9, 0.0))


@kernel(optional=("grad_entropy", "grad_square"), dynamic=("n", "m", "e_stride"))
def saved_gradient_kernel(e, reference, row_lse, grad_row, grad_entropy, grad_square, factor, n, m, e_stride,
                          R: tl.constexpr, C: tl.constexpr, ROW_TERMS: tl.constexpr, CODE: tl.constexpr):  # fmt: skip
    """Replace the exponentials of a chunk by G, as `gradient_kernel` computes it from scores.

    A program has the rows of one tile, whose references are one row of ``reference``. m is rounded up (`aligned`), so that
    a thread reads and writes several numbers at once; what lies past the last column is never used.
    """
    col_tiles = tl.cdiv(m, C)
    tile_row, tile_col = tl.program_id(0) // col_tiles, tl.program_id(0) % col_tiles
    rows, cols = tile_row * R + tl.arange(0, R), tile_col * C + tl.arange(0, C)
    ok = rows < n
    level, _, coming = side(row_lse, None, grad_row, rows, ok, nonzero_factor(factor))
    top = tl.load(reference + tile_col.to(tl.int64) * n + rows, mask=ok, other=0.0)
    place = e + rows.to(tl.int64)[:, None] * row_stride(e, e_stride) + cols[None, :]
    inside = ok[:, None] & (cols < row_stride(e, m))[None, :]
    value = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    apart = (top - level)[:, None]
    mine = GradRows(rows[:, None], ok[:, None], nonzero_factor(factor), grad_entropy, grad_square)
    g = softmax_term(coming[:, None], value * tl.exp2(apart), tl.log2(value) + apart, mine, ROW_TERMS)
    tl.store(place, g.to(e.dtype.element_ty), mask=inside)


@kernel(
    optional=("own", "row_key", "grad_pos", "grad_picked", "entry"),
    dynamic=("peak_count", "n", "m", "first", "ahead", "picks", "a_stride"),
)
def factor_kernel(a, row_key, own, row_lse, peaks, grad_row, grad_pos, grad_picked, factor, needs_repair,  # in
                  each, scaled, entry,  # outputs
                  peak_count, a_stride, n, m, first, ahead, picks,
                  D: tl.constexpr, POSITIVE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """each_i = f_i = g_i exp(t - lse_i) and scaled_i = f_i a_i; 1 and a_i if ``needs_repair`` is set.

    A row without scores (lse_i = -inf) has f_i = 1: all its exponentials are 0.

    The positive's entry is often the largest of its row in E, and most of the row's gradient. In E it is rounded to the
    type of the features. If the positive is among the m saved columns, f_i is changed by at most that rounding, so that
    f_i times the rounded entry is G. ``entry`` is the unrounded one, G / f_i.
    """
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = rows < n
    outer = nonzero_factor(factor)
    level, _, grad_lse = side(row_lse, None, grad_row, rows, ok, outer)
    top_over_sum = tl.exp2((estimated_top(peaks, peak_count) + BELOW_PEAK) - level)
    grad_positive = tl.zeros((BLOCK,), tl.float32)
    if grad_pos is not None:
        grad_positive = tl.load(grad_pos + rows, mask=ok, other=0.0) * outer
    most = tl.abs(grad_positive)
    if grad_picked is not None:  # `folded_picks` has moved the gradient of a picked positive into grad_pos
        for k in range(0, picks):
            value = tl.load(grad_picked + rows.to(tl.int64) * picks + k, mask=ok, other=0.0)
            most = tl.maximum(most, tl.abs(value * outer))
    least = most * SMALLEST_SHARE
    f = tl.where(tl.abs(grad_lse) < least, least, grad_lse) * top_over_sum
    if grad_pos is not None:
        value = grad_lse * tl.exp2(tl.load(own + rows, mask=ok, other=0.0) * LOG2E - level) + grad_positive
        rounded = (value / f).to(a.dtype.element_ty).to(tl.float32)
        there = own_column(rows, n, m, row_key, first, ahead, 0, POSITIVE) >= 0
        fitted = value / tl.where(rounded == 0.0, 1.0, rounded)
        f = tl.where(there & (tl.abs(fitted - f) < tl.abs(f) * ROUNDING), fitted, f)
    f = tl.where((tl.load(needs_repair) < 1.0) & (level < float("inf")), f, 1.0)
    tl.store(each + rows, f, mask=ok)
    if entry is not None:
        tl.store(entry + rows, tl.where(f == 0.0, 0.0, value / f), mask=ok)
    for k in range(0, D, WIDTH):
        at = k + tl.arange(0, WIDTH)
        inside = ok[:, None] & (at < D)[None, :]
        row_at = a + rows.to(tl.int64)[:, None] * row_stride(a, a_stride)
        row = tl.load(row_at + at[None, :], mask=inside, other=0.0).to(tl.float32)
        place = scaled + rows.to(tl.int64)[:, None] * D + at[None, :]
        tl.store(place, (row * f[:, None]).to(scaled.dtype.element_ty), mask=inside)
