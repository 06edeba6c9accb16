"""The error for a loss or gradient that is not finite, and its likely cause."""

from __future__ import annotations

import math

from tilewise.errors import TilewiseError
from tilewise.train.models import TwoTowers


class DivergedError(TilewiseError, ArithmeticError):
    """The loss or a gradient is not a finite number."""


def likely_cause(model: TwoTowers, loss: float, lr: float, precision: str) -> str:
    """Return the likely cause in words, judged by the weights and the loss.

    Args:
        model: the current model.
        loss: loss of the step.
        lr: learning rate of the step.
        precision: precision of the encoders.
    """
    bad = [name for name, p in model.named_parameters() if not p.detach().isfinite().all()]
    scale = float(model.scale().detach())
    if bad:
        return f"the weight {bad[0]} is no longer finite: the last steps were too large (lr {lr:.2g})"
    if precision == "fp16":
        return "an encoder overflows in fp16; try loop.precision='bf16'"
    if not math.isfinite(loss):
        return f"an encoder gives features that are not finite (logit scale {scale:.3g}, lr {lr:.2g})"
    return f"a gradient overflows although the loss is finite (logit scale {scale:.3g}, lr {lr:.2g})"
