"""Held-out images are decoded once, on threads, with progress."""

import io
import json
import threading

import pytest
from rich.console import Console
from tests.train.test_train_portable import invoke, settings, write_colours

from tilewise.train import loop, progress
from tilewise.train.checkpoint import list_checkpoints, step_name
from tilewise.train.data import SkipLog, open_eval_pairs
from tilewise.train.data import open as module
from tilewise.train.load_run import choose_checkpoint
from tilewise.train.loop import train
from tilewise.train.progress import counted
from tilewise.train.run_folder import RunFolder

IMAGES = 18


@pytest.fixture
def decoded(monkeypatch):
    """Return the threads on which held-out images were decoded."""
    names = []
    original = module.decode

    def count(data):
        names.append(threading.current_thread().name)
        return original(data)

    monkeypatch.setattr(module, "decode", count)
    return names


def evaluations(folder):
    return [line for line in RunFolder(folder).read_metrics() if line["kind"] == "eval"]


def test_a_run_with_evaluations_and_report_decodes_each_image_once(tmp_path, decoded):
    data = write_colours(tmp_path / "data")
    model = ["model.name=clip-tiny", "loop.steps=4", "output.evaluate_every=2", "output.report=true"]
    train(settings(data, tmp_path / "a", *model))
    assert len(evaluations(tmp_path / "a")) == 2
    assert (tmp_path / "a" / "report.html").is_file()
    assert len(decoded) == IMAGES
    assert threading.main_thread().name not in decoded
    decoded.clear()
    train(settings(data, tmp_path / "b", *model, "output.report=false", "data.eval_memory_mib=0"))
    assert len(decoded) == IMAGES * (1 + 2)  # once at the start and once per evaluation
    assert evaluations(tmp_path / "a") == evaluations(tmp_path / "b")


def test_evaluate_and_zero_shot_decode_each_image_once(tmp_path, decoded):
    data = write_colours(tmp_path / "data")
    train(settings(data, tmp_path / "run", "model.name=clip-tiny", "loop.steps=1"))
    decoded.clear()
    invoke("evaluate", tmp_path / "run", "--zero-shot", data)
    assert len(decoded) == 2 * IMAGES  # the held-out pairs, and the classes


def test_the_best_weights_are_kept_whenever_they_were(tmp_path, monkeypatch):
    recalls = iter([0.2, 0.7, 0.5, 0.6, 0.6])
    made = {f"{side}_{what}10": 0.1 for side in ("t2i", "i2t") for what in ("r", "chance")}
    monkeypatch.setattr(loop, "evaluate_retrieval", lambda *unused, **more: {**made, "t2i_r10": next(recalls)})
    settings_of_run = ["model.name=clip-tiny", "loop.steps=5", "output.evaluate_every=1", "output.checkpoint_every=4"]
    train(settings(write_colours(tmp_path / "data"), tmp_path / "run", *settings_of_run, "output.keep_last=1"))
    run = RunFolder(tmp_path / "run")
    assert [path.name for path in list_checkpoints(run.checkpoints)] == [step_name(2), step_name(5)]
    assert choose_checkpoint(run, "best").step == 2
    assert choose_checkpoint(run, "last").step == 5


def test_a_run_with_a_share_held_out_is_evaluated_on_it_and_on_others(tmp_path):
    data = write_colours(tmp_path / "data")
    share = ["model.name=clip-tiny", "loop.steps=2", "data.eval_path=", "data.eval_share=0.2"]
    train(settings(data, tmp_path / "run", *share))
    invoke("evaluate", tmp_path / "run")
    own = json.loads((tmp_path / "run" / "evaluation.json").read_text())["retrieval"]
    assert own == {key: evaluations(tmp_path / "run")[-1][key] for key in own}
    assert own["t2i_chance1"] == pytest.approx(1 / 4)
    invoke("evaluate", tmp_path / "run", "--pairs", data)
    other = json.loads((tmp_path / "run" / "evaluation.json").read_text())["retrieval"]
    assert other["t2i_chance1"] == pytest.approx(1 / IMAGES)


def test_memory_holds_the_first_images_and_the_order_stays(tmp_path, monkeypatch):
    data = write_colours(tmp_path / "data")
    (data / "green" / "2.png").write_bytes(b"broken")
    monkeypatch.setattr(module, "TRIED_TOGETHER", 5)
    config, told = settings(data, tmp_path / "run", "model.name=clip-tiny").data, []
    whole = open_eval_pairs(config, 256, SkipLog(), watch=lambda *now: told.append(now))
    assert told == [(5, 18), (10, 18), (15, 18), (18, 18)]
    assert len(whole.images.first) == len(whole.images) == 17
    import dataclasses

    skips = SkipLog()
    partly = open_eval_pairs(dataclasses.replace(config, eval_memory_mib=1), 256, skips)
    assert len(partly.images.first) == 2**20 // (3 * 256 * 256)
    assert skips.total == 1
    assert partly.texts == whole.texts
    for got, want in zip(partly.images.chunks(4), whole.images.chunks(4), strict=True):
        assert got.equal(want)


def test_counting_is_shown_in_a_terminal_and_now_and_then_elsewhere(monkeypatch):
    shown = io.StringIO()
    with counted(Console(file=shown, force_terminal=True, width=80), "reading") as watch:
        watch(3, 7)
    assert "reading" in shown.getvalue()
    assert "3/7" in shown.getvalue()
    plain = io.StringIO()
    with counted(Console(file=plain), "reading") as watch:
        watch(1, 7)
        assert plain.getvalue() == ""
        monkeypatch.setattr(progress, "LINE_EVERY_S", -1.0)
        watch(2, 7)
    assert plain.getvalue() == "reading: 2 of 7\n"
    with counted(None, "reading") as watch:
        assert watch is None
