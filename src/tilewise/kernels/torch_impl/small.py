"""The strategy `small` of the torch backend: the scores of all pairs at once, for a scalar loss of a small batch.

A batch of up to a few thousand rows is limited by the number of steps, not by arithmetic. So there is one block of
scores, and a few operators on the whole of it, which replace the scores by G, the gradient of the loss:

    x = scores                              l = log_softmax(x)                     [positive] is 1 at the positives
    L = -sum_i w_i l_i,pos                  G = w_i (exp(l) - [positive] / num_positives_i)
    with z_i:   L += sum_i z_i lse_i^2      G += 2 z_i lse_i exp(l)
    columns too: l of both directions, each with the weight w_i / 2
    sigmoid:    L = sum_ij w_i softplus(+-x)   G = w_i (sigmoid(x) - [positive])

    dA = scale G B,   dB = scale G' A,   dscale = sum_ij G_ij <a_i, b_j>,   dbias = column sums of G

Axes: n rows of a, m rows of b, d features.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tilewise.kernels import scalar_loss
from tilewise.kernels.backend import Like, SmallKey
from tilewise.kernels.precision import matmul_precision
from tilewise.kernels.spec import (
    HALF_TYPES,
    Grads,
    Needs,
    Pair,
    PairShape,
    PairSpec,
    RowWeights,
    stat_dtype,
)
from tilewise.kernels.tensors import FACTS
from tilewise.kernels.torch_impl.one_pass import multiplied
from tilewise.kernels.torch_impl.small_scores import Positives, score_block
from tilewise.kernels.torch_impl.small_stats import TorchStatsJob, why_not_stats
from tilewise.options import TileOptions

NOTHING = Needs(a=False, b=False)
LIBRARY_BYTES = 4 * 2**20  # buffers of the library that multiplies on a CPU, which it keeps from then on


class TorchSmall:
    """The capability `small` of the torch backend."""

    def why_not(self, shape: PairShape, spec: PairSpec, options: TileOptions, *, scalar: bool = True) -> str | None:
        """See `Small`."""
        return scalar_loss.why_not_small(shape, spec) if scalar else why_not_stats(shape, spec)

    def block_bytes(self, shape: PairShape, spec: PairSpec) -> int:
        """See `block_bytes`."""
        return block_bytes(shape, spec)

    def saved_like(self, shape: PairShape, needs: Needs) -> list[Like]:
        """The gradients."""
        return scalar_loss.gradients_like(shape, needs)

    def job(self, key: SmallKey) -> TorchJob | TorchStatsJob:
        """The work for calls of one kind."""
        return TorchJob(key) if key.scalar else TorchStatsJob(key)

    def describe(self, key: SmallKey) -> tuple[str, int]:
        """No text: the steps are calls of torch."""
        more = LIBRARY_BYTES if key.shape.device.type == "cpu" else 0
        return "", block_bytes(key.shape, key.spec) + more


class TorchJob:
    """See `SmallJob`."""

    def __init__(self, key: SmallKey) -> None:
        self.key, self.stat = key, stat_dtype(key.shape.dtype)

    def forward(
        self, a: Tensor, b: Tensor | None, scale: Any, bias: Tensor | None, facts: Sequence[Any], share: float
    ) -> tuple[Tensor, Sequence[Any]]:
        """The loss, and its gradients."""
        key, (*values, each, square) = self.key, facts
        keys: dict[str, Any] = dict(zip(FACTS, values, strict=True))
        pair = Pair(a=a, b=a if b is None else b, scale=scale, bias=bias, **keys)
        weights = RowWeights(share=share, kept=key.kept, each=each, square=square)
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self.forward(a, b, scale, bias, facts, share)
        with matmul_precision(key.precision):
            loss, grads = loss_and_gradients(pair, weights, key.needs, key.spec)
        return loss, (grads.a, grads.b, grads.scale, grads.bias)

    def backward(self, saved: Sequence[Any], grad_output: Tensor, *, overwrite: bool) -> Sequence[Tensor | None]:
        """The saved gradients multiplied by ``grad_output``."""
        dtype = self.key.shape.dtype
        if overwrite and dtype == self.stat and grad_output.device.type == "cpu" and grad_output.item() == 1.0:
            return saved
        a, b, scale, bias = saved
        return (
            None if a is None else multiplied(a, grad_output, dtype, overwrite),
            None if b is None else multiplied(b, grad_output, dtype, overwrite),
            None if scale is None else scale * grad_output,
            None if bias is None else bias * grad_output,
        )


def block_bytes(shape: PairShape, spec: PairSpec) -> int:
    """Scratch memory: scores, their logarithmic softmax, masks, and G as an operand of a product."""
    item, half = 8 if shape.dtype == torch.float64 else 4, shape.dtype in HALF_TYPES
    on_cuda, many = shape.device.type == "cuda", spec.positive == "many"
    copies = 2 + spec.col_lse + 2 * spec.row_moments + bool(spec.softcap) + spec.symmetric + many
    guide = (item + 2) * (spec.guide == "mask")
    score = copies * item + guide + (2 if half and on_cuda else 0) + 2 * (shape.has_skips or many)
    width = shape.width + shape.guide_width
    features = (shape.rows + shape.cols) * width * 4 if half and not on_cuda else 0  # as float32
    return shape.rows * shape.cols * score + features


def loss_and_gradients(pair: Pair, weights: RowWeights, needs: Needs, spec: PairSpec) -> tuple[Tensor, Grads]:
    """The loss, and its gradients with the features' gradients in `saved_dtype`."""
    block = score_block(pair, spec)
    x_nm, positives, kind = block.x_nm, block.positives, block.x_nm.dtype
    share: float | Tensor = weights.share
    if spec.drop_rows and x_nm.device.type != "cpu":  # on a CPU the ignored rows have been dropped
        counts = (pair.row_key != spec.ignored).to(x_nm.dtype)
        share = share / counts.sum() if weights.kept else share
        weights = RowWeights(each=counts if weights.each is None else weights.each, square=weights.square)
    elif weights.kept:
        share = share / x_nm.shape[0] if x_nm.shape[0] else math.inf
    if spec.softplus:
        loss, g_nm = sigmoid(x_nm, weights, positives)
    else:
        loss, g_nm = softmax(x_nm, weights, spec, positives)
    loss = loss.mul_(share)  # a mean over no rows is NaN: 0 times inf
    if loss.dtype is not kind:
        loss = loss.to(kind)
    if needs == NOTHING:
        return loss, Grads()
    if weights.kept or isinstance(share, Tensor):
        share = torch.where(share < torch.inf, share, 0.0) if isinstance(share, Tensor) else min(share, 1.0)
    return loss, block.gradients(g_nm, share, needs, spec)


def softmax(x_nm: Tensor, weights: RowWeights, spec: PairSpec, positives: Positives) -> tuple[Tensor, Tensor]:
    """The loss without the common weight of the rows, float64, and G, likewise."""
    pos = None if weights.square is None else positives.values(x_nm).clone()
    l_nm = torch.log_softmax(x_nm, 1)
    value = positives.values(l_nm)
    each, known = weights.each, positives.known
    if spec.col_lse:
        other_nm = torch.log_softmax(x_nm, 0)
        value = torch.lerp(value, positives.values(other_nm), 0.5)
        g_nm = l_nm.exp_().lerp_(other_nm.exp_(), 0.5)
    else:
        g_nm = l_nm
    if known is not None:
        value = value * known
    if positives.mask is not None:
        # A row without positives has the loss 0, and a lone row has no scores at all.
        some = positives.count > 0
        value = torch.where(some, value, 0.0)
        each = some.to(value.dtype) if each is None else each * some
    if each is not None:
        loss = torch.where(each != 0.0, each * value, 0.0).sum(dtype=torch.float64).neg_()
    else:
        loss = value.sum(dtype=torch.float64).neg_()
    weight = each if known is None else known if each is None else torch.where(each != 0.0, each * known, 0.0)
    factor = weight
    if weights.square is not None:
        assert pos is not None
        lse = pos - value  # the positive's score, minus its logarithmic probability
        squared = weights.square != 0
        loss = loss + torch.where(squared, weights.square.double() * lse.square(), 0.0).sum()
        more = torch.where(squared, 2.0 * weights.square * lse, 0.0)
        factor = more + (1.0 if weight is None else weight)
    if not spec.col_lse:
        g_nm.exp_()
    if factor is not None:
        g_nm.mul_(factor[:, None].to(g_nm.dtype)).masked_fill_((factor == 0.0)[:, None], 0.0)
    positives.subtract_(g_nm, 1.0 if weight is None else weight.to(g_nm.dtype))
    return loss, g_nm


def sigmoid(x_nm: Tensor, weights: RowWeights, positives: Positives) -> tuple[Tensor, Tensor]:
    """The loss without the common weight of the rows, float64, and G, likewise."""
    positives.flip_(x_nm)
    each, known = weights.each, positives.known
    loss_n = torch.logaddexp(x_nm, x_nm.new_zeros(())).sum(1)
    g_nm = x_nm.sigmoid_()
    positives.flip_(g_nm)
    if known is not None:
        each = known if each is None else torch.where(each != 0.0, each * known, 0.0)
    if each is None:
        return loss_n.sum(dtype=torch.float64), g_nm
    return (each.double() * loss_n).sum(), g_nm.mul_(each[:, None].to(g_nm.dtype))
