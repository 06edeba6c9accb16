"""The strategy `small` of the Triton backend: a scalar loss and its gradients as one program for each kind of call.

    x = a @ b'                                       cuBLAS, in float32
    rows_kernel, or for two directions rows_kernel (twice) and both_kernel:   losses of rows, and G in x's place
    finish_kernel                                    the loss
    dA = G @ b, dB = G' @ a                          cuBLAS; multiplied by scale, weights and grad_output in backward

A call allocates, above its results: x in float32 and G in the type of the features. `programs` are made once for each key.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.kernels import scalar_loss
from tilewise.kernels.backend import Like
from tilewise.kernels.precision import matmul_precision
from tilewise.kernels.spec import Grads, Needs, Pair, PairShape, PairSpec, RowWeights, wanted_names
from tilewise.kernels.triton_impl import bits as bit
from tilewise.kernels.triton_impl.launch.call import POSITIVE, bit_sum, cdiv, on_device, vector, without_graph
from tilewise.kernels.triton_impl.program import Buffer, Program
from tilewise.kernels.triton_impl.small import kernels
from tilewise.options import TileOptions

SOFTMAX = {"row_lse", "row_pos", "num_positives"}
STATISTICS = SOFTMAX, SOFTMAX | {"col_lse"}, {"row_softplus"}
SCORES_OF_A_PROGRAM = 2048  # scores that a program of `rows_kernel` has in registers at a time
BLOCK = 4096  # numbers of a program of `gradient_kernel`
GIVEN = ("a", "b", "scale", "number", "bias", "row_key", "col_key", "row_skip", "col_skip", "weight", "square", "share")


class Key(NamedTuple):
    """All that a program depends on."""

    shape: PairShape
    spec: PairSpec
    needs: Needs
    missing: tuple[bool, ...]  # which of GIVEN are None
    one_bias: bool  # the bias is one number for all columns
    kept: bool  # see `RowWeights`


class TritonSmall:
    """The capability `small` of the Triton backend."""

    def why_not(self, shape: PairShape, spec: PairSpec, options: TileOptions) -> str | None:
        """Why this loss cannot be computed from one block of scores, or None."""
        if set(wanted_names(spec)) not in STATISTICS or spec.guide != "none":
            return "it has other statistics than a softmax or a sigmoid loss, or a guide"
        if spec.softplus and spec.positive != "one":
            return "a sigmoid loss has one positive in each row"
        if shape.has_row_scale:
            return "each row has a scale of its own"
        return None

    def rows_that_fit(self, shape: PairShape, spec: PairSpec, memory: int) -> int:
        """All rows or none."""
        needed = shape.rows * shape.cols * (4 + shape.dtype.itemsize)
        return shape.rows if needed <= memory else 0

    def saved_like(self, shape: PairShape, needs: Needs, spec: PairSpec, options: TileOptions) -> list[Like]:
        """The gradients without the factor that they all share, and that factor."""
        return [*scalar_loss.gradients_like(shape, needs), ((), torch.float32)]

    def forward(
        self, pair: Pair, weights: RowWeights, needs: Needs, spec: PairSpec, options: TileOptions, rows: int
    ) -> tuple[Tensor, Sequence[Any]]:
        """The loss, and what `saved_like` lists."""
        shape, bias, one_bias = pair.shape, pair.bias, False
        if bias is not None and bias.stride(0) == 0 and spec.softplus:
            bias, one_bias = bias[:1], True
        vectors = pair.row_key, pair.col_key, pair.row_skip, pair.col_skip, weights.each, weights.square
        factor = (pair.scale, None) if isinstance(pair.scale, Tensor) else (None, pair.scale)
        given = [pair.a, None if spec.symmetric else pair.b, *factor, vector(bias), *map(vector, vectors)]
        given.append(weights.share)
        key = Key(shape, spec, needs, tuple(value is None for value in given), one_bias, weights.kept)
        with on_device(pair.a), without_graph(), matmul_precision(options.precision):
            found = loss_program(key).run(given, pair.a.device)
        loss, factor, *grads = found
        values = [grads.pop(0) if need else None for need in needs]
        if one_bias and values[3] is not None:
            values[3] = (values[3] / shape.cols).expand(shape.cols)
        return loss, (*values, factor)

    def backward(
        self,
        saved: Sequence[Any],
        pair: Pair,
        grad_output: Tensor,
        needs: Needs,
        spec: PairSpec,
        options: TileOptions,
        shape: PairShape,
        *,
        overwrite: bool = False,
    ) -> Grads:
        """The saved gradients multiplied by their factor and by ``grad_output``."""
        *grads, factor = saved
        a, b, scale, bias = (value if need else None for value, need in zip(grads, needs, strict=True))
        sizes = tuple(None if value is None else tuple(value.shape) for value in (a, b))
        program = gradient_program(sizes, pair.a.dtype, scale is not None, overwrite)
        with on_device(pair.a), without_graph():
            made = program.run([a, b, scale, factor, grad_output], pair.a.device)
        in_place = overwrite and pair.a.dtype == torch.float32
        return Grads(
            a=a if a is None or in_place else made.pop(0),
            b=b if b is None or in_place else made.pop(0),
            scale=None if scale is None else made.pop(0),
            bias=None if bias is None else bias * grad_output,
        )


@functools.lru_cache(maxsize=256)
def loss_program(key: Key) -> Program:
    """The loss, the factor of the features' gradients, and the gradients that are needed, in the order of `Needs`."""
    shape, spec, needs = key.shape, key.spec, key.needs
    n, m, d, half = shape.rows, shape.cols, shape.width, shape.dtype
    p = Program()
    given: dict[str, Buffer | None] = {
        name: None if none else made for name, none, made in zip(GIVEN, key.missing, map(p.given, GIVEN), strict=True)
    }
    a, b = given["a"], given["b"] or given["a"]
    assert a is not None
    assert b is not None
    both = spec.col_lse or spec.symmetric
    loss, factor = p.output("loss", (), torch.float32), p.output("factor", (), torch.float32)
    score = bit_sum(
        (bit.ONE_BIAS, key.one_bias),
        (bit.BIAS, given["bias"] is not None and not key.one_bias),
        (bit.SOFTCAP, spec.softcap),
        (bit.SKIP, shape.has_skips),
        (bit.MASK_SELF, spec.mask_self),
    )
    diagonal = spec.positive == "one" and given["row_key"] is None
    positive = bit.DIAGONAL.value if diagonal else POSITIVE[spec.positive]
    scores: dict[str, Any] = {
        name: given[name] for name in ("scale", "number", "bias", "row_key", "col_key", "row_skip", "col_skip")
    }
    scores |= {"softcap": float(spec.softcap), "n": n, "m": m, "SCORE": score, "POSITIVE": positive}

    x = p.scratch("x", (n, m), torch.float32)
    p.product(x, a, b.t)
    any_grad = any(needs)
    g = p.scratch("G", (n, m), half) if any_grad else None
    row_loss, col_loss = p.scratch("row_loss", (n,), torch.float32), None
    R, C = tile_of(n, m)
    dots, dot, bias_dot = n, None, None
    if needs.scale:
        B = 32 if n * m <= 2**20 else 64
        dots = cdiv(n, B) * cdiv(m, 128) if both else n
        dot = p.scratch("dot", (dots,), torch.float32)
    if needs.bias and key.one_bias:
        bias_dot = p.scratch("bias_dot", (n,), torch.float32)
    rows = {"x": x, "weight": given["weight"], "square": given["square"], "row_step": m, "col_step": 1}
    rows |= {"R": R, "C": C, "KEPT": key.kept, **scores}
    if not both:
        kind = kernels.SIGMOID.value if spec.softplus else kernels.SOFTMAX.value
        p.launch(kernels.rows_kernel, cdiv(n, R), loss=row_loss, dot=dot, bias_dot=bias_dot, g=g, LOSS=kind, **rows)
    else:
        names = ("top", "log", "factor", "hit")
        stats = {name: p.scratch(f"row_{name}", (n,), torch.float32) for name in names}
        outs = {f"{name}_out": value for name, value in stats.items()}
        p.launch(kernels.rows_kernel, cdiv(n, R), loss=row_loss, LOSS=kernels.STATS.value, **outs, **rows)
        other = stats
        if spec.col_lse:
            other = {name: p.scratch(f"col_{name}", (m,), torch.float32) for name in names}
            col_loss = p.scratch("col_loss", (m,), torch.float32)
            outs = {f"{name}_out": value for name, value in other.items()}
            swapped = {"row_step": 1, "col_step": m, "R": 32, "C": min(256, C), "n": m, "m": n}
            swapped |= {"row_skip": given["col_skip"], "col_skip": given["row_skip"]}
            p.launch(
                kernels.rows_kernel, cdiv(m, 32), warps=8, loss=col_loss, LOSS=kernels.STATS.value, **outs,
                **(rows | swapped),
            )  # fmt: skip
        if any_grad:
            B = 32 if n * m <= 2**20 else 64
            parts = {f"row_{name}": value for name, value in stats.items()}
            parts |= {f"col_{name}": value for name, value in other.items()}
            p.launch(kernels.both_kernel, cdiv(n, B) * cdiv(m, 128), x=x, dot=dot, g=g, R=B, C=128, **parts, **scores)
    weight = p.scratch("weight", (), torch.float32)
    scale_out = p.output("dscale", (), torch.float32) if needs.scale else None
    bias_out = p.scratch("dbias", (), torch.float32) if bias_dot is not None else None
    p.launch(
        kernels.finish_kernel, 1, row_loss=row_loss, col_loss=col_loss, dot=dot, bias_dot=bias_dot,
        scale=given["scale"], number=given["number"], share=given["share"], row_key=given["row_key"], loss_out=loss, scale_out=scale_out,
        bias_out=bias_out, weight_out=weight, factor_out=factor, n=n, dots=dots,
        HALF=spec.symmetric, KEPT=key.kept, BOTH=spec.col_lse, BLOCK=1024,
    )  # fmt: skip
    order: list[Buffer] = [loss, factor]
    if needs.a:
        assert g is not None
        order.append(p.output("dA", (n, d), torch.float32))
        p.product(order[-1], g, b)
    if needs.b and not spec.symmetric:
        assert g is not None
        order.append(p.output("dB", (m, d), torch.float32))
        p.product(order[-1], g.t, a)
    if scale_out is not None:
        order.append(scale_out)
    if needs.bias:
        if bias_out is None:
            bias_out = p.output("dbias", (m,), torch.float32)
            p.launch(kernels.columns_kernel, cdiv(m, 128), g=g, weight=weight, out=bias_out, n=n, m=m, R=32, C=128)
        order.append(bias_out)
    p.outputs = order
    return p.done()


def tile_of(n: int, m: int) -> tuple[int, int]:
    """Rows and columns that a program of `rows_kernel` has in registers."""
    cols = min(SCORES_OF_A_PROGRAM, max(64, 1 << (m - 1).bit_length()))
    rows = SCORES_OF_A_PROGRAM // cols
    while rows > 1 and n // rows < 512:  # enough programs for all multiprocessors
        rows //= 2
    return rows, cols


@functools.lru_cache(maxsize=256)
def gradient_program(
    sizes: tuple[tuple[int, int] | None, ...], dtype: torch.dtype, has_scale: bool, overwrite: bool
) -> Program:
    """The gradients of features of these sizes, and of the scale, from unit gradients and their factor."""
    p = Program()
    a, b, scale, factor, grad_output = map(p.given, ("a", "b", "scale", "factor", "grad_output"))
    in_place = overwrite and dtype == torch.float32
    named: dict[str, Any] = {"factor": factor, "grad_output": grad_output, "BLOCK": BLOCK}
    most = 1
    for name, given, size in zip(("a", "b"), (a, b), sizes, strict=True):
        if size is not None:
            count = size[0] * size[1]
            out = given if in_place else p.output(f"{name}_out", size, dtype)
            named |= {name: given, f"{name}_out": out, f"{name}_size": count}
            most = max(most, cdiv(count, BLOCK))
    if has_scale:
        named |= {"scale": scale, "scale_out": p.output("scale_out", (), torch.float32)}
    p.launch(kernels.gradient_kernel, most, **named)
    return p.done()
