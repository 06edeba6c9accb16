"""A folder of 40 pictures with captions, and the commands of the page "The command line" on it, in their order."""

import io
import json
import re
import shlex
import shutil
import sys
import types
from importlib.machinery import ModuleSpec
from pathlib import Path

import numpy
import pyarrow.parquet
import pytest
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw
from rich.console import Console
from tests.compare import assert_close
from tests.train.small_weights import write_clip
from typer.testing import CliRunner

from tilewise.errors import ConfigError, DataError, RangeError
from tilewise.train import demo, load_model
from tilewise.train.cli import app
from tilewise.train.config import load_config
from tilewise.train.demo import own_command
from tilewise.train.loop import train
from tilewise.train.pictures import LINES, _wrapped, contact_sheet
from tilewise.train.search import Gallery, open_gallery, show_hits

PAGE = Path(__file__).resolve().parents[2] / "docs" / "concepts" / "command-line.md"
COLOURS = {"red": (220, 30, 30), "green": (30, 180, 40), "blue": (30, 60, 220), "yellow": (230, 220, 30)}
SHAPES = ("circle", "square", "bar", "corner", "frame")
GPT2 = {"model_type": "gpt2", "vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_head": 12}


def draw(colour, shape, shift):
    image = Image.new("RGB", (64, 56), "white")
    pen, box = ImageDraw.Draw(image), [8 + shift, 8, 44 + shift, 44]
    if shape == "circle":
        pen.ellipse(box, fill=colour)
    elif shape == "frame":
        pen.rectangle(box, outline=colour, width=6)
    else:
        sides = {"square": box, "bar": [box[0], 20, box[2], 30], "corner": [0, 0, 20, 20]}
        pen.rectangle(sides[shape], fill=colour)
    return image


def write_pictures(folder):
    """Write ``pictures`` with 40 captioned images and ``classes`` with one sub-folder per colour."""
    (folder / "pictures").mkdir()
    number = 0
    for name, colour in COLOURS.items():
        (folder / "classes" / name).mkdir(parents=True)
        for shape in SHAPES:
            for shift in (0, 9):
                image = draw(colour, shape, shift)
                image.save(folder / "pictures" / f"{number:02}.png")
                caption = f"a large {name} {shape} on a white background, moved by {shift} pixels"
                (folder / "pictures" / f"{number:02}.txt").write_text(caption)
                image.save(folder / "classes" / name / f"{shape}{shift}.png")
                number += 1
    assert number == 40


def invoke(*arguments):
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def commands_of_the_page():
    blocks = re.findall(r"^```([^\n`]*)\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    return [line for language, block in blocks if not language for line in block.splitlines()]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder in which the commands of the page were run, and what each printed."""
    folder = tmp_path_factory.mktemp("commands")
    write_pictures(folder)
    (folder / "my-language-model").mkdir()
    (folder / "my-language-model" / "config.json").write_text(json.dumps(GPT2))
    for name, seed in (("questions", 1), ("answers", 2)):
        numpy.save(folder / f"{name}.npy", torch.randn(9, 4, generator=torch.Generator().manual_seed(seed)).numpy())
        (folder / f"{name}.txt").write_text("".join(f"{name} {i}\n" for i in range(9)))
    printed = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("COLUMNS", "120")
        for line in commands_of_the_page():
            words = shlex.split(line)
            assert words[0] == "tilewise", line
            if words[1] in ("demo", "tune"):  # a few minutes, and a GPU; other tests run them in small
                continue
            target = None
            if ">" in words:
                words, target = words[: words.index(">")], words[-1]
            result = invoke(*words[1:])
            fine = (0, 1) if words[1] == "doctor" else (0,)  # it may find something wrong with this machine
            assert result.exit_code in fine, (line, result.output)
            if target:
                Path(target).write_text(result.output)
            printed[line] = result.output
    return folder, printed


def test_the_page_has_every_command():
    names = set(re.findall(r"^│ (\w+)", invoke("--help").output, re.M))
    assert {"train", "report", "embed", "plan"} <= names
    assert names == {line.split()[1] for line in commands_of_the_page()}


def said(place, words):
    return next(text for line, text in place[1].items() if line.startswith(f"tilewise {words}"))


def test_a_folder_of_forty_pictures_needs_no_settings(place):
    words = said(place, "train")
    assert "there are 36 training pairs, so a batch has 36 instead of 4,096" in words
    assert "36 pairs, 4 held-out images" in words
    config = load_config(place[0] / "runs" / "shapes" / "config.toml")
    assert (config.data.source, config.model.name) == ("folder", "clip-tiny")
    assert (config.loop.batch_size, config.loop.chunk_size) == (36, 36)
    assert re.search(r"next: +\S.* search runs/shapes WORDS", words)


def test_the_length_of_a_run_that_is_left_open(place):
    from tilewise.train.distributed import join_world
    from tilewise.train.loop import Trainer

    def steps(*more):
        folder = f"output.folder={place[0] / 'never'}"
        return Trainer(
            load_config(None, [f"data.path={place[0] / 'pictures'}", folder, *more]), join_world("cpu")
        ).steps

    assert steps() == 200
    assert steps("loop.epochs=3") == 3
    assert steps("loop.batch_size=1000", "loop.epochs=2.6") == 3  # one step an epoch
    assert steps("loop.batch_size=2", "loop.epochs=0") == 200
    assert steps("loop.steps=7") == 7


def test_settings_are_asked_for():
    with pytest.raises(ConfigError, match="train needs settings"):
        invoke("train")


def test_a_folder_instead_of_settings_is_explained(place):
    with pytest.raises(ConfigError, match=r"is a folder\. To train on the images in it: tilewise train data\.path="):
        invoke("train", place[0] / "pictures")


def test_results_per_class(place):
    (file,) = (place[0] / "runs" / "shapes").glob("evaluation-classes-*.json")
    found = json.loads(file.read_text())["zero_shot"]
    assert set(found["per_class"]) == set(COLOURS)
    assert sum(one["images"] for one in found["per_class"].values()) == 40
    mean = sum(one["images"] * one["top1"] for one in found["per_class"].values()) / 40
    assert mean == pytest.approx(found["top1"])
    for name, one in found["per_class"].items():
        assert (one["taken_for"] == "") == (one["top1"] == 1.0)
        assert one["taken_for"] != name
    words = said(place, "evaluate runs/shapes --zero-shot")
    assert "most often taken for" in words
    assert all(name in words for name in COLOURS)


def test_captions_of_an_image(place):
    words = said(place, "search runs/shapes --image")
    assert words.startswith("checkpoint: ")
    assert words.splitlines()[1] == "pictures/00.png"
    assert (
        len(re.findall(r"^[ *] -?\d\.\d{3}  a large \w+ \w+ on a white background, moved by \d pixels$", words, re.M))
        == 10
    )


def test_right_answers_are_marked_in_both_directions(place):
    folder = place[0]
    gallery = open_gallery(folder / "runs" / "shapes", path=str(folder / "pictures"))
    query = (folder / "pictures" / "07.txt").read_text()
    (hits,) = gallery.search([query], top=40)
    assert [hit.number for hit in hits if hit.right] == [7]
    assert not any(hit.right for hit in gallery.search(["a large red"], top=40)[0])
    (hits,) = gallery.captions([folder / "pictures" / "07.png"], top=40)
    assert [hit.label for hit in hits if hit.right] == [query]
    outside = shutil.copy(folder / "pictures" / "07.png", folder / "outside.png")
    assert not any(hit.right for hit in gallery.captions([Path(outside)], top=40)[0])


def test_the_best_caption_has_the_highest_score(place):
    folder = place[0]
    model = load_model(folder / "runs" / "shapes")
    texts = [(folder / "pictures" / f"{i:02}.txt").read_text() for i in range(40)]
    scores = model.encode_text(texts) @ model.encode_image([folder / "pictures" / "11.png"])[0]
    (hits,) = open_gallery(folder / "runs" / "shapes", path=str(folder / "pictures")).captions(
        [folder / "pictures" / "11.png"], top=3
    )
    assert [hit.label for hit in hits] == [texts[i] for i in scores.topk(3).indices.tolist()]
    assert_close(torch.tensor([hit.score for hit in hits]), scores.topk(3).values, 1e-4)


def test_captions_are_whole_in_a_terminal_and_on_the_sheet(place):
    folder = place[0]
    gallery = open_gallery(folder / "runs" / "shapes", path=str(folder / "pictures"))
    hits = gallery.search(["red"], top=2)[0]
    shown = io.StringIO()
    show_hits(Console(file=shown, force_terminal=True, width=60), "red", hits)
    plain = re.sub(r"\x1b\[[\d;]*m", "", shown.getvalue())
    for word in ("background,", "moved", "pixels"):
        assert word in plain, word
    short = contact_sheet(["x"], [[(hits[0].image, "red", False)]])
    long = contact_sheet(["x"], [[(hits[0].image, hits[0].label * 3, False)]])
    assert long.height > short.height + 5 * 14
    framed = contact_sheet(["x"], [[(hits[0].image, "red", True)]])
    assert (22, 163, 74) in {colour for _, colour in framed.getcolors(10**6)}
    assert (22, 163, 74) not in {colour for _, colour in short.getcolors(10**6)}


class CountingFont:
    """Every character is six pixels wide."""

    measured = characters = 0

    def getlength(self, text):
        self.measured += 1
        self.characters += len(text)
        return 6 * len(text)


@pytest.mark.parametrize("text", ["word " * 2000, "w" * 10_000], ids=["words", "one word"])
def test_long_captions_are_wrapped_with_few_measurements(text):
    font = CountingFont()
    lines = _wrapped(text, 96, font)
    assert font.measured <= 9 * (LINES + 1)
    assert font.characters <= 96 * font.measured
    assert len(lines) == LINES
    assert all(0 < len(line) <= 16 for line in lines)
    assert lines[-1].endswith("...")


def test_lines_break_between_words_and_lose_none():
    assert _wrapped("  a red circle, moved\nby pixels ", 72, CountingFont()) == [
        "a red",
        "circle,",
        "moved by",
        "pixels",
    ]
    assert _wrapped("0123456789abcdef xy", 60, CountingFont()) == ["0123456789", "abcdef xy"]
    assert _wrapped("exactly ten", 66, CountingFont()) == ["exactly ten"]
    assert _wrapped("wide", 1, CountingFont()) == list("wide")
    assert _wrapped(" ", 60, CountingFont()) == []


def test_search_needs_words_or_an_image(place):
    with pytest.raises(RangeError, match="needs words, or --image"):
        invoke("search", place[0] / "runs" / "shapes")
    with pytest.raises(DataError, match="cannot read the image"):
        invoke("search", place[0] / "runs" / "shapes", "--image", "nothing.png", "--pairs", place[0] / "pictures")


@pytest.mark.parametrize("command", [["evaluate"], ["search", "red"], ["embed", "x.safetensors"]])
def test_data_that_has_moved_is_explained(place, tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    name, *more = command
    with pytest.raises(DataError, match=r"were in pictures, which does not exist here.*--pairs"):
        invoke(name, place[0] / "runs" / "shapes", *more)


def test_features_in_a_file_are_those_of_the_model(place):
    from safetensors.torch import load_file

    folder = place[0]
    features, names = load_file(folder / "features.safetensors"), json.loads((folder / "features.json").read_text())
    model = load_model(folder / "runs" / "shapes")
    assert_close(features["text"], model.encode_text(names["texts"]), 1e-4)
    assert_close(features["image"], model.encode_image([folder / name for name in names["images"]]), 1e-4)
    owners = [names["images"][i] for i in features["text_image"].tolist()]
    assert [(folder / name).with_suffix(".txt").read_text() for name in owners] == names["texts"]
    with pytest.raises(DataError, match=r"must end in \.safetensors"):
        invoke("embed", folder / "runs" / "shapes", folder / "features.pt")


def test_mined_images_of_a_run_are_the_closest_wrong_ones(place):
    """Of the training pairs: 36 of the 40, those that are not held out."""
    folder = place[0]
    rows = [json.loads(line) for line in (folder / "hard.jsonl").read_text().splitlines()]
    assert {tuple(row) for row in rows} == {("anchor", "positive", "negative")}
    images = sorted({row["positive"] for row in rows})
    captions = [(folder / image).with_suffix(".txt").read_text() for image in images]
    assert (len(images), len(rows)) == (36, 72)
    model = load_model(folder / "runs" / "shapes")
    scores = model.encode_text(captions) @ model.encode_image([folder / image for image in images]).T
    wanted = scores.fill_diagonal_(-torch.inf).topk(2, dim=1).values
    for caption, image, best, row in zip(captions, images, wanted, scores, strict=True):
        own = [one for one in rows if one["anchor"] == caption]
        assert {one["positive"] for one in own} == {image}
        got = torch.stack([row[images.index(one["negative"])] for one in own])
        assert_close(got, best, 1e-4)


def test_mined_captions_of_images_are_a_table_of_negatives(place):
    columns = pyarrow.parquet.read_table(place[0] / "hard-captions.parquet").to_pydict()
    assert list(columns) == ["anchor", "positive", *(f"negative_{i}" for i in (1, 2, 3))]
    assert columns["anchor"] == [f"pictures/{i:02}.png" for i in range(40)]
    for image, right, *wrong in zip(*columns.values(), strict=True):
        assert right == (place[0] / image).with_suffix(".txt").read_text()
        assert len({right, *wrong}) == 4
    assert "40 rows" in said(place, "mine runs/shapes hard-captions")


def test_mined_texts_of_two_files_of_features(place):
    folder = place[0]
    queries, gallery = (
        F.normalize(torch.from_numpy(numpy.load(folder / f"{n}.npy")), dim=1) for n in ("questions", "answers")
    )
    scores = queries @ gallery.T
    limit = scores.diagonal()[:, None] - 0.05
    wanted = [
        {"anchor": f"questions {i}", "positive": f"answers {i}", "negative": f"answers {j}"}
        for i, row in enumerate(scores.masked_fill(scores > limit, -torch.inf).fill_diagonal_(-torch.inf))
        for j in row.topk(3).indices.tolist()
        if row[j] > -torch.inf
    ]
    assert [json.loads(line) for line in (folder / "hard-answers.jsonl").read_text().splitlines()] == wanted
    few = 9 - sum(sum(row["anchor"] == f"questions {i}" for row in wanted) == 3 for i in range(9))
    assert f"{few} of them have fewer negatives" in said(place, "mine questions.npy")


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        (["hard.jsonl"], DataError, r"hard\.jsonl exists already, and is not overwritten"),
        (["new.csv"], DataError, r"must end in \.jsonl or \.parquet, got new\.csv"),
        (["new.jsonl", "--gallery", "answers.npy"], RangeError, "--gallery and a file of features belong together"),
        (["new.jsonl", "--normalize"], RangeError, "--normalize has an effect only together with --gallery"),
        (["new.jsonl", "--images", "."], RangeError, "--images has an effect only together with --pairs"),
        (["new.jsonl", "--num-negatives", "0"], RangeError, "num_negatives must be 1 or more"),
        (["new.jsonl", "--max-score=-2"], DataError, "nothing was written. Lower the margins"),
    ],
)
def test_what_mine_refuses_for_a_run(place, monkeypatch, arguments, error, message):
    monkeypatch.chdir(place[0])
    before = (place[0] / "hard.jsonl").read_bytes()
    with pytest.raises(error, match=message):
        invoke("mine", "runs/shapes", *arguments)
    assert (place[0] / "hard.jsonl").read_bytes() == before
    assert not list(place[0].glob("new*"))


def test_what_mine_refuses_for_files(place, tmp_path, monkeypatch):
    from safetensors.numpy import save_file

    monkeypatch.chdir(tmp_path)
    rows = numpy.eye(3, dtype=numpy.float32)

    def refused(message, *options, queries="q.npy"):
        with pytest.raises(DataError, match=message):
            invoke("mine", queries, "new.jsonl", "--gallery", "g.npy", *options)
        assert not Path("new.jsonl").exists()

    numpy.save("g.npy", rows)
    Path("q.npy").write_bytes(b"nothing")
    refused(r"cannot read the features q\.npy: .* write the file again")
    numpy.save("q.npy", rows)
    refused(r"texts of q\.npy must be in q\.txt .*q\.json .*neither exists")
    Path("q.txt").write_text("a\nb\n")
    Path("g.json").write_text(json.dumps(["x", "y\nz", "w"]))
    refused(r"q\.txt must have 3 texts, one for each row of q\.npy, got 2 entries")
    Path("q.txt").write_text("a\nb\nc\n")
    Path("q.json").write_text("{}")
    refused("both exist")
    Path("q.txt").unlink()
    refused(r"q\.json must have 3 texts.* got dict")
    Path("q.json").write_text("[")
    refused(r"cannot read the texts q\.json")
    Path("q.json").write_text(json.dumps(["a", "b", "c"]))
    save_file({"one": rows, "two": rows}, "two.safetensors")
    refused(r"two\.safetensors must have one tensor, it has one, two", queries="two.safetensors")
    Path("a.bin").touch()
    refused(r"ends in \.npy or \.safetensors", queries="a.bin")
    numpy.save("right.npy", numpy.array([[1, -1], [0, 2], [2, -1]]))
    invoke("mine", "q.npy", "new.jsonl", "--gallery", "g.npy", "--positives", "right.npy", "--num-negatives", "1")
    made = [json.loads(line) for line in Path("new.jsonl").read_text().splitlines()]
    assert [(row["anchor"], row["positive"], row["negative"]) for row in made] == [
        *(("a", "y\nz", "x"), ("b", "x", "y\nz"), ("b", "w", "y\nz"), ("c", "w", "x")),
    ]


def test_the_report_has_counted_and_measured_memory(place):
    page = (place[0] / "runs" / "shapes" / "report.html").read_text()
    assert "<td>peak</td>" in page
    assert re.search(r"<td>measured peak of the whole process</td><td>[\d,.]+ [MG]iB</td>", page)
    assert 'class="right"' in page  # the queries are captions, and 4 held-out images are few enough to find all


def test_a_stopped_run_and_one_without_a_checkpoint_have_a_report(place, tmp_path):
    shutil.copytree(place[0] / "runs" / "shapes", tmp_path / "run")
    (tmp_path / "run" / "report.html").unlink()
    status = {"status": "stopped", "step": 20, "steps": 50, "signal": 15, "error": "", "checkpoint": ""}
    (tmp_path / "run" / "status.json").write_text(json.dumps(status))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place[0])  # the data is given by a relative path
        invoke("report", tmp_path / "run")
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Stopped by signal 15 after step 20 of 50" in page
    assert "Searches" in page
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    result = invoke("report", tmp_path / "run")
    assert "No searches: " in result.output
    page = (tmp_path / "run" / "report.html").read_text()
    assert "has no checkpoint yet" in page
    assert "<svg" in page  # the curves are there


def test_plans_of_the_page(place):
    words = said(place, "plan lm my-language-model")
    assert "my-language-model" in words
    assert "949" in words  # 124,439,808 parameters of GPT 2 at 8 bytes, in MiB
    assert "tilewise + offload" in said(place, "plan clip")


class FakeWandb(types.ModuleType):
    """Records what a run sends."""

    def __init__(self):
        super().__init__("wandb")
        self.__spec__ = ModuleSpec("wandb", None)
        self.runs = []

    def init(self, **settings):
        run = types.SimpleNamespace(settings=settings, lines=[], finished=False)
        run.log = lambda numbers, step: run.lines.append((step, numbers))
        run.finish = lambda: setattr(run, "finished", True)
        self.runs.append(run)
        return run


@pytest.mark.parametrize("installed", [True, False])
def test_weights_and_biases(place, tmp_path, monkeypatch, installed):
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake if installed else None)
    config = load_config(
        None,
        [
            f"data.path={place[0] / 'pictures'}", f"output.folder={tmp_path / 'run'}", "loop.steps=2", "loop.threads=1",
            "output.wandb=mine", "output.report=false", "output.tensorboard=false", "optim.extend=restart",
        ],
    )  # fmt: skip
    if not installed:
        with pytest.raises(ConfigError, match=r"output\.wandb='mine' needs the package wandb.*output\.wandb=''"):
            train(config)
        assert not (tmp_path / "run").exists()
        return
    train(config)
    (run,) = fake.runs
    assert run.finished
    assert run.settings["project"] == "mine"
    assert run.settings["config"]["model"]["name"] == "clip-tiny"
    assert [step for step, _ in run.lines] == [1, 2, 2]
    assert {"train/loss", "train/lr"} <= set(run.lines[0][1])
    assert "eval/t2i_r10" in run.lines[2][1]
    longer = load_config(tmp_path / "run" / "config.toml", ["loop.steps=3"])
    train(longer)
    assert fake.runs[1].settings["id"] == run.settings["id"]


def test_nothing_is_sent_by_default():
    assert load_config(None).output.wandb == ""


@pytest.mark.parametrize("name, warned", [("clip-tiny", True), ("auto", False), ("clip", False)])
def test_a_name_that_does_not_match_the_weights(place, tmp_path, name, warned):
    shown = io.StringIO()
    train(
        load_config(
            None,
            [
                f"data.path={place[0] / 'pictures'}", f"output.folder={tmp_path / 'run'}", "loop.steps=1",
                f"model.name={name}", f"model.weights={write_clip(tmp_path / 'w')}", "output.report=false",
                "output.tensorboard=false", "loop.threads=1",
            ],
        ),
        Console(file=shown, width=400),
    )  # fmt: skip
    warning = "warning: model.name='clip-tiny' does not match the weights"
    assert (warning in shown.getvalue()) is warned
    if warned:
        assert "image width 32 instead of 64" in shown.getvalue()
        assert "Set model.name=clip\n" in shown.getvalue()


def test_weights_of_a_known_size_name_it():
    from tilewise.train.models.pretrained import name_mismatch

    class Tower:
        def __init__(self, width, **more):
            self.hidden_size, self.num_hidden_layers = width, 12
            vars(self).update(more)

    class Both:
        vision_config, text_config = Tower(768, patch_size=32, image_size=224), Tower(512)

    config = load_config(None, ["data.path=x", "model.name=clip-vit-b-16", "model.weights=w"]).model
    sentence = name_mismatch(config, {"": Both()})
    assert "patch size 32 instead of 16" in sentence
    assert sentence.endswith("Set model.name=clip-vit-b-32")


def test_the_demo_says_how_to_start_the_command_again(tmp_path, monkeypatch):
    program = tmp_path / ".venv" / "bin" / "tilewise"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(program)])
    monkeypatch.setenv("PATH", "/usr/bin")
    assert own_command() == ".venv/bin/tilewise"
    monkeypatch.setenv("PATH", str(program.parent))
    assert own_command() == "tilewise"
    monkeypatch.setenv("PATH", "/usr/bin")
    monkeypatch.setattr(sys, "argv", ["x.py"])
    assert own_command().endswith(" -m tilewise.train.cli")


def test_the_demo_shows_its_result_on_the_first_rank_and_only_a_report_that_exists(tmp_path, monkeypatch):
    result = demo.RunResult(tmp_path, 1, True, 0, {})
    monkeypatch.setattr(demo, "train", lambda config, console: result)
    monkeypatch.setattr(demo, "recall_table", lambda metrics: "recalls")
    monkeypatch.setattr(
        demo, "open_gallery", lambda folder, console: types.SimpleNamespace(search=lambda q, top: [[]] * len(q))
    )
    monkeypatch.setattr(demo, "save_sheet", lambda *unused: "sheet.png")

    def shown():
        console = Console(file=io.StringIO())
        demo.run_demo(console, [])
        return console.file.getvalue()

    assert "recalls" in shown()
    assert "report:" not in shown()
    (tmp_path / "report.html").write_text("")
    assert "report:" in shown()
    monkeypatch.setenv("RANK", "1")
    assert shown() == ""


def test_a_gallery_of_captions_has_each_caption_once(place):
    gallery = open_gallery(place[0] / "runs" / "shapes", path=str(place[0] / "pictures"))
    assert isinstance(gallery, Gallery)
    labels = [hit.label for hit in gallery.captions([place[0] / "pictures" / "00.png"], top=100)[0]]
    assert len(labels) == len(set(labels)) == 40
