"""Runs of the trainer over several ranks: sharded towers, another number of ranks in mid-run, and killed ranks.

    python -m tests.train.rank_runs [--device cpu] [--kills 20] [--seed 0] [--launcher torchrun] [--only kills]

Every run must end with the weights of one process. In a killed run rank 1 is killed with SIGKILL at a random moment:

    --launcher torchrun   torchrun with --max-restarts 1 starts both ranks again
    --launcher none       the other rank must end by itself, with one sentence; then the same command continues

It must take at most 30 seconds until the survivor has ended; with torchrun, until both ranks run again, 30 seconds and
their start. On one card all ranks use the first device. The command prints a line for each check and ends with 0 only
if all of them passed. With --lines FILE it also writes them as JSON.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from tests.compare import relative_error
from tests.processes import TORCHRUN, free_port, rank_environments
from tests.train.small_icons import write_small_icons

from tilewise.errors import TilewiseError
from tilewise.train.checkpoint import step_name
from tilewise.train.config import load_config
from tilewise.train.loop import train
from tilewise.train.run_folder import RunFolder

STEPS = 6
SETTINGS = [
    "model.width=32", "model.depth=1", "model.text_buckets=512", "model.embed_dim=16", "loop.batch_size=62",
    "loop.chunk_size=12", f"loop.steps={STEPS}", "loop.threads=1", "optim.lr=3e-3", "optim.ema_decay=0.9",
    "output.checkpoint_every=1", "output.keep_last=9", "output.evaluate_every=0", "output.report=false",
    "output.tensorboard=false",
]  # fmt: skip
BOUND = 1e-4  # of weights: sums over ranks have another order, and Adam divides small gradients by their size
ENDS_WITHIN_S = 30.0
LIMIT_S = 170.0  # of a run
MOMENT = "TILEWISE_TEST_KILL_AFTER"  # seconds; of rank 1 and the first start
SENTENCE = "stops, because another rank has ended or cannot be reached"


def rank_main() -> None:
    """One rank: `tilewise` with the first card, and its end if the environment has one. typer may be missing."""
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    after, first = os.environ.pop(MOMENT, None), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    if after is not None and first and os.environ["RANK"] == "1":
        timer = threading.Timer(float(after), end_here)
        timer.daemon = True
        timer.start()
    if not first and os.environ["RANK"] == "0":
        note_time("again")
    if importlib.util.find_spec("typer") is not None:
        from tilewise.train import cli

        cli.main()
    try:
        train(load_config(None, sys.argv[3:]))
    except TilewiseError as error:
        sys.exit(str(error))


def end_here() -> None:
    note_time("killed")
    os.kill(os.getpid(), signal.SIGKILL)


def note_time(what: str) -> None:
    Path(f"{sys.argv[-1].partition('=')[2]}.{what}").write_text(str(time.time()))


class Runs:
    """Runs in folders beside each other, and the weights of one process."""

    def __init__(self, base: Path, device: str) -> None:
        self.base, self.device = base, device
        self.icons = write_small_icons(base / "icons.zip")
        started = time.monotonic()
        self.run("alone", 1)
        self.seconds = time.monotonic() - started
        self.want = self.weights("alone")

    def arguments(self, name: str, *more: str) -> list[str]:
        (self.base / "start.toml").write_text("")
        settings = [*SETTINGS, f"loop.device={self.device}", f"data.path={self.icons}", *more]
        return ["train", str(self.base / "start.toml"), *settings, f"output.folder={self.base / name}"]

    def start(self, name: str, world: int, *more: str, kill_after: float | None = None) -> list[subprocess.Popen[str]]:
        """The processes of the ranks."""
        command = [sys.executable, "-m", "tests.train.rank_runs", "--rank", *self.arguments(name, *more)]
        kill = {} if kill_after is None else {MOMENT: str(kill_after)}
        return [self._popen(command, rank | kill) for rank in rank_environments(world)]

    def launch(self, name: str, kill_after: float) -> subprocess.Popen[str]:
        """The same with torchrun and two ranks, which it starts again once."""
        how = ["--nproc-per-node=2", "--max-restarts=1", f"--master-port={free_port()}", "--monitor-interval=0.5"]
        command = [*TORCHRUN, *how, "-m", "tests.train.rank_runs", "--rank", *self.arguments(name)]
        return self._popen(command, {MOMENT: str(kill_after), "OMP_NUM_THREADS": "1"})

    def _popen(self, command: list[str], more: dict[str, str]) -> subprocess.Popen[str]:
        environment = os.environ | more
        return subprocess.Popen(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def run(self, name: str, world: int, *more: str) -> None:
        """A whole run; all ranks must end well."""
        ranks = self.start(name, world, *more)
        outputs = [end_of(rank) for rank in ranks]
        assert not any(rank.returncode for rank in ranks), "\n".join(outputs)[-2000:]

    def weights(self, name: str, step: int = STEPS) -> dict[str, Any]:
        return load_file(self.base / name / "checkpoints" / step_name(step) / "model.safetensors")

    def error(self, name: str) -> float:
        """The largest error of a tensor of weights, and all steps must be there once."""
        steps = [line["step"] for line in RunFolder(self.base / name).read_metrics() if line["kind"] == "train"]
        assert steps == list(range(1, STEPS + 1)), steps
        got = self.weights(name)
        return max(relative_error(got[key], want) for key, want in self.want.items() if want.any())

    def cut(self, name: str, step: int) -> None:
        """Remove all checkpoints after this step, so that the run continues there."""
        for later in range(step + 1, STEPS + 1):
            shutil.rmtree(self.base / name / "checkpoints" / step_name(later))


def end_of(process: subprocess.Popen[str]) -> str:
    """The output of a process that has ended; one that does not is killed with all that it has started."""
    try:
        return process.communicate(timeout=LIMIT_S)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise AssertionError(f"did not end in {LIMIT_S:g} s: {process.communicate()[0][-1000:]}") from None


def check_sharded(runs: Runs) -> str:
    """Two ranks with sharded towers."""
    runs.run("sharded", 2, "loop.shard=true")
    return within(runs, "sharded")


def check_other_numbers(runs: Runs) -> str:
    """Four ranks go on as three, and these as two."""
    for world, until in ((4, 2), (3, 4), (2, STEPS)):
        runs.run("fewer", world)
        runs.cut("fewer", until)
    return within(runs, "fewer")


def within(runs: Runs, name: str) -> str:
    error = runs.error(name)
    assert error <= BOUND, f"weights are off by {error:.1e}"
    return f"weights {error:.1e}"


def check_kill_with_torchrun(runs: Runs, name: str, after: float) -> dict[str, Any]:
    """Kill rank 1 after so many seconds; torchrun starts both again, from the last checkpoint or the beginning."""
    launcher = runs.launch(name, after)
    output = end_of(launcher)
    assert launcher.returncode == 0, output[-2000:]
    times = [Path(f"{runs.base / name}.{what}") for what in ("killed", "again")]
    found: dict[str, Any] = {"killed": times[0].exists()}
    if found["killed"]:
        killed, again = (float(path.read_text()) for path in times)
        found["again_s"] = round(again - killed, 2)
        assert found["again_s"] <= ENDS_WITHIN_S + runs.seconds, f"torchrun took {found['again_s']} s to start again"
    return found | {"error": runs.error(name)}


def check_kill_alone(runs: Runs, name: str, after: float) -> dict[str, Any]:
    """Kill rank 1 so many seconds after the first step; rank 0 ends by itself, and the same command goes on."""
    other, killed = runs.start(name, 2)
    metrics = runs.base / name / "metrics.jsonl"
    while killed.poll() is None and not (metrics.exists() and '"train"' in metrics.read_text()):
        time.sleep(0.005)
    time.sleep(after)
    killed.kill()
    at = time.monotonic()
    output = " ".join(end_of(other).split())
    took = time.monotonic() - at
    killed.communicate()
    found: dict[str, Any] = {"killed": killed.returncode == -signal.SIGKILL, "survivor_s": round(took, 2)}
    found["step"] = len([line for line in RunFolder(runs.base / name).read_metrics() if line["kind"] == "train"])
    assert took <= ENDS_WITHIN_S, f"the other rank took {took:.0f} s"
    assert "Traceback" not in output, output
    assert other.returncode == 0 or SENTENCE in output, output
    found["ended_with"] = other.returncode
    runs.run(name, 2)
    return found | {"error": runs.error(name)}


def check_kill(runs: Runs, rng: random.Random, launcher: str) -> dict[str, Any]:
    """Kill a run at a random moment; one that ended before is repeated."""
    for attempt in range(5):
        name = f"killed-{rng.random()}"
        if launcher == "torchrun":
            after = rng.uniform(0.2, 0.9) * runs.seconds
            found = check_kill_with_torchrun(runs, name, after)
        else:
            after = rng.uniform(0.0, 0.06) * runs.seconds
            found = check_kill_alone(runs, name, after)
        assert found["error"] <= BOUND, found
        shutil.rmtree(runs.base / name)
        if found["killed"]:
            return found | {"after_s": round(after, 3), "launcher": launcher, "ended_before": attempt}
    raise AssertionError("every run ended before it was killed")


def summary(found: dict[str, Any]) -> str:
    """One killed run in words."""
    how = f"ended within {found['survivor_s']} s" if "survivor_s" in found else f"runs again after {found['again_s']} s"
    return f"killed after {found['after_s']} s, weights {found['error']:.1e}, the other rank {how}"


def main() -> int:
    if sys.argv[1:2] == ["--rank"]:
        sys.argv[1:] = sys.argv[2:]
        rank_main()
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--launcher", choices=["torchrun", "none"], default="torchrun")
    parser.add_argument("--lines", type=Path, help="a file that gets a line of JSON for each check")
    parser.add_argument("--only", nargs="+", choices=["sharded", "numbers", "kills"])
    args = parser.parse_args()
    failed, rng = 0, random.Random(args.seed)
    with tempfile.TemporaryDirectory() as folder:
        runs = Runs(Path(folder), args.device)
        checks: dict[str, dict[str, Callable[[Runs], Any]]] = {
            "sharded": {"sharded towers": check_sharded},
            "numbers": {"4, 3, 2 ranks": check_other_numbers},
            "kills": {
                f"kill {k} of seed {args.seed}": lambda runs: check_kill(runs, rng, args.launcher)
                for k in range(1, args.kills + 1)
            },
        }
        chosen = [one for kind in args.only or checks for one in checks[kind].items()]
        for name, check in chosen:
            began = time.monotonic()
            said: dict[str, Any] = {"job": name}
            try:
                found = check(runs)
                said |= {"passed": True, "worst": found} if isinstance(found, str) else found
                said |= {} if isinstance(found, str) else {"passed": True, "worst": summary(found)}
            except AssertionError as error:
                said |= {"passed": False, "worst": str(error)[-400:]}
                failed += 1
            said["seconds"] = round(time.monotonic() - began, 1)
            print(f"{name}: {said['worst']}, {said['seconds']:g} s", flush=True)
            if args.lines is not None:
                with args.lines.open("a") as out:
                    out.write(json.dumps(said) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
