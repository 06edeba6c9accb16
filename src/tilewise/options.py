"""How a loss is computed. No field changes its value beyond rounding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from tilewise.errors import ConfigError

BackendName = Literal["auto", "triton", "torch"]
BACKEND_NAMES: list[str] = list(get_args(BackendName))  # `kernels.registry` adds the names of registered backends
Precision = Literal["torch", "highest", "high"]
RingGradients = Literal["float32", "features"]
GradientsIn = Literal["auto", "forward", "backward"]


@dataclass(frozen=True, kw_only=True)
class TileOptions:
    """How a loss is computed, never what it computes.

    Args:
        backend: "auto" takes the fastest backend that can serve the call; a name takes that one or fails.
        workspace_mib: the most scratch memory that one call may take, in MiB. Gradients and statistics,
            which grow with the rows plus the columns, come on top.
        precision: products of float32 inputs. "torch" follows ``torch.get_float32_matmul_precision()``,
            "highest" is full float32, "high" permits TF32.
        filter_tolerance: the largest probability mass that backward may leave out of a row. 0 is exact;
            a backend may always leave out less than it is allowed to.
        ring_gradients: over a group, the type in which gradients of columns travel and are added up: "float32"
            (float64 for float64 features), or "features" for their own type, which halves the bytes of bfloat16
            at the price of one rounding per rank.
        gradients: when the gradients of a scalar loss are formed. "backward" computes the scores a second time;
            "forward" forms the gradients at once (three products instead of four, memory for a block of scores),
            where the loss permits it: `linear_cross_entropy`, `info_nce` and `siglip_loss` with a mean or sum, in
            one process. Elsewhere it changes nothing, but that "backward" keeps a small `clip_loss` on a GPU from
            launching its gradients early. "auto" does so where that memory fits the workspace.

    >>> TileOptions(workspace_mib=64).backend
    'auto'
    """

    backend: BackendName = "auto"
    workspace_mib: int = 256
    precision: Precision = "torch"
    filter_tolerance: float = 0.0
    ring_gradients: RingGradients = "float32"
    gradients: GradientsIn = "auto"

    def __post_init__(self) -> None:
        if self.backend not in BACKEND_NAMES:
            raise ConfigError(f"no backend {self.backend!r}; choose one of {', '.join(BACKEND_NAMES)}")
        if self.precision not in get_args(Precision):
            raise ConfigError(f"no precision {self.precision!r}; choose one of {', '.join(get_args(Precision))}")
        if self.ring_gradients not in get_args(RingGradients):
            raise ConfigError(
                f"no type {self.ring_gradients!r} of travelling gradients; choose one of "
                f"{', '.join(get_args(RingGradients))}"
            )
        if self.gradients not in get_args(GradientsIn):
            raise ConfigError(f"no gradients {self.gradients!r}; choose one of {', '.join(get_args(GradientsIn))}")
        if isinstance(self.workspace_mib, bool) or not isinstance(self.workspace_mib, int):
            raise ConfigError(f"workspace_mib is a whole number of MiB, got {self.workspace_mib!r}. Round it down")
        if self.workspace_mib < 1:
            raise ConfigError(
                f"workspace_mib must be at least 1, got {self.workspace_mib}. A tile needs some scratch memory; "
                "the default is 256"
            )
        if not isinstance(self.filter_tolerance, (int, float)) or not 0.0 <= self.filter_tolerance < 1.0:
            raise ConfigError(
                f"filter_tolerance is a probability mass in [0, 1), got {self.filter_tolerance!r}; 0 is exact"
            )

    @property
    def workspace_bytes(self) -> int:
        """The same limit in bytes."""
        return self.workspace_mib * 2**20


DEFAULT_OPTIONS = TileOptions()
