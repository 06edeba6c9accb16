"""Options that say how a loss is computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from tilewise.errors import ConfigError

BackendName = Literal["auto", "triton", "torch"]
BACKEND_NAMES: list[str] = list(get_args(BackendName))  # `kernels.registry` adds the names of registered backends
Precision = Literal["torch", "highest", "high"]
RingGradients = Literal["float32", "features"]
GradientsIn = Literal["auto", "forward", "backward"]
FilterTolerance = float | Literal["rounding"]
WorkspaceMib = int | Literal["auto"] | None
DEFAULT_MIB, DEFAULT_SMALL_MIB = 256, 768


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Check that a word is one of ``choices``."""
    if not isinstance(value, str) or value not in choices:
        raise ConfigError(f"no {name} {value!r:.60}; choose one of {', '.join(choices)}")


def check_flag(name: str, value: object) -> None:
    """Check that a value is True or False. A text such as "False" would count as true."""
    if not isinstance(value, bool):
        number = isinstance(value, int) or type(value).__name__ in ("bool_", "bool")  # also NumPy's bool
        how = "Convert it with bool()" if number else "Pass True or False"
        raise ConfigError(f"{name} is True or False, got {value!r:.60}. {how}")


@dataclass(frozen=True, kw_only=True)
class TileOptions:
    """How a loss is computed. Except for ``filter_tolerance``, no field changes a result beyond rounding.

    Args:
        backend: "auto" chooses the fastest backend that can serve the call. A name selects that backend; if it cannot
            serve the call, an error is raised.
        workspace_mib: upper limit of the scratch memory of one call, in MiB. Gradients and statistics, which grow with
            the number of rows plus columns, are not included. With more of it, some losses are faster: they keep
            scores instead of computing them twice. None, the default, depends on the sizes of the call only: 768 for a
            small batch, whose scores are computed all at once; 256 to 4,096 for a softmax over classes on a GPU; 256
            for all other calls. `tilewise.explain` shows it. "auto" (deprecated) is a quarter of the memory that is
            free on the device at each call, rounded down to 2**k or 1.5 * 2**k MiB, between 64 MiB and 8 GiB; with a
            group, inside of ``torch.compile`` and for retrieval it is the default.
        precision: precision of float32 products. "torch" follows ``torch.get_float32_matmul_precision()``,
            "highest" is full float32, "high" permits TF32.
        filter_tolerance: the largest probability mass that the filter may drop from each row in backward. The loss
            stays exact; gradients change by no more than the documented bound. 0, the default, is exact. A backend
            may drop less; the torch backend, which serves a CPU, drops nothing. "rounding" chooses a tolerance that
            changes gradients about as much as rounding logits and their gradients to bfloat16 or float16 does; for
            float32 and float64 it drops nothing.
        ring_gradients: over a group, the type in which the gradients of columns are sent and summed. "float32" (float64
            for float64 features), or "features" for the type of the features, which halves the traffic of bfloat16
            and rounds once per rank.
        gradients: when the gradients of a scalar loss are computed. "forward" is the one-pass strategy: loss and
            gradients come from one pass over the scores, with three products instead of four and memory for a block
            of scores. "backward" is the two-pass strategy: backward computes the scores a second time. "auto" lets
            the route decide; `tilewise.explain` shows its decision. A loss that has no one-pass strategy, such as one
            with reduction="none" or with a group, uses two passes in any case, and so does a call whose workspace
            holds so few rows of scores that one pass would be slower.
        batch_invariant: a row's results are bitwise the same whatever other rows are in the batch, however many, and
            wherever the row stands: its loss with reduction="none", its statistics, and its gradient for a given
            ``grad_output`` of the row. For `linear_cross_entropy` and `linear_token_stats`, also over a group of a
            fixed size, and for `linear_logsumexp` without a group; other losses raise `ConfigError`. The rows are
            computed in blocks of a fixed size, and the last block is filled up: few rows cost as much as a block. If
            the columns, the scale or the bias need a gradient, the scores are computed once more.

    >>> TileOptions(workspace_mib=64).backend
    'auto'
    """

    backend: BackendName = "auto"
    workspace_mib: WorkspaceMib = None
    precision: Precision = "torch"
    filter_tolerance: FilterTolerance = 0.0
    ring_gradients: RingGradients = "float32"
    gradients: GradientsIn = "auto"
    batch_invariant: bool = False

    def __post_init__(self) -> None:
        check_choice("backend", self.backend, BACKEND_NAMES)
        check_choice("precision", self.precision, get_args(Precision))
        check_choice("ring_gradients", self.ring_gradients, get_args(RingGradients))
        check_choice("gradients", self.gradients, get_args(GradientsIn))
        memory = self.workspace_mib
        number = isinstance(memory, (int, torch.SymInt))  # a compiler's symbol for a default from sizes
        known = memory is None or number or (isinstance(memory, str) and memory == "auto")
        if isinstance(memory, bool) or not known:
            how = "Round it" if isinstance(memory, float) else "Pass an int"
            raise ConfigError(f'workspace_mib is a whole number of MiB or "auto", got {memory!r:.60}. {how}')
        if isinstance(memory, int) and memory < 1:
            raise ConfigError(
                f"workspace_mib must be at least 1, got {memory}. A tile needs scratch memory; "
                "leave it out for the default"
            )
        tolerance = self.filter_tolerance
        share = isinstance(tolerance, (int, float)) and 0.0 <= tolerance < 1.0
        if not share and not (isinstance(tolerance, str) and tolerance == "rounding"):
            raise ConfigError(
                f'filter_tolerance is a probability mass in [0, 1) or "rounding", got {tolerance!r}; 0 is exact'
            )
        check_flag("batch_invariant", self.batch_invariant)
        if self.batch_invariant and (self.filter_tolerance != 0.0 or self.gradients == "forward"):
            other = (
                'gradients="forward"' if self.gradients == "forward" else f"filter_tolerance={self.filter_tolerance}"
            )
            raise ConfigError(
                f"batch_invariant=True needs exact gradients from two passes, got {other}, with which a row's gradient "
                "depends on the other rows. Remove one of the two"
            )

    @property
    def workspace_bytes(self) -> int:
        """`workspace_mib` in bytes; 256 MiB in place of a None or "auto" that nothing replaced by a number."""
        memory = self.workspace_mib
        return (DEFAULT_MIB if memory is None or isinstance(memory, str) else memory) * 2**20

    @property
    def small_bytes(self) -> int:
        """The most memory for all scores of a small batch."""
        return DEFAULT_SMALL_MIB * 2**20 if self.workspace_mib is None else self.workspace_bytes


DEFAULT_OPTIONS = TileOptions()
