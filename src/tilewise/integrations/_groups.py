"""Which process group a drop-in means, when its signature only has numbers or a flag for it."""

from __future__ import annotations

import torch.distributed as dist

from tilewise.errors import GroupError


def world_group(world_size: int | None = None, rank: int | None = None) -> dist.ProcessGroup | None:
    """All ranks of ``torch.distributed``, or None for one process; checked against what the caller expects.

    Args:
        world_size: the number of ranks that the caller counts on. 1: this process alone, whatever group there is.
            None: all ranks, if there are several.
        rank: this process's number among them, or None to ask nobody.
    """
    there = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    wanted = there if world_size is None else world_size
    if wanted == 1:
        return None
    if wanted != there:
        raise GroupError(
            f"world_size={wanted}, but torch.distributed has {there} rank{'s' if there > 1 else ''}. "
            "Call torch.distributed.init_process_group before the loss, and pass its world size"
        )
    if rank is not None and rank != dist.get_rank():
        raise GroupError(f"rank={rank}, but torch.distributed calls this process rank {dist.get_rank()}. Pass that")
    return dist.group.WORLD
