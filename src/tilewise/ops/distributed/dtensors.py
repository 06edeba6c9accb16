"""Sharded tensors (DTensor) to the plain tensors of a rank and back, with gradients in their own placements.

`torch.distributed.tensor` is imported by the caller who made a DTensor, never by ``import tilewise``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.errors import ConfigError
from tilewise.ops.distributed.sharded import Plan, symbol

_checked: set[Any] = set()  # the weights whose rows were found to differ over the ranks


def is_sharded(value: Any) -> bool:
    """Whether this is a DTensor."""
    return isinstance(value, Tensor) and hasattr(value, "device_mesh")


def symbols_of(tensor: Any) -> tuple[str, ...]:
    """The placements of a DTensor, for the planner."""
    return tuple(symbol(placement) for placement in tensor.placements)


def placements_of(symbols: Sequence[str]) -> list[Any]:
    """The placements that these symbols mean; "T0" cannot be made."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    made = {"R": Replicate, "P": Partial}
    return [made[text]() if text in made else Shard(int(text[1:])) for text in symbols]


class Move(NamedTuple):
    """How a DTensor becomes the plain tensor of a rank, and its gradient a DTensor."""

    placed: Sequence[str]  # the placements of which a rank takes its part
    gradient: Sequence[str]  # those of the gradient of that part
    factor: float = 1.0  # by which the gradient is multiplied after it is summed
    dtype: torch.dtype | None = None  # the type of the part; its gradient is summed in the type of the DTensor


class _Local(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Any, move: Move) -> Tensor:
        ctx.of = tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride(), tensor.dtype
        ctx.move = move
        tensor = tensor.detach()
        if move.dtype is not None:
            tensor = tensor.to(move.dtype)
        local: Tensor = tensor.redistribute(placements=placements_of(move.placed)).to_local()
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        mesh, placements, shape, stride, dtype = ctx.of
        part = wrapped(grad.to(dtype), mesh, ctx.move.gradient, shape, stride)
        found = reduced(part, placements)
        if ctx.move.factor != 1.0:
            found = wrapped_as(found.to_local() * ctx.move.factor, found)
        return found, None


def to_local(tensor: Any, move: Move) -> Tensor:
    """The plain tensor of this rank, differentiable."""
    if tensor.requires_grad and torch.is_grad_enabled():
        local: Tensor = _Local.apply(tensor, move)
    else:
        local = _Local.forward(_Local(), tensor, move)
    return local


def wrapped(local: Tensor, mesh: Any, symbols: Sequence[str], shape: Any, stride: Any = None) -> Any:
    """A DTensor of this shape from the part of this rank, differentiable. Parts may differ in size."""
    return _wrapped(local, mesh, placements_of(symbols), shape, stride)


def wrapped_as(local: Tensor, like: Any) -> Any:
    """A DTensor with the mesh, placements and shape of another."""
    return _wrapped(local, like.device_mesh, like.placements, like.shape, like.stride())


def _wrapped(local: Tensor, mesh: Any, placements: Any, shape: Any, stride: Any) -> Any:
    from torch.distributed.tensor import DTensor

    shape = torch.Size(shape)
    if stride is None:
        stride = torch.empty(shape, device="meta").stride()
    # `from_local` takes an empty tuple for nothing.
    sizes = {"shape": shape, "stride": stride} if shape else {}
    return DTensor.from_local(local, mesh, placements, run_check=False, **sizes)


def reduced(part: Any, placements: Sequence[Any] | None = None) -> Any:
    """``part`` with other placements, by default replicated: one reduction for each dimension on which it is partial.

    Torch warns if one step reduces over two dimensions. A weight that is sharded for tensor parallelism and for FSDP
    has strided shards over one dimension, which are parts of the shards over the other. They are made last, because
    torch 2.11 makes them only from those shards.
    """
    placements = placements_of("R" * part.device_mesh.ndim) if placements is None else placements
    now = list(part.placements)
    for i in sorted(range(len(now)), key=lambda i: symbol(placements[i]).startswith("T")):
        if now[i] != placements[i] and (now[i].is_partial() or now[i].is_replicate()):
            now[i] = placements[i]
            part = part.redistribute(placements=now)
    return part.redistribute(placements=placements)


def replicated(value: Any) -> Any:
    """A DTensor replicated on all ranks, and a plain tensor as it is."""
    return reduced(value) if is_sharded(value) else value


def total(value: Tensor, mesh: Any, plan: Plan) -> Tensor:
    """The sum over the ranks with different rows, without a gradient: one all-reduce for each dimension of them."""
    found: Tensor = reduced(wrapped(value.detach(), mesh, plan.sums, value.shape)).to_local()
    return found


def check_rows_differ(rows: Tensor, weight: Any, plan: Plan) -> None:
    """Check that plain hidden states are not those of tensor parallelism, which all ranks hold: once for each weight.

    The minimum and the maximum of a checksum over the ranks are equal if all hold the same rows.
    """
    columns = symbols_of(weight)
    guessed = [i for i in plan.row_dims if columns[i].startswith("S") and weight.device_mesh.size(i) > 1]
    mesh, key = weight.device_mesh, (weight.device_mesh, weight.placements, weight.shape, weight.dtype)
    if not guessed or key in _checked or any("T" in column for column in columns):
        return
    if rows.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    import torch.distributed as dist

    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[rows.element_size()]
    values = rows.detach().contiguous().view(-1).view(bits)
    checksum = values.sum(dtype=torch.int64) * 31 + rows.shape[0]
    same = torch.zeros(mesh.ndim, dtype=torch.int64, device=rows.device)
    for i in guessed:
        ends = torch.stack([checksum, -checksum])
        dist.all_reduce(ends, dist.ReduceOp.MAX, group=mesh.get_group(i))
        same[i] = (ends[0] == -ends[1]) & (rows.shape[0] > 0)
    for i in range(mesh.ndim):
        dist.all_reduce(same, dist.ReduceOp.MIN, group=mesh.get_group(i))
    if not same.any().item():
        _checked.add(key)
        return
    name = "mesh" if mesh.mesh_dim_names is None else f"mesh {tuple(mesh.mesh_dim_names)}"
    raise ConfigError(
        f"plain hidden states beside a sharded weight are those of this rank's own tokens, got the same ones on all "
        f"ranks of a dimension of the {name}. If all ranks hold the same tokens, as with tensor parallelism, say so: "
        "pass DTensor.from_local(hidden, mesh, [Replicate()]), and the classes stay sharded. "
        "For data parallelism give each rank other tokens"
    )
