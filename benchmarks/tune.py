"""Measure tile sizes of the Triton kernels on this card, and print a row for `kernels/triton_impl/sizes.py`.

    PYTHONPATH=src python3 -m benchmarks.tune [--rows 32768] [--width 512] [--dtype bfloat16] [--jobs 12]

Candidates are compiled in parallel processes first; then each is timed alone, in one process. With a width of 1,024 or
more, the sizes of the two-pass kernels are those of the wide fields. The filter is measured with tiles of 256 columns.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import triton

from tilewise.kernels import filter_plan
from tilewise.kernels.spec import FilterPlan, GradStats, Needs, Pair, PairSpec
from tilewise.kernels.triton_impl.filtered import backward as filter_backward
from tilewise.kernels.triton_impl.filtered.forward import FilterForward
from tilewise.kernels.triton_impl.launch.call import Call, tile_descriptor
from tilewise.kernels.triton_impl.sizes import WIDE, PairSizes, Sizes, architecture
from tilewise.kernels.triton_impl.two_pass.backward import Backward
from tilewise.kernels.triton_impl.two_pass.forward import Forward
from tilewise.options import TileOptions

DEVICE = "cuda"
FORWARD = [
    Sizes(128, 128, 64, 4, 3, 2, 16, strip=8),
    Sizes(128, 128, 64, 4, 3, 2, 16, strip=4),
    Sizes(128, 128, 64, 4, 3, 2, 16),
    Sizes(128, 128, 64, 4, 3, 2, 8),
    Sizes(128, 128, 64, 4, 2, 3, 16),
    Sizes(128, 128, 64, 4, 4, 1, 16),
    Sizes(128, 256, 64, 8, 3, 1, 16),
    Sizes(128, 256, 64, 8, 3, 1, 8),
    Sizes(128, 256, 64, 8, 4, 1, 8),
    Sizes(256, 128, 64, 8, 3, 1, 8),
    Sizes(256, 128, 64, 8, 4, 1, 8),
    Sizes(64, 64, 32, 4, 2, 2, 8),
]
GRADIENT = [
    Sizes(128, 256, 64, 8, 3, 1, 16),
    Sizes(128, 256, 64, 8, 3, 1, 8),
    Sizes(256, 128, 64, 8, 3, 1, 16),
    Sizes(128, 256, 64, 8, 4, 1, 16, 2),
    Sizes(128, 128, 32, 4, 4, 2, 16),
    Sizes(128, 128, 32, 4, 4, 2, 8),
    Sizes(128, 128, 32, 4, 6, 2, 16, 2),
    Sizes(128, 128, 64, 4, 2, 2, 16),
    Sizes(128, 128, 64, 4, 3, 2, 16, 2),
    Sizes(128, 128, 64, 4, 3, 2, 16, 4),
    Sizes(128, 128, 64, 4, 3, 2, 8, 2),
    Sizes(128, 256, 32, 8, 5, 1, 16),
    Sizes(128, 256, 32, 8, 6, 1, 8),
    Sizes(64, 64, 32, 4, 2, 2, 8),
]
MASSES = [
    Sizes(128, 256, 64, 8, 3, 1, 16),
    Sizes(128, 256, 64, 8, 2, 1, 16),
    Sizes(64, 256, 64, 8, 3, 1, 16),
    Sizes(64, 256, 32, 8, 3, 1, 8),
    Sizes(64, 256, 32, 8, 2, 1, 8),
    Sizes(64, 256, 16, 8, 2, 1, 8),
]
PAIRS = [
    PairSizes(64, 64, 128, 8, 8, 3),
    PairSizes(64, 64, 64, 8, 8, 2),
    PairSizes(64, 32, 64, 8, 8, 2),
    PairSizes(32, 32, 64, 4, 8, 2),
    PairSizes(16, 32, 64, 4, 8, 2),
    PairSizes(16, 16, 64, 4, 8, 2),
]
TWO_PASS = {
    "clip": PairSpec(row_lse=True, col_lse=True, positive="one"),
    "siglip": PairSpec(softplus=True, positive="one"),
    "cross-entropy": PairSpec(row_lse=True, positive="one"),
}
FILTER = PairSpec(row_lse=True, positive="one", drop_rows=True)
FILTER_COLUMNS = 65_536  # so that tiles have 256 columns


def problem(spec: PairSpec, rows: int, cols: int, width: int, dtype: torch.dtype) -> Pair:
    """Unit features, some of them aligned, at a scale that a trained model has."""
    torch.manual_seed(0)
    a = F.normalize(torch.randn(rows, width, device=DEVICE), dim=1)
    b = F.normalize(a.repeat(-(-cols // rows), 1)[:cols] + torch.randn(cols, width, device=DEVICE), dim=1)
    return Pair(
        a=a.to(dtype),
        b=b.to(dtype),
        scale=torch.tensor(30.0, device=DEVICE),
        bias=torch.full((cols,), -10.0, device=DEVICE) if spec.softplus else None,
        row_key=torch.arange(rows, device=DEVICE) if not spec.col_lse and not spec.softplus else None,
        row_shift=None if spec.softplus else torch.zeros(rows, device=DEVICE),
        col_shift=torch.zeros(cols, device=DEVICE) if spec.col_lse else None,
    )


def gradient_call(launch: Call, spec: PairSpec) -> tuple[Callable[[], None], int]:
    """A callable that computes G of one macro-tile, and how many scores that is."""
    pair = launch.pair
    n = pair.a.shape[0]
    stats = Forward(launch).run()
    ones = torch.full((n,), 1.0 / n, device=DEVICE)
    grad = GradStats(
        row_lse=ones if spec.row_lse else None,
        col_lse=ones if spec.col_lse else None,
        row_softplus=ones if spec.softplus else None,
        row_pos=None if spec.softplus else -ones,
    )
    work = Backward(launch, stats, grad, Needs(), pair.a.dtype)
    i, j = slice(0, min(n, work.row_step)), slice(0, min(n, work.col_step))
    g = pair.a.new_empty((i.stop, j.stop))
    desc = tile_descriptor(g, work.sizes)
    return lambda: work._gradient(g, desc, i, j, None), i.stop * j.stop


def masses_call(pair: Pair, sizes: Sizes) -> tuple[Callable[[], None], int]:
    """A callable that computes the masses of the filter, and how many scores that is."""
    n, m = pair.a.shape[0], pair.b.shape[0]
    work = FilterForward(pair, FILTER, TileOptions(filter_tolerance=1e-2))
    work.sizes, work.keep_all, work.bias = sizes, None, None
    work.order = torch.arange(m, dtype=torch.int32, device=DEVICE)
    work.mean = pair.a.new_empty((work.tiles, work.d))
    part = pair.scale.new_empty(work.tiles * n)
    return lambda: work._masses(part, slice(0, n)), n * m


def pairs_call(pair: Pair, sizes: PairSizes) -> tuple[Callable[[], object], int]:
    """A callable that runs the backward of the filter with one pair in eight kept, and how many scores are kept."""
    n, m = pair.a.shape[0], pair.b.shape[0]
    options = TileOptions(filter_tolerance=1e-2)
    stats, plan = FilterForward(pair, FILTER, options).run()[:2]
    mass = torch.zeros_like(plan.mass)
    mass.view(-1)[::8] = filter_plan.KEPT
    kept = (mass < 0).sum(1, dtype=torch.int32)
    plan = FilterPlan(order=plan.order, mass=mass, mean=plan.mean, kept=kept, keep_all=torch.zeros_like(plan.keep_all))
    ones = torch.full((n,), 1.0 / n, device=DEVICE)

    def call() -> object:
        filter_backward.pair_sizes = lambda *_: sizes
        grad = GradStats(row_lse=ones, row_pos=-ones)
        return filter_backward.FilterBackward(pair, FILTER, options).run(stats, plan, grad, Needs())

    return call, n * m // 8


def candidates(width: int) -> list[tuple[str, str, Any]]:
    """(field of the table, loss, sizes)."""
    wide = "_wide" if width >= WIDE else ""
    found = [
        (field + wide, loss, sizes)
        for field, table in (("forward", FORWARD), ("gradient", GRADIENT))
        for loss in TWO_PASS
        if not (wide and field == "forward" and TWO_PASS[loss].col_lse)  # sums of columns take the other sizes
        for sizes in table
    ]
    found += [("filter_masses", "filter", sizes) for sizes in MASSES]
    return found + [("filter_pairs", "filter", sizes) for sizes in PAIRS]


def run_one(field: str, loss: str, sizes: Any, rows: int, width: int, dtype: torch.dtype, *, quick: bool) -> float:
    """Compile (quick) or time one candidate; returns TFLOP/s of the product inside."""
    call: Callable[[], object]
    if loss == "filter":
        pair = problem(FILTER, 256 if quick else 4096, FILTER_COLUMNS, width, dtype)
        call, scores = masses_call(pair, sizes) if field == "filter_masses" else pairs_call(pair, sizes)
    else:
        spec = TWO_PASS[loss]
        n = 4096 if quick else min(rows, 2**24 // width // 256 * 256)
        pair = problem(spec, n, n, width, dtype)
        launch = Call(pair, spec, TileOptions())
        if field.startswith("forward"):
            call, scores = Forward(dataclasses.replace(launch, forward_sizes=sizes)).run, n * n
        else:
            call, scores = gradient_call(dataclasses.replace(launch, gradient_sizes=sizes), spec)
    if quick:
        call()
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        return 0.0
    ms = triton.testing.do_bench(call, warmup=15, rep=40, return_mode="median")
    return 2 * scores * width / ms / 1e9


def plain_rate(seconds: float = 0.3) -> float:
    """TFLOP/s of an 8192^3 bf16 product, sustained."""
    x, y = torch.randn(2, 8192, 8192, device=DEVICE, dtype=torch.bfloat16)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.mm(x, y)
    count = int(seconds / 1.6e-3)
    start.record()
    for _ in range(count):
        torch.mm(x, y)
    end.record()
    torch.cuda.synchronize()
    return 2 * 8192**3 * count / start.elapsed_time(end) / 1e9


def table_row(rates: dict[tuple[str, str, Any], float], name: str, item: int) -> str:
    """The row of the table: for each field the sizes with the best geometric mean over all losses.

    >>> one, other = Sizes(64, 64, 32, 4, 2, 2, 8), Sizes(128, 64, 32, 4, 2, 2, 8)
    >>> rates = {("forward", "clip", one): 4.0, ("forward", "clip", other): 5.0, ("forward", "siglip", one): 4.0}
    >>> print(table_row(rates, "sm_90", 2))
    ("sm_90", 2): KernelSizes(
        forward=Sizes(rows=64, cols=64, depth=32, warps=4, stages=2, programs=2, group=8, pieces=1, strip=1),
    ),
    """
    lines = []
    for field in dict.fromkeys(key[0] for key in rates):
        losses = {key[1] for key in rates if key[0] == field}
        means = {}
        for sizes in dict.fromkeys(key[2] for key in rates if key[0] == field):
            found = [rates.get((field, loss, sizes), 0.0) for loss in losses]
            means[sizes] = math.prod(found) ** (1 / len(found))
        lines.append(f"    {field}={max(means, key=means.__getitem__)},")
    return "\n".join([f'("{name}", {item}): KernelSizes(', *lines, "),"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=32768)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--jobs", type=int, default=12)
    parser.add_argument("--compile-part", type=int, default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    dtype = getattr(torch, args.dtype)
    todo = candidates(args.width)
    if args.compile_part is not None:
        for field, loss, sizes in todo[args.compile_part :: args.jobs]:
            try:
                run_one(field, loss, sizes, args.rows, args.width, dtype, quick=True)
            except Exception as error:
                print("cannot compile", field, loss, sizes, repr(error)[:200], flush=True)
        return
    base = [sys.executable, "-m", "benchmarks.tune", "--jobs", str(args.jobs)]
    base += ["--width", str(args.width), "--dtype", args.dtype]
    parts = [subprocess.Popen([*base, "--compile-part", str(part)]) for part in range(args.jobs)]
    for part in parts:
        part.wait()
    print(f"plain product: {plain_rate():.0f} TFLOP/s (8192^3 bf16, sustained)")
    rates = {}
    for field, loss, sizes in todo:
        try:
            rates[field, loss, sizes] = run_one(field, loss, sizes, args.rows, args.width, dtype, quick=False)
            print(f"{field:14s} {loss:14s} {rates[field, loss, sizes]:6.0f} TFLOP/s  {sizes}", flush=True)
        except Exception as error:
            print(f"{field:14s} {loss:14s} failed {sizes}: {repr(error)[:120]}", flush=True)
    print(table_row(rates, architecture(torch.cuda.get_device_capability()), dtype.itemsize))


if __name__ == "__main__":
    main()
