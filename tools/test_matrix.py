"""Run the tests with the oldest and the newest supported torch, each with the Triton that it requires.

    make test-matrix                                   # the quick half of the tests, both versions
    python tools/test_matrix.py --full                 # all tests that need no GPU
    python tools/test_matrix.py --torch 2.14.1         # another version; repeat for several
    python tools/test_matrix.py tests/kernels          # only these files or folders

Every version gets an environment of its own below build/matrix, which later runs use again. The other packages have
the versions of constraints.txt. Counts, versions and the names of failed tests are written to
tests/results/matrix.json, one entry for each pair of torch and Python. The entries of other pairs stay.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "tests" / "results" / "matrix.json"
OLDEST, NEWEST = "2.11.0", "2.15.0"
QUICK = "not slow and not group and not gpu and not cards"
FULL = "not gpu and not cards"
PACKAGES = ("torch", "triton", "numpy", "transformers")
VERSIONS = """
import json, platform, sys
from importlib.metadata import PackageNotFoundError, version
found = {"python": platform.python_version()}
for name in sys.argv[1:]:
    try:
        found[name] = version(name)
    except PackageNotFoundError:
        found[name] = None
print(json.dumps(found))
"""


def run(*command: str | Path) -> None:
    """Run a command from the root of the repository and show it. A failure ends this program."""
    print("+", *command, flush=True)
    subprocess.run(list(map(str, command)), cwd=ROOT, check=True)


def versions(python: Path) -> dict[str, str | None]:
    """The versions of Python and of the packages that matter here. None: not installed."""
    command = [str(python), "-c", VERSIONS, *PACKAGES]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def environment(folder: Path, torch: str, creator: str) -> Path:
    """The Python of an environment with this torch. It is made if it is not there."""
    python = folder / "bin" / "python"
    if not python.exists():
        run(creator, "-m", "venv", folder)
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    limits = folder / "constraints.txt"
    limits.write_text("\n".join([line for line in lines if not line.startswith("torch==")] + [f"torch=={torch}", ""]))
    pip = python, "-m", "pip", "install", "--disable-pip-version-check", "-c", limits
    run(*pip, "torch")
    run(*pip, "-e", ".[dev]")
    run(python, ROOT / "tools" / "triton_for_tests.py")
    return python


def counts(report: Path) -> dict[str, object]:
    """The numbers in a JUnit report, the names of failed tests, and why tests were skipped."""
    numbers, failed, reasons = Counter(passed=0, failed=0, skipped=0), [], Counter()
    for case in ElementTree.parse(report).iter("testcase"):
        if case.find("failure") is not None or case.find("error") is not None:
            numbers["failed"] += 1
            failed.append(f"{case.get('classname')}.{case.get('name')}")
        elif (skipped := case.find("skipped")) is not None:
            numbers["skipped"] += 1
            reasons[skipped.get("message", "")] += 1
        else:
            numbers["passed"] += 1
    return {**numbers, "failed_tests": sorted(failed), "skip_reasons": dict(sorted(reasons.items()))}


def test(python: Path, folder: Path, marker: str, paths: list[str], processes: int) -> dict[str, object]:
    """Run the tests and count them."""
    report = folder / "report.xml"
    report.unlink(missing_ok=True)
    start = time.monotonic()
    how = ["-q", "-m", marker, "-n", str(processes), f"--junitxml={report}"]
    command = [str(python), "-m", "pytest", *how, *paths]
    print("+", *command, flush=True)
    code = subprocess.run(command, cwd=ROOT, check=False).returncode
    seconds = round(time.monotonic() - start)
    if not report.exists():
        sys.exit(f"pytest wrote no report (exit code {code}).")
    return {"seconds": seconds, "complete": code in (0, 1), "exit_code": code, **counts(report)}


def commit() -> str:
    """The commit that was tested; "+" behind it if the source was changed since. "unknown" outside of a repository.

    The project may be a copy inside another repository, whose commit says nothing about it.
    """
    command = ["git", "rev-parse", "--show-toplevel"]
    top = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    if not top or Path(top).resolve() != ROOT:
        return "unknown"
    head = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    state = ["git", "status", "--porcelain", "--", "src", "tests", "pyproject.toml", ":!tests/results"]
    changed = subprocess.run(state, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    return head.stdout.strip() + ("+" if changed else "")


def save(entry: dict[str, object], results: Path = RESULTS, command: str = "python tools/test_matrix.py") -> None:
    """Put an entry into the results, in the place of the one for the same pair (and command, where it has one)."""

    def key(one: dict[str, object]) -> tuple[object, ...]:
        python = re.match(r"\d+\.\d+", str(one["python"]))
        return str(one["torch"]), python and python[0], one["system"], one["machine"], one.get("command", "")

    entries = json.loads(results.read_text())["runs"] if results.exists() else []
    entries = [one for one in entries if key(one) != key(entry)] + [entry]
    results.parent.mkdir(exist_ok=True)
    runs = sorted(entries, key=lambda one: [str(part) for part in key(one)])
    results.write_text(json.dumps({"command": command, "runs": runs}, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Run the tests with several versions of torch.")
    parser.add_argument("paths", nargs="*", help="files or folders of tests (default: all)")
    parser.add_argument("--torch", action="append", help=f"a version of torch (default: {OLDEST} and {NEWEST})")
    parser.add_argument("--full", action="store_true", help="all tests that need no GPU, not only the quick half")
    parser.add_argument("--python", default=sys.executable, help="the Python that the environments are made with")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "matrix", help="where the environments are")
    parser.add_argument("--processes", type=int, default=2, help="test processes side by side")
    options = parser.parse_args()
    marker, failed = FULL if options.full else QUICK, False
    shell = "import sys; print('%d.%d' % sys.version_info[:2])"
    short = subprocess.run([options.python, "-c", shell], capture_output=True, text=True, check=True).stdout.strip()
    for torch in options.torch or (OLDEST, NEWEST):
        folder = options.folder.resolve() / f"torch-{torch}-python-{short}"
        python, tested = environment(folder, torch, options.python), commit()
        result = test(python, folder, marker, options.paths, options.processes)
        where = {"system": platform.system(), "machine": platform.machine()}
        save({**versions(python), **where, "commit": tested, "tests": marker, "paths": options.paths, **result})
        failed = failed or result["exit_code"] != 0
        print(f"torch {torch}: {result['passed']} passed, {result['failed']} failed, {result['skipped']} skipped")
    sys.exit(int(failed))


if __name__ == "__main__":
    main()
