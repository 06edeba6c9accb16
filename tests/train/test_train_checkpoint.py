import json
import os
import shutil

import pytest
import torch

from tilewise.errors import CheckpointError
from tilewise.train import checkpoint as module
from tilewise.train.checkpoint import (
    check_room,
    clear_leftovers,
    latest_checkpoint,
    list_checkpoints,
    open_checkpoint,
    prune,
    save_checkpoint,
    step_name,
)


def save(folder, step, value=1.0):
    tensors = {
        "model": {"w": torch.full((3, 4), value)},
        "optimizer": {"w/moment": torch.ones(2, dtype=torch.bfloat16)},
    }
    return save_checkpoint(folder, step, tensors, {"position": {"epoch": 2}})


def test_what_is_saved_comes_back(tmp_path):
    save(tmp_path, 7, 0.5)
    checkpoint, problems = latest_checkpoint(tmp_path)
    assert problems == []
    assert checkpoint.step == 7
    assert checkpoint.state["position"] == {"epoch": 2}
    assert torch.equal(checkpoint.tensors("model")["w"], torch.full((3, 4), 0.5))
    assert checkpoint.tensors("optimizer")["w/moment"].dtype == torch.bfloat16
    assert checkpoint.tensors("average") == {}
    assert sorted(p.suffix for p in checkpoint.path.iterdir()) == [".json", ".safetensors", ".safetensors"]


@pytest.mark.parametrize("stop_at", ["save_file", "write_atomically", "rename", "fsync"])
def test_an_interrupted_save_leaves_the_old_checkpoints_and_no_new_one(tmp_path, monkeypatch, stop_at):
    save(tmp_path, 1)

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    if stop_at == "save_file":
        monkeypatch.setattr("safetensors.torch.save_file", full)
    elif stop_at == "rename":
        monkeypatch.setattr(module.Path, "rename", full)
    elif stop_at == "fsync":
        monkeypatch.setattr(os, "fsync", full)
    else:
        monkeypatch.setattr(module, stop_at, full)
    with pytest.raises(CheckpointError, match=r"step 2.*No space left.*Earlier checkpoints are untouched"):
        save(tmp_path, 2)
    monkeypatch.undo()
    assert [p.name for p in tmp_path.iterdir()] == [step_name(1)]
    assert latest_checkpoint(tmp_path)[0].step == 1


@pytest.mark.parametrize("damage", ["flip", "cut", "remove", "state", "format"])
def test_a_damaged_checkpoint_is_noticed_and_the_one_before_is_taken(tmp_path, damage):
    save(tmp_path, 1)
    newest = save(tmp_path, 2)
    file = newest / "model.safetensors"
    data = file.read_bytes()
    if damage == "flip":
        file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    elif damage == "cut":
        file.write_bytes(data[:-4])
    elif damage == "remove":
        file.unlink()
    elif damage == "state":
        (newest / "state.json").write_text("{")
    else:
        state = json.loads((newest / "state.json").read_text())
        (newest / "state.json").write_text(json.dumps({**state, "format": 99}))
    with pytest.raises(CheckpointError):
        open_checkpoint(newest)
    checkpoint, problems = latest_checkpoint(tmp_path)
    assert checkpoint.step == 1
    assert len(problems) == 1
    shutil.rmtree(tmp_path / step_name(1))
    with pytest.raises(CheckpointError, match="no checkpoint"):
        latest_checkpoint(tmp_path)


def test_pruning_keeps_the_last_and_the_best(tmp_path):
    for step in (1, 2, 3, 4, 5):
        save(tmp_path, step)
    prune(tmp_path, 2, best_step=2, step=5)
    assert [p.name for p in list_checkpoints(tmp_path)] == [step_name(2), step_name(4), step_name(5)]


def test_pruning_does_not_count_a_damaged_checkpoint_ahead(tmp_path):
    for step in (2, 3, 5):
        save(tmp_path, step)
    (tmp_path / step_name(5) / "state.json").write_text("{")  # so the run went on from step 2, and is at 3
    prune(tmp_path, 1, best_step=None, step=3)
    checkpoint, _ = latest_checkpoint(tmp_path)
    assert checkpoint.step == 3


def test_leftovers_go(tmp_path):
    (tmp_path / ".writing-step-00000003-1").mkdir()
    (tmp_path / ".writing-metrics.jsonl-1").write_text("x")
    save(tmp_path, 1)
    clear_leftovers(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == [step_name(1)]
    assert latest_checkpoint(tmp_path / "none") == (None, [])


def test_an_unwritable_or_full_place_is_refused_before_training(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot write to the run's folder.*output\.folder"):
        check_room(tmp_path / "file" / "run", 1, 1)
    with pytest.raises(CheckpointError, match=r"do not fit.*MiB free"):
        check_room(tmp_path, 2**60, 3)
    check_room(tmp_path / "new", 10, 2)
    assert list((tmp_path / "new").iterdir()) == []


def test_nothing_is_pickled():
    source = "".join(p.read_text() for p in module.Path(module.__file__).parent.rglob("*.py"))
    for word in ("pickle", "torch.load", "torch.save"):
        assert f"import {word}" not in source
        assert f"{word}(" not in source
