"""Checkpoints of safetensors and JSON. A checkpoint is written to a temporary name and renamed, so it is never partial.

A checkpoint is a folder ``step-00000100`` with ``model.safetensors``, ``optimizer.safetensors``, optionally
``average.safetensors``, and ``state.json``. ``state.json`` has the sizes and CRC-32 sums of the other files and a
CRC-32 sum of its own content. No file is unpickled.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilewise.errors import CheckpointError
from tilewise.train.saved_state import CHECKSUM, FORMAT, check_state, state_checksum
from tilewise.train.sharding import like
from tilewise.train.untrusted import STATE_LIMIT, parse_json, read_regular
from tilewise.train.writing import make_folder, one_sentence, sync

if TYPE_CHECKING:
    from torch import Tensor, nn

    Tensors = Mapping[str, Tensor]

STEP_NAME = re.compile(r"step-[0-9]{8,18}")
LOCKED_HEAD = "image.body.project.weight"  # of a locked image tower, in checkpoints of earlier versions


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk whose files have been verified."""

    path: Path
    state: dict[str, Any]

    @property
    def step(self) -> int:
        """Number of steps done."""
        return int(self.state["step"])

    def tensors(self, name: str) -> dict[str, Tensor]:
        """Return the tensors of one file, such as "model". The result is empty if there is no such file."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        file = self.path / f"{name}.safetensors"
        if file.name not in self.state["files"]:
            return {}
        try:
            return load_file(file)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"cannot read {file}: {error}") from error


def step_name(step: int) -> str:
    """Return the folder name of a step.

    >>> step_name(100)
    'step-00000100'
    """
    return f"step-{step:08d}"


def save_checkpoint(folder: Path, step: int, tensors: Mapping[str, Tensors], state: Mapping[str, Any]) -> Path:
    """Write a checkpoint. If the write is interrupted, no partial checkpoint remains under its name.

    Args:
        folder: the folder of a run's checkpoints.
        step: number of steps done.
        tensors: maps a file name without suffix to named tensors.
        state: all other values, as plain JSON values.
    """
    from safetensors.torch import save_file

    final, aside = folder / step_name(step), folder / f".writing-{step_name(step)}-{os.getpid()}"
    with one_sentence(f"the checkpoint of step {step} to {folder}", "Earlier checkpoints are untouched"):
        old = None
        try:
            make_folder(folder)
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir()
            files = {}
            for name, content in tensors.items():
                file = aside / f"{name}.safetensors"
                save_file({key: value.detach().cpu().contiguous().clone() for key, value in content.items()}, file)
                sync(file)
                files[file.name] = _size_and_checksum(file)
            document = {**state, "format": FORMAT, "step": step, "files": files}
            document[CHECKSUM] = state_checksum(document)
            (aside / "state.json").write_text(json.dumps(document, indent=1), encoding="utf-8")
            sync(aside / "state.json")
            sync(aside)
            # An existing checkpoint of the same step is damaged or has no evaluation.
            old = _set_aside(final) if final.exists() else None
            aside.rename(final)
            sync(folder)
        except Exception:
            shutil.rmtree(aside, ignore_errors=True)
            if old is not None and not final.exists():
                old.rename(final)
            raise
        if old is not None:
            shutil.rmtree(old, ignore_errors=True)
    return final


def _size_and_checksum(file: Path) -> dict[str, int]:
    checksum = 0
    with file.open("rb") as stream:
        while block := stream.read(1 << 22):
            checksum = zlib.crc32(block, checksum)
    return {"bytes": file.stat().st_size, "crc32": checksum}


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a checkpoint. Raises `CheckpointError` if a file is missing, or if its size or checksum differs."""
    try:
        state = parse_json(read_regular(path / "state.json", STATE_LIMIT).decode("utf-8"))
        check_state(state, step_of(path))
    except OSError as error:
        raise CheckpointError(f"{path / 'state.json'} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise CheckpointError(f"{path / 'state.json'} is damaged: {error}") from error
    for name, recorded in state["files"].items():
        file = path / name
        try:
            same = file.is_file() and _size_and_checksum(file) == recorded
        except OSError as error:
            raise CheckpointError(f"{file} cannot be read: {error.strerror or error}") from error
        if not same:
            raise CheckpointError(f"{file} is missing or damaged (its size or checksum is not what was written)")
    return Checkpoint(path, state)


def put_weights(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Load the weights of a checkpoint into a model with the same names and shapes."""
    weights = checkpoint.tensors("model")
    try:
        there = model.state_dict()
        model.load_state_dict({key: like(value, there.get(key, value)) for key, value in weights.items()})
    except RuntimeError as error:
        why = f"{error}"
        if LOCKED_HEAD in weights and LOCKED_HEAD not in model.state_dict():
            why = (
                "an earlier version of tilewise added a random projection to a locked image tower "
                "(model.lock_image), and this version has none. Train it again in another output.folder"
            )
        raise CheckpointError(f"{checkpoint.path} does not fit the model of its run: {why}") from error


def step_of(path: Path) -> int:
    """Return the step in the name of a checkpoint's folder.

    >>> step_of(Path("checkpoints/step-00000100"))
    100
    """
    return int(path.name.removeprefix("step-"))


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoint folders, oldest first."""
    return sorted((p for p in folder.glob("step-*") if STEP_NAME.fullmatch(p.name) and p.is_dir()), key=step_of)


def latest_checkpoint(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """Return the newest undamaged checkpoint (None if there are none), and the problems of newer ones."""
    problems: list[str] = []
    for path in reversed(list_checkpoints(folder)):
        try:
            return open_checkpoint(path), problems
        except CheckpointError as error:
            problems.append(str(error))
    if problems:
        raise CheckpointError(f"no checkpoint in {folder} can be used: {'; '.join(problems)}")
    return None, problems


def clear_leftovers(folder: Path) -> None:
    """Remove the leftovers of an interrupted save."""
    for path in folder.glob(".writing-*"):
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


def prune(folder: Path, keep_last: int, best_step: int | None, step: int) -> None:
    """Keep the last few checkpoints up to this step, and the best one. Remove the other checkpoints up to this step.

    Checkpoints of later steps are damaged: the run continued from an earlier one. They are neither counted nor removed.
    """
    paths = [path for path in list_checkpoints(folder) if step_of(path) <= step]
    for path in paths[:-keep_last]:
        if step_of(path) != best_step:
            _remove(path)


def _remove(path: Path) -> None:
    """Remove a checkpoint. It is renamed first, so that a partial checkpoint never has its name."""
    with contextlib.suppress(OSError):
        path = _set_aside(path)
    shutil.rmtree(path, ignore_errors=True)


def _set_aside(path: Path) -> Path:
    """Rename a checkpoint to a name that `clear_leftovers` removes. Return the new path."""
    aside = path.with_name(f".writing-removed-{path.name}-{os.getpid()}")
    shutil.rmtree(aside, ignore_errors=True)
    return path.rename(aside)


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0


def check_room(folder: Path, bytes_per_checkpoint: int, count: int) -> None:
    """Check before training that the run folder can be written to and that `count` checkpoints fit on its disk.

    New checkpoints replace those that the run already has. The first new one is written before an old one is removed.
    """
    try:
        make_folder(folder)
        probe = folder / f".writing-probe-{os.getpid()}"
        probe.write_bytes(b"tilewise")
        probe.unlink()
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise CheckpointError(
            f"cannot write to the run's folder {folder}: {error.strerror or error}. Choose another output.folder"
        ) from error
    there = sum(_size(file) for path in list_checkpoints(folder / "checkpoints") for file in path.iterdir())
    if free < max(bytes_per_checkpoint * count - there, bytes_per_checkpoint):
        earlier = f"In addition to {there / 2**20:,.0f} MiB of earlier ones, " if there else ""
        raise CheckpointError(
            f"{earlier}{count} checkpoints of {bytes_per_checkpoint / 2**20:,.0f} MiB do not fit on the disk of "
            f"{folder}, which has {free / 2**20:,.0f} MiB free. Lower output.keep_last or choose another output.folder"
        )
