"""Record the random state of every device in use, and replay it.

The second encoding of a chunk must draw the same dropout masks as the first. So the state is recorded before
each chunk of the first pass and put back before the same chunk of the second. Around the second pass the
state is kept: once it is over, the random stream goes on where an uncached step would have left it.

Recorded are torch's generators of the CPU and of the devices in use, Python's ``random``, and NumPy's global
generator if NumPy is loaded (some audio and vision models draw their masks there).
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


def random_devices(
    tensors: Iterable[Tensor], modules: Sequence[nn.Module], others: Iterable[torch.device] = ()
) -> tuple[torch.device, ...]:
    """The devices with a random generator of their own (the CPU aside) that an encoder is seen to use.

    An encoder that shows no module may draw on the current CUDA device, if CUDA is in use at all.
    """
    devices = {tensor.device for tensor in tensors} | set(others)
    if not modules and torch.cuda.is_initialized():
        devices.add(torch.device("cuda", torch.cuda.current_device()))
    for module in modules:
        devices |= {parameter.device for parameter in module.parameters()}
        devices |= {buffer.device for buffer in module.buffers()}
    return tuple(sorted((d for d in devices if d.type not in ("cpu", "meta")), key=str))


@dataclass(frozen=True)
class RandomState:
    """The random state of this process at one moment.

    >>> state = RandomState.record()
    >>> first = torch.rand(3)
    >>> state.restore()
    >>> torch.equal(first, torch.rand(3))
    True
    """

    torch_cpu: Tensor
    torch_devices: tuple[tuple[torch.device, Tensor], ...]
    python: Any
    numpy: Any

    @classmethod
    def record(cls, devices: Iterable[torch.device] = ()) -> RandomState:
        """The state of the CPU's generators and of these devices'."""
        numpy = sys.modules.get("numpy")
        return cls(
            torch_cpu=torch.get_rng_state(),
            torch_devices=tuple((device, _device_state(device)) for device in devices),
            python=random.getstate(),
            numpy=numpy.random.get_state() if numpy is not None else None,
        )

    def restore(self) -> None:
        """Put every generator back to where it was."""
        torch.set_rng_state(self.torch_cpu)
        for device, state in self.torch_devices:
            module = torch.get_device_module(device)
            if device.type == "mps":
                module.set_rng_state(state)
            else:
                module.set_rng_state(state, device)
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)


def _device_state(device: torch.device) -> Tensor:
    module = torch.get_device_module(device)
    state: Tensor = module.get_rng_state() if device.type == "mps" else module.get_rng_state(device)
    return state


@contextmanager
def kept_random_state(devices: Iterable[torch.device] = ()) -> Iterator[None]:
    """Whatever is drawn inside leaves no trace outside, even after an error."""
    before = RandomState.record(devices)
    try:
        yield
    finally:
        before.restore()
