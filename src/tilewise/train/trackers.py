"""Trackers of a run: TensorBoard events, and Weights & Biases if the settings name a project."""

from __future__ import annotations

import importlib.util
import secrets
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from tilewise.errors import ConfigError
from tilewise.train.config import RunConfig
from tilewise.train.settings import to_dict
from tilewise.train.writing import UNTOUCHED, one_sentence, write_atomically

ID_FILE = "wandb_id.txt"


class Tracker(Protocol):
    """Takes the numbers of a step."""

    def write(self, step: int, numbers: dict[str, float]) -> None:
        """Write named numbers, such as ``train/loss``."""

    def close(self) -> None:
        """Flush all numbers and close the tracker."""


def check_trackers(config: RunConfig) -> None:
    """Refuse a tracker whose package is missing, before any data is read."""
    for given, setting, package in (
        (config.output.tensorboard, "output.tensorboard=true", "tensorboard"),
        (bool(config.output.wandb), f"output.wandb={config.output.wandb!r}", "wandb"),
    ):
        if given and importlib.util.find_spec(package) is None:
            off = "false" if package == "tensorboard" else "''"
            raise ConfigError(
                f"{setting} needs the package {package}, which is not installed. Install it (pip install {package}), "
                f"or set output.{package}={off}"
            )


def open_trackers(config: RunConfig, folder: Path, step: int) -> list[Tracker]:
    """Open the trackers that the settings name.

    Args:
        config: settings of the run.
        folder: folder of the run.
        step: number of steps done.
    """
    check_trackers(config)
    made: list[Tracker] = []
    if config.output.tensorboard:
        made.append(TensorBoard(folder / "tensorboard", step))
    if config.output.wandb:
        made.append(WeightsAndBiases(config, folder, step))
    return made


class TensorBoard:
    """Events in a folder. Those after `step`, written after the last checkpoint, are hidden."""

    def __init__(self, path: Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._path = path
        with self._writing():
            self._writer = SummaryWriter(str(path), purge_step=step + 1)

    def _writing(self) -> AbstractContextManager[None]:
        return one_sentence(f"the TensorBoard events to {self._path}", UNTOUCHED)

    def write(self, step: int, numbers: dict[str, float]) -> None:
        """Write named numbers."""
        with self._writing():
            for name, value in numbers.items():
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush the events."""
        with self._writing():
            self._writer.close()


class WeightsAndBiases:
    """A run in a project of Weights & Biases. A run that continues in its folder also continues in the project.

    Args:
        config: settings of the run; ``output.wandb`` is the project.
        folder: folder of the run. It keeps the id of the run in ``wandb_id.txt``.
        step: number of steps done. 0 begins a new run.
    """

    def __init__(self, config: RunConfig, folder: Path, step: int) -> None:
        import wandb

        file = folder / ID_FILE
        if step == 0 or not file.is_file():
            write_atomically(file, secrets.token_hex(8), UNTOUCHED)
        self._run: Any = wandb.init(
            project=config.output.wandb, name=folder.resolve().name, dir=str(folder), config=to_dict(config),
            id=file.read_text(encoding="utf-8").strip(), resume="allow",
        )  # fmt: skip

    def write(self, step: int, numbers: dict[str, float]) -> None:
        """Write named numbers."""
        self._run.log(numbers, step=step)

    def close(self) -> None:
        """Send the remaining numbers and end the run."""
        self._run.finish()
