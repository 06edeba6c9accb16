"""Float32 features are rounded to the nearest number of TF32 before a product in TF32.

Tensor cores read the upper 19 bits of a float32 number. Without rounding, the others are cut off. Every score is then too
small, by 7e-4 of it on average, and so is what a loss subtracts. cuBLAS rounds as well.

From Triton 3.9 on, the load of a tile rounds: `tensor_descriptor`. Kernels that read addresses round in registers
(`operand`). Older versions cannot round in a load, or have an assembler with a fault in products whose operands come from
registers (`known_faults`). With them, all kernels read a rounded copy of the features (`rounded`, `Scores`).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tilewise.kernels.triton_impl.launch import kernel, launch
from tilewise.kernels.triton_impl.primitives import row_stride
from tilewise.kernels.triton_impl.sizes import TF32, interpreted

VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2])
LOADS_ROUND = tl.constexpr(VERSION >= (3, 9) and not interpreted())  # the interpreter ignores that a load should round
ROWS, WIDTH = 8, 256  # rows of a program of `round_kernel`, and its features at a time


@triton.jit
def nearest(x):
    """The nearest TF32 number, as a load that rounds gives it. Ties go to the even one; NaN and infinities stay."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = (bits + 0xFFF + ((bits >> 13) & 1)) & -0x2000
    return tl.where((bits & 0x7F800000) == 0x7F800000, bits, rounded).to(tl.float32, bitcast=True)


@triton.jit
def computed_operand(x, EXACT: tl.constexpr):
    """An operand of a product that was computed in registers, rounded if the product is one of float32 in TF32."""
    if (EXACT == "tf32") and (x.dtype == tl.float32):
        x = nearest(x)
    return x


@triton.jit
def operand(x, EXACT: tl.constexpr):
    """The same for numbers that were loaded from features, which may be a rounded copy already."""
    if LOADS_ROUND:
        x = computed_operand(x, EXACT)
    return x


@kernel(dynamic=("rows", "stride", "out_stride"))
def round_kernel(features, out, rows, stride, out_stride, D: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """out = `nearest` of the features."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    for k in range(0, D, WIDTH):
        col = (k + tl.arange(0, WIDTH))[None, :]
        ok = (row < rows) & (col < D)
        value = tl.load(features + row * row_stride(features, stride) + col, mask=ok, other=0.0)
        tl.store(out + row * row_stride(out, out_stride) + col, nearest(value), mask=ok)


def round_arguments(features: Any, out: Any) -> tuple[int, dict[str, Any]]:
    """Programs and arguments of `round_kernel`, for tensors or buffers whose rows start at 16-byte addresses."""
    rows, d = features.shape
    values = {"features": features, "out": out, "rows": rows, "stride": features.stride(0), "out_stride": out.stride(0)}
    return -(-rows // ROWS), values | {"D": d, "ROWS": ROWS, "WIDTH": min(WIDTH, triton.next_power_of_2(d))}


def copies(exact: str, dtype: torch.dtype | None) -> bool:
    """Whether kernels read a rounded copy of features. ``exact``: EXACT of the kernels."""
    return exact == TF32 and dtype == torch.float32 and not LOADS_ROUND.value


def rounded(features: Tensor, exact: str) -> Tensor:
    """The features, or a rounded copy of them, if kernels need one. Outside of a program."""
    if not copies(exact, features.dtype) or not features.numel():
        return features
    row = -(-features.shape[1] // 4) * 4  # rows of the copy start at 16-byte addresses
    out = features.new_empty((features.shape[0], row))[:, : features.shape[1]]
    programs, values = round_arguments(features, out)
    launch(round_kernel, programs, features.device, values)
    return out


def tensor_descriptor(
    tensor: Tensor, block: Any, exact: str | None = None, *, loads_round: bool = LOADS_ROUND.value
) -> TensorDescriptor:
    """The descriptor of a tensor that is read or written in blocks. ``exact``: of the products with what is read."""
    more: dict[str, Any] = {}
    if loads_round and exact == TF32 and tensor.dtype == torch.float32:
        more["round_f32_to_tf32"] = True
    return TensorDescriptor.from_tensor(tensor, list(block), **more)
