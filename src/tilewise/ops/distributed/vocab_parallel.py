"""Calls where every rank has all rows and a shard of the columns (vocabulary-parallel). Columns and scores stay.

forward    the statistics of all ranks, vectors, are gathered and merged in rank order
backward   dA and dscale are summed over the ranks;   dB and dbias of a shard stay on its rank

A backend may save work of forward for backward (`Backend.forward_saving`). The Triton backend saves nothing for a
shard of the columns, so a call takes four products. There is no one pass, which would take three: gradients need the
log-sum-exp over all ranks, and so a merge for each block of rows.

A filter chooses on each rank among its own tiles, after the merge (`filter_plan`), or it computes all of them. With
``batch_invariant`` each rank computes blocks of rows of a fixed size, and dA is summed in rank order: an all-reduce
chooses its algorithm, and with it the order, by the size of the tensor.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tilewise.kernels.backend import FilterGroup, GroupFilter
from tilewise.kernels.registry import choose_backend
from tilewise.kernels.spec import Backward, FilterPlan, Grads, Pair, PairSpec, Statistic, Stats, wanted_stats
from tilewise.ops.row_blocks import block_rows, in_blocks
from tilewise.options import TileOptions
from tilewise.ring.blocks import Guard
from tilewise.ring.exchange import TOKENS, Exchange


def local_forward(pair: Pair, spec: PairSpec, options: TileOptions, *, save: bool) -> tuple[Stats, object | None]:
    """The statistics over this rank's columns, and with ``save`` what `Backend.forward_saving` saved."""
    backend = in_blocks(choose_backend(pair.shape, spec, options), options)
    return backend.forward_saving(pair, spec, options) if save else (backend.forward(pair, spec, options), None)


def local_backward(job: Backward, plan: FilterPlan | None = None, saved: object | None = None, **more: Any) -> Grads:
    """The gradients over this rank's columns; with a plan, those of the filter if it is faster."""
    backend = choose_backend(job.pair.shape, job.spec, job.options)
    if plan is not None:
        assert isinstance(backend.filtered, GroupFilter)
        pair, stats, grad, needs, spec, options = job
        grads = backend.filtered.backward(pair, stats, plan, grad, needs, spec, options, saved=saved, **more)
        if grads is not None:
            return grads
    return in_blocks(backend, job.options).backward(*job, saved=saved, **more)


def merged_forward(
    exchange: Exchange, pair: Pair, spec: PairSpec, options: TileOptions, *, save: bool
) -> tuple[Stats, object | None]:
    """Row statistics over the shards of all ranks, bitwise the same on every rank, and what this rank saved."""
    guard = Guard()  # if this rank fails, it still takes part in the all-reduce, with NaN, and raises afterwards
    local, saved = guard.run(lambda: local_forward(pair, spec, options, save=save)) or (None, None)
    merge = _Merge(exchange, pair, wanted_stats(spec))
    stats = merge(local, pair.a.shape[0])
    guard.check()
    return stats, saved


def filtered_forward(
    exchange: Exchange, cols: list[int], pair: Pair, spec: PairSpec, options: TileOptions, *, save: bool
) -> tuple[Stats, FilterPlan, object | None]:
    """`merged_forward` with the filter, and the plan of this rank. ``cols``: the number of columns of each rank."""
    chosen = choose_backend(pair.shape, spec, options).filtered
    assert isinstance(chosen, GroupFilter)
    merge, sampled = _Merge(exchange, pair, wanted_stats(spec)), _Merge(exchange, pair, wanted_stats(_of_sample(spec)))
    sample = chosen.sample_rows(pair.shape._replace(cols=max(cols)), options)
    left = [(sampled, sample), (merge, pair.a.shape[0])] if sample else [(merge, pair.a.shape[0])]

    def merged(stats: Stats | None) -> Stats:
        each, rows = left.pop(0)
        return each(stats, rows)

    def work() -> tuple[Stats, FilterPlan, object | None]:
        group = FilterGroup(exchange.world, sum(cols), sample, merged)
        if save:
            return chosen.forward_saving(pair, spec, options, group=group)
        return *chosen.forward(pair, spec, options, group=group), None

    guard = Guard()  # if this rank fails, it still takes part in the merges that are left, with NaN
    found = guard.run(work)
    while left:
        merged(None)
    guard.check()
    assert found is not None
    return found


def _of_sample(spec: PairSpec) -> PairSpec:
    """The statistics on which a probe decides."""
    return dataclasses.replace(spec, row_picked=False, row_top=False)


class _Merge:
    """Merges statistics of rows over the columns of all ranks. A collective: vectors are gathered, and nothing else."""

    def __init__(self, exchange: Exchange, pair: Pair, wanted: tuple[Statistic, ...]) -> None:
        self.exchange, self.wanted = exchange, wanted
        self.sizes = [pair.shape.picks if stat.of_picks else 1 for stat in wanted]
        self.kind, self.device = pair.stat_dtype, pair.a.device

    def __call__(self, local: Stats | None, rows: int) -> Stats:
        """The merged statistics, bitwise the same on every rank. A rank that failed passes None, and all get NaN.

        A statistic that this rank lacks is 0: the positives of a sample.
        """
        exchange = self.exchange
        # An all-gather as one all-reduce: every rank fills its own part of zeros.
        size = exchange.world, sum(self.sizes), rows
        gathered = torch.zeros(size, dtype=torch.float64, device=self.device)
        for stat, mine in zip(self.wanted, self._split(gathered[exchange.rank]), strict=True):
            if local is None:
                mine.fill_(torch.nan)
            elif (value := getattr(local, stat.name)) is not None:
                mine.copy_(value)
        exchange.sum_(gathered)
        return self._merged(gathered)

    def _split(self, values: Tensor) -> list[Tensor]:
        """Each statistic, as a view of the (vectors, rows) of one rank: a vector, or K for the picked columns."""
        parts = zip(self.wanted, values.split(self.sizes), strict=True)
        return [part.T if stat.of_picks else part[0] for stat, part in parts]

    def _merged(self, gathered: Tensor) -> Stats:
        """``gathered`` is (ranks, vectors, rows), float64; see `_split`."""

        def of_rank(values: Tensor) -> Stats:
            # Indices below 2**53 are exact in float64. NaN, from a rank that failed, has no index.
            parts = zip(self.wanted, self._split(values), strict=True)
            return Stats(**{stat.name: v.nan_to_num(-1.0).long() if stat.integer else v for stat, v in parts})

        merged = functools.reduce(Stats.merge, map(of_rank, gathered))
        if merged.num_positives is not None and merged.row_pos is not None:
            # A target is in one shard. If two ranks found one, they were given different targets.
            wrong = merged.num_positives > 1
            merged = dataclasses.replace(merged, row_pos=torch.where(wrong, torch.nan, merged.row_pos))
        return Stats(
            **{
                stat.name: getattr(merged, stat.name).to(torch.int64 if stat.integer else self.kind, copy=True)
                for stat in self.wanted
            }
        )


def sum_rows(
    exchange: Exchange, grad: Tensor, job: Backward, group_name: str, rows: int, kept: Tensor | None
) -> Tensor:
    """The gradient of the rows, summed over the ranks; with a `TokensGroup` of this rank's tokens, else zeros.

    ``kept``: which of all ``rows`` these are; None for all.
    """
    if job.options.batch_invariant:
        for part in grad.split(block_rows(grad.device, job.options)):
            exchange.sum_(part, in_order=True)
        return grad
    if not group_name.startswith(TOKENS) or rows == 0:
        exchange.sum_(grad)
        return grad
    tokens, inner, each = map(int, group_name.split(" of ")[0].removeprefix(TOKENS).split())
    every = grad if kept is None else grad.new_zeros((rows, grad.shape[1])).index_copy_(0, kept, grad)
    every = every.view(-1, tokens, inner * grad.shape[1])
    parts = every.new_zeros((exchange.world, len(every), each, every.shape[2]))
    owned = [slice(min(rank * each, tokens), min((rank + 1) * each, tokens)) for rank in range(exchange.world)]
    for part, own in zip(parts, owned, strict=True):
        part[:, : own.stop - own.start] = every[:, own]
    own = owned[exchange.rank]
    mine = exchange.scatter_sum(parts)[:, : own.stop - own.start]
    found = torch.zeros_like(every)
    found[:, own] = mine
    found = found.view(rows, grad.shape[1])
    return found if kept is None else found[kept]


def summed_backward(
    exchange: Exchange,
    job: Backward,
    sum_rows: Callable[[Tensor], Tensor],
    plan: FilterPlan | None = None,
    saved: object | None = None,
) -> Grads:
    """Gradients of this rank's shard, from the statistics of all. Those of rows and scale are summed over the ranks."""
    pair, needs = job.pair, job.needs
    guard = Guard()  # if this rank fails, it still takes part in the all-reduces, with NaN, and raises afterwards
    grads = guard.run(lambda: local_backward(job, plan, saved, grad_dtype=pair.stat_dtype))
    if grads is None:
        nan = torch.full((), torch.nan, dtype=pair.stat_dtype, device=pair.a.device)
        grads = Grads(a=nan.expand(pair.a.shape).clone() if needs.a else None, scale=nan if needs.scale else None)
    if grads.a is not None:
        grads.a = sum_rows(grads.a)
    scale = None if grads.scale is None else grads.scale.double()
    if scale is not None:
        exchange.sum_(scale)
    guard.check()
    return dataclasses.replace(grads, scale=scale)
