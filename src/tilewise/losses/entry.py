"""The entry of a public function: what the key of a call determines is checked once.

The key of a call is all that is no value of a tensor: shapes, types, devices, which tensors need gradients, settings,
grad mode and autocast. After a call has succeeded, the next one with its key skips the checks of its arguments
(`Calls.checked`) and finds the work of its operator calls (`Calls.job`). Values are checked in every call, and so are
calls over a group, of sharded or fake tensors, inside of `torch.compile` and while `explain` runs.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

from tilewise import _check
from tilewise.errors import ConfigError
from tilewise.ops.distributed.dtensors import is_sharded
from tilewise.ops.explain import listeners
from tilewise.ops.small import Calls, Job, forget_jobs_with
from tilewise.options import TileOptions

P = ParamSpec("P")
R = TypeVar("R")
Run = Callable[[Callable[..., Any], dict[str, Any]], Any]
MOST_KEYS = 1024  # of one function; then all are forgotten
SETTINGS = (type(None), float, str, bool, int, TileOptions, tuple)  # classes of arguments whose value is in the key
NUMBERS = ("temperature", "logit_scale", "scale", "teacher_logit_scale")  # values, which no key has


def entry(shards: Run | None = None) -> Callable[[Callable[Concatenate[Calls, P], R]], Callable[P, R]]:
    """Decorate a loss, which gets `Calls` before its own arguments.

    ``shards``: if an argument is a DTensor, ``shards(loss, arguments)`` is called instead of the loss.
    """

    def decorate(loss: Callable[Concatenate[Calls, P], R]) -> Callable[P, R]:
        known: dict[Any, list[Job]] = {}
        forget_jobs_with(known.clear)

        @functools.wraps(loss)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            key = None if torch.compiler.is_compiling() or listeners else key_of(args, kwargs)
            try:
                jobs = None if key is None else known.get(key)
            except TypeError:  # a tuple with something that cannot be in a key
                key = jobs = None
            if key is None:
                return other(args, kwargs)
            if jobs is not None:
                return loss(Calls(jobs, checked=key[0] is None), *args, **kwargs)
            jobs = []
            result = loss(Calls(jobs), *args, **kwargs)
            if len(known) >= MOST_KEYS:
                known.clear()
            known[key] = jobs
            return result

        def other(args: Any, kwargs: Any) -> Any:
            plain: Callable[..., Any] = functools.partial(loss, Calls())
            if shards is None or not any(map(_holds_shards, (*args, *kwargs.values()))):
                return plain(*args, **kwargs)
            given = inspect.signature(call).bind(*args, **kwargs)
            given.apply_defaults()
            values = given.arguments
            if values.get("group") is not None:
                raise ConfigError(
                    "group= is for plain tensors, of which each rank passes its own, got a group beside a DTensor, "
                    "whose mesh has its own groups. Pass group=None"
                )
            if torch.compiler.is_compiling():
                raise ConfigError(
                    f"{loss.__name__} takes a DTensor outside of torch.compile only. Compile the model without the "
                    "loss, or pass the plain tensors of this rank and group="
                )
            return shards(functools.wraps(loss)(plain), values)

        of_loss = inspect.signature(loss)
        call.__signature__ = of_loss.replace(parameters=[*of_loss.parameters.values()][1:])  # type: ignore[attr-defined]
        return call

    return decorate


def key_of(args: Any, kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
    """All that checks and work of a call depend on, autocast's type first; None for a call that has no key."""
    key: list[Any] = [None, torch.is_grad_enabled()]
    device: Any = None
    for name, value in (*enumerate(args), *kwargs.items()):
        kind = value.__class__
        if kind in _check.PLAIN:
            if value.is_nested:
                return None
            device = value.device
            key += (name, value.shape, value.dtype, device, value.layout, value.requires_grad)
        elif kind is float and (name in NUMBERS or name.__class__ is int):
            key += (name, kind)
        elif kind in SETTINGS:  # with the class, because 1 == 1.0 == True
            key += (name, kind, value)
        else:
            return None
    if device is None or device.type not in _check.AUTOCAST_DEVICES:
        return None
    if torch.is_autocast_enabled(device.type):
        key[0] = torch.get_autocast_dtype(device.type)
    return tuple(key)


def _holds_shards(value: Any) -> bool:
    if isinstance(value, SETTINGS):  # torch.compile of torch 2.11 cannot trace is_dataclass(None)
        return False
    if dataclasses.is_dataclass(value):
        return any(is_sharded(getattr(value, field.name)) for field in dataclasses.fields(value))
    return is_sharded(value)
