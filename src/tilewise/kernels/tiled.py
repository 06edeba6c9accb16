"""The torch backend: a loop of matrix products over tiles, on any device and in any floating type.

Axes: n rows of a, m rows of b, d features; r, c rows and columns of one tile.

One exponential per score serves both directions. With a shift t that suits the whole tile,

    e_ij = exp(x_ij - t)        rows: log sum_j e_ij + t        columns: log sum_i e_ij + t
    G_ij = e_ij * (u_i + v_j)   u_i = g_i exp(t - row_lse_i)    v_j = g_j exp(t - col_lse_j)

When a sum is too small or a factor too large for that (scores that spread over more than float32's range), the
tile is done again with a shift for each row and each column. Vectors are float64 inside, so that t and lse, which may
be large, cost no accuracy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor

from tilewise.kernels import keys
from tilewise.kernels.spec import Grads, GradStats, Needs, Pair, PairSpec, Stats, incoming_size
from tilewise.options import TileOptions

TILE_ROWS, TILE_COLS = 512, 2048  # 4 MiB of float32: stays in a CPU's cache between the passes over it
SAFE_SCORE = 60.0  # exp(+-60) and sums of 1e9 of them are ordinary float32 numbers: no shift is needed
SMALLEST_SUM = 2.0**-100
LARGEST_EXPONENT = 60.0


class TorchBackend:
    """Plain PyTorch. Never refuses."""

    name = "torch"

    def why_not(self, pair: Pair, spec: PairSpec, options: TileOptions) -> str | None:
        """Any device, any floating type, any shape."""
        return None

    def forward(self, pair: Pair, spec: PairSpec, options: TileOptions) -> Stats:
        """The statistics that ``spec`` asks for, tile by tile."""
        with matmul_precision(options.precision), torch.no_grad():
            return _forward(Tiles(pair, spec, options), pair, spec)

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
        """Gradients from tiles that are computed a second time."""
        with matmul_precision(options.precision), torch.no_grad():
            return _backward(pair, stats, grad, needs, spec, options, grad_dtype or pair.a.dtype)


def _forward(tiles: Tiles, pair: Pair, spec: PairSpec) -> Stats:
    n, m = pair.a.shape[0], pair.b.shape[0]
    empty, zeros = -torch.inf, 0.0

    def vector(wanted: bool, size: int, fill: float) -> Tensor | None:
        return pair.a.new_full((size,), fill, dtype=torch.float64) if wanted else None

    row_lse = vector(spec.row_lse, n, empty)
    col_lse = vector(spec.col_lse, m, empty)
    row_pos = vector(spec.positive != "none" and not spec.softplus, n, zeros)
    row_softplus = vector(spec.softplus, n, zeros)
    row_sum = vector(spec.row_sum, n, zeros)
    for i, j in tiles:
        x_rc = tiles.scores(i, j)
        mirrored = spec.symmetric and i != j
        if row_pos is not None:
            row_pos[i] += tiles.positive_sum(x_rc, i, j)
            if mirrored:
                row_pos[j] += tiles.positive_sum(x_rc.T, j, i)
        if row_sum is not None:
            assert pair.col_weight is not None
            row_sum[i] += x_rc @ pair.col_weight[j].to(x_rc.dtype)
        if row_softplus is not None:
            tiles.flip_positives(x_rc, i, j)
            row_softplus[i] -= torch.nn.functional.logsigmoid(x_rc.neg_()).sum(1)
        if row_lse is not None or col_lse is not None:
            row_part, col_part = tiles.log_sums(x_rc, spec.row_lse, spec.col_lse or mirrored)
            if row_lse is not None:
                row_lse[i] = torch.logaddexp(row_lse[i], row_part)
            if mirrored and row_lse is not None:
                row_lse[j] = torch.logaddexp(row_lse[j], col_part)
            if col_lse is not None:
                col_lse[j] = torch.logaddexp(col_lse[j], col_part)
    if row_lse is not None and pair.row_zero is not None:
        row_lse -= pair.row_zero
    if col_lse is not None and pair.col_zero is not None:
        col_lse -= pair.col_zero

    def out(vector: Tensor | None) -> Tensor | None:
        return None if vector is None else vector.to(pair.stat_dtype)

    return Stats(
        row_lse=out(row_lse),
        row_pos=out(row_pos),
        row_hits=None if row_pos is None else tiles.hits(),
        row_softplus=out(row_softplus),
        row_sum=out(row_sum),
        col_lse=out(col_lse),
    )


def _backward(
    pair: Pair,
    stats: Stats,
    grad: GradStats,
    needs: Needs,
    spec: PairSpec,
    options: TileOptions,
    grad_dtype: torch.dtype,
) -> Grads:
    size = incoming_size(grad).to(pair.a.device)
    tiles = Tiles(pair, spec, options)
    weights = TileWeights(pair, stats, grad, size)
    n, m, d = pair.a.shape[0], pair.b.shape[0], pair.a.shape[1]
    compute = tiles.compute_dtype
    both_into_a = spec.symmetric
    need_a = needs.a or both_into_a or (needs.scale and not needs.b)
    need_b = needs.b and not both_into_a
    # The side whose blocks are finished one after another needs no accumulator of the other type.
    grad_a = pair.a.new_zeros((n, d), dtype=compute if both_into_a else grad_dtype) if need_a else None
    grad_b = pair.a.new_zeros((m, d), dtype=compute) if need_b else None
    grad_bias = pair.a.new_zeros(m, dtype=torch.float64) if needs.bias else None
    grad_scale = pair.a.new_zeros((), dtype=torch.float64) if needs.scale else None

    block: Tensor | None = None  # gradient of the rows at hand, before the scale
    for i, j in tiles:
        g_rc = tiles.gradient(i, j, weights)
        if grad_bias is not None:
            grad_bias[j] += g_rc.sum(0)
        operand = g_rc if tiles.upcast else g_rc.to(pair.a.dtype)
        if grad_a is not None:
            if both_into_a:
                tiles.add_product(grad_a[i], operand, tiles.b_block(j))
                if i != j:
                    tiles.add_product(grad_a[j], operand.T, tiles.a_block(i))
            else:
                if block is None or j.start == 0:
                    block = pair.a.new_zeros((i.stop - i.start, d), dtype=compute)
                tiles.add_product(block, operand, tiles.b_block(j))
                if j.stop == m:
                    if grad_scale is not None:
                        grad_scale += (block * tiles.a_block(i)).sum(dtype=torch.float64)
                    torch.mul(block, pair.scale * size, out=block)
                    grad_a[i] = block.to(grad_dtype)
        if grad_b is not None:
            tiles.add_product(grad_b[j], operand.T, tiles.a_block(i))
    if grad_scale is not None and both_into_a:
        assert grad_a is not None
        grad_scale += _dot(grad_a, pair.a) / 2  # each pair was counted from both of its ends
    elif grad_scale is not None and not need_a:
        assert grad_b is not None
        grad_scale += _dot(grad_b, pair.b)
    if both_into_a and grad_a is not None:
        grad_a = grad_a.mul_(pair.scale * size).to(grad_dtype)
    if grad_b is not None:
        grad_b = grad_b.mul_(pair.scale * size).to(grad_dtype)
    stat = pair.stat_dtype
    return Grads(
        a=grad_a if needs.a else None,
        b=grad_b,
        scale=None if grad_scale is None else (grad_scale * size).to(stat),
        bias=None if grad_bias is None else (grad_bias * size).to(stat),
    )


class Tiles:
    """The tiles of one pair of blocks, in the order of the rows; holds the buffers that they share."""

    def __init__(self, pair: Pair, spec: PairSpec, options: TileOptions) -> None:
        self.pair, self.spec = pair, spec
        half = pair.a.dtype in (torch.float16, torch.bfloat16)
        # CUDA multiplies half types with float32 accumulation and output; elsewhere a tile is converted first.
        self.upcast = not (half and pair.a.is_cuda)
        self.compute_dtype = torch.float32 if half else pair.a.dtype
        self.on_cpu = pair.a.device.type == "cpu"
        self.rows, self.cols = tile_sizes(pair, spec, options)
        self.buffers: list[Tensor | None] = [None, None]
        self.pos_col: Tensor | None = None
        if spec.positive == "one":
            assert pair.row_key is not None
            self.pos_col = pair.row_key - pair.col_start
        self.bounded = self.on_cpu and score_bound(pair, spec) <= SAFE_SCORE
        self._held: dict[str, tuple[slice, Tensor]] = {}

    def __iter__(self) -> Iterator[tuple[slice, slice]]:
        """Rows outside, columns inside; with symmetric scores only tiles on and above the diagonal."""
        n, m = self.pair.a.shape[0], self.pair.b.shape[0]
        for start in range(0, n, self.rows):
            first = start if self.spec.symmetric else 0
            for col in range(first, m, self.cols):
                yield slice(start, min(start + self.rows, n)), slice(col, min(col + self.cols, m))

    def hits(self) -> Tensor:
        """The number of positives of each row."""
        if self.pos_col is not None:
            return ((self.pos_col >= 0) & (self.pos_col < self.pair.b.shape[0])).to(self.pair.stat_dtype)
        return keys.hits(self.pair, self.spec)

    def a_block(self, i: slice) -> Tensor:
        """Rows of a, in the type of the products."""
        return self._block("a", self.pair.a, i)

    def b_block(self, j: slice) -> Tensor:
        """Rows of b, in the type of the products."""
        return self._block("b", self.pair.b, j)

    def _block(self, name: str, features: Tensor, part: slice) -> Tensor:
        if not self.upcast or features.dtype == self.compute_dtype:
            return features[part]
        if name not in self._held or self._held[name][0] != part:
            self._held[name] = (part, features[part].to(self.compute_dtype))
        return self._held[name][1]

    def buffer(self, which: int, r: int, c: int) -> Tensor:
        """A reused (r, c) buffer."""
        held = self.buffers[which]
        if held is None:
            held = self.pair.a.new_empty(self.rows * self.cols, dtype=self.compute_dtype)
            self.buffers[which] = held
        return held[: r * c].view(r, c)

    def scores(self, i: slice, j: slice) -> Tensor:
        """Scores of one tile: (r, c), -inf where a pair never meets."""
        pair, spec = self.pair, self.spec
        if self.upcast:
            x_rc = self.buffer(0, i.stop - i.start, j.stop - j.start)
            torch.mm(self._scaled(i), self.b_block(j).T, out=x_rc)
        else:
            x_rc = torch.mm(pair.a[i], pair.b[j].T, out_dtype=torch.float32).mul_(pair.scale)
        if pair.bias is not None:
            x_rc.add_(pair.bias[j])
        if spec.softcap:
            x_rc.div_(spec.softcap).tanh_().mul_(spec.softcap)
        if pair.row_skip is not None and pair.col_skip is not None:
            x_rc.masked_fill_(self.excluded(i, j), -torch.inf)
        if spec.itself:
            x_rc.diagonal(self._diagonal(i, j)).fill_(-torch.inf)
        return x_rc

    def _scaled(self, i: slice) -> Tensor:
        if "scaled" not in self._held or self._held["scaled"][0] != i:
            self._held["scaled"] = (i, self.a_block(i) * self.pair.scale.to(self.compute_dtype))
        return self._held["scaled"][1]

    def _diagonal(self, i: slice, j: slice) -> int:
        """Where the pairs of a sample with itself lie in the tile; clamped to an empty diagonal outside of it."""
        offset = (self.pair.row_start + i.start) - (self.pair.col_start + j.start)
        return max(-(i.stop - i.start), min(offset, j.stop - j.start))

    def _place(self, i: slice, j: slice) -> tuple[Tensor, Tensor]:
        """For "one" positive: its column in the tile (r, 1), and whether it is there at all (r, 1)."""
        assert self.pos_col is not None
        place = (self.pos_col[i] - j.start)[:, None]
        width = j.stop - j.start
        return place.clamp(0, width - 1), (place >= 0) & (place < width)

    def _positives(self, i: slice, j: slice) -> Tensor:
        """For "many" positives: where they are, (r, c) bool."""
        pair = self.pair
        assert pair.row_key is not None
        assert pair.col_key is not None
        mask_rc = pair.row_key[i, None] == pair.col_key[None, j]
        if self.spec.itself:
            mask_rc.diagonal(self._diagonal(i, j)).fill_(False)
        return mask_rc

    def excluded(self, i: slice, j: slice) -> Tensor:
        """Pairs that share a skip key and are no positives: (r, c) bool."""
        pair = self.pair
        assert pair.row_skip is not None
        assert pair.col_skip is not None
        mask_rc = pair.row_skip[i, None] == pair.col_skip[None, j]
        if self.spec.positive == "one":
            place, inside = self._place(i, j)
            mask_rc.scatter_(1, place, mask_rc.gather(1, place) & ~inside)
        elif self.spec.positive == "many":
            mask_rc &= ~self._positives(i, j)
        return mask_rc

    def positive_sum(self, x_rc: Tensor, i: slice, j: slice) -> Tensor:
        """For each row the sum over its positives of x - zero: (r,) float64."""
        zero = self._zero(self.pair.row_zero, i)
        if self.spec.positive == "one":
            place, inside = self._place(i, j)
            found = x_rc.gather(1, place).double() - zero
            return torch.where(inside, found, 0.0).squeeze(1)
        mask_rc = self._positives(i, j)
        picked = torch.where(mask_rc, x_rc, 0.0)
        return picked.sum(1, dtype=torch.float64) - zero.squeeze(1) * mask_rc.sum(1)

    def _zero(self, zero: Tensor | None, part: slice) -> Tensor:
        """A zero vector as a float64 column."""
        if zero is None:
            return torch.zeros((part.stop - part.start, 1), dtype=torch.float64, device=self.pair.a.device)
        return zero[part, None].double()

    def flip_positives(self, x_rc: Tensor, i: slice, j: slice) -> None:
        """Change the sign of the positives, in place."""
        if self.spec.positive == "one":
            place, inside = self._place(i, j)
            found = x_rc.gather(1, place)
            x_rc.scatter_(1, place, torch.where(inside, -found, found))
        elif self.spec.positive == "many":
            torch.where(self._positives(i, j), -x_rc, x_rc, out=x_rc)

    def add_at_positives(self, g_rc: Tensor, value: Tensor, i: slice, j: slice) -> None:
        """Add value_i at the positives of row i, in place."""
        value = value[:, None].to(g_rc.dtype)
        if self.spec.positive == "one":
            place, inside = self._place(i, j)
            g_rc.scatter_add_(1, place, torch.where(inside, value, 0.0))
        else:
            g_rc.add_(torch.where(self._positives(i, j), value, 0.0))

    def log_sums(self, x_rc: Tensor, rows: bool, cols: bool) -> tuple[Tensor, Tensor]:
        """Log-sum-exp over rows and over columns of the tile, float64; destroys the tile."""
        nothing = x_rc.new_zeros(())
        if self.on_cpu and x_rc.numel() and (self.bounded or (rows and cols)):
            top = 0.0 if self.bounded else x_rc.max().item()
            if math.isfinite(top):
                spare = x_rc if self.bounded else torch.sub(x_rc, top, out=self.buffer(1, *x_rc.shape))
                spare.exp_()
                row = spare.sum(1) if rows else nothing
                col = spare.sum(0) if cols else nothing
                least = min(row.min().item() if rows else 1.0, col.min().item() if cols else 1.0)
                if self.bounded or least >= SMALLEST_SUM:
                    return row.double().log() + top, col.double().log() + top
        row_out = _log_sum(x_rc, 1, self.buffer(1, *x_rc.shape)) if rows else nothing
        col_out = _log_sum(x_rc, 0, self.buffer(1, *x_rc.shape)) if cols else nothing
        return row_out, col_out

    def gradient(self, i: slice, j: slice, weights: TileWeights) -> Tensor:
        """The tile of G, the gradient of the scores before softcap, divided by the incoming size: (r, c)."""
        spec = self.spec
        x_rc = self.scores(i, j)
        slope = (x_rc / spec.softcap).square_().neg_().add_(1.0) if spec.softcap else None
        mirrored = spec.symmetric
        if spec.softplus:
            self.flip_positives(x_rc, i, j)
            g_rc = x_rc.sigmoid_()
            self.flip_positives(g_rc, i, j)
            g_rc.mul_(weights.softplus(i))
        else:
            g_rc = self._softmax_terms(x_rc, i, j, weights)
            if weights.grad_pos is not None:
                self.add_at_positives(g_rc, weights.grad_pos[i], i, j)
                if mirrored:
                    self.add_at_positives(g_rc.T, weights.grad_pos[j], j, i)
        if weights.grad_sum is not None:
            assert self.pair.col_weight is not None
            g_rc.addr_(weights.grad_sum[i].to(g_rc.dtype), self.pair.col_weight[j].to(g_rc.dtype))
        return g_rc if slope is None else g_rc.mul_(slope)

    def _softmax_terms(self, x_rc: Tensor, i: slice, j: slice, weights: TileWeights) -> Tensor:
        """g_i exp(x_ij - row_lse_i) + g_j exp(x_ij - col_lse_j), in place of the scores."""
        rows, cols = weights.rows, weights.rows if self.spec.symmetric else weights.cols
        if rows is None and cols is None:
            return x_rc.zero_()
        if self.on_cpu and x_rc.numel():
            top = 0.0 if self.bounded else x_rc.max().item()
            row = None if rows is None else rows.factor(i, top)
            col = None if cols is None else cols.factor(j, top)
            if math.isfinite(top) and (rows is None or row is not None) and (cols is None or col is not None):
                e_rc = (x_rc if self.bounded else x_rc.sub_(top)).exp_()
                if row is None or col is None:
                    only = row[:, None] if row is not None else cast(Tensor, col)[None, :]
                    return e_rc.mul_(only.to(e_rc.dtype))
                both = torch.add(
                    row.to(e_rc.dtype)[:, None], col.to(e_rc.dtype)[None, :], out=self.buffer(1, *e_rc.shape)
                )
                return e_rc.mul_(both)
        other = self.buffer(1, *x_rc.shape).copy_(x_rc) if rows is not None and cols is not None else x_rc
        if rows is not None:
            rows.softmax_(x_rc, i, 1)
        if cols is not None:
            cols.softmax_(other, j, 0)
        return x_rc if other is x_rc else x_rc.add_(other)

    def add_product(self, total: Tensor, left: Tensor, right: Tensor) -> None:
        """total += left @ right, in place, accumulated in the type of ``total``."""
        if self.upcast:
            total.addmm_(left, right)
        else:
            total.add_(torch.mm(left, right, out_dtype=torch.float32))


class SideWeights:
    """What one direction of the softmax gradient needs: its log-sum-exp and its incoming gradient, float64."""

    def __init__(self, lse: Tensor, zero: Tensor | None, grad: Tensor, size: Tensor) -> None:
        self.grad = grad.double() / size
        total = lse.double() if zero is None else lse.double() + zero.double()
        # A row in which nothing may meet has lse = -inf and no gradient: exp(x - inf) = 0 says so without NaN.
        self.lse = torch.where(total == -torch.inf, torch.inf, total)

    def factor(self, part: slice, top: float) -> Tensor | None:
        """grad * exp(top - lse), or None where that would overflow."""
        exponent = top - self.lse[part]
        if exponent.numel() and not exponent.max().item() <= LARGEST_EXPONENT:
            return None
        return self.grad[part] * exponent.exp()

    def softmax_(self, x_rc: Tensor, part: slice, dim: int) -> None:
        """x := grad * exp(x - lse), in place, ``dim`` being the axis that the sum ran over."""
        lse, grad = self.lse[part].unsqueeze(dim), self.grad[part].unsqueeze(dim)
        # Subtract in two steps: the part of lse that x's type can hold, then the rest.
        coarse = lse.to(x_rc.dtype)
        rest = torch.where(lse.isfinite(), lse - coarse, 0.0)
        x_rc.sub_(coarse).sub_(rest.to(x_rc.dtype)).exp_().mul_(grad.to(x_rc.dtype))


class TileWeights:
    """Incoming gradients, divided by their common size."""

    def __init__(self, pair: Pair, stats: Stats, grad: GradStats, size: Tensor) -> None:
        self.rows = self.cols = None
        if grad.row_lse is not None:
            assert stats.row_lse is not None
            self.rows = SideWeights(stats.row_lse, pair.row_zero, grad.row_lse, size)
        if grad.col_lse is not None:
            assert stats.col_lse is not None
            self.cols = SideWeights(stats.col_lse, pair.col_zero, grad.col_lse, size)
        self.grad_pos = None if grad.row_pos is None else grad.row_pos / size
        self.grad_sum = None if grad.row_sum is None else grad.row_sum / size
        self.grad_softplus = None if grad.row_softplus is None else grad.row_softplus / size

    def softplus(self, i: slice) -> Tensor:
        """Incoming gradient of the softplus sums of these rows: (r, 1)."""
        assert self.grad_softplus is not None
        return self.grad_softplus[i, None]


def _log_sum(x_rc: Tensor, dim: int, spare: Tensor) -> Tensor:
    """logsumexp along ``dim`` in float64, with the maximum of each row (column) as its shift."""
    if x_rc.shape[dim] == 0:
        return x_rc.new_full((x_rc.shape[1 - dim],), -torch.inf, dtype=torch.float64)
    top = x_rc.amax(dim, keepdim=True)
    shift = torch.where(top == -torch.inf, 0.0, top)
    total = torch.sub(x_rc, shift, out=spare).exp_().sum(dim)
    return total.double().log() + shift.squeeze(dim).double()


def _dot(total: Tensor, features: Tensor) -> Tensor:
    """Sum of products of two (n, d) tensors, float64, a block of rows at a time."""
    out = total.new_zeros((), dtype=torch.float64)
    for start in range(0, total.shape[0], 4096):
        part = slice(start, start + 4096)
        out += (total[part] * features[part].to(total.dtype)).sum(dtype=torch.float64)
    return out


def score_bound(pair: Pair, spec: PairSpec) -> float:
    """No score is larger than this in size (Cauchy-Schwarz); inf when nothing can be said."""
    if pair.a.numel() == 0 or pair.b.numel() == 0:
        return math.inf
    norms = [
        max(
            torch.linalg.vector_norm(x[k : k + 4096], dim=1, dtype=pair.stat_dtype).max().item()
            for k in range(0, x.shape[0], 4096)
        )
        for x in ((pair.a,) if spec.symmetric else (pair.a, pair.b))
    ]
    bound = abs(pair.scale.item()) * norms[0] * norms[-1]
    if pair.bias is not None:
        bound += pair.bias.abs().max().item()
    if spec.softcap:
        bound = min(bound, spec.softcap)
    return bound if math.isfinite(bound) else math.inf


def tile_sizes(pair: Pair, spec: PairSpec, options: TileOptions) -> tuple[int, int]:
    """Rows and columns of a tile such that all scratch memory stays inside the workspace."""
    d = max(pair.a.shape[1], 1)
    item = 8 if pair.a.dtype == torch.float64 else 4
    rows, cols = TILE_ROWS, TILE_COLS
    if spec.symmetric:
        rows = cols = 1024
    if pair.a.is_cuda:
        rows = cols = 8192

    def scratch(rows: int, cols: int) -> int:
        tiles = 4 * rows * cols * item + (3 * 8 * rows * cols if spec.positive == "many" else 0)
        return tiles + (3 * rows + 2 * cols) * d * item

    while scratch(rows, cols) > options.workspace_bytes and max(rows, cols) > 16:
        rows, cols = (
            (rows // 2, rows // 2) if spec.symmetric else (rows, cols // 2) if cols >= rows else (rows // 2, cols)
        )
    return rows, cols


@contextmanager
def matmul_precision(precision: str) -> Iterator[None]:
    """Float32 products as `TileOptions.precision` asks for."""
    if precision == "torch" or torch.get_float32_matmul_precision() == precision:
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
