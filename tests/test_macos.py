"""What differs on macOS, imitated here: files that it adds, a linked folder, other units, missing functions."""

import tarfile
from pathlib import Path

import pytest
import torch
from tests.train.small_pictures import picture

from tilewise.train.config import DataConfig
from tilewise.train.data.open import open_source
from tilewise.train.data.records import Draw, SkipLog
from tilewise.train.data.table import image_files

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
