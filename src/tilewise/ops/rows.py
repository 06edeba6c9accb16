"""Ignored rows (such as padding tokens) are removed before any product.

Their number depends on the data, not on shapes. On the CPU it can be read at once. Elsewhere the host waits for the
device once, and only where the products take much longer than that. Otherwise the rows stay, with weight zero: the
result is the same.

While the host waits and then launches, the device has nothing to do, for about 0.5 ms on an H200. So where the last
call of a kind dropped no row, the host launches forward for all rows first and waits then (`PendingRows.likely_all`).
If rows must be dropped after all, the kernels find that on the device (`Pair.only_if`) and return at once, and forward
runs again without these rows. The numbers do not depend on the guess.
"""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

import torch
from torch import Tensor

from tilewise.kernels.host_scalar import HostScalar
from tilewise.kernels.spec import STATISTICS, FilterPlan, Grads, Pair, PairShape, PairSpec, Stats
from tilewise.kernels.tensors import ROW_TENSORS
from tilewise.ops.limits import current

# Columns that a vocabulary-parallel rank is assumed to have. Shards may be uneven, and all ranks must decide the same.
USUAL_SHARD = 2**15
# On a GPU a few ignored rows stay, so that tiles are full, some rows always remain, and steps with about the same
# number of tokens have the same shapes, for which launches are recorded.
WHOLE_TILES = 128
ROW_NAMES = tuple(stat.name for stat in STATISTICS if not stat.of_columns)
AnyStats = TypeVar("AnyStats", bound=Stats)
MOST_KINDS = 64  # kinds that are remembered before all are forgotten
_all_stayed: dict[tuple[Any, ...], bool] = {}  # by kind: whether the last call dropped no row


def may_read(pair: Pair, spec: PairSpec) -> bool:
    """Whether the host may read which rows count: always on the CPU; elsewhere if it pays and no graph is captured."""
    return pays(pair.shape, spec) and not (pair.a.is_cuda and torch.cuda.is_current_stream_capturing())


def pays(shape: PairShape, spec: PairSpec) -> bool:
    """Whether it pays to read which rows count: always on the CPU."""
    cols = USUAL_SHARD if spec.same_rows else shape.cols
    return shape.device.type == "cpu" or shape.rows * cols * shape.width >= current().worth_waiting


def copied_bytes(shape: PairShape, spec: PairSpec, needs_a: bool) -> int:
    """The most memory of the features of the rows that stay, and of their gradient; 0 if no row can be dropped."""
    if not spec.drop_rows or not shape.has_row_key or not pays(shape, spec):
        return 0
    return shape.rows * (shape.width * (1 + needs_a) + shape.guide_width) * shape.dtype.itemsize


class KeptRows:
    """The rows of a pair that count, those with a key that is not negative, and on a GPU a few more."""

    def __init__(self, index: Tensor, rows: int) -> None:
        self.index, self.rows = index, rows

    @staticmethod
    def find(pair: Pair, spec: PairSpec) -> KeptRows | None:
        """Which rows stay; None if all do, or if the host may not read it. Reading waits for the device."""
        pending = PendingRows.of(pair, spec)
        return None if pending is None else pending.wait()

    def of_pair(self, pair: Pair) -> Pair:
        """The pair with only these rows."""
        fewer: dict[str, Any] = {name: self._pick(getattr(pair, name)) for name in ROW_TENSORS}
        return dataclasses.replace(pair, a=pair.a.index_select(0, self.index), **fewer)

    def pick(self, stats: AnyStats) -> AnyStats:
        """Statistics, or their gradients, of only these rows."""
        return dataclasses.replace(stats, **{name: self._pick(getattr(stats, name)) for name in ROW_NAMES})

    def pick_grads(self, grads: Grads) -> Grads:
        """Gradients of only these rows, or directions of them."""
        return dataclasses.replace(grads, a=self._pick(grads.a))

    def scatter_back(self, stats: Stats) -> Stats:
        """Statistics of these rows as statistics of all rows, with zeros for the others."""
        return dataclasses.replace(stats, **{name: self._scatter_back(getattr(stats, name)) for name in ROW_NAMES})

    def scatter_back_grads(self, grads: Grads) -> Grads:
        """Gradients of these rows as gradients of all rows, with zeros for the others."""
        return dataclasses.replace(grads, a=self._scatter_back(grads.a))

    def pick_plan(self, plan: FilterPlan) -> FilterPlan:
        """The plan of only these rows, from that of all rows."""
        surprise = plan.surprise.index_select(0, self.index) if plan.surprise.numel() else plan.surprise
        return dataclasses.replace(plan, mass=plan.mass.index_select(1, self.index), surprise=surprise)

    def scatter_back_plan(self, plan: FilterPlan) -> FilterPlan:
        """The plan of these rows as a plan of all rows. The others drop everything, which is 0."""
        mass = plan.mass.new_zeros((plan.mass.shape[0], self.rows)).index_copy_(1, self.index, plan.mass)
        surprise = plan.surprise
        if surprise.numel():
            surprise = surprise.new_zeros(self.rows).index_copy_(0, self.index, surprise)
        return dataclasses.replace(plan, mass=mass, surprise=surprise)

    def _pick(self, value: Tensor | None) -> Tensor | None:
        return None if value is None else value.index_select(0, self.index)

    def _scatter_back(self, value: Tensor | None) -> Tensor | None:
        if value is None:
            return None
        return value.new_zeros((self.rows, *value.shape[1:])).index_copy_(0, self.index, value)


class PendingRows:
    """The rows that stay, before the host has read them: those whose key is not negative, and a few more.

    As many others stay as make their number a multiple of ``step``. With a step above 1 at least ``step`` rows stay.
    """

    def __init__(self, key: Tensor, step: int, kind: tuple[Any, ...] = ()) -> None:
        """Start to count the rows on the device. Calls of one ``kind`` share the guess whether all rows stay."""
        self.ignored, self.rows, self.step, self.kind = key < 0, key.shape[0], step, kind
        self.count = self.ignored.sum(dtype=torch.int32)
        self.on_host = HostScalar(self.count)

    @staticmethod
    def of(pair: Pair, spec: PairSpec) -> PendingRows | None:
        """The pending rows of a pair; None if all rows stay or the host may not read which do."""
        if not spec.drop_rows or pair.row_key is None or not may_read(pair, spec):
            return None
        step = 1 if pair.a.device.type == "cpu" else WHOLE_TILES
        return PendingRows(pair.row_key, step, (pair.a.device, *pair.b.shape))

    @property
    def likely_all(self) -> bool:
        """Whether all rows stayed in the last call of this kind, and the host must wait for the count of this one."""
        return self.on_host.copied is not None and _all_stayed.get(self.kind, False)

    def all_stay(self) -> Tensor:
        """1 if all rows stay, else 0: (1,) int32 on the device."""
        whole = (self.rows - 1) // self.step * self.step  # the largest number of rows that can stay if not all do
        if self.step > 1 and whole == 0:  # at least a step of rows stays, even if all are ignored
            return torch.ones_like(self.count).view(1)
        return (self.count < self.rows - whole).to(torch.int32).view(1)

    def wait(self) -> KeptRows | None:
        """The rows that stay, or None when all do."""
        # Unless all rows will probably stay, the device sorts them while the host waits.
        order = None if self.step == 1 or self.likely_all else self._order()
        kept = max(-(-(self.rows - int(self.on_host())) // self.step), int(self.step > 1)) * self.step
        if len(_all_stayed) >= MOST_KINDS:
            _all_stayed.clear()
        _all_stayed[self.kind] = kept >= self.rows
        if kept >= self.rows:
            return None
        return KeptRows((self._order() if order is None else order)[:kept], self.rows)

    def _order(self) -> Tensor:
        """Rows that count first."""
        return self.ignored.view(torch.uint8).argsort(stable=True)
