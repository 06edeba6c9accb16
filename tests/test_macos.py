"""What differs on macOS, imitated here: files that it adds, a linked folder, other units, missing functions."""

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from tests import processes
from tests.train.small_pictures import picture

import tilewise as tw
from benchmarks import measure
from tilewise.errors import ConfigError
from tilewise.ops import budget
from tilewise.train import memory
from tilewise.train.checkpoint import step_name
from tilewise.train.config import DataConfig, load_config
from tilewise.train.data.files import Preparation
from tilewise.train.data.open import EvalImages, open_source
from tilewise.train.data.records import Draw, SkipLog
from tilewise.train.data.table import Entry, FileSource, image_files
from tilewise.train.distributed import choose_device
from tilewise.train.run_folder import check_not_moved

APPLE_DOUBLE = b"\x00\x05\x16\x07\x00\x02\x00\x00Mac OS X" + 100 * b"\0"


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Two pairs as a Mac leaves them on a disk of another system."""
    for name in ("a", "b"):
        (tmp_path / f"{name}.png").write_bytes(picture())
        (tmp_path / f"{name}.txt").write_text("a cup")
        (tmp_path / f"._{name}.png").write_bytes(APPLE_DOUBLE)
        (tmp_path / f"._{name}.txt").write_bytes(APPLE_DOUBLE)
    (tmp_path / ".DS_Store").write_bytes(b"\0\0\0\x01Bud1")
    return tmp_path


@pytest.mark.parametrize("source", ["folder", "shards"])
def test_files_that_macos_adds_are_no_damage(pictures: Path, tmp_path_factory: pytest.TempPathFactory, source: str):
    path = pictures
    if source == "shards":
        path = tmp_path_factory.mktemp("shards") / "0.tar"
        with tarfile.open(path, "w") as tar:
            for file in sorted(pictures.iterdir()):
                tar.add(file, f"./{file.name}")
    skips = SkipLog()
    pairs = open_source(DataConfig(source=source, path=str(path), eval_share=0), 8, skips)
    rows = pairs.rows(torch.tensor(pairs.all_keys()), Draw(0, 0, 0, 0, 2), skips)
    assert rows.texts == ["a cup", "a cup"]
    assert (len(pairs), skips.total, skips.take_notices()) == (2, 0, [])


def test_classes_of_zero_shot_have_no_such_files(pictures: Path):
    assert [path.name for path in image_files(pictures)] == ["a.png", "b.png"]


def test_a_temporary_folder_behind_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """/tmp and the user's own temporary folder are links there: a run may be named in two ways."""
    (tmp_path / "private" / "run" / "checkpoints" / step_name(1)).mkdir(parents=True)
    (tmp_path / "var").symlink_to("private")
    config = load_config(None, [f"output.folder={tmp_path / 'var' / 'run'}"])
    check_not_moved(tmp_path / "private" / "run" / "config.toml", config, [])
    monkeypatch.chdir(tmp_path / "var")
    check_not_moved(Path("run/config.toml"), config, [])
    (tmp_path / "var" / "other").mkdir()
    with pytest.raises(ConfigError, match="another folder"):
        check_not_moved(Path("run/config.toml"), load_config(None, ["output.folder=other"]), [])


def test_a_file_with_two_names(tmp_path: Path):
    """Case is ignored there, so a.png and A.PNG are one file. Here a second link is a second name."""
    (tmp_path / "a.png").write_bytes(picture())
    os.link(tmp_path / "a.png", tmp_path / "b.png")
    images = EvalImages(source=FileSource([Entry(str(tmp_path / "a.png"), ["a cup"])], Preparation(8)), keys=[0])
    assert images.number_of(tmp_path / "b.png") == 0
    (tmp_path / "c.png").write_bytes(picture())
    assert images.number_of(tmp_path / "c.png") is None
    assert images.number_of(tmp_path / "none.png") is None


def test_the_peak_of_a_process_has_other_units(monkeypatch: pytest.MonkeyPatch):
    """`ru_maxrss` is in KiB on Linux and in bytes on macOS."""
    monkeypatch.setattr(memory.resource, "getrusage", lambda who: SimpleNamespace(ru_maxrss=5 * 2**20))
    found = {}
    for system in ("linux", "darwin"):
        monkeypatch.setattr(sys, "platform", system)
        found[system] = memory.process_peak_bytes()
    assert found == {"linux": 5 * 2**30, "darwin": 5 * 2**20}


def test_free_memory_is_not_known(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "sysconf_names", {"SC_PAGE_SIZE": 29})
    assert budget.free_bytes(torch.device("cpu")) is None
    options = tw.TileOptions(workspace_mib="auto")
    assert tw.clip_loss(torch.eye(4), torch.eye(4), 1.0, options=options).isfinite()


def test_memory_that_cannot_be_measured_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(measure, "RESET_PEAK", tmp_path / "clear_refs")
    with pytest.raises(measure.NoCounterError, match="on Linux only: there is no"):
        measure.cpu_peak_bytes("tests.memory_steps:measured", {})


def test_the_trainer_does_not_take_an_apple_gpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert choose_device("auto").type == "cpu"
    with pytest.raises(ConfigError, match="must be auto, cpu or cuda, got 'mps'"):
        choose_device("mps")


def meet(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    loss = tw.clip_loss(torch.eye(4), torch.eye(4), 1.0, group=dist.group.WORLD)
    Path(folder, f"{rank}.txt").write_text(f"{loss:.4f} {os.environ['GLOO_SOCKET_IFNAME']}")
    dist.destroy_process_group()


@pytest.mark.group
def test_ranks_that_are_not_forked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(processes, "START", "spawn")
    processes.run_ranks(meet, (str(tmp_path),), 2)
    told = [(tmp_path / f"{rank}.txt").read_text() for rank in range(2)]
    assert told[0] == told[1]


def test_children_without_proc(monkeypatch: pytest.MonkeyPatch):
    """The list of processes is read from ps where there is no /proc."""
    if shutil.which("ps") is None:
        pytest.skip("there is no ps on this machine (Debian package: procps)")
    with subprocess.Popen(["sleep", "60"]) as child:
        monkeypatch.setattr(Path, "exists", lambda path: False)
        found = processes.children(os.getpid())
        child.kill()
    assert child.pid in found
