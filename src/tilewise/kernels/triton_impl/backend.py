"""The Triton backend.

What a call allocates above inputs and gradients, with w the workspace: forward, the parts of the statistics (at
most w / 2); backward, G (at most 3 w / 4), a block of float32 row gradients (at most w / 4), and, if the rows need more
than one macro-tile, one float32 accumulator for the column gradients (m x d). Up to 16,384 rows are one macro-tile: then the
columns need no accumulator, and the block of float32 row gradients is n x d. A workspace too small for one tile of each
is exceeded by that tile. A forward that carries exponentials over (see `carried`) takes the gradient of the columns and
G already, and the parts take at most w / 4 beside them. Features that a tensor descriptor cannot read (rows that do not
start at 16-byte addresses, a last axis with a stride) are copied once.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import torch
from torch import Tensor

from tilewise.kernels import keys
from tilewise.kernels.precision import float32_precision, matmul_precision
from tilewise.kernels.spec import Grads, GradStats, Needs, Pair, PairSpec, Stats
from tilewise.kernels.triton_impl import small_step
from tilewise.kernels.triton_impl.carried import Carried
from tilewise.kernels.triton_impl.gradients import Backward
from tilewise.kernels.triton_impl.launch import Call, small_keys
from tilewise.kernels.triton_impl.sizes import interpreted
from tilewise.kernels.triton_impl.statistics import Forward
from tilewise.kernels.triton_impl.tape import Tape, kind_of, taped
from tilewise.kernels.triton_impl.token_statistics import TokenForward
from tilewise.options import TileOptions

STATISTICS = tuple(field.name for field in dataclasses.fields(Stats))
INCOMING = tuple(field.name for field in dataclasses.fields(GradStats))
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
LARGEST_WIDTH = 8192
TAPED_SCORES = 2**34


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
        if spec.of_tokens and (spec.positive == "many" or spec.row_sum):
            return "it has entropies and largest scores beside one positive in each row only"
        if pair.a.device.type == "cuda":
            capability = torch.cuda.get_device_capability(pair.a.device)
            if capability < (8, 0):
                return f"it needs compute capability 8.0, and this card has {capability[0]}.{capability[1]}"
        elif pair.a.dtype == torch.bfloat16 and interpreted():
            return "the interpreter gets bfloat16 products wrong"
        return None

    def forward(self, pair: Pair, spec: PairSpec, options: TileOptions, dense: Tensor | None = None) -> Stats:
        """Statistics, macro-tile by macro-tile. ``dense``: see `Forward`."""
        with on_device(pair.a), torch.no_grad():
            pair = small_keys(pair, spec)
            hits = keys.hits(pair, spec) if spec.positive == "many" else None

            def run(tape: Tape | None) -> tuple[Tensor | None, ...]:
                stats = forward_of(Call.of(pair, spec, options, tape), dense).run()
                return tuple(getattr(stats, name) for name in STATISTICS)

            if host_bound(pair):
                inputs = [*tensors_of(pair, spec), dense]
                values = taped(kind_of(("forward", *how(pair, spec, options)), inputs), inputs, run, pair.a.device)
            else:
                values = run(None)
            stats = Stats(**dict(zip(STATISTICS, values, strict=True)))
            return stats if hits is None else dataclasses.replace(stats, row_hits=hits)

    def forward_carrying(
        self, pair: Pair, spec: PairSpec, options: TileOptions, dense: Tensor | None = None
    ) -> tuple[Stats, Carried | None]:
        """The same, and what spares backward a part of its work, if the gradient of the columns will be asked for."""
        carried = Carried.of(pair, spec)
        if carried is None:
            return self.forward(pair, spec, options, dense), None

        def run(tape: Tape | None) -> tuple[Any, ...]:
            forward = Forward(Call.of(pair, spec, options, tape), carried, dense)
            stats, held = forward.run(), forward.carried
            found = (None,) * 4 if held is None else (held.buffer, held.behind, held.peaks, held.doubt)
            return stats.row_lse, stats.row_pos, stats.row_hits, *found

        with on_device(pair.a), torch.no_grad():
            inputs = [*tensors_of(pair, spec), carried.memory, dense]
            kind = kind_of(("carrying", *how(pair, spec, options)), inputs)
            lse, pos, hits, *found = taped(kind, inputs, run, pair.a.device)
            carried.buffer, behind, carried.peaks, carried.doubt = found
            stats = Stats(row_lse=lse, row_pos=pos, row_hits=hits)
            if behind is None:  # the workspace is too small
                return stats, None
            carried.behind = behind
            return stats, carried

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
        carried: object | None = None,
    ) -> Grads:
        """Gradients: G of a macro-tile, then two products. ``carried`` is given away: its memory is the gradient."""
        out_dtype = grad_dtype or pair.a.dtype
        assert carried is None or isinstance(carried, Carried)
        with on_device(pair.a), torch.no_grad(), matmul_precision(options.precision):
            pair = small_keys(pair, spec)
            if not host_bound(pair):
                return Backward(Call.of(pair, spec, options), stats, grad, needs, out_dtype, carried).run()

            def run(tape: Tape | None) -> tuple[Tensor | None, ...]:
                call = Call.of(pair, spec, options, tape)
                grads = Backward(call, stats, grad, needs, out_dtype, carried).run()
                return grads.a, grads.b, grads.scale, grads.bias

            coming = [getattr(grad, name) for name in INCOMING]
            known = stats.row_lse, stats.row_pos, stats.row_entropy, stats.col_lse
            inputs = [*tensors_of(pair, spec), *known, *coming]
            layout = None
            if carried is not None:
                inputs += [carried.memory, carried.buffer, carried.peaks, carried.doubt]
                layout = carried.inside, carried.behind
            what = "backward", needs, out_dtype, layout, *how(pair, spec, options)
            a, b, scale, bias = taped(kind_of(what, inputs), inputs, run, pair.a.device)
            if carried is not None:
                carried.buffer = None
            return Grads(a=a, b=b, scale=scale, bias=bias)

    @staticmethod
    def loss_and_gradients(
        a: Tensor, b: Tensor, scale: Tensor, share: float, needs: Needs, spec: PairSpec, options: TileOptions
    ) -> tuple[Tensor, Grads]:
        """A small symmetric loss with its gradients in float32: see `small_step`. Called without a graph."""
        with on_device(a):
            number = scale if scale.dtype == torch.float32 else scale.float()
            return small_step.loss_and_gradients(a, b, number, share, needs, spec, options)

    @staticmethod
    def times(
        held: Grads, upstream: Tensor, dtypes: tuple[torch.dtype, torch.dtype, torch.dtype]
    ) -> tuple[Tensor | None, ...]:
        """Those gradients times what comes in, each rounded to its type."""
        with on_device(upstream):
            return small_step.times(held, upstream, dtypes)


def forward_of(call: Call, dense: Tensor | None) -> Forward:
    """The statistics of tokens take kernels of their own, so that others pay nothing for them."""
    return TokenForward(call) if call.spec.of_tokens else Forward(call, dense=dense)


def host_bound(pair: Pair) -> bool:
    """Whether the host's time may count. Beyond, a step takes the GPU a tenth of a second and a tape thousands of entries."""
    return pair.a.shape[0] * pair.b.shape[0] <= TAPED_SCORES


def how(pair: Pair, spec: PairSpec, options: TileOptions) -> tuple[object, ...]:
    """What the launches depend on beside the tensors."""
    one_zero = pair.col_zero is pair.row_zero
    return pair.row_start, pair.col_start, one_zero, spec, options, float32_precision()


def tensors_of(pair: Pair, spec: PairSpec) -> list[Tensor | None]:
    """Every tensor of a pair once: with symmetric scores the columns are the rows, and both may share their zeros."""
    b = None if spec.symmetric else pair.b
    zeros = pair.row_zero, None if pair.col_zero is pair.row_zero else pair.col_zero
    keys = pair.row_key, pair.col_key, pair.row_skip, pair.col_skip
    return [pair.a, b, pair.scale, pair.bias, *keys, *zeros, pair.col_weight]


def on_device(features: Tensor) -> contextlib.AbstractContextManager[object]:
    """Launches go to the device that holds the features."""
    if not features.is_cuda or features.device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(features.device)
