"""Blocks that move around the ring: their tensors, their packing, and the loop in which each rank gets each block once.

A block has a *payload*: tensors that no rank changes, such as features, ids and shifts. It also has *accumulators*:
tensors that every rank adds to, such as column statistics in forward and gradients in backward. The payload for the
next step is received while this step computes. Accumulators follow one step behind their block: what a rank adds at
step s is sent while step s + 1 computes.

The journey of the block owned by rank 0; numbers are ranks:

    step                  0            1              2          ...   W - 1          return
    payload hop           0 -> 1       1 -> 2         2 -> 3            -
    accumulator hop       -            0 -> 1         1 -> 2            W-2 -> W-1     W-1 -> 0

With ``chunk`` the values to add are computed for so many columns at a time, and added to accumulators that have
arrived. So a rank never holds the values of a whole block. A chunk is sent on as soon as it is complete, and received
one step before it is needed, so its transfer overlaps with the work on the other chunks.

With a ``team`` of several ranks, the blocks of a team are one block of the loop above: its ranks gather them first, and
at the end each of them gets the sum of its own accumulators over the team. That is one call of the work for each team.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from tilewise.ring.exchange import Exchange, Pending, Teams
from tilewise.ring.schedule import column_chunks, held_block, partners

T = TypeVar("T")
Tensors = Mapping[str, Tensor]
# (owner, tensors of its block) -> values to add; with chunks: (owner, tensors of the columns, the first column)
Work = Callable[..., Tensors | None]
Merge = Callable[[dict[str, Tensor], Tensors], object]  # (accumulators, changed in place; values to add)


@dataclass(frozen=True)
class Field:
    """One tensor of a block: (size, width), or (size,) with width None."""

    name: str
    dtype: torch.dtype
    width: int | None = None

    @staticmethod
    def of(name: str, tensor: Tensor) -> Field:
        """Field with this name, and the dtype and width of this tensor."""
        return Field(name, tensor.dtype, tensor.shape[1] if tensor.dim() == 2 else None)


class Layout:
    """Packs the fields of a block into flat buffers: one per matrix, and one for all vectors of a dtype."""

    def __init__(self, fields: Sequence[Field]) -> None:
        self.matrices = [field for field in fields if field.width is not None]
        vectors: dict[torch.dtype, list[Field]] = {}
        for field in fields:
            if field.width is None:
                vectors.setdefault(field.dtype, []).append(field)
        self.vectors = list(vectors.items())

    def __bool__(self) -> bool:
        return bool(self.matrices or self.vectors)

    def _widths(self) -> list[tuple[torch.dtype, int]]:
        matrices = [(field.dtype, field.width or 0) for field in self.matrices]
        return matrices + [(dtype, len(fields)) for dtype, fields in self.vectors]

    def pack(self, tensors: Tensors) -> list[Tensor]:
        """Flat buffers of these tensors. Contiguous matrices are not copied."""
        buffers = [tensors[field.name].contiguous().view(-1) for field in self.matrices]
        for _, fields in self.vectors:
            parts = [tensors[field.name] for field in fields]
            buffers.append(torch.stack(parts).view(-1) if len(parts) > 1 else parts[0].contiguous())
        return buffers

    def empty(self, size: int, device: torch.device) -> list[Tensor]:
        """Uninitialized buffers for a block of up to ``size`` columns."""
        return [torch.empty(size * width, dtype=dtype, device=device) for dtype, width in self._widths()]

    def cut(self, buffers: Sequence[Tensor], size: int) -> list[Tensor]:
        """The part of each buffer that a block of ``size`` columns uses, as views."""
        return [buffer[: size * width] for buffer, (_, width) in zip(buffers, self._widths(), strict=True)]

    def unpack(self, buffers: Sequence[Tensor], size: int) -> dict[str, Tensor]:
        """The fields of a block of ``size`` columns, as views."""
        parts = iter(self.cut(buffers, size))
        found = {field.name: next(parts).view(size, field.width or 0) for field in self.matrices}
        for _, fields in self.vectors:
            rows = next(parts).view(len(fields), size)
            found.update({field.name: rows[k] for k, field in enumerate(fields)})
        return found


def rotate_blocks(
    exchange: Exchange,
    sizes: Sequence[int],
    payload: Tensors,
    work: Work,
    *,
    accumulators: Sequence[Field] = (),
    merge: Merge | None = None,
    chunk: int | None = None,
    team: int = 1,
) -> dict[str, Tensor]:
    """Call ``work`` on every block once, and return the accumulators of this rank's own block.

    Args:
        exchange: the group.
        sizes: number of columns of each rank's block.
        payload: tensors of this rank's block, (size, width) or (size,). Names and dtypes are equal on every rank.
        work: ``work(owner, tensors)`` returns the values to add to this block's accumulators, or None to add nothing.
            The first call gets this rank's own block. With a team, ``owner`` is its first rank.
        accumulators: the fields that ``work`` returns.
        merge: adds the values of one call to the accumulators of a block, in place.
        chunk: call ``work(owner, tensors, first)`` for so many columns at a time, from column ``first`` on. Equal on
            every rank.
        team: the number of consecutive ranks that gather their blocks: a power of two that divides the number of ranks.

    Returns:
        The accumulators by name. If no rank added to a block, its accumulators are zeros. One rank alone returns what
        ``work`` returned, and {} for None.

    If ``work`` or ``merge`` fails, this rank still sends all blocks on and raises afterwards. It fills the accumulators
    of the current and all later blocks with NaN (the smallest integer for integer types). So the other ranks neither
    hang nor use wrong values. A rank that cannot allocate the buffers sends nothing and raises at once.

    Memory in addition to the payload: two blocks of payload and two of accumulators, for any number of ranks, and what
    ``work`` returns. With a team, instead three blocks of the team's payload.
    """
    if exchange.world == 1:
        assert chunk is None
        return dict(work(exchange.rank, dict(payload)) or {})
    guard = Guard()
    how = accumulators, merge, chunk, guard
    if team == 1:
        home = _rotate(exchange, sizes, payload, work, *how)
    else:
        assert chunk is None
        of_teams = [sum(sizes[first : first + team]) for first in range(0, exchange.world, team)]
        whole = _gather(exchange, sizes, payload, team)
        home = _rotate(Teams(exchange, team), of_teams, whole, lambda k, block: work(k * team, block), *how)
        home = _scatter_sum(exchange, sizes, home, team, merge, guard) if accumulators else home
    guard.check()
    return home


def _gather(exchange: Exchange, sizes: Sequence[int], payload: Tensors, team: int) -> dict[str, Tensor]:
    """The blocks of this rank's team, one after another in rank order."""
    layout, held = Layout([Field.of(name, value) for name, value in payload.items()]), dict(payload)
    for partner, _, ranks in partners(exchange.rank, team):
        size = sum(sizes[ranks.start : ranks.stop])
        received = layout.empty(size, next(iter(payload.values())).device)
        exchange.shift(layout.pack(held), received, partner, partner).wait()
        both = [held, layout.unpack(received, size)]
        both = both if exchange.rank < partner else both[::-1]
        held = {name: torch.cat([one[name] for one in both]) for name in payload}
    return held


def _scatter_sum(
    exchange: Exchange, sizes: Sequence[int], sums: Tensors, team: int, merge: Merge | None, guard: Guard
) -> dict[str, Tensor]:
    """The accumulators of this rank's block, merged over its team, from those of all blocks of the team."""
    mine = dict(sums)
    for partner, own, other in reversed(partners(exchange.rank, team)):
        count = sum(sizes[own.start : own.stop])
        first = 0 if exchange.rank < partner else sum(sizes[other.start : other.stop])
        theirs = {name: value[count:] if first == 0 else value[:first] for name, value in mine.items()}
        mine = {name: value[first : first + count] for name, value in mine.items()}
        received = {name: torch.empty_like(value) for name, value in mine.items()}
        send, receive = ([value.view(-1) for value in one.values()] for one in (theirs, received))
        exchange.shift(send, receive, partner, partner).wait()
        _add(mine, received, merge, guard)
    return mine


def _rotate(
    exchange: Exchange,
    sizes: Sequence[int],
    payload: Tensors,
    work: Work,
    accumulators: Sequence[Field],
    merge: Merge | None,
    chunk: int | None,
    guard: Guard,
) -> dict[str, Tensor]:
    """`rotate_blocks` without teams; ``guard`` has the error of this rank."""
    rank, world = exchange.rank, exchange.world
    layout = Layout([Field.of(name, value) for name, value in payload.items()])
    device = next(iter(payload.values())).device
    current, largest = layout.pack(payload), max(sizes)
    spare = [layout.empty(largest, device) for _ in range(2)]
    sums = [_Sums(accumulators, largest, device) for _ in range(2)]
    chunks = column_chunks(largest, chunk)
    pending: deque[Pending] = deque()  # transfers are waited for in the order in which they were started
    for step in range(world):
        before, owner, after = (held_block(rank, step + k, world) for k in (-1, 0, 1))
        held, other = sums[step % 2], sums[(step + 1) % 2]  # of this block; of the one before, then of the one after
        send: list[Tensor] = []
        receive: list[Tensor] = []
        if step + 1 < world:
            send, receive = layout.cut(current, sizes[owner]), layout.cut(spare[step % 2], sizes[after])
        if step > 0:  # the last chunk of the block before
            send, receive = send + other.cut(chunks[-1], sizes[before]), receive + held.cut(chunks[-1], sizes[owner])
        pending.append(exchange.shift(send, receive))
        tensors = layout.unpack(current, sizes[owner])
        for columns in chunks:
            added = None
            if columns.start < sizes[owner] or columns is chunks[0]:
                of_chunk = tensors if chunk is None else {name: value[columns] for name, value in tensors.items()}
                added = guard.run(work, owner, of_chunk, *(() if chunk is None else (columns.start,)))
            if step > 0 or columns is chunks[-1]:
                pending.popleft().wait()
            held.add(columns, sizes[owner], guard, added, merge if step > 0 else None)
            if columns is not chunks[-1]:
                pending.append(exchange.shift(held.cut(columns, sizes[owner]), other.cut(columns, sizes[after])))
        current = spare[step % 2]
    home = sums[world % 2]
    if accumulators:
        last = sums[(world - 1) % 2].cut(chunks[-1], sizes[held_block(rank, world - 1, world)])
        pending.append(exchange.shift(last, home.cut(chunks[-1], sizes[rank])))
        while pending:
            pending.popleft().wait()
    return home.views(slice(0, sizes[rank]), sizes[rank])


class _Sums:
    """The accumulators of a block: one flat buffer for each field."""

    def __init__(self, fields: Sequence[Field], size: int, device: torch.device) -> None:
        self.fields = fields
        self.flat = [torch.empty(size * (field.width or 1), dtype=field.dtype, device=device) for field in fields]

    def cut(self, columns: slice, size: int) -> list[Tensor]:
        """The flat parts of these columns of a block of ``size``, as views."""
        first, last = min(columns.start, size), min(columns.stop, size)
        parts = zip(self.fields, self.flat, strict=True)
        return [flat[first * (field.width or 1) : last * (field.width or 1)] for field, flat in parts]

    def views(self, columns: slice, size: int) -> dict[str, Tensor]:
        """The same by name, (columns, width) or (columns,)."""
        count = min(columns.stop, size) - min(columns.start, size)
        parts = zip(self.fields, self.cut(columns, size), strict=True)
        return {field.name: flat if field.width is None else flat.view(count, field.width) for field, flat in parts}

    def add(self, columns: slice, size: int, guard: Guard, added: Tensors | None, merge: Merge | None) -> None:
        """Add this rank's values to these columns, or write NaN if it failed. Without ``merge``, begin with them."""
        _add(self.views(columns, size), added, merge, guard)


class Guard:
    """Runs calls until one of them fails, and keeps that error for `check`."""

    failure: Exception | None = None

    def check(self) -> None:
        """Raise the kept error and release it, so that the tensors in its traceback are freed after handling."""
        failure, self.failure = self.failure, None
        try:
            if failure is not None:
                raise failure
        finally:
            del failure

    def run(self, function: Callable[..., T], *args: object) -> T | None:
        """``function(*args)``. Returns None without calling it if an earlier call failed."""
        if self.failure is None:
            try:
                return function(*args)
            except Exception as error:
                self.failure = error
        return None


def _add(accumulated: dict[str, Tensor], added: Tensors | None, merge: Merge | None, guard: Guard) -> None:
    """Add to these accumulators in place, or write NaN if this rank failed."""
    guard.run(_accumulate, accumulated, added, merge)
    if guard.failure is not None:
        for value in accumulated.values():
            value.fill_(torch.nan if value.is_floating_point() else torch.iinfo(value.dtype).min)


def _accumulate(accumulated: dict[str, Tensor], added: Tensors | None, merge: Merge | None) -> None:
    """Merge this rank's values into the accumulators. Without ``merge``, initialize the accumulators."""
    if merge is None:
        for name, value in accumulated.items():
            value.zero_() if added is None else value.copy_(added[name])
    elif added is not None:
        merge(accumulated, added)
