"""Build the wheel and the sdist, check them, and try the wheel in an empty environment.

    make dist
    python tools/check_release.py loop.steps=4     # a shorter demo; any settings of `tilewise demo`

The trial takes the wheel alone, outside of the repository: it installs the train extra, measures what `import tilewise`
adds to `import torch`, and runs `tilewise demo`. Any failure ends the program with a message. Sizes and times are
written to tests/results/release.json.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
import venv
import zipfile
from pathlib import Path
from typing import Any

from test_matrix import commit

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
RESULTS = ROOT / "tests" / "results" / "release.json"
LONGEST_IMPORT_S = 0.3
IMPORT = """
import json, time, torch
start, used = time.perf_counter(), time.process_time()
import tilewise
print(json.dumps({"wall_s": time.perf_counter() - start, "cpu_s": time.process_time() - used,
                  "version": tilewise.__version__, "file": tilewise.__file__}))
"""


def run(*command: str | Path, cwd: Path = ROOT) -> None:
    """Run a command and show it. A failure ends this program."""
    print("+", *command, flush=True)
    subprocess.run(list(map(str, command)), cwd=cwd, env=clean(), check=True)


def clean() -> dict[str, str]:
    """The environment without what could lead Python back to the repository."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}


def build() -> tuple[Path, Path]:
    """The wheel and the sdist, in dist. The wheel is built from the sdist, so the sdist is complete."""
    shutil.rmtree(DIST, ignore_errors=True)
    run(sys.executable, "-m", "build", "--outdir", DIST)
    run(sys.executable, "-m", "twine", "check", "--strict", *sorted(DIST.iterdir()))
    (wheel,), (sdist,) = DIST.glob("*.whl"), DIST.glob("*.tar.gz")
    return wheel, sdist


def check_contents(wheel: Path) -> None:
    """The wheel holds every file of the package, and nothing beside it."""
    with zipfile.ZipFile(wheel) as archive:
        inside = {name for name in archive.namelist() if ".dist-info/" not in name}
    source = ROOT / "src"
    wanted = {path.relative_to(source).as_posix() for path in (source / "tilewise").rglob("*") if path.is_file()}
    wanted = {name for name in wanted if "__pycache__" not in name}
    if inside != wanted:
        sys.exit(f"The wheel and src differ: {sorted(inside ^ wanted)}")


def try_wheel(wheel: Path, version: str, settings: list[str]) -> dict[str, object]:
    """Install the wheel into an empty environment and use it there. Returns what was measured."""
    with tempfile.TemporaryDirectory(prefix="tilewise-release-") as name:
        folder = Path(name)
        venv.create(folder / "venv", with_pip=True)
        python, empty = folder / "venv" / "bin" / "python", folder / "empty"
        empty.mkdir()
        constraints = "-c", ROOT / "constraints.txt"
        run(python, "-m", "pip", "install", "--disable-pip-version-check", *constraints, f"{wheel}[train]", cwd=empty)
        found = [measure_import(python, empty) for _ in range(5)]
        best = min(found, key=lambda one: one["cpu_s"])
        print(f"import tilewise after torch: {best['wall_s']:.3f} s, {best['cpu_s']:.3f} s of the processor")
        if best["version"] != version or not Path(best["file"]).is_relative_to(folder):
            sys.exit(f"Wanted version {version} from {folder}, got {best['version']} from {best['file']}.")
        if best["cpu_s"] > LONGEST_IMPORT_S:  # the processor's time does not depend on what else runs
            sys.exit(f"import tilewise takes longer than {LONGEST_IMPORT_S} s.")
        start = time.monotonic()
        run(folder / "venv" / "bin" / "tilewise", "demo", *settings, cwd=empty)
        return {
            "import_wall_s": round(best["wall_s"], 3),
            "import_cpu_s": round(best["cpu_s"], 3),
            "demo": " ".join(["tilewise demo", *settings]),
            "demo_s": round(time.monotonic() - start),
        }


def measure_import(python: Path, cwd: Path) -> dict[str, Any]:
    """What `import tilewise` costs in a new process that has torch already."""
    done = subprocess.run([python, "-c", IMPORT], cwd=cwd, env=clean(), capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def main() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    wheel, sdist = build()
    check_contents(wheel)
    found: dict[str, object] = {"version": version, "system": f"{platform.system()} {platform.machine()}"}
    found |= {"python": platform.python_version(), "commit": commit()} | try_wheel(wheel, version, sys.argv[1:])
    for kind, path in (("wheel_mb", wheel), ("sdist_mb", sdist)):
        found[kind] = round(path.stat().st_size / 1e6, 2)
        print(f"{path.relative_to(ROOT)}: {found[kind]} MB")
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
