"""Text of a user's data is printed and never obeyed: captions, file names, class names, error messages, the report."""

import csv
import io
import json
import re
import sys
import tarfile

import pyarrow
import pyarrow.parquet
import pytest
import torch
from rich.table import Table
from tests.train.small_pictures import picture

from tilewise.tools import doctor, tune, tune_cli
from tilewise.train import cli, terminal
from tilewise.train.charts import bar_chart
from tilewise.train.config import RunConfig
from tilewise.train.progress import RunProgress, counted
from tilewise.train.search import Hit, show_hits
from tilewise.train.settings import build, read_toml, to_toml
from tilewise.train.status import Status, write_status
from tilewise.train.terminal import Terminal, one_cell, say
from tilewise.train.untrusted import one_line, visible

CONTROLS = [*range(0x20), *range(0x7F, 0xA0), 0x61C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A)]
OBEYED = re.compile("[" + "".join(map(chr, set(CONTROLS) - {0x0A})) + "\ud800-\udfff]")
OWN = re.compile(r"\x1b\[[0-9;]*m|\x1b\[\?25[lh]|\x1b\[1A|\x1b\[2K|\r")  # styles of rich, its cursor and its lines
HOSTILE = "red \x1b]0;OWNED\x07\x1b[2J\x9b2J\u202ecar [red]x[/] [/nope] :car: <script> \x7f\x85\u2028z"
SHOWN = r"red \x1b]0;OWNED\x07\x1b[2J\x9b2J\u202ecar [red]x[/] [/nope] :car: <script> \x7f z"
NAME = HOSTILE.replace("/", "|")  # of a file or folder
SMALL = ["model.name=clip-tiny", "loop.threads=1", "loop.steps=1", "loop.device=cpu", "output.tensorboard=false"]


def harmless(text):
    return not OBEYED.search(OWN.sub("", text))


def test_what_counts_as_harmless():
    assert harmless("\x1b[1mbold\x1b[0m\n\r")
    assert not any(harmless(chr(number)) for number in CONTROLS if chr(number) not in "\n\r")
    assert not any(map(harmless, ("\x1b[2J", "\x1b]0;x\x07", "\ud800", HOSTILE)))


def test_every_control_character_is_shown_or_is_a_space():
    for character in [*map(chr, CONTROLS), "\ud800", "\udfff"]:
        shown = visible(f"a{character}b")
        assert re.fullmatch(r"a( |\n|\\x[0-9a-f]{2}|\\u[0-9a-f]{4})b", shown), ascii(character)
        assert "\n" not in one_line(f"a{character}b")
    assert one_line(HOSTILE) == SHOWN
    assert one_line("two\r\n  lines\n") == "two lines"
    assert visible("größe 汉字 👩‍👩‍👧 \\x1b") == "größe 汉字 👩‍👩‍👧 \\x1b"  # nothing to change


@pytest.fixture
def screen():
    """A terminal with colours, and what it shows."""
    shown = io.StringIO()
    return Terminal(file=shown, force_terminal=True, width=200, color_system="truecolor"), shown


def test_a_terminal_obeys_nothing_that_is_printed_in_any_way(screen):
    """Even if a caller forgets to clean the text of a cell, a title or a bar."""
    console, shown = screen
    table = Table(title=HOSTILE)
    table.add_column(HOSTILE)
    table.add_row(HOSTILE)
    console.print(table)
    console.print(HOSTILE, one_cell(HOSTILE), style="bold")
    console.print(one_cell(HOSTILE, "red"), soft_wrap=True)
    say(console, HOSTILE)
    with counted(console, HOSTILE) as watch:
        watch(1, 2)
    bar = RunProgress(console, 4, 1)
    bar.recall = HOSTILE
    bar.step(2, {"loss": 1.0, "skipped": 0}, {"pairs_per_second": 1.0, "memory_bytes": 1.0})
    bar.close()
    assert harmless(shown.getvalue())
    assert shown.getvalue().count("OWNED") >= 8
    assert "\x1b[1m" in shown.getvalue()  # its own styles are obeyed


def test_a_line_break_in_a_cell_breaks_no_table(screen):
    console, shown = screen
    table = Table()
    table.add_column("class")
    table.add_row(one_cell("red\ncar\r\n|"))
    console.print(table)
    assert "red car |" in shown.getvalue()
    assert len(shown.getvalue().splitlines()) == 5


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_line_break_in_a_caption_or_a_query_adds_no_line(is_terminal):
    shown = io.StringIO()
    console = Terminal(file=shown, force_terminal=is_terminal, width=100)
    image = None if not is_terminal else torch.zeros(1, 16, 16, dtype=torch.uint8)
    show_hits(console, "a\nb", [Hit(0, 0.5, "two\nlines\r\n  0.999  forged", image)])
    lines = [line.strip() for line in OWN.sub("", shown.getvalue()).splitlines()]
    assert lines[0] == "a b"
    assert not any(line.startswith(("0.999", "lines", "b")) for line in lines)
    if not is_terminal:
        assert lines[1:] == ["0.500  two lines 0.999  forged"]


def test_brackets_and_names_of_emoji_are_plain_text(screen):
    console, shown = screen
    for line in ("[red]x[/]", "[/nope]", ":car:"):
        say(console, line)
        console.print(line)
    assert OWN.sub("", shown.getvalue()) == "[red]x[/]\n" * 2 + "[/nope]\n" * 2 + ":car:\n" * 2


# -- commands on hostile data --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Images with hostile captions and names, some of them damaged, and classes with hostile names."""
    folder = tmp_path_factory.mktemp("hostile")
    for colour, name in (("red", "a"), ("blue", "b"), ("green", f"c {NAME}"), ("white", "d")):
        (folder / "pictures" / "pairs").mkdir(parents=True, exist_ok=True)
        (folder / "pictures" / "pairs" / f"{name}.png").write_bytes(picture(colour))
        (folder / "pictures" / "pairs" / f"{name}.txt").write_text(f"{colour} {HOSTILE}", encoding="utf-8")
    (folder / "pictures" / "pairs" / f"broken {NAME}\n.png").write_bytes(b"x")
    for colour in ("red", "blue"):
        (folder / "classes" / f"{colour} {NAME}\n2").mkdir(parents=True)
        (folder / "classes" / f"{colour} {NAME}\n2" / "1.png").write_bytes(picture(colour))
        (folder / "classes" / f"{colour} {NAME}\n2" / f"{NAME}.png").write_bytes(b"x")
    return folder


def test_every_command_prints_hostile_data_harmlessly(data, run_main, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # a terminal, to rich
    monkeypatch.setenv("COLUMNS", "300")
    pairs, run = data / "pictures", data / "run"
    for command in (
        ["train", f"data.path={pairs}", f"data.eval_path={pairs}", f"output.folder={run}", *SMALL],
        ["evaluate", run, "--pairs", pairs, "--zero-shot", data / "classes"],
        ["search", run, HOSTILE, f"red {HOSTILE}", "--pairs", pairs],
        ["search", run, "--image", pairs / "pairs" / f"c {NAME}.png", "--pairs", pairs],
        ["embed", run, data / f"{NAME}.safetensors", "--pairs", pairs],
        ["export", run, data / NAME],
        ["report", run],
        ["status", run],
    ):
        code, out, errors = run_main(*command)
        assert code == 0, errors
        assert harmless(out), (command, out)
        assert harmless(errors), (command, errors)
        if command[0] not in ("report", "status"):
            assert r"\x1b]0;OWNED\x07\x1b[2J" in out, out
    page = (run / "report.html").read_text(encoding="utf-8")
    assert harmless(page)
    assert "<script>" not in page
    assert r"\x1b]0;OWNED\x07\x1b[2J\x9b2J\u202ecar [red]x[/] [/nope] :car: &lt;script&gt;" in page
    names = json.loads((data / f"{NAME}.json").read_text(encoding="utf-8"))
    assert f"red {HOSTILE}".splitlines()[0] in names["texts"]  # files keep the data as it is


def test_every_reader_quotes_hostile_data_harmlessly(tmp_path, refusal):
    row = {f"image {HOSTILE}": "a.png", HOSTILE: "x"}
    with (tmp_path / "a.csv").open("w", newline="", encoding="utf-8") as file:
        csv.DictWriter(file, row).writeheader()
    (tmp_path / "a.jsonl").write_text(
        json.dumps(row, ensure_ascii=False).replace("\u2028", "") + "\n", encoding="utf-8"
    )
    (tmp_path / "b.jsonl").write_text(HOSTILE, encoding="utf-8")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "a.parquet")
    (tmp_path / "a.json").write_text(json.dumps({"images": [], "annotations": [{"image_id": HOSTILE}]}))
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        info = tarfile.TarInfo(f"{NAME}.png")
        tar.addfile(info, io.BytesIO())
    for name in ("a.csv", "a.jsonl", "b.jsonl", "a.parquet", "a.json", "a.tar", f"{NAME}.csv", NAME, f"{NAME}.zip"):
        said = refusal("train", f"data.path={tmp_path / name}", f"output.folder={tmp_path / 'run'}")
        assert harmless(said), (name, said)
        assert name == "b.jsonl" or "OWNED" in said, (name, said)


@pytest.mark.parametrize(
    "command",
    [
        ["evaluate", HOSTILE], ["search", "run", f"--{HOSTILE}"], [HOSTILE], ["train", f"data.{HOSTILE}=3"],
        ["plan", "lm", HOSTILE], ["plan", "clip", HOSTILE], ["config", f"{HOSTILE}=3"], ["tune", "--dtype", HOSTILE],
        ["search", "run", "x", "--top", HOSTILE], ["search"], ["status", "\udcff\udcfe"],
    ],
)  # fmt: skip
def test_arguments_are_quoted_harmlessly(command, refusal):
    assert harmless(refusal(*command))


def test_a_model_in_a_hostile_folder_is_planned(tmp_path, run_main):
    from transformers import LlamaConfig

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    LlamaConfig(vocab_size=64, **sizes).save_pretrained(tmp_path / f"{NAME}\n2")
    code, out, errors = run_main("plan", "lm", tmp_path / f"{NAME}\n2", "--memory", "80GiB")
    assert (code, errors) == (0, "")
    assert harmless(out)
    assert "[red]x[|]" in out


def test_the_error_of_a_run_and_the_name_of_a_card_are_printed_harmlessly(tmp_path, run_main, monkeypatch):
    (tmp_path / "config.toml").write_text("")
    write_status(tmp_path, Status("failed", 1, 2, error=f"{HOSTILE}\nfinished: 2 steps"))
    code, out, _ = run_main("status", tmp_path)
    assert code == 1
    assert harmless(out)
    assert len(out.splitlines()) == 1
    monkeypatch.setattr(doctor, "find_devices", lambda: [doctor.Device(HOSTILE, "9.0", 80.0, False, HOSTILE)])
    monkeypatch.setattr(doctor, "device_problems", lambda device: [doctor.Problem(HOSTILE, "x")])
    monkeypatch.setattr(doctor, "fault_problems", lambda device, avoided: [doctor.Problem(HOSTILE, "y")])
    monkeypatch.setattr(doctor, "typical_calls", lambda device: [])
    for more in ([], ["--json"]):
        _, out, _ = run_main("doctor", *more)
        assert harmless(out)
        assert "OWNED" in out


def test_a_card_that_is_not_there_is_quoted_harmlessly(refusal, monkeypatch):
    def untunable(name):
        raise tune.Untunable(f"--device is one of cuda:0, got {name}")

    monkeypatch.setattr(tune_cli, "check_tunable", untunable)
    said = refusal("tune", "--device", HOSTILE)
    assert harmless(said)
    assert "OWNED" in said


def test_settings_are_printed_harmlessly_and_can_be_read_again(tmp_path, run_main):
    value = HOSTILE.replace("\u2028", "")
    code, out, _ = run_main("config", f"output.folder={tmp_path / 'x'}", f"data.text_column={json.dumps(value)}")
    assert code == 0
    assert harmless(out)
    (tmp_path / "c.toml").write_text(out, encoding="utf-8")
    assert build(RunConfig, read_toml(tmp_path / "c.toml")).data.text_column == value
    assert to_toml(build(RunConfig, read_toml(tmp_path / "c.toml")), help=True) == out.rstrip("\n") + "\n"


def test_an_unexpected_error_is_printed_harmlessly(tmp_path, run_main, monkeypatch):
    def fail(folder):
        raise KeyError(HOSTILE + "\n")

    class Quoted(Exception):
        def __str__(self):
            return HOSTILE

    def raw(folder):
        raise Quoted

    for fault in (fail, raw):
        monkeypatch.setattr("tilewise.train.status.read_status", fault)
        code, _, errors = run_main("status", tmp_path)
        assert code == 1
        assert errors.startswith("Traceback")
        assert harmless(errors)


def test_a_terminal_without_these_characters_shows_escapes(monkeypatch):
    output = io.BytesIO()
    stream = io.TextIOWrapper(output, "ascii", write_through=True)
    monkeypatch.setattr(sys, "stdout", stream)
    terminal.accept_any_text()
    say(cli._console(), "caf\xe9 \u6c49")
    assert output.getvalue() == b"caf\\xe9 \\u6c49\n"


def test_names_in_charts_are_no_tags():
    assert "<script>" not in bar_chart("<script>", [("<script>", 1.0, "<script>")])
