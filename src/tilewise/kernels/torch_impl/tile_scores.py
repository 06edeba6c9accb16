"""How the scores of a tile are computed: product, scale, bias, soft cap.

Axes: r, c rows and columns of one tile; d features.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise.kernels.spec import HALF_TYPES, Pair, PairSpec


def product_types(device: torch.device, dtype: torch.dtype) -> tuple[torch.dtype, torch.dtype]:
    """(type of the operands, type of the result) of a product of features.

    Products of half types are accumulated and returned in float32. Only CUDA multiplies half operands that way.
    On other devices the operands are converted to float32 first, which is exact.
    """
    if dtype in HALF_TYPES:
        return (dtype if device.type == "cuda" else torch.float32), torch.float32
    return dtype, dtype


class TileScores:
    """How the scores of a tile are computed: product, scale, bias, soft cap."""

    def __init__(self, pair: Pair, spec: PairSpec) -> None:
        self.pair, self.spec = pair, spec
        self.operand_dtype, self.compute_dtype = product_types(pair.a.device, pair.a.dtype)
        self.scale = pair.scale.to(self.compute_dtype)

    @property
    def widens(self) -> bool:
        """Whether the result of a product has a wider type than its operands (half types on CUDA)."""
        return self.operand_dtype != self.compute_dtype

    def operand(self, values: Tensor) -> Tensor:
        """Features or a tile of G, in the type of the operands of a product."""
        return values.to(self.operand_dtype)

    def scaled(self, a_rd: Tensor) -> Tensor:
        """The rows times the scale, as operands; without the scale if their type would round the result."""
        return a_rd if self.widens else self.operand(a_rd) * self.scale

    def product(self, left: Tensor, right: Tensor) -> Tensor:
        """left @ right of two operands, in `compute_dtype`."""
        return torch.mm(left, right, out_dtype=self.compute_dtype) if self.widens else left @ right

    def add_product(self, total: Tensor, left: Tensor, right: Tensor) -> None:
        """total += left @ right, in place, accumulated in the type of ``total``."""
        if self.widens:
            total.add_(self.product(left, right))
        else:
            total.addmm_(left, right)

    def scaled_product(self, scaled_rd: Tensor, b_cd: Tensor, out: Tensor | None = None) -> Tensor:
        """scale * <a_i, b_j>: (r, c), written to ``out`` where possible. ``scaled_rd`` is a result of `scaled`."""
        if self.widens:
            return self.product(scaled_rd, b_cd.T).mul_(self.scale)
        return torch.mm(scaled_rd, b_cd.T, out=out)

    def finish_(self, x_rc: Tensor, bias: Tensor | None) -> Tensor:
        """Add the bias of the columns and apply the soft cap, in place."""
        if bias is not None:
            x_rc.add_(bias)
        if cap := self.spec.softcap:
            x_rc.div_(cap).tanh_().mul_(cap)
        return x_rc

    def score_slope(self, x_rc: Tensor, i: slice) -> Tensor | None:
        """The derivative of the scores of the rows i: that of soft cap and row scale together; None for 1."""
        if self.pair.row_scale is None:
            return self.softcap_slope(x_rc) if self.spec.softcap else None
        scale_r = self.pair.row_scale[i, None].to(x_rc.dtype)
        return self.softcap_slope(x_rc / scale_r).mul_(scale_r) if self.spec.softcap else scale_r

    def softcap_slope(self, x_rc: Tensor) -> Tensor:
        """d softcap(x) / dx = 1 - (x / cap)^2 of capped scores; 0 for an excluded pair."""
        return (x_rc / self.spec.softcap).square_().neg_().add_(1.0).clamp_(min=0.0)
