"""PyTorch Metric Learning with our margin losses, `NTXentLoss` and `SupConLoss`; everything else is the peer's.

Its tests mix settings in one function. Where ours refuses a setting, the peer's own loss takes its place, so that the
other settings of that test are tested.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

sys.path.insert(0, "src")

from pytorch_metric_learning import losses  # type: ignore[import-not-found]

from tilewise.errors import ConfigError
from tilewise.integrations import pytorch_metric_learning as ours


def ours_or(own: Callable[..., Any], theirs: Callable[..., Any]) -> Callable[..., Any]:
    """A class of ours that gives way to the peer's for refused settings."""

    def make(*arguments: Any, **settings: Any) -> Any:
        try:
            return own(*arguments, **settings)
        except ConfigError:
            return theirs(*arguments, **settings)

    return make


losses.ArcFaceLoss, losses.CosFaceLoss = ours.ArcFaceLoss, ours.CosFaceLoss
losses.NTXentLoss = ours_or(ours.NTXentLoss, losses.NTXentLoss)
losses.SupConLoss = ours_or(ours.SupConLoss, losses.SupConLoss)
