"""A finished run can be made longer. The learning rate of the added steps is chosen, saved, and survives a stop."""

import shutil

import pytest
from tests.train.small_icons import write_small_icons

from tilewise.errors import ConfigError
from tilewise.train import loop
from tilewise.train.checkpoint import step_name
from tilewise.train.config import OptimConfig, load_config
from tilewise.train.loop import train
from tilewise.train.optim import learning_rate
from tilewise.train.plan import Leg, change_length, new_plan, planned_rate
from tilewise.train.run_folder import RunFolder


@pytest.fixture(scope="module")
def icons(tmp_path_factory):
    return write_small_icons(tmp_path_factory.mktemp("icons") / "small.zip")


@pytest.fixture
def small(icons, tmp_path):
    def make(*overrides, path=icons):
        return load_config(None, [
            "model.width=32", "model.depth=1", "model.text_buckets=512", "model.embed_dim=16", "loop.batch_size=64",
            "loop.chunk_size=32", "loop.threads=1", "optim.lr=1.0e-3", "optim.ema_decay=0.9", "optim.warmup_steps=2",
            "optim.final_lr_share=0.1", "output.checkpoint_every=2", "output.report=false", "output.tensorboard=false",
            f"data.path={path}", f"output.folder={tmp_path / 'run'}", *overrides,
        ])  # fmt: skip

    return make


def rates(folder):
    return [line["lr"] for line in RunFolder(folder).read_metrics() if line["kind"] == "train"]


OPTIM = OptimConfig(lr=1e-3, warmup_steps=2, final_lr_share=0.1)
WANTED = {
    "restart": [learning_rate(s, 4, OPTIM) for s in range(4)] + [learning_rate(s, 6, OPTIM) for s in range(6)],
    "stretch": [learning_rate(s, 4, OPTIM) for s in range(4)] + [learning_rate(s, 10, OPTIM) for s in range(4, 10)],
    "constant": [learning_rate(s, 4, OPTIM) for s in range(4)] + [1e-4] * 6,
}


@pytest.mark.parametrize("how", WANTED)
def test_an_ended_run_goes_on_for_longer(small, tmp_path, how, monkeypatch):
    assert train(small("loop.steps=4")).finished
    longer = small("loop.steps=10", f"optim.extend={how}")
    original = loop.Trainer._after_step

    def die(self, log, bar, stopping):
        original(self, log, bar, stopping)
        if self.step == 7:
            raise KeyboardInterrupt

    monkeypatch.setattr(loop.Trainer, "_after_step", die)
    with pytest.raises(KeyboardInterrupt):
        train(longer)
    monkeypatch.undo()
    assert train(longer).step == 10  # continues at 6, within the added steps
    assert rates(tmp_path / "run") == pytest.approx(WANTED[how])
    assert train(longer).finished  # nothing left to do, and no error


def test_another_length_without_a_word_on_the_learning_rate_is_refused(small):
    train(small("loop.steps=2"))
    with pytest.raises(
        ConfigError, match=r"planned for 2 steps and has done 2, and the settings ask for 6.*optim\.extend="
    ):
        train(small("loop.steps=6"))
    with pytest.raises(ConfigError, match=r"planned for 2 steps.*has done 2, and the settings ask for 12"):
        train(small("loop.epochs=2"))
    assert train(small("loop.epochs=0.34")).finished  # the same length, given in epochs or steps


def test_with_one_learning_rate_a_longer_run_equals_a_long_one(small, tmp_path):
    """The added steps use the data that an uninterrupted run would use next."""
    flat = ["optim.warmup_steps=0", "optim.final_lr_share=1.0"]
    train(small("loop.steps=6", *flat))
    whole = [line["loss"] for line in RunFolder(tmp_path / "run").read_metrics() if line["kind"] == "train"]
    shutil.rmtree(tmp_path / "run")
    train(small("loop.steps=3", *flat))
    train(small("loop.steps=6", "optim.extend=constant", *flat))
    parts = [line["loss"] for line in RunFolder(tmp_path / "run").read_metrics() if line["kind"] == "train"]
    assert parts == whole  # bitwise


def test_a_run_of_an_earlier_version_has_the_plan_of_its_settings(small, tmp_path):
    import json

    train(small("loop.steps=2"))
    file = tmp_path / "run" / "checkpoints" / step_name(2) / "state.json"
    state = json.loads(file.read_text())
    del state["plan"], state["pairs"], state["config"]["optim"]["extend"], state["checksum"]
    state["format"] = 1
    file.write_text(json.dumps(state))
    with pytest.raises(ConfigError, match="planned for 2 steps"):
        train(small("loop.steps=4"))
    assert train(small("loop.steps=4", "optim.extend=restart")).step == 4


def test_lengths_that_make_no_sense_are_refused():
    plan = new_plan(8)
    with pytest.raises(ConfigError, match="cannot be undone; choose at least 5"):
        change_length(plan, 5, 4, OptimConfig(extend="stretch"))
    with pytest.raises(ConfigError, match="only stretch can shorten"):
        change_length(plan, 5, 6, OptimConfig(extend="restart"))
    with pytest.raises(ConfigError, match=r"final_lr_share is 0.*Choose restart or stretch"):
        change_length(plan, 8, 9, OptimConfig(extend="constant"))
    assert change_length(plan, 5, 6, OptimConfig(extend="stretch")) == (Leg(0, 8, "plan"), Leg(5, 6, "stretch"))


def test_a_run_stopped_early_first_ends_its_old_plan():
    plan = change_length(new_plan(8), 5, 12, OptimConfig(extend="restart"))
    assert plan == (Leg(0, 8, "plan"), Leg(8, 12, "restart"))
    again = change_length(plan, 6, 20, OptimConfig(extend="stretch"))
    config = OptimConfig(lr=1.0)
    assert planned_rate(9, again, config) == learning_rate(9, 20, config)
    assert planned_rate(5, again, config) == learning_rate(5, 8, config)


def test_the_same_data_may_lie_elsewhere(small, tmp_path, icons):
    train(small("loop.steps=2"))
    moved = tmp_path / "moved.zip"
    shutil.copy(icons, moved)
    assert train(small("loop.steps=4", "optim.extend=stretch", path=moved)).finished
    fewer = write_small_icons(tmp_path / "fewer.zip", train=200)
    with pytest.raises(ConfigError, match=r"started on \d+ training pairs, .*fewer\.zip' has \d+.*output\.folder"):
        train(small("loop.steps=4", path=fewer))
