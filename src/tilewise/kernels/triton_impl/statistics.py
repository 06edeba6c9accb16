"""Statistics of the softmax of each row, as functions that kernels call. Scores and logarithms are in units of log2.

Forward: a tile has e_j = 2**below_j, below_j = x_j - safe, total = sum_j e_j for each of its rows.

    part(tile)                       the numbers of each row that the tile stores, a tuple
    begin(rows, total)               merging: the state of the statistic before these parts, 0 for none
    share(state, part, step)         the state with MANY_PARTS further parts, each weighted by 2**(its lse - safe)
    end(rows, state, total)          stores the statistic
    fold(rows, part, ...)            instead of the three: merges parts that need no log-sum-exp, stores the result, and
                                     returns where these parts end

Backward: G_ij = p_ij (v_i + the terms of all statistics)

    term(value, p, below, grad)      ``value`` with the term of the statistic added; below = log2 p

A new statistic also takes a line in `tilewise.kernels.spec.STATISTICS`, a parameter of `merge_kernel` and, if it has a
gradient, one of the three kernels that take ROW_TERMS; `Backward` passes it by name. Decision 0034 has an example.

A kernel has a tuple of such functions as a compile-time constant, and the constant CODE, which `launch` adds: Triton
does not see functions inside a tuple when it looks for a compiled kernel on the disk.
"""

from collections.abc import Collection
from typing import Any, NamedTuple

import triton
import triton.language as tl

from tilewise.kernels.spec import PairSpec, wanted_names
from tilewise.kernels.triton_impl.primitives import LN2, LOG2E, NO_SHARE, shifts, with_rank, without_rank

MANY_PARTS = tl.constexpr(64)  # parts that are read at once
NO_COLUMN = tl.constexpr(2.0**24)  # a macro-tile has fewer columns, so float32 holds their indices


class RowTile(NamedTuple):
    """A tile of scores and the softmax of each of its rows."""

    x: Any
    cols: Any
    high: Any  # the largest score
    safe: Any  # the same, 0 instead of -inf
    below: Any
    e: Any
    total: Any


class Rows(NamedTuple):
    """The rows whose parts a program merges, and their statistics."""

    at: Any
    ok: Any
    size: Any  # numbers of one part
    parts: Any
    first: Any  # the index of the macro-tile's first column
    row_shift: Any
    row_entropy: Any
    row_sum_sq: Any
    row_top: Any
    row_top_col: Any


class Step(NamedTuple):
    """Some parts of each row, and how much they and the state before them count."""

    value: Any  # their log-sum-exps
    where: Any  # where the log-sum-exps lie, from the start of all of them
    here: Any
    share: Any
    kept: Any
    high: Any  # the largest log-sum-exp before
    safe: Any  # and with these parts
    total: Any  # before


class GradRows(NamedTuple):
    """Rows of G, with the gradients of their statistics, each multiplied by ``factor``."""

    at: Any
    ok: Any
    factor: Any
    grad_entropy: Any
    grad_square: Any


@triton.jit
def softmax_term(value, p, below, grad, ROW_TERMS: tl.constexpr):
    """What the softmax of the rows adds to G. ``value``: the gradient of the log-sum-exp, already multiplied by ``factor``."""
    for i in tl.static_range(len(ROW_TERMS)):
        value = ROW_TERMS[i](value, p, below, grad)
    return value * p


# -- The entropy: log total - sum_j e_j below_j / total, and sum_k w_k (entropy_k + lse - lse_k) of parts k ------------


@triton.jit
def part_entropy(tile):
    """The entropy over the columns of the tile."""
    gap = tl.sum(tile.e * tl.maximum(tile.below, NO_SHARE), 1)  # 0 times -inf would be NaN
    return (tl.where(tile.total == 0.0, 0.0, tl.log2(tile.total) - gap / tile.total),)


@triton.jit
def begin_entropy(rows, total):
    """The state is the sum of 2**(lse_k - high) (entropy_k + high - lse_k)."""
    return tl.load(rows.row_entropy + rows.at, mask=rows.ok, other=0.0) * LOG2E


@triton.jit
def share_entropy(state, part, step):
    """No term is negative, so nothing cancels."""
    each = tl.load(part + step.where, mask=step.here, other=0.0)
    each += tl.where(step.value == float("-inf"), 0.0, step.safe[None, :] - step.value)
    rise = tl.where(step.high == float("-inf"), 0.0, step.safe - step.high)
    return step.kept * (state + rise * step.total) + tl.sum(step.share * each, 0)


@triton.jit
def end_entropy(rows, state, total):
    """0 for a row without scores."""
    found = tl.where(total == 0.0, 0.0, state / total + tl.log2(total))
    tl.store(rows.row_entropy + rows.at, found * LN2, mask=rows.ok)


@triton.jit
def term_entropy(value, p, below, grad):
    """The part of the gradient that does not depend on the column is in ``value``: see `folded_gradients`."""
    h = tl.load(grad.grad_entropy + grad.at, mask=grad.ok, other=0.0)
    return value - h * grad.factor * LN2 * tl.maximum(below, NO_SHARE)


# -- The log of the sum of squares: log sum_j e_j^2 - 2 log total, and log sum_k w_k^2 exp(square_k) ---------------------


@triton.jit
def part_sum_sq(tile):
    """The log of the sum of squares over the columns of the tile."""
    square = tl.log2(tl.sum(tile.e * tile.e, 1)) - 2.0 * tl.log2(tile.total)
    return (tl.where(tile.total == 0.0, 0.0, square),)


@triton.jit
def begin_sum_sq(rows, total):
    """The state is the sum of (2**(lse_k - high))**2 2**square_k."""
    return total * tl.exp2(tl.load(rows.row_sum_sq + rows.at, mask=rows.ok, other=0.0) * LOG2E)


@triton.jit
def share_sum_sq(state, part, step):
    """Squared weights."""
    each = tl.exp2(tl.load(part + step.where, mask=step.here, other=0.0))
    return step.kept * step.kept * state + tl.sum(step.share * step.share * each, 0)


@triton.jit
def end_sum_sq(rows, state, total):
    """0 for a row without scores."""
    found = tl.where(total == 0.0, 0.0, tl.log2(state) - 2.0 * tl.log2(total))
    tl.store(rows.row_sum_sq + rows.at, found * LN2, mask=rows.ok)


@triton.jit
def term_sum_sq(value, p, below, grad):
    """``grad_square`` is already multiplied by 2 exp(-row_sum_sq)."""
    return value + tl.load(grad.grad_square + grad.at, mask=grad.ok, other=0.0) * grad.factor * p


# -- The largest score and its column ------------------------------------------------------------------------------------


@triton.jit
def part_top(tile):
    """From `below`, which the other statistics need too: fewer tiles are live at once."""
    high = tl.where(tile.total == tile.total, tile.high, float("inf"))  # the rank of NaN
    hit = with_rank(tile.below) >= (high - tile.safe)[:, None]
    return high, tl.min(tl.where(hit, tile.cols[None, :].to(tl.float32), NO_COLUMN), 1)


@triton.jit
def fold_top(rows, part, FIRST: tl.constexpr, LAST: tl.constexpr):
    """The shift is subtracted after the last macro-tile of the row (LAST). Earlier subtraction could break ties."""
    best = tl.full(rows.at.shape, float("-inf"), tl.float32)
    place = tl.full(rows.at.shape, 2**31 - 1, tl.int64)
    if not FIRST:
        best = tl.load(rows.row_top + rows.at, mask=rows.ok, other=0.0)
        place = tl.load(rows.row_top_col + rows.at, mask=rows.ok, other=0)
    for begin in range(0, rows.parts, MANY_PARTS):
        p = begin + tl.arange(0, MANY_PARTS)
        here = (p < rows.parts)[:, None] & rows.ok[None, :]
        where = part + p.to(tl.int64)[:, None] * rows.size + rows.at[None, :]
        score = tl.load(where, mask=here, other=float("-inf"))
        column = tl.load(where + rows.parts * rows.size, mask=here, other=NO_COLUMN)
        high = tl.max(score, 0)
        column = tl.min(tl.where(score == high[None, :], column, NO_COLUMN), 0).to(tl.int64) + rows.first
        place = tl.where(high > best, column, tl.where(high == best, tl.minimum(place, column), place))
        best = tl.maximum(best, high)
    if LAST:
        best = without_rank(best, (best - shifts(rows.row_shift, rows.at, rows.ok)) * LN2)
    tl.store(rows.row_top + rows.at, best, mask=rows.ok)
    tl.store(rows.row_top_col + rows.at, place, mask=rows.ok)
    return part + 2 * rows.parts * rows.size


class Statistic(NamedTuple):
    """A row of `TABLE`."""

    part: Any
    numbers: int  # of a row, in each part
    shares: tuple[Any, ...] | None = None  # begin, share, end; or
    fold: Any = None


# In the order of their parts, those with ``shares`` first. This order spills the fewest registers: see decision 0034.
TABLE = {
    "row_entropy": Statistic(
        part_entropy,
        1,
        shares=(begin_entropy, share_entropy, end_entropy),
    ),
    "row_sum_sq": Statistic(
        part_sum_sq,
        1,
        shares=(begin_sum_sq, share_sum_sq, end_sum_sq),
    ),
    "row_top": Statistic(part_top, 2, fold=fold_top),
}


# By the parameter that has the gradient, in the order in which they are added.
ROW_TERMS = {"grad_square": term_sum_sq, "grad_entropy": term_entropy}


def wanted_parts(spec: PairSpec) -> list[Statistic]:
    """The statistics of the table that a spec wants."""
    return [statistic for name, statistic in TABLE.items() if name in wanted_names(spec)]


def forward_functions(spec: PairSpec) -> dict[str, tuple[Any, ...]]:
    """PARTS of `forward_kernel`, SHARES and FOLDS of `merge_kernel`."""
    wanted = wanted_parts(spec)
    found = {"PARTS": tuple(one.part for one in wanted), "SHARES": tuple(one.shares for one in wanted if one.shares)}
    return found | {"FOLDS": tuple(one.fold for one in wanted if one.fold)}


def row_terms(given: Collection[str]) -> tuple[Any, ...]:
    """ROW_TERMS of the kernels of backward, for the gradients that are given, by the names of parameters."""
    return tuple(factor for name, factor in ROW_TERMS.items() if name in given)
