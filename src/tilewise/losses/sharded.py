"""Losses over sharded tensors (DTensor): arguments are unwrapped before a loss, and its results are wrapped after it.

The loss itself gets plain tensors of this rank, and a group if the classes stay sharded. See docs/concepts/sharded.md.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from tilewise import _check
from tilewise.errors import ConfigError, DtypeError
from tilewise.kernels.spec import HALF_TYPES
from tilewise.ops.distributed import dtensors
from tilewise.ops.distributed.collectives import RowsGroup
from tilewise.ops.distributed.dtensors import Move, is_sharded, symbols_of, to_local, wrapped
from tilewise.ops.distributed.sharded import Plan, plan, plan_pairs
from tilewise.ops.explain import is_explaining, note_plan
from tilewise.ops.limits import current
from tilewise.options import TileOptions

Loss = TypeVar("Loss", bound=Callable[..., Any])
# Classes of arguments of a call without sharded tensors, compared without a call: a small batch counts its calls.
# torch.compile makes wrong guards of a frozenset, and cannot ask a process group for its class.
ORDINARY = (*_check.PLAIN, type(None), float, str, bool, int, TileOptions, tuple)


def takes_shards(run: Callable[[Callable[..., Any], dict[str, Any]], Any]) -> Callable[[Loss], Loss]:
    """Decorate a loss. If an argument is a DTensor, call ``run(loss, arguments)`` instead."""

    def decorate(loss: Loss) -> Loss:
        @functools.wraps(loss)
        def call(*args: Any, **kwargs: Any) -> Any:
            for value in args:
                if value.__class__ not in ORDINARY:
                    return other(args, kwargs)
            for name in kwargs:
                if name != "group" and kwargs[name].__class__ not in ORDINARY:
                    return other(args, kwargs)
            return loss(*args, **kwargs)

        def other(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if not any(map(_holds_shards, (*args, *kwargs.values()))):
                return loss(*args, **kwargs)
            given = inspect.signature(loss).bind(*args, **kwargs)
            given.apply_defaults()
            values = given.arguments
            if values.get("group") is not None:
                raise ConfigError(
                    "group= is for plain tensors, of which each rank passes its own, got a group beside a DTensor, "
                    "whose mesh has its own groups. Pass group=None"
                )
            if torch.compiler.is_compiling():
                raise ConfigError(
                    f"{loss.__name__} takes a DTensor outside of torch.compile only. Compile the model without the "
                    "loss, or pass the plain tensors of this rank and group="
                )
            return run(loss, values)

        return call  # type: ignore[return-value]

    return decorate


def _holds_shards(value: Any) -> bool:
    if dataclasses.is_dataclass(value):
        return any(is_sharded(getattr(value, field.name)) for field in dataclasses.fields(value))
    return is_sharded(value)


@dataclass(frozen=True)
class Head:
    """The arguments of a loss with a classifier.

    Args:
        rows: names of arguments with an entry for each row, the hidden states first.
        columns: those with an entry for each class, the classifier first.
        teacher: those of ``columns`` that belong to a teacher, without gradients.
        scalars: names of numbers that may be tensors.
        vocabulary: whether ``group=`` of this loss means shards of the classes.
        count: the number by which "mean" divides the sum, from the arguments of this rank.
    """

    rows: tuple[str, ...]
    columns: tuple[str, ...]
    teacher: tuple[str, ...] = ()
    scalars: tuple[str, ...] = ("logit_scale",)
    vocabulary: bool = True
    count: Callable[[dict[str, Any]], Tensor] | None = None

    def __call__(self, loss: Callable[..., Any], values: dict[str, Any]) -> Any:
        """Run the loss on the plain tensors of this rank."""
        hidden, weight = (values[side[0]] for side in (self.rows, self.columns))
        if not is_sharded(weight):
            return self._with_plain_classifier(loss, values)
        if not isinstance(hidden, Tensor):
            return loss(**values)  # it refuses that
        mesh, found = self._plan(values)
        local = {**values, **self._rows(values, found), **self._columns(values, mesh, found)}
        local |= _numbers(values, (*self.scalars, "temperature"), found, mesh)
        if found.ring is not None:
            local["group"] = RowsGroup(_group(mesh, found.ring).group_name)
        elif found.vocabulary is not None:
            local["group"] = _group(mesh, found.vocabulary)
        if found.local:
            if not is_explaining():
                dtensors.check_rows_differ(local[self.rows[0]], values[self.columns[0]], found)
            return loss(**local)
        return self._wrapped(loss, values, local, mesh, found)

    def _with_plain_classifier(self, loss: Callable[..., Any], values: dict[str, Any]) -> Any:
        """Only a teacher may be sharded: it has no gradient, so all of it is gathered. The loss refuses the others."""
        name = self.columns[0]
        if is_sharded(values[self.rows[0]]):
            raise DtypeError(
                f"{name} is a DTensor where {self.rows[0]} is one, got a plain tensor. Pass "
                f"DTensor.from_local({name}, mesh, [Replicate()]), with one placement for each dimension of the mesh"
            )
        teacher = {key: values[key] for key in self.teacher if is_sharded(values[key])}
        return loss(**{**values, **{key: value.detach().full_tensor() for key, value in teacher.items()}})

    def _plan(self, values: dict[str, Any]) -> tuple[Any, Plan]:
        hidden, weight = values[self.rows[0]], values[self.columns[0]]
        names = self.rows[0], self.columns[0]
        _same_mesh({name: values[name] for name in values if is_sharded(values[name])})
        options, invariant = values["options"], False
        if isinstance(options, TileOptions):
            invariant = options.batch_invariant
        whole = invariant or values.get("classes") is not None  # needs all classes on every rank
        large = weight.numel() * weight.dtype.itemsize >= current().ring_head and values.get("weight") is None
        found = plan(
            symbols_of(weight),
            symbols_of(hidden) if is_sharded(hidden) else None,
            features=hidden.dim() - 1,
            names=names,
            keep_shards=self.vocabulary and not whole,
            large=large and not whole,
        )
        shift = values.get("shift", 0)
        if shift and f"S{hidden.dim() - 2}" in found.rows:
            raise ConfigError(
                f"shift={shift} pairs a hidden state with a later target, which may be on another rank, because "
                f"{names[0]} is sharded along its tokens. Shift the whole targets before they are sharded and pass "
                "shift=0, or redistribute the hidden states to Replicate()"
            )
        note_plan(lambda: _described(found, hidden, weight))
        return weight.device_mesh, found

    def _rows(self, values: dict[str, Any], found: Plan) -> dict[str, Any]:
        """The tensors of this rank's rows."""
        local = {}
        for name in (*self.rows, "temperature"):
            value: Any = values.get(name)
            if not is_sharded(value) or value.dim() == 0:
                continue
            if found.local:
                raise DtypeError(
                    f"{name} is a plain tensor where {self.rows[0]} is one, got a DTensor. Pass {name}.to_local() if "
                    f"it is sharded like the rows of this rank, otherwise {name}.full_tensor()"
                )
            local[name] = to_local(value, Move(found.rows, found.rows))
        return local

    def _columns(self, values: dict[str, Any], mesh: Any, found: Plan) -> dict[str, Any]:
        """The classifiers, biases and class weights: whole, or this rank's shard."""
        hidden, local = values[self.rows[0]], {}
        factor = found.average(mesh.shape)
        for name in self.columns:
            value = values[name]
            if not isinstance(value, Tensor):
                continue
            if not is_sharded(value):
                _refuse_grad(name, value, found, whole="S0" not in found.columns)
                value = wrapped(value, mesh, "R" * mesh.ndim, value.shape)
            # FSDP2 casts only its own gathered copy of a float32 weight. This does the same; sums stay in float32.
            narrow = value.dim() == 2 and value.dtype == torch.float32 and hidden.dtype in HALF_TYPES
            how = Move(found.columns, found.column_gradients, factor, hidden.dtype if narrow else None)
            local[name] = to_local(value, how)
        return local

    def _wrapped(
        self, loss: Callable[..., Any], values: dict[str, Any], local: dict[str, Any], mesh: Any, found: Plan
    ) -> Any:
        """The results as DTensors: rows with the placements of the targets, a sum partial, a mean replicated."""
        reduction = values.get("reduction", "none")
        mean = reduction == "mean" and bool(found.row_dims)
        if mean:
            local["reduction"] = "sum"
        result = loss(**local)
        hidden = values[self.rows[0]]
        target = next((values[name] for name in self.rows[1:] if is_sharded(values[name])), None)
        shape = list(hidden.shape[:-1])
        if values.get("shift"):
            shape[-1] = max(shape[-1] - int(values["shift"]), 0)

        def of_rows(part: Tensor) -> Any:
            rows = wrapped(part, mesh, found.rows, (*shape, *part.shape[len(shape) :]))
            return rows if target is None else rows.redistribute(placements=target.placements)

        if dataclasses.is_dataclass(result):
            make: Any = type(result)
            return make(**{name: None if part is None else of_rows(part) for name, part in vars(result).items()})
        value: Any
        value, *more = result if isinstance(result, tuple) else (result,)
        if reduction == "none":
            value = of_rows(value)
        else:
            if mean:
                value = value / dtensors.total(self._count(values, local), mesh, found)
            value = wrapped(value, mesh, found.sums, ())
            value = dtensors.reduced(value) if mean else value
        return (value, *map(of_rows, more)) if more else value

    def _count(self, values: dict[str, Any], local: dict[str, Any]) -> Tensor:
        weight: Any = values.get("weight")
        if weight is not None and values["z_loss"]:
            raise ConfigError(
                'z_loss with class weights has two means, so it takes plain rows or a sum, got a DTensor and "mean". '
                "Pass return_lse=True and z_loss=0, and add z_loss * (lse ** 2).mean() over the valid rows"
            )
        assert self.count is not None
        return self.count({**local, "weight": weight.full_tensor() if is_sharded(weight) else weight})


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
        _same_mesh(sharded | {name: values[name] for name in self.scalars if is_sharded(values[name])})
        if "key_ids" in sharded and sharded["key_ids"].shape[0] != first.shape[0]:
            raise ConfigError(
                "key_ids with those of shared negatives at the end is a plain tensor beside a DTensor, got a DTensor. "
                "Pass the ids of this rank's keys, then those of this rank's negatives"
            )
        mesh, found = first.device_mesh, plan_pairs({name: symbols_of(value) for name, value in sharded.items()})
        for name, value in given.items():
            _refuse_grad(name, value, found, whole=False)
        note_plan(lambda: _described(found, first, None))
        local: dict[str, Any] = {name: to_local(value, Move(found.rows, found.rows)) for name, value in sharded.items()}
        if dataclasses.is_dataclass(guide):
            fields = {name: local.pop(f"guide.{name}") for name in vars(guide) if f"guide.{name}" in local}
            local["guide"] = dataclasses.replace(guide, **fields)  # type: ignore[type-var]
        local = {**values, **local, **_numbers(values, self.scalars, found, mesh)}
        world = 1
        if found.row_dims:
            (dim,) = found.row_dims
            local["group"], world = _group(mesh, dim), mesh.size(dim)
        result = loss(**local)
        if values["reduction"] == "none":
            return wrapped(result, mesh, found.rows, (first.shape[0],))
        # Over a group the result is W times this rank's share.
        part = wrapped(result / world, mesh, found.sums, ())
        if values["reduction"] == "sum":
            return part
        return dtensors.reduced(part)


def _group(mesh: Any, dim: int) -> Any:
    """The process group of a mesh dimension. Its ranks are in ascending order, and so must be those of the mesh."""
    if mesh.size(dim) > 1 and not bool((mesh.mesh.diff(dim=dim) > 0).all()):
        raise ConfigError(
            f"a mesh lists the ranks of each dimension in ascending order, got {mesh.mesh.tolist()}. "
            "Make the mesh with sorted ranks"
        )
    return mesh.get_group(dim)


def _same_mesh(sharded: dict[str, Any]) -> None:
    (first, one), *others = sharded.items()
    for name, other in others:
        if other.device_mesh != one.device_mesh:
            raise ConfigError(
                f"all sharded arguments are on one mesh, got {first} on {one.device_mesh} and {name} on "
                f"{other.device_mesh}. Make one of them again with DTensor.from_local(..., mesh, placements)"
            )


def _refuse_grad(name: str, value: Tensor, found: Plan, *, whole: bool) -> None:
    """A plain tensor beside DTensors gets the gradient of this rank alone, which is right only for plain rows."""
    wanted = isinstance(value, Tensor) and not is_sharded(value) and value.requires_grad and torch.is_grad_enabled()
    if wanted and not (found.local and whole) and (found.row_dims or not whole):
        raise DtypeError(
            f"{name} is a DTensor beside other DTensors, got a plain tensor that requires grad. Pass "
            f"DTensor.from_local({name}, mesh, [Replicate()]), with one placement for each dimension of the mesh"
        )


def _numbers(values: dict[str, Any], names: tuple[str, ...], found: Plan, mesh: Any) -> dict[str, Any]:
    """Numbers that are DTensors, whole. Each rank computes the gradient of what its own rows depend on."""
    local = {}
    for name in names:
        value: Any = values.get(name)
        if is_sharded(value) and value.numel() == 1:
            local[name] = to_local(value, Move("R" * mesh.ndim, found.sums, found.average(mesh.shape)))
        elif isinstance(value, Tensor):
            _refuse_grad(name, value, found, whole=True)
    return local


def _described(found: Plan, rows: Any, columns: Any | None) -> str:
    mesh = (rows if columns is None else columns).device_mesh
    names = mesh.mesh_dim_names or tuple(f"dimension {i}" for i in range(mesh.ndim))
    placed = symbols_of(rows) if is_sharded(rows) else None
    return found.describe(names, mesh.shape, placed, None if columns is None else symbols_of(columns))
