"""Rows that do not count (ignored tokens) are taken out before any product.

On the CPU only: on a GPU their number would have to be waited for, so there they stay, with weight zero.
"""

from __future__ import annotations

import dataclasses

from torch import Tensor

from tilewise.kernels.spec import Grads, GradStats, Pair, PairSpec, Stats


class KeptRows:
    """The rows of a pair with a key that is not negative; ``None`` from `find` if nothing is to be dropped."""

    def __init__(self, index: Tensor, rows: int) -> None:
        self.index, self.rows = index, rows

    @staticmethod
    def find(pair: Pair, spec: PairSpec) -> KeptRows | None:
        """Which rows stay, or None when all do or nobody may look."""
        if not spec.drop_rows or pair.row_key is None or pair.a.device.type != "cpu":
            return None
        index = (pair.row_key >= 0).nonzero().squeeze(1)
        return None if index.shape[0] == pair.a.shape[0] else KeptRows(index, pair.a.shape[0])

    def of_pair(self, pair: Pair) -> Pair:
        """The pair with only these rows."""
        return dataclasses.replace(
            pair,
            a=pair.a[self.index],
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
        return None if value is None else value[self.index]

    def _widen(self, value: Tensor | None) -> Tensor | None:
        if value is None:
            return None
        return value.new_zeros((self.rows, *value.shape[1:])).index_copy_(0, self.index, value)
