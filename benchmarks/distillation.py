"""Distillation of a language model's head: divergence of a student from a teacher, with gradients for the student.

    python -m benchmarks.distillation --peers FOLDER    on a CUDA device: time, memory and errors of ours and of others
    python -m benchmarks.distillation --quick           small sizes on any device: checks that everything runs
    python -m benchmarks.distillation --page            write the table of the committed results into the page

Hidden states (n, d) and classifiers (V, d) of both models. Errors are against float64: the largest error of a token's
divergence, and the relative errors of the gradients of the student's hidden states and classifier. The last kind has a
teacher of which only 64 classes of each token are stored, beside a plain cross-entropy. Results:
benchmarks/results/distillation-<device>.json.
"""

from __future__ import annotations

import gc
import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import tilewise as tw
from benchmarks.cases import make_inputs, vocabulary
from benchmarks.measure import Failure, Step, cuda_peak_bytes, failure_of, sustained_rate, time_in_turns
from benchmarks.run import RESULTS
from benchmarks.shapes import ShapesBenchmark
from tilewise.losses.sparse_distillation import Tail

Divergence = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # student and teacher: hidden, classifier -> (n,)
SHAPES = ((8192, 4096, 128256), (8192, 2048, 151936))
QUICK = ((256, 64, 1000),)
KINDS = {"KL(teacher || student)": 0.0, "KL(student || teacher)": 1.0, "JSD": 0.5}
STORED = "64 classes of a teacher"
CLASSES = 64  # of STORED
OTHER_LOSSES = ("tilewise, bucket", "tilewise, one class")  # of STORED: only their time and memory are compared
PAGE = RESULTS.parent.parent / "docs" / "distillation.md"
REFERENCE_ROWS = 128  # tokens at a time in float64


def of_logits(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """From stored logits; the softmax is in float32 or wider."""
    wide = torch.float64 if student.dtype == torch.float64 else torch.float32
    log_p, log_q = student.to(wide).log_softmax(-1), teacher.to(wide).log_softmax(-1)
    if beta == 0.0:
        return (log_q.exp() * (log_q - log_p)).sum(-1)
    if beta == 1.0:
        return (log_p.exp() * (log_p - log_q)).sum(-1)
    log_m = torch.log((1.0 - beta) * log_p.exp() + beta * log_q.exp())
    one, other = log_q.exp() * (log_q - log_m), log_p.exp() * (log_p - log_m)
    return (beta * one + (1.0 - beta) * other).sum(-1)


def tilewise_divergence(beta: float, options: tw.TileOptions | None = None) -> Divergence:
    """Ours."""

    def divergence(x: Tensor, w: Tensor, teacher: Tensor, head: Tensor) -> Tensor:
        return tw.linear_distillation_loss(x, w, teacher, head, beta=beta, reduction="none", options=options)

    return divergence


def trl_divergence(beta: float) -> Divergence:
    """TRL's kernel, with its default chunks."""
    function = importlib.import_module("trl.kernels.chunked_divergence").ChunkedDivergenceFunction

    def divergence(x: Tensor, w: Tensor, teacher: Tensor, head: Tensor) -> Tensor:
        found: Tensor = function.apply(x, w, None, teacher, head, None, beta)[0]
        return found

    return divergence


def compiled_divergence(beta: float) -> Divergence:
    """Logits of all tokens, with torch.compile."""
    torch._dynamo.reset()

    def divergence(x: Tensor, w: Tensor, teacher: Tensor, head: Tensor) -> Tensor:
        return of_logits(x @ w.T, teacher @ head.T, beta)

    return torch.compile(divergence, dynamic=False)


METHODS: dict[str, Callable[[float], Divergence]] = {
    "tilewise": tilewise_divergence,
    "tilewise, 2 GiB": partial(tilewise_divergence, options=tw.TileOptions(workspace_mib=2048)),
    "tilewise, auto": partial(tilewise_divergence, options=tw.TileOptions(workspace_mib="auto")),
    "TRL": trl_divergence,
    "torch.compile, bf16 logits": compiled_divergence,
}


def stored_teacher(x: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The likeliest classes of each token and their log-probabilities: (n, CLASSES) each."""
    blocks = range(0, x["x"].shape[0], REFERENCE_ROWS)
    found = [(x["teacher"][k : k + REFERENCE_ROWS] @ x["head"].T).float().log_softmax(-1).topk(CLASSES) for k in blocks]
    return torch.cat([top.indices for top in found]), torch.cat([top.values for top in found])


def stored_divergence(ids: Tensor, log_probs: Tensor, tail: Tail = "ignore") -> Divergence:
    """The cross-entropy of the student against the stored classes."""

    def divergence(x: Tensor, w: Tensor, teacher: Tensor, head: Tensor) -> Tensor:
        how: dict[str, Any] = {"divergence": "cross_entropy", "reduction": "none", "tail": tail}
        return tw.linear_sparse_distillation_loss(x, w, ids, log_probs, **how)

    return divergence


def plain_cross_entropy(target: Tensor) -> Divergence:
    """The cross-entropy against one class of each token."""

    def loss(x: Tensor, w: Tensor, teacher: Tensor, head: Tensor) -> Tensor:
        return tw.linear_cross_entropy(x, w, target, reduction="none")

    return loss


def reference(x: dict[str, Tensor], beta: float, stored: tuple[Tensor, Tensor] | None = None) -> dict[str, Tensor]:
    """Divergences and both gradients in float64, a block of tokens at a time. ``stored``: see `stored_teacher`."""
    weight, head = x["w"].detach().double().requires_grad_(), x["head"].double()
    found: dict[str, list[Tensor]] = {"divergence": [], "hidden": []}
    for start in range(0, x["x"].shape[0], REFERENCE_ROWS):
        rows = slice(start, start + REFERENCE_ROWS)
        hidden = x["x"][rows].detach().double().requires_grad_()
        if stored is None:
            value = of_logits(hidden @ weight.T, x["teacher"][rows].double() @ head.T, beta)
        else:
            log_p = (hidden @ weight.T).log_softmax(-1).gather(1, stored[0][rows])
            value = -(stored[1][rows].double().exp() * log_p).sum(-1)
        (value * x["weight"][rows]).sum().backward()
        assert hidden.grad is not None
        found["divergence"].append(value.detach())
        found["hidden"].append(hidden.grad)
    assert weight.grad is not None
    return {name: torch.cat(values) for name, values in found.items()} | {"classifier": weight.grad}


def errors(method: Divergence, x: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    """The largest absolute error of a divergence, and relative errors of both gradients."""
    value = method(x["x"], x["w"], x["teacher"], x["head"])
    (value * x["weight"]).sum().backward()
    found = {"divergence_error": (value.detach() - exact["divergence"]).abs().max().item()}
    for name, leaf in (("hidden", x["x"]), ("classifier", x["w"])):
        assert leaf.grad is not None
        blocks = [slice(k, k + 8192) for k in range(0, leaf.shape[0], 8192)]
        off = sum((leaf.grad[k].double() - exact[name][k]).square().sum().item() for k in blocks)
        found[f"{name}_grad_error"] = (off / exact[name].square().sum().item()) ** 0.5
        leaf.grad = None
    return found


def inputs(n: int, d: int, classes: int, device: torch.device) -> dict[str, Tensor]:
    """Student and teacher: different heads with peaked scores."""
    kind = "bf16" if device.type == "cuda" else "float32"
    found = make_inputs(vocabulary(n, d, classes, kind, scores="peaked"), device)
    generator = torch.Generator(device).manual_seed(3)
    x, w = found["a"], found["b"]
    noise = torch.randn(n, d, generator=generator, device=device, dtype=x.dtype)
    teacher = (x.detach() + 0.5 * noise * x.detach().std()).contiguous()
    shift = torch.randn(classes, d, generator=generator, device=device, dtype=w.dtype)
    head = (w.detach() + 0.3 * shift * w.detach().std()).contiguous()
    weight = torch.randn(n, generator=generator, device=device)
    return {"x": x, "w": w, "teacher": teacher, "head": head, "weight": weight, "target": found["target"]}


def run_shape(shape: tuple[int, int, int], device: torch.device, repeats: int, budget_s: float) -> list[dict[str, Any]]:
    """One result for each method and divergence."""
    x = inputs(*shape, device)
    results: dict[tuple[str, str], dict[str, Any]] = {}
    steps: dict[str, Step] = {}
    stored = stored_teacher(x)
    makers = {kind: {name: partial(make, beta) for name, make in METHODS.items()} for kind, beta in KINDS.items()}
    makers[STORED] = {
        "tilewise": lambda: stored_divergence(*stored),
        "tilewise, bucket": lambda: stored_divergence(*stored, tail="bucket"),
        "tilewise, one class": lambda: plain_cross_entropy(x["target"]),
    }
    for kind, methods in makers.items():
        exact = reference(x, KINDS.get(kind, 0.0), stored if kind == STORED else None)
        for name, make in methods.items():
            row = results[kind, name] = {"kind": kind, "method": name}
            row |= dict(zip(("n", "d", "V"), shape, strict=True))
            try:
                method = make()
                if name not in OTHER_LOSSES:
                    row |= errors(method, x, exact)
                steps[f"{kind}: {name}"] = step_of(method, x)
            except Exception as error:
                failure = failure_of(error)
                row |= {"status": failure.status, "reason": failure.reason}
        del exact
        gc.collect()
    before = sustained_rate(device)
    times = time_in_turns(steps, device, repeats=repeats, budget_s=budget_s, least=3)
    rate = (before + sustained_rate(device)) / 2
    for (kind, name), row in results.items():
        time = times.get(f"{kind}: {name}")
        if time is None:
            continue
        if isinstance(time, Failure):
            row |= {"status": time.status, "reason": time.reason}
            continue
        row |= {"status": "ok", "ms": time.median_ms, "low_ms": time.low_ms, "high_ms": time.high_ms}
        row["rate_tflops"] = rate / 1e12
        if device.type == "cuda":
            row["bytes"] = cuda_peak_bytes(steps[f"{kind}: {name}"], device)
        steps[f"{kind}: {name}"].clear()
    return list(results.values())


def step_of(method: Divergence, x: dict[str, Tensor]) -> Step:
    """One training step: the weighted sum of the divergences."""
    return Step(lambda: (method(x["x"], x["w"], x["teacher"], x["head"]) * x["weight"]).sum(), [x["x"], x["w"]])


def table(report: dict[str, Any]) -> str:
    """The results as Markdown, one table for each shape."""
    lines: list[str] = []
    for n, d, classes in dict.fromkeys((row["n"], row["d"], row["V"]) for row in report["results"]):
        lines += [
            "",
            f"{n:,} tokens, {d:,} features, {classes:,} classes, bf16, on an {report['device']}:",
            "",
            "| divergence | method | training step | memory | largest error of a token |",
            "|---|---|---|---|---|",
        ]
        for row in report["results"]:
            if (row["n"], row["d"], row["V"]) == (n, d, classes) and row["status"] == "ok":
                cells = [row["kind"].replace("|", "\\|"), row["method"], f"{row['ms']:.1f} ms"]
                error = f"{row['divergence_error']:.1e}" if "divergence_error" in row else ""
                cells += [f"{row['bytes'] / 2**20:,.0f} MiB", error]
                lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines).strip()


BENCHMARK = ShapesBenchmark("distillation", SHAPES, QUICK, run_shape, table, PAGE)

if __name__ == "__main__":
    BENCHMARK.main(__doc__ or "")
