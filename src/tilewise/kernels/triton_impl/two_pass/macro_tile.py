"""How large a macro-tile of backward is: the block of scores whose gradient G is in memory at one time."""

from __future__ import annotations

import torch

from tilewise.kernels.spec import PairShape, PairSpec
from tilewise.kernels.triton_impl.scores import cdiv
from tilewise.kernels.triton_impl.sizes import Sizes, whole_rounds
from tilewise.kernels.triton_impl.two_pass.saved import CHUNK_ENTRIES
from tilewise.options import TileOptions

ONE_MACRO = 16384  # rows or columns


def macro_tile(shape: PairShape, spec: PairSpec, sizes: Sizes, options: TileOptions) -> tuple[int, int]:
    """Rows and columns of a macro-tile: G takes at most 3/4 of the workspace, a block of row gradients 1/4."""
    budget, item = options.workspace_bytes, shape.dtype.itemsize
    n, m, d = shape.rows, shape.cols, shape.width
    tile, entries = max(sizes.rows, sizes.cols), budget * 3 // 4 // item  # of G
    block = max(tile, budget // 4 // (4 * d) // tile * tile)  # rows whose float32 gradients fit
    rows = max(tile, min(8192, block, entries // tile) // tile * tile)
    if spec.symmetric:
        while rows > tile and rows * rows > entries:
            rows = cdiv(rows // 2, tile) * tile
        return rows, rows
    all_rows, all_cols = cdiv(n, tile) * tile, cdiv(m, tile) * tile
    rows = min(rows, all_rows)
    # If one side fits into one macro-tile, the gradient of the other side is one product and needs no accumulator.
    if n <= ONE_MACRO and all_rows * tile <= entries:
        rows = all_rows
    elif m <= ONE_MACRO and all_cols * tile <= entries:
        rows = entries // all_cols // tile * tile
        return min(rows, block) if shape.dtype == torch.float16 else rows, all_cols
    room = max(tile, entries // rows // tile * tile)
    # Beyond 8192 columns the products are not faster, and with as many rows they are slower.
    cols = min(max(8192, room // 2 // tile * tile), room, 65536)
    if spec.guide == "none":
        cols = min(whole_rounds(cols, tile, rows, shape.device, sizes), room)
    else:  # scores that are saved for a guide take what G leaves of the workspace
        cols = min(cols, max(8192, CHUNK_ENTRIES // rows // tile * tile))
    return rows, min(all_cols, cols)
