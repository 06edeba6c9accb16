"""The tiles of one pair of blocks: their sizes, their order, and their scores.

Axes: n rows of a, m rows of b, d features; r, c rows and columns of one tile; i, j their slices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from tilewise.kernels.slices import slices
from tilewise.kernels.spec import Pair, PairShape, PairSpec
from tilewise.kernels.torch_impl.guide import GuideTiles
from tilewise.kernels.torch_impl.tile_keys import TileKeys
from tilewise.kernels.torch_impl.tile_scores import TileScores
from tilewise.options import TileOptions

# Large tiles, so that there are few steps: the threads of a CPU synchronize after each one.
TILE_ROWS, TILE_COLS = 1024, 4096  # 16 MiB of float32
SYMMETRIC_TILE = 2048
ACCELERATOR_TILE = 8192
SMALLEST_TILE = 16
SYMMETRIC_STEPS = 8  # fewest tiles along a side, if there are enough rows: tiles below the diagonal are not computed


class Tiles(TileScores):
    """The tiles of one pair of blocks, row block by row block, and the buffers that they share."""

    def __init__(self, pair: Pair, spec: PairSpec, options: TileOptions) -> None:
        super().__init__(pair, spec)
        self.rows, self.cols = tile_sizes(pair.shape, spec, options)
        self.keys = TileKeys(pair, spec)
        self.mask = GuideTiles(pair, spec) if spec.guide == "mask" else None
        self._buffers: dict[str, Tensor] = {}
        self._cached: dict[str, tuple[slice, Tensor]] = {}

    def __iter__(self) -> Iterator[tuple[slice, slice]]:
        """Rows in the outer loop, columns in the inner one. Symmetric: only tiles on and above the diagonal."""
        n, m = self.pair.a.shape[0], self.pair.b.shape[0]
        for i in slices(n, self.rows):
            for j in slices(m, self.cols, i.start if self.spec.symmetric else 0):
                yield i, j

    def a_block(self, i: slice) -> Tensor:
        """Rows of a, in the type of the operands."""
        return self._block("a", self.pair.a, i)

    def b_block(self, j: slice) -> Tensor:
        """Rows of b, in the type of the operands."""
        return self._block("b", self.pair.b, j)

    def scratch(self, like: Tensor) -> Tensor:
        """A second buffer of the tile's shape. Its values are valid until the next call."""
        return self._buffer("scratch", *like.shape)

    def scores(self, i: slice, j: slice) -> Tensor:
        """Scores of one tile: (r, c), -inf for an excluded pair. They are valid until the next call."""
        out = None if self.widens else self._buffer("scores", i.stop - i.start, j.stop - j.start)
        scaled_rd = self._cache("scaled", i, lambda: self.scaled(self.a_block(i)))
        x_rc = self.scaled_product(scaled_rd, self.b_block(j), out)
        if self.spec.symmetric and i == j:
            # x_ij is also used as x_ji, but a product rounds the two differently. Their mean is symmetric.
            x_rc.add_(self.scratch(x_rc).copy_(x_rc.T)).mul_(0.5)
        self.finish_(x_rc, None if self.pair.bias is None else self.pair.bias[j])
        if self.pair.row_scale is not None:
            x_rc.mul_(self.pair.row_scale[i, None].to(x_rc.dtype))
        self.keys.exclude_(x_rc, i, j)
        if self.mask is not None:
            self.keys.exclude_unless_positive_(x_rc, self.mask.above_limit(i, j), i, j)
        return x_rc

    def _block(self, name: str, features: Tensor, rows: slice) -> Tensor:
        if features.dtype == self.operand_dtype:
            return features[rows]
        return self._cache(name, rows, lambda: self.operand(features[rows]))

    def _cache(self, name: str, rows: slice, make: Callable[[], Tensor]) -> Tensor:
        """The result of ``make``, kept until other rows are requested under this name."""
        if name not in self._cached or self._cached[name][0] != rows:
            self._cached.pop(name, None)  # frees its memory before the next one is made
            self._cached[name] = (rows, make())
        return self._cached[name][1]

    def _buffer(self, name: str, r: int, c: int) -> Tensor:
        if name not in self._buffers:
            largest = min(self.rows, self.pair.a.shape[0]) * min(self.cols, self.pair.b.shape[0])
            self._buffers[name] = self.pair.a.new_empty(largest, dtype=self.compute_dtype)
        return self._buffers[name][: r * c].view(r, c)


def score_bound(pair: Pair, spec: PairSpec) -> float:
    """An upper bound of |x_ij| over all scores (Cauchy-Schwarz); inf if there is none."""
    if pair.a.numel() == 0 or pair.b.numel() == 0:
        return math.inf
    norms = [
        max(
            torch.linalg.vector_norm(x[rows], dim=1, dtype=pair.stat_dtype).max().item()
            for rows in slices(x.shape[0], 4096)
        )
        for x in ((pair.a,) if spec.symmetric else (pair.a, pair.b))
    ]
    bound = abs(pair.scale.item()) * norms[0] * norms[-1]
    if pair.bias is not None:
        bound += pair.bias.abs().max().item()
    if spec.softcap:
        bound = min(bound, spec.softcap)
    if pair.row_scale is not None:
        bound *= pair.row_scale.abs().max().item()
    return bound if math.isfinite(bound) else math.inf


def tile_sizes(shape: PairShape, spec: PairSpec, options: TileOptions) -> tuple[int, int]:
    """Rows and columns of a tile whose scratch memory fits the workspace."""
    rows, cols = TILE_ROWS, TILE_COLS
    if shape.device.type != "cpu":
        rows = cols = ACCELERATOR_TILE
    elif spec.symmetric:
        eighth = -(-shape.rows // SYMMETRIC_STEPS)
        rows = cols = min(SYMMETRIC_TILE, max(SYMMETRIC_TILE // 4, eighth))
    while scratch_bytes(rows, cols, shape, spec) > options.workspace_bytes and max(rows, cols) > SMALLEST_TILE:
        if spec.symmetric:
            rows = cols = max(rows // 2, SMALLEST_TILE)
        elif cols >= rows:
            cols //= 2
        else:
            rows //= 2
    return rows, cols


def scratch_bytes(rows: int, cols: int, shape: PairShape, spec: PairSpec) -> int:
    """An upper bound of one tile's memory: its buffers, its masks, and its blocks of features."""
    item = 8 if shape.dtype == torch.float64 else 4
    many, skips = spec.positive == "many", shape.has_skips
    tiles = 2 + bool(spec.softcap) * (2 if shape.has_row_scale else 1) + many + 2 * (shape.device.type != "cpu")
    tiles += 2 * (spec.guide == "mask") + 12 * spec.divergence
    masks = 2 * many + 2 * skips + 2 * (spec.guide != "none")
    vectors = 6 * (rows + cols) * 8 + 5 * rows * shape.picks * 8
    width = max(shape.width + shape.guide_width, 1)
    return rows * cols * (tiles * item + masks) + (3 * rows + cols) * width * item + vectors
