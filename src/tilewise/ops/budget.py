"""The number for ``workspace_mib="auto"``: a share of the memory that is free when a loss is called."""

from __future__ import annotations

import dataclasses
import os

import torch

from tilewise.options import TileOptions

MIB = 2**20
SHARE = 4  # a quarter of what is free
LEAST, MOST = 64, 8192  # MiB; more than 8 GiB was not measured


def with_budget(options: TileOptions, device: torch.device, group_name: str) -> TileOptions:
    """The options with a number in place of "auto".

    With a group, all ranks need the same number. Inside of ``torch.compile``, the number would become a constant of the
    compiled graph. In these cases, and if the free memory is not known, "auto" stays and means the default
    (`TileOptions.workspace_bytes`).
    """
    if not isinstance(options.workspace_mib, str) or group_name or torch.compiler.is_compiling():
        return options
    free = free_bytes(device)
    return options if free is None else dataclasses.replace(options, workspace_mib=budget_mib(free))


def budget_mib(free: int) -> int:
    """A quarter of ``free`` bytes, rounded down to 2**k or 1.5 * 2**k MiB. So most steps of a run get the same.

    >>> [budget_mib(gib * 2**30) for gib in (0, 1, 3, 7, 100)]
    [64, 256, 768, 1536, 8192]
    """
    mib = min(max(free // SHARE // MIB, LEAST), MOST)
    power = 1 << (mib.bit_length() - 1)
    return power * 3 // 2 if mib >= power * 3 // 2 else power


def free_bytes(device: torch.device) -> int | None:
    """Memory that a new tensor could take, or None if it is not known."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free) + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if device.type == "cpu" and "SC_AVPHYS_PAGES" in getattr(os, "sysconf_names", {}):  # not on macOS and Windows
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None
