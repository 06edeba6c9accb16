"""Kernels that declare their arguments, and launches that check them.

Triton treats a missing argument as None and compiles another kernel for it, without an error. Here `kernel` declares
which parameters may be None. A launch fails on an unknown name and on a missing argument.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tilewise.kernels.triton_impl.launch.driver import is_known_version
from tilewise.kernels.triton_impl.launch.replay import Recording

_compiled: dict[tuple[Any, ...], Any] = {}
_compiling = threading.Lock()  # threads mostly need the same kernels: one compiles, the others find the result
SCORE_KEYS = ("bias", "row_key", "col_key", "row_skip", "col_skip")  # optional wherever a kernel computes scores
TILE_NUMBERS = ("softcap", "n", "m", "first", "ahead")  # dynamic in all kernels over tiles


class Declared(NamedTuple):
    """The parameters of a kernel."""

    places: dict[str, int]
    optional: frozenset[str]
    dynamic: frozenset[int]  # places


_declared: dict[Callable[..., None], Declared] = {}


def kernel(*, optional: Sequence[str] = (), dynamic: Sequence[str] = ()) -> Callable[[Callable[..., None]], Any]:
    """`triton.jit` for a kernel that `Prepared` launches.

    Args:
        optional: parameters that may be None.
        dynamic: numbers whose value is no part of the compiled kernel.
    """

    def declare(function: Callable[..., None]) -> Any:
        places = {name: place for place, name in enumerate(inspect.signature(function).parameters)}
        unknown = sorted({*optional, *dynamic} - places.keys())
        if unknown:
            raise TypeError(f"kernel {function.__name__} has no parameter {', '.join(unknown)}")
        made = triton.jit(do_not_specialize=list(dynamic))(function)
        _declared[function] = Declared(places, frozenset(optional), frozenset(places[name] for name in dynamic))
        return made

    return declare


class Prepared:
    """A kernel with the arguments that stay the same during a call; the others are set before each launch.

    A compiled kernel depends on types, alignment, constants and on which arguments are None. All of that is the same
    for all launches of one `Prepared`, so the compiled kernel is looked up once.
    """

    def __init__(
        self, kernel: Any, device: torch.device, warps: int, stages: int, recording: Recording | None = None
    ) -> None:
        self.kernel, self.device, self.recording = kernel, device, recording
        self.options = {"num_warps": warps, "num_stages": stages}
        self.declared = _declared[kernel.fn]
        self.places = self.declared.places
        self.args: list[Any] = [None] * len(self.places)
        self.runners: dict[int, Any] = {}
        self.compiled: Any = None  # stays None in the interpreter and with an unknown version of Triton

    def put(self, values: dict[str, Any]) -> Prepared:
        """Set arguments by name."""
        places, args = self.places, self.args
        try:
            for name, value in values.items():
                args[places[name]] = value
        except KeyError:
            raise TypeError(f"kernel {self.kernel.__name__} has no parameter {name}") from None
        return self

    def offer(self, values: dict[str, Any]) -> Prepared:
        """Set those arguments that the kernel declares: for bundles of values that many kernels share."""
        places, args = self.places, self.args
        for name, value in values.items():
            place = places.get(name)
            if place is not None:
                args[place] = value
        return self

    def launch(self, programs: int) -> None:
        """Run it with the current arguments."""
        runner = self.runners.get(programs)
        if runner is None:
            runner = self.runners[programs] = self._runner(programs)
        runner(*self.args)
        if self.recording is not None:
            self.recording.launched(runner, self.args, self.compiled, programs)

    def _runner(self, programs: int) -> Any:
        """The compiled kernel with its grid."""
        for name, arg in zip(self.places, self.args, strict=True):
            if arg is None and name not in self.declared.optional:
                raise TypeError(f"kernel {self.kernel.__name__} misses the argument {name}")
        if self.device.type != "cuda" or not is_known_version():  # on a CPU, the interpreter
            return functools.partial(self.kernel[(programs,)], **self.options)
        key = self._key()
        with _compiling:
            if key not in _compiled:
                _compiled[key] = self.kernel.warmup(*self.args, grid=(programs,), **self.options)
            self.compiled = _compiled[key]
            return self.compiled[(programs, 1, 1)]

    def _key(self) -> tuple[Any, ...]:
        """All that the compiled kernel depends on."""
        key: list[Any] = [self.kernel, self.device, *self.options.values()]
        for place, arg in enumerate(self.args):
            if isinstance(arg, Tensor):
                key.append((arg.dtype, arg.data_ptr() % 16 == 0))
            elif isinstance(arg, TensorDescriptor):
                key.append((arg.base.dtype, *arg.block_shape))
            elif place in self.declared.dynamic:
                key.append((type(arg), -(2**31) <= arg < 2**31))
            else:
                key.append(arg)
        return tuple(key)
