"""Held-out images are decoded once, on threads, with progress."""

import dataclasses
import io
import json
import os
import shutil
import threading
from concurrent.futures import CancelledError
from pathlib import Path
from types import SimpleNamespace

import pytest
from PIL import Image
from rich.console import Console
from tests.train.small_icons import write_small_icons
from tests.train.test_train_portable import invoke, settings, write_colours

from tilewise.errors import CheckpointError, DataError
from tilewise.train import held_out, loop, progress
from tilewise.train.checkpoint import list_checkpoints, step_name
from tilewise.train.data import SkipLog, open_eval_pairs
from tilewise.train.data import open as module
from tilewise.train.evaluate_run import open_classes, recall_table
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
    monkeypatch.setattr(held_out, "evaluate_retrieval", lambda *unused, **more: {**made, "t2i_r10": next(recalls)})
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
    assert own["t2i_chance1"] == pytest.approx((2 * 2 + 1 + 1) / 4 / 4)  # two of the four have the same caption
    kept = (tmp_path / "run" / "evaluation.json").read_bytes()
    invoke("evaluate", tmp_path / "run", "--pairs", data)
    invoke("evaluate", tmp_path / "run", "--pairs", data / ".." / "data", "--own-captions")  # the same set
    (file,) = (tmp_path / "run").glob("evaluation-*.json")
    other = json.loads(file.read_text())
    assert (other["pairs"], other["images"], other["captions"]) == (str(data), IMAGES, IMAGES)
    assert other["retrieval"]["t2i_chance1"] == pytest.approx(1 / IMAGES)
    assert (tmp_path / "run" / "evaluation.json").read_bytes() == kept
    with pytest.raises(DataError, match=r"only a table or shards have ids \(--id-column\)"):
        invoke("evaluate", tmp_path / "run", "--pairs", data, "--id-column", "product")


def test_ids_of_a_table_are_right_answers_and_every_rank_is_exported(share_run, tmp_path):
    rows = [
        ("a", "green/0.png", "rot"),
        ("a", "green/1.png", "dark"),
        ("b", "blue/0.png", "blau"),
        ("c", "blue/1.png", "x"),
    ]
    table = "product,image,caption\n" + "".join(f"{p},{image},{text}\n" for p, image, text in rows)
    (tmp_path / "p.csv").write_text(table)
    export = tmp_path / "ranks"
    other = ("--pairs", tmp_path / "p.csv", "--images", share_run[0], "--id-column", "product")
    invoke("evaluate", share_run[1], *other, "--export", export)
    (file,) = share_run[1].glob("evaluation-p-*.json")
    assert json.loads(file.read_text())["retrieval"]["t2i_chance1"] == pytest.approx((2 + 2 + 1 + 1) / 4 / 4)
    for query, item, folder in (("caption", "image", "text-to-image"), ("image", "caption", "image-to-text")):
        header, *lines = (export / folder / "ranks.tsv").read_text().splitlines()
        assert header == "query-id\titem-id\trank"
        ranks = {tuple(line.split("\t")[:2]): int(line.split("\t")[2]) for line in lines}
        right = [(0, 0), (0, 1), (1, 0), (1, 1), (2, 2), (3, 3)]
        assert list(ranks) == [(f"{query}-{a}", f"{item}-{b}") for a, b in right]
        run = [line.split() for line in (export / folder / "run.txt").read_text().splitlines()]
        assert {(q, i): int(rank) for q, _, i, rank, *_ in run if (q, i) in ranks} == ranks
        qrels = (export / folder / "qrels" / "test.tsv").read_text().splitlines()[1:]
        assert [tuple(line.split("\t")) for line in qrels] == [(*pair, "1") for pair in ranks]
        corpus = [json.loads(line)["text"] for line in (export / folder / "corpus.jsonl").read_text().splitlines()]
        texts = [row[2] if item == "caption" else str(share_run[0] / row[1]) for row in rows]
        assert corpus == texts
    with pytest.raises(CheckpointError, match="exists already"):
        invoke("evaluate", share_run[1], "--export", export)


def test_memory_holds_the_first_images_and_the_order_stays(tmp_path, monkeypatch):
    data = write_colours(tmp_path / "data")
    (data / "green" / "2.png").write_bytes(b"broken")
    monkeypatch.setattr(module, "TRIED_TOGETHER", 5)
    config, told = settings(data, tmp_path / "run", "model.name=clip-tiny").data, []
    whole = open_eval_pairs(config, 256, SkipLog(), watch=lambda *now: told.append(now))
    assert told == [(5, 18), (10, 18), (15, 18), (18, 18)]
    assert len(whole.images.first) == len(whole.images) == 17
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


LONGER = ["model.name=clip-tiny", "loop.steps=5", "output.evaluate_every=3", "output.checkpoint_every=100"]


def results(folder):
    times = ("seconds", "data_seconds", "pairs_per_second", "memory_bytes")
    lines = [{k: v for k, v in line.items() if k not in times} for line in RunFolder(folder).read_metrics()]
    last = list_checkpoints(folder / "checkpoints")[-1]
    state = json.loads((last / "state.json").read_text())
    weights = [(last / f"{name}.safetensors").read_bytes() for name in ("model", "optimizer")]
    return lines, state["best"], state["metrics"], weights


@pytest.fixture(scope="module")
def longer_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("longer")
    data = write_colours(folder / "data")
    train(settings(data, folder / "run", *LONGER))
    return data, folder / "run"


@pytest.mark.parametrize("step", [3, 5])
def test_a_failed_evaluation_keeps_the_steps_and_is_made_up_for(tmp_path, monkeypatch, longer_run, step):
    data, whole = longer_run
    held_out = shutil.copytree(data, tmp_path / "held-out")
    lost = held_out / "green" / "1.png"
    config = settings(data, tmp_path / "run", *LONGER, "data.eval_memory_mib=0", f"data.eval_path={held_out}")
    original = loop.Trainer._after_step

    def lose(self, *given):
        if self.step == step:
            lost.unlink()
        original(self, *given)

    monkeypatch.setattr(loop.Trainer, "_after_step", lose)
    with pytest.raises(DataError, match=r"held-out image .*green/1\.png .*FileNotFoundError"):
        train(config)
    monkeypatch.undo()
    assert list_checkpoints(tmp_path / "run" / "checkpoints")[-1].name == step_name(step)
    shutil.copy(data / "green" / "1.png", lost)
    assert train(config).metrics
    assert results(tmp_path / "run") == results(whole)
    assert choose_checkpoint(RunFolder(tmp_path / "run"), "best").step == choose_checkpoint(RunFolder(whole)).step


def test_a_stop_while_held_out_images_block_saves_the_last_whole_step(tmp_path, monkeypatch, longer_run):
    def block(*unused, **more):
        raise CancelledError

    monkeypatch.setattr(held_out, "evaluate_retrieval", block)
    with pytest.raises(DataError, match="stopped by a signal"):
        train(settings(longer_run[0], tmp_path, *LONGER))
    assert list_checkpoints(tmp_path / "checkpoints")[-1].name == step_name(3)


@pytest.fixture(scope="module")
def share_run(tmp_path_factory):
    """A run that holds out a fifth of its own images. One of them has a name that is not UTF-8."""
    folder = tmp_path_factory.mktemp("share")
    data = write_colours(folder / "data")
    for file in sorted(data.glob("red/*.png")):
        file.rename(os.fsdecode(os.fsencode(file.with_suffix("")) + b"\xe9.png"))
    share = ["model.name=clip-tiny", "loop.steps=1", "data.eval_path=", "data.eval_share=0.2"]
    train(settings(data, folder / "run", *share))
    return data, folder / "run"


@pytest.mark.parametrize("command", [["evaluate"], ["search", "red"], ["embed", "x.safetensors"]])
def test_a_changed_folder_is_not_split_anew(share_run, tmp_path, monkeypatch, command):
    data, run = share_run
    name, *more = command
    monkeypatch.chdir(tmp_path)
    added = data / "another.png"
    Image.new("RGB", (20, 16), "white").save(added)
    try:
        with pytest.raises(DataError, match=r"trained on 14 pairs of .* now gives 15\..*--pairs"):
            invoke(name, run, *more)
        assert invoke(name, run, *more, "--pairs", data).exit_code == 0
    finally:
        added.unlink()
    assert invoke(name, run, *more).exit_code == 0


def test_names_that_are_not_utf_8_are_embedded(share_run, tmp_path):
    data, run = share_run
    invoke("embed", run, tmp_path / "x.safetensors", "--pairs", data)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.json", "x.safetensors"]
    assert str(data / "red" / "0?.png") in json.loads((tmp_path / "x.json").read_text())["images"]


def test_icons_are_refused_by_a_model_of_colour_images(share_run, tmp_path):
    icons = write_small_icons(tmp_path / "small.zip", 40, 10)
    with pytest.raises(DataError, match=r"icon file .* the model reads colour images"):
        invoke("evaluate", share_run[1], "--pairs", icons)
    config = settings("", tmp_path / "run", "data.source=icons", f"data.path={icons}", "data.eval_path=").data
    with pytest.raises(DataError, match="32 pixels wide, the model reads 16"):
        open_eval_pairs(config, 16, SkipLog())


def test_a_step_in_other_digits_is_refused(share_run):
    with pytest.raises(CheckpointError, match="keeps no checkpoint"):
        choose_checkpoint(RunFolder(share_run[1]), "\u00b2")


def classes_of(folder):
    pixels = SimpleNamespace(size=8, channels=3)
    config = settings(folder, folder).data
    return open_classes(SimpleNamespace(model=SimpleNamespace(pixels=pixels)), folder, ["{}"], SkipLog(), config)


def test_hidden_and_empty_folders_are_no_classes_and_equal_names_are_refused(tmp_path):
    write_colours(tmp_path, each=2)
    (tmp_path / "empty").mkdir()
    shutil.copytree(tmp_path / "red", tmp_path / ".ipynb_checkpoints")
    found = classes_of(tmp_path)
    assert found.names == ["blue", "green", "red"]
    assert found.labels.tolist() == [0, 0, 1, 1, 2, 2]
    for name in ("red-car", "red_car"):
        shutil.copytree(tmp_path / "red", tmp_path / name)
    with pytest.raises(DataError, match=r"'red-car' and 'red_car' .* rename one"):
        classes_of(tmp_path)


def test_brackets_in_the_title_of_a_table_stay(share_run, tmp_path, monkeypatch):
    metrics = {f"{side}_{what}{k}": 0.5 for side in ("t2i", "i2t") for what in ("r", "chance") for k in (1, 5, 10)}
    shown = io.StringIO()
    Console(file=shown, markup=True, width=100).print(recall_table(metrics, "recall on p[bold]"))
    assert "recall on p[bold], and" in shown.getvalue()
    shutil.copytree(share_run[0], tmp_path / "p[bold]")
    monkeypatch.chdir(tmp_path)
    assert "recall on p[bold]," in invoke("evaluate", share_run[1], "--pairs", "p[bold]").output


def test_a_folder_of_held_out_images_with_tar_in_its_name(tmp_path):
    data = write_colours(tmp_path / "x.target" / "pictures")
    config = dataclasses.replace(settings(data, tmp_path).data, source="shards", path="a.tar")
    assert len(open_eval_pairs(config, 8, SkipLog()).images) == IMAGES


def test_every_format_that_is_decoded_is_found_in_a_folder(tmp_path):
    names = [f"{end}.{end}" for end in ("tif", "tiff", "jp2", "ppm", "tga", "ico", "PNG")]
    for name in names:
        Image.new("RGB", (16, 16), "red").save(tmp_path / name)
    skips = SkipLog()
    pairs = open_eval_pairs(settings(tmp_path, "unused").data, 8, skips)
    assert sorted(Path(pairs.images.name(n)).name for n in range(len(pairs.images))) == sorted(names)
    assert not skips.total


def test_two_images_are_too_few_unless_none_is_held_out(tmp_path):
    data = tmp_path / "data"
    write_colours(data, each=1)
    shutil.rmtree(data / "green")
    shown, share = io.StringIO(), ["model.name=clip-tiny", "loop.steps=1", "data.eval_path="]
    with pytest.raises(DataError, match=r"at least 2 pairs, the data has 1 .*data\.eval_share=0"):
        train(settings(data, tmp_path / "run", *share), Console(file=shown))
    assert "so a batch has" not in shown.getvalue()
    assert train(settings(data, tmp_path / "run", *share, "data.eval_share=0")).finished
