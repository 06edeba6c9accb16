"""Whether the packages of this repository can be installed on every supported system and Python, without being there.

    pip install uv
    python tools/check_platforms.py

For each system, Python and use, uv looks for versions that fit together, among public packages, with the
limits of constraints.txt, and only those that are already built for that system. Nothing is downloaded but their
descriptions. Results: tests/results/platforms.json.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "tests" / "results" / "platforms.json"
SYSTEMS = {
    "Linux x86_64": "x86_64-manylinux_2_28",
    "Linux aarch64": "aarch64-manylinux_2_28",
    "macOS 14, Apple chips": "aarch64-apple-darwin",
}
PYTHONS = ("3.11.9", "3.12", "3.13", "3.14")
USES = {"make demo": "train", "make test": "dev", "make docs": "docs", "make dist": "release"}
SHOWN = ("torch", "triton", "numpy", "transformers")


def chosen(system: str, python: str, extra: str) -> tuple[dict[str, str], str]:
    """The versions of all packages, and what uv says if there are none."""
    command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-config", "--only-binary", ":all:"]
    command += ["--python-platform", system, "--python-version", python, "--extra", extra]
    command += ["--constraints", "constraints.txt", "--no-annotate", "--no-header", "pyproject.toml"]
    # uv takes macOS 13 unless told otherwise; torch needs 14.
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"MACOSX_DEPLOYMENT_TARGET": "14.0"}, capture_output=True, text=True
    )
    lines = [line.split(";")[0].strip() for line in done.stdout.splitlines()]
    found = dict(line.split("==") for line in lines if "==" in line) if done.returncode == 0 else {}
    return found, done.stderr.strip()


def main() -> None:
    """Try all of them and write the results."""
    rows, failed = [], 0
    for name, system in SYSTEMS.items():
        for python in PYTHONS:
            for use, extra in USES.items():
                found, said = chosen(system, python, extra)
                row = {"system": name, "python": python, "use": use, "packages": len(found)}
                row |= {package: found[package] for package in SHOWN if package in found}
                if not found:
                    row["why_not"], failed = said, failed + 1
                rows.append(row)
                print(json.dumps(row), flush=True)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    report = {"command": "python tools/check_platforms.py", "commit": commit.stdout.strip(), "failed": failed}
    lines = ",\n  ".join(json.dumps(row) for row in rows)
    RESULTS.write_text(json.dumps(report, indent=1)[:-2] + f',\n "runs": [\n  {lines}\n ]\n}}\n')
    print(f"{len(rows) - failed} of {len(rows)} can be installed; wrote {RESULTS.relative_to(ROOT)}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
