"""The torch backend: plain PyTorch, on any device that has float64 and in any floating type. It serves every call."""

from __future__ import annotations

from typing import Any

import torch

from tilewise.kernels.backend import Backend
from tilewise.kernels.ranks import Searcher
from tilewise.kernels.spec import HALF_TYPES, Backward, Grads, Needs, Pair, PairShape, PairSpec, Stats
from tilewise.kernels.torch_impl import two_pass
from tilewise.kernels.torch_impl.one_pass import TorchOnePass, block_bytes, block_rows
from tilewise.kernels.torch_impl.ranks import ScoreTile
from tilewise.kernels.torch_impl.small import TorchSmall
from tilewise.kernels.torch_impl.tiles import scratch_bytes, tile_sizes
from tilewise.options import TileOptions


class TorchBackend(Backend):
    """Plain PyTorch, tile by tile."""

    name = "torch"
    one_pass, small = TorchOnePass(), TorchSmall()
    offers_ranks = offers_search = True

    def why_not(self, shape: PairShape, spec: PairSpec, options: TileOptions) -> str | None:
        """It serves every call, except where rows must not depend on their place in a product."""
        if options.batch_invariant and shape.device.type != "cpu" and not shape.empty:
            return "batch_invariant=True needs products that treat all rows alike, and those of cuBLAS do not"
        return None

    def forward(self, pair: Pair, spec: PairSpec, options: TileOptions) -> Stats:
        """The statistics of ``spec``, tile by tile."""
        return two_pass.forward(pair, spec, options)

    def backward(self, *args: Any, grad_dtype: torch.dtype | None = None, **more: Any) -> Grads:
        """Gradients, tile by tile. The scores are computed a second time; nothing is saved."""
        return two_pass.backward(Backward(*args), grad_dtype)

    def accumulator_bytes(self, shape: PairShape, needs: Needs, spec: PairSpec, options: TileOptions) -> int:
        """For half types, the gradients of columns (and of symmetric rows) are summed in float32."""
        if shape.dtype not in HALF_TYPES:
            return 0
        summed = shape.rows if spec.symmetric else shape.cols * needs.b
        return 4 * summed * shape.width

    def workspace_bytes(self, shape: PairShape, spec: PairSpec, options: TileOptions, strategy: str) -> int:
        """One tile with its buffers, or the scores of a block of rows with all columns; see `Backend`."""
        if strategy == "one_pass" and not spec.softplus:
            return block_bytes(shape, spec, block_rows(shape, spec, options.workspace_bytes))
        rows, cols = tile_sizes(shape, spec, options)
        return scratch_bytes(min(rows, shape.rows), min(cols, shape.cols), shape, spec)

    def scorer(self, device: torch.device, width: int, dtype: torch.dtype, options: TileOptions) -> Searcher:
        """Counts ranks and finds the nearest items tile by tile."""
        return ScoreTile(device, width, dtype, options.workspace_bytes)
