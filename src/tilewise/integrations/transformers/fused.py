"""Statistics of tokens for a trainer that asks the model for them and not for logits.

TRL's trainers give the model a head of their own and call ``model(..., labels=labels, fused_lm_head=True)``, for an
object with ``loss``, ``log_probs``, ``entropy``, ``is_top1`` and ``label_mask``. What they get is learned from one
such call, not assumed: its type, which of the fields are there, and their values, which have to be ours.

Axes: b sequences, t tokens of each, n = b * t.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tilewise.errors import ConfigError
from tilewise.losses.token_stats import TokenStats

ASKED = "fused_lm_head"
FIELDS = {"log_probs": "log_prob", "entropy": "entropy", "is_top1": "correct", "label_mask": "valid"}
PASSED_ON = ("loss", "aux_loss")  # of the model's own output


class FusedKind(NamedTuple):
    """What the trainer's own head returns."""

    make: Callable[..., Any]
    fields: tuple[str, ...]  # those that are not None

    @classmethod
    def of(cls, theirs: Any) -> FusedKind:
        """Learned from one output; fields that we cannot fill are refused."""
        fields = tuple(name for name in theirs if theirs[name] is not None)
        unknown = [name for name in fields if name not in (*FIELDS, *PASSED_ON)]
        if unknown:
            raise ConfigError(
                f"the trainer's head also computes {', '.join(unknown)}, which tilewise does not. TRL's SFTTrainer "
                "needs none of that; for other trainers leave use_linear_cross_entropy out"
            )
        return cls(type(theirs), fields)

    def fill(self, output: Any, stats: list[TokenStats], labels_bt: Tensor, shifted: bool) -> Any:
        """The same object from our statistics and the model's own output."""
        if len(stats) != 1:
            raise ConfigError(
                f"the model takes the cross-entropy of its head's output {len(stats)} times, so it is not clear which "
                "one the trainer wants. Call handle.remove()"
            )
        values = {name: getattr(output, name, None) for name in PASSED_ON}
        for name in self.fields:
            if name in FIELDS:
                values[name] = _by_sequence(getattr(stats[0], FIELDS[name]), labels_bt, shifted)
        return self.make(**values)

    def compare(self, got: Any, want: Any, tolerance: float) -> None:
        """An error if the trainer's head means something else, such as a temperature."""
        for name in self.fields:
            if name not in FIELDS or name == "is_top1":  # which one is the first of two nearly equal is rounding
                continue
            ours, theirs = got[name].double(), want[name].double()
            most = theirs.abs().max().clamp(min=1.0)
            if ours.shape != theirs.shape or not (ours - theirs).abs().max() <= tolerance * most:
                raise ConfigError(
                    f"the trainer's own head computes other {name} on random tokens than the cross-entropy of this "
                    "model (a temperature, another precision?). For this trainer leave use_linear_cross_entropy out"
                )


def takes_fused(model: nn.Module) -> bool:
    """Whether a trainer has given the model, or the one inside its adapters, a head of its own."""
    inside = getattr(model, "get_base_model", None)
    models = (model, inside()) if callable(inside) else (model,)
    return any(ASKED in (getattr(one.forward, "__kwdefaults__", None) or ()) for one in models)


def _by_sequence(values_n: Tensor, labels_bt: Tensor, shifted: bool) -> Tensor:
    """(b, t), or (b, t - 1) for labels that the model shifts: the last token of a sequence has no next."""
    rows, tokens = labels_bt.shape
    if not shifted and values_n.numel() == rows * (tokens - 1):
        return values_n.reshape(rows, tokens - 1)
    values_bt = values_n.reshape(rows, tokens)
    return values_bt if shifted else values_bt[:, :-1]


def detached(stats: TokenStats) -> TokenStats:
    """The same numbers, without what backward would need."""
    fields = {name: value.detach() for name, value in vars(stats).items() if isinstance(value, torch.Tensor)}
    return TokenStats(**fields)
