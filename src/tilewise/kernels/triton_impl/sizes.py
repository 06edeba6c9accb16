"""Tile sizes of all kernels in one table: a row for each architecture and number of bytes of the type.

`tilewise tune` measures the candidates on a card and keeps the best ones in a file of the user. They replace fields of
the row for that card (`row_of`). CONTRIBUTING.md explains how to add an architecture.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from tilewise.kernels import tuned_file


@dataclass(frozen=True)
class Sizes:
    """How a kernel over tiles divides its work."""

    rows: int  # of a tile
    cols: int
    depth: int  # features at a time
    warps: int
    stages: int
    programs: int  # resident programs per multiprocessor
    group: int  # row tiles that share their column tiles in the cache
    pieces: int = 1  # in which a tile is written: more pieces take less shared memory
    strip: int = 1  # row tiles whose columns one program adds up


@dataclass(frozen=True)
class PairSizes:
    """How the kernels over kept (row, tile) entries of the filter divide their work."""

    rows: int  # pairs at a time
    depth: int  # features at a time, of the scores and of the row gradients
    columns: int  # features at a time, of the column gradients
    warps: int
    column_warps: int
    stages: int


@dataclass(frozen=True, kw_only=True)
class KernelSizes:
    """One row of the table. The wide sizes are for `WIDE` features or more; None: same as the others.

    The default sizes of the filter fit cards with 160 KiB of shared memory, for types of up to 4 bytes.
    """

    forward: Sizes  # statistics in forward, and ranks
    gradient: Sizes  # G in backward, and exponentials in one pass
    forward_wide: Sizes | None = None  # where no columns are summed
    gradient_wide: Sizes | None = None
    guided: Sizes | None = None  # with a second score matrix, whose tile takes as many registers; None: as gradient
    filter_masses: Sizes = Sizes(64, 256, 32, 8, 2, 1, 8)  # with tiles of 256 columns
    filter_masses_narrow: Sizes = Sizes(64, 128, 32, 4, 2, 1, 8)  # with tiles of fewer columns; `cols` is their number
    filter_pairs: PairSizes = PairSizes(16, 32, 64, 4, 8, 2)


TF32 = "tf32"  # EXACT of kernels that multiply float32 in TF32; also their row of the table, where it has one
WIDE = 1024  # from here on the product takes longer than the exponentials, and larger tiles pay
SMALL_SHARED = ((8, 6), (8, 9), (12, 0), (12, 1))  # capabilities of cards with 100 KiB of shared memory, not 160 to 228
Kind = int | str  # bytes of the type, or TF32
# (architecture, kind) -> sizes. Those of sm_90 are measured, except for TF32; the others fit the shared memory.
TABLE: dict[tuple[str, Kind], KernelSizes] = {
    ("sm_80", 2): KernelSizes(
        forward=Sizes(128, 128, 32, 4, 3, 2, 8),
        gradient=Sizes(128, 128, 32, 8, 3, 1, 8),
        filter_pairs=PairSizes(64, 32, 64, 8, 8, 2),
    ),
    ("sm_80", 4): KernelSizes(
        forward=Sizes(64, 64, 16, 4, 3, 2, 8),
        gradient=Sizes(64, 64, 32, 4, 3, 2, 8),
        guided=Sizes(64, 64, 32, 8, 3, 1, 8),
        filter_masses=Sizes(64, 256, 16, 8, 2, 1, 8),
        filter_masses_narrow=Sizes(64, 128, 16, 4, 2, 1, 8),
    ),
    ("sm_90", 2): KernelSizes(
        forward=Sizes(128, 128, 64, 4, 3, 2, 16, strip=8),
        gradient=Sizes(128, 128, 64, 4, 3, 2, 16, pieces=4),
        forward_wide=Sizes(128, 256, 64, 8, 3, 1, 16),
        gradient_wide=Sizes(128, 256, 64, 8, 3, 1, 16),
        guided=Sizes(128, 128, 64, 8, 4, 1, 16),
        filter_masses=Sizes(128, 256, 64, 8, 3, 1, 16),
        filter_masses_narrow=Sizes(128, 128, 64, 4, 3, 2, 16),
        filter_pairs=PairSizes(64, 64, 128, 8, 8, 3),
    ),
    ("sm_90", 4): KernelSizes(
        forward=Sizes(128, 64, 32, 4, 3, 2, 8),
        gradient=Sizes(128, 64, 32, 4, 3, 2, 8),
    ),
    # A tile of 32 features takes as much shared memory as one of 64 in a half type.
    ("sm_90", TF32): KernelSizes(
        forward=Sizes(128, 128, 32, 4, 3, 2, 16, strip=8),
        gradient=Sizes(128, 128, 32, 4, 3, 2, 16, pieces=4),
        forward_wide=Sizes(128, 256, 32, 8, 3, 1, 16),
        gradient_wide=Sizes(128, 256, 32, 8, 3, 1, 16, pieces=4),
        guided=Sizes(128, 128, 32, 8, 4, 1, 16),
    ),
    ("sm_100", 2): KernelSizes(
        forward=Sizes(128, 64, 64, 4, 2, 2, 16),
        gradient=Sizes(128, 64, 64, 4, 2, 2, 16),
        filter_pairs=PairSizes(64, 32, 64, 8, 8, 2),
    ),
    ("sm_100", 4): KernelSizes(
        forward=Sizes(64, 64, 32, 4, 2, 2, 8),
        gradient=Sizes(64, 64, 32, 4, 2, 2, 8),
    ),
    # Cards with 100 KiB of shared memory, and all that are not listed. Triton 3.9 takes one stage more than 3.6.
    ("other", 2): KernelSizes(
        forward=Sizes(64, 64, 32, 4, 2, 2, 8),
        gradient=Sizes(64, 64, 32, 4, 2, 2, 8),
        filter_pairs=PairSizes(64, 32, 64, 8, 8, 2),
    ),
    ("other", 4): KernelSizes(
        forward=Sizes(32, 32, 32, 4, 2, 2, 8),
        gradient=Sizes(32, 32, 32, 4, 2, 2, 8),
        filter_masses=Sizes(64, 256, 16, 8, 2, 1, 8),
        filter_masses_narrow=Sizes(64, 128, 16, 4, 2, 1, 8),
        filter_pairs=PairSizes(16, 32, 64, 8, 8, 2),
    ),
}
# Candidates that `tilewise tune` measures for each field, in addition to the sizes in the table.
MORE_FORWARD = (
    Sizes(128, 128, 64, 4, 3, 2, 16, strip=4),
    Sizes(128, 128, 64, 4, 3, 2, 16),
    Sizes(128, 128, 64, 4, 3, 2, 8),
    Sizes(128, 128, 64, 4, 2, 3, 16),
    Sizes(128, 128, 64, 4, 4, 1, 16),
    Sizes(128, 256, 64, 8, 3, 1, 16),
    Sizes(128, 256, 64, 8, 3, 1, 8),
    Sizes(128, 256, 64, 8, 4, 1, 8),
    Sizes(256, 128, 64, 8, 3, 1, 8),
    Sizes(256, 128, 64, 8, 4, 1, 8),
)
MORE_GRADIENT = (
    Sizes(128, 256, 64, 8, 3, 1, 16),
    Sizes(128, 256, 64, 8, 3, 1, 8),
    Sizes(256, 128, 64, 8, 3, 1, 16),
    Sizes(128, 256, 64, 8, 4, 1, 16, pieces=2),
    Sizes(128, 128, 32, 4, 4, 2, 16),
    Sizes(128, 128, 32, 4, 4, 2, 8),
    Sizes(128, 128, 32, 4, 6, 2, 16, pieces=2),
    Sizes(128, 128, 64, 4, 2, 2, 16),
    Sizes(128, 128, 64, 4, 3, 2, 16, pieces=2),
    Sizes(128, 128, 64, 4, 3, 2, 8, pieces=2),
    Sizes(128, 256, 32, 8, 5, 1, 16),
    Sizes(128, 256, 32, 8, 6, 1, 8),
)
MORE: dict[str, tuple[Sizes | PairSizes, ...]] = {
    "forward": MORE_FORWARD,
    "forward_wide": MORE_FORWARD,
    "gradient": MORE_GRADIENT,
    "gradient_wide": MORE_GRADIENT,
    "filter_masses": (
        Sizes(128, 256, 64, 8, 2, 1, 16),
        Sizes(64, 256, 64, 8, 3, 1, 16),
        Sizes(64, 256, 32, 8, 3, 1, 8),
    ),
    "filter_pairs": (PairSizes(64, 64, 64, 8, 8, 2), PairSizes(32, 32, 64, 4, 8, 2), PairSizes(16, 16, 64, 4, 8, 2)),
}
INTERPRETED = Sizes(64, 64, 64, 1, 1, 1, 2)  # in the interpreter each block operation is slow: few, large blocks
INTERPRETED_PAIRS = PairSizes(64, 64, 64, 1, 1, 1)
_rows: dict[tuple[torch.device, Kind], KernelSizes] = {}  # those in use


def interpreted() -> bool:
    """Whether Triton runs its interpreter, on the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def architecture(capability: tuple[int, int]) -> str:
    """The architecture in the table for a compute capability.

    >>> [architecture(capability) for capability in ((8, 0), (8, 9), (10, 3), (13, 0))]
    ['sm_80', 'other', 'sm_100', 'other']
    """
    name = f"sm_{capability[0]}0"
    return name if (name, 2) in TABLE and capability not in SMALL_SHARED else "other"


def candidates(field: str, item: int) -> list[Sizes | PairSizes]:
    """The sizes that may be tuned for a field of the table: those of all cards, and `MORE`."""
    found = [getattr(row, field) for (_, size), row in TABLE.items() if size == item]
    return [sizes for sizes in dict.fromkeys([*found, *MORE[field]]) if sizes is not None]


def parse_tuned(values: Any) -> dict[int, dict[str, Any]]:
    """Fields for each number of bytes of a type, from the contents of a file. Only candidates are accepted.

    >>> parse_tuned({"4": {"gradient": [64, 64, 32, 4, 3, 2, 8, 1, 1]}})[4]["gradient"].rows
    64
    """
    found: dict[int, dict[str, Any]] = {}
    for item, fields in values.items():
        size = {"2": 2, "4": 4}[item]
        found[size] = row = {}
        for field, numbers in fields.items():
            known = {dataclasses.astuple(sizes): sizes for sizes in candidates(field, size)}
            row[field] = known[tuple(numbers)]
    return found


@functools.cache
def tuned(card: str) -> dict[int, dict[str, Any]]:
    """The fields that `tilewise tune` measured on this card; empty if there is no file, or no valid one."""
    found, problem = tuned_file.read(card, parse_tuned)
    if problem is not None:
        warnings.warn(f"tilewise: {problem}", RuntimeWarning, stacklevel=2)
    return found or {}


def kind_of(dtype: torch.dtype, exact: str = "") -> Kind:
    """The row of a type; ``exact``: EXACT of the kernels."""
    return TF32 if exact == TF32 and dtype == torch.float32 else dtype.itemsize


def row_of(device: torch.device, kind: Kind) -> KernelSizes:
    """The row in use for a device. Where TF32 has none, it is that of float32."""
    row = _rows.get((device, kind))
    if row is not None:
        return row
    if device.type != "cuda":  # the interpreter
        one, pairs = INTERPRETED, INTERPRETED_PAIRS
        return KernelSizes(forward=one, gradient=one, filter_masses=one, filter_masses_narrow=one, filter_pairs=pairs)
    name = architecture(torch.cuda.get_device_capability(device))
    if kind == TF32 and (name, TF32) not in TABLE:
        return row_of(device, torch.float32.itemsize)
    tried = tuned(torch.cuda.get_device_name(device)).get(kind, {}) if isinstance(kind, int) else {}
    row = dataclasses.replace(TABLE[name, kind], **tried)
    if device.index is not None:  # without an index it is the current device, which may change
        _rows[device, kind] = row
    return row


@contextlib.contextmanager
def trying(device: torch.device, kind: Kind, row: KernelSizes) -> Iterator[None]:
    """Use another row, to measure it."""
    before = _rows.get((device, kind))
    _rows[device, kind] = row
    try:
        yield
    finally:
        del _rows[device, kind]
        if before is not None:
            _rows[device, kind] = before


def forget_tuned() -> None:
    """Read the files again at the next call: after tuning, and in tests."""
    _rows.clear()
    tuned.cache_clear()


def forward_sizes(device: torch.device, dtype: torch.dtype, width: int, *, columns: bool, exact: str = "") -> Sizes:
    """Sizes of the kernels in forward; ``columns``: whether statistics of columns are computed."""
    row = row_of(device, kind_of(dtype, exact))
    return row.forward_wide if row.forward_wide is not None and width >= WIDE and not columns else row.forward


def gradient_sizes(device: torch.device, dtype: torch.dtype, width: int, exact: str = "") -> Sizes:
    """Sizes of the kernels that compute G or exponentials."""
    row = row_of(device, kind_of(dtype, exact))
    return row.gradient_wide if row.gradient_wide is not None and width >= WIDE else row.gradient


def guided_sizes(device: torch.device, dtype: torch.dtype, exact: str = "") -> Sizes:
    """Sizes of the kernels with a second score matrix."""
    row = row_of(device, kind_of(dtype, exact))
    return row.gradient if row.guided is None else row.guided


def mass_sizes(device: torch.device, dtype: torch.dtype, cols: int, exact: str = "") -> Sizes:
    """Sizes of `mass_kernel` of the filter, whose tiles have ``cols`` columns."""
    row = row_of(device, kind_of(dtype, exact))
    return dataclasses.replace(row.filter_masses if cols == 256 else row.filter_masses_narrow, cols=cols)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """The number of multiprocessors of the card; 1 in the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def whole_rounds(cols: int, step: int, rows: int, device: torch.device, sizes: Sizes) -> int:
    """``cols`` plus a multiple of ``step``, up to an eighth more, so that the last round leaves the fewest programs idle.

    The programs share the tiles of a macro-tile, one each in a round. On an H200, with 132 programs, 8,192 x 8,448 scores
    are 16 full rounds of tiles of 128 x 256; those of 8,192 columns leave half of the last round empty.
    """
    programs, row_tiles = multiprocessors(device) * sizes.programs, -(-rows // sizes.rows)

    def used(cols: int) -> float:
        tiles = row_tiles * -(-cols // sizes.cols)
        return tiles / (programs * -(-tiles // programs))

    return max(range(cols, cols + cols // 8 + 1, step), key=used)
