"""Whole training steps: language models of 1 billion parameters, and dense retrieval, with each loss that people use.

    python -m benchmarks.steps --peers FOLDER            on a CUDA device: all cases
    python -m benchmarks.steps --only llama --add-to F   measure the cases with this word, and keep the others of F
    python -m benchmarks.steps --small                   tiny models on any device: checks that everything runs
    python -m benchmarks.steps --page                    write tables and charts of the committed results

A step is forward and backward, without the optimizer's, which is the same for all. The models have the shapes of
transformers' configurations and random weights: nothing is downloaded. Language models take sequences of 4,096 tokens
in bfloat16, with gradient checkpointing. Retrieval takes BERT-base, 8,192 pairs and a gradient cache. Every option is
at its default. Each method runs twice to warm up, then the methods take turns in shuffled orders. Time: the median of
the turns. Memory: the largest peak of a turn above the weights, gradients included. The loss is recorded, so that a
method that computes something else is noticed. The file is written after each case.

`python -m reproductions.train_step` has the steps of a CLIP model (ViT-B/16). Results:
benchmarks/results/steps-<device>.json.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import charts, measure, peers
from benchmarks.run import COMMIT_HELP, RESULTS, commit_of, describe, device_name, repeatable, rows_of_file, slug, write
from benchmarks.steps_models import (
    LANGUAGE,
    LANGUAGE_METHODS,
    NO_HEAD,
    OWN,
    RETRIEVAL_METHODS,
    language_steps,
    retrieval_steps,
)

LENGTH, BATCHES, PAIRS = 4096, (4, 16), 8192
SMALL_LENGTH, SMALL_BATCH = 16, 8
GIB = 2**30
COMMITTED = RESULTS / "steps-nvidia-h200.json"
ROOT = measure.ROOT
README, PAGE = ROOT / "README.md", ROOT / "docs" / "concepts" / "benchmarks.md"
BEGIN, END = "<!-- steps: begin -->", "<!-- steps: end -->"
Row = dict[str, Any]


@dataclass(frozen=True)
class StepCase:
    """A model and a batch: sequences of a language model, or pairs for retrieval."""

    model: str
    batch: int

    @property
    def is_language(self) -> bool:
        """Whether it is a language model."""
        return self.model in LANGUAGE

    @property
    def items(self) -> int:
        """Tokens or pairs of a step."""
        return self.batch * LENGTH if self.is_language else self.batch

    @property
    def name(self) -> str:
        """The case in results and for ``--only``.

        >>> StepCase("Llama-3.2-1B", 4).name
        'llama-3.2-1b-16k'
        """
        return f"{self.model.lower()}-{self.items // 1024}k"

    @property
    def methods(self) -> tuple[str, ...]:
        """What is compared. The step without a head is run for the smaller batch only."""
        if not self.is_language:
            return RETRIEVAL_METHODS
        return LANGUAGE_METHODS if self.batch == min(BATCHES) else LANGUAGE_METHODS[:-1]


CASES = (*(StepCase(model, batch) for model in LANGUAGE for batch in BATCHES), StepCase("BERT-base", PAIRS))


@dataclass(frozen=True)
class Turn:
    """Time and peak memory of one step. A CPU has no peak."""

    ms: float
    peak_bytes: int | None


def one_turn(step: measure.Step, device: torch.device) -> Turn:
    """Run a step once. Unlike in `measure`, no untimed step comes first: these steps are long enough."""
    step.clear()
    gc.collect()
    if device.type != "cuda":
        start = time.perf_counter()
        step()
        return Turn(1e3 * (time.perf_counter() - start), None)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    first.record()
    step()
    last.record()
    measure.synchronize(device)
    return Turn(first.elapsed_time(last), torch.cuda.max_memory_allocated(device) - before)


def take_turns(
    steps: Mapping[str, measure.Step], device: torch.device, turns: int, warm_ups: int
) -> dict[str, list[Turn] | measure.Failure]:
    """Warm up each step, then run them in shuffled orders. A step that fails takes no more turns."""
    taken: dict[str, list[Turn] | measure.Failure] = {name: [] for name in steps}

    def attempt(name: str, keep: bool) -> None:
        found = taken[name]
        if isinstance(found, measure.Failure):
            return
        try:
            turn = one_turn(steps[name], device)
        except Exception as error:
            taken[name] = measure.failure_of(error)
        else:
            found += [turn] if keep else []
        steps[name].clear()

    for name in steps:
        start = time.perf_counter()
        for _ in range(warm_ups):
            attempt(name, keep=False)
        print(f"  {name}: warm after {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)
    for order in measure.orders(steps, turns):
        for name in order:
            attempt(name, keep=True)
    return taken


def run_case(case: StepCase, device: torch.device, turns: int, methods: Sequence[str], small: bool) -> list[Row]:
    """One result for each method."""
    wanted = [method for method in case.methods if method in methods]
    batch, length = (SMALL_BATCH, SMALL_LENGTH) if small else (case.batch, LENGTH)
    items = batch * length if case.is_language else batch
    if case.is_language:
        built = language_steps(case.model, batch, length, device, wanted, small)
    else:
        built = retrieval_steps(batch, device, wanted, small)
    steps = {name: step for name, step in built.items() if isinstance(step, measure.Step)}
    taken = take_turns(steps, device, turns, warm_ups=1 if small else 2)
    rows = []
    for method in wanted:
        row: Row = {"case": case.name, "model": case.model, "items": items, "method": method}
        step, outcome = built[method], taken.get(method)
        if isinstance(step, peers.PeerAbsent):
            row |= {"status": "absent", "reason": str(step)}
        elif isinstance(outcome, measure.Failure):
            row |= {"status": outcome.status, "reason": outcome.reason}
        elif outcome:
            timing = measure.summarize([turn.ms for turn in outcome])
            row |= {"status": "ok", **asdict(timing), "items_per_s": 1e3 * items / timing.median_ms}
            peaks = [turn.peak_bytes for turn in outcome if turn.peak_bytes is not None]
            if peaks:
                row["peak_bytes"] = max(peaks)
            if step.value is not None and method != NO_HEAD:
                row["loss_value"] = float(step.value)
        rows.append(row)
    return rows


def merged(earlier: list[Row], fresh: list[Row]) -> list[Row]:
    """All rows in the order of `CASES` and their methods. Of what was measured again, only the new row is kept."""
    again = {(row["case"], row["method"]) for row in fresh}
    rows = [row for row in earlier if (row["case"], row["method"]) not in again] + fresh
    order = {(case.name, method): place for place, case in enumerate(CASES) for method in case.methods}
    places = list(order)
    return sorted(rows, key=lambda row: places.index((row["case"], row["method"])))


def table(report: Row, *, full: bool) -> str:
    """Time and memory of each method of each case as Markdown: one line for a case, or (``full``) for a method."""
    cases = [case for case in CASES if any(row["case"] == case.name for row in report["results"])]
    of = {(row["case"], row["method"]): row for row in report["results"]}
    if full:
        lines = [
            "| step | loss | time | per second | memory above the weights | loss value |",
            "|---|---|---:|---:|---:|---:|",
        ]
        for case in cases:
            for method in case.methods:
                if row := of.get((case.name, method)):
                    lines.append(f"| {label(case)} | {method} | {' | '.join(cells(row))} |")
        return "\n".join(lines)
    methods = [
        m for m in LANGUAGE_METHODS if any(of.get((c.name, m), {}).get("status") in ("ok", "oom") for c in cases)
    ]
    lines = [f"| step | {' | '.join(methods)} |", f"|---|{'---|' * len(methods)}"]
    for case in cases:
        if case.is_language:
            found = [brief(of.get((case.name, method))) for method in methods]
            lines.append(f"| {label(case)} | {' | '.join(found)} |")
    return "\n".join(lines)


def label(case: StepCase) -> str:
    """The case in words."""
    return f"{case.model}, {case.items:,} {'tokens' if case.is_language else 'pairs'}"


def cells(row: Row) -> list[str]:
    """Time, rate, memory and loss of a row."""
    if row["status"] != "ok":
        return [{"oom": "out of memory", "absent": "not installed"}.get(row["status"], "failed"), "", "", ""]
    memory = f"{row['peak_bytes'] / GIB:.2f} GiB" if "peak_bytes" in row else ""
    loss = f"{row['loss_value']:.5f}" if "loss_value" in row else ""
    return [f"{row['median_ms']:,.1f} ms", f"{row['items_per_s']:,.0f}", memory, loss]


def brief(row: Row | None) -> str:
    """Time and memory of a row in one cell."""
    if row is None or row["status"] == "absent":
        return "-"
    time, _, memory, _ = cells(row)
    return f"{time}, {memory}" if memory else time


def largest(report: Row) -> StepCase:
    """The case in which transformers' own loss takes the most memory, of those that it can run."""
    ran = [row for row in report["results"] if row["method"] == OWN and row["status"] == "ok"]
    name = max(ran, key=lambda row: row["peak_bytes"])["case"]
    return next(case for case in CASES if case.name == name)


def written() -> dict[Path, str]:
    """The pages with the tables of the committed results, and charts of the `largest` step."""
    report = json.loads(COMMITTED.read_text())
    case = largest(report)
    words = f"{label(case)}, {report['device']}"
    rows = [row for row in report["results"] if row["case"] == case.name and row["method"] != NO_HEAD]
    files = {
        charts.DRAWINGS / f"chart-steps-{kind}.svg": charts.bars(rows, key, f"{words}: {kind} of a step")
        for kind, key in (("time", "median_ms"), ("memory", "peak_bytes"))
    }
    for path, text in ((README, on_readme(report)), (PAGE, on_page(report))):
        before, rest = path.read_text().split(BEGIN)
        files[path] = f"{before}{BEGIN}\n\n{text}\n\n{END}{rest.split(END)[1]}"
    return files


def on_readme(report: Row) -> str:
    """What the README shows."""
    case = largest(report)
    of = {row["method"]: row for row in report["results"] if row["case"] == case.name}
    ours, theirs = of["tilewise"], of[OWN]
    return f"""**{theirs["peak_bytes"] / GIB:.0f} GiB become {ours["peak_bytes"] / GIB:.1f} GiB**: a training step of \
{label(case)}, takes {ours["median_ms"] / theirs["median_ms"]:.2f} times the time
of the same step with the loss of transformers. Every option is at its default. Time, and memory above the weights, on
one {report["device"]} ([all columns](docs/concepts/benchmarks.md#whole-training-steps)):

{table(report, full=False)}

Measured with `python -m benchmarks.steps`. "{NO_HEAD}" is the step without any loss."""


def on_page(report: Row) -> str:
    """What the page of the benchmarks shows."""
    charts_of = "\n\n".join(f"![{kind} of a step](../drawings/chart-steps-{kind}.svg)" for kind in ("time", "memory"))
    return f"{table(report, full=True)}\n\n{charts_of}"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.steps", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--only", default="", help="cases whose name has one of these words, separated by commas")
    parser.add_argument("--methods", help="these methods, separated by semicolons, instead of all")
    parser.add_argument("--add-to", type=Path, help="keep the other rows of this file")
    parser.add_argument("--peers", type=Path, nargs="*", default=[], help="folders that hold other libraries")
    parser.add_argument("--turns", type=int, default=5, help="timed steps of each method of each case")
    parser.add_argument("--small", action="store_true", help="tiny models, one turn, any device")
    parser.add_argument("--page", action="store_true", help="write tables and charts of the committed results")
    parser.add_argument("--out", type=Path, help="file to write, instead of one in benchmarks/results")
    parser.add_argument("--commit", help=COMMIT_HELP)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> Path | None:
    """Measure, or write the pages. Returns the path of the results."""
    given = parse(argv)
    if given.page:
        for path, text in written().items():
            path.write_text(text)
        return None
    for folder in given.peers:
        sys.path.insert(0, str(folder.resolve()))
    # Without it, a dense step would free and allocate the blocks of the others again while it is timed.
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type != "cuda" and not given.small:
        raise SystemExit("this benchmark needs a CUDA device, and torch finds none. Pass --small to try it out")
    chosen = [case for case in CASES if any(word in case.name for word in given.only.lower().split(","))]
    if not chosen:
        raise SystemExit(f"no case has {given.only!r} in its name. There are: {', '.join(case.name for case in CASES)}")
    turns = 1 if given.small else given.turns
    methods = given.methods.split(";") if given.methods else (*LANGUAGE_METHODS, *RETRIEVAL_METHODS)
    command = repeatable("benchmarks.steps", sys.argv[1:] if argv is None else argv)
    earlier = rows_of_file(given.add_to, device_name(device))
    report = describe("steps", device, command, turns, 0.0, commit=commit_of(given.commit))
    del report["budget_s"]  # the number of turns does not depend on the time
    path = given.out or given.add_to or RESULTS / f"steps-{slug(report['device'])}.json"
    fresh: list[Row] = []
    for case in sorted(chosen, key=lambda case: (not case.is_language, case.items)):
        print(f"measuring {case.name}", file=sys.stderr, flush=True)
        fresh += run_case(case, device, turns, methods, given.small)
        report["results"] = merged(earlier, fresh)
        write(path, report)
        for row in fresh:
            if row["case"] == case.name:
                print(row["case"], row["method"], *cells(row), sep="  ", flush=True)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    print(f"wrote {path}")
    return Path(path)


if __name__ == "__main__":
    main()
