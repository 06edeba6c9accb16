"""The output of ``tilewise tune``: progress, and what has changed."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from tilewise.errors import ConfigError
from tilewise.tools.tune import WIDTHS, Tuning, check_tunable, tune
from tilewise.tools.tune_check import TYPES

if TYPE_CHECKING:
    from rich.console import Console


def run_tune(
    console: Console,
    types: list[str] | None,
    widths: list[int] | None,
    processes: int | None,
    table: bool,
    device: str | None = None,
) -> int:
    """Tune a device. Returns the exit code: 1 if nothing could be measured or saved."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    unknown = set(types or ()) - TYPES.keys()
    if unknown:
        raise ConfigError(f"--dtype is one of {', '.join(TYPES)}, got {', '.join(sorted(unknown))}")
    check_tunable(device)
    columns = TextColumn("{task.description:<10}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, TextColumn("{task.fields[job]}", markup=False), console=console) as bar:
        tasks: dict[str, Any] = {}

        def show(phase: str, done: int, total: int, job: str) -> None:
            if phase not in tasks:
                tasks[phase] = bar.add_task(phase, total=total, job="")
                if not console.is_terminal:  # rich writes the bar into a file only at the end
                    console.print(f"{phase}: {total} jobs")
            bar.update(tasks[phase], completed=done, total=total, job=job)

        found = tune(types or list(TYPES), widths or list(WIDTHS), processes, show, device)
    for line in report(found, table or bool(found.unsaved)):
        console.print(line, highlight=False, soft_wrap=True)
    return 0 if found.rates and not found.unsaved else 1


def report(found: Tuning, table: bool) -> list[str]:
    """What was measured, in lines; with ``table``, all rates and the rows for the size table."""
    hint = "" if table or not found.failed else " (--table shows why; most are too large for the card)"
    lines = [f"{found.card}: {len(found.rates)} measured, {len(found.failed)} failed{hint}"]
    if not found.rates:
        lines.append("nothing could be measured, so the sizes in use stay")
    for item, row in found.after.items():
        for field in dataclasses.fields(row):
            old, new = getattr(found.before[item], field.name), getattr(row, field.name)
            if old != new:
                lines.append(f"{item}-byte types, {field.name}: {short(old)} -> {short(new)}")
    if found.rates:
        lines += [] if len(lines) > 1 else ["the sizes in use are the fastest of those measured"]
        saved = f"saved in {found.path}; every later process uses them"
        if found.unsaved:
            saved = f"cannot write {found.path}: {found.unsaved}. Free some space or repair its folder, and tune again"
        lines.append(saved)
    lines += [f"not taken, {reason}" for reason in found.refused]
    if table:
        rates = sorted(found.rates.items(), key=lambda each: (each[0].field, each[0].case, -each[1]))
        lines += [f"{job.field:14} {job.case:14} {rate:6.0f} TFLOP/s  {short(job.sizes)}" for job, rate in rates]
        lines += [f"{job.field:14} {job.case:14} {reason}" for job, reason in found.failed.items()]
        lines += found.rows
    return lines


def short(sizes: Any) -> str:
    """Sizes in one line."""
    if sizes is None:
        return "as for narrow features"
    return " ".join(f"{name}={value}" for name, value in dataclasses.asdict(sizes).items())
