"""A call of the backend: arguments that all its macro-tiles share, and launches with little work on the host."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tilewise.kernels import keys
from tilewise.kernels.precision import float32_precision
from tilewise.kernels.spec import Pair, PairSpec
from tilewise.kernels.triton_impl import bits as bit
from tilewise.kernels.triton_impl.launch.prepared import Prepared
from tilewise.kernels.triton_impl.launch.replay import Recording, TensorStep, allocate, replay_or_record
from tilewise.kernels.triton_impl.sizes import Sizes, forward_sizes, gradient_sizes, guided_sizes, multiprocessors
from tilewise.options import TileOptions

WHOLE_UNIT = 8  # numbers that a thread can read or write at once
REPLAYED_SCORES = 2**34  # larger calls are not recorded: they have thousands of launches, and the host is not the limit
POSITIVE_ROWS = 64  # rows of one program of the kernels for positives
# Products of float32 on tensor cores: each number is split into two of TF32, which hold 22 of its 24 bits. Plain
# multiplications and additions ("ieee") are no closer to float64 and took 25 times as long: their registers spilled.
FULL = "tf32x3"
ROW_VECTORS = ("row_key", "row_skip", "row_shift", "row_limit", "row_norm", "guide_norm", "row_scale")
COL_VECTORS = ("col_key", "col_skip", "col_shift", "col_weight", "guide_bias")
GUIDE = {"mask": bit.MASK.value, "kl": bit.KL.value, "reverse_kl": bit.REVERSE_KL.value, "jsd": bit.JSD.value}
POSITIVE = {"none": 0, "one": bit.ONE.value, "many": bit.MANY.value}


def cdiv(size: int, step: int) -> int:
    """How many steps cover the size. The function of Triton is slow on the host."""
    return -(-size // step)


def bit_sum(*switches: tuple[Any, object]) -> int:
    """The sum of the bits whose condition is true; each switch is (bit of a kernel, condition)."""
    return sum(one.value for one, condition in switches if condition)


def unit_of(*sizes: int) -> int:
    """UNIT of a kernel: 8 if it divides all these sizes or strides, so that a thread reads or writes 8 numbers at once."""
    return 1 if any(size % WHOLE_UNIT for size in sizes) else WHOLE_UNIT


def row_width(cols: int, dtype: torch.dtype) -> int:
    """Numbers from one row of a matrix to the next, so that each row starts at a 16-byte address."""
    step = 16 // dtype.itemsize
    return cdiv(cols, step) * step


def readable(features: Tensor) -> Tensor:
    """The features, or a copy whose rows a tensor descriptor can read."""
    item = features.element_size()
    aligned = features.data_ptr() % 16 == 0 and features.stride(0) * item % 16 == 0
    if features.stride(1) == 1 and aligned and features.stride(0) >= features.shape[1]:
        return features
    rows, cols = features.shape
    return features.new_zeros((rows, row_width(cols, features.dtype)))[:, :cols].copy_(features)


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


class Call:
    """Arguments that all macro-tiles of a call share. The slices of its tensors are made once."""

    def __init__(self, pair: Pair, spec: PairSpec, options: TileOptions, recording: Recording | None = None) -> None:
        """Choose sizes and switches."""
        self.pair = pair = small_keys(pair, spec)
        self.spec, self.options, self.recording, bias = spec, options, recording, pair.bias
        # An expanded number (the bias of a sigmoid loss) is read once, and its gradient is one sum.
        shared = None
        if bias is not None and bias.stride(0) == 0 and bias.shape[0] > 1 and spec.softplus and pair.row_key is None:
            shared, bias = vector(bias[:1]), None
        self.score_bits = bit_sum(
            (bit.ONE_BIAS, shared is not None),
            (bit.BIAS, bias is not None),
            (bit.SOFTCAP, spec.softcap),
            (bit.SKIP, pair.row_skip is not None and pair.col_skip is not None),
            (bit.MASK_SELF, spec.mask_self),
        )
        diagonal = spec.positive == "one" and pair.row_key is None
        self.positive = bit.DIAGONAL.value if diagonal else POSITIVE[spec.positive]
        self.exact = exact_products(options)
        self.a = readable(pair.a)
        self.b = self.a if spec.symmetric else readable(pair.b)
        kind = self.a.device, self.a.dtype, self.a.shape[1]
        self.forward_sizes = forward_sizes(*kind, columns=spec.col_lse or spec.symmetric)
        self.gradient_sizes = gradient_sizes(*kind)
        self.by_row = {name: vector(getattr(pair, name)) for name in ROW_VECTORS}
        self.by_col = {name: vector(getattr(pair, name)) for name in COL_VECTORS}
        self.pick = vector(pair.pick)
        self.by_row["picked"] = self.pick if spec.skip_picked else None
        if spec.symmetric:
            self.by_col["col_shift"] = self.by_row["row_shift"]
        self.fixed: dict[str, Any] = {"scale": pair.scale, "softcap": spec.softcap, "D": self.a.shape[1]}
        self.fixed |= {"a_stride": self.a.stride(0), "b_stride": self.b.stride(0), "picks": pair.shape.picks}
        self.fixed |= {"SCORE": self.score_bits, "POSITIVE": self.positive, "EXACT": self.exact}
        if shared is None:
            self.by_col["bias"] = vector(bias)
        else:
            self.fixed["bias"] = shared
        self.guide_a: Tensor | None = None
        self.guide_b: Tensor | None = None
        if pair.guide_a is not None and pair.guide_b is not None:
            self.guide_a, self.guide_b = readable(pair.guide_a), readable(pair.guide_b)
            self.guided_sizes = guided_sizes(*kind[:2])
            score = bit_sum((bit.BIAS, pair.guide_bias is not None), (bit.SOFTCAP, spec.guide_softcap))
            self.fixed |= {"guide_scale": pair.guide_scale, "guide_softcap": spec.guide_softcap, "hot": spec.hot}
            # 1 - beta is rounded once, here: in float32 it would be 0 for a beta close to 1.
            self.fixed |= {"beta": spec.beta, "rest": 1.0 - spec.beta}
            self.fixed |= {"E": self.guide_a.shape[1], "GUIDE": GUIDE[spec.guide]}
            self.fixed |= {"GUIDE_SCORE": score}
        self.prepared: dict[Any, Prepared] = {}
        self.row_cuts: dict[Any, dict[str, Any]] = {}
        self.col_cuts: dict[Any, dict[str, Any]] = {}

    def empty(self, *shape: int, dtype: torch.dtype | None = None, zero: bool = False) -> Tensor:
        """New memory, by default in the type of the statistics."""
        return allocate(self.recording, self.a, shape, dtype or self.pair.scale.dtype, zero)

    def prepare(self, kernel: Any, warps: int = 4, stages: int = 2) -> Prepared:
        """A kernel whose launches are recorded if this call is."""
        return Prepared(kernel, self.a.device, warps, stages, self.recording)

    def step(self, run: TensorStep, target: Tensor, left: Tensor, right: Tensor, first: bool = True) -> None:
        """``run`` of three tensors, for instance a product of matrices, which is recorded if this call is."""
        run(target, left, right, first)
        if self.recording is not None:
            self.recording.stepped(run, target, left, right, first)

    def do_not_record(self) -> None:
        """Discard the recording, because torch will compute something that `step` does not record."""
        if self.recording is not None:
            self.recording.whole = False

    def run(self, kernel: Any, i: slice, j: slice, sizes: Sizes, **values: Any) -> None:
        """A kernel of persistent programs over the macro-tile (i, j)."""
        programs = multiprocessors(self.a.device) * sizes.programs
        score = self.score_bits if self.may_have_self_pairs(i, j) else self.score_bits & ~bit.MASK_SELF.value
        key = kernel, score, *(value if name.isupper() else value is None for name, value in values.items())
        prepared = self.prepared.get(key)
        if prepared is None:
            tile = {"R": sizes.rows, "C": sizes.cols, "K": sizes.depth, "GROUP": sizes.group, "PROGRAMS": programs}
            prepared = self.prepared[key] = self.prepare(kernel, sizes.warps, sizes.stages)
            prepared.offer(self.fixed).put(tile).put({"SCORE": score})
        self._place(prepared, i, j, sizes).put(values).launch(programs)

    def run_positive(self, kernel: Any, i: slice, j: slice, **values: Any) -> None:
        """A kernel for the positives of the rows i that lie in the columns j, or, with `picks`, for picked columns."""
        key = kernel, *(value if name.isupper() else value is None for name, value in values.items())
        prepared = self.prepared.get(key)
        if prepared is None:
            tile = {"P": POSITIVE_ROWS, "K": 64 if self.a.element_size() == 2 else 32, "picks": 1}
            prepared = self.prepared[key] = self.prepare(kernel).offer(self.fixed).offer(tile)
        entries = values.get("n", i.stop - i.start)
        self._place(prepared, i, j, None).put(values).launch(cdiv(entries, POSITIVE_ROWS))

    def picks(self, i: slice, **values: Tensor) -> dict[str, Any]:
        """Arguments of `run_positive` for the columns that the rows i pick; ``values`` are (n, K) of all rows."""
        assert self.pick is not None
        count = self.pick.shape[1]
        found: dict[str, Any] = {name: value[i].view(-1) for name, value in ({"row_key": self.pick} | values).items()}
        return found | {"n": (i.stop - i.start) * count, "picks": count, "POSITIVE": bit.PICKED.value}

    def _place(self, prepared: Prepared, i: slice, j: slice, sizes: Sizes | None) -> Prepared:
        return prepared.offer(self.rows(i, sizes)).offer(self.cols(j, sizes)).put({"ahead": self.ahead(i, j)})

    def may_have_self_pairs(self, i: slice, j: slice) -> bool:
        """Whether a row and a column of the macro-tile may have the same global index."""
        ahead = self.pair.row_start - self.pair.col_start
        return i.start + ahead < j.stop and j.start < i.stop + ahead

    def ahead(self, i: slice, j: slice) -> int:
        """The global index of the first of the rows i, less that of the first of the columns j."""
        return (self.pair.row_start + i.start) - (self.pair.col_start + j.start)

    def rows(self, i: slice, sizes: Sizes | None) -> dict[str, Any]:
        """The arguments of kernels that belong to the rows i."""
        at = i.start, i.stop, sizes is not None
        here = self.row_cuts.get(at)
        if here is None:
            here = self.row_cuts[at] = cut(self.by_row | {"a": self.a}, i) | {"n": i.stop - i.start}
            if sizes is not None:
                here["a_desc"] = TensorDescriptor.from_tensor(here["a"], [sizes.rows, sizes.depth])
                if self.guide_a is not None:
                    here["ga_desc"] = TensorDescriptor.from_tensor(self.guide_a[i], [sizes.rows, sizes.depth])
        return here

    def cols(self, j: slice, sizes: Sizes | None) -> dict[str, Any]:
        """The arguments of kernels that belong to the columns j."""
        at = j.start, j.stop, sizes is not None
        here = self.col_cuts.get(at)
        if here is None:
            here = self.col_cuts[at] = cut(self.by_col | {"b": self.b}, j)
            here |= {"m": j.stop - j.start, "first": self.pair.col_start + j.start}
            if sizes is not None:
                here["b_desc"] = TensorDescriptor.from_tensor(here["b"], [sizes.cols, sizes.depth])
                if self.guide_b is not None:
                    here["gb_desc"] = TensorDescriptor.from_tensor(self.guide_b[j], [sizes.cols, sizes.depth])
        return here


def cut(values: dict[str, Tensor | None], at: slice) -> dict[str, Any]:
    """A slice of each tensor."""
    return {name: None if value is None else value[at] for name, value in values.items()}


def replayed(
    what: tuple[Any, ...],
    pair: Pair,
    spec: PairSpec,
    options: TileOptions,
    more: Sequence[Tensor | None],
    run: Callable[[Call], tuple[Any, ...]],
) -> Sequence[Any]:
    """The result of ``run``. The first call of a kind is recorded, and later ones replay its launches.

    Calls with more than REPLAYED_SCORES scores are neither recorded nor replayed. The launches depend on ``what`` in
    addition to the pair, and they read the tensors ``more``.
    """
    # The statistics of a pair with a guide are merged by torch, and only launches of kernels are recorded.
    if pair.a.shape[0] * pair.b.shape[0] > REPLAYED_SCORES or spec.guide != "none":
        return run(Call(pair, spec, options))
    # Every tensor once: with symmetric scores the columns are the rows, and both may share their shifts.
    one_shift = pair.col_shift is pair.row_shift
    columns = None if spec.symmetric else pair.b, None if one_shift else pair.col_shift
    named = pair.row_key, pair.col_key, pair.row_skip, pair.col_skip
    inputs = [pair.a, pair.scale, pair.bias, *named, pair.row_shift, *columns, pair.col_weight]
    inputs += [pair.pick, pair.row_scale, pair.only_if, *more]
    precision = float32_precision() if pair.a.dtype == torch.float32 else None
    what = *what, pair.row_start, pair.col_start, one_shift, spec, options, precision
    return replay_or_record(what, inputs, lambda recording: run(Call(pair, spec, options, recording)), pair.a.device)


NOTHING = contextlib.nullcontext()


def on_device(features: Tensor) -> contextlib.AbstractContextManager[object]:
    """Launches go to the device that holds the features."""
    if not features.is_cuda or features.device.index == torch.cuda.current_device():
        return NOTHING
    return torch.cuda.device(features.device)


def without_graph() -> contextlib.AbstractContextManager[object]:
    """`torch.no_grad`, which costs nothing where an autograd function has switched gradients off already."""
    return torch.no_grad() if torch.is_grad_enabled() else NOTHING
