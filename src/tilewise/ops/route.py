"""Which strategy computes a call, and why. The size thresholds of that choice are in `limits`.

    small       all scores at once, for a small batch. Gradients of a scalar loss in forward, of statistics in backward.
    two_pass    statistics in forward, scores recomputed in backward: four products. Always possible.
    one_pass    a scalar loss and its gradients in forward: three products, if the memory allows.
    filtered    gradients without the (row, tile) entries that carry almost no probability; a ``filter_tolerance``.

`route` is a pure function of sizes, types and settings. It never looks at a number in a tensor.
"""

from __future__ import annotations

import functools
from typing import Literal, NamedTuple

import torch

from tilewise.kernels import filter_plan as plans
from tilewise.kernels.backend import Backend, GroupFilter, Like, OnePass
from tilewise.kernels.registry import choose_backend, forget_with_backends, operators_instead
from tilewise.kernels.spec import Needs, PairShape, PairSpec, wanted_names
from tilewise.ops.budget import sized
from tilewise.ops.limits import Limits, current
from tilewise.ops.row_blocks import in_blocks
from tilewise.options import TileOptions

Strategy = Literal["small", "two_pass", "one_pass", "filtered"]

# The statistics that the filter computes
FILTERED = {"row_lse", "row_pos", "num_positives", "row_entropy", "row_top", "row_top_col", "row_picked"}
TOO_SMALL = "the call is too small for the filter to pay"
NO_FILTER = "this backend has no filter; the Triton backend has one"


class Route(NamedTuple):
    """How a call is computed."""

    strategy: Strategy
    reason: str
    backend: Backend
    unfiltered: bool = False  # whether only the size of the call or the backend is a reason not to use the filter
    forms_gradients: bool = False  # whether forward computes the gradients too

    @property
    def one_pass(self) -> OnePass:
        """With the strategy `one_pass`: the backend's capability."""
        assert self.backend.one_pass is not None
        return self.backend.one_pass

    def saved_like(self, shape: PairShape, needs: Needs, spec: PairSpec, options: TileOptions) -> list[Like]:
        """With `forms_gradients`: sizes and types of what forward saves."""
        if self.strategy == "small":
            assert self.backend.small is not None
            return self.backend.small.saved_like(shape, needs)
        return self.one_pass.saved_like(shape, needs, spec, options)


def route(shape: PairShape, spec: PairSpec, options: TileOptions, needs: Needs, **how: bool) -> Route:
    """The strategy of a call; ``how`` are the keywords of `_route`."""
    plain = type(shape.rows) is type(shape.cols) is type(shape.width) is type(shape.picks) is int
    choose = _route if plain else _route.__wrapped__  # a compiler's symbols cannot be keys of a cache
    return choose(shape, spec, options, needs, current(), **how)


@functools.lru_cache(maxsize=1024)
def _route(
    shape: PairShape,
    spec: PairSpec,
    options: TileOptions,
    needs: Needs,
    limits: Limits,
    *,
    scalar: bool = False,
    over_group: bool = False,
    capturing: bool = False,
) -> Route:
    """The strategy of a call.

    Args:
        shape, spec, options, needs: of the call.
        limits: the thresholds.
        scalar: whether the loss is a scalar with known weights (`RowWeights`).
        over_group: whether the columns are sharded over a process group; ``shape`` has those of this rank.
        capturing: whether a CUDA graph is being captured, in which the host may not read numbers.
    """
    plain = type(shape.rows) is int and type(shape.picks) is int
    backend = in_blocks((choose_backend if plain else choose_backend.__wrapped__)(shape, spec, options), options)
    if over_group and not spec.same_rows:
        return Route("two_pass", "over a ring the statistics of all ranks come first", backend)
    if options.batch_invariant:
        return Route("two_pass", "batch_invariant=True: blocks of rows have a fixed size", backend)
    if not over_group and options.filter_tolerance == 0.0:
        if _why_not_small(shape, spec, options, backend, limits, scalar) is None:
            reason = "all scores fit the workspace at once, and there are few of them"
            return Route("small", reason, backend, forms_gradients=scalar)
        # Where the host is the limit, some operators on all scores at once take less time than many tiles.
        other = operators_instead(backend, options)
        fits = other is not None and _why_not_small(shape, spec, options, other, limits, scalar) is None
        if other is not None and fits and shape.rows * shape.cols <= limits.small_operators:
            reason = f"few scores: operators on all of them instead of the tiles of the backend {backend.name}"
            return Route("small", reason, other, forms_gradients=scalar)
    if not any(needs):
        return Route("two_pass", "no gradient is needed", backend)
    options = sized(options, shape, spec, needs)
    if spec.guide != "none":
        return Route("two_pass", "a second score matrix is computed in the same tiles", backend)
    if (tolerance := plans.tolerance_of(options, shape.dtype)) > 0.0:
        why_exact = _why_not_filtered(shape, spec, options, backend, limits, over_group, capturing)
        if why_exact is None:
            return Route("filtered", _filter_reason(options, tolerance), backend)
        return Route(
            "two_pass", f"nothing is dropped: {why_exact}", backend, unfiltered=why_exact in (TOO_SMALL, NO_FILTER)
        )
    if over_group:
        return Route("two_pass", "over a group the statistics of all ranks come first", backend)
    if not scalar:
        return Route("two_pass", "the loss needs the statistics of each row", backend)
    why_two = _why_not_one_pass(shape, spec, options, backend, limits)
    if why_two is None:
        reason = "the loss is a scalar, and the workspace is large enough"
        return Route("one_pass", reason, backend, forms_gradients=True)
    return Route("two_pass", why_two, backend)


forget_with_backends(_route.cache_clear)


def _filter_reason(options: TileOptions, tolerance: float) -> str:
    meaning = f'"rounding": {tolerance:g}' if options.filter_tolerance == "rounding" else f"{tolerance:g}"
    return f"filter_tolerance is {meaning}"


def _why_not_filtered(
    shape: PairShape,
    spec: PairSpec,
    options: TileOptions,
    backend: Backend,
    limits: Limits,
    over_group: bool,
    capturing: bool,
) -> str | None:
    """Why the exact gradients are computed despite a tolerance, or None."""
    if over_group and backend.filtered is not None and not isinstance(backend.filtered, GroupFilter):
        return f"the filter of the backend {backend.name} is for one process"
    if plans.tolerance_of(options, shape.dtype) < plans.SMALLEST_TOLERANCE:
        return "the tolerance is too small for float32"
    if spec.row_sum:
        return "a weighted sum of all scores (label smoothing, mean_logit) needs every entry"
    if spec.skip_picked:
        return "the log-sum-exp leaves out the picked columns, and the filter does not"
    if spec.row_sum_sq:
        return "the filter has no bound for the sum of squared probabilities (log_sum_sq_prob)"
    unsupported = spec.mask_self or spec.symmetric or spec.local_keys or shape.has_skips
    unsupported = unsupported or shape.has_row_scale
    one = spec.positive == "one" or (spec.positive == "none" and spec.drop_rows)
    if not spec.row_lse or not set(wanted_names(spec)) <= FILTERED or not one or unsupported or not shape.has_row_key:
        return "the filter is for softmax losses with one positive per row, given by an index"
    if shape.empty or shape.cols < 2 * plans.tile_width(shape.cols):
        return "there are too few columns to choose from"
    if shape.rows * plans.tile_count(shape.cols) * shape.dtype.itemsize > options.workspace_bytes / 2:
        return "the plan would not fit half the workspace"
    if over_group and not plans.fits_at_once(shape.rows, shape.cols, spec, options):
        return "over a group the masses of all rows would not fit a quarter of the workspace"
    if shape.rows * plans.tile_count(shape.cols) >= 2**31:
        return "pairs are counted in 32 bits"
    if shape.device.type == "cuda" and shape.products < limits.worth_filtering:
        return TOO_SMALL
    if capturing:
        return "a CUDA graph is being captured"
    return NO_FILTER if backend.filtered is None else None


def _why_not_small(
    shape: PairShape, spec: PairSpec, options: TileOptions, backend: Backend, limits: Limits, scalar: bool
) -> str | None:
    """Why a scalar loss, or statistics, are not computed from one block of scores, or None."""
    if backend.small is None:
        return f"the backend {backend.name} offers no strategy for small batches"
    if options.gradients == "backward":
        return 'gradients="backward"'
    if shape.empty:
        return "there are no scores"
    if shape.rows * shape.cols > (limits.small if shape.device.type == "cuda" else limits.small_cpu):
        return "there are so many scores that tiles are faster"
    if backend.small.block_bytes(shape, spec) > options.small_bytes:
        return "the workspace does not hold all scores"
    return backend.small.why_not(shape, spec, options, scalar=scalar)


def _why_not_one_pass(
    shape: PairShape, spec: PairSpec, options: TileOptions, backend: Backend, limits: Limits
) -> str | None:
    """Why a scalar loss takes two passes, or None."""
    if options.gradients == "backward":
        return 'gradients="backward"'
    if backend.one_pass is None:
        return f"the backend {backend.name} offers no one-pass strategy"
    if shape.empty:
        return "there are no scores"
    if shape.has_row_scale:
        return "one pass has the same scale for all rows"
    if reason := backend.one_pass.why_not(shape, spec, options):
        return reason
    gpu, forward = shape.device.type == "cuda", options.gradients == "forward"
    rows = backend.one_pass.rows_that_fit(shape, spec, options.workspace_bytes)
    if gpu and not forward and shape.products < limits.worth_one_pass and not spec.softplus:
        return "the call is so small that the host would take longer than the device"
    if gpu and not forward and rows < shape.rows and shape.width < limits.narrowest_in_blocks and not spec.softplus:
        return "features are so narrow that one pass in several blocks of rows gains nothing"
    enough = limits.smallest_block
    if gpu:
        enough = limits.smallest_gpu_block if min(shape.rows, shape.cols) <= limits.many else limits.smallest_of_many
    if spec.softplus or rows >= min(shape.rows, enough):
        return None
    return f"the workspace holds the scores of {rows} rows; one pass needs all rows, or at least {enough}"


def is_capturing(features: torch.Tensor) -> bool:
    """Whether a CUDA graph is being captured."""
    return features.is_cuda and torch.cuda.is_current_stream_capturing()
