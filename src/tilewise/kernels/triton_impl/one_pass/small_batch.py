"""A small loss of both directions with its gradients, as one recorded sequence of launches.

    loss = share * sum_i ((row_lse_i + col_lse_i) / 2 - pos_i)

For a batch of a few thousand pairs the device is faster than the Python code of autograd. So forward also
launches the kernels of the gradients: the host reads three tensors and replays one recording. The gradients are saved in
float32; `times` multiplies all of them by ``grad_output`` in one launch and rounds them.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewise.kernels.spec import Grads, GradStats, Needs, Pair, PairSpec
from tilewise.kernels.triton_impl.launch.call import Call, cdiv, launch_settings, unit_of
from tilewise.kernels.triton_impl.launch.prepared import Prepared, kernel
from tilewise.kernels.triton_impl.launch.replay import Recording, replay_key, replay_or_record
from tilewise.kernels.triton_impl.primitives import in_units
from tilewise.kernels.triton_impl.two_pass.backward import Backward
from tilewise.kernels.triton_impl.two_pass.forward import Forward
from tilewise.options import TileOptions

SUM_BLOCK = 1024
TIMES_BLOCK = 4096


def loss_and_gradients(
    pair: Pair, share: float, needs: Needs, spec: PairSpec, options: TileOptions
) -> tuple[Tensor, Grads]:
    """The loss above, and its gradients in float32."""
    a, scale = pair.a, pair.scale

    def run(recording: Recording | None) -> tuple[Tensor | None, ...]:
        call = Call.of(pair, spec, options, recording)
        stats = Forward(call).run()
        loss, half, minus = call.empty(), call.empty(a.shape[0]), call.empty(a.shape[0])
        factors = (call.empty(), call.empty()) if a.dtype == torch.float16 else (None, None)
        values: dict[str, Any] = {"row_lse": stats.row_lse, "col_lse": stats.col_lse, "row_pos": stats.row_pos}
        values |= {"loss": loss, "half": half, "minus": minus, "scale": scale}
        values |= {"inside": factors[0], "outside": factors[1], "share": share, "n": a.shape[0], "BLOCK": SUM_BLOCK}
        call.prepare(loss_kernel).put(values).launch(1)
        incoming = GradStats(row_lse=half, col_lse=half, row_pos=minus)
        again = Call.of(pair, spec, options, recording)
        grads = Backward(again, stats, incoming, needs, scale.dtype, factors=factors).run()
        return loss, grads.a, grads.b, grads.scale

    inputs = pair.a, pair.b, pair.scale
    key = replay_key(("small batch", share, needs, *launch_settings(pair, spec, options)), inputs)
    loss, grad_a, grad_b, grad_scale = replay_or_record(key, inputs, run, a.device)
    assert loss is not None
    return loss, Grads(a=grad_a, b=grad_b, scale=grad_scale)


def times(grads: Grads, grad_output: Tensor, a_dtype: torch.dtype, b_dtype: torch.dtype) -> Grads:
    """The gradients of rows, columns and scale multiplied by ``grad_output``: in one launch, each in its type."""
    inputs = grads.a, grads.b, grads.scale, grad_output
    dtypes = a_dtype, b_dtype, torch.float32

    def run(recording: Recording | None) -> tuple[Tensor | None, ...]:
        def like(value: Tensor | None, dtype: torch.dtype) -> Tensor | None:
            if value is None:
                return None
            if recording is not None:
                return recording.empty(value, tuple(value.shape), dtype, False)
            return torch.empty_like(value, dtype=dtype)

        outs = [like(value, dtype) for value, dtype in zip(inputs, dtypes, strict=False)]
        sizes = [0 if value is None else value.numel() for value in inputs[:2]]
        values: dict[str, Any] = dict(zip(("a", "b", "scale", "grad_output"), inputs, strict=True))
        values |= dict(zip(("a_out", "b_out", "scale_out"), outs, strict=True))
        values |= {"a_size": sizes[0], "b_size": sizes[1], "UNIT": unit_of(*sizes), "BLOCK": TIMES_BLOCK}
        ready = Prepared(times_kernel, grad_output.device, 4, 2, recording).put(values)
        ready.launch(max(1, sum(cdiv(size, TIMES_BLOCK) for size in sizes)))
        return tuple(outs)

    a, b, scale = replay_or_record(replay_key(("times", *dtypes), inputs), inputs, run, grad_output.device)
    return Grads(a=a, b=b, scale=scale)


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


@triton.jit
def times_block(source, target, factor, block, size, BLOCK: tl.constexpr):
    """One block of target = source * factor."""
    at = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(source + at, mask=at < size, other=0.0)
    tl.store(target + at, (value * factor).to(target.dtype.element_ty), mask=at < size)


@kernel(optional=("a", "b", "scale", "a_out", "b_out", "scale_out"), dynamic=("a_size", "b_size"))
def times_kernel(
    a, b, scale, grad_output, a_out, b_out, scale_out, a_size, b_size, UNIT: tl.constexpr, BLOCK: tl.constexpr
):
    """Every gradient times ``grad_output``; a gradient that is not needed is None. UNIT divides the sizes."""
    program = tl.program_id(0)
    factor = tl.load(grad_output)
    a_blocks = tl.cdiv(a_size, BLOCK)
    if a is not None:
        if program < a_blocks:
            times_block(a, a_out, factor, program, in_units(a_size, UNIT), BLOCK)
    if b is not None:
        if program >= a_blocks:
            times_block(b, b_out, factor, program - a_blocks, in_units(b_size, UNIT), BLOCK)
    if scale is not None:
        if program == 0:
            tl.store(scale_out, (tl.load(scale) * factor).to(scale_out.dtype.element_ty))
