"""The processes of a run: a single one, or the ranks that ``torchrun`` started."""

from __future__ import annotations

import gc
import os
import socket
import time
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tilewise.errors import ConfigError, GroupError

JOIN_S = 300.0  # for rank 0 to be reachable


@dataclass(frozen=True)
class World:
    """Rank, device and group of this process, and the number of all processes.

    Args:
        rank, size: rank of this process, and number of processes.
        device: device of this process.
        group: the process group; None for a single process.
    """

    rank: int
    size: int
    device: torch.device
    group: Any = None

    @property
    def is_first(self) -> bool:
        """Whether this is the process that writes and prints."""
        return self.rank == 0

    def total(self, *values: float) -> list[float]:
        """Return the sums over all ranks, in float64."""
        sums = torch.tensor(values, dtype=torch.float64, device=self.device)
        if self.group is not None:
            dist.all_reduce(sums, group=self.group)
        return sums.tolist()

    def largest(self, value: float) -> float:
        """Return the maximum over all ranks."""
        found = torch.tensor(value, dtype=torch.float64, device=self.device)
        if self.group is not None:
            dist.all_reduce(found, dist.ReduceOp.MAX, group=self.group)
        return found.item()

    def average_(self, tensor: Tensor) -> None:
        """Replace a tensor with its mean over all ranks, in place."""
        if self.group is not None:
            dist.all_reduce(tensor, group=self.group)
            tensor /= self.size

    def wait(self) -> None:
        """Block until every rank has reached this call."""
        if self.group is not None:
            dist.barrier(group=self.group)

    def close(self) -> None:
        """Leave the process group."""
        if self.group is not None and dist.is_initialized():
            # DDP objects in reference cycles keep the group alive. Its threads would abort the program at its exit.
            gc.collect()
            dist.destroy_process_group()


def choose_device(name: str, local_rank: int = 0, local_size: int = 1) -> torch.device:
    """Return the device that the setting names. "auto" is CUDA if it is available, otherwise the CPU.

    Args:
        name: auto, cpu or cuda.
        local_rank: rank of this process among those of this machine. Each rank has a GPU of its own.
        local_size: number of ranks on this machine.
    """
    if name not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"the device must be auto, cpu or cuda, got {name!r}")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("the device is 'cuda', but torch sees no CUDA device; use 'auto' or 'cpu'")
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    count, wanted = torch.cuda.device_count(), max(local_size, local_rank + 1)
    if wanted > count:
        raise ConfigError(
            f"{wanted} ranks on this machine need {wanted} GPUs, one for each, and torch sees {count}. Start "
            f"fewer ranks (--nproc-per-node {count} of torchrun), set loop.device=cpu, or check CUDA_VISIBLE_DEVICES: "
            "every rank must see all GPUs of its machine"
        )
    return torch.device("cuda", local_rank)


def join_world(device_name: str) -> World:
    """Join the ranks that ``torchrun`` describes in the environment. Without it, or with one rank, no group is made."""
    size = _count("WORLD_SIZE", 1)
    if size == 1:
        return World(0, 1, choose_device(device_name))
    device = choose_device(device_name, _count("LOCAL_RANK", 0), _count("LOCAL_WORLD_SIZE", 1))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    _wait_for_first_rank(size)
    try:
        # Torch's compiler imports this module. If that happens after the group was made, the module keeps a reference
        # to the group for ever. If it is imported before, it has no reference, and the group ends when it is destroyed.
        import_module("torch.distributed.nn.functional")

        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    except (RuntimeError, ValueError) as error:
        why = str(error).rstrip(".")
        raise GroupError(f"cannot join the process group of {size} ranks: {why}. Start with torchrun") from error
    return World(dist.get_rank(), dist.get_world_size(), device, dist.group.WORLD)


def _wait_for_first_rank(size: int, seconds: float = JOIN_S) -> None:
    """Block until something listens where the environment says that rank 0 is. Unlike torch's wait, signals end it."""
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
    if os.environ.get("RANK", "0") == "0" or not host or not port.isdecimal():
        return
    until = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=5.0).close()
            return
        except (OSError, OverflowError) as error:
            if time.monotonic() > until:
                raise GroupError(
                    f"cannot join the process group of {size} ranks: nothing has answered at {host}:{port} "
                    f"(MASTER_ADDR, MASTER_PORT) for {seconds:g} seconds: {error}. Start rank 0 there, and check that "
                    "this machine can reach it; or start all ranks with torchrun"
                ) from error
            time.sleep(0.2)


def is_lost_rank(error: BaseException | None) -> bool:
    """Whether a collective failed, because another rank has ended or cannot be reached. gloo has no class for this."""
    return isinstance(error, dist.DistError) or "gloo" in str(error).lower()


def _count(name: str, default: int) -> int:
    """Return a number that ``torchrun`` puts into the environment."""
    text = os.environ.get(name, str(default))
    if not text.isdecimal() or len(text) > 9 or int(text) < min(default, 1):
        raise GroupError(f"the environment has {name}={text!r}, which is no number of ranks. Unset it, or use torchrun")
    return int(text)
