"""Tables and plots of results.

    python -m benchmarks.report                     every file in benchmarks/results
    python -m benchmarks.report results/cpu-x.json  one file
    python -m benchmarks.report --readme            every file, and the table in README.md (of the gpu suite, if there)

Writes x.md beside each x.json. If matplotlib is installed and a loss was measured at several sizes, also writes
x-clip.png: time and memory against the batch size, with a cross where a method ran out of memory.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.run import RESULTS

Result = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> list[Path]:
    """Write the reports and return their paths."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    readme = "--readme" in arguments
    named = [Path(name) for name in arguments if name != "--readme"]
    files = named or [file for file in sorted(RESULTS.glob("*.json")) if file.name.startswith(("cpu-", "gpu-"))]
    if not files:
        raise SystemExit(f"there are no results in {RESULTS}. First run: python -m benchmarks.run cpu")
    written: list[Path] = []
    for file in files:
        report = json.loads(file.read_text())
        images = plots(report, file) if importlib.util.find_spec("matplotlib") else []
        page = file.with_suffix(".md")
        page.write_text(markdown(report, [image.name for image in images]))
        written += [page, *images]
    if readme:
        best = sorted(files, key=lambda file: not file.name.startswith("gpu-"))[0]
        written.append(write_readme(json.loads(best.read_text()), best))
    for path in written:
        print(f"wrote {path}")
    return written


def write_readme(report: dict[str, Any], source: Path, readme: Path = RESULTS.parent.parent / "README.md") -> Path:
    """Write the CLIP rows of a suite between the markers of the README."""
    clip = [r for r in report["results"] if r["loss"] == "clip"]
    rows = [r for r in clip if r["width"] == min(other["width"] for other in clip)]
    methods = [
        m
        for m in dict.fromkeys(r["method"] for r in rows)
        if any(r["method"] == m and r["status"] == "ok" for r in rows)
    ]
    found = {(r["rows"], r["method"]): r for r in rows}
    width, dtype = rows[0]["width"], rows[0]["dtype"]
    lines = [
        f"`clip_loss`, forward and backward, d = {width}, {dtype}, {report['device']}: "
        "milliseconds / MiB above the inputs.",
        "",
        "| batch | " + " | ".join(methods) + " |",
        "|---:|" + "---:|" * len(methods),
    ]
    for size in sorted({r["rows"] for r in rows}):
        lines.append(f"| {size:,} | " + " | ".join(_cell(found.get((size, method))) for method in methods) + " |")
    link = source.resolve().relative_to(readme.parent).with_suffix(".md").as_posix()
    lines += [
        "",
        f"`{report['command'].split(' --peers')[0]}`, torch {report['torch']}. All figures: [{link}]({link}).",
    ]
    begin, end = "<!-- results:begin -->", "<!-- results:end -->"
    text = readme.read_text()
    readme.write_text(text[: text.index(begin) + len(begin)] + "\n" + "\n".join(lines) + "\n" + text[text.index(end) :])
    return readme


def _cell(result: Result | None) -> str:
    if result is None or result["status"] == "absent":
        return ""
    if result["status"] != "ok":
        return "out of memory" if result["status"] == "oom" else "failed"
    return f"{digits(result['median_ms'])} / {result['peak_bytes'] / 2**20:,.0f}"


def markdown(report: dict[str, Any], images: Sequence[str] = ()) -> str:
    """The whole page."""
    commit = report["commit"][:10] + (" with local changes" if report["dirty"] else "")
    lines = [
        f"# {report['suite']} suite on {report['device']}",
        "",
        f"`{report['command']}`",
        "",
        f"{report['date']}, commit {commit}, torch {report['torch']}, triton {report['triton']}, "
        f"Python {report['python']}, {report['threads']} CPU threads.",
        "",
        "Forward and backward.",
        "",
        "- Time: median, with the 10th and 90th percentile.",
        "- Memory: peak above the inputs, gradients included.",
        "- x: divided by the baseline of the case, which has 1.00.",
        "- Share: of the rate of a plain product on this machine in the same minute. It counts 4 products of rows x "
        "columns x width (1 for ranks), whatever the method does.",
        "",
        *table(report["results"]),
        "",
    ]
    for origin in earlier(report["results"]):
        lines += [origin, ""]
    absent = sorted({f"{r['method']} ({r['reason']})" for r in report["results"] if r["status"] == "absent"})
    if absent:
        lines += ["Absent: " + "; ".join(absent) + ".", ""]
    lines += [f"![{name}]({name})\n" for name in images]
    return "\n".join(lines)


def earlier(results: list[Result]) -> list[str]:
    """A sentence for each earlier run, with the cases that come from it."""
    runs: dict[str, list[str]] = {}
    for row in results:
        if "origin" in row:
            origin = row["origin"]
            at = f"{origin['date']}, commit {origin['commit'][:10]}, torch {origin['torch']}, triton {origin['triton']}"
            kept = runs.setdefault(f"{at}: `{origin['command']}`", [])
            if row["case"] not in kept:
                kept.append(row["case"])
    return [f"Measured earlier, {run}: {', '.join(kept)}." for run, kept in runs.items()]


def table(results: list[Result]) -> list[str]:
    """A row for each method of each case, except absent ones."""
    head = "| case | method | time ms | spread | x time | memory MiB | x memory | share | loss |"
    lines = [head, "|---|---|---:|---:|---:|---:|---:|---:|---:|"]
    for result in results:
        if result["status"] == "absent":
            continue
        name = f"| {result['case']} | {result['method']} |"
        if result["status"] == "oom":
            lines.append(f"{name} out of memory | | | | | | |")
            continue
        if result["status"] != "ok":
            lines.append(f"{name} failed: {result['reason'].replace('|', '/')[:100]} | | | | | | |")
            continue
        peak = result.get("peak_bytes")
        memory = "" if peak is None else f"{peak / 2**20:,.0f}"
        value = f"{result['loss_value']:.6g}" if "loss_value" in result else ""
        lines.append(
            f"{name} {digits(result['median_ms'])} | "
            f"{digits(result['low_ms'])} - {digits(result['high_ms'])} | {ratio(result, 'time_ratio')} | "
            f"{memory} | {ratio(result, 'memory_ratio')} | {100 * result['share_of_rate']:.0f} % | {value} |"
        )
    return lines


def digits(value: float) -> str:
    """Format with three significant digits.

    >>> digits(1234.5), digits(12.345), digits(0.012345)
    ('1,234', '12.3', '0.0123')
    """
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def short(size: int) -> str:
    """Format a batch size.

    >>> short(32768), short(1048576), short(1000)
    ('32k', '1M', '1000')
    """
    for unit, word in ((2**20, "M"), (2**10, "k")):
        if size % unit == 0:
            return f"{size // unit}{word}"
    return str(size)


def ratio(result: Result, name: str) -> str:
    """Format a ratio; empty if there is none."""
    return f"{result[name]:.2f}" if name in result else ""


def series(results: list[Result]) -> dict[tuple[str, int, str], list[Result]]:
    """Results of each (loss, width, dtype) with at least three batch sizes."""
    groups: dict[tuple[str, int, str], list[Result]] = {}
    for result in results:
        if result["rows"] == result["cols"]:
            groups.setdefault((result["loss"], result["width"], result["dtype"]), []).append(result)
    return {key: rows for key, rows in groups.items() if len({r["rows"] for r in rows}) >= 3}


def plots(report: dict[str, Any], file: Path) -> list[Path]:
    """Draw one image for each loss with several sizes: time on the left, memory on the right. Returns their paths."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    written = []
    for (loss, width, dtype), results in series(report["results"]).items():
        figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), constrained_layout=True)
        draw(left, results, "median_ms", 1.0, "time of a step (ms)")
        draw(right, results, "peak_bytes", 2.0**20, "peak memory above the inputs (MiB)")
        if any(result["status"] == "oom" for result in results):
            right.plot([], [], "x", color="0.3", markersize=9, markeredgewidth=2, label="out of memory")
        right.legend(frameon=False)
        figure.suptitle(f"{loss} loss, forward and backward, d = {width}, {dtype}, {report['device']}")
        path = file.with_name(f"{file.stem}-{loss}-{width}.png")
        figure.savefig(path, dpi=130)
        pyplot.close(figure)
        written.append(path)
    return written


def draw(axes: Any, results: list[Result], field: str, unit: float, label: str) -> None:
    """Draw a line for each method, and a cross above all lines where it ran out of memory."""
    measured = [r[field] / unit for r in results if r["status"] == "ok" and r.get(field)]
    ceiling = 2 * max(measured, default=1.0)
    for place, method in enumerate(dict.fromkeys(r["method"] for r in results)):
        color = f"C{place}"
        mine = sorted((r for r in results if r["method"] == method), key=lambda r: r["rows"])
        points = [(r["rows"], r[field] / unit) for r in mine if r["status"] == "ok" and r.get(field)]
        axes.plot(*zip(*points, strict=True), marker="o", color=color, label=method) if points else None
        lost = [r["rows"] for r in mine if r["status"] == "oom"]
        if lost:
            height = ceiling * 1.3**place
            axes.plot(lost, [height] * len(lost), "x", color=color, markersize=9, markeredgewidth=2)
    sizes = sorted({r["rows"] for r in results})
    axes.set(xscale="log", yscale="log", xlabel="batch size", ylabel=label, xticks=sizes)
    axes.set_xticklabels([short(size) for size in sizes])
    axes.minorticks_off()
    axes.grid(alpha=0.3)


if __name__ == "__main__":
    main()
