"""Time block sizes of the Triton kernels on this card, to choose rows for `kernels/triton_impl/sizes.py`.

    PYTHONPATH=src python3 -m benchmarks.tune [--rows 32768] [--width 512] [--dtype bfloat16] [--jobs 12]

Candidates are first compiled in parallel processes. Then each is timed alone, in one process.
"""

from __future__ import annotations

import argparse
import dataclasses
import subprocess
import sys

import torch
import torch.nn.functional as F
import triton

from tilewise.kernels.spec import GradStats, Needs, Pair, PairSpec
from tilewise.kernels.triton_impl.launch.call import Call, tile_descriptor
from tilewise.kernels.triton_impl.sizes import Sizes
from tilewise.kernels.triton_impl.two_pass.backward import Backward
from tilewise.kernels.triton_impl.two_pass.forward import Forward
from tilewise.options import TileOptions

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
]
SPECS = {
    "clip": PairSpec(row_lse=True, col_lse=True, positive="one"),
    "siglip": PairSpec(softplus=True, positive="one"),
    "cross-entropy": PairSpec(row_lse=True, positive="one"),
}


def problem(spec: PairSpec, rows: int, width: int, dtype: torch.dtype) -> Pair:
    """Unit features whose pairs are similar, at a scale as in a trained model."""
    torch.manual_seed(0)
    a = F.normalize(torch.randn(rows, width, device="cuda"), dim=1)
    b = F.normalize(a + torch.randn(rows, width, device="cuda"), dim=1).to(dtype)
    zero = torch.zeros(rows, device="cuda")
    bias = torch.full((rows,), -10.0, device="cuda") if spec.softplus else None
    key = torch.arange(rows, device="cuda") if not spec.col_lse and not spec.softplus else None
    return Pair(
        a=a.to(dtype),
        b=b,
        scale=torch.tensor(30.0, device="cuda"),
        bias=bias,
        row_key=key,
        row_shift=None if spec.softplus else zero,
        col_shift=zero if spec.col_lse else None,
    )


def gradient_call(launch: Call, spec: PairSpec):
    """A function that computes G of one macro-tile, and the number of its scores."""
    pair = launch.pair
    n = pair.a.shape[0]
    stats = Forward(launch).run()
    ones = torch.full((n,), 1.0 / n, device="cuda")
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


def measure(call, scores: int, width: int) -> float:
    """TFLOP/s, counting the one product of the call."""
    ms = triton.testing.do_bench(call, warmup=15, rep=40, return_mode="median")
    return 2 * scores * width / ms / 1e9


def plain_rate(seconds: float = 0.3) -> float:
    """R: TFLOP/s of an 8192^3 bf16 product, repeated for `seconds`."""
    x, y = torch.randn(2, 8192, 8192, device="cuda", dtype=torch.bfloat16)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.mm(x, y)
    count = int(seconds / 1.6e-3)
    start.record()
    for _ in range(count):
        torch.mm(x, y)
    end.record()
    torch.cuda.synchronize()
    return 2 * 8192**3 * count / start.elapsed_time(end) / 1e9


def candidates() -> list[tuple[str, str, Sizes]]:
    return [
        (name, kind, s)
        for name in SPECS
        for kind, table in (("forward", FORWARD), ("gradient", GRADIENT))
        for s in table
    ]


def run_one(name: str, kind: str, sizes: Sizes, rows: int, width: int, dtype: torch.dtype, *, quick: bool) -> float:
    """Compile one candidate (`quick`), or time it: TFLOP/s."""
    spec = SPECS[name]
    pair = problem(spec, 4096 if quick else min(rows, 2**24 // width // 256 * 256), width, dtype)
    launch = Call.of(pair, spec, TileOptions())
    if kind == "forward":
        launch = dataclasses.replace(launch, forward_sizes=sizes)
        work = Forward(launch)
        call, scores = work.run, pair.a.shape[0] ** 2
    else:
        call, scores = gradient_call(dataclasses.replace(launch, gradient_sizes=sizes), spec)
    if quick:
        call()
        torch.cuda.synchronize()
        return 0.0
    return measure(call, scores, width)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=32768, help="rows and columns of the scores")
    parser.add_argument("--width", type=int, default=512, help="features")
    parser.add_argument("--dtype", default="bfloat16", help="type of the features")
    parser.add_argument("--jobs", type=int, default=12, help="processes that compile")
    parser.add_argument("--compile-part", type=int, default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    dtype = getattr(torch, args.dtype)
    todo = candidates()
    if args.compile_part is not None:
        for name, kind, sizes in todo[args.compile_part :: args.jobs]:
            try:
                run_one(name, kind, sizes, args.rows, args.width, dtype, quick=True)
            except Exception as error:
                print("cannot compile", name, kind, sizes, repr(error)[:200], flush=True)
        return
    base = [
        sys.executable,
        "-m",
        "benchmarks.tune",
        "--jobs",
        str(args.jobs),
        "--width",
        str(args.width),
        "--dtype",
        args.dtype,
    ]
    parts = [subprocess.Popen([*base, "--compile-part", str(part)]) for part in range(args.jobs)]
    for part in parts:
        part.wait()
    print(f"R = {plain_rate():.0f} TFLOP/s (8192^3 bf16, sustained)")
    for name, kind, sizes in todo:
        try:
            rate = run_one(name, kind, sizes, args.rows, args.width, dtype, quick=False)
            print(f"{name:14s} {kind:9s} {rate:6.0f} TFLOP/s  {sizes}", flush=True)
        except Exception as error:
            print(f"{name:14s} {kind:9s} failed {sizes}: {repr(error)[:120]}", flush=True)


if __name__ == "__main__":
    main()
