"""Which checkpoint a command uses: an explicit choice never falls back, an automatic one says what it took and why."""

import json
import shutil

import pytest
from safetensors import safe_open
from tests.train.test_train_portable import invoke, settings, write_colours

from tilewise.errors import CheckpointError
from tilewise.train import held_out, load_model
from tilewise.train.checkpoint import step_name
from tilewise.train.load_run import choose_checkpoint
from tilewise.train.loop import train
from tilewise.train.run_folder import RunFolder

COMMANDS = ["evaluate", "search", "embed", "export", "report"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run with the checkpoints of step 2, the best one, and of step 4, the last one."""
    folder, recalls = tmp_path_factory.mktemp("choice"), iter([0.7, 0.2])
    made = {f"{side}_{what}{k}": 0.1 for side in ("t2i", "i2t") for what in ("r", "chance") for k in (1, 5, 10)}
    data = write_colours(folder / "data", each=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(held_out, "evaluate_retrieval", lambda *_, **more: {**made, "t2i_r10": next(recalls)})
        train(settings(data, folder / "run", "model.name=clip-tiny", "loop.steps=4", "output.evaluate_every=2"))
    return folder / "run"


@pytest.fixture
def run(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "run")


def start(command, run, *more):
    targets = {"embed": [run.parent / "f.safetensors"], "export": [run.parent / "model"], "search": ["cat"]}
    return invoke(command, run, *targets.get(command, []), *more).output


def damage(run, step):
    (run / "checkpoints" / step_name(step) / "model.safetensors").write_bytes(b"x")


def remove(run, step):
    shutil.rmtree(run / "checkpoints" / step_name(step))


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    "which, step, why",
    [
        ("auto", 2, "the best by held-out recall"),
        ("best", 2, "the best by held-out recall"),
        ("last", 4, "the last one"),
        ("4", 4, "the given step"),
    ],
)
def test_every_command_names_the_checkpoint_the_step_and_the_reason(run, command, which, step, why):
    said = start(command, run, *([] if which == "auto" else ["--checkpoint", which]))
    assert f"checkpoint: {run / 'checkpoints' / step_name(step)}, step {step}: {why}\n" in said


def test_the_files_that_commands_write_name_the_step(run):
    for step in (2, 4):
        start("evaluate", run, "--checkpoint", step)
        assert json.loads((run / "evaluation.json").read_text())["step"] == step
        start("embed", run, "--checkpoint", step)
        assert json.loads((run.parent / "f.json").read_text())["step"] == str(step)
        with safe_open(run.parent / "f.safetensors", "pt") as features:
            assert features.metadata()["step"] == str(step)
        start("report", run, "--checkpoint", step)
        assert f"The weights are those of step {step}: the given step." in (run / "report.html").read_text()


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    "spoil, which, lost, there",
    [
        (remove, "best", 2, r"the best checkpoint, .*step-00000002, is missing.*whole checkpoints of the steps 4\. "),
        (damage, "best", 2, r"the best checkpoint is damaged: .*whole checkpoints of the steps 4\. "),
        (damage, "best", 4, r"step-00000004.*damaged.*whole checkpoints of the steps 2\. "),
        (damage, "last", 4, r"step-00000004.*damaged.*whole checkpoints of the steps 2\. "),
        (damage, "2", 2, r"step-00000002.*damaged.*whole checkpoints of the steps 4\. "),
        (remove, "2", 2, r"keeps no checkpoint '2'; there are auto, best, last, 4"),
    ],
)
def test_an_explicit_choice_never_falls_back(run, command, spoil, which, lost, there):
    spoil(run, lost)
    with pytest.raises(CheckpointError, match=there):
        start(command, run, "--checkpoint", which)
    written = ("f.safetensors", "model", "run/evaluation.json", "run/search.png", "run/report.html")
    assert not any((run.parent / name).exists() for name in written)


@pytest.mark.parametrize("command", COMMANDS)
def test_an_automatic_choice_says_why_it_is_not_the_best(run, command):
    remove(run, 2)
    said = start(command, run)
    assert f"the best checkpoint, {run / 'checkpoints' / step_name(2)}, is missing\n" in said
    assert f"{step_name(4)}, step 4: the last one, because the best one cannot be used\n" in said


@pytest.mark.parametrize("command", COMMANDS)
def test_an_automatic_choice_names_damaged_checkpoints(run, command):
    damage(run, 4)
    said = start(command, run)
    assert (
        f"ignored a damaged checkpoint: {run / 'checkpoints' / step_name(4) / 'model.safetensors'} is missing" in said
    )
    assert f"{step_name(2)}, step 2: the best by held-out recall, as far as the last whole one knows\n" in said


def test_without_an_evaluation_there_is_no_best_one(run):
    """The checkpoint of step 1 of another run, whose evaluation comes at its end."""
    data = run.parent / "data"
    write_colours(data, each=2)
    config = settings(data, run.parent / "new", "model.name=clip-tiny", "loop.steps=2", "output.checkpoint_every=1")
    train(config)
    remove(run.parent / "new", 2)
    found = choose_checkpoint(RunFolder(run.parent / "new"))
    assert (found.step, found.why) == (1, "the last one, because no evaluation has chosen a best one")
    with pytest.raises(CheckpointError, match=r"'best'.*no evaluation has chosen a best one.*the steps 1\. Pass one"):
        choose_checkpoint(RunFolder(run.parent / "new"), "best")


def test_a_run_without_a_whole_checkpoint_is_refused(run):
    damage(run, 2), damage(run, 4)
    for which in ("best", "last", "2"):
        with pytest.raises(CheckpointError, match=r"There is no whole one\. Continue or repeat the training"):
            choose_checkpoint(RunFolder(run), which)
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* can be used"):
        choose_checkpoint(RunFolder(run))


def test_a_report_needs_no_checkpoint_unless_one_is_named(run):
    damage(run, 2), damage(run, 4)
    assert "No searches: no checkpoint in" in start("report", run)
    (run / "report.html").unlink()
    with pytest.raises(CheckpointError, match=r"'last' of .* cannot be used"):
        start("report", run, "--checkpoint", "last")
    assert not (run / "report.html").exists()


def test_a_model_in_python_warns_and_an_explicit_choice_raises(run, recwarn):
    assert load_model(run, device="cpu").origin == f"{run}, step 2"
    assert not recwarn
    remove(run, 2)
    with pytest.warns(UserWarning, match=r"step-00000002, is missing\. checkpoint: .*step-00000004, step 4: the last"):
        assert load_model(run, device="cpu").origin == f"{run}, step 4"
    with pytest.raises(CheckpointError, match=r"'best' of .* cannot be used"):
        load_model(run, device="cpu", checkpoint="best")


def test_an_exported_model_has_no_checkpoints_to_choose(run):
    start("export", run)
    with pytest.raises(CheckpointError, match="exported model, which has no checkpoints, got checkpoint 'last'"):
        invoke("export", run.parent / "model", run.parent / "again", "--checkpoint", "last")
    assert not (run.parent / "again").exists()
