"""Sharded towers (FSDP2): each rank has a shard of every weight, of its gradient and of its optimizer state.

Checkpoints are not sharded: the first rank gathers the tensors one by one and writes them as a single process does.
`torch.distributed.tensor` takes a second to import, so it is imported only where something is sharded.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from tilewise.train.distributed import World
    from tilewise.train.models import TwoTowers


def is_sharded(tensor: Tensor) -> bool:
    """Whether this is a DTensor."""
    return hasattr(tensor, "device_mesh")


def shard_towers(model: TwoTowers, world: World) -> TwoTowers:
    """Shard both towers over the ranks, block by block, and move them to the device. The scale stays whole."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(world.device.type, (world.size,))
    for tower in (model.image, model.text):
        for block in blocks_of(tower):
            fully_shard(block, mesh=mesh)
        fully_shard(tower, mesh=mesh, reshard_after_forward=True)
    model.scale.to(world.device)
    return model


def blocks_of(tower: nn.Module) -> list[nn.Module]:
    """The repeated blocks of a tower: the members of its outermost lists of modules of one class.

    >>> tower = nn.Sequential(nn.Linear(2, 2), nn.ModuleList([nn.GELU(), nn.GELU()]), nn.Tanh())
    >>> blocks_of(nn.ModuleDict({"body": tower}))
    [GELU(approximate='none'), GELU(approximate='none')]
    """
    found = []
    for child in tower.children():
        members = list(child.children())
        alike = isinstance(child, nn.ModuleList | nn.Sequential) and len({type(member) for member in members}) == 1
        found += members if alike else blocks_of(child)
    return found


def local(tensor: Any) -> Tensor:
    """This rank's shard, which shares its memory with the sharded tensor. A tensor that is not sharded is whole."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def like(whole: Tensor, other: Any) -> Tensor:
    """The whole tensor sharded as the other one is. Every rank has the whole tensor, so nothing is sent."""
    if not is_sharded(other):
        return whole
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole.to(other.device), other.device_mesh, other.placements, src_data_rank=None)


def gathered(tensors: Mapping[str, Tensor], world: World) -> dict[str, Tensor]:
    """Whole tensors. Sharded ones are gathered one by one to the host memory of the first rank; others return {}."""
    found = {}
    for name, tensor in tensors.items():
        whole: Any = tensor.detach()
        if is_sharded(whole):
            whole = whole.full_tensor()
            whole = whole.cpu() if world.is_first else whole
        if world.is_first:
            found[name] = whole
    return found


def clip_gradients(parameters: Iterable[nn.Parameter], limit: float) -> Tensor:
    """Scale the gradients so that their norm over all ranks is at most the limit. Return the norm before."""
    learned = [p for p in parameters if p.grad is not None]
    groups = [[p for p in learned if is_sharded(p) == sharded] for sharded in (False, True)]
    norms = [_norm(group) for group in groups if group]
    norm = norms[0] if len(norms) == 1 else torch.stack(norms).norm()
    for group, foreach in zip(groups, (None, False), strict=True):
        if group:
            nn.utils.clip_grads_with_norm_(group, limit or math.inf, norm, foreach=foreach)
    return norm


def _norm(parameters: list[nn.Parameter]) -> Tensor:
    norm: Any = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    return norm.full_tensor() if is_sharded(norm) else norm


def even_chunks(rows: int, chunk_size: int, world: World) -> int:
    """The number of chunks of a batch, which is the same on all ranks: FSDP2 gathers weights for every chunk."""
    most, fewest = world.largest(rows), -world.largest(-rows)
    return int(min(fewest, -(-most // chunk_size)))
