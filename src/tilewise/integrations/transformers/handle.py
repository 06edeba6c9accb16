"""The replacement of one model's forward: how it is installed, verified and removed."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from tilewise import _check
from tilewise.errors import ConfigError, RangeError
from tilewise.integrations.transformers.fused import FLAG, FusedOutput, detached, forwards_of, has_fused_head, is_fused
from tilewise.integrations.transformers.head_input import HeadInput
from tilewise.integrations.transformers.lazy_logits import LazyLogits, LossSettings, replace_logits
from tilewise.integrations.transformers.model import (
    CHECK_TOKENS,
    classes_of,
    evaluation_mode,
    head_of,
    is_tensor_parallel,
    loss_of,
    plain_forward,
    random_tokens,
)
from tilewise.losses.cross_entropy import check_z_loss
from tilewise.losses.token_stats import TokenStats
from tilewise.options import TileOptions

TOLERANCE = {torch.float16: 3e-2, torch.bfloat16: 3e-2}  # so large because the original loss rounds its logits
EXACT_TOLERANCE = 1e-4


def use_linear_cross_entropy(
    model: nn.Module,
    *,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    statistics: bool = False,
    evaluation: bool = False,
    verify: bool = True,
    group: torch.distributed.ProcessGroup | None = None,
    options: TileOptions | None = None,
) -> LossHandle:
    """Train a language model without computing its logits.

    Afterwards, ``model(input_ids, labels=labels)`` in training mode gives the same loss and gradients as before,
    ``F.cross_entropy(head(hidden), labels)`` through the model's own forward and loss function. ``output.logits`` is
    then a placeholder that raises an error when it is used. Evaluation mode (by default), calls without labels, and
    ``generate`` do not change.

    Args:
        model: has ``get_output_embeddings()`` and takes ``labels``. The head may be tied or untied, with or without
            bias, capped, scaled, with LoRA, or sharded by transformers (``tp_plan``). Only this instance is changed.
            Wrap it (DDP, ``torch.compile``) afterwards.
        z_loss: adds ``z_loss * logsumexp(logits) ** 2`` for each token that counts. In training only.
        label_smoothing: as in ``F.cross_entropy``. In training only. ``Trainer(label_smoothing_factor=...)`` removes
            the labels from the model's inputs and needs the logits.
        statistics: keep ``handle.token_stats`` of the last call without logits: a `tilewise.TokenStats` of all its
            tokens in one dimension, with the log-probability of the target, the entropy, whether the target was the
            most likely token, and which tokens count. They come from the same pass as the loss. ``gradients`` then
            has no effect.
        evaluation: do not compute logits in evaluation mode either, if there are labels. For a ``Trainer`` without
            metrics that need logits. The loss is then the model's own, without ``z_loss`` and ``label_smoothing``.
        verify: run the model on 16 random tokens, before and after, and raise `ConfigError` if the losses differ.
        group: the head is sharded over these ranks: parts of the vocabulary, in rank order. Then nothing is verified.
        options: how to compute it. No option changes the result beyond rounding.

    TRL's ``SFTTrainer`` (from 1.15) uses log-probabilities instead of logits. Call this before or after the trainer is
    built: on the model that you pass to it, or on ``trainer.model``.

    Returns:
        A handle. ``remove()`` undoes everything. It is also a context manager.

    Memory: no tensor of tokens x vocabulary, in forward or backward. LoRA on the head costs a copy of its weight.
    """
    check_z_loss(z_loss)
    _check.check_number("label_smoothing", label_smoothing)
    if not 0.0 <= label_smoothing <= 1.0:
        raise RangeError(f"label_smoothing is in [0, 1], got {label_smoothing}. It is a fraction, not a percentage")
    settings = LossSettings(z_loss, group, _check.check_options(options, rows_alone=True), label_smoothing)
    _check.group_name(group)
    _check_model(model)
    handle = LossHandle(model, settings, statistics=statistics, evaluation=evaluation)
    if verify and group is None:
        handle.verify()
    handle.install()
    return handle


class LossHandle:
    """Replaces ``forward`` of one model, and restores it. Made by `use_linear_cross_entropy`.

    It is an object and not a closure, so that a copy of the model (``copy.deepcopy``) gets its own handle.
    """

    def __init__(
        self, model: nn.Module, settings: LossSettings, *, statistics: bool = False, evaluation: bool = False
    ) -> None:
        self.model, self.settings, self.statistics, self.evaluation = model, settings, statistics, evaluation
        self.token_stats: TokenStats | None = None  # of the last call without logits, if ``statistics``
        self.previous = model.__dict__.get("forward")  # a replacement that was installed before this one
        self.active = True
        self.head: nn.Module | None = None
        self.head_hooks: list[RemovableHandle] = []
        self.input_hook = -1  # the id of the first of them, kept here because torch.compile cannot read it from a hook
        self.model_hooks: list[RemovableHandle] = []
        self.current: LossSettings | None = None  # set while the model runs without logits
        self.head_calls = 0  # in this run
        self.head_dtype = torch.float32  # in which the head's last product is computed
        self.verifying = False
        self.fused: FusedOutput | None = None  # output of a trainer's fused head, after the first call
        self.fused_requested = False  # a trainer called its fused head, which is installed around this handle
        self.replaced: Callable[..., Any] | None = None  # a fused head that was installed around this handle

    def __repr__(self) -> str:
        state = "active" if self.active else "removed"
        shown = {"z_loss": self.settings.z_loss, "label_smoothing": self.settings.label_smoothing}
        shown |= {"statistics": self.statistics, "evaluation": self.evaluation}
        changed = "".join(f", {name}={value}" for name, value in shown.items() if value)
        return f"LossHandle({type(self.model).__name__}, {state}{changed})"

    @property
    def __signature__(self) -> inspect.Signature:
        """The model's own signature: `Trainer` reads the columns and keywords of the model from it."""
        return inspect.signature(self._original())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward. In training with labels, it runs without logits."""
        if args and args[0] is self.model:  # accelerate's unwrap_model turns this object into a method
            args = args[1:]
        requested, self.fused_requested = self.fused_requested or bool(kwargs.get(FLAG)), False
        if requested and self._replaces_fused_head():
            return self._fused(args, kwargs)
        original = self.replaced if self.replaced is not None and kwargs.get(FLAG) else self._original()
        settings = self._current_settings()
        if settings is None or not self._has_labels(args, kwargs):
            return original(*args, **kwargs)
        if not self.statistics or self.verifying:
            return self._run_without_logits(original, args, kwargs, settings)
        collected: list[TokenStats] = []
        output = self._run_without_logits(original, args, kwargs, settings._replace(collected=collected))
        self.token_stats = detached(collected[-1]) if collected else None
        return output

    def _current_settings(self) -> LossSettings | None:
        """The loss settings for the model's mode, or None if the logits are computed."""
        if self.active and self.model.training:
            return self.settings
        if self.verifying or (self.active and self.evaluation):
            return self.settings._replace(z_loss=0.0, label_smoothing=0.0)
        return None

    def install(self) -> None:
        """Replace the model's forward."""
        self._hook_head()
        self.model_hooks = [
            self.model.register_forward_pre_hook(self._before_model, with_kwargs=True),
            self.model.register_forward_hook(self._after_model),
        ]
        backbone = getattr(self.model, "base_model", None)
        if isinstance(backbone, nn.Module) and backbone is not self.model:
            self.model_hooks.append(backbone.register_forward_pre_hook(self._before_backbone))
        self.model.forward = self

    def remove(self) -> None:
        """Restore the model's own forward. A second call does nothing."""
        self._unhook_head()
        for hook in self.model_hooks:
            hook.remove()
        self.model_hooks = []
        self.active = False  # if another replacement calls this object, it only calls the original from now on
        if _installed_handle(self.model) is self:
            self._restore()

    def _restore(self) -> None:
        outer = self.previous if self.replaced is None else self.replaced
        if outer is None:
            del self.model.forward
        else:
            self.model.forward = outer

    def __enter__(self) -> LossHandle:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()

    def verify(self) -> None:
        """Compare the loss on a few random tokens with and without logits. Raise `ConfigError` if they differ."""
        inputs, name = random_tokens(self.model), type(self.model).__name__
        with torch.no_grad(), evaluation_mode(self.model):
            try:
                want = loss_of(_run(self.model, inputs))
            except Exception as error:
                raise ConfigError(
                    f"{name} could not be verified: its own forward fails on input_ids and labels of shape "
                    f"{CHECK_TOKENS} ({type(error).__name__}: {error}). If it needs other inputs, pass verify=False"
                ) from error
            self.verifying, self.model.forward = True, self
            try:
                got = loss_of(_run(self.model, inputs))
            finally:
                self.verifying = False
                self._restore()
                self._unhook_head()
        if not abs(got - want) <= self._tolerance() * max(1.0, abs(want)):
            raise ConfigError(
                f"{name} computes a loss of {want:.6g} on random tokens, but without its logits it would be {got:.6g}. "
                "Its loss is not the cross-entropy of its head's output. The model was not changed"
            )
        if has_fused_head(self.model):
            try:
                self.fused = self._probe_fused_head(self._original(), self._through_hooks)
            finally:
                self._unhook_head()

    # A trainer's fused head.

    def _fused(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The output of a trainer's fused head, computed from the token statistics of tilewise."""
        if self.settings.z_loss or self.settings.label_smoothing or self.settings.group is not None:
            raise ConfigError(
                "the trainer computes the loss from log-probabilities, so z_loss, label_smoothing and group have no "
                "effect on it. Do not pass them to use_linear_cross_entropy"
            )
        if self.fused is None:
            # Here the hooks of the model have run.
            self.fused = self._probe_fused_head(self._fused_forward(), lambda forward, inputs: forward(**inputs))
        return self._fused_output(self.fused, args, kwargs)

    def _replaces_fused_head(self) -> bool:
        """Whether calls of a trainer's fused head are computed by this handle: in training, or with ``evaluation``."""
        return self.active and (self.model.training or self.evaluation)

    def _fused_forward(self) -> Callable[..., Any]:
        """The forward of the trainer's fused head: installed after this handle, or before it."""
        if self.replaced is not None:
            return self.replaced
        outer: Any = self.model.__dict__.get("forward")
        return self._original() if _installed_handle(self.model) is self else outer

    def _through_hooks(self, forward: Callable[..., Any], inputs: dict[str, Any]) -> Any:
        """``forward`` with the hooks of the model around it: FSDP gathers weights in hooks."""
        self.model.forward = forward
        try:
            return _run(self.model, inputs)
        finally:
            self._restore()

    def _probe_fused_head(
        self, fused_forward: Callable[..., Any], call: Callable[[Callable[..., Any], dict[str, Any]], Any]
    ) -> FusedOutput:
        """Call the trainer's fused head on a few random tokens, and check that tilewise computes the same values."""
        inputs = random_tokens(self.model)
        with torch.no_grad(), evaluation_mode(self.model):
            theirs = call(fused_forward, inputs | {FLAG: True})
            kind = FusedOutput.of(theirs, [fused_forward, *forwards_of(self.model)])
            ours = call(lambda **kwargs: self._fused_output(kind, (), kwargs), inputs)
        kind.compare(ours, theirs, self._tolerance())
        return kind

    def _fused_output(self, kind: FusedOutput, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        inputs = {name: value for name, value in kwargs.items() if name != FLAG}
        shifted = inputs.get("shift_labels")
        labels = inputs.get("labels") if shifted is None else shifted
        if labels is None:
            raise ConfigError("the trainer requests log-probabilities without labels. Pass labels as a keyword")
        collected: list[TokenStats] = []
        inputs["labels"] = labels
        plain = self.settings._replace(z_loss=0.0, label_smoothing=0.0)
        settings = plain._replace(
            collected=collected, want=kind.want, temperature=kind.temperature, no_tokens_is_zero=True
        )
        output = self._run_without_logits(self._original(), args, inputs, settings)
        result = kind.fill(output, collected, labels, shifted is not None)
        if self.statistics:
            self.token_stats = detached(collected[-1])
        return result

    def _before_model(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        """Redirect a call of a fused head that a trainer has installed around this handle.

        Without the flag, the trainer's forward calls the forward that it replaced, which is this handle.
        """
        self.fused_requested = False
        if not (self._replaces_fused_head() and kwargs.get(FLAG)) or _installed_handle(model) is self:
            return None
        self.fused_requested = True
        return args, {name: value for name, value in kwargs.items() if name != FLAG}

    def _after_model(self, model: nn.Module, args: Any, output: Any) -> None:
        if self.fused_requested:
            self.fused_requested = False
            raise ConfigError(
                f"the forward of this {type(model).__name__} was replaced after use_linear_cross_entropy, and the new "
                "one does not call it. Call handle.remove(), and then use_linear_cross_entropy(trainer.model)"
            )

    def _before_backbone(self, backbone: nn.Module, args: Any) -> None:
        """Install this handle around a fused head that adapters (PEFT) call without the hooks of the model.

        The running call is computed by the trainer's head, with the same values. The next one reaches this handle.
        """
        outer = self.model.__dict__.get("forward")
        if self._replaces_fused_head() and self.current is None and is_fused(outer):
            self.replaced, self.model.forward = outer, self

    def _tolerance(self) -> float:
        """The tolerance of `verify` for the dtype of the model's logits."""
        return TOLERANCE.get(self.head_dtype, EXACT_TOLERANCE)

    def _original(self) -> Callable[..., Any]:
        if self.previous is not None:
            previous: Callable[..., Any] = self.previous
            return previous
        # Not a bound method: torch.compile would rebuild it as model.forward, which is this object.
        return functools.partial(type(self.model).forward, self.model)

    def _has_labels(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if args and "labels" not in kwargs:
            kwargs = dict(zip(self.__signature__.parameters, args, strict=False))
        return kwargs.get("labels") is not None

    # The head.

    def _run_without_logits(
        self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], settings: LossSettings
    ) -> Any:
        """Run the forward with a head that returns `LazyLogits`. The output has `NO_LOGITS` in their place."""
        head = head_of(self.model)
        # The head was replaced (resized, adapted), or an engine such as DeepSpeed ZeRO-3 has added hooks for its input.
        # Ours must run after those, so that the gradient of the input passes through them.
        if head is not self.head or next(reversed(head._forward_pre_hooks)) != self.input_hook:
            self._hook_head()
        self.current, self.head_calls = settings._replace(same_tokens=is_tensor_parallel(head)), 0
        try:
            with plain_forward(head):
                output = forward(*args, **kwargs)
        finally:
            self.current = None
        if not self.head_calls:
            raise ConfigError(
                f"{type(self.model).__name__} did not call its output embedding ({type(head).__name__}), so it "
                "computed its logits elsewhere. Call handle.remove(). If a model of this class was compiled and run "
                "before, call torch.compiler.reset(), because the compiled code has a head without hooks"
            )
        return replace_logits(output)

    def _before_head(self, head: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if self.current is None:
            return None
        # Known only here: a wrapper of the model's forward, such as accelerate's, may enable autocast.
        kind = inputs[0].device.type
        self.head_dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else inputs[0].dtype
        return (HeadInput.mark(inputs[0], classes_of(head), self.current), *inputs[1:])

    def _after_head(self, head: nn.Module, _: Any, output: Any) -> None:
        if self.current is None:
            return
        self.head_calls += 1
        if not isinstance(output, LazyLogits):
            raise ConfigError(
                f"the head is a {type(head).__name__}, which does not end in F.linear with {classes_of(head)} classes, "
                "so its product cannot be skipped. Use a linear head, or LoRA on a linear head"
            )
        output.belong_to(head)

    def _hook_head(self) -> None:
        self._unhook_head()
        self.head = head = head_of(self.model)
        self.head_hooks = [
            head.register_forward_pre_hook(self._before_head),
            head.register_forward_hook(self._after_head, prepend=True),
        ]
        self.input_hook = self.head_hooks[0].id

    def _unhook_head(self) -> None:
        for hook in self.head_hooks:
            hook.remove()
        self.head, self.head_hooks = None, []


def _check_model(model: nn.Module) -> None:
    name = type(model).__name__
    compiled = "_orig_mod" in getattr(model, "_modules", {})  # torch.compile's wrapper has all attributes of the model
    if compiled or not isinstance(model, nn.Module) or not callable(getattr(model, "get_output_embeddings", None)):
        raise ConfigError(
            f"model is a language model of transformers, with get_output_embeddings(), got {name}. If it is wrapped "
            "(DistributedDataParallel, torch.compile), pass the model inside, and before it is wrapped"
        )
    if _installed_handle(model) is not None:
        raise ConfigError(
            f"use_linear_cross_entropy is already active on this {name}. Call remove() on its handle first"
        )
    is_tensor_parallel(head_of(model))
    parameters = inspect.signature(model.forward).parameters
    if "labels" not in parameters and not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        raise ConfigError(f"{name} takes no labels, so it computes no loss. Use tilewise.linear_cross_entropy instead")


def _installed_handle(model: nn.Module) -> LossHandle | None:
    """The handle that is the model's forward, also if it was turned into a method."""
    forward = model.__dict__.get("forward")
    function = getattr(forward, "__func__", forward)
    return function if isinstance(function, LossHandle) else None


def _run(model: nn.Module, inputs: dict[str, torch.Tensor]) -> Any:
    """Call the model with its hooks (FSDP gathers weights in hooks), but not its compiled version."""
    return nn.Module._call_impl(model, **inputs)
