"""Run a suite and write its results.

    python -m benchmarks.run cpu                        all CPU cases
    python -m benchmarks.run gpu --only 'clip-*-512-*'  some GPU cases
    python -m benchmarks.run cpu --quick                no side above 2,048, few turns: checks that everything runs
    python -m benchmarks.run gpu --add-to FILE          measure what FILE lacks (or --only), keep its other cases

The file benchmarks/results/<suite>-<device>.json is written after each case, so an interrupted run leaves what it
measured. With --add-to, cases that are not measured again keep the commit and the date of their own run.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import fnmatch
import gc
import importlib.util
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks import cases, measure, peers
from benchmarks.cases import Case

RESULTS = Path(__file__).resolve().parent / "results"
FORMAT = 1
COMMIT_HELP = "the commit to record; without it, the one that is checked out in the project's own repository"
# Variables that point git at another repository than that of the current folder; git sets them in its hooks.
GIT_REDIRECTIONS = {"GIT_DIR", "GIT_WORK_TREE", "GIT_COMMON_DIR", "GIT_INDEX_FILE"}
ORIGIN = ("commit", "dirty", "date", "command", "torch", "triton", "python", "repeats")


def main(argv: Sequence[str] | None = None) -> Path:
    """Measure and write. Returns the path of the file."""
    arguments = parse(argv)
    for folder in arguments.peers:
        sys.path.insert(0, str(folder.resolve()))
    device = torch.device("cuda" if arguments.suite == "gpu" else "cpu")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit("the gpu suite needs a CUDA device, and torch finds none. Run the cpu suite instead")
    chosen = choose(cases.SUITES[arguments.suite](), arguments.only, arguments.quick)
    if not chosen:
        raise SystemExit(f"no case of the {arguments.suite} suite matches {arguments.only!r}")
    earlier = rows_of_file(arguments.add_to, device_name(device))
    if arguments.add_to and arguments.only is None:
        there = {row["case"] for row in earlier}
        chosen = [case for case in chosen if case.name not in there]
    repeats, budget_s = (3, 1.0) if arguments.quick else (arguments.repeats, arguments.budget_s)
    least = 1 if arguments.quick or device.type == "cuda" else 3  # other programs disturb a CPU more than a GPU
    command = arguments.command or shlex.join(["python", "-m", "benchmarks.run", *(argv or sys.argv[1:])])
    report = describe(arguments.suite, device, command, repeats, budget_s, commit=arguments.commit)
    path = arguments.out or RESULTS / f"{arguments.suite}-{slug(report['device'])}.json"
    fresh: list[dict[str, Any]] = []
    with progress(chosen) as turn:
        for case in chosen:
            turn(case.name)
            fresh += run_case(case, device, repeats, budget_s, least)
            report["results"] = merged(earlier, fresh, arguments.suite)
            write(path, report)
    print(f"wrote {path}")
    return path


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("suite", choices=sorted(cases.SUITES))
    parser.add_argument("--only", help="run cases whose name matches one of these patterns, separated by commas")
    parser.add_argument(
        "--add-to", type=Path, help="measure the cases that this file lacks (or --only), and keep its other cases"
    )
    parser.add_argument("--quick", action="store_true", help="small sizes and few turns")
    parser.add_argument("--repeats", type=int, default=20, help="most turns of a method")
    parser.add_argument("--budget-s", type=float, default=4.0, help="about this many seconds per method and case")
    parser.add_argument("--peers", type=Path, nargs="*", default=[], help="folders that hold other libraries")
    parser.add_argument("--out", type=Path, help="file to write, instead of one in benchmarks/results")
    parser.add_argument("--commit", help=COMMIT_HELP)
    parser.add_argument("--command", help="the command to record, instead of this one")
    return parser.parse_args(argv)


def choose(suite: list[Case], only: str | None, quick: bool) -> list[Case]:
    """The cases that match. A pattern without wildcards matches anywhere in the name."""
    words = (only or "*").split(",")
    patterns = [word if any(c in word for c in "*?[") else f"*{word}*" for word in words]
    chosen = [case for case in suite if any(fnmatch.fnmatchcase(case.name, pattern) for pattern in patterns)]
    if quick:
        chosen = list({case.name: case for case in map(cases.shrunk, chosen)}.values())
    return chosen


def rows_of_file(path: Path | None, device: str) -> list[dict[str, Any]]:
    """The rows of an earlier run, each with its commit, date and versions as "origin"."""
    if path is None:
        return []
    report = json.loads(path.read_text())
    if report["device"] != device:
        raise SystemExit(f"{path} was measured on {report['device']}, this is {device}. Give --out, without --add-to")
    origin = {name: report[name] for name in ORIGIN if name in report}
    return [{"origin": origin, **row} for row in report["results"]]


def merged(earlier: list[dict[str, Any]], fresh: list[dict[str, Any]], suite: str) -> list[dict[str, Any]]:
    """All rows in the order of the suite. Of a case that was measured again, only the new rows are kept."""
    again = {row["case"] for row in fresh}
    rows = [row for row in earlier if row["case"] not in again] + fresh
    order = {case.name: place for place, case in enumerate(cases.SUITES[suite]())}
    return sorted(rows, key=lambda row: order.get(row["case"], len(order)))


def run_case(case: Case, device: torch.device, repeats: int, budget_s: float, least: int) -> list[dict[str, Any]]:
    """Measure a case. Returns one result for each method."""
    before = measure.sustained_rate(device)
    inputs = cases.make_inputs(case, device)
    steps: dict[str, measure.Step] = {}
    outcome: dict[str, measure.Timing | measure.Failure] = {}
    for method in case.methods:
        try:
            steps[method] = cases.build_step(case, method, inputs)
        except peers.PeerAbsent as absent:
            outcome[method] = measure.Failure("absent", str(absent))
    outcome |= measure.time_in_turns(steps, device, repeats=repeats, budget_s=budget_s, least=least)
    rates = before, measure.sustained_rate(device)
    results = []
    for method in case.methods:
        result = {"case": case.name, "method": method, **asdict(case)}
        del result["methods"]
        result |= timing_fields(case, outcome[method], rates)
        if result["status"] == "ok":
            result |= memory_fields(case, method, steps[method], device)
        results.append(result)
    del steps, inputs
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return with_ratios(results, case.baseline)


def timing_fields(case: Case, outcome: measure.Timing | measure.Failure, rates: tuple[float, float]) -> dict[str, Any]:
    """Fields of the time, and its share of the machine's rate: the mean of before and after the case."""
    if isinstance(outcome, measure.Failure):
        return {"status": outcome.status, "reason": outcome.reason}
    per_second, rate = case.flops / (1e-3 * outcome.median_ms), sum(rates) / 2
    return {
        "status": "ok",
        **asdict(outcome),
        "nominal_tflops": per_second / 1e12,  # counts 4 products (ranks: 1), whatever the method does
        "rate_tflops": rate / 1e12,
        "rate_before_tflops": rates[0] / 1e12,
        "rate_after_tflops": rates[1] / 1e12,
        "share_of_rate": per_second / rate,
    }


def memory_fields(case: Case, method: str, step: measure.Step, device: torch.device) -> dict[str, Any]:
    """Fields of the peak memory and of the loss. A failure is recorded beside the time."""
    try:
        if device.type == "cuda":
            peak = measure.cuda_peak_bytes(step, device)
        else:
            peak = measure.cpu_peak_bytes("benchmarks.cases:memory_target", {"case": asdict(case), "method": method})
    except Exception as error:
        failure = measure.failure_of(error)
        return {"peak_bytes": None, "memory_reason": failure.reason}
    finally:
        step.clear()
    return {"peak_bytes": peak} | ({} if step.value is None else {"loss_value": float(step.value)})


def with_ratios(results: list[dict[str, Any]], baseline: str) -> list[dict[str, Any]]:
    """Add each method's time and memory divided by the baseline's, if both were measured."""
    base = next((r for r in results if r["method"] == baseline and r["status"] == "ok"), None)
    for result in results:
        if base is None or result["status"] != "ok":
            continue
        result["time_ratio"] = result["median_ms"] / base["median_ms"]
        if result.get("peak_bytes") is not None and base.get("peak_bytes"):
            result["memory_ratio"] = result["peak_bytes"] / base["peak_bytes"]
    return results


def describe(
    suite: str, device: torch.device, command: str, repeats: int, budget_s: float, *, commit: str | None = None
) -> dict[str, Any]:
    """Command, commit, device and versions: everything that is needed to repeat the measurement.

    `commit` is recorded if it is given. Otherwise it is read from the project's own repository.
    """
    cuda = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    changes = git("status", "--porcelain", "--untracked-files=no", "--", "src", "benchmarks", "reproductions")
    return {
        "format": FORMAT,
        "suite": suite,
        "command": command,
        "commit": commit_of(commit),
        "dirty": None if changes is None else bool(changes),  # None: not known
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": device_name(device),
        "device_bytes": cuda.total_memory if cuda else None,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": module_version("triton"),
        "peers": {name: peers.version(name) for name in peers.PEERS},
        "repeats": repeats,
        "budget_s": budget_s,
        "results": [],
    }


def module_version(name: str) -> str | None:
    """The version of an optional package, or None."""
    if importlib.util.find_spec(name) is None:
        return None
    return str(__import__(name).__version__)


def device_name(device: torch.device) -> str:
    """The name of the GPU or the processor."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()


def cpu_name() -> str:
    """The name of the processor."""
    with contextlib.suppress(OSError):
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        if found:
            return found.group(1).strip()
    return platform.processor() or platform.machine()


def commit_of(given: str | None) -> str:
    """The commit to record: the given one, else the checked-out one of the project's own repository, else "unknown"."""
    return given or git("rev-parse", "HEAD") or "unknown"


def git(*arguments: str) -> str | None:
    """Output of a git command in the project's own repository. None if it has none.

    The project may be a copy without history inside another repository. That repository's answers do not describe the
    project, so its root must be the project's root.
    """
    top = _git("rev-parse", "--show-toplevel")
    return _git(*arguments) if top and Path(top).resolve() == measure.ROOT else None


def _git(*arguments: str) -> str | None:
    """Output of a git command in the project's folder, or None if there is no git or it fails."""
    environment = {name: value for name, value in os.environ.items() if name not in GIT_REDIRECTIONS}
    try:
        done = subprocess.run(
            ["git", *arguments],
            cwd=measure.ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def repeatable(module: str, argv: Sequence[str]) -> str:
    """The command to repeat a measurement, without folders and without --out and --commit.

    >>> repeatable("benchmarks.x", ["table", "/tmp/a/icons.zip", "--out", "/tmp/b", "--commit=1234", "--seeds", "2"])
    'python -m benchmarks.x table icons.zip --seeds 2'
    """
    words = list(argv)
    for option in ("--out", "--commit"):
        words = [word for word in words if not word.startswith(f"{option}=")]
        if option in words:
            place = words.index(option)
            del words[place : place + 2]
    return " ".join(["python -m", module, *(Path(word).name if "/" in word else word for word in words)])


def slug(name: str) -> str:
    """A name that can be used in a file name.

    >>> slug("Intel(R) Xeon(R) Processor")
    'intel-xeon-processor'
    """
    return re.sub(r"[^a-z0-9]+", "-", name.lower().replace("(r)", "")).strip("-")


def write(path: Path, report: dict[str, Any]) -> None:
    """Write the file atomically, so that it is complete at any time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(report, indent=1) + "\n")
    draft.replace(path)


@contextlib.contextmanager
def progress(chosen: list[Case]) -> Iterator[Any]:
    """Yield a function to call with the name of each case. Shows a bar on a terminal with rich, otherwise lines."""
    if importlib.util.find_spec("rich") is None or not sys.stderr.isatty():
        yield lambda name: print(f"measuring {name}", file=sys.stderr, flush=True)
        return
    from rich.progress import Progress

    with Progress(transient=True) as bar:
        task = bar.add_task("", total=len(chosen) + 1)

        def turn(name: str) -> None:
            bar.update(task, advance=1, description=name)

        yield turn


if __name__ == "__main__":
    main()
