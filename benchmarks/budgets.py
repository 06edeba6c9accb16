"""Exact cross-entropy with one memory budget (`TileOptions.workspace_mib`), beside torch.compile.

    python -m benchmarks.budgets           on a CUDA device: time, memory and errors
    python -m benchmarks.budgets --quick   small sizes on any device: checks that everything runs
    python -m benchmarks.budgets --page    write the table of the committed results into the page

Each shape is computed with the default budget, with 256 MiB, with the budget that brings the whole call to two thirds
of the memory of torch.compile, and with "auto". Memory is the peak above the inputs, gradients included. Errors are the
relative errors of both gradients against float64. Results: benchmarks/results/budgets-<device>.json.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import tilewise as tw
from benchmarks.cases import make_inputs, vocabulary
from benchmarks.measure import Failure, Step, cuda_peak_bytes, sustained_rate, time_in_turns
from benchmarks.run import RESULTS
from benchmarks.shapes import ShapesBenchmark

SHAPES = (
    (8192, 2304, 256000),
    (8192, 4096, 128256),
    (2048, 4096, 128256),
    (32768, 2048, 128256),
    (8192, 1024, 151936),
)
QUICK = ((256, 64, 1000),)
SHARE = 0.67  # of torch.compile's memory
LEAST_MIB = 64  # where less is left beside the gradients, that budget is not measured
COMPILED = "torch.compile"
PAGE = RESULTS.parent.parent / "docs" / "concepts" / "benchmarks.md"
MIB = 2**20


def dense(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """The mean loss of stored logits; the softmax is in float32 or wider."""
    logits = hidden @ weight.T
    return cross_entropy(logits if logits.dtype == torch.float64 else logits.float(), target)


def exact(x: dict[str, Any], rows: int = 512) -> list[Tensor]:
    """Both gradients in float64, a block of tokens at a time."""
    weight, found = x["b"].detach().double().requires_grad_(), []
    for start in range(0, len(x["a"]), rows):
        hidden, target = (
            x["a"][start : start + rows].detach().double().requires_grad_(),
            x["target"][start : start + rows],
        )
        (dense(hidden, weight, target) * (len(target) / len(x["a"]))).backward()
        found.append(hidden.grad)
    return [torch.cat(found), weight.grad]


def run_shape(shape: tuple[int, int, int], device: torch.device, repeats: int, budget_s: float) -> list[dict[str, Any]]:
    """One result for each budget, and one for torch.compile."""
    n, d, classes = shape
    x = make_inputs(vocabulary(n, d, classes, "bf16" if device.type == "cuda" else "float32", scores="peaked"), device)
    leaves, gradients = [x["a"], x["b"]], x["a"].nbytes + x["b"].nbytes
    want = exact(x)
    torch._dynamo.reset()
    compiled = torch.compile(dense, dynamic=False)

    def ours(mib: Any) -> Callable[[], Tensor]:
        options = tw.TileOptions(workspace_mib=mib)
        return lambda: tw.linear_cross_entropy(x["a"], x["b"], x["target"], options=options)

    steps = {COMPILED: Step(lambda: compiled(x["a"], x["b"], x["target"]), leaves)}
    budgets: dict[str, Any] = {"tilewise, default": None, "tilewise, 256 MiB": 256, "tilewise, auto": "auto"}
    if device.type == "cuda":
        steps[COMPILED]()
        steps[COMPILED].clear()
        two_thirds = int((SHARE * cuda_peak_bytes(steps[COMPILED], device) - gradients) / MIB) - 1
        if two_thirds >= LEAST_MIB:
            budgets[f"tilewise, {SHARE} of its memory"] = two_thirds
    steps |= {name: Step(ours(mib), leaves) for name, mib in budgets.items()}
    results = {}
    for name, step in steps.items():
        step()
        errors = [((leaf.grad.double() - g).norm() / g.norm()).item() for leaf, g in zip(leaves, want, strict=True)]
        step.clear()
        results[name] = {"method": name, "n": n, "d": d, "V": classes, "workspace_mib": budgets.get(name)}
        results[name] |= dict(zip(("hidden_error", "classifier_error"), errors, strict=True))
        if device.type == "cuda":
            results[name]["bytes"] = cuda_peak_bytes(step, device)
    del want
    times = time_in_turns(steps, device, repeats=repeats, budget_s=budget_s, least=3)
    rate = sustained_rate(device)
    for name, row in results.items():
        time = times[name]
        assert not isinstance(time, Failure), time.reason
        row |= {"ms": time.median_ms, "low_ms": time.low_ms, "high_ms": time.high_ms, "rate_tflops": rate / 1e12}
        first = times[COMPILED]
        assert not isinstance(first, Failure)
        row["of_compiled"] = time.median_ms / first.median_ms
    return list(results.values())


def table(report: dict[str, Any]) -> str:
    """The results as Markdown."""
    lines = [
        "| tokens x width x classes | method | time | memory | time and memory of torch.compile's |",
        "|---|---|---|---|---|",
    ]
    shapes = dict.fromkeys((row["n"], row["d"], row["V"]) for row in report["results"])
    for shape in shapes:
        rows = [row for row in report["results"] if (row["n"], row["d"], row["V"]) == shape]
        most = next(row["bytes"] for row in rows if row["method"] == COMPILED)
        for row in rows:
            cells = [" x ".join(f"{size:,}" for size in shape), row["method"], f"{row['ms']:.1f} ms"]
            cells += [f"{row['bytes'] / MIB:,.0f} MiB", f"{row['of_compiled']:.2f}, {row['bytes'] / most:.2f}"]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


BENCHMARK = ShapesBenchmark("budgets", SHAPES, QUICK, run_shape, table, PAGE)

if __name__ == "__main__":
    BENCHMARK.main(__doc__ or "")
