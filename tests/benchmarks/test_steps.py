"""Whole training steps: every loss of a tiny model agrees, files are merged, and the pages show the data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.measure import Failure, Step

from benchmarks import steps, steps_models

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def without_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling takes seconds, and is torch's own work."""
    monkeypatch.setattr(torch, "compile", lambda function, **settings: function)


@pytest.mark.parametrize("name", steps_models.LANGUAGE)
def test_every_head_gives_the_same_loss_and_gradients(name: str) -> None:
    pytest.importorskip("transformers")
    methods = ("tilewise", steps_models.OWN, steps_models.COMPILED)
    built = steps_models.language_steps(name, 2, 8, CPU, methods, small=True)
    found = []
    for method in methods:
        step = built[method]
        assert isinstance(step, Step)
        loss = step()
        found.append((loss, torch.cat([leaf.grad.flatten() for leaf in step.leaves])))
        step.clear()
    want, grad = found[1]
    assert want > 5.0
    assert grad.norm() > 0.1
    for loss, other in found:
        assert abs(loss - want) < 1e-4
        assert (other - grad).norm() < 1e-4 * grad.norm()


def test_retrieval_losses_agree() -> None:
    pytest.importorskip("transformers")
    built = steps_models.retrieval_steps(8, CPU, steps_models.RETRIEVAL_METHODS[:2], small=True)
    ours, dense = (step() for step in built.values() if isinstance(step, Step))
    assert ours > 0.1
    assert abs(ours - dense) < 1e-4


def test_a_published_shape_has_its_number_of_weights() -> None:
    """Only the sizes are checked: 1.24, 0.60 and 1.00 billion, as published."""
    pytest.importorskip("transformers")
    with torch.device("meta"):
        for name, billions in (("Llama-3.2-1B", 1.24), ("Qwen3-0.6B", 0.60), ("Gemma-3-1B", 1.00)):
            model = steps_models.language_model(name, torch.device("meta"), small=False)
            assert abs(sum(weight.numel() for weight in model.parameters()) / 1e9 - billions) < 0.005


def test_a_step_that_fails_takes_no_more_turns() -> None:
    calls: list[str] = []

    def works() -> torch.Tensor:
        calls.append("works")
        return torch.zeros(())

    def fails() -> torch.Tensor:
        calls.append("fails")
        if calls.count("fails") == 3:
            raise MemoryError("no memory")
        return torch.zeros(())

    taken = steps.take_turns({"works": Step(works), "fails": Step(fails)}, CPU, turns=4, warm_ups=2)
    assert isinstance(taken["works"], list)
    assert len(taken["works"]) == 4
    assert taken["fails"] == Failure("oom", "no memory")
    assert (calls.count("works"), calls.count("fails")) == (6, 3)


def test_the_command_writes_and_merges(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    path = tmp_path / "steps.json"
    arguments = ["--small", "--commit", "abc", "--only", "llama-3.2-1b-16k,bert", "--out", str(path)]
    steps.main([*arguments, "--methods", "tilewise;transformers"])
    first = json.loads(path.read_text())["results"]
    assert [(r["case"], r["method"], r["status"]) for r in first] == [
        ("llama-3.2-1b-16k", "tilewise", "ok"),
        ("llama-3.2-1b-16k", "transformers", "ok"),
        ("bert-base-8k", "tilewise", "ok"),
    ]
    assert abs(first[0]["loss_value"] - first[1]["loss_value"]) < 1e-4
    steps.main(
        ["--small", "--commit", "abc", "--only", "llama-3.2-1b-16k", "--methods", "no head", "--add-to", str(path)]
    )
    both = json.loads(path.read_text())["results"]
    assert [r["method"] for r in both] == ["tilewise", "transformers", "no head", "tilewise"]
    assert "loss_value" not in both[2]


def row(case: str, method: str, ms: float, gib: float, status: str = "ok") -> dict[str, Any]:
    """A result as the command writes it."""
    found = {"case": case, "method": method, "status": status}
    if status != "ok":
        return found
    return found | {"median_ms": ms, "items_per_s": 1e6 / ms, "peak_bytes": int(gib * steps.GIB), "loss_value": 12.0}


def test_pages_show_the_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        row("qwen3-0.6b-64k", "tilewise", 1417.2, 11.25),
        row("qwen3-0.6b-64k", "transformers", 1527.5, 115.3),
        row("gemma-3-1b-64k", "tilewise", 1700.0, 9.0),
        row("gemma-3-1b-64k", "transformers", 0.0, 0.0, "oom"),
        row("gemma-3-1b-64k", "Liger", 0.0, 0.0, "absent"),
    ]
    path = tmp_path / "results.json"
    path.write_text(json.dumps({"device": "a card", "results": rows}))
    monkeypatch.setattr(steps, "COMMITTED", path)
    files = steps.written()
    readme, page = files[steps.README], files[steps.PAGE]
    assert "**115 GiB become 11.2 GiB**: a training step of Qwen3-0.6B, 65,536 tokens, takes 0.93 times" in readme
    assert "| step | tilewise | transformers |" in readme
    assert "| Qwen3-0.6B, 65,536 tokens | 1,417.2 ms, 11.25 GiB | 1,527.5 ms, 115.30 GiB |" in readme
    assert "| Gemma-3-1B, 65,536 tokens | 1,700.0 ms, 9.00 GiB | out of memory |" in readme
    assert "| Gemma-3-1B, 65,536 tokens | Liger | not installed |" in page
    assert all("Qwen3-0.6B" in files[steps.charts.DRAWINGS / f"chart-steps-{kind}.svg"] for kind in ("time", "memory"))


def test_committed_pages_show_the_committed_data() -> None:
    for path, text in steps.written().items():
        assert path.read_text() == text, "run: python -m benchmarks.steps --page"
