"""Damaged files of a run: the damage is named in one sentence, and the run continues from the last good checkpoint."""

import errno
import io
import json
import os

import pytest
from rich.console import Console
from tests.train.small_icons import write_small_icons
from typer.testing import CliRunner

from tilewise.errors import CheckpointError, ConfigError, TilewiseError
from tilewise.train import loop
from tilewise.train.checkpoint import list_checkpoints, step_name
from tilewise.train.cli import app
from tilewise.train.config import load_config
from tilewise.train.loop import train
from tilewise.train.report import report_run, write_report
from tilewise.train.run_folder import MetricsLog, RunFolder
from tilewise.train.status import read_status

SMALL = [
    "model.width=32", "model.depth=0", "model.text_buckets=512", "model.embed_dim=16", "loop.batch_size=64",
    "loop.chunk_size=64", "loop.threads=1", "loop.device=cpu", "loop.steps=6", "output.checkpoint_every=2",
    "output.keep_last=9", "output.report=false", "output.tensorboard=false",
]  # fmt: skip
TIMES = ("seconds", "data_seconds", "pairs_per_second", "memory_bytes")
DEEP = "[" * 100_000


@pytest.fixture(scope="module")
def icons(tmp_path_factory):
    return f"data.path={write_small_icons(tmp_path_factory.mktemp('icons') / 'small.zip')}"


def lines(folder):
    return [{k: v for k, v in line.items() if k not in TIMES} for line in RunFolder(folder).read_metrics()]


def weights(folder, step=6):
    path = folder / "checkpoints" / step_name(step)
    return [(path / f"{name}.safetensors").read_bytes() for name in ("model", "optimizer")]


@pytest.fixture(scope="module")
def whole(icons, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    train(load_config(None, [*SMALL, icons, f"output.folder={folder}"]))
    return folder


@pytest.fixture
def stopped(icons, tmp_path, monkeypatch):
    """A run that was killed after step 5, and its settings; its checkpoints are those of steps 2 and 4."""
    config = load_config(None, [*SMALL, icons, f"output.folder={tmp_path}"])
    original = loop.Trainer._after_step

    def die(self, log, bar, stopping):
        original(self, log, bar, stopping)
        if self.step == 5:
            raise ZeroDivisionError

    monkeypatch.setattr(loop.Trainer, "_after_step", die)
    with pytest.raises(ZeroDivisionError):
        train(config)
    monkeypatch.undo()
    assert [path.name for path in list_checkpoints(tmp_path / "checkpoints")] == [step_name(2), step_name(4)]
    return config


def resume(config):
    shown = io.StringIO()
    assert train(config, Console(file=shown, width=1000)).finished
    return " ".join(shown.getvalue().split())


@pytest.mark.parametrize(
    "old, new",
    [('"step": 4,', '"step": 5,'), ('"offset": 256', '"offset": 257'), ('"skipped": 0', '"skipped": 1')],
)
def test_one_changed_number_in_a_state_falls_back_and_ends_with_the_same_weights(stopped, whole, tmp_path, old, new):
    file = tmp_path / "checkpoints" / step_name(4) / "state.json"
    text = file.read_text()
    assert text.count(old) == 1
    file.write_text(text.replace(old, new))
    said = resume(stopped)
    assert f"ignored a damaged checkpoint: {file} is damaged: its content does not match its checksum" in said
    assert "continuing after step 2 of 6" in said
    assert weights(tmp_path) == weights(whole)
    assert lines(tmp_path) == lines(whole)


@pytest.mark.parametrize(
    "change",
    [
        {"files": []}, {"step": None}, {"config": None}, {"step": "x"}, {"best": []}, {"position": {}}, None,
    ],
    ids=str,
)  # fmt: skip
def test_a_state_without_a_checksum_and_with_wrong_content_falls_back(stopped, whole, tmp_path, change):
    """As an earlier version wrote it. None: nested 100,000 deep."""
    file = tmp_path / "checkpoints" / step_name(4) / "state.json"
    state = json.loads(file.read_text())
    del state["checksum"]
    state = {key: value for key, value in {**state, "format": 1, **(change or {})}.items() if value is not None}
    file.write_text(json.dumps(state) if change is not None else DEEP)
    said = resume(stopped)
    assert f"ignored a damaged checkpoint: {file} is damaged: " in said
    assert weights(tmp_path) == weights(whole)


def test_a_checkpoint_of_format_1_continues_and_the_run_says_so(stopped, whole, tmp_path):
    for path in list_checkpoints(tmp_path / "checkpoints"):
        state = json.loads((path / "state.json").read_text())
        del state["checksum"]
        (path / "state.json").write_text(json.dumps({**state, "format": 1}))
    said = resume(stopped)
    assert "without a checksum of its state.json" in said
    assert "continuing after step 4 of 6" in said
    assert weights(tmp_path) == weights(whole)


def test_a_run_whose_checkpoints_are_all_damaged_is_refused_and_not_begun_anew(stopped, tmp_path):
    for path in list_checkpoints(tmp_path / "checkpoints"):
        (path / "state.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* can be used"):
        train(stopped)


@pytest.mark.parametrize(
    "bad", [b"\xff\n", b"[1]\n", b'{"step": "x", "kind": "train"}\n', b"[" * 9999 + b"\n", b"\0\n"]
)
def test_damaged_lines_of_metrics_are_named_and_left_out(stopped, whole, tmp_path, bad):
    file = tmp_path / "metrics.jsonl"
    first, rest = file.read_bytes().split(b"\n", 1)
    file.write_bytes(first + b"\n" + bad + rest)
    assert read_status(tmp_path).step == 5
    said = resume(stopped)
    assert "metrics.jsonl: 1 damaged lines were removed, the first was line 2" in said
    assert weights(tmp_path) == weights(whole)
    assert lines(tmp_path) == lines(whole)


class Full(io.StringIO):
    """A file on a full disk."""

    def flush(self):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_disk_that_is_full_of_metrics_is_one_sentence(tmp_path):
    log = MetricsLog(RunFolder(tmp_path), 0)
    log._file.close()
    log._file = Full()
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl: No space left.*start again"):
        log.write(1, "train", {"loss": 1.0})
    log.close()


def test_a_report_of_damaged_checkpoints_has_the_curves(stopped, tmp_path):
    for path in list_checkpoints(tmp_path / "checkpoints"):
        (path / "state.json").write_text("{}")
    shown = io.StringIO()
    page = report_run(Console(file=shown), tmp_path, "cpu").read_text()
    assert "No searches: no checkpoint in" in shown.getvalue()
    assert "<svg" in page


def test_a_report_leaves_out_lines_without_its_numbers(whole, tmp_path):
    text = (whole / "metrics.jsonl").read_text()
    (tmp_path / "metrics.jsonl").write_text(
        text + '{"step": 7, "kind": "train"}\n{"step": 7, "kind": "eval", "t2i_r1": "x"}\n'
    )
    (tmp_path / "config.toml").write_text((whole / "config.toml").read_text())
    assert write_report(tmp_path, None, None).is_file()


@pytest.mark.parametrize(
    "text",
    [
        b"", b"[1]", b"{", b"\xff", DEEP.encode(), b'{"status": "running", "step": "x", "steps": 3}',
        b'{"status": [], "step": 1, "steps": 3}', b'{"status": "failed", "step": 1, "steps": 3, "error": 7}',
        b'{"status": "running", "step": null, "steps": 3}',
    ],
)  # fmt: skip
def test_a_damaged_status_is_one_sentence(whole, tmp_path, text):
    (tmp_path / "config.toml").write_text((whole / "config.toml").read_text())
    (tmp_path / "status.json").write_bytes(text)
    with pytest.raises(ConfigError, match=r"cannot read .*status\.json"):
        read_status(tmp_path)
    result = CliRunner().invoke(app, ["status", str(tmp_path)])
    assert isinstance(result.exception, TilewiseError)


@pytest.mark.parametrize("text", [b"x = " + DEEP.encode(), b"\xff", b"[loop]\nsteps = 1e999\n", b"[loop"])
def test_damaged_settings_are_one_sentence(tmp_path, text):
    (tmp_path / "config.toml").write_bytes(text)
    with pytest.raises(ConfigError):
        load_config(tmp_path / "config.toml")


@pytest.mark.parametrize("text", [b"[1]", b"\xff", DEEP.encode(), b'{"format": 1}', b'{"format": 1, "kind": "icon"}'])
def test_a_damaged_description_of_the_model_is_one_sentence(stopped, tmp_path, text):
    (tmp_path / "model" / "tilewise.json").write_bytes(text)
    with pytest.raises(CheckpointError):
        train(stopped)


def test_a_model_that_does_not_fit_in_memory_is_one_sentence(icons, tmp_path, monkeypatch):
    def full(config):
        raise RuntimeError("cannot allocate 17 GiB\nand a stack trace")

    monkeypatch.setattr("tilewise.train.run_folder.build_model", full)
    config = load_config(None, [*SMALL, icons, f"output.folder={tmp_path}"])
    with pytest.raises(
        ConfigError, match=r"cannot be built on cpu: cannot allocate 17 GiB\. .*model\.width=32"
    ) as caught:
        train(config)
    assert "stack trace" not in str(caught.value)
