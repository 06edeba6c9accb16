"""The measurements of CuBlaze run on a CPU, and a page is made from what they wrote."""

import json

import pytest
import torch

from reproductions import cublaze


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            torch, "compile", lambda loss, **settings: loss
        )  # compiling takes seconds, and is tested elsewhere
        path = cublaze.main(["--small", "--out", str(tmp_path_factory.mktemp("cublaze")), "--commit", "abc"])
    return json.loads(path.read_text()), path.with_suffix(".md").read_text()


def test_every_method_is_measured_in_both_precisions(report):
    rows = report[0]["results"]
    on_cpu = set(cublaze.METHODS) - {"tilewise, own kernels"}
    assert {(r["precision"], r["batch"], r["method"]) for r in rows} == {
        (precision, batch, method) for precision in ("float32", "TF32") for batch in (16, 64) for method in on_cpu
    }
    assert all(r["ms"] > 0 for r in rows)


def test_errors_are_those_of_float32_and_not_zero_by_accident(report):
    rows = report[0]["results"]
    assert all(0 < r["gradient_error"] < cublaze.TARGETS["gradient_error"] for r in rows)
    assert 0 < max(r["loss_error"] for r in rows) < cublaze.TARGETS["loss_error"]


def test_an_error_is_seen():
    """A loss that is 1 % off misses both targets."""
    losses = {"wrong": lambda z: 1.01 * cublaze.dense(z)}
    found = cublaze.errors(losses, 16, 1, torch.device("cpu"))["wrong"]
    assert found["loss_error"] > 1e-2
    assert found["gradient_error"] > cublaze.TARGETS["gradient_error"]


def test_the_page_says_whether_the_targets_are_met(report):
    data, page = report
    assert "the targets are met" in page
    assert page.count("\n| float32 |") == page.count("\n| TF32 |") == len(data["results"]) / 2
    data["results"][2]["loss_error"] = 1e-4
    assert data["results"][2]["method"] == "tilewise"
    assert "the targets are not met" in cublaze.page(data)
