"""Charts and figures of the documentation are those of the committed results."""

from __future__ import annotations

import copy

import pytest

from benchmarks import charts


@pytest.mark.parametrize("name", charts.charts())
def test_charts_show_the_data(name: str) -> None:
    assert (charts.DOCS / name).read_text() == charts.charts()[name], "run python -m benchmarks.charts"


@pytest.mark.parametrize("name", charts.pages())
def test_pages_show_the_data(name: str) -> None:
    assert (charts.DOCS / name).read_text() == charts.pages()[name], "run python -m benchmarks.charts"


def test_other_data_gives_other_charts_and_sentences(monkeypatch: pytest.MonkeyPatch) -> None:
    old_charts, old_pages, load = charts.charts(), charts.pages(), charts.load

    def changed(name: str) -> dict[str, object]:
        report = copy.deepcopy(load(name))
        for row in report["results"]:
            if row["status"] == "ok" and row["method"] in ("tilewise", "tilewise, 256 MiB"):
                for field in {"median_ms", "peak_bytes", "ms", "bytes"} & set(row):
                    row[field] *= 1.5
        return report

    monkeypatch.setattr(charts, "load", changed)
    assert all(old_charts[name] != text for name, text in charts.charts().items())
    assert all(old_pages[name] != text for name, text in charts.pages().items())


def test_a_method_that_ran_out_of_memory_has_a_cross() -> None:
    row = {"loss": "clip", "width": 8, "status": "ok", "median_ms": 2.0}
    rows = [{**row, "method": m, "rows": n} for m in ("tilewise", "dense") for n in (16, 32)]
    assert "out of memory" not in charts.lines(rows, "median_ms", "a")
    rows[-1] = {**rows[-1], "status": "oom"}
    text = charts.lines([{**r, "median_ms": 20.0 * (1 + i)} for i, r in enumerate(rows)], "median_ms", "a")
    assert text.count("l10 10 m0 -10 l-10 10") == 1


def test_times_from_64_rows_on_have_charts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not charts.size_charts({"results": []})
    rows = [
        {"loss": loss, "rows": n, "method": method, "status": "ok", "median_ms": n / 100}
        for loss in charts.IN_SIZES
        for n in (64, 65536)
        for method in ("tilewise", "dense")
    ]
    rows[-1] = {**rows[-1], "status": "oom"}
    found = charts.size_charts({"width": 512, "device": "card", "results": rows})
    assert len(found) == 3
    assert all("tilewise" in text and "PyTorch, all scores" in text for text in found.values())
    assert [text.count("out of memory") for text in found.values()] == [0, 0, 1]
    monkeypatch.setattr(charts, "size_charts", lambda: found)
    assert all(chart in "\n".join(charts.tables()) for chart in found)
