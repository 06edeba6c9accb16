"""Forward of a pair with a guide, a second score matrix: ranges of columns in turn, whose statistics are merged."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tilewise.kernels.merging import folded_entropy, folded_kl
from tilewise.kernels.spec import Stats, wanted_names
from tilewise.kernels.triton_impl import bits as bit
from tilewise.kernels.triton_impl.launch.call import Call, bit_sum, cdiv, pieces, row_width, vector
from tilewise.kernels.triton_impl.sizes import Sizes
from tilewise.kernels.triton_impl.two_pass import guide_kernels as kernels
from tilewise.kernels.triton_impl.two_pass.positive_kernels import positive_kernel

# What a tile writes, in the order of `guided_forward_kernel`
DIVERGENCES = {"mask": (), "kl": ("guide_lse", "row_kl"), "reverse_kl": ("guide_lse", "row_reverse_kl")}
FEWEST_STORED = 256  # rows; estimated, see decision 0029
STORED_BLOCK = 2048  # columns that `stored_jsd_kernel` reads at a time
PARTS = DIVERGENCES | {"jsd": ("guide_lse", "row_jsd", "row_mix_kl")}


def guided_forward(call: Call, memory: int) -> Stats:
    """The statistics of all columns, with at most ``memory`` bytes for scores that are stored."""
    spec, (n, m) = call.spec, (call.a.shape[0], call.b.shape[0])
    found: dict[str, Any] = {}
    if spec.positive == "one":
        found = {"row_pos": call.empty(n), "num_positives": call.empty(n)}
        call.run_positive(positive_kernel, slice(0, n), slice(0, m), **found)
    if spec.guide == "jsd" and call.by_row["row_norm"] is None:
        total = _without_norms(call, memory)
    else:
        total = _statistics(call, slice(0, n), PARTS[spec.guide])
    found = vars(total.rounded(call.pair.stat_dtype)) | found
    return Stats(**{name: found[name] for name in wanted_names(spec)})


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
        norms = _statistics(call, slice(0, n), ("guide_lse",)).rounded(call.pair.stat_dtype)
        call.by_row |= {"row_norm": vector(norms.row_lse), "guide_norm": vector(norms.guide_lse)}
        call.row_cuts.clear()
        call.prepared.clear()  # they were prepared without norms
        return _statistics(call, slice(0, n), PARTS["jsd"])
    x, y = (call.empty(min(step, n), wide, dtype=torch.float32)[:, :m] for _ in range(2))
    blocks = []
    for i in pieces(n, step):
        rows = i.stop - i.start
        found = _statistics(call, i, ("guide_lse",), x_desc=x[:rows], y_desc=y[:rows])
        norms, out = found.rounded(torch.float32), [call.empty(rows, dtype=torch.float32) for _ in range(2)]
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


def _statistics(call: Call, i: slice, divergences: tuple[str, ...], **stored: Tensor) -> Stats:
    """The statistics of the rows i, whose scores are written to ``stored``, if given.

    Each number that a tile writes is a plane of ``part``; a log-sum-exp is two.
    """
    spec, sizes, n, m = call.spec, call.guided_sizes, i.stop - i.start, call.b.shape[0]
    names = ["row_lse", *divergences]
    names += [name for name in ("row_entropy", "row_hot_lse") if name in wanted_names(spec)]
    stats = bit_sum((bit.ENTROPY, spec.row_entropy), (bit.HOT, spec.hot))
    planes = len(names) + sum(name.endswith("lse") for name in names)
    total = Stats()
    # Parts take at most a quarter of the workspace, and merging them about as much again.
    most = max(call.options.workspace_bytes // (16 * planes * n), 1)  # tiles of columns
    for j in pieces(m, most * sizes.cols):
        part = call.empty(planes, cdiv(j.stop - j.start, sizes.cols), n)
        here = {name: TensorDescriptor.from_tensor(value[:, j], stored_block(sizes)) for name, value in stored.items()}
        call.run(kernels.guided_forward_kernel, i, j, sizes, row_part=part, STATS=stats, **here)
        total = total.merge(_folded(names, iter(part)))
    return total


def _folded(names: list[str], planes: Iterator[Tensor]) -> Stats:
    """The statistics of all tiles of columns; each plane of parts is (tiles, n)."""
    parts, tops = {}, {}
    for name in names:
        parts[name] = next(planes)
        if name.endswith("lse"):
            tops[name] = parts[name].amax(0)
            parts[name] = (parts[name] - tops[name]) + next(planes)
    found = {name: part.sum(0) for name, part in parts.items() if name in ("row_jsd", "row_mix_kl")}
    for name, p, q in (("row_kl", "row_lse", "guide_lse"), ("row_reverse_kl", "guide_lse", "row_lse")):
        if name in parts:
            found[p], found[q], found[name] = folded_kl(parts[p], parts[q], parts[name])
    if "row_entropy" in parts:
        found["row_lse"], found["row_entropy"] = folded_entropy(parts["row_lse"], parts["row_entropy"])
    found |= {name: torch.logsumexp(parts[name], 0) for name in tops if name not in found}
    return Stats(**{name: value.double() + tops.get(name, 0.0) for name, value in found.items()})
