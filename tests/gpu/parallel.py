"""The GPU tests in n processes at once, and one summary of them all.

    PYTHONPATH=src python -m tests.gpu.parallel [n] [--json summary.json] [--commit id] [-- arguments of pytest]

Ends with 0 only if every process ended well, something passed and nothing failed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
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


def start(index: int, count: int, folder: Path, arguments: list[str]) -> subprocess.Popen[bytes]:
    """One process of pytest; its log and its results go to the folder."""
    environment = os.environ | {
        "GPU_SHARD": f"{index}/{count}",
        "GPU_CLAIMS": str(folder / "claims"),
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider"]
    command += [f"--junitxml={folder / f'{index}.xml'}", *(arguments or ["tests/gpu"])]
    with (folder / f"{index}.log").open("wb") as log:
        return subprocess.Popen(command, env=environment, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)


def count_results(results: Path) -> tuple[dict[str, int], list[str]]:
    """Passed, failed, errors and skipped in one file of results, and the names of what failed."""
    counts = {"passed": 0, "failed": 0, "errors": 0, "skipped": 0}
    names = []
    for case in ElementTree.parse(results).iter("testcase"):
        kinds = {child.tag for child in case}
        kind = next((k for k in ("failure", "error", "skipped") if k in kinds), None)
        counts[{"failure": "failed", "error": "errors", "skipped": "skipped", None: "passed"}[kind]] += 1
        if kind in ("failure", "error"):
            names.append(f"{case.get('classname')}::{case.get('name')}")
    return counts, names


def merge(folder: Path, codes: list[int]) -> dict[str, object]:
    """One summary of all processes. One that did not end well, or left no results, is an error of its own."""
    total = {"passed": 0, "failed": 0, "errors": 0, "skipped": 0}
    failures: list[str] = []
    for index, code in enumerate(codes):
        results = folder / f"{index}.xml"
        if results.exists():
            counts, names = count_results(results)
            total = {kind: total[kind] + counts[kind] for kind in total}
            failures += names
        if code not in ENDED_WELL or not results.exists():
            total["errors"] += 1
            failures.append(f"process {index} ended with {code}")
    return {**total, "failures": sorted(failures)}


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
    given = sys.argv[1:] if arguments is None else arguments
    cut = given.index("--") if "--" in given else len(given)
    args, for_pytest = parser.parse_args(given[:cut]), given[cut + 1 :]
    os.environ.setdefault("GPU_SEED", str(time.time_ns() % 2**31))
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "claims").mkdir()
        running = [start(index, args.processes, folder, for_pytest) for index in range(args.processes)]
        codes = [process.wait() for process in running]
        summary = merge(folder, codes)
        for index in range(args.processes):
            text = (folder / f"{index}.log").read_text(errors="replace")
            if codes[index] not in (0, 5):
                print(f"--- process {index}\n{text[-LOG_CHARACTERS:]}")
    summary |= {"seconds": round(time.monotonic() - began, 1), "processes": args.processes}
    summary |= {"seed": int(os.environ["GPU_SEED"]), "commit": args.commit, **describe_machine()}
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(summary, indent=2) + "\n")
    print(json.dumps(summary, indent=2))
    return 0 if summary["passed"] and not summary["failures"] else 1


if __name__ == "__main__":
    sys.exit(main())
