"""Optimizers from settings, the learning rate of a step, and averaged weights."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from tilewise.train.adafactor import Adafactor
from tilewise.train.config import OptimConfig
from tilewise.train.sharding import like, local


def build_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
    """Build the optimizer with three parameter groups: matrices (decayed), vectors, and the logit scale and bias."""
    groups: dict[str, list[nn.Parameter]] = {"matrices": [], "vectors": [], "scale": []}
    for name, p in model.named_parameters():
        if p.requires_grad:
            groups["scale" if name.startswith("scale.") else "matrices" if p.ndim >= 2 else "vectors"].append(p)
    made = [
        {"params": groups["matrices"], "weight_decay": config.weight_decay, "lr_share": 1.0},
        {"params": groups["vectors"], "weight_decay": 0.0, "lr_share": 1.0},
        {"params": groups["scale"], "weight_decay": 0.0, "lr_share": config.scale_lr},
    ]
    made = [group for group in made if group["params"]]
    if config.name == "adafactor":
        return Adafactor(made, lr=config.lr, betas=config.betas, weight_decay=config.weight_decay)
    return torch.optim.AdamW(made, lr=config.lr, betas=config.betas, eps=config.eps)


def learning_rate(step: int, steps: int, config: OptimConfig) -> float:
    """Return the learning rate of a step, counted from 0: linear warm-up, then half a cosine to the final share.

    >>> config = OptimConfig(lr=1.0, warmup_steps=2)
    >>> [round(learning_rate(step, 6, config), 3) for step in range(6)]
    [0.5, 1.0, 1.0, 0.854, 0.5, 0.146]
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    progress = (step - config.warmup_steps) / max(1, steps - config.warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return config.lr * (config.final_lr_share + (1 - config.final_lr_share) * cosine)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of every group to its share of `lr`."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_share"]


class AveragedWeights:
    """An exponential moving average of the trained weights.

    After step t (from 1): ``average += (1 - min(decay, (1 + t) / (10 + t))) * (weight - average)``. The decay is
    smaller in the first steps, so the initial weights lose their influence quickly.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model, self.decay = model, decay
        self.average = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Update the average with the weights after this step."""
        keep = min(self.decay, (1 + step) / (10 + step))
        weights = {name: local(p.detach()) for name, p in self.model.named_parameters() if p.requires_grad}
        names = list(self.average)
        torch._foreach_lerp_([local(self.average[n]) for n in names], [weights[n] for n in names], 1 - keep)

    @contextmanager
    def used(self) -> Iterator[None]:
        """Context manager: inside it, the model has the averaged weights."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for name, p in self.model.named_parameters():
            if name in self.average:
                kept = p.detach().clone()
                p.copy_(self.average[name])
                self.average[name].copy_(kept)


def optimizer_tensors(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """The optimizer's state as named tensors: ``<parameter>/<entry>``."""
    names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
    return {
        f"{names[p]}/{entry}": value if isinstance(value, Tensor) else torch.tensor(value)
        for p, state in optimizer.state.items()
        for entry, value in state.items()
    }


def restore_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Restore the state that `optimizer_tensors` returned. Entries named ``step`` stay on the CPU."""
    parameters = dict(model.named_parameters())
    optimizer.state.clear()
    for key, value in tensors.items():
        name, _, entry = key.rpartition("/")
        p = parameters[name]
        shard = like(value, p) if value.shape == p.shape else value
        optimizer.state[p][entry] = value.clone() if entry == "step" else shard.to(p.device, copy=True)
