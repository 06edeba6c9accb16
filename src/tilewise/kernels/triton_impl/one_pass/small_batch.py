"""A small loss of both directions with its gradients, as one recorded sequence of launches.

    loss = share * sum_i ((row_lse_i + col_lse_i) / 2 - pos_i)

For a batch of a few thousand pairs the device is faster than the Python code of autograd. So forward also launches the
kernels of the gradients: the host reads three tensors and replays one recording. The gradients are saved in float32.
"""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from tilewise.kernels.spec import Grads, GradStats, Needs, Pair, PairSpec
from tilewise.kernels.triton_impl.launch.call import Call, replayed
from tilewise.kernels.triton_impl.launch.prepared import kernel
from tilewise.kernels.triton_impl.two_pass.backward import Backward
from tilewise.kernels.triton_impl.two_pass.forward import Forward
from tilewise.options import TileOptions

SUM_BLOCK = 1024


def loss_and_gradients(
    pair: Pair, share: float, needs: Needs, spec: PairSpec, options: TileOptions
) -> tuple[Tensor, Grads]:
    """The loss above, and its gradients in float32."""

    def run(call: Call) -> tuple[Tensor | None, ...]:
        n, scale, stats = pair.a.shape[0], pair.scale, Forward(call).run()
        loss, half, minus = call.empty(), call.empty(n), call.empty(n)
        factors = (call.empty(), call.empty()) if pair.a.dtype == torch.float16 else (None, None)
        values: dict[str, Any] = {"row_lse": stats.row_lse, "col_lse": stats.col_lse, "row_pos": stats.row_pos}
        values |= {"loss": loss, "half": half, "minus": minus, "scale": scale}
        values |= {"inside": factors[0], "outside": factors[1], "share": share, "n": n, "BLOCK": SUM_BLOCK}
        call.prepare(loss_kernel).put(values).launch(1)
        incoming = GradStats(row_lse=half, col_lse=half, row_pos=minus)
        grads = Backward(call, stats, incoming, needs, scale.dtype, factors=factors).run()
        return loss, grads.a, grads.b, grads.scale

    loss, a, b, scale = replayed(("small batch", share, needs), pair, spec, options, (), run)
    return loss, Grads(a=a, b=b, scale=scale)


@kernel(optional=("inside", "outside"), dynamic=("share", "n"))
def loss_kernel(scale, row_lse, col_lse, row_pos, loss, half, minus, inside, outside, share, n, BLOCK: tl.constexpr):
    """The loss, its gradient with respect to each statistic, and, in float16, the factors that keep G near 1."""
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, n, BLOCK):
        at = start + tl.arange(0, BLOCK)
        ok = at < n
        row, col = tl.load(row_lse + at, mask=ok, other=0.0), tl.load(col_lse + at, mask=ok, other=0.0)
        total += (row + 0.5 * (col - row)) - tl.load(row_pos + at, mask=ok, other=0.0)
        nothing = tl.zeros((BLOCK,), tl.float32)
        tl.store(half + at, nothing + 0.5 * share, mask=ok)
        tl.store(minus + at, nothing - share, mask=ok)
    tl.store(loss, tl.sum(total, 0) * share)
    if inside is not None:
        tl.store(inside, 1.0 / share)
        tl.store(outside, tl.load(scale) * share)
