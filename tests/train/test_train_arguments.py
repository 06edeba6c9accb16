"""Arguments and surroundings that no one means: one sentence and an exit code, never a traceback or a hang."""

import os
import subprocess
import sys

import pytest
from tests.train.test_train_portable import settings, write_colours

from tilewise.errors import DataError
from tilewise.train.data.shards import MOST_SHARDS, expand_shards
from tilewise.train.loop import train

BYTES = os.fsdecode(b"\xff\xfe")  # no UTF-8
DIGITS = "9" * 5000
DEEP = "/".join("a" * 1500)
START = [sys.executable, "-m", "tilewise"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("arguments")
    train(settings(write_colours(folder / "data", each=1), folder / "run", "model.name=clip-tiny", "loop.steps=1"))
    return folder / "run"


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A current folder with things that are no files."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "dangling").symlink_to(tmp_path / "none")
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("x")
    return tmp_path


@pytest.mark.parametrize("name", ["loop", "loop/x", "folder/../file", "file/x", "\0", "n" * 300, DEEP])
def test_places_to_which_nothing_can_be_written(here, run, name, refusal, usual_recursion):
    for command in (
        ["export", run, name], ["search", run, "cat", "--sheet", name],
        ["embed", run, f"{name}/f.safetensors"], ["train", f"data.path={run.parent / 'data'}", f"output.folder={name}"],
    ):  # fmt: skip
        if name == "folder/../file" and command[0] == "search":  # it can be written
            continue
        assert "Traceback" not in refusal(*command)


@pytest.mark.parametrize("name", ["", "loop", "dangling", "folder", "file", BYTES, "\0", "n" * 300, DEEP, "/dev/null"])
def test_things_that_are_no_run(here, name, refusal, usual_recursion):
    commands = ["evaluate"], ["status"], ["search", "x"], ["report"], ["export", "o"], ["embed", "o.safetensors"]
    for command, *more in commands:
        refusal(command, name, *more)


@pytest.mark.parametrize("which", [DIGITS, f"-{DIGITS}", "", "-1", "1.0", "0x1", "\u0661", "Best", BYTES, "1\n"])
@pytest.mark.parametrize(
    "command", [["evaluate"], ["search", "x"], ["report"], ["export", "o"], ["embed", "o.safetensors"]]
)
def test_steps_that_are_no_steps(here, run, command, which, refusal):
    said = refusal(command[0], run, *command[1:], f"--checkpoint={which}")
    assert "keeps no checkpoint" in said
    assert "there are auto, best, last, 1" in said


@pytest.mark.parametrize("name", ["/dev/zero", "/dev/full"])
def test_a_device_that_never_ends_is_no_settings_file(name, tmp_path, refusal):
    if not os.path.exists(name):
        pytest.skip(f"this system has no {name}")
    assert "more than 16 MiB, which no settings have" in refusal("train", name)


def test_settings_may_come_from_a_pipe(run, here):
    settings = f"[data]\npath = {str(run.parent / 'none')!r}\n"
    done = subprocess.run([*START, "train", "/dev/stdin"], input=settings, capture_output=True, text=True, timeout=600)
    assert done.returncode == 1
    assert "none does not exist; data.source='folder' needs a folder" in done.stderr


@pytest.mark.parametrize("pattern", ["{1..99999999999}.tar", "{1..9999}{1..9999}.tar", f"{{1..{DIGITS}}}.tar"])
def test_braces_that_name_more_shards_than_there_are(pattern, refusal):
    with pytest.raises(DataError, match=rf"more than {MOST_SHARDS:,} shards, got .*Name fewer"):
        expand_shards(pattern)
    assert "more than 1,000,000 shards" in refusal("train", f"data.path={pattern}")
    assert len(expand_shards("{001..100}-{a,b}.tar")) == 200
    assert expand_shards("{08..10}-{a,b}.tar")[:3] == ["08-a.tar", "08-b.tar", "09-a.tar"]


def test_queries_and_names_that_are_no_utf8_are_shown(here, run, run_main):
    code, out, errors = run_main("search", run, BYTES, "--sheet", f"{BYTES}.png")
    assert (code, errors) == (0, "")
    assert out.count(r"\udcff\udcfe") == 2
    code, out, errors = run_main("export", run, BYTES)
    assert (code, errors) == (0, "")
    assert r"\udcff\udcfe" in out


@pytest.mark.parametrize(
    "command, of",
    [
        (["nothing"], "tilewise"), (["--nothing"], "tilewise"), (["search"], "tilewise search"),
        (["search", "run", "x", "--top", "many"], "tilewise search"), (["plan", "x"], "tilewise plan"),
        (["search", "run", "x", "--top", "0"], "tilewise search"), (["search", "run", "x", "--top"], "tilewise"),
        (["status", "a", "b"], "tilewise status"),
    ],
)  # fmt: skip
def test_a_wrong_use_is_one_sentence_and_exit_code_2(command, of, run_main):
    code, out, errors = run_main(*command)
    assert (code, out) == (2, "")
    assert errors.startswith("tilewise: ")
    assert errors.count("\n") == 1
    assert f"`{of} --help` shows what it takes" in errors


def test_no_command_shows_the_help(run_main):
    for command in ([], ["plan"]):
        _, out, errors = run_main(*command)
        assert "Usage" in out + errors


@pytest.mark.parametrize(
    "error, said",
    [
        (
            PermissionError(13, "Permission denied", "/x/y"),
            "cannot read or write /x/y: Permission denied. Check the path",
        ),
        (OSError(36, "File name too long", "n" * 999), "n... (999 characters): File name too long. Check the path"),
        (MemoryError(), "there is not enough memory. Lower loop.batch_size"),
    ],
)
def test_what_the_system_refuses_is_one_sentence(error, said, refusal, monkeypatch):
    def fail(folder):
        raise error

    monkeypatch.setattr("tilewise.train.status.read_status", fail)
    assert said in refusal("status", "run")


@pytest.mark.parametrize("command", ["config", "--version"])
def test_an_output_that_is_full_closed_or_no_longer_read(command):
    def start(shell):
        done = subprocess.run(["sh", "-c", shell, "sh", *START, command], capture_output=True, text=True, timeout=600)
        return done.stdout, done.stderr

    if os.path.exists("/dev/full"):
        code, errors = start('"$@" > /dev/full; echo $?')
        assert code == "1\n"
        assert errors.startswith("tilewise: cannot read or write the output: No space left on device. Check ")
        assert errors.count("\n") == 1
    assert start('"$@" >&-; echo $?') == ("0\n", "")
    _, errors = start('"$@" | true')
    assert errors == ""
