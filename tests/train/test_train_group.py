"""Several ranks have the loss curve of one process with the same global batch."""

import gc
import itertools
import os
import signal
import subprocess
import sys

import pytest
import torch.distributed as dist
from tests.processes import rank_environments, run_commands
from tests.train.small_icons import write_small_icons

from tilewise.train import cli, update
from tilewise.train.config import load_config
from tilewise.train.loop import train
from tilewise.train.run_folder import RunFolder

SETTINGS = [
    "model.width=32", "model.depth=1", "model.text_buckets=512", "model.embed_dim=16",
    "loop.batch_size=62", "loop.chunk_size=12", "loop.steps=5", "loop.threads=1", "loop.device=cpu",
    "optim.lr=3e-3", "optim.ema_decay=0.9", "output.checkpoint_every=2", "output.evaluate_every=0",
    "output.report=false", "output.tensorboard=false",
]  # fmt: skip


def train_alone(folder, overrides):
    assert train(load_config(None, [*SETTINGS, f"output.folder={folder}", *overrides])).finished
    return [line for line in RunFolder(folder).read_metrics() if line["kind"] == "train"]


def rank_commands(world, folder, overrides):
    """Environment (that of torchrun) and arguments of each rank."""
    (folder / "start.toml").write_text("")
    arguments = ["train", str(folder / "start.toml"), *SETTINGS, *overrides]
    return [(environment, arguments) for environment in rank_environments(world)]


def train_ranks(world, folder, overrides):
    """Return the training lines of a run on several ranks."""
    folder.mkdir(exist_ok=True)
    commands = rank_commands(world, folder, [f"output.folder={folder}", *overrides])
    for returncode, output in run_commands(cli.main, folder, commands):
        assert returncode == 0, output
    return [line for line in RunFolder(folder).read_metrics() if line["kind"] == "train"]


def start_ranks(world, folder, overrides):
    """Start Python for each rank, and return exit codes and outputs. How Python shuts down is part of this."""
    program = [sys.executable, "-m", "tilewise.train.cli"]
    ranks = [
        subprocess.Popen(
            [*program, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env={**os.environ, **environment},
        )
        for environment, arguments in rank_commands(world, folder, overrides)
    ]  # fmt: skip
    outputs = [rank.communicate(timeout=300)[0] for rank in ranks]
    return [(rank.returncode, output) for rank, output in zip(ranks, outputs, strict=True)]


@pytest.mark.group
@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        ["loss.name=tilewise", "loss.mask_same_id=true"],
        ["loss.name=dense"],
        ["loss.name=local"],
        ["loss.name=tilewise", "loss.kind=siglip"],
    ],
    ids=lambda value: " ".join(value),
)
def test_ranks_agree_with_one_process(tmp_path, overrides):
    settings = [*overrides, f"data.path={write_small_icons(tmp_path / 'small.zip')}"]
    alone = train_alone(tmp_path / "one", settings)
    for world in (2, 3) if "tilewise" in overrides[0] else (2,):
        curve = train_ranks(world, tmp_path / f"w{world}", settings)
        assert [line["rows"] for line in curve] == [62] * 5
        for got, want in zip(curve, alone, strict=True):
            assert got["loss"] == pytest.approx(want["loss"], rel=2e-5)
            assert got["grad_norm"] == pytest.approx(want["grad_norm"], rel=1e-3)
            assert got["scale"] == pytest.approx(want["scale"], rel=1e-5)


@pytest.mark.group
@pytest.mark.slow
def test_a_run_on_two_ranks_continues_on_one(tmp_path):
    settings = [f"data.path={write_small_icons(tmp_path / 'small.zip')}"]
    whole = train_alone(tmp_path / "one", settings)
    train_ranks(2, tmp_path / "two", settings)
    checkpoints = RunFolder(tmp_path / "two").checkpoints
    import shutil

    shutil.rmtree(checkpoints / "step-00000005")
    again = train_alone(tmp_path / "two", settings)
    assert [line["step"] for line in again] == [1, 2, 3, 4, 5]
    assert again[-1]["loss"] == pytest.approx(whole[-1]["loss"], rel=2e-5)


@pytest.mark.group
@pytest.mark.slow
def test_one_rank_speaks_and_no_rank_ends_in_a_traceback(tmp_path):
    icons = f"data.path={write_small_icons(tmp_path / 'small.zip')}"
    (_, first), (_, second) = start_ranks(2, tmp_path, [icons, f"output.folder={tmp_path / 'run'}"])
    assert "done: 5 steps" in first
    assert "Warning" not in first
    assert second == ""
    (tmp_path / "file").write_text("")
    commands = rank_commands(2, tmp_path, [icons, f"output.folder={tmp_path / 'file' / 'run'}"])
    ends = run_commands(cli.main, tmp_path, commands)
    assert [code for code, _ in ends] == [1, 1]
    assert "cannot write to the run's folder" in ends[0][1]
    assert "the first rank cannot use output.folder" in ends[1][1]
    assert not any("Traceback" in output for _, output in ends)


def die_in_step_four():
    """Rank 1 is killed in its fourth step, after its gradients: rank 0 waits for it in a collective."""
    clip, steps = update.clip_gradients, itertools.count(1)

    def deadly(parameters, limit):
        if next(steps) == 4 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        return clip(parameters, limit)

    update.clip_gradients = deadly
    cli.main()


@pytest.mark.group
def test_a_killed_rank_is_one_sentence_and_the_next_start_has_the_same_result(tmp_path):
    """As under ``torchrun --max-restarts``, which ends the other ranks and starts all of them again."""
    settings = [f"data.path={write_small_icons(tmp_path / 'small.zip')}", f"output.folder={tmp_path / 'two'}"]
    whole = train_alone(tmp_path / "one", settings[:1])
    (_, output), (killed, _) = run_commands(die_in_step_four, tmp_path, rank_commands(2, tmp_path, settings))
    assert killed == -signal.SIGKILL
    assert "rank 0 stops, because another rank has ended" in " ".join(output.split())
    assert "The same command continues from the last checkpoint" in " ".join(output.split())
    assert "Traceback" not in output
    for code, output in run_commands(cli.main, tmp_path, rank_commands(2, tmp_path, settings)):
        assert code == 0, output
    lines = [line for line in RunFolder(tmp_path / "two").read_metrics() if line["kind"] == "train"]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert lines[-1]["loss"] == pytest.approx(whole[-1]["loss"], rel=2e-5)


def count_what_holds_the_group():
    """Train as the arguments say, and print how many references to the group are left."""
    groups, leave = [], dist.destroy_process_group
    dist.destroy_process_group = lambda: (groups.append(dist.group.WORLD), leave())
    gc.disable()
    train(load_config(None, sys.argv[3:]))
    print("held", sys.getrefcount(groups[0]) - 2)


@pytest.mark.group
def test_nothing_holds_the_group_of_a_run_that_has_ended(tmp_path):
    """The threads of a process group sometimes abort the process while Python shuts down."""
    icons = f"data.path={write_small_icons(tmp_path / 'small.zip')}"
    commands = rank_commands(2, tmp_path, [icons, f"output.folder={tmp_path / 'run'}"])
    for _, output in run_commands(count_what_holds_the_group, tmp_path, commands):
        assert output.splitlines()[-1] == "held 0", output
