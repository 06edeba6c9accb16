"""Progress of a ranking or a search: a progress bar, or a callback."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from tilewise.errors import DtypeError
from tilewise.kernels import ranks as kernel

Progress = Callable[[int, int], None]


def check_progress(progress: bool | Progress) -> None:
    """Check that progress is a bool or a function."""
    if not callable(progress) and not isinstance(progress, bool):
        raise DtypeError(
            "progress is True, False, or a function of (pairs done, all pairs), got "
            f"{type(progress).__name__} {progress!r:.60}. Pass one of these"
        )


@contextmanager
def reporter(
    progress: bool | Progress, total: int, device: torch.device, title: str = "ranking"
) -> Iterator[kernel.Advance | None]:
    """Yield the function that the tile loops call to report progress, or None."""
    if progress is False or (progress is True and importlib.util.find_spec("rich") is None):
        yield None
        return
    done = 0

    def report(pairs: int) -> None:
        nonlocal done
        done += pairs
        if device.type != "cpu":  # launches are asynchronous
            torch.accelerator.synchronize(device)
        show(done, total)

    if callable(progress):
        show = progress
        yield report
        return
    from rich.progress import Progress as RichProgress

    with RichProgress() as bar:
        task = bar.add_task(title, total=total)

        def show(done: int, total: int) -> None:
            bar.update(task, completed=done)

        yield report
