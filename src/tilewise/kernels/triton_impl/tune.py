"""Measure tile sizes on a card: what `tilewise tune` runs.

A job times one kernel with candidate sizes for one field of the size table. Its rate is that of the product inside the
kernel, in TFLOP/s. With `WIDE` features or more, the two-pass kernels tune the wide fields. The filter is measured with
tiles of 256 columns.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton

from tilewise.kernels import filter_plan
from tilewise.kernels.spec import GradStats, Needs, Pair, PairSpec
from tilewise.kernels.triton_impl.buffers import Buffer
from tilewise.kernels.triton_impl.filtered.backward import FilterBackward
from tilewise.kernels.triton_impl.filtered.forward import FilterForward
from tilewise.kernels.triton_impl.scores import Scores, forget_programs, on_device, run_program, tile_descriptor
from tilewise.kernels.triton_impl.sizes import (
    WIDE,
    KernelSizes,
    PairSizes,
    Sizes,
    candidates,
    row_of,
    trying,
)
from tilewise.kernels.triton_impl.two_pass import strategy as two_pass
from tilewise.kernels.triton_impl.two_pass.backward import Backward, backward_tensors
from tilewise.options import TileOptions

Timer = Callable[[Callable[[], object]], float]  # milliseconds of a call
TWO_PASS = {
    "clip": PairSpec(row_lse=True, col_lse=True, positive="one"),
    "siglip": PairSpec(softplus=True, positive="one"),
    "cross-entropy": PairSpec(row_lse=True, positive="one"),
}
FILTER = PairSpec(row_lse=True, positive="one", drop_rows=True)


class Job(NamedTuple):
    """One measurement."""

    field: str  # of the table
    case: str  # a name of `TWO_PASS`, or "filter"
    sizes: Sizes | PairSizes
    width: int
    dtype: torch.dtype


class Extent(NamedTuple):
    """How large the problems are."""

    rows: int = 32768
    filter_rows: int = 4096
    filter_columns: int = 65_536  # so that tiles have 256 columns


COMPILED = Extent(4096, 256)  # enough to compile and to launch each kernel


def jobs(device: torch.device, dtype: torch.dtype, widths: Iterable[int]) -> list[Job]:
    """All measurements for a type. The filter is measured with the first width."""
    found = []
    for index, width in enumerate(widths):
        wide = "_wide" if width >= WIDE else ""
        for field in ("forward", "gradient"):
            for case, spec in TWO_PASS.items():
                if wide and field == "forward" and spec.col_lse:
                    continue  # sums of columns always take the other sizes
                found += [
                    Job(field + wide, case, sizes, width, dtype) for sizes in candidates(field + wide, dtype.itemsize)
                ]
        for field in ("filter_masses", "filter_pairs") if index == 0 else ():
            found += [Job(field, "filter", sizes, width, dtype) for sizes in candidates(field, dtype.itemsize)]
    return [job for job in found if may_fit(job.sizes, dtype.itemsize, device)]


def may_fit(sizes: Any, item: int, device: torch.device) -> bool:
    """False if the blocks exceed the shared memory even with one stage less, so that compiling would be useless."""
    if device.type != "cuda" or isinstance(sizes, PairSizes):
        return True
    most = getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", math.inf)
    return (sizes.stages - 1) * (sizes.rows + sizes.cols) * sizes.depth * item <= most


def problem(spec: PairSpec, rows: int, cols: int, width: int, dtype: torch.dtype, device: torch.device) -> Pair:
    """Unit features, some of them aligned, at a scale that a trained model has."""
    draw = torch.Generator(device).manual_seed(0)
    a = F.normalize(torch.randn(rows, width, device=device, generator=draw), dim=1)
    noise = torch.randn(cols, width, device=device, generator=draw)
    b = F.normalize(a.repeat(-(-cols // rows), 1)[:cols] + noise, dim=1)
    return Pair(
        a=a.to(dtype),
        b=b.to(dtype),
        scale=torch.tensor(30.0, device=device),
        bias=torch.full((cols,), -10.0, device=device) if spec.softplus else None,
        row_key=torch.arange(rows, device=device) if not spec.col_lse and not spec.softplus else None,
        row_shift=None if spec.softplus else torch.zeros(rows, device=device),
        col_shift=torch.zeros(cols, device=device) if spec.col_lse else None,
    )


def forward_call(pair: Pair, spec: PairSpec) -> tuple[Callable[[], object], int]:
    """A callable that computes all statistics, and how many scores that is."""
    return lambda: two_pass.forward(pair, spec, TileOptions()), pair.a.shape[0] * pair.b.shape[0]


def gradient_call(pair: Pair, spec: PairSpec) -> tuple[Callable[[], object], int]:
    """A callable that computes G of one macro-tile, and how many scores that is."""
    n, options, shape = pair.a.shape[0], TileOptions(), []
    stats = two_pass.forward(pair, spec, options)[0]
    ones = torch.full((n,), 1.0 / n, device=pair.a.device)
    grad = GradStats(
        row_lse=ones if spec.row_lse else None,
        col_lse=ones if spec.col_lse else None,
        row_softplus=ones if spec.softplus else None,
        row_pos=None if spec.softplus else -ones,
    )

    def build(scores: Scores, more: dict[str, Buffer]) -> list[Buffer]:
        work = Backward(scores, more, Needs(), scores.dtype)
        i, j = slice(0, min(n, work.row_step)), slice(0, min(scores.m, work.col_step))
        shape.append(i.stop * j.stop)
        g = scores.empty("G", i.stop, j.stop, dtype=scores.dtype)
        work._gradient(g, tile_descriptor(g, work.sizes), i, j)
        return [g]

    tensors = backward_tensors(stats, grad, spec)

    def run() -> object:
        return run_program(("one G",), pair, spec, options, tensors, build)

    run()
    return run, shape[0]


def masses_call(pair: Pair) -> tuple[Callable[[], object], int]:
    """A callable that computes the masses of the filter, and how many scores that is."""
    n, m = pair.a.shape[0], pair.b.shape[0]
    work = FilterForward(pair, FILTER, TileOptions(filter_tolerance=1e-2))
    work.known["skip_if"], work.bias = torch.zeros(1, dtype=torch.int32, device=pair.a.device), None
    work.order = torch.arange(m, dtype=torch.int32, device=pair.a.device)
    work.mean = pair.a.new_empty((work.tiles, work.d))
    part = pair.scale.new_empty(work.tiles * n)
    return lambda: work._masses({"part": part}, slice(0, n)), n * m


def pairs_call(pair: Pair) -> tuple[Callable[[], object], int]:
    """A callable that runs the backward of the filter with one pair in eight kept, and how many scores are kept."""
    n, m = pair.a.shape[0], pair.b.shape[0]
    options = TileOptions(filter_tolerance=1e-2)
    stats, plan = FilterForward(pair, FILTER, options).run()[:2]
    mass = torch.zeros_like(plan.mass)
    mass.view(-1)[::8] = filter_plan.KEPT
    kept = (mass < 0).sum(1, dtype=torch.int32)
    plan = dataclasses.replace(plan, mass=mass, kept=kept, keep_all=torch.zeros_like(plan.keep_all))
    ones = torch.full((n,), 1.0 / n, device=pair.a.device)
    grad = GradStats(row_lse=ones, row_pos=-ones)
    return lambda: FilterBackward(pair, FILTER, options).run(stats, plan, grad, Needs()), n * m // 8


def run_job(job: Job, device: torch.device, extent: Extent, timer: Timer) -> float:
    """The rate of a job in TFLOP/s, on any device. Raises whatever the compiler or the launch raises."""
    forget_programs()  # they have the sizes of an earlier job
    item, width = job.dtype.itemsize, job.width
    change: dict[str, Any] = {job.field: job.sizes}
    row = dataclasses.replace(row_of(device, item), **change)
    with on_device(torch.empty(0, device=device)), trying(device, item, row):  # also for the timer
        if job.case == "filter":
            pair = problem(FILTER, extent.filter_rows, extent.filter_columns, width, job.dtype, device)
            call, scores = masses_call(pair) if job.field == "filter_masses" else pairs_call(pair)
        else:
            spec = TWO_PASS[job.case]
            n = min(extent.rows, max(256, 2**24 // width // 256 * 256))
            make = forward_call if job.field.startswith("forward") else gradient_call
            call, scores = make(problem(spec, n, n, width, job.dtype, device), spec)
        return 2 * scores * width / timer(call) / 1e9


def bench(call: Callable[[], object]) -> float:
    """The median time of a call on the GPU, in milliseconds."""
    return float(triton.testing.do_bench(call, warmup=15, rep=40, return_mode="median"))


def once(call: Callable[[], object]) -> float:
    """Compile and run a call once."""
    call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return 1.0


def compile_job(job: Job, device: torch.device) -> str | None:
    """Compile a job in a process of its own, into Triton's cache on disk. Returns what went wrong, or None."""
    try:
        run_job(job, device, COMPILED, once)
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:200]
    return None


def ranking(rates: dict[Job, float], field: str, item: int) -> list[Any]:
    """Sizes for a field, best first: by the geometric mean over all cases. Sizes that failed in a case are left out.

    >>> one, other = Sizes(64, 64, 32, 4, 2, 2, 8), Sizes(128, 64, 32, 4, 2, 2, 8)
    >>> half, key = torch.float16, ("forward", "clip")
    >>> rates = {Job(*key, one, 512, half): 4.0, Job(*key, other, 512, half): 5.0}
    >>> [sizes.rows for sizes in ranking(rates, "forward", 2)]
    [128, 64]
    >>> [sizes.rows for sizes in ranking(rates | {Job("forward", "siglip", one, 512, half): 1.0}, "forward", 2)]
    [64]
    """
    here = {job: rate for job, rate in rates.items() if job.field == field and job.dtype.itemsize == item}
    cases = {(job.case, job.width) for job in here}
    found: dict[Any, list[float]] = {}
    for job, rate in here.items():
        found.setdefault(job.sizes, []).append(rate)
    means = {sizes: math.prod(each) ** (1 / len(each)) for sizes, each in found.items() if len(each) == len(cases)}
    return sorted(means, key=means.__getitem__, reverse=True)


def table_row(name: str, item: int, row: KernelSizes) -> str:
    """A row of the size table, as Python.

    >>> from tilewise.kernels.triton_impl.sizes import TABLE
    >>> print(table_row("sm_80", 4, TABLE["sm_80", 4]).splitlines()[1])
        forward=Sizes(rows=64, cols=64, depth=16, warps=4, stages=3, programs=2, group=8, pieces=1, strip=1),
    """
    values = {field.name: getattr(row, field.name) for field in dataclasses.fields(row)}
    lines = [f"    {field}={sizes}," for field, sizes in values.items() if sizes is not None]
    return "\n".join([f'("{name}", {item}): KernelSizes(', *lines, "),"])
