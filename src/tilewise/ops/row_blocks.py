"""Batch invariance: rows in blocks of a fixed size, so that a row's results do not depend on the rest of the batch.

A matrix product may choose its kernel, and with it the order of its sums, by the number of rows. Here all products have
the same number of rows: the rows are copied to blocks of `block_rows`, and the last block is filled up with its last
row. Inside a block, a backend with ``options.batch_invariant`` computes each row by itself: no number that several rows
share, such as a common reference of exponentials, may change a bit of a row.

Only the gradient of the rows is computed in blocks. Columns, scale and bias sum over all rows; their gradients come
from an ordinary second call.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

from tilewise.kernels.backend import Backend
from tilewise.kernels.slices import full_blocks
from tilewise.kernels.spec import Grads, GradStats, Needs, Pair, PairShape, PairSpec, Stats, wanted_names
from tilewise.ops.rows import ROW_NAMES, KeptRows
from tilewise.options import TileOptions

CPU_ROWS = 256
ACCELERATOR_ROWS = 1024  # fewer launches, and products that fill the card


def block_rows(device: torch.device, options: TileOptions) -> int:
    """Rows of a block; 0 without ``batch_invariant``."""
    if not options.batch_invariant:
        return 0
    return CPU_ROWS if device.type == "cpu" else ACCELERATOR_ROWS


def in_blocks(backend: Backend, options: TileOptions) -> Backend:
    """The backend, with ``batch_invariant`` in blocks of rows."""
    return RowBlocks(backend) if options.batch_invariant else backend


class RowBlocks(Backend):
    """Two passes of another backend, in blocks of rows."""

    def __init__(self, inner: Backend) -> None:
        self.inner, self.name = inner, inner.name

    def forward(self, pair: Pair, spec: PairSpec, options: TileOptions) -> Stats:
        """The statistics of each block, joined."""
        parts = [(self.inner.forward(rows.of_pair(pair), spec, options), used) for rows, used in _blocks(pair, options)]
        if not parts:
            return self.inner.forward(pair, spec, options)
        names = wanted_names(spec)
        return Stats(**{name: torch.cat([getattr(stats, name)[:used] for stats, used in parts]) for name in names})

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
        saved: object | None = None,
    ) -> Grads:
        """The gradient of the rows block by block, the others at once."""
        others = Grads()
        if any(needs[1:]):
            ordinary = dataclasses.replace(options, batch_invariant=False)
            rest = needs._replace(a=False)
            others = self.inner.backward(pair, stats, grad, rest, spec, ordinary, grad_dtype=grad_dtype)
        if not needs.a:
            return others
        out = pair.a.new_empty(pair.a.shape, dtype=grad_dtype)
        size, small = None, pair.a.dtype == torch.float16
        if small:  # G must stay near 1 in float16, in every row
            size = _row_sizes(grad)
            grad = _divided(grad, size)
        for rows, used in _blocks(pair, options):
            job: Any = rows.of_pair(pair), rows.pick(stats), rows.pick(grad), Needs(a=True, b=False), spec, options
            found = self.inner.backward(*job, grad_dtype=torch.float32 if small else grad_dtype).a
            assert found is not None
            here = rows.index[:used]
            out[here] = (found[:used] if size is None else found[:used] * size[here, None]).to(out.dtype)
        return dataclasses.replace(others, a=out)

    def accumulator_bytes(self, shape: PairShape, needs: Needs, spec: PairSpec, options: TileOptions) -> int:
        """Those of the other backend, and a block of rows with its gradient."""
        rows = block_rows(shape.device, options)
        block = rows * shape.width * (2 * shape.dtype.itemsize + 4)
        return self.inner.accumulator_bytes(shape, needs, spec, options) + block

    def workspace_bytes(self, shape: PairShape, spec: PairSpec, options: TileOptions, strategy: str) -> int:
        """That of the other backend."""
        return self.inner.workspace_bytes(shape, spec, options, strategy)


def _blocks(pair: Pair, options: TileOptions) -> list[tuple[KeptRows, int]]:
    """The rows of each block, and how many of them are not there to fill it up."""
    n, device = pair.a.shape[0], pair.a.device
    return [(KeptRows(index, n), used) for index, used in full_blocks(n, block_rows(device, options), device)]


def _row_sizes(grad: GradStats) -> Tensor:
    """For each row a power of two, at least as large as all gradients of its statistics: (n,), 1 if they are zero.

    Division by a power of two is exact in float32. The size depends on this row only, so the later rounding of G to
    float16 does too.
    """
    found = [getattr(grad, name) for name in ROW_NAMES]
    tops = [value.abs().reshape(len(value), math.prod(value.shape[1:])).amax(1) for value in found if value is not None]
    _, exponent = torch.frexp(torch.stack(tops).amax(0))
    return torch.ldexp(torch.ones_like(tops[0]), exponent)


def _divided(grad: GradStats, size: Tensor) -> GradStats:
    """All gradients of the rows divided by their size."""
    found = {name: getattr(grad, name) for name in ROW_NAMES}
    fields = {name: v / size.view(-1, *(1,) * (v.dim() - 1)) for name, v in found.items() if v is not None}
    return dataclasses.replace(grad, **fields)
