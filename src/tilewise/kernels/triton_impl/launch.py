"""Launching kernels on macro-tiles with little work on the host.

Triton looks at every argument of every launch to find the compiled kernel. Here all that a compiled kernel depends on is
the same for all macro-tiles of a call, so it is looked up by a short key and launched directly.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tilewise.kernels import keys
from tilewise.kernels.spec import Pair, PairSpec
from tilewise.kernels.triton_impl import parts
from tilewise.kernels.triton_impl.sizes import Sizes, multiprocessors, sizes_for
from tilewise.options import TileOptions

POSITIVE_ROWS = 64  # rows of one program of the kernels for positives
_compiled: dict[tuple[Any, ...], Any] = {}


def launch(kernel: Any, programs: int, values: dict[str, Any], key: tuple[Any, ...], warps: int, stages: int) -> None:
    """Run a kernel; ``key`` holds all that its compiled form depends on, beside which arguments are None."""
    args = [values.get(name) for name in kernel.arg_names]
    if values["device"].type != "cuda":  # the interpreter
        kernel[(programs,)](*args)
        return
    key = (kernel, values["device"], warps, stages, *key, *(arg is None for arg in args))
    compiled = _compiled.get(key)
    if compiled is None:
        _compiled[key] = kernel[(programs,)](*args, num_warps=warps, num_stages=stages)
    else:
        compiled[(programs, 1, 1)](*args)


def readable(features: Tensor) -> Tensor:
    """The features, or a copy of them whose rows a tensor descriptor can read."""
    item = features.element_size()
    aligned = features.data_ptr() % 16 == 0 and features.stride(0) * item % 16 == 0
    if features.stride(1) == 1 and aligned and features.stride(0) >= features.shape[1]:
        return features
    width = triton.cdiv(features.shape[1] * item, 16) * 16 // item
    copy = features.new_zeros((features.shape[0], width))[:, : features.shape[1]]
    return copy.copy_(features)


def vector(values: Tensor | None) -> Tensor | None:
    """Contiguous and at a 16-byte address, as every compiled kernel assumes."""
    if values is None:
        return None
    values = values.contiguous()
    return values.clone() if values.data_ptr() % 16 else values


def cut(values: Tensor | None, part: slice) -> Tensor | None:
    """values[part], None staying None."""
    return None if values is None else values[part]


def pieces(size: int, step: int) -> list[slice]:
    """[0, size) cut into slices of ``step``."""
    return [slice(start, min(start + step, size)) for start in range(0, size, step)]


@dataclass
class Call:
    """Everything that is the same for all macro-tiles of a call, and slices that are made once."""

    pair: Pair
    spec: PairSpec
    options: TileOptions
    a: Tensor
    b: Tensor
    score_bits: int
    positive: int
    exact: str
    forward_sizes: Sizes
    gradient_sizes: Sizes
    by_row: dict[str, Tensor | None]
    by_col: dict[str, Tensor | None]
    fixed: dict[str, Any]
    row_cuts: dict[Any, dict[str, Any]] = field(default_factory=dict)
    col_cuts: dict[Any, dict[str, Any]] = field(default_factory=dict)

    @staticmethod
    def of(pair: Pair, spec: PairSpec, options: TileOptions) -> Call:
        """Choose sizes, switches and small keys."""
        bias = pair.bias
        # An expanded number (the bias of a sigmoid loss) need not be read, nor its gradient taken, column by column.
        shared_bias = (
            bias is not None and bias.stride(0) == 0 and bias.shape[0] > 1 and spec.softplus and pair.row_key is None
        )
        if shared_bias:
            assert bias is not None
            bias = bias[:1].clone()
        bits = (parts.ONE_BIAS if shared_bias else parts.BIAS).value * (bias is not None)
        skipping = pair.row_skip is not None and pair.col_skip is not None
        bits += (
            parts.SOFTCAP.value * bool(spec.softcap) + parts.SKIP.value * skipping + parts.ITSELF.value * spec.itself
        )
        row_key, col_key, row_skip, col_skip = pair.row_key, None, None, None
        positive = {"none": 0, "one": parts.ONE.value, "many": parts.MANY.value}[spec.positive]
        if spec.positive == "one" and row_key is None:
            positive = parts.DIAGONAL.value
        if spec.positive == "many":
            assert pair.row_key is not None
            assert pair.col_key is not None
            row_key, col_key = keys.dense_ranks(pair.row_key, pair.col_key)
        if pair.row_skip is not None and pair.col_skip is not None:
            row_skip, col_skip = keys.dense_ranks(pair.row_skip, pair.col_skip)
        a = readable(pair.a)
        precision = torch.get_float32_matmul_precision() if options.precision == "torch" else options.precision
        forward_sizes, gradient_sizes = sizes_for(pair.a.device, pair.a.dtype, a.shape[1])
        if spec.positive == "many" or skipping:
            gradient_sizes = forward_sizes  # masks of a tile's size need room of their own
        col_zero = pair.row_zero if spec.symmetric else pair.col_zero
        return Call(
            pair=pair,
            spec=spec,
            options=options,
            a=a,
            b=a if spec.symmetric else readable(pair.b),
            score_bits=bits,
            positive=positive,
            exact="ieee" if precision == "highest" else "tf32",
            forward_sizes=forward_sizes,
            gradient_sizes=gradient_sizes,
            by_row={"row_key": vector(row_key), "row_skip": vector(row_skip), "row_zero": vector(pair.row_zero)},
            by_col={
                "col_key": vector(col_key),
                "col_skip": vector(col_skip),
                "col_zero": vector(col_zero),
                "col_weight": vector(pair.col_weight),
            }
            | ({} if shared_bias else {"bias": vector(bias)}),
            fixed={
                "scale": pair.scale,
                "softcap": spec.softcap,
                "device": pair.a.device,
                "D": a.shape[1],
                "SCORE": bits,
                "POSITIVE": positive,
                "EXACT": "ieee" if precision == "highest" else "tf32",
                "a_stride": a.stride(0),
                "b_stride": a.stride(0),
            }
            | ({"bias": bias} if shared_bias else {}),
        )

    def run(self, kernel: Any, i: slice, j: slice, sizes: Sizes, **values: Any) -> None:
        """A kernel of persistent programs over the macro-tile (i, j)."""
        programs = multiprocessors(self.a.device) * sizes.programs
        blocks = {"R": sizes.rows, "C": sizes.cols, "K": sizes.depth, "GROUP": sizes.group, "PROGRAMS": programs}
        given = self._given(i, j, sizes) | blocks | values
        bits = (values.get("STATS"), values.get("TERMS"), values.get("WIDE"))
        launch(kernel, programs, given, self._key(bits, sizes), sizes.warps, sizes.stages)

    def run_positive(self, kernel: Any, i: slice, j: slice, **values: Any) -> None:
        """A kernel for the positives of the rows i that lie in the columns j."""
        given = self._given(i, j, None) | {"P": POSITIVE_ROWS, "K": 64 if self.a.element_size() == 2 else 32} | values
        programs = triton.cdiv(i.stop - i.start, POSITIVE_ROWS)
        launch(kernel, programs, given, self._key((values.get("TERMS"),), None), 4, 2)

    def _key(self, bits: tuple[Any, ...], sizes: Sizes | None) -> tuple[Any, ...]:
        return (*bits, self.score_bits, self.positive, self.exact, sizes, self.a.shape[1], self.a.dtype)

    def _given(self, i: slice, j: slice, sizes: Sizes | None) -> dict[str, Any]:
        """Arguments that depend on the place of the macro-tile."""
        row_at, col_at = (i.start, i.stop, sizes), (j.start, j.stop, sizes)
        if row_at not in self.row_cuts:
            here = {name: cut(value, i) for name, value in self.by_row.items()} | {
                "a": self.a[i],
                "n": i.stop - i.start,
            }
            if sizes is not None:
                here["a_desc"] = TensorDescriptor.from_tensor(here["a"], [sizes.rows, sizes.depth])
            self.row_cuts[row_at] = here
        if col_at not in self.col_cuts:
            here = {name: cut(value, j) for name, value in self.by_col.items()} | {
                "b": self.b[j],
                "m": j.stop - j.start,
            }
            if sizes is not None:
                here["b_desc"] = TensorDescriptor.from_tensor(here["b"], [sizes.cols, sizes.depth])
            self.col_cuts[col_at] = here
        first = self.pair.col_start + j.start
        place = {"first": first, "ahead": self.pair.row_start + i.start - first, "b_stride": self.b.stride(0)}
        return self.fixed | self.row_cuts[row_at] | self.col_cuts[col_at] | place
