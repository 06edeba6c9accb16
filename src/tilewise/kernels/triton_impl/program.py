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
import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from tilewise.kernels.triton_impl.launch.compiled import compiled_launch
from tilewise.kernels.triton_impl.two_pass.products import product

ALLOCATED = 512  # bytes: torch's allocator rounds up to a multiple


@dataclass(frozen=True, eq=False)
class Buffer:
    """A tensor of a program, or a number that is known when it runs. ``place``: among the values of a run."""

    name: str
    place: int
    shape: tuple[int, ...] = ()
    dtype: torch.dtype | None = None  # None: given, not allocated by the program
    transposed: bool = False

    @property
    def t(self) -> Buffer:
        """The same matrix, transposed, as an operand of a product."""
        return dataclasses.replace(self, transposed=not self.transposed)

    @property
    def bytes(self) -> int:
        """What the program allocates for it."""
        if self.dtype is None:
            return 0
        return -(-math.prod(self.shape) * self.dtype.itemsize // ALLOCATED) * ALLOCATED

    def of(self, values: Sequence[Any]) -> Tensor:
        """The tensor, among the values of a run."""
        tensor: Tensor = values[self.place]
        return tensor.t() if self.transposed else tensor

    def __str__(self) -> str:
        return f"{self.name}'" if self.transposed else self.name


@dataclass(frozen=True, eq=False)
class Product:
    """out = left @ right, accumulated in float32; added to ``out`` with ``add``."""

    out: Buffer
    left: Buffer
    right: Buffer
    add: bool = False

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """All that it reads or writes."""
        return self.out, self.left, self.right

    def run(self, values: Sequence[Any]) -> None:
        """Multiply."""
        product(self.out.of(values), self.left.of(values), self.right.of(values), not self.add)

    def __str__(self) -> str:
        return f"{self.out} {'+=' if self.add else '='} {self.left} @ {self.right}"


@dataclass(frozen=True, eq=False)
class Launch:
    """A kernel with its grid. ``arguments``: in the order of its parameters; a buffer, a number or a constant."""

    kernel: Any
    programs: int
    arguments: dict[str, Any]
    warps: int

    def __post_init__(self) -> None:
        places = [value.place for value in self.arguments.values()]
        object.__setattr__(self, "_pick", itemgetter(*places))
        object.__setattr__(self, "_known", {})  # the compiled kernel for each device

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """All that it reads or writes."""
        return tuple(value for value in self.arguments.values())

    def run(self, values: Sequence[Any]) -> None:
        """Launch."""
        arguments, known = self._pick(values), self._known  # type: ignore[attr-defined]
        device = values[0].device
        start = known.get(device)
        if start is None:
            start = known[device] = compiled_launch(self.kernel, self.programs, arguments, device, self.warps)
        start(*arguments)

    def __str__(self) -> str:
        tensors = [str(value) for value in self.arguments.values() if value.dtype is not None or value.name[0] != "="]
        return f"{self.kernel.fn.__name__} x {self.programs:,}: {', '.join(tensors)}"


class Program:
    """Steps over named buffers, in order."""

    def __init__(self) -> None:
        self.buffers: list[Buffer] = []
        self.steps: list[Product | Launch] = []
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

    def product(self, out: Buffer, left: Buffer, right: Buffer, *, add: bool = False) -> None:
        """A step: see `Product`."""
        self.steps.append(Product(out, left, right, add))

    def launch(self, kernel: Any, programs: int, *, warps: int = 4, **arguments: Any) -> None:
        """A step: a kernel with its arguments by name. A parameter that is not named is None."""
        names = list(inspect.signature(kernel.fn).parameters)
        unknown = sorted(arguments.keys() - set(names))
        assert not unknown, f"kernel {kernel.fn.__name__} has no parameter {', '.join(unknown)}"
        found = {}
        for name in names:
            value = arguments.get(name)
            if not isinstance(value, Buffer):
                value = self._add(Buffer(f"={name}", len(self.buffers)), value)
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
        owned = [buffer for buffer in self.buffers if buffer.dtype is not None]
        self.turns: list[tuple[list[Buffer], Product | Launch, list[int]]] = []
        now = self.peak_bytes = 0
        for number, step in enumerate(self.steps):
            made = [buffer for buffer in owned if first.get(buffer.place) == number]
            freed = [b for b in owned if last.get(b.place) == number and b.place not in kept]
            now += sum(buffer.bytes for buffer in made)
            self.peak_bytes = max(self.peak_bytes, now)
            now -= sum(buffer.bytes for buffer in freed)
            self.turns.append((made, step, [buffer.place for buffer in freed]))
        return self

    def run(self, given: Sequence[Any], device: torch.device) -> list[Tensor]:
        """The outputs, for these tensors and numbers."""
        values = self.template.copy()
        values[: self.count] = given
        for made, step, freed in self.turns:
            for buffer in made:
                values[buffer.place] = torch.empty(buffer.shape, dtype=buffer.dtype, device=device)
            step.run(values)
            for place in freed:
                values[place] = None
        return [values[buffer.place] for buffer in self.outputs]

    def __str__(self) -> str:
        sizes = [f"{b.name} {list(b.shape)} {str(b.dtype)[6:]}" for b in self.buffers if b.dtype is not None]
        steps = [f"{number}. {step}" for number, step in enumerate(self.steps, 1)]
        return "\n".join([*steps, f"buffers: {', '.join(sizes)}", f"peak: {self.peak_bytes:,} bytes"])
