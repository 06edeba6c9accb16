"""The commands on one small run: train, evaluate, search, the report, the settings of the demo."""

import base64
import io
import json
import re
import shutil
import subprocess
import sys

import pytest
import torch
from PIL import Image
from tests.train.small_icons import write_small_icons
from tests.train.test_train_help import PROGRAM
from tests.train.test_train_portable import write_colours
from typer.testing import CliRunner

from tilewise.errors import CheckpointError, ConfigError, DataError, RangeError
from tilewise.train.cli import app
from tilewise.train.config import RunConfig
from tilewise.train.demo import demo_config
from tilewise.train.memory import DENSE_MATRICES, activation_bytes
from tilewise.train.settings import build, to_toml

SETTINGS = [
    "model.width=32", "model.depth=1", "model.text_buckets=512", "model.embed_dim=16", "loop.batch_size=64",
    "loop.chunk_size=32", "loop.steps=4", "loop.threads=1", "output.evaluate_every=2",
]  # fmt: skip


def invoke(*arguments):
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cli")
    (folder / "c.toml").write_text("")
    icons = write_small_icons(folder / "small.zip")
    result = invoke("train", folder / "c.toml", *SETTINGS, f"output.folder={folder / 'run'}", f"data.path={icons}")
    assert result.exit_code == 0, result.output
    shown = result.output.splitlines()
    assert shown[1].startswith(
        'model   name="icon"  embed_dim=16  width=32  '
    )  # settings that differ from the defaults, one line per section
    sizes = r"400 pairs, 60 held-out images; \d{2},\d{3} parameters on \S+; 4 steps, 6 per epoch"
    assert re.fullmatch(sizes, shown[4])
    assert shown[5] == f"all settings, defaults too: {folder / 'run' / 'config.toml'}"
    assert "betas" not in result.output
    assert "report.html" in result.output
    return folder / "run"


def test_search_writes_a_sheet_and_lists_the_best(run):
    result = invoke("search", run, "arrow left", "heart", "--top", 4)
    assert result.exit_code == 0
    assert "arrow left" in result.output
    assert len(re.findall(r"^[ *] -?\d\.\d{3}  ", result.output, re.M)) == 8
    with Image.open(run / "search.png") as sheet:
        assert sheet.width > 300
        assert sheet.convert("L").getextrema()[0] < 128


@pytest.mark.parametrize("words", [[""], ["heart", "  "]])
def test_an_empty_query_is_refused(run, words):
    with pytest.raises(RangeError, match="Leave the empty one out"):
        invoke("search", run, *words)


def test_brackets_in_words_and_paths_are_no_markup(run, tmp_path):
    sheet = tmp_path / "[bold]s.png"
    result = invoke("search", run, "[/red] arrow", "--top", 1, "--sheet", sheet)
    assert "[/red] arrow" in result.output
    assert "[bold]s.png" in result.output.replace("\n", "")


def test_a_device_that_does_not_exist_is_refused(run):
    with pytest.raises(ConfigError, match="auto, cpu or cuda, got 'gpu'"):
        invoke("search", run, "x", "--device", "gpu")


def test_evaluate_and_search_take_a_checkpoint(run):
    kept = [path.name for path in sorted((run / "checkpoints").glob("step-*"))]
    last = int(kept[-1].removeprefix("step-"))
    for which in ("last", last):
        assert f"checkpoints/{kept[-1]}" in invoke("evaluate", run, "--checkpoint", which).output.replace("\n", "")
    assert invoke("search", run, "heart", "--checkpoint", "last").exit_code == 0
    for command in (("evaluate", run), ("search", run, "heart")):
        with pytest.raises(CheckpointError, match="keeps no checkpoint '999'; there are auto, best, last"):
            invoke(*command, "--checkpoint", "999")


def test_evaluate_prints_and_keeps_the_recalls(run):
    result = invoke("evaluate", run)
    assert result.output.startswith(f"checkpoint: {run / 'checkpoints' / 'step-0000000'}")
    assert "text to image" in result.output
    kept = json.loads((run / "evaluation.json").read_text())
    last = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()][-1]
    assert result.output.endswith(f"written to {run / 'evaluation.json'}\n")
    assert kept["retrieval"]["i2t_r10"] == pytest.approx(last["i2t_r10"], abs=0.05)


def test_tensorboard_events_are_written(run):
    assert list((run / "tensorboard").glob("events*"))


def test_the_report_holds_everything_and_needs_nothing(run):
    page = (run / "report.html").read_text()
    for words in ("recall at 10", "Searches", "Memory", "dense", "peak", "config.toml", "shopping cart", "Loss"):
        assert words in page, words
    for outside in ("http://", "https://", "<script", "src='", 'src="/'):
        assert outside not in page.replace("http://www.w3.org/2000/svg", ""), outside
    pictures = re.findall(r'src="data:image/png;base64,([^"]+)"', page)
    assert len(pictures) == 120
    with Image.open(io.BytesIO(base64.b64decode(pictures[0]))) as first:
        assert first.size == (64, 64)


def test_the_report_opens_in_a_browser_without_errors(run, tmp_path):
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no chromium on this machine (Debian package: chromium)")
    command = [
        browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
        "--enable-logging=stderr", "--log-level=0", f"--user-data-dir={tmp_path / 'profile'}",
        "--window-size=1100,2400", f"--screenshot={tmp_path / 'page.png'}", f"file://{(run / 'report.html').resolve()}",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert console == []
    with Image.open(tmp_path / "page.png") as shot:
        assert shot.width == 1100
        assert len(shot.convert("L").getcolors(256) or []) > 40  # not an empty page


def test_unknown_runs_and_settings_are_refused(tmp_path, run):
    with pytest.raises(ConfigError, match=r"no config\.toml"):
        invoke("evaluate", tmp_path)
    (tmp_path / "config.toml").write_text(to_toml(RunConfig()))
    with pytest.raises(CheckpointError, match="train it first"):
        invoke("search", tmp_path, "x")
    with pytest.raises(ConfigError, match="did you mean 'loss'"):
        invoke("train", tmp_path / "config.toml", "los.name=dense")
    (tmp_path / "classes" / "red").mkdir(parents=True)
    Image.new("RGB", (8, 8), "red").save(tmp_path / "classes" / "red" / "1.png")
    with pytest.raises(DataError, match="colour images"):
        invoke("evaluate", run, "--zero-shot", tmp_path / "classes")


@pytest.mark.parametrize("command", ["evaluate", "status"])
def test_what_is_no_run_is_named(tmp_path, run, command):
    (tmp_path / "runs" / "one").mkdir(parents=True)
    (tmp_path / "runs" / "one" / "config.toml").write_text("")
    with pytest.raises(ConfigError, match=r"nowhere does not exist\. Give the folder of a run"):
        invoke(command, tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=rf"is a file.*which may be {run}$"):
        invoke(command, run / "config.toml")
    with pytest.raises(ConfigError, match=r"runs below it: .*one$"):
        invoke(command, tmp_path / "runs")
    with pytest.raises(ConfigError, match=r"Give .*config\.toml"):
        invoke("train", run)


def test_a_run_that_was_moved_does_not_begin_anew(tmp_path, run):
    moved, there = tmp_path / "moved", run / "config.toml"
    shutil.copytree(run, moved)
    with pytest.raises(ConfigError, match=rf"is the folder of a run.*add output\.folder={moved}"):
        invoke("train", moved / "config.toml")
    assert invoke("train", moved / "config.toml", f"output.folder={moved}").exit_code == 0
    assert invoke("train", moved / "config.toml").exit_code == 0  # its settings now have the new folder
    assert invoke("train", there).exit_code == 0
    shutil.copy(there, tmp_path / "config.toml")
    assert invoke("train", tmp_path / "config.toml").exit_code == 0  # settings outside a run folder may name any folder


def test_zero_shot_and_other_pairs_with_a_colour_model(tmp_path):
    colours = {"red": (220, 0, 0), "green": (0, 200, 0), "blue": (0, 0, 210)}
    for name, colour in colours.items():
        (tmp_path / "classes" / name).mkdir(parents=True)
        for i in range(6):
            shade = tuple(max(0, c - 5 * i) for c in colour)
            Image.new("RGB", (40, 32), shade).save(tmp_path / "classes" / name / f"{i}.png")
            (tmp_path / "classes" / name / f"{i}.txt").write_text(name)
    (tmp_path / "c.toml").write_text("")
    settings = [
        "model.name=clip-tiny", "data.source=folder", f"data.path={tmp_path / 'classes'}", "data.eval_share=0",
        "loop.batch_size=18", "loop.chunk_size=8", "loop.steps=15", "loop.threads=1", "optim.lr=2e-3",
        f"output.folder={tmp_path / 'run'}", "output.report=false", "output.tensorboard=false",
    ]  # fmt: skip
    assert invoke("train", tmp_path / "c.toml", *settings).exit_code == 0
    result = invoke("evaluate", tmp_path / "run", "--zero-shot", tmp_path / "classes", "--pairs", tmp_path / "classes")
    assert "zero-shot over 3 classes" in result.output
    assert "(chance 33.3 %)" in result.output
    assert "top-5" not in result.output
    (file,) = (tmp_path / "run").glob("evaluation-classes-classes-*.json")  # of pairs and of classes
    found = json.loads(file.read_text())
    assert found["zero_shot"]["top1"] > 0.6
    assert found["zero_shot"]["top5"] == 1.0
    with pytest.raises(DataError, match=r"no held-out images to search in\. Give other images with --pairs"):
        invoke("search", tmp_path / "run", "red")
    (tmp_path / "above").mkdir()
    (tmp_path / "classes").rename(tmp_path / "above" / "classes")
    with pytest.raises(DataError, match="only one sub-folder with images, 'classes', so every answer would be right"):
        invoke("evaluate", tmp_path / "run", "--zero-shot", tmp_path / "above")
    (tmp_path / "above" / "classes").rename(tmp_path / "classes")
    result = invoke("search", tmp_path / "run", "red", "--top", "3", "--pairs", tmp_path / "classes")
    assert re.findall(r"\d  (\w+)\n", result.output) == ["red"] * 3
    assert f"sheet: {tmp_path / 'run' / 'search.png'}\n" in result.output


@pytest.mark.parametrize("command, needed", [
    (("evaluate", "run", "--images", "x"), "--pairs"),
    (("evaluate", "run", "--text-column", "title"), "--pairs"),
    (("evaluate", "run", "--template", "a {}"), "--zero-shot"),
    (("search", "run", "red", "--images", "x"), "--pairs"),
    (("search", "run", "--image", "a.png", "--sheet", "b.png"), "words to search for"),
    (("embed", "run", "f.safetensors", "--images", "x"), "--pairs"),
])  # fmt: skip
def test_an_option_without_effect_is_refused(command, needed):
    """Before the run is opened: it does not exist here."""
    with pytest.raises(RangeError, match=f"{command[-2]} has an effect only together with {needed}"):
        invoke(*command)


def test_broken_images_are_left_out_and_named(tmp_path):
    for name in ("red", "blue"):
        (tmp_path / "classes" / name).mkdir(parents=True)
        for i in range(4):
            Image.new("RGB", (16, 16), name).save(tmp_path / "classes" / name / f"{i}.png")
    (tmp_path / "classes" / "red" / "0.png").write_bytes(b"junk")
    (tmp_path / "pairs.csv").write_text("file,title\nclasses/red/1.png,red\nclasses/blue/1.png,blue\n")
    (tmp_path / "c.toml").write_text("")
    run, classes = tmp_path / "run", tmp_path / "classes"
    settings = [
        "model.name=clip-tiny", "data.source=folder", f"data.path={classes}", f"data.eval_path={classes}",
        "loop.batch_size=8", "loop.chunk_size=8", "loop.steps=1", "loop.threads=1", f"output.folder={run}",
        "output.report=false", "output.tensorboard=false",
    ]  # fmt: skip
    said = " ".join(invoke("train", tmp_path / "c.toml", *settings).output.split())
    assert "held-out pairs: 1 skipped" in said
    assert "training pairs: 1 skipped" in said
    result = invoke("evaluate", run, "--zero-shot", classes, "--pairs", tmp_path / "pairs.csv",
                    "--image-column", "file", "--text-column", "title")  # fmt: skip
    assert "zero-shot over 2 classes" in result.output
    assert "1 skipped" in result.output
    assert "red/0.png" in result.output.replace("\n", "")
    moved = classes.rename(tmp_path / "elsewhere")
    result = invoke("evaluate", run, "--zero-shot", moved)
    assert "no recall: the held-out pairs" in result.output
    assert "zero-shot over 2 classes" in result.output
    with pytest.raises(DataError, match="do not exist"):
        invoke("evaluate", run, "--pairs", tmp_path / "nowhere")
    with pytest.raises(DataError, match="one sub-folder per class"):
        invoke("evaluate", run, "--zero-shot", tmp_path / "nowhere")


def test_other_settings_are_refused_with_both_values(run):
    with pytest.raises(ConfigError, match=r"loop\.seed was 0, now 5"):
        invoke("train", run / "config.toml", "loop.seed=5")


@pytest.mark.parametrize("command", ["evaluate", "search", "export"])
def test_a_small_model_starts_without_large_packages(run, tmp_path, command):
    """torch takes most of the start. transformers, sympy and dynamo would double it."""
    more = {
        "evaluate": [],
        "search": ["heart", "--sheet", str(tmp_path / "s.png")],
        "export": [str(tmp_path / "model")],
    }
    program = PROGRAM.format(arguments=[command, str(run), *more[command]])
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=600)
    code, modules = json.loads(done.stdout.splitlines()[-1])
    assert code == 0
    assert "torch" in modules
    assert {"transformers", "sympy", "pyarrow", "tensorboard", "matplotlib", "triton"} & set(modules) == set()


@pytest.fixture(scope="module")
def clip_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clip")
    pictures = write_colours(folder / "data")
    result = invoke("train", f"data.path={pictures}", f"output.folder={folder / 'run'}", "loop.steps=1")
    assert result.exit_code == 0, result.output
    assert "clip-tiny" in (folder / "run" / "config.toml").read_text()
    return folder / "run"


@pytest.mark.parametrize("command", ["evaluate", "search", "export"])
def test_a_clip_model_starts_without_large_packages(clip_run, tmp_path, command):
    """Its towers need no transformers, which would take longer than torch."""
    test_a_small_model_starts_without_large_packages(clip_run, tmp_path, command)


def test_version_and_options_with_dashes(run):
    assert re.match(r"tilewise \d", invoke("--version").output)
    with pytest.raises(ConfigError, match="without dashes"):
        invoke("train", run / "config.toml", "--loop.steps=5")


def test_config_prints_settings_that_can_be_read_again(tmp_path):
    import tomllib

    result = invoke("config", "loss.name=local")
    assert build(RunConfig, tomllib.loads(result.output)).loss.name == "local"
    assert "# peak learning rate" in result.output


@pytest.mark.parametrize("cuda", [False, True])
def test_the_demo_has_large_batches_through_the_cache(cuda):
    config = demo_config(["output.folder=x"], cuda=cuda)
    assert config.loop.batch_size >= 4096
    assert config.loop.chunk_size < config.loop.batch_size
    assert config.loss.name == "tilewise"
    assert config.output.folder == "x"


def test_a_first_argument_that_is_too_long_for_a_file_is_read_as_a_setting(tmp_path):
    long = "::".join(f"{tmp_path}/{i}.tar" for i in range(10)) + "x" * 300
    with pytest.raises(ConfigError, match=r"loop\.steps must be at least 0"):
        invoke("train", f"data.path={long}", "loop.steps=-1")
    with pytest.raises(ConfigError, match="cannot read the configuration x"):
        invoke("train", "x" * 300)


def test_names_that_are_too_long_are_one_sentence(run_main):
    code, _, errors = run_main("evaluate", "x" * 300)
    assert code == 1
    assert errors.startswith("tilewise: ")
    assert errors.count("\n") == 1


def test_help_is_quick_to_read_and_names_the_commands():
    result = invoke("--help")
    for command in ("train", "evaluate", "search", "embed", "report", "export", "status", "demo", "config", "plan"):
        assert command in result.output


def test_activations_are_counted_once_per_storage():
    x = torch.randn(100, 10, requires_grad=True)
    assert activation_bytes(lambda: (x.exp() * x.exp()).sum()) == 2 * 4000
    assert activation_bytes(lambda: x + 1) == 0
    assert DENSE_MATRICES == 4


def test_the_demo_runs_to_its_report(tmp_path):
    icons = write_small_icons(tmp_path / "small.zip")
    extra = ["optim.warmup_steps=1", f"data.path={icons}", f"output.folder={tmp_path / 'demo'}"]
    result = invoke("demo", *SETTINGS, *extra)
    assert result.exit_code == 0
    for words in ("held-out recall", "text to image", "shopping cart", "report:", " search ", "train data.path=FOLDER"):
        assert words in result.output
    assert (tmp_path / "demo" / "report.html").is_file()
    assert (tmp_path / "demo" / "searches.png").is_file()


def test_pictures_in_a_terminal(run):
    from rich.console import Console

    from tilewise.train.search import open_gallery, show_hits

    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True, width=100, color_system="truecolor")
    show_hits(console, "bell", open_gallery(run).search(["bell"], top=5)[0])
    assert shown.getvalue().count("\u2580") >= 16 * 8 * 3


def test_a_live_bar_in_a_terminal():
    from rich.console import Console

    from tilewise.train.progress import RunProgress

    shown = io.StringIO()
    bar = RunProgress(Console(file=shown, force_terminal=True, width=140), steps=4, done=1)
    bar.evaluated(10, 0.25)
    bar.step(2, {"loss": 1.5, "skipped": 3}, {"pairs_per_second": 1234.0, "memory_bytes": 2**30})
    bar.close()
    for words in ("loss 1.500", "recall@10 25.0%", "1,234 pairs/s", "1,024 MiB", "3 skipped"):
        assert words in shown.getvalue()
