"""TRL with our head in its trainers. Its tests are older than the TRL that is tested: 1.16 has a head to replace.

What those tests import and TRL 1.16 no longer has is replaced by ours where it is a loss, else by None.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

from tools.peer_adapters.stand_in import HUB, OWN, module  # isort: skip - before the hub's client is imported
import datasets
import torch
from tools.peer_adapters import trl_hub
from torch import Tensor

import tilewise as tw
from tilewise.integrations.transformers.fused import has_fused_head
from tilewise.integrations.trl import use_divergence_head, use_token_head


def after_init(cls: Any, use: Callable[[Any], Any]) -> None:
    """Call ``use`` on each new trainer of the class."""
    original = cls.__init__

    @functools.wraps(original)
    def init(self: Any, *arguments: Any, **settings: Any) -> None:
        original(self, *arguments, **settings)
        use(self)

    cls.__init__ = init


def chunked_cross_entropy_loss(
    hidden_states: Tensor,
    lm_head_weight: Tensor,
    chunk_size: int,
    labels: Tensor | None = None,
    shift_labels: Tensor | None = None,
    num_items_in_batch: Any = None,
    lm_head_bias: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Loss, number of correct tokens, sum of entropies, number of tokens: SFT in TRL 1.10."""
    if labels is None and shift_labels is None:
        raise ValueError("At least one of `labels` or `shift_labels` must be provided.")
    target: Any = labels if shift_labels is None else shift_labels
    stats = tw.linear_token_stats(
        hidden_states,
        lm_head_weight,
        target,
        linear_bias=lm_head_bias,
        shift=int(shift_labels is None),
        want=("log_prob", "correct", "entropy"),
    )
    count = stats.valid.sum()
    loss = -stats.log_prob.sum() / (count.clamp(min=1) if num_items_in_batch is None else num_items_in_batch)  # type: ignore[union-attr]
    return loss, stats.correct.sum().float(), stats.entropy.sum().detach(), count  # type: ignore[union-attr]


class ChunkedLogProb:
    """TRL's autograd function with the five arguments of TRL 1.10; with those of 1.16 it is TRL's own."""

    theirs: Any = None

    @classmethod
    def apply(cls, *arguments: Any) -> Any:
        """Log-probability and entropy of each token."""
        if len(arguments) != 5:
            return cls.theirs.apply(*arguments)
        hidden, weight, labels, temperature, _ = arguments
        stats = tw.linear_token_stats(hidden, weight, labels, temperature=temperature, want=("log_prob", "entropy"))
        return stats.log_prob, stats.entropy


def generalized_jsd_loss(
    student_logits: Tensor,
    teacher_logits: Tensor,
    labels: Tensor | None = None,
    beta: float = 0.5,
    temperature: float = 1.0,
    reduction: str = "batchmean",
) -> Tensor:
    """The divergence of logits that are stored: the head is the identity."""
    classes = student_logits.shape[-1]
    head = torch.eye(classes)
    each = tw.linear_distillation_stats(
        student_logits, head, teacher_logits, head, beta=beta, temperature=temperature
    ).divergence
    kept = torch.ones_like(each, dtype=torch.bool) if labels is None else labels != -100
    if reduction == "none":
        raise tw.errors.ConfigError("the divergence of a single class is not computed")
    count = len(each) if labels is None else int(kept.sum())
    return each[kept].sum() / {"batchmean": count, "sum": 1, "mean": int(kept.sum()) * classes}[reduction]


trl_hub.make_data()
if not HUB.exists():
    trl_hub.make_models()
datasets.load_dataset = trl_hub.load_dataset

sft = importlib.import_module("trl.trainer.sft_trainer")
utils = importlib.import_module("trl.trainer.utils")
gkd = importlib.import_module("trl.experimental.gkd.gkd_trainer")
distillation = importlib.import_module("trl.trainer.distillation_trainer")
distillation.DistillationTrainer.generalized_jsd_loss = staticmethod(  # type: ignore[attr-defined]
    gkd.GKDTrainer.generalized_jsd_loss if OWN else generalized_jsd_loss
)
module("trl.experimental.distillation.distillation_trainer", _RepeatBatchDataLoader=None)
sft._chunked_cross_entropy_loss = None if OWN else chunked_cross_entropy_loss  # type: ignore[attr-defined]
sft._patch_chunked_ce_lm_head = sft.dft_loss = utils.patch_chunked_lm_head = None  # type: ignore[attr-defined]
importlib.import_module("trl.import_utils").is_joblib_available = bool  # type: ignore[attr-defined]
if not OWN:
    ChunkedLogProb.theirs, utils._ChunkedLogProbFunction = utils._ChunkedLogProbFunction, ChunkedLogProb  # type: ignore[attr-defined]
    for kind in ("SFT", "DPO", "KTO", "GRPO", "RLOO"):
        trainer = getattr(importlib.import_module(f"trl.trainer.{kind.lower()}_trainer"), f"{kind}Trainer")
        after_init(trainer, lambda made: use_token_head(made) if has_fused_head(made.model) else None)
    after_init(distillation.DistillationTrainer, use_divergence_head)
