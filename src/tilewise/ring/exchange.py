"""What a ring needs from a group of ranks, and the exchange over a `torch.distributed` process group.

An exchange moves flat buffers one rank up, and makes ranks agree on small numbers. Everything else (what is in the
buffers, whose turn it is) is known above it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from tilewise.errors import GroupError
from tilewise.ring.schedule import next_rank, previous_rank


class Pending(Protocol):
    """A transfer under way."""

    def wait(self) -> None:
        """Until the received buffers may be read and the sent ones written (on CUDA: by the current stream)."""


class Exchange(Protocol):
    """A group of ranks in a ring, seen from one of them."""

    rank: int
    world: int

    def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        """The numbers of every rank, on every rank."""

    def shift(self, send: Sequence[Tensor], receive: Sequence[Tensor]) -> Pending:
        """Start to send flat buffers to the next rank and to receive others from the previous one."""

    def sum_(self, values: Tensor) -> None:
        """Replace the values by their sum over all ranks."""

    def max_(self, values: Tensor) -> None:
        """Replace the values by their maximum over all ranks."""

    def refuses(self, device: torch.device) -> str | None:
        """Why tensors of this device cannot travel, or None."""


class Alone:
    """The exchange of a process without a group: there is nobody to talk to."""

    rank, world = 0, 1

    def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        """Its own."""
        return [list(numbers)]

    def shift(self, send: Sequence[Tensor], receive: Sequence[Tensor]) -> Pending:
        """Never called: a block of one rank stays."""
        raise AssertionError("a ring of one passes nothing on")

    def sum_(self, values: Tensor) -> None:
        """They are the sum."""

    def max_(self, values: Tensor) -> None:
        """They are the maximum."""

    def refuses(self, device: torch.device) -> str | None:
        """Nothing travels."""
        return None


class GroupExchange:
    """The exchange over a process group: NCCL on GPUs, gloo on CPUs."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank, self.world = group.rank(), group.size()
        self._stream: torch.cuda.Stream | None = None

    def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        """One small all-gather. On CUDA it does not wait for the work that is queued on the current stream."""
        with self._named("agree on sizes"), self._aside() as device:
            mine = torch.tensor(list(numbers), dtype=torch.int64, device=device)
            found = [torch.empty_like(mine) for _ in range(self.world)]
            dist.all_gather(found, mine, group=self.group)
            return [values.tolist() for values in found]

    def shift(self, send: Sequence[Tensor], receive: Sequence[Tensor]) -> Pending:
        """Post all transfers of one step as one batch; empty buffers stay at home."""
        up, down = next_rank(self.rank, self.world), previous_rank(self.rank, self.world)
        moves = [(dist.isend, part, up, tag) for tag, part in enumerate(send)]
        moves += [(dist.irecv, part, down, tag) for tag, part in enumerate(receive)]  # type: ignore[misc]
        started = time.monotonic()
        ops = [
            dist.P2POp(move, part, group=self.group, tag=tag, group_peer=peer)
            for move, part, peer, tag in moves
            if part.numel()
        ]
        if not ops:
            return _Works(self, [], None)
        with self._named("post a block"):
            works = dist.batch_isend_irecv(ops)
        return _Works(self, works, self._deadline(started, ops[0].tensor.device))

    def sum_(self, values: Tensor) -> None:
        """All-reduce."""
        with self._named("add up"):
            dist.all_reduce(values, dist.ReduceOp.SUM, group=self.group)

    def max_(self, values: Tensor) -> None:
        """All-reduce."""
        with self._named("compare"):
            dist.all_reduce(values, dist.ReduceOp.MAX, group=self.group)

    def refuses(self, device: torch.device) -> str | None:
        """Gloo moves CPU memory and NCCL GPU memory."""
        kinds = {kind.type for kind in self.group._device_types}
        wanted = "gloo" if device.type == "cpu" else "nccl"
        if device.type not in kinds:
            return f"its backend moves tensors on {', '.join(sorted(kinds))}, not on {device.type}; use {wanted}"
        backend = self.group._get_backend(device).name()
        if device.type == "cuda" and backend == "gloo":
            return "gloo cannot send CUDA tensors; start the group with backend='nccl' (or 'cpu:gloo,cuda:nccl')"
        return None

    @contextmanager
    def _aside(self) -> Iterator[torch.device]:
        """A device for small numbers, beside the work that is queued for features."""
        if any(kind.type == "cpu" for kind in self.group._device_types):
            yield torch.device("cpu")
            return
        device = torch.device("cuda", torch.cuda.current_device())
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        with torch.cuda.stream(self._stream):
            yield device

    def _deadline(self, started: float, device: torch.device) -> float | None:
        """When a transfer on the CPU is late. On CUDA, and where the group does not say, its transport decides."""
        options = getattr(self.group._get_backend(device), "options", None)
        limit: timedelta | None = getattr(options, "_timeout", None)
        return started + limit.total_seconds() if limit is not None and device.type == "cpu" else None

    @contextmanager
    def _named(self, doing: str) -> Iterator[None]:
        """Failures of the transport as a `GroupError` that says where in the ring they struck."""
        try:
            yield
        except GroupError:
            raise
        except RuntimeError as error:  # dist.DistBackendError and DistNetworkError are RuntimeErrors
            up, down = next_rank(self.rank, self.world), previous_rank(self.rank, self.world)
            raise GroupError(
                f"rank {self.rank} of {self.world} could not {doing}: a rank of the group is gone or did not come "
                f"within the group's timeout (this rank sends to {up} and receives from {down}). Every rank of "
                f"the group must make the same calls in the same order. The transport said: {error}"
            ) from error


class _Works:
    """Transfers of one step over a process group."""

    def __init__(self, exchange: GroupExchange, works: list[dist.Work], deadline: float | None) -> None:
        self.exchange, self.works, self.deadline = exchange, works, deadline

    def wait(self) -> None:
        """On CUDA the current stream waits; on the CPU this thread, at most until the group's timeout."""
        works, self.works = self.works, []
        with self.exchange._named("pass a block on"):
            for work in works:
                if self.deadline is None:
                    work.wait()
                else:
                    left = max(self.deadline - time.monotonic(), 0.001)
                    work.wait(timedelta(seconds=left))


VIRTUAL = "virtual-"  # how the names of virtual groups begin
_registered: dict[str, Exchange] = {}


def register_exchange(name: str, exchange: Exchange) -> None:
    """Let ``group_name == name`` mean this exchange: virtual ranks, and tests that count or slow it down."""
    _registered[name] = exchange


def forget_exchange(name: str) -> None:
    """Undo `register_exchange`."""
    _registered.pop(name, None)


def find_exchange(group_name: str) -> Exchange:
    """The exchange of a group, by the name that `torch.distributed` (or `register_exchange`) gave it."""
    if group_name in _registered:
        return _registered[group_name]
    if group_name.startswith(VIRTUAL):
        raise GroupError(f"the virtual group {group_name!r} is over: virtual ranks live inside of run_virtual only")
    if not dist.is_available() or not dist.is_initialized():
        raise GroupError(
            f"no process group {group_name!r}: torch.distributed is not initialized in this process. Call "
            "torch.distributed.init_process_group, or pass group=None"
        )
    try:
        group = dist.distributed_c10d._resolve_process_group(group_name)  # type: ignore[arg-type]
    except RuntimeError as error:
        raise GroupError(f"no process group {group_name!r}; was it destroyed? {error}") from error
    return GroupExchange(group)
