"""Reports of what the filter dropped from backward, one entry for each call."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tilewise.kernels.spec import FilterPlan


@dataclass
class FilterReport:
    """What the filter dropped from the calls inside `record_filtering`. Reading it synchronizes with the device.

    Each property has one value for each call. The report holds the plans: one number for each row and tile.
    """

    _plans: list[tuple[FilterPlan, Tensor, float]] = dataclasses.field(default_factory=list)

    def __len__(self) -> int:
        return len(self._plans)

    def __repr__(self) -> str:
        names = ("tolerance", "kept_share", "mean_dropped", "largest_dropped", "dense")
        return f"FilterReport({', '.join(f'{name}={getattr(self, name)}' for name in names)})"

    @property
    def kept_share(self) -> list[float]:
        """The share of the (row, tile) entries, of rows with a positive, that backward computes.

        It is 1 where a sample of the rows needed nearly all of them, where a call is too small for the
        filter, and on a CPU.
        """
        return [int(plan.kept.sum()) / max(1, int(valid.sum()) * plan.mass.shape[0]) for plan, valid, _ in self._plans]

    @property
    def tolerance(self) -> list[float]:
        """The ``filter_tolerance`` of the call as a number, also where it was given as "rounding"."""
        return [tolerance for _, _, tolerance in self._plans]

    @property
    def dense(self) -> list[bool]:
        """Whether so many entries are kept that backward computes all of them, and drops nothing."""
        return [bool(plan.keep_all) for plan, _, _ in self._plans]

    @property
    def mean_dropped(self) -> list[float]:
        """The probability mass that a row drops, on average."""
        return [dropped.mean().item() if dropped.numel() else 0.0 for dropped in self._dropped()]

    @property
    def largest_dropped(self) -> list[float]:
        """The probability mass that a row drops, at most."""
        return [dropped.max().item() if dropped.numel() else 0.0 for dropped in self._dropped()]

    def _dropped(self) -> list[Tensor]:
        """For each call the mass that its rows drop, those without a positive left out."""
        out = []
        for (plan, valid, tolerance), dense in zip(self._plans, self.dense, strict=True):
            dropped = plan.mass[:, valid].double().clamp(min=0.0).sum(0) * tolerance
            out.append(torch.zeros_like(dropped) if dense else dropped)
        return out


_reports: list[FilterReport] = []


def is_recording() -> bool:
    """Whether a report is being recorded."""
    return bool(_reports)


def record(plan: FilterPlan, valid: Tensor, tolerance: float) -> None:
    """Add the plan of one call to every report that is being recorded; ``valid`` marks its rows with a positive."""
    for report in _reports:
        report._plans.append((plan, valid, tolerance))


@contextlib.contextmanager
def record_filtering() -> Iterator[FilterReport]:
    """Record what `TileOptions.filter_tolerance` drops from each call. Without it, calls have no extra cost.

    Calls of all threads are recorded. A forward that checkpointing runs again counts as another call.

    >>> import tilewise as tw
    >>> from torch import randn
    >>> hidden, classifier = randn(20, 8, requires_grad=True), randn(500, 8)
    >>> with tw.record_filtering() as report:
    ...     loss = tw.linear_cross_entropy(
    ...         hidden, classifier, torch.arange(20), options=tw.TileOptions(filter_tolerance=1e-2)
    ...     )
    >>> len(report), report.largest_dropped[0] <= 1e-2
    (1, True)
    """
    report = FilterReport()
    _reports.append(report)
    try:
        yield report
    finally:
        _reports[:] = [other for other in _reports if other is not report]
