"""Backward of the Triton backend: G of a macro-tile, then its products with the features of both sides."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from torch import Tensor

from tilewise.kernels.keys import combined_picks
from tilewise.kernels.spec import GradStats, Needs, Pair, PairSpec, Stats, largest_gradient
from tilewise.kernels.triton_impl import bits as bit
from tilewise.kernels.triton_impl.buffers import Buffer, Descriptor
from tilewise.kernels.triton_impl.scores import Scores, bit_sum, cdiv, pieces, tile_descriptor, vector
from tilewise.kernels.triton_impl.statistics import row_terms
from tilewise.kernels.triton_impl.two_pass import backward_kernels as kernels
from tilewise.kernels.triton_impl.two_pass.gradient_sum import GradientSum
from tilewise.kernels.triton_impl.two_pass.guide_kernels import guided_gradient_kernel
from tilewise.kernels.triton_impl.two_pass.macro_tile import macro_tile
from tilewise.kernels.triton_impl.two_pass.positive_kernels import positive_gradient_kernel, positive_kernel
from tilewise.kernels.triton_impl.two_pass.saved import RowFactors, SavedColumns, breaks, column_pieces
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
    """Gradients of the statistics of a row with all that does not depend on the column in that of its log-sum-exp.

    row_lse: g_lse - g_entropy entropy - 2 g_sum_sq        row_sum_sq: 2 g_sum_sq exp(-sum_sq)
    """
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
    """``g_factor`` and ``product_factor`` of `Backward`: in float16 G is divided by the largest gradient, to stay near 1."""
    if pair.a.dtype != torch.float16:
        return None, None
    size = largest_gradient(grad, options).to(pair.scale)
    return 1.0 / size, pair.scale * size


STATISTICS = ("row_lse", "row_pos", "row_picked", "col_lse", "guide_lse", "row_hot_lse", "row_mix_kl", "row_reverse_kl")
DIVERGENCE = {"kl": "row_kl", "jsd": "row_jsd"}  # the gradient that a guide's statistic gets; by default row_reverse_kl


def backward_tensors(stats: Stats, grad: GradStats, spec: PairSpec) -> dict[str, Tensor | None]:
    """What backward is given besides the pair, by the names of kernels' parameters."""
    found: dict[str, Tensor | None] = {name: getattr(stats, name) for name in STATISTICS}
    found["own"], found["own_picked"] = found.pop("row_pos"), found.pop("row_picked")
    mix, reverse = found.pop("row_mix_kl"), found.pop("row_reverse_kl")
    found["row_level"] = mix if spec.guide == "jsd" else reverse
    found["grad_row"] = grad.row_softplus if spec.softplus else grad.row_lse
    found |= {"grad_pos": grad.row_pos, "grad_sum": grad.row_sum, "grad_entropy": grad.row_entropy}
    found |= {"grad_square": grad.row_sum_sq, "grad_picked": grad.row_picked, "grad_col": grad.col_lse}
    found |= {"grad_hot": grad.row_hot_lse, "grad_guide": getattr(grad, DIVERGENCE.get(spec.guide, "row_reverse_kl"))}
    return {name: None if value is None else vector(value) for name, value in found.items()}


class Backward:
    """Writes the steps of backward: the gradients of all macro-tiles.

    ``more``: the buffers for `backward_tensors`, and two factors. ``g_factor`` multiplies dL/dx before it is stored as G,
    ``product_factor`` multiplies the products with G; by default the scale and none. A kernel calls either ``factor``.
    """

    tiles_have_positives = False  # whether the kernel of a tile also writes the entry of an only positive

    def __init__(
        self,
        scores: Scores,
        more: dict[str, Buffer],
        needs: Needs,
        grad_dtype: torch.dtype,
        saved: SavedColumns | None = None,
    ) -> None:
        self.scores, self.needs, self.grad_dtype, self.spec = scores, needs, grad_dtype, scores.spec
        self.guided = self.spec.guide != "none"
        self.tiles_have_positives |= self.guided
        self.sizes = scores.guided_sizes if self.guided else scores.gradient_sizes
        self.n, self.m, self.d = scores.n, scores.m, scores.d
        sym = self.spec.symmetric
        self.need_a = needs.a or sym or (needs.scale and not needs.b)
        self.need_b = needs.b and not sym
        self.row_step, self.col_step = self._macro()
        # Exponentials serve the gradients of log-sum-exps; saved scores serve all.
        serves = self.guided or ("grad_row" in more and not self.spec.softplus and not needs.bias)
        # The gradient of the columns then lies in the memory of ``saved``, in the type of the features.
        self.col_dtype = grad_dtype if saved is None else scores.dtype
        in_place = self.need_b and self.col_dtype == scores.dtype and self.row_step >= self.n
        self.saved = saved if serves and in_place else None
        self.factors: RowFactors | None = None
        self.bias: Bias | None = None
        self.g_factor: Buffer = more.get("g_factor", scores.scale)
        self.product_factor = more.get("product_factor")
        names = "row_lse", "grad_row", "grad_pos", "grad_sum", "grad_entropy", "grad_square", "grad_picked"
        guide = ("guide_lse", "row_level", "row_hot_lse", "grad_hot", "grad_guide") if self.guided else ()
        scores.by_row |= {name: more.get(name) for name in (*names, *guide)}
        if sym:  # a column is a row too
            as_column = {"col_lse": "row_lse", "grad_col": "grad_row", "grad_pos_col": "grad_pos"}
            scores.by_col |= {name: more.get(of_row) for name, of_row in as_column.items()}
        else:
            scores.by_col |= {name: more.get(name) for name in ("col_lse", "grad_col")}
        self.picked: dict[str, Buffer] = {}  # arguments of `Scores.picks`
        if "grad_picked" in more:
            self.picked = {"own": more["own_picked"], "grad_pos": more["grad_picked"]}
        self.shared_bias = bool(scores.score_bits & bit.ONE_BIAS.value)
        self.terms = bit_sum(
            (bit.ROWS, "grad_row" in more and not self.spec.softplus),
            (bit.COLS, scores.by_col["grad_col"] is not None),
            (bit.SOFTPLUS, self.spec.softplus),
            (bit.ROW_SUM, "grad_sum" in more),
            (bit.MIRROR, sym),
            (bit.HOT, "grad_hot" in more),
            (bit.BIAS_TOTAL, needs.bias and self.shared_bias),
            (bit.BIAS_COLS, needs.bias and not self.shared_bias),
        )
        scores.fixed["ROW_TERMS"] = row_terms(more)
        self.span = self._span() if self.terms & bit.ROWS.value and self.terms & bit.COLS.value else None
        if scores.positive in ONE_POSITIVE and not self.tiles_have_positives:
            own = more.get("own")
            if own is None:
                own = scores.empty("own", self.n)
                scores.positives(positive_kernel, slice(0, self.n), slice(0, self.m), row_pos=own)
            scores.by_row["own"] = own

    def _macro(self) -> tuple[int, int]:
        return macro_tile(self.scores.shape, self.spec, self.sizes, self.scores.options)

    def _span(self) -> Buffer:
        """The span of the log-sum-exps and the largest of them; u of each row and v of each column."""
        scores, sym = self.scores, self.spec.symmetric
        span, u = scores.empty("span", 2), scores.empty("u", self.n)
        v = u if sym else scores.empty("v", self.m)
        values: dict[str, Any] = {"span": span, "row_share": u, "col_share": v, "factor": self.g_factor}
        values |= {"n": self.n, "m": self.m, "BLOCK": SPAN_BLOCK} | scores.by_row | scores.by_col
        scores.launch(kernels.span_kernel, 1, values, warps=8)
        cols = 0 if sym else self.m
        programs = cdiv(self.n, SPAN_BLOCK) + cdiv(cols, SPAN_BLOCK)
        scores.launch(kernels.share_kernel, programs, values, m=cols)
        scores.by_row["row_share"], scores.by_col["col_share"] = u, v
        return span

    def run(self) -> tuple[Buffer | None, ...]:
        """All macro-tiles; with symmetric scores those on and above the diagonal. The gradients in the order of `Needs`."""
        scores, sym = self.scores, self.spec.symmetric
        self.row_pieces = pieces(self.n, self.row_step)
        self.col_pieces = column_pieces(self.m, self.col_step, self.saved)
        self.g_all = self._memory_of_g()
        once = not sym and len(self.col_pieces) == 1
        dot_a = self.needs.scale and self.need_a
        self.grad_a = self._sum("dA", self.n, whole=sym, once=once, dot=dot_a) if self.need_a else None
        self.grad_b = None
        if self.need_b:
            memory = None if self.saved is None else self.saved.memory
            dot_b = self.needs.scale and not self.need_a
            one_block = len(self.row_pieces) == 1
            self.grad_b = self._sum("dB", self.m, whole=True, once=one_block, dot=dot_b, out=memory)
        if self.needs.bias:
            self.bias = Bias(self)
        if self.saved is not None and not self.guided and not self.saved.relative and self.saved.end:
            # The memory of the row gradients is not written before all columns are done.
            unused = None if self.grad_a is None or self.grad_a.total is None else self.grad_a.out
            self.factors = self.saved.factors(scores, self.g_factor, unused)
        if not sym:
            scores.program.over(self.row_pieces, self._row_of_blocks)
        else:
            scores.program.above_diagonal(self.row_pieces, self._macro_tile, diagonal=True)
            assert self.grad_a is not None
            self.grad_a.finish(slice(0, self.n), scores.a)
        if self.grad_b is not None:
            self.grad_b.finish(slice(0, self.m), scores.b)
        dots = next((s.dots for s in (self.grad_a, self.grad_b) if s is not None and s.dots is not None), None)
        return (
            self.grad_a.out if self.grad_a is not None and self.needs.a else None,
            None if self.grad_b is None else self.grad_b.out,
            None if dots is None else self._without_factor(dots, "dscale"),
            None if self.bias is None else self.bias.finish(),
        )

    def _memory_of_g(self) -> Buffer:
        """G of one macro-tile."""
        others_from = 0 if self.saved is None else self.saved.end
        width = min(self.m - others_from, self.col_step)
        if self.guided:  # the saved columns have a G too
            width = max(j.stop - j.start for j in self.col_pieces)
        item = self.scores.dtype.itemsize
        width = cdiv(width * item, 16) * 16 // item
        held: Buffer | None = None if self.saved is None else self.saved.g(self.n, width)
        if held is not None:
            return held
        return self.scores.empty("G", min(self.n, self.row_step), width, dtype=self.scores.dtype)

    def _row_of_blocks(self, i: slice) -> None:
        """All macro-tiles of the rows i, whose gradient is then complete."""
        self.scores.program.over(self.col_pieces, lambda j: self._macro_tile(i, j), breaks(self.saved))
        if self.grad_a is not None:
            self.grad_a.finish(i, self.scores.a)

    def _macro_tile(self, i: slice, j: slice) -> None:
        """G of the macro-tile (i, j), and its products."""
        scores, sym = self.scores, self.spec.symmetric
        g, a = self.g_all[: i.stop - i.start, : j.stop - j.start], scores.a[i]
        ready = None if self.saved is None else self.saved.chunk(j)
        if ready is not None:
            g, a = ready, a if self.factors is None else self.factors.scaled
        self._gradient(g, tile_descriptor(g, self.sizes), i, j)
        last_saved = self.factors is not None and self.saved is not None and j.stop == self.saved.end
        if self.grad_a is not None:
            self.grad_a.add(i, g, scores.b[j], first=j.start == 0)
            if sym and i != j:
                self.grad_a.add(j, g.T, a, first=i.start == 0)
            if last_saved:
                assert self.factors is not None
                self.grad_a.scale_rows(i, self.factors.each)
        if self.grad_b is not None:
            self.grad_b.add(j, g.T, a, first=i.start == 0)
            if last_saved:
                assert self.saved is not None
                assert self.factors is not None
                self.saved.correct_positives(scores, self.grad_b.sums, self.factors)

    def _sum(self, name: str, rows: int, **how: Any) -> GradientSum:
        """The gradient of one side; ``how``: see `GradientSum`."""
        dtype = self.grad_dtype if name == "dA" else self.col_dtype
        return GradientSum(self.scores, name, rows, dtype, block=self.row_step, factor=self.product_factor, **how)

    def _without_factor(self, dots: Buffer, name: str) -> Buffer:
        """The sum of ``dots`` divided by the factor of G: (). Half of it if each pair was counted twice."""
        out = self.scores.empty(name)
        values: dict[str, Any] = {"dots": dots, "factor": self.g_factor, "out": out, "count": dots.numel()}
        values |= {"share": 0.5 if self.spec.symmetric else 1.0, "BLOCK": SPAN_BLOCK}
        self.scores.launch(kernels.scale_kernel, 1, **values)
        return out

    def _gradient(self, g: Buffer, desc: Descriptor, i: slice, j: slice) -> None:
        """G of the macro-tile (i, j)."""
        scores, span, row_factor = self.scores, self.span, None
        is_saved = self.saved is not None and j.start < self.saved.end
        if is_saved and self.factors is not None:
            assert self.saved is not None
            row_factor = self.factors.each
            span = self.saved.needs_repair  # WIDE runs only where a repair is needed
        shared: dict[str, Any] = {"factor": self.g_factor, "TERMS": self.terms}
        part = None if self.bias is None else self.bias.part(i, j)
        if self.guided:
            x, y = (None if self.saved is None else self.saved.saved_scores(j)) or (None, None)
            stored = {"x": x, "y": y, "stored_stride": 0 if x is None else x.stride(0)}
            scores.tiles(guided_gradient_kernel, i, j, self.sizes, g_desc=desc, bias_part=part, **stored, **shared)
        elif is_saved and self.factors is None:
            assert self.saved is not None
            self.saved.write_gradient(scores, j, self.g_factor)
        else:
            more = {"g_desc": desc, "span": span, "bias_part": part} | shared
            for wide in (False, True) if self.span is not None else (True,):
                scores.tiles(kernels.gradient_kernel, i, j, self.sizes, WIDE=wide, **more)
        if not self.guided:
            entries: dict[str, Any] = {"g": g, "g_stride": g.stride(0), "row_factor": row_factor}
            # Those among skipped picks are added below.
            if scores.positive in ONE_POSITIVE and not self.spec.skip_picked:
                near = scores.positive == bit.DIAGONAL.value
                scores.positives(positive_gradient_kernel, i, j, only_near=near, **entries, **shared)
            if self.picked:
                if self.spec.skip_picked:
                    shared["TERMS"] &= ~bit.ROWS.value
                scores.positives(positive_gradient_kernel, i, j, **entries, **scores.picks(i, **self.picked), **shared)
        if self.bias is not None:
            self.bias.add(j, part)


class Bias:
    """The gradient of the bias: column sums of G before it is rounded, or its total for a bias that all columns share.

    The tiles leave out an only positive and picked columns; their shares of the column are added here.
    """

    def __init__(self, parent: Backward) -> None:
        self.parent, self.shared = parent, parent.shared_bias
        self.total = parent.scores.zeros("bias sums", 1 if self.shared else parent.m)

    def part(self, i: slice, j: slice) -> Buffer:
        """Memory for the sums of G over the rows, or over the columns, of each tile."""
        n, m, sizes = i.stop - i.start, j.stop - j.start, self.parent.sizes
        size = cdiv(m, sizes.cols) * n if self.shared else cdiv(n, sizes.rows) * m
        return self.parent.scores.empty("bias_part", size)

    def add(self, j: slice, part: Buffer | None) -> None:
        """Add the sums of one macro-tile."""
        self.parent.scores.program.call(add_columns, self.total if self.shared else self.total[j], part)

    def finish(self) -> Buffer:
        """One number for each column, or one for a shared bias, which `spread` divides."""
        parent, scores = self.parent, self.parent.scores
        spec, given = parent.spec, scores.given
        kind = BiasKind(parent.m, self.shared, spec.mask_self, spec.softplus, bool(spec.softcap))
        common = self.total, parent.g_factor, given.get("row_scale"), given.get("row_shift"), given["softcap"]
        if parent.picked:
            picked = parent.picked["grad_pos"], parent.picked["own"], scores.pick, given["first"]
            scores.program.call(functools.partial(add_picked, kind), *common, *picked)
        incoming = scores.by_row["grad_row" if spec.softplus else "grad_pos"]
        if incoming is not None and scores.positive in ONE_POSITIVE and not parent.tiles_have_positives:
            one = incoming, scores.by_row["own"], given.get("row_key"), given["first"], given["ahead"]
            scores.program.call(functools.partial(add_positives, kind), *common, *one)
        if self.shared:
            return parent._without_factor(self.total, "dbias")
        out = scores.empty("dbias", parent.m)
        scores.program.call(without_factor, out, self.total, parent.g_factor)
        return out


@dataclasses.dataclass(frozen=True)
class BiasKind:
    """What `add_positives` and `add_picked` depend on; ``cols``: the number of columns."""

    cols: int
    shared: bool
    mask_self: bool
    softplus: bool
    softcap: bool


def add_columns(total: Tensor, parts: Tensor) -> None:
    """Add the sums of each column of ``parts``."""
    total += parts.view(-1, len(total)).sum(0)


def without_factor(out: Tensor, total: Tensor, g_factor: Tensor) -> None:
    """out = total / the factor of G, as the kernels take it."""
    out.copy_(total / factor_of(g_factor))


def factor_of(g_factor: Tensor) -> Tensor:
    """The factor of G, as the kernels take it."""
    return g_factor.masked_fill(g_factor == 0, kernels.TINY_SCALE.value)


def add_picked(
    kind: BiasKind,
    total: Tensor,
    g_factor: Tensor,
    row_scale: Tensor | None,
    row_shift: Tensor | None,
    softcap: float,
    grad: Tensor,
    own: Tensor,
    pick: Tensor,
    first: int,
) -> None:
    """Add the gradients of picked columns."""
    here = pick - first
    there = (pick >= 0) & (here >= 0) & (here < kind.cols)
    _add_entries(kind, total, row_scale, row_shift, softcap, grad * factor_of(g_factor), own, here, there)


def add_positives(
    kind: BiasKind,
    total: Tensor,
    g_factor: Tensor,
    row_scale: Tensor | None,
    row_shift: Tensor | None,
    softcap: float,
    grad: Tensor,
    own: Tensor,
    row_key: Tensor | None,
    first: int,
    ahead: int,
) -> None:
    """Add g_pos for each positive, or -1 times the weight for a sigmoid loss: sigmoid(x) - 1."""
    factor = factor_of(g_factor)
    share = grad * (-factor if kind.softplus else factor)
    rows = torch.arange(len(grad), device=grad.device) + (first + ahead)
    key = rows if row_key is None else row_key
    here = key - first
    there = (here >= 0) & (here < kind.cols)
    if kind.mask_self:
        there &= key != rows
    entries = share[:, None], own[:, None], here[:, None], there[:, None]
    _add_entries(kind, total, row_scale, row_shift, softcap, *entries)


def _add_entries(
    kind: BiasKind,
    total: Tensor,
    row_scale: Tensor | None,
    row_shift: Tensor | None,
    softcap: float,
    share: Tensor,
    own: Tensor,
    here: Tensor,
    there: Tensor,
) -> None:
    """Add shares to the columns ``here``, where they are inside; ``own`` are their scores: (n, K) each."""
    each = 1.0 if row_scale is None else row_scale[:, None]
    if kind.softcap:
        x = (own if row_shift is None else own + row_shift[:, None]) / each
        share = share * (1.0 - (x / softcap).square())
    share = torch.where(there, share * each, 0.0)
    if kind.shared:
        total += share.sum()
    else:
        total.index_put_((here.clamp(0, kind.cols - 1),), share, accumulate=True)  # sorts: no atomics


def spread(bias: Tensor | None, cols: int) -> Tensor | None:
    """The gradient of a bias that all columns share, divided evenly: only the sum has a meaning."""
    return (bias / cols).expand(cols).contiguous() if bias is not None and bias.dim() == 0 else bias
