"""The launches of a call, recorded once and replayed with other tensors.

For a small batch, or for narrow features, the host takes longer than the GPU: it chooses sizes, cuts slices and fills
in forty arguments a launch. All of that depends on shapes, types, alignment and options, never on numbers. So the first
call of a kind runs normally and is recorded. Later calls allocate memory, fill addresses into prepared lists of
arguments, and launch.

    record   each allocation is a slot; each tensor argument becomes (slot, offset)
    replay   a slot is allocated before its first use and freed after its last; small scratch slots share one block

Only launches and the steps of `Call.step` can be replayed. A call that does something else (a copy of unaligned features,
a sum by torch) uses tensors that belong to no slot, or calls `Call.do_not_record`. It runs normally every time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from triton.tools.tensor_descriptor import TensorDescriptor

from tilewise.kernels.triton_impl.launch.driver import DriverLaunch, Where, no_launch_hooks

POOLED = 2**22  # bytes; scratch up to this size shares one block
ALIGNED = 256
MOST_RECORDINGS = 256
MOST_STEPS = 20_000  # of all recordings together; a step takes about 3 kB
_recordings: dict[Any, Recording | None] = {}  # shared by all threads: backward runs in a thread of autograd
_UNKNOWN = object()
# What torch does with three tensors, target, left and right: most often target = left @ right, or target += left @ right.
TensorStep = Callable[[Tensor, Tensor, Tensor, bool], None]
NOWHERE = Where(-1, 0, (), ())
POOL = -1  # the last of the addresses of a replay is that of the block for small scratch slots


@dataclass
class Slot:
    """One tensor of the recording: an input, or an allocation with its first and last step."""

    address: int
    bytes: int
    shape: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32
    zero: bool = False
    first: int = 0
    last: int = -1
    pool_at: int = -1
    memory: StorageWeakRef | None = None  # of an allocation, while recording: once freed, torch may use it again


class Launch(NamedTuple):
    """A kernel with its arguments, except for tensors."""

    run: Callable[..., None]
    args: list[Any]
    wheres: dict[int, Where]  # by place among the arguments
    blocks: dict[int, Sequence[int]]  # the block shapes of those that are tensor descriptors
    by_driver: DriverLaunch | None

    def with_tensors(self, tensors: Sequence[Tensor | None]) -> None:
        """Launch through Triton's own launcher with the tensors of the slots."""
        args = self.args.copy()
        for place, where in self.wheres.items():
            tensor, block = where.view(tensors), self.blocks.get(place)
            args[place] = tensor if block is None else TensorDescriptor.from_tensor(tensor, list(block))
        self.run(*args)


class TorchStep(NamedTuple):
    """A `TensorStep` with the places of its tensors."""

    run: TensorStep
    wheres: list[Where]
    first: bool

    def with_tensors(self, tensors: Sequence[Tensor | None]) -> None:
        """Run with the tensors of the slots, and keep none of them."""
        target, left, right = [where.view(tensors) for where in self.wheres]
        self.run(target, left, right, self.first)


class Filled(NamedTuple):
    """The arguments of all launches of a replay, and what they were made from."""

    stream: int
    at: list[int]  # the address of each slot, then that of the pool
    args: list[tuple[Any, ...]]  # of each step; () for one of torch


class Recording:
    """The launches and torch's steps of one call, whose inputs `replay` will get in the same order."""

    def __init__(self, device: torch.device, inputs: Sequence[Tensor | None]) -> None:
        self.device, self.inputs = device, len(inputs)
        self.slots: list[Slot] = []
        self.steps: list[Launch | TorchStep] = []
        self.whole = True  # every tensor so far has a slot
        self.driven = device.type == "cuda"  # and the driver can make every launch so far
        self.pooled: list[tuple[int, Slot]] = []
        self.pool_bytes = 0
        for tensor in inputs:
            if tensor is None:
                self.slots.append(Slot(0, 0))
                continue
            reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
            start, end = tensor.data_ptr(), tensor.data_ptr() + reach * tensor.element_size()
            apart = all(start >= other.address + other.bytes or other.address >= end for other in self.slots)
            self.whole &= apart and tensor.numel() > 0  # the inputs of another call need not overlap
            self.slots.append(Slot(start, end - start, tuple(tensor.shape), tensor.stride()))
        self.alive = list(range(len(self.slots)))  # slots to look for while recording; those that were freed leave it

    # -- recording ------------------------------------------------------------------------------------------------

    def allocated(self, made: Tensor, zero: bool) -> None:
        """Record an allocation; see `allocate`."""
        slot = Slot(made.data_ptr(), made.nbytes, tuple(made.shape), made.stride(), made.dtype, zero)
        slot.first, slot.memory = len(self.steps), StorageWeakRef(made.untyped_storage())
        self.alive.append(len(self.slots))
        self.slots.append(slot)

    def launched(self, run: Callable[..., None], args: list[Any], compiled: Any, programs: int) -> None:
        """A kernel was launched; ``compiled`` is None in the interpreter."""
        if not self.whole:
            return  # and keep no tensor without a slot alive
        descriptors = {place: arg for place, arg in enumerate(args) if isinstance(arg, TensorDescriptor)}
        tensors = {place: arg for place, arg in enumerate(args) if isinstance(arg, Tensor)}
        tensors |= {place: arg.base for place, arg in descriptors.items()}
        wheres = {place: self.find(tensors[place]) for place in sorted(tensors)}
        if self.whole:
            blocks = {place: arg.block_shape for place, arg in descriptors.items()}
            others = [None if place in wheres else arg for place, arg in enumerate(args)]
            by_driver = DriverLaunch.of(compiled, programs, others, wheres)
            self.driven &= by_driver is not None
            self.steps.append(Launch(run, others, wheres, blocks, by_driver))

    def stepped(self, run: TensorStep, target: Tensor, left: Tensor, right: Tensor, first: bool) -> None:
        """Record a call of ``run``."""
        step = TorchStep(run, [self.find(tensor) for tensor in (target, left, right)], first)
        if self.whole:
            self.steps.append(step)

    def find(self, tensor: Tensor) -> Where:
        """The place of a tensor: in the slot that is alive and contains its address.

        Freed memory is used again, also by tensors without a slot.
        """
        address = tensor.data_ptr()
        for place in reversed(range(len(self.alive))):
            index = self.alive[place]
            slot = self.slots[index]
            if slot.memory is not None and slot.memory.expired():
                del self.alive[place]
            elif slot.address <= address < slot.address + slot.bytes:
                slot.last = len(self.steps)
                where = Where(index, address - slot.address, tuple(tensor.shape), tensor.stride())
                return where._replace(whole=where[1:4] == (0, slot.shape, slot.stride))
        self.whole = False
        return NOWHERE

    def finish(self, outputs: Sequence[Any]) -> Recording | None:
        """The recording, ready to be replayed; None if it cannot be."""
        steps = len(self.steps)
        self.outputs = [self.find(output) if isinstance(output, Tensor) else output for output in outputs]
        if not self.whole or not steps:
            return None
        kept = {where.slot for where in self.outputs if isinstance(where, Where)}
        # A step of torch takes tensors, not addresses.
        tensors = kept | {where.slot for step in self.steps if isinstance(step, TorchStep) for where in step.wheres}
        # Slots to allocate before a step, and how
        made_at: list[list[tuple[int, Callable[[], Tensor]]]] = [[] for _ in range(steps)]
        done_at: list[list[int]] = [[] for _ in range(steps)]  # and to free after it
        for index, slot in enumerate(self.slots):
            slot.memory = None
            if index < self.inputs or slot.last < 0:
                continue  # given, or allocated and never used
            if index not in tensors and slot.bytes <= POOLED and not slot.zero:
                self._put_in_pool(index, slot)
                continue
            kind: dict[str, Any] = {"dtype": slot.dtype, "device": self.device}
            make = functools.partial(torch.empty_strided, slot.shape, slot.stride, **kind)  # faster than `torch.empty`
            if slot.zero:
                make = functools.partial(torch.zeros, slot.shape, **kind)
            made_at[min(slot.first, steps - 1)].append((index, make))
            if index not in kept:
                done_at[slot.last].append(index)
        in_pool = {index: slot.pool_at for index, slot in self.pooled}
        for step in self.steps:
            if isinstance(step, Launch) and step.by_driver is not None:
                step.by_driver.move(in_pool, POOL)
        self.turns = list(zip(range(steps), made_at, self.steps, done_at, strict=True))
        self.filled = Filled(0, [], [()] * steps)
        return self

    def _put_in_pool(self, index: int, slot: Slot) -> None:
        """Give a small scratch slot a place in the block, after those that are used at the same time."""
        places = sorted(
            (other.pool_at, other.pool_at + other.bytes)
            for _, other in self.pooled
            if other.last >= slot.first and slot.last >= other.first
        )
        start = 0
        for other_start, other_end in places:
            if start + slot.bytes <= other_start:
                break
            start = max(start, -(-other_end // ALIGNED) * ALIGNED)
        slot.pool_at = start
        self.pooled.append((index, slot))
        self.pool_bytes = max(self.pool_bytes, start + slot.bytes)

    # -- replaying ------------------------------------------------------------------------------------------------

    def replay(self, inputs: Sequence[Tensor | None]) -> list[Any]:
        """The same launches with other inputs of the same shapes.

        In most steps of a training every address is that of the step before. As long as that holds, launches take the
        arguments of that step as they are.
        """
        device, by_driver = self.device, self.driven and no_launch_hooks()
        stream = torch._C._cuda_getCurrentRawStream(device.index) if by_driver else 0
        others = len(self.slots) - self.inputs
        tensors: list[Tensor | None] = [*inputs, *([None] * others)]
        at = [0 if tensor is None else tensor.data_ptr() for tensor in inputs]
        before = self.filled  # read once: other threads may replay this recording at the same time, and replace it
        same = by_driver and before.stream == stream and before.at[: self.inputs] == at
        at += [0] * (others + 1)
        if self.pooled:
            pool = torch.empty(self.pool_bytes, dtype=torch.uint8, device=device)
            at[POOL] = pool.data_ptr()
            same = same and before.at[POOL] == at[POOL]
            if not by_driver:
                for index, slot in self.pooled:
                    part = pool[slot.pool_at : slot.pool_at + slot.bytes]
                    tensors[index] = part.view(slot.dtype).view(slot.shape)
        args = before.args.copy()
        for turn, made, step, done in self.turns:
            for index, make in made:
                tensor = tensors[index] = make()
                at[index] = tensor.data_ptr()
                same = same and before.at[index] == at[index]
                del tensor  # the list holds it until its last step
            if by_driver and isinstance(step, Launch) and step.by_driver is not None:
                if not same:
                    args[turn] = step.by_driver.arguments(at, stream)
                step.by_driver.launch(*args[turn])
            else:
                step.with_tensors(tensors)
            for index in done:
                tensors[index] = None
        if by_driver and not same:
            self.filled = Filled(stream, at, args)
        return [where.view(tensors) if isinstance(where, Where) else where for where in self.outputs]


def allocate(
    recording: Recording | None, like: Tensor, shape: Sequence[int], dtype: torch.dtype, zero: bool = False
) -> Tensor:
    """New memory on the device of ``like``, for a call that may be recorded."""
    made = like.new_zeros(shape, dtype=dtype) if zero else like.new_empty(shape, dtype=dtype)
    if recording is not None:
        recording.allocated(made, zero)
    return made


def replay_or_record(
    what: tuple[Any, ...],
    inputs: Sequence[Tensor | None],
    run: Callable[[Recording | None], tuple[Any, ...]],
    device: torch.device,
) -> Sequence[Any]:
    """Replay the recording of this kind of call, or run the call and record it.

    The launches depend on ``what``, and on the inputs except for their numbers and addresses.
    """
    like = [None if t is None else (t.shape, t.stride(), t.dtype, t.device, t.data_ptr() % 16) for t in inputs]
    kind = *what, *like
    known: Any = _recordings.get(kind, _UNKNOWN)  # one lookup: another thread may clear them
    if known is not _UNKNOWN:
        return run(None) if known is None else known.replay(inputs)
    fresh = Recording(device, inputs)
    if not fresh.whole:  # inputs share memory; those of the next call of this kind may not, and can be recorded
        return run(None)
    outputs = run(fresh)
    made = fresh.finish(outputs)
    steps = sum(len(recording.steps) for recording in (*list(_recordings.values()), made) if recording is not None)
    if len(_recordings) >= MOST_RECORDINGS or steps > MOST_STEPS:
        _recordings.clear()
    _recordings[kind] = made
    return outputs
