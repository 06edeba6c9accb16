"""Batches in host memory that are copied to the device chunk by chunk.

While the device computes one chunk, the next one is copied on a separate stream, from pinned memory. So at most three
chunks are on the device at any time: one in use, one being copied, and one being freed. On the CPU, chunks are views
and nothing is copied.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from tilewise._check import check_index
from tilewise.cache.chunks import Tree, count_rows, map_tensors, take_rows, tensors_of
from tilewise.errors import DeviceError, DtypeError, GradientError, ShapeError
from tilewise.options import check_choice

Pin = Literal["chunk", "batch"]


def target_device(device: torch.device | str | None) -> torch.device | None:
    """The device with its index, so that it is the same device in another thread."""
    if device is None:
        return None
    try:
        wanted = torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise DeviceError(
            f"device is for example 'cuda' or torch.device('cuda', 1), got {device!r:.60}. Pass a name like these, or "
            "'cpu'"
        ) from error
    if wanted.type == "cuda":
        if not torch.cuda.is_available():
            raise DeviceError(f"chunks cannot be copied to {wanted}: torch finds no CUDA device. Use device='cpu'")
        if wanted.index is None:
            return torch.device("cuda", torch.cuda.current_device())
    return wanted


class HostBatch:
    """A batch in host memory. Each chunk is copied to a device when it is needed.

    Args:
        tree: a tensor in host memory, or a tuple, list, mapping or dataclass of tensors.
        device: the device of the encoder.
        pin: "chunk" copies each chunk to pinned memory first, unless the batch is already pinned. "batch" pins the
            whole batch now: chunks are faster, and the batch is in host memory twice for a moment.

    >>> batch = HostBatch({"pixels": torch.zeros(5, 3)}, "cpu")
    >>> batch.rows, batch.load(slice(4, 5))["pixels"].shape
    (5, torch.Size([1, 3]))
    """

    def __init__(self, tree: Tree, device: torch.device | str, *, pin: Pin = "chunk") -> None:
        check_choice("pin", pin, get_args(Pin))
        self.rows = count_rows(tree, "the host batch")
        self.device = target_device(device)
        self.tensors = tensors_of(tree)
        if any(tensor.requires_grad for tensor in self.tensors):
            raise GradientError(
                "a batch in host memory cannot have a gradient, but one of its tensors requires one. "
                "Pass that input without offload, or detach it"
            )
        if pin == "batch" and self._pins:
            tree = map_tensors(_pinned, tree)
            self.tensors = tensors_of(tree)
        self.tree = tree

    @property
    def _pins(self) -> bool:
        return self.device is not None and self.device.type == "cuda"

    def load(self, rows: slice) -> Tree:
        """These rows in host memory. They are pinned if the device is a CUDA device."""
        chunk = take_rows(self.tree, rows)
        return map_tensors(_pinned, chunk) if self._pins else chunk


class LazyBatch:
    """A batch whose chunks are made on demand, for example by decoding images.

    A step loads every chunk twice. The second time, the random state of the first is restored, so that random
    augmentation with torch, ``random`` or NumPy's global generator gives the same result.

    Args:
        rows: number of rows.
        load: ``load(first, last)`` returns the rows ``first`` to ``last - 1``, as a tree.
        device: device to which chunks are moved before encoding. With ``None`` they stay on the device of the tensors
            that ``load`` returns.

    >>> words = ["sun", "moon", "star"]
    >>> batch = LazyBatch(3, lambda first, last: torch.tensor([len(w) for w in words[first:last]]))
    >>> batch.load(slice(1, 3))
    tensor([4, 4])
    """

    def __init__(self, rows: int, load: Callable[[int, int], Tree], device: torch.device | str | None = None) -> None:
        if not callable(load):
            raise DtypeError(f"load is a function of (first, last), got {load!r:.60}. Pass a function")
        self.rows = check_index("rows", rows, "Pass the number of rows that load can return")
        if self.rows < 1:
            raise ShapeError(f"a batch needs at least one row, got rows={rows}. Skip empty batches")
        self.device = target_device(device)
        self._load = load

    def load(self, rows: slice) -> Tree:
        """Call ``load`` for these rows."""
        return self._load(rows.start, rows.stop)


def _pinned(tensor: Tensor) -> Tensor:
    return tensor if tensor.device.type != "cpu" or tensor.is_pinned() else tensor.pin_memory()


def on_device(count: int, load: Callable[[int], Tree], device: torch.device | None) -> Iterator[Tree]:
    """Chunks 0, 1, ... on the device. Each is copied while the previous one is in use."""
    if device is not None and device.type == "cuda":
        yield from _prefetched(count, load, device)
        return
    for index in range(count):
        chunk = load(index)
        yield chunk if device is None else map_tensors(lambda tensor: tensor.to(device), chunk)
        del chunk


def _prefetched(count: int, load: Callable[[int], Tree], device: torch.device) -> Iterator[Tree]:
    side = torch.cuda.Stream(device)
    compute = torch.cuda.current_stream(device)

    def move(tensor: Tensor) -> Tensor:
        if tensor.device.type != "cpu":  # on another device; the current stream may still be writing it
            return tensor.to(device)
        with torch.cuda.stream(side):
            return _pinned(tensor).to(device, non_blocking=True)

    def start_copy(index: int) -> tuple[Tree, Any]:
        return map_tensors(move, load(index)), side.record_event()

    upcoming = start_copy(0)
    finished: deque[torch.cuda.Event] = deque()
    for index in range(count):
        chunk, copied = upcoming
        compute.wait_event(copied)
        for tensor in tensors_of(chunk):
            tensor.record_stream(compute)
        upcoming = start_copy(index + 1) if index + 1 < count else (None, None)
        yield chunk
        del chunk
        # Without this synchronization the host would run far ahead of the device, and every queued chunk would use
        # memory. Waiting for the previous chunk leaves one queued, so the device is never idle.
        finished.append(compute.record_event())
        if len(finished) > 1:
            finished.popleft().synchronize()
