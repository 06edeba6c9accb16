"""A loop over the blocks of a group, for computations that are no operator, such as ranks.

Without a group there is one block, and the same loop runs once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from tilewise.errors import GroupError
from tilewise.kernels.registry import choose_scorer
from tilewise.ring.agree import agree, propagate_errors
from tilewise.ring.blocks import Field, Merge, Tensors, rotate_blocks
from tilewise.ring.exchange import Exchange, SingleExchange, find_exchange
from tilewise.ring.shards import Shards

__all__ = ["Field", "RingLoop", "choose_scorer"]
Work = Callable[[int, dict[str, Tensor]], Tensors | None]


class RingLoop:
    """A group whose ranks hold rows that stay and blocks of columns that travel."""

    def __init__(self, group_name: str) -> None:
        self.exchange: Exchange = find_exchange(group_name) if group_name else SingleExchange()
        self.shards = Shards(self.exchange.rank, (0,) * self.exchange.world, (0,) * self.exchange.world)

    @contextmanager
    def propagate_errors(self) -> Iterator[None]:
        """Propagates a validation error of this rank to the other ranks, so that all of them raise."""
        with propagate_errors(self.exchange):
            yield

    def meet(self, rows: int, cols: int, device: torch.device, call: Mapping[str, object]) -> None:
        """Learn the sizes of all shards, or raise a `GroupError` on every rank."""
        self.shards = agree(self.exchange, rows, cols, call)
        if self.exchange.world > 1 and (reason := self.exchange.refuses(device)):
            raise GroupError(f"tensors on {device} cannot travel through this group: {reason}")

    @property
    def row_start(self) -> int:
        """Global index of this rank's first row."""
        return self.shards.row_start

    @property
    def col_start(self) -> int:
        """Global index of this rank's first column."""
        return self.shards.col_start(self.shards.rank)

    @property
    def all_cols(self) -> int:
        """Columns of all ranks together."""
        return self.shards.all_cols

    def visit(
        self, block: Tensors, work: Work, *, accumulators: Sequence[Field] = (), merge: Merge | None = None
    ) -> dict[str, Tensor]:
        """``work(global index of its first column, block)`` for every rank's block; see `rotate_blocks`."""

        def at_home(owner: int, tensors: dict[str, Tensor]) -> Tensors | None:
            return work(self.shards.col_start(owner), tensors)

        return rotate_blocks(self.exchange, self.shards.cols, block, at_home, accumulators=accumulators, merge=merge)
