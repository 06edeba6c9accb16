"""Load the model of a run with the weights of one of its checkpoints."""

from __future__ import annotations

from pathlib import Path

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


def load_run(
    folder: str | Path, device: str = "auto", which: str | int = "best"
) -> tuple[RunConfig, Encoders, Checkpoint]:
    """Load the model of a run at a checkpoint, by default the best. Averaged weights are used if the run has them."""
    run = RunFolder(folder)
    config = run.read_config()
    checkpoint = choose_checkpoint(run, which)
    place = choose_device(device)
    model = load_weights(run.build_model(config, for_training=False), checkpoint).to(place)
    return config, Encoders(model, place, config.loop.precision, config.loop.chunk_size), checkpoint


def choose_checkpoint(run: RunFolder, which: str | int = "best") -> Checkpoint:
    """Return the "best" checkpoint (the last one if nothing was evaluated), the "last" one, or that of a step."""
    latest, _ = latest_checkpoint(run.checkpoints)
    if latest is None:
        raise CheckpointError(f"{run.path} has no checkpoint yet; train it first: tilewise train {run.config_file}")
    if which == "last":
        return latest
    if which == "best":
        best = latest.state.get("best") or {}
        path = run.checkpoints / step_name(int(best["step"])) if best else latest.path
        return open_checkpoint(path) if path != latest.path and path.is_dir() else latest
    kept = {step_of(path): path for path in list_checkpoints(run.checkpoints)}
    if not str(which).isdecimal() or int(which) not in kept:
        raise CheckpointError(
            f"{run.path} keeps no checkpoint {which!r}; there are best, last, {', '.join(map(str, kept))}"
        )
    return open_checkpoint(kept[int(which)])


def load_weights(model: TwoTowers, checkpoint: Checkpoint) -> TwoTowers:
    """Load the weights of a checkpoint into a model. Averaged weights are used if there are any."""
    put_weights(model, checkpoint)
    average = checkpoint.tensors("average")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in average:
                parameter.copy_(average[name])
    return model
