"""Two revisions of the library side by side in one process, so that their ratio can be trusted to a per cent.

    python -m benchmarks.revisions copy v0.1.0 build/old         # the package of a revision, renamed to `old_tilewise`
    python -m benchmarks.revisions run build/old gpu             # every case: old and new take turns
    python -m benchmarks.revisions run build/old cpu --note "before the change of the tile loop"

Two processes on one card differ by more than two revisions do. In one process both share the card's state, torch's
allocator and the host. On a CPU the times are processor time of one thread, so that other processes do not count.
Results: benchmarks/results/revisions-<device>.json.
"""

from __future__ import annotations

import argparse
import importlib
import io
import json
import re
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

import tilewise
from benchmarks.cases import Case, Inputs, cpu_suite, leaves_of, make_inputs, square, vocabulary
from benchmarks.measure import ROOT, Failure, Step, cuda_peak_bytes, time_in_turns
from benchmarks.run import COMMIT_HELP, commit_of

OLD = "old_tilewise"


def copy(revision: str, folder: Path) -> None:
    """Write the package of ``revision`` to ``folder``, with the name `old_tilewise` and operators of that name."""
    archive = subprocess.run(
        ["git", "archive", revision, "src/tilewise"], cwd=ROOT, check=True, capture_output=True
    ).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as members:
        for member in members.getmembers():
            if not member.isfile() or not member.name.endswith((".py", ".pyi")):
                continue
            source = members.extractfile(member)
            assert source is not None
            path = folder / member.name.replace("src/tilewise", OLD)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(renamed(source.read().decode()))
    (folder / "revision").write_text(
        subprocess.run(
            ["git", "rev-parse", "--short", revision], cwd=ROOT, check=True, capture_output=True, text=True
        ).stdout
    )


def renamed(source: str) -> str:
    """The source with imports, quoted module names and operators of `tilewise` changed to `old_tilewise`.

    >>> renamed('from tilewise.ops import x; torch.ops.tilewise.f; "tilewise::f"; "tilewise.ring"')
    'from old_tilewise.ops import x; torch.ops.old_tilewise.f; "old_tilewise::f"; "old_tilewise.ring"'
    """
    source = re.sub(r"\b(from|import) tilewise\b", rf"\1 {OLD}", source)
    source = re.sub(r"\bops\.tilewise\b", f"ops.{OLD}", source)
    return re.sub(r"([\"'])tilewise(::|\.|[\"'])", rf"\1{OLD}\2", source)


def loss(package: ModuleType, case: Case, x: Inputs, **options: Any) -> Tensor:
    """The loss of ``case``, computed by ``package``."""
    chosen = package.TileOptions(**options) if options else None
    if case.loss == "clip":
        return package.clip_loss(x["a"], x["b"], x["scale"], options=chosen)
    if case.loss == "siglip":
        return package.siglip_loss(x["a"], x["b"], x["scale"], x["bias"], options=chosen)
    if case.loss == "nt_xent":
        return package.nt_xent(x["a"], temperature=1 / x["scale"], options=chosen)
    if case.loss == "cross_entropy":
        return package.linear_cross_entropy(x["a"], x["b"], x["target"], options=chosen)
    return package.retrieval_ranks(x["a"], x["b"], options=chosen).double().mean()


def tokens(package: ModuleType, case: Case, x: Inputs) -> Tensor:
    """Log-probabilities and entropy, with a gradient for each token."""
    stats = package.linear_token_stats(x["a"], x["b"], x["target"], want=("log_prob", "entropy"))
    return (stats.log_prob * x["each"]).sum() + (stats.entropy * x["each"]).sum()


Call = Callable[[ModuleType, Case, Inputs], Tensor]


def gpu_cases() -> list[tuple[str, Case, Call]]:
    """The cases whose speed is promised."""

    def filtered(package: ModuleType, case: Case, x: Inputs) -> Tensor:
        return loss(package, case, x, filter_tolerance=1e-2)

    def two_passes(package: ModuleType, case: Case, x: Inputs) -> Tensor:
        return loss(package, case, x, gradients="backward")

    def within_rounding(package: ModuleType, case: Case, x: Inputs) -> Tensor:
        return loss(package, case, x, filter_tolerance="rounding")

    def mostly_ignored(package: ModuleType, case: Case, x: Inputs) -> Tensor:
        return package.linear_cross_entropy(x["a"], x["b"], x["few"])

    wide, deep = (8192, 2304, 256000, "bf16"), (8192, 4096, 128256, "bf16")
    return [
        *(
            (f"clip {n} x {d}", square("clip", n, d, "bf16"), loss)
            for n, d in ((8192, 512), (16384, 512), (32768, 512))
        ),
        *((f"clip {n} x 512, two passes", square("clip", n, 512, "bf16"), two_passes) for n in (2048, 8192)),
        *(
            (f"clip {n} x {d}", square("clip", n, d, "bf16"), loss)
            for n, d in ((65536, 512), (65536, 768), (65536, 640))
        ),
        ("siglip 65536 x 768", square("siglip", 65536, 768, "bf16"), loss),
        ("nt_xent 65536 x 256", square("nt_xent", 65536, 256, "bf16"), loss),
        ("retrieval 131072 x 512", square("retrieval", 131072, 512, "bf16"), loss),
        ("cross-entropy 8192 x 2304 x 256000", vocabulary(*wide), loss),
        ("cross-entropy 8192 x 4096 x 128256", vocabulary(*deep), loss),
        ("the same, peaked, tolerance 1e-2", vocabulary(*wide, scores="peaked"), filtered),
        ("the same, less peaked, rounding", vocabulary(*wide, scores="peaked", slope=1.5), within_rounding),
        ("the same, flat, tolerance 1e-2", vocabulary(*wide), filtered),
        ("the same, 90 % ignored", vocabulary(*wide), mostly_ignored),
        ("token statistics 8192 x 4096 x 128256", vocabulary(*deep), tokens),
    ]


def cpu_cases() -> list[tuple[str, Case, Call]]:
    """The cases of the CPU benchmarks."""
    return [(f"{case.loss} {case.rows} x {case.width} x {case.cols}", case, loss) for case in cpu_suite()]


def measure(packages: dict[str, ModuleType], name: str, case: Case, call: Call, device: torch.device) -> dict[str, Any]:
    """Milliseconds, memory and value of both packages, which take turns."""
    inputs = make_inputs(case, device)
    if case.loss == "cross_entropy":
        inputs["each"] = torch.randn(case.rows, device=device)
        keep = torch.rand(case.rows, device=device) < 0.1
        inputs["few"] = torch.where(keep, inputs["target"], -100)
    steps = {
        key: Step(lambda package=package: call(package, case, inputs), leaves_of(case, inputs))
        for key, package in packages.items()
    }
    short = case.rows * case.cols * case.width < 2**37
    repeats = 2000 if short else 24
    times = time_in_turns(steps, device, repeats=repeats, budget_s=5.0, least=12, clock=time.process_time)
    row: dict[str, Any] = {"case": name}
    for key, timing in times.items():
        if isinstance(timing, Failure):
            row[key] = timing.reason
            continue
        row[key] = {"ms": round(timing.median_ms, 4), "low": round(timing.low_ms, 4), "high": round(timing.high_ms, 4)}
        value = steps[key].value
        row[key]["value"] = None if value is None else value.item()
        if device.type == "cuda":
            row[key]["mib"] = round(cuda_peak_bytes(steps[key], device) / 2**20)
    if all(isinstance(row[key], dict) for key in packages):
        row["ratio"] = round(row["new"]["ms"] / row["old"]["ms"], 4)
    return row


def run(folder: Path, suite: str, note: str, only: str, commit: str | None = None) -> None:
    """Measure every case and write the results."""
    sys.path.insert(0, str(folder.resolve()))
    packages = {"old": importlib.import_module(OLD), "new": tilewise}
    device = torch.device("cuda" if suite == "gpu" else "cpu")
    if suite == "cpu":
        torch.set_num_threads(1)
    rows = []
    for name, case, call in gpu_cases() if suite == "gpu" else cpu_cases():
        if only in name:
            row = measure(packages, name, case, call, device)
            rows.append(row)
            print(json.dumps(row), flush=True)
    card = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    path = ROOT / "benchmarks" / "results" / f"revisions-{card.lower().replace(' ', '-')}.json"
    result = {
        "what": "two revisions of the library in one process, in shuffled turns; medians with 10th and 90th percentile",
        "command": f"python -m benchmarks.revisions run OLD {suite}" + (f" --only '{only}'" if only else ""),
        "clock": "device" if suite == "gpu" else "processor time of one thread",
        "card": card,
        "torch": torch.__version__,
        "old": (folder / "revision").read_text().strip(),
        "new": commit_of(commit),
        "note": note,
        "cases": rows,
    }
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"written: {path.relative_to(ROOT)}")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    copying = commands.add_parser("copy", help="write the package of a revision to a folder, renamed")
    copying.add_argument("revision")
    copying.add_argument("folder", type=Path)
    running = commands.add_parser("run", help="measure that package beside this one")
    running.add_argument("folder", type=Path)
    running.add_argument("suite", choices=("gpu", "cpu"))
    running.add_argument("--note", default="", help="kept in the results")
    running.add_argument("--commit", help=COMMIT_HELP)
    running.add_argument("--only", default="", help="measure only the cases whose names contain this text")
    given = parser.parse_args()
    if given.command == "copy":
        copy(given.revision, given.folder)
    else:
        run(given.folder, given.suite, given.note, given.only, given.commit)


if __name__ == "__main__":
    main()
