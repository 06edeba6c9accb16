"""A causal-LM loss that never builds the logits, for any model of `transformers` with an output embedding.

    from tilewise.integrations.transformers import use_linear_cross_entropy
    handle = use_linear_cross_entropy(model)      # this instance only; handle.remove() undoes it

In training the head returns `UnbuiltLogits`: what it would have multiplied, not the product. The model's own forward
then scales and caps it and its own loss function asks for ``F.cross_entropy`` of it, and that is the moment at which
`tilewise.linear_cross_entropy` is called. So the shift, ``num_items_in_batch``, auxiliary losses, scales and caps are
the model's and not a copy of them, and whatever else a model does to its logits is an error, never a wrong loss.

Axes: n tokens, d features, v classes (the vocabulary).
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import EllipsisType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from tilewise import _check
from tilewise.errors import ConfigError, ShapeError, TilewiseError
from tilewise.losses.cross_entropy import linear_cross_entropy
from tilewise.options import TileOptions

CHECK_TOKENS = (2, 8)
TOLERANCE = {torch.float16: 3e-2, torch.bfloat16: 3e-2}  # what rounding the original's logits may change
EXACT_TOLERANCE = 1e-4
Scale = float | Tensor


def use_linear_cross_entropy(
    model: nn.Module,
    *,
    z_loss: float = 0.0,
    verify: bool = True,
    group: torch.distributed.ProcessGroup | None = None,
    options: TileOptions | None = None,
) -> LossHandle:
    """Train a language model without its logits.

    From now on, ``model(input_ids, labels=labels)`` in training mode has the same loss and gradients as before,
    ``F.cross_entropy(head(hidden), labels)`` through the model's own forward and loss function, with ``logits=None``.
    In evaluation mode, without labels, and in ``generate`` nothing changes.

    Args:
        model: has ``get_output_embeddings()`` and takes ``labels``; tied or untied, with or without bias, capped,
            scaled, with LoRA on the head. Only this instance is changed. Wrap it (DDP, ``torch.compile``) afterwards.
        z_loss: adds ``z_loss * logsumexp(logits) ** 2`` for each token that counts.
        verify: run the model on 16 random tokens, before and after, and refuse it if the two losses differ.
        group: the head is spread over these ranks, slices of the vocabulary in rank order; nothing is verified then.
        options: how, never what.

    Returns:
        A handle: ``remove()`` undoes everything, as does leaving it as a context manager.

    Memory: no tensor of tokens x vocabulary, in forward or in backward. LoRA on the head costs a copy of its weight.
    """
    _check.check_number("z_loss", z_loss)
    settings = LossSettings(z_loss, group, _check.check_options(options))
    _check.group_name(group)
    _check_model(model)
    handle = LossHandle(model, settings)
    if verify and group is None:
        handle.verify()
    handle.install()
    return handle


class LossSettings(NamedTuple):
    """What `linear_cross_entropy` is told beside the tensors."""

    z_loss: float
    group: torch.distributed.ProcessGroup | None
    options: TileOptions


class LossHandle:
    """Stands in for ``forward`` of one model, and undoes it: `use_linear_cross_entropy` makes it.

    It is an object and not a closure, so that a copy of the model (``copy.deepcopy``) gets its own.
    """

    def __init__(self, model: nn.Module, settings: LossSettings) -> None:
        self.model, self.settings = model, settings
        self.previous = model.__dict__.get("forward")  # somebody else's stand-in, if there is one
        self.active = True
        self.head: nn.Module | None = None
        self.hooks: list[RemovableHandle] = []
        self.recording: LossSettings | None = None  # only while the model runs in training
        self.calls = 0  # of the head, in this run

    @property
    def __signature__(self) -> inspect.Signature:
        """The model's own: `Trainer` reads from it which columns and keywords the model takes."""
        return inspect.signature(self._original())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward; in training with labels, with the head's product left to the loss."""
        original = self._original()
        if not (self.active and self.model.training and self._has_labels(args, kwargs)):
            return original(*args, **kwargs)
        return self._without_product(original, args, kwargs, self.settings)

    def install(self) -> None:
        """Become the model's forward."""
        self._join_head()
        self.model.forward = self

    def remove(self) -> None:
        """Give the model its own forward back. A second call does nothing."""
        self._leave_head()
        self.active = False  # for the case that somebody has wrapped us: then we stay, and only pass on
        if self.model.__dict__.get("forward") is not self:
            return
        if self.previous is None:
            del self.model.forward
        else:
            self.model.forward = self.previous

    def __enter__(self) -> LossHandle:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()

    def verify(self) -> None:
        """The loss of a few random tokens as the model computes it and as we do; an error if they differ."""
        inputs, original = _random_tokens(self.model), self._original()
        plain = self.settings._replace(z_loss=0.0)
        name = type(self.model).__name__
        with torch.no_grad(), _quiet(self.model):
            try:
                want = _loss_of(original(**inputs))
            except Exception as error:
                raise ConfigError(
                    f"{name} could not be checked: its own forward fails on input_ids and labels of shape "
                    f"{CHECK_TOKENS} ({type(error).__name__}: {error}). If it needs other inputs, pass verify=False"
                ) from error
            try:
                got = _loss_of(self._without_product(original, (), inputs, plain))
            finally:
                self._leave_head()
        tolerance = TOLERANCE.get(next(self.model.parameters()).dtype, EXACT_TOLERANCE)
        if not abs(got - want) <= tolerance * max(1.0, abs(want)):
            raise ConfigError(
                f"{name} computes a loss of {want:.6g} on random tokens, and without its logits it would be {got:.6g}. "
                "Its loss is not the cross-entropy of its head's output; it is left unchanged"
            )

    def _original(self) -> Callable[..., Any]:
        if self.previous is not None:
            previous: Callable[..., Any] = self.previous
            return previous
        # Not a bound method: torch.compile rebuilds one as model.forward, which is us.
        return functools.partial(type(self.model).forward, self.model)

    def _has_labels(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if args and "labels" not in kwargs:
            kwargs = dict(zip(self.__signature__.parameters, args, strict=False))
        return kwargs.get("labels") is not None

    def _without_product(
        self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], settings: LossSettings
    ) -> Any:
        """Run the forward with a head that returns `UnbuiltLogits`; what comes back has None for them."""
        head = _head(self.model)
        if head is not self.head:  # replaced since: resized, adapted
            self._join_head()
        self.recording, self.calls = settings, 0
        try:
            output = forward(*args, **kwargs)
        finally:
            self.recording = None
        if not self.calls:
            raise ConfigError(
                f"{type(self.model).__name__} did not call its output embedding ({type(head).__name__}), so the logits "
                "were built elsewhere. Call handle.remove()"
            )
        return _without_logits(output)

    def _before_head(self, head: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if self.recording is None:
            return None
        return (HeadInput.mark(inputs[0], _classes(head), self.recording), *inputs[1:])

    def _after_head(self, head: nn.Module, _: Any, output: Any) -> None:
        if self.recording is None:
            return
        self.calls += 1
        if not isinstance(output, UnbuiltLogits):
            raise ConfigError(
                f"the head is a {type(head).__name__}, which does not end in F.linear with {_classes(head)} classes, "
                "so its product cannot be left out. Use a linear head, or LoRA on one"
            )

    def _join_head(self) -> None:
        self._leave_head()
        self.head = head = _head(self.model)
        self.hooks = [
            head.register_forward_pre_hook(self._before_head),
            head.register_forward_hook(self._after_head, prepend=True),
        ]

    def _leave_head(self) -> None:
        for hook in self.hooks:
            hook.remove()
        self.head, self.hooks = None, []


class HeadInput(Tensor):
    """Hidden states on their way through the head: the linear layer that makes classes of them is not computed.

    Everything else is, so that a head may also drop out, normalize, or go through a low rank first (LoRA).
    """

    plain: Tensor
    classes: int
    settings: LossSettings

    @staticmethod
    def mark(hidden: Tensor, classes: int, settings: LossSettings) -> HeadInput:
        """The same tensor, marked."""
        marked = hidden.as_subclass(HeadInput)
        marked.plain, marked.classes, marked.settings = hidden, classes, settings
        return marked

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """``F.linear`` to the classes is left out; other results are computed and marked."""
        kwargs = kwargs or {}
        marked = [item for item in pytree.tree_leaves((args, kwargs)) if isinstance(item, HeadInput)]
        first = marked[0]
        plain_args, plain_kwargs = pytree.tree_map(_unmarked, (tuple(args), kwargs))
        if func is F.linear:
            hidden, weight, bias = _linear_arguments(*plain_args, **plain_kwargs)
            if weight.shape[0] == first.classes:
                return UnbuiltLogits((Term(hidden, weight, weight.shape),), bias, None, first.settings)
        result = func(*plain_args, **plain_kwargs)
        if isinstance(result, Tensor) and not isinstance(result, HeadInput):
            return cls.mark(result, first.classes, first.settings)
        return result


def _unmarked(value: Any) -> Any:
    return value.plain if isinstance(value, HeadInput) else value


class Term(NamedTuple):
    """scale * hidden @ weight.T, not computed: (..., d), (v, d)."""

    hidden: Tensor
    weight: Tensor
    size: torch.Size  # of the weight when the head ran; whoever shards it may have taken it away since
    scale: Scale = 1.0


class UnbuiltLogits:
    """Logits as a recipe: ``x = sum of terms + bias``, or ``cap * tanh(x)`` once there is a cap.

    It can be scaled, capped, added to, converted, reshaped and sliced along the tokens, and ``F.cross_entropy`` of it
    is `tilewise.linear_cross_entropy`. Anything else is refused.
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
        if not _is_number(factor) or (self.cap is not None and isinstance(factor, Tensor)):
            raise _refusal("a product with something that is not a number")
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
        if self.cap is not None:
            raise _refusal("a sum behind the cap")
        if isinstance(other, UnbuiltLogits) and other.cap is None and other.shape == self.shape:
            biases = [bias for bias in (self.bias, other.bias) if bias is not None]
            return self._with(terms=(*self.terms, *other.terms), bias=sum(biases) if biases else None)
        if isinstance(other, Tensor) and other.shape[-1:] == self.shape[-1:] and other.numel() == self.shape[-1]:
            bias_v = other.reshape(-1)
            return self._with(bias=bias_v if self.bias is None else self.bias + bias_v)
        raise _refusal("a sum with something that is not a bias for each class or another linear layer")

    __radd__ = __add__

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

    def _on_hidden(self, change: Callable[[Tensor], Tensor]) -> UnbuiltLogits:
        return self._with(terms=tuple(term._replace(hidden=change(term.hidden)) for term in self.terms))

    def layer(self) -> tuple[Tensor, Tensor, Scale]:
        """The terms as one linear layer: hidden states, weight and scale.

        Several terms, ``sum_k s_k h_k @ W_k.T``, are one whose features are all of theirs: ``[s_k h_k] @ [W_k].T``.
        That is exact also where their inputs differ, as under LoRA's dropout.
        """
        for term in self.terms:
            if term.weight.shape != term.size or (term.size.numel() and not term.weight.untyped_storage().size()):
                raise ConfigError(
                    "the head's weight was taken away when the head had run, before the loss: it is sharded by itself. "
                    "Keep the head in the outermost FSDP unit, or out of ZeRO-3"
                )
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
    hidden, classifier, scale = input.layer()
    bias, cap = input.bias, input.cap
    if cap is not None:  # cap * tanh(x) is the soft cap of cap * x
        scale, bias = scale * cap, None if bias is None else bias * cap
    return linear_cross_entropy(
        hidden,
        classifier,
        target,
        linear_bias=bias,
        weight=weight,
        reduction=reduction,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        softcap=cap,
        logit_scale=scale,
        z_loss=input.settings.z_loss,
        group=input.settings.group,
        options=input.settings.options,
    )


class UnbuiltLogitsError(ConfigError, AttributeError):
    """Something that needs the logits; an ``AttributeError`` too, for ``hasattr``."""


TORCH_NAMES = {  # functions and operators of torch, by the method that does the same here
    "tanh": "tanh",
    **dict.fromkeys(("mul", "multiply", "__mul__", "__rmul__"), "__mul__"),
    **dict.fromkeys(("div", "divide", "true_divide", "__truediv__"), "__truediv__"),
    **dict.fromkeys(("add", "__add__", "__radd__"), "__add__"),
}


def _refusal(what: str) -> UnbuiltLogitsError:
    return UnbuiltLogitsError(
        f"the model uses {what} on its logits, which are not built in training. What works is a scale, a soft cap, a "
        "bias, LoRA, a reshape or slice along the tokens, and cross_entropy. Use the model in evaluation mode, or undo "
        "use_linear_cross_entropy with handle.remove()"
    )


def _linear_arguments(
    input: Tensor, weight: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    return input, weight, bias


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


def _without_logits(output: Any) -> Any:
    """The output of a model with None for logits."""
    if isinstance(output, UnbuiltLogits):
        return None
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        named = {field.name: getattr(output, field.name) for field in dataclasses.fields(output)}
        unbuilt = {name: None for name, value in named.items() if isinstance(value, UnbuiltLogits)}
        return dataclasses.replace(output, **unbuilt) if unbuilt else output
    if type(output) is dict:
        return {name: _without_logits(value) for name, value in output.items()}
    if type(output) is tuple:
        return tuple(None if isinstance(value, UnbuiltLogits) else value for value in output)
    return output


def _check_model(model: nn.Module) -> None:
    name = type(model).__name__
    if not isinstance(model, nn.Module) or not callable(getattr(model, "get_output_embeddings", None)):
        raise ConfigError(
            f"a language model of transformers is needed, one with get_output_embeddings(), got {name}. If it is "
            "wrapped (DistributedDataParallel, torch.compile), pass the model inside, and before wrapping it"
        )
    if isinstance(model.__dict__.get("forward"), LossHandle):
        raise ConfigError(f"this {name} has its loss from tilewise already. Call remove() on that handle first")
    _head(model)
    parameters = inspect.signature(model.forward).parameters
    if "labels" not in parameters and not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        raise ConfigError(f"{name} takes no labels, so it computes no loss. Use tilewise.linear_cross_entropy itself")


def _head(model: nn.Module) -> nn.Module:
    head = model.get_output_embeddings()  # type: ignore[operator]
    if not isinstance(head, nn.Module):
        raise ConfigError(f"{type(model).__name__} has no output embedding (head). Use a ...ForCausalLM")
    return head


def _classes(head: nn.Module) -> int:
    """The rows of the largest linear layer in the head."""
    widths = [getattr(module, "out_features", None) for module in head.modules()]
    sizes = [width for width in widths if isinstance(width, int)]
    sizes = sizes or [weight.shape[0] for weight in head.parameters() if weight.dim() == 2]
    if not sizes:
        raise ConfigError(f"the head, a {type(head).__name__}, has no linear layer in it. Use a ...ForCausalLM")
    return max(sizes)


def _random_tokens(model: nn.Module) -> dict[str, Tensor]:
    weight = next(iter(_head(model).parameters()))
    if weight.device.type == "meta":
        raise ConfigError("the model has no weights yet (meta device). Load them first, or pass verify=False")
    embedding = model.get_input_embeddings()  # type: ignore[operator]
    classes = min(_classes(_head(model)), embedding.weight.shape[0])
    ids = torch.randint(classes, CHECK_TOKENS, generator=torch.Generator().manual_seed(0)).to(weight.device)
    labels = ids.clone()
    labels[0, :2] = -100
    return {"input_ids": ids, "labels": labels}


@contextmanager
def _quiet(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, and the random state as it was."""
    modes = [(module, module.training) for module in model.modules()]
    devices = {parameter.device for parameter in model.parameters() if parameter.device.type == "cuda"}
    try:
        model.eval()
        with torch.random.fork_rng(devices=list(devices)):
            yield
    finally:
        for module, training in modes:
            module.training = training


def _loss_of(output: Any) -> float:
    loss = output[0] if isinstance(output, tuple) else output["loss"]
    if not isinstance(loss, Tensor):
        raise TilewiseError("the model returned no loss though it was given labels")
    return float(loss)
