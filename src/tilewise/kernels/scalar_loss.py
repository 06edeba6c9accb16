"""Scalar losses of pair scores: the loss from the statistics, its gradient, and the tensors that one-pass saves.

`RowWeights` in `spec` has the equations. Axes: n rows, m columns, d features.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tilewise.kernels.backend import Like
from tilewise.kernels.spec import (
    HALF_TYPES,
    Grads,
    GradStats,
    Needs,
    PairShape,
    PairSpec,
    Stats,
    stat_dtype,
    wanted_names,
)

ONE_SIDED = {"row_lse", "row_pos", "num_positives"}, {"row_softplus"}  # statistics of a softmax and a sigmoid loss
SOFTMAX = {"row_lse", "row_pos", "num_positives"}
SMALL_STATISTICS = SOFTMAX, SOFTMAX | {"col_lse"}, {"row_softplus"}  # of losses that `small` computes
NOT_ONE_SIDED = (
    "here one pass is for one softmax over each row, or a sigmoid loss, with one positive per row; this loss is another"
)


def is_one_sided(spec: PairSpec) -> bool:
    """Whether the loss is a softmax or sigmoid loss with one positive per row, which every `one_pass` supports."""
    if spec.symmetric or spec.mask_self or spec.positive != "one" or (spec.softplus and spec.softcap):
        return False
    return set(wanted_names(spec)) in ONE_SIDED


def why_not_small(shape: PairShape, spec: PairSpec) -> str | None:
    """Why a scalar loss cannot be computed from one block of all scores, or None."""
    if set(wanted_names(spec)) not in SMALL_STATISTICS or spec.guide != "none":
        return "it has other statistics than a softmax or a sigmoid loss, or a guide"
    if spec.softplus and spec.positive != "one":
        return "a sigmoid loss has one positive in each row"
    if shape.has_row_scale:
        return "each row has a scale of its own"
    return None


def fixed_slopes(spec: PairSpec) -> dict[str, float]:
    """The gradient of l_i in `RowWeights` with respect to each statistic; empty where it depends on the statistics."""
    if spec.softplus:
        return {"row_softplus": 1.0}
    return {"row_lse": 0.5, "col_lse": 0.5, "row_pos": -1.0} if spec.col_lse else {}


def loss_of_stats(
    weight: Tensor | float, square: Tensor | None, stats: Stats, row_shift: Tensor | float | None, spec: PairSpec
) -> tuple[Tensor, GradStats]:
    """The loss, float64 and 0-d, and its gradient with respect to the statistics.

    Args:
        weight, square: (n,), see `RowWeights`. With `fixed_slopes`, ``weight`` may be one number for all rows. Then the
            gradient is not returned: it is that number times the slopes.
        stats: the statistics of these rows, relative to ``row_shift``.
    """
    slopes = fixed_slopes(spec)
    if slopes:
        each = stats.row_softplus if spec.softplus else torch.lerp(stats.row_lse, stats.col_lse, 0.5) - stats.row_pos
        if isinstance(weight, float):
            return each.sum(dtype=torch.float64) * weight, GradStats()
        return (weight.double() * each).sum(), GradStats(**{name: slope * weight for name, slope in slopes.items()})
    assert isinstance(weight, Tensor)
    wide = weight.double()
    counts = weight != 0
    if spec.positive == "many":  # a row without positives has the loss 0
        counts = counts & (stats.num_positives > 0)
        weight = torch.where(counts, weight, 0.0)
    lse_grad = weight
    # A target out of range has 0 positives, and 0 / 0 gives NaN. A row of weight 0 is not an error.
    positives = torch.where(counts, stats.num_positives, 1.0)
    each = torch.where(counts, wide * (stats.row_lse - stats.row_pos / positives), 0.0)
    loss, wrong = each.sum(), each.isnan()
    if square is not None:
        lse, squared = stats.row_lse if row_shift is None else stats.row_lse + row_shift, square != 0
        loss = loss + torch.where(squared, square.double() * lse.square(), 0.0).sum()
        lse_grad = lse_grad + torch.where(squared, 2.0 * square * lse, 0.0).to(lse_grad.dtype)
    # A row whose loss is NaN has the gradient NaN, never a plausible one.
    lse_grad = torch.where(wrong, torch.nan, lse_grad)
    return loss, GradStats(row_lse=lse_grad, row_pos=-weight / positives)


def saved_dtype(features: torch.dtype) -> torch.dtype:
    """The type in which one-pass gradients are saved: that of the products.

    They are rounded once, after the multiplication by ``grad_output``, which may contain a loss scale. Without it,
    float16 could not represent small gradients.
    """
    return torch.float32 if features in HALF_TYPES else features


def gradients_like(shape: PairShape, needs: Needs) -> list[Like]:
    """Sizes and types of the tensors of `saved_gradients`."""
    stat, saved = stat_dtype(shape.dtype), saved_dtype(shape.dtype)
    sizes = ((shape.rows, shape.width), saved), ((shape.cols, shape.width), saved), ((), stat), ((shape.cols,), stat)
    return [like if need else ((0,), stat) for need, like in zip(needs, sizes, strict=True)]


def saved_gradients(grads: Grads, rows: int) -> tuple[Tensor | None, ...]:
    """Gradients as the tensors that forward saves, those of the rows padded to ``rows``."""
    return padded(grads.a, rows), grads.b, grads.scale, grads.bias


def padded(a: Tensor | None, rows: int) -> Tensor | None:
    """The gradient of the rows, with zeros for as many others as make it ``rows``."""
    if a is None or a.shape[0] >= rows:
        return a
    return torch.nn.functional.pad(a, (0, 0, 0, rows - a.shape[0]))


def gradients_of(saved: Sequence[Tensor | None], needs: Needs, rows: int) -> Grads:
    """The gradients that `saved_gradients` saved, of the first ``rows`` rows."""
    a, b, scale, bias = saved
    if a is not None and a.shape[0] != rows:
        a = a[:rows]
    return Grads(
        a=a if needs.a else None,
        b=b if needs.b else None,
        scale=scale if needs.scale else None,
        bias=bias if needs.bias else None,
    )
