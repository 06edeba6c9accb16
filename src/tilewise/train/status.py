"""The status of a run in ``status.json``. It distinguishes a run that was stopped and saved from one that crashed."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tilewise.errors import CheckpointError, ConfigError
from tilewise.train.checkpoint import list_checkpoints
from tilewise.train.untrusted import STATE_LIMIT, parse_json, read_regular
from tilewise.train.writing import UNTOUCHED, write_atomically

FILE = "status.json"
# sysexits.h calls 75 a temporary failure: try again later.
EXIT_CODES = {"finished": 0, "failed": 1, "starting": 3, "running": 3, "stopped": 75, "killed": 75}


@dataclass(frozen=True)
class Status:
    """The status of a run.

    Args:
        status: "running", "finished" (all steps done), "stopped" (by a signal, and saved) or "failed" (by an error).
            `read_status` also returns "killed" (the file says running, but no process holds the lock) and "starting" (a
            process holds the lock and has not written the file yet).
        step: number of steps done. For a running or killed run it is that of the last line in metrics.jsonl.
        steps: number of planned steps.
        signal: the signal that stopped the run, or 0.
        error: the error of a failed run.
        checkpoint: the last checkpoint when the status is read, from which the run would continue. Empty if there is
            none.
    """

    status: str
    step: int
    steps: int
    signal: int = 0
    error: str = ""
    checkpoint: str = ""

    @property
    def exit_code(self) -> int:
        """Exit code of ``tilewise status``."""
        return EXIT_CODES[self.status]

    def sentence(self) -> str:
        """Return the status as a sentence.

        >>> Status("stopped", 20, 100, signal=15).sentence()
        'stopped by signal 15 after step 20 of 100, and saved. The same command continues it'
        """
        place = f"after step {self.step} of {self.steps}"
        again = f"The same command continues it from {self.checkpoint}"
        if not self.checkpoint:
            again = "No checkpoint had been written; the same command begins it anew"
        last = f"; last checkpoint: {self.checkpoint}" if self.checkpoint else "; no checkpoint yet"
        return {
            "finished": f"finished: {self.step} steps",
            "starting": f"starting{last}",
            "running": f"running, {place}{last}",
            "stopped": f"stopped by signal {self.signal} {place}, and saved. The same command continues it"
            if self.step
            else f"stopped by signal {self.signal} before the first step. The same command begins it anew",
            "killed": f"killed while it was running, {place}. {again}",
            "failed": f"failed {place}: {self.error.rstrip('.')}{last}",
        }[self.status]


def write_status(folder: Path, status: Status) -> None:
    """Write the status to the run folder."""
    write_atomically(folder / FILE, json.dumps(asdict(status), indent=1) + "\n", UNTOUCHED)


def read_status(folder: Path) -> Status:
    """Return the status of the run in a folder."""
    try:
        lock, kept = folder / ".lock", list_checkpoints(folder / "checkpoints")
        checkpoint = str(kept[-1]) if kept else ""
        held = _is_held(lock)
        if held and _is_older(folder / FILE, lock):
            return Status("starting", 0, 0, checkpoint=checkpoint)
        status = Status(**parse_json(read_regular(folder / FILE, STATE_LIMIT).decode("utf-8")))
        _check(status)
    except (FileNotFoundError, NotADirectoryError) as error:
        from tilewise.train.run_folder import why_no_run

        if (folder / "config.toml").is_file():
            raise ConfigError(f"{folder} has no {FILE}, so the status of its run is unknown. Train it") from error
        raise ConfigError(why_no_run(folder)) from error
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            f"cannot read {folder / FILE}: {error}. It is written again when the run continues"
        ) from error
    if status.status == "running":
        step = max(status.step, _last_logged(folder / "metrics.jsonl"))
        return replace(status, status="running" if held else "killed", step=step, checkpoint=checkpoint)
    return replace(status, checkpoint=checkpoint)


def _check(status: Status) -> None:
    if not isinstance(status.status, str) or status.status not in EXIT_CODES:
        raise ValueError(f"status {status.status!r}")
    for name in ("step", "steps", "signal"):
        if not isinstance(getattr(status, name), int):
            raise ValueError(f"{name} is not a whole number")
    if not isinstance(status.error, str):
        raise ValueError("error is not text")


def _is_older(file: Path, lock: Path) -> bool:
    """Return whether a file is missing, or was written before the lock was taken."""
    try:
        return file.stat().st_mtime_ns < lock.stat().st_mtime_ns
    except FileNotFoundError:
        return True


def _last_logged(metrics: Path) -> int:
    """Return the step of the last whole line, or 0."""
    try:
        with metrics.open("rb") as file:
            file.seek(max(0, metrics.stat().st_size - 16384))
            lines = file.read().split(b"\n")[:-1]
        return int(parse_json(lines[-1])["step"])
    except (OSError, ValueError, KeyError, IndexError, TypeError, OverflowError):
        return 0


def check_free(folder: Path) -> None:
    """Refuse a folder in which another process trains, before any data is read."""
    if _is_held(folder / ".lock"):
        raise CheckpointError(f"another process is training in {folder}. Wait for it, or choose another output.folder")


def _is_held(lock: Path) -> bool:
    """Return whether a process on this machine holds the lock."""
    try:
        handle = os.open(lock, os.O_RDONLY | os.O_NONBLOCK)  # a FIFO would block
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(handle)
    return False


@contextmanager
def status_kept(folder: Path, now: Callable[[], tuple[int, int]], signal: Callable[[], int]) -> Iterator[None]:
    """Write the status of a run: running inside the block, then finished, stopped or failed.

    Args:
        folder: folder of the run.
        now: returns the number of steps done and planned.
        signal: returns the signal that stopped the run, or 0.
    """
    write_status(folder, Status("running", *now()))
    try:
        yield
    except BaseException as error:
        text = str(error).strip() or type(error).__name__
        with suppress(CheckpointError):  # for example a full disk; the error of the run is more important
            write_status(folder, Status("failed", *now(), error=text))
        raise
    step, steps = now()
    write_status(folder, Status("finished" if step >= steps else "stopped", step, steps, signal()))
