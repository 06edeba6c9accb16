"""The benchmarks of the trainer run, here on tiny sizes, and their reports say what was measured."""

import json

import pytest
from tests.train.small_icons import write_small_icons

from benchmarks import batch_size, train_step


@pytest.mark.slow
def test_a_step_is_measured_for_every_loss(tmp_path, capsys):
    sizes = ["--model", "clip-tiny", "--batches", "32", "--chunk", "8", "--max-seconds", "60"]
    path = train_step.main([*sizes, "--out", str(tmp_path / "t.json")])
    report = json.loads(path.read_text())
    assert len(report["results"]) == 4
    assert all(row["step_measured"] and row["step_s"] > row["loss_s"] > 0 for row in report["results"])
    offloaded = [row for row in report["results"] if row["method"] == "tilewise+offload"]
    assert {row["data_bytes"] for row in offloaded} == {0}
    assert "| 32 | dense |" in path.with_suffix(".md").read_text()


def test_without_time_steps_are_estimated_and_say_so(tmp_path, capsys):
    sizes = ["--model", "clip-tiny", "--batches", "32", "--chunk", "16", "--max-seconds", "0", "--methods", "tilewise"]
    report = json.loads(train_step.main([*sizes, "--out", str(tmp_path / "t.json")]).read_text())
    assert report["results"][0]["step_measured"] is False
    assert "from parts" in (tmp_path / "t.md").read_text()


def test_running_out_of_memory_is_a_result():
    bench = train_step.Bench(None, None, _NoOptimizer(), train_step.torch.device("cpu"), 0.0)  # type: ignore[arg-type]

    def fails():
        raise RuntimeError("CUDA out of memory. Tried to allocate")

    assert train_step.attempt(bench, fails) == {"oom": True}
    with pytest.raises(RuntimeError, match="other"):
        train_step.attempt(bench, _other)


class _NoOptimizer:
    def zero_grad(self, set_to_none):
        pass


def _other():
    raise RuntimeError("other")


@pytest.mark.slow
def test_batch_sizes_and_curves(tmp_path, capsys):
    icons = str(write_small_icons(tmp_path / "small.zip"))
    small = ["--width", "32", "--depth", "1", "--dim", "16"]
    table = batch_size.main(
        [
            "table",
            icons,
            "--batches",
            "64,128,9999",
            "--epochs",
            "2",
            "--seeds",
            "1",
            *small,
            "--out",
            str(tmp_path / "b.json"),
        ]
    )
    rows = json.loads(table[0].read_text())["results"]
    assert [(row["batch"], row["steps"]) for row in rows] == [(64, 12), (128, 6)]
    assert rows[1]["lr"] == pytest.approx(rows[0]["lr"] * 2**0.5)
    curves = batch_size.main(
        ["curves", icons, "--curve-batch", "64", "--curve-steps", "6", *small, "--out", str(tmp_path / "c.json")]
    )
    assert json.loads(curves[0].read_text())["largest_relative_difference"] < 1e-4
    for picture in batch_size.main(["plot", str(table[0]), str(curves[0])]):
        assert picture.stat().st_size > 5000
