"""Memory sizes with a unit, and the devices of this machine, for ``tilewise plan``."""

from __future__ import annotations

import math
from typing import NamedTuple

from tilewise.errors import RangeError

UNITS = {"": 2**30, "gib": 2**30, "mib": 2**20, "tib": 2**40, "gb": 10**9, "mb": 10**6, "tb": 10**12}


class Devices(NamedTuple):
    """Number of devices, and the memory of one in bytes."""

    number: int
    memory_bytes: int


PAPER_DEVICES = Devices(16, 80 * 2**30)  # of table A3 in "Cut Your Losses in Large-Vocabulary Language Models"


def parse_memory(text: str) -> int:
    """Return a memory size in bytes. A number without a unit is in GiB.

    >>> parse_memory("80GiB") == parse_memory("80") == 80 * 2**30, parse_memory("24 GB")
    (True, 24000000000)
    """
    plain = text.strip().lower().replace("_", "").replace(",", "")
    number = plain.rstrip("abcdefghijklmnopqrstuvwxyz ")
    try:
        size = float(number) * UNITS[plain[len(number) :].strip()]
        if not (math.isfinite(size) and size >= 1):
            raise ValueError
    except (ValueError, KeyError):
        raise RangeError(f"--memory is the memory of one device, such as 80GiB or 24GB, got {text!r}") from None
    return round(size)


def choose_devices(count: int, memory: str) -> Devices:
    """Return the devices that the options describe.

    Without --memory they are the CUDA devices of this machine, or those of the paper if it has none. With --memory and
    without --gpus there is one.
    """
    if count < 0:
        raise RangeError(f"--gpus must be at least 1, got {count}. Leave it out to use the devices of this machine")
    if memory:
        return Devices(count or 1, parse_memory(memory))
    found = find_devices() or PAPER_DEVICES
    return Devices(count or found.number, found.memory_bytes)


def find_devices() -> Devices | None:
    """Return the CUDA devices of this machine with the smallest of their memories, or None."""
    import torch

    if not torch.cuda.is_available():
        return None
    sizes = [torch.cuda.get_device_properties(number).total_memory for number in range(torch.cuda.device_count())]
    return Devices(len(sizes), min(sizes))
