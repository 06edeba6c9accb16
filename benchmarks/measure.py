"""Time and memory of a step. No other module measures them.

Time: methods take turns, so a machine that slows down affects all of them and ratios stay fair. The median over the
turns is reported, with the 10th and 90th percentile. A GPU is timed with CUDA events, a CPU with `perf_counter`.

Memory: the peak during a step, above what was in use before it. On a GPU the allocator reports it. On the CPU a new
process runs the step once. It writes 5 to ``/proc/self/clear_refs``, which resets the high-water mark of resident
memory (VmHWM) to what is resident now, and reads VmHWM after the step.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
Status = Literal["ok", "oom", "absent", "error"]

# By default freed blocks stay in the process for some time, and the peak would depend on earlier allocations. torch for
# ARM allocates with mimalloc, torch for x86 with glibc.
RETURNS_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "2"}
RETURNS_MEMORY |= {"MIMALLOC_PURGE_DELAY": "0"}

RESET_PEAK = Path("/proc/self/clear_refs")

# torch's CPU allocator raises a RuntimeError; its words depend on the platform.
NO_CPU_MEMORY = re.compile(r"DefaultCPUAllocator: (can't allocate|not enough) memory")


class MeasurementError(RuntimeError):
    """A measurement that could not be taken. It is not replaced by a guess."""


class NoCounterError(MeasurementError):
    """This system has no counter of a process's peak memory that can be reset. Linux has one."""


@dataclass
class Step:
    """One forward and, if the loss requires grad, one backward."""

    forward: Callable[[], Tensor]
    leaves: list[Tensor] = field(default_factory=list)
    value: Tensor | None = None  # the loss of the last call

    def clear(self) -> None:
        """Drop the gradients, so that every step allocates them again."""
        for leaf in self.leaves:
            leaf.grad = None

    def __call__(self) -> Tensor:
        self.clear()
        loss = self.forward()
        if loss.requires_grad:
            loss.backward()
        self.value = loss.detach()
        return self.value


@dataclass(frozen=True)
class Timing:
    """Milliseconds of a step, over its turns."""

    median_ms: float
    low_ms: float  # 10th percentile
    high_ms: float  # 90th
    repeats: int


@dataclass(frozen=True)
class Failure:
    """A step that did not run, with the reason."""

    status: Status
    reason: str


def summarize(samples_ms: list[float]) -> Timing:
    """Median, and 10th and 90th percentile.

    >>> summarize([1.0, 2.0, 3.0, 4.0, 100.0])
    Timing(median_ms=3.0, low_ms=1.4, high_ms=61.6, repeats=5)
    """
    if len(samples_ms) == 1:
        return Timing(samples_ms[0], samples_ms[0], samples_ms[0], 1)
    tenths = statistics.quantiles(samples_ms, n=10, method="inclusive")
    return Timing(statistics.median(samples_ms), round(tenths[0], 6), round(tenths[-1], 6), len(samples_ms))


def time_in_turns(
    steps: Mapping[str, Callable[[], Any]],
    device: torch.device,
    *,
    repeats: int = 20,
    budget_s: float = 4.0,
    least: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Timing | Failure]:
    """Time of each step. Steps warm up one after the other, then take turns in shuffled orders (`orders`).

    A step gets at most `repeats` turns. It gets no more turns after `budget_s` seconds, once it had `least` of them.
    A step that fails is reported with the reason, and the others continue. `clock` times the steps of a CPU.
    """
    outcome: dict[str, Timing | Failure] = {}
    for name, step in steps.items():
        failure = _warm_up(step, device, budget_s)
        if failure is not None:
            outcome[name] = failure
    samples: dict[str, list[float]] = {name: [] for name in steps if name not in outcome}
    for order in orders(samples, repeats):
        for name in order:
            taken = samples[name]
            if name in outcome or (sum(taken) > 1e3 * budget_s and len(taken) >= least):
                continue
            try:
                taken.append(timed_ms(steps[name], device, clock))
            except Exception as error:
                outcome[name] = failure_of(error)
    for name, taken in samples.items():
        outcome.setdefault(name, summarize(taken) if taken else Failure("error", "it had no turn"))
    return {name: outcome[name] for name in steps}


def orders(names: Iterable[str], turns: int) -> Iterator[list[str]]:
    """The order of each turn: shuffled, the same in every run. No step follows itself across two turns.

    A card at its power limit is slower for a while after hard work, so a step's time depends on the step before it.
    Over the turns each step follows many others, and never itself.

    >>> list(orders("abc", 2))
    [['a', 'c', 'b'], ['c', 'b', 'a']]
    """
    order, chance = list(names), random.Random(0)
    for _ in range(turns):
        last = order[-1:]
        chance.shuffle(order)
        while len(order) > 1 and order[:1] == last:
            chance.shuffle(order)
        yield order.copy()


def _warm_up(step: Callable[[], Any], device: torch.device, budget_s: float) -> Failure | None:
    """Run once, to compile and tune, and repeat until a tenth of the budget is spent."""
    start = time.perf_counter()
    try:
        step()
        synchronize(device)
        while time.perf_counter() - start < 0.1 * budget_s:
            step()
            synchronize(device)
    except Exception as error:
        return failure_of(error)
    return None


def timed_ms(step: Callable[[], Any], device: torch.device, clock: Callable[[], float] = time.perf_counter) -> float:
    """Milliseconds of one step."""
    if device.type != "cuda":
        start = clock()
        step()
        return 1e3 * (clock() - start)
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    # An untimed step first fills the queue, as in training. The time is then that of the device, or of the host where
    # the host is slower, without the start from idle.
    step()
    first.record()
    step()
    last.record()
    synchronize(device)
    return float(first.elapsed_time(last))


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all launches."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def failure_of(error: Exception) -> Failure:
    """Status "oom" if memory ran out, otherwise "error", with the first line of the message."""
    text = str(error).strip()
    line = text.splitlines()[0] if text else type(error).__name__
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or NO_CPU_MEMORY.search(text):
        return Failure("oom", line)
    return Failure("error", f"{type(error).__name__}: {line}")


def sustained_rate(device: torch.device, seconds: float = 0.3) -> float:
    """Operations per second of a plain square product, repeated for `seconds`."""
    side, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (2048, torch.float32)
    a, b, out = (torch.zeros(side, side, device=device, dtype=dtype).normal_() for _ in range(3))
    torch.mm(a, b, out=out)
    synchronize(device)
    count, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        torch.mm(a, b, out=out)
        count += 1
        if count % 8 == 0 or device.type == "cpu":
            synchronize(device)
    synchronize(device)
    return 2 * side**3 * count / (time.perf_counter() - start)


def cuda_peak_bytes(step: Step, device: torch.device) -> int:
    """Peak of allocated memory during a step, above what was allocated before. Includes the step's gradients."""
    step.clear()
    gc.collect()
    synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    step()
    synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def cpu_peak_bytes(target: str, arguments: dict[str, Any], timeout_s: float = 600.0) -> int:
    """Peak of resident memory during a step, above what was resident before. Measured in a process of its own.

    Args:
        target: "module:function". Called with `arguments`, it returns two functions. The first runs a small step of the
            same kind, which loads code and starts threads. The second is measured.
        arguments: plain values; they are passed as JSON.
        timeout_s: limit on the time of the process.
    """
    require_counter()
    command = [sys.executable, "-m", "benchmarks.measure", target, json.dumps(arguments)]
    path = os.pathsep.join([str(ROOT), str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, **RETURNS_MEMORY, "PYTHONPATH": path}
    environment.pop("MALLOC_PERTURB_", None)  # it writes to memory that the step does not touch
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False
    )
    if done.returncode in (-9, 137) or NO_CPU_MEMORY.search(done.stderr):
        raise MemoryError(f"{target} {arguments} ran out of memory")
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:] or ["it printed nothing"]
        raise MeasurementError(f"measuring the memory of {target} {arguments} failed: {last[0]}")
    return int(json.loads(done.stdout.splitlines()[-1])["peak_bytes"])


def require_counter() -> None:
    """Raise `NoCounterError` on a system without the counter, for instance macOS."""
    if not RESET_PEAK.exists():
        raise NoCounterError(f"the peak memory of a CPU step is measured on Linux only: there is no {RESET_PEAK}")


def resident_bytes(name: Literal["VmRSS", "VmHWM"]) -> int:
    """Resident memory of this process: now (VmRSS), or its peak (VmHWM)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return 1024 * int(line.split()[1])
    raise MeasurementError(f"/proc/self/status has no {name}: CPU memory is measured on Linux only")


def peak_bytes_here(step: Callable[[], Any]) -> int:
    """Peak of resident memory during the step, above what is resident now. For a new process only."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    try:
        RESET_PEAK.write_text("5")
    except OSError as error:
        raise MeasurementError(f"the high-water mark cannot be reset: {error}") from error
    before = resident_bytes("VmRSS")
    if resident_bytes("VmHWM") > before + 2**20:
        raise MeasurementError("the kernel did not reset the high-water mark of resident memory")
    step()
    return resident_bytes("VmHWM") - before


def without_huge_pages() -> None:
    """Turn off transparent huge pages in this process: a page of 2 MiB counts whole, however little of it is used."""
    pr_set_thp_disable = 41
    ctypes.CDLL(None).prctl(pr_set_thp_disable, 1, 0, 0, 0)


def peak_bytes_of(target: str, arguments: dict[str, Any]) -> int:
    """The measurement of `cpu_peak_bytes` in this process, which must be a new one."""
    without_huge_pages()
    module, name = target.split(":")
    warm_up, step = getattr(importlib.import_module(module), name)(**arguments)
    warm_up()
    return peak_bytes_here(step)


if __name__ == "__main__":
    print(json.dumps({"peak_bytes": peak_bytes_of(sys.argv[1], json.loads(sys.argv[2]))}))
