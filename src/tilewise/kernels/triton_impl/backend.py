"""The Triton backend: fused kernels for CUDA devices; in the interpreter, for tests, on the CPU."""

from __future__ import annotations

import textwrap
from typing import Any

import torch

from tilewise.kernels.backend import Backend
from tilewise.kernels.ranks import Scorer
from tilewise.kernels.spec import (
    HALF_TYPES,
    GradStats,
    Needs,
    Pair,
    PairShape,
    PairSpec,
    RowWeights,
    Stats,
    wanted_stats,
)
from tilewise.kernels.triton_impl.filtered.strategy import TritonFilter
from tilewise.kernels.triton_impl.nearest import FusedSearcher
from tilewise.kernels.triton_impl.one_pass.strategy import TritonOnePass
from tilewise.kernels.triton_impl.scores import describing
from tilewise.kernels.triton_impl.sizes import gradient_sizes, interpreted
from tilewise.kernels.triton_impl.small.strategy import TritonSmall
from tilewise.kernels.triton_impl.two_pass import strategy as two_pass
from tilewise.kernels.triton_impl.two_pass.macro_tile import macro_tile
from tilewise.options import TileOptions

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
LARGEST_WIDTH = 8192
TOKEN_STATS = {"row_entropy", "row_sum_sq", "row_top", "row_top_col", "row_picked"}
GUIDE_STATS = {"guide_lse", "row_kl", "row_reverse_kl", "row_jsd", "row_mix_kl", "row_hot_lse"}


def why_not_here(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the kernels cannot run on this device with this type, or None."""
    if dtype not in DTYPES:
        return f"it multiplies float16, bfloat16 and float32, not {dtype}"
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability < (8, 0):
            return f"it needs compute capability 8.0, and this card has {capability[0]}.{capability[1]}"
    elif dtype == torch.bfloat16 and interpreted():
        return "the interpreter gets bfloat16 products wrong"
    return None


class TritonBackend(Backend):
    """Fused kernels."""

    name = "triton"
    one_pass, small = TritonOnePass(), TritonSmall()
    filtered = TritonFilter()
    offers_ranks = offers_search = True
    backward = staticmethod(two_pass.backward)
    statistics = (
        frozenset({"row_lse", "row_pos", "num_positives", "row_softplus", "row_sum", "col_lse"})
        | TOKEN_STATS
        | GUIDE_STATS
    )

    def why_not(self, shape: PairShape, spec: PairSpec, options: TileOptions) -> str | None:
        """The first reason why these kernels cannot serve the call, or None."""
        if reason := why_not_here(shape.device, shape.dtype):
            return reason
        if (width := max(shape.width, shape.guide_width)) > LARGEST_WIDTH:
            return f"it takes at most {LARGEST_WIDTH} features, not {width}"
        if shape.empty:
            return "there is nothing to launch for an empty side"
        if max(shape.rows, shape.cols, shape.last_start) >= 2**31:
            return "it counts rows and columns in 32 bits"
        if spec.softplus and spec.positive == "many":
            return "it looks for one positive in each row of a sigmoid loss"
        if spec.row_picked and (spec.positive == "many" or shape.has_skips):
            return "it picks columns of rows with at most one positive and no excluded pairs"
        if spec.guide != "none" and (spec.row_picked or shape.has_row_scale):
            return "a guided tile has neither picked columns nor a scale of each row"
        return None

    def can_skip(self, spec: PairSpec) -> bool:
        """True for statistics of rows without a guide: their kernels read ``Pair.only_if``."""
        return spec.guide == "none" and not (spec.col_lse or spec.symmetric)

    def forward(self, pair: Pair, spec: PairSpec, options: TileOptions) -> Stats:
        """Statistics, macro-tile by macro-tile."""
        return two_pass.forward(pair, spec, options)[0]

    def forward_saving(self, pair: Pair, spec: PairSpec, options: TileOptions) -> tuple[Stats, object | None]:
        """`forward`, and the exponentials or scores of some columns."""
        return two_pass.forward(pair, spec, options, save=True)

    def accumulator_bytes(self, shape: PairShape, needs: Needs, spec: PairSpec, options: TileOptions) -> int:
        """Half-type gradients are summed in float32, unless one macro-tile holds all rows."""
        if shape.dtype not in HALF_TYPES:
            return 0
        if spec.symmetric:
            return 4 * shape.rows * shape.width
        sizes = gradient_sizes(shape.device, shape.dtype, shape.width)
        rows, _ = macro_tile(shape, spec, sizes, options)
        return 4 * shape.width * (shape.cols if needs.b and rows < shape.rows else min(rows, shape.rows))

    def workspace_bytes(self, shape: PairShape, spec: PairSpec, options: TileOptions, strategy: str) -> int:
        """What is kept of each score and of each feature at the same time, at most; see `Backend`.

        G and saved exponentials take up to 4 bytes each, the stored scores of a guide 8, the parts of all tiles 4.
        """
        rows, cols = (-(-size // 256) * 256 for size in (shape.rows, shape.cols))
        return min(options.workspace_bytes, 20 * rows * cols + 8 * (rows + cols) * shape.width)

    def describe(
        self,
        pair: Pair,
        weights: RowWeights,
        needs: Needs,
        spec: PairSpec,
        options: TileOptions,
        *,
        strategy: str,
        save: bool,
    ) -> tuple[str, int] | None:
        """The programs of forward and backward, which are written for the stand-ins and not run."""
        if strategy == "filtered":  # its steps depend on numbers
            return None
        saved: Any = None
        with describing() as programs:
            if strategy == "one_pass":
                loss, found = self.one_pass.forward(pair, weights, needs, spec, options, pair.a.shape[0])
                self.one_pass.backward(found, pair, loss, needs, spec, options, pair.shape, overwrite=True)
            else:
                stats, saved = two_pass.forward(pair, spec, options, save=save)
                if any(needs):
                    names = [stat.name for stat in wanted_stats(spec) if stat.gradient]
                    grad = GradStats(**{name: getattr(stats, name) for name in names})
                    two_pass.backward(pair, stats, grad, needs, spec, options, saved=saved)
        text = "\n".join(
            f"{name}\n{textwrap.indent(str(program), '  ')}"
            for name, program in zip(("forward", "backward"), programs, strict=False)
        )
        first, *later = programs
        memory = 0 if saved is None else saved.memory.nbytes  # it becomes dB
        held = memory + first.output_bytes
        return text, max(first.peak_bytes + memory, *(held + program.peak_bytes for program in later), 0)

    def why_no_ranks(self, device: torch.device, width: int, dtype: torch.dtype) -> str | None:
        """Depends only on what all ranks of a group share."""
        if reason := why_not_here(device, dtype):
            return reason
        if not 0 < width <= LARGEST_WIDTH:
            return f"it takes 1 to {LARGEST_WIDTH} features, not {width}"
        return None

    def scorer(self, device: torch.device, width: int, dtype: torch.dtype, options: TileOptions) -> Scorer:
        """A scorer that stores no scores, and finds the nearest items."""
        return FusedSearcher(device, width, dtype, options)
