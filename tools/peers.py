"""Run other packages' own tests of their losses with this package's losses in their place.

    make test-peers                                      # all peers; downloads their sources
    python tools/peers.py --peer lightly                 # one of them; repeat for several
    python tools/peers.py --sources FOLDER               # FOLDER/<peer> is a clone; nothing is downloaded
    python tools/peers.py --device cuda                  # tests that need a GPU run on it instead of on the CPU
    python tools/peers.py --peer transformers            # every model family of the installed transformers

An adapter (`tools/peer_adapters`) replaces the peer's loss before a test file imports it. A test file is otherwise
changed only by the text substitutions of its entry in `tools/peer_list.py`, for instance "cuda" to "cpu". Counts are
written to tests/results/peers.json. Every failure needs a reason in that list; one without a reason makes this program
fail. Failures are repeated with the peer's own losses where they are at hand.

Where a peer has no test of its own, one of `tools/peer_tests` runs its code with both losses and compares them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import version
from io import BytesIO
from pathlib import Path
from xml.etree import ElementTree

from peer_list import PEERS, Peer
from test_matrix import commit

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "tests" / "results" / "peers.json"


def fetched(peer: Peer, sources: Path | None) -> Path:
    """A clone that has the commit; downloaded below build/peers if it is not there."""
    folder = (sources or ROOT / "build" / "peers" / "sources") / peer.place
    if not folder.exists():
        if sources is not None:
            sys.exit(f"{folder} does not exist. Clone {peer.source} there, or leave out --sources")
        subprocess.run(
            ["git", "clone", "--quiet", "--filter=blob:none", "--no-checkout", peer.source, folder], check=True
        )
    return folder


def unpack(peer: Peer, sources: Path | None, into: Path, device: str) -> None:
    """The files at the commit, with the adapter's import and the substitutions in the test files."""
    if peer.ours:
        shutil.copy(ROOT / peer.ours, into)
    if not peer.commit:
        return
    clone = fetched(peer, sources)
    names = sorted({test.split("::")[0] for test in peer.tests})
    command = ["git", "-C", str(clone), "archive", peer.commit, *names, *peer.content]
    data = subprocess.run(command, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=BytesIO(data)) as files:
        files.extractall(into, filter="data")
    for path in (into / name for name in names):
        text = path.read_text()
        for old, new in peer.substitutions + (peer.on_cpu if device == "cpu" else ()):
            text = text.replace(old, new)
        first = re.search(r"^(import|from (?!__future__)) ?", text, flags=re.MULTILINE)
        assert first is not None, path
        adapter = f"from tools.peer_adapters.{peer.place} import *  # noqa: F403 - this package in place of the peer\n"
        path.write_text(text[: first.start()] + adapter + text[first.start() :])


def run_tests(peer: Peer, folder: Path, site: Path | None, device: str, timeout: float, own: bool = False) -> Path:
    """Run pytest in the unpacked folder; returns its report. ``own``: what failed before, with the peer's losses."""
    report = folder / ("own.xml" if own else "report.xml")
    # An installed peer runs with what is installed: transformers would find the timm that OpenCLIP needs.
    paths = [folder, ROOT / "src", ROOT, *([site] if site and peer.commit else [])]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "TORCHDYNAMO_DISABLE": "1",  # peers compile their references, which needs a C++ compiler and takes long
        "TEST_DEVICE": device,  # read by PyTorch Metric Learning
        "TEST_DTYPES": "float32,float64",  # likewise; its test of float16 wants a loss in float16, and ours is float32
        "HF_HUB_OFFLINE": "1",
        "PEERS_OWN": str(int(own)),
    }
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-o",
        "addopts=",
        *(["--last-failed", "--last-failed-no-failures=none"] if own else []),
        "--rootdir",
        str(folder),
    ]
    if not peer.ours:
        # As a plugin, the adapter is also there for the peer's conftest. Processes that a test starts import the file.
        command += ["-p", f"tools.peer_adapters.{peer.place}"]
    command += [
        "--tb=short",
        f"--junitxml={report}",
        "-k",
        peer.select,
        *([Path(peer.ours).name] if peer.ours else peer.tests),
    ]
    print(f"{peer.name}: running; progress in {folder / 'log.txt'}", flush=True)
    with (folder / "log.txt").open("a") as log:
        subprocess.run(command, cwd=folder, env=environment, timeout=timeout, check=False, stdout=log, stderr=log)
    if not report.exists():
        sys.exit(f"{peer.name}: pytest wrote no report\n{(folder / 'log.txt').read_text()[-3000:]}")
    return report


def outcomes(report: Path) -> Iterator[tuple[str, str, str]]:
    """(name, passed | failed | skipped, message) of each test."""
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('classname', '').split('.')[-1]}::{case.get('name')}"
        bad = next((child for child in case if child.tag in ("failure", "error")), None)
        if bad is not None:
            yield name, "failed", (bad.get("message") or "").splitlines()[0][:300] if bad.get("message") else ""
        else:
            skipped = next((child for child in case if child.tag == "skipped"), None)
            yield (
                name,
                "passed" if skipped is None else "skipped",
                "" if skipped is None else skipped.get("message", ""),
            )


def explained(patterns: dict[str, str], text: str) -> str | None:
    """The first entry whose pattern occurs in the text."""
    return next((why for pattern, why in patterns.items() if re.search(pattern, text)), None)


def counted(peer: Peer, report: Path, own: set[str], device: str) -> tuple[dict[str, object], list[str]]:
    """The entry for the results file, and the failures without a reason. ``own``: failures with the peer's losses."""
    total: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    skipped: Counter[str] = Counter()
    unknown, passed = [], []
    for name, outcome, message in outcomes(report):
        needs = explained(peer.not_run, message) if outcome == "failed" else None
        outcome = "skipped" if needs else outcome
        total[outcome] += 1
        if outcome == "passed":
            passed.append(name.partition("[")[2].removesuffix("]"))
        if outcome == "skipped":
            skipped[needs or message] += 1
        if outcome == "failed":
            reason = explained(peer.reasons, f"{name}: {message}")
            if reason is None and name in own:
                reason = "fails with the peer's own losses too"
            if reason is None:
                unknown.append(f"{peer.name}: {name}: {message}")
            reasons[reason or "no reason known"] += 1
    entry = {
        "peer": peer.name,
        "source": peer.source,
        "commit": peer.commit or f"{peer.name} {version(peer.name)}, installed",
        "tests": [peer.ours] if peer.ours else list(peer.tests),
        "selected": peer.select,
        "changed": dict(peer.substitutions + (peer.on_cpu if device == "cpu" else ())),
        "device": device,
        "tilewise": commit(),
        "torch": version("torch"),
        "python": platform.python_version(),
        "ran": total["passed"] + total["failed"],
        "passed": total["passed"],
        "failed": dict(reasons),
        "skipped": dict(skipped),
        "not run": peer.left_out,
    }
    if peer.ours:
        entry["passed cases"] = passed
    return entry, unknown


def save(entries: list[dict[str, object]]) -> None:
    """Replace the entries of these peers and devices; the others stay."""
    known = json.loads(RESULTS.read_text())["peers"] if RESULTS.exists() else []
    new = {(entry["peer"], entry["device"]): entry for entry in entries}
    kept = {(entry["peer"], entry["device"]): entry for entry in known}
    merged = sorted((kept | new).values(), key=lambda entry: (entry["peer"], entry["device"]))
    RESULTS.write_text(json.dumps({"command": "python tools/peers.py", "peers": merged}, indent=1) + "\n")


def installed(peers: list[Peer]) -> Path:
    """A folder with the packages that the peers' tests import."""
    site = ROOT / "build" / "peers" / "site"
    packages = sorted({package for peer in peers for package in peer.packages})
    if packages:
        subprocess.run(
            [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--upgrade", "--target", site, *packages],
            check=True,
        )
    return site


def main() -> int:
    """Run the peers' tests, write the counts, and return 1 if a failure has no reason."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", action="append", choices=[peer.name for peer in PEERS], help="only this one; repeat")
    parser.add_argument("--sources", type=Path, help="a folder with a clone of each peer; nothing is downloaded")
    parser.add_argument("--site", type=Path, help="a folder with the packages that the tests import, instead of pip")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds for one peer")
    arguments = parser.parse_args()
    chosen = [peer for peer in PEERS if not arguments.peer or peer.name in arguments.peer]
    if arguments.device != "cpu":
        chosen = [peer for peer in chosen if not peer.ours]  # they run on the CPU
    site = arguments.site or installed(chosen)
    entries, unknown = [], []
    for peer in chosen:
        with tempfile.TemporaryDirectory() as place:
            unpack(peer, arguments.sources, Path(place), arguments.device)
            report = run_tests(peer, Path(place), site.resolve(), arguments.device, arguments.timeout)
            own = set()
            if peer.has_own and any(outcome == "failed" for _, outcome, _ in outcomes(report)):
                again = run_tests(peer, Path(place), site.resolve(), arguments.device, arguments.timeout, own=True)
                own = {name for name, outcome, _ in outcomes(again) if outcome == "failed"}
            entry, without_reason = counted(peer, report, own, arguments.device)
        print(f"{peer.name}: {entry['passed']} of {entry['ran']} passed; failed: {entry['failed']}", flush=True)
        entries.append(entry)
        unknown += without_reason
        save(entries)
    print("\n".join(unknown))
    return int(bool(unknown))


if __name__ == "__main__":
    sys.exit(main())
