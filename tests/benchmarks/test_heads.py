"""The benchmark of language-model heads: every head agrees with float64, and the page shows the committed results."""

from __future__ import annotations

import json
from types import ModuleType

import pytest
import torch
from benchmarks.cases import make_inputs, vocabulary
from benchmarks.shapes import ShapesBenchmark

from benchmarks import budgets, distillation, heads

ON_A_CPU = [name for name in heads.METHODS if name != "verl" and not name.startswith("torch.compile")]
PACKAGES = {"TRL": "trl", heads.ALONE: "liger_kernel", "Liger": "liger_kernel", "Unsloth zoo": "unsloth_zoo"}


@pytest.mark.parametrize("name", ON_A_CPU)
def test_heads_agree(name: str) -> None:
    if package := PACKAGES.get(name):
        pytest.importorskip(package)
    x = make_inputs(vocabulary(40, 16, 300, "float32"), torch.device("cpu"))
    x["advantage"], x["bonus"] = torch.randn(40), torch.randn(40)
    found = heads.errors(heads.METHODS[name](), x, heads.reference(x))
    wanted = {"log_prob_error"} if name == heads.ALONE else set(found)
    assert max(found[key] for key in wanted) < 1e-4, found


def test_errors_see_a_wrong_head() -> None:
    x = make_inputs(vocabulary(40, 16, 300, "float32"), torch.device("cpu"))
    x["advantage"], x["bonus"] = torch.randn(40), torch.randn(40)
    exact = heads.reference(x)

    def wrong(hidden, weight, target):
        log_prob, entropy = heads.eager_head(hidden, weight, target)
        return 1.01 * log_prob, 1.01 * entropy

    assert min(heads.errors(wrong, x, exact).values()) > 1e-3


@pytest.mark.parametrize("module", [heads, distillation, budgets])
def test_page_shows_the_results(module: ModuleType) -> None:
    benchmark: ShapesBenchmark = module.BENCHMARK
    page = benchmark.page.read_text()
    written = benchmark.with_table(page, benchmark.committed())
    assert written == page, f"run: python -m benchmarks.{benchmark.name} --page"


def test_readme_says_what_was_measured() -> None:
    rows = json.loads((heads.RESULTS / "heads-nvidia-h200.json").read_text())["results"]
    ours, theirs = (next(row for row in rows if row["method"] == name) for name in (heads.SMALL, "TRL"))
    times = round(theirs["log_prob_error"] / ours["log_prob_error"], -2)
    readme = " ".join((heads.RESULTS.parents[1] / "README.md").read_text().split())
    assert f"an error {times:.0f} times smaller than that of bf16 logits" in readme
    time, memory = ours["ms"] / theirs["ms"], 100 * ours["bytes"] / theirs["bytes"]
    assert f"in {time:.2f} times the time and {memory:.0f} % of the" in readme
