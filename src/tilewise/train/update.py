"""One step of a run: the loss of a batch, its gradients, and new weights."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import torch

from tilewise.train.checkpoint import latest_checkpoint
from tilewise.train.config import RunConfig
from tilewise.train.data import Batch
from tilewise.train.distributed import World
from tilewise.train.diverged import DivergedError, likely_cause
from tilewise.train.objective import Objective
from tilewise.train.optim import set_learning_rate
from tilewise.train.plan import planned_rate
from tilewise.train.run_state import RunState
from tilewise.train.sharding import clip_gradients
from tilewise.train.signals import StopRequest
from tilewise.train.step_memory import memory_counted


def step_seed(seed: int, step: int, rank: int) -> int:
    """Return the seed of a step (dropout). It is a function of its arguments, so checkpoints need no random state."""
    return random.Random(f"step/{seed}/{step}/{rank}").getrandbits(62)


class Update:
    """Changes the state of a run, batch by batch.

    Args:
        state: the state of the run.
        objective: computes the loss and its gradients.
        config: settings of the run.
        world: the ranks.
        checkpoints: the folder that an error message points to.
    """

    def __init__(
        self, state: RunState, objective: Objective, config: RunConfig, world: World, checkpoints: Path
    ) -> None:
        self.state, self.objective, self.config, self.world = state, objective, config, world
        self.model, self.checkpoints = state.model, checkpoints

    def run(self, batch: Batch, stop: StopRequest) -> tuple[dict[str, Any], bool]:
        """Compute the loss and its gradients, and update the weights.

        Returns the line of the log, and whether any rank received a stop signal.
        """
        config, state = self.config.optim, self.state
        self.model.train()
        torch.manual_seed(step_seed(self.config.loop.seed, state.step, self.world.rank))
        lr = planned_rate(state.step, state.plan, config)
        set_learning_rate(state.optimizer, lr)
        state.optimizer.zero_grad(set_to_none=True)
        with memory_counted(state, self.objective, self.config, batch):
            loss = self.objective.step(batch)
        scaler = self.objective.scaler
        if scaler is not None:
            scaler.unscale_(state.optimizer)
        norm = clip_gradients(self.model.parameters(), config.clip_norm)
        loss_sum, rows, stops = self.world.total(float(loss), len(batch.ids), float(stop.signal_number != 0))
        value, grad_norm = loss_sum / self.world.size, float(norm)
        self._check_finite(value, grad_norm, lr)
        if scaler is not None:
            scaler.step(state.optimizer)
            scaler.update()
        else:
            state.optimizer.step()
        self.model.scale.clamp()
        state.step, state.position = state.step + 1, batch.after
        state.skips, state.skipped = batch.skips, state.skipped + self.config.loop.batch_size - int(rows)
        if state.average is not None:
            state.average.update(state.step)
        line = {
            "epoch": batch.epoch, "loss": value, "lr": lr, "scale": float(self.model.scale().detach()),
            "grad_norm": grad_norm, "rows": int(rows), "skipped": state.skipped,
        }  # fmt: skip
        return line, stops > 0

    def _check_finite(self, loss: float, norm: float, lr: float) -> None:
        overflow = self.objective.scaler is not None and not math.isfinite(norm)  # GradScaler then skips the step
        if math.isfinite(loss) and (math.isfinite(norm) or overflow):
            return
        saved = "Rank 0 names the last good checkpoint"
        if self.world.is_first:
            kept, _ = latest_checkpoint(self.checkpoints)
            saved = f"The last good checkpoint is {kept.path}" if kept else "No checkpoint had been written yet"
        cause = likely_cause(self.model, loss, lr, self.config.loop.precision)
        raise DivergedError(
            f"step {self.state.step + 1}: the loss is {loss} and the gradient norm {norm}. Likely cause: {cause}. "
            f"{saved}. Lower optim.lr, lengthen optim.warmup_steps, or clip more (optim.clip_norm)"
        )
