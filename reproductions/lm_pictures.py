"""Output of `reproductions.lm_figures`: progress, two figures, a page, and a section of the documentation."""

from __future__ import annotations

import importlib.util
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from os.path import relpath
from pathlib import Path
from typing import Any

from benchmarks.report import digits

from reproductions.records import RESULTS, todays_command

CONCEPTS = RESULTS.parents[1] / "docs" / "concepts"
DOCS, SKIPPING = CONCEPTS / "language-models.md", CONCEPTS / "skipping.md"
EVERY = 0.5, 10.0  # seconds between two updates: on a terminal, and in a log
STYLES = {  # colour, line, width
    "exact": ("C0", "-", 3.5),
    "filter 0.001": ("C1", "--", 1.8),
    "filter 0.01": ("C2", "-.", 1.8),
    "dense": ("C3", ":", 1.8),
    "exact, again": ("C4", ":", 1.5),
    "exact, other masks": ("C5", "-", 1.2),
    "exact, other batches": ("C7", "-", 1.2),
}
COLUMNS = (
    "run",
    "held-out loss",
    "at the end",
    "largest",
    "largest of a step",
    "pairs computed",
    "mass dropped",
    "step ms",
)
Report = dict[str, Any]


# Progress


def say(words: str) -> None:
    """Print a line to the log."""
    print(words, file=sys.stderr, flush=True)


@contextmanager
def progress(name: str, steps: int) -> Iterator[Callable[[Callable[[], str]], None]]:
    """Yield a function to call once a step, with a function that returns the state as words.

    Shows a bar on a terminal with rich, otherwise a line every ten seconds. The state is only asked for when it is
    shown, because reading a loss waits for the device.
    """
    watched = sys.stderr.isatty() and importlib.util.find_spec("rich") is not None
    done, last = 0, time.perf_counter()

    def due() -> bool:
        nonlocal done, last
        done += 1
        if time.perf_counter() - last < EVERY[not watched] and done < steps:
            return False
        last = time.perf_counter()
        return True

    if not watched:

        def line(words: Callable[[], str]) -> None:
            if due():
                say(f"{name}: step {done} of {steps}, {words()}")

        yield line
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[words]}"))
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as bars:
        task = bars.add_task(name, total=steps, words="")

        def advance(words: Callable[[], str]) -> None:
            shown = {"words": words()} if due() else {}
            bars.update(task, completed=done, **shown)

        yield advance


# Figures


def draw(report: Report, path: Path) -> list[Path]:
    """Draw both figures as SVG and PNG beside the file. Returns their paths."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "tilewise"
    from matplotlib import pyplot

    written = []
    for name, paint, panels in (("figure-3", draw_probabilities, 1), ("figure-4", draw_runs, 3)):
        if not any(f"-{name}.png" in link for link in links(report, path.stem)):
            continue
        figure, axes = pyplot.subplots(1, panels, figsize=(6.4 if panels == 1 else 13, 4.2), constrained_layout=True)
        paint(axes, report)
        figure.suptitle(title(report), fontsize=9)
        for suffix in ("svg", "png"):
            target = path.with_name(f"{path.stem}-{name}.{suffix}")
            figure.savefig(target, dpi=130, metadata={"Date": None} if suffix == "svg" else None)
            written.append(target)
        pyplot.close(figure)
    return written


def title(report: Report) -> str:
    """Title of both figures: the model and the device."""
    trained = report["pretraining"]
    return (
        f"{trained['layers']} layers of {trained['hidden']}, vocabulary {trained['vocabulary']:,}, "
        f"{trained['steps'] * trained['batch'] * trained['length'] / 1e6:.3g}M tokens, {report['device']}"
    )


def draw_probabilities(axes: Any, report: Report) -> None:
    """Figure 3."""
    found = report["figure_3"]
    axes.plot(found["rank"], found["probability"], label="mean probability of the i-th most likely token")
    axes.axhline(report["threshold"], color="0.4", linestyle="--", linewidth=1, label="$2^{-12}$")
    axes.axvline(found["first_rank_below_2^-12"], color="0.4", linestyle=":", linewidth=1)
    axes.set(xscale="log", yscale="log", xlabel="rank", ylabel="probability")
    axes.set_title(
        f"below $2^{{-12}}$ from rank {found['first_rank_below_2^-12']:,}, with "
        f"{digits(100 * found['mass_below_2^-12'])} % of the probability",
        fontsize=9,
    )
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)


def draw_runs(axes: Any, report: Report) -> None:
    """Figure 4: the curves, their distance from the exact one, and the share of pairs that backward computed."""
    left, middle, right = axes
    runs = {run["name"]: run for run in report["figure_4"]["runs"]}
    for name in (n for n in ("exact", "filter 0.001", "filter 0.01", "dense") if n in runs):
        color, line, width = STYLES[name]
        left.plot(*zip(*runs[name]["held_out"], strict=True), color=color, linestyle=line, linewidth=width, label=name)
    left.set(xlabel="step of fine-tuning", ylabel="loss on held-out text")
    for name in (n for n in STYLES if n in runs and n != "exact"):
        color, line, width = STYLES[name]
        points = [
            (s, abs(x - y)) for (s, x), (_, y) in zip(runs[name]["held_out"], runs["exact"]["held_out"], strict=True)
        ]
        points = [point for point in points if point[1] > 0.0]  # a logarithmic axis cannot show zero
        if points:
            middle.plot(
                *zip(*points, strict=True), color=color, linestyle=line, linewidth=width, marker=".", label=name
            )
    middle.set(xlabel="step of fine-tuning", ylabel="distance from the exact run", yscale="log")
    if middle.lines:
        middle.set_ylim(top=10.0 * middle.get_ylim()[1])  # room for the names
    for name in (n for n in STYLES if n in runs and runs[n]["skipping"]):
        color, line, width = STYLES[name]
        points = [
            (seen["step"] + 1, 100 * (seen["kept_share"] if seen["skips"] else 1.0)) for seen in runs[name]["skipping"]
        ]
        right.plot(*zip(*points, strict=True), color=color, linestyle=line, linewidth=width, marker=".", label=name)
    right.set(xlabel="step of fine-tuning", ylabel="(row, tile) pairs that backward computes, %", yscale="log")
    for one in axes:
        one.grid(alpha=0.3)
        if one.lines:
            one.legend(frameon=False, fontsize=8, ncols=2 if len(one.lines) > 4 else 1)


# Text


def page(report: Report, stem: str) -> str:
    """The page beside the JSON file."""
    commit = report["commit"][:10] + (" with local changes" if report["dirty"] else "")
    lines = [
        f"# Figures 3 and 4 of Cut Cross-Entropy on {report['device']}",
        "",
        f"`{todays_command(report['command'])}`",
        "",
        f"{report['date']}, commit {commit}, torch {report['torch']}, triton {report['triton']}, Python "
        f"{report['python']}; {report.get('seconds', 0):.0f} s.",
        "",
        words(report),
        "",
        *links(report, stem),
    ]
    return "\n".join(lines) + "\n"


def links(report: Report, stem: str) -> list[str]:
    """Links to the figures that `draw` makes."""
    lines = [f"![mean probability by rank]({stem}-figure-3.png)"]
    if report.get("figure_4", {}).get("runs"):
        lines.append(f"![loss with and without a filter]({stem}-figure-4.png)")
    return lines


def words(report: Report) -> str:
    """What was trained and what was measured, one sentence a line. Every number comes from the file."""
    lines = words_on_probabilities(report)
    four = report.get("figure_4")
    if four is None or not four["runs"]:
        return "\n".join(lines)
    tuned, exact = report["tuning"], four["runs"][0]
    lines += [
        "",
        f"**Figure 4.** The model is fine-tuned on {report['text']['said']['tuning']} for {tuned['steps']} steps of "
        f"{tuned['batch'] * tuned['length']:,} tokens, with dropout of {tuned['dropout']:g} in the attention.",
        f"In the exact run the held-out loss goes from {exact['held_out'][0][1]:.3f} to "
        f"{exact['held_out'][-1][1]:.3f}.",
        "The table shows how far the other runs are from it, in nats.",
        "",
        "- *At the end*, *largest*: the difference of the held-out losses, after the last step and at most.",
        "- *Largest of a step*: the difference of the training losses, where batches and dropout masks are the same.",
        "- *Pairs computed*: the share of (row, tile) pairs that backward computed, in the steps that were recorded.",
        "- *Mass dropped*: the probability that was dropped, mean over rows and largest of a row.",
        "- A run with a tolerance and other batches is compared with the exact run of those batches.",
        "",
        f"| {' | '.join(COLUMNS)} |",
        "|---|" + "---:|" * (len(COLUMNS) - 1),
    ]
    for run in four["runs"]:
        lines.append(run_line(run, four["differences"].get(run["name"], {})))
    if four["no_time_for"]:
        lines += ["", f"Not run, because the time was up: {'; '.join(four['no_time_for'])}."]
    return "\n".join([*lines, "", verdict(four)])


def words_on_probabilities(report: Report) -> list[str]:
    """Sentences on figure 3."""
    trained, found, text = report["pretraining"], report["figure_3"], report["text"]
    seen = trained["steps"] * trained["batch"] * trained["length"]
    lines = [
        f"**Figure 3.** A Llama of {trained['layers']} layers, width {trained['hidden']} and {trained['vocabulary']:,} "
        f"words is trained on {text['said']['pretraining']}: {seen / 1e6:.3g} million tokens "
        f"({report['device']}, {trained['seconds']:.0f} s).",
        f"On held-out text, {text['said']['held_out']}, its loss is {found['loss']:.2f} and "
        f"{100 * found['accuracy']:.0f} % of the next tokens are right.",
        f"None of those files was trained on, but {100 * text['overlap']['held_out']:.0f} % of their sequences of "
        f"{text['sequence']} tokens also occur in files that were.",
        f"The mean probability by rank falls below 2^-12 at rank {found['first_rank_below_2^-12']:,}.",
        f"A fixed threshold of 2^-12 would drop the rest, which has {digits(100 * found['mass_below_2^-12'])} % of the "
        "probability.",
        *of_skipping(found["skipping"]),
    ]
    if "other" in found:
        lines += [
            f"On text of another kind, {text['said']['other']}, its loss is {found['other']['loss']:.2f}.",
            *of_skipping(found["other"]["skipping"]),
        ]
    return lines


def of_skipping(skipping: Report) -> list[str]:
    """A sentence on each tolerance."""
    return [of_tolerance(tolerance, one) for tolerance, one in skipping.items()]


def of_tolerance(tolerance: str, one: Report) -> str:
    """A sentence on one tolerance."""
    computed = f"{digits(100 * one['kept_share'])} % of the (row, tile) pairs"
    if not one["skips"] and one["kept_share"] == 1.0:  # a sample of the rows decided, so pairs were not counted
        return f"At a tolerance of {tolerance} backward computes all (row, tile) pairs: too many of them matter."
    if not one["skips"]:
        return f"At a tolerance of {tolerance} backward would need {computed}, so it computes all."
    return f"At a tolerance of {tolerance} backward computes {computed}."


def run_line(run: Report, apart: Report) -> str:
    """One row of the table of runs."""
    cells = [f"{run['held_out'][-1][1]:.5f}"]
    cells += [f"{apart[name]:.1e}" if name in apart else "" for name in ("final", "largest", "largest_of_a_step")]
    seen = run["skipping"]
    share, dropped = "all", ""
    if seen:
        skips = [one for one in seen if one["skips"]]
        shares = [100 * one["kept_share"] for one in skips or seen]
        share = f"{digits(min(shares))} to {digits(max(shares))} %"
        if not skips:
            share = "all" if min(shares) == 100.0 else f"all ({share} are needed)"
        elif len(skips) < len(seen):
            share += f", all in {len(seen) - len(skips)} of {len(seen)} steps"
        dropped = f"{max(one['mean_dropped'] for one in seen):.1e}, {max(one['largest_dropped'] for one in seen):.1e}"
    step = "" if run["step_ms"] is None else digits(run["step_ms"])
    return f"| {run['name']} | " + " | ".join([*cells, share, dropped, step]) + " |"


def verdict(four: Report) -> str:
    """The effect of the filter beside the noise of exact runs, one sentence a line."""
    largest = {name: one["largest"] for name, one in four["differences"].items()}
    filtered = {name: value for name, value in largest.items() if name.startswith("filter")}
    noise = {name: value for name, value in largest.items() if name not in filtered}
    if not filtered or not noise:
        return "There are too few runs to compare."
    worst = max(filtered, key=lambda name: filtered[name])
    above, below = ([n for n in noise if (noise[n] > filtered[worst]) is higher] for higher in (True, False))
    by_tolerance: dict[float, list[bool]] = {}
    for run in four["runs"]:
        by_tolerance.setdefault(run["tolerance"], []).extend(seen["skips"] for seen in run["skipping"])
    steps = [f"{sum(skips)} of {len(skips)} at {t:g}" for t, skips in sorted(by_tolerance.items(), key=str) if skips]
    return "\n".join(
        [
            f"With a tolerance, a curve is at most {filtered[worst]:.1e} from the exact one ({worst}).",
            f"Runs without a filter that differ by more: {listed(above, noise)}.",
            f"Runs without a filter that differ by no more: {listed(below, noise)}.",
            f"Recorded steps in which backward dropped pairs: {', '.join(steps) or 'none'}.",
        ]
    )


def listed(names: list[str], values: dict[str, float]) -> str:
    """Names with their values, or "none"."""
    return ", ".join(f"{name} ({values[name]:.1e})" for name in names) or "none"


def write_docs(report: Report, path: Path, docs: Path = DOCS, skipping: Path = SKIPPING) -> list[Path]:
    """Write text and figures to the page on language models, and the result to the page on the filter."""
    where = relpath(path.resolve().parent, docs.resolve().parent)
    section = "\n".join([words(report), "", *links(report, f"{where}/{path.stem}")])
    between_markers(docs, "lm-figures", section)
    between_markers(skipping, "lm-figures", in_short(report))
    return [docs, skipping]


def in_short(report: Report) -> str:
    """The result alone, for the page on the filter."""
    four = report.get("figure_4")
    if four is None or not four["runs"]:
        return "The model was not fine-tuned with a tolerance."
    tuned = report["tuning"]
    return (
        f"A small model was fine-tuned on {report['device']} ({tuned['steps']} steps of "
        f"{tuned['batch'] * tuned['length']:,} tokens). Differences of held-out losses, in nats:\n\n{verdict(four)}"
    )


def between_markers(docs: Path, name: str, section: str) -> None:
    """Replace the text between ``<!-- name:begin -->`` and ``<!-- name:end -->``."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    text = docs.read_text()
    if len(pattern.findall(text)) != 1:
        raise SystemExit(f"{docs} needs exactly one {begin} and one {end}")
    docs.write_text(pattern.sub(lambda _: f"{begin}\n{section}\n{end}", text))
