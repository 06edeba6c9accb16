"""Ranks on a GPU: scores are compared where they are computed, and no tile of them is stored.

    before_ij = x_ij > s_i  or  x_ij == s_i and j < p_i          s_i, p_i: score and index of the right answer
    row count_i = sum_j before_ij          column count_j: the same with rows and columns exchanged

Counts are whole numbers, so atomic additions give the same sum in any order. The right answers' scores come from the
same product of a tile (`tile_dot`, equal sizes), of which the diagonal is kept; with ids, from the best of a tile. So a
score depends on its two feature vectors alone, and equal gallery rows tie exactly.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewise.kernels.ranks import NO_INDEX, Answers, Best, Block
from tilewise.kernels.triton_impl.launch import kernel, launch
from tilewise.kernels.triton_impl.primitives import tile_dot, tile_place
from tilewise.kernels.triton_impl.scores import cdiv, exact_products, on_device, pieces, readable, vector
from tilewise.kernels.triton_impl.sizes import forward_sizes, multiprocessors
from tilewise.kernels.triton_impl.tf32 import copies, rounded, tensor_descriptor
from tilewise.options import TileOptions

PAIRS_AT_ONCE = 2**35  # scores of one launch: about 0.1 s on an H200, so that a progress bar moves
ANSWERS_AT_ONCE = 4  # of a query, for one product
GATHERED_BYTES = 2**24  # of right answers, copied in the order of their queries
NONE = -(2**63)  # no best yet
LAST = tl.constexpr(2**31 - 1)  # index ^ LAST falls while the index rises


@triton.jit
def goes_before(x, score, index, place):
    """Where a score is higher than the answer's, or equal and earlier."""
    return (x > score) | ((x == score) & (index < place))


@triton.jit
def without_hidden(x, hide, hidden, rows, cols, n):
    """The scores, -inf where a column is hidden from a row: hide is (hidden, n), columns, or -1."""
    if hide is not None:
        at = hide + rows
        for _ in range(0, hidden):
            x = tl.where(tl.load(at, mask=rows < n, other=-1)[:, None] == cols[None, :], float("-inf"), x)
            at += n
    return x


@kernel(optional=("col_score", "col_place", "col_count", "hide"), dynamic=("n", "m", "hidden"))
def count_kernel(a_desc, b_desc, row_score, row_place, row_count, col_score, col_place, col_count, hide, n, m, hidden,
                 D: tl.constexpr, R: tl.constexpr, C: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr,
                 PROGRAMS: tl.constexpr, EXACT: tl.constexpr, ANSWERS: tl.constexpr):  # fmt: skip
    """Add to row_count (ANSWERS, n) and, if given, to col_count (m,)."""
    row_tiles, col_tiles = tl.cdiv(n, R), tl.cdiv(m, C)
    steps = tl.cdiv(row_tiles * col_tiles - tl.program_id(0), PROGRAMS)
    for step in tl.range(0, steps, flatten=hide is None):
        tile_row, tile_col = tile_place(tl.program_id(0) + step * PROGRAMS, row_tiles, col_tiles, GROUP)
        x = tile_dot(a_desc, b_desc, tile_row * R, tile_col * C, D, R, C, K, EXACT)
        rows = tile_row * R + tl.arange(0, R)
        cols = tile_col * C + tl.arange(0, C)
        ok_rows, ok_cols = rows < n, cols < m
        x = tl.where(ok_rows[:, None] & ok_cols[None, :], x, float("-inf"))
        x = without_hidden(x, hide, hidden, rows, cols, n)
        for answer in tl.static_range(ANSWERS):
            at = rows + answer * n.to(tl.int64)
            score = tl.load(row_score + at, mask=ok_rows, other=float("inf"))
            place = tl.load(row_place + at, mask=ok_rows, other=0)
            before = goes_before(x, score[:, None], cols[None, :], place[:, None])
            tl.atomic_add(row_count + at, tl.sum(before.to(tl.int32), 1), mask=ok_rows, sem="relaxed")
        if col_count is not None:
            score = tl.load(col_score + cols, mask=ok_cols, other=float("inf"))
            place = tl.load(col_place + cols, mask=ok_cols, other=0)
            before = goes_before(x, score[None, :], rows[:, None], place[None, :])
            tl.atomic_add(col_count + cols, tl.sum(before.to(tl.int32), 0), mask=ok_cols, sem="relaxed")


@kernel(dynamic=("n",))
def diagonal_kernel(a_desc, b_desc, out, n, D: tl.constexpr, R: tl.constexpr, C: tl.constexpr, K: tl.constexpr,
                    EXACT: tl.constexpr):  # fmt: skip
    """x_ii of min(R, C) columns, from the whole tile that contains them. It may be wider than tall, or the reverse."""
    side: tl.constexpr = min(R, C)
    first = tl.program_id(0) * side
    top, left = first // R * R, first // C * C
    x = tile_dot(a_desc, b_desc, top, left, D, R, C, K, EXACT)
    rows, cols = top + tl.arange(0, R), left + tl.arange(0, C)
    own = tl.sum(tl.where(rows[:, None] == cols[None, :], x, 0.0), 0)
    tl.store(out + cols, own, mask=(cols >= first) & (cols < first + side) & (cols < n))


@triton.jit
def best_key(x, index):
    """Score and index as one number. It is larger for a higher score and, at equal scores, for a lower index."""
    x = tl.where(x == 0.0, 0.0, x)  # -0.0 equals 0.0
    bits = x.to(tl.int32, bitcast=True)
    return (tl.where(bits < 0, bits ^ LAST, bits).to(tl.int64) << 32) | (index ^ LAST).to(tl.int64)


@triton.jit
def right_pairs(row_ids, col_ids, rows, cols, n, m):
    """Where a row and a column have the same id."""
    ok_rows, ok_cols = rows < n, cols < m
    mine, theirs = tl.load(row_ids + rows, mask=ok_rows, other=0), tl.load(col_ids + cols, mask=ok_cols, other=0)
    return (mine[:, None] == theirs[None, :]) & ok_rows[:, None] & ok_cols[None, :]


@kernel(optional=("col_best", "hide"), dynamic=("n", "m", "hidden"))
def best_kernel(a_desc, b_desc, row_ids, col_ids, row_best, col_best, hide, n, m, hidden,
                D: tl.constexpr, R: tl.constexpr, C: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr,
                PROGRAMS: tl.constexpr, EXACT: tl.constexpr):  # fmt: skip
    """The best column of equal id of each row, and row of each column, as keys. A tile without equal ids needs no product."""
    row_tiles, col_tiles = tl.cdiv(n, R), tl.cdiv(m, C)
    steps = tl.cdiv(row_tiles * col_tiles - tl.program_id(0), PROGRAMS)
    for step in range(0, steps):
        tile_row, tile_col = tile_place(tl.program_id(0) + step * PROGRAMS, row_tiles, col_tiles, GROUP)
        rows = tile_row * R + tl.arange(0, R)
        cols = tile_col * C + tl.arange(0, C)
        right = right_pairs(row_ids, col_ids, rows, cols, n, m)
        if tl.max(tl.max(right.to(tl.int32), 1), 0) > 0:
            x = tile_dot(a_desc, b_desc, tile_row * R, tile_col * C, D, R, C, K, EXACT)
            # Computed again: a mask kept during the product would take registers.
            x = tl.where(right_pairs(row_ids, col_ids, rows, cols, n, m), x, float("-inf"))
            x = without_hidden(x, hide, hidden, rows, cols, n)
            top = tl.max(x, 1)
            at = tl.min(tl.where(x == top[:, None], cols[None, :], m), 1)
            tl.atomic_max(row_best + rows, best_key(top, at), mask=top > float("-inf"), sem="relaxed")
            if col_best is not None:
                top = tl.max(x, 0)
                at = tl.min(tl.where(x == top[None, :], rows[:, None], n), 0)
                tl.atomic_max(col_best + cols, best_key(top, at), mask=top > float("-inf"), sem="relaxed")


def as_best(key: Tensor, first: int) -> tuple[Tensor, Tensor]:
    """The scores and indices of the keys of `best_kernel`; indices start at ``first``."""
    bits = (key >> 32).to(torch.int32)
    score = torch.where(bits < 0, bits ^ LAST.value, bits).view(torch.float32)
    none = key == NONE
    index = (key & LAST.value ^ LAST.value) + first
    return torch.where(none, -torch.inf, score), torch.where(none, NO_INDEX, index)


class FusedScorer:
    """A `kernels.ranks.Scorer` of Triton kernels; no tile is stored."""

    side = 0
    dtype = torch.float32

    def __init__(self, device: torch.device, width: int, dtype: torch.dtype, options: TileOptions) -> None:
        self.device, self.width = device, width
        self.exact = exact_products(options)
        self.sizes = forward_sizes(device, dtype, width, columns=True, exact=self.exact)
        self.workspace = options.workspace_bytes
        self.step = max(self.sizes.rows, min(options.workspace_bytes, GATHERED_BYTES) // (width * dtype.itemsize))

    def pair_scores(self, block: Block, index: Tensor, into: Tensor) -> None:
        """See `Scorer`. The answers are gathered in the order of their queries."""
        for rows in pieces(block.queries.shape[0] if block.items.shape[0] else 0, self.step):
            items, inside = block.answering(index, rows)
            own = torch.empty(items.shape[0], device=self.device, dtype=self.dtype)
            programs = cdiv(items.shape[0], min(self.sizes.rows, self.sizes.cols))
            values = {"out": own, "n": items.shape[0]}
            self._launch(diagonal_kernel, self._operand(block.queries[rows]), self._operand(items), values, programs)
            into[rows] = torch.where(inside, own, into[rows])
            del items  # free them before the next are gathered

    def find_best(
        self, block: Block, row_ids: Tensor, col_ids: Tensor, rows_best: Best, cols_best: Best | None = None
    ) -> None:
        """See `Scorer`. One part of the gallery at a time."""
        n, queries = block.queries.shape[0], self._operand(block.queries)
        for here, items, values in self._parts(block):
            row_best = torch.full((n,), NONE, device=self.device, dtype=torch.int64)
            col_best = None if cols_best is None else row_best.new_full((here.stop - here.start,), NONE)
            values |= {"row_ids": vector(row_ids), "col_ids": vector(col_ids[here])}
            values |= {"row_best": row_best, "col_best": col_best}
            self._launch(best_kernel, queries, items, values)
            rows_best.merge_(*as_best(row_best, block.col_offset + here.start))
            if cols_best is not None and col_best is not None:
                Best(cols_best.score[here], cols_best.index[here]).merge_(*as_best(col_best, block.row_offset))
            block.done(here)

    def count_better(
        self, block: Block, rows: Sequence[Answers], cols: Answers | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """See `Scorer`. One part of the gallery at a time."""
        n, queries = block.queries.shape[0], self._operand(block.queries)
        counts = torch.zeros(len(rows), n, device=self.device, dtype=torch.int32)
        col_counts = None if cols is None else counts.new_zeros(block.items.shape[0])
        for here, items, shared in self._parts(block):
            for k in pieces(len(rows), ANSWERS_AT_ONCE):
                index = torch.stack([answers.index for answers in rows[k]])
                values = shared | {"row_score": vector(torch.stack([answers.score for answers in rows[k]]))}
                values |= {"row_place": local_places(index, block.col_offset + here.start)}
                values |= {"row_count": counts[k], "ANSWERS": len(index)}
                if cols is not None and col_counts is not None and k.start == 0:  # counted once
                    values |= {"col_score": vector(cols.score[here]), "col_count": col_counts[here]}
                    values["col_place"] = local_places(cols.index[here], block.row_offset)
                self._launch(count_kernel, queries, items, values)
            block.done(here)
        return counts.long(), None if col_counts is None else col_counts.long()

    def _operand(self, features: Tensor) -> Tensor:
        """What kernels read in place of the features: these, or a copy. See `readable` and `tf32`."""
        with on_device(features):
            return rounded(readable(features), self.exact)

    def _parts(self, block: Block) -> Iterator[tuple[slice, Tensor, dict[str, Any]]]:
        """Parts of the gallery, what kernels read of them, and the arguments that all kernels over tiles need."""
        n, tile = block.queries.shape[0], self.sizes.cols
        most = PAIRS_AT_ONCE // max(n, 1)
        if copies(self.exact, block.items.dtype):
            most = min(most, self.workspace // (4 * self.width))
        for here in pieces(block.items.shape[0], max(most // tile, 1) * tile) if n else ():
            values: dict[str, Any] = {"n": n, "m": here.stop - here.start, "hidden": 0}
            if block.excluded is not None:
                hidden = block.excluded.index
                values |= {"hide": local_places(hidden.T, block.col_offset + here.start), "hidden": hidden.shape[1]}
            yield here, self._operand(block.items[here]), values

    def _launch(
        self, kernel: Any, queries: Tensor, items: Tensor, values: dict[str, Any], programs: int | None = None
    ) -> None:
        """A kernel with its tiles; by default, persistent programs over all of them."""
        sizes = self.sizes
        persistent = multiprocessors(self.device) * sizes.programs
        tile: dict[str, Any] = {
            "GROUP": sizes.group,
            "PROGRAMS": persistent,
            "R": sizes.rows,
            "C": sizes.cols,
            "K": sizes.depth,
        }
        tile |= {"a_desc": tensor_descriptor(queries, (sizes.rows, sizes.depth), self.exact), "D": self.width}
        tile |= {"b_desc": tensor_descriptor(items, (sizes.cols, sizes.depth), self.exact), "EXACT": self.exact}
        with on_device(queries):
            how = {"warps": sizes.warps, "stages": sizes.stages}
            launch(kernel, programs or persistent, self.device, tile, **how, **values)


def local_places(index: Tensor, first: int) -> Tensor:
    """Global indices relative to ``first``, clamped to int32; -1 stays negative."""
    return (index - first).clamp(-1, 2**31 - 1).to(torch.int32).contiguous()
