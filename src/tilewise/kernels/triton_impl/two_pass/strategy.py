"""The strategy `two_pass` of the Triton backend: statistics in forward, scores recomputed in backward.

What a call allocates above inputs and gradients, with w the workspace: forward, the partial sums of the statistics (at
most w / 2); backward, G (at most 3 w / 4), a block of float32 row gradients (at most w / 4), and, if the rows need more
than one macro-tile, one float32 accumulator for the column gradients (m x d). Up to 16,384 rows are one macro-tile: then
the columns need no accumulator, and the block of float32 row gradients is n x d. A workspace too small for one tile of
each is exceeded by that tile. A forward that saves columns (see `saved`) allocates the gradient of the columns and a buffer
already, and the partial sums take at most w / 4 beside them. Features that a tensor descriptor cannot read (rows that do
not start at 16-byte addresses, a last axis with a stride) are copied once. So are float32 features in TF32, where loads
do not round (`tf32`).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from tilewise.kernels import keys
from tilewise.kernels.precision import matmul_precision
from tilewise.kernels.spec import Grads, GradStats, Needs, Pair, PairSpec, Stats, wanted_names
from tilewise.kernels.triton_impl.buffers import Buffer
from tilewise.kernels.triton_impl.scores import Scores, on_device, run_program, small_keys, without_graph
from tilewise.kernels.triton_impl.two_pass.backward import (
    Backward,
    backward_tensors,
    factors_of,
    folded_gradients,
    folded_picks,
    spread,
)
from tilewise.kernels.triton_impl.two_pass.forward import Forward
from tilewise.kernels.triton_impl.two_pass.guide import guided_forward
from tilewise.kernels.triton_impl.two_pass.saved import SavedColumns
from tilewise.options import TileOptions


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
        names = [name for name in wanted_names(spec) if not (name == "num_positives" and spec.positive == "many")]

        def build(scores: Scores, more: dict[str, Buffer]) -> list[Any]:
            held = None if saved is None else saved.in_program(more)
            if spec.guide != "none":
                # The memory of the column gradients is unused until backward.
                stats, held = guided_forward(scores, options.workspace_bytes + (pair.b.nbytes if save else 0), held)
            else:
                work = Forward(scores, held, beside_plan)
                stats, held = work.run(), work.saved
            found: tuple[Any, ...] = (None,) * 6
            if held is not None:
                found = held.cols, held.behind, held.buffer, held.peaks, held.needs_repair, held.reference
            return [*(stats[name] for name in names), *found]

        more = {} if saved is None else saved.tensors
        layout = None if saved is None else (saved.cols, saved.inside, saved.tile)
        values = run_program(("forward", save, beside_plan, layout), pair, spec, options, more, build)
        stats = Stats(**dict(zip(names, values, strict=False)))
        if spec.positive == "many":
            stats = dataclasses.replace(stats, num_positives=keys.num_positives(pair, spec))
        cols, behind, buffer, peaks, needs_repair, reference = values[len(names) :]
        if saved is None or behind is None:  # without saved columns, or the workspace is too small for them
            return stats, None
        saved.cols, saved.behind, saved.buffer, saved.peaks = cols, behind, buffer, peaks
        saved.needs_repair, saved.reference = needs_repair, reference
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
        g_factor, product_factor = factors_of(pair, grad, options)
        pair, stats, grad = folded_picks(pair, stats, grad, spec)
        folded = folded_gradients(stats, grad)
        more = backward_tensors(stats, folded, spec) | {"g_factor": g_factor, "product_factor": product_factor}
        layout = None
        if saved is not None:
            saved.sort_positives(pair, folded)
            more |= saved.tensors
            layout = saved.cols, saved.inside, saved.behind, saved.tile, saved.scores

        def build(scores: Scores, more: dict[str, Buffer]) -> tuple[Any, ...]:
            held = None if saved is None else saved.in_program(more)
            return Backward(scores, more, needs, out_dtype, held).run()

        a, b, scale, bias = run_program(("backward", needs, out_dtype, layout), pair, spec, options, more, build)
        if saved is not None:
            saved.buffer = None
        return Grads(a=a, b=b, scale=scale, bias=spread(bias, pair.b.shape[0]))
