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

import contextlib
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
from tilewise.kernels.torch_impl.one_pass import multiplied
from tilewise.kernels.torch_impl.tile_scores import product_types
from tilewise.options import TileOptions

NOTHING = Needs(a=False, b=False)
LIBRARY_BYTES = 4 * 2**20  # buffers of the library that multiplies on a CPU, which it keeps from then on


class TorchSmall:
    """The capability `small` of the torch backend."""

    def why_not(self, shape: PairShape, spec: PairSpec, options: TileOptions) -> str | None:
        """Why this loss cannot be computed from one block of scores, or None."""
        return scalar_loss.why_not_small(shape, spec)

    def block_bytes(self, shape: PairShape, spec: PairSpec) -> int:
        """See `block_bytes`."""
        return block_bytes(shape, spec)

    def saved_like(self, shape: PairShape, needs: Needs) -> list[Like]:
        """The gradients."""
        return scalar_loss.gradients_like(shape, needs)

    def job(self, key: SmallKey) -> TorchJob:
        """The work for calls of one kind."""
        return TorchJob(key)

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
        key, (row_key, col_key, row_skip, col_skip, each, square) = self.key, facts
        keys = {"row_key": row_key, "col_key": col_key, "row_skip": row_skip, "col_skip": col_skip}
        pair = Pair(a=a, b=a if b is None else b, scale=scale, bias=bias, **keys)
        weights = RowWeights(share=share, kept=key.kept, each=each, square=square)
        with matmul_precision(key.precision), without_graph():
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
    copies = 2 + spec.col_lse + bool(spec.softcap) + spec.symmetric + many
    score = copies * item + (2 if half and on_cuda else 0) + 2 * (shape.has_skips or many)
    features = (shape.rows + shape.cols) * shape.width * 4 if half and not on_cuda else 0  # as float32
    return shape.rows * shape.cols * score + features


def loss_and_gradients(pair: Pair, weights: RowWeights, needs: Needs, spec: PairSpec) -> tuple[Tensor, Grads]:
    """The loss, and its gradients with the features' gradients in `saved_dtype`."""
    operand, kind = product_types(pair.a.device, pair.a.dtype)
    a = pair.a if pair.a.dtype == operand else pair.a.to(operand)
    b = a if spec.symmetric else pair.b if pair.b.dtype == operand else pair.b.to(operand)
    scale = pair.scale
    if type(scale) is not float and isinstance(scale, Tensor) and scale.device.type == "cpu":
        scale = scale.item()
    x_nm = product(a, b.t(), kind, scale)
    if pair.bias is not None:
        x_nm.add_(pair.bias)
    slope = None
    if cap := spec.softcap:
        x_nm.div_(cap).tanh_()
        slope = x_nm.square().neg_().add_(1.0)
        x_nm.mul_(cap)
    share: float | Tensor = weights.share
    if spec.drop_rows and x_nm.device.type != "cpu":  # on a CPU the ignored rows have been dropped
        counts = (pair.row_key != spec.ignored).to(x_nm.dtype)
        share = share / counts.sum() if weights.kept else share
        weights = RowWeights(each=counts if weights.each is None else weights.each, square=weights.square)
    elif weights.kept:
        share = share / x_nm.shape[0] if x_nm.shape[0] else math.inf
    positives = Positives(pair, spec)
    exclude_(x_nm, pair, spec, positives)
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
    if slope is not None:
        # An excluded pair has the score -inf and no gradient.
        g_nm = torch.where(g_nm == 0.0, 0.0, g_nm.mul_(slope))
    return loss, gradients(g_nm, a, b, scale, share, operand, kind, needs, spec)


def product(left: Tensor, right: Tensor, kind: torch.dtype, factor: float | Tensor) -> Tensor:
    """factor * left @ right, in the type ``kind``."""
    if type(factor) is float and left.dtype == kind:
        out = left.new_empty((left.shape[0], right.shape[1]))
        return out.addmm_(left, right, beta=0.0, alpha=factor)
    out = torch.mm(left, right) if left.dtype == kind else torch.mm(left, right, out_dtype=kind)
    return out.mul_(factor)


def without_graph() -> contextlib.AbstractContextManager[object]:
    """`torch.no_grad`, which costs nothing where an autograd function has switched gradients off already."""
    return torch.no_grad() if torch.is_grad_enabled() else contextlib.nullcontext()


class Positives:
    """The positives of all rows: the diagonal, one given column each (``place``), or a mask."""

    def __init__(self, pair: Pair, spec: PairSpec) -> None:
        self.place: Tensor | None = None  # (n, 1)
        self.mask: Tensor | None = None  # (n, m)
        self.known: Tensor | None = None  # (n,) NaN for a positive out of range, otherwise 1
        if spec.positive == "many":
            self.mask = pair.row_key[:, None] == pair.col_key
            if spec.mask_self:
                self.mask.fill_diagonal_(False)
            self.count = self.mask.sum(1)
        elif spec.in_range:
            self.place = pair.row_key[:, None]
        elif pair.row_key is not None:
            place = pair.row_key.clamp(0, pair.b.shape[0] - 1)
            known = place == pair.row_key
            if spec.drop_rows:
                known = known | (pair.row_key == spec.ignored)
            self.known = torch.where(known, 1.0, torch.nan)
            self.place = place[:, None]

    def values(self, x_nm: Tensor) -> Tensor:
        """x at the positives, its mean over several, and 0 for a row without any: (n,)."""
        if self.mask is not None:
            total = torch.where(self.mask, x_nm, 0.0).sum(1)
            return total.div_(self.count.clamp(min=1))
        return x_nm.diagonal() if self.place is None else x_nm.gather(1, self.place).squeeze(1)

    def flip_(self, x_nm: Tensor) -> None:
        """Change the sign of the positives."""
        if self.place is None:
            x_nm.diagonal().neg_()
        else:
            x_nm.scatter_(1, self.place, -x_nm.gather(1, self.place))

    def subtract_(self, g_nm: Tensor, weight: float | Tensor) -> None:
        """Subtract the weight, 0-d or (n,), at the positive; an equal part of it at each of several."""
        if self.mask is not None:
            each = weight / self.count.clamp(min=1)
            g_nm.sub_(each[:, None].to(g_nm.dtype) * self.mask)
        elif self.place is None:
            g_nm.diagonal().sub_(weight)
        else:
            values = -weight[:, None] if isinstance(weight, Tensor) else g_nm.new_full(self.place.shape, -weight)
            g_nm.scatter_add_(1, self.place, values)

    def allow_(self, mask_nm: Tensor) -> None:
        """Set a mask to False at the positives."""
        if self.mask is not None:
            mask_nm.logical_and_(~self.mask)
        elif self.place is None:
            mask_nm.fill_diagonal_(False)
        else:
            mask_nm.scatter_(1, self.place, False)


def exclude_(x_nm: Tensor, pair: Pair, spec: PairSpec, positives: Positives) -> None:
    """Set the scores of excluded pairs to -inf."""
    if pair.row_skip is not None and pair.col_skip is not None:
        mask = pair.row_skip[:, None] == pair.col_skip
        positives.allow_(mask)
        x_nm.masked_fill_(mask, -torch.inf)
    if spec.mask_self:
        x_nm.fill_diagonal_(-torch.inf)


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


def gradients(
    g_nm: Tensor,
    a: Tensor,
    b: Tensor,
    scale: float | Tensor,
    share: float | Tensor,
    operand: torch.dtype,
    kind: torch.dtype,
    needs: Needs,
    spec: PairSpec,
) -> Grads:
    """The gradients from G, which lacks the common weight ``share`` of the rows."""
    grads = Grads()
    if needs.bias:
        grads.bias = g_nm.sum(0, dtype=torch.float64).mul_(share).to(kind)
    # With the gradient of the scale, the products come without it: <A, G B>.
    factor = share if needs.scale else share * scale
    if spec.symmetric:
        g_nm = (g_nm + g_nm.t()).mul_(0.5)
    size: Tensor | None = None
    if operand == torch.float16:  # keeps G near 1
        size = g_nm.abs().amax()
        size = torch.where((size > 0) & (size < torch.inf), size, 1.0)
        g_nm = g_nm / size
        factor = factor * size
    if g_nm.dtype != operand:
        g_nm = g_nm.to(operand)
    if needs.a or (needs.scale and not needs.b):
        grads.a = product(g_nm, b, kind, 2.0 * factor if spec.symmetric else factor)
    if needs.b and not spec.symmetric:
        grads.b = product(g_nm.t(), a, kind, factor)
    if needs.scale:
        made, side = (grads.a, a) if grads.a is not None else (grads.b, b)
        assert made is not None
        total = (made * side.to(kind)).sum(dtype=torch.float64)
        grads.scale = (total * 0.5 if spec.symmetric else total).to(kind)
        grads.a = grads.a.mul_(scale) if needs.a and grads.a is not None else None
        grads.b = None if grads.b is None else grads.b.mul_(scale)
    return grads
