"""Precision of float32 products.

PyTorch has two settings: `torch.set_float32_matmul_precision`, and `fp32_precision` of `torch.backends`. The first also
sets the second. If only the second was set, `torch.get_float32_matmul_precision` raises an error.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

NOTHING = contextlib.nullcontext()


def float32_precision() -> str:
    """The current precision on a GPU, from either setting: "highest", or "high" if TF32 is permitted."""
    return "high" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "highest"


def matmul_precision(precision: str) -> contextlib.AbstractContextManager[None]:
    """A context in which float32 products have the precision of `TileOptions.precision`. "torch" costs nothing."""
    return NOTHING if precision == "torch" else _changed_precision(precision)


@contextlib.contextmanager
def _changed_precision(precision: str) -> Iterator[None]:
    backends = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    saved = [backend.fp32_precision for backend in backends]
    if set(saved) <= ({"tf32"} if precision == "high" else {"ieee", "none"}):
        yield
        return
    try:
        before = torch.get_float32_matmul_precision()
    except RuntimeError:  # only `fp32_precision` was set
        before = None
    if before is not None:
        torch.set_float32_matmul_precision(precision)
    else:
        for backend in backends:
            backend.fp32_precision = "tf32" if precision == "high" else "ieee"
    try:
        yield
    finally:
        if before is not None:
            torch.set_float32_matmul_precision(before)
        for backend, value in zip(backends, saved, strict=True):
            backend.fp32_precision = value
