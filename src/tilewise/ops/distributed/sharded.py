"""How a loss over sharded tensors (DTensor) is computed: a plan from placements alone.

Nothing here touches a tensor or a process group. A placement is written as a short text, see `symbol`:
"R" replicated, "S0", "S1", ... sharded along that dimension, "T0", ... sharded with a stride, as FSDP2 does to a
weight that tensor parallelism has sharded before, and "P" partial.

Each dimension of the mesh is one of:

    replicated   every rank computes the same
    rows         ranks have different rows; a sharded classifier is gathered, or its shards move around a ring
    vocabulary   ranks have the same rows, and each has a shard of the classes
    features     ranks have the same rows and shards of the classifier's features, which are gathered
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tilewise.errors import ConfigError

Kind = Literal["replicated", "rows", "vocabulary", "features"]
Symbols = tuple[str, ...]


def symbol(placement: Any) -> str:
    """The text of a placement of torch. Duck typed: `_StridedShard` is no `Shard` in some versions of torch."""
    if getattr(placement, "dim", None) is not None:
        return f"{'T' if 'Strided' in type(placement).__name__ else 'S'}{placement.dim}"
    return "R" if placement.is_replicate() else "P"


@dataclass(frozen=True)
class Plan:
    """For each mesh dimension its kind, and with which placements rows and columns are computed.

    Args:
        kinds: see the module.
        rows: placements of the rows' tensors during the computation.
        columns: those of the classifier.
        ring: the mesh dimension around which the shards of the classifier move, or None.
        local: the rows are plain tensors: a mean is that of this rank's rows, and gradients are averaged.
    """

    kinds: tuple[Kind, ...]
    rows: Symbols
    columns: Symbols
    ring: int | None = None
    local: bool = False

    @property
    def vocabulary(self) -> int | None:
        """The mesh dimension over which the classes are sharded, or None."""
        return self.kinds.index("vocabulary") if "vocabulary" in self.kinds else None

    @property
    def row_dims(self) -> tuple[int, ...]:
        """The mesh dimensions whose ranks have different rows."""
        return tuple(i for i, kind in enumerate(self.kinds) if kind == "rows")

    @property
    def column_gradients(self) -> Symbols:
        """Placements of the gradient that a rank computes for the classifier.

        If the classifier is gathered, that gradient is one term of a sum over the ranks with other rows.
        """
        pairs = zip(self.kinds, self.columns, strict=True)
        return tuple("P" if kind == "rows" and column == "R" else column for kind, column in pairs)

    @property
    def sums(self) -> Symbols:
        """Placements of a number to which each rank adds what its own rows give, and of its gradient."""
        return tuple("P" if kind == "rows" else "R" for kind in self.kinds)

    def sharded_tokens(self, rows: Symbols | None) -> int | None:
        """The dimension of the hidden states that the vocabulary dimension of the mesh alone shards, or None.

        ``rows``: their placements. Sequence parallelism: a rank has to know the gradient of its own tokens only.
        """
        symbol = "R" if rows is None or self.vocabulary is None else rows[self.vocabulary]
        return None if rows is None or symbol == "R" or rows.count(symbol) > 1 else int(symbol[1:])

    def average(self, sizes: Sequence[int]) -> float:
        """The factor of a gradient that is summed over the ranks with different rows."""
        return 1.0 / math.prod(sizes[i] for i in self.row_dims) if self.local else 1.0

    def describe(
        self, names: Sequence[str], sizes: Sequence[int], rows: Symbols | None, columns: Symbols | None
    ) -> str:
        """The plan and its collectives in words, one line for each mesh dimension; ``columns``: None for pairs."""
        lines = []
        for i, kind in enumerate(self.kinds):
            moves = []
            if columns is None:
                moves += ["blocks of columns move around a ring with their gradients"] * (kind == "rows")
            elif i == self.ring:
                moves.append("classifier shards move around a ring with their float32 gradients")
            elif columns[i] != self.columns[i]:
                back = (
                    "its gradient is reduce-scattered" if kind == "rows" else "each rank keeps its part of the gradient"
                )
                moves.append(f"the classifier is gathered once per pass, and {back}")
            elif kind == "rows":
                moves.append("the classifier's gradient is all-reduced")
            if kind == "vocabulary" and self.sharded_tokens(rows) is None:
                moves.append("vectors of the rows and the gradient of the hidden states are all-reduced")
            elif kind == "vocabulary":
                moves += ["vectors of the rows are all-reduced"]
                moves += ["the gradient of the hidden states is reduce-scattered"]
            if rows is not None and rows[i] != self.rows[i]:
                moves.append("the hidden states are gathered")
            lines.append(f"  {names[i]} ({sizes[i]} ranks)  {kind}: {'; '.join(moves) or 'nothing is sent'}")
        return "\n".join(["sharded tensors, for each dimension of the mesh:", *lines])


def plan(
    columns: Sequence[str],
    rows: Sequence[str] | None = None,
    *,
    features: int = 1,
    names: tuple[str, str] = ("input", "linear_weight"),
    keep_shards: bool = True,
    large: bool = False,
) -> Plan:
    """The plan of a loss with a classifier.

    Args:
        columns: placements of the classifier, (V, d), on each mesh dimension.
        rows: those of the hidden states, or None for plain hidden states: the rows of this rank.
        features: the last dimension of the hidden states.
        names: of both arguments, for messages.
        keep_shards: whether the loss can compute with shards of the classes. Otherwise the classifier is gathered.
        large: whether a ring is better than a gathered classifier.

    >>> plan(["S0"]).kinds, plan(["S0"], ["R"]).kinds, plan(["T0", "S0"]).kinds
    (('rows',), ('vocabulary',), ('rows', 'vocabulary'))
    """
    strided = any(column.startswith("T") for column in columns)
    kinds: list[Kind] = []
    for i, column in enumerate(columns):
        if column == "P":
            raise _refusal(names[1], i, "is a sum that is not reduced yet (Partial)", "Replicate() in its place")
        row = None if rows is None else rows[i]
        if row is None:
            kinds.append("vocabulary" if strided and column == "S0" and keep_shards else "rows")
        elif row == "P":
            raise _refusal(names[0], i, "is a sum that is not reduced yet (Partial)", "Replicate() or Shard(0)")
        elif row[1:] == str(features):
            raise _refusal(names[0], i, "is sharded along its features", "Replicate() or Shard(0)")
        elif row == "R":
            shards: dict[str, Kind] = {"R": "replicated", "S0": "vocabulary" if keep_shards else "replicated"}
            kinds.append(shards.get(column, "replicated" if column.endswith("0") else "features"))
        else:  # sequence parallel: the hidden states are gathered, and the classes stay where they are
            kinds.append("vocabulary" if row != "S0" and column == "S0" and keep_shards else "rows")
    first = kinds.index("vocabulary") if "vocabulary" in kinds else None
    # Only one dimension can be that of the group. The shards of the first are contiguous when the others are gathered.
    found: tuple[Kind, ...] = tuple(
        "replicated" if kind == "vocabulary" and i != first else kind for i, kind in enumerate(kinds)
    )
    sharded = [i for i, kind in enumerate(found) if kind == "rows" and columns[i] == "S0"]
    ring = sharded[0] if large and first is None and len(sharded) == 1 else None
    return Plan(
        kinds=found,
        rows=tuple(rows[i] if rows is not None and kind == "rows" else "R" for i, kind in enumerate(found)),
        columns=tuple("S0" if i in (first, ring) else "R" for i in range(len(found))),
        ring=ring,
        local=rows is None,
    )


def plan_pairs(arguments: dict[str, Sequence[str]]) -> Plan:
    """The plan of a contrastive loss, whose features are all sharded over their rows, or not at all.

    >>> plan_pairs({"image_features": ["S0", "R"], "text_features": ["R", "R"]}).kinds
    ('rows', 'replicated')
    """
    for name, placements in arguments.items():
        for i, placement in enumerate(placements):
            if placement == "P":
                raise _refusal(name, i, "is a sum that is not reduced yet (Partial)", "Replicate() or Shard(0)")
            if placement not in ("R", "S0"):
                raise _refusal(name, i, "is not sharded along its rows", "Replicate() or Shard(0)")
    kinds: tuple[Kind, ...] = tuple(
        "rows" if "S0" in on_dim else "replicated" for on_dim in zip(*arguments.values(), strict=True)
    )
    if kinds.count("rows") > 1:
        raise ConfigError(
            "a contrastive loss takes features that are sharded over one dimension of the mesh, got "
            f"{kinds.count('rows')} dimensions. Make them one, or redistribute to Replicate() on the others"
        )
    placed = tuple("S0" if kind == "rows" else "R" for kind in kinds)
    return Plan(kinds=kinds, rows=placed, columns=placed)


def _refusal(name: str, dim: int, what: str, instead: str) -> ConfigError:
    return ConfigError(
        f"{name} {what} on dimension {dim} of its mesh. Call {name}.redistribute(placements=...) with {instead} there"
    )
