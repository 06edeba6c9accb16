"""Communication of a ring: the `Exchange` interface, and its implementation over a `torch.distributed` process group.

An exchange sends flat buffers to the next rank, or to another one, and gathers small integers. The contents of the
buffers and the schedule are defined by its callers.
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
    """A transfer that has been started."""

    def wait(self) -> None:
        """Block until received buffers can be read and sent buffers can be written (on CUDA: by the current stream)."""


class Exchange:
    """A ring of ranks, as one rank uses it. This one is a single process without a group, which sends nothing."""

    rank, world = 0, 1

    def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        """All-gather integers."""
        return [list(numbers)]

    def shift(
        self, send: Sequence[Tensor], receive: Sequence[Tensor], to: int | None = None, source: int | None = None
    ) -> Pending:
        """Start sending flat buffers to a rank and receiving buffers from one: by default the next and the previous."""
        raise AssertionError("a ring of one rank sends nothing")

    def sum_(self, values: Tensor, *, in_order: bool = False) -> None:
        """All-reduce in place: sum. ``in_order``: in rank order, so that no bit depends on the size of the tensor."""

    def scatter_sum(self, values: Tensor) -> Tensor:
        """Reduce-scatter: the sum over all ranks of ``values[rank]``, for this rank."""
        return values[0]

    def refuses(self, device: torch.device) -> str | None:
        """Reason why tensors on this device cannot be sent, or None."""
        return None


class GroupExchange(Exchange):
    """Exchange over a process group: NCCL on GPUs, gloo on CPUs."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank, self.world = group.rank(), group.size()
        self._stream: torch.cuda.Stream | None = None

    def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        """One small all-gather. On CUDA it does not wait for work queued on the current stream."""
        with self._group_errors("agree on sizes"), self._metadata_device() as device:
            mine = torch.tensor(list(numbers), dtype=torch.int64, device=device)
            found = [torch.empty_like(mine) for _ in range(self.world)]
            dist.all_gather(found, mine, group=self.group)
            return [values.tolist() for values in found]

    def shift(
        self, send: Sequence[Tensor], receive: Sequence[Tensor], to: int | None = None, source: int | None = None
    ) -> Pending:
        """Post all transfers of one step as one batch. Empty buffers are not sent."""
        up = next_rank(self.rank, self.world) if to is None else to
        down = previous_rank(self.rank, self.world) if source is None else source
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
        with self._group_errors("post a block"):
            works = dist.batch_isend_irecv(ops)
        return _Works(self, works, self._deadline(started, ops[0].tensor.device))

    def sum_(self, values: Tensor, *, in_order: bool = False) -> None:
        """All-reduce in place: sum."""
        with self._group_errors("all-reduce a sum"):
            if in_order:
                parts = [torch.empty_like(values) for _ in range(self.world)]
                dist.all_gather(parts, values, group=self.group)
                values.copy_(sum(parts[1:], parts[0]))
                return
            dist.all_reduce(values, dist.ReduceOp.SUM, group=self.group)

    def scatter_sum(self, values: Tensor) -> Tensor:
        """Reduce-scatter: the sum over all ranks of ``values[rank]``, for this rank."""
        with self._group_errors("reduce-scatter a sum"):
            mine = torch.empty_like(values[0])
            dist.reduce_scatter_tensor(mine, values.flatten(0, 1), group=self.group)
            return mine

    def refuses(self, device: torch.device) -> str | None:
        """Gloo sends CPU tensors, NCCL sends CUDA tensors."""
        kinds = {kind.type for kind in self.group._device_types}
        wanted = "gloo" if device.type == "cpu" else "nccl"
        if device.type not in kinds:
            return f"its backend sends tensors on {', '.join(sorted(kinds))}, not on {device.type}; use {wanted}"
        backend = self.group._get_backend(device).name()
        if device.type == "cuda" and backend == "gloo":
            return "gloo cannot send CUDA tensors; start the group with backend='nccl' (or 'cpu:gloo,cuda:nccl')"
        return None

    @contextmanager
    def _metadata_device(self) -> Iterator[torch.device]:
        """Device for small integers: the CPU if the group has a CPU backend, else CUDA on a separate stream."""
        if any(kind.type == "cpu" for kind in self.group._device_types):
            yield torch.device("cpu")
            return
        device = torch.device("cuda", torch.cuda.current_device())
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        with torch.cuda.stream(self._stream):
            yield device

    def _deadline(self, started: float, device: torch.device) -> float | None:
        """Time at which a CPU transfer times out. None on CUDA or without a known timeout: the transport decides."""
        options = getattr(self.group._get_backend(device), "options", None)
        limit: timedelta | None = getattr(options, "_timeout", None)
        return started + limit.total_seconds() if limit is not None and device.type == "cpu" else None

    @contextmanager
    def _group_errors(self, action: str) -> Iterator[None]:
        """Convert a failure of the transport into a `GroupError` that names the ranks involved."""
        try:
            yield
        except GroupError:
            raise
        except RuntimeError as error:  # dist.DistBackendError and DistNetworkError are RuntimeErrors
            up, down = next_rank(self.rank, self.world), previous_rank(self.rank, self.world)
            raise GroupError(
                f"rank {self.rank} of {self.world} could not {action}: a rank of the group has exited or did not "
                f"respond within the group's timeout (this rank sends to {up} and receives from {down}). Every rank of "
                f"the group must make the same calls in the same order. Error of the transport: {error}"
            ) from error


class Teams(Exchange):
    """A ring of teams of consecutive ranks: each rank exchanges with the one at its place in the next team."""

    def __init__(self, inner: Exchange, team: int) -> None:
        self.inner, self.team = inner, team
        self.rank, self.world = inner.rank // team, inner.world // team

    def shift(
        self, send: Sequence[Tensor], receive: Sequence[Tensor], to: int | None = None, source: int | None = None
    ) -> Pending:
        """To the next team, from the previous one. A single team keeps what it sends."""
        if self.world > 1:
            rank, world = self.inner.rank, self.inner.world
            return self.inner.shift(send, receive, (rank + self.team) % world, (rank - self.team) % world)
        for into, part in zip(receive, send, strict=True):
            into.copy_(part)
        return _Done()


class _Done:
    """A transfer that is complete."""

    def wait(self) -> None:
        """Return at once."""


class _Works:
    """Pending transfers of one step over a process group."""

    def __init__(self, exchange: GroupExchange, works: list[dist.Work], deadline: float | None) -> None:
        self.exchange, self.works, self.deadline = exchange, works, deadline

    def wait(self) -> None:
        """Block the current stream (CUDA) or this thread (CPU, at most until the group's timeout)."""
        works, self.works = self.works, []
        with self.exchange._group_errors("send a block"):
            for work in works:
                if self.deadline is None:
                    work.wait()
                else:
                    left = max(self.deadline - time.monotonic(), 0.001)
                    work.wait(timedelta(seconds=left))


# Beginnings of the name of a group: its ranks have different rows, where a loss means equal ones; or they have equal
# rows, but each needs the gradient of its own tokens only, and the numbers of `TokensGroup` follow.
ROWS, TOKENS = "rows of ", "tokens "
_registered: dict[str, Exchange] = {}


def register_exchange(name: str, exchange: Exchange) -> None:
    """Use this exchange for the group of this name: for tests, such as ranks that are threads of one process."""
    _registered[name] = exchange


def forget_exchange(name: str) -> None:
    """Undo `register_exchange`."""
    _registered.pop(name, None)


def find_exchange(group_name: str) -> Exchange:
    """Exchange of the group with this name, as `torch.distributed` or `register_exchange` knows it; "" for none."""
    if not group_name:
        return Exchange()
    if group_name.startswith((ROWS, TOKENS)):
        group_name = group_name.split(" of ", 1)[1]
    if group_name in _registered:
        return _registered[group_name]
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
