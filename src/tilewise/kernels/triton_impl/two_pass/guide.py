"""Forward of a pair with a guide (a second score matrix).

Ranges of columns are computed one after another, and their statistics are merged. Scores are *stored* until forward
ends, for a Jensen-Shannon divergence, or *saved* for backward, for a Kullback-Leibler divergence (see `saved`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tilewise.kernels.merging import folded_entropy, folded_kl
from tilewise.kernels.spec import PairSpec, Stats, wanted_names
from tilewise.kernels.triton_impl import bits as bit
from tilewise.kernels.triton_impl.launch.call import Call, bit_sum, cdiv, pieces, row_width, vector
from tilewise.kernels.triton_impl.sizes import Sizes
from tilewise.kernels.triton_impl.two_pass import guide_kernels as kernels
from tilewise.kernels.triton_impl.two_pass.macro_tile import macro_tile
from tilewise.kernels.triton_impl.two_pass.positive_kernels import positive_kernel
from tilewise.kernels.triton_impl.two_pass.saved import FULL_TILES, SavedColumns, column_pieces

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


def guided_forward(call: Call, memory: int, saved: SavedColumns | None = None) -> tuple[Stats, SavedColumns | None]:
    """The statistics of all columns, with at most ``memory`` bytes for scores that are stored until forward ends.

    The scores of some columns are saved for backward in ``saved``, if given and if the workspace is large enough.
    """
    spec, (n, m) = call.spec, (call.a.shape[0], call.b.shape[0])
    found: dict[str, Any] = {}
    if spec.positive == "one":
        found = {"row_pos": call.empty(n), "num_positives": call.empty(n)}
        call.run_positive(positive_kernel, slice(0, n), slice(0, m), **found)
    if spec.guide == "jsd" and call.by_row["row_norm"] is None:
        total = _without_norms(call, memory)
    else:
        saved = _allocated(call, saved)
        total = _statistics(call, slice(0, n), PARTS[spec.guide], saved)
    found = vars(_rounded(call, total)) | found
    return Stats(**{name: found[name] for name in wanted_names(spec)}), saved


def _rounded(call: Call, stats: Stats) -> Stats:
    """Float32 statistics. Log-sum-exps of float32 features stay in float64: they may be large, and are subtracted."""
    rounded = stats.rounded(call.pair.stat_dtype)
    if call.pair.a.dtype != torch.float32:
        return rounded
    return dataclasses.replace(rounded, row_lse=stats.row_lse, guide_lse=stats.guide_lse)


def _without_norms(call: Call, memory: int) -> Stats:
    """The statistics with a Jensen-Shannon divergence, whose log-sum-exps over all columns are not known yet.

    For a block of rows, both scores of all columns are stored in float32; then their log-sum-exps are known, and the
    divergence is computed from what is stored. If the memory holds fewer than FEWEST_STORED rows, all products are
    computed twice instead.
    """
    (n, m), sizes = (call.a.shape[0], call.b.shape[0]), call.guided_sizes
    wide = row_width(m, torch.float32)
    step = memory // (8 * wide) // sizes.rows * sizes.rows
    if step < min(n, FEWEST_STORED):
        norms = _rounded(call, _statistics(call, slice(0, n), ("guide_lse",)))
        call.by_row |= {"row_norm": vector(norms.row_lse), "guide_norm": vector(norms.guide_lse)}
        call.row_cuts.clear()
        call.prepared.clear()  # they were prepared without norms
        return _statistics(call, slice(0, n), PARTS["jsd"])
    x, y = (call.empty(min(step, n), wide, dtype=torch.float32)[:, :m] for _ in range(2))
    blocks = []
    for i in pieces(n, step):
        rows = i.stop - i.start
        found = _statistics(call, i, ("guide_lse",), stored=(x[:rows], y[:rows]))
        norms, out = _rounded(call, found), [call.empty(rows, dtype=torch.float32) for _ in range(2)]
        values: dict[str, Any] = {
            "x": x,
            "y": y,
            "row_norm": vector(norms.row_lse),
            "guide_norm": vector(norms.guide_lse),
        }
        values |= {"row_jsd": out[0], "row_mix_kl": out[1], "row_shift": call.rows(i, sizes)["row_shift"]}
        values |= {"stride": wide, "m": m, "BLOCK": min(STORED_BLOCK, triton.next_power_of_2(m))}
        call.prepare(kernels.stored_jsd_kernel, warps=8).offer(call.fixed).put(values).launch(rows)
        blocks.append(dataclasses.replace(found, row_jsd=out[0].double(), row_mix_kl=out[1].double()))
    names = [name for name, value in vars(blocks[0]).items() if value is not None]
    return Stats(**{name: torch.cat([getattr(block, name) for block in blocks]) for name in names})


def stored_block(sizes: Sizes) -> list[int]:
    """The block that `store_tile` writes at a time: a whole tile of float32 would take too much shared memory."""
    return [sizes.rows, sizes.cols // min(4, sizes.cols // 16)]


def _descriptor(scores: Tensor, sizes: Sizes) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(scores, stored_block(sizes))


def _allocated(call: Call, saved: SavedColumns | None) -> SavedColumns | None:
    """Allocate the buffer of ``saved``. None if nothing can be saved.

    In backward the buffer, G of one macro-tile and the float32 row gradients exist together, so the buffer gets what the
    other two leave of the workspace.
    """
    if saved is None:
        return None
    (n, d), item, spec = call.a.shape, call.a.element_size(), call.spec
    rows, cols = macro_tile(call.pair.shape, spec, call.guided_sizes, call.options)
    widest = min(cols, _widest(call, n, _planes(_names(spec, PARTS[spec.guide]))))
    saved.cols = min(saved.cols, widest // FULL_TILES * FULL_TILES)
    if rows < n or saved.cols == 0:
        return None
    left = max(0, call.options.workspace_bytes - n * (4 * d + item * cols))
    saved.allocate(left // item // saved.column_numbers // FULL_TILES * FULL_TILES, call.empty)
    return saved if saved.end else None


def _names(spec: PairSpec, divergences: tuple[str, ...]) -> list[str]:
    """The statistics that a tile writes, in the order of `guided_forward_kernel`."""
    return ["row_lse", *divergences, *(name for name in ("row_entropy", "row_hot_lse") if name in wanted_names(spec))]


def _planes(names: list[str]) -> int:
    """How many numbers a tile writes for each of its rows; a log-sum-exp is two."""
    return len(names) + sum(name.endswith("lse") for name in names)


def _widest(call: Call, n: int, planes: int, saved: SavedColumns | None = None) -> int:
    """Most columns of one launch: its parts may take a quarter of the workspace, less the buffer of saved scores.

    Merging the parts takes about as much again.
    """
    left = call.options.workspace_bytes
    if saved is not None and saved.buffer is not None:
        left -= saved.buffer.nbytes
    return max(left // (16 * planes * n), 1) * call.guided_sizes.cols


def _statistics(
    call: Call,
    i: slice,
    divergences: tuple[str, ...],
    saved: SavedColumns | None = None,
    stored: tuple[Tensor, Tensor] | None = None,
) -> Stats:
    """The statistics of the rows i. Scores are written to ``stored``, or those of some columns to ``saved``, if given.

    Each number that a tile writes is a plane of ``part``; a log-sum-exp is two.
    """
    sizes, n, m, names = call.guided_sizes, i.stop - i.start, call.b.shape[0], _names(call.spec, divergences)
    stats = bit_sum((bit.ENTROPY, call.spec.row_entropy), (bit.HOT, call.spec.hot))
    planes, total = _planes(names), Stats()
    for j in column_pieces(m, _widest(call, n, planes, saved), saved):
        part = call.empty(planes, cdiv(j.stop - j.start, sizes.cols), n)
        here = None if saved is None else saved.saved_scores(j)
        if stored is not None:
            here = stored[0][:, j], stored[1][:, j]
        places = {}
        if here is not None:
            places = {"x_desc": _descriptor(here[0], sizes), "y_desc": _descriptor(here[1], sizes)}
        call.run(kernels.guided_forward_kernel, i, j, sizes, row_part=part, STATS=stats, **places)
        total = total.merge(_folded(names, iter(part)))
    return total


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
