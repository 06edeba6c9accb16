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
    step_of,
)
from tilewise.train.saved_state import state_checksum
from tilewise.train.writing import write_atomically

STATE = {
    "position": {"epoch": 2, "window": 0, "offset": 5}, "skips": {"counts": {"no caption": 3}, "once": ["a.tar"]},
    "skipped": 3, "best": {"step": 1.0, "value": 0.5}, "metrics": {"t2i_r10": 0.5}, "scaler": {}, "memory": {},
    "plan": [[0, 9, "plan"]], "pairs": 40, "config": {"loop": {"steps": 9}},
}  # fmt: skip


def save(folder, step, value=1.0):
    tensors = {
        "model": {"w": torch.full((3, 4), value)},
        "optimizer": {"w/moment": torch.ones(2, dtype=torch.bfloat16)},
    }
    return save_checkpoint(folder, step, tensors, STATE)


def test_what_is_saved_comes_back(tmp_path):
    save(tmp_path, 7, 0.5)
    checkpoint, problems = latest_checkpoint(tmp_path)
    assert problems == []
    assert checkpoint.step == 7
    assert {name: checkpoint.state[name] for name in STATE} == STATE
    assert torch.equal(checkpoint.tensors("model")["w"], torch.full((3, 4), 0.5))
    assert checkpoint.tensors("optimizer")["w/moment"].dtype == torch.bfloat16
    assert checkpoint.tensors("average") == {}
    assert sorted(p.suffix for p in checkpoint.path.iterdir()) == [".json", ".safetensors", ".safetensors"]


@pytest.mark.parametrize("stop_at", ["save_file", "write_text", "rename", "fsync"])
def test_an_interrupted_save_leaves_the_old_checkpoints_and_no_new_one(tmp_path, monkeypatch, stop_at):
    save(tmp_path, 1)

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    if stop_at == "save_file":
        monkeypatch.setattr("safetensors.torch.save_file", full)
    elif stop_at in ("rename", "write_text"):
        monkeypatch.setattr(module.Path, stop_at, full)
    else:
        monkeypatch.setattr(os, "fsync", full)
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


def rewrite(path, change, checksum=True):
    """Change the state of a checkpoint. With `checksum`, the checksum is updated as well."""
    file = path / "state.json"
    state = json.loads(file.read_text())
    change(state)
    if checksum and "checksum" in state:
        state["checksum"] = state_checksum(state)
    file.write_text(json.dumps(state))


def flips(text):
    """Yield all texts that differ from `text` in a single bit."""
    for place in range(len(text)):
        for bit in range(8):
            yield text[:place] + bytes([text[place] ^ 1 << bit]) + text[place + 1 :]


def test_every_flipped_bit_of_a_state_is_noticed_or_harmless(tmp_path, monkeypatch):
    """Harmless: a flip in white space, or one that JSON reads as the same content. No file is written for each flip."""
    newest = save(tmp_path, 9)
    good = (newest / "state.json").read_bytes()
    want, noticed = json.loads(good), 0
    for bad in flips(good):
        monkeypatch.setattr(module, "read_regular", lambda path, limit, bad=bad: bad)
        try:
            found = open_checkpoint(newest).state
        except CheckpointError:
            noticed += 1
        else:
            assert found == want, bad
    assert noticed > 0.7 * 8 * len(good)


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state.update(step=8),
        lambda state: state["position"].update(offset=4),
        lambda state: state.update(checksum=state["checksum"] ^ 1),
        lambda state: state.pop("checksum"),
        lambda state: state.update(format=1),
    ],
)
def test_a_changed_state_is_named_and_the_checkpoint_before_is_taken(tmp_path, change):
    save(tmp_path, 3)
    rewrite(save(tmp_path, 9), change, checksum=False)
    checkpoint, problems = latest_checkpoint(tmp_path)
    assert checkpoint.step == 3
    assert len(problems) == 1
    assert f"{step_name(9)}/state.json is damaged: " in problems[0]


def test_the_step_of_a_state_is_that_of_its_folder(tmp_path):
    rewrite(save(tmp_path, 9), lambda state: state.update(step=8))
    with pytest.raises(CheckpointError, match="state of step 8, and its folder is that of step 9"):
        open_checkpoint(tmp_path / step_name(9))


DAMAGE = {
    "files is a list": lambda state: state.update(files=[]),
    "files outside": lambda state: state.update(files={"../model.safetensors": {"bytes": 1, "crc32": 1}}),
    "files without sums": lambda state: state.update(files={"model.safetensors": 3}),
    "no step": lambda state: state.pop("step"),
    "no config": lambda state: state.pop("config"),
    "config is a list": lambda state: state.update(config=[1]),
    "step is text": lambda state: state.update(step="x"),
    "step is true": lambda state: state.update(step=True),
    "step is endless": lambda state: state.update(step=float("inf")),
    "best is a list": lambda state: state.update(best=[]),
    "best without a value": lambda state: state.update(best={"step": 3}),
    "best is endless": lambda state: state.update(best={"step": float("inf"), "value": 1}),
    "position is negative": lambda state: state["position"].update(offset=-1),
    "position is a list": lambda state: state.update(position=[0, 0, 0]),
    "skips are text": lambda state: state.update(skips="many"),
    "counts are text": lambda state: state.update(skips={"counts": {"no caption": "3"}, "once": []}),
    "memory is incomplete": lambda state: state.update(memory={"data": 3}),
    "metrics are text": lambda state: state.update(metrics={"t2i_r10": "high"}),
    "plan is empty": lambda state: state.update(plan=[]),
    "plan is short": lambda state: state.update(plan=[[0, 1]]),
    "format is unknown": lambda state: state.update(format=99),
}


@pytest.mark.parametrize("form", [1, 2])
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_state_with_wrong_content_is_named_and_the_checkpoint_before_is_taken(tmp_path, damage, form):
    """Format 1 has no checksum. In format 2 the checksum matches the wrong content."""
    save(tmp_path, 3)
    newest = save(tmp_path, 9)
    if form == 1:
        rewrite(newest, old_format)
    rewrite(newest, DAMAGE[damage])
    checkpoint, problems = latest_checkpoint(tmp_path)
    assert checkpoint.step == 3
    assert len(problems) == 1
    assert "state.json is damaged: it" in problems[0]


@pytest.mark.parametrize("text", [b"", b"[]", b"3", b"\xff{}", b"[" * 100_000, b'{"format": 2}', b"{}" * 9])
def test_a_state_that_is_no_json_object_is_named(tmp_path, text):
    newest = save(tmp_path, 9)
    (newest / "state.json").write_bytes(text)
    with pytest.raises(CheckpointError, match=r"state\.json is damaged: "):
        open_checkpoint(newest)
    (newest / "state.json").unlink()
    os.mkfifo(newest / "state.json")
    with pytest.raises(CheckpointError, match=r"state\.json cannot be read: not a regular file"):
        open_checkpoint(newest)


def old_format(state):
    state["format"] = 1
    del state["checksum"]


def test_checkpoints_of_format_1_without_a_checksum_are_still_read(tmp_path):
    rewrite(save(tmp_path, 9), old_format)
    assert open_checkpoint(tmp_path / step_name(9)).step == 9
    rewrite(tmp_path / step_name(9), lambda state: (state.pop("plan"), state.pop("pairs")))
    assert open_checkpoint(tmp_path / step_name(9)).step == 9


def test_other_folders_are_no_checkpoints_and_steps_are_in_order(tmp_path):
    for step in (99_999_999, 100_000_000, 3):
        save(tmp_path, step)
    (tmp_path / "step-last").mkdir()
    assert [step_of(p) for p in list_checkpoints(tmp_path)] == [3, 99_999_999, 100_000_000]
    assert latest_checkpoint(tmp_path)[0].step == 100_000_000


def test_pruning_keeps_the_last_and_the_best(tmp_path):
    for step in (1, 2, 3, 4, 5):
        save(tmp_path, step)
    prune(tmp_path, 2, best_step=2, step=5)
    assert [p.name for p in list_checkpoints(tmp_path)] == [step_name(2), step_name(4), step_name(5)]


def test_pruning_does_not_count_a_damaged_checkpoint_ahead(tmp_path):
    for step in (2, 3, 5):
        save(tmp_path, step)
    (tmp_path / step_name(5) / "state.json").write_text("{")  # the run continued from step 2 and is at step 3
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


def test_existing_checkpoints_count_as_room(tmp_path, monkeypatch):
    for step in (1, 2):
        path = tmp_path / "checkpoints" / step_name(step)
        path.mkdir(parents=True)
        (path / "model.safetensors").write_bytes(bytes(100))
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage._replace(free=150))
    check_room(tmp_path, 100, 3)
    check_room(tmp_path, 100, 1)
    with pytest.raises(CheckpointError, match="4 checkpoints"):
        check_room(tmp_path, 100, 4)
    with pytest.raises(CheckpointError, match="do not fit"):  # the first new one is written beside the old ones
        check_room(tmp_path, 151, 1)


def test_a_text_that_cannot_be_written_leaves_the_old_file_alone(tmp_path):
    write_atomically(tmp_path / "a.json", "old")
    with pytest.raises(CheckpointError, match=r"cannot write .*a\.json: .*surrogates not allowed"):
        write_atomically(tmp_path / "a.json", "\udce9")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a.json", "old")]


def test_nothing_is_pickled():
    source = "".join(p.read_text() for p in module.Path(module.__file__).parent.rglob("*.py"))
    for word in ("pickle", "torch.load", "torch.save"):
        assert f"import {word}" not in source
        assert f"{word}(" not in source
