"""How float32 products are rounded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def matmul_precision(precision: str) -> Iterator[None]:
    """Float32 products as `TileOptions.precision` asks for."""
    before = torch.get_float32_matmul_precision()
    if precision in ("torch", before):
        yield
        return
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
