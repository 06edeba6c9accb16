"""Losses over sharded tensors (DTensor): arguments are unwrapped before a loss, and its results are wrapped after it.

The loss itself gets plain tensors of this rank, and a group if the classes stay sharded. See docs/concepts/sharded.md.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilewise.errors import ConfigError, DtypeError
from tilewise.ops.distributed import dtensors
from tilewise.ops.distributed.dtensors import Move, is_sharded, symbols_of, to_local, wrapped
from tilewise.ops.distributed.sharded import Plan, plan_pairs
from tilewise.ops.explain import note_plan


def refused(advice: str) -> Callable[[Callable[..., Any], dict[str, Any]], Any]:
    """For `entry`: the loss takes plain tensors only, and ``advice`` says which."""

    def run(loss: Callable[..., Any], values: dict[str, Any]) -> Any:
        raise ConfigError(f"{loss.__name__} takes plain tensors of this rank, got a DTensor. {advice}")

    return run


@dataclass(frozen=True)
class Pairs:
    """The arguments of a contrastive loss: ``rows`` are sharded along their rows, the features first."""

    rows: tuple[str, ...]
    scalars: tuple[str, ...]

    def __call__(self, loss: Callable[..., Any], values: dict[str, Any]) -> Any:
        """Run the loss over the group of the one mesh dimension over which the rows are sharded, if there is one."""
        first: Any = values[self.rows[0]]
        if not is_sharded(first):
            return loss(**values)  # it refuses the others
        guide: Any = values.get("guide")
        given = {name: value for name in self.rows if isinstance(value := values.get(name), Tensor)}
        if dataclasses.is_dataclass(guide):
            given |= {f"guide.{name}": value for name, value in vars(guide).items() if isinstance(value, Tensor)}
        sharded: dict[str, Any] = {name: value for name, value in given.items() if is_sharded(value)}
        check_mesh(sharded | {name: values[name] for name in self.scalars if is_sharded(values[name])})
        for name in ("key_ids", "log_q"):
            if name in sharded and sharded[name].shape[0] != first.shape[0]:
                raise ConfigError(
                    f"{name} with those of shared negatives at the end is a plain tensor beside a DTensor, got a "
                    "DTensor. Pass the numbers of this rank's keys, then those of this rank's negatives"
                )
        mesh, found = first.device_mesh, plan_pairs({name: symbols_of(value) for name, value in sharded.items()})
        for name, value in given.items():
            refuse_grad(name, value, found, whole=False)
        note_plan(lambda: described(found, first, None))
        local: dict[str, Any] = {name: to_local(value, Move(found.rows, found.rows)) for name, value in sharded.items()}
        if dataclasses.is_dataclass(guide):
            fields = {name: local.pop(f"guide.{name}") for name in vars(guide) if f"guide.{name}" in local}
            local["guide"] = dataclasses.replace(guide, **fields)  # type: ignore[type-var]
        local = {**values, **local, **local_numbers(values, self.scalars, found, mesh)}
        world = 1
        if found.row_dims:
            (dim,) = found.row_dims
            local["group"], world = group_of(mesh, dim), mesh.size(dim)
        result = loss(**local)
        if values["reduction"] == "none":
            return wrapped(result, mesh, found.rows, (first.shape[0],))
        # Over a group the result is W times this rank's share.
        part = wrapped(result / world, mesh, found.sums, ())
        if values["reduction"] == "sum":
            return part
        return dtensors.reduced(part)


def group_of(mesh: Any, dim: int) -> Any:
    """The process group of a mesh dimension. Its ranks are in ascending order, and so must be those of the mesh."""
    if mesh.size(dim) > 1 and not bool((mesh.mesh.diff(dim=dim) > 0).all()):
        raise ConfigError(
            f"a mesh lists the ranks of each dimension in ascending order, got {mesh.mesh.tolist()}. "
            "Make the mesh with sorted ranks"
        )
    return mesh.get_group(dim)


def check_mesh(sharded: dict[str, Any]) -> None:
    """Check that all DTensors of a call, by name, are on one mesh."""
    (first, one), *others = sharded.items()
    for name, other in others:
        if other.device_mesh != one.device_mesh:
            raise ConfigError(
                f"all sharded arguments are on one mesh, got {first} on {one.device_mesh} and {name} on "
                f"{other.device_mesh}. Make one of them again with DTensor.from_local(..., mesh, placements)"
            )


def refuse_grad(name: str, value: Tensor, found: Plan, *, whole: bool) -> None:
    """A plain tensor beside DTensors gets the gradient of this rank alone, which is right only for plain rows."""
    wanted = isinstance(value, Tensor) and not is_sharded(value) and value.requires_grad and torch.is_grad_enabled()
    if wanted and not (found.local and whole) and (found.row_dims or not whole):
        raise DtypeError(
            f"{name} is a DTensor beside other DTensors, got a plain tensor that requires grad. Pass "
            f"DTensor.from_local({name}, mesh, [Replicate()]), with one placement for each dimension of the mesh"
        )


def local_numbers(values: dict[str, Any], names: tuple[str, ...], found: Plan, mesh: Any) -> dict[str, Any]:
    """Numbers that are DTensors, whole. Each rank computes the gradient of what its own rows depend on."""
    local = {}
    for name in names:
        value: Any = values.get(name)
        if is_sharded(value) and value.numel() == 1:
            local[name] = to_local(value, Move("R" * mesh.ndim, found.sums, found.average(mesh.shape)))
        elif isinstance(value, Tensor):
            refuse_grad(name, value, found, whole=True)
    return local


def described(found: Plan, rows: Any, columns: Any | None) -> str:
    """The plan in words, for `explain`; ``columns``: None for a contrastive loss."""
    mesh = (rows if columns is None else columns).device_mesh
    names = mesh.mesh_dim_names or tuple(f"dimension {i}" for i in range(mesh.ndim))
    placed = symbols_of(rows) if is_sharded(rows) else None
    return found.describe(names, mesh.shape, placed, None if columns is None else symbols_of(columns))
