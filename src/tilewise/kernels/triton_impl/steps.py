"""The steps of a program: products, sums, functions of torch, launches of kernels, and loops of them.

A step has ``operands``, all that it reads or writes, and shows itself as a line of text. Steps other than launches and
loops run themselves, given the `Values` of a run. ``makes``: whether a step allocates its result. ``start``: the function
that launches a kernel, once it is known, if the step does nothing else.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tilewise.kernels.triton_impl.buffers import Buffer, Descriptor, Moving, Values, joined, tensor_of
from tilewise.kernels.triton_impl.launch import declared


@dataclass(eq=False)
class Product:
    """out = left @ right, or with ``add`` out += left @ right, accumulated in float32, in the type of ``out``."""

    out: Any
    left: Any
    right: Any
    add: bool = False
    makes: bool = False  # whether it allocates ``out``: the first step of a whole buffer
    start = None

    @property
    def operands(self) -> tuple[Any, ...]:
        """All that it reads or writes."""
        return self.out, self.left, self.right

    @functools.cached_property
    def kind(self) -> Any:
        """The type of ``out``."""
        buffer = Buffer.under(self.out)
        assert buffer is not None
        return buffer.dtype

    def run(self, values: Values) -> None:
        """Multiply."""
        tensors, kind = values.tensors, self.kind
        if self.whole:
            l_place, l_turned, r_place, r_turned = self.whole
            left, right = tensors[l_place], tensors[r_place]
            left, right = left.t() if l_turned else left, right.t() if r_turned else right
        else:
            left, right = tensor_of(self.left, values), tensor_of(self.right, values)
        if not left.is_cuda:  # the interpreter
            made = left.float() @ right.float()
            if self.makes:
                tensors[self.out.place] = made.to(kind)
            else:
                out = tensor_of(self.out, values)
                out.copy_(out + made if self.add else made)
        elif self.makes:
            same = left.dtype is kind
            tensors[self.out.place] = torch.mm(left, right) if same else torch.mm(left, right, out_dtype=kind)
        else:
            out, more = tensor_of(self.out, values), {} if left.dtype is kind else {"out_dtype": kind}
            torch.addmm(out, left, right, out=out, **more) if self.add else torch.mm(left, right, out=out, **more)

    @functools.cached_property
    def whole(self) -> tuple[int, bool, int, bool] | None:
        """Place of each factor and whether it is transposed, where both are whole tensors; otherwise None."""
        factors = self.left, self.right
        if not all(isinstance(factor, Buffer) and factor.is_whole for factor in factors):
            return None
        return self.left.place, self.left.transposed, self.right.place, self.right.transposed

    def __str__(self) -> str:
        return f"{self.out} {'+' if self.add else ''}= {self.left} @ {self.right}"


@dataclass(eq=False)
class Total:
    """out = the sum of ``values``. It allocates ``out``. Torch's own sum takes half the time of a launch on the host."""

    out: Buffer
    values: Buffer
    makes: bool = True
    start = None

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
    start = None

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
    compiled: Any = None  # since the first run
    start: Any = None  # the same, of a launch without ``near``

    @property
    def operands(self) -> tuple[Any, ...]:
        """All that it reads or writes, and its numbers."""
        return tuple(self.arguments.values())

    def __str__(self) -> str:
        names = [buffer.name for buffer in buffers_of(self) if buffer.made or not buffer.is_number]
        return f"{self.kernel.fn.__name__} x {self.programs:,}: {', '.join(dict.fromkeys(names))}"


@dataclass(eq=False)
class Loop:
    """The same steps ``count`` times. ``moves``: what changes from turn to turn, with its slot among the values."""

    depth: int  # the number of loops around it
    count: Any
    steps: list[Any]
    moves: list[tuple[int, Moving]] = field(default_factory=list)
    makes = False
    start = None

    @property
    def operands(self) -> tuple[Any, ...]:
        """All that its steps read or write."""
        return tuple(operand for step in self.steps for operand in step.operands)

    def __str__(self) -> str:
        lines = [line for step in self.steps for line in str(step).split("\n")]
        return "\n".join([f"{self.count} times:", *(f"    {line}" for line in lines)])


def buffers_of(step: Any) -> list[Buffer]:
    """The buffers that a step uses."""
    named = [operand for operand in step.operands if isinstance(operand, (Buffer, Descriptor, Moving))]
    found = [Buffer.under(operand) for operand in named]
    return [buffer for buffer in found if buffer is not None]


def same_step(one: Any, two: Any, depth: int, same: dict[int, int]) -> Any:
    """One step for two turns of a loop; what differs becomes `Moving`."""

    def join(x: Any, y: Any) -> Any:
        return joined(x, y, depth, same)

    assert type(one) is type(two), f"two turns of a loop take the same steps, not {one} and {two}"
    if isinstance(one, Loop):
        steps = [same_step(a, b, depth, same) for a, b in zip(one.steps, two.steps, strict=True)]
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
        far = None if one.far is None else same_step(one.far, two.far, depth, same)
        return Launch(one.kernel, one.programs, found, one.warps, one.stages, near, far)
    operands = [join(x, y) for x, y in zip(one.operands, two.operands, strict=True)]
    if isinstance(one, Product):
        assert one.add == two.add
        return Product(operands[0], operands[1], operands[2], one.add)
    assert isinstance(one, Torch)
    return Torch(one.function, tuple(operands))
