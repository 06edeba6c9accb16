"""Ignored rows (such as padding tokens) are removed before any product.

Their number is a value. On the CPU it can be read at once; elsewhere the host waits for the device once, and only where
the products take much longer than that. Otherwise the rows stay, with weight zero: the result is the same.
"""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

import torch
from torch import Tensor

from tilewise.kernels.host_scalar import HostScalar
from tilewise.kernels.spec import ROW_TENSORS, STATISTICS, Grads, Pair, PairSpec, Stats

WORTH_WAITING = 2**38  # multiply-adds of one product; forward and backward then take 3 ms of an H200
USUAL_SHARD = 2**15  # columns of one rank: shards may be uneven, and all ranks must decide alike
# On a GPU a few ignored rows stay, so that tiles are full, some rows always remain, and steps with about the same
# number of tokens have the same shapes, for which launches are recorded.
WHOLE_TILES = 128
ROW_NAMES = tuple(stat.name for stat in STATISTICS if not stat.of_columns)
AnyStats = TypeVar("AnyStats", bound=Stats)


def may_look(pair: Pair, spec: PairSpec) -> bool:
    """Whether the host may read which rows count: always on the CPU; elsewhere if it pays and nothing is captured."""
    if pair.a.device.type == "cpu":
        return True
    cols = USUAL_SHARD if spec.same_rows else pair.b.shape[0]
    if pair.a.shape[0] * cols * pair.a.shape[1] < WORTH_WAITING:
        return False
    return not (pair.a.is_cuda and torch.cuda.is_current_stream_capturing())


class KeptRows:
    """The rows of a pair that count, those with a key that is not negative, and on a GPU a few more."""

    def __init__(self, index: Tensor, rows: int) -> None:
        self.index, self.rows = index, rows

    @staticmethod
    def find(pair: Pair, spec: PairSpec) -> KeptRows | None:
        """Which rows stay, or None when all do or the host may not look. Where it looks, it waits for the device."""
        if not spec.drop_rows or pair.row_key is None or not may_look(pair, spec):
            return None
        return kept_rows(pair.row_key, 1 if pair.a.device.type == "cpu" else WHOLE_TILES)

    def of_pair(self, pair: Pair) -> Pair:
        """The pair with only these rows."""
        fewer: dict[str, Any] = {name: self._pick(getattr(pair, name)) for name in ROW_TENSORS}
        return dataclasses.replace(pair, a=pair.a.index_select(0, self.index), **fewer)

    def pick(self, stats: AnyStats) -> AnyStats:
        """Statistics, or their gradients, of only these rows."""
        return dataclasses.replace(stats, **{name: self._pick(getattr(stats, name)) for name in ROW_NAMES})

    def scatter_back(self, stats: Stats) -> Stats:
        """Statistics of these rows as statistics of all rows, with zeros for the others."""
        return dataclasses.replace(stats, **{name: self._scatter_back(getattr(stats, name)) for name in ROW_NAMES})

    def scatter_back_grads(self, grads: Grads) -> Grads:
        """Gradients of these rows as gradients of all rows, with zeros for the others."""
        return dataclasses.replace(grads, a=self._scatter_back(grads.a))

    def _pick(self, value: Tensor | None) -> Tensor | None:
        return None if value is None else value.index_select(0, self.index)

    def _scatter_back(self, value: Tensor | None) -> Tensor | None:
        if value is None:
            return None
        return value.new_zeros((self.rows, *value.shape[1:])).index_copy_(0, self.index, value)


def kept_rows(key: Tensor, step: int) -> KeptRows | None:
    """The rows whose key is not negative, and as many others as make their number a multiple of ``step``.

    None when all rows stay. With a step above 1 at least ``step`` rows stay.
    """
    ignored, rows = key < 0, key.shape[0]
    count = HostScalar(ignored.sum(dtype=torch.int32))
    if step == 1 and not count():
        return None
    # Launched before the host waits for the count: the device sorts while the host continues.
    order = ignored.view(torch.uint8).argsort(stable=True)
    kept = max(-(-(rows - int(count())) // step), int(step > 1)) * step
    return KeptRows(order[:kept], rows) if kept < rows else None
