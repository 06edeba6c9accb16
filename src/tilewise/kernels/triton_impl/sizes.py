"""Block sizes from a plain table: one row per architecture, kernel and width of the type.

`benchmarks/tune.py` measures candidates and prints rows for this table. A card that is not listed gets the safe row.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Sizes:
    """How one kernel cuts its work."""

    rows: int  # of a tile
    cols: int
    depth: int  # features at a time
    warps: int
    stages: int
    programs: int  # resident programs per multiprocessor
    group: int  # row tiles that share their column tiles in the cache
    pieces: int = 1  # in which a tile is written: less shared memory
    strip: int = 1  # row tiles whose columns one program adds up


# (major compute capability, bytes of the type) -> (forward, gradient)
TABLE: dict[tuple[int, int], tuple[Sizes, Sizes]] = {
    (8, 2): (Sizes(128, 128, 32, 4, 3, 2, 8), Sizes(128, 128, 32, 8, 3, 1, 8)),
    (8, 4): (Sizes(64, 64, 32, 4, 3, 2, 8), Sizes(64, 64, 32, 4, 3, 2, 8)),
    (9, 2): (Sizes(128, 128, 64, 4, 3, 2, 16, strip=8), Sizes(128, 128, 64, 4, 3, 2, 16, pieces=4)),
    (9, 4): (Sizes(128, 64, 32, 4, 3, 2, 8), Sizes(128, 64, 32, 4, 3, 2, 8)),
    (10, 2): (Sizes(128, 128, 64, 4, 2, 2, 16), Sizes(128, 128, 32, 4, 2, 2, 8)),
    (10, 4): (Sizes(64, 64, 32, 4, 2, 2, 8), Sizes(64, 64, 32, 4, 2, 2, 8)),
}
# From WIDE features on the product outweighs the exponentials, and larger tiles pay where no columns are summed.
WIDE = 1024
WIDE_TABLE: dict[tuple[int, int], tuple[Sizes, Sizes]] = {
    (9, 2): (Sizes(128, 256, 64, 8, 3, 1, 16), Sizes(128, 256, 64, 8, 3, 1, 16)),
}
SAFE = {
    2: (Sizes(64, 64, 32, 4, 2, 2, 8), Sizes(64, 64, 32, 4, 2, 2, 8)),
    4: (Sizes(32, 32, 32, 4, 2, 2, 8), Sizes(32, 32, 32, 4, 2, 2, 8)),
}
INTERPRETED = Sizes(64, 64, 64, 1, 1, 1, 2)  # the interpreter pays per block operation: few, large blocks


def interpreted() -> bool:
    """Whether Triton runs its interpreter, on the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def sizes_for(device: torch.device, dtype: torch.dtype, width: int, *, columns: bool) -> tuple[Sizes, Sizes]:
    """The sizes of the forward and of the gradient kernel; ``columns``: whether statistics of columns are wanted."""
    if device.type != "cuda":
        return INTERPRETED, INTERPRETED
    major, minor = torch.cuda.get_device_capability(device)
    small = (major, minor) in ((8, 6), (8, 9), (12, 0), (12, 1))  # 100 KiB of shared memory, not 160 to 228
    if small:
        return SAFE[dtype.itemsize]
    key = major, dtype.itemsize
    forward, gradient = TABLE.get(key, SAFE[dtype.itemsize])
    if width >= WIDE and key in WIDE_TABLE:
        wide_forward, gradient = WIDE_TABLE[key]
        forward = forward if columns else wide_forward
    return forward, gradient


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """How many of them the card has; 1 in the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
