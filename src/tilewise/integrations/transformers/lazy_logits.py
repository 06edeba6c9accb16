"""Logits that are represented by their factors: the operations on them, and their cross-entropy.

Axes: n tokens, d features, v classes (the vocabulary).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from types import EllipsisType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tilewise import _check
from tilewise.errors import ConfigError, ShapeError
from tilewise.integrations.transformers.no_logits import NO_LOGITS, LazyLogitsError
from tilewise.losses.cross_entropy import linear_cross_entropy
from tilewise.losses.token_stats import TokenStats, linear_token_stats
from tilewise.options import TileOptions

Scale = float | Tensor


class LossSettings(NamedTuple):
    """Arguments of `linear_cross_entropy` other than the tensors."""

    z_loss: float
    group: torch.distributed.ProcessGroup | None
    options: TileOptions
    label_smoothing: float = 0.0
    collected: list[TokenStats] | None = None  # the token statistics of each loss are appended here
    want: tuple[str, ...] = ("log_prob", "entropy", "correct", "logsumexp")  # which of them
    temperature: float = 1.0  # of these statistics and of their loss
    no_tokens_is_zero: bool = False  # the mean loss of no tokens is 0, as in TRL's fused head, and not NaN
    same_tokens: bool = False  # the weight is a DTensor, and all ranks of its mesh have the same tokens


class Term(NamedTuple):
    """One linear layer, ``scale * hidden @ weight.T``, that is not computed: (..., d), (v, d)."""

    hidden: Tensor
    weight: Tensor
    size: torch.Size  # of the weight when the head ran; a sharded weight may have been freed since
    scale: Scale = 1.0
    read: Callable[[], Tensor] | None = None  # the head's parameter as it is now


class LazyLogits:
    """Logits that are never computed: ``x = sum of terms + bias``, or ``cap * tanh(x)`` with a cap.

    They can be scaled (also per class), capped, added to, converted, and reshaped or sliced along the tokens.
    ``F.cross_entropy`` of them calls `tilewise.linear_cross_entropy`. Any other operation raises `LazyLogitsError`.
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
        self.read_bias: Callable[[], Tensor] | None = None  # as in `Term`; only before an operation changes the bias

    def belong_to(self, head: nn.Module) -> None:
        """Name the parameters of the head among the weights. FSDP2 frees them, and what remains are their shards."""
        readers = {
            id(value): functools.partial(getattr, module, name)
            for module in head.modules()
            for name, value in module._parameters.items()
        }
        self.terms = tuple(term._replace(read=readers.get(id(term.weight))) for term in self.terms)
        self.read_bias = readers.get(id(self.bias))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Map torch functions and operators to the methods of this class."""
        name = TORCH_NAMES.get(getattr(func, "__name__", ""))
        if func is F.cross_entropy:
            return _cross_entropy(*args, **(kwargs or {}))
        if name is None or kwargs:
            raise _refusal(getattr(func, "__name__", str(func)))
        first, *rest = args
        if not isinstance(first, cls):  # a tensor on the left side; both operations commute
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
        """Device of the hidden states."""
        return self.terms[0].hidden.device

    def size(self, dim: int | None = None) -> torch.Size | int:
        """As `torch.Tensor.size`."""
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        """As `torch.Tensor.dim`."""
        return len(self.shape)

    def __mul__(self, factor: Any) -> LazyLogits:
        self._check_weights()
        if self.cap is None and self._is_per_class(factor):
            return self._scale_classes(factor.reshape(-1))
        if not _is_number(factor) or (self.cap is not None and isinstance(factor, Tensor)):
            raise _refusal("a product with something other than a number or one factor per class")
        if self.cap is not None:
            return self._with(cap=self.cap * factor)
        terms = tuple(term._replace(scale=term.scale * factor) for term in self.terms)
        return self._with(terms=terms, bias=None if self.bias is None else self.bias * factor)

    __rmul__ = __mul__

    def __truediv__(self, divisor: Any) -> LazyLogits:
        if not _is_number(divisor):
            raise _refusal("a division by something other than a number")
        return self * (1.0 / divisor)

    def __add__(self, other: Any) -> LazyLogits:
        self._check_weights()
        if self.cap is not None:
            raise _refusal("a sum after the soft cap")
        if isinstance(other, LazyLogits) and other.cap is None and other.shape == self.shape:
            biases = [bias for bias in (self.bias, other.bias) if bias is not None]
            return self._with(terms=(*self.terms, *other.terms), bias=sum(biases) if biases else None)
        if self._is_per_class(other):
            bias_v = other.reshape(-1)
            return self._with(bias=bias_v if self.bias is None else self.bias + bias_v)
        raise _refusal("a sum with something other than one bias per class or another linear layer")

    __radd__ = __add__

    def __sub__(self, other: Any) -> LazyLogits:
        return self + -1.0 * other

    def tanh(self) -> LazyLogits:
        """First step of a soft cap. The second step is a product."""
        if self.cap is not None:
            raise _refusal("a second tanh")
        return self._with(cap=1.0)

    def float(self) -> LazyLogits:
        """Set the dtype. The loss always accumulates in float32."""
        return self._with(dtype=torch.float32)

    def to(self, *args: Any, **kwargs: Any) -> LazyLogits:
        """Change the dtype. A change of the device is refused."""
        dtype = self.dtype
        for wanted in (*args, *kwargs.values()):
            if isinstance(wanted, torch.dtype):
                dtype = wanted
            elif isinstance(wanted, (str, torch.device, int)) and not isinstance(wanted, bool):
                target, current = torch.device(wanted), self.device
                if (target.type, target.index or 0) != (current.type, current.index or 0):
                    raise _refusal(f"a move from {current} to {target}")
        return self._with(dtype=dtype)

    def contiguous(self) -> LazyLogits:
        """Returns itself."""
        return self

    def view(self, *shape: Any) -> LazyLogits:
        """Reshape the dimensions of the tokens. The last dimension stays the classes."""
        sizes = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape
        classes = self.shape[-1]
        if self.settings.group is None and sizes[-1] not in (classes, -1):
            raise ShapeError(
                f"logits of {classes} classes are reshaped to {sizes}. config.vocab_size must be the number of classes "
                "of the head, also after the embeddings are resized"
            )
        return self._on_hidden(lambda hidden: hidden.reshape(*sizes[:-1], hidden.shape[-1]))

    reshape = view

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> LazyLogits:
        """Flatten dimensions of the tokens."""
        if end_dim % self.dim() == self.dim() - 1:
            raise _refusal("flatten over the classes")
        return self._on_hidden(lambda hidden: hidden.flatten(start_dim, end_dim))

    def __getitem__(self, key: Any) -> LazyLogits:
        if not _only_tokens(key, self.dim()):
            raise _refusal("indexing along the classes")
        return self._on_hidden(lambda hidden: hidden[key])

    def __setitem__(self, key: Any, value: Any) -> None:
        raise _refusal("an assignment")

    def __getattr__(self, name: str) -> Any:
        raise _refusal(name)

    def _refuse(self, *args: Any) -> Any:
        raise _refusal("this operator")

    __len__ = __iter__ = __neg__ = __abs__ = __pow__ = __rpow__ = __rsub__ = __rtruediv__ = _refuse
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __lt__ = __le__ = __gt__ = __ge__ = __matmul__ = _refuse

    def __repr__(self) -> str:
        return f"LazyLogits({tuple(self.shape)}, not computed in training)"

    def _with(self, **changes: Any) -> LazyLogits:
        kept = {name: getattr(self, name) for name in ("terms", "bias", "cap", "settings", "dtype")}
        return LazyLogits(**(kept | changes))

    def _is_per_class(self, value: Any) -> bool:
        classes = self.shape[-1]
        return isinstance(value, Tensor) and value.shape[-1:] == (classes,) and value.numel() == classes

    def _scale_classes(self, factor_v: Tensor) -> LazyLogits:
        """``f_v * <h, w_v> = <h, f_v w_v>``, as in DoRA. Costs a copy of the weight."""
        terms = tuple(
            term._replace(weight=(term.weight * factor_v[:, None]).to(term.weight.dtype)) for term in self.terms
        )
        return self._with(terms=terms, bias=None if self.bias is None else self.bias * factor_v)

    def _on_hidden(self, change: Callable[[Tensor], Tensor]) -> LazyLogits:
        return self._with(terms=tuple(term._replace(hidden=change(term.hidden)) for term in self.terms))

    def _check_weights(self) -> None:
        """Raise if the head's weight or bias has been freed: reading freed memory would crash the process.

        If the head is a unit of its own under FSDP2, its sharded parameters (DTensor) replace the freed ones.
        DeepSpeed's ZeRO-3 gathers a parameter again when a module reads it, here and in backward.
        """
        self.terms = tuple(term._replace(weight=_present(term.weight, term.size, term.read)) for term in self.terms)
        if self.bias is not None:
            self.bias = _present(self.bias, self.shape[-1:], self.read_bias)
        freed = any(_is_freed(term.weight, term.size) for term in self.terms)
        if freed or (self.bias is not None and _is_freed(self.bias, self.shape[-1:])):
            raise ConfigError(
                "the weight of the head was freed after the head's forward and before the loss, because the head is "
                "sharded separately. Use FSDP2 or ZeRO-3, or keep the head in the outermost FSDP unit"
            )

    def layer(self) -> tuple[Tensor, Tensor, Scale]:
        """All terms as one linear layer: hidden states, weight and scale.

        ``sum_k s_k h_k @ W_k.T`` equals ``[s_k h_k] @ [W_k].T`` with concatenated features. This is also exact for
        different inputs, as with LoRA's dropout.
        """
        self._check_weights()
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
    """``F.cross_entropy`` of lazy logits: (n, v) against (n,)."""
    if not isinstance(input, LazyLogits) or input.dim() > 2 or size_average is not None or reduce is not None:
        raise _refusal("F.cross_entropy of other than (tokens, classes), or with size_average or reduce")
    if isinstance(target, Tensor) and target.shape != input.shape[:-1]:
        raise ShapeError(
            f"the model's loss has {input.shape[:-1].numel()} tokens and {target.numel()} labels. labels need the "
            "shape of input_ids, with -100 for tokens to ignore. The model shifts the labels"
        )
    hidden, classifier, scale = input.layer()
    bias, cap, settings = input.bias, input.cap, input.settings
    if settings.same_tokens:
        hidden = _replicated(hidden, classifier)
    if cap is not None:  # cap * tanh(x) is the soft cap of the scores cap * x
        scale, bias = scale * cap, None if bias is None else bias * cap
    label_smoothing = label_smoothing or settings.label_smoothing
    shared: dict[str, Any] = {"linear_bias": bias, "ignore_index": ignore_index, "softcap": cap, "logit_scale": scale}
    shared |= {"group": settings.group, "options": settings.options}
    plain = weight is None and label_smoothing == 0.0
    if settings.collected is not None:
        with torch.set_grad_enabled(torch.is_grad_enabled() and plain):
            stats = linear_token_stats(
                hidden, classifier, target, want=settings.want, temperature=settings.temperature, **shared
            )
        if settings.same_tokens:
            stats = TokenStats(**{name: _to_local(value) for name, value in vars(stats).items()})
        settings.collected.append(stats)
        if plain:
            return _from_statistics(stats, settings, reduction)
    smoothing: dict[str, Any] = {"weight": weight, "label_smoothing": label_smoothing, "z_loss": settings.z_loss}
    loss = linear_cross_entropy(hidden, classifier, target, reduction=reduction, **smoothing, **shared)
    return _to_local(loss) if settings.same_tokens else loss


def _replicated(hidden: Tensor, weight: Any) -> Tensor:
    """Hidden states that all ranks of the weight's mesh have, as a DTensor."""
    from torch.distributed.tensor import DTensor, Replicate

    return DTensor.from_local(hidden, weight.device_mesh, [Replicate()] * weight.device_mesh.ndim, run_check=False)


def _to_local(value: Any) -> Any:
    return value.to_local() if hasattr(value, "device_mesh") else value


def _from_statistics(stats: TokenStats, settings: LossSettings, reduction: _check.Reduction) -> Tensor:
    """The loss from the token statistics: ``z_loss * logsumexp ** 2 - log_prob`` of each token."""
    assert stats.log_prob is not None
    assert stats.valid is not None
    loss_n = -stats.log_prob
    if settings.z_loss:
        assert stats.logsumexp is not None
        loss_n = loss_n + settings.z_loss * stats.logsumexp.square()
    if reduction == "none":
        return loss_n
    count = stats.valid.sum()
    return (
        loss_n.sum()
        if reduction == "sum"
        else loss_n.sum() / (count.clamp(min=1) if settings.no_tokens_is_zero else count)
    )


TORCH_NAMES = {  # torch functions and operators, and the method of LazyLogits that implements them
    "tanh": "tanh",
    **dict.fromkeys(("mul", "multiply", "__mul__", "__rmul__"), "__mul__"),
    **dict.fromkeys(("div", "divide", "true_divide", "__truediv__"), "__truediv__"),
    **dict.fromkeys(("add", "__add__", "__radd__"), "__add__"),
    **dict.fromkeys(("sub", "subtract", "__sub__"), "__sub__"),
}


def _refusal(what: str) -> LazyLogitsError:
    return LazyLogitsError(
        f"the model uses {what} on its logits, which are not computed in training. Supported are a scale, a soft cap, "
        "a bias or a factor per class, LoRA, a reshape or slice along the tokens, and cross_entropy. Use the model in "
        "evaluation mode, or undo use_linear_cross_entropy with handle.remove()"
    )


def _is_freed(tensor: Tensor, size: torch.Size) -> bool:
    """Whether a parameter of that size has no memory: FSDP frees the storage, ZeRO-3 leaves an empty tensor."""
    if tensor.shape != size:
        return True
    return not hasattr(tensor, "device_mesh") and tensor.numel() > 0 and not tensor.untyped_storage().size()


def _present(tensor: Tensor, size: torch.Size, read: Callable[[], Tensor] | None) -> Tensor:
    """The tensor, or if it is freed the head's parameter as it is now."""
    return tensor if read is None or not _is_freed(tensor, size) else read()


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.dim() == 0)


def _only_tokens(key: Any, dims: int) -> bool:
    """Whether an index does not select along the last dimension."""
    keys = key if isinstance(key, tuple) else (key,)
    taken = [item.dim() if isinstance(item, Tensor) and item.dtype == torch.bool else 1 for item in keys]
    used = sum(n for n, item in zip(taken, keys, strict=True) if item is not None and item is not ...)
    if used < dims and not isinstance(keys[-1], EllipsisType) and ... in [k for k in keys if not isinstance(k, Tensor)]:
        return keys[-1] == slice(None)  # the key after the ellipsis is that of the last dimension
    return used < dims or (isinstance(keys[-1], slice) and keys[-1] == slice(None))


def replace_logits(output: Any) -> Any:
    """Replace the lazy logits in the output of a model by `NO_LOGITS`, which keeps no tensors alive."""
    if isinstance(output, LazyLogits):
        return NO_LOGITS
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        named = {field.name: getattr(output, field.name) for field in dataclasses.fields(output)}
        lazy = {name: NO_LOGITS for name, value in named.items() if isinstance(value, LazyLogits)}
        return dataclasses.replace(output, **lazy) if lazy else output
    if type(output) is dict:
        return {name: replace_logits(value) for name, value in output.items()}
    if type(output) is tuple:
        return tuple(NO_LOGITS if isinstance(value, LazyLogits) else value for value in output)
    return output
