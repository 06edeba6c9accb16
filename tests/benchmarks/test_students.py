"""The benchmark of students: both methods have the same loss and gradients, and the committed curves agree."""

from __future__ import annotations

import json

import pytest
import torch
from benchmarks.charts import STUDENTS
from tests.compare import relative_error

from benchmarks import students


def loss_and_gradients(case: str, method: str) -> list[torch.Tensor]:
    task = students.TASKS[case]
    torch.manual_seed(0)
    student, teacher, batch = task.model("student"), task.model("teacher"), task.any_batch(6)
    with torch.no_grad():
        known = tuple(x.detach() for x in task.taught(teacher, batch))
    loss = task.methods[method](student, batch, known)
    loss.backward()
    return [loss.detach(), *(p.grad for p in student.parameters())]


@pytest.mark.parametrize("case", students.TASKS)
def test_both_methods_have_the_same_loss_and_gradients(case: str) -> None:
    ours, dense = (loss_and_gradients(case, method) for method in ("tilewise", "dense"))
    assert max(relative_error(a, b) for a, b in zip(ours, dense, strict=True)) < 1e-4


@pytest.mark.parametrize("case", students.TASKS)
def test_the_committed_curves_lie_on_each_other(case: str) -> None:
    results = json.loads((students.RESULTS / STUDENTS).read_text())["results"]
    ours, dense = ({r["method"]: r for r in results if r["case"] == case}[name] for name in ("tilewise", "dense"))
    assert ours["losses"] == pytest.approx(dense["losses"], rel=1e-3)
    assert ours["losses"][-1] < 0.9 * ours["losses"][0]  # the student learns
    assert ours["losses"] != dense["losses"]  # two runs, not one of them twice
    assert ours["peak_bytes"] < dense["peak_bytes"]


def test_students_learn_the_same_in_few_steps() -> None:
    found = students.curves("language", 2, 3, 1)
    assert found["tilewise"]["losses"] == pytest.approx(found["dense"]["losses"], rel=1e-4)
    assert found["tilewise"]["losses"][-1] < found["tilewise"]["losses"][0]
