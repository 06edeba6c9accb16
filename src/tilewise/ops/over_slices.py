"""The one op where every rank has all rows and a slice of the columns: nothing travels but vectors.

forward    row_lse = log sum_r exp(row_lse_r),  row_pos = sum_r row_pos_r, ...
           row_entropy = sum_r w_r (row_entropy_r + row_lse - row_lse_r),  w_r = exp(row_lse_r - row_lse)
backward   dA = sum_r dA_r, on every rank;   dB_r and dbias_r stay
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise.kernels.select import choose_backend
from tilewise.kernels.spec import Grads, GradStats, Needs, Pair, PairSpec, Stats
from tilewise.options import TileOptions
from tilewise.ring.blocks import Guard
from tilewise.ring.exchange import Exchange


def merge_slices(exchange: Exchange, pair: Pair, spec: PairSpec, options: TileOptions) -> Stats:
    """Row statistics over the slices of all ranks: one maximum and one sum of vectors, and one more for the columns."""
    guard = Guard()  # the others wait for this rank's part: if it fails, they get NaN
    local = guard.run(lambda: choose_backend(pair, spec, options).forward(pair, spec, options))
    merged = _merge(exchange, local or _spoilt(pair, spec), pair.stat_dtype)
    guard.check()
    return merged


def _spoilt(pair: Pair, spec: PairSpec) -> Stats:
    """In place of statistics that could not be computed: what nobody takes for a number."""
    nan = torch.full((pair.a.shape[0],), torch.nan, dtype=torch.float64, device=pair.a.device)
    has_pos = None if spec.positive == "none" else nan
    return Stats(
        row_lse=nan if spec.row_lse else None,
        row_pos=has_pos,
        row_hits=has_pos,
        row_sum=nan if spec.row_sum else None,
        row_entropy=nan if spec.row_entropy else None,
        # A maximum may pass over NaN, and takes infinity for the largest score.
        row_top=torch.full_like(nan, torch.inf) if spec.row_top else None,
        row_top_col=torch.full_like(nan, -1.0) if spec.row_top else None,
    )


def _merge(exchange: Exchange, local: Stats, dtype: torch.dtype) -> Stats:
    """The statistics of all slices; those of this rank are ``local``."""
    stats = {name: value.double() for name, value in vars(local).items() if value is not None}
    best, col = stats.pop("row_top", None), stats.pop("row_top_col", None)
    if "row_lse" in stats:
        top, own = stats["row_lse"].clone(), stats["row_lse"]
        exchange.max_(top)
        top = torch.where(top == -torch.inf, 0.0, top)
        stats["row_lse"] = (own - top).exp_()
        if "row_entropy" in stats:
            above = torch.where(own == -torch.inf, 0.0, top - own)
            stats["row_entropy"] = stats["row_lse"] * (stats["row_entropy"] + above)
    if stats:
        packed = torch.stack(list(stats.values()))
        exchange.sum_(packed)
        stats = dict(zip(stats, packed, strict=True))
    if "row_lse" in stats:
        total, log_total = stats["row_lse"], stats["row_lse"].log()
        if "row_entropy" in stats:
            entropy = stats["row_entropy"] / total + log_total
            stats["row_entropy"] = torch.where(total == 0.0, 0.0, entropy)
        stats["row_lse"] = log_total + top
    if "row_hits" in stats:
        # A row has one target. Found on two ranks, it was another one on each of them.
        stats["row_pos"] = torch.where(stats["row_hits"] > 1.5, torch.nan, stats["row_pos"])
    # Rows of one packed tensor; an operator's outputs own their memory.
    merged = {name: value.to(dtype, copy=True) for name, value in stats.items()}
    if best is not None and col is not None:
        merged["row_top"], merged["row_top_col"] = _merge_tops(exchange, best, col, dtype)
    return Stats(**merged)


def _merge_tops(exchange: Exchange, best: Tensor, col: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The largest score over the slices of all ranks and its column, the lowest of equal ones. All float64."""
    top = best.clone()
    exchange.max_(top)
    first = torch.where(best == top, -col, -torch.inf)
    exchange.max_(first)
    return top.to(dtype), torch.where(first == -torch.inf, 0.0, -first).long()


def sum_slices(
    exchange: Exchange,
    pair: Pair,
    stats: Stats,
    grad: GradStats,
    needs: Needs,
    spec: PairSpec,
    options: TileOptions,
) -> Grads:
    """This rank's slice with the statistics of all; what belongs to the rows is added up over the ranks."""

    def work() -> Grads:
        backend = choose_backend(pair, spec, options)
        return backend.backward(pair, stats, grad, needs, spec, options, grad_dtype=pair.stat_dtype)

    guard = Guard()  # the others wait for this rank's part: if it fails, they get NaN
    grads = guard.run(work)
    if grads is None:
        nan = torch.full((), torch.nan, dtype=pair.stat_dtype, device=pair.a.device)
        grads = Grads(a=nan.expand(pair.a.shape).clone() if needs.a else None, scale=nan if needs.scale else None)
    if grads.a is not None:
        exchange.sum_(grads.a)
    scale = None if grads.scale is None else grads.scale.double()
    if scale is not None:
        exchange.sum_(scale)
    guard.check()
    return Grads(
        a=None if grads.a is None else grads.a.to(pair.a.dtype),
        b=None if grads.b is None else grads.b.to(pair.b.dtype),
        scale=None if scale is None else scale.to(pair.stat_dtype),
        bias=grads.bias,
    )
