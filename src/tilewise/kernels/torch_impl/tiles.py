"""The tiles of one pair of blocks: how large they are, in which order they come, and their scores.

Axes: n rows of a, m rows of b, d features; r, c rows and columns of one tile; i, j their slices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from tilewise.kernels.spec import Pair, PairSpec
from tilewise.kernels.torch_impl.tile_keys import TileKeys
from tilewise.options import TileOptions

# Few, large steps: after every one the threads of a CPU wait for the slowest, and on a busy machine that is long.
TILE_ROWS, TILE_COLS = 1024, 4096  # 16 MiB of float32
SYMMETRIC_TILE = 2048
ACCELERATOR_TILE = 8192
SMALLEST_TILE = 16
SYMMETRIC_STEPS = 8  # the least number of tiles along a side, where rows permit: those below the diagonal are saved


class Tiles:
    """The tiles of one pair of blocks, in the order of the rows; holds the buffers that they share."""

    def __init__(self, pair: Pair, spec: PairSpec, options: TileOptions) -> None:
        self.pair, self.spec = pair, spec
        half = pair.a.dtype in (torch.float16, torch.bfloat16)
        # CUDA multiplies half types with float32 accumulation and output; elsewhere a tile is converted first.
        self.upcast = not (half and pair.a.is_cuda)
        self.compute_dtype = torch.float32 if half else pair.a.dtype
        self.rows, self.cols = tile_sizes(pair, spec, options)
        self.keys = TileKeys(pair, spec)
        self._buffers: dict[str, Tensor] = {}
        self._held: dict[str, tuple[slice, Tensor]] = {}

    def __iter__(self) -> Iterator[tuple[slice, slice]]:
        """Rows outside, columns inside; with symmetric scores only tiles on and above the diagonal."""
        n, m = self.pair.a.shape[0], self.pair.b.shape[0]
        for start in range(0, n, self.rows):
            first = start if self.spec.symmetric else 0
            for col in range(first, m, self.cols):
                yield slice(start, min(start + self.rows, n)), slice(col, min(col + self.cols, m))

    def a_block(self, i: slice) -> Tensor:
        """Rows of a, in the type of the products."""
        return self._block("a", self.pair.a, i)

    def b_block(self, j: slice) -> Tensor:
        """Rows of b, in the type of the products."""
        return self._block("b", self.pair.b, j)

    def spare(self, like: Tensor) -> Tensor:
        """A second buffer of the tile's shape; what it holds lasts until the next call."""
        return self._buffer("spare", *like.shape)

    def scores(self, i: slice, j: slice) -> Tensor:
        """Scores of one tile: (r, c), -inf where a pair never meets. Lasts until the next call."""
        pair, cap = self.pair, self.spec.softcap
        if self.upcast:
            x_rc = self._buffer("scores", i.stop - i.start, j.stop - j.start)
            torch.mm(self._scaled(i), self.b_block(j).T, out=x_rc)
        else:
            x_rc = torch.mm(pair.a[i], pair.b[j].T, out_dtype=torch.float32).mul_(pair.scale)
        if self.spec.symmetric and i == j:
            # A product rounds x_ij and x_ji differently, and here the one stands for the other.
            x_rc.add_(self.spare(x_rc).copy_(x_rc.T)).mul_(0.5)
        if pair.bias is not None:
            x_rc.add_(pair.bias[j])
        if cap:
            x_rc.div_(cap).tanh_().mul_(cap)
        self.keys.exclude_(x_rc, i, j)
        return x_rc

    def softcap_slope(self, x_rc: Tensor) -> Tensor:
        """d softcap(x) / dx = 1 - (x / cap)^2 of capped scores, and 0 where a pair never meets."""
        return (x_rc / self.spec.softcap).square_().neg_().add_(1.0).clamp_(min=0.0)

    def add_product(self, total: Tensor, left: Tensor, right: Tensor) -> None:
        """total += left @ right, in place, accumulated in the type of ``total``."""
        if self.upcast:
            total.addmm_(left, right)
        else:
            total.add_(torch.mm(left, right, out_dtype=torch.float32))

    def _block(self, name: str, features: Tensor, part: slice) -> Tensor:
        if not self.upcast or features.dtype == self.compute_dtype:
            return features[part]
        return self._hold(name, part, lambda: features[part].to(self.compute_dtype))

    def _scaled(self, i: slice) -> Tensor:
        return self._hold("scaled", i, lambda: self.a_block(i) * self.pair.scale.to(self.compute_dtype))

    def _hold(self, name: str, part: slice, make: Callable[[], Tensor]) -> Tensor:
        """The block that ``make`` gives, kept until another part is asked for."""
        if name not in self._held or self._held[name][0] != part:
            self._held.pop(name, None)  # before the next one is made
            self._held[name] = (part, make())
        return self._held[name][1]

    def _buffer(self, name: str, r: int, c: int) -> Tensor:
        if name not in self._buffers:
            largest = min(self.rows, self.pair.a.shape[0]) * min(self.cols, self.pair.b.shape[0])
            self._buffers[name] = self.pair.a.new_empty(largest, dtype=self.compute_dtype)
        return self._buffers[name][: r * c].view(r, c)


def score_bound(pair: Pair, spec: PairSpec) -> float:
    """No score is larger than this in size (Cauchy-Schwarz); inf when nothing can be said."""
    if pair.a.numel() == 0 or pair.b.numel() == 0:
        return math.inf
    norms = [
        max(
            torch.linalg.vector_norm(x[k : k + 4096], dim=1, dtype=pair.stat_dtype).max().item()
            for k in range(0, x.shape[0], 4096)
        )
        for x in ((pair.a,) if spec.symmetric else (pair.a, pair.b))
    ]
    bound = abs(pair.scale.item()) * norms[0] * norms[-1]
    if pair.bias is not None:
        bound += pair.bias.abs().max().item()
    if spec.softcap:
        bound = min(bound, spec.softcap)
    return bound if math.isfinite(bound) else math.inf


def tile_sizes(pair: Pair, spec: PairSpec, options: TileOptions) -> tuple[int, int]:
    """Rows and columns of a tile such that all scratch memory stays inside the workspace."""
    rows, cols = TILE_ROWS, TILE_COLS
    if pair.a.device.type != "cpu":
        rows = cols = ACCELERATOR_TILE
    elif spec.symmetric:
        eighth = -(-pair.a.shape[0] // SYMMETRIC_STEPS)
        rows = cols = min(SYMMETRIC_TILE, max(SYMMETRIC_TILE // 4, eighth))
    while scratch_bytes(rows, cols, pair, spec) > options.workspace_bytes and max(rows, cols) > SMALLEST_TILE:
        if spec.symmetric:
            rows = cols = max(rows // 2, SMALLEST_TILE)
        elif cols >= rows:
            cols //= 2
        else:
            rows //= 2
    return rows, cols


def scratch_bytes(rows: int, cols: int, pair: Pair, spec: PairSpec) -> int:
    """The most that one tile takes: its buffers, its masks, and the blocks of features around it."""
    item = 8 if pair.a.dtype == torch.float64 else 4
    many, skips = spec.positive == "many", pair.row_skip is not None
    tiles = 2 + bool(spec.softcap) + many + 2 * (pair.a.device.type != "cpu")
    masks = 2 * many + 2 * skips
    vectors = 6 * (rows + cols) * 8
    return rows * cols * (tiles * item + masks) + (3 * rows + cols) * max(pair.a.shape[1], 1) * item + vectors
