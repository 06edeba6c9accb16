"""How float32 products are rounded.

PyTorch is told in two ways: `torch.set_float32_matmul_precision`, and `fp32_precision` of `torch.backends`. The first
sets the second too; after the second alone, asking by the first is an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def float32_precision() -> str:
    """What holds for a GPU, whichever way it was told: "highest", or "high" where TF32 is permitted."""
    return "high" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "highest"


@contextmanager
def matmul_precision(precision: str) -> Iterator[None]:
    """Float32 products as `TileOptions.precision` asks for."""
    ways = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    held = [way.fp32_precision for way in ways]
    if precision == "torch" or set(held) <= ({"tf32"} if precision == "high" else {"ieee", "none"}):
        yield
        return
    try:
        before = torch.get_float32_matmul_precision()
    except RuntimeError:  # told by the second way alone
        before = None
    if before is not None:
        torch.set_float32_matmul_precision(precision)
    else:
        for way in ways:
            way.fp32_precision = "tf32" if precision == "high" else "ieee"
    try:
        yield
    finally:
        if before is not None:
            torch.set_float32_matmul_precision(before)
        for way, value in zip(ways, held, strict=True):
            way.fp32_precision = value
