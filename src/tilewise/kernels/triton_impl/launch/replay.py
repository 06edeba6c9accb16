"""The launches of a call, recorded once and replayed with other tensors.

For a small batch, or for narrow features, the host takes longer than the GPU: it chooses sizes, cuts slices and fills
in forty arguments a launch. All of that depends on shapes, types, alignment and options, never on numbers. So the first
call of a kind runs normally and is recorded. Later calls allocate memory, fill addresses into prepared lists of
arguments, and launch.

    record   each allocation is a slot; each tensor argument becomes (slot, offset)
    replay   a slot is allocated before its first use and freed after its last; small scratch slots share one block

Only launches and products can be replayed. A call that does something else (a copy of unaligned features, a sum by
torch) uses tensors that belong to no slot. It is not recorded and runs normally every time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from triton.tools.tensor_descriptor import TensorDescriptor

from tilewise.kernels.triton_impl.launch.driver import DriverLaunch, is_known_version, no_launch_hooks

POOLED = 2**22  # bytes; scratch up to this size shares one block
ALIGNED = 256
MOST_RECORDINGS = 256
MOST_STEPS = 20_000  # of all recordings together; a step takes about 3 kB
_recordings: dict[Any, Recording | None] = {}  # shared by all threads: backward runs in a thread of autograd
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
    memory: StorageWeakRef | None = None  # of an allocation, while recording: once freed, torch may use it again


@dataclass(frozen=True)
class Where:
    """The place of a tensor in a slot."""

    slot: int
    offset: int  # bytes
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def view(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """The tensor at the same place of another call."""
        whole = tensors[self.slot]
        assert whole is not None
        if self.offset == 0 and whole.shape == self.shape and whole.stride() == self.stride:
            return whole
        return whole.as_strided(self.shape, self.stride, whole.storage_offset() + self.offset // whole.element_size())


class Described:
    """Stands in for a tensor descriptor and its tensor, of which known versions of Triton read only the address."""

    __slots__ = ("address", "block_shape", "padding", "shape", "strides")

    def __init__(self, address: int, like: Any) -> None:
        self.address, self.shape, self.strides = address, like.shape, like.strides
        self.block_shape, self.padding = like.block_shape, getattr(like, "padding", "zero")

    @property
    def base(self) -> Described:
        """In place of the tensor."""
        return self

    def data_ptr(self) -> int:
        """As `Tensor.data_ptr`."""
        return self.address


@dataclass
class Launch:
    """A kernel with its arguments, except for tensors."""

    run: Callable[..., None]
    args: list[Any]
    tensors: list[tuple[int, Where]]  # (place among the arguments, where)
    descriptors: list[tuple[int, Where, Described]]
    by_driver: DriverLaunch | None = None
    sources: list[tuple[int, int]] = field(default_factory=list)  # (slot, offset) of its addresses, by place

    def with_addresses(self, at: Sequence[int], stream: int) -> None:
        """Launch with the addresses of the slots instead of tensors."""
        args = self.args.copy()
        for place, where in self.tensors:
            args[place] = at[where.slot] + where.offset
        for place, where, like in self.descriptors:
            args[place] = Described(at[where.slot] + where.offset, like)
        self.run(*args, stream=stream)

    def with_tensors(self, tensors: Sequence[Tensor | None]) -> None:
        """Launch with the tensors of the slots: the public way."""
        args = self.args.copy()
        for place, where in self.tensors:
            args[place] = where.view(tensors)
        for place, where, like in self.descriptors:
            args[place] = TensorDescriptor.from_tensor(where.view(tensors), like.block_shape)
        self.run(*args)


@dataclass
class Product:
    """target = left @ right, or target += left @ right, or what else ``run`` does with three tensors."""

    run: Callable[[Tensor, Tensor, Tensor, bool], None]
    target: Where
    left: Where
    right: Where
    first: bool


@dataclass
class Recording:
    """The launches and products of one call."""

    device: torch.device
    slots: list[Slot] = field(default_factory=list)
    steps: list[Launch | Product] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)  # the place of each tensor; other values unchanged
    inputs: int = 0
    whole: bool = True  # every tensor so far has a slot
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
            self.whole &= apart and tensor.numel() > 0  # the inputs of another call need not overlap
            self.slots.append(slot)

    def empty(self, like: Tensor, shape: tuple[int, ...], dtype: torch.dtype, zero: bool) -> Tensor:
        """Allocate a slot."""
        made = like.new_zeros(shape, dtype=dtype) if zero else like.new_empty(shape, dtype=dtype)
        slot = Slot(made.data_ptr(), made.nbytes, tuple(made.shape), dtype, zero, first=len(self.steps))
        slot.memory = StorageWeakRef(made.untyped_storage())
        self.slots.append(slot)
        return made

    def launched(self, run: Callable[..., None], args: list[Any], compiled: Any, programs: int) -> None:
        """A kernel was launched; ``compiled`` is None in the interpreter."""
        if not self.whole:
            return  # and keep no tensor without a slot alive
        open_tensors, descriptors, kept = [], [], list(args)
        for place, arg in enumerate(args):
            if isinstance(arg, Tensor) and (where := self.find(arg)) is not None:
                open_tensors.append((place, where))
                kept[place] = None
            elif isinstance(arg, TensorDescriptor) and (where := self.find(arg.base)) is not None:
                descriptors.append((place, where, Described(0, arg)))
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
            step.by_driver = DriverLaunch.of(compiled, programs, laid, open_at)
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
        """The place of a tensor: in the slot that is alive and contains its address.

        Freed memory is used again, also by tensors without a slot.
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
        """The recording, ready to be replayed; None if it cannot be."""
        steps = len(self.steps)
        self.outputs = [self.find(output) if isinstance(output, Tensor) else output for output in outputs]
        if not self.whole or not steps:
            return None
        for slot in self.slots:
            slot.memory = None
        kept = {where.slot for where in self.outputs if isinstance(where, Where)}
        made_at: list[list[tuple[int, Slot]]] = [[] for _ in range(steps)]  # slots to allocate before a step
        done_at: list[list[int]] = [[] for _ in range(steps)]  # and to free after it
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
        """The same launches with other inputs of the same shapes."""
        device = self.device
        by_address = device.type == "cuda" and is_known_version()
        tensors: list[Tensor | None] = [*inputs, *([None] * (len(self.slots) - self.inputs))]
        at = [0 if tensor is None else tensor.data_ptr() for tensor in inputs] + [0] * (len(self.slots) - self.inputs)
        if self.pooled:
            pool = torch.empty(self.pool_bytes, dtype=torch.uint8, device=device)
            base = pool.data_ptr()
            for index, slot in self.pooled:
                at[index] = base + slot.pool_at
                if not by_address:
                    part = pool[slot.pool_at : slot.pool_at + slot.bytes]
                    tensors[index] = part.view(slot.dtype).view(slot.shape)
        stream = torch._C._cuda_getCurrentRawStream(device.index) if by_address else 0
        by_driver = by_address and no_launch_hooks()
        for made, step, done in self.turns:
            for index, slot in made:
                make = torch.zeros if slot.zero else torch.empty
                tensor = tensors[index] = make(slot.shape, dtype=slot.dtype, device=device)
                at[index] = tensor.data_ptr()
            if isinstance(step, Product):
                step.run(step.target.view(tensors), step.left.view(tensors), step.right.view(tensors), step.first)
            elif by_driver and step.by_driver is not None:
                step.by_driver(stream, [at[slot] + offset for slot, offset in step.sources])
            elif by_address:
                step.with_addresses(at, stream)
            else:
                step.with_tensors(tensors)
            for index in done:
                tensors[index] = None
        return [where.view(tensors) if isinstance(where, Where) else where for where in self.outputs]


def replay_key(what: tuple[Any, ...], tensors: Sequence[Tensor | None]) -> tuple[Any, ...]:
    """All that the launches of a call depend on, so that equal keys may share a recording."""
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
    """Replay the recording of this kind of call, or run the call and record it."""
    known: Any = _recordings.get(kind, _UNKNOWN)  # one lookup: another thread may clear them
    if known is not _UNKNOWN:
        return run(None) if known is None else known.replay(inputs)
    fresh = Recording(device)
    fresh.take(inputs)
    if not fresh.whole:  # inputs share memory; those of the next call of this kind may not, and can be recorded
        return run(None)
    outputs = run(fresh)
    made = fresh.finish(outputs)
    steps = sum(len(recording.steps) for recording in (*list(_recordings.values()), made) if recording is not None)
    if len(_recordings) >= MOST_RECORDINGS or steps > MOST_STEPS:
        _recordings.clear()
    _recordings[kind] = made
    return outputs
