"""Load the model of a run with the weights of one of its checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from tilewise.errors import CheckpointError
from tilewise.train.checkpoint import (
    Checkpoint,
    latest_checkpoint,
    list_checkpoints,
    open_checkpoint,
    put_weights,
    step_name,
    step_of,
)
from tilewise.train.config import RunConfig
from tilewise.train.distributed import choose_device
from tilewise.train.evaluate import Encoders
from tilewise.train.models import TwoTowers
from tilewise.train.run_folder import RunFolder
from tilewise.train.terminal import say

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True)
class Choice:
    """The checkpoint that is used, and why.

    Args:
        checkpoint: the checkpoint.
        why: the reason, as the end of a sentence.
        problems: sentences about checkpoints that an automatic choice would have preferred.
    """

    checkpoint: Checkpoint
    why: str
    problems: tuple[str, ...] = ()

    @property
    def step(self) -> int:
        """Number of steps done."""
        return self.checkpoint.step

    def sentence(self) -> str:
        """Return the path, the step and the reason."""
        return f"checkpoint: {self.checkpoint.path}, step {self.step}: {self.why}"


def load_run(
    folder: str | Path, device: str = "auto", which: str | int = "auto", console: Console | None = None
) -> tuple[RunConfig, Encoders, Choice]:
    """Load the model of a run at a checkpoint. Averaged weights are used if the run has them.

    The console shows which checkpoint is used, and why. Nothing is shown without one.
    """
    run = RunFolder(folder)
    config = run.read_config()
    choice = choose_checkpoint(run, which)
    for problem in choice.problems:
        say(console, problem)
    say(console, choice.sentence())
    place = choose_device(device)
    model = load_weights(run.build_model(config, for_training=False), choice.checkpoint).to(place)
    return config, Encoders(model, place, config.loop.precision, config.loop.chunk_size), choice


def choose_checkpoint(run: RunFolder, which: str | int = "auto") -> Choice:
    """Choose a checkpoint.

    Args:
        run: the folder of the run.
        which: "best" (by held-out recall), "last", or a step that was kept. If that one is missing or damaged, an error
            is raised. "auto" takes the best one, and another one if that is not possible.
    """
    kept = {str(step_of(path)): path for path in list_checkpoints(run.checkpoints)}
    if not kept:
        raise CheckpointError(f"{run.path} has no checkpoint yet; train it first: tilewise train {run.config_file}")
    name = str(which)
    if name == "auto":
        return _automatic(run)
    if name not in ("best", "last", *kept):
        raise CheckpointError(
            f"{run.path} keeps no checkpoint {which!r}; there are auto, best, last, {', '.join(kept)}"
        )
    try:
        if name == "best":
            return Choice(_best(run, open_checkpoint([*kept.values()][-1])), "the best by held-out recall")
        if name == "last":
            return Choice(open_checkpoint([*kept.values()][-1]), "the last one")
        return Choice(open_checkpoint(kept[name]), "the given step")
    except CheckpointError as error:
        whole = [step for step, path in kept.items() if _is_whole(path)]
        there = f"There are whole checkpoints of the steps {', '.join(whole)}" if whole else "There is no whole one"
        advice = "Pass one of these steps, or auto" if whole else "Continue or repeat the training"
        raise CheckpointError(
            f"the checkpoint {name!r} of {run.path} cannot be used: {error}. {there}. {advice}"
        ) from None


def _automatic(run: RunFolder) -> Choice:
    """Return the best checkpoint, as the newest whole one names it. If that is not possible, return the newest one."""
    latest, damaged = latest_checkpoint(run.checkpoints)
    assert latest is not None
    problems = tuple(f"ignored a damaged checkpoint: {problem}" for problem in damaged)
    last = "the last whole one" if damaged else "the last one"
    if not latest.state["best"]:
        return Choice(latest, f"{last}, because no evaluation has chosen a best one", problems)
    try:
        doubt = ", as far as the last whole one knows" if damaged else ""
        return Choice(_best(run, latest), f"the best by held-out recall{doubt}", problems)
    except CheckpointError as error:
        return Choice(latest, f"{last}, because the best one cannot be used", (*problems, str(error)))


def _best(run: RunFolder, newest: Checkpoint) -> Checkpoint:
    """Return the checkpoint that the newest one names as the best."""
    best = newest.state["best"]
    if not best:
        raise CheckpointError("no evaluation has chosen a best one")
    path = run.checkpoints / step_name(int(best["step"]))
    if path == newest.path:
        return newest
    if not path.is_dir():
        raise CheckpointError(f"the best checkpoint, {path}, is missing")
    try:
        return open_checkpoint(path)
    except CheckpointError as error:
        raise CheckpointError(f"the best checkpoint is damaged: {error}") from error


def _is_whole(path: Path) -> bool:
    try:
        open_checkpoint(path)
    except CheckpointError:
        return False
    return True


def load_weights(model: TwoTowers, checkpoint: Checkpoint) -> TwoTowers:
    """Load the weights of a checkpoint into a model. Averaged weights are used if there are any."""
    put_weights(model, checkpoint)
    average = checkpoint.tensors("average")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in average:
                parameter.copy_(average[name])
    return model
