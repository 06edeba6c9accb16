"""Virtual ranks: threads of one process, on one device, that exchange blocks through memory.

The ring runs with any number of ranks on a machine with one GPU, through the same code as over a process group. For
tests, and for finding out what a ring does before renting one.
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from tilewise.errors import GroupError
from tilewise.ring.exchange import Pending, forget_exchange, register_exchange
from tilewise.ring.schedule import next_rank

T = TypeVar("T")
_serial = itertools.count()


class VirtualGroup:
    """What a virtual rank passes as ``group=``."""

    def __init__(self, name: str, rank: int, world: int) -> None:
        self.group_name, self._rank, self._world = name, rank, world

    def rank(self) -> int:
        """This rank."""
        return self._rank

    def size(self) -> int:
        """The number of ranks."""
        return self._world


class _Parcel:
    """Buffers on their way from one thread to the next."""

    def __init__(self, parts: list[Tensor]) -> None:
        self.parts = parts
        self.ready = _mark(parts)
        self.taken = threading.Event()
        self.copied: torch.cuda.Event | None = None


class _Hub:
    """What the threads of one group share."""

    def __init__(self, world: int, timeout_s: float) -> None:
        self.world, self.timeout_s = world, timeout_s
        self.barrier = threading.Barrier(world)
        self.slots: list[object] = [None] * world
        self.mail: list[deque[_Parcel]] = [deque() for _ in range(world)]
        self.news = threading.Condition()
        self.broken = False

    def leave(self) -> None:
        """A rank failed: nobody waits for it any longer."""
        with self.news:
            self.broken = True
            self.news.notify_all()
        self.barrier.abort()

    def gather(self, rank: int, value: object) -> list[object]:
        try:
            self.slots[rank] = value
            self.barrier.wait(self.timeout_s)
            found = list(self.slots)
            self.barrier.wait(self.timeout_s)
        except threading.BrokenBarrierError:
            raise GroupError(_gone(rank, self.timeout_s)) from None
        return found

    def post(self, to: int, parcel: _Parcel) -> None:
        with self.news:
            self.mail[to].append(parcel)
            self.news.notify_all()

    def take(self, rank: int) -> _Parcel:
        with self.news:
            if not self.news.wait_for(lambda: self.mail[rank] or self.broken, self.timeout_s) or not self.mail[rank]:
                raise GroupError(_gone(rank, self.timeout_s))
            return self.mail[rank].popleft()


class VirtualExchange:
    """The exchange of one virtual rank: copies, on a side stream where there are streams."""

    def __init__(self, hub: _Hub, rank: int) -> None:
        self.hub, self.rank, self.world = hub, rank, hub.world
        self._stream: torch.cuda.Stream | None = None

    def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        """Through shared memory."""
        return self.hub.gather(self.rank, list(numbers))  # type: ignore[return-value]

    def shift(self, send: Sequence[Tensor], receive: Sequence[Tensor]) -> Pending:
        """Hand the buffers to the next thread; what comes is copied when it is waited for."""
        parcel = _Parcel(list(send))
        self.hub.post(next_rank(self.rank, self.world), parcel)
        return _Transfer(self, parcel, list(receive))

    def sum_(self, values: Tensor) -> None:
        """Added in the order of the ranks, so that all get the same bits."""
        self._combine(values, torch.add)

    def max_(self, values: Tensor) -> None:
        """Elementwise."""
        self._combine(values, torch.maximum)

    def refuses(self, device: torch.device) -> str | None:
        """Memory is shared, whatever the device."""
        return None

    def side_stream(self, device: torch.device) -> torch.cuda.Stream:
        """Where this rank copies."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        return self._stream

    def _combine(self, values: Tensor, join: Callable[[Tensor, Tensor], Tensor]) -> None:
        if values.is_cuda:
            torch.cuda.current_stream(values.device).synchronize()
        found: list[Tensor] = self.hub.gather(self.rank, values.clone())  # type: ignore[assignment]
        if values.is_cuda:
            torch.cuda.synchronize(values.device)
        total = found[0]
        for other in found[1:]:
            total = join(total, other)
        values.copy_(total)
        if values.is_cuda:
            torch.cuda.current_stream(values.device).synchronize()
        self.hub.gather(self.rank, None)


class _Transfer:
    def __init__(self, exchange: VirtualExchange, sent: _Parcel, receive: list[Tensor]) -> None:
        self.exchange, self.sent, self.receive = exchange, sent, receive
        self.free = _mark(receive)

    def wait(self) -> None:
        hub, rank = self.exchange.hub, self.exchange.rank
        parcel = hub.take(rank)
        assert [p.numel() for p in parcel.parts] == [p.numel() for p in self.receive], "ranks sent other sizes"
        if parcel.ready is None:
            for here, there in zip(self.receive, parcel.parts, strict=True):
                here.copy_(there)
        else:
            device = self.receive[0].device
            stream = self.exchange.side_stream(device)
            with torch.cuda.stream(stream):
                stream.wait_event(parcel.ready)
                if self.free is not None:
                    stream.wait_event(self.free)
                for here, there in zip(self.receive, parcel.parts, strict=True):
                    here.copy_(there, non_blocking=True)
                parcel.copied = torch.cuda.Event()
                parcel.copied.record(stream)
            torch.cuda.current_stream(device).wait_event(parcel.copied)
        parcel.taken.set()
        if not self.sent.taken.wait(hub.timeout_s):
            raise GroupError(_gone(rank, hub.timeout_s))
        if self.sent.copied is not None:
            torch.cuda.current_stream(self.receive[0].device).wait_event(self.sent.copied)


def _mark(parts: Sequence[Tensor]) -> torch.cuda.Event | None:
    """An event after the work that is queued now, where the parts live on CUDA."""
    if not parts or not parts[0].is_cuda:
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(parts[0].device))
    return event


def _gone(rank: int, timeout_s: float) -> str:
    return (
        f"virtual rank {rank} waited for the others in vain: one failed, or did not come within {timeout_s} s. Every "
        "rank must make the same calls in the same order"
    )


def run_virtual(world: int, work: Callable[[VirtualGroup], T], *, timeout_s: float = 60.0) -> list[T]:
    """Run ``work(group)`` on ``world`` virtual ranks and return what each gave.

    Autograd runs each rank's backward in its own thread, also on CUDA, where one thread per device would otherwise
    serve all ranks in turn and wait for itself.

    >>> run_virtual(3, lambda group: (group.rank(), group.size()))
    [(0, 3), (1, 3), (2, 3)]
    """
    hub, serial = _Hub(world, timeout_s), next(_serial)
    results: list[T | None] = [None] * world
    failures: list[tuple[int, BaseException]] = []

    def serve(rank: int) -> None:
        name = f"virtual-{serial}-{rank}"
        register_exchange(name, VirtualExchange(hub, rank))
        try:
            with torch.autograd.set_multithreading_enabled(False):
                results[rank] = work(VirtualGroup(name, rank, world))
        except BaseException as error:
            failures.append((rank, error))
            hub.leave()
        finally:
            forget_exchange(name)

    threads = [threading.Thread(target=serve, args=(rank,), daemon=True) for rank in range(world)]
    for thread in threads:
        thread.start()
    stuck = _join(threads, failures, timeout_s)
    if failures:
        error = failures[0][1]
        for rank, place in stuck.items():
            error.add_note(f"virtual rank {rank} has not come back. It is at:\n{place}")
        raise error
    return results  # type: ignore[return-value]


def _join(threads: list[threading.Thread], failures: Sequence[object], timeout_s: float) -> dict[int, str]:
    """Wait for the ranks, however long they work; once one has failed, no longer than the exchange makes others wait.

    Returns the ranks that are left behind, and where they are: one that hangs makes the others fail in the exchange,
    and then it must not hang its caller.
    """
    until = None
    while running := {rank: thread for rank, thread in enumerate(threads) if thread.is_alive()}:
        next(iter(running.values())).join(0.1)
        if failures and until is None:
            until = time.monotonic() + 2 * timeout_s
        if until is not None and time.monotonic() > until:
            frames = sys._current_frames()
            places = {rank: frames.get(thread.ident or 0) for rank, thread in running.items()}
            return {rank: "".join(traceback.format_stack(frame)) for rank, frame in places.items()}
    return {}
