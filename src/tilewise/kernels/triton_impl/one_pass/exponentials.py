"""What a softmax loss may save instead of gradients: the exponentials that they are made of.

The gradient of a large bfloat16 classifier would be saved as float32, twice the memory of the final gradient. Where one
block holds all rows, `Exponentials` take no memory that the call has not used already, and the products that turn them
into gradients include ``grad_output``, so these too are rounded once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tilewise.kernels.spec import Needs, PairShape, PairSpec, stat_dtype
from tilewise.options import TileOptions


@dataclass(frozen=True, kw_only=True)
class Exponentials:
    """What gradients are made of: G_ij = factor_i E_ij.

    The positive's entry of E is also kept unrounded, since it may be most of the gradient.
    """

    e: Tensor  # (n or more, `row_width` or more), in the type of the features; columns from m on are undefined
    factor: Tensor  # (n or more,), in the type of the statistics
    entry: Tensor  # (n or more,), in the type of the statistics
    column: Tensor  # (n or more,), int32: the column of the entry; -1 in a row without

    @property
    def rounded(self) -> bool:
        """Whether E has fewer digits than the entries."""
        return self.e.dtype != self.entry.dtype


def row_width(cols: int, features: torch.dtype) -> int:
    """Numbers from one row of E to the next, so that each row starts at a 16-byte address."""
    step = 16 // features.itemsize
    return (cols + step - 1) // step * step


def one_block(shape: PairShape, memory: int) -> bool:
    """Whether ``memory`` bytes hold the exponentials of all rows, a copy of the rows, and partial sums."""
    row = (shape.cols + shape.width) * shape.dtype.itemsize + shape.cols // 32
    return shape.rows * row <= memory


def saves_exponentials(shape: PairShape, needs: Needs, spec: PairSpec, options: TileOptions) -> bool:
    """Whether exponentials are saved instead of gradients."""
    memory = options.workspace_bytes
    if not needs.b or spec.softplus or shape.dtype != torch.bfloat16 or 4 * shape.cols * shape.width <= memory // 4:
        return False
    return one_block(shape, memory)


def exponentials_like(shape: PairShape) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Sizes and types of the fields of `Exponentials`."""
    stat = stat_dtype(shape.dtype)
    e = (shape.rows, row_width(shape.cols, shape.dtype)), shape.dtype
    return [e, *(((shape.rows,), dtype) for dtype in (stat, stat, torch.int32))]
