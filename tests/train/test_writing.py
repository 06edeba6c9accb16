"""Files that cannot be written: one sentence with the file and a remedy, and the old file stays."""

import errno
import os
import shutil
import sys
import threading
import types

import pytest
from tests.train.test_train_portable import invoke, settings, write_colours

from tilewise.errors import CheckpointError
from tilewise.train.checkpoint import list_checkpoints, step_name
from tilewise.train.loop import train
from tilewise.train.run_folder import RunFolder
from tilewise.train.trackers import WeightsAndBiases
from tilewise.train.writing import make_folder, one_sentence, replacing, write_atomically

AGAIN = "then start again with the same command"
MORE = ("model.name=clip-tiny", "loop.steps=4", "output.keep_last=9")


class FullDisk:
    """A disk on which the file or folder with this name cannot be flushed. `hits` counts the failures."""

    def __init__(self, monkeypatch, folder, name):
        self.folder, self.name, self.hits = folder, name, 0
        self._fsync = os.fsync
        monkeypatch.setattr(os, "fsync", self)

    def __call__(self, handle):
        paths = (path for path in self.folder.rglob("*") if ".writing-" in str(path) and self.name in str(path))
        if any(os.path.sameopenfile(handle, other) for other in map(opened, paths)):
            self.hits += 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._fsync(handle)


def opened(path):
    return os.open(path, os.O_RDONLY)


def leftovers(folder):
    return list(folder.rglob(".writing-*"))


def contents(folder):
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


# -- one file ------------------------------------------------------------------------------------------------


def test_a_file_is_replaced_whole_and_flushed_first(tmp_path, monkeypatch):
    done = []
    for name in ("fsync", "replace"):
        original = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *given, name=name, to=original: (done.append(name), to(*given))[1])
    write_atomically(tmp_path / "a.json", "old")
    write_atomically(tmp_path / "a.json", "new")
    assert done == ["fsync", "replace"] * 2
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a.json", "new")]


@pytest.mark.parametrize("fault", ["folder", "fsync", "write", "pipe", "missing"])
def test_an_error_keeps_the_old_file_and_names_the_file_and_a_remedy(tmp_path, monkeypatch, fault):
    file, remedy = tmp_path / "a.json", "Free some space"
    file.write_text("old")
    if fault == "folder":
        file, remedy = tmp_path / "b.json", "Rename or remove the folder of that name"
        file.mkdir()
    elif fault == "pipe":
        file, remedy = tmp_path / "c.json", "it is neither a file nor a device"
        os.mkfifo(file)
    elif fault == "missing":
        file, remedy = tmp_path / "none" / "a.json", "Choose a folder that exists"
    else:
        name = {"fsync": "os.fsync", "write": "pathlib.Path.write_text"}[fault]
        monkeypatch.setattr(name, lambda *_, **more: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left")))
    with pytest.raises(CheckpointError, match=rf"^cannot write {file}: .*Nothing else is lost\. .*{AGAIN}$") as caught:
        write_atomically(file, "new", "Nothing else is lost")
    assert remedy in str(caught.value)
    assert (tmp_path / "a.json").read_text() == "old"
    assert not leftovers(tmp_path)


def test_links_devices_and_long_names_are_written(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "a.json").write_text("old")
    (tmp_path / "link.json").symlink_to(tmp_path / "there" / "a.json")
    write_atomically(tmp_path / "link.json", "new")
    assert (tmp_path / "link.json").is_symlink()
    assert (tmp_path / "there" / "a.json").read_text() == "new"
    write_atomically(tmp_path / ("n" * 250), "new")
    with replacing(tmp_path / ("n" * 50 + ".a")) as one, replacing(tmp_path / ("n" * 50 + ".b")) as other:
        one.write_text("one"), other.write_text("other")
    assert (tmp_path / ("n" * 50 + ".a")).read_text() == "one"
    write_atomically(os.devnull, "new")
    assert not os.path.isfile(os.devnull)


def test_errors_without_a_number_and_sentences_of_others_stay_whole():
    with pytest.raises(CheckpointError, match=rf"cannot write x: KeyError\. Free some space or .*{AGAIN}"):  # noqa: SIM117
        with one_sentence("x"):
            raise KeyError
    with pytest.raises(CheckpointError, match=r"^already one$"):  # noqa: SIM117
        with one_sentence("x"):
            raise CheckpointError("already one")


def test_a_thousand_folders_inside_one_another_are_no_recursion_error(tmp_path, usual_recursion):
    with pytest.raises(OSError, match="too many folders"):
        make_folder(tmp_path.joinpath(*"a" * 1500))


# -- the files of a run --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_colours(tmp_path_factory.mktemp("pictures") / "data", each=2)


@pytest.fixture(scope="module")
def stopped(data, tmp_path_factory):
    """A run that stopped after step 2 of 4."""
    from tilewise.train import loop

    folder = tmp_path_factory.mktemp("stopped") / "run"
    original = loop.Trainer._after_step

    def stop(self, *given):
        original(self, *given)
        if self.step == 2:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop.Trainer, "_after_step", stop)
        with pytest.raises(KeyboardInterrupt):
            train(settings(data, folder, *MORE, "output.tensorboard=true"))
    return folder


@pytest.fixture
def run(stopped, tmp_path):
    return shutil.copytree(stopped, tmp_path / "run")


def config_of(run, data, *more):
    return settings(data, run, *MORE, "output.tensorboard=true", *more)


@pytest.mark.parametrize(
    "name, advice",
    [
        ("config.toml", "Rename or remove the folder of that name"),
        ("metrics.jsonl", "Rename or remove the folder of that name"),
        ("status.json", "Rename or remove the folder of that name"),
        ("tensorboard", "Rename the file in the place of the folder"),
    ],
)
def test_something_else_in_the_place_of_a_file_of_a_run_loses_nothing(run, data, name, advice):
    there = run / name
    shutil.move(there, run.parent / "aside")
    there.write_text("x") if name == "tensorboard" else there.mkdir()
    before = contents(run / "checkpoints")
    with pytest.raises(
        CheckpointError, match=rf"^cannot write .*{there}: .*checkpoints are untouched\. {advice}, {AGAIN}"
    ):
        train(config_of(run, data))
    assert contents(run / "checkpoints") == before
    assert not leftovers(run)
    there.unlink() if name == "tensorboard" else there.rmdir()
    shutil.move(run.parent / "aside", there)
    assert train(config_of(run, data)).finished
    assert [line["step"] for line in RunFolder(run).read_metrics() if line["kind"] == "train"] == [1, 2, 3, 4]


@pytest.mark.parametrize("name", ["config.toml", "metrics.jsonl", "status.json", "state.json"])
def test_a_disk_that_is_full_when_a_file_of_a_run_is_flushed_loses_nothing(run, data, monkeypatch, name):
    before = contents(run / "checkpoints")
    with monkeypatch.context() as patch:
        disk = FullDisk(patch, run, name)
        what = r"the checkpoint of step 4 to" if name == "state.json" else rf"{run / name}:"
        with pytest.raises(
            CheckpointError, match=rf"^cannot write {what}.*No space left.*untouched\. Free some space, {AGAIN}"
        ):
            train(config_of(run, data))
    assert disk.hits
    assert contents(run / "checkpoints") == before
    assert not leftovers(run)
    assert train(config_of(run, data)).finished


def test_a_new_run_in_whose_folder_a_file_has_the_name_of_the_model(tmp_path, data):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "model").write_text("x")
    with pytest.raises(
        CheckpointError, match=rf"^cannot write the model to .*model: Not a directory\. Rename the file.*{AGAIN}"
    ):
        train(settings(data, tmp_path / "run", *MORE))
    assert (tmp_path / "run" / "model").read_text() == "x"


def test_an_old_checkpoint_comes_back_if_it_cannot_be_replaced(run, data, monkeypatch):
    """A damaged checkpoint of a step is replaced when the step is done again."""
    (run / "checkpoints" / step_name(4)).mkdir()
    (run / "checkpoints" / step_name(4) / "note.txt").write_text("x")
    rename = os.rename

    def full(source, target, **more):
        if os.fspath(target).endswith(step_name(4)) and "removed" not in os.fspath(source):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        rename(source, target, **more)

    monkeypatch.setattr(os, "rename", full)
    with pytest.raises(CheckpointError, match="cannot write the checkpoint of step 4"):
        train(config_of(run, data))
    assert (run / "checkpoints" / step_name(4) / "note.txt").read_text() == "x"
    assert not leftovers(run)


def test_events_that_cannot_be_written_end_in_one_sentence(run, data, monkeypatch):
    from tensorboard.summary.writer.record_writer import RecordWriter

    def full(self, record):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(RecordWriter, "write", full)
    monkeypatch.setattr(threading, "excepthook", lambda end: None)
    sentence = (
        rf"^cannot write the TensorBoard events to {run / 'tensorboard'}: No space left.*untouched\. Free some space"
    )
    with pytest.raises(CheckpointError, match=sentence):
        train(config_of(run, data))
    assert list_checkpoints(run / "checkpoints")[0].name == step_name(2)


def test_an_error_of_the_run_is_not_hidden_by_its_events(run, data, monkeypatch):
    from tilewise.train import trackers, update

    def fail(*given):
        raise ValueError("the loss is strange")

    def full(self):
        raise CheckpointError("cannot write the TensorBoard events")

    monkeypatch.setattr(update.Update, "run", fail)
    monkeypatch.setattr(trackers.TensorBoard, "close", full)
    with pytest.raises(ValueError, match="the loss is strange"):
        train(config_of(run, data))


def test_the_id_of_a_run_of_weights_and_biases(tmp_path, monkeypatch, data):
    started = []
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=lambda **given: started.append(given["id"])))
    (tmp_path / "wandb_id.txt").mkdir()
    config = settings(data, tmp_path)
    with pytest.raises(CheckpointError, match=rf"^cannot write .*wandb_id\.txt: Is a directory.*{AGAIN}"):
        WeightsAndBiases(config, tmp_path, 0)
    (tmp_path / "wandb_id.txt").rmdir()
    WeightsAndBiases(config, tmp_path, 0)
    assert started == [(tmp_path / "wandb_id.txt").read_text()]


# -- what commands write -------------------------------------------------------------------------------------

COMMANDS = {
    "evaluation.json": ["evaluate"],
    "report.html": ["report"],
    "search.png": ["search", "cat"],
    "features.safetensors": ["embed", "features.safetensors"],
    "features.json": ["embed", "features.safetensors"],
}


def start(run, command, name):
    more = [run / given if given.endswith(".safetensors") else given for given in command[1:]]
    return invoke(command[0], run, *more)


@pytest.mark.parametrize("name, command", COMMANDS.items())
@pytest.mark.parametrize("fault", ["folder", "full"])
def test_what_a_command_cannot_write_is_named_and_the_old_file_stays(run, name, command, fault, monkeypatch):
    assert start(run, command, name).exit_code == 0
    written = {path: path.read_bytes() for path in map(run.joinpath, COMMANDS) if path.exists()}
    assert run / name in written
    disk = None
    if fault == "folder":
        del written[run / name]
        (run / name).unlink()
        (run / name).mkdir()
    else:
        disk = FullDisk(monkeypatch, run, f".writing-{name}")
    advice = "Rename or remove the folder of that name" if fault == "folder" else "Free some space"
    with pytest.raises(CheckpointError, match=rf"^cannot write {run / name}: .*{advice}, {AGAIN}"):
        start(run, command, name)
    assert disk is None or disk.hits
    assert {path: path.read_bytes() for path in written} == written  # of both files of features, or of neither
    assert not leftovers(run)


def test_an_export_on_a_full_disk_leaves_no_folder(run, monkeypatch):
    disk = FullDisk(monkeypatch, run.parent, "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"^cannot write the model to .*out: No space left.*{AGAIN}"):
        invoke("export", run, run.parent / "out")
    assert disk.hits
    assert not (run.parent / "out").exists()
    assert not leftovers(run.parent)
