"""What an encoder is: a call, the modules it runs, and whether anything in it learns."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tilewise.cache.chunks import Tree, call_with
from tilewise.errors import DtypeError


@dataclass(frozen=True)
class Encoder:
    """An encoder described by hand, for a function that does not show which modules it runs.

    Args:
        call: takes a chunk, returns its representations.
        modules: the modules inside. Their DDP or FSDP wrappers are found here, their devices' random state is
            recorded, their buffers are kept.
        frozen: it learns nothing, so it runs once and without a graph. ``None``: frozen if no parameter of
            ``modules`` requires a gradient.

    A module, a bound method of a module and a function that closes over modules need no description:

    >>> tower = nn.Linear(4, 2)
    >>> Encoder.of(tower).modules == Encoder.of(tower.forward).modules == (tower,)
    True
    >>> Encoder.of(lambda x: tower(x)).modules == (tower,)
    True
    """

    call: Callable[..., Tree]
    modules: tuple[nn.Module, ...] = ()
    frozen: bool | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "modules", tuple(self.modules))

    @classmethod
    def of(cls, encoder: Any) -> Encoder:
        """Describe an encoder: a Module, a bound method, any callable, or an `Encoder` as it is."""
        if isinstance(encoder, Encoder):
            return encoder
        if not callable(encoder):
            raise DtypeError(f"an encoder is a module or a function from a chunk to representations, got {encoder!r}")
        if isinstance(encoder, nn.Module):
            return cls(encoder, (encoder,))
        owner = getattr(encoder, "__self__", None)
        if isinstance(owner, nn.Module):
            return cls(encoder, (owner,))
        # A function may reach parameters that its variables do not show, so it is never taken for frozen.
        return cls(encoder, tuple(dict.fromkeys(_modules_near(encoder))), frozen=False)

    @property
    def learns(self) -> bool:
        """Whether a gradient may arrive at something inside, inputs aside."""
        if self.frozen is not None:
            return not self.frozen
        return any(p.requires_grad for module in self.modules for p in module.parameters())

    def __call__(self, chunk: Tree) -> Tree:
        """The representations of one chunk."""
        return call_with(self.call, chunk)


def _modules_near(function: Any) -> Iterator[nn.Module]:
    """The modules that a function, a partial or a method can be seen to use."""
    if isinstance(function, nn.Module):
        yield function
    elif isinstance(function, functools.partial):
        for item in (function.func, *function.args, *function.keywords.values()):
            yield from _modules_near(item)
    elif inspect.ismethod(function):
        yield from _modules_near(function.__self__)
        yield from _modules_near(function.__func__)
    elif inspect.isfunction(function):
        try:
            seen = inspect.getclosurevars(function)
        except ValueError:  # a variable of the enclosing function that is not set yet
            return
        for value in (*seen.nonlocals.values(), *seen.globals.values(), *(function.__defaults__ or ())):
            if isinstance(value, nn.Module | functools.partial):
                yield from _modules_near(value)
            elif isinstance(value, list | tuple):
                yield from (item for item in value if isinstance(item, nn.Module))
    elif hasattr(function, "__dict__"):
        yield from (value for value in vars(function).values() if isinstance(value, nn.Module))


def as_encoders(encoders: Any, inputs: int) -> list[Encoder]:
    """One encoder per input; a single one serves them all."""
    several = isinstance(encoders, list | tuple | nn.ModuleList)
    chosen: Sequence[Any] = list(encoders) if several else [encoders] * inputs
    if len(chosen) != inputs or not chosen:
        raise DtypeError(
            f"as many inputs as encoders are needed, got {inputs} inputs for {len(chosen)} encoders. "
            "An encoder that takes several arguments gets them as one tuple or mapping; "
            "one that serves all inputs is given by itself, not in a list"
        )
    return [Encoder.of(encoder) for encoder in chosen]


@contextmanager
def kept_buffers(modules: Sequence[nn.Module], versions: dict[Tensor, int]) -> Iterator[None]:
    """Undo what happens inside to running statistics, so that a second forward does not count twice.

    Buffers of a module are restored if one of them moved since ``versions`` was taken, or if the module
    tracks running statistics (batch norm updates those without changing the version of the tensor). Others,
    such as position tables, are left alone: a graph may have saved them.
    """
    moving = [
        buffer
        for module in dict.fromkeys(part for module in modules for part in module.modules())
        if module.training
        for buffer in _moving_buffers(module, versions)
    ]
    before = [buffer.detach().clone() for buffer in moving]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in zip(moving, before, strict=True):
                buffer.copy_(value)


def _moving_buffers(module: nn.Module, versions: dict[Tensor, int]) -> list[Tensor]:
    own = [buffer for buffer in module.buffers(recurse=False) if buffer is not None]
    moved = any(versions.get(buffer, -1) != version_of(buffer) for buffer in own)
    return own if moved or getattr(module, "running_mean", None) is not None else []


def buffer_versions(modules: Sequence[nn.Module]) -> dict[Tensor, int]:
    """How often each buffer has been changed in place."""
    return {buffer: version_of(buffer) for module in modules for buffer in module.buffers()}


def version_of(tensor: Tensor) -> int:
    """How often a tensor has been changed in place; inference tensors do not count."""
    return -1 if tensor.is_inference() else tensor._version
