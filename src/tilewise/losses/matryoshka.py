"""A loss of embeddings that may be cut: the loss of the first features, for several widths."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from tilewise import _check
from tilewise.errors import ConfigError, DtypeError, RangeError, ShapeError
from tilewise.options import check_flag


class Matryoshka(nn.Module):
    """Sum of a loss over the first features of all its inputs, for several widths (Matryoshka representation learning).

    Equals, with ``cut(x) = normalize(x[..., :width])`` for every input that has features::

        sum(weight * loss(cut(image), cut(text), scale) for width, weight in zip(widths, weights))

    Args:
        loss: any function or Module, such as `clip_loss` or a drop-in. If it is a Module, its parameters are trained.
        widths: the numbers of features.
        weights: a number for each width; None for 1 each.
        normalize: bring the cut features to length 1, which most losses need. False for a loss that normalizes its
            inputs itself, and for a classifier such as `linear_cross_entropy`.

    The call takes the arguments of the loss. Cut are all floating tensors of two or more dimensions whose last one is
    that of the first such tensor. Others are passed as they are.

    >>> import torch
    >>> import tilewise as tw
    >>> loss = Matryoshka(tw.clip_loss, widths=(4, 2), weights=(1.0, 0.5))
    >>> round(loss(torch.eye(2, 4), torch.eye(2, 4), 1.0).item(), 4)
    0.4699
    """

    def __init__(
        self,
        loss: Callable[..., Tensor],
        widths: Sequence[int],
        weights: Sequence[float] | None = None,
        *,
        normalize: bool = True,
    ) -> None:
        super().__init__()
        check_flag("normalize", normalize)
        if not callable(loss):
            raise DtypeError(f"loss is a function or a Module, got {type(loss).__name__}. Pass tw.clip_loss, say")
        for name, values in (("widths", widths), ("weights", weights)):
            if values is not None or name == "widths":
                _check_sequence(name, values)
        self.widths = tuple(_check.check_index("widths", width, "Pass numbers of features") for width in widths)
        given = [1.0] * len(self.widths) if weights is None else weights
        self.weights = tuple(_check.check_number("weights", weight) for weight in given)
        if len(self.weights) != len(self.widths):
            raise ConfigError(
                f"weights has one number for each of {len(self.widths)} widths, got {len(self.weights)}. "
                "Pass None for 1 each"
            )
        if min(self.widths) < 1:
            raise RangeError(f"widths are at least 1, got {min(self.widths)}. Pass numbers of features")
        self.loss, self.normalize = loss, normalize

    def forward(self, *args: Any, **more: Any) -> Tensor:
        """The weighted sum of the losses; the arguments are those of the loss."""
        features = next((x for x in (*args, *more.values()) if _has_features(x)), None)
        if features is None or features.shape[-1] < max(self.widths):
            shape = None if features is None else tuple(features.shape)
            raise ShapeError(
                f"the loss needs features that are at least {max(self.widths)} wide, the largest width, got {shape}. "
                "Pass smaller widths"
            )
        total: Tensor | float = 0.0
        for width, weight in zip(self.widths, self.weights, strict=True):
            cut = [self._cut(x, features, width) for x in args]
            named = {name: self._cut(x, features, width) for name, x in more.items()}
            total = total + weight * self.loss(*cut, **named)
        assert isinstance(total, Tensor)
        return total

    def _cut(self, x: Any, features: Tensor, width: int) -> Any:
        if not _has_features(x) or x.shape[-1] != features.shape[-1]:
            return x
        return F.normalize(x[..., :width], dim=-1) if self.normalize else x[..., :width]


def _has_features(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dim() >= 2 and x.is_floating_point()


def _check_sequence(name: str, values: Any) -> None:
    if not isinstance(values, Iterable) or isinstance(values, str | bytes | Tensor | dict) or not list(values):
        raise DtypeError(f"{name} is a sequence of numbers, at least one, got {values!r:.60}. Pass a tuple of numbers")
