"""Logits that are not built: what can be done with them, and their loss.

Axes: n tokens, d features, v classes (the vocabulary).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import EllipsisType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewise import _check
from tilewise.errors import ConfigError, ShapeError
from tilewise.losses.cross_entropy import linear_cross_entropy
from tilewise.losses.token_stats import TokenStats, linear_token_stats
from tilewise.options import TileOptions

Scale = float | Tensor


class LossSettings(NamedTuple):
    """What `linear_cross_entropy` is told beside the tensors."""

    z_loss: float
    group: torch.distributed.ProcessGroup | None
    options: TileOptions
    label_smoothing: float = 0.0
    seen: list[TokenStats] | None = None  # where the statistics of tokens are put, if somebody wants them


class Term(NamedTuple):
    """scale * hidden @ weight.T, not computed: (..., d), (v, d)."""

    hidden: Tensor
    weight: Tensor
    size: torch.Size  # of the weight when the head ran; whoever shards it may have taken it away since
    scale: Scale = 1.0


class UnbuiltLogits:
    """Logits as a recipe: ``x = sum of terms + bias``, or ``cap * tanh(x)`` once there is a cap.

    It can be scaled (each class too), capped, added to, converted, reshaped and sliced along the tokens, and
    ``F.cross_entropy`` of it is `tilewise.linear_cross_entropy`. Anything else is refused.
    """

    def __init__(
        self,
        terms: tuple[Term, ...],
        bias: Tensor | None,
        cap: float | None,
        settings: LossSettings,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.terms, self.bias, self.cap, self.settings = terms, bias, cap, settings
        self.dtype = dtype or _check.autocast(terms[0].hidden).dtype

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Functions and operators that have a method of the same meaning here."""
        name = TORCH_NAMES.get(getattr(func, "__name__", ""))
        if func is F.cross_entropy:
            return _cross_entropy(*args, **(kwargs or {}))
        if name is None or kwargs:
            raise _refusal(getattr(func, "__name__", str(func)))
        first, *rest = args
        if not isinstance(first, cls):  # a tensor at the left; both operations commute
            if name not in ("__add__", "__mul__"):
                raise _refusal(func.__name__)
            first, rest = rest[0], [first]
        result = getattr(first, name)(*rest)
        if result is NotImplemented:
            raise _refusal(func.__name__)
        return result

    @property
    def shape(self) -> torch.Size:
        """(..., v)."""
        return torch.Size([*self.terms[0].hidden.shape[:-1], self.terms[0].size[0]])

    @property
    def device(self) -> torch.device:
        """Where they would be."""
        return self.terms[0].hidden.device

    def size(self, dim: int | None = None) -> torch.Size | int:
        """As of a tensor."""
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        """As of a tensor."""
        return len(self.shape)

    def __mul__(self, factor: Any) -> UnbuiltLogits:
        self._check_there()
        if self.cap is None and self._is_for_each_class(factor):
            return self._times_each_class(factor.reshape(-1))
        if not _is_number(factor) or (self.cap is not None and isinstance(factor, Tensor)):
            raise _refusal("a product with something that is neither a number nor a factor for each class")
        if self.cap is not None:
            return self._with(cap=self.cap * factor)
        terms = tuple(term._replace(scale=term.scale * factor) for term in self.terms)
        return self._with(terms=terms, bias=None if self.bias is None else self.bias * factor)

    __rmul__ = __mul__

    def __truediv__(self, divisor: Any) -> UnbuiltLogits:
        if not _is_number(divisor):
            raise _refusal("a division by something that is not a number")
        return self * (1.0 / divisor)

    def __add__(self, other: Any) -> UnbuiltLogits:
        self._check_there()
        if self.cap is not None:
            raise _refusal("a sum behind the cap")
        if isinstance(other, UnbuiltLogits) and other.cap is None and other.shape == self.shape:
            biases = [bias for bias in (self.bias, other.bias) if bias is not None]
            return self._with(terms=(*self.terms, *other.terms), bias=sum(biases) if biases else None)
        if self._is_for_each_class(other):
            bias_v = other.reshape(-1)
            return self._with(bias=bias_v if self.bias is None else self.bias + bias_v)
        raise _refusal("a sum with something that is not a bias for each class or another linear layer")

    __radd__ = __add__

    def __sub__(self, other: Any) -> UnbuiltLogits:
        return self + -1.0 * other

    def tanh(self) -> UnbuiltLogits:
        """The first half of a soft cap; the second is a product."""
        if self.cap is not None:
            raise _refusal("tanh, twice")
        return self._with(cap=1.0)

    def float(self) -> UnbuiltLogits:
        """The loss accumulates in float32 anyway."""
        return self._with(dtype=torch.float32)

    def to(self, *args: Any, **kwargs: Any) -> UnbuiltLogits:
        """Another type; not another device."""
        dtype = self.dtype
        for wanted in (*args, *kwargs.values()):
            if isinstance(wanted, torch.dtype):
                dtype = wanted
            elif isinstance(wanted, (str, torch.device, int)) and not isinstance(wanted, bool):
                there, here = torch.device(wanted), self.device
                if (there.type, there.index or 0) != (here.type, here.index or 0):
                    raise _refusal(f"a move from {here} to {there}")
        return self._with(dtype=dtype)

    def contiguous(self) -> UnbuiltLogits:
        """As they are."""
        return self

    def view(self, *shape: Any) -> UnbuiltLogits:
        """Other dimensions of tokens; the last dimension stays the classes."""
        sizes = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape
        classes = self.shape[-1]
        if self.settings.group is None and sizes[-1] not in (classes, -1):
            raise ShapeError(
                f"logits of {classes} classes are reshaped to {sizes}. Is config.vocab_size that of the head? "
                "After resizing the embeddings, it has to be"
            )
        return self._on_hidden(lambda hidden: hidden.reshape(*sizes[:-1], hidden.shape[-1]))

    reshape = view

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> UnbuiltLogits:
        """The dimensions of the tokens as one."""
        if end_dim % self.dim() == self.dim() - 1:
            raise _refusal("flatten over the classes")
        return self._on_hidden(lambda hidden: hidden.flatten(start_dim, end_dim))

    def __getitem__(self, key: Any) -> UnbuiltLogits:
        if not _only_tokens(key, self.dim()):
            raise _refusal("indexing along the classes")
        return self._on_hidden(lambda hidden: hidden[key])

    def __setitem__(self, key: Any, value: Any) -> None:
        raise _refusal("an assignment")

    def __getattr__(self, name: str) -> Any:
        raise _refusal(name)

    def __repr__(self) -> str:
        return f"UnbuiltLogits({tuple(self.shape)}, never built in training)"

    def _with(self, **changes: Any) -> UnbuiltLogits:
        kept = {name: getattr(self, name) for name in ("terms", "bias", "cap", "settings", "dtype")}
        return UnbuiltLogits(**(kept | changes))

    def _is_for_each_class(self, value: Any) -> bool:
        classes = self.shape[-1]
        return isinstance(value, Tensor) and value.shape[-1:] == (classes,) and value.numel() == classes

    def _times_each_class(self, factor_v: Tensor) -> UnbuiltLogits:
        """``f_v * <h, w_v>`` is ``<h, f_v w_v>``: DoRA's magnitudes, at the cost of a copy of the weight."""
        terms = tuple(
            term._replace(weight=(term.weight * factor_v[:, None]).to(term.weight.dtype)) for term in self.terms
        )
        return self._with(terms=terms, bias=None if self.bias is None else self.bias * factor_v)

    def _on_hidden(self, change: Callable[[Tensor], Tensor]) -> UnbuiltLogits:
        return self._with(terms=tuple(term._replace(hidden=change(term.hidden)) for term in self.terms))

    def _check_there(self) -> None:
        """An error if the head's weight or bias is gone: to read freed memory would end the process."""
        gone = any(term.weight.shape != term.size or _is_freed(term.weight) for term in self.terms)
        if gone or (self.bias is not None and _is_freed(self.bias)):
            raise ConfigError(
                "the head's weight was taken away when the head had run, before the loss: it is sharded by itself. "
                "Keep the head in the outermost FSDP unit, or in one with reshard_after_forward=False, or out of ZeRO-3"
            )

    def layer(self) -> tuple[Tensor, Tensor, Scale]:
        """The terms as one linear layer: hidden states, weight and scale.

        Several terms, ``sum_k s_k h_k @ W_k.T``, are one whose features are all of theirs: ``[s_k h_k] @ [W_k].T``.
        That is exact also where their inputs differ, as under LoRA's dropout.
        """
        self._check_there()
        if len(self.terms) == 1:
            only = self.terms[0]
            return only.hidden, only.weight, only.scale
        hidden = torch.cat([_check.autocast(term.hidden * term.scale) for term in self.terms], dim=-1)
        return hidden, torch.cat([_check.autocast(term.weight) for term in self.terms], dim=-1), 1.0


def _cross_entropy(
    input: Any,
    target: Any,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: _check.Reduction = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """``F.cross_entropy`` of logits that are not built: (n, v) against (n,)."""
    if not isinstance(input, UnbuiltLogits) or input.dim() > 2 or size_average is not None or reduce is not None:
        raise _refusal("F.cross_entropy of other than (tokens, classes), or with size_average or reduce")
    if isinstance(target, Tensor) and target.shape != input.shape[:-1]:
        raise ShapeError(
            f"the model's loss has {input.shape[:-1].numel()} tokens and {target.numel()} labels. labels need the "
            "shape of input_ids, with -100 where a token does not count; the model shifts them itself"
        )
    hidden, classifier, scale = input.layer()
    bias, cap = input.bias, input.cap
    if cap is not None:  # cap * tanh(x) is the soft cap of cap * x
        scale, bias = scale * cap, None if bias is None else bias * cap
    settings = input.settings
    label_smoothing = label_smoothing or settings.label_smoothing
    shared: dict[str, Any] = {"linear_bias": bias, "ignore_index": ignore_index, "softcap": cap, "logit_scale": scale}
    shared |= {"group": settings.group, "options": settings.options}
    plain = weight is None and label_smoothing == 0.0
    if settings.seen is not None:
        with torch.set_grad_enabled(torch.is_grad_enabled() and plain):
            stats = linear_token_stats(hidden, classifier, target, want=SEEN, **shared)
        settings.seen.append(stats)
        if plain:
            return _from_statistics(stats, settings.z_loss, reduction)
    smoothing: dict[str, Any] = {"weight": weight, "label_smoothing": label_smoothing, "z_loss": settings.z_loss}
    return linear_cross_entropy(hidden, classifier, target, reduction=reduction, **smoothing, **shared)


SEEN = ("log_prob", "entropy", "correct", "logsumexp")


def _from_statistics(stats: TokenStats, z_loss: float, reduction: _check.Reduction) -> Tensor:
    """The same loss, from the pass that has the statistics: ``z_loss * logsumexp ** 2 - log_prob`` of each token."""
    assert stats.log_prob is not None
    assert stats.logsumexp is not None
    assert stats.valid is not None
    loss_n = -stats.log_prob
    if z_loss:
        loss_n = loss_n + z_loss * stats.logsumexp.square()
    if reduction == "none":
        return loss_n
    return loss_n.sum() if reduction == "sum" else loss_n.sum() / stats.valid.sum()


class UnbuiltLogitsError(ConfigError, AttributeError):
    """Something that needs the logits; an ``AttributeError`` too, for ``hasattr``."""


TORCH_NAMES = {  # functions and operators of torch, by the method that does the same here
    "tanh": "tanh",
    **dict.fromkeys(("mul", "multiply", "__mul__", "__rmul__"), "__mul__"),
    **dict.fromkeys(("div", "divide", "true_divide", "__truediv__"), "__truediv__"),
    **dict.fromkeys(("add", "__add__", "__radd__"), "__add__"),
    **dict.fromkeys(("sub", "subtract", "__sub__"), "__sub__"),
}


def _refusal(what: str) -> UnbuiltLogitsError:
    return UnbuiltLogitsError(
        f"the model uses {what} on its logits, which are not built in training. What works is a scale, a soft cap, a "
        "bias or a factor for each class, LoRA, a reshape or slice along the tokens, and cross_entropy. Use the model "
        "in evaluation mode, or undo use_linear_cross_entropy with handle.remove()"
    )


def _is_freed(tensor: Tensor) -> bool:
    return tensor.numel() > 0 and not tensor.untyped_storage().size()


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.dim() == 0)


def _only_tokens(key: Any, dims: int) -> bool:
    """Whether an index leaves the last of the dimensions alone."""
    keys = key if isinstance(key, tuple) else (key,)
    taken = [item.dim() if isinstance(item, Tensor) and item.dtype == torch.bool else 1 for item in keys]
    used = sum(n for n, item in zip(taken, keys, strict=True) if item is not None and item is not ...)
    if used < dims and not isinstance(keys[-1], EllipsisType) and ... in [k for k in keys if not isinstance(k, Tensor)]:
        return keys[-1] == slice(None)  # what follows the dots reaches the end
    return used < dims or (isinstance(keys[-1], slice) and keys[-1] == slice(None))


def without_logits(output: Any) -> Any:
    """The output of a model with None for logits."""
    if isinstance(output, UnbuiltLogits):
        return None
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        named = {field.name: getattr(output, field.name) for field in dataclasses.fields(output)}
        unbuilt = {name: None for name, value in named.items() if isinstance(value, UnbuiltLogits)}
        return dataclasses.replace(output, **unbuilt) if unbuilt else output
    if type(output) is dict:
        return {name: without_logits(value) for name, value in output.items()}
    if type(output) is tuple:
        return tuple(None if isinstance(value, UnbuiltLogits) else value for value in output)
    return output
