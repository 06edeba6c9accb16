"""The nearest items on a GPU: scores are compared with a limit of their row where they are computed.

The limit of a row is the k-th best score found so far. The few scores above it are appended to a buffer of the row, as
keys: a score and an index in one number, larger for a higher score and, at equal scores, for a lower index. Keys differ,
so ties are exact. Between launches `select_kernel` keeps the k largest keys of each buffer and raises the limits.
Each launch covers up to GROWTH times the columns that have been searched, so about GROWTH * k scores of a row enter.

Appending is written in PTX. Triton would move the tile through shared memory before each atomic addition and each
store; here a thread appends its own scores, and jumps over the code where none of 8 enters.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewise.kernels.ranks import NO_INDEX, Block, Nearest, Unwanted
from tilewise.kernels.triton_impl.launch import kernel, launch
from tilewise.kernels.triton_impl.primitives import tile_dot, tile_place
from tilewise.kernels.triton_impl.ranks import (
    LAST,
    NONE,
    PAIRS_AT_ONCE,
    FusedScorer,
    as_best,
    best_key,
    local_places,
    right_pairs,
    without_hidden,
)
from tilewise.kernels.triton_impl.scores import on_device, pieces, vector

SMALLEST_BUFFER = 512  # keys of a row
BUFFER = 5  # times k: k are kept, about GROWTH * k enter, and the rest is room for rows in which more enter
GROWTH = 2
PARTS = 8  # column ranges of a tile; a thread takes one score of each at once
LOWEST_KEY = tl.constexpr(-(2**63))
# The operands of the PTX below, after its result
OPERANDS = [*(f"x{part}" for part in range(PARTS)), "least", "col", "step", "m", "row", "to", "first", "capacity"]
ENTERS = """
    mad.lo.s32 col, {step}, {part}, {col};
    setp.gt.f32 q, {x}, {least};
    setp.lt.and.s32 q, col, {m}, q;"""
# Add the number of these 8 scores that enter to the count of the row. The result is the count before, or -1 if none do.
RESERVE = """{{
    .reg .pred p, q;
    .reg .f32 most;
    .reg .b32 number, col;
    .reg .b64 at;
    mov.b32 {result}, -1;
    max.f32 most, {x0}, {x1};
    max.f32 most, most, {x2};
    max.f32 most, most, {x3};
    max.f32 most, most, {x4};
    max.f32 most, most, {x5};
    max.f32 most, most, {x6};
    max.f32 most, most, {x7};
    setp.gt.f32 p, most, {least};
    @!p bra END;
    mov.b32 number, 0;
    {each}
    setp.gt.s32 p, number, 0;
    mad.wide.s32 at, {row}, 4, {to};
    @p atom.global.relaxed.gpu.add.u32 {result}, [at], number;
END:
}}"""
# Write the keys (see `best_key`) of those that enter, to these places of the buffer of the row.
WRITE = """{{
    .reg .pred p, q;
    .reg .f32 score;
    .reg .b32 place, col, bits, sign;
    .reg .b64 own, at;
    mov.b32 {result}, 0;
    mov.b32 place, {first};
    setp.lt.s32 p, place, 0;
    @p bra END;
    mul.wide.s32 own, {row}, {capacity};
    shl.b64 own, own, 3;
    add.s64 own, own, {to};
    {each}
END:
}}"""
WRITE_ONE = """
    add.f32 score, {x}, 0f00000000;
    mov.b32 bits, score;
    shr.s32 sign, bits, 31;
    and.b32 sign, sign, 0x7fffffff;
    xor.b32 bits, bits, sign;
    xor.b32 col, col, 0x7fffffff;
    mad.wide.s32 at, place, 8, own;
    setp.lt.and.s32 p, place, {capacity}, q;
    @p st.global.v2.b32 [at], {{col, bits}};
    @q add.s32 place, place, 1;"""


def ptx(body: str, one: str) -> str:
    """The code, with ``one`` after the comparison of each of the scores."""
    names = {"result": "$0"} | {name: f"${at + 1}" for at, name in enumerate(OPERANDS)}
    each = [(ENTERS + one).format(x=f"${part + 1}", part=part, **names) for part in range(PARTS)]
    return body.format(each="".join(each), **names)


RESERVE_PTX = tl.constexpr(ptx(RESERVE, "@q add.s32 number, number, 1;"))
WRITE_PTX = tl.constexpr(ptx(WRITE, WRITE_ONE))
RESERVE_TYPES = tl.constexpr("=&r,f,f,f,f,f,f,f,f,f,r,r,r,r,l")
WRITE_TYPES = tl.constexpr("=&r,f,f,f,f,f,f,f,f,f,r,r,r,r,l,r,r")


@triton.jit
def halves(x):
    """The left and the right columns of a tile."""
    R: tl.constexpr = x.shape[0]
    C: tl.constexpr = x.shape[1]
    return tl.split(tl.permute(tl.reshape(x, (R, 2, C // 2)), (0, 2, 1)))


@triton.jit
def append(x, rows, col, m, limit, count, keys, capacity, PTX: tl.constexpr):
    """Append the scores above the limits, in columns before ``m``, to the buffers of their rows.

    ``col`` is the first column. ``count`` also counts what finds no place.
    """
    C: tl.constexpr = x.shape[1]
    if PTX:
        left, right = halves(x)
        a, b = halves(left)
        c, d = halves(right)
        x0, x1 = halves(a)
        x2, x3 = halves(b)
        x4, x5 = halves(c)
        x6, x7 = halves(d)
        least, cols, row = limit[:, None], (col + tl.arange(0, C // 8))[None, :], rows[:, None]
        first = tl.inline_asm_elementwise(
            RESERVE_PTX, RESERVE_TYPES, [x0, x1, x2, x3, x4, x5, x6, x7, least, cols, C // 8, m, row, count.to(tl.int64)],
            dtype=tl.int32, is_pure=False, pack=1)  # fmt: skip
        # The additions of all parts of the tile are under way before the first result is needed.
        tl.inline_asm_elementwise(
            WRITE_PTX, WRITE_TYPES,
            [x0, x1, x2, x3, x4, x5, x6, x7, least, cols, C // 8, m, row, keys.to(tl.int64), first, capacity],
            dtype=tl.int32, is_pure=False, pack=1)  # fmt: skip
    else:
        cols = (col + tl.arange(0, C))[None, :]
        enters = (x > limit[:, None]) & (cols < m)
        places = tl.broadcast_to((count + rows)[:, None], x.shape)
        at = tl.atomic_add(places, enters.to(tl.int32), mask=enters, sem="relaxed")
        own = (keys + rows.to(tl.int64) * capacity)[:, None]
        tl.store(own + at, best_key(x, tl.broadcast_to(cols, x.shape)), mask=enters & (at < capacity))


@kernel(optional=("below", "row_ids", "col_ids", "hide"), dynamic=("first", "n", "m", "hidden", "capacity"))
def search_kernel(a_desc, b_desc, limit, below, row_ids, col_ids, hide, count, keys, first, n, m, hidden, capacity,
                  D: tl.constexpr, R: tl.constexpr, C: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr,
                  PROGRAMS: tl.constexpr, EXACT: tl.constexpr, PTX: tl.constexpr):  # fmt: skip
    """Append the scores of all rows with the columns first to m."""
    row_tiles, col_tiles = tl.cdiv(n, R), tl.cdiv(m - first, C)
    steps = tl.cdiv(row_tiles * col_tiles - tl.program_id(0), PROGRAMS)
    for step in tl.range(0, steps, flatten=hide is None):
        tile_row, tile_col = tile_place(tl.program_id(0) + step * PROGRAMS, row_tiles, col_tiles, GROUP)
        x = tile_dot(a_desc, b_desc, tile_row * R, first + tile_col * C, D, R, C, K, EXACT)
        rows = tile_row * R + tl.arange(0, R)
        cols = first + tile_col * C + tl.arange(0, C)
        if below is not None:
            most = tl.load(below + rows, mask=rows < n, other=0.0)
            x = tl.where(x < most[:, None], x, float("-inf"))
        if row_ids is not None:
            x = tl.where(right_pairs(row_ids, col_ids, rows, cols, n, m), float("-inf"), x)
        x = without_hidden(x, hide, hidden, rows, cols, n)
        least = tl.load(limit + rows, mask=rows < n, other=float("inf"))
        append(x, rows, first + tile_col * C, m, least, count, keys, capacity, PTX)


@kernel(dynamic=("k", "capacity"))
def select_kernel(keys, count, limit, k, capacity, WIDTH: tl.constexpr):
    """Keep the k largest keys of a row, in its first places, and raise its limit to the lowest of their scores."""
    row = tl.program_id(0).to(tl.int64)
    held = tl.load(count + row)
    if held >= k:
        places = tl.arange(0, WIDTH)
        own = keys + row * capacity
        key = tl.load(own + places, mask=places < held, other=LOWEST_KEY)
        # Halve the range of keys until k keys are as large as its lower end. Keys differ, so it ends.
        low, high, number = tl.min(tl.where(places < held, key, tl.max(key, 0)), 0), tl.max(key, 0) + 1, held
        while number != k:
            middle = (low & high) + ((low ^ high) >> 1)
            above = tl.sum((key >= middle).to(tl.int32), 0)
            enough = above >= k
            low, high = tl.where(enough, middle, low), tl.where(enough, high, middle)
            number = tl.where(enough, above, number)
        kept = (key >= low) & (places < held)
        lowest = tl.min(tl.where(kept, key, tl.max(key, 0)), 0)
        tl.debug_barrier()  # all keys are read before some are overwritten
        tl.store(own + tl.cumsum(kept.to(tl.int32), 0) - 1, key, mask=kept)
        tl.store(count + row, k)
        bits = (lowest >> 32).to(tl.int32)
        tl.store(limit + row, tl.where(bits < 0, bits ^ LAST, bits).to(tl.float32, bitcast=True))


class FusedSearcher(FusedScorer):
    """A `kernels.ranks.Searcher` of Triton kernels. Buffers of as many rows as the workspace holds are in use at once."""

    def find_nearest(self, block: Block, unwanted: Unwanted, found: Nearest) -> None:
        """See `Searcher`."""
        n, m = block.queries.shape[0], block.items.shape[0]
        k = min(found.index.shape[1], m)
        capacity = triton.next_power_of_2(max(SMALLEST_BUFFER, BUFFER * k))
        items = self._operand(block.items)
        col_ids = None if unwanted.col_ids is None else vector(unwanted.col_ids)
        for rows in pieces(n if m else 0, max(self.sizes.rows, self.workspace // (8 * capacity))):
            best = Nearest(found.score[rows], found.index[rows])
            limit = best.limit(block.col_offset).contiguous()
            values: dict[str, Any] = {"n": rows.stop - rows.start, "capacity": capacity, "limit": limit, "hidden": 0}
            if unwanted.row_ids is not None:
                values |= {"row_ids": vector(unwanted.row_ids[rows]), "col_ids": col_ids}
            if unwanted.below is not None:
                values["below"] = vector(unwanted.below[rows])
            if block.excluded is not None:
                hidden = block.excluded.index[rows]
                values |= {"hide": local_places(hidden.T, block.col_offset), "hidden": hidden.shape[1]}
            keys = self._search(self._operand(block.queries[rows]), items, values, k)
            score, index = as_best(keys.sort(dim=1, descending=True).values, block.col_offset)
            if (best.index == NO_INDEX).all():
                best.score[:, :k], best.index[:, :k] = score, index
            else:
                best.keep_(slice(None), torch.cat([best.score, score], 1), torch.cat([best.index, index], 1))
                best.sort_()
            if block.advance is not None:
                block.advance((rows.stop - rows.start) * m)

    def _search(self, queries: Tensor, items: Tensor, values: dict[str, Any], k: int) -> Tensor:
        """The k largest keys of each row above its limit, (n, k), in any order."""
        n, m, capacity = queries.shape[0], items.shape[0], values["capacity"]
        keys = torch.empty(n, capacity, device=self.device, dtype=torch.int64)
        count = torch.zeros(n, device=self.device, dtype=torch.int32)
        values = values | {"count": count, "keys": keys, "PTX": self.device.type == "cuda"}
        warps = max(1, min(16, capacity // 512))
        first, width, held = 0, capacity, count.clone()
        while first < m:
            stop = min(m, first + width)
            self._launch(search_kernel, queries, items, values | {"first": first, "m": stop})
            if int(count.max()) > capacity:  # some scores found no place: search fewer columns
                count.copy_(held)
                width = max((stop - first) // 2, capacity - k)
                continue
            with on_device(keys):
                launch(select_kernel, n, self.device, values, warps=warps, stages=1, k=k, WIDTH=capacity)
            held.copy_(count)
            first, width = stop, max(min(GROWTH * stop, PAIRS_AT_ONCE // n), capacity - k)
        unused = torch.arange(k, device=self.device) >= count[:, None]
        return keys[:, :k].masked_fill(unused, NONE)
