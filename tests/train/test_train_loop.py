"""Whole runs with a tiny model: they learn, stop and continue, and wrong input is refused."""

import io
import json
import signal
import time
from types import SimpleNamespace

import pytest
import torch
import webdataset
from PIL import Image
from rich.console import Console
from tests.processes import start_command
from tests.train.small_icons import write_small_icons
from tests.train.small_weights import write_clip

from tilewise.errors import CheckpointError, ConfigError, DataError
from tilewise.train import cli, held_out, loop, run_state, step_memory
from tilewise.train.checkpoint import list_checkpoints, step_name
from tilewise.train.config import load_config
from tilewise.train.diverged import DivergedError
from tilewise.train.loop import train
from tilewise.train.run_folder import RunFolder

SMALL = [
    "model.width=32", "model.depth=1", "model.text_buckets=512", "model.embed_dim=16", "model.dropout=0.1",
    "loop.batch_size=64", "loop.chunk_size=24", "loop.threads=1", "optim.ema_decay=0.9", "optim.lr=3e-3",
    "output.checkpoint_every=2", "output.evaluate_every=3", "output.report=false", "output.tensorboard=false",
]  # fmt: skip
TIMES = ("seconds", "data_seconds", "pairs_per_second", "memory_bytes")


@pytest.fixture(scope="module", autouse=True)
def icons_file(tmp_path_factory):
    SMALL.append(f"data.path={write_small_icons(tmp_path_factory.mktemp('icons') / 'small.zip')}")
    yield
    SMALL.pop()


def small(folder, *overrides):
    return load_config(None, [*SMALL, f"output.folder={folder}", *overrides])


def lines(folder):
    return [{k: v for k, v in line.items() if k not in TIMES} for line in RunFolder(folder).read_metrics()]


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    return train(small(folder, "loop.steps=8"))


def test_a_run_writes_what_it_promises(whole_run):
    folder = whole_run.folder
    assert whole_run.finished
    assert (folder / "config.toml").is_file()
    made = lines(folder)
    assert [line["step"] for line in made if line["kind"] == "train"] == list(range(1, 9))
    assert [line["step"] for line in made if line["kind"] == "eval"] == [3, 6, 8]
    assert made[0]["rows"] == 64
    kept = {p.name for p in list_checkpoints(folder / "checkpoints")}
    assert {step_name(6), step_name(8)} <= kept
    assert len(kept) <= 3
    state = json.loads((folder / "checkpoints" / step_name(8) / "state.json").read_text())
    memory = state["memory"]
    assert memory["peak"] == memory["data"] + max(memory["loss"], memory["backbone"])
    assert memory["dense_loss"] > 0


class Killed(Exception):
    pass


@pytest.mark.parametrize("after", [1, 2, 5, 7])
def test_a_killed_run_continues_bitwise(tmp_path, whole_run, monkeypatch, after):
    """The run dies after a step (2: before an evaluation; 5: between checkpoints) and starts again."""
    config = small(tmp_path, "loop.steps=8")
    original = loop.Trainer._after_step

    def die(self, log, bar, stopping):
        original(self, log, bar, stopping)
        if self.step == after:
            raise Killed

    monkeypatch.setattr(loop.Trainer, "_after_step", die)
    with pytest.raises(Killed):
        train(config)
    monkeypatch.undo()
    result = train(config)
    assert result.finished
    assert lines(tmp_path) == lines(whole_run.folder)
    for name in ("model", "optimizer", "average"):
        file = f"checkpoints/{step_name(8)}/{name}.safetensors"
        assert (tmp_path / file).read_bytes() == (whole_run.folder / file).read_bytes()


def test_two_runs_are_equal_and_another_seed_is_not(tmp_path, whole_run):
    train(small(tmp_path / "same", "loop.steps=2"))
    train(small(tmp_path / "other", "loop.steps=2", "loop.seed=1"))
    first = [line["loss"] for line in lines(tmp_path / "same")[:2]]
    assert first[0] == lines(whole_run.folder)[0]["loss"]
    assert first != [line["loss"] for line in lines(tmp_path / "other")[:2]]


@pytest.mark.parametrize("name", ["dense", "local"])
def test_losses_of_the_baselines_coincide_with_tilewise(tmp_path, whole_run, name):
    train(small(tmp_path, "loop.steps=8", f"loss.name={name}"))
    for got, want in zip(lines(tmp_path), lines(whole_run.folder), strict=True):
        if got["kind"] == "train":
            assert got["loss"] == pytest.approx(want["loss"], rel=1e-4)


def test_the_cache_changes_nothing_but_memory(tmp_path):
    without = ["model.dropout=0.0", "loop.steps=4"]
    train(small(tmp_path / "a", *without, "loop.chunk_size=64"))
    train(small(tmp_path / "b", *without, "loop.chunk_size=7"))
    for got, want in zip(lines(tmp_path / "a"), lines(tmp_path / "b"), strict=True):
        if got["kind"] == "train":
            assert got["loss"] == pytest.approx(want["loss"], rel=1e-5)
            assert got["grad_norm"] == pytest.approx(want["grad_norm"], rel=1e-4)


@pytest.mark.parametrize(
    "overrides",
    [
        ["loss.kind=siglip"],
        ["loss.mask_same_id=true"],
        ["optim.name=adafactor", "optim.lr=1e-3"],
        ["loop.precision=bf16"],
        ["loop.precision=fp16"],
        ["model.name=clip-tiny"],
        ["loss.offload=true"],
    ],
    ids=lambda value: value[0],
)
def test_variants_learn(tmp_path, overrides):
    train(small(tmp_path, "loop.steps=10", "model.dropout=0.0", "output.evaluate_every=0", *overrides))
    losses = [line["loss"] for line in lines(tmp_path) if line["kind"] == "train"]
    assert losses[-1] < losses[0] - 0.02


def test_a_locked_image_tower_runs_once_and_keeps_its_weights(tmp_path, monkeypatch):
    calls = []
    original = loop.Trainer._step

    def count(self, batch, stop):
        before = {name: p.clone() for name, p in self.model.named_parameters()}
        handle = self.model.image.register_forward_hook(lambda *unused: calls.append(torch.is_grad_enabled()))
        result = original(self, batch, stop)
        handle.remove()
        moved = {n.split(".")[0] for n, p in self.model.named_parameters() if not torch.equal(p, before[n])}
        assert moved == {"text", "scale"}
        return result

    monkeypatch.setattr(loop.Trainer, "_step", count)
    monkeypatch.setattr(step_memory, "activation_bytes", lambda run: 0)
    weights = write_clip(tmp_path / "clip", size=32)
    locked = ["model.name=clip-tiny", "model.embed_dim=0", f"model.weights={weights}", "model.lock_image=true"]
    train(small(tmp_path / "run", "loop.steps=2", *locked, "output.evaluate_every=0"))
    assert calls == [False] * (2 * 3)  # three chunks a step, each once, without a graph


def test_skipped_records_are_counted_the_same_after_a_restart(tmp_path, monkeypatch):
    """Broken records in batches that were prepared but not used must not be counted twice."""
    for shard in range(4):
        with webdataset.TarWriter(str(tmp_path / f"{shard}.tar")) as writer:
            for i in range(12):
                picture = io.BytesIO()
                Image.new("RGB", (32, 32), (9 * i, 50 * shard, 0)).save(picture, "PNG")
                data = b"broken" if i % 4 == 0 else picture.getvalue()
                writer.write({"__key__": f"{shard}-{i}", "png": data, **({"txt": f"w{i}"} if i != 5 else {})})
    settings = [
        "model.name=clip-tiny", "data.source=shards", f"data.path={tmp_path}/*.tar", "data.shuffle_shards=1",
        "data.records=44", "data.prefetch=3", "loop.batch_size=8", "loop.chunk_size=8", "loop.steps=9",
    ]  # fmt: skip
    config, other = (small(tmp_path / name, *settings[:2], settings[2], *settings[3:]) for name in ("a", "b"))
    train(config)
    original = loop.Trainer._after_step

    def die(self, log, bar, stopping):
        original(self, log, bar, stopping)
        if self.step == 3:
            time.sleep(0.3)  # time for the batches ahead to be made
            raise Killed

    monkeypatch.setattr(loop.Trainer, "_after_step", die)
    with pytest.raises(Killed):
        train(other)
    monkeypatch.undo()
    train(other)
    assert lines(tmp_path / "a") == lines(tmp_path / "b")
    assert 8 < lines(tmp_path / "a")[-1]["skipped"] < 30
    kept = [
        json.loads((tmp_path / name / "checkpoints" / step_name(9) / "state.json").read_text())["skips"]
        for name in "ab"
    ]
    assert kept[0] == kept[1]
    assert kept[0]["counts"]["no caption"] == 4


def test_icons_of_the_wrong_size_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"model\.image_size=32"):
        train(small(tmp_path, "model.image_size=64"))


def test_other_settings_in_the_same_folder_are_refused(tmp_path):
    train(small(tmp_path, "loop.steps=2"))
    with pytest.raises(ConfigError, match=r"optim\.lr.*output\.folder"):
        train(small(tmp_path, "loop.steps=2", "optim.lr=1"))


def test_room_is_needed_only_for_checkpoints_that_can_be_written(tmp_path, monkeypatch):
    counts = []
    monkeypatch.setattr(loop, "check_room", lambda folder, size, count: counts.append(count))
    for more in ("loop.steps=2", "loop.steps=8", "output.keep_last=1"):
        config = small(tmp_path / str(len(counts)), "loop.steps=8", "output.keep_last=1000000", more)
        monkeypatch.setattr(loop.Trainer, "_train", lambda *unused: None)
        train(config)
    assert counts == [2, 8, 3]


def test_a_report_that_cannot_be_written_does_not_fail_the_run(tmp_path):
    (tmp_path / "report.html").mkdir()
    shown = io.StringIO()
    assert train(small(tmp_path, "loop.steps=1", "output.report=true"), Console(file=shown)).finished
    assert f"no report: cannot write {tmp_path / 'report.html'}: Is a directory" in shown.getvalue()


def test_a_folder_in_use_is_refused(tmp_path):
    with RunFolder(tmp_path).locked(), pytest.raises(CheckpointError, match="another process"):
        train(small(tmp_path, "loop.steps=1"))


def test_an_unwritable_folder_is_refused_before_training(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"output\.folder"):
        train(small(tmp_path / "file" / "run", "loop.steps=1"))


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_last_checkpoint(tmp_path, monkeypatch):
    original = loop.Trainer._step

    def poison(self, batch, stop):
        if self.step == 4:
            with torch.no_grad():
                self.model.text.body.table.weight.fill_(float("nan"))
        return original(self, batch, stop)

    monkeypatch.setattr(loop.Trainer, "_step", poison)
    with pytest.raises(DivergedError) as caught:
        train(small(tmp_path, "loop.steps=8"))
    message = str(caught.value)
    for words in ("step 5", "loss is nan", "text.body.table.weight", "step-00000004", "optim.lr"):
        assert words in message
    assert list_checkpoints(tmp_path / "checkpoints")[-1].name == step_name(4)


def test_a_disk_that_fills_up_stops_safely(tmp_path, monkeypatch):
    saves = []
    original = run_state.save_checkpoint

    def fill_up(folder, step, tensors, state):
        saves.append(step)
        if step == 4:
            monkeypatch.setattr(
                "safetensors.torch.save_file", lambda *a: (_ for _ in ()).throw(OSError(28, "No space left"))
            )
        return original(folder, step, tensors, state)

    monkeypatch.setattr(run_state, "save_checkpoint", fill_up)
    config = small(tmp_path, "loop.steps=6")
    with pytest.raises(CheckpointError, match="No space left"):
        train(config)
    monkeypatch.undo()
    kept = [p.name for p in list_checkpoints(tmp_path / "checkpoints")]
    assert kept == [step_name(2), step_name(3)]  # step 3 was evaluated and is the best so far
    assert train(config).finished


@pytest.mark.parametrize("data_s", [0.0, 30.0])
def test_a_run_that_waits_for_its_data_says_so(tmp_path, monkeypatch, data_s):
    now = [0.0]

    def takes(seconds, original):
        def work(*args, **more):
            now[0] += seconds
            return original(*args, **more)

        return work

    monkeypatch.setattr(loop, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(loop.BatchStream, "make", takes(data_s, loop.BatchStream.make))
    monkeypatch.setattr(loop.Trainer, "_step", takes(10.0, loop.Trainer._step))
    monkeypatch.setattr(held_out, "evaluate_retrieval", takes(1000.0, held_out.evaluate_retrieval))
    shown = io.StringIO()
    train(small(tmp_path, "loop.steps=4", "data.prefetch=0"), Console(file=shown))
    assert ("\n75 % of the time was spent waiting for images\n" in shown.getvalue()) == (
        data_s > 0
    )  # icons use no workers
    steps = [line for line in RunFolder(tmp_path).read_metrics() if line["kind"] == "train"]
    assert [(line["seconds"], line["data_seconds"]) for line in steps] == [(10.0 + data_s, data_s)] * 4


def start(folder, *overrides):
    folder.mkdir(exist_ok=True)
    (folder / "start.toml").write_text("")
    settings = [*SMALL, f"output.folder={folder}", *overrides]
    arguments = ["train", str(folder / "start.toml"), *settings]
    return start_command(cli.main, folder / "output", {"OMP_NUM_THREADS": "1"}, arguments)


def finish(process, folder, limit=900):
    process.join(limit)
    return process.exitcode, (folder / "output").read_text()


def wait_for_step(folder, process, step, limit=900):
    end = time.monotonic() + limit
    while time.monotonic() < end and process.is_alive():
        if any(line["step"] >= step for line in RunFolder(folder).read_metrics()):
            return
        time.sleep(0.05)
    process.kill()
    raise AssertionError(f"the run did not reach step {step}: {finish(process, folder)}")


@pytest.mark.slow
def test_kill_9_and_sigterm_in_a_real_process(tmp_path):
    often = ["loop.steps=40", "output.checkpoint_every=3"]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    train(small(whole, *often))
    killed = start(cut, *often)
    wait_for_step(cut, killed, 7)
    killed.kill()
    assert finish(killed, cut)[0] == -signal.SIGKILL
    stopped = start(cut, *often)
    wait_for_step(cut, stopped, 15)
    stopped.terminate()
    code, output = finish(stopped, cut)
    assert code == 143, output
    assert "saved" in output
    reached = list_checkpoints(cut / "checkpoints")[-1].name
    assert reached == step_name(lines(cut)[-1]["step"])  # saved at the step at which it stopped
    code, output = finish(start(cut, *often), cut)
    assert code == 0, output
    assert lines(cut) == lines(whole)
