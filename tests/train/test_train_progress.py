"""The output of a run in a terminal."""

import io
from types import SimpleNamespace

from rich.console import Console
from tests.train.test_train_portable import settings, write_colours

from tilewise.train import loop, messages
from tilewise.train import progress as module
from tilewise.train.config import load_config
from tilewise.train.progress import RunProgress


def test_step_and_time_are_whole_in_a_narrow_terminal():
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=80, color_system=None)
    progress = RunProgress(console, steps=20000, done=0)
    progress.evaluated(10, 0.579)
    facts = {"pairs_per_second": 12439.0, "memory_bytes": 5.5e9}
    progress.step(12345, {"loss": 5.152, "skipped": 0}, facts)
    progress.close()
    shown = " ".join(screen.getvalue().split())
    assert "…" not in shown
    assert len(screen.getvalue().splitlines()) <= 6  # two lines for a frame
    for words in ("12345/20000", "5.152", "57.9%", "12,439", "0:00:00", "left"):
        assert words in shown


def test_an_evaluation_is_seen_to_go_on(monkeypatch):
    screen, plain = io.StringIO(), io.StringIO()
    progress = RunProgress(Console(file=screen, force_terminal=True, width=100, color_system=None), steps=20, done=0)
    progress.evaluating(512, 25000)
    progress.close()
    assert "evaluating, image 512 of 25,000" in screen.getvalue()
    progress = RunProgress(Console(file=plain), steps=20, done=0)
    progress.evaluating(512, 25000)
    assert plain.getvalue() == ""  # at most one line per interval
    monkeypatch.setattr(module, "LINE_EVERY_S", -1.0)
    progress.evaluating(1024, 25000)
    assert plain.getvalue() == "evaluating, image 1,024 of 25,000\n"
    RunProgress(None, steps=20, done=0).evaluating(1, 2)


def test_a_run_that_waits_for_files_is_told_of_workers(tmp_path, monkeypatch):
    monkeypatch.setattr(messages, "SLOW_DATA_S", -1.0)
    monkeypatch.setattr(messages, "SLOW_DATA_SHARE", -1.0)
    shown = io.StringIO()
    config = settings(write_colours(tmp_path / "data"), tmp_path / "run", "model.name=clip-tiny", "loop.steps=1")
    loop.train(config, Console(file=shown))
    assert "% of the time was spent waiting for images. Raise data.workers above 2\n" in shown.getvalue()


def test_a_run_with_steps_and_epochs_says_which_of_them_counts():
    for given, warned in ((["loop.steps=5", "loop.epochs=2"], True), (["loop.steps=5"], False)):
        screen = io.StringIO()
        messages.Messages(Console(file=screen, width=200)).warnings(
            SimpleNamespace(kind="icon"), load_config(None, given)
        )
        assert ("loop.steps=5 and loop.epochs=2 are both set" in screen.getvalue()) == warned
