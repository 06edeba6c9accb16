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
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

import torch

from tilewise.kernels.triton_impl.buffers import (
    Buffer,
    Descriptor,
    Moving,
    Values,
    joined,
    sample_of,
    strides_of,
    tensor_of,
    value_of,
)
from tilewise.kernels.triton_impl.launch import arguments_of, compiled_launch, declared

POOLED = 2**22  # bytes; scratch up to this size shares one block
LEAST_TURNS = 4  # of a loop; fewer are written out


@dataclass(eq=False)
class Product:
    """out = left @ right, or with ``add`` out += left @ right, accumulated in float32, in the type of ``out``."""

    out: Any
    left: Any
    right: Any
    add: bool = False
    makes: bool = False  # whether it allocates ``out``: the first step of a whole buffer

    @property
    def operands(self) -> tuple[Any, ...]:
        """All that it reads or writes."""
        return self.out, self.left, self.right

    @property
    def kind(self) -> Any:
        """The type of ``out``."""
        buffer = Buffer.under(self.out)
        assert buffer is not None
        return buffer.dtype

    def run(self, values: Values) -> None:
        """Multiply."""
        left, right, kind = tensor_of(self.left, values), tensor_of(self.right, values), self.kind
        if not left.is_cuda:  # the interpreter
            made = left.float() @ right.float()
            if self.makes:
                values.tensors[self.out.place] = made.to(kind)
            else:
                out = tensor_of(self.out, values)
                out.copy_(out + made if self.add else made)
            return
        more: dict[str, Any] = {} if left.dtype == kind else {"out_dtype": kind}
        if self.makes:
            values.tensors[self.out.place] = torch.mm(left, right, **more)
            return
        out = tensor_of(self.out, values)
        torch.addmm(out, left, right, out=out, **more) if self.add else torch.mm(left, right, out=out, **more)

    def __str__(self) -> str:
        return f"{self.out} {'+' if self.add else ''}= {self.left} @ {self.right}"


@dataclass(eq=False)
class Total:
    """out = the sum of ``values``. It allocates ``out``. Torch's own sum takes half the time of a launch on the host."""

    out: Buffer
    values: Buffer
    makes: bool = True

    @property
    def operands(self) -> tuple[Any, ...]:
        """All that it reads or writes."""
        return self.out, self.values

    def run(self, values: Values) -> None:
        """Add up."""
        values.tensors[self.out.place] = values.tensors[self.values.place].sum()

    def __str__(self) -> str:
        return f"{self.out} = sum of {self.values}"


@dataclass(eq=False)
class Torch:
    """A function of tensors and numbers, which writes into some of the tensors."""

    function: Callable[..., None]
    operands: tuple[Any, ...]
    makes = False

    def run(self, values: Values) -> None:
        """Call it."""
        self.function(*[tensor_of(operand, values) for operand in self.operands])

    def __str__(self) -> str:
        name = getattr(self.function, "func", self.function).__name__
        return f"{name}: {', '.join(str(operand) for operand in self.operands if operand is not None)}"


@dataclass(eq=False)
class Launch:
    """A kernel with its grid. ``arguments``: in the order of its parameters."""

    kernel: Any
    programs: int
    arguments: dict[str, Any]
    warps: int
    stages: int
    # (ahead, n, m): with ahead <= -n or ahead >= m, ``far`` replaces this launch: another one, or None for nothing
    near: tuple[Any, int, int] | None = None
    far: Launch | None = None
    makes = False
    pick: Callable[[Sequence[Any]], tuple[Any, ...]] = field(init=False)
    compiled: dict[torch.device, Any] = field(default_factory=dict)

    @property
    def operands(self) -> tuple[Any, ...]:
        """All that it reads or writes, and its numbers."""
        return tuple(self.arguments.values())

    def __str__(self) -> str:
        names = [buffer.name for buffer in _buffers(self) if buffer.made or not buffer.is_number]
        return f"{self.kernel.fn.__name__} x {self.programs:,}: {', '.join(dict.fromkeys(names))}"


@dataclass(eq=False)
class Loop:
    """The same steps ``count`` times. ``moves``: what changes from turn to turn, with its slot among the values."""

    depth: int  # the number of loops around it
    count: Any
    steps: list[Any]
    moves: list[tuple[int, Moving]] = field(default_factory=list)
    makes = False

    @property
    def operands(self) -> tuple[Any, ...]:
        """All that its steps read or write."""
        return tuple(operand for step in self.steps for operand in step.operands)

    def __str__(self) -> str:
        lines = [line for step in self.steps for line in str(step).split("\n")]
        return "\n".join([f"{self.count} times:", *(f"    {line}" for line in lines)])


Step = Product | Total | Torch | Launch | Loop


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
        """Memory that only the program uses."""
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
        """The steps of ``body`` for each turn. It is called for the first two, whose difference is that of any two."""
        before, depth, first = self.steps, self.depth, len(self.buffers)
        self.depth, self.steps = depth + 1, []
        body(0)
        one, second, self.steps = self.steps, len(self.buffers), []
        body(1)
        two, self.steps, self.depth = self.steps, before, depth
        same = {second + place: first + place for place in range(len(self.buffers) - second)}
        assert second - first == len(same), "two turns of a loop need the same scratch memory"
        del self.buffers[second:]
        self.steps.append(Loop(depth, count, [_same_step(a, b, depth, same) for a, b in zip(one, two, strict=True)]))

    def above_diagonal(
        self, slices: Sequence[slice], body: Callable[[slice, slice], None], *, diagonal: bool = False
    ) -> None:
        """The steps of ``body`` for each two slices, the first before the second; ``diagonal``: also for each with itself."""

        def row(place: int) -> None:
            if diagonal:
                body(slices[place], slices[place])
            self.over(slices[place + 1 :], lambda j: body(slices[place], j))

        # Each row of blocks has one less than the row before it. While that is a loop, the rows are turns of a loop too.
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
            for buffer in _buffers(step):
                if buffer.made:
                    first.setdefault(buffer.place, number)
                    last[buffer.place] = number
            if not isinstance(step, Launch):
                tensors |= {buffer.place for buffer in _buffers(step)}
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

        def slot(value: Any, loops: list[Loop]) -> int:
            buffer = Buffer.under(value)
            if buffer is not None and isinstance(value, Buffer) and value.is_start:
                return value.place
            key = value.key if buffer is not None else (type(value), value)
            if isinstance(value, Moving):
                key = *key, id(loops[max(value.by)])
            if key not in found:
                found[key] = len(self.template)
                self.template.append(None if buffer is not None or isinstance(value, Moving) else value)
                if isinstance(value, Moving):
                    loops[max(value.by)].moves.append((found[key], value))
                elif buffer is not None:
                    self.parts.setdefault(buffer.place, []).append((found[key], value))
            return found[key]

        def visit(steps: list[Any], loops: list[Loop]) -> None:
            for step in steps:
                if isinstance(step, Loop):
                    visit(step.steps, [*loops, step])
                elif isinstance(step, Launch):
                    for one in (step, step.far):
                        if one is not None:
                            one.pick = itemgetter(*(slot(value, loops) for value in one.operands))

        visit(self.steps, [])

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
        values = Values(device, [*given, *(None for _ in range(len(self.buffers) - self.count))], self.template.copy())
        tensors, at, on_card = values.tensors, values.at, values.on_card
        for place, value in enumerate(given):
            at[place] = value.data_ptr() if on_card and isinstance(value, torch.Tensor) else value
            if place in self.parts:
                self._place(place, values)
        if self.block_bytes:
            values.places = self.block
            values.block = torch.empty_strided((self.block_bytes,), (1,), dtype=torch.uint8, device=device)
            start = values.block.data_ptr()
            for place, offset in self.block.items():
                at[place] = start + offset if on_card else tensor_of(self.buffers[place], values)
                if place in self.parts:
                    self._place(place, values)
        for made, step, freed in self.turns:
            for place, shape, strides, dtype in made:
                tensor = tensors[place] = torch.empty_strided(shape, strides, dtype=dtype, device=device)
                at[place] = tensor.data_ptr() if on_card else tensor
                if place in self.parts:
                    self._place(place, values)
            self._step(step, values)
            for place in freed:
                tensors[place] = None
                at[place] = None
                for slot, _ in self.parts.get(place, ()):
                    at[slot] = None
        return [tensors[out.place] if isinstance(out, Buffer) else out for out in self.outputs]

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
            launch = step.compiled.get(values.device)
            if launch is None:
                arguments = [sample_of(value, values) for value in step.operands]
                where = step.kernel, step.programs, arguments, values.device
                launch = step.compiled[values.device] = compiled_launch(*where, step.warps, step.stages)
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
            if step.makes:
                place = step.out.place
                made = values.tensors[place]
                values.at[place] = made.data_ptr() if values.on_card else made
                if place in self.parts:
                    self._place(place, values)

    def __str__(self) -> str:
        sizes = [f"{b.name} {list(b.shape)} {str(b.dtype)[6:]}" for b in self.buffers if b.made]
        steps = [f"{number}. {step}" for number, step in enumerate(self.steps, 1)]
        return "\n".join([*steps, f"buffers: {', '.join(sizes)}", f"peak: {self.peak_bytes:,} bytes"])


def _buffers(step: Any) -> list[Buffer]:
    """The buffers that a step uses."""
    found = [Buffer.under(operand) for operand in step.operands]
    return [buffer for buffer in found if buffer is not None]


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


def _same_step(one: Any, two: Any, depth: int, same: dict[int, int]) -> Any:
    """One step for two turns of a loop; what differs becomes `Moving`."""

    def join(x: Any, y: Any) -> Any:
        return joined(x, y, depth, same)

    assert type(one) is type(two), f"two turns of a loop take the same steps, not {one} and {two}"
    if isinstance(one, Loop):
        steps = [_same_step(a, b, depth, same) for a, b in zip(one.steps, two.steps, strict=True)]
        return Loop(one.depth, join(one.count, two.count), steps)
    if isinstance(one, Launch):
        how = [(step.kernel, step.programs, step.warps, step.stages) for step in (one, two)]
        assert how[0] == how[1]
        found = {name: join(value, two.arguments[name]) for name, value in one.arguments.items()}
        for place, value in enumerate(found.values()):  # other numbers are those of the first turn in a compiled kernel
            number = isinstance(value, Moving) and isinstance(value.value, int)
            assert not number or place in declared(one.kernel).dynamic
        near = None
        if one.near is not None:
            assert two.near is not None
            near = join(one.near[0], two.near[0]), *one.near[1:]
        far = None if one.far is None else _same_step(one.far, two.far, depth, same)
        return Launch(one.kernel, one.programs, found, one.warps, one.stages, near, far)
    operands = [join(x, y) for x, y in zip(one.operands, two.operands, strict=True)]
    if isinstance(one, Product):
        assert one.add == two.add
        return Product(operands[0], operands[1], operands[2], one.add)
    assert isinstance(one, Torch)
    return Torch(one.function, tuple(operands))
