"""Save the state of a run to a checkpoint, and load it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tilewise.errors import CheckpointError
from tilewise.train.checkpoint import Checkpoint, prune, put_weights, save_checkpoint
from tilewise.train.config import RunConfig
from tilewise.train.data import Position
from tilewise.train.distributed import World
from tilewise.train.memory import MemoryUse
from tilewise.train.models import TwoTowers
from tilewise.train.optim import AveragedWeights, optimizer_tensors, restore_optimizer
from tilewise.train.plan import Plan, plan_of
from tilewise.train.settings import to_dict
from tilewise.train.sharding import gathered, like, local


@dataclass
class RunState:
    """The state of a run after `step` steps.

    The learning rate (given the plan), the order of the data, its augmentation and the random state of a step are
    functions of the settings and the step. They are not part of the state.

    Args:
        model, optimizer, average, scaler: the trained objects. The last two may be None.
        step: number of steps done.
        position: position of the next batch.
        best: step and value of the best evaluation.
        metrics: metrics of the last evaluation.
        skips: skipped records by reason, as seen by this rank.
        skipped: number of rows left out of all batches, over all ranks.
        memory: memory of a step, once it was measured.
        plan: length and learning rates of the run.
        pairs: number of training pairs. Another copy of the data must have the same number.
        tensors: weights, optimizer state and averaged weights for a checkpoint, by file and name: see `collect`.
    """

    model: TwoTowers
    optimizer: torch.optim.Optimizer
    average: AveragedWeights | None
    scaler: Any
    step: int = 0
    position: Position = field(default_factory=Position)
    best: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    skips: dict[str, Any] = field(default_factory=lambda: {"counts": {}, "once": []})
    skipped: int = 0
    memory: MemoryUse | None = None
    plan: Plan = ()
    pairs: int = 0
    tensors: dict[str, dict[str, Tensor]] = field(default_factory=dict)

    def collect(self, world: World) -> None:
        """Fill `tensors` on the first rank, from the shards of all ranks. Every rank calls this before `save`."""
        parts = {"model": dict(self.model.state_dict()), "optimizer": optimizer_tensors(self.optimizer, self.model)}
        if self.average is not None:
            parts["average"] = self.average.average
        self.tensors = {name: gathered(part, world) for name, part in parts.items()}

    def save(self, folder: Path, config: RunConfig) -> None:
        """Write a checkpoint of the collected tensors, and remove those that are no longer kept."""
        rest = {
            "position": self.position.state(),
            "skips": self.skips,
            "skipped": self.skipped,
            "best": self.best,
            "metrics": self.metrics,
            "scaler": self.scaler.state_dict() if self.scaler is not None else {},
            "memory": self.memory.state() if self.memory is not None else {},
            "plan": [list(leg) for leg in self.plan],
            "pairs": self.pairs,
            "config": to_dict(config),
        }
        save_checkpoint(folder, self.step, self.tensors, rest)
        prune(folder, config.output.keep_last, int(self.best["step"]) if self.best else None, self.step)

    def load(self, checkpoint: Checkpoint) -> None:
        """Load a checkpoint."""
        rest = checkpoint.state
        put_weights(self.model, checkpoint)
        try:
            restore_optimizer(self.optimizer, self.model, checkpoint.tensors("optimizer"))
            if self.average is not None:
                for name, value in checkpoint.tensors("average").items():
                    local(self.average.average[name]).copy_(local(like(value, self.average.average[name])))
            if self.scaler is not None:
                self.scaler.load_state_dict(rest["scaler"])
            self.step, self.position = checkpoint.step, Position(**rest["position"])
            self.best, self.metrics = rest["best"], rest["metrics"]
            self.skips, self.skipped = rest["skips"], rest["skipped"]
            self.plan = plan_of(rest["plan"]) if "plan" in rest else self.plan
            if rest["memory"]:
                self.memory = MemoryUse(**{key: rest["memory"][key] for key in MemoryUse.__dataclass_fields__})
        except (KeyError, TypeError, RuntimeError) as error:
            raise CheckpointError(f"{checkpoint.path} does not fit this model or run: {error}") from error
