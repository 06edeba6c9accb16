"""A gallery that is read in blocks: the same bits as from one block, in memory that does not grow with it."""

from __future__ import annotations

import contextlib
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import tilewise as tw
from tilewise.retrieval import gallery as blocks

GENERATOR = torch.Generator().manual_seed(0)
QUERIES, GALLERY = (torch.randn(rows, 24, generator=GENERATOR) for rows in (70, 500))
IDS = [torch.randint(0, 30, (rows,), generator=GENERATOR) for rows in (70, 500)]
RIGHT, LEFT_OUT = (torch.randint(-1, 500, (70, 3), generator=GENERATOR) for _ in range(2))
LEFT_OUT[(LEFT_OUT[:, :, None] == RIGHT[:, None]).any(2)] = -1
IDENTIFIED = {"query_ids": IDS[0], "gallery_ids": IDS[1]}
CALLS = {
    "nearest": lambda g: tw.nearest(QUERIES, g, 40, **IDENTIFIED, exclude=LEFT_OUT, below=torch.arange(70) / 7.0),
    "ranks": lambda g: (tw.retrieval_ranks(QUERIES, g, RIGHT, exclude=LEFT_OUT),),
    "both directions": lambda g: tw.retrieval_ranks_both(QUERIES, g, RIGHT[:, 0]),
    "both directions, item i": lambda g: tw.retrieval_ranks_both(QUERIES, g),
    "both directions, ids": lambda g: tw.retrieval_ranks_both(QUERIES, g, **IDENTIFIED),
    "mining": lambda g: tw.mine_hard_negatives(QUERIES, g, RIGHT, num_negatives=4, relative_margin=0.1),
}


@pytest.fixture
def set_block_bytes(monkeypatch):
    return lambda size: monkeypatch.setattr(blocks, "BLOCK_BYTES", size)


@pytest.mark.parametrize("name", CALLS)
def test_blocks_change_no_bit(name, set_block_bytes):
    whole = CALLS[name](GALLERY)
    for rows in (77, 250):
        set_block_bytes(rows * 24 * 4)
        for got, want in zip(CALLS[name](GALLERY), whole, strict=True):
            assert torch.equal(got, want)


def test_an_empty_gallery_and_one_without_width_are_one_block(set_block_bytes):
    set_block_bytes(1)
    for gallery in (GALLERY[:0], torch.ones(5, 0)):
        parts = list(blocks.gallery_blocks(gallery, torch.device("cpu")))
        assert sum(part.stop - part.start for part, _ in parts) == len(gallery)
        assert torch.equal(torch.cat([items for _, items in parts]), gallery)


def anonymous_bytes() -> int:
    """Resident memory of this process without the pages of files, which the system drops when it needs room."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon:"))


def test_a_memory_mapped_gallery_is_not_read_into_memory(tmp_path, set_block_bytes):
    try:
        anonymous_bytes()
    except (OSError, StopIteration):
        pytest.skip("the system does not tell anonymous memory apart")
    set_block_bytes(2**22)
    size = 2**18, 32  # 32 MiB
    file = np.memmap(tmp_path / "gallery", np.float32, "w+", shape=size)
    file[:] = np.random.default_rng(0).standard_normal(32, np.float32)
    file[12345], file[200000] = 2 * file[0], 3 * file[0]
    file.flush()
    queries, seen = torch.from_numpy(file[:4].copy()), []

    def note(*_: int) -> None:
        seen.append(anonymous_bytes())

    tw.nearest(queries, queries, 2)  # what is allocated once
    for opened in (
        torch.from_numpy(np.memmap(tmp_path / "gallery", np.float32, "c", shape=size)),
        torch.from_file(str(tmp_path / "gallery"), size=size[0] * size[1]).view(size),
    ):
        seen.clear()
        before = anonymous_bytes()
        found = tw.nearest(queries, opened, 3, progress=note)
        assert found.indices.tolist() == [[200000, 12345, 0]] * 4
        assert len(seen) == 8  # blocks
        assert max(seen) - before < 2**24  # half of the gallery; a strip of scores takes 8 MiB


class Order:
    """In place of CUDA's streams and events: every copy is done at once, by the thread that asks for it."""

    def __getattr__(self, name: str):
        return lambda *_: None


def test_a_copied_block_is_not_overwritten_while_it_is_in_use(monkeypatch):
    """The copies to a GPU, with memory of the host on both sides."""
    empty = torch.empty
    cuda = SimpleNamespace(
        Event=Order, Stream=lambda _: Order(), current_stream=lambda _: Order(), stream=contextlib.nullcontext
    )
    monkeypatch.setattr(
        blocks, "torch", SimpleNamespace(empty=lambda *a, pin_memory=0, **how: empty(*a, **how), cuda=cuda)
    )
    parts = [slice(first, min(first + 64, 500)) for first in range(0, 500, 64)]
    for part, items in blocks._copied(GALLERY, torch.device("cpu"), parts):
        time.sleep(0.01)  # the next block is copied meanwhile
        assert torch.equal(items, GALLERY[part])
    stopped = blocks._copied(GALLERY, torch.device("cpu"), parts)
    next(stopped)
    stopped.close()
