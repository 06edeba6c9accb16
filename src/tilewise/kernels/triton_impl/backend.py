"""The Triton backend.

What a call allocates above inputs and gradients, with w the workspace: forward, the parts of the statistics (at
most w / 2); backward, G (at most 3 w / 4), a block of float32 row gradients (at most w / 4), and, if the rows need more
than one macro-tile, one float32 accumulator for the column gradients (m x d). Up to 16,384 rows are one macro-tile: then the
columns need no accumulator, and the block of float32 row gradients is n x d. A workspace too small for one tile of each
is exceeded by that tile. Features that a tensor descriptor cannot read (rows that do not start at 16-byte addresses, a
last axis with a stride) are copied once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from tilewise.kernels.precision import matmul_precision
from tilewise.kernels.spec import Grads, GradStats, Needs, Pair, PairSpec, Stats
from tilewise.kernels.triton_impl.gradients import Backward
from tilewise.kernels.triton_impl.launch import Call
from tilewise.kernels.triton_impl.sizes import interpreted
from tilewise.kernels.triton_impl.statistics import Forward
from tilewise.options import TileOptions

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
LARGEST_WIDTH = 8192


class TritonBackend:
    """Fused kernels for CUDA devices; in the interpreter, for tests, on the CPU."""

    name = "triton"

    def why_not(self, pair: Pair, spec: PairSpec, options: TileOptions) -> str | None:
        """The first thing that these kernels cannot do."""
        if pair.a.dtype not in DTYPES:
            return f"it multiplies float16, bfloat16 and float32, not {pair.a.dtype}"
        if pair.a.shape[1] > LARGEST_WIDTH:
            return f"it takes at most {LARGEST_WIDTH} features, not {pair.a.shape[1]}"
        if min(pair.a.shape[0], pair.b.shape[0], pair.a.shape[1]) == 0:
            return "there is nothing to launch for an empty side"
        if max(pair.a.shape[0], pair.b.shape[0], pair.row_start, pair.col_start) >= 2**31:
            return "it counts rows and columns in 32 bits"
        if spec.softplus and spec.positive == "many":
            return "it looks for one positive in each row of a sigmoid loss"
        if pair.a.device.type == "cuda":
            capability = torch.cuda.get_device_capability(pair.a.device)
            if capability < (8, 0):
                return f"it needs compute capability 8.0, and this card has {capability[0]}.{capability[1]}"
        elif pair.a.dtype == torch.bfloat16 and interpreted():
            return "the interpreter gets bfloat16 products wrong"
        return None

    def forward(self, pair: Pair, spec: PairSpec, options: TileOptions) -> Stats:
        """Statistics, macro-tile by macro-tile."""
        with on_device(pair.a), torch.no_grad():
            return Forward(Call.of(pair, spec, options)).run()

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
    ) -> Grads:
        """Gradients: G of a macro-tile, then two products."""
        with on_device(pair.a), torch.no_grad(), matmul_precision(options.precision):
            call = Call.of(pair, spec, options)
            return Backward(call, stats, grad, needs, grad_dtype or pair.a.dtype).run()


@contextlib.contextmanager
def on_device(features: Tensor) -> Iterator[None]:
    """Launches go to the device that holds the features."""
    with torch.cuda.device(features.device) if features.is_cuda else contextlib.nullcontext():
        yield
