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
declared. Each other buffer is allocated before its first step, and scratch memory is freed after its last one.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from tilewise.kernels.triton_impl.launch.compiled import compiled_launch

ALLOCATED = 512  # bytes: torch's allocator rounds up to a multiple


@dataclass(frozen=True, eq=False)
class Buffer:
    """A tensor of a program, or a number that is known when it runs. ``place``: among the values of a run."""

    name: str
    place: int
    shape: tuple[int, ...] = ()
    dtype: torch.dtype | None = None  # None: given, not allocated by the program
    transposed: bool = False
    constant: bool = False

    @property
    def t(self) -> Buffer:
        """The same matrix, transposed, as an operand of a product."""
        return dataclasses.replace(self, transposed=not self.transposed)

    @property
    def used_bytes(self) -> int:
        """Its numbers; 0 for what is given."""
        return 0 if self.dtype is None else math.prod(self.shape) * self.dtype.itemsize

    @property
    def bytes(self) -> int:
        """What the program allocates for it."""
        return -(-self.used_bytes // ALLOCATED) * ALLOCATED

    def of(self, values: Sequence[Any]) -> Tensor:
        """The tensor, among the values of a run."""
        tensor: Tensor = values[self.place]
        return tensor.t() if self.transposed else tensor

    def __str__(self) -> str:
        return f"{self.name}'" if self.transposed else self.name


@dataclass(frozen=True, eq=False)
class Product:
    """out = left @ right, accumulated in float32, in the type of ``out``. It allocates ``out``."""

    out: Buffer
    left: Buffer
    right: Buffer

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """All that it reads or writes."""
        return self.out, self.left, self.right

    def run(self, values: list[Any]) -> None:
        """Multiply."""
        left, right, kind = self.left.of(values), self.right.of(values), self.out.dtype
        assert kind is not None
        if not left.is_cuda:  # the interpreter
            made = (left.float() @ right.float()).to(kind)
        else:
            made = torch.mm(left, right) if left.dtype == kind else torch.mm(left, right, out_dtype=kind)
        values[self.out.place] = made

    def __str__(self) -> str:
        return f"{self.out} = {self.left} @ {self.right}"


@dataclass(frozen=True, eq=False)
class Total:
    """out = the sum of ``values``. It allocates ``out``. Torch's own sum takes half the time of a launch on the host."""

    out: Buffer
    values: Buffer

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """All that it reads or writes."""
        return self.out, self.values

    def run(self, values: list[Any]) -> None:
        """Add up."""
        values[self.out.place] = values[self.values.place].sum()

    def __str__(self) -> str:
        return f"{self.out} = sum of {self.values}"


@dataclass(eq=False)
class Launch:
    """A kernel with its grid. ``arguments``: in the order of its parameters; constants are buffers too."""

    kernel: Any
    programs: int
    arguments: dict[str, Buffer]
    warps: int

    compiled: dict[torch.device, Any] = field(default_factory=dict)

    @functools.cached_property
    def pick(self) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
        """The arguments, from the values of a run."""
        return itemgetter(*(buffer.place for buffer in self.arguments.values()))

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """All that it reads or writes."""
        return tuple(self.arguments.values())

    def __str__(self) -> str:
        names = [str(value) for value in self.arguments.values() if not value.constant]
        return f"{self.kernel.fn.__name__} x {self.programs:,}: {', '.join(names)}"


Step = Product | Total | Launch


class Program:
    """Steps over named buffers, in order."""

    def __init__(self) -> None:
        self.buffers: list[Buffer] = []
        self.steps: list[Step] = []
        self.outputs: list[Buffer] = []
        self.template: list[Any] = []  # the values of a run, before anything is given: constants
        self.count = 0  # of what is given

    def given(self, name: str) -> Buffer:
        """A tensor or number that the caller passes. All of them are declared before anything else."""
        assert self.count == len(self.buffers)
        self.count += 1
        return self._add(Buffer(name, len(self.buffers)))

    def scratch(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Buffer:
        """Memory that only the program uses."""
        return self._add(Buffer(name, len(self.buffers), shape, dtype))

    def output(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Buffer:
        """A tensor that `run` returns."""
        made = self.scratch(name, shape, dtype)
        self.outputs.append(made)
        return made

    def _add(self, buffer: Buffer, value: Any = None) -> Buffer:
        self.buffers.append(buffer)
        self.template.append(value)
        return buffer

    def product(self, out: Buffer, left: Buffer, right: Buffer) -> None:
        """A step: see `Product`."""
        self.steps.append(Product(out, left, right))

    def total(self, out: Buffer, values: Buffer) -> None:
        """A step: see `Total`."""
        self.steps.append(Total(out, values))

    def launch(self, kernel: Any, programs: int, *, warps: int = 4, **arguments: Any) -> None:
        """A step: a kernel with its arguments by name. A parameter that is not named is None."""
        names = list(inspect.signature(kernel.fn).parameters)
        unknown = sorted(arguments.keys() - set(names))
        assert not unknown, f"kernel {kernel.fn.__name__} has no parameter {', '.join(unknown)}"
        found = {}
        for name in names:
            value = arguments.get(name)
            if not isinstance(value, Buffer):
                value = self._add(Buffer(name, len(self.buffers), constant=True), value)
            found[name] = value
        self.steps.append(Launch(kernel, programs, found, warps))

    def done(self) -> Program:
        """Plan the memory: what is allocated before each step, and freed after it."""
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        for number, step in enumerate(self.steps):
            for buffer in step.buffers:
                first.setdefault(buffer.place, number)
                last[buffer.place] = number
        kept = {buffer.place for buffer in self.outputs}
        operands = {b.place for step in self.steps if not isinstance(step, Launch) for b in step.buffers}
        owned = [buffer for buffer in self.buffers if buffer.dtype is not None and buffer.place in first]
        # Scratch that only launches use is in one block: (place, offset in bytes, shape, type).
        self.block: list[tuple[int, int, tuple[int, ...], Any]] = []
        self.block_bytes = 0
        for buffer in owned:
            if buffer.place not in kept | operands:
                self.block.append((buffer.place, self.block_bytes, buffer.shape, buffer.dtype))
                self.block_bytes += buffer.bytes
        inside = {place for place, *_ in self.block}
        self.turns: list[tuple[list[Any], Step, list[int]]] = []
        now = self.peak_bytes = self.block_bytes
        for number, step in enumerate(self.steps):
            alone = [buffer for buffer in owned if buffer.place not in inside]
            made = [buffer for buffer in alone if first[buffer.place] == number]
            freed = [buffer for buffer in alone if last[buffer.place] == number and buffer.place not in kept]
            now += sum(buffer.bytes for buffer in made)
            self.peak_bytes = max(self.peak_bytes, now)
            now -= sum(buffer.bytes for buffer in freed)
            # `empty_strided` with all of its arguments is faster than `empty`. A product allocates its result itself.
            sizes = [(b.place, b.shape, _strides(b.shape), b.dtype) for b in made if isinstance(step, Launch)]
            self.turns.append((sizes, step, [buffer.place for buffer in freed]))
        return self

    @property
    def scratch_bytes(self) -> int:
        """The peak less the outputs, except for single numbers."""
        return self.peak_bytes - sum(buffer.used_bytes for buffer in self.outputs if buffer.shape)

    def run(self, device: torch.device, *given: Any) -> list[Tensor]:
        """The outputs, for these tensors and numbers."""
        values, count = self.template.copy(), self.count
        values[:count] = given
        block = None
        if self.block_bytes:
            block = torch.empty_strided((self.block_bytes,), (1,), dtype=torch.uint8, device=device)
        if device.type != "cuda":
            return self._run_interpreted(values, block)
        at = values.copy()  # the same with addresses in place of tensors: a launch takes them faster
        for place in range(count):
            if isinstance(values[place], Tensor):
                at[place] = values[place].data_ptr()
        if block is not None:
            start = block.data_ptr()
            for place, offset, _, _ in self.block:
                at[place] = start + offset
        for made, step, freed in self.turns:
            for place, shape, strides, dtype in made:
                tensor = values[place] = torch.empty_strided(shape, strides, dtype=dtype, device=device)
                at[place] = tensor.data_ptr()
            if not isinstance(step, Launch):
                step.run(values)
                at[step.out.place] = values[step.out.place].data_ptr()
            else:
                launch = step.compiled.get(device)
                if launch is None:
                    launch = self._compile(step, values, block, device)
                launch(*step.pick(at))
            for place in freed:
                values[place] = None
        return [values[buffer.place] for buffer in self.outputs]

    def _views(self, values: list[Any], block: Tensor | None) -> list[Any]:
        """The values with a tensor for each buffer in the block."""
        found = values.copy()
        for place, offset, shape, dtype in self.block:
            assert block is not None
            size = math.prod(shape) * dtype.itemsize
            found[place] = block[offset : offset + size].view(dtype).view(shape)
        return found

    def _compile(self, step: Launch, values: list[Any], block: Tensor | None, device: torch.device) -> Any:
        arguments = step.pick(self._views(values, block))
        step.compiled[device] = compiled_launch(step.kernel, step.programs, arguments, device, step.warps)
        return step.compiled[device]

    def _run_interpreted(self, values: list[Any], block: Tensor | None) -> list[Tensor]:
        values = self._views(values, block)
        for made, step, _ in self.turns:
            for place, shape, _, dtype in made:
                values[place] = torch.empty(shape, dtype=dtype)
            if not isinstance(step, Launch):
                step.run(values)
            else:
                compiled_launch(step.kernel, step.programs, (), values[0].device, step.warps)(*step.pick(values))
        return [values[buffer.place] for buffer in self.outputs]

    def __str__(self) -> str:
        sizes = [f"{b.name} {list(b.shape)} {str(b.dtype)[6:]}" for b in self.buffers if b.dtype is not None]
        steps = [f"{number}. {step}" for number, step in enumerate(self.steps, 1)]
        return "\n".join([*steps, f"buffers: {', '.join(sizes)}", f"peak: {self.peak_bytes:,} bytes"])


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of a contiguous tensor."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
