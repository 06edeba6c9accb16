"""Record and restore the random state of all devices in use.

A gradient cache encodes each chunk of a batch twice, first without a graph and then with one, and both passes must draw
the same dropout masks. So the state is recorded before each chunk of the first pass and restored before the same chunk
of the second pass. After the second pass the state is the same as before it, so later random numbers are those of a
step without a cache over the same chunks.

The state includes torch's generators of the CPU and of the devices in use, Python's ``random``, and NumPy's global
generator if NumPy is loaded (some audio and vision models use it).
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
    """The devices other than the CPU whose random generator an encoder may use.

    Without known modules, this includes the current CUDA device if CUDA is initialized.
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
        """Record the state of the CPU's generators and of these devices."""
        numpy = sys.modules.get("numpy")
        return cls(
            torch_cpu=torch.get_rng_state(),
            torch_devices=tuple((device, _device_state(device)) for device in devices),
            python=random.getstate(),
            numpy=numpy.random.get_state() if numpy is not None else None,
        )

    def restore(self) -> None:
        """Restore the state of every generator."""
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
def preserve_random_state(devices: Iterable[torch.device] = ()) -> Iterator[None]:
    """Restore the random state afterwards, also after an error."""
    before = RandomState.record(devices)
    try:
        yield
    finally:
        before.restore()
