"""The folder of a run: lock, configuration and metrics."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tilewise.errors import CheckpointError, ConfigError
from tilewise.train.checkpoint import clear_leftovers, list_checkpoints
from tilewise.train.config import RunConfig, load_config
from tilewise.train.models import TwoTowers, build_described, build_model
from tilewise.train.settings import to_toml
from tilewise.train.trackers import Tracker
from tilewise.train.untrusted import is_same_file, parse_json
from tilewise.train.writing import UNTOUCHED, make_folder, one_sentence, write_atomically


def why_no_run(path: Path) -> str:
    """Return a sentence that explains why a path is not the folder of a run, and what to give instead."""
    if not path.exists():
        return f"{path} does not exist. Give the folder of a run: its output.folder"
    if not path.is_dir():
        beside = f", which may be {path.parent}" if path.name in ("config.toml", "status.json") else ""
        return f"{path} is a file, not a run of tilewise. Give the folder of a run{beside}"
    if (path / "tilewise.json").is_file():
        return f"{path} is no run of tilewise. It is an exported model: tilewise.train.load_model reads it"
    runs = sorted(str(found.parent) for found in path.glob("*/config.toml"))
    advice = f"There are runs below it: {', '.join(runs[:5])}" if runs else "Give the output.folder of a run"
    return f"{path} is no run of tilewise: it has no config.toml. {advice}"


def check_not_moved(config_file: Path, config: RunConfig, overrides: Sequence[str]) -> None:
    """Raise `ConfigError` for the settings of a run that was moved: a new run would start in the old folder.

    Args:
        config_file: file of the settings.
        config: the settings.
        overrides: overrides from the command line. One of output.folder makes the choice explicit.
    """
    home = config_file.parent
    if config_file.name != "config.toml" or any(given.startswith("output.folder=") for given in overrides):
        return
    if list_checkpoints(home / "checkpoints") and not is_same_file(config.output.folder, home):
        raise ConfigError(
            f"{home} is the folder of a run, but its settings have output.folder={config.output.folder!r}, which is "
            f"another folder. To continue the run, add output.folder={home}. To train a new run, add its folder"
        )


class RunFolder:
    """Paths of a run.

    Args:
        path: the folder.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config_file = self.path / "config.toml"
        self.metrics_file = self.path / "metrics.jsonl"
        self.checkpoints = self.path / "checkpoints"
        self.model = self.path / "model"
        self.report = self.path / "report.html"

    def read_config(self) -> RunConfig:
        """Return the configuration of the run."""
        if not self.config_file.is_file():
            raise ConfigError(why_no_run(self.path))
        return load_config(self.config_file)

    def save_config(self, config: RunConfig) -> None:
        """Write the configuration to the run folder."""
        write_atomically(self.config_file, to_toml(config), UNTOUCHED)

    def build_model(self, config: RunConfig, *, for_training: bool = True) -> TwoTowers:
        """Build the model of the run, on the CPU. A model that is not trained further starts faster.

        The model of a run with a checkpoint is built from its description in the run folder, and the weights come from
        the checkpoint. The initial folder or hub id is not used again. A new run is built from its settings.
        """
        if not (self.model.is_dir() and list_checkpoints(self.checkpoints)):
            return build_model(config)
        model = build_described(self.model, for_training=for_training)
        if config.model.lock_image:
            model.lock_image()
        return model

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the folder for one process. The operating system releases the lock when the process ends."""
        try:
            make_folder(self.path)
            handle = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise CheckpointError(
                f"cannot write to the run's folder {self.path}: {error.strerror or error}. Choose another output.folder"
            ) from error
        try:
            if not _taken(handle):
                raise CheckpointError(
                    f"another process is training in {self.path}. Wait for it, or choose another output.folder"
                )
            os.utime(handle)  # `tilewise status` compares this time with that of status.json
            clear_leftovers(self.path)
            clear_leftovers(self.checkpoints)
            yield
        finally:
            os.close(handle)

    def read_metrics(self) -> list[dict[str, Any]]:
        """Return the lines of metrics.jsonl that are whole."""
        return self.check_metrics()[0]

    def check_metrics(self) -> tuple[list[dict[str, Any]], list[int]]:
        """Return the lines of metrics.jsonl that are whole, and the numbers of the damaged ones.

        A last line without a line break was cut short by a crash. It is left out and is not called damaged.
        """
        if not self.metrics_file.is_file():
            return [], []
        lines: list[dict[str, Any]] = []
        damaged: list[int] = []
        *whole, rest = self.metrics_file.read_bytes().split(b"\n")
        for number, text in enumerate([*whole, rest], 1):
            line = _metrics_line(text)
            if line is not None:
                lines.append(line)
            elif number <= len(whole):
                damaged.append(number)
        return lines, damaged


def _metrics_line(text: bytes) -> dict[str, Any] | None:
    """Return one line of metrics.jsonl, or None if it is damaged."""
    try:
        line = parse_json(text.decode("utf-8"))
    except ValueError:
        return None
    if not isinstance(line, dict) or not isinstance(line.get("kind"), str):
        return None
    return line if isinstance(line.get("step"), int) else None


def _taken(handle: int) -> bool:
    """Lock an open file. ``tilewise status`` holds the lock for a moment, so try more than once."""
    for pause_s in (0.05, 0.2, 0.0):
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError:
            time.sleep(pause_s)
    return False


class MetricsLog:
    """Appends to metrics.jsonl and to the trackers.

    Args:
        folder: folder of the run.
        step: number of steps done. Later lines, written after the last checkpoint, are removed.
        trackers: TensorBoard and others.

    Attributes:
        damaged: the numbers of the lines that were damaged, and are no longer in the file.
        evaluated: whether the file has the evaluation of `step`.
    """

    def __init__(self, folder: RunFolder, step: int, trackers: Sequence[Tracker] = ()) -> None:
        lines, self.damaged = folder.check_metrics()
        kept = [line for line in lines if line["step"] <= step]
        self.evaluated = any(line["step"] == step and line["kind"] == "eval" for line in kept)
        self._path, self._trackers = folder.metrics_file, trackers
        write_atomically(self._path, "".join(json.dumps(line) + "\n" for line in kept), UNTOUCHED)
        with one_sentence(self._path, UNTOUCHED):
            self._file = self._path.open("a", encoding="utf-8")

    def write(self, step: int, kind: str, values: dict[str, Any]) -> None:
        """Write one line. Trackers get the numbers as ``kind/name``."""
        with one_sentence(self._path, UNTOUCHED):
            self._file.write(json.dumps({"step": step, "kind": kind, **values}) + "\n")
            self._file.flush()
        numbers = {f"{kind}/{name}": value for name, value in values.items() if isinstance(value, int | float)}
        for tracker in self._trackers:
            tracker.write(step, numbers)

    def close(self) -> None:
        """Close the file and the trackers. Every line was flushed when it was written, or its error was raised."""
        with suppress(OSError):
            self._file.close()
        for tracker in self._trackers:
            tracker.close()
