"""Derivatives of the statistics along directions of the features, the scale and the bias, tile by tile.

With directions va, vb, vs and vt of a, b, scale and bias, a score x, before soft cap and row scale, changes by

    dx_ij = scale * (<va_i, b_j> + <a_i, vb_j>) + vs * <a_i, b_j> + vt_j

and a statistic S of row i by

    dS_i = sum_j G_ij dx_ij        G_ij = dS_i / dx_ij, the tile of `two_pass.backward` where S alone has a gradient, 1

Likewise a statistic of column j, with the sum over i.

Axes: r, c rows and columns of one tile; i, j their slices.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from tilewise.kernels.precision import matmul_precision
from tilewise.kernels.spec import Backward, Grads, GradStats, Needs, Pair, PairSpec, Stats, wanted_stats
from tilewise.kernels.torch_impl.tile_keys import TileKeys
from tilewise.kernels.torch_impl.tiles import Tiles
from tilewise.kernels.torch_impl.two_pass import TileWeights, forward
from tilewise.options import TileOptions


def derivatives(
    pair: Pair, along: Grads, names: Sequence[str], spec: PairSpec, options: TileOptions
) -> tuple[Stats, Stats]:
    """The statistics of ``spec``, and the derivatives of those in ``names``, float64. A direction of None is zero."""
    if spec.symmetric:  # all pairs, each once
        along, spec = dataclasses.replace(along, b=along.a), dataclasses.replace(spec, symmetric=False)
    with matmul_precision(options.precision), torch.no_grad():
        stats = forward(pair, spec, options)
        # A tile takes half of the workspace, because its changes and their operands take as much as its scores.
        half = dataclasses.replace(options, workspace_mib=max(options.workspace_bytes // 2**21, 1))
        tiles = Tiles(pair, spec, half)
        changes = [_Change(tiles, stats, name, options) for name in names]
        for i, j in tiles:
            dx_rc = _score_changes(tiles, along, i, j)
            for change in changes:
                change.add(dx_rc, i, j)
        return stats, Stats(**{change.stat.name: change.total for change in changes})


def _score_changes(tiles: Tiles, along: Grads, i: slice, j: slice) -> Tensor:
    """dx of one tile: (r, c)."""
    kind, scale = tiles.compute_dtype, tiles.scale
    a_rd, b_cd = tiles.pair.a[i].to(kind), tiles.pair.b[j].to(kind)
    dx_rc = a_rd.new_zeros((a_rd.shape[0], b_cd.shape[0]))
    if along.a is not None:
        dx_rc.addmm_(along.a[i].to(kind) * scale, b_cd.T)
    if along.b is not None:
        dx_rc.addmm_(a_rd * scale, along.b[j].to(kind).T)
    if along.scale is not None:
        dx_rc.addmm_(a_rd * along.scale.to(kind), b_cd.T)
    if along.bias is not None:
        dx_rc.add_(along.bias[j].to(kind))
    return dx_rc


class _Change:
    """The derivative of one statistic, summed over the tiles added so far: ``total``, float64."""

    def __init__(self, tiles: Tiles, stats: Stats, name: str, options: TileOptions) -> None:
        pair, spec = tiles.pair, tiles.spec
        (self.stat,) = (stat for stat in wanted_stats(spec) if stat.name == name)
        size = self.stat.size(pair.shape)
        self.tiles, self.total = tiles, pair.a.new_zeros(size, dtype=torch.float64)
        # The picked scores are K statistics of each row: their derivatives are picked from those of the scores.
        self.keys = TileKeys(dataclasses.replace(pair, row_shift=None), spec) if self.stat.of_picks else None
        unit = torch.ones_like(self.total, dtype=pair.stat_dtype)
        job = Backward(pair, stats, GradStats(**{name: unit}), Needs(), spec, options)
        self.weights = TileWeights(job, unit.new_ones(()))

    def add(self, dx_rc: Tensor, i: slice, j: slice) -> None:
        """Add the tile of the rows i and the columns j."""
        if self.keys is not None:
            slope = self.tiles.score_slope(self.tiles.scores(i, j), i)
            self.total[i] += self.keys.picked_scores(dx_rc if slope is None else dx_rc * slope, i, j)
        elif self.stat.of_columns:
            self.total[j] += self.weights.gradient(self.tiles, i, j).mul_(dx_rc).sum(0)
        else:
            self.total[i] += self.weights.gradient(self.tiles, i, j).mul_(dx_rc).sum(1)
