"""The GPU tests in n processes at once, and one summary of them all.

    PYTHONPATH=src python -m tests.gpu.parallel [n] [--json file] [--commit id] [--max-seconds s] [-- more for pytest]

Ends with 0 only if every process ended well, something passed and nothing failed. After --max-seconds the processes are
interrupted, and what they have done until then is summed up; a test that they were at is a failure. Of a test that
takes very long it is printed where its threads are.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[2]
ENDED_WELL = (0, 1, 5)  # all passed, some failed, none left to run
LOG_CHARACTERS = 6000
MESSAGE_CHARACTERS = 200
GRACE_S = 20.0  # for a process that was interrupted
SLOWEST = 8  # tests that are named


def start(index: int, count: int, folder: Path, arguments: list[str]) -> subprocess.Popen[bytes]:
    """One process of pytest; its log and its results go to the folder."""
    environment = os.environ | {
        "GPU_SHARD": f"{index}/{count}",
        "GPU_CLAIMS": str(folder / "claims"),
        "GPU_STACKS": str(folder / f"{index}.stacks"),
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "--show-capture=no", "-p", "no:cacheprovider"]
    command += [f"--junitxml={folder / f'{index}.xml'}", *(arguments or ["tests/gpu"])]
    with (folder / f"{index}.log").open("wb") as log:
        return subprocess.Popen(
            command, env=environment, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, preexec_fn=hear_interrupts
        )


def hear_interrupts() -> None:
    """A shell's background processes, and all that they start, are deaf to them."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def wait_for(running: list[subprocess.Popen[bytes]], seconds: float | None) -> tuple[list[int], bool]:
    """How each process ended, and whether they had to be stopped."""
    deadline = None if seconds is None else time.monotonic() + seconds
    stopped = False
    for process in running:
        try:
            process.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            stopped = True
    for process in running:
        process.send_signal(signal.SIGINT)  # pytest then writes what it has; nothing happens to those that ended
    for process in running:
        try:
            process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    return [process.returncode for process in running], stopped


def count_results(results: Path) -> tuple[dict[str, int], list[str], list[tuple[float, str]]]:
    """Passed, failed, errors and skipped in one file of results, what failed and how, and how long each took."""
    counts = {"passed": 0, "failed": 0, "errors": 0, "skipped": 0}
    names, times = [], []
    for case in ElementTree.parse(results).iter("testcase"):
        if case.get("name") is None:  # it was interrupted
            continue
        kinds = {child.tag for child in case}
        kind = next((k for k in ("failure", "error", "skipped") if k in kinds), None)
        counts[{"failure": "failed", "error": "errors", "skipped": "skipped", None: "passed"}[kind]] += 1
        name = f"{case.get('classname')}::{case.get('name')}"
        times.append((float(case.get("time") or 0.0), name))
        if kind in ("failure", "error"):
            said = (case.find(kind).get("message") or "").strip().splitlines()  # type: ignore[union-attr]
            names.append(f"{name}: {said[0][:MESSAGE_CHARACTERS]}" if said else name)
    return counts, names, times


def merge(folder: Path, codes: list[int]) -> dict[str, object]:
    """One summary of all processes. One that did not end well, or left no results, is an error of its own."""
    total = {"passed": 0, "failed": 0, "errors": 0, "skipped": 0}
    failures: list[str] = []
    times: list[tuple[float, str]] = []
    for index, code in enumerate(codes):
        results = folder / f"{index}.xml"
        if results.exists():
            counts, names, seconds = count_results(results)
            times += seconds
            total = {kind: total[kind] + counts[kind] for kind in total}
            failures += names
        if code not in ENDED_WELL or not results.exists():
            total["errors"] += 1
            failures.append(f"process {index} ended with {code}")
    unfinished = [claim.read_text() for claim in (folder / "claims").glob("*") if claim.stat().st_size]
    total["errors"] += len(unfinished)
    failures += [f"{name} did not end" for name in unfinished]
    slowest = {name: round(seconds, 1) for seconds, name in sorted(times, reverse=True)[:SLOWEST]}
    return {**total, "failures": sorted(failures), "slowest": slowest}


def describe_machine() -> dict[str, str | None]:
    """Card and versions."""
    import torch

    def of(package: str) -> str | None:
        try:
            return version(package)
        except PackageNotFoundError:
            return None

    return {
        "card": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "torch": torch.__version__,
        "triton": of("triton"),
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("processes", nargs="?", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--json", type=Path, help="where the summary is written")
    parser.add_argument("--commit", help="what was tested, for the summary")
    parser.add_argument("--max-seconds", type=float, help="stop then, and sum up what was done")
    given = sys.argv[1:] if arguments is None else arguments
    cut = given.index("--") if "--" in given else len(given)
    args, for_pytest = parser.parse_args(given[:cut]), given[cut + 1 :]
    os.environ.setdefault("GPU_SEED", str(time.time_ns() % 2**31))
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "claims").mkdir()
        running = [start(index, args.processes, folder, for_pytest) for index in range(args.processes)]
        codes, stopped = wait_for(running, args.max_seconds)
        summary = merge(folder, codes)
        for index in range(args.processes):
            text = (folder / f"{index}.log").read_text(errors="replace")
            if codes[index] not in (0, 5):
                print(f"--- process {index}\n{text[-LOG_CHARACTERS:]}")
            stacks = folder / f"{index}.stacks"
            if stacks.exists() and stacks.stat().st_size:
                print(f"--- process {index} was long at\n{stacks.read_text(errors='replace')[-LOG_CHARACTERS:]}")
    if stopped:
        summary["stopped_after_s"] = args.max_seconds
    summary |= {"seconds": round(time.monotonic() - began, 1), "processes": args.processes}
    summary |= {"seed": int(os.environ["GPU_SEED"]), "commit": args.commit, **describe_machine()}
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(summary, indent=2) + "\n")
    print(json.dumps(summary, indent=2))
    return 0 if summary["passed"] and not summary["failures"] else 1


if __name__ == "__main__":
    sys.exit(main())
