"""Run other packages' own tests of their losses with this package's losses in their place.

    make test-peers                                      # all peers; downloads their sources
    python tools/peers.py --peer lightly                 # one of them; repeat for several
    python tools/peers.py --sources FOLDER               # FOLDER/<peer> is a clone; nothing is downloaded
    python tools/peers.py --device cuda                  # tests that need a GPU run on it instead of on the CPU

An adapter (`tools/peer_adapters`) replaces the peer's loss before a test file imports it. A test file is otherwise
changed only by the text substitutions of its entry in `PEERS`, for instance "cuda" to "cpu". Counts are written to
tests/results/peers.json. Every failure needs a reason in `PEERS`; one without a reason makes this program fail.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from io import BytesIO
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "tests" / "results" / "peers.json"
ON_CPU = (
    ('device="cuda"', 'device="cpu"'),
    ("torch.cuda.is_available()", "True"),
    ("torch.cuda.manual_seed", "torch.manual_seed"),
)
# scikit-learn and what it needs; numpy is installed already.
SKLEARN = ("scikit-learn", "scipy", "joblib", "threadpoolctl", "tqdm", "cloudpickle", "narwhals")


@dataclass(frozen=True)
class Peer:
    """Where a peer's tests are, and how they are run."""

    name: str  # of the adapter and of the folder below --sources
    source: str
    commit: str
    tests: tuple[str, ...]
    content: tuple[str, ...] = ()  # files and folders that the tests need, beside themselves
    substitutions: tuple[tuple[str, str], ...] = ()
    conftest: str = ""  # replaces the peer's own, which may download models
    packages: tuple[str, ...] = ()
    reasons: dict[str, str] = field(default_factory=dict)  # pattern of a test's name -> why it fails
    left_out: dict[str, str] = field(default_factory=dict)  # tests of the same loss that are not run, and why


PEERS = [
    Peer(
        name="cut_cross_entropy",
        source="https://github.com/apple/ml-cross-entropy",
        commit="d42911f9b1a1f98289bb601c35c8151562603d74",
        tests=(
            "tests/test_cce_loss_forward.py",
            "tests/test_cce_loss_backward.py",
            "tests/test_cce_lse.py",
            "tests/test_compute_z_loss.py",
            "tests/test_vocab_parallel.py",
        ),
        content=("cut_cross_entropy",),
        substitutions=ON_CPU,
        left_out={"tests/test_cce_indexed_dot.py": "tests a kernel of the peer; no function here corresponds to it"},
    ),
    Peer(
        name="liger_kernel",
        source="https://github.com/linkedin/Liger-Kernel",
        commit="ead96b618e5c67bddc6a6e9bcb99bfe6b5ab661c",
        tests=("test/transformers/test_fused_linear_cross_entropy.py",),
        content=("test/__init__.py", "test/conftest.py", "test/utils.py", "test/transformers/test_cross_entropy.py"),
        left_out={
            "test/transformers/test_cross_entropy.py": "cross entropy of logits that are already stored",
            "test/transformers/test_fused_linear_scaled_cross_entropy.py": "no such loss here",
        },
    ),
    Peer(
        name="open_clip",
        source="https://github.com/mlfoundations/open_clip",
        commit="89fb801f1e6087880e951fc8354b8a2077b79c6d",
        tests=("tests/test_siglip_chunked_loss.py",),
        reasons={"True": "negative_only is private to OpenCLIP's exchange between ranks, and refused"},
        left_out={
            "tests/test_loss.py": "tests how the peer gathers features; here they are never gathered",
            "tests/test_factory_task.py": "tests which class the peer's factory returns",
        },
    ),
    Peer(
        name="lightly",
        source="https://github.com/lightly-ai/lightly",
        commit="e8d317fc5a87f4387a85a35e689869039ec249ee",
        tests=("tests/loss/test_ntx_ent_loss.py",),
        packages=("pytest-mock",),
        reasons={
            "neg_temp": "a temperature below 0 is refused",
            r"correlated_embedding\[(True|False)-0\.1-1-": (
                "the test's tolerance is 7e-7, and its scores of 10 are rounded by up to 5e-7 each in float32"
            ),
        },
        left_out={"tests/utils/test_dist__gather__losses.py": "gathers over real ranks; see tests/integrations here"},
    ),
    Peer(
        name="pytorch_metric_learning",
        source="https://github.com/KevinMusgrave/pytorch-metric-learning",
        commit="216a792c22b0154d3d3bf008a7317edc7d677e71",
        tests=(
            "tests/losses/test_ntxent_loss.py",
            "tests/losses/test_self_supervised_loss.py",
            "tests/losses/test_losses_without_labels.py",
        ),
        content=("src", "tests"),
        packages=SKLEARN,
        reasons={"LossesWithoutLabels": "pairs that a miner selects are refused"},
        left_out={
            "tests/losses/test_cross_batch_memory.py": "many losses; tests/integrations/test_drop_ins.py compares ours",
        },
    ),
    Peer(
        name="sentence_transformers",
        source="https://github.com/UKPLab/sentence-transformers",
        commit="85ec64559f4414aa536eca4bf53538291e0a333f",
        tests=("tests/losses/test_MatryoshkaLoss.py", "tests/test_cmnrl.py"),
        content=("sentence_transformers",),
        conftest=(
            "import pytest\n"
            "from tools.peer_adapters.sentence_transformers import small_model\n"
            'static_retrieval_mrl_en_v1_model = pytest.fixture(small_model, name="static_retrieval_mrl_en_v1_model")\n'
        ),
        substitutions=(('SentenceTransformer("distilbert-base-uncased")', "small_transformer()"),),
        packages=(*SKLEARN, "requests", "urllib3", "idna", "certifi", "charset-normalizer"),
        left_out={
            "AdaptiveLayerLoss": "not tested by the peer; see tests/integrations/test_sentence_transformers.py",
            "tests/test_trainer.py": "trains models that it downloads",
        },
    ),
]


def fetched(peer: Peer, sources: Path | None) -> Path:
    """A clone that has the commit; downloaded below build/peers if it is not there."""
    folder = (sources or ROOT / "build" / "peers" / "sources") / peer.name
    if not folder.exists():
        if sources is not None:
            sys.exit(f"{folder} does not exist. Clone {peer.source} there, or leave out --sources")
        subprocess.run(
            ["git", "clone", "--quiet", "--filter=blob:none", "--no-checkout", peer.source, folder], check=True
        )
    return folder


def unpack(peer: Peer, clone: Path, into: Path, device: str) -> None:
    """The files at the commit, with the adapter's import and the substitutions in the test files."""
    command = ["git", "-C", str(clone), "archive", peer.commit, *peer.tests, *peer.content]
    data = subprocess.run(command, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=BytesIO(data)) as files:
        files.extractall(into, filter="data")
    if peer.conftest:
        (into / "conftest.py").write_text(peer.conftest)
    for path in (into / name for name in peer.tests):
        text = path.read_text()
        for old, new in peer.substitutions if device == "cpu" or peer.substitutions is not ON_CPU else ():
            text = text.replace(old, new)
        first = re.search(r"^(import|from (?!__future__)) ?", text, flags=re.MULTILINE)
        assert first is not None, path
        adapter = f"from tools.peer_adapters.{peer.name} import *  # noqa: F403 - this package in place of the peer\n"
        path.write_text(text[: first.start()] + adapter + text[first.start() :])


def run_tests(peer: Peer, folder: Path, site: Path | None, device: str, timeout: float) -> Path:
    """Run pytest in the unpacked folder; returns its report."""
    report = folder / "report.xml"
    paths = [folder, ROOT / "src", ROOT, *([site] if site else [])]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "TORCHDYNAMO_DISABLE": "1",  # peers compile their references, which needs a C++ compiler and takes long
        "TEST_DEVICE": device,  # read by PyTorch Metric Learning
        "TEST_DTYPES": "float32,float64",  # likewise; its test of float16 wants a loss in float16, and ours is float32
        "HF_HUB_OFFLINE": "1",
    }
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-o",
        "addopts=",
        "--rootdir",
        str(folder),
    ]
    # As a plugin, the adapter is also there for the peer's conftest. Processes that a test starts import the test file.
    command += ["-p", f"tools.peer_adapters.{peer.name}", "--tb=short", f"--junitxml={report}", *peer.tests]
    with (folder / "log.txt").open("w") as log:
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


def counted(peer: Peer, report: Path, device: str) -> tuple[dict[str, object], list[str]]:
    """The entry for the results file, and the failures without a reason."""
    total: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    skipped: Counter[str] = Counter()
    unknown = []
    for name, outcome, message in outcomes(report):
        total[outcome] += 1
        if outcome == "skipped":
            skipped[message] += 1
        if outcome == "failed":
            reason = next((why for pattern, why in peer.reasons.items() if re.search(pattern, name)), None)
            if reason is None:
                unknown.append(f"{peer.name}: {name}: {message}")
            reasons[reason or "no reason known"] += 1
    entry = {
        "peer": peer.name,
        "source": peer.source,
        "commit": peer.commit,
        "tests": list(peer.tests),
        "device": device,
        "torch": version("torch"),
        "python": platform.python_version(),
        "ran": total["passed"] + total["failed"],
        "passed": total["passed"],
        "failed": dict(reasons),
        "skipped": dict(skipped),
        "not run": peer.left_out,
    }
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
    site = arguments.site or installed(chosen)
    entries, unknown = [], []
    for peer in chosen:
        clone = fetched(peer, arguments.sources)
        with tempfile.TemporaryDirectory() as place:
            unpack(peer, clone, Path(place), arguments.device)
            report = run_tests(peer, Path(place), site.resolve(), arguments.device, arguments.timeout)
            entry, without_reason = counted(peer, report, arguments.device)
        print(f"{peer.name}: {entry['passed']} of {entry['ran']} passed; failed: {entry['failed']}", flush=True)
        entries.append(entry)
        unknown += without_reason
        save(entries)
    print("\n".join(unknown))
    return int(bool(unknown))


if __name__ == "__main__":
    sys.exit(main())
