"""The order of pairs: a shuffled order that is a function of the seed, and positions in it.

The order has no other state, so a run continues in the middle of an epoch from three numbers.
"""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from tilewise.errors import DataError
from tilewise.train.data.records import Source


@dataclass(frozen=True)
class Position:
    """The position of the next pair: `offset` pairs into a window of an epoch."""

    epoch: int = 0
    window: int = 0
    offset: int = 0

    def state(self) -> dict[str, Any]:
        """Plain values for a checkpoint."""
        return asdict(self)


class Order:
    """Iterates over a source in batches. The last pairs of an epoch that do not fill a batch are left out.

    Args:
        source: the source.
        seed: seed of the shuffling. The same seed gives the same order on any number of ranks.
    """

    def __init__(self, source: Source, seed: int) -> None:
        self.source = source
        self.seed = seed
        self._cached: tuple[int, int] | None = None
        self._keys = torch.empty(0, dtype=torch.int64)

    def take(self, position: Position, count: int) -> tuple[Tensor, int, Position]:
        """Return the keys (count,) from a position on, their epoch, and the position after them."""
        start = position
        for _ in range(2):
            parts: list[Tensor] = []
            missing, epoch, window, offset = count, start.epoch, start.window, start.offset
            while missing and window < self.source.window_count():
                part = self._window(epoch, window)[offset : offset + missing]
                parts.append(part)
                missing -= len(part)
                offset += len(part)
                if missing:
                    window, offset = window + 1, 0
            if not missing:
                return torch.cat(parts), epoch, Position(epoch, window, offset)
            start = Position(start.epoch + 1)
        raise DataError(
            f"a batch of {count} pairs does not fit in an epoch of {len(self.source)} usable pairs. "
            "Lower loop.batch_size, or give more data"
        )

    def _window(self, epoch: int, window: int) -> Tensor:
        if self._cached != (epoch, window):
            keys = self.source.window_keys(self.seed, epoch, window)
            self._keys = keys[permutation(len(keys), f"{self.seed}/{epoch}/{window}")]
            self._cached = (epoch, window)
        return self._keys


def permutation(count: int, seed: str) -> Tensor:
    """Return a permutation of ``range(count)`` that depends only on the text `seed`.

    >>> sorted(permutation(5, "a").tolist())
    [0, 1, 2, 3, 4]
    """
    generator = torch.Generator().manual_seed(random.Random(seed).getrandbits(62))
    return torch.randperm(count, generator=generator)
