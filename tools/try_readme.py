"""Run the two commands of the README in a fresh clone with public packages only, and record how they end.

    python3.13 tools/try_readme.py
    python3.14 tools/try_readme.py --folder ../trial     # keep the clone and the logs there
    python3.13 tools/try_readme.py --only "make test" --note "on a busy machine"

Uncommitted changes are not in the clone. The environment in it is made with the Python that runs this program. Pip
reads no file of settings and no extra index; what else it needs (a certificate, for instance) goes into variables such
as PIP_CERT. Versions, times and counts of tests are written to tests/results/public_packages.json, one entry for each
Python, torch, platform and command. Other entries stay.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from test_matrix import ROOT, commit, counts, save, versions

RESULTS = ROOT / "tests" / "results" / "public_packages.json"
OTHER_PACKAGES = ("PIP_FIND_LINKS", "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PYTHONPATH", "VIRTUAL_ENV")


def commands() -> list[str]:
    """The commands in the README's section "Two commands"."""
    section = (ROOT / "README.md").read_text().split("\n## Two commands\n")[1].split("\n## ")[0]
    return re.findall(r"^make [a-z-]+", section, re.MULTILINE)


def run(command: str, clone: Path) -> dict[str, object]:
    """Run a command in the clone, with a log beside it. Tests are counted if there were any."""
    report, log = clone.parent / "report.xml", clone.parent / f"{command.replace(' ', '-')}.log"
    report.unlink(missing_ok=True)
    settings = {name: value for name, value in os.environ.items() if name not in OTHER_PACKAGES}
    settings |= {"PIP_CONFIG_FILE": os.devnull, "PYTHON": sys.executable}
    settings["PYTEST_ADDOPTS"] = f"{settings.get('PYTEST_ADDOPTS', '')} --junitxml={report}"
    print(f"+ {command} (log: {log})", flush=True)
    start = time.monotonic()
    with log.open("w") as file:
        done = subprocess.run(command.split(), cwd=clone, env=settings, stdout=file, stderr=file, check=False)
    result = {"command": command, "exit_code": done.returncode, "seconds": round(time.monotonic() - start)}
    return {**result, **(counts(report) if report.exists() else {})}


def main() -> None:
    known = commands()
    parser = argparse.ArgumentParser(description="Run the commands of the README in a fresh clone.")
    parser.add_argument("--only", choices=known, help=f"one command (default: {' and '.join(known)}, in one clone)")
    parser.add_argument(
        "--folder", type=Path, help="a new folder for the clone and the logs (default: a temporary one)"
    )
    parser.add_argument("--note", help="what a reader of the record must know, for instance other load on the machine")
    options = parser.parse_args()
    failed, note = False, {"note": options.note} if options.note else {}
    with tempfile.TemporaryDirectory(prefix="tilewise-readme-") as name:
        folder = (options.folder or Path(name)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        clone, tested = folder / "tilewise", commit()
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
        for command in [options.only] if options.only else known:
            result = run(command, clone)
            where = {"system": platform.system(), "machine": platform.machine(), "commit": tested}
            entry = {**versions(clone / ".venv" / "bin" / "python"), **where, **result, **note}
            save(entry, RESULTS, "python tools/try_readme.py")
            failed = failed or result["exit_code"] != 0
            print(", ".join(f"{key} {value}" for key, value in result.items() if not isinstance(value, (list, dict))))
    sys.exit(int(failed))


if __name__ == "__main__":
    main()
