"""Kill a run with SIGKILL inside its checkpoint writes, and compare it with a run that was never killed.

    python -m tests.train.kill_saves [KILLS] [SEED]

Each kill comes at a random moment while a checkpoint is being written. After each one, the newest whole checkpoint must
be bitwise that of the other run at the same step; at the end, all metrics must be the same as well. The command
prints its counts.
"""

import multiprocessing
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

from tests.train.small_icons import write_small_icons

from tilewise.train.checkpoint import latest_checkpoint, step_name
from tilewise.train.config import RunConfig, load_config
from tilewise.train.loop import train
from tilewise.train.run_folder import RunFolder

FILES = ("model.safetensors", "optimizer.safetensors", "average.safetensors")
TIMES = ("seconds", "data_seconds", "pairs_per_second", "memory_bytes")


def settings(icons: Path, folder: Path, steps: int, keep: int) -> RunConfig:
    return load_config(None, [
        "model.width=32", "model.depth=0", "model.text_buckets=512", "model.embed_dim=16", "loop.batch_size=64",
        "loop.chunk_size=64", "loop.threads=1", "loop.device=cpu", f"loop.steps={steps}", "optim.ema_decay=0.9",
        "output.checkpoint_every=1", f"output.keep_last={keep}", "output.report=false", "output.tensorboard=false",
        f"data.path={icons}", f"output.folder={folder}",
    ])  # fmt: skip


def in_child(work: Callable[..., object], *args: object) -> BaseProcess:
    """Call `work` in a process of its own. This process never runs torch, so a fork is safe, except on macOS."""
    child = multiprocessing.get_context("spawn" if sys.platform == "darwin" else "fork").Process(target=work, args=args)
    child.start()
    return child


def ended_well(child: BaseProcess) -> bool:
    child.join()
    return child.exitcode == 0


def is_writing(checkpoints: Path) -> bool:
    return any(name.startswith(".writing-") for name in os.listdir(checkpoints)) if checkpoints.is_dir() else False


def kill_in_a_save(config: RunConfig, rng: random.Random) -> bool:
    """Start the run and kill it inside a checkpoint write. Return whether the kill came inside one."""
    checkpoints = Path(config.output.folder) / "checkpoints"
    child = in_child(train, config)
    after, delay = time.monotonic() + rng.uniform(0.0, 0.2), rng.uniform(0.0, 0.01)
    started = False
    while True:
        if not child.is_alive():
            return False
        if not started:  # leftovers of the kill before are cleared when the run takes its folder
            started = not is_writing(checkpoints)
            after = time.monotonic() + rng.uniform(0.0, 0.2) if started else after
        elif time.monotonic() > after and is_writing(checkpoints):
            time.sleep(delay)
            child.kill()
            child.join()
            return is_writing(checkpoints)
        time.sleep(0.0005)


def bitwise(one: Path, other: Path) -> bool:
    return all((one / name).read_bytes() == (other / name).read_bytes() for name in FILES)


def lines(folder: Path) -> list[dict[str, object]]:
    return [{k: v for k, v in line.items() if k not in TIMES} for line in RunFolder(folder).read_metrics()]


def check(kills: int, seed: int, folder: Path) -> dict[str, int]:
    """Return the counts; anything that is not bitwise the same raises ``AssertionError``."""
    rng = random.Random(seed)
    steps = 4 * kills + 8
    icons = folder / "icons.zip"
    assert ended_well(in_child(write_small_icons, icons))
    whole, cut = settings(icons, folder / "whole", steps, steps), settings(icons, folder / "cut", steps, 2)
    assert ended_well(in_child(train, whole))
    inside = outside = 0
    while inside < kills:
        if kill_in_a_save(cut, rng):
            inside += 1
        else:
            outside += 1
        newest, _ = latest_checkpoint(folder / "cut" / "checkpoints")
        if newest is not None:
            assert bitwise(newest.path, folder / "whole" / "checkpoints" / newest.path.name), newest.path.name
            assert newest.step < steps, "the run ended before it was killed often enough"
    assert ended_well(in_child(train, cut))
    last = Path("checkpoints") / step_name(steps)
    assert bitwise(folder / "cut" / last, folder / "whole" / last)
    assert lines(folder / "cut") == lines(folder / "whole")
    return {"kills inside a save": inside, "kills between saves": outside, "steps": steps}


def main() -> None:
    kills, seed = (int(text) for text in (*sys.argv[1:], *("30", "0")[len(sys.argv) - 1 :]))
    folder = Path(tempfile.mkdtemp())
    start = time.monotonic()
    try:
        print(check(kills, seed, folder))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"all continued bitwise, {time.monotonic() - start:.0f} s, seed {seed}")


if __name__ == "__main__":
    main()
