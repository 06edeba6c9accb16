"""Random calls for a while, each held against dense float64: shapes, types, options and leaves that nobody thought of.

    PYTHONPATH=src python -m tests.gpu.random_calls --seconds 100 --processes 14 [--first SEED]

Every call is made three times with other numbers of the same shapes, because launches are written down the first time
and repeated after it; in between the memory that is handed out is filled with NaN. Ends with 0 if all were right. A
failure is printed with its seed: `--first SEED --count 1` asks it alone.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import time
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from tests.compare import relative_error
from tests.gpu.checks import Place
from tests.losses.loss_cases import CASES, Problem, converted, problem, solve, upstream_like
from torch import Tensor

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Small problems round by luck: what is looked for is wrong, not coarse. Vectors and numbers are sums over many pairs.
FLOOR = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}
FLOOR_OF_SUMS = {torch.bfloat16: 5e-2, torch.float16: 1e-2, torch.float32: 2e-4}
TIMES = 3


@dataclass(frozen=True)
class Call:
    """A loss, its sizes and how it is computed."""

    name: str
    dtype: torch.dtype
    n: int
    d: int
    reduction: str
    frozen: float  # the share of leaves without a gradient
    settings: dict[str, Any]


def size(chance: random.Random, most: int) -> int:
    """Of any magnitude, often beside a power of two."""
    near = 2 ** chance.randrange(2, most.bit_length()) + chance.choice([-1, 0, 0, 1])
    return min(most, max(2, chance.choice([near, round(2 ** chance.uniform(1.0, most.bit_length()))])))


def draw(seed: int, largest: int = 3000) -> Call:
    """The call of this seed."""
    chance = random.Random(seed)
    settings = {
        "workspace_mib": chance.choice([1, 2, 16, 256, 256, 1024]),
        "gradients": chance.choice(["auto", "auto", "forward", "backward"]),
        "filter_tolerance": chance.choice([0.0, 0.0, 0.0, 1e-6]),
    }
    return Call(
        name=chance.choice(sorted(CASES)),
        dtype=chance.choice(DTYPES),
        n=size(chance, largest),
        d=size(chance, 700),
        reduction=chance.choice(["mean", "mean", "sum", "none"]),
        frozen=chance.choice([0.0, 0.0, 0.3]),
        settings=settings,
    )


def wrong(call: Call, place: Place, seed: int) -> list[str]:
    """What is not as it should be; each line names a leaf and its error."""
    found = []
    for data_seed in range(TIMES * seed, TIMES * (seed + 1)):
        made = problem(call.name, call.dtype, n=call.n, d=call.d, seed=data_seed, device=place.device)
        freeze_some(made, call.frozen, seed)
        with torch.no_grad():
            like = made.dense(SimpleNamespace(**made.leaves), reduction=call.reduction)
        upstream = upstream_like(like, data_seed).to(place.device)
        how = {"reduction": call.reduction, "options": place.options(**call.settings)}
        spoil_memory(place)
        got, grads = solve(made.ours, made.leaves, upstream, **how)
        exact_leaves = {
            name: leaf.requires_grad_(made.leaves[name].requires_grad)
            for name, leaf in converted(made.leaves, torch.float64).items()
        }
        want, want_grads = solve(made.dense, exact_leaves, upstream, reduction=call.reduction)
        dense, dense_grads = solve(made.dense, made.leaves, upstream, reduction=call.reduction)
        found += judged("loss", got, dense, want, FLOOR[call.dtype])
        for leaf, exact in want_grads.items():
            floor = (FLOOR if exact.dim() > 1 else FLOOR_OF_SUMS)[call.dtype]
            if exact.dim() == 0:
                floor *= cancellation(made, exact_leaves, leaf, upstream)
            found += judged(leaf, grads[leaf], dense_grads[leaf], exact, floor)
    return found


def cancellation(made: Problem, leaves: dict[str, Tensor], leaf: str, upstream: Tensor) -> float:
    """How much larger the rows' shares of a number's gradient are than their sum: what they lose, it cannot have."""
    moved = []
    with torch.no_grad():
        for step in (1e-5, -1e-5):
            there = SimpleNamespace(**{**leaves, leaf: leaves[leaf] * (1 + step)})
            moved.append(made.dense(there, reduction="none"))
    share = (moved[0] - moved[1]) * (upstream if upstream.dim() else 1.0)
    size, total = share.abs().sum().item(), share.sum().abs().item()
    return size / total if total > 0 else 1.0


def freeze_some(made: Problem, frozen: float, seed: int) -> None:
    """Take the gradient from some leaves, but not from all."""
    chance, names = random.Random(seed), sorted(made.leaves)
    kept = chance.choice(names)
    for name in names:
        if name != kept and chance.random() < frozen:
            made.leaves[name].requires_grad_(False)


def spoil_memory(place: Place) -> None:
    """What the allocator hands out next is NaN."""
    largest = 25 if place.device == "cuda" else 16
    garbage = [torch.full((2**k,), torch.nan, device=place.device) for k in range(6, largest)]
    del garbage


def judged(what: str, got: Tensor, dense: Tensor, want: Tensor, floor: float) -> list[str]:
    """Nothing, or a line that says how far off it is."""
    ours, theirs = relative_error(got, want), relative_error(dense, want)
    return [] if ours <= max(1.5 * theirs, floor) else [f"{what}: error {ours:.3g}, dense {theirs:.3g}"]


def ask(place: Place, seeds: range, seconds: float) -> int:
    """The calls of these seeds, until the time is up: how many were wrong."""
    end, asked, failed = time.monotonic() + seconds, 0, 0
    for seed in seeds:
        if time.monotonic() > end:
            break
        call = draw(seed)
        try:
            found = wrong(call, place, seed)
        except Exception as error:
            found = [f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"]
        asked += 1
        failed += bool(found)
        for line in found:
            print(f"seed {seed}: {line}: {call}", flush=True)
    print(f"{asked} calls, {failed} wrong", flush=True)
    return failed


def main() -> int:
    """Ask in several processes, and add up."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.random_calls", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--seconds", type=float, default=100.0)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--count", type=int, default=10**6, help="calls of a process, at most")
    arguments = parser.parse_args()
    if arguments.processes > 1:
        command = [sys.executable, "-m", "tests.gpu.random_calls", "--seconds", str(arguments.seconds)]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        running = [
            subprocess.Popen([*command, "--first", str(arguments.first + 10**6 * k)], env=environment)
            for k in range(arguments.processes)
        ]
        return max(process.wait() for process in running)
    place = Place() if torch.cuda.is_available() else Place("cpu", "torch")
    return int(ask(place, range(arguments.first, arguments.first + arguments.count), arguments.seconds) > 0)


if __name__ == "__main__":
    sys.exit(main())
