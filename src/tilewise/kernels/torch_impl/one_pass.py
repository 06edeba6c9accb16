"""The one-pass strategy of the torch backend: a scalar loss and its gradients from one pass over the scores.

The weights of each row, w_i and that of the squared log-sum-exp, z_i, are known beforehand, so forward can compute G.
[positive] is 1 at the positive of a row, else 0. With a soft cap, G is also multiplied by its slope.

    L = sum_i w_i (lse_i - pos_i) + sum_i z_i lse_i^2                    or    L = sum_i w_i softplus_i
    G_ij = (w_i + 2 z_i lse_i) exp(x_ij - lse_i) - w_i [positive]        or    w_i (sigmoid(x_ij) - [positive])
    dA = scale G B,   dB = scale G' A,   dscale = sum_ij G_ij <a_i, b_j>,   dbias = column sums of G

This takes three products instead of four. For a softmax the scores of a block of rows with ALL columns are stored
until the sums of the rows are known. A sigmoid needs one score at a time and is computed tile by tile.

Axes: n rows of a, m rows of b, d features; r rows of one block; i, j slices of rows and columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise.kernels import scalar_loss
from tilewise.kernels.backend import Like, Saved
from tilewise.kernels.precision import matmul_precision
from tilewise.kernels.slices import slices
from tilewise.kernels.spec import (
    HALF_TYPES,
    Grads,
    GradStats,
    Needs,
    Pair,
    PairShape,
    PairSpec,
    RowWeights,
    Stats,
    largest_gradient,
)
from tilewise.kernels.torch_impl.tiles import Tiles
from tilewise.kernels.torch_impl.two_pass import GradSums, is_bounded
from tilewise.options import TileOptions

LARGEST_BLOCK = 1024  # rows; larger blocks are not faster
MULTIPLY_ROWS = 4096  # rows multiplied at a time: multiplying tensors of different types allocates a copy


def block_rows(shape: PairShape, spec: PairSpec, memory: int) -> int:
    """The number of rows whose scores with all columns fit ``memory`` bytes; it may be 0."""
    columns, row = block_bytes(shape, spec, 0), block_bytes(shape, spec, 1) - block_bytes(shape, spec, 0)
    return max(0, min(shape.rows, LARGEST_BLOCK, (memory - columns) // row))


def block_bytes(shape: PairShape, spec: PairSpec, rows: int) -> int:
    """The memory of a block of rows with all columns."""
    half, on_cuda = shape.dtype in HALF_TYPES, shape.device.type == "cuda"
    item = 8 if shape.dtype == torch.float64 else 4
    columns = shape.cols * shape.width * item if half and not on_cuda else 0  # converted columns
    more = 8 if half and on_cuda else 2  # masks, and G in the type of the features
    return columns + rows * (shape.cols * (item * (1 + bool(spec.softcap)) + more) + 4 * shape.width * item)


class TorchOnePass:
    """The capability `one_pass` of the torch backend. It saves the gradients."""

    def why_not(self, shape: PairShape, spec: PairSpec, options: TileOptions) -> str | None:
        """See `OnePass`. Only for losses with one positive per row, and if the workspace holds the scores of a row."""
        if not scalar_loss.is_one_sided(spec):
            return scalar_loss.NOT_ONE_SIDED
        if self.rows_that_fit(shape, spec, options.workspace_bytes) < 1:
            return "the workspace does not hold the scores of one row"
        return None

    def rows_that_fit(self, shape: PairShape, spec: PairSpec, memory: int) -> int:
        """See `OnePass`. A sigmoid stores no scores."""
        return shape.rows if spec.softplus else block_rows(shape, spec, memory)

    def saved_like(self, shape: PairShape, needs: Needs, spec: PairSpec, options: TileOptions) -> list[Like]:
        """See `OnePass`."""
        return scalar_loss.gradients_like(shape, needs)

    def forward(
        self, pair: Pair, weights: RowWeights, needs: Needs, spec: PairSpec, options: TileOptions, rows: int
    ) -> tuple[Tensor, Saved]:
        """The loss and its gradients, block by block of rows."""
        fit = self.rows_that_fit(pair.shape, spec, options.workspace_bytes)
        with matmul_precision(options.precision), torch.no_grad():
            loss, grads = _Blocks(pair, weights, needs, spec, options, fit).run()
        return loss, scalar_loss.saved_gradients(grads, rows)

    def backward(
        self, saved: Saved, pair: Pair, grad_output: Tensor, needs: Needs, *unused: object, overwrite: bool = False
    ) -> Grads:
        """The saved gradients multiplied by ``grad_output``."""
        return scaled_gradients(saved, pair, grad_output, needs, overwrite)


def scaled_gradients(saved: Saved, pair: Pair, grad_output: Tensor, needs: Needs, overwrite: bool) -> Grads:
    """The saved gradients multiplied by ``grad_output``, those of the features in their type."""
    grads, dtype = scalar_loss.gradients_of(saved, needs, pair.a.shape[0]), pair.a.dtype
    if overwrite and dtype == pair.stat_dtype and grad_output.device.type == "cpu" and grad_output.item() == 1.0:
        return grads
    return Grads(
        a=None if grads.a is None else multiplied(grads.a, grad_output, dtype, overwrite),
        b=None if grads.b is None else multiplied(grads.b, grad_output, dtype, overwrite),
        scale=None if grads.scale is None else grads.scale * grad_output,
        bias=None if grads.bias is None else grads.bias * grad_output,
    )


def multiplied(grad: Tensor, grad_output: Tensor, dtype: torch.dtype, overwrite: bool) -> Tensor:
    """grad * grad_output in ``dtype``, rounded once; with ``overwrite``, in place where the types are equal."""
    in_place = overwrite and grad.dtype == dtype
    out = grad if in_place else torch.empty_like(grad, dtype=dtype)
    # The factor has 2 dimensions, because a 0-d factor would first be rounded to the type of a half gradient.
    for rows in slices(grad.shape[0], MULTIPLY_ROWS):
        out[rows] = grad[rows] * grad_output.reshape(1, 1)
    return out


class _Blocks:
    """For each block: compute the scores, add the loss, overwrite the scores by G, and add both gradient products."""

    def __init__(
        self, pair: Pair, weights: RowWeights, needs: Needs, spec: PairSpec, options: TileOptions, rows: int
    ) -> None:
        self.pair, self.spec = pair, spec
        self.weight, self.square = weights.full(pair), weights.square
        self.tiles = Tiles(pair, spec, options)
        if not spec.softplus:
            self.tiles.rows, self.tiles.cols = rows, max(pair.b.shape[0], 1)
        # G is divided by the largest weight, so that half types do not underflow. `GradSums` multiplies it back.
        self.size = largest_gradient(GradStats(row_lse=self.weight, row_pos=self.square)).to(pair.a.device)
        self.sums = GradSums(self.tiles, needs, self.size, scalar_loss.saved_dtype(pair.a.dtype))
        self.loss = pair.a.new_zeros((), dtype=torch.float64)
        self.bounded = not spec.softplus and is_bounded(pair, spec)
        self.num_positives = self.tiles.keys.num_positives()
        self.at_positive = torch.zeros_like(self.weight)

    def run(self) -> tuple[Tensor, Grads]:
        """The loss and the gradients of all blocks."""
        for i, j in self.tiles:
            g_rc = self._sigmoid(i, j) if self.spec.softplus else self._softmax(i, j)
            self.sums.add(g_rc, i, j)
        return self.loss.to(self.pair.stat_dtype), self.sums.grads()

    def _softmax(self, i: slice, j: slice) -> Tensor:
        """Add the loss of the rows i and return their G."""
        pair, keys = self.pair, self.tiles.keys
        x_rc = self.tiles.scores(i, j)
        slope = self.tiles.softcap_slope(x_rc) if self.spec.softcap else None
        pos, _ = keys.positive_sums(x_rc, i, j, x_rc)
        top = x_rc.new_zeros((i.stop - i.start, 1))
        if not self.bounded:
            top = x_rc.amax(1, keepdim=True)
            top = torch.where(top == -torch.inf, 0.0, top)
            x_rc.sub_(top)
        total = x_rc.exp_().sum(1).double()
        lse = total.log() + top.squeeze(1).double()
        shift = 0.0 if pair.row_shift is None else pair.row_shift[i].double()
        # `pos` is relative to the shift of the row already.
        stats = Stats(row_lse=lse - shift, row_pos=pos, num_positives=self.num_positives[i])
        square = None if self.square is None else self.square[i]
        loss, grad = scalar_loss.loss_of_stats(self.weight[i], square, stats, shift, self.spec)
        self.loss += loss
        factor = grad.row_lse / self.size / torch.where(total == 0, 1.0, total)
        x_rc.mul_(factor.to(x_rc.dtype)[:, None])
        self.at_positive[i] = (grad.row_pos / self.size).to(self.at_positive.dtype)
        keys.add_at_positives_(x_rc, self.at_positive, i, j, x_rc)
        return x_rc if slope is None else x_rc.mul_(slope)

    def _sigmoid(self, i: slice, j: slice) -> Tensor:
        """Add the loss of one tile of a sigmoid loss and return its G."""
        keys, weight = self.tiles.keys, self.weight[i]
        x_rc = self.tiles.scores(i, j)
        keys.flip_positives_(x_rc, i, j)
        scratch = self.tiles.scratch(x_rc)
        self.loss += (weight * torch.logaddexp(x_rc, x_rc.new_zeros(()), out=scratch).sum(1)).sum(dtype=torch.float64)
        g_rc = x_rc.sigmoid_()
        keys.flip_positives_(g_rc, i, j)
        return g_rc.mul_((weight / self.size).to(g_rc.dtype)[:, None])
