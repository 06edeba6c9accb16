"""Kernels that declare their arguments, and how they are compiled and launched. The only calls of Triton's launcher.

Triton treats a missing argument as None and compiles another kernel for it, without an error. Here `kernel` declares
which parameters may be None. A launch fails on an unknown name and on a missing argument.

Triton's own launch finds the compiled kernel by all of its arguments each time. Here that is one lookup for each step
of a program: `warmup` compiles, and indexing the result with a grid gives a function that launches. That function takes
three times as long on the host as ``run`` of the compiled kernel, mostly for hooks of profilers. So `starter` calls
``run`` while there is no hook. Its arguments are the same in Triton 3.6 to 3.9.
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

from tilewise.errors import BackendError

SCORE_KEYS = ("bias", "row_key", "col_key", "row_skip", "col_skip")  # optional wherever a kernel computes scores
TILE_NUMBERS = ("softcap", "n", "m", "first", "ahead")  # dynamic in all kernels over tiles
_compiled: dict[tuple[Any, ...], Any] = {}
_compiling = threading.Lock()  # threads mostly need the same kernels: one compiles, the others find the result


class Declared(NamedTuple):
    """The parameters of a kernel."""

    places: dict[str, int]
    optional: frozenset[str]
    dynamic: frozenset[int]  # places


_declared: dict[Callable[..., None], Declared] = {}


def kernel(*, optional: Sequence[str] = (), dynamic: Sequence[str] = ()) -> Callable[[Callable[..., None]], Any]:
    """`triton.jit` for a kernel whose arguments are checked.

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


def declared(kernel: Any) -> Declared:
    """The parameters of a kernel; of one that `triton.jit` made, all may be None."""
    found = _declared.get(kernel.fn)
    if found is None:
        places = {name: place for place, name in enumerate(inspect.signature(kernel.fn).parameters)}
        found = _declared[kernel.fn] = Declared(places, frozenset(places), frozenset())
    return found


def arguments_of(kernel: Any, bundles: Sequence[dict[str, Any]], own: dict[str, Any]) -> dict[str, Any]:
    """The arguments in the order of the parameters: those of ``own``, and what the bundles have of the others."""
    places, optional, _ = declared(kernel)
    for name in own:
        if name not in places:
            raise TypeError(f"kernel {kernel.fn.__name__} has no parameter {name}")
    every: dict[str, Any] = {}
    for bundle in (*bundles, own):
        every.update(bundle)
    if "CODE" in places:
        every["CODE"] = code_of(tuple(every.get(name) for name in places))
    found = {name: every.get(name) for name in places}
    for name, value in found.items():
        if value is None and name not in optional:
            raise TypeError(f"kernel {kernel.fn.__name__} misses the argument {name}")
    return found


def code_of(values: Any) -> str:
    """A key of the code of all functions in tuples, which Triton's key of a compiled kernel on the disk leaves out.

    It is empty in the interpreter, which compiles nothing.
    """
    if isinstance(values, tuple):
        return "".join(code_of(value) for value in values)
    return getattr(values, "cache_key", "")


def launch(
    kernel: Any,
    programs: int,
    device: torch.device,
    *bundles: dict[str, Any],
    warps: int = 4,
    stages: int = 2,
    **arguments: Any,
) -> None:
    """Launch a kernel now; the arguments are those of `Program.launch`, with tensors in place of buffers."""
    values = list(arguments_of(kernel, bundles, arguments).values())
    compiled_launch(kernel, programs, values, device, warps, stages)(*values)


def compiled_launch(
    kernel: Any, programs: int, arguments: Sequence[Any], device: torch.device, warps: int, stages: int
) -> Callable[..., Any]:
    """A function that launches the kernel with arguments like these: equal types, alignment and constants."""
    # Triton 3.10 changes the default of the last one.
    options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True}
    if device.type != "cuda":  # the interpreter
        return functools.partial(kernel[(programs,)], **options)
    dynamic = declared(kernel).dynamic
    key = kernel, device, warps, stages, *(_kind(value, at in dynamic) for at, value in enumerate(arguments))
    made = _compiled.get(key)
    if made is None:
        if torch.cuda.is_current_stream_capturing():
            raise BackendError(
                "kernels cannot be loaded while a CUDA graph is captured. Call the loss once with tensors of these shapes "
                "before capturing"
            )
        with _compiling:
            made = _compiled[key] = kernel.warmup(*arguments, grid=(programs,), **options)
    return starter(made, programs, device)


def starter(made: Any, programs: int, device: torch.device) -> Callable[..., Any]:
    """A function that launches a compiled kernel on the current stream of the device, which is the current one."""
    hooked, knobs = made[(programs, 1, 1)], triton.knobs.runtime  # indexing also loads the kernel
    run, function, metadata = made.run, made.function, made.packed_metadata
    stream, index = triton.runtime.driver.active.get_current_stream, device.index

    def start(*arguments: Any) -> None:
        before, after = knobs.launch_enter_hook, knobs.launch_exit_hook
        if getattr(before, "calls", before) or getattr(after, "calls", after):  # a chain of hooks, a function, or None
            hooked(*arguments)
        else:
            run(programs, 1, 1, stream(index), function, metadata, None, None, None, *arguments)

    return start


def _kind(value: Any, dynamic: bool) -> Any:
    """All that the compiled kernel depends on."""
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if isinstance(value, TensorDescriptor):
        return value.base.dtype, *value.block_shape
    if dynamic:
        return type(value), -(2**31) <= value < 2**31
    return type(value), value
