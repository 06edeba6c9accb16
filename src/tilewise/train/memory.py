"""Memory of a step, as in equation 10 of the papers.

    M_peak = M_data + max(M_loss, M_backbone)

On CUDA the parts are measured. On the CPU, where torch has no memory counters, they are the sums of the tensor sizes.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tilewise.train.sharding import local

MIB = 2**20
# Dense score matrices alive at the peak of backward, measured for F.cross_entropy in both directions:
# 16,448 MiB at n = 32,768 in float32, which is four times 4 n^2 bytes.
DENSE_MATRICES = 4


@dataclass(frozen=True)
class MemoryUse:
    """Bytes of one step on one device.

    Args:
        data: the part of the batch that is on the device.
        loss: features, their gradients and the workspace of the loss.
        backbone: weights, gradients, optimizer state and the activations of one chunk.
        dense_loss: the memory of a loss that stores all scores.
        measured: whether the device's allocator measured the numbers. Otherwise they are sums of tensor sizes.
    """

    data: int
    loss: int
    backbone: int
    dense_loss: int
    measured: bool

    @property
    def peak(self) -> int:
        """Equation 10."""
        return self.data + max(self.loss, self.backbone)

    @property
    def dense_peak(self) -> int:
        """Equation 10 with stored scores."""
        return self.data + max(self.dense_loss, self.backbone)

    def state(self) -> dict[str, Any]:
        """Plain values, with the two peaks."""
        return {**asdict(self), "peak": self.peak, "dense_peak": self.dense_peak}


def tensor_bytes(tensors: Any) -> int:
    """Bytes of these tensors."""
    return sum(t.numel() * t.element_size() for t in tensors)


def dense_loss_bytes(rows: int, cols: int, width: int) -> int:
    """Stored scores in float32, features and gradients.

    >>> dense_loss_bytes(32_768, 32_768, 512) // MIB
    16641
    """
    return DENSE_MATRICES * 4 * rows * cols + tiled_loss_bytes(rows, cols, width, 0)


def tiled_loss_bytes(rows: int, cols: int, width: int, workspace: int) -> int:
    """Features and gradients in float32, four statistics per row and column, and the workspace."""
    return 2 * 4 * (rows + cols) * width + 4 * 4 * (rows + cols) + workspace


def activation_bytes(run: Callable[[], Any]) -> int:
    """Return the bytes that autograd saves for backward while `run` builds its graph. Each storage counts once."""
    seen: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        seen[storage._cdata] = storage.nbytes()  # also distinguishes tensors without data
        return tensor

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        result = run()
    kept = sum(seen.values())
    del result
    return kept


def weight_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Weights, their gradients, and the optimizer's state on this rank."""
    learned = tensor_bytes(local(p) for p in model.parameters() if p.requires_grad)
    state = tensor_bytes(local(v) for s in optimizer.state.values() for v in s.values() if isinstance(v, Tensor))
    return tensor_bytes(map(local, model.parameters())) + learned + state


class CudaMemory:
    """Peaks of the parts of one step on a CUDA device.

    Call `start` before the step, pass `watch` to the objective, and call `finish` afterwards.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.loss = self.others = self._at_loss = 0

    def start(self) -> None:
        """Reset the counters."""
        self.loss = self.others = 0
        torch.cuda.reset_peak_memory_stats(self.device)

    def watch(self, image: Tensor, text: Tensor) -> None:
        """Mark the end of the encoders. From here to the gradients of the features, the memory belongs to the loss."""
        self._turn("others")
        features = tensor_bytes((image, text))
        self._at_loss = torch.cuda.memory_allocated(self.device) - features
        waiting = [t for t in (image, text) if t.requires_grad]
        remaining = len(waiting)

        def done(grad: Tensor) -> None:
            nonlocal remaining
            remaining -= 1
            if remaining == 0:
                self._turn("loss")

        for tensor in waiting:
            tensor.register_hook(done)

    @property
    def peak(self) -> int:
        """Return the peak of allocated bytes on the device in the step."""
        return max(self.others, self._at_loss + self.loss)

    def _turn(self, part: str) -> None:
        peak = torch.cuda.max_memory_allocated(self.device)
        value = peak - self._at_loss if part == "loss" else peak
        setattr(self, part, max(getattr(self, part), value))
        torch.cuda.reset_peak_memory_stats(self.device)

    def finish(self, data: int, rows: int, cols: int, width: int) -> MemoryUse:
        """Read the counters after the step."""
        self._turn("others")
        return MemoryUse(data, self.loss, self.others - data, dense_loss_bytes(rows, cols, width), True)


def process_peak_bytes() -> int:
    """Return the peak resident memory of this process."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
