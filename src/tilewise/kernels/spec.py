"""The contract between losses and backends: scores, keys, statistics and gradients. `backend` has the interface.

Scores of one pair of blocks, never stored as a whole:

    x_ij = scale * <a_i, b_j> + bias_j          then, with a soft cap,  softcap * tanh(x_ij / softcap)

Integer keys define which pairs are positive or excluded:

    self      iff  row_start + i == col_start + j            score = -inf, never positive   (``mask_self``)
    positive  iff  row_key[i] == col_key[j]                  ("many"), or
                   row_key[i] == col_start + j               ("one": the key is the global index of the column;
                                                              without keys it is that of the row: row_start + i)
    excluded  iff  row_skip[i] == col_skip[j], not positive  score = -inf

Axes: n rows of a, m rows of b (the columns of the scores), d features.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from tilewise.options import TileOptions

Positive = Literal["none", "one", "many"]
HALF_TYPES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, kw_only=True)
class PairSpec:
    """Which statistics to compute, and what the keys mean. Hashable; holds no tensor.

    Args:
        row_lse, col_lse: the log-sum-exp of each row / each column.
        softplus: for each row, the sum of softplus(x_ij), with -x_ij at the positive.
        row_sum: for each row, the sum of col_weight_j * x_ij.
        row_entropy: the entropy of each row's softmax, sum_j p_ij (row_lse_i - x_ij), p_ij = exp(x_ij - row_lse_i).
        row_sum_sq: the log of the sum of the squares of each row's softmax, log sum_j p_ij^2.
        row_top: the largest score of each row and the global index of its column (the lowest, if several are equal).
            ``row_entropy``, ``row_sum_sq`` and ``row_top`` need ``row_lse`` and exclude ``col_lse``, ``symmetric`` and
            ``softplus``.
        positive: whether a row has no positives, at most one (``row_key`` is its column's global index, by default
            the row's own; ``col_key`` is not used), or any number (equal keys).
        mask_self: a row and a column of equal global index are the same sample; their score is -inf.
        symmetric: ``b`` is ``a`` and the keys are symmetric, so that x_ij = x_ji. Only row statistics;
            ``Grads.a`` is then the whole gradient.
        softcap: the cap, or 0 for none.
        drop_rows: a row with a negative key is ignored; its statistics and its gradient are 0.
        local_keys: over a group, ``row_key`` is a position in this rank's shard of the columns; the ring adds the
            shard's start.
        same_rows: over a group, every rank holds the same rows and its own shard of the columns
            (vocabulary-parallel); otherwise each rank holds its own rows and its own columns.
    """

    row_lse: bool = False
    col_lse: bool = False
    softplus: bool = False
    row_sum: bool = False
    row_entropy: bool = False
    row_sum_sq: bool = False
    row_top: bool = False
    positive: Positive = "none"
    mask_self: bool = False
    symmetric: bool = False
    softcap: float = 0.0
    drop_rows: bool = False
    local_keys: bool = False
    same_rows: bool = False

    @property
    def has_positive_scores(self) -> bool:
        """Whether the scores of the positives are a statistic; the sigmoid loss has them in ``softplus``."""
        return self.positive != "none" and not self.softplus

    @property
    def token_stats(self) -> bool:
        """Whether the entropy, the sum of squares or the largest score of each row is wanted."""
        return self.row_moments or self.row_top

    @property
    def row_moments(self) -> bool:
        """Whether the entropy or the sum of squares of each row is wanted."""
        return self.row_entropy or self.row_sum_sq


@dataclass(frozen=True, kw_only=True)
class Pair:
    """The tensors of one pair of blocks.

    ``row_shift`` and ``col_shift`` are subtracted from the scores of a row or column in its statistics. A shift close
    to the positive's score avoids cancellation in ``lse - pos`` when both are near 100 and their difference near 0.001.
    """

    a: Tensor  # (n, d)
    b: Tensor  # (m, d); the same tensor as a when symmetric
    scale: Tensor  # (), in the type of the statistics
    bias: Tensor | None = None  # (m,)
    row_key: Tensor | None = None  # (n,) int64
    col_key: Tensor | None = None  # (m,) int64
    row_skip: Tensor | None = None  # (n,) int64
    col_skip: Tensor | None = None  # (m,) int64
    row_shift: Tensor | None = None  # (n,)
    col_shift: Tensor | None = None  # (m,)
    col_weight: Tensor | None = None  # (m,), for row_sum
    row_start: int = 0
    col_start: int = 0

    @property
    def stat_dtype(self) -> torch.dtype:
        """Statistics are float32, or float64 for float64 features."""
        return stat_dtype(self.a.dtype)

    @property
    def shape(self) -> PairShape:
        """Sizes and types, without values."""
        return PairShape(
            rows=self.a.shape[0],
            cols=self.b.shape[0],
            width=self.a.shape[1],
            dtype=self.a.dtype,
            device=self.a.device,
            has_row_key=self.row_key is not None,
            has_skips=self.row_skip is not None and self.col_skip is not None,
            last_start=max(self.row_start, self.col_start),
        )


class PairShape(NamedTuple):
    """Sizes and types of a `Pair`: all that the choice of a backend and of a strategy depends on. Hashable."""

    rows: int
    cols: int
    width: int
    dtype: torch.dtype
    device: torch.device
    has_row_key: bool = False
    has_skips: bool = False
    last_start: int = 0  # the larger of row_start and col_start

    @property
    def products(self) -> int:
        """Multiply-adds of one product of all rows with all columns."""
        return self.rows * self.cols * self.width

    @property
    def empty(self) -> bool:
        """Whether there are no scores."""
        return self.rows == 0 or self.cols == 0 or self.width == 0


def stat_dtype(features: torch.dtype) -> torch.dtype:
    """The type of the statistics of features of this type."""
    return torch.float64 if features == torch.float64 else torch.float32


@dataclass(frozen=True, kw_only=True)
class Stats:
    """Statistics of one pair of blocks, or of several merged. A monoid: ``Stats()`` is the neutral element.

    Row statistics of blocks that share their rows merge into those of all the columns, and column statistics
    of blocks that share their columns into those of all the rows. See `STATISTICS`.

    Values are in `stat_dtype`, or, for log-sum-exps, optionally in float64. A loss gets them `rounded`. Backward takes
    them unrounded: rounding a log-sum-exp of 1000 to float32 changes probabilities by 3e-5.
    """

    row_lse: Tensor | None = None  # (n,)
    row_pos: Tensor | None = None  # (n,) sum of the scores of the positives
    num_positives: Tensor | None = None  # (n,)
    row_softplus: Tensor | None = None  # (n,)
    row_sum: Tensor | None = None  # (n,)
    row_entropy: Tensor | None = None  # (n,)
    row_sum_sq: Tensor | None = None  # (n,)
    row_top: Tensor | None = None  # (n,) the largest score
    row_top_col: Tensor | None = None  # (n,) int64, the global index of its column
    col_lse: Tensor | None = None  # (m,)

    def merge(self, other: Stats) -> Stats:
        """Statistics of both."""
        joined = {}
        for stat in STATISTICS:
            mine, theirs = getattr(self, stat.name), getattr(other, stat.name)
            if mine is not None and theirs is not None:
                joined[stat.name] = stat.merge(self, other)
            else:
                joined[stat.name] = theirs if mine is None else mine
        return Stats(**joined)

    def rounded(self, dtype: torch.dtype) -> Stats:
        """Numbers in that type; indices unchanged."""
        found = {name: value for name, value in vars(self).items() if value is not None}
        return Stats(**{name: v.to(dtype) if v.is_floating_point() else v for name, v in found.items()})

    def rows(self) -> Stats:
        """Only the row statistics."""
        return Stats(**{stat.name: getattr(self, stat.name) for stat in STATISTICS if not stat.of_columns})


class Statistic(NamedTuple):
    """One row of `STATISTICS`: everything that operators, fakes, ring, vocabulary-parallel and row dropping need."""

    name: str
    wanted: Callable[[PairSpec], bool]  # whether a spec requests it
    merge: Callable[[Stats, Stats], Tensor]  # its value over two blocks
    of_columns: bool = False  # one value for each column instead of each row
    integer: bool = False  # int64 instead of the type of the statistics
    gradient: bool = True  # whether it is differentiable
    saved: bool = False  # whether backward needs its value over all blocks


def _sum_of(name: str) -> Callable[[Stats, Stats], Tensor]:
    return lambda one, other: getattr(one, name) + getattr(other, name)


def _log_sum_of(name: str) -> Callable[[Stats, Stats], Tensor]:
    return lambda one, other: torch.logaddexp(getattr(one, name), getattr(other, name))


def merged_entropy(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The log-sum-exp and the entropy over two blocks, each given as (log-sum-exp, entropy):

    H = w_1 (H_1 + lse - lse_1) + w_2 (H_2 + lse - lse_2),   w_k = exp(lse_k - lse).

    No term is negative, so nothing cancels.
    """
    lse = torch.logaddexp(one[0], other[0])

    def share(block_lse: Tensor, entropy: Tensor) -> Tensor:
        above = lse - block_lse
        return torch.where(block_lse == -torch.inf, 0.0, torch.exp(-above) * (entropy + above))

    return lse, share(*one) + share(*other)


def merged_sum_sq(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The log-sum-exp and q = log sum p^2 over two blocks, each given as (log-sum-exp, q):

    q = log(w_1^2 exp(q_1) + w_2^2 exp(q_2)),   w_k = exp(lse_k - lse);   0 if both are empty.
    """
    lse = torch.logaddexp(one[0], other[0])

    def share(block_lse: Tensor, q: Tensor) -> Tensor:
        return torch.where(block_lse == -torch.inf, -torch.inf, q + 2.0 * (block_lse - lse))

    return lse, torch.where(lse == -torch.inf, 0.0, torch.logaddexp(share(*one), share(*other)))


def merged_top(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The larger of two scores and its column, each given as (score, column); of equal ones the lower column.

    NaN is larger than every number, as in `torch.argmax`.
    """
    (x, i), (y, j) = one, other
    same = (x == y) | (x.isnan() & y.isnan())
    col = torch.where(same, torch.minimum(i, j), torch.where((y > x) | (y.isnan() & ~x.isnan()), j, i))
    return torch.maximum(x, y), col


def _part_of(merge: Callable[..., tuple[Tensor, Tensor]], names: tuple[str, str], part: int) -> Callable[..., Tensor]:
    """One result of a function that merges two statistics together."""

    def values(stats: Stats) -> tuple[Tensor, ...]:
        return tuple(getattr(stats, name) for name in names)

    return lambda one, other: merge(values(one), values(other))[part]


ENTROPY, SUM_SQ, TOP = ("row_lse", "row_entropy"), ("row_lse", "row_sum_sq"), ("row_top", "row_top_col")
# A new statistic needs a line here, a flag of `PairSpec` and a field of `Stats`.
STATISTICS: tuple[Statistic, ...] = (
    Statistic("row_lse", lambda spec: spec.row_lse, _log_sum_of("row_lse"), saved=True),
    Statistic("row_pos", lambda spec: spec.has_positive_scores, _sum_of("row_pos"), saved=True),
    Statistic("row_softplus", lambda spec: spec.softplus, _sum_of("row_softplus")),
    Statistic("row_sum", lambda spec: spec.row_sum, _sum_of("row_sum")),
    Statistic("row_entropy", lambda spec: spec.row_entropy, _part_of(merged_entropy, ENTROPY, 1), saved=True),
    Statistic("row_sum_sq", lambda spec: spec.row_sum_sq, _part_of(merged_sum_sq, SUM_SQ, 1), saved=True),
    Statistic("col_lse", lambda spec: spec.col_lse, _log_sum_of("col_lse"), of_columns=True, saved=True),
    Statistic("num_positives", lambda spec: spec.has_positive_scores, _sum_of("num_positives"), gradient=False),
    Statistic("row_top", lambda spec: spec.row_top, _part_of(merged_top, TOP, 0), gradient=False),
    Statistic("row_top_col", lambda spec: spec.row_top, _part_of(merged_top, TOP, 1), integer=True, gradient=False),
)


@functools.lru_cache(maxsize=256)
def wanted_stats(spec: PairSpec) -> tuple[Statistic, ...]:
    """The statistics of ``spec``, in the order of the table."""
    return tuple(stat for stat in STATISTICS if stat.wanted(spec))


@functools.lru_cache(maxsize=256)
def wanted_names(spec: PairSpec) -> tuple[str, ...]:
    """The names of `wanted_stats`."""
    return tuple(stat.name for stat in wanted_stats(spec))


@functools.lru_cache(maxsize=256)
def saved_names(spec: PairSpec) -> tuple[str, ...]:
    """The names of those that backward needs."""
    return tuple(stat.name for stat in wanted_stats(spec) if stat.saved)


class GradStats(Stats):
    """The gradient of the loss with respect to each differentiable statistic; None where there is none."""


class Needs(NamedTuple):
    """Which gradients are wanted. A side that is not wanted costs no product."""

    a: bool = True
    b: bool = True
    scale: bool = False
    bias: bool = False


@dataclass(frozen=True, kw_only=True)
class Grads:
    """Gradients of one pair of blocks: features in ``grad_dtype``, scale and bias in the statistics' type."""

    a: Tensor | None = None
    b: Tensor | None = None
    scale: Tensor | None = None
    bias: Tensor | None = None


class Backward(NamedTuple):
    """What the gradients of one pair of blocks are computed from; the arguments of `Backend.backward`."""

    pair: Pair
    stats: Stats  # those that are saved (see `STATISTICS`), over ALL blocks
    grad: GradStats
    needs: Needs
    spec: PairSpec
    options: TileOptions


@dataclass(frozen=True, kw_only=True)
class RowWeights:
    """The weights of a scalar loss, without gradient.

        L = sum_i w_i l_i + sum_i square_i row_lse_i^2         w_i = share * each_i
        l_i = softplus_i                                       with ``softplus``
        l_i = (row_lse_i + col_lse_i) / 2 - pos_i              with ``col_lse`` (as many rows as columns)
        l_i = row_lse_i - pos_i                                otherwise

    An ignored row has the weight 0.
    """

    share: float = 1.0
    each: Tensor | None = None  # (n,), in the type of the statistics; None for ones
    square: Tensor | None = None  # (n,)

    def full(self, pair: Pair) -> Tensor:
        """w_i of all rows: (n,)."""
        if self.each is None:
            return torch.full((pair.a.shape[0],), self.share, dtype=pair.stat_dtype, device=pair.a.device)
        return self.each if self.share == 1.0 else self.each * self.share

    def rows(self, index: slice | Tensor) -> RowWeights:
        """The weights of the rows ``index``."""
        each = None if self.each is None else self.each[index]
        return RowWeights(share=self.share, each=each, square=None if self.square is None else self.square[index])


@dataclass(frozen=True, kw_only=True)
class FilterPlan:
    """What the filter saves for backward: which (row, tile) pairs are kept. See `filter_plan`.

    Axes: m columns in a new order, T tiles of them, n rows, d features.
    """

    order: Tensor  # (m,) int32, the column at each position
    mass: Tensor  # (T, n) in the features' type: -1 for a kept pair, or the dropped mass divided by the tolerance
    mean: Tensor  # (T, d) in the features' type: the mean column of each tile
    kept: Tensor  # (T,) int32, the number of rows that keep the tile
    keep_all: Tensor  # (1,) int32, 1 if backward computes every pair, because that is faster


def largest_gradient(grad: GradStats) -> Tensor:
    """The largest absolute value among the gradients of the statistics, as a 0-d tensor; 1 if all are zero.

    Kernels divide by it and multiply the result back, so that the operand G of the gradient products stays
    in [-2, 2]: float16 would lose gradients of a mean over a million rows.
    """
    tops = [values.abs().amax() for values in vars(grad).values() if values is not None and values.numel()]
    if not tops:
        return torch.ones(())
    top = torch.stack(tops).amax()
    return torch.where(top > 0, top, torch.ones_like(top))
