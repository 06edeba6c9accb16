"""The tables of the cross-entropy paper: cases, methods, and what a run writes."""

import json

import pytest
import torch
import torch.nn.functional as F
from tests.compare import relative_error

from benchmarks import measure, peers, run
from reproductions import lm_cases, lm_pages, lm_tables

TINY = lm_cases.LmCase(table="1", model="tiny", vocabulary=301, hidden=24, tokens=64)


@pytest.fixture(autouse=True)
def known_rate(monkeypatch):
    monkeypatch.setattr(measure, "sustained_rate", lambda device: 1e12)


def tiny(**changes):
    case = lm_cases.replace(TINY, **changes)
    return case, lm_cases.make_inputs(case, torch.device("cpu"), torch.float64)


@pytest.mark.parametrize("ignored", [0.0, 0.5])
@pytest.mark.parametrize("decay", [0.0, 1.8])
def test_the_reference_is_the_gradient_of_the_mean(decay, ignored):
    case, inputs = tiny(decay=decay, ignored=ignored)
    assert (inputs["target"] != lm_cases.IGNORED).sum() == case.counted == (32 if ignored else 64)
    loss = F.cross_entropy(inputs["a"] @ inputs["b"].T, inputs["target"])
    want = torch.autograd.grad(loss, (inputs["a"], inputs["b"]))
    for got, exact in zip(lm_cases.exact_gradients(inputs, rows=5), want, strict=True):
        assert relative_error(got, exact) < 1e-5
        assert lm_tables.relative_error(got, exact) < 1e-5
        assert lm_tables.relative_error(torch.zeros_like(got), exact) == pytest.approx(1.0)


def test_peaked_scores_are_as_described():
    case, inputs = tiny(vocabulary=20_000, hidden=256, tokens=256, decay=1.8)
    p = (inputs["a"] @ inputs["b"].T).softmax(1)
    flat = lm_cases.make_inputs(lm_cases.replace(case, decay=0.0), torch.device("cpu"), torch.float64)
    spread = (flat["a"] @ flat["b"].T).softmax(1)
    assert (p > 2**-12).double().mean() < 0.01 < 0.02 < (spread > 2**-13).double().mean()
    assert p.max(1).values.mean() > 0.3 > 0.01 > spread.max(1).values.mean()


@pytest.mark.parametrize("method", ["tilewise", "torch.compile, filtered", "eager", "eager, filtered"])
def test_methods_compute_the_same_loss_and_gradients(method, monkeypatch):
    monkeypatch.setattr(lm_cases, "compiled_loss", lambda: lm_cases.dense_loss)  # saves the time to compile
    _, inputs = tiny(ignored=0.5)
    want = lm_cases.exact_gradients(inputs)
    step = lm_cases.build_step(method, inputs)
    step()
    assert step.value.item() == pytest.approx(F.cross_entropy(inputs["a"] @ inputs["b"].T, inputs["target"]).item())
    for leaf, exact in zip(step.leaves, want, strict=True):
        assert relative_error(leaf.grad, exact) < 1e-5


def test_an_option_that_is_not_there_is_absent():
    with pytest.raises(peers.PeerAbsent, match=r"no TileOptions\(moonshine=\.\.\.\)"):
        lm_cases.tilewise_forward({}, moonshine=True)


def test_the_list_has_all_tables_and_the_important_ones_first():
    cases = lm_cases.all_cases()
    assert [case.name for case in cases[:2]] == ["table 1, Gemma 2 2B, a=1.8", "table 1, Gemma 2 2B, a=1.5"]
    assert len({case.name for case in cases}) == len(cases)
    assert {case.model for case in cases if case.table == "A2"} == set(lm_cases.MODELS) - {"Gemma 2 2B"}
    assert {case.ignored for case in cases if case.table == "A1"} == {0.5, 0.9}
    assert all(method in lm_cases.METHODS for case in cases for method in case.methods)


def run_small(tmp_path, *more):
    path = lm_tables.main(["--small", "--out", str(tmp_path / "lm.json"), "--only", "table 1, *a=1.8", *more])
    return json.loads(path.read_text()), path.with_suffix(".md").read_text()


def test_a_run_writes_rows_and_a_page(tmp_path, monkeypatch):
    def full(inputs):
        raise torch.OutOfMemoryError("no 24 GB here")

    monkeypatch.setitem(lm_cases.METHODS, "eager", full)
    report, page = run_small(tmp_path, "--methods", "[!t]*", "--repeats", "2")
    rows = {row["method"]: row for row in report["results"]}
    assert set(rows) == {"lower bound", "CCE", "CCE exact", "Liger", "eager"}
    assert rows["eager"]["status"] == "oom"
    assert "| eager | out of memory |" in page
    report, page = run_small(tmp_path, "--methods", "tilewise", "--repeats", "2")
    lower, ours = report["results"]
    assert ours["status"] == "ok"
    assert ours["repeats"] == 2
    assert ours["both_ms"] == pytest.approx((ours["low_ms"] + ours["high_ms"]) / 2)
    assert max(ours["error_dE"], ours["error_dC"]) < 1e-5
    assert lower["both_bytes"] == 4 * 36 * (128 + 1000)
    assert lower["both_ms"] == pytest.approx(1e3 * 3 * 2 * 128 * 1000 * 36 / 1e12)
    assert ours["three_products_tflops"] == pytest.approx(lower["both_ms"] / ours["both_ms"])
    assert report["not_reached"] == []
    assert "## Table 1, Gemma 2 2B, a=1.8" in page
    assert "| tilewise |" in page


def test_ratios_are_to_torch_compile(tmp_path, monkeypatch, filter_on_cpu):
    monkeypatch.setattr(lm_cases, "compiled_loss", lambda: lm_cases.dense_loss)
    report, _ = run_small(tmp_path, "--methods", "t*")
    rows = {row["method"]: row for row in report["results"]}
    ours, base = rows["tilewise"], rows["torch.compile"]
    assert ours["time_ratio"] == pytest.approx(ours["both_ms"] / base["both_ms"])
    assert base["time_ratio"] == 1.0
    loose, tight = rows["tilewise, filter 3e-2"], rows["tilewise, filter 1e-3"]
    assert 0.0 < loose["kept_share"] <= tight["kept_share"] <= 1.0
    assert 0.0 < loose["largest_dropped"] <= 3e-2
    assert loose["error_dE"] < 0.05
    assert "kept_share" not in ours


def test_what_the_time_did_not_allow_is_named(tmp_path, monkeypatch):
    report, page = run_small(tmp_path, "--max-seconds", "0")
    assert report["results"] == []
    assert "Not reached in the time: table 1, Gemma 2 2B, a=1.8" in page
    asked = iter([False, False, True])
    monkeypatch.setattr(lm_tables.Session, "over", property(lambda self: next(asked, True)))
    report, page = run_small(tmp_path, "--methods", "tilewise*")
    by_method = {row["method"]: row["status"] for row in report["results"]}
    assert by_method["tilewise"] == "ok"  # it was warmed up, so it is measured
    assert by_method["tilewise, filter 1e-2"] == "not reached"
    assert "| tilewise, filter 1e-2 | not reached |" in page


def test_another_run_adds_what_is_missing(tmp_path, monkeypatch):
    case, other = (lm_cases.replace(TINY, model=model, methods=("tilewise", "eager")) for model in ("one", "two"))
    third = lm_cases.replace(case, table="A1", ignored=0.5)
    monkeypatch.setattr(lm_cases, "all_cases", lambda: [case, other, third])
    monkeypatch.setattr(lm_cases, "shrunk", lambda case: case)
    first = lm_tables.main(["--small", "--out", str(tmp_path / "a.json")])
    earlier = json.loads(first.read_text())
    assert len(earlier["results"]) == 9
    earlier["results"] = earlier["results"][:6]  # as if the time was up in the second block
    earlier["results"][-1] = {name: earlier["results"][-1][name] for name in ("case", "method")}
    earlier["results"][-1]["status"] = "not reached"
    earlier |= {"commit": "0123456789abcdef", "torch": "1.13", "dirty": False, "not_reached": [third.name]}
    first.write_text(json.dumps(earlier))

    add = ["--small", "--add-to", str(first), "--out", str(tmp_path / "b.json")]
    path = lm_tables.main(add)
    report, page = json.loads(path.read_text()), path.with_suffix(".md").read_text()
    assert [(r["case"], r["method"], r["status"]) for r in report["results"]] == [
        (c.name, method, "ok") for c in (case, other, third) for method in ("lower bound", "tilewise", "eager")
    ]
    assert report["not_reached"] == []
    assert [row.pop("origin")["commit"] for row in report["results"][:3]] == ["0123456789abcdef"] * 3
    assert report["results"][:3] == earlier["results"][:3]  # not measured again
    assert not any("origin" in row for row in report["results"][3:])
    assert set(report["spent_s"]) == {other.name, third.name}
    assert page.count("commit 0123456789, at most 3 turns, torch 1.13") == 1

    monkeypatch.setattr(lm_tables.Session, "over", property(lambda self: True))  # no time at all: nothing is lost
    same = json.loads(lm_tables.main([*add, "--only", f"{case.name}*"]).read_text())
    assert [(r["case"], r["method"], r["status"]) for r in same["results"]] == [
        (r["case"], r["method"], r["status"]) for r in earlier["results"]
    ]
    with pytest.raises(SystemExit, match="whole blocks"):
        lm_tables.main([*add, "--methods", "tilewise"])


@pytest.mark.parametrize("status, again", [("ok", False), ("oom", False), ("not reached", True), ("warm", True)])
def test_a_row_without_times_is_lacking(status, again):
    """A run that was interrupted before the turns leaves rows with status "warm"."""
    case = lm_tables.choose("*", "*", small=True)[0]
    rows = [{"case": case.name, "method": method, "status": "ok"} for method in case.methods]
    rows[-1]["status"] = status
    assert lm_tables.lacking(case, rows) == again


def test_a_row_of_an_earlier_file_keeps_its_first_origin(tmp_path):
    kept = {"case": "c", "method": "m", "status": "ok", "origin": {"commit": "old"}}
    report = {"device": "abacus", "commit": "new", "results": [kept, {"case": "d", "method": "m", "status": "ok"}]}
    (tmp_path / "x.json").write_text(json.dumps(report))
    rows = run.rows_of_file(tmp_path / "x.json", "abacus")
    assert [row["origin"]["commit"] for row in rows] == ["old", "new"]
    assert run.rows_of_file(None, "abacus") == []
    with pytest.raises(SystemExit, match="measured on abacus, this is slide rule"):
        run.rows_of_file(tmp_path / "x.json", "slide rule")


def test_the_documentation_sums_up_the_committed_result(tmp_path, monkeypatch):
    path = lm_tables.RESULTS / "lm-nvidia-h200.json"
    docs = lm_pages.DOCS.read_text()
    link = "../../reproductions/results/lm-nvidia-h200.md"
    assert lm_pages.summary(json.loads(path.read_text()), link) in docs
    assert path.with_suffix(".md").read_text() == lm_pages.markdown(json.loads(path.read_text()))
    copy = tmp_path / "page.md"
    copy.write_text("<!-- lm-tables:begin --><!-- lm-tables:end -->")
    monkeypatch.setattr(lm_pages.write_docs, "__defaults__", (copy,))
    lm_tables.main(["--docs"])
    assert "| table 1, Gemma 2 2B, a=1.8 | 5" in copy.read_text()
    copy.write_text("nothing to replace")
    with pytest.raises(SystemExit, match="needs exactly one <!-- lm-tables:begin -->"):
        lm_tables.main(["--docs"])


def test_a_summary_has_what_was_measured():
    block = {"case": "table 9", "rate_tflops": 600.0, "both_bytes": 3 * 2**20, "three_products_tflops": 540.0}
    rows = [
        {**block, "method": "tilewise", "status": "ok", "both_ms": 12.34},
        {**block, "method": "torch.compile, filtered", "status": "oom"},
        {**block, "method": "CCE", "status": "not reached"},
        {**block, "method": lm_cases.ONE_BLOCK, "status": "ok", "both_ms": 5.0},
    ]
    said = lm_pages.summary({"device": "X", "results": rows, "not_reached": ["table 10"]}, "there.md")
    assert "| table 9 | 12.3 / 3 |  |  | out of memory |  |  |  |" in said
    assert "table 9 takes 5 / 3: 0.90 of the rate of three plain products." in said
    assert "Not measured yet: table 10." in said
    assert "the filter costs" not in said


def test_a_summary_says_what_a_filter_costs_where_nothing_is_dropped():
    def row(case, method, ms, **more):
        return {"case": case, "method": method, "status": "ok", "both_ms": ms, **more}

    rows = [
        row("one", "tilewise", 10.0),
        row("one", "tilewise, gradients in backward", 10.4),
        row("one", "tilewise, filter 1e-2", 10.71, dense=True),
        row("one", "tilewise, filter 1e-3", 5.0, dense=False),
        row("two", "tilewise", 10.0),
        row("two", "tilewise, gradients in backward", 10.0),
        row("two", "tilewise, filter 1e-2", 9.0, dense=True),
        row("three", "tilewise", 10.0),  # measured once, so it is not compared
        row("three", "tilewise, filter 1e-2", 99.0, dense=True),
    ]
    said = " ".join(lm_pages.cost_without_gain(rows))
    assert "costs between -10.0 % and +5.0 % compared with the exact call (2 cases)" in said
    assert "differ by +0.0 % to +4.0 % (2 blocks)" in said


@pytest.mark.group
def test_shapes_are_compiled_in_processes_of_their_own():
    shapes = [lm_cases.replace(TINY, hidden=hidden, methods=("tilewise", "CCE")) for hidden in (8, 16, 16)]
    assert (
        lm_tables.compile_ahead(shapes, 2, [], seconds=120) == 2
    )  # equal shapes run once; an absent peer is no failure
    assert lm_tables.compile_ahead(shapes, 2, [], seconds=0.0) == 0


def test_full_sizes_are_refused_without_a_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="--small runs anywhere"):
        lm_tables.main(["--out", str(tmp_path / "x.json")])
