"""Heads of language models for reinforcement learning: log-probabilities and entropy, with a gradient for each token.

    python -m benchmarks.heads --peers FOLDER      on a CUDA device: time, memory and errors of ours and of others
    python -m benchmarks.heads --quick             small sizes on any device: checks that everything runs
    python -m benchmarks.heads --page              write the table of the committed results into the page

Every method computes, for hidden states (n, d), a classifier (V, d) and targets (n,), the log-probability of the
target and the entropy of each token. In training each token has a gradient of its own, as with advantages. Errors are
against float64: the largest error of a log-probability, and the relative error of the gradients of the hidden states
and of the classifier. Results: benchmarks/results/heads-<device>.json.

Axes: n tokens, d features, V classes.
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
from benchmarks.cases import Case, make_inputs, vocabulary
from benchmarks.measure import Failure, Step, cuda_peak_bytes, failure_of, sustained_rate, time_in_turns
from benchmarks.run import RESULTS
from benchmarks.shapes import Shape, ShapesBenchmark

Head = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]  # hidden, classifier, target: log_prob, entropy
SHAPES = ((8192, 4096, 128256), (8192, 2048, 151936))
QUICK = ((256, 64, 1000),)
ALONE = "Liger, log-probability alone"
SMALL = "tilewise, 256 MiB"
REFERENCE_ROWS = 256  # tokens at a time in float64
PAGE = RESULTS.parent.parent / "docs" / "post-training.md"


def tilewise_head(
    hidden: Tensor, weight: Tensor, target: Tensor, options: tw.TileOptions | None = None
) -> tuple[Tensor, Tensor]:
    """Ours."""
    stats = tw.linear_token_stats(hidden, weight, target, want=("log_prob", "entropy"), options=options)
    assert stats.log_prob is not None
    assert stats.entropy is not None
    return stats.log_prob, stats.entropy


def from_logits(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """From stored logits; the softmax is in float32 or wider."""
    log_p = (logits.float() if logits.dtype != torch.float64 else logits).log_softmax(-1)
    return log_p.gather(1, target[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def eager_head(hidden: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Logits in the type of the features."""
    return from_logits(hidden @ weight.T, target)


def float32_head(hidden: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """A head in float32: features and classifier are converted, and products have float32 operands."""
    return from_logits(hidden.float() @ weight.float().T, target)


def compiled_head() -> Head:
    """`eager_head` with torch.compile."""
    torch._dynamo.reset()
    return torch.compile(eager_head, dynamic=False)


def trl_head() -> Head:
    """TRL's fused head, with its default chunk of 32,768 classes."""
    function = importlib.import_module("trl.kernels.chunked_logprob").ChunkedLogProbFunction

    def head(hidden: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return function.apply(hidden, weight, None, target, 1.0, 32768, None, 1.0, ("log_probs", "entropy"))[:2]

    return head


def liger_head() -> Head:
    """The log-probabilities of Liger's losses for reinforcement learning; it has no entropy."""
    module = importlib.import_module("liger_kernel.chunked_loss.fused_linear_ppo")
    chunk = module._SELECTIVE_LOGPROB_VOCAB_CHUNK_SIZE

    def head(hidden: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        log_prob = module._ChunkedSelectiveLogProbFunction.apply(hidden, weight, target, None, 1.0, chunk)
        return log_prob, torch.zeros_like(log_prob)

    return head


def verl_head() -> Head:
    """verl's Triton head, with its default backward."""
    function = importlib.import_module("verl.utils.kernel.linear_cross_entropy").linear_cross_entropy
    return lambda hidden, weight, target: function(hidden, weight, target, 1.0, "none")


def unsloth_head() -> Head:
    """Unsloth zoo's fused head."""
    function = importlib.import_module("unsloth_zoo.fused_losses.fused_linear").fused_linear_logprobs
    return partial(function, return_entropy=True)


def liger_scaled_head() -> Head:
    """Liger's head with both statistics. On Hopper it runs a kernel that needs NVIDIA's CUTLASS DSL."""
    module = importlib.import_module("liger_kernel.ops.fused_linear_scaled_cross_entropy")
    if torch.cuda.is_available():
        module._resolve_implementation(torch.device("cuda"))  # raises ImportError without the CUTLASS DSL
    function = module.LigerFusedLinearScaledCrossEntropyFunction

    def head(hidden: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        minus_log_prob, entropy = function.apply(hidden, weight, target, return_entropy=True)
        return -minus_log_prob, entropy

    return head


METHODS: dict[str, Callable[[], Head]] = {
    "tilewise": lambda: tilewise_head,
    SMALL: lambda: partial(tilewise_head, options=tw.TileOptions(workspace_mib=256)),
    "TRL": trl_head,
    "verl": verl_head,
    "Unsloth zoo": unsloth_head,
    "Liger": liger_scaled_head,
    ALONE: liger_head,
    "torch.compile, bf16 logits": compiled_head,
    "eager, bf16 logits": lambda: eager_head,
    "eager, float32 head": lambda: float32_head,
}


def reference(x: dict[str, Any]) -> dict[str, Tensor]:
    """Log-probabilities, entropies and both gradients in float64, a block of tokens at a time."""
    weight = x["b"].detach().double().requires_grad_()
    found: dict[str, list[Tensor]] = {"log_prob": [], "entropy": [], "hidden": []}
    for start in range(0, x["a"].shape[0], REFERENCE_ROWS):
        rows = slice(start, start + REFERENCE_ROWS)
        hidden = x["a"][rows].detach().double().requires_grad_()
        log_prob, entropy = from_logits(hidden @ weight.T, x["target"][rows])
        total(log_prob, entropy, x, rows).backward()
        assert hidden.grad is not None
        for name, value in (("log_prob", log_prob.detach()), ("entropy", entropy.detach()), ("hidden", hidden.grad)):
            found[name].append(value)
    assert weight.grad is not None
    return {name: torch.cat(values) for name, values in found.items()} | {"weight": weight.grad}


def total(log_prob: Tensor, entropy: Tensor, x: dict[str, Any], rows: slice = slice(None)) -> Tensor:
    """A loss with a gradient of its own for each token and each of the two statistics."""
    return (log_prob * x["advantage"][rows]).sum() + (entropy * x["bonus"][rows]).sum()


def errors(head: Head, x: dict[str, Any], exact: dict[str, Tensor]) -> dict[str, float]:
    """Largest absolute errors of both statistics, and relative errors of both gradients."""
    x["a"].grad = x["b"].grad = None
    log_prob, entropy = head(x["a"], x["b"], x["target"])
    total(log_prob, entropy, x).backward()
    found = {
        "log_prob_error": (log_prob.detach() - exact["log_prob"]).abs().max().item(),
        "entropy_error": (entropy.detach() - exact["entropy"]).abs().max().item(),
    }
    for name, leaf in (("hidden", x["a"]), ("weight", x["b"])):
        # A block at a time: a whole gradient in float64 would be gigabytes.
        blocks = [slice(k, k + 8192) for k in range(0, leaf.shape[0], 8192)]
        off = sum((leaf.grad[k].double() - exact[name][k]).square().sum().item() for k in blocks)
        found[f"{name}_grad_error"] = (off / exact[name].square().sum().item()) ** 0.5
    x["a"].grad = x["b"].grad = None
    return found


def run_shape(
    case: Case,
    device: torch.device,
    repeats: int,
    budget_s: float,
    methods: dict[str, Callable[[], Head]] = METHODS,
    loss: bool = False,
) -> list[dict[str, Any]]:
    """One result for each method.

    ``loss``: the gradients are those of a mean loss, the same for each token, and none of the entropy.
    """
    x = make_inputs(case, device)
    generator = torch.Generator(device).manual_seed(1)
    x["advantage"], x["bonus"] = (torch.randn(case.rows, generator=generator, device=device) for _ in range(2))
    if loss:
        x["advantage"], x["bonus"] = torch.full_like(x["bonus"], -1.0 / case.rows), torch.zeros_like(x["bonus"])
    exact = reference(x)
    heads: dict[str, Head] = {}
    results: dict[str, dict[str, Any]] = {}
    for name, make in methods.items():
        results[name] = {"method": name, "n": case.rows, "d": case.width, "V": case.cols}
        try:
            heads[name] = make()
            found = errors(heads[name], x, exact)
            # Without an entropy the gradients are those of another loss.
            results[name] |= {"log_prob_error": found["log_prob_error"]} if name == ALONE else found
        except Exception as error:
            heads.pop(name, None)
            failure = failure_of(error)
            results[name] |= {"status": failure.status, "reason": failure.reason}
    del exact
    gc.collect()

    def training(head: Head) -> Step:
        return Step(lambda: total(*head(x["a"], x["b"], x["target"]), x), [x["a"], x["b"]])

    def scoring(head: Head) -> Callable[[], Any]:
        def step() -> None:
            with torch.no_grad():
                head(x["a"], x["b"], x["target"])

        return step

    steps = {name: training(head) for name, head in heads.items()}
    scores = {name: scoring(head) for name, head in heads.items()}
    before = sustained_rate(device)
    times = time_in_turns(steps, device, repeats=repeats, budget_s=budget_s, least=3)
    score_times = time_in_turns(scores, device, repeats=repeats, budget_s=budget_s / 2, least=3)
    rate = (before + sustained_rate(device)) / 2
    for name in heads:
        row, time, score = results[name], times[name], score_times[name]
        if isinstance(time, Failure) or isinstance(score, Failure):
            failure = time if isinstance(time, Failure) else score
            assert isinstance(failure, Failure)
            row |= {"status": failure.status, "reason": failure.reason}
            continue
        row |= {"status": "ok", "ms": time.median_ms, "low_ms": time.low_ms, "high_ms": time.high_ms}
        row |= {"no_grad_ms": score.median_ms, "rate_tflops": rate / 1e12}
        row["no_grad_share_of_rate"] = case.unit_flops / (1e-3 * score.median_ms) / rate
        if device.type == "cuda":
            row["bytes"] = cuda_peak_bytes(steps[name], device)
            row["no_grad_bytes"] = cuda_peak_bytes(Step(lambda name=name: scored(scores[name]), []), device)
        steps[name].clear()
    return list(results.values())


def scored(step: Callable[[], Any]) -> Tensor:
    """Run a step without gradients. Returns a number without gradient, as `Step` expects."""
    step()
    return torch.zeros(())


def table(report: dict[str, Any]) -> str:
    """The results as Markdown, one table for each shape."""
    lines: list[str] = []
    shapes = dict.fromkeys((row["n"], row["d"], row["V"]) for row in report["results"])
    for n, d, classes in shapes:
        lines += [
            "",
            f"{n:,} tokens, {d:,} features, {classes:,} classes, bf16, on an {report['device']}:",
            "",
            "| head | training | memory | scoring | memory | largest error of a log-probability |",
            "|---|---|---|---|---|---|",
        ]
        for row in report["results"]:
            if (row["n"], row["d"], row["V"]) != (n, d, classes):
                continue
            if row["status"] != "ok":
                lines.append(f"| {row['method']} | {row['status']} | | | | |")
                continue
            cells = [row["method"], f"{row['ms']:.1f} ms", f"{row['bytes'] / 2**20:,.0f} MiB"]
            cells += [f"{row['no_grad_ms']:.1f} ms", f"{row['no_grad_bytes'] / 2**20:,.0f} MiB"]
            lines.append("| " + " | ".join([*cells, f"{row['log_prob_error']:.1e}"]) + " |")
    return "\n".join(lines).strip()


def run_peaked(shape: Shape, device: torch.device, turns: int, seconds: float) -> list[dict[str, Any]]:
    """One result for each method, with peaked scores."""
    kind = "bf16" if device.type == "cuda" else "float32"
    return run_shape(vocabulary(*shape, kind, scores="peaked"), device, turns, seconds)


BENCHMARK = ShapesBenchmark("heads", SHAPES, QUICK, run_peaked, table, PAGE, turns=10)

if __name__ == "__main__":
    BENCHMARK.main(__doc__ or "")
