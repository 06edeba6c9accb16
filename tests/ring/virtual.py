"""Virtual ranks: threads of one process, on one device, that exchange blocks through shared memory.

They run a ring of any size on one device, through the same code as a process group.
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
import traceback
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TypeVar

import torch
from torch import Tensor

from tilewise._check import AUTOCAST_DEVICES
from tilewise.errors import GroupError, RangeError
from tilewise.ring.exchange import Exchange, Pending, forget_exchange, register_exchange
from tilewise.ring.schedule import next_rank, previous_rank

T = TypeVar("T")
_serial = itertools.count()


class VirtualGroup:
    """Process group of one virtual rank, to pass as ``group=``."""

    def __init__(self, name: str, rank: int, world: int) -> None:
        self.group_name, self._rank, self._world = name, rank, world

    def rank(self) -> int:
        """This rank."""
        return self._rank

    def size(self) -> int:
        """The number of ranks."""
        return self._world


class _Message:
    """Buffers that one thread sends to the next."""

    def __init__(self, parts: list[Tensor]) -> None:
        self.parts = parts
        self.ready = _record_event(parts)
        self.received = False
        self.copied: torch.cuda.Event | None = None


class _Hub:
    """Shared state of the threads of one group. A thread stops waiting for a rank that has finished or failed."""

    def __init__(self, world: int, timeout_s: float) -> None:
        self.world, self.timeout_s = world, timeout_s
        self.tables: dict[int, dict[int, object]] = {}  # values of all ranks, by the number of the all-gather
        self.gathers = [0] * world  # number of all-gathers that each rank has started
        self.queues: dict[tuple[int, int], deque[_Message]] = defaultdict(deque)  # by sender and receiver
        self.finished: dict[int, str] = {}
        self.changed = threading.Condition()

    def finish(self, rank: int, how: str) -> None:
        """Mark a rank as finished or failed, so that no other rank waits for it."""
        with self.changed:
            self.finished[rank] = how
            self.changed.notify_all()

    def gather(self, rank: int, value: object) -> list[object]:
        """The values of all ranks, in rank order."""
        with self.changed:
            number = self.gathers[rank]
            self.gathers[rank] += 1
            table = self.tables.setdefault(number, {})
            table[rank] = value
            self.changed.notify_all()
            self._wait(rank, lambda: len(table) == self.world, lambda: set(range(self.world)) - table.keys())
            self.tables.pop(number, None)  # every rank has its own reference
            return [table[each] for each in range(self.world)]

    def send(self, rank: int, to: int, message: _Message) -> None:
        """Put a message from ``rank`` into the queue of another."""
        with self.changed:
            self.queues[rank, to].append(message)
            self.changed.notify_all()

    def receive(self, rank: int, source: int) -> _Message:
        """Block until ``source`` has sent a message, and return it."""
        queue = self.queues[source, rank]
        with self.changed:
            self._wait(rank, lambda: bool(queue), lambda: {source})
            return queue.popleft()

    def confirm(self, message: _Message) -> None:
        """Mark a message as received: the sender may write its buffers again."""
        with self.changed:
            message.received, message.parts = True, []  # the sender's memory is free when the sender drops it
            self.changed.notify_all()

    def await_confirmation(self, rank: int, to: int, message: _Message) -> None:
        """Block until ``to`` has received the message."""
        with self.changed:
            self._wait(rank, lambda: message.received, lambda: {to})

    def _wait(self, rank: int, done: Callable[[], bool], missing: Callable[[], set[int]]) -> None:
        """Block until ``done``. Raise `GroupError` if a ``missing`` rank has finished, or after the timeout."""
        self.changed.wait_for(lambda: done() or missing() & self.finished.keys(), self.timeout_s)
        if not done():
            ended = [f"rank {each} {self.finished[each]}" for each in sorted(missing() & self.finished.keys())]
            why = ", ".join(ended) or f"no response within {self.timeout_s} s"
            raise GroupError(
                f"virtual rank {rank} cannot go on without rank {', '.join(map(str, sorted(missing())))}: {why}. Every "
                "rank must make the same calls in the same order"
            )


class VirtualExchange(Exchange):
    """Exchange of one virtual rank: copies, on a separate stream on CUDA."""

    def __init__(self, hub: _Hub, rank: int) -> None:
        self.hub, self.rank, self.world = hub, rank, hub.world
        self._stream: torch.cuda.Stream | None = None

    def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        """All-gather through shared memory."""
        return self.hub.gather(self.rank, list(numbers))  # type: ignore[return-value]

    def shift(
        self, send: Sequence[Tensor], receive: Sequence[Tensor], to: int | None = None, source: int | None = None
    ) -> Pending:
        """Send the buffers to another thread. The received ones are copied in `wait`."""
        message = _Message(list(send))
        to = next_rank(self.rank, self.world) if to is None else to
        source = previous_rank(self.rank, self.world) if source is None else source
        self.hub.send(self.rank, to, message)
        return _Transfer(self, message, list(receive), to, source)

    def sum_(self, values: Tensor, *, in_order: bool = False) -> None:
        """Sum in rank order, so that all ranks get the same bits."""
        if values.is_cuda:
            torch.cuda.current_stream(values.device).synchronize()
        found: list[Tensor] = self.hub.gather(self.rank, values.clone())  # type: ignore[assignment]
        if values.is_cuda:
            torch.cuda.synchronize(values.device)
        values.copy_(sum(found[1:], found[0]))
        if values.is_cuda:
            torch.cuda.current_stream(values.device).synchronize()
        self.hub.gather(self.rank, None)

    def scatter_sum(self, values: Tensor) -> Tensor:
        """The part of this rank of the sum."""
        total = values.clone()
        self.sum_(total)
        return total[self.rank]

    def refuses(self, device: torch.device) -> str | None:
        """None: memory is shared on every device."""
        return None

    def side_stream(self, device: torch.device) -> torch.cuda.Stream:
        """Stream on which this rank copies."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        return self._stream


class _Transfer:
    """A pending transfer between two threads."""

    def __init__(self, exchange: VirtualExchange, sent: _Message, receive: list[Tensor], to: int, source: int) -> None:
        self.exchange, self.sent, self.receive, self.to, self.source = exchange, sent, receive, to, source
        self.free = _record_event(receive)

    def wait(self) -> None:
        """Copy the received buffers, then block until the other rank has copied the sent ones."""
        hub, rank = self.exchange.hub, self.exchange.rank
        message = hub.receive(rank, self.source)
        assert [p.numel() for p in message.parts] == [p.numel() for p in self.receive], "sizes differ between ranks"
        if message.ready is None:
            for target, source in zip(self.receive, message.parts, strict=True):
                target.copy_(source)
                del source  # below, this frame would keep the sender's memory
        else:
            device = self.receive[0].device
            stream = self.exchange.side_stream(device)
            with torch.cuda.stream(stream):
                stream.wait_event(message.ready)
                if self.free is not None:
                    stream.wait_event(self.free)
                for target, source in zip(self.receive, message.parts, strict=True):
                    target.copy_(source, non_blocking=True)
                message.copied = torch.cuda.Event()
                message.copied.record(stream)
            torch.cuda.current_stream(device).wait_event(message.copied)
        hub.confirm(message)
        hub.await_confirmation(rank, self.to, self.sent)
        if self.sent.copied is not None:
            torch.cuda.current_stream(self.receive[0].device).wait_event(self.sent.copied)


def _record_event(parts: Sequence[Tensor]) -> torch.cuda.Event | None:
    """Record an event on the current stream of the device of these tensors. None on the CPU."""
    if not parts or not parts[0].is_cuda:
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(parts[0].device))
    return event


def run_virtual(world: int, work: Callable[[VirtualGroup], T], *, timeout_s: float = 300.0) -> list[T]:
    """Run ``work(group)`` on ``world`` virtual ranks and return the result of each.

    Ranks run under the caller's gradient mode and autocast. The backward of each rank runs in the thread of that rank,
    also on CUDA. There, autograd's single thread per device would run the ranks one after another and deadlock.

    Args:
        world: number of ranks.
        work: function of one rank. If ranks fail, the error of the first one is raised.
        timeout_s: time limit of a rank's wait for another rank in the exchange.

    >>> run_virtual(3, lambda group: (group.rank(), group.size()))
    [(0, 3), (1, 3), (2, 3)]
    """
    if world < 1:
        raise RangeError(f"a group has at least one rank, got world={world}. Were rank and world swapped?")
    hub, serial, modes = _Hub(world, timeout_s), next(_serial), _Modes()
    results: list[T | None] = [None] * world
    failures: list[tuple[int, BaseException]] = []

    def serve(rank: int) -> None:
        name = f"virtual-{serial}-{rank}"
        register_exchange(name, VirtualExchange(hub, rank))
        try:
            # Enter the modes first: torch.inference_mode(False) also enables autograd's own threads.
            with modes.entered(), torch.autograd.set_multithreading_enabled(False):
                results[rank] = work(VirtualGroup(name, rank, world))
            hub.finish(rank, "has finished")
        except BaseException as error:
            failures.append((rank, error))
            hub.finish(rank, "failed")
        finally:
            forget_exchange(name)

    threads = [threading.Thread(target=serve, args=(rank,), daemon=True) for rank in range(world)]
    for thread in threads:
        thread.start()
    stuck = _join(threads, failures, timeout_s)
    if failures:
        error = failures[0][1]
        for rank, place in stuck.items():
            error.add_note(f"virtual rank {rank} has not returned. It is at:\n{place}")
        raise error
    return results  # type: ignore[return-value]


class _Modes:
    """Gradient mode, inference mode and autocast of the calling thread, to enter in another thread."""

    def __init__(self) -> None:
        self.inference, self.grad = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
        self.casts = [
            (kind, torch.get_autocast_dtype(kind)) for kind in AUTOCAST_DEVICES if torch.is_autocast_enabled(kind)
        ]

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Enter these modes in the current thread."""
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(self.inference))
            stack.enter_context(torch.set_grad_enabled(self.grad))
            for kind, dtype in self.casts:
                stack.enter_context(torch.autocast(kind, dtype=dtype))
            yield


def _join(threads: list[threading.Thread], failures: Sequence[object], timeout_s: float) -> dict[int, str]:
    """Join the threads, without a time limit until one fails. After that, wait for at most ``2 * timeout_s``.

    Returns the ranks that still run then, with their stack traces. A rank that hangs makes the others fail in the
    exchange, and it must not make the caller hang too.
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
