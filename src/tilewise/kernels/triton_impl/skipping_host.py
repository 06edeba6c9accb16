"""The filter of the Triton backend: what its kernels are launched with, and how much memory that takes.

What a call allocates above inputs and gradients, with w the workspace: forward, the plan (at most w / 2), a chunk of the
columns in their new order (at most 3 w / 8) and the masses of a block of rows (at most w / 4); backward, G of some pairs
(w / 8, or one tile's), the row gradients of some pairs (w / 2), and one float32 accumulator for the row gradients.

A large call looks at a sample of its rows first (at most w / 2, in memory that is needed later anyway, or before it is):
how many pairs would they keep? The answer, `dense`, stays on the device. Both ways are launched, this one and the exact loss's (`statistics`), with what it
carries over to backward (`carried`); the kernels of one of them find that there is nothing to do. The host learns which
at the start of backward, where it waits for the number of pairs anyway. What is carried lies in the memory of the columns'
gradient either way, and if nothing was, it is in doubt.

A small call is computed exactly from the start.
"""

from __future__ import annotations

import torch

from tilewise.kernels.filter import FilterPlan
from tilewise.kernels.precision import matmul_precision
from tilewise.kernels.spec import Grads, GradStats, Needs, Pair, PairSpec, Stats
from tilewise.kernels.triton_impl.backend import on_device
from tilewise.kernels.triton_impl.carried import Carried
from tilewise.kernels.triton_impl.skipping_backward import SkipBackward
from tilewise.kernels.triton_impl.skipping_forward import Sampled, SkipForward
from tilewise.options import TileOptions

WORTH_FILTERING = 2**40  # multiply-adds of one product; below, launches cost a GPU more than is saved


class TritonFilter:
    """Fused kernels for CUDA devices; in the interpreter, for tests, on the CPU."""

    def leaves_out(self, pair: Pair) -> bool:
        """Whether anything may be left out of this call: of a small one nothing is, because that is faster."""
        return not (pair.a.is_cuda and pair.a.shape[0] * pair.b.shape[0] * pair.a.shape[1] < WORTH_FILTERING)

    def begin(self, pair: Pair, spec: PairSpec, options: TileOptions) -> Sampled | None:
        """The order of the columns, and what a sample of the rows says; those without a positive have no say."""
        if not self.leaves_out(pair):
            return None
        with on_device(pair.a), torch.no_grad():
            return SkipForward(pair, spec, options).begin()

    def forward(
        self, pair: Pair, spec: PairSpec, options: TileOptions, begun: object | None = None
    ) -> tuple[Stats, FilterPlan]:
        """Statistics of all pairs, and which of them backward may leave out."""
        assert begun is None or isinstance(begun, Sampled)
        with on_device(pair.a), torch.no_grad():
            return SkipForward(pair, spec, options).run(begun)[:2]

    def forward_carrying(
        self, pair: Pair, spec: PairSpec, options: TileOptions, begun: object | None = None
    ) -> tuple[Stats, FilterPlan, Carried | None]:
        """The same, and what is carried over if so many pairs are kept that backward computes all of them."""
        assert begun is None or isinstance(begun, Sampled)
        with on_device(pair.a), torch.no_grad():
            return SkipForward(pair, spec, options, carry=True).run(begun)

    def backward(
        self,
        pair: Pair,
        stats: Stats,
        plan: FilterPlan,
        grad: GradStats,
        needs: Needs,
        spec: PairSpec,
        options: TileOptions,
        *,
        carried: object | None = None,
    ) -> Grads | None:
        """Gradients of the kept pairs. The host waits once, for how many there are.

        If a sample of the rows said in forward that there are too many, that has long arrived, and it need not wait.
        """
        if not self.leaves_out(pair) or (pair.a.is_cuda and torch.cuda.is_current_stream_capturing()):
            return None
        assert carried is None or isinstance(carried, Carried)
        if carried is not None and carried.asked is not None and carried.asked():
            return None
        with on_device(pair.a), torch.no_grad(), matmul_precision(options.precision):
            return SkipBackward(pair, stats, plan, grad, needs, spec, options, carried).run()
