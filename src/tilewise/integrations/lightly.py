"""`NTXentLoss` with lightly's signature. Like lightly, it normalizes the features.

- from lightly.loss import NTXentLoss
+ from tilewise.integrations.lightly import NTXentLoss
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tilewise.errors import ConfigError, GroupError, ShapeError
from tilewise.integrations._groups import is_initialized, world_group
from tilewise.losses.info_nce import info_nce
from tilewise.losses.nt_xent import nt_xent
from tilewise.options import TileOptions


class NTXentLoss(nn.Module):
    """lightly's ``NTXentLoss``: `tilewise.nt_xent`, or `tilewise.info_nce` against the memory bank if there is one.

    Args:
        temperature: divides the cosines; a tensor that requires grad gets its exact gradient.
        memory_bank_size: 0 for none (SimCLR), or (entries, features) for a queue of second views, which are then the
            only negatives (MoCo). It starts with random unit vectors. A batch is added if ``out0`` requires a gradient,
            so evaluation does not change it. With a number of entries alone, the first batch determines the features.
        gather_distributed: use the negatives of all ranks. With a memory bank, the second views of all ranks are added
            to it. Needs an initialized process group.
        options: how to compute it. No option changes the result beyond rounding.

    Over several ranks, each rank returns its share of the global mean, so that DDP's averaging gives the gradient of
    the global mean, for any split of the samples. With a memory bank, all ranks need the same number of samples.

    >>> x = torch.eye(2)
    >>> round(NTXentLoss()(x, x).item(), 4)
    0.2395
    """

    bank: Tensor | None

    def __init__(
        self,
        temperature: float | Tensor = 0.5,
        memory_bank_size: int | Sequence[int] = 0,
        gather_distributed: bool = False,
        *,
        options: TileOptions | None = None,
    ) -> None:
        super().__init__()
        self.temperature = temperature  # an nn.Parameter registers itself and is learned
        self.memory_bank_size, self.gather_distributed, self.options = memory_bank_size, gather_distributed, options
        if gather_distributed and not dist.is_available():
            raise ConfigError(
                "gather_distributed=True needs torch.distributed, which this build of PyTorch does not have. Use "
                "gather_distributed=False"
            )
        self.entries, features = _bank_size(memory_bank_size)
        known = self.entries and features
        self.register_buffer("bank", _new_bank(self.entries, features) if known else None, persistent=False)
        self.place = 0  # index of the next entry to overwrite

    def forward(self, out0: Tensor, out1: Tensor) -> Tensor:
        """The loss of two views of each sample, (n, d) each. Row i of both is sample i."""
        if out0.shape != out1.shape:
            raise ShapeError(
                f"out0 and out1 are two views of the same samples, got {tuple(out0.shape)} and {tuple(out1.shape)}. "
                "Did a filter drop samples on one side only?"
            )
        group = self._group()
        first, second = F.normalize(out0, dim=1), F.normalize(out1, dim=1)
        if self.entries and self.bank is None:
            with torch.inference_mode(False):  # a later training step writes into it
                kind = torch.float64 if first.dtype == torch.float64 else torch.float32
                self.bank = _new_bank(self.entries, first.shape[1]).to(first.device, kind)
        if self.bank is not None:
            return self._against_bank(first, second, group, update=first.requires_grad)
        return nt_xent(torch.cat([first, second]), temperature=self.temperature, group=group, options=self.options)

    def _group(self) -> dist.ProcessGroup | None:
        if not self.gather_distributed:
            return None
        if not is_initialized():
            raise GroupError(
                "gather_distributed=True needs a process group, but torch.distributed is not initialized. Call "
                "torch.distributed.init_process_group, or use gather_distributed=False"
            )
        return world_group()

    def _against_bank(self, first: Tensor, second: Tensor, group: dist.ProcessGroup | None, *, update: bool) -> Tensor:
        assert self.bank is not None
        if self.bank.shape[1] != first.shape[1]:
            raise ShapeError(
                f"the memory bank has {self.bank.shape[1]} features, got {tuple(first.shape)}. "
                f"Use memory_bank_size=({self.bank.shape[0]}, {first.shape[1]})"
            )
        # A copy, because the bank changes before backward uses it.
        negatives = self.bank.to(first, copy=True)
        if update:
            self._enqueue(second.detach(), group)
        return info_nce(first, second, negatives, temperature=self.temperature, in_batch=False, options=self.options)

    @torch.no_grad()
    def _enqueue(self, batch: Tensor, group: dist.ProcessGroup | None) -> None:
        """Overwrite the oldest entries. At the end of the bank, the rest of the batch is dropped, as in lightly."""
        assert self.bank is not None
        if group is not None:
            parts = [torch.empty_like(batch) for _ in range(dist.get_world_size(group))]
            dist.all_gather(parts, batch.contiguous(), group=group)
            batch = torch.cat(parts)
        count = min(batch.shape[0], self.bank.shape[0] - self.place)
        self.bank[self.place : self.place + count] = batch[:count].to(self.bank)
        self.place = (self.place + count) % self.bank.shape[0]


def _new_bank(entries: int, features: int) -> Tensor:
    return F.normalize(torch.randn(entries, features), dim=1)


def _bank_size(size: int | Sequence[int]) -> tuple[int, int]:
    """(entries, features): entries are 0 for no bank, features are 0 if the first batch determines them."""
    entries, features = (size, 0) if isinstance(size, int) else (*size, 0, 0)[:2]
    wrong = not isinstance(size, int) and (len(size) not in (1, 2) or (len(size) == 2 and entries > 0 and features < 1))
    if entries < 0 or wrong:
        shown = size if isinstance(size, int) else tuple(size)
        raise ConfigError(f"memory_bank_size is a number of entries or (entries, features), got {shown}. 0 is no bank")
    return entries, features
