"""The stand-in for one model's forward: made, verified, undone."""

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
from tilewise.integrations.transformers.fused import ASKED, FusedKind, detached, takes_fused
from tilewise.integrations.transformers.head_input import HeadInput
from tilewise.integrations.transformers.model import CHECK_TOKENS, classes_of, head_of, loss_of, quiet, random_tokens
from tilewise.integrations.transformers.unbuilt import LossSettings, UnbuiltLogits, without_logits
from tilewise.losses.cross_entropy import check_z_loss
from tilewise.losses.token_stats import TokenStats
from tilewise.options import TileOptions

TOLERANCE = {torch.float16: 3e-2, torch.bfloat16: 3e-2}  # what rounding the original's logits may change
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
    """Train a language model without its logits.

    From now on, ``model(input_ids, labels=labels)`` in training mode has the same loss and gradients as before,
    ``F.cross_entropy(head(hidden), labels)`` through the model's own forward and loss function, with ``logits=None``.
    In evaluation mode (unless asked for), without labels, and in ``generate`` nothing changes.

    Args:
        model: has ``get_output_embeddings()`` and takes ``labels``; tied or untied, with or without bias, capped,
            scaled, with LoRA on the head. Only this instance is changed. Wrap it (DDP, ``torch.compile``) afterwards.
        z_loss: adds ``z_loss * logsumexp(logits) ** 2`` for each token that counts; in training only.
        label_smoothing: as of ``F.cross_entropy``, in training only. ``Trainer(label_smoothing_factor=...)`` would take
            the labels away from the model and build the logits.
        statistics: keep ``handle.token_stats`` of the last call that built no logits, a `tilewise.TokenStats` of all
            its tokens in one dimension: log-probability of the target, entropy, whether it was the likeliest, and which
            tokens count. They come from the pass that has the loss; ``filter_tolerance`` and ``gradients`` have no
            effect then.
        evaluation: no logits in evaluation mode either, when there are labels: for ``Trainer`` without metrics that
            read them. The loss is then the model's own, without ``z_loss`` and ``label_smoothing``.
        verify: run the model on 16 random tokens, before and after, and refuse it if the two losses differ.
        group: the head is spread over these ranks, slices of the vocabulary in rank order; nothing is verified then.
        options: how, never what.

    TRL's ``SFTTrainer`` (from 1.15) wants log-probabilities and no logits: ``use_linear_cross_entropy(trainer.model)``,
    once there is a trainer.

    Returns:
        A handle: ``remove()`` undoes everything, as does leaving it as a context manager.

    Memory: no tensor of tokens x vocabulary, in forward or in backward. LoRA on the head costs a copy of its weight.
    """
    check_z_loss(z_loss)
    _check.check_number("label_smoothing", label_smoothing)
    if not 0.0 <= label_smoothing <= 1.0:
        raise RangeError(f"label_smoothing is in [0, 1], got {label_smoothing}. It is a share, not a percentage")
    settings = LossSettings(z_loss, group, _check.check_options(options), label_smoothing)
    _check.group_name(group)
    _check_model(model)
    handle = LossHandle(model, settings, statistics=statistics, evaluation=evaluation)
    if verify and group is None:
        handle.verify()
    handle.install()
    return handle


class LossHandle:
    """Stands in for ``forward`` of one model, and undoes it: `use_linear_cross_entropy` makes it.

    It is an object and not a closure, so that a copy of the model (``copy.deepcopy``) gets its own.
    """

    def __init__(
        self, model: nn.Module, settings: LossSettings, *, statistics: bool = False, evaluation: bool = False
    ) -> None:
        self.model, self.settings, self.statistics, self.evaluation = model, settings, statistics, evaluation
        self.token_stats: TokenStats | None = None  # of the last call that built no logits, if they are kept
        self.previous = model.__dict__.get("forward")  # somebody else's stand-in, if there is one
        self.active = True
        self.head: nn.Module | None = None
        self.hooks: list[RemovableHandle] = []
        self.recording: LossSettings | None = None  # only while the model runs in training
        self.calls = 0  # of the head, in this run
        self.verifying = False
        self.watch: RemovableHandle | None = None
        self.fused: FusedKind | None = None  # what a trainer's own head returns, once that is known
        self.served = False  # whether the trainer's last question reached us

    @property
    def __signature__(self) -> inspect.Signature:
        """The model's own: `Trainer` reads from it which columns and keywords the model takes."""
        return inspect.signature(self._original())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward; in training with labels, with the head's product left to the loss."""
        if args and args[0] is self.model:  # accelerate's unwrap_model makes a method of us
            args = args[1:]
        original = self._original()
        if self.active and self.model.training and kwargs.get(ASKED):
            self.served = True
            return self._fused(original, args, kwargs)
        settings = self._settings_now()
        if settings is None or not self._has_labels(args, kwargs):
            return original(*args, **kwargs)
        if not self.statistics or self.verifying:
            return self._without_product(original, args, kwargs, settings)
        seen: list[TokenStats] = []
        output = self._without_product(original, args, kwargs, settings._replace(seen=seen))
        self.token_stats = detached(seen[-1]) if seen else None
        return output

    def _settings_now(self) -> LossSettings | None:
        """What the loss is told in the model's mode; None where the logits are built."""
        if self.active and self.model.training:
            return self.settings
        if self.verifying or (self.active and self.evaluation):
            return self.settings._replace(z_loss=0.0, label_smoothing=0.0)
        return None

    def install(self) -> None:
        """Become the model's forward."""
        self._join_head()
        self.watch = self.model.register_forward_hook(self._after_model, with_kwargs=True)
        self.model.forward = self

    def remove(self) -> None:
        """Give the model its own forward back. A second call does nothing."""
        self._leave_head()
        if self.watch is not None:
            self.watch.remove()
        self.active = False  # for the case that somebody has wrapped us: then we stay, and only pass on
        if _stands_in(self.model) is self:
            self._give_back()

    def _give_back(self) -> None:
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
        inputs, name = random_tokens(self.model), type(self.model).__name__
        with torch.no_grad(), quiet(self.model):
            try:
                want = loss_of(_run(self.model, inputs))
            except Exception as error:
                raise ConfigError(
                    f"{name} could not be checked: its own forward fails on input_ids and labels of shape "
                    f"{CHECK_TOKENS} ({type(error).__name__}: {error}). If it needs other inputs, pass verify=False"
                ) from error
            self.verifying, self.model.forward = True, self
            try:
                got = loss_of(_run(self.model, inputs))
            finally:
                self.verifying = False
                self._give_back()
                self._leave_head()
        if not abs(got - want) <= self._tolerance() * max(1.0, abs(want)):
            raise ConfigError(
                f"{name} computes a loss of {want:.6g} on random tokens, and without its logits it would be {got:.6g}. "
                "Its loss is not the cross-entropy of its head's output; it is left unchanged"
            )
        if takes_fused(self.model):
            try:
                self.fused = self._learned(self._original())
            finally:
                self._leave_head()

    def _fused(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A trainer's question for statistics of tokens, answered from our pass."""
        if self.settings.z_loss or self.settings.label_smoothing or self.settings.group is not None:
            raise ConfigError(
                "the trainer makes the loss itself, of log-probabilities, so z_loss, label_smoothing and group have no "
                "place in it. Leave them out of use_linear_cross_entropy"
            )
        if self.fused is None:
            self.fused = self._learned(original)
        return self._answer(self.fused, original, args, kwargs)

    def _learned(self, original: Callable[..., Any]) -> FusedKind:
        """What the trainer's own head returns for a few random tokens, and that ours is the same."""
        inputs = random_tokens(self.model)
        with torch.no_grad(), quiet(self.model):
            theirs = original(**inputs, **{ASKED: True})
            kind = FusedKind.of(theirs)
            ours = self._answer(kind, original, (), inputs)
        kind.compare(ours, theirs, self._tolerance())
        return kind

    def _answer(
        self, kind: FusedKind, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        wanted = {name: value for name, value in kwargs.items() if name != ASKED}
        shifted = wanted.get("shift_labels")
        labels = wanted.get("labels") if shifted is None else shifted
        if labels is None:
            raise ConfigError("the trainer asks for log-probabilities of no labels. Pass labels, by name")
        seen: list[TokenStats] = []
        wanted["labels"] = labels
        output = self._without_product(original, args, wanted, self.settings._replace(seen=seen))
        answer = kind.fill(output, seen, labels, shifted is not None)
        if self.statistics:
            self.token_stats = detached(seen[-1])
        return answer

    def _after_model(self, model: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        if self.active and model.training and kwargs.get(ASKED) and not self.served:
            raise ConfigError(
                f"a trainer has put a head of its own around this {type(model).__name__} since "
                "use_linear_cross_entropy, whose loss is therefore not used. Call handle.remove(), and "
                "use_linear_cross_entropy(trainer.model) when the trainer is made"
            )
        self.served = False

    def _tolerance(self) -> float:
        return TOLERANCE.get(next(self.model.parameters()).dtype, EXACT_TOLERANCE)

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
        head = head_of(self.model)
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
                "were built elsewhere. Call handle.remove(); or, if one like it was compiled and run before, "
                "torch.compiler.reset(), since compiled code keeps a head without hooks"
            )
        return without_logits(output)

    def _before_head(self, head: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if self.recording is None:
            return None
        return (HeadInput.mark(inputs[0], classes_of(head), self.recording), *inputs[1:])

    def _after_head(self, head: nn.Module, _: Any, output: Any) -> None:
        if self.recording is None:
            return
        self.calls += 1
        if not isinstance(output, UnbuiltLogits):
            raise ConfigError(
                f"the head is a {type(head).__name__}, which does not end in F.linear with {classes_of(head)} classes, "
                "so its product cannot be left out. Use a linear head, or LoRA on one"
            )

    def _join_head(self) -> None:
        self._leave_head()
        self.head = head = head_of(self.model)
        self.hooks = [
            head.register_forward_pre_hook(self._before_head),
            head.register_forward_hook(self._after_head, prepend=True),
        ]

    def _leave_head(self) -> None:
        for hook in self.hooks:
            hook.remove()
        self.head, self.hooks = None, []


def _check_model(model: nn.Module) -> None:
    name = type(model).__name__
    compiled = "_orig_mod" in getattr(model, "_modules", {})  # by torch.compile, which passes every name on
    if compiled or not isinstance(model, nn.Module) or not callable(getattr(model, "get_output_embeddings", None)):
        raise ConfigError(
            f"a language model of transformers is needed, one with get_output_embeddings(), got {name}. If it is "
            "wrapped (DistributedDataParallel, torch.compile), pass the model inside, and before wrapping it"
        )
    if _stands_in(model) is not None:
        raise ConfigError(f"this {name} has its loss from tilewise already. Call remove() on that handle first")
    head_of(model)
    parameters = inspect.signature(model.forward).parameters
    if "labels" not in parameters and not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        raise ConfigError(f"{name} takes no labels, so it computes no loss. Use tilewise.linear_cross_entropy itself")


def _stands_in(model: nn.Module) -> LossHandle | None:
    """The handle that is the model's forward, or that somebody has made a method of."""
    forward = model.__dict__.get("forward")
    ours = getattr(forward, "__func__", forward)
    return ours if isinstance(ours, LossHandle) else None


def _run(model: nn.Module, inputs: dict[str, torch.Tensor]) -> Any:
    """The model with its hooks (those of FSDP bring the weights), but not compiled for these few tokens."""
    return nn.Module._call_impl(model, **inputs)
