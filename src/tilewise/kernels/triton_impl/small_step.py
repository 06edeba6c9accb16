"""A small symmetric loss with its gradients, on one tape.

    loss = share * sum_i ((row_lse_i + col_lse_i) / 2 - pos_i)

All that happens between the features and their gradients is a launch or a product: the host reads three tensors, looks
up one tape, and is done. The gradients stay in float32, since what comes in from above is not known yet; `times`
multiplies by it and rounds, all of them in one launch.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewise.kernels.spec import Grads, GradStats, Needs, Pair, PairSpec
from tilewise.kernels.triton_impl.gradients import Backward
from tilewise.kernels.triton_impl.launch import Call, Prepared, cdiv, unit_of
from tilewise.kernels.triton_impl.parts import in_units
from tilewise.kernels.triton_impl.statistics import Forward
from tilewise.kernels.triton_impl.tape import Tape, kind_of, taped
from tilewise.options import TileOptions

SUM_BLOCK = 1024
TIMES_BLOCK = 4096


def loss_and_gradients(
    a: Tensor, b: Tensor, scale: Tensor, share: float, needs: Needs, spec: PairSpec, options: TileOptions
) -> tuple[Tensor, Grads]:
    """The loss above, and its gradients in the type of ``scale``, which is that of the statistics."""

    def run(tape: Tape | None) -> tuple[Tensor | None, ...]:
        pair = Pair(a=a.detach(), b=b.detach(), scale=scale.detach())
        call = Call.of(pair, spec, options, tape)
        stats = Forward(call).run()
        loss, half, minus = call.empty(), call.empty(a.shape[0]), call.empty(a.shape[0])
        factors = (call.empty(), call.empty()) if a.dtype == torch.float16 else (None, None)
        values: dict[str, Any] = {
            "row_lse": stats.row_lse,
            "col_lse": stats.col_lse,
            "row_pos": stats.row_pos,
            "loss": loss,
        }
        values |= {"half": half, "minus": minus, "scale": pair.scale, "inside": factors[0], "outside": factors[1]}
        values |= {"share": share, "n": a.shape[0], "BLOCK": SUM_BLOCK}
        call.prepare(loss_kernel, 4, 2, (a.dtype,)).put(values).launch(1)
        coming = GradStats(row_lse=half, col_lse=half, row_pos=minus)
        again = Call.of(pair, spec, options, tape)
        grads = Backward(again, stats, coming, needs, scale.dtype, factors=factors).run()
        return loss, grads.a, grads.b, grads.scale

    inputs = (a, b, scale)
    found = taped(kind_of(("small step", share, needs, spec, options), inputs), inputs, run, a.device)
    loss, grad_a, grad_b, grad_scale = found
    assert loss is not None
    return loss, Grads(a=grad_a, b=grad_b, scale=grad_scale)


def times(
    held: Grads, upstream: Tensor, dtypes: tuple[torch.dtype, torch.dtype, torch.dtype]
) -> tuple[Tensor | None, ...]:
    """The gradients of rows, columns and scale times what comes in, each in its type."""
    inputs = held.a, held.b, held.scale, upstream

    def run(tape: Tape | None) -> tuple[Tensor | None, ...]:
        def like(value: Tensor | None, dtype: torch.dtype) -> Tensor | None:
            if value is None:
                return None
            shape = tuple(value.shape)
            return tape.empty(value, shape, dtype, False) if tape is not None else value.new_empty(shape, dtype=dtype)

        outs = [like(value, dtype) for value, dtype in zip(inputs, dtypes, strict=False)]
        sizes = [0 if value is None else value.numel() for value in inputs[:2]]
        values: dict[str, Any] = dict(zip(("a", "b", "scale", "upstream"), inputs, strict=True))
        values |= dict(zip(("a_out", "b_out", "scale_out"), outs, strict=True))
        unit = unit_of(*sizes)
        values |= {"a_size": sizes[0], "b_size": sizes[1], "UNIT": unit, "BLOCK": TIMES_BLOCK}
        # Addresses that are no multiple of 16 compile to another kernel: an upstream number may lie anywhere.
        key = (*dtypes, unit, upstream.dtype, upstream.data_ptr() % 16 == 0)
        ready = Prepared(times_kernel, upstream.device, 4, 2, key, tape).put(values)
        ready.launch(max(1, sum(cdiv(size, TIMES_BLOCK) for size in sizes)))
        return tuple(outs)

    return tuple(taped(kind_of(("times", *dtypes), inputs), inputs, run, upstream.device))


@triton.jit(do_not_specialize=["share", "n"])
def loss_kernel(row_lse, col_lse, row_pos, scale, loss, half, minus, inside, outside, share, n, BLOCK: tl.constexpr):
    """The loss, what it says of each statistic, and, in float16, the factors that keep G near 1."""
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


@triton.jit(do_not_specialize=["a_size", "b_size"])
def times_kernel(
    a, b, scale, upstream, a_out, b_out, scale_out, a_size, b_size, UNIT: tl.constexpr, BLOCK: tl.constexpr
):
    """Every gradient times the upstream number; those that nobody needs are None. Sizes are multiples of UNIT."""
    program = tl.program_id(0)
    factor = tl.load(upstream)
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
