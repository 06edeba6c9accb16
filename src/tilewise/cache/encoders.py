"""Encoders: a callable, the modules that it runs, and whether it has trainable parameters."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tilewise.cache.chunks import Tree, call_with
from tilewise.cache.sync import fsdp2_groups, is_fsdp2
from tilewise.errors import DtypeError, GradientError
from tilewise.options import check_flag


@dataclass(frozen=True)
class Encoder:
    """An encoder with explicit modules, for a function whose modules cannot be found automatically.

    Args:
        call: maps a chunk to its representations.
        modules: the modules that it runs. They determine the DDP or FSDP wrappers, the devices whose random state is
            recorded, and the buffers to preserve.
        frozen: True if it has no trainable parameters. It then runs once and without a graph. ``None`` means frozen if
            no parameter of ``modules`` requires a gradient.

    A module, a bound method of a module, and a function that closes over modules can be passed directly:

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
        if not callable(self.call):
            raise DtypeError(
                f"an encoder is a module, or a function of a chunk, got {self.call!r:.60}. Pass one of these"
            )
        given = self.modules
        modules = tuple(given) if isinstance(given, Iterable) and not isinstance(given, Tensor) else (given,)
        if isinstance(given, nn.Module) or not all(isinstance(module, nn.Module) for module in modules):
            raise DtypeError(
                f"modules is a tuple of the modules that the encoder runs, got {type(given).__name__} {given!r:.60}. "
                "Pass (module,) for one module, and () for none"
            )
        if self.frozen is not None:
            check_flag("frozen", self.frozen)
        object.__setattr__(self, "modules", modules)

    @classmethod
    def of(cls, encoder: Any) -> Encoder:
        """Make an `Encoder` from a module, a bound method or any callable. An `Encoder` is returned unchanged."""
        if isinstance(encoder, Encoder):
            return encoder
        if not callable(encoder):
            raise DtypeError(
                f"an encoder is a module, or a function of a chunk, got {encoder!r:.60}. Pass one of these"
            )
        if isinstance(encoder, nn.Module):
            return cls(encoder, (encoder,))
        owner = getattr(encoder, "__self__", None)
        if isinstance(owner, nn.Module):
            return cls(encoder, (owner,))
        # A function may use parameters that its variables do not show, so it is never treated as frozen.
        return cls(encoder, tuple(dict.fromkeys(_modules_near(encoder))), frozen=False)

    @property
    def learns(self) -> bool:
        """Whether it may have parameters that require a gradient."""
        if self.frozen is not None:
            return not self.frozen
        return any(p.requires_grad for module in self.modules for p in module.parameters())

    def __call__(self, chunk: Tree) -> Tree:
        """The representations of one chunk."""
        return call_with(self.call, chunk)


def _modules_near(function: Any) -> Iterator[nn.Module]:
    """The modules in the variables of a function, partial or method."""
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
        except ValueError:  # a variable of the enclosing function is not set yet
            return
        for value in (*seen.nonlocals.values(), *seen.globals.values(), *(function.__defaults__ or ())):
            if isinstance(value, nn.Module | functools.partial):
                yield from _modules_near(value)
            elif isinstance(value, list | tuple):
                yield from (item for item in value if isinstance(item, nn.Module))
    elif hasattr(function, "__dict__"):
        yield from (value for value in vars(function).values() if isinstance(value, nn.Module))


def as_encoders(encoders: Any, inputs: int) -> list[Encoder]:
    """One encoder per input. A single encoder is used for all inputs."""
    several = isinstance(encoders, list | tuple | nn.ModuleList)
    chosen: Sequence[Any] = list(encoders) if several else [encoders] * inputs
    if len(chosen) != inputs or not chosen:
        raise DtypeError(
            f"the numbers of inputs and encoders must be equal, got {inputs} inputs for {len(chosen)} encoders. "
            "Pass several arguments of one encoder as one tuple or mapping. "
            "Pass one encoder for all inputs without a list"
        )
    return [Encoder.of(encoder) for encoder in chosen]


@contextmanager
def preserve_buffers(modules: Sequence[nn.Module], versions: dict[Tensor, int]) -> Iterator[None]:
    """Restore the running statistics of modules at the end, so that a second forward does not update them twice.

    The buffers of a module are restored if one of them changed since ``versions`` was recorded, or if the module tracks
    running statistics (batch norm updates those without changing the version of the tensor). Other buffers, such as
    position tables, are not written: a graph may have saved them.
    """
    changing = [
        buffer
        for module in dict.fromkeys(part for module in modules for part in module.modules())
        if module.training
        for buffer in _changing_buffers(module, versions)
    ]
    before = [buffer.detach().clone() for buffer in changing]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in zip(changing, before, strict=True):
                buffer.copy_(value)


def _changing_buffers(module: nn.Module, versions: dict[Tensor, int]) -> list[Tensor]:
    own = [buffer for buffer in module.buffers(recurse=False) if buffer is not None]
    changed = any(versions.get(buffer, -1) != version_of(buffer) for buffer in own)
    return own if changed or getattr(module, "running_mean", None) is not None else []


class WatchedState:
    """Parameters and buffers of modules, and their version counters: whether they change between two passes.

    What the first pass itself changes is not watched. Nor are running statistics (see `preserve_buffers`), and buffers
    that a wrapper broadcasts in its forward, as DDP does.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        """Record the versions before the first pass."""
        self.modules, self.tensors, self.buffers = modules, list[Tensor](), dict[Tensor, int]()
        skipped: list[Tensor] = []
        for module in dict.fromkeys(part for whole in modules for part in whole.modules()):
            self.tensors += [tensor for tensor in module._parameters.values() if tensor is not None]
            # Read from the dictionaries: `getattr` of a name that a module lacks takes a microsecond.
            if module._buffers:
                buffers = {buffer: version_of(buffer) for buffer in module._buffers.values() if buffer is not None}
                self.buffers |= buffers
                skipped += buffers if "running_mean" in module._buffers else ()
            if vars(module).get("broadcast_buffers"):
                skipped += module.buffers()
            if is_fsdp2(module):  # an optimizer writes the shards, which its parameters are not while they are gathered
                for group in fsdp2_groups(module):
                    self.tensors += [param.sharded_param for param in getattr(group, "fsdp_params", ())]
        self.tensors += self.buffers.keys() - set(skipped)
        self.versions = [version_of(tensor) for tensor in self.tensors]

    def keep_constant(self) -> None:
        """After the first pass: from now on watch what it did not change."""
        pairs = zip(self.tensors, self.versions, strict=True)
        kept = [(tensor, version) for tensor, version in pairs if version_of(tensor) == version]
        self.tensors, self.versions = [tensor for tensor, _ in kept], [version for _, version in kept]

    def check(self) -> None:
        """Raise `GradientError` if one has changed since then."""
        for tensor, version in zip(self.tensors, self.versions, strict=True):
            if version_of(tensor) != version:
                raise GradientError(
                    f"{self._name(tensor)} was changed in place after the inputs were encoded, for example by an "
                    "optimizer, so encoding them again for backward would give other representations. Call "
                    "optimizer.step() after the backward of every loss that was computed before it. If the encoder "
                    "does not use this tensor, pass Encoder(call, modules) with the modules that it runs"
                )

    def _name(self, tensor: Tensor) -> str:
        for module in self.modules:
            for name, value in (*module.named_parameters(), *module.named_buffers()):
                if value is tensor:
                    return f"{name!r} of {type(module).__name__}"
        return "a parameter"  # which FSDP has gathered, so that another tensor has its name


def version_of(tensor: Tensor) -> int:
    """Version counter of a tensor, or -1 for inference tensors, which have none."""
    try:
        return tensor._version
    except RuntimeError:
        return -1
