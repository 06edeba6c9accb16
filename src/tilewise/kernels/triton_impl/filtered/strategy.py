"""The strategy `filtered` of the Triton backend: the memory that it takes, and how the exact case is handled.

What a call allocates above inputs and gradients, with w the workspace: forward, the plan (at most w / 2), a chunk of the
columns in their new order (at most 3 w / 8) and the masses of a block of rows (at most w / 4); backward, G of some entries
(w / 8, or that of one tile), the row gradients of some entries (w / 2), and one float32 accumulator for the row gradients.

A large call first probes a sample of its rows (at most w / 2, freed before the masses), to find whether they keep too many
entries. The result, `keep_all`, stays on the device. Forward launches the kernels of both cases, those of the filter and
those of the exact loss (`two_pass`), which also saves exponentials. The kernels of one case return at once. The host reads
`keep_all` at the start of backward, together with the number of kept entries.
"""

from __future__ import annotations

import torch

from tilewise.kernels.backend import FilterGroup
from tilewise.kernels.precision import matmul_precision
from tilewise.kernels.spec import FilterPlan, Grads, GradStats, Needs, Pair, PairShape, PairSpec, Stats
from tilewise.kernels.triton_impl.filtered.backward import FilterBackward
from tilewise.kernels.triton_impl.filtered.forward import FilterForward, sample_rows
from tilewise.kernels.triton_impl.scores import on_device
from tilewise.kernels.triton_impl.two_pass.saved import SavedColumns
from tilewise.options import TileOptions


class TritonFilter:
    """The capability `filtered` of the Triton backend."""

    def sample_rows(self, shape: PairShape, options: TileOptions) -> int:
        """The number of rows that a call of this shape probes."""
        return sample_rows(shape, options)

    def forward(
        self, pair: Pair, spec: PairSpec, options: TileOptions, *, group: FilterGroup | None = None
    ) -> tuple[Stats, FilterPlan]:
        """The statistics of all pairs, and the plan of the entries that backward drops."""
        with on_device(pair.a), torch.no_grad():
            return FilterForward(pair, spec, options, group=group).run()[:2]

    def forward_saving(
        self, pair: Pair, spec: PairSpec, options: TileOptions, *, group: FilterGroup | None = None
    ) -> tuple[Stats, FilterPlan, SavedColumns | None]:
        """`forward`, and the saved exponentials of the exact case."""
        with on_device(pair.a), torch.no_grad():
            return FilterForward(pair, spec, options, save=True, group=group).run()

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
        saved: object | None = None,
        grad_dtype: torch.dtype | None = None,
    ) -> Grads | None:
        """Gradients of the kept entries. The host waits once, for their number.

        If the probe in forward found that the exact case is faster, the host has that answer already and does not wait.
        """
        assert saved is None or isinstance(saved, SavedColumns)
        grads = None
        if not (pair.a.is_cuda and torch.cuda.is_current_stream_capturing()):
            if saved is not None and saved.probed_exact is not None and saved.probed_exact():
                return None
            with on_device(pair.a), torch.no_grad(), matmul_precision(options.precision):
                grads = FilterBackward(pair, spec, options).run(stats, plan, grad, needs, saved, grad_dtype)
        if grads is None and saved is not None:
            saved.forget()
        return grads
