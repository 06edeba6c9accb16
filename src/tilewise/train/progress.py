"""Progress of a run: a live bar in a terminal, an occasional line elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tilewise.train.memory import MIB
from tilewise.train.terminal import say

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

LINE_EVERY_S = 10.0  # seconds between lines if there is no terminal


@contextmanager
def counted(console: Console | None, what: str) -> Iterator[Callable[[int, int], None] | None]:
    """Yield a function that takes the number of finished items and the total, and shows them.

    Args:
        console: output; None shows nothing.
        what: description of the work.
    """
    if console is None:
        yield None
    elif console.is_terminal:
        from rich import progress as rich

        name = rich.TextColumn("{task.description}", markup=False)
        columns = (name, rich.BarColumn(), rich.MofNCompleteColumn(), rich.TimeRemainingColumn())
        with rich.Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task(what, total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)
    else:
        said = time.monotonic()

        def watch(done: int, total: int) -> None:
            nonlocal said
            if time.monotonic() - said > LINE_EVERY_S:
                said = time.monotonic()
                say(console, f"{what}: {done:,} of {total:,}")

        yield watch


class RunProgress:
    """The progress bar of a run.

    Args:
        console: output; None shows nothing.
        steps: total number of steps.
        done: number of steps done so far.
    """

    def __init__(self, console: Console | None, steps: int, done: int) -> None:
        self.console, self.steps = console, steps
        self.recall = ""
        self._said = time.monotonic()
        self._bar: Progress | None = None
        if console is not None and console.is_terminal:
            self._bar = _make_bar(console)
            self._task = self._bar.add_task("train", total=steps, completed=done, facts="")
            self._bar.start()

    def step(self, step: int, line: dict[str, Any], speed: dict[str, float]) -> None:
        """Show a finished step."""
        if self.console is None:
            return
        facts = (
            f"loss {line['loss']:.3f}{self.recall}  {speed['pairs_per_second']:,.0f} pairs/s  "
            f"{speed['memory_bytes'] / MIB:,.0f} MiB"
        )
        if line["skipped"]:
            facts += f"  {line['skipped']} skipped"
        if self._bar is not None:
            self._bar.update(self._task, completed=step, facts=facts)
        elif time.monotonic() - self._said > LINE_EVERY_S or step == self.steps:
            self._said = time.monotonic()
            say(self.console, f"step {step}/{self.steps}  {facts}")

    def evaluating(self, done: int, total: int) -> None:
        """Show how many held-out images are encoded. No steps are done meanwhile."""
        facts = f"evaluating, image {done:,} of {total:,}"
        if self._bar is not None:
            self._bar.update(self._task, facts=facts)
        elif self.console is not None and time.monotonic() - self._said > LINE_EVERY_S:
            self._said = time.monotonic()
            say(self.console, facts)

    def evaluated(self, k: int, recall: float) -> None:
        """Show the result of an evaluation: text-to-image recall at k."""
        self.recall = f"  recall@{k} {100 * recall:.1f}%"

    def close(self) -> None:
        """Restore the terminal."""
        if self._bar is not None:
            self._bar.stop()


def _make_bar(console: Console) -> Progress:
    from rich import progress as rich
    from rich.table import Column

    def whole() -> Column:  # in a narrow terminal the bar becomes shorter and the text wraps, but numbers are not cut
        return Column(no_wrap=True)

    return rich.Progress(
        rich.TextColumn("[bold]training"), rich.BarColumn(bar_width=8 if console.width < 120 else None),
        rich.MofNCompleteColumn(table_column=whole()),
        rich.TextColumn("{task.fields[facts]}", markup=False, table_column=Column()),
        rich.TimeElapsedColumn(table_column=whole()),
        rich.TextColumn("left"), rich.TimeRemainingColumn(table_column=whole()), console=console, refresh_per_second=4,
    )  # fmt: skip
