"""The filter: time, memory and errors of tolerances and of "rounding", for the loss and for statistics of tokens.

    python -m benchmarks.filters --peers FOLDER    on a CUDA device
    python -m benchmarks.filters --quick           small sizes on any device: checks that everything runs

Each task has scores with a slope of 1.8, of 1.5, and flat ones. Errors are those of `benchmarks.heads`: relative errors
of both gradients against float64. Prints one line of JSON for each method, with its time and its errors divided by
those of torch.compile.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import tilewise as tw
from benchmarks.cases import vocabulary
from benchmarks.heads import Head, compiled_head, eager_head, run_shape, tilewise_head, trl_head

TOLERANCES: tuple[Any, ...] = (0.0, 1e-2, "rounding")
SHAPES = {"loss": (8192, 2304, 256000), "tokens": (8192, 4096, 128256)}
QUICK = {"loss": (64, 16, 1000), "tokens": (64, 16, 1000)}
COMPILED = "torch.compile, bf16 logits"


def loss_head(head: Head) -> Head:
    """The log-probability alone, with zeros for the entropy."""

    def alone(hidden: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        log_prob = head(hidden, weight, target)[0]
        return log_prob, torch.zeros_like(log_prob)

    return alone


def tilewise_loss(hidden: Tensor, weight: Tensor, target: Tensor, options: tw.TileOptions) -> tuple[Tensor, Tensor]:
    """Ours, by `linear_cross_entropy`."""
    loss = tw.linear_cross_entropy(hidden, weight, target, reduction="none", options=options)
    return -loss, torch.zeros_like(loss)


def methods_of(task: str) -> dict[str, Callable[[], Head]]:
    """Ours with each tolerance, torch.compile, and for tokens TRL."""
    ours = tilewise_loss if task == "loss" else tilewise_head

    def made(tolerance: Any) -> Head:
        return functools.partial(ours, options=tw.TileOptions(filter_tolerance=tolerance))

    found: dict[str, Callable[[], Head]] = {f"tilewise, {t}": functools.partial(made, t) for t in TOLERANCES}
    if task == "tokens":
        return found | {COMPILED: compiled_head, "TRL": trl_head}
    return found | {COMPILED: lambda: torch.compile(loss_head(eager_head), dynamic=False)}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--peers", type=Path, nargs="*", default=[], help="folders that hold other libraries")
    parser.add_argument("--quick", action="store_true", help="small sizes, few turns, any device")
    parser.add_argument("--task", choices=tuple(SHAPES), help="only this task")
    given = parser.parse_args(argv)
    for folder in given.peers:
        sys.path.insert(0, str(folder.resolve()))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type != "cuda" and not given.quick:
        raise SystemExit("this benchmark needs a CUDA device, and torch finds none. Pass --quick to try it out")
    repeats, budget_s = (2, 0.2) if given.quick else (20, 3.0)
    for task, (n, d, classes) in (QUICK if given.quick else SHAPES).items():
        if given.task in (None, task):
            for slope in (1.8, 1.5, 0.0):
                scores = "peaked" if slope else "flat"
                dtype = "bf16" if device.type == "cuda" else "float32"
                case = vocabulary(n, d, classes, dtype, scores=scores, slope=slope)
                rows = run_shape(case, device, repeats, budget_s, methods_of(task), task == "loss")
                rival = next(row for row in rows if row["method"] == COMPILED)
                for row in rows:
                    print(json.dumps({"task": task, "slope": slope} | row | ratios(row, rival)), flush=True)


def ratios(row: dict[str, Any], rival: dict[str, Any]) -> dict[str, float]:
    """Time and gradient errors divided by those of the rival, where both were measured."""
    names = [name for name in ("ms", "hidden_grad_error", "weight_grad_error") if name in row and name in rival]
    return {f"{name}_ratio": row[name] / rival[name] for name in names}


if __name__ == "__main__":
    main()
