"""A device-to-host copy of a few numbers that does not block until their values are needed."""

from __future__ import annotations

import torch
from torch import Tensor


class HostScalar:
    """Asynchronous device-to-host copy of one scalar, or a few. Reading it blocks until the copy is done."""

    def __init__(self, number: Tensor) -> None:
        """Start the copy of ``number``, a small tensor on any device."""
        self.host, self.copied = number, None
        if number.is_cuda:
            self.host = torch.empty(number.shape, dtype=number.dtype, device="cpu", pin_memory=True)
            self.host.copy_(number, non_blocking=True)
            self.copied = torch.cuda.Event()
            self.copied.record(torch.cuda.current_stream(number.device))  # of the copy; not of the current device

    def __call__(self) -> float:
        """The number."""
        return self.tensor().item()

    def tensor(self) -> Tensor:
        """The numbers, on the host."""
        if self.copied is not None:
            self.copied.synchronize()
        return self.host
