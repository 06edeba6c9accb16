"""The programs of small batches: the loss with its gradients, and the gradients times ``grad_output``.

Axes: n rows of a, m rows of b, d features.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tilewise.kernels import tensors
from tilewise.kernels.backend import SmallKey
from tilewise.kernels.precision import matmul_precision
from tilewise.kernels.spec import Needs
from tilewise.kernels.triton_impl import bits as bit
from tilewise.kernels.triton_impl.program import Buffer, Program
from tilewise.kernels.triton_impl.scores import POSITIVE, bit_sum, cdiv, vector
from tilewise.kernels.triton_impl.small import kernels, row_tiles

IN_REGISTERS = 2048  # scores that a program of `rows_kernel` has at a time
ENOUGH_PROGRAMS = 512  # for all multiprocessors
COLUMN_ROWS = 32  # where columns are read as rows: neighbours in memory that threads read together
FEW = 2**20  # scores, with which a tile of `both_kernel` is smaller
BOTH_COLS = 128
BLOCK = 4096  # numbers of a program of `gradient_kernel`
COUNTED_ROWS = 2048  # of which each program of `rows_kernel` counts those that are not ignored
FACTS = (*tensors.FACTS, *tensors.WEIGHTS)
PARTS = ("top", "log", "factor", "hit")  # of the softmax of a row or column, for `both_kernel`


def is_whole(features: torch.dtype, needs: Needs) -> bool:
    """Whether G has the factor of the features' gradients, scale times weight, before it is rounded.

    Then gradients are saved in the type of the features: grad_output is mostly 1 or a power of 2, so nothing is rounded
    twice. In float16 the factor would leave the range. With a bias, whose gradient is the sum of G, G must not have
    it either. Then gradients are saved in float32, and backward multiplies them by the factor.
    """
    return features != torch.float16 and not needs.bias


def saved_type(features: torch.dtype, needs: Needs) -> torch.dtype:
    """The type in which the gradients of features are saved between forward and backward."""
    return features if is_whole(features, needs) else torch.float32


def loss_program(key: SmallKey) -> Program:
    """Outputs: the loss, the gradients that are needed, and the factor that those of the features lack, if any."""
    shape, spec, needs = key.shape, key.spec, key.needs
    n, m, d, wide = shape.rows, shape.cols, shape.width, torch.float32
    p = Program()
    a, b, scores = given_scores(p, key, FACTS)
    weight, square, share = scores.pop("each"), scores.pop("square"), p.given("share")

    def scratch(name: str, size: int) -> Buffer:
        return p.scratch(name, (size,), wide)

    loss = p.output("loss", (), wide)
    common: dict[str, Any] = {"share": share}
    whole = is_whole(shape.dtype, needs)
    # Without other sums than that of the losses, torch adds them up.
    total = whole and not spec.col_lse and not needs.scale
    counted = key.kept and total and n <= COUNTED_ROWS
    if key.kept and not counted:
        common["kept_share"] = out = scratch("kept_share", 1)
        how = {"row_key": scores["row_key"], "ignored": spec.ignored, "n": n, "BLOCK": 1024}
        p.launch(kernels.share_kernel, 1, share=share, out=out, **how)
    x = p.scratch("x", (n, m), wide)
    p.product(x, a, b.t)
    saved = saved_type(shape.dtype, needs)
    g = p.scratch("G", (n, m), shape.dtype) if any(needs) else None
    row_loss, col_loss, two = scratch("row_loss", n), None, spec.col_lse or spec.symmetric
    tile_rows, tile_cols = tile_of(n, m)
    both_rows = 32 if n * m <= FEW else 64
    dots = cdiv(n, both_rows) * cdiv(m, BOTH_COLS) if two else n
    dot = scratch("dot", dots) if needs.scale else None
    bias_dot = scratch("bias_dot", n) if needs.bias and key.one_bias else None
    kept = kernels.COUNTED.value if counted else int(spec.drop_rows)
    rows: dict[str, Any] = {"x": x, "weight": weight, "square": square, "ignored": spec.ignored, "row_step": m}
    rows |= {"col_step": 1, "R": tile_rows, "C": tile_cols, "KEPT": kept, **scores}
    rows |= {"WHOLE": whole, "TOTAL": total, **common}
    if not two:
        kind = row_tiles.SIGMOID.value if spec.softplus else row_tiles.SOFTMAX.value
        more = {"loss": row_loss, "dot": dot, "bias_dot": bias_dot, "g": g, "LOSS": kind}
        p.launch(kernels.rows_kernel, cdiv(n, tile_rows), **more, **rows)
    else:
        stats = {name: scratch(f"row_{name}", n) for name in PARTS}
        more = {f"{name}_out": value for name, value in stats.items()} | {"LOSS": row_tiles.STATS.value}
        p.launch(kernels.rows_kernel, cdiv(n, tile_rows), loss=row_loss, **more, **rows)
        other = stats
        if spec.col_lse:
            other, col_loss = {name: scratch(f"col_{name}", m) for name in PARTS}, scratch("col_loss", m)
            more |= {f"{name}_out": value for name, value in other.items()}
            rows |= {"row_step": 1, "col_step": m, "R": COLUMN_ROWS, "C": min(256, tile_cols), "n": m, "m": n}
            rows |= {"row_skip": rows["col_skip"], "col_skip": rows["row_skip"]}
            if rows["SCORE"] & bit.BIAS.value:
                assert not spec.softcap
                rows["SCORE"] += bit.ROW_BIAS.value - bit.BIAS.value
            p.launch(kernels.rows_kernel, cdiv(m, COLUMN_ROWS), warps=8, loss=col_loss, **more, **rows)
        if g is not None:
            parts: dict[str, Any] = {f"row_{name}": value for name, value in stats.items()}
            parts |= {f"col_{name}": value for name, value in other.items()}
            grid = cdiv(n, both_rows) * cdiv(m, BOTH_COLS)
            tile: dict[str, Any] = {"R": both_rows, "C": BOTH_COLS}
            more = {"share": share, "WHOLE": whole}
            p.launch(kernels.both_kernel, grid, warps=8, x=x, dot=dot, g=g, **more, **tile, **parts, **scores)
    order: list[Buffer] = [loss]
    if needs.a:
        assert g is not None
        order.append(p.output("dA", (n, d), saved))
        p.product(order[-1], g, b)
    if needs.b and not spec.symmetric:
        assert g is not None
        order.append(p.output("dB", (m, d), saved))
        p.product(order[-1], g.t, a)
    sums: dict[str, Any] = {"row_loss": row_loss, "col_loss": col_loss, "dot": dot, "bias_dot": bias_dot}
    sums |= {"loss_out": loss, "scale": scores["scale"], "number": scores["number"], **common}
    if not whole:
        sums |= {"unit_out": scratch("unit", 1), "factor_out": p.output("factor", (), wide)}
    if needs.scale:
        order.append(p.output("dscale", (), wide))
        sums["scale_out"] = order[-1]
    if needs.bias:
        order.append(p.output("dbias", () if key.one_bias else (m,), wide))
        if key.one_bias:
            sums["bias_out"] = order[-1]
    if total:
        p.total(loss, row_loss)
    else:
        p.launch(kernels.finish_kernel, 1, n=n, dots=dots, HALF=spec.symmetric, BLOCK=1024, **sums)
    if needs.bias and not key.one_bias:
        tile = {"R": 32, "C": BOTH_COLS}
        p.launch(
            kernels.columns_kernel, cdiv(m, BOTH_COLS), g=g, weight=sums["unit_out"], out=order[-1], n=n, m=m, **tile
        )
    if not whole:
        order.append(sums["factor_out"])
    p.outputs = order
    return p.done()


def given_scores(p: Program, key: SmallKey, facts: Sequence[str]) -> tuple[Buffer, Buffer, dict[str, Any]]:
    """Declares a, b, scale or number, bias and ``facts``: those that are present.

    Returns a, b, and what the scores of a kernel need by name.
    """
    shape, spec = key.shape, key.spec
    a = p.given("a")
    b = a if spec.symmetric else p.given("b")
    given: dict[str, Any] = dict.fromkeys(("scale", "number", "bias", *facts))
    for name in given:
        if name in key.present or (name == "number" and "scale" not in key.present):
            given[name] = p.given(name)
    score = bit_sum(
        (bit.ONE_BIAS, key.one_bias),
        (bit.BIAS, "bias" in key.present and not key.one_bias),
        (bit.SOFTCAP, spec.softcap),
        (bit.SKIP, shape.has_skips),
        (bit.MASK_SELF, spec.mask_self),
    )
    positive = POSITIVE[spec.positive]
    if spec.positive == "one" and not shape.has_row_key:
        positive = bit.DIAGONAL.value
    more = {"softcap": float(spec.softcap), "n": shape.rows, "m": shape.cols, "SCORE": score, "POSITIVE": positive}
    return a, b, {**given, **more}


def tile_of(n: int, m: int) -> tuple[int, int]:
    """Rows and columns that a program of `rows_kernel` has in registers."""
    cols = min(IN_REGISTERS, max(64, 1 << (m - 1).bit_length()))
    rows = IN_REGISTERS // cols
    while rows > 1 and n // rows < ENOUGH_PROGRAMS:
        rows //= 2
    return rows, cols


def gradient_program(
    sizes: tuple[tuple[int, int] | None, ...],
    features: torch.dtype,
    needs: Needs,
    *,
    overwrite: bool,
) -> Program:
    """Gradients of features of these sizes, and of the scale, times ``grad_output``; outputs: those not in place."""
    p = Program()
    given = [p.given(name) for name in ("a", "b", "scale", "factor", "grad_output")]
    in_place = overwrite and saved_type(features, needs) == features
    named: dict[str, Any] = {"grad_output": given[4], "IN_PLACE": in_place, "BLOCK": BLOCK}
    if not is_whole(features, needs):
        named["factor"] = given[3]
    blocks = 1
    for name, buffer, size in zip(("a", "b"), given, sizes, strict=False):
        if size is not None:
            count = size[0] * size[1]
            out = buffer if in_place else p.output(f"{name}_out", size, features)
            named |= {name: buffer, f"{name}_out": out, f"{name}_size": count}
            blocks = max(blocks, cdiv(count, BLOCK))
    if needs.scale:
        named |= {"scale": given[2], "scale_out": p.output("scale_out", (), torch.float32)}
    p.launch(kernels.gradient_kernel, blocks, **named)
    return p.done()


def given_values(
    key: SmallKey, a: Tensor, b: Tensor | None, scale: Any, bias: Tensor | None, facts: Sequence[Any]
) -> list[Any]:
    """The tensors and numbers that `given_scores` declares."""
    if isinstance(scale, Tensor) and scale.dtype is not torch.float32:
        scale = scale.float()
    given = [a, scale] if key.spec.symmetric else [a, b, scale]
    if bias is not None:
        given.append(vector((bias[:1] if key.one_bias else bias).to(torch.float32)))
    for value in facts:
        if value is not None:
            given.append(vector(value))
    return given


def run_small(program: Program, key: SmallKey, given: Sequence[Any]) -> list[Tensor]:
    """The program's outputs. Contexts cost as much as a launch, so they are entered only where they change something."""
    device, precision = key.shape.device, key.precision
    index = device.index
    if precision == "torch" and not torch.is_grad_enabled() and (index is None or index == torch.cuda.current_device()):
        return program.run(device, *given)
    with torch.cuda.device(device if device.type == "cuda" else -1), torch.no_grad(), matmul_precision(precision):
        return program.run(device, *given)
