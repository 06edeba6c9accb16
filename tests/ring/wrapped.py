"""Wrapped exchanges: one counts bytes, one is slow."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tilewise.ring.exchange import Pending, find_exchange, forget_exchange, register_exchange

_serial = itertools.count()


class Counted:
    """Counts the bytes that this rank sends in each hop, the all-gathers and the bytes of all-reduces."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.rank, self.world = inner, inner.rank, inner.world
        self.hops: list[int] = []
        self.types: set[torch.dtype] = set()
        self.gathers = self.reduced_bytes = 0
        self.orders: set[bool] = set()

    @property
    def sent(self) -> int:
        return sum(self.hops)

    def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        self.gathers += 1
        return self.inner.gather(numbers)

    def shift(self, send: Sequence[Tensor], receive: Sequence[Tensor], *peers: int | None) -> Pending:
        self.hops.append(sum(part.numel() * part.element_size() for part in send))
        self.types |= {part.dtype for part in send}
        return self.inner.shift(send, receive, *peers)

    def sum_(self, values: Tensor, *, in_order: bool = False) -> None:
        self.reduced_bytes += values.numel() * values.element_size()
        self.orders.add(in_order)
        self.inner.sum_(values, in_order=in_order)

    def scatter_sum(self, values: Tensor) -> Tensor:
        self.reduced_bytes += values[0].numel() * values.element_size()
        return self.inner.scatter_sum(values)

    def refuses(self, device: torch.device) -> str | None:
        return self.inner.refuses(device)


class Clock:
    """A clock that only moves when something is said to take time."""

    def __init__(self) -> None:
        self.now = 0.0


class Slow(Counted):
    """A link on which every hop takes ``seconds`` of the clock after it is posted."""

    def __init__(self, inner: Any, clock: Clock, seconds: float) -> None:
        super().__init__(inner)
        self.clock, self.seconds = clock, seconds

    def shift(self, send: Sequence[Tensor], receive: Sequence[Tensor], *peers: int | None) -> Pending:
        return _Late(super().shift(send, receive, *peers), self.clock, self.clock.now + (self.seconds if send else 0.0))


class _Late:
    def __init__(self, inner: Pending, clock: Clock, earliest: float) -> None:
        self.inner, self.clock, self.earliest = inner, clock, earliest

    def wait(self) -> None:
        self.inner.wait()
        self.clock.now = max(self.clock.now, self.earliest)


class Named:
    """A group whose name is registered for the wrapped exchange."""

    def __init__(self, name: str, group: Any) -> None:
        self.group_name, self.rank, self.size = name, group.rank, group.size


@contextlib.contextmanager
def wrapped(group: Any, make: Any = Counted, *args: Any) -> Iterator[tuple[Named, Any]]:
    """A group over ``make(exchange of group, *args)``, and that exchange."""
    exchange = make(find_exchange(group.group_name), *args)
    name = f"wrapped-{next(_serial)}"
    register_exchange(name, exchange)
    try:
        yield Named(name, group), exchange
    finally:
        forget_exchange(name)


class Allocated(TorchDispatchMode):
    """Counts the bytes of the tensors that operators of this thread make, while they are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: list[tuple[StorageWeakRef, int]] = []
        self.peak = self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func.is_view or func._schema.is_mutable:
            return made
        self.alive = [(storage, size) for storage, size in self.alive if not storage.expired()]
        for tensor in (t for t in tree_leaves(made) if isinstance(t, Tensor)):
            self.alive.append((StorageWeakRef(tensor.untyped_storage()), tensor.untyped_storage().nbytes()))
            self.largest = max(self.largest, self.alive[-1][1])
        self.peak = max(self.peak, sum(size for _, size in self.alive))
        return made
