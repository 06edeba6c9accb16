"""The page of `train_step`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from reproductions.train_step_order import BASELINES, METHODS

Row = dict[str, Any]


def step_ratios(results: Sequence[Row]) -> dict[str, float]:
    """Time of our step divided by that of the fastest baseline, for batches where one run measured both."""
    ratios = {}
    for batch in sorted({row["batch"] for row in results}):
        rows = [row for row in results if row["batch"] == batch and row.get("step_measured")]
        run = next((row.get("date") for row in rows if row["method"] == "tilewise"), None)
        whole = {row["method"]: row["step_s"] for row in rows if row.get("date") == run}
        baselines = [whole[name] for name in BASELINES if name in whole]
        if "tilewise" in whole and baselines:
            ratios[str(batch)] = whole["tilewise"] / min(baselines)
    return ratios


def markdown(report: Row) -> str:
    """The page: a table of the results."""
    compiled = f", compiled {report['compiled']}" if report.get("compiled") else ""
    lines = [
        f"{report['model']}, chunks of {report['chunk']}, {report['precision']}{compiled}, on {report['device']}.",
        "",
        "| batch | loss | step s | whole steps | loss s | M_data GiB | M_loss GiB | M_peak GiB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in sorted(report["results"], key=lambda row: (row["batch"], METHODS.index(row["method"]))):
        gib = [
            f"{row[k] / 2**30:.2f}" if row.get(k) is not None else "-"
            for k in ("data_bytes", "loss_bytes", "peak_bytes")
        ]
        name = f"| {row['batch']:,} | {row['method']} |"
        if row.get("oom"):
            lines.append(f"{name} out of memory | 0 | - | {gib[0]} | - | - |")
            continue
        parts = "" if row["step_measured"] else " (from parts)"
        step = f"{row['step_s']:.2f}{parts}"
        gib[2] += parts if gib[2] != "-" else ""
        lines.append(f"{name} {step} | {len(row.get('steps_s', []))} | {row['loss_s']:.3f} | {' | '.join(gib)} |")
    ratios = [f"{ratio:.3f} at {int(batch):,}" for batch, ratio in report.get("step_ratios", {}).items()]
    if ratios:
        lines += ["", f"Step time of tilewise divided by that of the faster baseline: {', '.join(ratios)}."]
    return "\n".join(lines) + "\n"
