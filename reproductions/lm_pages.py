"""Pages of `reproductions.lm_tables`: one with a table for each block, and a summary for the documentation."""

from __future__ import annotations

import json
from os.path import relpath
from pathlib import Path
from typing import Any

from benchmarks.report import digits

from reproductions.lm_pictures import DOCS, between_markers
from reproductions.records import todays_command

Row = dict[str, Any]
PARTS = ("loss", "gradient", "both")
SUMMARY = {  # columns of the summary; each shows the first of its methods that the block has
    "tilewise": ("tilewise",),
    "filter 1e-3": ("tilewise, filter 1e-3",),
    "filter 1e-2": ("tilewise, filter 1e-2",),
    "torch.compile": ("torch.compile", "torch.compile, filtered"),
    "CCE": ("CCE",),
    "Liger": ("Liger", "Liger, filtered"),
    "lower bound": ("lower bound",),
}

ONE_PASS = "tilewise, gradients in forward, workspace 2,400 MiB"
EXACT_TWICE = {"tilewise", "tilewise, gradients in backward"}  # the same call at these sizes


def markdown(report: dict[str, Any]) -> str:
    """The page: a table for each block."""
    commit = report["commit"][:10] + (" with local changes" if report["dirty"] else "")
    lines = [
        f"# The tables of Cut Cross-Entropy on {report['device']}",
        "",
        f"`{todays_command(report['command'])}`",
        "",
        f"{report['date']}, commit {commit}, torch {report['torch']}, triton {report['triton']}, Python "
        f"{report['python']}; {report.get('seconds', 0):.0f} s.",
        "",
        f"- Times are in ms: medians of at most {report['repeats']} turns.",
        "- Memory is in MiB: the peak above the inputs. That of the gradient is above what the loss left.",
        "- x: time divided by that of torch.compile.",
        "- dE, dC: error of the gradients against float32 gradients of the same inputs, relative to their norm.",
        "- kept: share of (row, tile) pairs that the filter keeps. (all): so many that backward computes all pairs.",
        "- R: the rate of a plain 8192^3 product, the mean of before and after a block.",
        "- 3u / R: the rate of the method, counted as three products, divided by R.",
        "- Lower bound: memory of the two gradients, and the time of three products at R.",
    ]
    for name in dict.fromkeys(row["case"] for row in report["results"]):
        rows = [row for row in report["results"] if row["case"] == name]
        first = rows[0]
        lines += [
            "",
            f"## {name[0].upper()}{name[1:]}",
            "",
            f"{first['tokens']:,} tokens, vocabulary {first['vocabulary']:,}, hidden {first['hidden']:,}; "
            f"R = {first['rate_tflops']:.4g} TFLOP/s.{of_origin(first, report)}",
            "",
            "| method | loss MiB | ms | gradient MiB | ms | both MiB | ms | x | dE % | dC % | kept % | 3u / R |",
            "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
            *(row_line(row) for row in rows if row["status"] != "absent"),
        ]
        absent = [f"{row['method']} ({row['reason']})" for row in rows if row["status"] == "absent"]
        if absent:
            lines += ["", "Absent: " + "; ".join(absent) + "."]
    if report.get("not_reached"):
        lines += ["", "Not reached in the time: " + "; ".join(report["not_reached"]) + "."]
    return "\n".join(lines) + "\n"


def of_origin(row: Row, report: dict[str, Any]) -> str:
    """Commit, date and versions of a block that an earlier run measured. Empty if this run measured it."""
    origin = row.get("origin")
    if origin is None:
        return ""
    commit = origin["commit"][:10] + (" with local changes" if origin.get("dirty") else "")
    other = [f"{name} {origin[name]}" for name in ("torch", "triton", "python") if origin.get(name) != report[name]]
    words = [f"Measured {origin['date']}", f"commit {commit}", f"at most {origin['repeats']} turns", *other]
    return f" {', '.join(words)}: `{todays_command(origin['command'])}`."


def row_line(row: Row) -> str:
    """One row of a block's table."""
    if row["status"] not in ("ok", "warm"):
        words = {"oom": "out of memory", "not reached": "not reached"}
        said = words.get(row["status"], f"failed: {row.get('reason', '')[:80]}").replace("|", "/")
        return f"| {row['method']} | {said} |" + " |" * 10

    def cell(name: str, unit: float, form: str) -> str:
        return format(row[name] / unit, form) if row.get(name) is not None else ""

    cells = []
    for part in PARTS:
        ms = row.get(f"{part}_ms")
        cells += [cell(f"{part}_bytes", 2**20, ",.0f"), "" if ms is None else digits(ms)]
    cells += [cell("time_ratio", 1, ".2f"), cell("error_dE", 1e-2, ".2g"), cell("error_dC", 1e-2, ".2g")]
    cells.append(cell("kept_share", 1e-2, ".2g") + (" (all)" if row.get("dense") else ""))
    share = row.get("three_products_tflops")
    cells.append("" if share is None else f"{share / row['rate_tflops']:.2f}")
    return f"| {row['method']} | " + " | ".join(cells) + " |"


def write_docs(path: Path, docs: Path = DOCS) -> Path:
    """Write the summary of a result between the markers of the page."""
    link = relpath(path.with_suffix(".md").resolve(), docs.resolve().parent)
    between_markers(docs, "lm-tables", summary(json.loads(path.read_text()), link))
    return docs


def summary(report: dict[str, Any], link: str) -> str:
    """A line for each block: loss and gradient together."""
    lines = [
        f"Loss and gradient on {report['device']}, bfloat16, 8,192 tokens: ms / MiB above the inputs.",
        f"[All rows]({link}), with errors and commits.",
        "",
        f"| block | {' | '.join(SUMMARY)} |",
        "|---|" + "---:|" * len(SUMMARY),
    ]
    for name in dict.fromkeys(row["case"] for row in report["results"]):
        rows = {row["method"]: row for row in report["results"] if row["case"] == name}
        cells = [next((cell(rows[m]) for m in methods if m in rows), "") for methods in SUMMARY.values()]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    for row in report["results"]:
        if row["method"] == ONE_PASS and row["status"] == "ok":
            share = row["three_products_tflops"] / row["rate_tflops"]
            lines += [
                "",
                f'With `gradients="forward"` and a workspace of 2,400 MiB, {row["case"]} takes {cell(row)}: '
                f"{share:.2f} of the rate of three plain products.",
            ]
    lines += cost_without_gain(report["results"])
    if report.get("not_reached"):
        lines += ["", "Not measured yet: " + "; ".join(report["not_reached"]) + "."]
    return "\n".join(lines)


def cost_without_gain(results: list[Row]) -> list[str]:
    """What a filter costs where nothing can be dropped, and how much two rows of the same exact call differ."""
    blocks: dict[str, dict[str, Row]] = {}
    for row in results:
        if "both_ms" in row:
            blocks.setdefault(row["case"], {})[row["method"]] = row
    more, apart = [], []
    for rows in blocks.values():
        if set(rows) >= EXACT_TWICE:
            exact, twin = (rows[method]["both_ms"] for method in sorted(EXACT_TWICE))
            apart.append(100 * (twin / exact - 1))
            more += [200 * row["both_ms"] / (exact + twin) - 100 for row in rows.values() if row.get("dense")]
    if not more:
        return []
    return [
        "",
        f"Where nothing can be dropped, the filter costs between {min(more):+.1f} % and {max(more):+.1f} % compared "
        f"with the exact call ({len(more)} cases).",
        f"Two measurements of the exact call differ by {min(apart):+.1f} % to {max(apart):+.1f} % "
        f"({len(apart)} blocks).",
    ]


def cell(row: Row) -> str:
    """Time and memory of a row, or "out of memory" or "failed". Empty for what was not measured."""
    if row["status"] == "ok":
        memory = f" / {row['both_bytes'] / 2**20:,.0f}" if "both_bytes" in row else ""
        return f"{digits(row['both_ms'])}{memory}"
    return {"oom": "out of memory", "error": "failed"}.get(row["status"], "")
