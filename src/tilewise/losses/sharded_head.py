"""Losses with a classifier over sharded tensors (DTensor): see `tilewise.losses.sharded`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilewise.errors import ConfigError, DtypeError
from tilewise.kernels.spec import HALF_TYPES
from tilewise.losses.sharded import check_mesh, described, group_of, local_numbers, refuse_grad
from tilewise.ops.distributed import dtensors
from tilewise.ops.distributed.collectives import RowsGroup, TokensGroup
from tilewise.ops.distributed.dtensors import Move, is_sharded, symbols_of, to_local, wrapped
from tilewise.ops.distributed.sharded import Plan, plan
from tilewise.ops.explain import is_explaining, note_plan
from tilewise.ops.limits import current
from tilewise.options import TileOptions


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
        local |= local_numbers(values, (*self.scalars, "temperature"), found, mesh)
        if found.ring is not None:
            local["group"] = RowsGroup(group_of(mesh, found.ring).group_name)
        elif found.vocabulary is not None:
            local["group"] = self._vocabulary_group(values, local[self.rows[0]], mesh, found)
        if found.local:
            if not is_explaining():
                dtensors.check_rows_differ(local[self.rows[0]], values[self.columns[0]], found)
            return loss(**local)
        return self._wrapped(loss, values, local, mesh, found)

    def _vocabulary_group(self, values: dict[str, Any], hidden: Tensor, mesh: Any, found: Plan) -> Any:
        """The group of the vocabulary dimension. With sequence parallelism a rank needs its tokens' gradient only."""
        assert found.vocabulary is not None
        group = group_of(mesh, found.vocabulary)
        whole = values[self.rows[0]]
        dim = found.sharded_tokens(symbols_of(whole) if is_sharded(whole) else None)
        if dim is None:
            return group
        shape = list(hidden.shape[:-1])
        each = -(-shape[dim] // mesh.size(found.vocabulary))
        shape[-1] -= min(int(values.get("shift", 0)), shape[-1])
        return TokensGroup(group.group_name, shape[dim], math.prod(shape[dim + 1 :]), each)

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
        check_mesh({name: values[name] for name in values if is_sharded(values[name])})
        options, invariant = values["options"], False
        if isinstance(options, TileOptions):
            invariant = options.batch_invariant
        whole = values.get("classes") is not None  # needs all classes on every rank
        large = weight.numel() * weight.dtype.itemsize >= current().ring_head and values.get("weight") is None
        found = plan(
            symbols_of(weight),
            symbols_of(hidden) if is_sharded(hidden) else None,
            features=hidden.dim() - 1,
            names=names,
            keep_shards=self.vocabulary and not whole,
            large=large and not whole and not invariant,
        )
        shift = values.get("shift", 0)
        if shift and f"S{hidden.dim() - 2}" in found.rows:
            raise ConfigError(
                f"shift={shift} pairs a hidden state with a later target, which may be on another rank, because "
                f"{names[0]} is sharded along its tokens. Shift the whole targets before they are sharded and pass "
                "shift=0, or redistribute the hidden states to Replicate()"
            )
        note_plan(lambda: described(found, hidden, weight))
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
                refuse_grad(name, value, found, whole="S0" not in found.columns)
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
