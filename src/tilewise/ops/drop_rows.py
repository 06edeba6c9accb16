"""Rows that do not count (ignored tokens) are taken out before any product.

How many are left is a value. On the CPU it is there to be read; elsewhere the host waits for the device once, and only
where the products take much longer than that. Otherwise the rows stay, with weight zero: the result is the same.
Between the question (`Asked`) and its answer a caller may launch what is right if all rows stay.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from tilewise.kernels.spec import Grads, GradStats, Pair, PairSpec, Stats
from tilewise.kernels.told import Told

WORTH_WAITING = 2**38  # multiply-adds of one product; forward and backward take 3 ms of an H200 then
USUAL_SLICE = 2**15  # columns of one rank: slices may be uneven, and all ranks must decide alike
# On a GPU a few ignored rows stay, so that tiles are full, some rows are always left, and steps with about the same
# number of tokens have the same shapes, for which launches are ready.
WHOLE_TILES = 128


def may_look(pair: Pair, spec: PairSpec) -> bool:
    """Whether the host may read which rows count: always on the CPU; elsewhere if it pays and nothing is captured."""
    if pair.a.device.type == "cpu":
        return True
    cols = USUAL_SLICE if spec.same_rows else pair.b.shape[0]
    if pair.a.shape[0] * cols * pair.a.shape[1] < WORTH_WAITING:
        return False
    return not (pair.a.is_cuda and torch.cuda.is_current_stream_capturing())


class Asked:
    """How many rows of a pair have a negative key: a question whose answer is on its way to the host.

    All other rows stay, and as many of these as make their number a multiple of ``step``.
    """

    def __init__(self, key: Tensor, step: int) -> None:
        self.ignored, self.rows, self.step = key < 0, key.shape[0], step
        self.least = step if step > 1 else 0
        # with no more than these ignored all rows stay
        self.most = self.rows if self.rows <= self.least else self.rows - 1 - (self.rows - 1) // step * step
        self.count = self.ignored.sum(dtype=torch.int32)
        self._told = Told(self.count)
        # The rows that count, then the others. The device sorts while the host, which has its answer, gets ready.
        self._order = self.ignored.view(torch.uint8).argsort(stable=True) if step > 1 else None

    @staticmethod
    def about(pair: Pair, spec: PairSpec) -> Asked | None:
        """None where rows are not dropped, or nobody may look."""
        if not spec.drop_rows or pair.row_key is None or not may_look(pair, spec):
            return None
        return Asked(pair.row_key, 1 if pair.a.device.type == "cpu" else WHOLE_TILES)

    def all_stay(self) -> Tensor:
        """What the device knows already: 1 if `answer` will be None, else 0; a number, int32."""
        return (self.count <= self.most).to(torch.int32)

    def answer(self) -> KeptRows | None:
        """Which rows stay; None when all do. The host waits until the device has come to the question."""
        ignored = int(self._told())
        if ignored <= self.most:
            return None
        if self._order is None:
            return KeptRows((~self.ignored).nonzero().squeeze(1), self.rows)
        kept = max(-(-(self.rows - ignored) // self.step) * self.step, self.least)
        return KeptRows(self._order[:kept], self.rows)


class KeptRows:
    """The rows of a pair with a key that is not negative; ``None`` from `find` if nothing is to be dropped."""

    def __init__(self, index: Tensor, rows: int) -> None:
        self.index, self.rows = index, rows

    @staticmethod
    def find(pair: Pair, spec: PairSpec) -> KeptRows | None:
        """Which rows stay, or None when all do or nobody may look. Where it looks, the host waits for the device."""
        asked = Asked.about(pair, spec)
        return None if asked is None else asked.answer()

    def of_pair(self, pair: Pair) -> Pair:
        """The pair with only these rows."""
        return dataclasses.replace(
            pair,
            a=pair.a.index_select(0, self.index),
            row_key=self._pick(pair.row_key),
            row_skip=self._pick(pair.row_skip),
            row_zero=self._pick(pair.row_zero),
        )

    def of_stats(self, stats: Stats) -> Stats:
        """Statistics of only these rows."""
        return dataclasses.replace(
            stats,
            **{name: self._pick(value) for name, value in vars(stats).items() if name.startswith("row")},
        )

    def of_grad(self, grad: GradStats) -> GradStats:
        """Incoming gradients of only these rows."""
        return dataclasses.replace(
            grad, **{name: self._pick(value) for name, value in vars(grad).items() if name.startswith("row")}
        )

    def widen_stats(self, stats: Stats) -> Stats:
        """Back to all rows, zeros elsewhere."""
        return dataclasses.replace(
            stats,
            **{name: self._widen(value) for name, value in vars(stats).items() if name.startswith("row")},
        )

    def widen_grads(self, grads: Grads) -> Grads:
        """Back to all rows, zeros elsewhere."""
        return dataclasses.replace(grads, a=self._widen(grads.a))

    def _pick(self, value: Tensor | None) -> Tensor | None:
        return None if value is None else value.index_select(0, self.index)

    def _widen(self, value: Tensor | None) -> Tensor | None:
        if value is None:
            return None
        return value.new_zeros((self.rows, *value.shape[1:])).index_copy_(0, self.index, value)
