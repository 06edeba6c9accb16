"""What is seen while a run goes on: a live bar in a terminal, now and then a line elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tilewise.train.memory import MIB

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

LINE_EVERY_S = 10.0  # where there is no terminal


@contextmanager
def counted(console: Console | None, what: str) -> Iterator[Callable[[int, int], None] | None]:
    """Something that is told how many of how many are done, and shows it: a bar, or now and then a line.

    Args:
        console: where; None shows nothing.
        what: is being done.
    """
    if console is None:
        yield None
    elif console.is_terminal:
        from rich import progress as rich

        columns = (rich.TextColumn(what), rich.BarColumn(), rich.MofNCompleteColumn(), rich.TimeRemainingColumn())
        with rich.Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task(what, total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)
    else:
        said = time.monotonic()

        def watch(done: int, total: int) -> None:
            nonlocal said
            if time.monotonic() - said > LINE_EVERY_S:
                said = time.monotonic()
                console.print(f"{what}: {done:,} of {total:,}", highlight=False)

        yield watch


class RunProgress:
    """The bar of a run.

    Args:
        console: where it is shown; None shows nothing.
        steps: in all.
        done: so far.
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
        """A step is done."""
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
            self.console.print(f"step {step}/{self.steps}  {facts}", highlight=False)

    def evaluating(self, done: int, total: int) -> None:
        """So many held-out images are encoded; the steps stand still until all are."""
        facts = f"evaluating, image {done:,} of {total:,}"
        if self._bar is not None:
            self._bar.update(self._task, facts=facts)
        elif self.console is not None and time.monotonic() - self._said > LINE_EVERY_S:
            self._said = time.monotonic()
            self.console.print(facts, highlight=False)

    def evaluated(self, metrics: dict[str, float]) -> None:
        """An evaluation is done."""
        if "t2i_r10" in metrics:
            self.recall = f"  recall@10 {100 * metrics['t2i_r10']:.1f}%"

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._bar is not None:
            self._bar.stop()


def _make_bar(console: Console) -> Progress:
    from rich import progress as rich
    from rich.table import Column

    def whole() -> Column:  # in a narrow terminal the bar is short and the facts wrap, never the numbers
        return Column(no_wrap=True)

    return rich.Progress(
        rich.TextColumn("[bold]training"), rich.BarColumn(bar_width=8 if console.width < 120 else None),
        rich.MofNCompleteColumn(table_column=whole()),
        rich.TextColumn("{task.fields[facts]}", table_column=Column()), rich.TimeElapsedColumn(table_column=whole()),
        rich.TextColumn("left"), rich.TimeRemainingColumn(table_column=whole()), console=console, refresh_per_second=4,
    )  # fmt: skip
