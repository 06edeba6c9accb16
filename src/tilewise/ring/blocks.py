"""Blocks that travel: what they carry, how it is packed, and the loop in which every rank meets every block once.

A block carries *cargo*, which nobody changes (features, keys, zeros), and collects *credits*, to which every host
adds (column statistics in forward, gradients in backward). Cargo for the next step arrives while this step is computed.
Credits follow one step behind their block: what a host adds at step s travels while it computes step s + 1.

    step            0            1              2          ...   W - 1          home
    cargo of hop    0 -> 1       1 -> 2         2 -> 3            -
    credits of hop  -            0 -> 1         1 -> 2            W-2 -> W-1     W-1 -> 0
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from tilewise.ring.exchange import Exchange
from tilewise.ring.schedule import held_block

T = TypeVar("T")
Tensors = Mapping[str, Tensor]
Join = Callable[[dict[str, Tensor], Tensors], object]  # what a block has, to change in place; what to add to it


@dataclass(frozen=True)
class Field:
    """One tensor of a block: (size, width), or (size,) with width None."""

    name: str
    dtype: torch.dtype
    width: int | None = None

    @staticmethod
    def of(name: str, tensor: Tensor) -> Field:
        """The field that this tensor fills."""
        return Field(name, tensor.dtype, tensor.shape[1] if tensor.dim() == 2 else None)


class Layout:
    """Where the fields of a block lie in a few flat buffers: one for each wide field, one for vectors of a type."""

    def __init__(self, fields: Sequence[Field]) -> None:
        self.wide = [field for field in fields if field.width is not None]
        thin: dict[torch.dtype, list[Field]] = {}
        for field in fields:
            if field.width is None:
                thin.setdefault(field.dtype, []).append(field)
        self.thin = list(thin.items())

    def __bool__(self) -> bool:
        return bool(self.wide or self.thin)

    def _widths(self) -> list[tuple[torch.dtype, int]]:
        wide = [(field.dtype, field.width or 0) for field in self.wide]
        return wide + [(dtype, len(fields)) for dtype, fields in self.thin]

    def pack(self, tensors: Tensors) -> list[Tensor]:
        """Buffers of these tensors; contiguous wide ones are not copied."""
        buffers = [tensors[field.name].contiguous().view(-1) for field in self.wide]
        for _, fields in self.thin:
            parts = [tensors[field.name] for field in fields]
            buffers.append(torch.stack(parts).view(-1) if len(parts) > 1 else parts[0].contiguous())
        return buffers

    def empty(self, size: int, device: torch.device) -> list[Tensor]:
        """Buffers for a block of up to ``size`` columns."""
        return [torch.empty(size * width, dtype=dtype, device=device) for dtype, width in self._widths()]

    def cut(self, buffers: Sequence[Tensor], size: int) -> list[Tensor]:
        """The parts of the buffers that a block of ``size`` columns fills."""
        return [buffer[: size * width] for buffer, (_, width) in zip(buffers, self._widths(), strict=True)]

    def open(self, buffers: Sequence[Tensor], size: int) -> dict[str, Tensor]:
        """The fields of a block of ``size`` columns, as views."""
        parts = iter(self.cut(buffers, size))
        found = {field.name: next(parts).view(size, field.width or 0) for field in self.wide}
        for _, fields in self.thin:
            rows = next(parts).view(len(fields), size)
            found.update({field.name: rows[k] for k, field in enumerate(fields)})
        return found


def go_round(
    exchange: Exchange,
    sizes: Sequence[int],
    cargo: Tensors,
    work: Callable[[int, dict[str, Tensor]], Tensors | None],
    *,
    credits: Sequence[Field] = (),
    join: Join | None = None,
) -> dict[str, Tensor]:
    """Every rank meets every block once; what they add to this rank's block is returned.

    Args:
        exchange: the group.
        sizes: columns of each rank's block.
        cargo: the tensors of this rank's block, (size, width) or (size,); the same names and types on every rank.
        work: called with the owner of the block at hand and its tensors; returns what the block is to be credited
            with, or None for nothing. Called with this rank's own block first.
        credits: the fields of what ``work`` returns.
        join: adds a credit to the ones that a block has already, in place.

    If ``work`` or ``join`` fails, this rank still passes all blocks on, with NaN in place of what it owed them (in
    integers, the smallest one), and raises afterwards: its neighbours neither hang nor take a wrong number for a right
    one. Only a rank that cannot get the memory of the blocks under way has nothing to pass on, and raises at once.

    Memory beside the cargo itself: two blocks of cargo and two of credits, whatever the number of ranks.
    """
    rank, world = exchange.rank, exchange.world
    layout, bag = Layout([Field.of(name, value) for name, value in cargo.items()]), Layout(credits)
    if world == 1:
        return dict(work(rank, dict(cargo)) or {})
    device = next(iter(cargo.values())).device
    here, largest = layout.pack(cargo), max(sizes)
    spare = [layout.empty(largest, device) for _ in range(2)]
    bags = [bag.empty(largest, device) for _ in range(2)]
    guard = Guard()
    for step in range(world):
        owner, came = held_block(rank, step, world), held_block(rank, step + 1, world)
        send: list[Tensor] = []
        receive: list[Tensor] = []
        if step + 1 < world:
            send += layout.cut(here, sizes[owner])
            receive += layout.cut(spare[step % 2], sizes[came])
        if bag and step > 0:
            send += bag.cut(bags[(step - 1) % 2], sizes[held_block(rank, step - 1, world)])
            receive += bag.cut(bags[step % 2], sizes[owner])
        under_way = exchange.shift(send, receive)
        added = guard.run(work, owner, layout.open(here, sizes[owner]))
        under_way.wait()
        if bag:
            held = bag.open(bags[step % 2], sizes[owner])
            guard.run(_settle, held, added, join if step > 0 else None)
            if guard.failure is not None:
                _spoil(held)
        here = spare[step % 2]
    home = bags[world % 2]
    if bag:
        sent = bag.cut(bags[(world - 1) % 2], sizes[held_block(rank, world - 1, world)])
        exchange.shift(sent, bag.cut(home, sizes[rank])).wait()
    guard.check()
    return bag.open(home, sizes[rank]) if bag else {}


class Guard:
    """Runs one thing after another until one of them fails, and keeps its error."""

    failure: Exception | None = None

    def check(self) -> None:
        """Raise what failed. It is not kept, so that what it holds (blocks, say) is free as soon as it is handled."""
        failure, self.failure = self.failure, None
        try:
            if failure is not None:
                raise failure
        finally:
            del failure

    def run(self, do: Callable[..., T], *args: object) -> T | None:
        """``do(*args)``, unless something has failed already."""
        if self.failure is None:
            try:
                return do(*args)
            except Exception as error:
                self.failure = error
        return None


def _settle(held: dict[str, Tensor], added: Tensors | None, join: Join | None) -> None:
    """Add to a block's credits what this rank owes it; without ``join`` the block has none yet."""
    if join is not None:
        if added is not None:
            join(held, added)
        return
    for name, value in held.items():
        if added is None:
            value.zero_()
        else:
            value.copy_(added[name])


def _spoil(held: dict[str, Tensor]) -> None:
    """What nobody takes for a number: NaN, or the smallest integer."""
    for value in held.values():
        value.fill_(torch.nan if value.is_floating_point() else torch.iinfo(value.dtype).min)
