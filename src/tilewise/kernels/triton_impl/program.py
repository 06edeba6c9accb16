"""A call as data: steps over named buffers. A program is written once for each kind of call, and run many times.

    program = Program()
    a, b = program.given("a"), program.given("b")
    x = program.scratch("x", (n, m), torch.float32)
    lse = program.output("lse", (n,), torch.float32)
    program.product(x, a, b.t)
    program.launch(lse_kernel, programs=n, x=x, lse=lse, m=m)
    program.done()

What a program depends on is its key: sizes, types, settings, never a number in a tensor. It holds no tensor, so threads
may share it. `run` has what it needs for one call: the given tensors and numbers, in the order in which they were
declared. Each other buffer is allocated before its first step and freed after its last one.

A part of a buffer is written as a slice: ``lse[128:256]``, ``x[:, 4:]``. Many equal steps are a loop, in which only the
places of parts and some numbers change, by the same amount from one turn to the next. `over` finds that out by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import torch

from tilewise.kernels.triton_impl.buffers import (
    Buffer,
    Descriptor,
    Moving,
    Values,
    sample_of,
    strides_of,
    tensor_of,
    value_of,
)
from tilewise.kernels.triton_impl.launch import arguments_of, compiled_launch
from tilewise.kernels.triton_impl.steps import Launch, Loop, Product, Torch, Total, buffers_of, same_step

POOLED = 2**22  # bytes; scratch up to this size shares one block
NUMBERS = float, int, bool
LEAST_TURNS = 4  # of a loop; fewer are written out


class Program:
    """Steps over named buffers, in order."""

    def __init__(self) -> None:
        self.buffers: list[Buffer] = []
        self.steps: list[Any] = []
        self.outputs: list[Any] = []  # buffers, or what `run` returns as it is
        self.count = 0  # of what is given
        self.depth = 0  # of the loop that is being written

    def given(self, name: str, like: torch.Tensor | None = None) -> Buffer:
        """A tensor or number that the caller passes; of a tensor ``like`` this one, parts can be taken.

        All of them are declared before anything else.
        """
        assert self.count == len(self.buffers)
        self.count += 1
        place = len(self.buffers)
        if like is None:
            return self._add(Buffer(name, place))
        return self._add(Buffer(name, place, tuple(like.shape), like.dtype, like.stride()))

    def scratch(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Buffer:
        """Memory that the program allocates, and frees after its last use; an output is kept."""
        return self._add(Buffer(name, len(self.buffers), tuple(shape), dtype, strides_of(shape), made=True))

    def output(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Buffer:
        """A tensor that `run` returns."""
        made = self.scratch(name, shape, dtype)
        self.outputs.append(made)
        return made

    def _add(self, buffer: Buffer) -> Buffer:
        self.buffers.append(buffer)
        return buffer

    def product(self, out: Buffer, left: Buffer, right: Buffer, *, add: bool = False) -> None:
        """A step: see `Product`."""
        self.steps.append(Product(out, left, right, add))

    def total(self, out: Buffer, values: Buffer) -> None:
        """A step: see `Total`."""
        self.steps.append(Total(out, values))

    def call(self, function: Callable[..., None], *operands: Any) -> None:
        """A step: see `Torch`."""
        self.steps.append(Torch(function, operands))

    def launch(
        self,
        kernel: Any,
        programs: int,
        *bundles: dict[str, Any],
        warps: int = 4,
        stages: int = 3,
        near: tuple[Any, int, int] | None = None,
        far: dict[str, Any] | None = None,
        **arguments: Any,
    ) -> None:
        """A step: a kernel with its arguments by name.

        Args:
            kernel: the kernel; see `launch.kernel`.
            programs: the size of its grid.
            bundles: arguments that several kernels share. Those that this one does not declare are left out.
            warps, stages: how it is compiled.
            near: numbers (ahead, n, m); if not -n < ahead < m, the step does nothing, or takes the arguments ``far``.
            far: the arguments that differ then.
            arguments: by name; all of them are declared. A parameter without an argument is None.
        """
        found = arguments_of(kernel, bundles, arguments)
        other = None if far is None else Launch(kernel, programs, found | far, warps, stages)
        self.steps.append(Launch(kernel, programs, found, warps, stages, near, other))

    def over(self, slices: Sequence[slice], body: Callable[[slice], None], breaks: Sequence[int] = ()) -> None:
        """The steps of ``body`` for each slice.

        Neighbours of equal length are a loop, except for the first and the last of them, which may differ.
        ``breaks``: where the slices before and after have different steps.
        """
        for run in _runs(slices, breaks):
            middle = run[1:-1]
            if len(middle) < LEAST_TURNS:
                for here in run:
                    body(here)
            else:
                body(run[0])
                self.loop(len(middle), lambda turn, middle=middle: body(middle[turn]))  # type: ignore[misc]
                body(run[-1])

    def loop(self, count: int, body: Callable[[int], None]) -> None:
        """The steps of ``body`` for each turn.

        ``body`` is called for turns 0 and 1 only, and does nothing but add steps. What differs between these two changes by
        the same amount in every later turn.
        """
        before, depth, first = self.steps, self.depth, len(self.buffers)
        self.depth, self.steps = depth + 1, []
        body(0)
        one, second, self.steps = self.steps, len(self.buffers), []
        body(1)
        two, self.steps, self.depth = self.steps, before, depth
        same = {second + place: first + place for place in range(len(self.buffers) - second)}
        assert second - first == len(same), "two turns of a loop need the same scratch memory"
        del self.buffers[second:]
        self.steps.append(Loop(depth, count, [same_step(a, b, depth, same) for a, b in zip(one, two, strict=True)]))

    def above_diagonal(
        self, slices: Sequence[slice], body: Callable[[slice, slice], None], *, diagonal: bool = False
    ) -> None:
        """The steps of ``body`` for each two slices, the first before the second; ``diagonal``: also for each with itself."""

        def row(place: int) -> None:
            if diagonal:
                body(slices[place], slices[place])
            self.over(slices[place + 1 :], lambda j: body(slices[place], j))

        # Each row of blocks has one block less than the row before it. `over` writes a loop for LEAST_TURNS + 2 blocks and
        # more. While two rows in sequence have so many, they are turns of an outer loop.
        alike, start = len(slices) - 3 - LEAST_TURNS, 0
        if alike >= LEAST_TURNS:
            row(0)
            self.loop(alike, lambda turn: row(1 + turn))
            start = 1 + alike
        for place in range(start, len(slices)):
            row(place)

    # -- Memory and arguments -------------------------------------------------------------------------------------

    def done(self) -> Program:
        """Plan the memory: what is allocated before each step, and freed after it."""
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        tensors: set[int] = set()  # places whose tensors are needed, not only their addresses
        for number, step in enumerate(self.steps):
            for buffer in buffers_of(step):
                if buffer.made:
                    first.setdefault(buffer.place, number)
                    last[buffer.place] = number
            if not isinstance(step, Launch):
                tensors |= {buffer.place for buffer in buffers_of(step)}
            else:
                tensors |= {o.part.place for o in step.operands if isinstance(o, Descriptor)}
            if isinstance(step, Product) and step.out.is_whole and first.get(step.out.place) == number:
                step.makes = True
        self._arguments()
        kept = {buffer.place for buffer in self.outputs if isinstance(buffer, Buffer)}
        owned = [buffer for buffer in self.buffers if buffer.place in first]
        self.block: dict[int, int] = {}  # small scratch that only launches use: the offset in one block, by place
        self.block_bytes = 0
        pooled: list[tuple[Buffer, int]] = []
        for buffer in owned:
            if buffer.place not in kept | tensors and buffer.bytes <= POOLED:
                taken = [
                    (start, start + other.bytes)
                    for other, start in pooled
                    if last[other.place] >= first[buffer.place] and last[buffer.place] >= first[other.place]
                ]
                start = _gap(sorted(taken), buffer.bytes)
                pooled.append((buffer, start))
                self.block[buffer.place] = start
                self.block_bytes = max(self.block_bytes, start + buffer.bytes)
        self.turns: list[tuple[list[Any], Any, list[int]]] = []
        now = self.peak_bytes = self.block_bytes
        alone = [buffer for buffer in owned if buffer.place not in self.block]
        starts: list[list[Buffer]] = [[] for _ in self.steps]
        ends: list[list[Buffer]] = [[] for _ in self.steps]
        for buffer in alone:
            starts[first[buffer.place]].append(buffer)
            if buffer.place not in kept:
                ends[last[buffer.place]].append(buffer)
        for step, made, freed in zip(self.steps, starts, ends, strict=True):
            now += sum(buffer.bytes for buffer in made)
            self.peak_bytes = max(self.peak_bytes, now)
            now -= sum(buffer.bytes for buffer in freed)
            # `empty_strided` with all of its arguments is faster than `empty`.
            own = [(b.place, b.shape, b.strides, b.dtype) for b in made if not (step.makes and step.out is b)]
            self.turns.append((own, step, [buffer.place for buffer in freed]))
        return self

    def _arguments(self) -> None:
        """Give each argument of a launch a slot among the values of a run, after those of the buffers."""
        self.template: list[Any] = [None] * len(self.buffers)
        self.parts: dict[int, list[tuple[int, Any]]] = {}  # of each place: slots that its address determines
        found: dict[Any, int] = {}
        launches: list[Launch] = []

        def slot(value: Any, loops: list[Loop]) -> int:
            named = isinstance(value, (Buffer, Descriptor, Moving))
            if not named:
                key: Any = type(value), value
            elif isinstance(value, Buffer) and value.is_start:
                return value.place
            else:
                key = value.key
                if isinstance(value, Moving):
                    key = *key, id(loops[max(value.by)])
            if key not in found:
                found[key] = len(self.template)
                self.template.append(None if named else value)
                if isinstance(value, Moving):
                    loops[max(value.by)].moves.append((found[key], value))
                elif named:
                    part = value.part if isinstance(value, Descriptor) else value
                    self.parts.setdefault(part.place, []).append((found[key], value))
            return found[key]

        def visit(steps: list[Any], loops: list[Loop]) -> None:
            for step in steps:
                if isinstance(step, Loop):
                    visit(step.steps, [*loops, step])
                elif isinstance(step, Launch):
                    for one in (step, step.far):
                        if one is not None:
                            launches.append(one)
                            one.pick = itemgetter(*(slot(value, loops) for value in one.operands))

        visit(self.steps, [])
        # Places of buffers: those that launches use, the given ones among them, and the given ones that have parts
        self.needed = {buffer.place for step in launches for buffer in buffers_of(step)}
        self.launched = [place for place in range(self.count) if place in self.needed]
        self.given_parts = [place for place in range(self.count) if place in self.parts]
        self.missing = [None] * (len(self.buffers) - self.count)

    @property
    def output_bytes(self) -> int:
        """Of the outputs, except for single numbers."""
        return sum(b.used_bytes for b in self.outputs if isinstance(b, Buffer) and b.shape)

    @property
    def scratch_bytes(self) -> int:
        """The peak less the outputs."""
        return self.peak_bytes - self.output_bytes

    # -- Running --------------------------------------------------------------------------------------------------

    def run(self, device: torch.device, *given: Any) -> list[Any]:
        """The outputs, for these tensors and numbers."""
        values = Values(device, [*given, *self.missing], self.template.copy())
        tensors, at, on_card, parts = values.tensors, values.at, values.on_card, self.parts
        at[: len(given)] = given
        if on_card:
            for place in self.launched:
                value = given[place]
                if value is not None and value.__class__ not in NUMBERS:
                    at[place] = value.data_ptr()
        for place in self.given_parts:
            self._place(place, values)
        if self.block_bytes:
            values.places = self.block
            values.block = torch.empty_strided((self.block_bytes,), (1,), dtype=torch.uint8, device=device)
            start = values.block.data_ptr()
            for place, offset in self.block.items():
                at[place] = start + offset if on_card else tensor_of(self.buffers[place], values)
                if place in parts:
                    self._place(place, values)
        for made, step, freed in self.turns:
            for place, shape, strides, dtype in made:
                tensor = tensors[place] = torch.empty_strided(shape, strides, dtype=dtype, device=device)
                at[place] = tensor.data_ptr() if on_card else tensor
                if place in parts:
                    self._place(place, values)
            if step.start is not None:
                step.start(*step.pick(at))
            elif step.__class__ is Product or step.__class__ is Total:
                step.run(values)
                if step.makes and step.out.place in self.needed:
                    self._made(step.out.place, values)
            else:
                self._step(step, values)
            for place in freed:
                tensors[place] = None
                if not on_card:  # otherwise they are addresses
                    at[place] = None
                    for slot, _ in parts.get(place, ()):
                        at[slot] = None
        return [tensors[out.place] if out.__class__ is Buffer else out for out in self.outputs]

    def _made(self, place: int, values: Values) -> None:
        """Fill in the address of a tensor that a step has allocated."""
        made = values.tensors[place]
        values.at[place] = made.data_ptr() if values.on_card else made
        if place in self.parts:
            self._place(place, values)

    def _place(self, place: int, values: Values) -> None:
        """Fill in the arguments that depend on the address of a buffer."""
        for slot, part in self.parts[place]:
            values.at[slot] = value_of(part, values)

    def _step(self, step: Any, values: Values) -> None:
        if isinstance(step, Launch):
            if step.near is not None:
                ahead, n, m = step.near
                ahead = tensor_of(ahead, values)
                if not -n < ahead < m:
                    if step.far is None:
                        return
                    step = step.far
            launch = step.compiled
            if launch is None:
                arguments = [sample_of(value, values) for value in step.operands]
                where = step.kernel, step.programs, arguments, values.device
                launch = step.compiled = compiled_launch(*where, step.warps, step.stages)
                if step.near is None:
                    step.start = launch
            launch(*step.pick(values.at))
        elif isinstance(step, Loop):
            for turn in range(tensor_of(step.count, values)):
                values.turns[step.depth] = turn
                for slot, value in step.moves:
                    values.at[slot] = value_of(value, values)
                for inner in step.steps:
                    self._step(inner, values)
        else:
            step.run(values)

    def __str__(self) -> str:
        sizes = [f"{b.name} {list(b.shape)} {str(b.dtype)[6:]}" for b in self.buffers if b.made]
        steps = [f"{number}. {step}" for number, step in enumerate(self.steps, 1)]
        return "\n".join([*steps, f"buffers: {', '.join(sizes)}", f"peak: {self.peak_bytes:,} bytes"])


def _runs(slices: Sequence[slice], breaks: Sequence[int]) -> list[list[slice]]:
    """Neighbours of equal length, cut at the breaks; the last one of the slices may be shorter than those before it."""
    found: list[list[slice]] = []
    for here in slices:
        size = here.stop - here.start
        same = found and found[-1][0].stop - found[-1][0].start >= size and here.start not in breaks
        if same and (found[-1][-1].stop - found[-1][-1].start == found[-1][0].stop - found[-1][0].start):
            found[-1].append(here)
        else:
            found.append([here])
    return found


def _gap(taken: list[tuple[int, int]], size: int) -> int:
    """The first gap of this size between ranges in ascending order."""
    start = 0
    for low, high in taken:
        if start + size <= low:
            break
        start = max(start, high)
    return start
