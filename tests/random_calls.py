"""Random calls for a while, each compared with dense float64: losses, settings, shapes, types, options and leaves.

    PYTHONPATH=src python -m tests.random_calls --minutes 10 [--device cuda] [--processes 14] [--first SEED]

Among them are steps through the gradient cache, and drop-ins of other libraries.
Every call is made three times with other numbers of the same shapes, because a GPU's launches are recorded the first
time and replayed after it. In between, the memory that the allocator hands out next is filled with NaN. Calls are
small, so that many can be made. With `--as-if-large` they are computed as large ones are; of several processes, every
second does so. The exit status is 0 if all were right. A failure is printed with its seed. `--first SEED --count 1`
with the same `--device` and `--largest` makes it alone; also pass `--as-if-large` if its process did so.
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
from tests.losses.loss_cases import CASES, Loss, Maker, Problem, converted, solve, upstream_like
from tests.random_settings import FAMILIES
from torch import Tensor

from tilewise.kernels.spec import stat_dtype
from tilewise.ops import limits

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# An error may be the largest of three, as docs/concepts/numerics.md says. First, so much of the answer, or for the
# gradient of a number, of the sum of its rows' absolute shares. In a half type: the rounding of what is returned.
LOSS = {torch.float32: 2e-6, torch.float64: 1e-12}
GRADIENT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 1e-5, torch.float64: 1e-12}
# Second, rounding errors that do not depend on the size of the answer; see `permitted`. They are for scores up to 15;
# the dense path has the errors of larger ones, too.
ROUNDING = {torch.float32: 2.0**-22 * (1.0 + 15.0), torch.float64: 2.0**-51 * (1.0 + 15.0)}  # type of the statistics
STEEPEST = 15.0  # a row's gradient has terms of this size, times the incoming gradient
UNDERFLOW = {torch.float16: 2.0**-25}  # half of the smallest number
# Third, 1.5 times the error of the dense path. A small call rounds only a few numbers, so the dense path may be exact
# by luck. Where ours is not, the dense error is the largest of so many calls whose leaves are a little off.
NEARBY = 64
AWAY = 2.0**-5  # relative to each entry: 4 steps of bfloat16
TIMES = 3
REDUCTIONS = ("mean", "mean", "sum", "none")
# Size thresholds, and the values with which small calls drop rows, filter and save columns for backward.
LARGE = {"small": 0, "small_cpu": 0, "worth_waiting": 0, "worth_filtering": 0}  # of `tilewise.ops.limits`
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
        reduction=chance.choice(REDUCTIONS if family is None else family.reductions),
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
        spoil_memory(place)
        how = {"reduction": call.reduction, "options": place.options(**call.options)}
        got = answers(made.ours, made.leaves, upstream, **how)
        want = answers(made.dense, in_double(made.leaves), upstream, reduction=call.reduction)
        if want["loss"].dim() == 0 and want["loss"].isnan():  # a mean over no tokens
            if not got.pop("loss").isnan():
                found.append("loss: a number instead of NaN")
            # Gradients are finite, as in PyTorch: 0, or those of a divergence without targets. The oracle's are NaN.
            found += [f"{leaf}: not finite" for leaf, grad in got.items() if not grad.isfinite().all()]
            continue
        limits = permitted(call, made, got, want, upstream)
        errors = {what: error_of(got[what], exact) for what, exact in want.items()}
        suspects = [what for what in want if not errors[what] <= limits[what]]
        for draw_index in range(NEARBY + 1):
            if not suspects:
                break
            dense = dense_errors(call, made, upstream, draw_index)
            for what in suspects:
                limits[what] = max(limits[what], 1.5 * dense[what])
            suspects = [what for what in suspects if not errors[what] <= limits[what]]
        for what in suspects:
            norm = size_of(want[what])
            found.append(f"{what}: error {errors[what] / norm:.3g}, permitted {limits[what] / norm:.3g}")
    return found


def permitted(
    call: Call, made: Problem, got: dict[str, Tensor], want: dict[str, Tensor], upstream: Tensor
) -> dict[str, float]:
    """The largest error of the loss and of each gradient that needs no comparison with the dense path.

    Of two errors, the larger. One is relative: LOSS, GRADIENT. The other is, in the loss of a row, that of its scores:
    ROUNDING. In a gradient it is the rounding of a probability, times the terms of the gradient. It is the larger
    ROUNDING in place of that in float64, where the dense path is the reference; in a number, whose terms have a score
    as a factor; in a gradient of exactly 0; and on a GPU for sparse teachers.
    """
    score, row_factor = ROUNDING[stat_dtype(call.dtype)], {"mean": 1.0, "sum": call.n, "none": call.n**0.5}
    terms = STEEPEST * upstream.norm().item() * row_factor[call.reduction]
    limits = {}
    for what, exact in want.items():
        norm = exact.nan_to_num(0.0).norm().item()
        if what == "loss":
            limits[what] = max(LOSS[got[what].dtype] * norm, score * row_factor[call.reduction])
            continue
        by_score = call.dtype == torch.float64 or exact.dim() == 0 or norm == 0.0
        by_score |= upstream.is_cuda and "sparse" in call.name
        absolute = terms * (score if by_score else torch.finfo(torch.float32).eps)
        absolute += UNDERFLOW.get(call.dtype, 0.0) * exact.numel() ** 0.5
        more = cancellation(made, what, upstream) if exact.dim() == 0 else 1.0
        limits[what] = max(GRADIENT[call.dtype] * norm * more, absolute)
    return limits


def cancellation(made: Problem, leaf: str, upstream: Tensor) -> float:
    """How much larger the rows' absolute shares of a number's gradient are than their sum."""
    moved, leaves = [], in_double(made.leaves)
    with torch.no_grad():
        for step in (1e-5, -1e-5):
            there = SimpleNamespace(**{**leaves, leaf: leaves[leaf] * (1 + step)})
            moved.append(made.dense(there, reduction="none"))
    share = (moved[0] - moved[1]) * (upstream if upstream.dim() else 1.0)
    size, total = share.abs().sum().item(), share.sum().abs().item()
    return size / total if total > 0 else 1.0


def dense_errors(call: Call, made: Problem, upstream: Tensor, draw_index: int) -> dict[str, float]:
    """The errors of the dense path; see `nearby`.

    For float64 the dense path is the reference, so its error is taken from float32, which has 29 bits less. It is
    multiplied by 2^-24 instead of 2^-29, because the reference has a rounding error, too. Where the dense path
    overflows in float16, its error is taken from bfloat16, which has 3 bits less.
    """
    types = {torch.float64: [(torch.float32, 2.0**-24)], torch.float16: [(torch.float16, 1.0), (torch.bfloat16, 0.125)]}
    errors: dict[str, float] = {}
    for dtype, share in types.get(call.dtype, [(call.dtype, 1.0)]):
        leaves = nearby(made, draw_index, call.dtype, dtype)
        exact = answers(made.dense, in_double(leaves), upstream, reduction=call.reduction)
        for what, dense in answers(made.dense, leaves, upstream, reduction=call.reduction).items():
            if not math.isfinite(errors.get(what, math.nan)):
                errors[what] = share * error_of(dense, exact[what])
        if all(map(math.isfinite, errors.values())):
            break
    return {what: error if math.isfinite(error) else 0.0 for what, error in errors.items()}


def nearby(made: Problem, draw_index: int, old: torch.dtype, new: torch.dtype) -> dict[str, Tensor]:
    """The leaves, those of type ``old`` in type ``new``: for 0 as they are, otherwise each entry a little off."""
    leaves, generator = {}, torch.Generator().manual_seed(draw_index)
    for name, leaf in made.leaves.items():
        away = AWAY * (2.0 * torch.rand(leaf.shape, generator=generator) - 1.0) if draw_index else torch.zeros(())
        moved = leaf.detach() * (1.0 + away.to(leaf))
        leaves[name] = moved.to(new if leaf.dtype == old else leaf.dtype).requires_grad_(leaf.requires_grad)
    return leaves


def in_double(leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies of the leaves in float64, with the same ones frozen."""
    copies = converted(leaves, torch.float64)
    return {name: leaf.requires_grad_(leaves[name].requires_grad) for name, leaf in copies.items()}


def answers(loss: Loss, leaves: dict[str, Tensor], upstream: Tensor, **how: Any) -> dict[str, Tensor]:
    """The loss, and the gradient of each leaf."""
    value, grads = solve(loss, leaves, upstream, **how)
    return {"loss": value, **grads}


def error_of(got: Tensor, want: Tensor) -> float:
    """The norm of the difference. Where the right answer is NaN, ours must be too."""
    if want.isnan().any() and torch.equal(got.isnan(), want.isnan()):
        got, want = got.nan_to_num(0.0), want.nan_to_num(0.0)
    return relative_error(got, want) * size_of(want)


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
    limits.changed(**LARGE).__enter__()
    for name, values in (LARGE_ON_GPU if device == "cuda" else {}).items():
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
        codes = [process.wait() for process in running]  # a killed process has a negative one
        return int(any(codes))
    large = " as if large" if arguments.as_if_large else ""
    print(f"seeds from {arguments.first} on {arguments.device}{large}", flush=True)
    if arguments.as_if_large:
        compute_as_if_large(arguments.device)
    place = Place() if arguments.device == "cuda" else Place("cpu", "torch")
    seeds = range(arguments.first, arguments.first + arguments.count)
    return int(ask(place, seeds, 60 * arguments.minutes, arguments.largest) > 0)


if __name__ == "__main__":
    sys.exit(main())
