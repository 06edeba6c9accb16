"""The Triton backend: macro-tiles, the kernels on each, and the products with G.

Axes: n rows, m columns, d features. A macro-tile is what one launch works on; its size bounds the workspace.

What a call allocates above inputs and gradients, with w the workspace: forward, the parts of the statistics (at
most w / 2); backward, G (at most w / 2), a block of float32 row gradients (at most w / 4), and, if the rows need more
than one macro-tile, one float32 accumulator for the column gradients (m x d). Features that a tensor descriptor cannot
read (rows that do not start at 16-byte addresses, a last axis with a stride) are copied once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tilewise.kernels import keys
from tilewise.kernels.spec import Grads, GradStats, Needs, Pair, PairSpec, Stats, incoming_size
from tilewise.kernels.tiled import matmul_precision
from tilewise.kernels.triton_impl import backward, forward, parts
from tilewise.kernels.triton_impl.sizes import Sizes, interpreted, multiprocessors, sizes_for
from tilewise.options import TileOptions

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
LARGEST_WIDTH = 8192
MERGE_BLOCK = 128
TINY_SCALE = 1e-30  # stands for a scale of exactly 0, so that the scale's own gradient can be read off


class TritonBackend:
    """Fused kernels for CUDA devices; in the interpreter, for tests, on the CPU."""

    name = "triton"

    def why_not(self, pair: Pair, spec: PairSpec, options: TileOptions) -> str | None:
        """The first thing that these kernels cannot do."""
        if pair.a.dtype not in DTYPES:
            return f"it multiplies float16, bfloat16 and float32, not {pair.a.dtype}"
        if pair.a.shape[1] > LARGEST_WIDTH:
            return f"it takes at most {LARGEST_WIDTH} features, not {pair.a.shape[1]}"
        if min(pair.a.shape[0], pair.b.shape[0], pair.a.shape[1]) == 0:
            return "there is nothing to launch for an empty side"
        if pair.a.device.type == "cuda":
            capability = torch.cuda.get_device_capability(pair.a.device)
            if capability < (8, 0):
                return f"it needs compute capability 8.0, and this card has {capability[0]}.{capability[1]}"
        elif pair.a.dtype == torch.bfloat16 and interpreted():
            return "the interpreter gets bfloat16 products wrong"
        return None

    def forward(self, pair: Pair, spec: PairSpec, options: TileOptions) -> Stats:
        """Statistics, macro-tile by macro-tile."""
        with on_device(pair.a), torch.no_grad():
            return Forward(Launch.of(pair, spec, options)).run()

    def backward(
        self,
        pair: Pair,
        stats: Stats,
        grad: GradStats,
        needs: Needs,
        spec: PairSpec,
        options: TileOptions,
        *,
        grad_dtype: torch.dtype | None = None,
    ) -> Grads:
        """Gradients: G of a macro-tile, then two products."""
        with on_device(pair.a), torch.no_grad(), matmul_precision(options.precision):
            launch = Launch.of(pair, spec, options)
            return Backward(launch, stats, grad, needs, grad_dtype or pair.a.dtype).run()


@contextlib.contextmanager
def on_device(features: Tensor) -> Iterator[None]:
    """Launches go to the device that holds the features."""
    with torch.cuda.device(features.device) if features.is_cuda else contextlib.nullcontext():
        yield


def readable(features: Tensor) -> Tensor:
    """The features, or a copy of them whose rows a tensor descriptor can read."""
    item = features.element_size()
    aligned = features.data_ptr() % 16 == 0 and features.stride(0) * item % 16 == 0
    if features.stride(1) == 1 and aligned and features.stride(0) >= features.shape[1]:
        return features
    width = triton.cdiv(features.shape[1] * item, 16) * 16 // item
    copy = features.new_zeros((features.shape[0], width))[:, : features.shape[1]]
    return copy.copy_(features)


def pieces(size: int, step: int) -> list[slice]:
    """[0, size) cut into slices of ``step``."""
    return [slice(start, min(start + step, size)) for start in range(0, size, step)]


@dataclass(frozen=True)
class Launch:
    """Everything that is the same for all macro-tiles of a call."""

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
    row_key: Tensor | None
    col_key: Tensor | None
    row_skip: Tensor | None
    col_skip: Tensor | None

    @staticmethod
    def of(pair: Pair, spec: PairSpec, options: TileOptions) -> Launch:
        """Choose sizes, switches and small keys."""
        bits = parts.BIAS.value * (pair.bias is not None) + parts.SOFTCAP.value * bool(spec.softcap)
        skipping = pair.row_skip is not None and pair.col_skip is not None
        bits += parts.SKIP.value * skipping + parts.ITSELF.value * spec.itself
        row_key, col_key = pair.row_key, None
        if spec.positive == "many":
            assert pair.row_key is not None
            assert pair.col_key is not None
            row_key, col_key = keys.dense_ranks(pair.row_key, pair.col_key)
        row_skip = col_skip = None
        if pair.row_skip is not None and pair.col_skip is not None:
            row_skip, col_skip = keys.dense_ranks(pair.row_skip, pair.col_skip)
        a = readable(pair.a)
        precision = torch.get_float32_matmul_precision() if options.precision == "torch" else options.precision
        sizes = sizes_for(pair.a.device, pair.a.dtype)
        return Launch(
            pair=pair,
            spec=spec,
            options=options,
            a=a,
            b=a if spec.symmetric else readable(pair.b),
            score_bits=bits,
            positive={"none": 0, "one": parts.ONE.value, "many": parts.MANY.value}[spec.positive],
            exact="ieee" if precision == "highest" else "tf32",
            forward_sizes=sizes[0],
            gradient_sizes=sizes[1],
            row_key=row_key,
            col_key=col_key,
            row_skip=row_skip,
            col_skip=col_skip,
        )

    def programs(self, sizes: Sizes) -> int:
        """Resident programs of a launch."""
        return multiprocessors(self.a.device) * sizes.programs

    def run(self, kernel: Any, i: slice, j: slice, sizes: Sizes, tensors: dict[str, Any], **switches: Any) -> None:
        """One kernel over the macro-tile (i, j)."""
        pair, programs = self.pair, self.programs(sizes)
        kernel[(programs,)](
            a_desc=TensorDescriptor.from_tensor(self.a[i], [sizes.rows, sizes.depth]),
            b_desc=TensorDescriptor.from_tensor(self.b[j], [sizes.cols, sizes.depth]),
            scale=pair.scale,
            bias=cut(pair.bias, j),
            softcap=self.spec.softcap,
            row_key=cut(self.row_key, i),
            col_key=cut(self.col_key, j),
            row_skip=cut(self.row_skip, i),
            col_skip=cut(self.col_skip, j),
            row_zero=cut(pair.row_zero, i),
            n=i.stop - i.start,
            m=j.stop - j.start,
            first=pair.col_start + j.start,
            ahead=(pair.row_start + i.start) - (pair.col_start + j.start),
            D=self.a.shape[1],
            SCORE=self.score_bits,
            POSITIVE=self.positive,
            R=sizes.rows,
            C=sizes.cols,
            K=sizes.depth,
            GROUP=sizes.group,
            PROGRAMS=programs,
            EXACT=self.exact,
            num_warps=sizes.warps,
            num_stages=sizes.stages,
            **tensors,
            **switches,
        )


def cut(values: Tensor | None, part: slice) -> Tensor | None:
    """values[part], None staying None."""
    return None if values is None else values[part]


class Forward:
    """The statistics of all macro-tiles, merged."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.pair, self.spec, self.sizes = launch.pair, launch.spec, launch.forward_sizes
        self.n, self.m = self.pair.a.shape[0], self.pair.b.shape[0]
        spec = self.spec
        self.has_pos = spec.positive != "none" and not spec.softplus
        self.row_steps, self.col_steps = self._macro()
        stats = {"row": spec.row_lse or spec.softplus, "col": spec.col_lse or spec.symmetric}
        stats |= {"pos": self.has_pos and spec.positive == "many", "sum": spec.row_sum}
        rows, cols = min(self.n, self.row_steps), min(self.m, self.col_steps)
        row_tiles, col_tiles = triton.cdiv(rows, self.sizes.rows), triton.cdiv(cols, self.sizes.cols)

        def buffer(name: str, size: int) -> Tensor | None:
            return self.pair.scale.new_empty(size) if stats[name] else None

        self.row_part = buffer("row", col_tiles * rows)
        self.col_part = buffer("col", row_tiles * cols)
        self.pos_part = buffer("pos", col_tiles * rows)
        self.pos_col_part = buffer("pos", row_tiles * cols) if spec.symmetric else None
        self.sum_part = buffer("sum", col_tiles * rows)
        self.flags = torch.empty(row_tiles * col_tiles, dtype=torch.int32, device=self.pair.a.device)
        self.started: set[tuple[str, int]] = set()

    def _macro(self) -> tuple[int, int]:
        """Rows and columns of a macro-tile whose parts take at most half the workspace."""
        if self.spec.symmetric:
            rows = cols = 8192
        else:
            rows, cols = min(self.n, 65536), min(self.m, 2**20 if not self.spec.col_lse else 65536)
        tall = 1 + (self.spec.positive == "many") + self.spec.row_sum
        both = self.spec.col_lse or self.spec.symmetric

        def bytes_of(rows: int, cols: int) -> int:
            return 4 * rows * cols * (tall / self.sizes.cols + both / self.sizes.rows)

        while bytes_of(rows, cols) > self.launch.options.workspace_bytes // 2 and max(rows, cols) > 256:
            if self.spec.symmetric:
                rows = cols = rows // 2
            else:
                rows, cols = (rows, triton.cdiv(cols, 2)) if cols >= rows else (triton.cdiv(rows, 2), cols)
        tile = max(self.sizes.rows, self.sizes.cols)
        return triton.cdiv(rows, tile) * tile, triton.cdiv(cols, tile) * tile

    def run(self) -> Stats:
        """All macro-tiles; with symmetric scores those on and above the diagonal."""
        spec, new = self.spec, self.pair.scale.new_empty
        row = new(self.n) if spec.row_lse or spec.softplus else None
        col = new(self.m) if spec.col_lse else None
        many = spec.positive == "many"
        pos = (new(self.n) if many else self.pair.scale.new_zeros(self.n)) if self.has_pos else None
        total = new(self.n) if spec.row_sum else None
        for i in pieces(self.n, self.row_steps):
            for j in pieces(self.m, self.col_steps):
                if spec.symmetric and j.start < i.start:
                    continue
                mirrored = spec.symmetric and i != j
                self._launch(i, j, pos, mirrored)
                self._merge(self.row_part, row, i, j, log=not spec.softplus)
                if mirrored:
                    self._merge(self.col_part, row, j, i, log=True, across=True)
                if col is not None:
                    self._merge(self.col_part, col, j, i, log=True, across=True)
                if many:
                    self._merge(self.pos_part, pos, i, j, log=False)
                    if mirrored:
                        self._merge(self.pos_col_part, pos, j, i, log=False, across=True)
                self._merge(self.sum_part, total, i, j, log=False)
        hits = None
        if self.has_pos and many:
            hits = keys.hits(self.pair, spec)
        elif self.has_pos:
            assert self.pair.row_key is not None
            place = self.pair.row_key - self.pair.col_start
            hits = ((place >= 0) & (place < self.m)).to(torch.float32)
        return Stats(
            row_lse=row if spec.row_lse else None,
            row_softplus=row if spec.softplus else None,
            col_lse=col,
            row_pos=pos,
            row_hits=hits,
            row_sum=total,
        )

    def _launch(self, i: slice, j: slice, pos: Tensor | None, mirrored: bool) -> None:
        spec = self.spec
        bits = forward.ROWS.value * spec.row_lse + forward.COLS.value * (spec.col_lse or mirrored)
        bits += forward.SOFTPLUS.value * spec.softplus + forward.ROW_SUM.value * spec.row_sum
        bits += forward.MIRROR.value * mirrored
        col_zero = self.pair.row_zero if spec.symmetric else self.pair.col_zero
        shared = {
            "row_part": self.row_part,
            "col_part": self.col_part,
            "flags": self.flags,
            "col_zero": cut(col_zero, j),
        }
        more = {
            "row_pos": cut(pos, i),
            "col_pos": cut(pos, j) if mirrored else None,
            "pos_part": self.pos_part,
            "pos_col_part": self.pos_col_part,
            "sum_part": self.sum_part,
            "col_weight": cut(self.pair.col_weight, j),
        }
        launch = self.launch
        launch.run(forward.forward_kernel, i, j, self.sizes, shared | more, STATS=bits)
        launch.run(forward.repair_kernel, i, j, self.sizes, shared, STATS=bits)

    def _merge(
        self, part: Tensor | None, out: Tensor | None, i: slice, j: slice, *, log: bool, across: bool = False
    ) -> None:
        """Fold the parts of the rows (or columns) ``i`` that the other side ``j`` gave."""
        if part is None or out is None:
            return
        size = i.stop - i.start
        tile = self.sizes.rows if across else self.sizes.cols
        key = (str(out.data_ptr()), i.start)
        first = key not in self.started
        self.started.add(key)
        forward.merge_kernel[(triton.cdiv(size, MERGE_BLOCK),)](
            part,
            out[i],
            size,
            triton.cdiv(j.stop - j.start, tile),
            FIRST=first,
            LOG=log,
            BLOCK=MERGE_BLOCK,
            num_warps=4,
        )


class Backward:
    """Gradients of all macro-tiles, added up in float32."""

    def __init__(self, launch: Launch, stats: Stats, grad: GradStats, needs: Needs, grad_dtype: torch.dtype) -> None:
        self.launch, self.stats, self.grad, self.needs, self.grad_dtype = launch, stats, grad, needs, grad_dtype
        self.pair, self.spec, self.sizes = launch.pair, launch.spec, launch.gradient_sizes
        self.n, self.m, self.d = self.pair.a.shape[0], self.pair.b.shape[0], self.pair.a.shape[1]
        self.need_a = needs.a or self.spec.symmetric or (needs.scale and not needs.b)
        self.need_b = needs.b and not self.spec.symmetric
        self.row_steps, self.col_steps = self._macro()
        scale = self.pair.scale
        if self.pair.a.dtype == torch.float16:
            # G must stay near 1 in float16: divide by the size of what comes in, multiply at the end.
            size = incoming_size(grad).to(scale)
            self.inside, self.outside = 1.0 / size, scale * size
            self.per_scale = size
        else:
            self.inside = torch.where(scale == 0, TINY_SCALE, scale)
            self.outside = torch.ones_like(scale)
            self.per_scale = 1.0 / self.inside

    def _macro(self) -> tuple[int, int]:
        """Rows and columns of a macro-tile: G takes at most half the workspace, a block of row gradients a quarter."""
        budget, item = self.launch.options.workspace_bytes, self.pair.a.element_size()
        tile = max(self.sizes.rows, self.sizes.cols)
        rows = min(8192, max(tile, budget // 4 // (4 * self.d) // tile * tile))
        if self.spec.symmetric:
            while rows > tile and rows * rows * item > budget // 2:
                rows = rows // 2
            return rows, rows
        rows = min(rows, triton.cdiv(self.n, tile) * tile)
        cols = max(tile, budget // 2 // (rows * item) // tile * tile)
        while cols < tile * 4 and rows > tile:
            rows, cols = rows // 2 // tile * tile or tile, cols * 2
        cols = min(cols, triton.cdiv(self.m, tile) * tile)
        return rows, min(cols, 65536)

    def run(self) -> Grads:
        """All macro-tiles; with symmetric scores those on and above the diagonal."""
        pair, sym = self.pair, self.spec.symmetric
        row_pieces, col_pieces = pieces(self.n, self.row_steps), pieces(self.m, self.col_steps)
        width = triton.cdiv(min(self.m, self.col_steps) * pair.a.element_size(), 16) * 16 // pair.a.element_size()
        g_all = pair.a.new_empty((min(self.n, self.row_steps), width))
        direct = pair.a.dtype != torch.float16  # a product that is complete may be written in its final type
        grad_a = (
            Sum(self, self.n, whole=sym, direct=direct and not sym and len(col_pieces) == 1) if self.need_a else None
        )
        grad_b = Sum(self, self.m, whole=True, direct=direct and len(row_pieces) == 1) if self.need_b else None
        bias = pair.scale.new_zeros(self.m) if self.needs.bias else None
        for i in row_pieces:
            for j in col_pieces:
                if sym and j.start < i.start:
                    continue
                g = g_all[: i.stop - i.start, : j.stop - j.start]
                self._gradient(g, i, j, bias)
                if grad_a is not None:
                    grad_a.add(i, g, self.launch.b[j])
                    if sym and i != j:
                        grad_a.add(j, g.T, self.launch.a[i])
                if grad_b is not None:
                    grad_b.add(j, g.T, self.launch.a[i])
            if grad_a is not None and not sym:
                grad_a.finish(i, self.launch.a)
        del g_all
        if grad_a is not None and sym:
            grad_a.finish(slice(0, self.n), self.launch.a)
        if grad_b is not None:
            grad_b.finish(slice(0, self.m), self.launch.b)
        grad_scale = None
        if self.needs.scale:
            source = grad_a if grad_a is not None else grad_b
            assert source is not None
            grad_scale = torch.stack(source.dots).sum() * self.per_scale * (0.5 if sym else 1.0)
        if bias is not None:
            bias *= self.per_scale
        return Grads(
            a=grad_a.out if grad_a is not None and self.needs.a else None,
            b=None if grad_b is None else grad_b.out,
            scale=grad_scale,
            bias=bias,
        )

    def _gradient(self, g: Tensor, i: slice, j: slice, bias: Tensor | None) -> None:
        """G of the macro-tile (i, j)."""
        grad, stats, spec, sym = self.grad, self.stats, self.spec, self.spec.symmetric
        grad_row = grad.row_softplus if spec.softplus else grad.row_lse
        grad_col = grad.row_lse if sym else grad.col_lse
        bits = backward.ROWS.value * (grad.row_lse is not None) + backward.COLS.value * (grad_col is not None)
        bits += backward.SOFTPLUS.value * spec.softplus + backward.ROW_SUM.value * (grad.row_sum is not None)
        bits += backward.MIRROR.value * sym + backward.BIAS_GRAD.value * (bias is not None)
        row_tiles = triton.cdiv(g.shape[0], self.sizes.rows)
        bias_part = None if bias is None else bias.new_empty((row_tiles, g.shape[1]))
        self.launch.run(
            backward.gradient_kernel,
            i,
            j,
            self.sizes,
            {
                "g_desc": TensorDescriptor.from_tensor(g, [self.sizes.rows, self.sizes.cols]),
                "factor": self.inside,
                "col_zero": cut(self.pair.row_zero if sym else self.pair.col_zero, j),
                "col_weight": cut(self.pair.col_weight, j),
                "row_lse": cut(stats.row_lse, i),
                "col_lse": cut(stats.row_lse if sym else stats.col_lse, j),
                "grad_row": cut(grad_row, i),
                "grad_col": cut(grad_col, j),
                "grad_pos": cut(grad.row_pos, i),
                "grad_pos_col": cut(grad.row_pos, j) if sym else None,
                "grad_sum": cut(grad.row_sum, i),
                "bias_part": bias_part,
            },
            TERMS=bits,
        )
        if bias is not None and bias_part is not None:
            bias[j] += bias_part.sum(0)


class Sum:
    """The gradient of one side: products with G, added up and brought into their final type.

    ``whole``: the rows of all macro-tiles are accumulated at once; otherwise one block of rows after another.
    ``direct``: each row meets one macro-tile only, so its product is final and needs no float32 accumulator.
    """

    def __init__(self, parent: Backward, rows: int, *, whole: bool, direct: bool) -> None:
        self.parent, self.whole = parent, whole
        self.direct = direct or parent.grad_dtype == torch.float32
        like = parent.pair.a
        held = rows if whole else min(rows, parent.row_steps)
        self.out: Tensor | None = None
        if self.direct or not whole:
            self.out = like.new_empty((rows, parent.d), dtype=parent.grad_dtype)
        self.total = None if self.direct else like.new_empty((held, parent.d), dtype=torch.float32)
        self.started: set[int] = set()
        self.dots: list[Tensor] = []

    def add(self, i: slice, left: Tensor, right: Tensor) -> None:
        """total[i] += left @ right."""
        first = i.start not in self.started
        self.started.add(i.start)
        if self.direct:
            assert self.out is not None
            target = self.out[i]
        else:
            assert self.total is not None
            target = self.total[i] if self.whole else self.total[: i.stop - i.start]
        product(target, left, right, first)

    def finish(self, i: slice, features: Tensor) -> None:
        """The final values of the rows ``i``, and their part of the scale's gradient."""
        parent, dot = self.parent, self.parent.needs.scale
        if self.out is None:
            self.out = parent.pair.a.new_empty((i.stop, parent.d), dtype=parent.grad_dtype)
        final = self.direct and parent.pair.a.dtype != torch.float16
        if final and not dot:
            return
        source = self.out[i] if self.total is None else self.total if self.whole else self.total[: i.stop - i.start]
        rows, block = i.stop - i.start, 16
        programs = triton.cdiv(rows, block)
        dots = parent.pair.scale.new_empty(programs if dot else 0)
        features = features[i]
        backward.finish_kernel[(programs,)](
            source,
            features,
            parent.outside,
            self.out[i],
            dots,
            rows,
            D=parent.d,
            stride=source.stride(0),
            out_stride=self.out.stride(0),
            feature_stride=features.stride(0),
            WRITE=not final,
            DOT=dot,
            BLOCK=block,
            WIDTH=min(256, triton.next_power_of_2(parent.d)),
            num_warps=4,
        )
        if dot:
            self.dots.append(dots.sum(dtype=torch.float64).float())
        if self.whole:
            self.total = None


def product(target: Tensor, left: Tensor, right: Tensor, first: bool) -> None:
    """target = left @ right, or target += left @ right, accumulated in float32."""
    if not target.is_cuda:  # the interpreter
        result = left.float() @ right.float()
        target.copy_(result if first else target + result)
    elif target.dtype == left.dtype:
        torch.mm(left, right, out=target) if first else torch.addmm(target, left, right, out=target)
    elif first:
        torch.mm(left, right, out_dtype=target.dtype, out=target)
    else:
        torch.addmm(target, left, right, out_dtype=target.dtype, out=target)
