"""The strategy `two_pass` of the Triton backend: statistics in forward, scores recomputed in backward.

What a call allocates above inputs and gradients, with w the workspace: forward, the partial sums of the statistics (at
most w / 2); backward, G (at most 3 w / 4), a block of float32 row gradients (at most w / 4), and, if the rows need more
than one macro-tile, one float32 accumulator for the column gradients (m x d). Up to 16,384 rows are one macro-tile: then
the columns need no accumulator, and the block of float32 row gradients is n x d. A workspace too small for one tile of
each is exceeded by that tile. A forward that saves columns (see `saved`) allocates the gradient of the columns and a buffer
already, and the partial sums take at most w / 4 beside them. Features that a tensor descriptor cannot read (rows that do
not start at 16-byte addresses, a last axis with a stride) are copied once.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from tilewise.kernels import keys
from tilewise.kernels.precision import matmul_precision
from tilewise.kernels.spec import Grads, GradStats, Needs, Pair, PairSpec, Stats
from tilewise.kernels.triton_impl.launch.call import Call, on_device, replayed, small_keys, without_graph
from tilewise.kernels.triton_impl.two_pass.backward import (
    Backward,
    factors_of,
    folded_gradients,
    folded_picks,
    spread,
)
from tilewise.kernels.triton_impl.two_pass.forward import Forward
from tilewise.kernels.triton_impl.two_pass.guide import guided_forward
from tilewise.kernels.triton_impl.two_pass.saved import SavedColumns
from tilewise.options import TileOptions

STATISTICS = tuple(field.name for field in dataclasses.fields(Stats))


def forward(
    pair: Pair, spec: PairSpec, options: TileOptions, *, save: bool = False, beside_plan: bool = False
) -> tuple[Stats, SavedColumns | None]:
    """Statistics, macro-tile by macro-tile.

    With ``save`` also the exponentials or scores of some columns, where a backward for both sides can use them.
    ``beside_plan``: a filter's plan takes the workspace that could hold more of them.

    If ``pair.only_if`` is not 1, only the scores of the positives are computed, nothing is saved, and the log-sum-exps
    of the rows are not written.
    """
    if options.batch_invariant:
        # With this statistic, exponentials are relative to the largest score of each row, and nothing needs repair.
        spec = dataclasses.replace(spec, row_top=True)
    with on_device(pair.a), without_graph():
        saved = SavedColumns.of(pair, spec) if save else None
        pair = small_keys(pair, spec)

        def run(call: Call) -> tuple[Any, ...]:
            if spec.guide != "none":
                # The memory of the column gradients is unused until backward.
                stats, held = guided_forward(call, options.workspace_bytes + (pair.b.nbytes if save else 0), saved)
            else:
                work = Forward(call, saved, beside_plan)
                stats, held = work.run(), work.saved
            found: tuple[Any, ...] = (None,) * 5
            if held is not None:
                found = held.buffer, held.behind, held.peaks, held.needs_repair, held.reference
            return *(getattr(stats, name) for name in STATISTICS), *found

        memory = None if saved is None else saved.memory
        values = replayed(("forward", beside_plan), pair, spec, options, [memory], run)
        stats = Stats(**dict(zip(STATISTICS, values, strict=False)))
        if spec.positive == "many":
            stats = dataclasses.replace(stats, num_positives=keys.num_positives(pair, spec))
        buffer, behind, peaks, needs_repair, reference = values[len(STATISTICS) :]
        if saved is None or behind is None:  # without saved columns, or the workspace is too small for them
            return stats, None
        saved.buffer, saved.behind, saved.peaks, saved.needs_repair = buffer, behind, peaks, needs_repair
        saved.reference = reference
        return stats, saved


def backward(
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
    """Gradients: G of a macro-tile, then two products. The memory of ``saved`` becomes the gradient of the columns."""
    out_dtype = grad_dtype or pair.a.dtype
    assert saved is None or isinstance(saved, SavedColumns)
    with on_device(pair.a), without_graph(), matmul_precision(options.precision):
        pair = small_keys(pair, spec)
        factors = factors_of(pair, grad, options)
        pair, stats, grad = folded_picks(pair, stats, grad, spec)
        folded = folded_gradients(stats, grad)

        def run(call: Call) -> tuple[Tensor | None, ...]:
            grads = Backward(call, stats, folded, needs, out_dtype, saved, factors).run()
            return grads.a, grads.b, grads.scale, grads.bias

        known = [stats.row_lse, stats.row_pos, stats.col_lse, stats.row_picked, *vars(folded).values(), *factors]
        layout = None
        if saved is not None:
            saved.sort_positives(pair, folded)
            known += [saved.memory, saved.buffer, saved.peaks, saved.needs_repair, saved.reference]
            known += saved.positives or ()
            layout = saved.inside, saved.behind
        a, b, scale, bias = replayed(("backward", needs, out_dtype, layout), pair, spec, options, known, run)
        if saved is not None:
            saved.buffer = None
        return Grads(a=a, b=b, scale=scale, bias=spread(bias, pair.b.shape[0]))
