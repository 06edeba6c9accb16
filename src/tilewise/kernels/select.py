"""Which backend serves a call, and why the others do not."""

from __future__ import annotations

import functools
import importlib.util
import logging
import os

from tilewise.errors import BackendError
from tilewise.kernels.spec import Backend, Pair, PairSpec
from tilewise.kernels.tiled import TorchBackend
from tilewise.options import TileOptions

log = logging.getLogger("tilewise")
NAMES = ("triton", "torch")  # in the order of preference; torch is last and never refuses


@functools.cache
def load_backend(name: str) -> Backend:
    """The backend of that name. Triton is imported here and nowhere before."""
    if name == "triton":
        from tilewise.kernels.triton_impl.backend import TritonBackend

        return TritonBackend()
    return TorchBackend()


@functools.cache
def installed(package: str) -> bool:
    """Whether it can be imported."""
    return importlib.util.find_spec(package) is not None


def why_not(name: str, pair: Pair, spec: PairSpec, options: TileOptions) -> str | None:
    """Why the backend ``name`` cannot serve this call, or None if it can."""
    if name == "triton":
        if pair.a.device.type != "cuda":
            interpreted = os.environ.get("TRITON_INTERPRET") == "1" and options.backend == "triton"
            if not interpreted:
                return "it needs a CUDA device (or TRITON_INTERPRET=1, for tests)"
        if not installed("triton"):
            return "the package triton is not installed"
    return load_backend(name).why_not(pair, spec, options)


def choose_backend(pair: Pair, spec: PairSpec, options: TileOptions) -> Backend:
    """The backend that ``options`` names, or the first that can serve the call."""
    if options.backend != "auto":
        if reason := why_not(options.backend, pair, spec, options):
            raise BackendError(
                f"backend {options.backend!r} cannot serve features of shape {tuple(pair.a.shape)} and "
                f'{tuple(pair.b.shape)}, {pair.a.dtype} on {pair.a.device}: {reason}. Use backend="auto"'
            )
        return load_backend(options.backend)
    for name in NAMES:
        reason = why_not(name, pair, spec, options)
        if reason is None:
            log.debug("backend %s chosen", name)
            return load_backend(name)
        log.debug("backend %s not chosen: %s", name, reason)
    raise AssertionError("the torch backend never refuses")
