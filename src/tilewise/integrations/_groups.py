"""The process group of a drop-in whose signature has only a world size, a rank or a flag."""

from __future__ import annotations

import torch.distributed as dist

from tilewise.errors import GroupError


def world_group(world_size: int | None = None, rank: int | None = None) -> dist.ProcessGroup | None:
    """The group of all ranks, or None for one process. Checked against the arguments.

    Args:
        world_size: number of ranks that the caller expects. 1 means this process only, also if there is a group. None
            means all ranks.
        rank: rank of this process that the caller expects, or None to skip the check.
    """
    existing = dist.get_world_size() if is_initialized() else 1
    expected = existing if world_size is None else world_size
    if expected == 1:
        return None
    if expected != existing:
        raise GroupError(
            f"world_size={expected}, but torch.distributed has {existing} rank{'s' if existing > 1 else ''}. "
            "Call torch.distributed.init_process_group before the loss, and pass its world size"
        )
    if rank is not None and rank != dist.get_rank():
        raise GroupError(f"rank={rank}, but this process is rank {dist.get_rank()} of torch.distributed. Pass that")
    return dist.group.WORLD


def is_initialized() -> bool:
    """Whether there is a process group."""
    return dist.is_available() and dist.is_initialized()
