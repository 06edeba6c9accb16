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
    ("skipif(not torch.cuda.is_available()", "skipif(False"),
    ("torch.bfloat16 and not torch.cuda.is_available()", "False"),
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
    tests: tuple[str, ...]  # files, or file::class
    content: tuple[str, ...] = ()  # files and folders that the tests need, beside themselves
    substitutions: tuple[tuple[str, str], ...] = ()
    on_cpu: tuple[tuple[str, str], ...] = ()  # further substitutions
    packages: tuple[str, ...] = ()
    has_own: bool = False  # its own losses are there too: failures are repeated with them
    not_run: dict[str, str] = field(default_factory=dict)  # pattern of a message -> what the test needs
    reasons: dict[str, str] = field(default_factory=dict)  # pattern of "name: message" -> why a test fails
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
        on_cpu=ON_CPU,
        # The implementation has no meaning here: each would repeat the same call.
        substitutions=(
            ('["cce", "torch_compile"]', '["cce"]'),
            ('["cce", "torch_compile", "cce_exact"]', '["cce"]'),
            ('["torch_compile", "cce_exact"]', '["cce_exact"]'),
        ),
        left_out={"tests/test_cce_indexed_dot.py": "tests a kernel of the peer; no function here corresponds to it"},
    ),
    Peer(
        name="liger_kernel",
        source="https://github.com/linkedin/Liger-Kernel",
        commit="ead96b618e5c67bddc6a6e9bcb99bfe6b5ab661c",
        tests=(
            "test/transformers/test_fused_linear_cross_entropy.py",
            "test/transformers/test_fused_linear_jsd.py",
            "test/chunked_loss/test_jsd_loss.py",
        ),
        content=(
            *("test/__init__.py", "test/conftest.py", "test/utils.py", "test/chunked_loss/__init__.py"),
            *("test/transformers/test_cross_entropy.py", "test/transformers/test_jsd.py"),
        ),
        on_cpu=(("(8, 128, 1024, 4096)", "(2, 64, 256, 1024)"),),  # bfloat16 takes minutes on a CPU
        left_out={
            "test/transformers/test_cross_entropy.py": "cross entropy of logits that are already stored",
            "test/transformers/test_fused_linear_scaled_cross_entropy.py": "no such loss here",
            "test/transformers/test_jsd.py, test_kl_div.py": "divergences of logits that are already stored",
            "test/chunked_loss, the others": "preference losses: recipes on token statistics here; see TRL's tests",
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
            "DistillClipLoss": "no test of its values; tests of the task around it use a dummy; see tests/integrations",
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
        source="https://github.com/huggingface/sentence-transformers",
        commit="cad211983f36ce458e9b3360f3e11b29fc54cbd8",
        tests=tuple(
            f"tests/sentence_transformer/losses/test_{name}.py"
            for name in (
                *("gist_embed", "cached_gist_embed", "cmnrl", "gradcache"),
                *("merged_forward", "matryoshka", "adaptive_layer"),
            )
        ),
        content=(
            *("sentence_transformers", "tests/__init__.py", "tests/conftest.py", "tests/utils.py"),
            *("tests/sentence_transformer/losses/__init__.py", "tests/sentence_transformer/losses/utils.py"),
        ),
        packages=(*SKLEARN, "requests", "urllib3", "idna", "certifi", "charset-normalizer"),
        has_own=True,
        reasons={
            "_gather_rank1_|positive_mask_protects|relative_margin_negative": (
                "sets private attributes of the peer's class and reads the stored scores; see tests/integrations here"
            ),
            "embed_minibatch": "replaces a private method of the peer's cache; see tests/cache here",
            "MatryoshkaLoss does not work": "MatryoshkaLoss around a cached loss is refused",
            "mini_batch_num_tokens|non_positive_budget": "mini_batch_num_tokens is refused",
            "hardness_mode": "hardness_mode is refused",
            "under_autocast": "wants a bfloat16 loss, and ours is float32",
            "static_embedding_behind": "refused as well, with another message",
            "stay_assignable": "reads `temperature`, which is 1 / scale here, and a module as similarity is refused",
        },
        left_out={"tests/sentence_transformer/test_trainer.py": "trains models that it downloads"},
    ),
    # Tests of a later TRL are not in the copy that was at hand; those of July 2026 run with TRL 1.16.
    Peer(
        name="trl",
        source="https://github.com/huggingface/trl",
        commit="f2cd57710ae345ea6428ae95363267fcf38a3dc8",
        tests=(
            "tests/test_utils.py::TestChunkedLogProbFunction",
            *(f"tests/test_{kind}_trainer.py" for kind in ("sft", "dpo", "kto", "grpo", "rloo")),
            "tests/experimental/test_distillation_trainer.py",
        ),
        content=(
            *("scripts", "pyproject.toml", "tests/__init__.py", "tests/conftest.py", "tests/data"),
            *("tests/testing_utils.py", "tests/testing_constants.py", "tests/experimental/__init__.py"),
        ),
        packages=("pytest-datadir",),
        has_own=True,
        not_run={
            "would be downloaded|couldn't connect|LocalEntryNotFound|is not a local folder|offline mode": (
                "needs a model or data set from the hub, most of them with images"
            ),
        },
        reasons={
            "backward_bfloat16": "the test's reference rounds logits to bfloat16; ours is closer to float64",
            "reduction_methods": "divergences of single classes are not computed",
        },
        left_out={"tests/test_utils.py::TestPatchChunkedLMHead": "needs a GPU"},
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
        adapter = f"from tools.peer_adapters.{peer.name} import *  # noqa: F403 - this package in place of the peer\n"
        path.write_text(text[: first.start()] + adapter + text[first.start() :])


def run_tests(peer: Peer, folder: Path, site: Path | None, device: str, timeout: float, own: bool = False) -> Path:
    """Run pytest in the unpacked folder; returns its report. ``own``: what failed before, with the peer's losses."""
    report = folder / ("own.xml" if own else "report.xml")
    paths = [folder, ROOT / "src", ROOT, *([site] if site else [])]
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
    # As a plugin, the adapter is also there for the peer's conftest. Processes that a test starts import the test file.
    command += ["-p", f"tools.peer_adapters.{peer.name}", "--tb=short", f"--junitxml={report}", *peer.tests]
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
    unknown = []
    for name, outcome, message in outcomes(report):
        needs = explained(peer.not_run, message) if outcome == "failed" else None
        outcome = "skipped" if needs else outcome
        total[outcome] += 1
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
        "commit": peer.commit,
        "tests": list(peer.tests),
        "changed": dict(peer.substitutions + (peer.on_cpu if device == "cpu" else ())),
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
