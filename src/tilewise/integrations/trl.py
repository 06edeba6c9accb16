"""Our head in TRL's trainers: SFT, DPO, KTO, GRPO and RLOO.

trainer = GRPOTrainer(model=model, reward_funcs=..., args=..., train_dataset=...)
use_token_head(trainer)
trainer.train()
"""

from __future__ import annotations

from typing import Any

from torch import nn

from tilewise.errors import ConfigError
from tilewise.integrations.transformers.fused import has_fused_head
from tilewise.integrations.transformers.handle import LossHandle, use_linear_cross_entropy
from tilewise.options import TileOptions


class TrainerHandle:
    """What `use_token_head` changed. ``remove()`` undoes it. Also a context manager."""

    def __init__(self, handles: list[LossHandle]) -> None:
        self.handles = handles

    def __repr__(self) -> str:
        return f"TrainerHandle({', '.join(map(repr, self.handles))})"

    def remove(self) -> None:
        """Restore the heads of the trainer. A second call does nothing."""
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
    return TrainerHandle([use_linear_cross_entropy(model, evaluation=True, options=options) for model in found])
