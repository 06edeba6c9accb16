"""The status of a run: finished, stopped and saved, failed, killed. Also under torchrun, which always exits with 1."""

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from tests.processes import TORCHRUN, children
from tests.train.small_icons import write_small_icons
from typer.testing import CliRunner

from tilewise.errors import CheckpointError, ConfigError
from tilewise.train import loop, status
from tilewise.train.checkpoint import list_checkpoints, step_name
from tilewise.train.cli import app
from tilewise.train.config import load_config
from tilewise.train.diverged import DivergedError
from tilewise.train.loop import train
from tilewise.train.run_folder import RunFolder
from tilewise.train.signals import StopRequest
from tilewise.train.status import Status, read_status, status_kept, write_status

SETTINGS = [
    "model.width=32", "model.depth=0", "model.text_buckets=512", "model.embed_dim=16", "loop.batch_size=64",
    "loop.chunk_size=32", "loop.threads=1", "loop.device=cpu", "output.report=false", "output.tensorboard=false",
]  # fmt: skip


@pytest.fixture(scope="module")
def icons(tmp_path_factory):
    return f"data.path={write_small_icons(tmp_path_factory.mktemp('icons') / 'small.zip')}"


def status_of(folder):
    result = CliRunner().invoke(app, ["status", str(folder)])
    return result.exit_code, " ".join(result.output.split())


def test_finished_stopped_and_failed_are_told_apart(icons, tmp_path, monkeypatch):
    config = load_config(None, [*SETTINGS, icons, f"output.folder={tmp_path}", "loop.steps=4"])
    original = loop.Trainer._step
    seen = []

    def signalled(self, batch, stop):
        seen.append(json.loads((tmp_path / "status.json").read_text())["status"])
        if self.step == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(self, batch, stop)

    monkeypatch.setattr(loop.Trainer, "_step", signalled)
    assert train(config).signal_number == signal.SIGTERM
    assert set(seen) == {"running"}
    assert status_of(tmp_path) == (
        75, "stopped by signal 15 after step 2 of 4, and saved. The same command continues it",
    )  # fmt: skip

    def broken(self, batch, stop):
        raise DivergedError("the loss is nan")

    monkeypatch.setattr(loop.Trainer, "_step", broken)
    with pytest.raises(DivergedError):
        train(config)
    last = tmp_path / "checkpoints" / "step-00000002"
    assert status_of(tmp_path) == (1, f"failed after step 2 of 4: the loss is nan; last checkpoint: {last}")
    monkeypatch.undo()
    assert train(config).finished
    assert status_of(tmp_path) == (0, "finished: 4 steps")
    with pytest.raises(ConfigError):  # refused settings do not change the status
        train(load_config(None, [*SETTINGS, icons, f"output.folder={tmp_path}", "loop.steps=4", "loop.seed=3"]))
    assert status_of(tmp_path)[0] == 0


def test_a_run_that_says_running_is_running_or_was_killed(tmp_path):
    with pytest.raises(ConfigError, match="is no run of tilewise"):
        read_status(tmp_path)
    write_status(tmp_path, Status("asleep", 3, 9))
    with pytest.raises(ConfigError, match="status 'asleep'"):
        read_status(tmp_path)
    with RunFolder(tmp_path).locked():
        write_status(tmp_path, Status("running", 3, 9))
        assert status_of(tmp_path) == (3, "running, after step 3 of 9; no checkpoint yet")
        (tmp_path / "metrics.jsonl").write_text('{"step": 4}\n{"step": 7, "kind": "train"}\n{"step": 8, "ki')
        kept = tmp_path / "checkpoints" / step_name(5)  # a line cut short does not count
        assert status_of(tmp_path) == (3, "running, after step 7 of 9; no checkpoint yet")
        kept.mkdir(parents=True)
        assert status_of(tmp_path) == (3, f"running, after step 7 of 9; last checkpoint: {kept}")
    killed = "killed while it was running, after step 7 of 9."
    assert status_of(tmp_path) == (75, f"{killed} The same command continues it from {kept}")
    kept.rmdir()
    assert status_of(tmp_path) == (75, f"{killed} No checkpoint had been written; the same command begins it anew")


@pytest.mark.parametrize("before", ["running", "stopped", "failed", "finished", None])
def test_what_an_earlier_process_wrote_is_not_taken_for_the_one_that_starts(tmp_path, before):
    (tmp_path / "checkpoints" / step_name(5)).mkdir(parents=True)
    if before is not None:
        write_status(tmp_path, Status(before, 0, 9))
        (tmp_path / "metrics.jsonl").write_text('{"step": 7, "kind": "train"}\n')
    time.sleep(0.02)  # file times have a coarse resolution
    with RunFolder(tmp_path).locked():  # it loads step 5, so step 7 is not done yet
        assert status_of(tmp_path) == (3, f"starting; last checkpoint: {tmp_path / 'checkpoints' / step_name(5)}")
        write_status(tmp_path, Status("running", 5, 9))
        assert read_status(tmp_path).status == "running"


def test_a_run_that_continues_never_shows_a_step_that_it_has_not_done(icons, tmp_path, monkeypatch):
    config = load_config(None, [*SETTINGS, icons, f"output.folder={tmp_path}", "loop.steps=4"])
    assert train(config).finished
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "kind": "train"}\n')  # written by a longer run that was killed before it saved
    write = status.write_status
    seen = []

    def watched(folder, status):
        write(folder, status)
        seen.append(read_status(folder).step)

    monkeypatch.setattr(status, "write_status", watched)
    assert train(load_config(None, [*SETTINGS, icons, f"output.folder={tmp_path}", "loop.steps=6",
                                    "optim.extend=restart"])).finished  # fmt: skip
    assert seen == [4, 6]


def test_a_folder_in_use_is_refused_before_anything_is_read(tmp_path):
    (tmp_path / "c.toml").write_text("")
    nothing = ["data.source=folder", "model.name=clip-tiny", f"data.path={tmp_path / 'nowhere'}"]
    command = ["train", str(tmp_path / "c.toml"), *nothing, f"output.folder={tmp_path / 'run'}"]
    with RunFolder(tmp_path / "run").locked(), pytest.raises(CheckpointError, match="another process is training"):
        raise CliRunner().invoke(app, command).exception
    assert "nowhere does not exist" in str(CliRunner().invoke(app, command).exception)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_before_the_first_step_ends_in_a_sentence(tmp_path, number):
    (tmp_path / "c.toml").write_text("")
    settings = [*SETTINGS, "loop.steps=2", f"output.folder={tmp_path / 'run'}"]
    command = [sys.executable, "-m", "tilewise.train.cli", "train", str(tmp_path / "c.toml"), *settings]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    for line in process.stdout:  # the settings are shown before torch is imported
        if line.startswith("output"):
            break
    time.sleep(0.1)
    process.send_signal(number)
    _, said = process.communicate(timeout=600)
    assert said == (
        f"tilewise: stopped by {number.name} while no step was running; what was saved is whole. "
        "The same command starts again\n"
    )
    assert process.returncode == 128 + number
    assert not (tmp_path / "run").exists()


def test_a_full_disk_does_not_hide_what_a_run_failed_with(tmp_path, monkeypatch):
    def fail():
        with status_kept(tmp_path, lambda: (1, 4), lambda: 0):
            monkeypatch.setattr(os, "fsync", full)
            raise DivergedError("the loss is nan")

    with pytest.raises(DivergedError, match="the loss is nan"):
        fail()
    with pytest.raises(CheckpointError, match=r"cannot write .*status\.json: No space left"):
        write_status(tmp_path, Status("running", 3, 9))


def full(handle):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_asking_for_the_status_does_not_refuse_a_run_that_starts(tmp_path):
    with RunFolder(tmp_path).locked():
        pass
    asking = os.open(tmp_path / ".lock", os.O_RDONLY)
    fcntl.flock(asking, fcntl.LOCK_SH)  # as `tilewise status` does, for a moment
    threading.Timer(0.02, os.close, (asking,)).start()
    with RunFolder(tmp_path).locked():
        assert status._is_held(tmp_path / ".lock")


@pytest.mark.parametrize("under_torchrun, taken", [(False, 1), (True, 2)])
def test_ctrl_c_under_torchrun_arrives_twice(monkeypatch, under_torchrun, taken, capfd):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    if under_torchrun:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    with StopRequest() as stop:
        for _ in range(taken):
            stop._note(signal.SIGINT, None)
        stop._note(signal.SIGTERM, None)
        assert stop.signal_number == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            stop._note(signal.SIGINT, None)
    told = "tilewise: SIGINT: this step is finished and saved, then the run ends; Ctrl-C again gives it up\n"
    assert capfd.readouterr().err == told  # once


@pytest.mark.group
@pytest.mark.slow
@pytest.mark.parametrize("whom", ["torchrun", "a rank"])
def test_a_signal_under_torchrun_leaves_a_run_that_is_told_from_a_crash(icons, tmp_path, whom):
    (tmp_path / "c.toml").write_text("")
    run = tmp_path / "run"
    settings = [*SETTINGS, icons, f"output.folder={run}", "loop.steps=100000", "output.checkpoint_every=100000"]
    command = [*TORCHRUN, "--nproc-per-node", "2", "-m", "tilewise.train.cli", "train", str(tmp_path / "c.toml")]
    command += settings
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    )  # fmt: skip
    end = time.monotonic() + 600
    while process.poll() is None and time.monotonic() < end and len(RunFolder(run).read_metrics()) < 3:
        time.sleep(0.2)
    assert status_of(run)[0] == 3
    if whom == "torchrun":
        process.send_signal(signal.SIGTERM)
    else:  # the second rank, which does not write
        os.kill(children(process.pid)[-1], signal.SIGTERM)
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 1, output  # always 1, so only the folder has the status
    code, said = status_of(run)
    assert (code, said.split(" after")[0]) == (75, "stopped by signal 15"), output
    assert "done:" not in output
    assert [p.name for p in list_checkpoints(run / "checkpoints")] == [step_name(read_status(run).step)]
