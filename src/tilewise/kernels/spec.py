"""The contract of a kernel: what goes in, what comes out, what a backend promises.

Scores of one pair of blocks, never stored as a whole:

    x_ij = scale * <a_i, b_j> + bias_j          then, if asked,  softcap * tanh(x_ij / softcap)

Integer keys decide everything that a loss says about pairs:

    itself    iff  row_start + i == col_start + j            score = -inf, never positive
    positive  iff  row_key[i] == col_key[j]                  ("many"), or
                   row_key[i] == col_start + j               ("one": the key IS the global index of the column;
                                                              without keys, that of the row: row_start + i)
    excluded  iff  row_skip[i] == col_skip[j], not positive  score = -inf

Axes: n rows of a, m rows of b (the columns of the scores), d features.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal, Protocol

import torch
from torch import Tensor

from tilewise.options import TileOptions

Positive = Literal["none", "one", "many"]


@dataclass(frozen=True, kw_only=True)
class PairSpec:
    """Which statistics are wanted, and what the keys mean. Hashable; holds no tensor.

    Args:
        row_lse, col_lse: the log-sum-exp of each row / each column.
        softplus: for each row, the sum of softplus(x_ij), with -x_ij at the positive.
        row_sum: for each row, the sum of col_weight_j * x_ij.
        row_entropy: the entropy of each row's softmax, sum_j p_ij (row_lse_i - x_ij), p_ij = exp(x_ij - row_lse_i).
        row_top: the largest score of each row and the global index of its column (the lowest, if several are equal).
            Both need ``row_lse`` and go with statistics of rows only, not with ``symmetric`` or ``softplus``.
        positive: whether a row has no positives, at most one (``row_key`` is its column's global index, by default
            the row's own; ``col_key`` is not used), or any number (equal keys).
        itself: a row and a column of equal global index are the same sample and never meet.
        symmetric: ``b`` is ``a`` and the keys are symmetric, so that x_ij = x_ji. Only row statistics;
            ``Grads.a`` is then the whole gradient.
        softcap: the cap, or 0 for none.
        drop_rows: a row with a negative key is no row at all; its statistics are returned as 0, its gradient too.
        local_keys: over a group, ``row_key`` is a position in this rank's shard of the columns; the ring adds the
            shard's start.
        same_rows: over a group, every rank holds the same rows and its own slice of the columns
            (vocabulary-parallel); otherwise each rank holds its own rows and its own columns.
    """

    row_lse: bool = False
    col_lse: bool = False
    softplus: bool = False
    row_sum: bool = False
    row_entropy: bool = False
    row_top: bool = False
    positive: Positive = "none"
    itself: bool = False
    symmetric: bool = False
    softcap: float = 0.0
    drop_rows: bool = False
    local_keys: bool = False
    same_rows: bool = False

    @property
    def of_tokens(self) -> bool:
        """Whether the entropy or the largest score of a row is asked for, as of the tokens of a language model."""
        return self.row_entropy or self.row_top


@dataclass(frozen=True, kw_only=True)
class Pair:
    """The tensors of one pair of blocks.

    ``row_zero`` and ``col_zero`` say from where a row or a column measures its scores: its statistics are those
    of ``x_ij - zero``. With the score of the positive as zero, ``lse - pos`` does not cancel when both are near
    100 and their difference near 0.001.
    """

    a: Tensor  # (n, d)
    b: Tensor  # (m, d); the same tensor as a when symmetric
    scale: Tensor  # (), in the type of the statistics
    bias: Tensor | None = None  # (m,)
    row_key: Tensor | None = None  # (n,) int64
    col_key: Tensor | None = None  # (m,) int64
    row_skip: Tensor | None = None  # (n,) int64
    col_skip: Tensor | None = None  # (m,) int64
    row_zero: Tensor | None = None  # (n,)
    col_zero: Tensor | None = None  # (m,)
    col_weight: Tensor | None = None  # (m,), for row_sum
    row_start: int = 0
    col_start: int = 0

    @property
    def stat_dtype(self) -> torch.dtype:
        """Statistics are float32, or float64 for float64 features."""
        return stat_dtype(self.a.dtype)


def stat_dtype(features: torch.dtype) -> torch.dtype:
    """The type of the statistics of features of this type."""
    return torch.float64 if features == torch.float64 else torch.float32


@dataclass(frozen=True, kw_only=True)
class Stats:
    """Statistics of one pair of blocks, or of several merged. A monoid: ``Stats()`` is its zero.

    Row statistics of blocks that share their rows merge into those of all the columns, and column statistics
    of blocks that share their columns into those of all the rows.

    Numbers are in `stat_dtype`; a backend that has the log-sum-exps in float64 may give them so. What a loss sees is
    `rounded`; backward takes them as they are, since a log-sum-exp of 1000 in float32 has probabilities 3e-5 off.
    """

    row_lse: Tensor | None = None  # (n,)
    row_pos: Tensor | None = None  # (n,) sum of the scores of the positives
    row_hits: Tensor | None = None  # (n,) number of positives
    row_softplus: Tensor | None = None  # (n,)
    row_sum: Tensor | None = None  # (n,)
    row_entropy: Tensor | None = None  # (n,)
    row_top: Tensor | None = None  # (n,) the largest score; no gradient
    row_top_col: Tensor | None = None  # (n,) int64, the global index of its column
    col_lse: Tensor | None = None  # (m,)

    def merge(self, other: Stats) -> Stats:
        """Statistics of both."""

        def join(name: str) -> Tensor | None:
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine is None or theirs is None:
                return theirs if mine is None else mine
            return torch.logaddexp(mine, theirs) if name.endswith("lse") else mine + theirs

        joined = {field.name: join(field.name) for field in fields(self)}
        if self.row_entropy is not None and other.row_entropy is not None:
            assert self.row_lse is not None
            assert other.row_lse is not None
            joined["row_entropy"] = merged_entropy(
                (self.row_lse, self.row_entropy), (other.row_lse, other.row_entropy), joined["row_lse"]
            )
        if self.row_top is not None and other.row_top is not None:
            assert self.row_top_col is not None
            assert other.row_top_col is not None
            joined["row_top"], joined["row_top_col"] = merged_top(
                (self.row_top, self.row_top_col), (other.row_top, other.row_top_col)
            )
        return Stats(**joined)

    def rounded(self, dtype: torch.dtype) -> Stats:
        """Numbers in that type; indices stay."""

        def in_type(value: Tensor | None) -> Tensor | None:
            return value if value is None or not value.is_floating_point() else value.to(dtype)

        return Stats(**{field.name: in_type(getattr(self, field.name)) for field in fields(self)})

    def rows(self) -> Stats:
        """Only what belongs to the rows."""
        return Stats(**{f.name: getattr(self, f.name) for f in fields(self) if f.name.startswith("row")})


def merged_entropy(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor], lse: Tensor | None) -> Tensor:
    """The entropy over both parts, each given as (log-sum-exp, entropy), ``lse`` being that of both:

    H = w_1 (H_1 + lse - lse_1) + w_2 (H_2 + lse - lse_2),   w_k = exp(lse_k - lse).

    No term is negative, so that nothing cancels.
    """
    assert lse is not None

    def share(part_lse: Tensor, entropy: Tensor) -> Tensor:
        above = lse - part_lse
        return torch.where(part_lse == -torch.inf, 0.0, torch.exp(-above) * (entropy + above))

    return share(*one) + share(*other)


def merged_top(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The larger of two scores and its column, each given as (score, column); of equal ones the lower column."""
    (x, i), (y, j) = one, other
    col = torch.where(x == y, torch.minimum(i, j), torch.where(y > x, j, i))
    return torch.maximum(x, y), col


@dataclass(frozen=True, kw_only=True)
class GradStats:
    """The incoming gradient of each statistic; None where nobody asks. Hits and largest scores have none."""

    row_lse: Tensor | None = None
    row_pos: Tensor | None = None
    row_softplus: Tensor | None = None
    row_sum: Tensor | None = None
    row_entropy: Tensor | None = None
    col_lse: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Needs:
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


class Backend(Protocol):
    """A way to compute the statistics and their gradients."""

    name: str

    def why_not(self, pair: Pair, spec: PairSpec, options: TileOptions) -> str | None:
        """Why this backend cannot serve the call, or None if it can."""

    def forward(self, pair: Pair, spec: PairSpec, options: TileOptions) -> Stats:
        """The statistics that ``spec`` asks for."""

    def forward_carrying(self, pair: Pair, spec: PairSpec, options: TileOptions) -> tuple[Stats, object | None]:
        """The same where the gradient of the columns will be asked for, and what may spare ``backward`` work."""

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
        carried: object | None = None,
    ) -> Grads:
        """Gradients, given statistics over ALL blocks: ``row_lse``, ``row_entropy``, ``col_lse``, ``row_pos`` if known.

        G_ij = g_lse_i p_ij + g_pos_i [positive] + g_col_j exp(x_ij - col_lse_j) + ...,   p_ij = exp(x_ij - row_lse_i)
               + g_entropy_i p_ij (row_lse_i - x_ij - row_entropy_i)
        dA = scale G B,   dB = scale G' A,   dscale = sum_ij G_ij <a_i, b_j>,   dbias = column sums of G

        ``grad_dtype`` is the type of the feature gradients, by default that of the features; a ring, which adds
        up the gradients of many blocks, asks for float32. ``carried`` is what ``forward_carrying`` gave, once.
        """


def incoming_size(grad: GradStats) -> Tensor:
    """The largest incoming gradient, as a 0-d tensor; 1 if all are zero.

    Kernels divide by it and multiply the result back, so that the operand G of the gradient products stays
    in [-2, 2]: float16 would lose gradients of a mean over a million rows.
    """
    parts = [getattr(grad, field.name) for field in fields(grad)]
    tops = [part.abs().amax() for part in parts if part is not None and part.numel()]
    if not tops:
        return torch.ones(())
    top = torch.stack(tops).amax()
    return torch.where(top > 0, top, torch.ones_like(top))
