"""The torch backend: plain PyTorch, on any device that has float64 and in any floating type. It never refuses."""

from __future__ import annotations

import torch

from tilewise.kernels.ranks import Scorer
from tilewise.kernels.spec import HALF_TYPES, Backend, Grads, GradStats, Needs, Pair, PairShape, PairSpec, Stats
from tilewise.kernels.torch_impl import two_pass
from tilewise.kernels.torch_impl.filtered import TorchFilter
from tilewise.kernels.torch_impl.one_pass import TorchOnePass
from tilewise.kernels.torch_impl.ranks import ScoreTile
from tilewise.options import TileOptions


class TorchBackend(Backend):
    """Plain PyTorch."""

    name = "torch"
    one_pass = TorchOnePass()
    filtered = TorchFilter()
    offers_ranks = True

    def forward(self, pair: Pair, spec: PairSpec, options: TileOptions) -> Stats:
        """The statistics that ``spec`` asks for, tile by tile."""
        return two_pass.forward(pair, spec, options)

    def backward(
        self,
        pair: Pair,
        stats: Stats,
        grad: GradStats,
        needs: Needs,
        spec: PairSpec,
        options: TileOptions,
        *,
        grad_dtype: torch.dtype | None = None,
        saved: object | None = None,
    ) -> Grads:
        """Gradients from tiles that are computed a second time. Nothing is ever saved."""
        return two_pass.backward(pair, stats, grad, needs, spec, options, grad_dtype or pair.a.dtype)

    def accumulator_bytes(self, shape: PairShape, needs: Needs, spec: PairSpec, options: TileOptions) -> int:
        """Sums over the columns (and over symmetric rows) are float32 for half types."""
        if shape.dtype not in HALF_TYPES:
            return 0
        summed = shape.rows if spec.symmetric else shape.cols * needs.b
        return 4 * summed * shape.width

    def scorer(self, device: torch.device, width: int, dtype: torch.dtype, options: TileOptions) -> Scorer:
        """Ranks counted tile by tile."""
        return ScoreTile(device, width, dtype, options.workspace_bytes)
