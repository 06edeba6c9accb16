"""A run folder is enough: it is evaluated, continued and exported without the initial weights."""

import json
import shutil

import pytest
import torch
from PIL import Image
from tests.train.small_weights import write_bert, write_clip, write_vit
from typer.testing import CliRunner

from tilewise.errors import CheckpointError, ConfigError
from tilewise.train.checkpoint import latest_checkpoint, save_checkpoint, step_name
from tilewise.train.cli import app
from tilewise.train.config import load_config
from tilewise.train.loop import train
from tilewise.train.models.saved import _NoRandomWeights
from tilewise.train.run_folder import RunFolder

COLOURS = ("red", "green", "blue")


def invoke(*arguments):
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def write_colours(folder, each=6):
    for name in COLOURS:
        (folder / name).mkdir(parents=True)
        for i in range(each):
            Image.new("RGB", (20, 16), name).point(lambda v, i=i: max(0, v - 9 * i)).save(folder / name / f"{i}.png")
            (folder / name / f"{i}.txt").write_text(f"a {name} cat")
    return folder


def settings(data, folder, *overrides):
    return load_config(None, [
        "data.source=folder", f"data.path={data}", f"data.eval_path={data}", "loop.batch_size=6", "loop.chunk_size=4",
        "loop.threads=1", "loop.device=cpu", "optim.lr=1e-3", "output.report=false", "output.tensorboard=false",
        "output.checkpoint_every=2", f"output.folder={folder}", *overrides,
    ])  # fmt: skip


@pytest.fixture(params=["clip", "lit"])
def started(request, tmp_path):
    """Return the settings of a run from pretrained weights, and the folder of those weights."""
    weights, data = tmp_path / "weights", write_colours(tmp_path / "data")
    weights.mkdir()
    if request.param == "clip":
        model = ["model.name=clip-tiny", f"model.weights={write_clip(weights / 'clip')}"]
    else:
        model = [
            "model.name=vit-bert-tiny", f"model.image_weights={write_vit(weights / 'vit')}", "model.lock_image=true",
            f"model.text_weights={write_bert(weights / 'bert')}",
        ]  # fmt: skip
    return lambda folder, *more: settings(data, folder, *model, "loop.steps=6", *more), weights


def test_a_run_from_weights_is_evaluated_and_continued_without_them(started, tmp_path):
    make, weights = started
    train(make(tmp_path / "whole"))
    train(make(tmp_path / "cut"))
    shutil.rmtree(RunFolder(tmp_path / "cut").checkpoints / step_name(6))
    shutil.rmtree(weights)
    (tmp_path / "elsewhere").mkdir()
    moved = tmp_path / "elsewhere" / "run"
    (tmp_path / "cut").rename(moved)
    assert train(make(moved)).finished
    for name in ("model", "optimizer"):
        file = f"checkpoints/{step_name(6)}/{name}.safetensors"
        assert (moved / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()
    result = invoke("evaluate", moved, "--zero-shot", tmp_path / "data", "--template", "a {} cat")
    assert "zero-shot over 3 classes" in result.output
    assert invoke("search", moved, "a red cat", "--top", 2).exit_code == 0
    assert {path.suffix for path in moved.rglob("*") if path.is_file() and path.suffix} <= {
        ".json", ".jsonl", ".toml", ".safetensors", ".txt", ".png",
    }  # fmt: skip


def test_a_run_that_never_saved_takes_its_settings_again(tmp_path):
    """A run that ended before its first checkpoint leaves a description. The next start must not use it."""
    data = write_colours(tmp_path / "data")
    config = settings(data, tmp_path / "run", "model.name=clip-tiny", "loop.steps=1")
    run = RunFolder(tmp_path / "run")
    train(config)
    shutil.rmtree(run.checkpoints)
    train(settings(data, tmp_path / "run", "model.name=vit-bert-tiny", "loop.steps=1"))
    assert json.loads((run.model / "tilewise.json").read_text())["kind"] == "vit-bert"
    assert invoke("evaluate", tmp_path / "run").exit_code == 0


def test_a_model_that_is_only_used_has_zeros_instead_of_random_weights():
    """`trunc_normal_` redraws what lies outside of its limits. With uninitialized memory it might never end."""
    with _NoRandomWeights():
        init = torch.nn.init
        for draw in (init.normal_, init.uniform_, init.kaiming_uniform_, torch.Tensor.normal_):
            assert not draw(torch.full((3, 3), 100.0)).any()
        weight = torch.nn.Parameter(torch.full((3, 3), 100.0))
        assert torch.nn.init.trunc_normal_(weight, std=0.02) is weight
        assert not weight.any()


def test_a_run_of_an_earlier_version_is_written_down_when_it_continues(started, tmp_path):
    make, weights = started
    train(make(tmp_path / "run"))
    run = RunFolder(tmp_path / "run")
    shutil.rmtree(run.model)
    shutil.rmtree(run.checkpoints / step_name(6))
    train(make(tmp_path / "run"))
    shutil.rmtree(weights)
    assert invoke("evaluate", tmp_path / "run").exit_code == 0


@pytest.mark.parametrize("started", ["lit"], indirect=True)
def test_a_locked_run_of_an_earlier_version_says_why_it_does_not_open(started, tmp_path):
    """Earlier versions had a random projection after the locked tower."""
    make, _ = started
    train(make(tmp_path / "run"))
    run = RunFolder(tmp_path / "run")
    checkpoint, _ = latest_checkpoint(run.checkpoints)
    tensors = {name: checkpoint.tensors(name) for name in ("model", "optimizer")}
    tensors["model"]["image.body.project.weight"] = torch.zeros(64, 32)
    save_checkpoint(run.checkpoints, checkpoint.step, tensors, checkpoint.state)
    shutil.rmtree(run.model)
    for use in (lambda: train(make(tmp_path / "run")), lambda: invoke("evaluate", tmp_path / "run")):
        with pytest.raises(CheckpointError, match=r"an earlier version.*locked image tower.*Train it again"):
            use()


def test_other_weights_in_the_same_folder_are_refused(tmp_path):
    data = write_colours(tmp_path / "data")
    model = ["model.name=clip-tiny", "loop.steps=1"]
    train(settings(data, tmp_path / "run", *model, f"model.weights={write_clip(tmp_path / 'one')}"))
    with pytest.raises(ConfigError, match=r"model\.weights was"):
        train(settings(data, tmp_path / "run", *model, f"model.weights={tmp_path / 'two'}"))
