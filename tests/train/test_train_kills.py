"""A run that dies inside a checkpoint write continues bitwise, at whatever moment it dies."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
from tests.train.small_icons import write_small_icons

from tilewise.train import loop
from tilewise.train.checkpoint import latest_checkpoint, step_name
from tilewise.train.config import load_config
from tilewise.train.loop import train

SMALL = [
    "model.width=32", "model.depth=0", "model.text_buckets=512", "model.embed_dim=16", "loop.batch_size=64",
    "loop.chunk_size=64", "loop.threads=1", "loop.device=cpu", "loop.steps=4", "optim.ema_decay=0.9",
    "output.checkpoint_every=1", "output.keep_last=1", "output.report=false", "output.tensorboard=false",
    "data.prefetch=0",
]  # fmt: skip
FILES = ("model.safetensors", "optimizer.safetensors", "average.safetensors")


class Killed(BaseException):
    """Like SIGKILL, it runs no cleanup: the code under test catches ``Exception`` only."""


class Disk:
    """Records the operations of a save on the disk, and dies before, within or after one of them."""

    def __init__(self, monkeypatch, deadly=-1, moment="", folder=None):
        self.done, self.deadly, self.moment, self.counting = [], deadly, moment, False
        self.folder, self.found = folder, []  # what is in this folder before and after each operation
        self._wrap(monkeypatch, safetensors.torch, "save_file", lambda tensors, file, *rest: half_a_file(file))
        for name in ("fsync", "rename", "replace"):
            self._wrap(monkeypatch, os, name)
        self._wrap(monkeypatch, shutil, "rmtree", lambda path, **rest: half_a_folder(Path(path)))

    def _wrap(self, monkeypatch, module, name, halfway=None):
        original = getattr(module, name)

        def operation(*args, **kwargs):
            if not self.counting:
                return original(*args, **kwargs)
            deadly = len(self.done) == self.deadly
            self.done.append(name)
            self._look()
            if deadly and self.moment == "before":
                raise Killed
            if deadly and self.moment == "within":
                halfway(*args, **kwargs)
                raise Killed
            result = original(*args, **kwargs)
            self._look()
            if deadly:
                raise Killed
            return result

        monkeypatch.setattr(module, name, operation)

    def _look(self):
        if self.folder is not None:
            paths = sorted(self.folder.rglob("*"))
            self.found.append(tuple((str(p), p.read_bytes() if p.is_file() else None) for p in paths))

    def moments(self):
        """(operation, moment): a death there leaves something else on the disk than those before it."""
        seen = set()
        for number, name in enumerate(self.done):
            if self.found[2 * number] not in seen:
                yield number, "before"
            if name in ("save_file", "rmtree"):
                yield number, "within"
            if self.found[2 * number + 1] not in {*seen, self.found[2 * number]}:
                yield number, "after"
            seen |= set(self.found[2 * number : 2 * number + 2])


def half_a_file(file):
    Path(file).write_bytes(b"\x40\0\0\0")


def half_a_folder(path):
    if path.is_dir():
        next(path.iterdir()).unlink()


def weights(path):
    return [(path / name).read_bytes() for name in FILES]


def save_on(disk, step):
    """`Trainer._save`, recorded by `disk` at one step."""
    original = loop.Trainer._save

    def save(self):
        disk.counting = self.step == step
        original(self)
        disk.counting = False

    return save


@pytest.mark.slow
def test_a_run_that_dies_at_any_operation_of_a_save_continues_bitwise(tmp_path, monkeypatch):
    """The save of step 3 also removes the checkpoint of step 2. The run dies in every state of the disk inside it."""
    icons = f"data.path={write_small_icons(tmp_path / 'icons.zip')}"

    def settings(name, *more):
        return load_config(None, [*SMALL, icons, f"output.folder={tmp_path / name}", *more])

    with monkeypatch.context() as patch:
        disk = Disk(patch, folder=tmp_path / "counted")
        patch.setattr(loop.Trainer, "_save", save_on(disk, 3))
        train(settings("counted"))
    assert {"save_file", "fsync", "rename", "rmtree"} == set(disk.done)
    train(settings("whole", "output.keep_last=9"))
    whole = tmp_path / "whole" / "checkpoints"
    with monkeypatch.context() as patch:  # a run that has done two steps, to start from
        patch.setattr(loop.Trainer, "_save", lambda self: die_after(self, 2))
        with pytest.raises(Killed):
            train(settings("start"))
    cases = list(disk.moments())
    assert {(disk.done[number], moment) for number, moment in cases} >= {
        ("save_file", "before"), ("save_file", "within"), ("save_file", "after"),
        ("rename", "after"), ("rmtree", "within"),
    }  # fmt: skip
    for number, moment in cases:
        name = f"{number}-{disk.done[number]}-{moment}"
        shutil.copytree(tmp_path / "start", tmp_path / name)
        kept = tmp_path / name / "checkpoints"
        with monkeypatch.context() as patch:
            patch.setattr(loop.Trainer, "_save", save_on(Disk(patch, number, moment), 3))
            with pytest.raises(Killed):
                train(settings(name))
        newest, problems = latest_checkpoint(kept)
        assert newest.step in (2, 3), name
        assert problems == [], name  # what has the name of a checkpoint is whole
        assert weights(newest.path) == weights(whole / newest.path.name), name
        assert train(settings(name)).finished
        assert weights(kept / step_name(4)) == weights(whole / step_name(4)), name
        assert not list(kept.glob(".writing-*")), name


def die_after(trainer, step):
    trainer.state.save(trainer.folder.checkpoints, trainer.config)
    if trainer.step == step:
        raise Killed


@pytest.mark.slow
def test_kills_inside_checkpoint_writes(tmp_path):
    """`python -m tests.train.kill_saves 30` does it thirty times; TILEWISE_KILLS sets the number for this test."""
    command = [sys.executable, "-m", "tests.train.kill_saves", os.environ.get("TILEWISE_KILLS", "2")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "all continued bitwise" in ended.stdout
