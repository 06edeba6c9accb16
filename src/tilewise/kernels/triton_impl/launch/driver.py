"""Launches of a compiled kernel by a direct call of the driver.

Triton's own launch looks for hooks, makes a description for profilers, allocates scratch memory and unpacks tensor
descriptors every time: 20 us for forty arguments, of which the driver takes 8 us. Here the list of arguments is made once,
and only the addresses in it change. In a training step most addresses equal those of the step before.

This depends on how one version of Triton passes arguments. With another version, or for a kernel that needs scratch
memory, or in the interpreter, `DriverLaunch.of` returns None, and the caller uses Triton's own launcher.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

import triton
from torch import Tensor
from triton import knobs

KNOWN_VERSION = "3.6."
STREAM = 3  # its place among the arguments of a launch, after the grid


def is_known_version() -> bool:
    """Whether the internals of this version of Triton are known. With another version only public calls are made."""
    return triton.__version__.startswith(KNOWN_VERSION)


class Where(NamedTuple):
    """The place of a tensor in a slot: an input or a scratch tensor of a recorded call (see `replay`).

    The address of a slot differs from call to call.
    """

    slot: int
    offset: int  # bytes
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    whole: bool = False  # whether it is the whole tensor of the slot

    def view(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """The tensor at this place, given a tensor for each slot."""
        whole = tensors[self.slot]
        assert whole is not None
        if self.whole:
            return whole
        return whole.as_strided(self.shape, self.stride, whole.storage_offset() + self.offset // whole.element_size())


class DriverLaunch:
    """A kernel with its grid and its arguments, except for addresses."""

    def __init__(self, compiled: Any, programs: int, args: Sequence[Any], wheres: dict[int, Where]) -> None:
        launcher = compiled.run
        self.launch, described = launcher.launch, {}
        # For kernels with tensor descriptors, Triton (triton/backends/nvidia/driver.py) wraps the launcher in a function
        # that unpacks them at each launch. The launcher itself is a variable of that function.
        if inspect.isfunction(self.launch):
            inside = inspect.getclosurevars(self.launch).nonlocals
            places, needs = sorted(inside["tensordesc_indices"]), inside["tensordesc_meta"]
            self.launch, described = inside["launcher"], dict(zip(places, needs or [None] * len(places), strict=True))
        no_stream, no_scratch = None, (None, None)
        flags = launcher.launch_cooperative_grid, launcher.launch_pdl
        no_profiler = (None, None, None)  # a description of the launch, and hooks before and after it
        self.args: list[Any] = [programs, 1, 1, no_stream, compiled.function, *flags, *no_scratch]
        self.args += [compiled.packed_metadata, *no_profiler]
        # Addresses to fill in: argument, place, how a descriptor is encoded
        self.open: list[tuple[int, Where, Any]] = []
        for place, arg in enumerate(args):
            if place in wheres:
                self.open.append((len(self.args), wheres[place], described.get(place)))
            self.args.append(arg)
            if place in described:
                sizes = *wheres[place].shape, *wheres[place].stride
                # A card without descriptors takes an address, shape, strides, a flag for the padding, shape, strides.
                self.args += sizes if described[place] is not None else [*sizes, False, *sizes]
        self.sources = [(where.slot, where.offset) for _, where, _ in self.open]
        # The addresses of the last launch, its stream, and its arguments
        self.ready: tuple[list[int], int, tuple[Any, ...]] | None = None

    @staticmethod
    def of(compiled: Any, programs: int, args: Sequence[Any], wheres: dict[int, Where]) -> DriverLaunch | None:
        """Lay out the arguments; ``wheres`` are the places of tensors and tensor descriptors, by argument."""
        if compiled is None or not is_known_version():
            return None
        if compiled.run.global_scratch_size or compiled.run.profile_scratch_size:
            return None
        return DriverLaunch(compiled, programs, args, wheres)

    def move(self, moved: dict[int, int], slot: int) -> None:
        """Use parts of ``slot`` in place of the slots in ``moved``, which has the first byte of each of them."""
        self.sources = [(slot, moved[old] + offset) if old in moved else (old, offset) for old, offset in self.sources]

    def arguments(self, at: Sequence[int], stream: int) -> tuple[Any, ...]:
        """The arguments of `launch` with slots at these addresses."""
        addresses = [at[slot] + offset for slot, offset in self.sources]
        ready = self.ready
        if ready is None or ready[0] != addresses or ready[1] != stream:
            ready = self.ready = addresses, stream, self._filled(addresses, stream)
        return ready[2]

    def _filled(self, addresses: list[int], stream: int) -> tuple[Any, ...]:
        args = self.args.copy()
        args[STREAM] = stream
        for (place, where, needs), address in zip(self.open, addresses, strict=True):
            args[place] = address if needs is None else encode_descriptor(address, needs, where)
        return tuple(args)


def encode_descriptor(address: int, needs: dict[str, Any], where: Where) -> Any:
    """A tensor descriptor as the card reads it."""
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

    how = needs["swizzle"], needs["elem_size"], TMA_DTYPE_DEVICE_TO_HOST[needs["elem_type"]], needs["block_size"]
    fill = triton.runtime.driver.active.utils.fill_tma_descriptor
    return fill(address, *how, list(where.shape), list(where.stride), 0)  # 0: padded with zeros


def no_launch_hooks() -> bool:
    """Whether no profiler has registered a hook on launches."""
    return _has_no_calls(knobs.runtime.launch_enter_hook) and _has_no_calls(knobs.runtime.launch_exit_hook)


def _has_no_calls(hook: Any) -> bool:
    return hook is None or not getattr(hook, "calls", True)
