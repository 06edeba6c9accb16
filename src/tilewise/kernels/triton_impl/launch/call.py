"""What all macro-tiles of a call share, and launches on them with little work on the host."""

from __future__ import annotations

import contextlib
import dataclasses
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tilewise.kernels import keys
from tilewise.kernels.precision import float32_precision
from tilewise.kernels.spec import Pair, PairSpec
from tilewise.kernels.triton_impl import bits as bit
from tilewise.kernels.triton_impl.launch.prepared import Prepared
from tilewise.kernels.triton_impl.launch.replay import Recording
from tilewise.kernels.triton_impl.sizes import Sizes, forward_sizes, gradient_sizes, multiprocessors
from tilewise.options import TileOptions

WHOLE_UNIT = 8  # numbers that a thread can read or write at once
REPLAYED_SCORES = 2**34  # beyond, a step takes the GPU a tenth of a second, and a recording has thousands of entries
POSITIVE_ROWS = 64  # rows of one program of the kernels for positives
# Products of float32 on tensor cores: each number is split into two of TF32, which hold 22 of its 24 bits. Plain
# multiplications and additions ("ieee") are no closer to float64 and took 25 times as long: their registers spilled.
FULL = "tf32x3"
POSITIVE = {"none": 0, "one": bit.ONE.value, "many": bit.MANY.value}


def cdiv(size: int, step: int) -> int:
    """How many steps cover the size. The function of Triton is slow on the host."""
    return -(-size // step)


def bit_sum(*switches: tuple[Any, object]) -> int:
    """The sum of the bits whose condition is true; each switch is (bit of a kernel, condition)."""
    return sum(one.value for one, condition in switches if condition)


def unit_of(*sizes: int) -> int:
    """UNIT of a kernel: a number that divides all these sizes or strides, so that as much is read or written at once."""
    return 1 if any(size % WHOLE_UNIT for size in sizes) else WHOLE_UNIT


def readable(features: Tensor) -> Tensor:
    """The features, or a copy whose rows a tensor descriptor can read."""
    item = features.element_size()
    aligned = features.data_ptr() % 16 == 0 and features.stride(0) * item % 16 == 0
    if features.stride(1) == 1 and aligned and features.stride(0) >= features.shape[1]:
        return features
    width = cdiv(features.shape[1] * item, 16) * 16 // item
    copy = features.new_zeros((features.shape[0], width))[:, : features.shape[1]]
    return copy.copy_(features)


def tile_descriptor(g: Tensor, sizes: Sizes) -> TensorDescriptor:
    """The descriptor with which `store_tile` writes."""
    return TensorDescriptor.from_tensor(g, [sizes.rows, sizes.cols // sizes.pieces])


def vector(values: Tensor | None) -> Tensor | None:
    """Contiguous and at a 16-byte address, as every compiled kernel assumes."""
    if values is None:
        return None
    values = values.contiguous()
    return values.clone() if values.data_ptr() % 16 else values


def exact_products(options: TileOptions) -> str:
    """EXACT of a kernel: how float32 numbers are multiplied."""
    precision = float32_precision() if options.precision == "torch" else options.precision
    return FULL if precision == "highest" else "tf32"


def small_keys(pair: Pair, spec: PairSpec) -> Pair:
    """The pair with int32 ranks instead of the keys that a kernel compares. Ranks cost a sort and are made once."""
    changes: dict[str, Any] = {}
    if spec.positive == "many":
        assert pair.row_key is not None
        assert pair.col_key is not None
        if pair.row_key.dtype != torch.int32:
            changes["row_key"], changes["col_key"] = keys.dense_ranks(pair.row_key, pair.col_key)
    if pair.row_skip is not None and pair.col_skip is not None and pair.row_skip.dtype != torch.int32:
        changes["row_skip"], changes["col_skip"] = keys.dense_ranks(pair.row_skip, pair.col_skip)
    return dataclasses.replace(pair, **changes) if changes else pair


def pieces(size: int, step: int) -> list[slice]:
    """[0, size) cut into slices of ``step``."""
    return [slice(start, min(start + step, size)) for start in range(0, size, step)]


@dataclass
class Call:
    """What all macro-tiles of a call share, and slices of tensors that are cut once."""

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
    recording: Recording | None = None
    prepared: dict[Any, Prepared] = field(default_factory=dict)
    row_cuts: dict[Any, dict[str, Any]] = field(default_factory=dict)
    col_cuts: dict[Any, dict[str, Any]] = field(default_factory=dict)

    @staticmethod
    def of(pair: Pair, spec: PairSpec, options: TileOptions, recording: Recording | None = None) -> Call:
        """Choose sizes and switches."""
        bias = pair.bias
        # An expanded number (the bias of a sigmoid loss) is read once, and its gradient is one sum.
        shared_bias = (
            bias is not None and bias.stride(0) == 0 and bias.shape[0] > 1 and spec.softplus and pair.row_key is None
        )
        if shared_bias:
            assert bias is not None
            bias = bias[:1].clone()
        has_skips = pair.row_skip is not None and pair.col_skip is not None
        score_bits = bit_sum(
            (bit.ONE_BIAS, shared_bias),
            (bit.BIAS, bias is not None and not shared_bias),
            (bit.SOFTCAP, spec.softcap),
            (bit.SKIP, has_skips),
            (bit.MASK_SELF, spec.mask_self),
        )
        pair = small_keys(pair, spec)
        diagonal = spec.positive == "one" and pair.row_key is None
        positive = bit.DIAGONAL.value if diagonal else POSITIVE[spec.positive]
        a = readable(pair.a)
        b = a if spec.symmetric else readable(pair.b)
        device, dtype, width, exact = a.device, a.dtype, a.shape[1], exact_products(options)
        by_row = {
            "row_key": pair.row_key,
            "row_skip": pair.row_skip if has_skips else None,
            "row_shift": pair.row_shift,
        }
        by_col = {
            "col_key": pair.col_key if spec.positive == "many" else None,
            "col_skip": pair.col_skip if has_skips else None,
            "col_shift": pair.row_shift if spec.symmetric else pair.col_shift,
            "col_weight": pair.col_weight,
        }
        fixed = {"scale": pair.scale, "softcap": spec.softcap, "a_stride": a.stride(0), "b_stride": b.stride(0)}
        fixed |= {"D": width, "SCORE": score_bits, "POSITIVE": positive, "EXACT": exact}
        (fixed if shared_bias else by_col)["bias"] = bias
        sizes = (
            forward_sizes(device, dtype, width, columns=spec.col_lse or spec.symmetric),
            gradient_sizes(device, dtype, width),
        )
        rows, cols = ({name: vector(value) for name, value in by.items()} for by in (by_row, by_col))
        return Call(pair, spec, options, a, b, score_bits, positive, exact, *sizes, rows, cols, fixed, recording)

    def empty(self, *shape: int, dtype: torch.dtype | None = None, zero: bool = False) -> Tensor:
        """New memory, by default in the type of the statistics."""
        dtype = dtype or self.pair.scale.dtype
        if self.recording is not None:
            return self.recording.empty(self.a, shape, dtype, zero)
        return self.a.new_zeros(shape, dtype=dtype) if zero else self.a.new_empty(shape, dtype=dtype)

    def prepare(self, kernel: Any, warps: int = 4, stages: int = 2) -> Prepared:
        """A kernel whose launches are recorded if this call is."""
        return Prepared(kernel, self.a.device, warps, stages, self.recording)

    def run(self, kernel: Any, i: slice, j: slice, sizes: Sizes, **values: Any) -> None:
        """A kernel of persistent programs over the macro-tile (i, j)."""
        programs = multiprocessors(self.a.device) * sizes.programs
        score = self.score_bits if self.meets_itself(i, j) else self.score_bits & ~bit.MASK_SELF.value
        key = kernel, score, *(value if name.isupper() else value is None for name, value in values.items())
        prepared = self.prepared.get(key)
        if prepared is None:
            tile = {"R": sizes.rows, "C": sizes.cols, "K": sizes.depth, "GROUP": sizes.group, "PROGRAMS": programs}
            prepared = self.prepared[key] = self.prepare(kernel, sizes.warps, sizes.stages)
            prepared.offer(self.fixed).put(tile).put({"SCORE": score})
        self._place(prepared, i, j, sizes).put(values).launch(programs)

    def meets_itself(self, i: slice, j: slice) -> bool:
        """Whether a row and a column of the macro-tile may have the same global index."""
        ahead = self.pair.row_start - self.pair.col_start
        return i.start + ahead < j.stop and j.start < i.stop + ahead

    def run_positive(self, kernel: Any, i: slice, j: slice, **values: Any) -> None:
        """A kernel for the positives of the rows i that lie in the columns j."""
        key = kernel, *(value is None for value in values.values())
        prepared = self.prepared.get(key)
        if prepared is None:
            tile = {"P": POSITIVE_ROWS, "K": 64 if self.a.element_size() == 2 else 32}
            prepared = self.prepared[key] = self.prepare(kernel).offer(self.fixed).offer(tile)
        self._place(prepared, i, j, None).put(values).launch(cdiv(i.stop - i.start, POSITIVE_ROWS))

    def rows(self, i: slice, sizes: Sizes | None) -> dict[str, Any]:
        """The arguments of kernels that belong to the rows i."""
        at = i.start, i.stop, sizes is not None
        here = self.row_cuts.get(at)
        if here is None:
            here = {name: None if value is None else value[i] for name, value in self.by_row.items()}
            here |= {"a": self.a[i], "n": i.stop - i.start}
            if sizes is not None:
                here["a_desc"] = TensorDescriptor.from_tensor(here["a"], [sizes.rows, sizes.depth])
            self.row_cuts[at] = here
        return here

    def cols(self, j: slice, sizes: Sizes | None) -> dict[str, Any]:
        """The arguments of kernels that belong to the columns j."""
        at = j.start, j.stop, sizes is not None
        here = self.col_cuts.get(at)
        if here is None:
            here = {name: None if value is None else value[j] for name, value in self.by_col.items()}
            here |= {"b": self.b[j], "m": j.stop - j.start, "first": self.pair.col_start + j.start}
            if sizes is not None:
                here["b_desc"] = TensorDescriptor.from_tensor(here["b"], [sizes.cols, sizes.depth])
            self.col_cuts[at] = here
        return here

    def ahead(self, i: slice, j: slice) -> int:
        """The global index of the first of the rows i, less that of the first of the columns j."""
        return (self.pair.row_start + i.start) - (self.pair.col_start + j.start)

    def _place(self, prepared: Prepared, i: slice, j: slice, sizes: Sizes | None) -> Prepared:
        rows, cols = self.rows(i, sizes), self.cols(j, sizes)
        if prepared.rows is not rows:
            prepared.offer(rows).rows = rows
        if prepared.cols is not cols:
            prepared.offer(cols).cols = cols
        return prepared.put({"ahead": self.ahead(i, j)})


def host_may_limit(pair: Pair) -> bool:
    """Whether the call is so small that the time of the host may count, and launches are recorded."""
    return pair.a.shape[0] * pair.b.shape[0] <= REPLAYED_SCORES


def launch_settings(pair: Pair, spec: PairSpec, options: TileOptions) -> tuple[object, ...]:
    """What the launches depend on, apart from tensors."""
    one_shift = pair.col_shift is pair.row_shift
    precision = float32_precision() if pair.a.dtype == torch.float32 else None
    return pair.row_start, pair.col_start, one_shift, spec, options, precision


def tensors_of(pair: Pair, spec: PairSpec) -> list[Tensor | None]:
    """Every tensor of a pair once: with symmetric scores the columns are the rows, and both may share their shifts."""
    b = None if spec.symmetric else pair.b
    shifts = pair.row_shift, None if pair.col_shift is pair.row_shift else pair.col_shift
    keys = pair.row_key, pair.col_key, pair.row_skip, pair.col_skip
    return [pair.a, b, pair.scale, pair.bias, *keys, *shifts, pair.col_weight]


def on_device(features: Tensor) -> contextlib.AbstractContextManager[object]:
    """Launches go to the device that holds the features."""
    if not features.is_cuda or features.device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(features.device)
