"""Names for memory: the tensors of a program, their parts, and what changes from one turn of a loop to the next."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilewise.kernels.triton_impl.tf32 import tensor_descriptor

ALLOCATED = 512  # bytes: torch's allocator rounds up to a multiple
ALIGNED = 16  # bytes: what a compiled kernel may assume of an address
DEEPEST = 4  # loops inside of each other
NO_PLACES: dict[int, int] = {}


def is_card(device: torch.device) -> bool:
    """Whether launches take addresses in place of tensors; the interpreter takes tensors."""
    return device.type == "cuda"


def strides_of(shape: Sequence[int]) -> tuple[int, ...]:
    """Of a contiguous tensor."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


@dataclass(frozen=True, eq=False)
class Buffer:
    """A tensor of a program or a part of one, or a number that is known when it runs.

    ``place``: among the buffers of the program. ``offset``: of a part, in numbers of ``dtype``; or what is added to a
    given number. A tensor that is given without a size (``dtype`` is None) has no parts.
    """

    name: str
    place: int
    shape: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    strides: tuple[int, ...] = ()
    offset: int = 0
    made: bool = False  # allocated by the program
    is_whole: bool = True
    transposed: bool = False

    @staticmethod
    def under(value: Any) -> Buffer | None:
        """The buffer that an argument is a part of, or None."""
        if isinstance(value, Moving):
            value = value.value
        if isinstance(value, Descriptor):
            value = value.part
        return value if isinstance(value, Buffer) else None

    @property
    def is_number(self) -> bool:
        """Whether it may be a number: given without a type."""
        return self.dtype is None

    @property
    def is_start(self) -> bool:
        """Whether its address is that of the whole."""
        return self.offset == 0

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for parts with equal addresses."""
        return self.place, self.offset, self.dtype, self.shape, self.strides

    @property
    def used_bytes(self) -> int:
        """Its numbers; 0 for what is given."""
        return math.prod(self.shape) * self.dtype.itemsize if self.made and self.dtype is not None else 0

    @property
    def bytes(self) -> int:
        """What the program allocates for it."""
        return -(-self.used_bytes // ALLOCATED) * ALLOCATED

    # -- As a tensor ----------------------------------------------------------------------------------------------

    @property
    def t(self) -> Buffer:
        """The same matrix, transposed."""
        turned = dataclasses.replace(self, transposed=not self.transposed)
        return dataclasses.replace(turned, shape=self.shape[::-1], strides=self.strides[::-1])

    T = t

    def __len__(self) -> int:
        return self.shape[0]

    def numel(self) -> int:
        """The number of its numbers."""
        return math.prod(self.shape)

    def element_size(self) -> int:
        """Bytes of one number."""
        assert self.dtype is not None
        return self.dtype.itemsize

    def stride(self, axis: int) -> int:
        """Numbers from one index of an axis to the next."""
        return self.strides[axis]

    @property
    def nbytes(self) -> int:
        """Bytes of its numbers."""
        return self.numel() * self.element_size()

    def __getitem__(self, index: slice | tuple[slice, ...]) -> Buffer:
        """A part; slices have the step 1."""
        cuts = index if isinstance(index, tuple) else (index,)
        shape, offset = list(self.shape), self.offset
        for axis, cut in enumerate(cuts):
            start, stop, _ = cut.indices(self.shape[axis])
            shape[axis], offset = max(0, stop - start), offset + start * self.strides[axis]
        if tuple(shape) == self.shape:
            return self
        return dataclasses.replace(self, shape=tuple(shape), offset=offset, is_whole=False)

    def view(self, *shape: int) -> Buffer:
        """Contiguous numbers in another shape; one size may be -1."""
        assert self.strides == strides_of(self.shape), f"{self} is not contiguous"
        if -1 in shape:
            known = -math.prod(shape)
            shape = tuple(self.numel() // known if size == -1 else size for size in shape)
        assert math.prod(shape) == self.numel()
        return dataclasses.replace(self, shape=shape, strides=strides_of(shape), is_whole=False)

    def as_type(self, dtype: torch.dtype) -> Buffer:
        """The same bytes as numbers of another type: one axis."""
        assert self.strides == strides_of(self.shape), f"{self} is not contiguous"
        size, offset = self.nbytes // dtype.itemsize, self.offset * self.element_size() // dtype.itemsize
        return dataclasses.replace(
            self, shape=(size,), strides=(1,), offset=offset, dtype=dtype, is_whole=False, transposed=False
        )

    def __add__(self, more: int) -> Buffer:
        """A given number plus another one."""
        assert self.dtype is None
        return dataclasses.replace(self, offset=self.offset + more, is_whole=False)

    def __str__(self) -> str:
        name = f"{self.name}'" if self.transposed else self.name
        if self.is_whole or self.is_number:
            return name
        axis = 1 if self.transposed else 0
        start = self.offset // max(1, self.strides[axis])
        return f"{name}[{start:,}:{start + self.shape[axis]:,}]"


@dataclass(frozen=True, eq=False)
class Descriptor:
    """A part that a kernel reads or writes in blocks of this size. ``exact``: see `tensor_descriptor`."""

    part: Buffer
    block: tuple[int, int]
    exact: str | None = None

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for equal descriptors."""
        return *self.part.key, self.block, self.exact

    def __str__(self) -> str:
        return str(self.part)


@dataclass(frozen=True, eq=False)
class Moving:
    """A part, a descriptor or a number in a loop. ``by``: how far it moves in one turn of the loop at each depth."""

    value: Any
    by: dict[int, int]

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for what moves in the same way."""
        own = self.value.key if Buffer.under(self.value) is not None else (self.value,)
        return *own, *self.by.items()

    def __str__(self) -> str:
        return str(self.value)


class Values:
    """The values of one run: tensors and numbers by place, arguments of launches by slot, and turns of loops."""

    __slots__ = ("at", "block", "device", "on_card", "places", "tensors", "turns")

    def __init__(self, device: torch.device, tensors: list[Any], at: list[Any]) -> None:
        self.device, self.tensors, self.at = device, tensors, at
        self.on_card = is_card(device)  # then launches take addresses in place of tensors
        self.block: Tensor | None = None  # the memory of small scratch, and the offset of each in it, by place
        self.places: dict[int, int] = NO_PLACES
        self.turns = [0] * DEEPEST


def _now(value: Any, values: Values) -> tuple[Any, int]:
    """What moves, and how far it has moved."""
    if not isinstance(value, Moving):
        return value, 0
    return value.value, sum(values.turns[depth] * by for depth, by in value.by.items())


def tensor_of(value: Any, values: Values) -> Any:
    """The tensor, tensor descriptor or number that stands for a value in this run."""
    if value.__class__ is Buffer and value.is_whole:  # nearly all, and it may be None in these values
        whole = values.tensors[value.place]
        if whole is not None:
            return whole.t() if value.transposed else whole
    value, moved = _now(value, values)
    if isinstance(value, Descriptor):
        return tensor_descriptor(_tensor(value.part, moved, values), value.block, value.exact)
    if not isinstance(value, Buffer):
        return value + moved if moved else value
    if value.dtype is None and not value.is_whole:
        return values.tensors[value.place] + value.offset + moved
    return _tensor(value, moved, values)


def _tensor(part: Buffer, moved: int, values: Values) -> Any:
    whole = values.tensors[part.place]
    kind: Any = part.dtype
    if whole is None and part.place in values.places:
        assert values.block is not None
        start = values.places[part.place]
        whole = values.block[start:].view(kind)
        return whole.as_strided(part.shape, part.strides, whole.storage_offset() + part.offset + moved)
    if part.is_whole:
        return whole.t() if part.transposed else whole
    if whole.dtype != kind:
        whole = whole.view(-1).view(kind)
    return whole.as_strided(part.shape, part.strides, whole.storage_offset() + part.offset + moved)


def value_of(value: Any, values: Values) -> Any:
    """The argument of a launch: on a card the address of a tensor."""
    inner, moved = _now(value, values)
    if not (values.on_card and isinstance(inner, Buffer) and inner.dtype is not None):
        return tensor_of(value, values)
    return values.at[inner.place] + (inner.offset + moved) * inner.dtype.itemsize


def joined(one: Any, two: Any, depth: int, same: dict[int, int]) -> Any:
    """One value for two turns of the loop at a depth. ``same``: places of scratch in the first turn, by those in the second."""
    by: dict[int, int] = {}
    if isinstance(one, Moving):
        assert isinstance(two, Moving)
        assert one.by == two.by
        by, one, two = one.by, one.value, two.value
    moved = 0
    assert type(one) is type(two), f"{one} and {two} in two turns of a loop"
    if isinstance(one, Descriptor):
        assert (one.block, one.exact) == (two.block, two.exact)
        moved = _apart(one.part, two.part, same)
    elif isinstance(one, Buffer):
        moved = _apart(one, two, same)
    elif isinstance(one, int) and not isinstance(one, bool):
        moved = two - one
    else:
        assert one == two, f"{one} and {two} in two turns of a loop"
    if moved:
        by = {depth: moved} | by
    return Moving(one, by) if by else one


def _apart(one: Buffer, two: Buffer, same: dict[int, int]) -> int:
    assert one.place == same.get(two.place, two.place), f"{one} and {two} in two turns of a loop"
    assert (one.shape, one.strides, one.dtype) == (two.shape, two.strides, two.dtype)
    return two.offset - one.offset


def sample_of(value: Any, values: Values) -> Any:
    """As `tensor_of`, to compile a kernel. If 16 does not divide the address of a part in some turn of a loop, neither here."""
    if not isinstance(value, (Buffer, Descriptor, Moving)):
        return value
    if isinstance(value, Moving) and isinstance(value.value, Buffer):
        kind = value.value.dtype
        if kind is not None and any(by * kind.itemsize % ALIGNED for by in value.by.values()):
            return torch.empty(2, dtype=kind, device=values.device)[1:]
    return tensor_of(value, values)
