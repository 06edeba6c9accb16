"""What kernels over the scores of a pair take: tensors by name, their rows and columns, and compile-time switches.

`Scores` has buffers of a program. `run_program` finds the program of a call, or writes it, and runs it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from tilewise.kernels import keys
from tilewise.kernels import tensors as table
from tilewise.kernels.precision import float32_precision
from tilewise.kernels.spec import Pair, PairShape, PairSpec, stat_dtype
from tilewise.kernels.tensors import COL_VECTORS, ROW_VECTORS
from tilewise.kernels.triton_impl import bits as bit
from tilewise.kernels.triton_impl import tf32
from tilewise.kernels.triton_impl.buffers import Buffer, Descriptor
from tilewise.kernels.triton_impl.program import Program
from tilewise.kernels.triton_impl.sizes import (
    TF32,
    Sizes,
    forward_sizes,
    gradient_sizes,
    guided_sizes,
    multiprocessors,
)
from tilewise.options import TileOptions

WHOLE_UNIT = 8  # numbers that a thread can read or write at once
MOST_PROGRAMS = 256
POSITIVE_ROWS = 64  # rows of one program of the kernels for positives
# Products of float32 on tensor cores: each number is split into two of TF32, which hold 22 of its 24 bits. Plain
# multiplications and additions ("ieee") are no closer to float64 and took 25 times as long: their registers spilled.
FULL = "tf32x3"
SINGLE = (*table.SINGLE, "only_if")
GUIDE = {"mask": bit.MASK.value, "kl": bit.KL.value, "reverse_kl": bit.REVERSE_KL.value, "jsd": bit.JSD.value}
POSITIVE = {"none": 0, "one": bit.ONE.value, "many": bit.MANY.value}
FEATURES = ("a", "b", "guide_a", "guide_b")
NUMBERS = ("softcap", "guide_softcap", "hot", "beta", "rest", "first", "ahead")
_describing: list[list[Program]] = []
_programs: dict[Any, Program] = {}  # shared by all threads: backward runs in a thread of autograd


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


def pieces(size: int, step: int) -> list[slice]:
    """[0, size) cut into slices of ``step``."""
    return [slice(start, min(start + step, size)) for start in range(0, size, step)]


def readable(features: Tensor) -> Tensor:
    """The features, or a copy whose rows a tensor descriptor can read."""
    item = features.element_size()
    aligned = is_aligned(features) and features.stride(0) * item % 16 == 0
    if features.stride(1) == 1 and aligned and features.stride(0) >= features.shape[1]:
        return features
    rows, cols = features.shape
    return features.new_zeros((rows, row_width(cols, features.dtype)))[:, :cols].copy_(features)


def vector(values: Tensor) -> Tensor:
    """Contiguous and at a 16-byte address, as every compiled kernel assumes."""
    values = values.contiguous()
    return values if is_aligned(values) else values.clone()


def is_aligned(tensor: Tensor) -> bool:
    """Whether it starts at a 16-byte address; a stand-in without memory counts as if it does."""
    return not has_memory(tensor) or tensor.data_ptr() % 16 == 0


def has_memory(tensor: Tensor) -> bool:
    """Whether it is no stand-in of sizes alone, as `explain` passes."""
    return type(tensor) in (Tensor, torch.nn.Parameter)


def exact_products(options: TileOptions) -> str:
    """EXACT of a kernel: how float32 numbers are multiplied."""
    precision = float32_precision() if options.precision == "torch" else options.precision
    return FULL if precision == "highest" else TF32


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


def tensors_of(pair: Pair, spec: PairSpec) -> dict[str, Tensor]:
    """The tensors of a pair as kernels can read them, by the name of their parameter. What is None is left out."""
    pair = small_keys(pair, spec)
    found: dict[str, Tensor] = {"a": readable(pair.a)}
    if not spec.symmetric:
        found["b"] = readable(pair.b)
    for name in ("guide_a", "guide_b"):
        if (features := getattr(pair, name)) is not None:
            found[name] = readable(features)
    bias = pair.bias
    # An expanded number (the bias of a sigmoid loss) is read once, and its gradient is one sum.
    if bias is not None and bias.stride(0) == 0 and bias.shape[0] > 1 and spec.softplus and pair.row_key is None:
        found["one_bias"], bias = vector(bias[:1]), None
    for name in (*ROW_VECTORS, *COL_VECTORS, "pick", *SINGLE):
        value = bias if name == "bias" else getattr(pair, name)
        if value is not None:
            found[name] = vector(value)
    return found


def switches_of(tensors: dict[str, Any], spec: PairSpec, options: TileOptions) -> dict[str, Any]:
    """Compile-time constants of all kernels over scores."""
    score = bit_sum(
        (bit.ONE_BIAS, "one_bias" in tensors),
        (bit.BIAS, "bias" in tensors),
        (bit.SOFTCAP, spec.softcap),
        (bit.SKIP, "row_skip" in tensors and "col_skip" in tensors),
        (bit.MASK_SELF, spec.mask_self),
    )
    diagonal = spec.positive == "one" and "row_key" not in tensors
    found: dict[str, Any] = {"D": tensors["a"].shape[1], "SCORE": score, "EXACT": exact_products(options)}
    found["POSITIVE"] = bit.DIAGONAL.value if diagonal else POSITIVE[spec.positive]
    if spec.guide != "none":
        found |= {"E": tensors["guide_a"].shape[1], "GUIDE": GUIDE[spec.guide]}
        found["GUIDE_SCORE"] = bit_sum((bit.BIAS, "guide_bias" in tensors), (bit.SOFTCAP, spec.guide_softcap))
    return found


@functools.lru_cache(maxsize=256)
def numbers_of(spec: PairSpec) -> tuple[PairSpec, tuple[float, ...]]:
    """The spec as part of a key, with 1 in place of numbers that are not 0, and those numbers: the first of NUMBERS."""
    rest = 1.0 - spec.beta  # rounded once, here: in float32 it would be 0 for a beta close to 1
    numbers = spec.softcap, spec.guide_softcap, spec.hot, spec.beta, rest
    plain: dict[str, Any] = {
        name: float(bool(getattr(spec, name))) for name in ("softcap", "guide_softcap", "hot", "beta")
    }
    return dataclasses.replace(spec, **plain, ignored=-1, in_range=False), numbers


class Scores:
    """The buffers of a program whose kernels compute scores; ``given`` are those of `tensors_of`."""

    def __init__(
        self, program: Program, given: dict[str, Buffer], spec: PairSpec, options: TileOptions, device: torch.device
    ) -> None:
        """Choose sizes and switches."""
        self.program, self.spec, self.options, self.device = program, spec, options, device
        switches = switches_of(given, spec, options)
        self.score_bits, self.positive, self.exact = switches["SCORE"], switches["POSITIVE"], switches["EXACT"]
        self.given = given = given | {name: self.operand(given[name]) for name in FEATURES if name in given}
        self.a: Buffer = given["a"]
        self.b: Buffer = given.get("b", self.a)
        self.scale: Buffer = given["scale"]
        self.n, self.m, self.d = self.a.shape[0], self.b.shape[0], self.a.shape[1]
        assert self.a.dtype is not None
        self.dtype = self.a.dtype
        self.stat_dtype = stat_dtype(self.dtype)
        columns = spec.col_lse or spec.symmetric
        self.forward_sizes = forward_sizes(device, self.dtype, self.d, columns=columns, exact=self.exact)
        self.gradient_sizes = gradient_sizes(device, self.dtype, self.d, self.exact)
        self.by_row: dict[str, Buffer | None] = {name: given.get(name) for name in ROW_VECTORS}
        self.by_col: dict[str, Buffer | None] = {name: given.get(name) for name in COL_VECTORS}
        self.pick = given.get("pick")
        self.by_row["picked"] = self.pick if spec.skip_picked else None
        if spec.symmetric:
            self.by_col["col_shift"] = self.by_row["row_shift"]
        self.fixed: dict[str, Any] = {**switches, "a_stride": self.a.stride(0), "b_stride": self.b.stride(0)}
        self.fixed |= {name: given[name] for name in (*SINGLE, *NUMBERS) if name in given}
        self.fixed["picks"] = 0 if self.pick is None else self.pick.shape[1]
        if "one_bias" in given:
            self.fixed["bias"] = given["one_bias"]
        if spec.guide != "none":
            self.guided_sizes = guided_sizes(device, self.dtype, self.exact)

    @property
    def shape(self) -> PairShape:
        """Sizes and types."""
        return PairShape(self.n, self.m, self.d, self.dtype, self.device)

    def empty(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Buffer:
        """Scratch memory, by default in the type of the statistics."""
        return self.program.scratch(name, shape, dtype or self.stat_dtype)

    def zeros(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Buffer:
        """The same, filled with zeros."""
        made = self.empty(name, *shape, dtype=dtype)
        self.program.call(fill_zero, made)
        return made

    def operand(self, values: Buffer, *, in_place: bool = False) -> Buffer:
        """What products of kernels read in place of ``values``: these, or a rounded copy. See `tf32`."""
        if not tf32.copies(self.exact, values.dtype):
            return values
        out = values
        if not in_place:
            rows, cols = values.shape
            copy = self.empty(f"{values.name} in TF32", rows, row_width(cols, torch.float32), dtype=torch.float32)
            out = copy[:, :cols]
        programs, arguments = tf32.round_arguments(values, out)
        self.launch(tf32.round_kernel, programs, arguments)
        return out

    def launch(self, kernel: Any, programs: int, *bundles: dict[str, Any], stages: int = 2, **values: Any) -> None:
        """A kernel; see `Program.launch`."""
        self.program.launch(kernel, programs, *bundles, stages=stages, **values)

    def tiles(self, kernel: Any, i: slice, j: slice, sizes: Sizes, **values: Any) -> None:
        """A kernel of persistent programs over the macro-tile (i, j)."""
        programs = multiprocessors(self.device) * sizes.programs
        tile = {"R": sizes.rows, "C": sizes.cols, "K": sizes.depth, "GROUP": sizes.group, "PROGRAMS": programs}
        far = None
        if self.score_bits & bit.MASK_SELF.value:  # not where no row and column are the same sample
            far = {"near": self.near(i, j), "far": {"SCORE": self.score_bits & ~bit.MASK_SELF.value}}
        bundles = self.fixed, tile, self.rows(i, sizes), self.cols(j, sizes), {"ahead": self.ahead(i, j)}
        self.launch(kernel, programs, *bundles, warps=sizes.warps, stages=sizes.stages, **(far or {}), **values)

    def positives(self, kernel: Any, i: slice, j: slice, *, only_near: bool = False, **values: Any) -> None:
        """A kernel for the positives of the rows i that lie in the columns j, or, with `picks`, for picked columns.

        ``only_near``: nothing is done if no row and column are the same sample.
        """
        tile = {"P": POSITIVE_ROWS, "K": 64 if self.dtype.itemsize == 2 else 32, "picks": 1}
        bundles = self.fixed, tile, self.rows(i, None), self.cols(j, None), {"ahead": self.ahead(i, j)}
        entries = values.get("n", i.stop - i.start)
        near = self.near(i, j) if only_near else None
        self.launch(kernel, cdiv(entries, POSITIVE_ROWS), *bundles, near=near, **values)

    def picks(self, i: slice, **values: Buffer) -> dict[str, Any]:
        """Arguments of `positives` for the columns that the rows i pick; ``values`` are (n, K) of all rows."""
        assert self.pick is not None
        count = self.pick.shape[1]
        found: dict[str, Any] = {name: value[i].view(-1) for name, value in ({"row_key": self.pick} | values).items()}
        return found | {"n": (i.stop - i.start) * count, "picks": count, "POSITIVE": bit.PICKED.value}

    def near(self, i: slice, j: slice) -> tuple[Any, int, int]:
        """See `Program.launch`: whether a row and a column of the macro-tile may have the same global index."""
        return self.ahead(i, j), i.stop - i.start, j.stop - j.start

    def ahead(self, i: slice, j: slice) -> Buffer:
        """The global index of the first of the rows i, less that of the first of the columns j."""
        return self.given["ahead"] + (i.start - j.start)

    def rows(self, i: slice, sizes: Sizes | None) -> dict[str, Any]:
        """The arguments of kernels that belong to the rows i."""
        here = _cut(self.by_row | {"a": self.a}, i) | {"n": i.stop - i.start}
        if sizes is not None:
            here["a_desc"] = Descriptor(here["a"], (sizes.rows, sizes.depth), self.exact)
            if self.spec.guide != "none":
                here["ga_desc"] = Descriptor(self.given["guide_a"][i], (sizes.rows, sizes.depth), self.exact)
        return here

    def cols(self, j: slice, sizes: Sizes | None) -> dict[str, Any]:
        """The arguments of kernels that belong to the columns j."""
        here = _cut(self.by_col | {"b": self.b}, j)
        here |= {"m": j.stop - j.start, "first": self.given["first"] + j.start}
        if "one_bias" in self.given:
            del here["bias"]
        if sizes is not None:
            here["b_desc"] = Descriptor(here["b"], (sizes.cols, sizes.depth), self.exact)
            if self.spec.guide != "none":
                here["gb_desc"] = Descriptor(self.given["guide_b"][j], (sizes.cols, sizes.depth), self.exact)
        return here


def _cut(values: dict[str, Buffer | None], at: slice) -> dict[str, Any]:
    """A part of each buffer."""
    return {name: None if value is None else value[at] for name, value in values.items()}


def tile_descriptor(g: Buffer, sizes: Sizes) -> Descriptor:
    """The descriptor with which `store_tile` writes."""
    return Descriptor(g, (sizes.rows, sizes.cols // sizes.pieces))


def fill_zero(values: Tensor) -> None:
    """Fill with zeros."""
    values.zero_()


def run_program(
    what: tuple[Any, ...],
    pair: Pair,
    spec: PairSpec,
    options: TileOptions,
    more: dict[str, Tensor | None],
    build: Callable[[Scores, dict[str, Buffer]], Sequence[Any]],
) -> Sequence[Any]:
    """What ``build`` returns, with tensors in place of buffers. It writes the program for the first call of a kind.

    Args:
        what: a key of all that ``build`` reads besides the spec, the options, and the sizes and types of tensors. Two
            calls with an equal key have an equal program.
        pair, spec, options: the call.
        more: other tensors, contiguous and at 16-byte addresses.
        build: writes the steps. It is called with the buffers of the pair, and with those of ``more``, by name.
    """
    device, tensors = pair.a.device, tensors_of(pair, spec)
    every: dict[str, Tensor | None] = {**tensors, **more}
    plain, numbers = numbers_of(spec)
    precision = float32_precision() if pair.a.dtype == torch.float32 else None

    def write(program: Program, given: dict[str, Buffer]) -> Sequence[Any]:
        known = {name: given[name] for name in tensors} | {name: program.given(name) for name in NUMBERS}
        return build(
            Scores(program, known, plain, options, device), {name: given[name] for name in more if name in given}
        )

    program, given = known_program((*what, plain, options, precision), every, device, write)
    if not has_memory(pair.a):
        return described(program, pair.a)
    # The numbers in the order of NUMBERS
    return program.run(device, *given, *numbers, pair.col_start, pair.row_start - pair.col_start)


def described(program: Program, like: Tensor) -> list[Any]:
    """Add a program to those that `describing` collects; its outputs as stand-ins like this one."""
    for programs in _describing:
        programs.append(program)
    return [like.new_empty(out.shape, dtype=out.dtype) if isinstance(out, Buffer) else out for out in program.outputs]


@contextlib.contextmanager
def describing() -> Iterator[list[Program]]:
    """The programs of calls with stand-ins, which are written and not run."""
    found: list[Program] = []
    _describing.append(found)
    try:
        yield found
    finally:
        _describing.remove(found)


def known_program(
    what: tuple[Any, ...],
    tensors: dict[str, Tensor | None],
    device: torch.device,
    write: Callable[[Program, dict[str, Buffer]], Sequence[Any]],
) -> tuple[Program, list[Tensor]]:
    """The program of a kind of calls, and the tensors to give it: those that are not None.

    For the first call, ``write`` writes it. It gets the buffers of the tensors by name, and returns the outputs.
    """
    present = {name: value for name, value in tensors.items() if value is not None}
    key = what, device, tuple([(name, t.shape, t.stride(), t.dtype) for name, t in present.items()])
    program = _programs.get(key)
    if program is None:
        program = Program()
        given = {name: program.given(name, value) for name, value in present.items()}
        program.outputs = list(write(program, given))
        if len(_programs) >= MOST_PROGRAMS:
            _programs.clear()
        _programs[key] = program.done()
    return program, list(present.values())


def forget_programs() -> None:
    """Write programs anew: after sizes changed, and in tests."""
    _programs.clear()


NOTHING = contextlib.nullcontext()


def on_device(features: Tensor) -> contextlib.AbstractContextManager[object]:
    """Launches go to the device that holds the features."""
    if not features.is_cuda or features.device.index == torch.cuda.current_device():
        return NOTHING
    return torch.cuda.device(features.device)


def without_graph() -> contextlib.AbstractContextManager[object]:
    """`torch.no_grad`, which costs nothing where an autograd function has switched gradients off already."""
    return torch.no_grad() if torch.is_grad_enabled() else NOTHING
