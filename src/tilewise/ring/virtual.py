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
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TypeVar

import torch
from torch import Tensor

from tilewise._check import AUTOCAST_DEVICES
from tilewise.errors import GroupError, RangeError
from tilewise.ring.exchange import VIRTUAL, Pending, forget_exchange, register_exchange
from tilewise.ring.schedule import next_rank, previous_rank

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
        self.taken = False
        self.copied: torch.cuda.Event | None = None


class _Hub:
    """What the threads of one group share. Whoever waits, waits for certain ranks, and no longer once one is gone."""

    def __init__(self, world: int, timeout_s: float) -> None:
        self.world, self.timeout_s = world, timeout_s
        self.tables: dict[int, dict[int, object]] = {}  # what ranks laid down, by the number of the gathering
        self.gathered = [0] * world  # gatherings that each rank has begun
        self.mail: list[deque[_Parcel]] = [deque() for _ in range(world)]
        self.gone: dict[int, str] = {}
        self.news = threading.Condition()

    def leave(self, rank: int, how: str) -> None:
        """A rank is done, or failed: nobody waits for it any longer."""
        with self.news:
            self.gone[rank] = how
            self.news.notify_all()

    def gather(self, rank: int, value: object) -> list[object]:
        """What all ranks laid down, in their order."""
        with self.news:
            turn = self.gathered[rank]
            self.gathered[rank] += 1
            table = self.tables.setdefault(turn, {})
            table[rank] = value
            self.news.notify_all()
            self._wait(rank, lambda: len(table) == self.world, lambda: set(range(self.world)) - table.keys())
            self.tables.pop(turn, None)  # all have it at hand
            return [table[each] for each in range(self.world)]

    def post(self, to: int, parcel: _Parcel) -> None:
        """Send."""
        with self.news:
            self.mail[to].append(parcel)
            self.news.notify_all()

    def take(self, rank: int) -> _Parcel:
        """Receive."""
        with self.news:
            self._wait(rank, lambda: bool(self.mail[rank]), lambda: {previous_rank(rank, self.world)})
            return self.mail[rank].popleft()

    def confirm(self, parcel: _Parcel) -> None:
        """The parcel's buffers are the sender's again."""
        with self.news:
            parcel.taken = True
            self.news.notify_all()

    def await_confirmation(self, rank: int, parcel: _Parcel) -> None:
        """Until the next rank has taken the parcel."""
        with self.news:
            self._wait(rank, lambda: parcel.taken, lambda: {next_rank(rank, self.world)})

    def _wait(self, rank: int, done: Callable[[], bool], missing: Callable[[], set[int]]) -> None:
        """Until ``done``; a `GroupError` when one of the ranks that are ``missing`` is gone, or the time is over."""
        self.news.wait_for(lambda: done() or missing() & self.gone.keys(), self.timeout_s)
        if not done():
            left = [f"rank {each} {self.gone[each]}" for each in sorted(missing() & self.gone.keys())]
            why = ", ".join(left) or f"it did not come within {self.timeout_s} s"
            raise GroupError(
                f"virtual rank {rank} waited for rank {', '.join(map(str, sorted(missing())))} in vain: {why}. Every "
                "rank must make the same calls in the same order"
            )


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
        hub.confirm(parcel)
        hub.await_confirmation(rank, self.sent)
        if self.sent.copied is not None:
            torch.cuda.current_stream(self.receive[0].device).wait_event(self.sent.copied)


def _mark(parts: Sequence[Tensor]) -> torch.cuda.Event | None:
    """An event after the work that is queued now, where the parts live on CUDA."""
    if not parts or not parts[0].is_cuda:
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(parts[0].device))
    return event


def run_virtual(world: int, work: Callable[[VirtualGroup], T], *, timeout_s: float = 60.0) -> list[T]:
    """Run ``work(group)`` on ``world`` virtual ranks and return what each gave.

    Ranks run under the caller's gradient mode and autocast. Autograd runs each rank's backward in its own thread, also
    on CUDA, where one thread per device would otherwise serve all ranks in turn and wait for itself.

    Args:
        world: the number of ranks.
        work: what a rank does; the error of the rank that failed first is raised here.
        timeout_s: how long a rank waits for another one in the exchange. One that failed or is done is not waited for.

    >>> run_virtual(3, lambda group: (group.rank(), group.size()))
    [(0, 3), (1, 3), (2, 3)]
    """
    if world < 1:
        raise RangeError(f"a group has at least one rank, got world={world}. Did rank and world change places?")
    hub, serial, modes = _Hub(world, timeout_s), next(_serial), _Modes()
    results: list[T | None] = [None] * world
    failures: list[tuple[int, BaseException]] = []

    def serve(rank: int) -> None:
        name = f"{VIRTUAL}{serial}-{rank}"
        register_exchange(name, VirtualExchange(hub, rank))
        try:
            # The modes first: torch.inference_mode, also if it is off, switches autograd's own threads on again.
            with modes.entered(), torch.autograd.set_multithreading_enabled(False):
                results[rank] = work(VirtualGroup(name, rank, world))
            hub.leave(rank, "is done")
        except BaseException as error:
            failures.append((rank, error))
            hub.leave(rank, "failed")
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


class _Modes:
    """What PyTorch keeps for each thread: whether gradients are recorded, and autocast. Taken here, entered there."""

    def __init__(self) -> None:
        self.inference, self.grad = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
        self.casts = [
            (kind, torch.get_autocast_dtype(kind)) for kind in AUTOCAST_DEVICES if torch.is_autocast_enabled(kind)
        ]

    @contextmanager
    def entered(self) -> Iterator[None]:
        """The same in this thread."""
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(self.inference))
            stack.enter_context(torch.set_grad_enabled(self.grad))
            for kind, dtype in self.casts:
                stack.enter_context(torch.autocast(kind, dtype=dtype))
            yield


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
