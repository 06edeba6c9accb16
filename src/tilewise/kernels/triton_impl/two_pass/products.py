"""Products by cuBLAS, accumulated in float32."""

from __future__ import annotations

import torch
from torch import Tensor


def product(target: Tensor, left: Tensor, right: Tensor, first: bool) -> None:
    """target = left @ right, or target += left @ right, accumulated in float32."""
    if not target.is_cuda:  # the interpreter
        result = left.float() @ right.float()
        target.copy_(result if first else target + result)
    elif target.dtype == left.dtype:
        torch.mm(left, right, out=target) if first else torch.addmm(target, left, right, out=target)
    elif first:
        torch.mm(left, right, out_dtype=target.dtype, out=target)
    else:
        torch.addmm(target, left, right, out_dtype=target.dtype, out=target)
