"""Launches of a compiled kernel by a direct call of the driver.

Triton's own launch looks for hooks, makes a description for profilers, allocates scratch memory and unpacks tensor
descriptors every time: 20 us for forty arguments, of which the driver takes 8 us. Here the arguments are laid out once,
and only addresses change. In a training step most addresses equal those of the step before.

This depends on how one version of Triton passes arguments. With another version, with a hook of a profiler, or for a
kernel that needs scratch memory, `DriverLaunch.of` returns None, and the caller launches in the public way.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import triton
from triton import knobs

KNOWN_VERSION = "3.6."


def is_known_version() -> bool:
    """Whether the internals of this version of Triton are known. With another version only public calls are made."""
    return triton.__version__.startswith(KNOWN_VERSION)


class DriverLaunch:
    """A kernel with its grid and its arguments, except for addresses."""

    def __init__(self, launch: Callable[..., None], before: tuple[Any, ...], after: tuple[Any, ...]) -> None:
        self.launch, self.before, self.after = launch, before, after
        self.args: list[Any] = []
        # An address to fill in: (place, how the descriptor is encoded, descriptor)
        self.open: list[tuple[int, dict[str, Any] | None, Any]] = []
        self.ready: tuple[list[int], list[Any]] | None = None  # the addresses of the last launch, and its arguments

    @staticmethod
    def of(compiled: Any, programs: int, args: Sequence[Any], addressed: Sequence[int]) -> DriverLaunch | None:
        """Lay out the arguments; ``addressed`` are the places of tensors and of tensor descriptors, in order."""
        if not is_known_version():
            return None
        launcher = compiled.run
        if launcher.global_scratch_size or launcher.profile_scratch_size:
            return None
        launch, described = launcher.launch, {}
        if inspect.isfunction(launch):  # unpacks descriptors, then launches
            inside = inspect.getclosurevars(launch).nonlocals
            launch, places, needs = inside["launcher"], sorted(inside["tensordesc_indices"]), inside["tensordesc_meta"]
            described = dict(zip(places, needs or [None] * len(places), strict=True))
        made = DriverLaunch(
            launch,
            (programs, 1, 1),
            (compiled.function, launcher.launch_cooperative_grid, launcher.launch_pdl, None, None)
            + (compiled.packed_metadata, None, None, None),
        )
        for place, arg in enumerate(args):
            if place in addressed:
                made.open.append((len(made.args), described.get(place), arg if place in described else None))
            if place not in described:
                made.args.append(arg)
                continue
            made.args += [None, *arg.shape, *arg.strides]
            if described[place] is None:  # a card without descriptors takes an address, and the shape twice
                made.args += [arg.padding == "nan", *arg.shape, *arg.strides]
        return made

    def __call__(self, stream: int, addresses: list[int]) -> None:
        """Launch with these addresses, in the order of ``addressed``."""
        ready = self.ready
        if ready is None or ready[0] != addresses:
            ready = self.ready = addresses, self._filled(addresses)
        self.launch(*self.before, stream, *self.after, *ready[1])

    def _filled(self, addresses: list[int]) -> list[Any]:
        args = self.args.copy()
        for (place, needs, descriptor), address in zip(self.open, addresses, strict=True):
            args[place] = address if needs is None else encode_descriptor(address, needs, descriptor)
        return args


def encode_descriptor(address: int, needs: dict[str, Any], like: Any) -> Any:
    """A tensor descriptor as the card reads it."""
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

    return triton.runtime.driver.active.utils.fill_tma_descriptor(
        address,
        needs["swizzle"],
        needs["elem_size"],
        TMA_DTYPE_DEVICE_TO_HOST[needs["elem_type"]],
        needs["block_size"],
        list(like.shape),
        list(like.strides),
        1 if like.padding == "nan" else 0,
    )


def no_launch_hooks() -> bool:
    """Whether no profiler has registered a hook on launches."""
    hooks = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return all(hook is None or not getattr(hook, "calls", True) for hook in hooks)
