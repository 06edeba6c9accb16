"""The measurements of "InfoNCE Loss CUDA Implementation" (the CuBlaze package): error, time and memory of NT-Xent.

    python -m reproductions.cublaze            on a CUDA device: float32 and TF32, batches of 16 to 8,192 samples
    python -m reproductions.cublaze --small    two small batches on any device: checks that everything runs

Two stacked views of each sample, width 256, temperature 0.5, as in the paper. The paper compares an own kernel and
cuBLAS with PyTorch. It sets two targets: an error of the loss below 1e-5, and of the gradient below 1e-4. Its times
and speedups are pictures without numbers; in words, both ways are slower than PyTorch.

Errors are against float64, the mean over seeds: |L - L64| of the loss, and the largest |g - g64| of the gradient. A
time is that of a step (forward and backward) in a sequence without a synchronization inside, the median of shuffled
turns. Memory is the peak of a step above what was allocated before. Results: results/cublaze-<device>.json here,
and a page made from it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from benchmarks.measure import Step, cuda_peak_bytes, orders
from benchmarks.ordinary import seconds
from benchmarks.run import COMMIT_HELP, describe, repeatable, slug, write
from torch import Tensor

import tilewise as tw
from reproductions.records import RESULTS
from tilewise.kernels.precision import matmul_precision

BATCHES = tuple(2**k for k in range(4, 14))
WIDTH, TEMPERATURE = 256, 0.5
TARGETS = {"loss_error": 1e-5, "gradient_error": 1e-4}
PRECISIONS = {"float32": "highest", "TF32": "high"}
METHODS = ("PyTorch", "torch.compile", "tilewise", "tilewise, own kernels", "tilewise, cuBLAS")


def dense(z: Tensor) -> Tensor:
    """The paper's PyTorch implementation, in its order of operations."""
    rows = len(z)
    scores = z @ z.T
    scores = scores.masked_fill(torch.eye(rows, dtype=torch.bool, device=z.device), -torch.inf)
    target = (torch.arange(rows, device=z.device) + rows // 2) % rows
    return F.cross_entropy(scores / TEMPERATURE, target)


def methods(cuda: bool) -> dict[str, Callable[[Tensor], Tensor]]:
    """The losses by name. "own kernels" recomputes the scores in tiles; it needs a CUDA device."""

    def ours(**settings: Any) -> Callable[[Tensor], Tensor]:
        options = tw.TileOptions(**settings)
        return lambda z: tw.nt_xent(z, temperature=TEMPERATURE, options=options)

    torch._dynamo.reset()
    found = {"PyTorch": dense, "torch.compile": torch.compile(dense, dynamic=False), "tilewise": ours()}
    if cuda:
        found["tilewise, own kernels"] = ours(backend="triton", gradients="backward")
    return found | {"tilewise, cuBLAS": ours(backend="torch")}


def features(batch: int, seed: int, device: torch.device) -> Tensor:
    """Unit rows of two views of ``batch`` samples, the second a disturbed copy of the first: (2 batch, width)."""
    generator = torch.Generator(device).manual_seed(seed)
    first, noise = (torch.randn(batch, WIDTH, generator=generator, device=device) for _ in range(2))
    return F.normalize(torch.cat([first, first + noise]), dim=1)


def gradient(loss: Callable[[Tensor], Tensor], z: Tensor) -> tuple[float, Tensor]:
    """The loss and its gradient."""
    leaf = z.detach().requires_grad_()
    value = loss(leaf)
    return value.item(), torch.autograd.grad(value, leaf)[0]


def errors(losses: dict[str, Callable[[Tensor], Tensor]], batch: int, seeds: int, device: torch.device) -> Any:
    """For each method its mean errors over the seeds."""
    found: dict[str, dict[str, list[float]]] = {name: {key: [] for key in TARGETS} for name in losses}
    for seed in range(seeds):
        z = features(batch, seed, device)
        want, want_grad = gradient(dense, z.double())
        for name, loss in losses.items():
            value, grad = gradient(loss, z)
            found[name]["loss_error"].append(abs(value - want))
            found[name]["gradient_error"].append((grad.double() - want_grad).abs().max().item())
    return {name: {key: statistics.mean(values) for key, values in one.items()} for name, one in found.items()}


def times(steps: dict[str, Step], turns: int, budget_s: float, cuda: bool) -> dict[str, float]:
    """Milliseconds of a step of each method."""
    for step in steps.values():
        for _ in range(5):
            step()
    many = max(1, min(30, int(budget_s / max(seconds(steps["PyTorch"], 3, cuda), 1e-5))))
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for order in orders(steps, turns):
        for name in order:
            taken[name].append(seconds(steps[name], many, cuda))
    return {name: 1e3 * statistics.median(values) for name, values in taken.items()}


def run_case(
    batch: int, precision: str, device: torch.device, turns: int, budget_s: float, seeds: int
) -> list[dict[str, Any]]:
    """One result for each method."""
    cuda = device.type == "cuda"
    with matmul_precision(PRECISIONS[precision]):
        losses = methods(cuda)
        wrong = errors(losses, batch, seeds, device)
        z = features(batch, 0, device).requires_grad_()
        steps = {name: Step(lambda loss=loss: loss(z), [z]) for name, loss in losses.items()}
        ms = times(steps, turns, budget_s, cuda)
        rows = [{"batch": batch, "precision": precision, "method": name, "ms": ms[name]} | wrong[name] for name in ms]
        for row in rows if cuda else ():
            row["bytes"] = cuda_peak_bytes(steps[row["method"]], device)
        return rows


def table(report: dict[str, Any]) -> str:
    """The results as Markdown."""
    lines = [
        "| precision | batch | method | time | of PyTorch's | memory | error of the loss | of the gradient |",
        "|---|---:|---|---:|---:|---:|---:|---:|",
    ]
    base = {(row["precision"], row["batch"]): row["ms"] for row in report["results"] if row["method"] == "PyTorch"}
    for row in report["results"]:
        memory = f"{row['bytes'] / 2**20:,.1f} MiB" if "bytes" in row else "-"
        ratio = row["ms"] / base[row["precision"], row["batch"]]
        lines.append(
            f"| {row['precision']} | {row['batch']:,} | {row['method']} | {row['ms']:.3f} ms | {ratio:.2f} | {memory} "
            f"| {row['loss_error']:.1e} | {row['gradient_error']:.1e} |"
        )
    return "\n".join(lines)


def page(report: dict[str, Any]) -> str:
    """The page of the results: whether the paper's targets are met, and the table."""
    ours = [row for row in report["results"] if row["method"].startswith("tilewise")]
    worst = {key: max(row[key] for row in ours if row["precision"] == "float32") for key in TARGETS}
    met = all(worst[key] < target for key, target in TARGETS.items())
    loss_target, gradient_target = TARGETS.values()
    largest = " and ".join(f"{value:.1e}" for value in worst.values())
    return f"""# NT-Xent of two stacked views, beside PyTorch

The measurements of "InfoNCE Loss CUDA Implementation" (CuBlaze), repeated on {report["device"]} with torch
{report["torch"]} at commit {report["commit"]}.
{report.get("note", "")}
Width {WIDTH}, temperature {TEMPERATURE}; a batch of B samples has 2B rows.

- The paper's targets are errors below {loss_target:g} (loss) and {gradient_target:g} (gradient).
  In float32 the largest errors of tilewise are {largest}: the targets are {"met" if met else "not met"}.
- The paper's times and speedups are pictures without numbers. It says that both of its ways are slower than PyTorch.
- Errors are against float64, the mean of {report["seeds"]} seeds.
  Time is that of forward and backward; memory is the peak above the features.

{table(report)}

Measured with `{report["command"]}`.
"""


def main(argv: Sequence[str] | None = None) -> Path:
    """Measure, and write results and page. Returns the path of the results."""
    parser = argparse.ArgumentParser(prog="python -m reproductions.cublaze", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--small", action="store_true", help="two small batches, few turns, any device")
    parser.add_argument("--batches", type=int, nargs="*", default=BATCHES, help="numbers of samples")
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--seeds", type=int, default=8, help="of the errors")
    parser.add_argument("--out", type=Path, help="folder for the results", default=RESULTS)
    parser.add_argument("--commit", help=COMMIT_HELP)
    given = parser.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type != "cuda" and not given.small:
        raise SystemExit("this measurement needs a CUDA device, and torch finds none. Pass --small to try it out")
    batches, turns, budget_s, seeds = given.batches, given.turns, 0.3, given.seeds
    if given.small:
        batches, turns, budget_s, seeds = (16, 64), 2, 0.01, 2
    command = repeatable("reproductions.cublaze", sys.argv[1:] if argv is None else argv)
    report = describe("cublaze", device, command, turns, budget_s, commit=given.commit) | {"seeds": seeds}
    path = Path(given.out) / f"cublaze-{slug(report['device'])}.json"
    for precision in PRECISIONS:
        for batch in batches:
            rows = run_case(batch, precision, device, turns, budget_s, seeds)
            report["results"] += rows
            print(
                *(f"{r['precision']} {r['batch']} {r['method']}: {r['ms']:.3f} ms" for r in rows), sep="\n", flush=True
            )
            write(path, report)
    path.with_suffix(".md").write_text(page(report))
    print(f"wrote {path}")
    return path


if __name__ == "__main__":
    main()
