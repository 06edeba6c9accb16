"""Batches that stay in host memory; a chunk at a time is on the device.

While the device works on one chunk, the next one is copied on a stream of its own, from pinned memory. So at
most three chunks are on the device at any moment (one in work, one copied, one whose memory is being handed
back), whatever the size of the batch. For the CPU chunks are plain slices, and nothing is copied.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from tilewise.cache.chunks import Tree, count_rows, map_tensors, take_rows, tensors_of
from tilewise.errors import ConfigError, DeviceError, DtypeError, GradientError, ShapeError

Pin = Literal["chunk", "batch"]


def target_device(device: torch.device | str | None) -> torch.device | None:
    """The device with its index, so that it means the same on another thread."""
    if device is None:
        return None
    try:
        wanted = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise DeviceError(f"a device such as 'cuda' or torch.device('cuda', 1) is needed, got {device!r}") from error
    if wanted.type == "cuda":
        if not torch.cuda.is_available():
            raise DeviceError(f"chunks cannot go to {wanted}: torch sees no CUDA device. Use device='cpu'")
        if wanted.index is None:
            return torch.device("cuda", torch.cuda.current_device())
    return wanted


class HostBatch:
    """A batch in host memory whose chunks are moved to a device when they are needed.

    Args:
        tree: tensors in host memory: one, or a tuple, list, mapping or dataclass of them.
        device: where the encoder runs.
        pin: "chunk" copies each chunk into pinned memory on its way (a batch that is pinned already goes
            straight). "batch" pins the whole batch now: faster chunks, twice the host memory for a moment.

    >>> batch = HostBatch({"pixels": torch.zeros(5, 3)}, "cpu")
    >>> batch.rows, batch.load(slice(4, 5))["pixels"].shape
    (5, torch.Size([1, 3]))
    """

    def __init__(self, tree: Tree, device: torch.device | str, *, pin: Pin = "chunk") -> None:
        if pin not in get_args(Pin):
            raise ConfigError(f"pin is one of {', '.join(get_args(Pin))}, got {pin!r}")
        self.rows = count_rows(tree, "the host batch")
        self.device = target_device(device)
        self.tensors = tensors_of(tree)
        if any(tensor.requires_grad for tensor in self.tensors):
            raise GradientError(
                "a batch in host memory takes no gradient, but one of its tensors requires one. "
                "Give that input without offload, or detach it"
            )
        if pin == "batch" and self._pins:
            tree = map_tensors(_pinned, tree)
            self.tensors = tensors_of(tree)
        self.tree = tree

    @property
    def _pins(self) -> bool:
        return self.device is not None and self.device.type == "cuda"

    def load(self, rows: slice) -> Tree:
        """These rows, still in host memory (pinned if they are bound for a CUDA device)."""
        chunk = take_rows(self.tree, rows)
        return map_tensors(_pinned, chunk) if self._pins else chunk


class LazyBatch:
    """A batch that is made chunk by chunk, for example by decoding images, each time it is needed.

    A step asks for every chunk twice, the second time with the random state of the first, so that random
    augmentation by torch, ``random`` or NumPy's global generator comes out the same.

    Args:
        rows: how many rows there are.
        load: ``load(first, last)`` returns the rows from ``first`` up to and without ``last``, as a tree.
        device: where chunks are moved before they are encoded; ``None`` leaves them where ``load`` puts them.

    >>> words = ["sun", "moon", "star"]
    >>> batch = LazyBatch(3, lambda first, last: torch.tensor([len(w) for w in words[first:last]]))
    >>> batch.load(slice(1, 3))
    tensor([4, 4])
    """

    def __init__(self, rows: int, load: Callable[[int, int], Tree], device: torch.device | str | None = None) -> None:
        if not callable(load):
            raise DtypeError(f"load is a function of (first, last), got {load!r}")
        if rows < 1:
            raise ShapeError(f"a batch needs at least one row, got rows={rows}")
        self.rows = rows
        self.device = target_device(device)
        self._load = load

    def load(self, rows: slice) -> Tree:
        """These rows, made now."""
        return self._load(rows.start, rows.stop)


def _pinned(tensor: Tensor) -> Tensor:
    return tensor if tensor.device.type != "cpu" or tensor.is_pinned() else tensor.pin_memory()


def on_device(count: int, load: Callable[[int], Tree], device: torch.device | None) -> Iterator[Tree]:
    """Chunks 0, 1, ... on the device, each copied while the one before is in work."""
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
        if tensor.device.type != "cpu":  # made on a device, by a stream that the copy would have to wait for
            return tensor.to(device)
        with torch.cuda.stream(side):
            return _pinned(tensor).to(device, non_blocking=True)

    def start_copy(index: int) -> tuple[Tree, Any]:
        return map_tensors(move, load(index)), side.record_event()

    coming = start_copy(0)
    finished: deque[torch.cuda.Event] = deque()
    for index in range(count):
        chunk, copied = coming
        compute.wait_event(copied)
        for tensor in tensors_of(chunk):
            tensor.record_stream(compute)
        coming = start_copy(index + 1) if index + 1 < count else (None, None)
        yield chunk
        del chunk
        # Without this wait the host would run far ahead of the device, and every chunk that it has queued
        # would hold memory. Waiting for the chunk before leaves one in work: the device never runs dry.
        finished.append(compute.record_event())
        if len(finished) > 1:
            finished.popleft().synchronize()
