"""Statistics of a small batch as two programs: forward and backward, which computes the scores again.

forward     x = a @ b'                             cuBLAS, in float32
            stats_kernel                           the statistics of rows
backward    x = a @ b'
            stats_gradient_kernel                  G
            dA = G @ b, dB = G' @ a                cuBLAS
"""

from __future__ import annotations

from typing import Any

import torch

from tilewise.kernels.backend import SmallKey
from tilewise.kernels.spec import (
    Grads,
    GradStats,
    Needs,
    Pair,
    PairShape,
    PairSpec,
    Stats,
    largest_gradient,
    wanted_names,
)
from tilewise.kernels.triton_impl import bits as bit
from tilewise.kernels.triton_impl.program import Program
from tilewise.kernels.triton_impl.scores import bit_sum, cdiv, vector
from tilewise.kernels.triton_impl.small import kernels, row_tiles, stats_kernels
from tilewise.kernels.triton_impl.small.programs import (
    BLOCK,
    BOTH_COLS,
    FACTS,
    given_scores,
    given_values,
    is_whole,
    run_small,
    tile_of,
)

OUTPUTS = {  # statistics: the parameters of `stats_kernel`
    "row_lse": "lse_out",
    "row_pos": "pos_out",
    "num_positives": "count_out",
    "row_entropy": "entropy_out",
    "row_softplus": "softplus_out",
    "row_top": "top_out",
    "row_top_col": "top_col_out",
}
GRADIENTS = {"row_lse": "lse", "row_pos": "pos", "row_entropy": "entropy", "row_softplus": "softplus"}


def why_not_stats(shape: PairShape, spec: PairSpec) -> str | None:
    """Why these statistics are not computed by a program, or None."""
    if not set(wanted_names(spec)) <= OUTPUTS.keys() or spec.guide != "none":
        return "it has other statistics than those of rows, or a guide"
    if spec.symmetric or spec.positive == "many":
        return "the scores are symmetric, or a row may have several positives"
    if shape.has_row_scale:
        return "each row has a scale of its own"
    return None


def stats_program(key: SmallKey, *, own_shift: bool) -> Program:
    """Outputs: the statistics in the order of `wanted_names`, and with ``own_shift`` the shifts, if there are any."""
    p, n, m, spec = Program(), key.shape.rows, key.shape.cols, key.spec
    a, b, scores = given_scores(p, key, FACTS[:4])
    scores["row_shift"] = p.given("row_shift")
    x = p.scratch("x", (n, m), torch.float32)
    p.product(x, a, b.t)
    for name in wanted_names(spec):
        kind = torch.int64 if name == "row_top_col" else torch.float32
        scores[OUTPUTS[name]] = p.output(name, (n,), kind)
    if own_shift and spec.has_positive_scores:
        scores["shift_out"] = p.output("shift", (n,), torch.float32)
    more = bit_sum((bit.ENTROPY, spec.row_entropy), (bit.TOP, spec.row_top))
    tile: dict[str, Any] = dict(zip("RC", tile_of(n, m), strict=True))
    p.launch(stats_kernels.stats_kernel, cdiv(n, tile["R"]), x=x, LOSS=_loss(spec), MORE=more, **tile, **scores)
    return p.done()


def stats_gradient_program(key: SmallKey, coming: tuple[str, ...], needs: Needs) -> Program:
    """Outputs: the gradients that are needed; those of features in `saved_type`. ``coming``: of which statistics."""
    p, shape, spec = Program(), key.shape, key.spec
    n, m, d, wide = shape.rows, shape.cols, shape.width, torch.float32
    a, b, scores = given_scores(p, key, FACTS[:4])
    grads: dict[str, Any] = {GRADIENTS[name]: p.given(f"g_{name}") for name in coming}
    size, factor = p.given("size"), p.given("factor")
    x, g = p.scratch("x", (n, m), wide), p.scratch("G", (n, m), shape.dtype)
    p.product(x, a, b.t)
    dot = p.scratch("dot", (n,), wide) if needs.scale else None
    bias_dot = p.scratch("bias_dot", (n,), wide) if needs.bias and key.one_bias else None
    whole, tile = is_whole(shape.dtype, needs), dict(zip("RC", tile_of(n, m), strict=True))
    how: dict[str, Any] = {
        "LOSS": _loss(spec),
        "WHOLE": whole,
        "dot": dot,
        "bias_dot": bias_dot,
        "size": size,
        "g": g,
        **tile,
    }
    p.launch(stats_kernels.stats_gradient_kernel, cdiv(n, tile["R"]), x=x, **how, **grads, **scores)
    scaled: dict[str, Any] = {}
    for name, need, rows, left, right in (("a", needs.a, n, g, b), ("b", needs.b, m, g.t, a)):
        if need:
            out = p.output(f"d{name.upper()}", (rows, d), shape.dtype)
            made = out if whole else p.scratch(f"{name}_wide", (rows, d), wide)
            p.product(made, left, right)
            scaled |= {name: made, f"{name}_out": out, f"{name}_size": rows * d}
    if scaled and not whole:
        blocks = cdiv(max(n, m) * d, BLOCK)
        p.launch(kernels.gradient_kernel, blocks, grad_output=factor, IN_PLACE=False, BLOCK=BLOCK, **scaled)
    if dot is not None:
        p.total(p.output("dscale", (), wide), dot)
    if bias_dot is not None:
        p.total(p.output("dbias", (), wide), bias_dot)
    elif needs.bias:
        sums: dict[str, Any] = {"out": p.output("dbias", (m,), wide), "g": g, "weight": size, "n": n, "m": m}
        p.launch(kernels.columns_kernel, cdiv(m, BOTH_COLS), R=32, C=BOTH_COLS, **sums)
    return p.done()


def programs_of(key: SmallKey) -> list[Program]:
    """Those of forward and backward, with a gradient of each statistic that can have one."""
    coming = tuple(name for name in GRADIENTS if name in wanted_names(key.spec))
    backward = [stats_gradient_program(key, coming, key.needs)] if any(key.needs) else []
    return [stats_program(key, own_shift=True), *backward]


def _loss(spec: PairSpec) -> int:
    found: int = (row_tiles.SIGMOID if spec.softplus else row_tiles.SOFTMAX).value
    return found


class TritonStatsJob:
    """See `SmallStatsJob`."""

    def __init__(self, key: SmallKey) -> None:
        self.key, self.names = key, wanted_names(key.spec)
        self.programs = {own: stats_program(key, own_shift=own) for own in (False, True)}
        self.gradients: dict[Any, Program] = {}

    def forward(self, pair: Pair, *, own_shift: bool) -> Stats:
        """The statistics."""
        given = *self._given(pair), None if pair.row_shift is None else vector(pair.row_shift)
        found = run_small(self.programs[own_shift], self.key, given)
        stats = Stats(**dict(zip(self.names, found, strict=False)))
        stats.row_shift = found[len(self.names)] if len(found) > len(self.names) else None
        return stats

    def backward(self, pair: Pair, grad: GradStats, needs: Needs) -> Grads:
        """The gradients."""
        coming = {name: vector(value.float()) for name in GRADIENTS if (value := getattr(grad, name)) is not None}
        program = self.gradients.get((needs, *coming))
        if program is None:
            program = self.gradients[needs, *coming] = stats_gradient_program(self.key, tuple(coming), needs)
        size = factor = None
        if not is_whole(self.key.shape.dtype, needs):
            size = largest_gradient(grad).to(pair.a.device, torch.float32)
            factor = (size * pair.scale).float()
        found = run_small(program, self.key, (*self._given(pair), *coming.values(), size, factor))
        names = [name for name, need in zip(("a", "b", "scale", "bias"), needs, strict=True) if need]
        values = dict(zip(names, found, strict=True))
        if self.key.one_bias and "bias" in values:
            values["bias"] = (values["bias"] / self.key.shape.cols).expand(self.key.shape.cols)
        return Grads(**values)

    def _given(self, pair: Pair) -> list[Any]:
        facts = pair.row_key, pair.col_key, pair.row_skip, pair.col_skip
        return given_values(self.key, pair.a, pair.b, pair.scale, pair.bias, facts)
