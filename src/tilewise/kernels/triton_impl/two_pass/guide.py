"""Forward of a pair with a guide (a second score matrix).

Ranges of columns are computed one after another, and their statistics are merged. Scores are *stored* until forward
ends, for a Jensen-Shannon divergence, or *saved* for backward, for a Kullback-Leibler divergence (see `saved`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import torch
import triton
from torch import Tensor

from tilewise.kernels.merging import folded_entropy, folded_kl
from tilewise.kernels.spec import PairSpec, Stats, wanted_names
from tilewise.kernels.triton_impl import bits as bit
from tilewise.kernels.triton_impl.buffers import Buffer, Descriptor
from tilewise.kernels.triton_impl.scores import Scores, bit_sum, cdiv, pieces, row_width
from tilewise.kernels.triton_impl.sizes import Sizes
from tilewise.kernels.triton_impl.two_pass import guide_kernels as kernels
from tilewise.kernels.triton_impl.two_pass.macro_tile import macro_tile
from tilewise.kernels.triton_impl.two_pass.positive_kernels import positive_kernel
from tilewise.kernels.triton_impl.two_pass.saved import FULL_TILES, SavedColumns, breaks, column_pieces

# What a tile writes, in the order of `guided_forward_kernel`
PARTS: dict[str, tuple[str, ...]] = {
    "mask": (),
    "kl": ("guide_lse", "row_kl"),
    "reverse_kl": ("guide_lse", "row_reverse_kl"),
    "jsd": ("guide_lse", "row_jsd", "row_mix_kl"),
}
LN2 = math.log(2.0)
FEWEST_STORED = 256  # rows; estimated, see decision 0029
STORED_BLOCK = 2048  # columns that `stored_jsd_kernel` reads at a time


def guided_forward(
    scores: Scores, memory: int, saved: SavedColumns | None = None
) -> tuple[dict[str, Buffer], SavedColumns | None]:
    """The statistics of all columns, with at most ``memory`` bytes for scores that are stored until forward ends.

    The scores of some columns are saved for backward in ``saved``, if given and if the workspace is large enough.
    """
    spec, n = scores.spec, scores.n
    found: dict[str, Any] = {}
    if spec.positive == "one":
        found = {name: scores.empty(name, n) for name in ("row_pos", "num_positives")}
        scores.positives(positive_kernel, slice(0, n), slice(0, scores.m), **found)
    if spec.guide == "jsd" and scores.by_row["row_norm"] is None:
        total = _without_norms(scores, memory)
    else:
        saved = _allocated(scores, saved)
        total = Totals(scores, n, _names(spec, PARTS[spec.guide]))
        _statistics(scores, slice(0, n), PARTS[spec.guide], total, saved)
    found = total.rounded() | found
    return {name: found[name] for name in wanted_names(spec) if name in found}, saved


class Totals:
    """Running statistics in float64: (n,) each."""

    def __init__(self, scores: Scores, n: int, names: list[str]) -> None:
        self.scores = scores
        self.each = {name: scores.empty(f"total of {name}", n, dtype=torch.float64) for name in names}

    def rounded(self) -> dict[str, Buffer]:
        """Float32 statistics. Log-sum-exps of float32 features stay in float64: they may be large, and are subtracted."""
        found, wide = {}, self.scores.dtype == torch.float32
        for name, value in self.each.items():
            if wide and name in ("row_lse", "guide_lse"):
                found[name] = value
            else:
                found[name] = self.scores.empty(name, len(value))
                self.scores.program.call(copy, found[name], value)
        return found


def copy(out: Tensor, values: Tensor) -> None:
    """out = values."""
    out.copy_(values)


def _without_norms(scores: Scores, memory: int) -> Totals:
    """The statistics with a Jensen-Shannon divergence, whose log-sum-exps over all columns are not known yet.

    For a block of rows, both scores of all columns are stored in float32; then their log-sum-exps are known, and the
    divergence is computed from what is stored. If the memory holds fewer than FEWEST_STORED rows, all products are
    computed twice instead.
    """
    n, m, sizes = scores.n, scores.m, scores.guided_sizes
    wide = row_width(m, torch.float32)
    step = memory // (8 * wide) // sizes.rows * sizes.rows
    if step < min(n, FEWEST_STORED):
        first = Totals(scores, n, _names(scores.spec, ("guide_lse",)))
        _statistics(scores, slice(0, n), ("guide_lse",), first)
        known = first.rounded()
        scores.by_row |= {"row_norm": known["row_lse"], "guide_norm": known["guide_lse"]}
        total = Totals(scores, n, _names(scores.spec, PARTS["jsd"]))
        _statistics(scores, slice(0, n), PARTS["jsd"], total)
        return total
    x, y = (scores.empty(name, min(step, n), wide, dtype=torch.float32)[:, :m] for name in ("x", "y"))
    total = Totals(scores, n, _names(scores.spec, PARTS["jsd"]))
    for i in pieces(n, step):
        rows = i.stop - i.start
        part = Totals(scores, rows, _names(scores.spec, ("guide_lse",)))
        _statistics(scores, i, ("guide_lse",), part, stored=(x[:rows], y[:rows]))
        norms, out = part.rounded(), {name: scores.empty(name, rows) for name in ("row_jsd", "row_mix_kl")}
        values: dict[str, Any] = {"x": x, "y": y, "row_norm": norms["row_lse"], "guide_norm": norms["guide_lse"]}
        values |= {"row_shift": scores.rows(i, sizes)["row_shift"]} | out
        values |= {"stride": wide, "m": m, "BLOCK": min(STORED_BLOCK, triton.next_power_of_2(m))}
        scores.launch(kernels.stored_jsd_kernel, rows, scores.fixed, warps=8, **values)
        for name, value in total.each.items():
            scores.program.call(copy, value[i], out[name] if name in out else part.each[name])
    return total


def stored_block(sizes: Sizes) -> tuple[int, int]:
    """The block that `store_tile` writes at a time: a whole tile of float32 would take too much shared memory."""
    return sizes.rows, sizes.cols // min(4, sizes.cols // 16)


def _allocated(scores: Scores, saved: SavedColumns | None) -> SavedColumns | None:
    """Allocate the buffer of ``saved``. None if nothing can be saved.

    In backward the buffer, G of one macro-tile and the float32 row gradients exist together, so the buffer gets what the
    other two leave of the workspace.
    """
    if saved is None:
        return None
    n, d, item, spec = scores.n, scores.d, scores.dtype.itemsize, scores.spec
    rows, cols = macro_tile(scores.shape, spec, scores.guided_sizes, scores.options)
    widest = min(cols, _widest(scores, n, _planes(_names(spec, PARTS[spec.guide]))))
    saved.cols = min(saved.cols, widest // FULL_TILES * FULL_TILES)
    if rows < n or saved.cols == 0:
        return None
    left = max(0, scores.options.workspace_bytes - n * (4 * d + item * cols))
    saved.allocate(left // item // saved.column_numbers // FULL_TILES * FULL_TILES, scores.empty)
    return saved if saved.end else None


def _names(spec: PairSpec, divergences: tuple[str, ...]) -> list[str]:
    """The statistics that a tile writes, in the order of `guided_forward_kernel`."""
    return ["row_lse", *divergences, *(name for name in ("row_entropy", "row_hot_lse") if name in wanted_names(spec))]


def _planes(names: list[str]) -> int:
    """How many numbers a tile writes for each of its rows; a log-sum-exp is two."""
    return len(names) + sum(name.endswith("lse") for name in names)


def _widest(scores: Scores, n: int, planes: int, saved: SavedColumns | None = None) -> int:
    """Most columns of one launch: its parts may take a quarter of the workspace, less the buffer of saved scores.

    Merging the parts takes about as much again.
    """
    left = scores.options.workspace_bytes
    if saved is not None and saved.buffer is not None:
        left -= saved.buffer.nbytes
    return max(left // (16 * planes * n), 1) * scores.guided_sizes.cols


def _statistics(
    scores: Scores,
    i: slice,
    divergences: tuple[str, ...],
    total: Totals,
    saved: SavedColumns | None = None,
    stored: tuple[Buffer, Buffer] | None = None,
) -> None:
    """The statistics of the rows i. Scores are written to ``stored``, or those of some columns to ``saved``, if given.

    Each number that a tile writes is a plane of ``part``; a log-sum-exp is two.
    """
    sizes, n, m, names = scores.guided_sizes, i.stop - i.start, scores.m, _names(scores.spec, divergences)
    stats = bit_sum((bit.ENTROPY, scores.spec.row_entropy), (bit.HOT, scores.spec.hot))
    planes = _planes(names)

    def columns(j: slice) -> None:
        part = scores.empty("parts", planes, cdiv(j.stop - j.start, sizes.cols), n)
        here = None if saved is None else saved.saved_scores(j)
        if stored is not None:
            here = stored[0][:, j], stored[1][:, j]
        places = {}
        if here is not None:
            block = stored_block(sizes)
            places = {"x_desc": Descriptor(here[0], block), "y_desc": Descriptor(here[1], block)}
        scores.tiles(kernels.guided_forward_kernel, i, j, sizes, row_part=part, STATS=stats, **places)
        fold = functools.partial(fold_parts, tuple(names), j.start == 0)
        scores.program.call(fold, part, *(total.each[name] for name in names))

    scores.program.over(column_pieces(m, _widest(scores, n, planes, saved), saved), columns, breaks(saved))


def fold_parts(names: tuple[str, ...], first: bool, part: Tensor, *totals: Tensor) -> None:
    """Add the parts of some columns to the running statistics; ``first``: there are none yet."""
    found = _folded(list(names), iter(part))
    if not first:
        found = Stats(**dict(zip(names, totals, strict=True))).merge(found)
    for name, out in zip(names, totals, strict=True):
        out.copy_(getattr(found, name))


def _folded(names: list[str], planes: Iterator[Tensor]) -> Stats:
    """The statistics of all tiles of columns; each plane of parts is (tiles, n)."""
    parts, tops = {}, {}
    for name in names:
        parts[name] = next(planes)
        if name.endswith("lse"):
            tops[name] = parts[name].amax(0)
            parts[name] = (parts[name] - tops[name]) * LN2 + next(planes)
    found = {name: part.sum(0) for name, part in parts.items() if name in ("row_jsd", "row_mix_kl")}
    for name, p, q in (("row_kl", "row_lse", "guide_lse"), ("row_reverse_kl", "guide_lse", "row_lse")):
        if name in parts:
            found[p], found[q], found[name] = folded_kl(parts[p], parts[q], parts[name])
    if "row_entropy" in parts:
        found["row_lse"], found["row_entropy"] = folded_entropy(parts["row_lse"], parts["row_entropy"])
    found |= {name: torch.logsumexp(parts[name], 0) for name in tops if name not in found}
    high = {name: top.double() * LN2 for name, top in tops.items()}
    return Stats(**{name: value.double() + high.get(name, 0.0) for name, value in found.items()})
