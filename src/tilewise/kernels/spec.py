"""The contract between losses and backends: scores, keys, statistics and gradients. `backend` has the interface.

Scores of one pair of blocks, never stored as a whole:

    x_ij = scale * <a_i, b_j> + bias_j          then, with a soft cap,  softcap * tanh(x_ij / softcap)
                                                then, with row scales,  row_scale_i * x_ij

Integer keys define which pairs are positive or excluded:

    self      iff  row_start + i == col_start + j            score = -inf, never positive   (``mask_self``)
    positive  iff  row_key[i] == col_key[j]                  ("many"), or
                   row_key[i] == col_start + j               ("one": the key is the global index of the column;
                                                              without keys it is that of the row: row_start + i)
    excluded  iff  row_skip[i] == col_skip[j], not positive  score = -inf

A pair may have a *guide*: a second score matrix over the same rows and columns, without a gradient, with features of
its own width e. It is computed in the same tile.

    y_ij = guide_scale * <guide_a_i, guide_b_j> + guide_bias_j        then, with a soft cap, as above

Axes: n rows of a, m rows of b (the columns of the scores), d features, e features of the guide, K columns that each
row picks.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from tilewise.kernels.merging import merged_entropy, merged_kl, merged_sum_sq, merged_top
from tilewise.options import DEFAULT_OPTIONS, TileOptions

Positive = Literal["none", "one", "many"]
GuideUse = Literal["none", "mask", "kl", "reverse_kl", "jsd"]
# A tensor, or None if the spec does not need it. A type checker does not know the spec, so it must not ask for a check.
MaybeTensor = Any
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
        row_picked: the scores of K given columns of each row (``pick``, global indices): 0 for a column outside of
            the block. Excludes ``col_lse``, ``symmetric``, ``mask_self`` and ``softplus``.
        skip_picked: ``row_lse`` leaves out the picked columns, which ascend in each row. Needs ``row_picked``. A
            positive must be one of them. Excludes skip keys and all other statistics.
        positive: whether a row has no positives, at most one (``row_key`` is its column's global index, by default
            the row's own; ``col_key`` is not used), or any number (equal keys).
        mask_self: a row and a column of equal global index are the same sample; their score is -inf.
        symmetric: ``b`` is ``a`` and the keys are symmetric, so that x_ij = x_ji. Only row statistics;
            ``Grads.a`` is then the whole gradient.
        softcap: the cap, or 0 for none.
        guide: how the guide is used. With p = softmax(x_i) and q = softmax(y_i) of each row:
            "mask"        x_ij = -inf where y_ij > row_limit_i, except at the positive
            "kl"          row_kl = sum_j q_j log(q_j / p_j)
            "reverse_kl"  row_reverse_kl = sum_j p_j log(p_j / q_j)
            "jsd"         row_jsd = beta sum_j q_j log(q_j / m_j) + (1 - beta) sum_j p_j log(p_j / m_j), with the
                          mixture m = (1 - beta) p + beta q
            A guide needs ``row_lse``. It allows ``row_entropy``, ``row_hot_lse`` and at most one positive, and no
            other statistic.
        guide_softcap: the cap of the guide, or 0 for none.
        beta: the weight of the guide in the mixture of "jsd".
        hot: with a guide, if not 0: also row_hot_lse_i = log sum_j exp(hot * x_ij).
        ignored: for ``drop_rows`` of a small call on a GPU: the key of ignored rows. Other negative keys, and keys
            beyond the columns, give NaN there.
        in_range: the caller has checked that every row has its positive among these columns ("one").
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
    row_picked: bool = False
    skip_picked: bool = False
    positive: Positive = "none"
    mask_self: bool = False
    symmetric: bool = False
    softcap: float = 0.0
    guide: GuideUse = "none"
    guide_softcap: float = 0.0
    beta: float = 0.0
    hot: float = 0.0
    ignored: int = -1
    in_range: bool = False
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
    def divergence(self) -> bool:
        """Whether a divergence from the guide's softmax is wanted."""
        return self.guide not in ("none", "mask")

    @property
    def row_moments(self) -> bool:
        """Whether the entropy or the sum of squares of each row is wanted."""
        return self.row_entropy or self.row_sum_sq


@dataclass
class Pair:
    """The tensors of one pair of blocks. Pass them by name.

    As `Stats`, `Grads` and `RowWeights`, it is made in every step and never changed. It is not frozen, because it would
    take three times as long to make.

    ``row_shift`` and ``col_shift`` are subtracted from the scores of a row or column in its statistics. A shift close
    to the positive's score avoids cancellation in ``lse - pos`` when both are near 100 and their difference near 0.001.
    """

    a: Tensor  # (n, d)
    b: Tensor  # (m, d); the same tensor as a when symmetric
    scale: MaybeTensor  # (), in the type of the statistics; in a small call it may be a number
    bias: Tensor | None = None  # (m,)
    row_key: MaybeTensor = None  # (n,) int64
    col_key: MaybeTensor = None  # (m,) int64
    row_skip: Tensor | None = None  # (n,) int64
    col_skip: Tensor | None = None  # (m,) int64
    row_shift: Tensor | None = None  # (n,)
    col_shift: Tensor | None = None  # (m,)
    col_weight: MaybeTensor = None  # (m,), for row_sum
    guide_a: MaybeTensor = None  # (n, e), in the type of a
    guide_b: MaybeTensor = None  # (m, e)
    guide_scale: MaybeTensor = None  # (), in the type of the statistics
    guide_bias: Tensor | None = None  # (m,), likewise
    row_limit: MaybeTensor = None  # (n,), for the guide "mask"
    row_norm: MaybeTensor = None  # (n,) row_lse over ALL columns, for "jsd"; None if all are in this pair
    guide_norm: MaybeTensor = None  # (n,) guide_lse over ALL columns, likewise
    pick: MaybeTensor = None  # (n, K) int64, for row_picked: global indices of columns; negative for none
    row_scale: Tensor | None = None  # (n,), positive, in the type of the statistics; not for symmetric scores
    _: KW_ONLY
    # (1,) int32 on the device, or None. If it is not 1, the results are not used, and a backend may skip the work.
    only_if: Tensor | None = None
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
            guide_width=0 if self.guide_a is None else self.guide_a.shape[1],
            picks=0 if self.pick is None else self.pick.shape[1],
            has_row_scale=self.row_scale is not None,
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
    guide_width: int = 0  # e
    picks: int = 0  # K, the columns that each row picks
    has_row_scale: bool = False

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


@dataclass(kw_only=True)
class Stats:
    """Statistics of one pair of blocks, or of several merged. A monoid: ``Stats()`` is the neutral element.

    Row statistics of blocks that share their rows merge into those of all the columns, and column statistics
    of blocks that share their columns into those of all the rows. See `STATISTICS`.

    Values are in `stat_dtype`, or, for log-sum-exps, optionally in float64. A loss gets them `rounded`. Backward takes
    them unrounded: rounding a log-sum-exp of 1000 to float32 changes probabilities by 3e-5.
    """

    row_lse: MaybeTensor = None  # (n,)
    row_pos: MaybeTensor = None  # (n,) sum of the scores of the positives
    num_positives: MaybeTensor = None  # (n,)
    row_softplus: MaybeTensor = None  # (n,)
    row_sum: MaybeTensor = None  # (n,)
    row_entropy: MaybeTensor = None  # (n,)
    row_sum_sq: MaybeTensor = None  # (n,)
    row_hot_lse: MaybeTensor = None  # (n,)
    guide_lse: MaybeTensor = None  # (n,) log-sum-exp of the guide's scores
    row_kl: MaybeTensor = None  # (n,)
    row_reverse_kl: MaybeTensor = None  # (n,)
    row_jsd: MaybeTensor = None  # (n,)
    row_mix_kl: MaybeTensor = None  # (n,) sum_j p_j log(p_j / m_j), a part of row_jsd
    row_top: MaybeTensor = None  # (n,) the largest score
    row_top_col: MaybeTensor = None  # (n,) int64, the global index of its column
    row_picked: MaybeTensor = None  # (n, K) scores of the picked columns
    col_lse: MaybeTensor = None  # (m,)
    row_shift: MaybeTensor = None  # (n,) the shift of these statistics, only in the result of `pair_stats`

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
    of_picks: bool = False  # K values for each row: one for each column that it picks
    integer: bool = False  # int64 instead of the type of the statistics
    gradient: bool = True  # whether it is differentiable
    saved: bool = False  # whether backward needs its value over all blocks

    def size(self, shape: PairShape) -> tuple[int, ...]:
        """Its size for a pair of this shape."""
        rows = shape.cols if self.of_columns else shape.rows
        return (rows, shape.picks) if self.of_picks else (rows,)


def _sum_of(name: str) -> Callable[[Stats, Stats], Tensor]:
    return lambda one, other: getattr(one, name) + getattr(other, name)


def _log_sum_of(name: str) -> Callable[[Stats, Stats], Tensor]:
    return lambda one, other: torch.logaddexp(getattr(one, name), getattr(other, name))


def _part_of(merge: Callable[..., tuple[Tensor, ...]], names: tuple[str, ...], part: int) -> Callable[..., Tensor]:
    """One result of a function that merges several statistics together."""

    def values(stats: Stats) -> tuple[Tensor, ...]:
        return tuple(getattr(stats, name) for name in names)

    return lambda one, other: merge(values(one), values(other))[part]


ENTROPY, SUM_SQ, TOP = ("row_lse", "row_entropy"), ("row_lse", "row_sum_sq"), ("row_top", "row_top_col")
KL, REVERSE_KL = ("row_lse", "guide_lse", "row_kl"), ("guide_lse", "row_lse", "row_reverse_kl")
# A new statistic needs a line here, a flag of `PairSpec` and a field of `Stats`.
STATISTICS: tuple[Statistic, ...] = (
    Statistic("row_lse", lambda spec: spec.row_lse, _log_sum_of("row_lse"), saved=True),
    Statistic("row_pos", lambda spec: spec.has_positive_scores, _sum_of("row_pos"), saved=True),
    Statistic("row_softplus", lambda spec: spec.softplus, _sum_of("row_softplus")),
    Statistic("row_sum", lambda spec: spec.row_sum, _sum_of("row_sum")),
    Statistic("row_entropy", lambda spec: spec.row_entropy, _part_of(merged_entropy, ENTROPY, 1), saved=True),
    Statistic("row_sum_sq", lambda spec: spec.row_sum_sq, _part_of(merged_sum_sq, SUM_SQ, 1), saved=True),
    Statistic("row_hot_lse", lambda spec: bool(spec.hot), _log_sum_of("row_hot_lse"), saved=True),
    Statistic("guide_lse", lambda spec: spec.divergence, _log_sum_of("guide_lse"), gradient=False, saved=True),
    Statistic("row_kl", lambda spec: spec.guide == "kl", _part_of(merged_kl, KL, 2)),
    Statistic(
        "row_reverse_kl", lambda spec: spec.guide == "reverse_kl", _part_of(merged_kl, REVERSE_KL, 2), saved=True
    ),
    Statistic("row_jsd", lambda spec: spec.guide == "jsd", _sum_of("row_jsd")),
    Statistic("row_mix_kl", lambda spec: spec.guide == "jsd", _sum_of("row_mix_kl"), gradient=False, saved=True),
    Statistic("row_picked", lambda spec: spec.row_picked, _sum_of("row_picked"), of_picks=True, saved=True),
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
    """Which gradients are needed. A side whose gradient is not needed costs no product."""

    a: bool = True
    b: bool = True
    scale: bool = False
    bias: bool = False


def may_save(needs: Needs, spec: PairSpec) -> bool:
    """Whether forward may save an object for backward.

    The object lies in the memory of the column gradient, so that gradient must be needed. Without a guide it holds
    exponentials instead of G, and the gradient of a bias is a sum of G.
    """
    return needs.b and (not needs.bias or spec.guide != "none")


@dataclass(kw_only=True)
class Grads:
    """Gradients of one pair of blocks: features in ``grad_dtype``, scale and bias in the statistics' type."""

    a: Tensor | None = None
    b: Tensor | None = None
    scale: Tensor | None = None
    bias: Tensor | None = None


class Backward(NamedTuple):
    """The arguments of `Backend.backward`, from which it computes the gradients of one pair of blocks."""

    pair: Pair
    stats: Stats  # those that are saved (see `STATISTICS`), over ALL blocks
    grad: GradStats
    needs: Needs
    spec: PairSpec
    options: TileOptions


@dataclass(kw_only=True)
class RowWeights:
    """The weights of a scalar loss, without gradient.

        L = sum_i w_i l_i + sum_i square_i row_lse_i^2         w_i = share * each_i
        l_i = softplus_i                                       with ``softplus``
        l_i = (row_lse_i + col_lse_i) / 2 - pos_i              with ``col_lse`` (as many rows as columns)
        l_i = row_lse_i - pos_i                                otherwise

    An ignored row has the weight 0. With ``kept``, share is divided by the number of rows whose key is not negative.
    """

    share: float = 1.0
    kept: bool = False
    each: Tensor | None = None  # (n,), in the type of the statistics; None for ones
    square: Tensor | None = None  # (n,)

    def full(self, pair: Pair) -> Tensor:
        """w_i of all rows: (n,)."""
        if self.kept:
            valid = (pair.row_key >= 0).to(pair.stat_dtype)
            return valid * (self.share / valid.sum().clamp(min=1.0))
        if self.each is None:
            return torch.full((pair.a.shape[0],), self.share, dtype=pair.stat_dtype, device=pair.a.device)
        return self.each if self.share == 1.0 else self.each * self.share

    def rows(self, index: slice | Tensor) -> RowWeights:
        """The weights of the rows ``index``, among them all whose key is not negative."""
        each = None if self.each is None else self.each[index]
        square = None if self.square is None else self.square[index]
        return RowWeights(share=self.share, kept=self.kept, each=each, square=square)

    def nan_if_none(self, loss: Tensor, pair: Pair) -> Tensor:
        """The loss, or NaN for a mean over no rows."""
        if math.isnan(self.share):
            return loss + self.share
        return torch.where((pair.row_key >= 0).any(), loss, torch.nan) if self.kept else loss


@dataclass(frozen=True, kw_only=True)
class FilterPlan:
    """What the filter saves for backward: which entries (one row and one tile each) are kept. See `filter_plan`.

    Axes: m columns in a new order, T tiles of them, n rows, d features.
    """

    order: Tensor  # (m,) int32, the column at each position
    mass: Tensor  # (T, n) in the features' type: -1 for a kept entry, or the dropped mass divided by the tolerance
    mean: Tensor  # (T, d) in the features' type: the mean column of each tile
    surprise: Tensor  # (n,) mean of row_lse - x over the probability that a row drops; (0,) without ``row_entropy``
    kept: Tensor  # (T,) int32, the number of rows that keep the tile
    keep_all: Tensor  # (1,) int32, 1 if backward computes every pair, because that is faster


def largest_gradient(grad: GradStats, options: TileOptions = DEFAULT_OPTIONS) -> Tensor:
    """The largest absolute value among the gradients of the statistics, as a 0-d tensor; 1 if all are zero.

    It is also 1 if one is infinite or NaN, so that the gradients of other rows do not change.

    With ``batch_invariant`` it is 1, because it depends on all rows; the caller has divided each row by its own size.

    Kernels divide by it and multiply the result back, so that the operand G of the gradient products stays
    in [-2, 2]: float16 would lose gradients of a mean over a million rows.
    """
    given = [values for values in vars(grad).values() if values is not None and values.numel()]
    tops = [torch.linalg.vector_norm(values, torch.inf) for values in given]  # one launch each
    if not tops or options.batch_invariant:
        return torch.ones(())
    top = torch.stack(tops).amax()
    return torch.where((top > 0) & (top < torch.inf), top, 1.0)
