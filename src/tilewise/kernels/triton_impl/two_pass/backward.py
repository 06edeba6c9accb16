"""Backward of the Triton backend: G of a macro-tile, then its products with the features of both sides."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tilewise.kernels.keys import combined_picks
from tilewise.kernels.spec import Grads, GradStats, Needs, Pair, PairSpec, Stats, largest_gradient
from tilewise.kernels.triton_impl import bits as bit
from tilewise.kernels.triton_impl.launch.call import Call, bit_sum, cdiv, pieces, tile_descriptor, vector
from tilewise.kernels.triton_impl.two_pass import backward_kernels as kernels
from tilewise.kernels.triton_impl.two_pass.gradient_sum import GradientSum
from tilewise.kernels.triton_impl.two_pass.guide_kernels import guided_gradient_kernel
from tilewise.kernels.triton_impl.two_pass.macro_tile import macro_tile
from tilewise.kernels.triton_impl.two_pass.positive_kernels import positive_gradient_kernel, positive_kernel
from tilewise.kernels.triton_impl.two_pass.saved import RowFactors, SavedColumns, column_pieces
from tilewise.options import TileOptions

SPAN_BLOCK = 1024
ONE_POSITIVE = bit.DIAGONAL.value, bit.ONE.value  # values of POSITIVE: at most one in a row


def folded_picks(pair: Pair, stats: Stats, grad: GradStats, spec: PairSpec) -> tuple[Pair, Stats, GradStats]:
    """Distinct picked columns of each row, their scores and summed gradients; a positive's go to that of ``row_pos``.

    With ``skip_picked`` a positive stays among them, and they ascend in each row.
    """
    if grad.row_picked is None and spec.skip_picked and grad.row_pos is not None:
        assert stats.row_picked is not None
        grad = dataclasses.replace(grad, row_picked=torch.zeros_like(stats.row_picked))
    if grad.row_picked is None:
        return pair, stats, grad
    assert pair.pick is not None
    assert stats.row_picked is not None
    pick, order, total = combined_picks(pair.pick, grad.row_picked)
    if spec.positive == "one":
        rows = torch.arange(pair.a.shape[0], device=pick.device) + pair.row_start
        same = pick == (rows if pair.row_key is None else pair.row_key)[:, None]
        if spec.skip_picked:
            more = 0.0 if grad.row_pos is None else torch.where(same, grad.row_pos[:, None], 0.0)
            grad, total = dataclasses.replace(grad, row_pos=None), total + more
        else:
            more = torch.where(same, total, 0.0).sum(1)
            grad = dataclasses.replace(grad, row_pos=more if grad.row_pos is None else grad.row_pos + more)
            pick, total = torch.where(same, -1, pick), torch.where(same, 0.0, total)
    if spec.skip_picked:  # repetitions became -1
        pick, place = pick.sort(dim=1)
        order, total = order.gather(1, place), total.gather(1, place)
    stats = dataclasses.replace(stats, row_picked=stats.row_picked.gather(1, order))
    return dataclasses.replace(pair, pick=pick), stats, dataclasses.replace(grad, row_picked=total)


def folded_gradients(stats: Stats, grad: GradStats) -> GradStats:
    """v, h and c of `token_terms` as the gradients of the log-sum-exp, the entropy and the squares of each row."""
    if grad.row_entropy is None and grad.row_sum_sq is None:
        return grad
    assert stats.row_lse is not None
    value = torch.zeros_like(stats.row_lse, dtype=torch.float32) if grad.row_lse is None else grad.row_lse
    square = None
    if grad.row_entropy is not None:
        assert stats.row_entropy is not None
        value = value - grad.row_entropy * stats.row_entropy
    if grad.row_sum_sq is not None:
        assert stats.row_sum_sq is not None
        value, square = value - 2.0 * grad.row_sum_sq, 2.0 * grad.row_sum_sq * torch.exp(-stats.row_sum_sq)
    return dataclasses.replace(grad, row_lse=value, row_sum_sq=square)


def factors_of(pair: Pair, grad: GradStats, options: TileOptions) -> tuple[Tensor | None, Tensor | None]:
    """``factors`` of `Backward` with which G stays near 1 in float16: divide by the largest gradient of a statistic."""
    if pair.a.dtype != torch.float16:
        return None, None
    size = largest_gradient(grad, options).to(pair.scale)
    return 1.0 / size, pair.scale * size


class Backward:
    """Gradients of all macro-tiles. The gradients of statistics are those of `folded_gradients`.

    ``factors``: the factor of G inside the kernels, and the factor of the products with G; by default the scale and none.
    """

    tiles_have_positives = False  # whether the kernel of a tile also writes the entry of an only positive

    def __init__(
        self,
        call: Call,
        stats: Stats,
        grad: GradStats,
        needs: Needs,
        grad_dtype: torch.dtype,
        saved: SavedColumns | None = None,
        factors: tuple[Tensor | None, Tensor | None] = (None, None),
    ) -> None:
        self.call, self.needs, self.grad_dtype = call, needs, grad_dtype
        self.pair, self.spec = call.pair, call.spec
        self.guided = self.spec.guide != "none"
        self.tiles_have_positives |= self.guided
        self.sizes = call.guided_sizes if self.guided else call.gradient_sizes
        self.n, self.m, self.d = call.a.shape[0], call.b.shape[0], call.a.shape[1]
        sym, scale = self.spec.symmetric, self.pair.scale
        self.need_a = needs.a or sym or (needs.scale and not needs.b)
        self.need_b = needs.b and not sym
        self.row_step, self.col_step = self._macro()
        # Exponentials serve the gradients of log-sum-exps; saved scores serve all.
        serves = self.guided or (grad.row_lse is not None and not needs.bias)
        in_place = self.need_b and grad_dtype == self.pair.a.dtype and self.row_step >= self.n
        self.saved = saved if serves and in_place else None
        self.factors: RowFactors | None = None
        self.inside: Tensor = scale if factors[0] is None else factors[0]
        self.outside = factors[1]
        call.by_row |= {
            "row_lse": vector(stats.row_lse),
            "grad_row": vector(grad.row_softplus if self.spec.softplus else grad.row_lse),
            "grad_pos": vector(grad.row_pos),
            "grad_sum": vector(grad.row_sum),
            "grad_entropy": vector(grad.row_entropy),
            "grad_square": vector(grad.row_sum_sq),
            "grad_picked": vector(grad.row_picked),
        }
        if self.guided:
            call.by_row |= {
                "guide_lse": vector(stats.guide_lse),
                "row_level": vector(stats.row_mix_kl if self.spec.guide == "jsd" else stats.row_reverse_kl),
                "row_hot_lse": vector(stats.row_hot_lse),
                "grad_hot": vector(grad.row_hot_lse),
                "grad_guide": vector(
                    {"kl": grad.row_kl, "jsd": grad.row_jsd}.get(self.spec.guide, grad.row_reverse_kl)
                ),
            }
        if sym:  # a column is a row too
            as_column = {"col_lse": "row_lse", "grad_col": "grad_row", "grad_pos_col": "grad_pos"}
            call.by_col |= {name: call.by_row[of_row] for name, of_row in as_column.items()}
        else:
            call.by_col |= {"col_lse": vector(stats.col_lse), "grad_col": vector(grad.col_lse)}
        self.picked: dict[str, Tensor] = {}  # arguments of `Call.picks`
        if (coming := call.by_row["grad_picked"]) is not None:
            own = vector(stats.row_picked)
            assert own is not None
            self.picked = {"own": own, "grad_pos": coming}
        self.shared_bias = bool(call.score_bits & bit.ONE_BIAS.value)
        self.terms = bit_sum(
            (bit.ROWS, grad.row_lse is not None),
            (bit.COLS, call.by_col["grad_col"] is not None),
            (bit.SOFTPLUS, self.spec.softplus),
            (bit.ROW_SUM, grad.row_sum is not None),
            (bit.MIRROR, sym),
            (bit.ENTROPY, grad.row_entropy is not None),
            (bit.SUM_SQ, grad.row_sum_sq is not None),
            (bit.HOT, grad.row_hot_lse is not None),
            (bit.BIAS_TOTAL, needs.bias and self.shared_bias),
            (bit.BIAS_COLS, needs.bias and not self.shared_bias),
        )
        self.span = self._span() if grad.row_lse is not None and call.by_col["grad_col"] is not None else None
        if call.positive in ONE_POSITIVE and not self.tiles_have_positives:
            own = vector(stats.row_pos)
            if own is None:
                own = call.empty(self.n)
                call.run_positive(positive_kernel, slice(0, self.n), slice(0, self.m), row_pos=own)
            call.by_row["own"] = own
        call.row_cuts.clear()
        call.col_cuts.clear()

    def _macro(self) -> tuple[int, int]:
        return macro_tile(self.pair.shape, self.spec, self.sizes, self.call.options)

    def _span(self) -> Tensor:
        """The span of the log-sum-exps and the largest of them; u of each row and v of each column."""
        call, sym = self.call, self.spec.symmetric
        span, u = call.empty(2), call.empty(self.n)
        v = u if sym else call.empty(self.m)
        values: dict[str, Any] = {"span": span, "row_share": u, "col_share": v, "factor": self.inside}
        values |= {"n": self.n, "m": self.m, "BLOCK": SPAN_BLOCK} | call.by_row | call.by_col
        call.prepare(kernels.span_kernel, warps=8).offer(values).launch(1)
        cols = 0 if sym else self.m
        programs = cdiv(self.n, SPAN_BLOCK) + cdiv(cols, SPAN_BLOCK)
        call.prepare(kernels.share_kernel).offer(values).put({"m": cols}).launch(programs)
        call.by_row["row_share"], call.by_col["col_share"] = u, v
        return span

    def run(self) -> Grads:
        """All macro-tiles; with symmetric scores those on and above the diagonal."""
        call, pair, sym = self.call, self.pair, self.spec.symmetric
        row_pieces, col_pieces = pieces(self.n, self.row_step), column_pieces(self.m, self.col_step, self.saved)
        item = pair.a.element_size()
        others_from = 0 if self.saved is None else self.saved.end
        width = min(self.m - others_from, self.col_step)
        if self.guided:  # the saved columns have a G too
            width = max(j.stop - j.start for j in col_pieces)
        width = cdiv(width * item, 16) * 16 // item
        g_all = None if self.saved is None else self.saved.g(self.n, width)
        if g_all is None:
            g_all = call.empty(min(self.n, self.row_step), width, dtype=pair.a.dtype)
        once = not sym and len(col_pieces) == 1
        dot_a = self.needs.scale and self.need_a
        grad_a = self._sum(self.n, whole=sym, once=once, dot=dot_a) if self.need_a else None
        grad_b = None
        if self.need_b:
            memory = None if self.saved is None else self.saved.memory
            dot_b = self.needs.scale and not self.need_a
            grad_b = self._sum(self.m, whole=True, once=len(row_pieces) == 1, dot=dot_b, out=memory)
        bias = Bias(self) if self.needs.bias else None
        if self.saved is not None and not self.guided and not self.saved.relative and self.saved.end:
            # The memory of the row gradients is not written before all columns are done.
            unused = None if grad_a is None or grad_a.total is None else grad_a.out
            self.factors = self.saved.factors(call, self.inside, unused)
        for i in row_pieces:
            for j in col_pieces:
                if sym and j.start < i.start:
                    continue
                g, a = g_all[: i.stop - i.start, : j.stop - j.start], call.rows(i, self.sizes)["a"]
                ready = None if self.saved is None else self.saved.chunk(j)
                if ready is not None:
                    g, a = ready, a if self.factors is None else self.factors.scaled
                self._gradient(g, tile_descriptor(g, self.sizes), i, j, bias)
                if grad_a is not None:
                    grad_a.add(i, g, call.cols(j, self.sizes)["b"])
                    if sym and i != j:
                        grad_a.add(j, g.T, a)
                    if self.factors is not None and j.stop == others_from:
                        grad_a.scale_rows(i, self.factors.each)
                if grad_b is not None:
                    grad_b.add(j, g.T, a)
                    if self.factors is not None and j.stop == others_from:
                        assert self.saved is not None
                        self.saved.correct_positives(call, grad_b.sums, self.factors)
            if grad_a is not None and not sym:
                grad_a.finish(i, call.a)
        del g_all, g, ready
        if self.saved is not None:
            self.saved.buffer = self.factors = None
        call.prepared.clear()  # the arguments of prepared launches keep G alive
        if grad_a is not None and sym:
            grad_a.finish(slice(0, self.n), call.a)
        if grad_b is not None:
            grad_b.finish(slice(0, self.m), call.b)
        dots = next((side.dots for side in (grad_a, grad_b) if side is not None and side.dots is not None), None)
        return Grads(
            a=grad_a.out if grad_a is not None and self.needs.a else None,
            b=None if grad_b is None else grad_b.out,
            scale=None if dots is None else self._without_factor(dots),
            bias=None if bias is None else bias.finish(),
        )

    def _sum(self, rows: int, **how: Any) -> GradientSum:
        """The gradient of one side; ``how``: see `GradientSum`."""
        return GradientSum(self.call, rows, self.grad_dtype, block=self.row_step, factor=self.outside, **how)

    def _without_factor(self, dots: Tensor) -> Tensor:
        """The sum of ``dots`` divided by the factor of G: (). Half of it if each pair was counted twice."""
        out = self.call.empty()
        values = {"dots": dots, "factor": self.inside, "out": out, "count": dots.numel()}
        values |= {"share": 0.5 if self.spec.symmetric else 1.0, "BLOCK": SPAN_BLOCK}
        self.call.prepare(kernels.scale_kernel).put(values).launch(1)
        return out

    def _gradient(self, g: Tensor, desc: TensorDescriptor, i: slice, j: slice, bias: Bias | None) -> None:
        """G of the macro-tile (i, j)."""
        call, span, row_factor = self.call, self.span, None
        is_saved = self.saved is not None and j.start < self.saved.end
        if is_saved and self.factors is not None:
            assert self.saved is not None
            row_factor = self.factors.each
            span = self.saved.needs_repair  # WIDE runs only where a repair is needed
        shared = {"factor": self.inside, "TERMS": self.terms}
        if self.guided:
            part = None if bias is None else bias.part(i, j)
            x, y = (None if self.saved is None else self.saved.saved_scores(j)) or (None, None)
            scores = {"x": x, "y": y, "stored_stride": 0 if x is None else x.stride(0)}
            call.run(guided_gradient_kernel, i, j, self.sizes, g_desc=desc, bias_part=part, **scores, **shared)
            if bias is not None:
                bias.add(j)
            return
        if is_saved and self.factors is None:
            assert self.saved is not None
            self.saved.write_gradient(call, j, **shared)
        else:
            more = {"g_desc": desc, "span": span, "bias_part": None if bias is None else bias.part(i, j)} | shared
            for wide in (False, True) if self.span is not None else (True,):
                call.run(kernels.gradient_kernel, i, j, self.sizes, WIDE=wide, **more)
        # On the diagonal, the host knows which macro-tiles have positives. Those among skipped picks are added below.
        one = call.positive == bit.ONE.value or (call.positive == bit.DIAGONAL.value and call.may_have_self_pairs(i, j))
        if one and not self.spec.skip_picked:
            more = {"g": g, "g_stride": g.stride(0), "row_factor": row_factor}
            call.run_positive(positive_gradient_kernel, i, j, **more, **shared)
        if self.picked:
            more = {"g": g, "g_stride": g.stride(0), "row_factor": row_factor} | call.picks(i, **self.picked)
            if self.spec.skip_picked:
                shared["TERMS"] &= ~bit.ROWS.value
            call.run_positive(positive_gradient_kernel, i, j, **more, **shared)
        if bias is not None:
            bias.add(j)


class Bias:
    """The gradient of the bias: column sums of G before it is rounded, or its total for a bias that all columns share.

    The tiles leave out an only positive and picked columns; their shares of the column are added here.
    """

    def __init__(self, parent: Backward) -> None:
        self.parent, self.shared = parent, parent.shared_bias
        self.total = parent.call.empty(1 if self.shared else parent.m, zero=True)
        self.held: Tensor | None = None

    def part(self, i: slice, j: slice) -> Tensor:
        """Memory for the sums of G over the rows, or over the columns, of each tile."""
        n, m, sizes = i.stop - i.start, j.stop - j.start, self.parent.sizes
        size = cdiv(m, sizes.cols) * n if self.shared else cdiv(n, sizes.rows) * m
        self.held = self.parent.call.empty(size)
        return self.held

    def add(self, j: slice) -> None:
        """Add the sums of one macro-tile."""
        assert self.held is not None
        self.parent.call.step(add_columns, self.total if self.shared else self.total[j], self.held, self.held)

    def _add_positives(self) -> None:
        """Add g_pos for each positive, or -1 times the weight for a sigmoid loss: sigmoid(x) - 1."""
        parent, call, factor = self.parent, self.parent.call, self._factor()
        if parent.picked:
            assert call.pick is not None
            here = call.pick - parent.pair.col_start
            inside = (call.pick >= 0) & (here >= 0) & (here < parent.m)
            self._add(parent.picked["grad_pos"] * factor, parent.picked["own"], here, inside)
        incoming = call.by_row["grad_row" if parent.spec.softplus else "grad_pos"]
        if incoming is None or call.positive not in ONE_POSITIVE or parent.tiles_have_positives:
            return
        share = incoming * (-factor if parent.spec.softplus else factor)
        rows = torch.arange(parent.n, device=incoming.device) + parent.pair.row_start
        key = rows if parent.pair.row_key is None else parent.pair.row_key
        here = key - parent.pair.col_start
        inside = (here >= 0) & (here < parent.m)
        if parent.spec.mask_self:
            inside &= key != rows
        own = call.by_row["own"]
        assert own is not None
        self._add(share[:, None], own[:, None], here[:, None], inside[:, None])

    def _add(self, share: Tensor, own: Tensor, here: Tensor, inside: Tensor) -> None:
        """Add shares to the columns ``here``, where they are inside; ``own`` are their scores: (n, K) each."""
        parent, pair = self.parent, self.parent.pair
        each = 1.0 if pair.row_scale is None else pair.row_scale[:, None]
        if parent.spec.softcap:
            x = (own if pair.row_shift is None else own + pair.row_shift[:, None]) / each
            share = share * (1.0 - (x / parent.spec.softcap).square())
        share = torch.where(inside, share * each, 0.0)
        if self.shared:
            self.total += share.sum()
        else:
            self.total.index_put_((here.clamp(0, parent.m - 1),), share, accumulate=True)  # sorts: no atomics

    def _factor(self) -> Tensor:
        """The factor of G, as the kernels take it."""
        return self.parent.inside.masked_fill(self.parent.inside == 0, kernels.TINY_SCALE.value)

    def finish(self) -> Tensor:
        """One number for each column, or one for a shared bias, which `spread` divides."""
        if self.parent.picked or not self.parent.tiles_have_positives:
            self.parent.call.do_not_record()
            self._add_positives()
        if self.shared:
            return self.parent._without_factor(self.total)
        self.parent.call.do_not_record()
        return self.total / self._factor()


def add_columns(total: Tensor, parts: Tensor, _: Tensor, __: bool) -> None:
    """Add the sums of each column of ``parts``."""
    total += parts.view(-1, len(total)).sum(0)


def spread(bias: Tensor | None, cols: int) -> Tensor | None:
    """The gradient of a bias that all columns share, divided evenly: only the sum has a meaning."""
    return (bias / cols).expand(cols).contiguous() if bias is not None and bias.dim() == 0 else bias
