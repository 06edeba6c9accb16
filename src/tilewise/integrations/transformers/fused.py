"""Token statistics for a trainer that replaces the head of the model by one that returns them instead of logits.

TRL's trainers replace the forward of the model by one with a fused head. They call
``model(..., labels=labels, fused_lm_head=True)`` and read ``loss``, ``log_probs``, ``entropy`` and the like of the
result. The type of the result and its fields are read from one such call on random tokens, the temperature from the
variables of the head's function. The values must then equal ours.

Axes: b sequences, t tokens of each, n = b * t.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tilewise.errors import ConfigError
from tilewise.losses.token_stats import TokenStats

FLAG = "fused_lm_head"  # keyword with which a trainer calls the fused head
FIELDS = {
    "log_probs": "log_prob",
    "entropy": "entropy",
    "log_sum_sq_probs": "log_sum_sq_prob",
    "mean_logits": "mean_logit",
    "is_top1": "correct",
    "label_mask": "valid",
}
COPIED = ("loss", "aux_loss")  # copied from the model's own output


class FusedOutput(NamedTuple):
    """The output of the trainer's fused head: its type, the fields that are not None, and its temperature."""

    make: Callable[..., Any]
    fields: tuple[str, ...]
    temperature: float

    @property
    def want(self) -> tuple[str, ...]:
        """The token statistics behind the fields. The log-probability is always among them: the loss needs it."""
        names = {FIELDS[name] for name in self.fields if name in FIELDS} | {"log_prob"}
        return tuple(sorted(names - {"valid"}))

    @classmethod
    def of(cls, example: Any, forwards: Sequence[Any]) -> FusedOutput:
        """Read from one output of the trainer's head, and from its function. Unknown fields are refused."""
        fields = tuple(name for name in example if example[name] is not None)
        unknown = [name for name in fields if name not in (*FIELDS, *COPIED)]
        if unknown:
            raise ConfigError(
                f"the trainer's head also computes {', '.join(unknown)}, which tilewise does not compute. Tested is "
                "TRL 1.16. With this version do not use use_linear_cross_entropy"
            )
        return cls(type(example), fields, temperature_of(forwards))

    def fill(self, output: Any, stats: list[TokenStats], labels_bt: Tensor, shifted: bool) -> Any:
        """The output of this type, from the token statistics of tilewise and the model's own output."""
        if len(stats) != 1:
            raise ConfigError(
                f"the model computes {len(stats)} cross-entropies of its head's output, so it is not clear which one "
                "the trainer needs. Call handle.remove()"
            )
        values = {name: getattr(output, name, None) for name in COPIED}
        for name in self.fields:
            if name in FIELDS:
                values[name] = _by_sequence(getattr(stats[0], FIELDS[name]), labels_bt, shifted)
        return self.make(**values)

    def compare(self, got: Any, want: Any, tolerance: float) -> None:
        """Raise if the trainer's head computes other values."""
        for name in self.fields:
            if name not in FIELDS or name == "is_top1":  # rounding decides between two nearly equal scores
                continue
            ours, theirs = got[name].double(), want[name].double()
            if theirs.isnan().any():
                raise ConfigError(
                    f"on random tokens, {name} of the trainer's own head is NaN, so it cannot be compared with ours. "
                    "Check the model for parameters that are NaN or infinite"
                )
            largest = theirs.abs().max().clamp(min=1.0)
            if ours.shape != theirs.shape or not (ours - theirs).abs().max() <= tolerance * largest:
                raise ConfigError(
                    f"on random tokens, {name} of the trainer's own head differs from the cross-entropy of this model "
                    f"at temperature {self.temperature:g} (another precision?). For this trainer do not use "
                    "use_linear_cross_entropy"
                )


def is_fused(forward: Any) -> bool:
    """Whether a forward is that of a trainer's fused head."""
    return FLAG in (getattr(forward, "__kwdefaults__", None) or ())


def temperature_of(forwards: Sequence[Any]) -> float:
    """The temperature of a trainer's fused head, the first among these: the variable of this name in its function."""
    for forward in filter(is_fused, forwards):
        function = getattr(forward, "__func__", forward)
        if inspect.isfunction(function):
            return float(inspect.getclosurevars(function).nonlocals.get("temperature", 1.0))
    return 1.0


def forwards_of(model: nn.Module) -> list[Any]:
    """The forward of the model, and that of the model inside of its adapters."""
    inside = getattr(model, "get_base_model", None)
    return [one.forward for one in ((model, inside()) if callable(inside) else (model,))]


def has_fused_head(model: nn.Module) -> bool:
    """Whether a trainer has added a fused head to the model, or to the model inside of its adapters."""
    return any(map(is_fused, forwards_of(model)))


def _by_sequence(values_n: Tensor, labels_bt: Tensor, shifted: bool) -> Tensor:
    """(b, t), or (b, t - 1) for labels that the model shifts: the last token of a sequence has no target.

    Prompt tuning puts tokens before each sequence, so t may be larger than that of the labels.
    """
    rows, tokens = labels_bt.shape
    values_bt = values_n.reshape(rows, -1)
    return values_bt if shifted or values_bt.shape[1] == tokens - 1 else values_bt[:, :-1]


def detached(stats: TokenStats) -> TokenStats:
    """The same statistics without a graph."""
    fields = {name: value.detach() for name, value in vars(stats).items() if isinstance(value, torch.Tensor)}
    return TokenStats(**fields)
