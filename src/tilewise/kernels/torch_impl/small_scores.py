"""The block of all scores of a small batch: scores with their positives, and the gradients from G. See `small`.

Axes: n rows of a, m rows of b, d features.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.kernels.spec import Grads, Needs, Pair, PairSpec
from tilewise.kernels.torch_impl.guide import GuideTiles
from tilewise.kernels.torch_impl.tile_scores import product_types


class Block(NamedTuple):
    """The scores of all pairs, and the operands of the products for their gradients."""

    x_nm: Tensor
    slope: Tensor | None  # the derivative of the scores before exclusion, of soft cap and row scale; None for 1
    positives: Positives
    a: Tensor
    b: Tensor
    scale: float | Tensor

    def gradients(self, g_nm: Tensor, share: float | Tensor, needs: Needs, spec: PairSpec) -> Grads:
        """The gradients from G, the gradient of the scores. It lacks the common weight ``share`` of the rows."""
        if self.slope is not None:
            # An excluded pair has the score -inf and no gradient.
            g_nm = torch.where(g_nm == 0.0, 0.0, g_nm.mul_(self.slope))
        return gradients(g_nm, self.a, self.b, self.scale, share, self.a.dtype, self.x_nm.dtype, needs, spec)


def score_block(pair: Pair, spec: PairSpec) -> Block:
    """All scores, with -inf for excluded pairs."""
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
    if pair.row_scale is not None:
        each = pair.row_scale[:, None].to(kind)
        x_nm.mul_(each)
        slope = each if slope is None else slope.mul_(each)
    positives = Positives(pair, spec)
    if pair.row_skip is not None or spec.mask_self:
        exclude_(x_nm, pair, spec, positives)
    if spec.guide == "mask":
        every = slice(None)
        above = GuideTiles(pair, spec).above_limit(every, every)
        if spec.positive != "none":
            positives.allow_(above)
        x_nm.masked_fill_(above, -torch.inf)
    return Block(x_nm, slope, positives, a, b, scale)


def product(left: Tensor, right: Tensor, kind: torch.dtype, factor: float | Tensor) -> Tensor:
    """factor * left @ right, in the type ``kind``."""
    if type(factor) is float and left.dtype == kind:
        out = left.new_empty((left.shape[0], right.shape[1]))
        return out.addmm_(left, right, beta=0.0, alpha=factor)
    out = torch.mm(left, right) if left.dtype == kind else torch.mm(left, right, out_dtype=kind)
    return out.mul_(factor)


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
        elif spec.positive == "none":
            pass
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
        return x_nm.diagonal() if self.place is None else x_nm.gather(1, self.place)[:, 0]

    def number(self, dtype: torch.dtype) -> Tensor | None:
        """The number of positives of each row: (n,); None where the keys say that each row has one."""
        if self.mask is not None:
            return self.count.to(dtype)
        return None if self.known is None else (~self.known.isnan()).to(dtype)

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
        if spec.positive != "none":
            positives.allow_(mask)
        x_nm.masked_fill_(mask, -torch.inf)
    if spec.mask_self:
        x_nm.fill_diagonal_(-torch.inf)


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
