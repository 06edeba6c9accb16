"""The head of tilewise for TRL's SFT, DPO, KTO, GRPO and RLOO trainers; its divergence for the distillation trainer.

trainer = GRPOTrainer(model=model, reward_funcs=..., args=..., train_dataset=...)
use_token_head(trainer)
trainer.train()

trainer = DistillationTrainer(model=model, teacher_model=teacher, args=..., train_dataset=...)
use_divergence_head(trainer)
trainer.train()
"""

from __future__ import annotations

import inspect
import sys
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from tilewise import _check
from tilewise.errors import ConfigError
from tilewise.integrations.transformers.fused import has_fused_head
from tilewise.integrations.transformers.handle import LossHandle, use_linear_cross_entropy
from tilewise.losses.distillation import linear_distillation_stats
from tilewise.options import TileOptions

SEAM = "ChunkedDivergenceFunction"  # the trainer's module calls its method `apply`
ARGUMENTS = (  # of that method
    *("student_hidden", "student_weight", "student_bias", "teacher_hidden", "teacher_weight", "teacher_bias"),
    *("beta", "temperature", "student_logit_scale", "student_final_logit_softcapping"),
    *("teacher_logit_scale", "teacher_final_logit_softcapping"),
)
TOLERANCE = 1e-4  # of both divergences on random tokens, in float32


class TrainerHandle:
    """What `use_token_head` or `use_divergence_head` changed. ``remove()`` undoes it. Also a context manager."""

    def __init__(self, handles: list[LossHandle] | list[Divergence]) -> None:
        self.handles = handles

    def __repr__(self) -> str:
        return f"TrainerHandle({', '.join(map(repr, self.handles))})"

    def remove(self) -> None:
        """Restore the trainer. A second call does nothing."""
        for handle in self.handles:
            handle.remove()

    def __enter__(self) -> TrainerHandle:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()


def use_token_head(trainer: Any, *, options: TileOptions | None = None) -> TrainerHandle:
    """Compute the log-probabilities of a TRL trainer by `tilewise.linear_token_stats`, in training and evaluation.

    Replaces the fused head that the trainer has added to its model, and that of its reference model, if it has one.
    Temperature, soft cap, scale and the requested fields are those of the trainer's head. Both heads are compared on a
    few random tokens first.

    Args:
        trainer: an ``SFTTrainer``, ``DPOTrainer``, ``KTOTrainer``, ``GRPOTrainer`` or ``RLOOTrainer`` of TRL 1.15 or
            newer, before ``train()``.
        options: how to compute it. No option changes the result beyond rounding.

    Before the trainer is built, call `tilewise.integrations.transformers.use_linear_cross_entropy` on the model
    instead.
    """
    models = [getattr(trainer, name, None) for name in ("model", "ref_model")]
    found = [model for model in models if isinstance(model, nn.Module)]
    if not found or not has_fused_head(found[0]):
        raise ConfigError(
            f"trainer is a trainer of TRL 1.15 or newer whose model has a fused head, got {type(trainer).__name__}. "
            "For other trainers call use_linear_cross_entropy(model)"
        )
    handles: list[Any] = []
    try:
        for model in found:
            handles.append(use_linear_cross_entropy(model, evaluation=True, options=options))
    except Exception:  # undo the change of the first model
        for handle in handles:
            handle.remove()
        raise
    return TrainerHandle(handles)


def use_divergence_head(trainer: Any, *, options: TileOptions | None = None) -> TrainerHandle:
    """Compute the divergence of TRL's distillation trainer by `tilewise.linear_distillation_stats`.

    The loss is the divergence of the student from the teacher at each token, and the logged entropy that of the
    student; both in training and evaluation. Other trainers of the process are not affected. Both divergences are
    compared on a few random tokens first.

    Args:
        trainer: a ``DistillationTrainer`` of TRL 1.16. Trainers that store logits (GKD, GOLD) or that get the
            teacher's probabilities from a server raise a `ConfigError`.
        options: how to compute it. No option changes the result beyond rounding.
    """
    module = _module_of(trainer)
    if isinstance(vars(trainer).get("_compute_loss"), Divergence):
        raise ConfigError(
            "use_divergence_head is already active on this trainer. Call remove() on its handle to change it"
        )
    divergence = Divergence(trainer, module, _check.check_options(options))
    _compare(divergence, getattr(module, SEAM), float(trainer.beta), float(trainer.temperature))
    trainer._compute_loss = divergence
    return TrainerHandle([divergence])


class Divergence:
    """The trainer's ``_compute_loss``. While it runs, the divergence of tilewise replaces that of TRL."""

    def __init__(self, trainer: Any, module: ModuleType, options: TileOptions) -> None:
        self.trainer, self.module, self.options = trainer, module, options
        self.compute_loss, self.own = trainer._compute_loss, vars(trainer).get("_compute_loss")
        self.active = True

    def __repr__(self) -> str:
        return f"Divergence({type(self.trainer).__name__}, {'active' if self.active else 'removed'})"

    def __call__(self, *arguments: Any, **more: Any) -> Any:
        """The loss of a batch."""
        if not self.active:  # another function that was put around this one may still call it
            return self.compute_loss(*arguments, **more)
        theirs = getattr(self.module, SEAM)
        setattr(self.module, SEAM, self)
        try:
            return self.compute_loss(*arguments, **more)
        finally:
            setattr(self.module, SEAM, theirs)

    def remove(self) -> None:
        """Restore what was there before."""
        self.active = False
        if vars(self.trainer).get("_compute_loss") is not self:
            return
        if self.own is None:
            del self.trainer._compute_loss
        else:
            self.trainer._compute_loss = self.own

    def apply(
        self,
        student_hidden: Tensor,
        student_weight: Tensor,
        student_bias: Tensor | None,
        teacher_hidden: Tensor,
        teacher_weight: Tensor,
        teacher_bias: Tensor | None,
        beta: float,
        temperature: float = 1.0,
        student_logit_scale: float = 1.0,
        student_final_logit_softcapping: float | None = None,
        teacher_logit_scale: float = 1.0,
        teacher_final_logit_softcapping: float | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Divergence and entropy of each token, with the arguments of TRL's function."""
        if hasattr(student_weight, "ds_id") or hasattr(teacher_weight, "ds_id"):
            raise ConfigError(
                "DeepSpeed ZeRO-3 shards the heads, and use_divergence_head needs whole ones. Call remove() on its "
                "handle, or use ZeRO-2 or FSDP"
            )
        # TRL computes each model in its own type. One of the two types holds the values of both.
        hidden, teacher = _check.autocast(student_hidden), _check.autocast(teacher_hidden)
        kind = torch.promote_types(hidden.dtype, teacher.dtype)
        classes = student_weight.shape[0]  # further rows of the teacher's head are padding, as in TRL
        wide = torch.promote_types(kind, torch.float32)
        if student_bias is not None:  # TRL also multiplies the biases by the scales
            student_bias = student_logit_scale * student_bias.to(wide)
        if teacher_bias is not None:
            teacher_bias = teacher_logit_scale * teacher_bias[:classes].to(wide)
        stats = linear_distillation_stats(
            hidden.to(kind),
            student_weight.to(kind),
            teacher.to(kind),
            teacher_weight[:classes].to(kind),
            beta=beta,
            temperature=temperature,
            linear_bias=student_bias,
            teacher_bias=teacher_bias,
            logit_scale=student_logit_scale,
            teacher_logit_scale=teacher_logit_scale,
            softcap=student_final_logit_softcapping,
            teacher_softcap=teacher_final_logit_softcapping,
            options=self.options,
        )
        assert stats.entropy is not None
        return stats.divergence, stats.entropy


def _module_of(trainer: Any) -> ModuleType:
    """The module in which the trainer's class looks up TRL's divergence. Raises `ConfigError` for other trainers."""
    wanted = "trainer is a DistillationTrainer of TRL 1.16"
    advice = "For another loss call tilewise.linear_distillation_loss yourself"
    modules = [sys.modules[cls.__module__] for cls in type(trainer).__mro__ if "_compute_loss" in vars(cls)]
    found = [module for module in modules if hasattr(module, SEAM)]
    # A subclass may have another loss, for example from the probabilities of a server, and never call this one.
    own = inspect.unwrap(getattr(type(trainer), "compute_loss", _module_of))
    calls = getattr(getattr(own, "__code__", None), "co_names", ())
    if not found or not {"compute_loss", "_compute_loss"} & set(calls):
        raise ConfigError(
            f"{wanted}, which computes a divergence from hidden states, got {type(trainer).__name__}. {advice}"
        )
    takes = tuple(inspect.signature(getattr(found[0], SEAM).forward).parameters)[1:]
    if takes != ARGUMENTS:
        raise ConfigError(f"{wanted}; the divergence of this version takes ({', '.join(takes)}). {advice}")
    return found[0]


def _compare(ours: Divergence, theirs: Any, beta: float, temperature: float) -> None:
    """Raise if TRL's function computes other values for 16 random tokens and 40 classes."""
    draw = torch.Generator().manual_seed(0)
    sizes = ((16, 8), (40, 8), (40,), (16, 6), (40, 6), (40,))
    tensors = [torch.randn(size, generator=draw) for size in sizes]
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        given: Any = (*tensors, beta, temperature, 0.7, 5.0, 1.3, 4.0)
        for name, got, want in zip(("divergence", "entropy"), ours.apply(*given), theirs.apply(*given), strict=True):
            if got.shape != want.shape or not (got - want).abs().max() <= TOLERANCE:
                raise ConfigError(
                    f"on random tokens, the {name} of this TRL differs from linear_distillation_stats. Tested is TRL "
                    "1.16. With this version do not use use_divergence_head"
                )
