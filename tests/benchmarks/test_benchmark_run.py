"""A run writes a file that describes itself, and a report makes a page of it."""

import json
import subprocess

import pytest
import torch

from benchmarks import cases, measure, report, run

FIELDS = {
    "format", "suite", "command", "commit", "dirty", "date", "device", "device_bytes", "threads", "python",
    "torch", "triton", "peers", "repeats", "budget_s", "results",
}  # fmt: skip


@pytest.fixture
def tiny_suite(monkeypatch):
    """Three sizes of a loss. One method runs out of memory at the largest, one is not installed."""
    suite = [cases.square("clip", n, 16, "float32", "tilewise", "dense", "memeff") for n in (32, 64, 128)]
    monkeypatch.setitem(cases.SUITES, "cpu", lambda: suite)
    monkeypatch.setattr(measure, "sustained_rate", lambda device: 1e12)
    monkeypatch.setattr(measure, "cpu_peak_bytes", lambda target, arguments: 1000 * arguments["case"]["rows"])
    dense_loss = cases.dense_loss

    def limited(case, inputs):
        if case.rows == 128:
            raise torch.OutOfMemoryError("no 4 TB here")
        return dense_loss(case, inputs)

    monkeypatch.setattr(cases, "dense_loss", limited)


def test_a_run_writes_what_a_reader_needs(tiny_suite, tmp_path):
    path = run.main(["cpu", "--repeats", "2", "--budget-s", "0.01", "--out", str(tmp_path / "x.json")])
    written = json.loads(path.read_text())
    assert set(written) == FIELDS
    assert written["command"].startswith("python -m benchmarks.run cpu --repeats 2")
    assert written["torch"] == torch.__version__
    by_name = {(r["rows"], r["method"]): r for r in written["results"]}
    assert len(by_name) == 9
    ours = by_name[64, "tilewise"]
    assert ours["status"] == "ok"
    assert ours["case"] == "clip-64-16-float32"
    assert ours["peak_bytes"] == 64_000
    assert ours["repeats"] == 2  # the least is 3, but not more than --repeats
    assert ours["time_ratio"] == ours["median_ms"] / by_name[64, "dense"]["median_ms"]
    assert ours["share_of_rate"] == pytest.approx(4 * 2 * 64 * 64 * 16 / (1e-3 * ours["median_ms"]) / 1e12)
    assert ours["loss_value"] == pytest.approx(by_name[64, "dense"]["loss_value"], rel=1e-5)
    assert by_name[128, "dense"]["status"] == "oom"
    assert "time_ratio" not in by_name[128, "tilewise"]
    assert by_name[32, "memeff"]["status"] in ("absent", "error")  # without a GPU it cannot be "ok"


GIT = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]


def new_repository(folder):
    """Make a repository with one commit. Returns the commit."""
    for command in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "first"]):
        subprocess.run([*GIT, *command], cwd=folder, check=True)
    return subprocess.run([*GIT, "rev-parse", "HEAD"], cwd=folder, check=True, capture_output=True, text=True).stdout[
        :-1
    ]


@pytest.mark.parametrize("variable", [None, "GIT_DIR"])
def test_the_commit_is_that_of_the_project_and_of_no_repository_around_it(tmp_path, monkeypatch, variable):
    """A copy inside another repository has no commit of its own. A given commit wins. GIT_DIR has no effect."""
    around, project = tmp_path, tmp_path / "copies" / "project"
    project.mkdir(parents=True)
    other = new_repository(around)
    if variable:
        monkeypatch.setenv(variable, str(around / ".git"))
    monkeypatch.setattr(measure, "ROOT", project)
    assert run.commit_of(None) == "unknown"
    described = run.describe("cpu", torch.device("cpu"), "command", 1, 1.0)
    assert (described["commit"], described["dirty"]) == ("unknown", None)
    assert run.commit_of("0123abc") == "0123abc"
    assert run.describe("cpu", torch.device("cpu"), "command", 1, 1.0, commit="0123abc")["commit"] == "0123abc"
    monkeypatch.delenv("GIT_DIR", raising=False)
    own = new_repository(project)
    if variable:
        monkeypatch.setenv(variable, str(around / ".git"))
    assert run.commit_of(None) == own
    assert run.commit_of("0123abc") == "0123abc"
    monkeypatch.setattr(measure, "ROOT", around)
    assert run.commit_of(None) == other


def test_a_given_commit_is_recorded(tiny_suite, tmp_path):
    out = ["--repeats", "1", "--budget-s", "0.01", "--out", str(tmp_path / "x.json")]
    path = run.main(["cpu", "--only", "clip-32-*", "--commit", "0123abc", *out])
    assert json.loads(path.read_text())["commit"] == "0123abc"


def test_cases_are_added_to_a_file(tiny_suite, tmp_path):
    """Measures what the file lacks, or --only. Other cases are kept, with the commit and date of their run."""
    few = ["--repeats", "1", "--budget-s", "0.01", "--out", str(tmp_path / "x.json")]
    path = run.main(["cpu", "--only", "clip-32-*,clip-128-*", *few])
    first = json.loads(path.read_text()) | {"commit": "0123456789abc", "date": "2001-02-03"}
    assert [row["rows"] for row in first["results"]] == [32] * 3 + [128] * 3
    path.write_text(json.dumps(first))
    run.main(["cpu", "--add-to", str(path), *few])
    second = json.loads(path.read_text())
    assert [row["rows"] for row in second["results"]] == [32] * 3 + [64] * 3 + [128] * 3
    old = "0123456789abc"
    assert [row.get("origin", {}).get("commit") for row in second["results"][::3]] == [old, None, old]
    page = report.markdown(second)
    assert "Measured earlier, 2001-02-03, commit 0123456789, " in page
    assert ": clip-32-16-float32, clip-128-16-float32." in page
    run.main(["cpu", "--add-to", str(path), "--only", "clip-32-*", *few])
    third = json.loads(path.read_text())["results"]
    assert ["origin" in row for row in third[::3]] == [False, True, True]
    path.write_text(json.dumps(first | {"device": "abacus"}))
    with pytest.raises(SystemExit, match="was measured on abacus"):
        run.main(["cpu", "--add-to", str(path), *few])


def test_a_report_has_a_table_and_a_plot(tiny_suite, tmp_path):
    path = run.main(["cpu", "--repeats", "1", "--budget-s", "0.01", "--out", str(tmp_path / "x.json")])
    pytest.importorskip("matplotlib")
    page, image = report.main([str(path)])
    text = page.read_text()
    assert "| clip-128-16-float32 | dense | out of memory |" in text
    assert "| clip-64-16-float32 | dense |" in text
    assert f"![{image.name}]({image.name})" in text
    assert image.read_bytes().startswith(b"\x89PNG")
    assert image.stat().st_size > 10_000


def test_the_table_shows_what_was_measured():
    result = {
        "case": "clip-64-16-float32", "method": "tilewise", "status": "ok", "median_ms": 1234.5, "low_ms": 1.25,
        "high_ms": 2.5, "time_ratio": 0.5, "peak_bytes": 3 * 2**20, "memory_ratio": 0.125,
        "share_of_rate": 0.801, "loss_value": 1.5,
    }  # fmt: skip
    row = report.table([result])[-1]
    assert row == "| clip-64-16-float32 | tilewise | 1,234 | 1.25 - 2.5 | 0.50 | 3 | 0.12 | 80 % | 1.5 |"
    failed = {"case": "c", "method": "m", "status": "error", "reason": "ValueError: a | b"}
    assert "failed: ValueError: a / b" in report.table([failed])[-1]


def test_cases_are_chosen_by_name():
    suite = cases.cpu_suite()
    assert {case.loss for case in run.choose(suite, "siglip", False)} == {"siglip"}
    assert [case.rows for case in run.choose(suite, "clip-[12]*", False)] == [1024, 2048, 16384]
    quick = run.choose(suite, "*", True)
    assert all(max(case.rows, case.cols) <= 2048 for case in quick)
    assert len({case.name for case in quick}) == len(quick)


def test_refusals(tmp_path):
    with pytest.raises(SystemExit, match="matches 'nothing'"):
        run.main(["cpu", "--only", "nothing"])
    if not torch.cuda.is_available():
        with pytest.raises(SystemExit, match="needs a CUDA device"):
            run.main(["gpu"])


def test_the_memory_of_our_loss_is_below_that_of_the_dense_one():
    """End to end, with a new process for each method."""
    case = cases.square("clip", 3072, 64, "float32", "tilewise", "dense")
    arguments = {key: getattr(case, key) for key in case.__dataclass_fields__}
    ours, dense = (
        measure.cpu_peak_bytes("benchmarks.cases:memory_target", {"case": arguments, "method": method})
        for method in case.methods
    )
    assert dense > 3 * 3072 * 3072 * 4
    assert ours < dense / 3
