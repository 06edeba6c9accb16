"""Preparation of a run: its model, a batch size that fits the data, and its number of steps."""

from __future__ import annotations

from dataclasses import replace

import torch

from tilewise.errors import ConfigError, DataError, TilewiseError
from tilewise.train.config import LoopConfig, RunConfig
from tilewise.train.messages import Messages
from tilewise.train.models import TwoTowers
from tilewise.train.run_folder import RunFolder
from tilewise.train.settings import to_dict

AUTO_EPOCHS, LEAST_STEPS = 8, 200  # the length of a run if the settings leave it open


def build_model(folder: RunFolder, config: RunConfig, device: torch.device) -> TwoTowers:
    """The model of the settings, on the device."""
    try:
        return folder.build_model(config).to(device)
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, TilewiseError):
            raise
        sizes = ", ".join(
            f"model.{name}={value}" for name, value in to_dict(config.model).items() if isinstance(value, int)
        )
        why = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"the model {config.model.name!r} cannot be built on {device}: {why}. The sizes are {sizes}. Choose "
            "smaller ones"
        ) from error


def fit_batch(config: RunConfig, pairs: int, ranks: int, messages: Messages) -> RunConfig:
    """The settings with a batch that is no larger than the data."""
    least = max(2, ranks)
    if pairs < least:
        share = config.data.source in ("folder", "table") and config.data.eval_share and not config.data.eval_path
        advice = ", or set data.eval_share=0, so that no images are held out" if share else ""
        raise DataError(
            f"training needs at least {least} pairs{' (one per rank)' if least > 2 else ''}, the data has {pairs}"
            f"{' in addition to the held-out images' if share else ''}. Give more data{advice}"
        )
    size = max(least, min(config.loop.batch_size, pairs))
    if size >= config.loop.batch_size:
        return config
    messages.say(f"there are {pairs:,} training pairs, so a batch has {size:,} instead of {config.loop.batch_size:,}")
    return replace(config, loop=replace(config.loop, batch_size=size))


def total_steps(config: LoopConfig, steps_per_epoch: int) -> int:
    """The number of steps of a whole run."""
    if config.steps or config.epochs:
        return config.steps or max(1, round(config.epochs * steps_per_epoch))
    return max(LEAST_STEPS, AUTO_EPOCHS * steps_per_epoch)
