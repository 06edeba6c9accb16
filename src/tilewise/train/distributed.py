"""The processes of a run: one, or those that ``torchrun`` started."""

from __future__ import annotations

import gc
import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tilewise.errors import ConfigError, GroupError


@dataclass(frozen=True)
class World:
    """This process among all.

    Args:
        rank, size: place and number of processes.
        device: where this process computes.
        group: the process group; None for one process alone.
    """

    rank: int
    size: int
    device: torch.device
    group: Any = None

    @property
    def is_first(self) -> bool:
        """The process that writes and prints."""
        return self.rank == 0

    def total(self, *values: float) -> list[float]:
        """Sums over all ranks, in float64."""
        sums = torch.tensor(values, dtype=torch.float64, device=self.device)
        if self.group is not None:
            dist.all_reduce(sums, group=self.group)
        return sums.tolist()

    def largest(self, value: float) -> float:
        """The largest over all ranks."""
        found = torch.tensor(value, dtype=torch.float64, device=self.device)
        if self.group is not None:
            dist.all_reduce(found, dist.ReduceOp.MAX, group=self.group)
        return found.item()

    def average_(self, tensor: Tensor) -> None:
        """The mean over all ranks, in place."""
        if self.group is not None:
            dist.all_reduce(tensor, group=self.group)
            tensor /= self.size

    def wait(self) -> None:
        """Until every rank is here."""
        if self.group is not None:
            dist.barrier(group=self.group)

    def close(self) -> None:
        """Leave the process group."""
        if self.group is not None and dist.is_initialized():
            gc.collect()  # DDP, in cycles by now, would hold the group, and its threads abort a process at its end
            dist.destroy_process_group()


def choose_device(name: str, local_rank: int = 0) -> torch.device:
    """The device of a setting: "auto" takes CUDA where there is one."""
    if name not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"the device is auto, cpu or cuda, got {name!r}")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("the device is 'cuda', but torch sees no CUDA device; use 'auto' or 'cpu'")
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", local_rank)


def join_world(device_name: str) -> World:
    """The world that ``torchrun`` describes in the environment, or one process alone."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        return World(0, 1, choose_device(device_name))
    device = choose_device(device_name, int(os.environ.get("LOCAL_RANK", "0")))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    try:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    except (RuntimeError, ValueError) as error:
        raise GroupError(f"cannot join the process group of {size} ranks: {error}. Start with torchrun") from error
    return World(dist.get_rank(), dist.get_world_size(), device, dist.group.WORLD)
