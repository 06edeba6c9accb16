"""Compiled kernels, looked up once for each program. The only calls of Triton's launcher besides `prepared`."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tilewise.errors import BackendError

_compiling = threading.Lock()  # threads mostly need the same kernels: one compiles, the others find the result


def compiled_launch(
    kernel: Any, programs: int, arguments: Sequence[Any], device: torch.device, warps: int
) -> Callable[..., Any]:
    """A function that launches the kernel with arguments like these: equal types, alignment and constants.

    Triton's own launch finds the compiled kernel by all of its arguments each time. Here that happens once.
    """
    if device.type != "cuda":  # the interpreter
        return functools.partial(kernel[(programs,)], num_warps=warps)
    if torch.cuda.is_current_stream_capturing():
        raise BackendError(
            "kernels cannot be loaded while a CUDA graph is captured. Call the loss once with tensors of these shapes "
            "before capturing"
        )
    with _compiling:
        made = kernel.warmup(*arguments, grid=(programs,), num_warps=warps)
    start: Callable[..., Any] = made[(programs, 1, 1)]
    return start
