"""The nearest items on a GPU: scores are compared with a limit of their row where they are computed.

The limit of a row is the k-th best score found so far. The few scores above it are appended to a buffer of the row, as
keys: a score and an index in one number, larger for a higher score and, at equal scores, for a lower index. Keys differ,
so ties are exact. Between launches `select_kernel` keeps the k largest keys of each buffer and raises the limits.
Launches cover as many columns as have been searched, so that about k scores of a row enter in each.
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
from tilewise.options import TileOptions

SMALLEST_BUFFER = 512  # keys of a row; at least three times k, so that what enters a launch rarely overflows it
PIECES = {9: 16}  # PIECE by major compute capability: columns whose places are in registers at once, without spills
OTHER_PIECE = 32
LOWEST_KEY = tl.constexpr(-(2**63))


@triton.jit
def append(x, rows, col, limit, count, keys, capacity, PIECE: tl.constexpr):
    """Append the scores above the limits to the buffers of their rows; ``col`` is the first column.

    ``count`` also counts what finds no place.
    """
    R: tl.constexpr = x.shape[0]
    C: tl.constexpr = x.shape[1]
    if C <= PIECE:
        enters = x > limit[:, None]
        # Reduced in one step: Triton 3.7 compiles no reduction of rows and then of columns here for capability 10.0.
        if tl.max(tl.reshape(enters.to(tl.int32), (R * C,)), 0) > 0:
            # A piece takes one place after another; the order of places does not matter, because keys are compared.
            at = tl.atomic_add(
                tl.broadcast_to((count + rows)[:, None], (R, C)),
                tl.full((R, C), 1, tl.int32),
                mask=enters,
                sem="relaxed",
            )
            found = best_key(x, tl.broadcast_to((col + tl.arange(0, C))[None, :], (R, C)))
            tl.store((keys + rows.to(tl.int64) * capacity)[:, None] + at, found, mask=enters & (at < capacity))
    else:
        left, right = tl.split(tl.permute(tl.reshape(x, (R, 2, C // 2)), (0, 2, 1)))
        append(left, rows, col, limit, count, keys, capacity, PIECE)
        append(right, rows, col + C // 2, limit, count, keys, capacity, PIECE)


@kernel(optional=("below", "row_ids", "col_ids", "hide"), dynamic=("first", "n", "m", "hidden", "capacity"))
def search_kernel(a_desc, b_desc, limit, below, row_ids, col_ids, hide, count, keys, first, n, m, hidden, capacity,
                  D: tl.constexpr, R: tl.constexpr, C: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr,
                  PROGRAMS: tl.constexpr, EXACT: tl.constexpr, PIECE: tl.constexpr):  # fmt: skip
    """Append the scores of all rows with the columns first to m."""
    row_tiles, col_tiles = tl.cdiv(n, R), tl.cdiv(m - first, C)
    steps = tl.cdiv(row_tiles * col_tiles - tl.program_id(0), PROGRAMS)
    for step in range(0, steps):
        tile_row, tile_col = tile_place(tl.program_id(0) + step * PROGRAMS, row_tiles, col_tiles, GROUP)
        x = tile_dot(a_desc, b_desc, tile_row * R, first + tile_col * C, D, R, C, K, EXACT)
        rows = tile_row * R + tl.arange(0, R)
        cols = first + tile_col * C + tl.arange(0, C)
        x = tl.where(cols[None, :] < m, x, float("-inf"))
        if below is not None:
            most = tl.load(below + rows, mask=rows < n, other=0.0)
            x = tl.where(x < most[:, None], x, float("-inf"))
        if row_ids is not None:
            x = tl.where(right_pairs(row_ids, col_ids, rows, cols, n, m), float("-inf"), x)
        x = without_hidden(x, hide, hidden, rows, cols, n)
        least = tl.load(limit + rows, mask=rows < n, other=float("inf"))
        append(x, rows, first + tile_col * C, least, count, keys, capacity, PIECE)


@kernel(dynamic=("k", "capacity"))
def select_kernel(keys, count, limit, k, capacity, WIDTH: tl.constexpr):
    """Keep the k largest keys of a row, in its first places, and raise its limit to the lowest of their scores."""
    row = tl.program_id(0).to(tl.int64)
    held = tl.load(count + row)
    if held >= k:
        places = tl.arange(0, WIDTH)
        own = keys + row * capacity
        key = tl.load(own + places, mask=places < held, other=LOWEST_KEY)
        # The k-th largest key, from its highest bit to its lowest: it is kept where k keys are as large.
        lowest = tl.full((), LOWEST_KEY, tl.int64)
        if tl.sum((key >= 0).to(tl.int32), 0) >= k:
            lowest = lowest - lowest
        for bit in range(0, 63):
            higher = lowest | (tl.full((), 1, tl.int64) << (62 - bit))
            lowest = tl.where(tl.sum((key >= higher).to(tl.int32), 0) >= k, higher, lowest)
        kept = (key >= lowest) & (places < held)
        tl.debug_barrier()  # all keys are read before some are overwritten
        tl.store(own + tl.cumsum(kept.to(tl.int32), 0) - 1, key, mask=kept)
        tl.store(count + row, k)
        bits = (lowest >> 32).to(tl.int32)
        tl.store(limit + row, tl.where(bits < 0, bits ^ LAST, bits).to(tl.float32, bitcast=True))


class FusedSearcher(FusedScorer):
    """A `kernels.ranks.Searcher` of Triton kernels. Buffers of as many rows as the workspace holds are in use at once."""

    def __init__(self, device: torch.device, width: int, dtype: torch.dtype, options: TileOptions) -> None:
        super().__init__(device, width, dtype, options)
        major = torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 0
        self.piece = PIECES.get(major, OTHER_PIECE)

    def find_nearest(self, block: Block, unwanted: Unwanted, found: Nearest) -> None:
        """See `Searcher`."""
        n, m = block.queries.shape[0], block.items.shape[0]
        k = min(found.index.shape[1], m)
        capacity = triton.next_power_of_2(max(SMALLEST_BUFFER, 3 * k))
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
        values = values | {"count": count, "keys": keys, "PIECE": self.piece}
        warps = max(1, min(16, capacity // 256))
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
            first, width = stop, max(min(2 * width, stop, PAIRS_AT_ONCE // n), capacity - k)
        unused = torch.arange(k, device=self.device) >= count[:, None]
        return keys[:, :k].masked_fill(unused, NONE)
