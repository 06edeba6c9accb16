"""How many MiB a call may take if ``workspace_mib`` is no number: from its sizes, or, for "auto", from free memory.

The default is 256 MiB, and more for a softmax over classes on a GPU, where exponentials that forward keeps save time.
It depends on sizes, types and settings only, so results have the same bits whatever else is on the card.
"""

from __future__ import annotations

import dataclasses
import functools
import os

import torch

from tilewise.kernels import filter_plan as plans
from tilewise.kernels.spec import Needs, PairShape, PairSpec, stat_dtype
from tilewise.ops import limits
from tilewise.options import DEFAULT_MIB, TileOptions
from tilewise.ring.schedule import team_size

MIB = 2**20
ALL_ROWS_MIB, MOST_MIB = 576, 4096
FEWEST_ROWS, MOST_ROWS, WHOLE_ROWS = 2048, 8192, 256  # rows whose exponentials are kept, and what divides their number
ONE_MACRO = 16384  # with more rows and classes, two passes need a float32 sum of the classifier's gradient too
NARROWEST = 1024  # features; with fewer, forward of two passes saves nothing
SHARE = 4  # a quarter of what is free
FEWEST_COLUMNS = 128  # of a chunk: a whole tile
VECTORS = 48  # bytes of a column's ids, shifts, statistics and bias, at most
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


def sized(options: TileOptions, shape: PairShape, spec: PairSpec, needs: Needs) -> TileOptions:
    """The options with the number for these sizes, if the user gave none and it is not the plain default."""
    if isinstance(options.workspace_mib, (int, torch.SymInt)) or not _gains(shape, spec, options, needs):
        return options
    mib = default_mib(shape)
    with_mib = _with_mib if isinstance(mib, int) else _with_mib.__wrapped__  # a compiler's symbol is no key of a cache
    return with_mib(options, mib)


def column_chunk(options: TileOptions, column: int, cols: int) -> tuple[int | None, TileOptions]:
    """Over a ring: how many of ``cols`` columns have their gradients, of ``column`` bytes each, formed at a time.

    A quarter of the workspace holds these gradients. Returned with the options for the rest of the workspace; None and
    the options unchanged if the quarter holds all columns.

    >>> column_chunk(TileOptions(workspace_mib=8), 1024, 5000)[0]
    2048
    """
    chunk = max(options.workspace_bytes // (4 * column), FEWEST_COLUMNS) // FEWEST_COLUMNS * FEWEST_COLUMNS
    if chunk >= cols:
        return None, options
    return chunk, _with_mib(options, max((options.workspace_bytes - chunk * column) // MIB, 1))


def ring_team(options: TileOptions, shape: PairShape, cols: int, world: int) -> tuple[int, TileOptions]:
    """Over a ring: how many ranks gather their blocks of up to ``cols`` columns, so that all of them take one launch.

    A quarter of the workspace holds three blocks of them, with their float32 gradients. Returned with the options for
    the rest of the workspace; 1 and the options unchanged if two blocks are too large.
    """
    item, stat = shape.dtype.itemsize, stat_dtype(shape.dtype).itemsize
    column = 3 * ((shape.width + shape.guide_width) * item + shape.width * stat + VECTORS)
    room = min(options.workspace_bytes // 4 // column, limits.current().ring_columns)
    team = team_size(world, room // max(cols, 1))
    if team == 1:
        return 1, options
    return team, _with_mib(options, max((options.workspace_bytes - team * cols * column) // MIB, 1))


def limit_and_reason(options: TileOptions, shape: PairShape, spec: PairSpec, needs: Needs) -> tuple[int, str]:
    """The MiB that a call may take, and why, for `explain`."""
    if isinstance(options.workspace_mib, int):
        return options.workspace_mib, "workspace_mib"
    if not _gains(shape, spec, options, needs):
        return DEFAULT_MIB, "the default"
    mib = default_mib(shape)
    rows = min(mib * MIB // row_bytes(shape), shape.rows)
    return mib, f"the default for these sizes, about the exponentials of {rows:,} rows"


def row_bytes(shape: PairShape) -> int:
    """The memory of a row's exponentials, its scaled features and its sums of tiles."""
    return shape.dtype.itemsize * (shape.cols + shape.width) + shape.cols // 32


def default_mib(shape: PairShape) -> int:
    """The default for a softmax over classes on a GPU.

    A quarter of the rows, 2,048 to 8,192 of them, with a float32 sum of the classifier's gradient up to 16,384 rows;
    at most two thirds of what a loss takes that stores all logits, and 4 GiB; at least all rows, or 576 MiB of them.

    >>> head = PairShape(65536, 128256, 2048, torch.bfloat16, torch.device("cuda"))
    >>> default_mib(head), default_mib(head._replace(rows=1024))
    (2068, 259)
    """
    n, classes, width, item, row = shape.rows, shape.cols, shape.width, shape.dtype.itemsize, row_bytes(shape)
    # Rounded up, because a few rows fewer than a power of 2 (as with ``shift=1``) should not add a block.
    rows = min(max(-(-n // (4 * WHOLE_ROWS)) * WHOLE_ROWS, FEWEST_ROWS), MOST_ROWS)
    fast = min(n * row, rows * row + (4 * classes * width if n <= ONE_MACRO else 0))
    two_thirds = (2 * item * n * classes - item * (n + classes) * width) // 3  # gradients not counted
    least = max(min(n * row, ALL_ROWS_MIB * MIB), DEFAULT_MIB * MIB)
    return -(-max(min(fast, two_thirds, MOST_MIB * MIB), least) // MIB)


def _gains(shape: PairShape, spec: PairSpec, options: TileOptions, needs: Needs) -> bool:
    """Whether more than the plain default saves time: exact gradients of a softmax over classes, on a GPU.

    Not beside a filter's plan, nor for a teacher, whose saved scores are four times as large. With ``batch_invariant``
    a row's bits must not depend on the number of rows.
    """
    if shape.device.type != "cuda" or options.batch_invariant or not any(needs):
        return False
    if spec.col_lse or spec.symmetric or spec.guide != "none" or plans.tolerance_of(options, shape.dtype) > 0.0:
        return False
    return spec.row_lse and (shape.has_row_key or shape.width >= NARROWEST)


@functools.lru_cache(maxsize=1024)
def _with_mib(options: TileOptions, mib: int) -> TileOptions:
    return dataclasses.replace(options, workspace_mib=mib)
