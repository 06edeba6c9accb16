"""The input of the head, marked so that the head's last linear layer is not computed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from tilewise.integrations.transformers.lazy_logits import LazyLogits, LossSettings, Term

LINEAR = torch._C._nn.linear  # F.linear, unless another package has replaced it


class HeadInput(Tensor):
    """Hidden states inside of the head. ``F.linear`` to the number of classes returns `LazyLogits`.

    All other operations are computed, so a head may also contain dropout, a norm or a low-rank layer (LoRA).
    """

    plain: Tensor
    classes: int
    settings: LossSettings

    @staticmethod
    def mark(hidden: Tensor, classes: int, settings: LossSettings) -> HeadInput:
        """The same tensor as a `HeadInput`."""
        marked = hidden.as_subclass(HeadInput)
        marked.plain, marked.classes, marked.settings = hidden, classes, settings
        return marked

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Skip ``F.linear`` to the classes. Compute all other functions and mark their results."""
        kwargs = kwargs or {}
        marked = [item for item in pytree.tree_leaves((args, kwargs)) if isinstance(item, HeadInput)]
        first = marked[0]
        plain_args, plain_kwargs = pytree.tree_map(_unmarked, (tuple(args), kwargs))
        if func is LINEAR:
            hidden, weight, bias = _linear_arguments(*plain_args, **plain_kwargs)
            if weight.shape[0] == first.classes:
                return LazyLogits((Term(hidden, weight, weight.shape),), bias, None, first.settings)
        result = func(*plain_args, **plain_kwargs)
        if isinstance(result, Tensor) and not isinstance(result, HeadInput):
            return cls.mark(result, first.classes, first.settings)
        return result


def _unmarked(value: Any) -> Any:
    return value.plain if isinstance(value, HeadInput) else value


def _linear_arguments(
    input: Tensor, weight: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    return input, weight, bias
