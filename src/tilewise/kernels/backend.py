"""The interface of a backend: `two_pass`, which every backend has, and the capabilities that it may add."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from tilewise.kernels.ranks import Scorer
from tilewise.kernels.spec import FilterPlan, Grads, GradStats, Needs, Pair, PairShape, PairSpec, RowWeights, Stats
from tilewise.kernels.tensors import FACTS, WEIGHTS
from tilewise.options import Precision, TileOptions

Saved = Sequence[Tensor | None]  # what `OnePass.forward` saves for backward
Like = tuple[tuple[int, ...], torch.dtype]  # size and type of a tensor


@runtime_checkable
class OnePass(Protocol):
    """A capability: a scalar loss and its gradients from one pass over the scores (see `RowWeights`)."""

    def why_not(self, shape: PairShape, spec: PairSpec, options: TileOptions) -> str | None:
        """Why this loss cannot be computed in one pass, or None."""

    def rows_that_fit(self, shape: PairShape, spec: PairSpec, memory: int) -> int:
        """Rows whose scores with all columns fit ``memory`` bytes; all rows where no scores are kept."""

    def saved_like(self, shape: PairShape, needs: Needs, spec: PairSpec, options: TileOptions) -> list[Like]:
        """Sizes and types of the tensors that `forward` saves; (0,) for one that is not needed."""

    def forward(
        self, pair: Pair, weights: RowWeights, needs: Needs, spec: PairSpec, options: TileOptions, rows: int
    ) -> tuple[Tensor, Saved]:
        """The loss, 0-d, and the tensors to save, with room for ``rows`` rows (at least those of the pair)."""

    def backward(
        self,
        saved: Saved,
        pair: Pair,
        grad_output: Tensor,
        needs: Needs,
        spec: PairSpec,
        options: TileOptions,
        shape: PairShape,
        *,
        overwrite: bool = False,
    ) -> Grads:
        """The gradients multiplied by ``grad_output``, in the types of the inputs.

        ``shape`` is the one that `saved_like` was called with; it may have more rows than the pair. With ``overwrite``
        the memory of ``saved`` may become a gradient.
        """


SMALL_TENSORS = ("bias", *FACTS, *WEIGHTS)


class SmallKey(NamedTuple):
    """All that the work of a small call depends on, except for tensors and numbers."""

    shape: PairShape
    spec: PairSpec
    needs: Needs
    precision: Precision
    present: frozenset[str]  # of `SMALL_TENSORS`; also "scale", if it is a tensor and no number
    one_bias: bool  # the bias is one number, expanded over all columns
    kept: bool  # see `RowWeights`
    scalar: bool = True  # a scalar loss, not statistics


class SmallJob(Protocol):
    """The work of small calls of one kind (`SmallKey`). It holds no tensor, and threads may share it."""

    def forward(
        self, a: Tensor, b: Tensor | None, scale: Any, bias: Tensor | None, facts: Sequence[Any], share: float
    ) -> tuple[Tensor, Sequence[Any]]:
        """The loss, 0-d, and the tensors to save, as `Small.saved_like` lists them.

        Args:
            a, b, scale, bias: the leaves of the call. ``b`` is None for symmetric scores. The scale is a tensor or a
                number.
            facts: row_key, col_key, row_skip, col_skip, and of `RowWeights` each and square, divided by ``share``.
            share: of `RowWeights`.
        """

    def backward(self, saved: Sequence[Any], grad_output: Tensor, *, overwrite: bool) -> Sequence[Tensor | None]:
        """The gradients of the four leaves times ``grad_output``. With ``overwrite`` they may lie in ``saved``."""


class SmallStatsJob(Protocol):
    """The statistics of small calls of one kind. Like a `SmallJob`, it holds no tensor."""

    names: tuple[str, ...]  # `wanted_names`

    def forward(self, pair: Pair, *, own_shift: bool) -> Stats:
        """The statistics, relative to the shifts of the pair.

        With ``own_shift`` the pair has no shifts. The shift of a row with positives is then the score of the positive,
        or about it, and `Stats.row_shift` has the shifts. ``num_positives`` may be None where each row has one.
        """

    def backward(self, pair: Pair, grad: GradStats, needs: Needs) -> Grads:
        """The gradients; ``needs`` are those of the key, or fewer. The features' have any floating type."""


class Small(Protocol):
    """A capability: all scores of a small batch at once. A scalar loss and its gradients, or statistics."""

    def why_not(self, shape: PairShape, spec: PairSpec, options: TileOptions, *, scalar: bool = True) -> str | None:
        """Why this loss, or without ``scalar`` these statistics, cannot be computed so, or None."""

    def block_bytes(self, shape: PairShape, spec: PairSpec) -> int:
        """Memory for all scores."""

    def saved_like(self, shape: PairShape, needs: Needs) -> list[Like]:
        """Sizes and types of the tensors that `SmallJob.forward` saves; (0,) for one that is not needed."""

    def job(self, key: SmallKey) -> SmallJob | SmallStatsJob:
        """The work for calls of one kind, by ``key.scalar``. It is made once for each kind."""

    def describe(self, key: SmallKey) -> tuple[str, int]:
        """For `explain`: the steps of `job` as text, if they are data, and what they allocate besides their results."""


class Filtered(Protocol):
    """A capability: gradients without the (row, tile) entries of almost no probability; see `filter_plan`.

    Over a group, the exact gradients are computed if the filter is no `GroupFilter`.
    """

    def forward(self, pair: Pair, spec: PairSpec, options: TileOptions) -> tuple[Stats, FilterPlan]:
        """The statistics, all of them exact, and the plan for backward."""

    def forward_saving(
        self, pair: Pair, spec: PairSpec, options: TileOptions
    ) -> tuple[Stats, FilterPlan, object | None]:
        """`forward`, and the saved object of `Backend.forward_saving`, in case backward computes every pair."""

    def backward(
        self,
        pair: Pair,
        stats: Stats,
        plan: FilterPlan,
        grad: GradStats,
        needs: Needs,
        spec: PairSpec,
        options: TileOptions,
        *,
        saved: object | None = None,
    ) -> Grads | None:
        """Gradients from the entries that are kept; None if the exact backward must run instead.

        The memory of ``saved`` may become a gradient, unless the result is None.
        """


@dataclass(frozen=True)
class FilterGroup:
    """What a filter needs to know of the other ranks of a vocabulary group, which have the same rows."""

    ranks: int
    cols: int  # of all ranks together
    sample: int  # the number of rows that every rank probes, see `GroupFilter.sample_rows`; 0 for no probe
    # The statistics over the columns of all ranks, from those over the columns of this rank. Every rank calls it once
    # for the sample, if there is one, and once for all rows.
    merged: Callable[[Stats], Stats]


@runtime_checkable
class GroupFilter(Protocol):
    """A `Filtered` that also serves a vocabulary group. Without ``group`` and ``grad_dtype``, it is a `Filtered`."""

    def sample_rows(self, shape: PairShape, options: TileOptions) -> int:
        """The number of rows that a call of this shape probes; ``shape`` has the most columns of a rank."""

    def forward(
        self, pair: Pair, spec: PairSpec, options: TileOptions, *, group: FilterGroup | None = None
    ) -> tuple[Stats, FilterPlan]:
        """The statistics over the columns of all ranks, and the plan for this rank's columns."""

    def forward_saving(
        self, pair: Pair, spec: PairSpec, options: TileOptions, *, group: FilterGroup | None = None
    ) -> tuple[Stats, FilterPlan, object | None]:
        """`forward`, and the saved object of `Filtered.forward_saving`."""

    def backward(
        self,
        pair: Pair,
        stats: Stats,
        plan: FilterPlan,
        grad: GradStats,
        needs: Needs,
        spec: PairSpec,
        options: TileOptions,
        *,
        saved: object | None = None,
        grad_dtype: torch.dtype | None = None,
    ) -> Grads | None:
        """`Filtered.backward`; ``grad_dtype`` is the type of the gradient of the rows, by default the features'."""


class Backend:
    """A way to compute the statistics and their gradients. `forward` and `backward` are the strategy `two_pass`.

    The other strategies are capabilities. A missing one is None: calls then take `two_pass` of the same backend,
    and ranks are counted with `forward`. With ``offers_search``, its scorer is a `Searcher`.
    """

    name: str
    one_pass: OnePass | None = None
    small: Small | None = None
    filtered: Filtered | None = None
    offers_ranks: bool = False
    offers_search: bool = False
    statistics: frozenset[str] | None = None  # names of those that it computes; None for all of `STATISTICS`

    def why_not(self, shape: PairShape, spec: PairSpec, options: TileOptions) -> str | None:
        """Why this backend cannot serve the call, or None if it can."""
        return None

    def can_skip(self, spec: PairSpec) -> bool:
        """Whether forward takes almost no time where ``Pair.only_if`` is not 1; also that of `filtered`."""
        return False

    def forward(self, pair: Pair, spec: PairSpec, options: TileOptions) -> Stats:
        """The statistics of ``spec``."""
        raise NotImplementedError

    def forward_saving(self, pair: Pair, spec: PairSpec, options: TileOptions) -> tuple[Stats, object | None]:
        """`forward`, and an object that may save `backward` work if the columns need a gradient, or None."""
        return self.forward(pair, spec, options), None

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
        saved: object | None = None,
    ) -> Grads:
        """Gradients, given the saved statistics (see `STATISTICS`) over ALL blocks; ``row_pos`` may be missing.

        G_ij = g_lse_i p_ij + g_pos_i [positive] + g_col_j exp(x_ij - col_lse_j) + ...,   p_ij = exp(x_ij - row_lse_i)
               + g_entropy_i p_ij (row_lse_i - x_ij - row_entropy_i) + 2 g_sum_sq_i (p_ij^2 exp(-row_sum_sq_i) - p_ij)
        dA = scale G B,   dB = scale G' A,   dscale = sum_ij G_ij <a_i, b_j>,   dbias = column sums of G

        ``grad_dtype`` is the type of the feature gradients, by default that of the features. A ring, which sums the
        gradients of many blocks, passes float32. ``saved`` is the object of `forward_saving`; it can be used only once.
        With it, the gradient of the columns may be in the type of the features whatever ``grad_dtype`` is.
        """
        raise NotImplementedError

    def accumulator_bytes(self, shape: PairShape, needs: Needs, spec: PairSpec, options: TileOptions) -> int:
        """Memory of backward besides inputs, gradients and workspace, such as float32 sums of half-type gradients."""
        return 0

    def workspace_bytes(self, shape: PairShape, spec: PairSpec, options: TileOptions, strategy: str) -> int:
        """An upper bound of what a call of these sizes uses of ``TileOptions.workspace_mib``, for `explain`."""
        return options.workspace_bytes

    def describe(
        self,
        pair: Pair,
        weights: RowWeights,
        needs: Needs,
        spec: PairSpec,
        options: TileOptions,
        *,
        strategy: str,
        save: bool,
    ) -> tuple[str, int] | None:
        """For `explain`: the steps of a call, and the peak of their memory above the inputs; None if they are not data.

        The tensors are stand-ins without memory. ``save``: whether the call takes `forward_saving`.
        """
        return None

    def why_no_ranks(self, device: torch.device, width: int, dtype: torch.dtype) -> str | None:
        """With ``offers_ranks``: why `scorer` cannot serve this retrieval, or None."""
        return None

    def scorer(self, device: torch.device, width: int, dtype: torch.dtype, options: TileOptions) -> Scorer:
        """With ``offers_ranks``: the scorer of this retrieval, if `why_no_ranks` returns None."""
        raise NotImplementedError
