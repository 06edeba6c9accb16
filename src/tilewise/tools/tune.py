"""`tilewise tune`: measure tile sizes on this card, and keep the best ones for later processes."""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tilewise.errors import DeviceError
from tilewise.kernels import registry, tuned_file
from tilewise.tools.tune_check import TYPES, why_not_all

Show = Callable[[str, int, int, str], None]  # (phase, jobs done, jobs in all, the last job)
WIDTHS = (512, 2048)


class Untunable(DeviceError):
    """There is nothing to tune on this machine."""


@dataclass
class Tuning:
    """What was measured, and what is used from now on."""

    card: str
    path: Path
    rates: dict[Any, float]  # TFLOP/s of each job
    failed: dict[Any, str]  # and why others have none
    before: dict[int, Any]  # the row of the size table in use, for each number of bytes of a type
    after: dict[int, Any]
    rows: list[str]  # the new rows, as Python
    refused: list[str] = dataclasses.field(default_factory=list)  # fast sizes that were not taken, with the reasons
    unsaved: str = ""  # why the file could not be written


def check_tunable(name: str | None = None) -> torch.device:
    """The CUDA device of that name, by default the current one. Raises `Untunable` if there is none, or no Triton."""
    if not torch.cuda.is_available():
        raise Untunable("tune needs a CUDA device, and torch sees none (see `tilewise doctor`)")
    if torch.version.hip is not None:
        raise Untunable("tune measures kernels for NVIDIA cards, and this torch is for AMD cards. They need no tuning")
    if not registry.installed("triton"):
        raise Untunable(
            "tune measures Triton kernels, and the package triton is not installed. Run: pip install triton"
        )
    try:
        device = torch.device(name or "cuda")
    except RuntimeError:
        device = torch.device("cpu")
    index = torch.cuda.current_device() if device.index is None else device.index
    if device.type != "cuda" or index >= torch.cuda.device_count():
        last = torch.cuda.device_count() - 1
        raise Untunable(
            f"--device is one of cuda:0 to cuda:{last}, got {name}. Run `tilewise doctor` to see the devices"
        )
    return torch.device("cuda", index)


def tune(
    types: Sequence[str] = tuple(TYPES),
    widths: Sequence[int] = WIDTHS,
    processes: int | None = None,
    show: Show = print,
    device_name: str | None = None,
) -> Tuning:
    """Measure all candidates on a device, and write the file with the best ones.

    Args:
        types: names of `TYPES`.
        widths: features of a row. From 1,024 on, the sizes for wide features are measured.
        processes: how many compile side by side; by default one per core, at most 8.
        show: is called after each job.
        device_name: such as "cuda:1"; by default the current device.
    """
    device, module = check_tunable(device_name), registry.tuner()
    processes = processes or min(8, os.cpu_count() or 1)
    with torch.cuda.device(device):
        todo = [job for name in types for job in module.jobs(device, TYPES[name][0], widths)]
        with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
            failed = compile_all(todo, device, pool, show)
        timed = [job for job in todo if job not in failed]
        rates, more = measure_all(timed, device, module.bench, show)
        return keep_best(device, torch.cuda.get_device_name(device), rates, failed | more, widths, show)


def compile_all(todo: Sequence[Any], device: torch.device, pool: Executor, show: Show) -> dict[Any, str]:
    """Compile all jobs side by side. Returns those that cannot be compiled or launched, with the reasons.

    If a process dies, the other jobs are compiled when they are measured.
    """
    module, failed = registry.tuner(), {}
    with contextlib.suppress(BrokenProcessPool):
        futures = {pool.submit(module.compile_job, job, device): job for job in todo}
        for done, future in enumerate(as_completed(futures), start=1):
            job = futures[future]
            if reason := future.result():
                failed[job] = reason
            show("compiling", done, len(todo), name_of(job))
    return failed


def measure_all(
    todo: Sequence[Any], device: torch.device, timer: Callable[..., float], show: Show, extent: Any = None
) -> tuple[dict[Any, float], dict[Any, str]]:
    """The rates of all jobs in TFLOP/s, and the reasons for those that fail."""
    module, rates, failed = registry.tuner(), {}, {}
    for done, job in enumerate(todo, start=1):
        try:
            rates[job] = module.run_job(job, device, extent or module.Extent(), timer)
            text = f"{rates[job]:.0f} TFLOP/s"
        except Exception as error:  # sizes that do not fit are no candidates
            failed[job] = f"{type(error).__name__}: {error}"[:200]
            text = "failed"
        show("measuring", done, len(todo), f"{name_of(job)}: {text}")
    return rates, failed


def keep_best(
    device: torch.device, card: str, rates: dict[Any, float], failed: dict[Any, str], widths: Sequence[int], show: Show
) -> Tuning:
    """Choose the fastest sizes with which every kernel is right, and write them to the file of this card."""
    module, sizes = registry.tuner(), registry.size_table()
    items = sorted({job.dtype.itemsize for job in rates})
    before = {item: sizes.row_of(device, item) for item in items}
    after = dict(before)
    kept, _ = tuned_file.read(card, sizes.parse_tuned)
    found: dict[int, dict[str, Any]] = kept or {}
    refused: list[str] = []
    for done, item in enumerate(items, start=1):
        show("checking", done, len(items), f"types of {item} bytes")
        best = best_fields(device, item, before[item], rates, widths, refused)
        after[item] = dataclasses.replace(before[item], **best)
        found.setdefault(item, {}).update(best)
    lists = {
        str(item): {name: list(dataclasses.astuple(best)) for name, best in row.items()} for item, row in found.items()
    }
    unsaved = ""
    try:
        tuned_file.write(card, lists)
    except OSError as error:  # the measurements are shown nevertheless
        unsaved = error.strerror or str(error)
    sizes.forget_tuned()
    name = sizes.architecture(torch.cuda.get_device_capability(device)) if device.type == "cuda" else "other"
    rows = [module.table_row(name, item, row) for item, row in after.items()]
    return Tuning(card, tuned_file.path_for(card), rates, failed, before, after, rows, refused, unsaved)


def best_fields(
    device: torch.device, item: int, row: Any, rates: dict[Any, float], widths: Sequence[int], refused: list[str]
) -> dict[str, Any]:
    """The fastest sizes for each field with which every call gives right results. Adds others to ``refused``."""
    fields = dict.fromkeys(job.field for job in rates if job.dtype.itemsize == item)
    ranked = {field: registry.tuner().ranking(rates, field, item) for field in fields}
    best = {field: found[0] for field, found in ranked.items() if found}
    if why_not_all(device, item, dataclasses.replace(row, **best), widths) is None:
        return best
    best = {}
    for field, found in ranked.items():  # some sizes do not suit another kernel: one field at a time
        for sizes in found:
            tried = dataclasses.replace(row, **best, **{field: sizes})
            reason = None if tried == row else why_not_all(device, item, tried, widths)
            if reason is None:
                best[field] = sizes
                break
            refused.append(f"{item}-byte types, {field}: {sizes}: {reason}")
    return best


def name_of(job: Any) -> str:
    """A job in words."""
    return f"{job.field}, {job.case}, width {job.width}, {str(job.dtype).removeprefix('torch.')}"
