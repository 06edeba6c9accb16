"""Random features, vectors and keys of which the cases of tests/kernels/pair_cases.py are made."""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise.kernels.spec import stat_dtype


class Maker:
    """Random tensors of one type on one device, the same numbers for all of them (up to rounding)."""

    def __init__(self, dtype: torch.dtype, device: str = "cpu", size: int = 1, seed: int = 0) -> None:
        self.dtype, self.device, self.size = dtype, device, size
        self.generator = torch.Generator().manual_seed(seed)

    def rows(self, count: int) -> int:
        """A number of rows at this size; never a multiple of a power of two above 1."""
        return count if count < 3 or self.size == 1 else count * self.size + (count * self.size) % 2 + 1

    def features(self, n: int, d: int, length: float = 1.0) -> Tensor:
        """(n, d), rows of about this length."""
        return self._to(torch.randn(n, d, generator=self.generator, dtype=torch.float64) * (length / max(d, 1) ** 0.5))

    def vector(self, n: int, spread: float = 1.0) -> Tensor:
        """(n,) in the type of the statistics."""
        values = torch.randn(n, generator=self.generator, dtype=torch.float64) * spread
        return values.to(self.device, stat_dtype(self.dtype))

    def number(self, value: float) -> Tensor:
        return torch.tensor(value, device=self.device, dtype=stat_dtype(self.dtype))

    def integers(self, high: int, n: int) -> Tensor:
        return torch.randint(0, high, (n,), generator=self.generator).to(self.device)

    def index(self, n: int) -> Tensor:
        return torch.arange(n, device=self.device)

    def _to(self, values: Tensor) -> Tensor:
        return values.to(self.device, self.dtype)
