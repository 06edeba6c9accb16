"""Launching kernels on macro-tiles with little work on the host."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tilewise.kernels import keys
from tilewise.kernels.precision import float32_precision
from tilewise.kernels.spec import Pair, PairSpec
from tilewise.kernels.triton_impl import primitives as parts
from tilewise.kernels.triton_impl.launch.replay import Recording
from tilewise.kernels.triton_impl.sizes import Sizes, multiprocessors, sizes_for
from tilewise.options import TileOptions

WHOLE_UNIT = 8  # numbers that a thread can read or write at once
REPLAYED_SCORES = 2**34  # beyond, a step takes a tenth of a second, and a recording has thousands of entries
POSITIVE_ROWS = 64  # rows of one program of the kernels for positives
# Products of float32 on tensor cores: each number is split in two of TF32, which hold 22 of its 24 bits. Plain
# multiplications and additions ("ieee") are no nearer to float64, and took 25 times as long, their registers spilled.
FULL = "tf32x3"
_compiled: dict[tuple[Any, ...], Any] = {}
_compiling = (
    threading.Lock()
)  # one thread at a time: the others want the same kernels, and wait for less than they would take
_places: dict[Any, dict[str, int]] = {}  # of the arguments of each kernel


def cdiv(size: int, step: int) -> int:
    """How many steps cover the size; Triton's own is slow on the host."""
    return -(-size // step)


class Prepared:
    """A kernel with the arguments that stay the same during a call, ready to be launched with the others.

    Triton looks at every argument of every launch to find the compiled kernel. Here all that a compiled kernel depends
    on (types, alignment, constants, which arguments are None) is the same for all its launches, so it is looked up once.
    """

    def __init__(
        self,
        kernel: Any,
        device: torch.device,
        warps: int,
        stages: int,
        key: tuple[Any, ...],
        recording: Recording | None = None,
    ) -> None:
        self.kernel, self.device, self.key, self.recording = (
            kernel,
            device,
            (kernel, device, warps, stages, *key),
            recording,
        )
        self.options = {"num_warps": warps, "num_stages": stages}
        if kernel not in _places:
            _places[kernel] = {name: place for place, name in enumerate(kernel.arg_names)}
        self.places = _places[kernel]
        self.args: list[Any] = [None] * len(self.places)
        self.runners: dict[int, Any] = {}
        self.compiled: Any = None  # stays None in the interpreter
        self.rows: Any = None  # what was put last, so that it need not be put again
        self.cols: Any = None

    def put(self, values: dict[str, Any]) -> Prepared:
        """Set arguments by name; names that the kernel does not have are passed over."""
        places, args = self.places, self.args
        for name, value in values.items():
            place = places.get(name)
            if place is not None:
                args[place] = value
        return self

    def launch(self, programs: int) -> None:
        """Run it with the arguments as they are now."""
        runner = self.runners.get(programs)
        if runner is None:
            runner = self.runners[programs] = self._runner(programs)
        runner(*self.args)
        if self.recording is not None:
            self.recording.launched(runner, self.args, self.compiled, programs)

    def _runner(self, programs: int) -> Any:
        """The compiled kernel with its grid."""
        if self.device.type != "cuda":  # the interpreter
            return self.kernel[(programs,)]
        key = (*self.key, *(arg is None for arg in self.args))
        with _compiling:
            if key not in _compiled:
                _compiled[key] = self.kernel.warmup(*self.args, grid=(programs,), **self.options)
            self.compiled = _compiled[key]
            return self.compiled[(programs, 1, 1)]


def unit_of(*sizes: int) -> int:
    """What all of these sizes or strides are multiples of: UNIT of a kernel, which then reads and writes as much at once."""
    return 1 if any(size % WHOLE_UNIT for size in sizes) else WHOLE_UNIT


def readable(features: Tensor) -> Tensor:
    """The features, or a copy of them whose rows a tensor descriptor can read."""
    item = features.element_size()
    aligned = features.data_ptr() % 16 == 0 and features.stride(0) * item % 16 == 0
    if features.stride(1) == 1 and aligned and features.stride(0) >= features.shape[1]:
        return features
    width = cdiv(features.shape[1] * item, 16) * 16 // item
    copy = features.new_zeros((features.shape[0], width))[:, : features.shape[1]]
    return copy.copy_(features)


def tile_descriptor(g: Tensor, sizes: Sizes) -> TensorDescriptor:
    """Where `store_tile` writes."""
    return TensorDescriptor.from_tensor(g, [sizes.rows, sizes.cols // sizes.pieces])


def vector(values: Tensor | None) -> Tensor | None:
    """Contiguous and at a 16-byte address, as every compiled kernel assumes."""
    if values is None:
        return None
    values = values.contiguous()
    return values.clone() if values.data_ptr() % 16 else values


def cut(values: Tensor | None, part: slice) -> Tensor | None:
    """values[part], None staying None."""
    return None if values is None else values[part]


def small_keys(pair: Pair, spec: PairSpec) -> Pair:
    """The pair with int32 ranks for keys that a kernel compares; with those, which cost a sort, it is given back as it is."""
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
    recording: Recording | None = None
    prepared: dict[Any, Prepared] = field(default_factory=dict)
    row_cuts: dict[Any, dict[str, Any]] = field(default_factory=dict)
    col_cuts: dict[Any, dict[str, Any]] = field(default_factory=dict)

    @staticmethod
    def of(pair: Pair, spec: PairSpec, options: TileOptions, recording: Recording | None = None) -> Call:
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
            parts.SOFTCAP.value * bool(spec.softcap)
            + parts.SKIP.value * skipping
            + parts.MASK_SELF.value * spec.mask_self
        )
        pair = small_keys(pair, spec)
        positive = {"none": 0, "one": parts.ONE.value, "many": parts.MANY.value}[spec.positive]
        if spec.positive == "one" and pair.row_key is None:
            positive = parts.DIAGONAL.value
        many = spec.positive == "many"
        a = readable(pair.a)
        b = a if spec.symmetric else readable(pair.b)
        precision = float32_precision() if options.precision == "torch" else options.precision
        forward_sizes, gradient_sizes = sizes_for(
            pair.a.device, pair.a.dtype, a.shape[1], columns=spec.col_lse or spec.symmetric
        )
        col_shift = pair.row_shift if spec.symmetric else pair.col_shift
        return Call(
            pair=pair,
            spec=spec,
            options=options,
            a=a,
            b=b,
            score_bits=bits,
            positive=positive,
            exact=FULL if precision == "highest" else "tf32",
            forward_sizes=forward_sizes,
            gradient_sizes=gradient_sizes,
            by_row={
                "row_key": vector(pair.row_key),
                "row_skip": vector(pair.row_skip) if skipping else None,
                "row_shift": vector(pair.row_shift),
            },
            by_col={
                "col_key": vector(pair.col_key) if many else None,
                "col_skip": vector(pair.col_skip) if skipping else None,
                "col_shift": vector(col_shift),
                "col_weight": vector(pair.col_weight),
            }
            | ({} if shared_bias else {"bias": vector(bias)}),
            fixed={
                "scale": pair.scale,
                "softcap": spec.softcap,
                "D": a.shape[1],
                "SCORE": bits,
                "POSITIVE": positive,
                "EXACT": FULL if precision == "highest" else "tf32",
                "a_stride": a.stride(0),
                "b_stride": b.stride(0),
            }
            | ({"bias": bias} if shared_bias else {}),
            recording=recording,
        )

    def empty(self, *shape: int, dtype: torch.dtype | None = None, zero: bool = False) -> Tensor:
        """New memory, in the type of the statistics unless told."""
        dtype = dtype or self.pair.scale.dtype
        if self.recording is not None:
            return self.recording.empty(self.a, shape, dtype, zero)
        return self.a.new_zeros(shape, dtype=dtype) if zero else self.a.new_empty(shape, dtype=dtype)

    def prepare(self, kernel: Any, warps: int, stages: int, key: tuple[Any, ...]) -> Prepared:
        """A kernel whose launches are written down if this call leaves a recording."""
        return Prepared(kernel, self.a.device, warps, stages, key, self.recording)

    def run(self, kernel: Any, i: slice, j: slice, sizes: Sizes, **values: Any) -> None:
        """A kernel of persistent programs over the macro-tile (i, j)."""
        programs = multiprocessors(self.a.device) * sizes.programs
        score = self.score_bits if self.meets_itself(i, j) else self.score_bits & ~parts.MASK_SELF.value
        switches = kernel, score, *(values.get(name) for name in ("STATS", "TERMS", "WIDE", "CARRY", "STRIP"))
        prepared = self.prepared.get(switches)
        if prepared is None:
            key = (*switches[1:], self.positive, self.exact, sizes, self.a.shape[1], self.a.dtype)
            blocks = {"R": sizes.rows, "C": sizes.cols, "K": sizes.depth, "GROUP": sizes.group, "PROGRAMS": programs}
            prepared = self.prepare(kernel, sizes.warps, sizes.stages, key)
            self.prepared[switches] = prepared.put(self.fixed).put(blocks).put({"SCORE": score})
        self._place(prepared, i, j, sizes).put(values).launch(programs)

    def meets_itself(self, i: slice, j: slice) -> bool:
        """Whether a row and a column of the macro-tile may have the same global index."""
        ahead = self.pair.row_start - self.pair.col_start
        return i.start + ahead < j.stop and j.start < i.stop + ahead

    def run_positive(self, kernel: Any, i: slice, j: slice, **values: Any) -> None:
        """A kernel for the positives of the rows i that lie in the columns j."""
        prepared = self.prepared.get((kernel, None))
        if prepared is None:
            key = (values.get("TERMS"), self.score_bits, self.positive, self.exact, self.a.shape[1], self.a.dtype)
            blocks = {"P": POSITIVE_ROWS, "K": 64 if self.a.element_size() == 2 else 32}
            prepared = self.prepare(kernel, 4, 2, key).put(self.fixed).put(blocks)
            self.prepared[kernel, None] = prepared
        self._place(prepared, i, j, None).put(values).launch(cdiv(i.stop - i.start, POSITIVE_ROWS))

    def rows(self, i: slice, sizes: Sizes | None) -> dict[str, Any]:
        """What the rows i give to a kernel, cut once."""
        at = i.start, i.stop, sizes is not None
        here = self.row_cuts.get(at)
        if here is None:
            here = {name: cut(value, i) for name, value in self.by_row.items()} | {
                "a": self.a[i],
                "n": i.stop - i.start,
            }
            if sizes is not None:
                here["a_desc"] = TensorDescriptor.from_tensor(here["a"], [sizes.rows, sizes.depth])
            self.row_cuts[at] = here
        return here

    def cols(self, j: slice, sizes: Sizes | None) -> dict[str, Any]:
        """What the columns j give to a kernel, cut once."""
        at = j.start, j.stop, sizes is not None
        here = self.col_cuts.get(at)
        if here is None:
            here = {name: cut(value, j) for name, value in self.by_col.items()} | {
                "b": self.b[j],
                "m": j.stop - j.start,
            }
            if sizes is not None:
                here["b_desc"] = TensorDescriptor.from_tensor(here["b"], [sizes.cols, sizes.depth])
            here["first"] = self.pair.col_start + j.start
            self.col_cuts[at] = here
        return here

    def _place(self, prepared: Prepared, i: slice, j: slice, sizes: Sizes | None) -> Prepared:
        rows, cols = self.rows(i, sizes), self.cols(j, sizes)
        if prepared.rows is not rows:
            prepared.put(rows).rows = rows
        if prepared.cols is not cols:
            prepared.put(cols).cols = cols
        return prepared.put({"ahead": (self.pair.row_start + i.start) - (self.pair.col_start + j.start)})


def host_may_limit(pair: Pair) -> bool:
    """Whether the host's time may count. Beyond, a step takes the GPU a tenth of a second and a recording thousands of entries."""
    return pair.a.shape[0] * pair.b.shape[0] <= REPLAYED_SCORES


def launch_settings(pair: Pair, spec: PairSpec, options: TileOptions) -> tuple[object, ...]:
    """What the launches depend on beside the tensors."""
    one_shift = pair.col_shift is pair.row_shift
    return pair.row_start, pair.col_start, one_shift, spec, options, float32_precision()


def tensors_of(pair: Pair, spec: PairSpec) -> list[Tensor | None]:
    """Every tensor of a pair once: with symmetric scores the columns are the rows, and both may share their zeros."""
    b = None if spec.symmetric else pair.b
    shifts = pair.row_shift, None if pair.col_shift is pair.row_shift else pair.col_shift
    keys = pair.row_key, pair.col_key, pair.row_skip, pair.col_skip
    return [pair.a, b, pair.scale, pair.bias, *keys, *shifts, pair.col_weight]


def on_device(features: Tensor) -> contextlib.AbstractContextManager[object]:
    """Launches go to the device that holds the features."""
    if not features.is_cuda or features.device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(features.device)
