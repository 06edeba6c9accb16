"""A number of a device on its way to the host."""

from __future__ import annotations

import torch
from torch import Tensor


class HostScalar:
    """The number is copied when the device comes to it; the host goes on, and waits only when it asks."""

    def __init__(self, number: Tensor) -> None:
        """``number``: one, on any device."""
        self.there, self.arrived = number, None
        if number.is_cuda:
            self.there = torch.empty(number.shape, dtype=number.dtype, device="cpu", pin_memory=True)
            self.there.copy_(number, non_blocking=True)
            self.arrived = torch.cuda.Event()
            self.arrived.record()

    def __call__(self) -> float:
        """The number."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.there.item()
