"""Random calls for a while, each compared with dense float64: losses, settings, shapes, types, options and leaves.

    PYTHONPATH=src python -m tests.random_calls --minutes 10 [--device cuda] [--processes 14] [--first SEED]

Every call is made three times with other numbers of the same shapes, because a GPU's launches are recorded the first
time and replayed after it. In between, the memory that the allocator hands out next is filled with NaN. Calls are
small, so that many can be made. With `--as-if-large` they are computed as large ones are; of several processes, every
second does so. The exit status is 0 if all were right. A failure is printed with its seed: `--first SEED --count 1`
makes it alone.
"""

from __future__ import annotations

import argparse
import importlib
import math
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
from tests.losses.loss_cases import CASES, Maker, Problem, converted, solve, upstream_like
from tests.random_settings import FAMILIES
from torch import Tensor

from tilewise.kernels.spec import stat_dtype

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Small problems round by luck: what is looked for is wrong, not coarse. The gradient of a few rows may be much smaller
# than the terms whose difference it is. Vectors and numbers are sums over many pairs.
FLOOR = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 3e-5, torch.float64: 1e-12}
FLOOR_OF_SUMS = {torch.bfloat16: 5e-2, torch.float16: 1e-2, torch.float32: 2e-4, torch.float64: 1e-10}
# What docs/concepts/numerics.md permits beside that, for scores up to 15. In a row's loss: the rounding of its scores.
# In a gradient: that of a probability, times its terms, which are up to 15 times upstream; where they cancel exactly,
# that of scores times them. In float16: what is below half of its smallest number, in the gradient and in the
# coefficients of its terms.
ROUNDING = {torch.float32: 2.0**-22 * (1.0 + 15.0), torch.float64: 2.0**-51 * (1.0 + 15.0)}  # type of the statistics
STEEPEST = 15.0
LOST = {torch.float16: 2.0**-25}
TIMES = 3
# Size thresholds, and the values with which small calls drop rows, filter and save columns for backward.
LARGE = {"tilewise.ops.rows": {"WORTH_WAITING": 0}, "tilewise.ops.route": {"WORTH_FILTERING": 0}}
LARGE_ON_GPU = {"tilewise.kernels.triton_impl.two_pass.saved": {"WORTH_IT": 0, "NARROWEST": 16, "COLS": 256}}


@dataclass(frozen=True)
class Call:
    """A loss, its sizes and how it is computed."""

    name: str
    dtype: torch.dtype
    n: int
    d: int
    reduction: str
    frozen: float  # the share of leaves without a gradient
    options: dict[str, Any]
    settings: dict[str, Any]  # of the loss, for a name in FAMILIES


def size(chance: random.Random, most: int) -> int:
    """Of any magnitude, often beside a power of two."""
    near = 2 ** chance.randrange(2, most.bit_length()) + chance.choice([-1, 0, 0, 1])
    return min(most, max(2, chance.choice([near, round(2 ** chance.uniform(1.0, most.bit_length()))])))


def make_problem(call: Call, seed: int, device: str) -> Problem:
    """The call's tensors, its loss and the oracle."""
    make = Maker(call.dtype, n=call.n, d=call.d, seed=seed, device=device)
    family = FAMILIES.get(call.name)
    made = CASES[call.name](make) if family is None else family.make(make, **call.settings)
    for leaf in made.leaves.values():
        leaf.requires_grad_()
    return made


def draw(seed: int, largest: int = 3000, dtypes: tuple[torch.dtype, ...] = DTYPES) -> Call:
    """The call of this seed."""
    chance = random.Random(seed)
    options = {
        "workspace_mib": chance.choice([1, 2, 16, 256, 256, 1024, "auto"]),
        "gradients": chance.choice(["auto", "auto", "forward", "backward"]),
        "filter_tolerance": chance.choice([0.0, 0.0, 0.0, 1e-6]),
    }
    name = chance.choice([*sorted(CASES), *sorted(FAMILIES) * 6])
    family = FAMILIES.get(name)
    largest = largest if family is None else min(largest, family.largest)
    return Call(
        name=name,
        dtype=chance.choice(dtypes),
        n=size(chance, largest),
        d=size(chance, 700),
        reduction=chance.choice(["mean", "mean", "sum", "none"]),
        frozen=chance.choice([0.0, 0.0, 0.3]),
        options=options,
        settings={} if family is None else family.draw(chance),
    )


def wrong(call: Call, place: Place, seed: int) -> list[str]:
    """What is not as it should be; each line names a leaf and its error."""
    found = []
    for data_seed in range(TIMES * seed, TIMES * (seed + 1)):
        made = make_problem(call, data_seed, place.device)
        freeze_some(made, call.frozen, seed)
        with torch.no_grad():
            like = made.dense(SimpleNamespace(**made.leaves), reduction=call.reduction)
        upstream = upstream_like(like, data_seed).to(place.device)
        how = {"reduction": call.reduction, "options": place.options(**call.options)}
        spoil_memory(place)
        got, grads = solve(made.ours, made.leaves, upstream, **how)
        exact_leaves, share = in_type(made, torch.float64), 1.0
        want, want_grads = solve(made.dense, exact_leaves, upstream, reduction=call.reduction)
        dense_leaves = made.leaves
        if call.dtype == torch.float64:
            # The dense path is the reference, so its error is taken from float32, which has 29 bits less. Five of them
            # are left for luck, and for the error of the reference: a small call rounds only a few numbers.
            dense_leaves, share = in_type(made, torch.float32), 2.0**-24
        dense, dense_grads = solve(made.dense, dense_leaves, upstream, reduction=call.reduction)
        eps = torch.finfo(call.dtype).eps
        with torch.no_grad():
            each = made.dense(SimpleNamespace(**exact_leaves), reduction="none")
        terms, total = each.abs().sum().item(), abs(each.sum().item())  # of both signs, they are larger than the loss
        floor = FLOOR[call.dtype] * (terms / total if want.dim() == 0 and total > 0 else 1.0)
        allowed = ROUNDING[stat_dtype(call.dtype)]
        rows = {"mean": 1.0, "sum": each.numel(), "none": each.numel() ** 0.5}[call.reduction]
        found += judged("loss", got, dense, want, max(floor, allowed * rows / size_of(want)), eps, share)
        if want.dim() == 0 and want.isnan():
            continue  # a mean over no tokens; its gradients are 0, as in PyTorch, but NaN in the oracle
        for leaf, exact in want_grads.items():
            floor = (FLOOR if exact.dim() > 1 else FLOOR_OF_SUMS)[call.dtype]
            if exact.dim() == 0:
                floor *= cancellation(made, exact_leaves, leaf, upstream)
            lost = LOST.get(call.dtype, 0.0)
            # Where terms cancel in part, the dense path has errors of scores, too; in float64 it is the reference.
            cancels = call.dtype == torch.float64 or not exact.any()
            coefficient = allowed if cancels else max(lost, torch.finfo(torch.float32).eps)
            most = coefficient * STEEPEST * upstream.norm().item() * rows + lost * exact.numel() ** 0.5
            floor = max(floor, most / size_of(exact))
            found += judged(leaf, grads[leaf], dense_grads[leaf], exact, floor, eps, share)
    return found


def in_type(made: Problem, dtype: torch.dtype) -> dict[str, Tensor]:
    """Copies of the leaves in another type, with the same ones frozen."""
    copies = converted(made.leaves, dtype)
    return {name: leaf.requires_grad_(made.leaves[name].requires_grad) for name, leaf in copies.items()}


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


def size_of(values: Tensor) -> float:
    """The norm that `relative_error` divides by."""
    norm = values.nan_to_num(0.0).norm().item()
    return norm if norm > 0 else 1.0


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


def judged(
    what: str, got: Tensor, dense: Tensor, want: Tensor, floor: float, eps: float, share: float = 1.0
) -> list[str]:
    """Nothing, or a line that says how far off it is. ``share``: of the dense error, what counts as such.

    Where the right answer is NaN (a mean over no tokens), ours must be too. Where the dense path overflows in a half
    type and ours does not, ours may be off by ``eps``.
    """
    if want.isnan().any() and torch.equal(got.isnan(), want.isnan()):
        got, dense, want = (values.nan_to_num(0.0) for values in (got, dense, want))
    ours, theirs = relative_error(got, want), relative_error(dense, want)
    theirs = eps if math.isnan(theirs) else share * theirs
    return [] if ours <= max(1.5 * theirs, floor) else [f"{what}: error {ours:.3g}, dense {theirs:.3g}"]


def ask(place: Place, seeds: range, seconds: float, largest: int = 3000) -> int:
    """The calls of these seeds, until the time is up: how many were wrong."""
    dtypes = DTYPES if place.device == "cuda" else (*DTYPES, torch.float64)  # the Triton backend has no float64
    end, asked, failed = time.monotonic() + seconds, 0, 0
    for seed in seeds:
        if time.monotonic() > end:
            break
        call = draw(seed, largest, dtypes)
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


def compute_as_if_large(device: str) -> None:
    """Lower the thresholds, until this process ends."""
    for name, values in (LARGE | (LARGE_ON_GPU if device == "cuda" else {})).items():
        for threshold, value in values.items():
            module = importlib.import_module(name)
            assert hasattr(module, threshold)
            setattr(module, threshold, value)


def main() -> int:
    """Make the calls in several processes. Returns 0 if all were right."""
    parser = argparse.ArgumentParser(prog="python -m tests.random_calls", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--largest", type=int, default=3000, help="most rows of a call")
    parser.add_argument("--as-if-large", action="store_true", help="compute small calls as large ones are")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--count", type=int, default=10**6, help="calls of a process, at most")
    arguments = parser.parse_args()
    if arguments.processes > 1:
        command = [sys.executable, "-m", "tests.random_calls", "--minutes", str(arguments.minutes)]
        command += ["--device", arguments.device, "--largest", str(arguments.largest)]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        running = [
            subprocess.Popen(
                [*command, "--first", str(arguments.first + 10**6 * k), *(["--as-if-large"] if k % 2 else [])],
                env=environment,
            )
            for k in range(arguments.processes)
        ]
        return max(process.wait() for process in running)
    large = " as if large" if arguments.as_if_large else ""
    print(f"seeds from {arguments.first} on {arguments.device}{large}", flush=True)
    if arguments.as_if_large:
        compute_as_if_large(arguments.device)
    place = Place() if arguments.device == "cuda" else Place("cpu", "torch")
    seeds = range(arguments.first, arguments.first + arguments.count)
    return int(ask(place, seeds, 60 * arguments.minutes, arguments.largest) > 0)


if __name__ == "__main__":
    sys.exit(main())
