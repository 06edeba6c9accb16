"""A scalar loss and its gradients in one pass over the scores, in the Triton backend.

What a call allocates above inputs and gradients, with w the workspace. Softmax: E of a block of rows, a copy of those
rows and their partial sums (at most w together, one row of tiles at the least). Sigmoid: as backward has it. Gradients
wait for backward in float32, or, of a large bfloat16 classifier whose rows are one block, E does in their place.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tilewise.kernels.direct import Exponentials, RowWeights, held_dtype, one_block, row_width
from tilewise.kernels.precision import matmul_precision
from tilewise.kernels.spec import Grads, GradStats, Needs, Pair, PairSpec, Stats
from tilewise.kernels.triton_impl import direct_products, direct_sigmoid, direct_softmax, positive
from tilewise.kernels.triton_impl.backend import how, on_device, tensors_of
from tilewise.kernels.triton_impl.gradients import Backward, Bias, product
from tilewise.kernels.triton_impl.launch import Call, Prepared, cdiv, pieces, tile_descriptor, unit_of, vector
from tilewise.kernels.triton_impl.sizes import multiprocessors
from tilewise.kernels.triton_impl.tape import Tape, kind_of, taped
from tilewise.options import TileOptions

START_BLOCK = 1024
ROWS_BLOCK = 32  # rows of one program of `rows_kernel`
FINISH_BLOCK, FINISH_WIDTH = 8, 256  # four times as many numbers are too many for the registers
MANY_PARTS = 64
WIDTH = 128
BIAS_ROWS, BIAS_COLS = 32, 128
MULTIPLY_BLOCK = 4096
POSITIVES_BLOCK, POSITIVES_WIDTH, POSITIVES_WARPS = 4, 512, 2
POSITIVES_RUN = 64  # rows of one column that are added up one after another


def why_not(pair: Pair, spec: PairSpec, options: TileOptions) -> str | None:
    """Why these kernels do not serve a call that the backend serves."""
    if not spec.softplus and pair.a.dtype == torch.float16:
        return "exponentials without their sum leave the range of float16"
    return None


def direct(pair: Pair, weights: RowWeights, needs: Needs, spec: PairSpec, options: TileOptions) -> tuple[Tensor, Grads]:
    """The loss and its gradients; see `tilewise.kernels.direct`."""
    with on_device(pair.a), torch.no_grad(), matmul_precision(options.precision):
        call = Call.of(pair, spec, options)
        if spec.softplus:
            return Sigmoid(call, weights, needs).loss_and_grads()
        return Softmax(call, weights).loss_and_grads(needs)


def exponentials(
    pair: Pair, weights: RowWeights, spec: PairSpec, options: TileOptions, rows: int, only_if: Tensor | None
) -> tuple[Tensor, Exponentials]:
    """The loss, and what gradients are made of; see `tilewise.kernels.direct`."""

    def run(tape: Tape | None) -> tuple[Tensor | None, ...]:
        losses, made = Softmax(Call.of(pair, spec, options, tape), weights, only_if).losses_and_exponentials(rows)
        return losses, made.e, made.factor, made.entry, made.column

    with on_device(pair.a), torch.no_grad():
        inputs = [*tensors_of(pair, spec), weights.each, weights.square, only_if]
        kind = kind_of(("exponentials", rows, *how(pair, spec, options)), inputs)
        losses, e, *vectors = taped(kind, inputs, run, pair.a.device)
        more = rows - pair.a.shape[0]
        factor, entry, column = (torch.nn.functional.pad(v, (0, more)) for v in vectors) if more else vectors
        return _sum([losses]), Exponentials(e=e, factor=factor, entry=entry, column=column)


def gradients(held: Exponentials, pair: Pair, upstream: Tensor, needs: Needs, options: TileOptions) -> Grads:
    """Two products. What comes in is a part of f_i: what it multiplies is rounded after it, and only then."""
    with on_device(pair.a), torch.no_grad(), matmul_precision(options.precision):
        # Keys, bias and softcap are in E already.
        plain = Pair(a=pair.a, b=pair.b, scale=pair.scale)
        call = Call.of(plain, PairSpec(row_lse=True), options)
        n, m = call.a.shape[0], call.b.shape[0]
        products = Products(call, needs, pair.a.dtype)
        e, factor = held.e[:n, :m], held.factor[:n] * upstream
        products.add(Exponentials(e=e, factor=factor, entry=held.entry[:n], column=held.column[:n]), slice(0, n))
        return products.grads()


def multiply(values: Tensor, by: Tensor, out: Tensor) -> None:
    """out = values * by, rounded once; contiguous, a number on the same device. In place, 1 costs nothing."""
    with on_device(values):
        programs, count = 8 * multiprocessors(values.device), values.numel()
        same = out is values
        unit = unit_of(count)
        key = values.dtype, out.dtype, same, values.data_ptr() % 16, out.data_ptr() % 16, by.dtype, by.data_ptr() % 16
        prepared = Prepared(direct_products.multiply_kernel, values.device, 4, 2, (*key, unit, count < 2**31))
        prepared.put({"values": values, "out": out, "by": by, "count": count, "UNIT": unit, "IN_PLACE": same})
        prepared.put({"PROGRAMS": programs, "BLOCK": MULTIPLY_BLOCK}).launch(programs)


class Sigmoid(Backward):
    """Backward of the sigmoid loss, whose kernel writes the loss too, and the positives' entries of G as well."""

    def __init__(self, call: Call, weights: RowWeights, needs: Needs) -> None:
        super().__init__(call, Stats(), GradStats(row_softplus=weights.each), needs, held_dtype(call.a.dtype))
        size = multiprocessors(call.a.device) * self.sizes.programs * self.sizes.rows
        self.loss_part, self.safe_part = call.empty(size, zero=True), call.empty(size)
        self.doubt = call.empty(1, dtype=torch.int32, zero=True)

    def loss_and_grads(self) -> tuple[Tensor, Grads]:
        """All macro-tiles."""
        grads, call = self.run(), self.call
        everything = slice(0, self.n), slice(0, self.m)
        call.run(direct_sigmoid.softplus_kernel, *everything, self.sizes, loss_part=self.safe_part, doubt=self.doubt)
        return torch.where(self.doubt[0] != 0, _sum([self.safe_part]), _sum([self.loss_part])), grads

    def _gradient(self, g: Tensor, desc: TensorDescriptor, i: slice, j: slice, bias: Bias | None) -> None:
        values = {"g_desc": desc, "bias_part": None if bias is None else bias.part(i, j), "loss_part": self.loss_part}
        values |= {"doubt": self.doubt, "factor": self.inside, "TERMS": self.bits}
        self.call.run(direct_sigmoid.sigmoid_kernel, i, j, self.sizes, **values)
        if bias is not None:
            bias.add(j)


class Softmax:
    """The loss of a softmax and E, a block of rows after another."""

    def __init__(self, call: Call, weights: RowWeights, only_if: Tensor | None = None) -> None:
        self.call, self.pair, self.sizes, self.only_if = call, call.pair, call.gradient_sizes, only_if
        self.n, self.m, self.d = call.a.shape[0], call.b.shape[0], call.a.shape[1]
        self.row_step = self._blocks()
        self.col_tiles = cdiv(self.m, self.sizes.cols)
        self.all_cols = slice(0, self.m)
        own, hits = call.empty(self.n), call.empty(self.n)
        call.run_positive(
            positive.positive_kernel, slice(0, self.n), self.all_cols, row_pos=own, row_hits=hits, peaks=None
        )
        self.doubt = call.empty(1, dtype=torch.int32)
        rows = {"row_hits": hits, "weight": vector(weights.each), "square": vector(weights.square)}
        rows |= {"own_at": call.empty(self.n), "shift": call.empty(self.n)}
        values: dict[str, Any] = {"own": own, "row_zero": call.by_row["row_zero"], "doubt": self.doubt, "n": self.n}
        start = call.prepare(direct_softmax.start_kernel, 4, 2, ())
        start.put(rows).put(values).put({"BLOCK": START_BLOCK}).launch(cdiv(self.n, START_BLOCK))
        call.by_row |= rows
        call.row_cuts.clear()
        self.losses: list[Tensor] = []

    def _blocks(self) -> int:
        """Rows of a block: E, the scaled rows and the partial sums fit the workspace, one row of tiles at the least."""
        budget, item, tile = self.call.options.workspace_bytes, self.pair.a.element_size(), self.sizes.rows
        if one_block((self.n, self.m, self.d), self.pair.a.dtype, budget):
            return cdiv(self.n, tile) * tile
        row = self.m * item + 4 * cdiv(self.m, self.sizes.cols) + self.d * item
        fits = max(tile, budget // row // tile * tile)
        return min(fits, cdiv(cdiv(self.n, cdiv(self.n, fits)), tile) * tile)

    def loss_and_grads(self, needs: Needs) -> tuple[Tensor, Grads]:
        """All blocks, and the products of each before the next takes its memory."""
        call, rows = self.call, min(self.n, self.row_step)
        e_all, row_part = self._memory(rows), call.empty(self.col_tiles * rows)
        products = Products(call, needs, held_dtype(self.pair.a.dtype))
        for i in pieces(self.n, self.row_step):
            e = e_all[: i.stop - i.start, : self.m]
            scaled = call.empty(len(e), self.d, dtype=self.pair.a.dtype) if needs.b else None
            products.add(self._exponentials(e, row_part, i, scaled), i, scaled)
            del scaled
        del e_all, e, row_part
        return _sum(self.losses), products.grads()

    def losses_and_exponentials(self, rows: int) -> tuple[Tensor, Exponentials]:
        """Parts of the loss, and E of all rows, which are one block, in memory for ``rows`` of them."""
        assert self.n <= min(rows, self.row_step)
        e, everything = self._memory(rows), slice(0, self.n)
        made = self._exponentials(e[: self.n, : self.m], self.call.empty(self.col_tiles * self.n), everything)
        return self.losses[0], dataclasses.replace(made, e=e)

    def _memory(self, rows: int) -> Tensor:
        """For E."""
        return self.call.empty(rows, row_width(self.m, self.pair.a.dtype), dtype=self.pair.a.dtype)

    def _exponentials(self, e: Tensor, row_part: Tensor, i: slice, scaled: Tensor | None = None) -> Exponentials:
        """Of the rows i, with E in ``e``; and into ``scaled``, if it is there, scale f_i a_i."""
        call, n = self.call, i.stop - i.start
        desc = tile_descriptor(e, self.sizes)
        shared = {"g_desc": desc, "row_part": row_part, "doubt": self.doubt, "only_if": self.only_if}
        gated, maxima = direct_softmax.GATED.value, direct_softmax.MAXIMA.value
        for terms in (0, gated + maxima, gated):
            call.run(direct_softmax.exponent_kernel, i, self.all_cols, self.sizes, TERMS=terms, **shared)
            if terms & maxima:
                again = call.prepare(direct_softmax.shift_kernel, 4, 2, ())
                again.put(call.rows(i, self.sizes)).put(shared).put({"parts": self.col_tiles})
                again.put({"MANY_PARTS": MANY_PARTS, "BLOCK": ROWS_BLOCK}).launch(cdiv(n, ROWS_BLOCK))
        vectors = {"factor": call.empty(n), "entry": call.empty(n), "column": call.empty(n, dtype=torch.int32)}
        programs = cdiv(n, ROWS_BLOCK)
        self.losses.append(call.empty(programs))
        a = call.rows(i, self.sizes)["a"]
        key = self.d, call.score_bits, call.positive, a.dtype, a.data_ptr() % 16
        last = call.prepare(direct_softmax.rows_kernel, 4, 2, key)
        last.put(call.fixed).put(call.rows(i, self.sizes)).put(call.cols(self.all_cols, self.sizes)).put(shared)
        last.put({"parts": self.col_tiles, "g": e, "g_stride": e.stride(0), "scaled": scaled}).put(vectors)
        last.put({"loss_part": self.losses[-1], "MANY_PARTS": MANY_PARTS})
        last.put({"ahead": self.pair.row_start + i.start - self.pair.col_start, "WIDTH": WIDTH, "BLOCK": ROWS_BLOCK})
        last.launch(programs)
        return Exponentials(e=e, **vectors)


class Products:
    """Gradients from E, a block of rows after another. Those of the features are ``dtype``; a half type takes one block.

    dA_i = scale f_i sum_j E_ij b_j,   dB_j = sum_i E_ij (scale f_i a_i),   dbias_j = sum_i f_i E_ij

    What rounding did to the positives' entries of E, and to their rows, is made good in each of them.
    """

    def __init__(self, call: Call, needs: Needs, dtype: torch.dtype) -> None:
        self.call, self.needs, self.dtype = call, needs, dtype
        self.n, self.m, self.d = call.a.shape[0], call.b.shape[0], call.a.shape[1]
        self.grad_a = call.empty(self.n, self.d, dtype=dtype) if needs.a else None
        self.grad_b: Tensor | None = None
        self.bias = call.empty(self.m) if needs.bias else None
        self.dots: list[Tensor] = []

    def add(self, held: Exponentials, i: slice, scaled: Tensor | None = None) -> None:
        """The rows i, of which E, f_i, and perhaps scale f_i a_i are known."""
        made, a = scaled is not None, self.call.a[i]
        if self.needs.b and scaled is None:
            scaled = self.call.empty(*a.shape, dtype=a.dtype)
        if self.needs.a or self.needs.scale:
            self._rows(held, i, None if made else scaled)
        elif scaled is not None and not made:
            torch.mul(a, (held.factor * self.call.pair.scale)[:, None], out=scaled)
        if self.bias is not None:
            self._bias(held, self.bias, first=i.start == 0)
        if scaled is not None:
            if self.grad_b is None:
                self.grad_b = self.call.empty(self.m, self.d, dtype=self.dtype)
            product(self.grad_b, held.e.T, scaled, i.start == 0)
            if held.rounded:
                self._positives(held, a, scaled, self.grad_b)

    def grads(self) -> Grads:
        """When all rows were added."""
        scale = _sum(self.dots) if self.needs.scale else None
        return Grads(a=self.grad_a, b=self.grad_b, scale=scale, bias=self.bias)

    def _rows(self, held: Exponentials, i: slice, scaled: Tensor | None) -> None:
        """The gradients of the rows i, their part of the scale's, and, where it is asked for, scale f_i a_i."""
        call, rows, out = self.call, i.stop - i.start, None if self.grad_a is None else self.grad_a[i]
        in_place = out is not None and out.dtype == torch.float32
        total = out if in_place else call.empty(rows, self.d, dtype=torch.float32)
        assert total is not None
        product(total, held.e, call.b, True)
        a, programs = call.a[i], cdiv(rows, FINISH_BLOCK)
        dots = call.empty(programs) if self.needs.scale else None
        if dots is not None:
            self.dots.append(dots)
        values: dict[str, Any] = {
            "total": total,
            "out": out,
            "scaled": scaled,
            "factor": held.factor,
            "scale": call.pair.scale,
        }
        values |= {"a": a, "a_stride": a.stride(0), "dots": dots, "n": rows, "D": self.d}
        if held.rounded:
            values |= {"entry": held.entry, "column": held.column, "b": call.b, "b_stride": call.b.stride(0)}
        key = self.d, a.dtype, self.dtype, a.data_ptr() % 16, total.data_ptr() % 16
        last = call.prepare(direct_products.finish_rows_kernel, 4, 2, key).put(values)
        last.put({"BLOCK": FINISH_BLOCK, "WIDTH": min(FINISH_WIDTH, triton.next_power_of_2(self.d))}).launch(programs)

    def _positives(self, held: Exponentials, a: Tensor, scaled: Tensor, out: Tensor) -> None:
        """The columns' gradients, corrected where they are the positive of a row."""
        column, order = torch.sort(held.column, stable=True)
        width = min(POSITIVES_WIDTH, triton.next_power_of_2(self.d))
        chunks, runs = cdiv(self.d, width), cdiv(len(a), POSITIVES_RUN)
        eps = 0.0 if out.dtype == torch.float32 else torch.finfo(out.dtype).eps
        key = self.d, a.stride(0), a.dtype, out.dtype, a.data_ptr() % 16, out.data_ptr() % 16
        values: dict[str, Any] = {"grad": out, "a": a, "scaled": scaled, "column": column, "order": order}
        values |= {"factor": held.factor, "entry": held.entry, "scale": self.call.pair.scale}
        values |= {"exacts": self.call.empty(runs, self.d), "helds": self.call.empty(runs, self.d)}
        values |= {"n": len(a), "D": self.d, "STRIDE": a.stride(0), "RUN": POSITIVES_RUN}
        values |= {"EPS": eps, "BLOCK": POSITIVES_BLOCK, "WIDTH": width}
        steps = (direct_products.runs_kernel, runs - 1), (direct_products.positives_kernel, len(a))
        for kernel, places in steps:
            if places:
                self.call.prepare(kernel, POSITIVES_WARPS, 2, key).put(values).launch(places * chunks)

    def _bias(self, held: Exponentials, out: Tensor, *, first: bool) -> None:
        """The bias's part of these rows, set or added."""
        e, factor = held.e, held.factor
        values = {"g": e, "g_stride": e.stride(0), "factor": factor, "out": out, "n": len(e), "m": self.m}
        prepared = self.call.prepare(direct_products.bias_kernel, 4, 2, (first, e.dtype)).put(values)
        prepared.put({"FIRST": first, "BLOCK": BIAS_ROWS, "WIDTH": BIAS_COLS}).launch(cdiv(self.m, BIAS_COLS))
        if held.rounded:
            lost = torch.where(held.column >= 0, factor * (held.entry - held.entry.to(e.dtype)), 0.0)
            out.index_put_((held.column.clamp(min=0).long(),), lost, accumulate=True)  # sorts: no atomics


def _sum(parts: list[Tensor]) -> Tensor:
    """The sum of many small numbers: ()."""
    whole = parts[0] if len(parts) == 1 else torch.cat(parts)
    return whole.sum(dtype=torch.float64).to(whole.dtype)
