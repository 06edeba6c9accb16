"""The registry of backends and the choice of one for a call. The only file that names implementations."""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import cast

import torch
from torch import Tensor

from tilewise.errors import BackendError
from tilewise.kernels.backend import Backend
from tilewise.kernels.known_faults import faults_on, warn_once
from tilewise.kernels.ranks import Scorer, Searcher
from tilewise.kernels.spec import Grads, Pair, PairShape, PairSpec, Stats, wanted_names
from tilewise.options import BACKEND_NAMES, TileOptions

log = logging.getLogger("tilewise")


@functools.cache
def _triton() -> Backend:
    from tilewise.kernels.triton_impl.backend import TritonBackend

    return TritonBackend()


@functools.cache
def _torch() -> Backend:
    from tilewise.kernels.torch_impl.backend import TorchBackend

    return TorchBackend()


@functools.cache
def installed(package: str) -> bool:
    """Whether the package can be imported."""
    return importlib.util.find_spec(package) is not None


def _why_not_load(name: str, device: torch.device, options: TileOptions) -> str | None:
    """Why the backend is not even imported, or None."""
    if name != "triton":
        return None
    if device.type != "cuda":
        interpreted = os.environ.get("TRITON_INTERPRET") == "1" and options.backend == "triton"
        if not interpreted:
            return "it needs a CUDA device (or TRITON_INTERPRET=1, for tests)"
    elif torch.version.hip is not None:
        return f"its kernels are made for NVIDIA cards, and this torch is for AMD cards (ROCm {torch.version.hip})"
    return None if installed("triton") else "the package triton is not installed"


def _why_avoided(name: str, device: torch.device, options: TileOptions) -> str | None:
    """Warn about known faults that the backend meets on this device. The reason why "auto" avoids it, or None."""
    auto = options.backend == "auto"
    faults = [fault for fault in faults_on(device) if fault.avoided] if name == "triton" else []
    for fault in faults:
        warn_once(fault, auto)
    return faults[0].reason if faults and auto else None


# Backends are imported when they are first used. "auto" prefers the first that can serve a call; torch always can.
_LOADERS: dict[str, Callable[[], Backend]] = {"triton": _triton, "torch": _torch}
_BUILT_IN = dict(_LOADERS)
_AUTO = tuple(_BUILT_IN)


def tuner() -> ModuleType:
    """The module that measures tile sizes. Needs Triton."""
    from tilewise.kernels.triton_impl import tune

    return tune


def size_table() -> ModuleType:
    """The module with the tile sizes. Does not need Triton."""
    from tilewise.kernels.triton_impl import sizes

    return sizes


_forgetters: list[Callable[[], None]] = []


def forget_with_backends(clear: Callable[[], None]) -> None:
    """Call ``clear``, which empties a cache of backends, whenever a backend is registered or unregistered."""
    _forgetters.append(clear)


def forget_choices() -> None:
    """Empty all caches of backends; also for tests that change a threshold."""
    for clear in _forgetters:
        clear()


def register_backend(backend: Backend) -> None:
    """Make a backend available as ``TileOptions(backend=backend.name)``. "auto" does not choose it."""
    _LOADERS[backend.name] = lambda: backend
    if backend.name not in BACKEND_NAMES:
        BACKEND_NAMES.append(backend.name)
    forget_choices()


def unregister_backend(name: str) -> None:
    """Undo `register_backend`. If it replaced a built-in backend, that one has its name again."""
    if name in _BUILT_IN:
        _LOADERS[name] = _BUILT_IN[name]
    else:
        del _LOADERS[name]
        BACKEND_NAMES.remove(name)
    forget_choices()


def load_backend(name: str) -> Backend:
    """The backend of that name, imported if necessary."""
    return _LOADERS[name]()


def why_not(name: str, shape: PairShape, spec: PairSpec, options: TileOptions) -> str | None:
    """Why the backend ``name`` cannot serve this call, or None if it can."""
    if reason := _why_not_load(name, shape.device, options):
        return reason
    backend = load_backend(name)
    if backend.statistics is not None and (missing := set(wanted_names(spec)) - backend.statistics):
        return f"it does not compute {', '.join(sorted(missing))}"
    if reason := backend.why_not(shape, spec, options):
        return reason
    return _why_avoided(name, shape.device, options)


def refusals(shape: PairShape, spec: PairSpec, options: TileOptions) -> dict[str, str]:
    """The backends that "auto" prefers to the one it chooses, with the reasons why they cannot serve this call."""
    found: dict[str, str] = {}
    for name in _AUTO if options.backend == "auto" else ():
        reason = why_not(name, shape, spec, options)
        if reason is None:
            break
        found[name] = reason
    return found


@functools.lru_cache(maxsize=1024)
def choose_backend(shape: PairShape, spec: PairSpec, options: TileOptions) -> Backend:
    """The backend that ``options`` names, or the first that can serve the call."""
    if options.backend != "auto":
        if reason := why_not(options.backend, shape, spec, options):
            raise BackendError(
                f"backend {options.backend!r} cannot serve {shape.rows} x {shape.cols} scores of width {shape.width}, "
                f'{shape.dtype} on {shape.device}: {reason}. Use backend="auto"'
            )
        return load_backend(options.backend)
    reasons = []
    for name in _AUTO:
        reason = why_not(name, shape, spec, options)
        if reason is None:
            log.debug("backend %s chosen", name)
            return load_backend(name)
        log.debug("backend %s not chosen: %s", name, reason)
        reasons.append(f"{name}: {reason}")
    # Only batch_invariant makes the torch backend refuse a call.
    raise BackendError(
        f"no backend can serve {shape.rows} x {shape.cols} scores of width {shape.width}, {shape.dtype} on "
        f"{shape.device} ({'; '.join(reasons)}). Pass batch_invariant=False"
    )


forget_with_backends(choose_backend.cache_clear)


def operators_instead(backend: Backend, options: TileOptions) -> Backend | None:
    """The backend of PyTorch's operators, where "auto" chose another one: for small calls without a program."""
    return load_backend("torch") if options.backend == "auto" and backend.name != "torch" else None


def directional_derivatives(
    pair: Pair, along: Grads, names: Sequence[str], spec: PairSpec, options: TileOptions
) -> tuple[Stats, Stats]:
    """The statistics, and the derivatives of those in ``names`` along directions of features, scale and bias.

    On every device the tiles of the torch backend compute them: only the derivative of a gradient with respect to
    ``grad_output`` needs them.
    """
    from tilewise.kernels.torch_impl import directional

    return directional.derivatives(pair, along, names, spec, options)


def choose_searcher(device: torch.device, width: int, dtype: torch.dtype, options: TileOptions) -> Searcher:
    """The scorer for features of this width and type, from a backend that finds the nearest items."""
    return cast(Searcher, choose_scorer(device, width, dtype, options, search=True))


def choose_scorer(
    device: torch.device, width: int, dtype: torch.dtype, options: TileOptions, *, search: bool = False
) -> Scorer:
    """The scorer for features of this width and type; with ``search``, a `Searcher`."""
    names = _AUTO if options.backend == "auto" else (options.backend,)
    for name in names:
        reason = _why_not_load(name, device, options)
        backend = None if reason else load_backend(name)
        if backend is not None and not backend.offers_ranks:
            return _scorer_of_forward(backend, device, width, dtype, options)
        if backend is not None:
            reason = backend.why_no_ranks(device, width, dtype)
            if reason is None and search and not backend.offers_search:
                reason = "it offers ranks, but no search for the nearest items"
            if reason is None:
                reason = _why_avoided(name, device, options)
            if reason is None:
                return backend.scorer(device, width, dtype, options)
        log.debug("backend %s not chosen: %s", name, reason)
    raise BackendError(
        f"backend {options.backend!r} cannot rank {dtype} features of width {width} on {device}: {reason}. "
        'Use backend="auto"'
    )


def _scorer_of_forward(
    backend: Backend, device: torch.device, width: int, dtype: torch.dtype, options: TileOptions
) -> Searcher:
    """Ranks of a backend that offers none: scores from its `forward`, one gallery item at a time, which is slow.

    The log-sum-exp of a single score is that score.
    """
    from tilewise.kernels.torch_impl.ranks import ScoreTile

    def multiply(queries: Tensor, items: Tensor, out: Tensor) -> None:
        for place in range(items.shape[0]):
            pair = Pair(a=queries, b=items[place : place + 1], scale=out.new_ones(()))
            found = backend.forward(pair, PairSpec(row_lse=True), options).row_lse
            out[:, place] = found

    return ScoreTile(device, width, dtype, options.workspace_bytes, multiply)
