"""Sharded towers: two ranks have the curve and the weights of one process, and their checkpoints are those of one."""

import os
import shutil

import pytest
from safetensors.torch import load_file
from tests.compare import relative_error
from tests.processes import free_port, run_commands
from tests.train.small_icons import write_small_icons

from tilewise.errors import ConfigError
from tilewise.train.checkpoint import open_checkpoint
from tilewise.train.config import load_config
from tilewise.train.loop import train
from tilewise.train.run_folder import RunFolder

SETTINGS = [
    "model.width=32", "model.depth=2", "model.text_buckets=513", "model.embed_dim=15",
    "loop.batch_size=61", "loop.chunk_size=15", "loop.steps=4", "loop.threads=1", "loop.device=cpu",
    "optim.lr=3e-3", "optim.ema_decay=0.9", "optim.clip_norm=0.05", "output.checkpoint_every=2",
    "output.evaluate_every=2", "output.keep_last=9", "output.report=false", "output.tensorboard=false",
]  # fmt: skip
RUNS = ("whole", "alone")
FILES = ("model", "optimizer", "average")


def run(folder, *more):
    assert train(load_config(None, [*SETTINGS, f"output.folder={folder}", *more])).finished


def lines(folder, kind):
    return [line for line in RunFolder(folder).read_metrics() if line["kind"] == kind]


def tensors(folder, name, step=4):
    return load_file(folder / "checkpoints" / f"step-{step:08d}" / f"{name}.safetensors")


def ranks_of_two():
    """A rank: a whole run; one that continues after its second step; one that continues a run of one process."""
    base, icons = os.environ["RUNS"], os.environ["ICONS"]
    ports = iter(os.environ["PORTS"].split())

    def sharded(name, *more):
        os.environ["MASTER_PORT"] = next(ports)
        run(f"{base}/{name}", icons, "loop.shard=true", *more)

    sharded("whole")
    if os.environ["RANK"] == "0":
        for name in ("again", "one"):
            shutil.copytree(f"{base}/{'whole' if name == 'again' else 'alone'}", f"{base}/{name}")
            shutil.rmtree(f"{base}/{name}/checkpoints/step-00000004")
    sharded("again")
    sharded("one")
    sharded("bf16", "loop.precision=bf16")


@pytest.mark.group
def test_sharded_runs(tmp_path):
    icons = f"data.path={write_small_icons(tmp_path / 'small.zip')}"
    run(tmp_path / "alone", icons)
    run(tmp_path / "alone16", icons, "loop.precision=bf16")
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "RUNS": str(tmp_path), "ICONS": icons}
    common["PORTS"] = " ".join(str(free_port()) for _ in range(4))
    commands = [(common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, []) for rank in range(2)]
    for code, output in run_commands(ranks_of_two, tmp_path, commands):
        assert code == 0, output
    for got, want in zip(lines(tmp_path / "whole", "train"), lines(tmp_path / "alone", "train"), strict=True):
        for name in ("loss", "grad_norm", "scale"):
            assert got[name] == pytest.approx(want[name], rel=2e-5)
        assert got["grad_norm"] > 0.05  # so that the norm over all shards decides about every step
    metrics = [[line["t2i_r10"] for line in lines(tmp_path / name, "eval")] for name in RUNS]
    assert metrics[0] == pytest.approx(metrics[1], abs=0.02)
    for name in FILES:
        want = tensors(tmp_path / "alone", name)
        for folder in ("whole", "one"):
            got = tensors(tmp_path / folder, name)
            assert {key: value.shape for key, value in got.items()} == {key: value.shape for key, value in want.items()}
            for key in want:
                assert relative_error(got[key], want[key]) < 2e-5 or (want[key] == got[key]).all(), (folder, key)
        again, whole = tensors(tmp_path / "again", name), tensors(tmp_path / "whole", name)
        assert all((again[key] == whole[key]).all() for key in whole)  # bitwise, with as many ranks
    # Each rank has half of the weights, gradients and optimizer state.
    memory = [open_checkpoint(tmp_path / name / "checkpoints" / "step-00000004").state["memory"] for name in RUNS]
    weights = 16 * sum(value.numel() for value in tensors(tmp_path / "alone", "model").values())
    assert memory[1]["backbone"] - memory[0]["backbone"] > 0.45 * weights
    # A run of two ranks continues in one process.
    shutil.rmtree(tmp_path / "again" / "checkpoints" / "step-00000004")
    run(tmp_path / "again", icons)
    got, want = tensors(tmp_path / "again", "model"), tensors(tmp_path / "alone", "model")
    assert all(relative_error(got[key], want[key]) < 2e-5 for key in want)
    # Low precision: the same casts as without shards, so the distance to float32 is the same.
    exact = lines(tmp_path / "alone", "train")[-1]["loss"]
    ours, dense = (abs(lines(tmp_path / name, "train")[-1]["loss"] - exact) for name in ("bf16", "alone16"))
    assert 0 < ours <= 1.5 * dense + 1e-3


@pytest.mark.parametrize("setting", ["optim.name=adafactor", "loop.precision=fp16"])
def test_settings_that_need_whole_weights_are_refused(setting):
    with pytest.raises(
        ConfigError, match=r"loop.shard=true needs optim.name='adamw' and no loop.precision='fp16', got"
    ):
        load_config(None, ["loop.shard=true", setting])
