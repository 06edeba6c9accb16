"""Forward of a pair with a guide: one range of columns after another, whose parts are merged."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tilewise.kernels.merging import folded_entropy, folded_kl
from tilewise.kernels.spec import Stats, wanted_names
from tilewise.kernels.triton_impl import bits as bit
from tilewise.kernels.triton_impl.launch.call import Call, bit_sum, cdiv, pieces
from tilewise.kernels.triton_impl.two_pass import guide_kernels as kernels
from tilewise.kernels.triton_impl.two_pass.positive_kernels import positive_kernel

# What a tile writes, in the order of `guided_forward_kernel`
DIVERGENCES = {"mask": (), "kl": ("guide_lse", "row_kl"), "reverse_kl": ("guide_lse", "row_reverse_kl")}
PARTS = DIVERGENCES | {"jsd": ("guide_lse", "row_jsd", "row_mix_kl")}


def guided_forward(call: Call) -> Stats:
    """The statistics of all columns. Each number that a tile writes is a plane of ``part``; a log-sum-exp is two."""
    spec, sizes = call.spec, call.guided_sizes
    n, m = call.a.shape[0], call.b.shape[0]
    names = ["row_lse", *PARTS[spec.guide]]
    names += [name for name in ("row_entropy", "row_hot_lse") if name in wanted_names(spec)]
    found: dict[str, Tensor] = {}
    if spec.positive == "one":
        found = {"row_pos": call.empty(n), "num_positives": call.empty(n)}
        call.run_positive(positive_kernel, slice(0, n), slice(0, m), **found)
    stats = bit_sum((bit.ENTROPY, spec.row_entropy), (bit.HOT, spec.hot))
    planes = len(names) + sum(name.endswith("lse") for name in names)
    total = Stats()
    # Parts take at most a quarter of the workspace, and merging them about as much again.
    most = max(call.options.workspace_bytes // (16 * planes * n), 1)  # tiles of columns
    for j in pieces(m, most * sizes.cols):
        part = call.empty(planes, cdiv(j.stop - j.start, sizes.cols), n)
        call.run(kernels.guided_forward_kernel, slice(0, n), j, sizes, row_part=part, STATS=stats)
        total = total.merge(_folded(names, iter(part)))
    values: dict[str, Any] = vars(total.rounded(call.pair.stat_dtype)) | found
    return Stats(**{name: values[name] for name in wanted_names(spec)})


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
