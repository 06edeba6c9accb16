"""The launches of a call, written down once and repeated with other tensors.

A small batch, or narrow features, cost the GPU less time than the host needs to choose sizes, cut slices and fill in
forty arguments a launch. All of that depends on shapes, types, alignment and options alone, never on numbers. So the first call of a kind
runs as it is and leaves a recording; the next ones allocate, put addresses into ready lists of arguments, and launch.

    record   every allocation is a slot; every argument that is a tensor becomes (slot, offset)
    replay   a slot is allocated before its first use and given back after its last; small scratch shares one block

A call that does anything beside launches and products (a copy of unaligned features, a sum by torch) holds tensors
that belong to no slot: it leaves no recording, and runs as it is every time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from triton.tools.tensor_descriptor import TensorDescriptor

from tilewise.kernels.triton_impl.launch.driver import DriverLaunch, no_launch_hooks

POOLED = 2**22  # bytes; scratch up to this size shares one block
ALIGNED = 256
MOST_RECORDINGS = 256
MOST_STEPS = 20_000  # of all recordings together; a step takes about 3 kB
_recordings: dict[Any, Recording | None] = {}  # shared by all threads: backward runs in one of autograd's
_UNKNOWN = object()


@dataclass
class Slot:
    """One tensor of the recording: an input, or an allocation with its first and last step."""

    address: int
    bytes: int
    shape: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32
    zero: bool = False
    first: int = 0
    last: int = -1
    multiplied: bool = False  # a product takes tensors, not addresses
    pool_at: int = -1
    memory: StorageWeakRef | None = None  # of an allocation, during recording: torch may use it again once it is free


@dataclass(frozen=True)
class Where:
    """A tensor as a place in a slot."""

    slot: int
    offset: int  # bytes
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def view(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """The same place of another call's tensors."""
        whole = tensors[self.slot]
        assert whole is not None
        if self.offset == 0 and whole.shape == self.shape and whole.stride() == self.stride:
            return whole
        return whole.as_strided(self.shape, self.stride, whole.storage_offset() + self.offset // whole.element_size())


class Address:
    """As much of a tensor as a descriptor needs."""

    __slots__ = ("address",)

    def __init__(self, address: int) -> None:
        self.address = address

    def data_ptr(self) -> int:
        """As a tensor's."""
        return self.address


class Described:
    """As much of a tensor descriptor as a launch needs."""

    __slots__ = ("base", "block_shape", "padding", "shape", "strides")
    round_f32_to_tf32 = False  # Triton asks for it from 3.7 on

    def __init__(self, base: Address, like: TensorDescriptor) -> None:
        self.base, self.shape, self.strides = base, like.shape, like.strides
        self.block_shape, self.padding = like.block_shape, like.padding


@dataclass
class Launch:
    """A kernel with its arguments, those that are tensors left open."""

    run: Callable[..., None]
    args: list[Any]
    tensors: list[tuple[int, Where]]  # (place among the arguments, where)
    descriptors: list[tuple[int, Where, TensorDescriptor]]
    quick: DriverLaunch | None = None
    sources: list[tuple[int, int]] = field(default_factory=list)  # (slot, offset) of its addresses, by place


@dataclass
class Product:
    """target = left @ right, or target += left @ right, or whatever else ``run`` does with three tensors."""

    run: Callable[[Tensor, Tensor, Tensor, bool], None]
    target: Where
    left: Where
    right: Where
    first: bool
    quick: None = None


@dataclass
class Recording:
    """What one call did."""

    device: torch.device
    slots: list[Slot] = field(default_factory=list)
    steps: list[Launch | Product] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)  # a place of each tensor; anything else as it is
    inputs: int = 0
    whole: bool = True  # nothing was met that has no slot
    turns: list[tuple[list[tuple[int, Slot]], Launch | Product, list[int]]] = field(default_factory=list)
    pooled: list[tuple[int, Slot]] = field(default_factory=list)
    pool_bytes: int = 0

    # -- recording ------------------------------------------------------------------------------------------------

    def take(self, tensors: Sequence[Tensor | None]) -> None:
        """The inputs, in the order in which `replay` will get them."""
        self.inputs = len(tensors)
        for tensor in tensors:
            if tensor is None:
                self.slots.append(Slot(0, 0))
                continue
            reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
            slot = Slot(tensor.data_ptr(), reach * tensor.element_size())
            apart = all(
                slot.address >= other.address + other.bytes or other.address >= slot.address + slot.bytes
                for other in self.slots
            )
            self.whole &= apart and tensor.numel() > 0  # another call's inputs may lie elsewhere
            self.slots.append(slot)

    def empty(self, like: Tensor, shape: tuple[int, ...], dtype: torch.dtype, zero: bool) -> Tensor:
        """Allocate, and remember it."""
        made = like.new_zeros(shape, dtype=dtype) if zero else like.new_empty(shape, dtype=dtype)
        slot = Slot(made.data_ptr(), made.nbytes, tuple(made.shape), dtype, zero, first=len(self.steps))
        slot.memory = StorageWeakRef(made.untyped_storage())
        self.slots.append(slot)
        return made

    def launched(self, run: Callable[..., None], args: list[Any], compiled: Any, programs: int) -> None:
        """A kernel was launched; ``compiled`` is None in the interpreter."""
        if not self.whole:
            return  # nor keep alive what has no slot
        open_tensors, descriptors, kept = [], [], list(args)
        for place, arg in enumerate(args):
            if isinstance(arg, Tensor) and (where := self.find(arg)) is not None:
                open_tensors.append((place, where))
                kept[place] = None
            elif isinstance(arg, TensorDescriptor) and (where := self.find(arg.base)) is not None:
                like = TensorDescriptor.__new__(TensorDescriptor)
                like.shape, like.strides = list(arg.shape), list(arg.strides)
                like.block_shape, like.padding = list(arg.block_shape), arg.padding
                descriptors.append((place, where, like))
                kept[place] = None
        step = Launch(run, kept, open_tensors, descriptors)
        if not self.whole:
            return
        if compiled is not None:
            places = sorted(open_tensors + [(p, w) for p, w, _ in descriptors], key=lambda one: one[0])
            step.sources = [(where.slot, where.offset) for _, where in places]
            open_at = [place for place, _ in places]
            likes = {place: like for place, _, like in descriptors}
            laid = [likes.get(place, arg) for place, arg in enumerate(kept)]
            step.quick = DriverLaunch.of(compiled, programs, laid, open_at)
        self.steps.append(step)

    def multiplied(
        self,
        run: Callable[[Tensor, Tensor, Tensor, bool], None],
        target: Tensor,
        left: Tensor,
        right: Tensor,
        first: bool,
    ) -> None:
        """A product was taken."""
        into, one, other = self.find(target), self.find(left), self.find(right)
        if into is not None and one is not None and other is not None:
            for where in (into, one, other):
                self.slots[where.slot].multiplied = True
            self.steps.append(Product(run, into, one, other, first))

    def find(self, tensor: Tensor) -> Where | None:
        """The slot of a tensor: the one that lives and holds its address. Memory is given back and used again, also by
        tensors that have no slot.
        """
        address = tensor.data_ptr()
        for index in reversed(range(len(self.slots))):
            slot = self.slots[index]
            if not slot.address <= address < slot.address + slot.bytes:
                continue
            if slot.memory is None or not slot.memory.expired():
                slot.last = len(self.steps)
                return Where(index, address - slot.address, tuple(tensor.shape), tensor.stride(), tensor.dtype)
        self.whole = False
        return None

    def finish(self, outputs: Sequence[Any]) -> Recording | None:
        """The recording, ready to be replayed; None if something cannot be."""
        steps = len(self.steps)
        self.outputs = [self.find(output) if isinstance(output, Tensor) else output for output in outputs]
        if not self.whole or not steps:
            return None
        for slot in self.slots:
            slot.memory = None
        kept = {where.slot for where in self.outputs if isinstance(where, Where)}
        made_at: list[list[tuple[int, Slot]]] = [[] for _ in range(steps)]  # what is allocated before a step
        done_at: list[list[int]] = [[] for _ in range(steps)]  # and what is given back after it
        for index, slot in enumerate(self.slots[self.inputs :], start=self.inputs):
            if slot.last < 0:
                continue  # allocated and never used
            if index in kept:
                slot.last = steps
            elif slot.bytes <= POOLED and not slot.zero and not slot.multiplied:
                slot.pool_at = self.pool_bytes
                self.pooled.append((index, slot))
                self.pool_bytes += -(-slot.bytes // ALIGNED) * ALIGNED
                continue
            else:
                done_at[slot.last].append(index)
            made_at[min(slot.first, steps - 1)].append((index, slot))
        self.turns = list(zip(made_at, self.steps, done_at, strict=True))
        return self

    # -- replaying ------------------------------------------------------------------------------------------------

    def replay(self, inputs: Sequence[Tensor | None]) -> list[Any]:
        """The same with other inputs of the same shapes."""
        device, cuda = self.device, self.device.type == "cuda"
        tensors: list[Tensor | None] = [*inputs, *([None] * (len(self.slots) - self.inputs))]
        at = [0 if tensor is None else tensor.data_ptr() for tensor in inputs] + [0] * (len(self.slots) - self.inputs)
        if self.pooled:
            pool = torch.empty(self.pool_bytes, dtype=torch.uint8, device=device)
            base = pool.data_ptr()
            for index, slot in self.pooled:
                at[index] = base + slot.pool_at
                if not cuda:
                    part = pool[slot.pool_at : slot.pool_at + slot.bytes]
                    tensors[index] = part.view(slot.dtype).view(slot.shape)
        stream = torch._C._cuda_getCurrentRawStream(device.index) if cuda else 0
        how, quiet = ({"stream": stream} if cuda else {}), no_launch_hooks()
        for made, step, done in self.turns:
            for index, slot in made:
                make = torch.zeros if slot.zero else torch.empty
                tensor = tensors[index] = make(slot.shape, dtype=slot.dtype, device=device)
                at[index] = tensor.data_ptr()
            if quiet and step.quick is not None:
                step.quick(stream, [at[slot] + offset for slot, offset in step.sources])
            elif isinstance(step, Launch):
                args = step.args.copy()
                if cuda:
                    for place, where in step.tensors:
                        args[place] = at[where.slot] + where.offset
                    for place, where, like in step.descriptors:
                        args[place] = Described(Address(at[where.slot] + where.offset), like)
                else:
                    for place, where in step.tensors:
                        args[place] = where.view(tensors)
                    for place, where, like in step.descriptors:
                        args[place] = TensorDescriptor.from_tensor(where.view(tensors), like.block_shape)
                step.run(*args, **how)
            else:
                step.run(step.target.view(tensors), step.left.view(tensors), step.right.view(tensors), step.first)
            for index in done:
                tensors[index] = None
        return [where.view(tensors) if isinstance(where, Where) else where for where in self.outputs]


def replay_key(what: tuple[Any, ...], tensors: Sequence[Tensor | None]) -> tuple[Any, ...]:
    """All that the launches of a call depend on."""
    return (
        *what,
        *(None if t is None else (t.shape, t.stride(), t.dtype, t.device, t.data_ptr() % 16) for t in tensors),
    )


def replay_or_record(
    kind: tuple[Any, ...],
    inputs: Sequence[Tensor | None],
    run: Callable[[Recording | None], tuple[Any, ...]],
    device: torch.device,
) -> Sequence[Any]:
    """Replay the recording of this kind of call, or run it and leave one."""
    known: Any = _recordings.get(kind, _UNKNOWN)  # one look: another thread may clear them
    if known is not _UNKNOWN:
        return run(None) if known is None else known.replay(inputs)
    fresh = Recording(device)
    fresh.take(inputs)
    if not fresh.whole:  # inputs share memory: the next ones of this kind may not, and are worth a recording
        return run(None)
    outputs = run(fresh)
    made = fresh.finish(outputs)
    steps = sum(len(recording.steps) for recording in (*list(_recordings.values()), made) if recording is not None)
    if len(_recordings) >= MOST_RECORDINGS or steps > MOST_STEPS:
        _recordings.clear()
    _recordings[kind] = made
    return outputs
