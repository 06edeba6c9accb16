"""Hostile and damaged data: nothing hangs, nothing ends a run, and every skipped record is counted."""

import gc
import io
import os
import signal
import struct
import tarfile
import threading
import time
import warnings
import zlib
from pathlib import Path

import pytest
import torch
from PIL import Image
from rich.console import Console
from tests.train import hostile_files
from tests.train.small_pictures import picture

from tilewise.train import loop, signals
from tilewise.train.config import DataConfig, load_config
from tilewise.train.data import SkipLog, open_source, workers
from tilewise.train.data.images import decode
from tilewise.train.data.records import Draw, RecordError
from tilewise.train.data.shards import index_shard
from tilewise.train.data.tar import MAX_EXTENSIONS, scan_tar
from tilewise.train.data.workers import Workers
from tilewise.train.untrusted import NotRegularError, TooLargeError, parse_json, read_regular

DEEP = "[" * 100_000 + "]" * 100_000


def add(tar, name, data, **changes):
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for key, value in changes.items():
        setattr(info, key, value)
    tar.addfile(info, io.BytesIO(data))


def header(name, size, kind, extra=()):
    """Return a tar header with arbitrary number fields."""
    block = bytearray(512)
    block[: len(name)] = name
    block[100:108], block[108:116], block[116:124], block[136:148] = b"0000644\0", b"0000000\0", b"0000000\0", b"0" * 12
    block[124:136] = (size % 2**88 | (255 if size < 0 else 128) << 88).to_bytes(12, "big")
    block[156:157] = kind
    block[257:265] = b"ustar  \0"
    for start, data in extra:
        block[start : start + len(data)] = data
    block[148:156] = b"%06o\0 " % (sum(block[:148]) + 8 * 32 + sum(block[156:]))
    return bytes(block)


def write_pairs(path, count=4):
    with tarfile.open(path, "w") as tar:
        for i in range(count):
            add(tar, f"{i}.png", picture())
            add(tar, f"{i}.txt", b"a cup")
    return path


def index(path):
    skips = SkipLog()
    return index_shard(str(path), skips), skips


def source_of(path, skips, **extra):
    return open_source(DataConfig(source="shards", path=str(path), **extra), 8, skips)


# -- tar headers ---------------------------------------------------------------------------------------------


def test_a_sparse_member_that_points_backwards_ends_the_shard(tmp_path):
    write_pairs(tmp_path / "a.tar")
    data = (tmp_path / "a.tar").read_bytes()
    end = len(data.rstrip(b"\0")) // 512 * 512 + 512
    sparse = header(b"x.png", -512, b"S", [(386, b"00000000000\0" + b"00000001000\0"), (483, b"00000001000\0")])
    (tmp_path / "a.tar").write_bytes(data[:end] + sparse + bytes(1024))
    entries, skips = index(tmp_path / "a.tar")
    assert len(entries) == 4
    assert skips.counts == {"shard is damaged (a member has -512 bytes)": 1}


def test_sparse_members_are_refused_and_counted(tmp_path):
    write_pairs(tmp_path / "a.tar")
    data = (tmp_path / "a.tar").read_bytes()
    more = bytearray(512)  # an extra block of the sparse map
    old = header(b"x.png", 512, b"S", [(482, b"\1"), (483, b"00000001000\0")]) + bytes(more) + b"x" * 512
    (tmp_path / "a.tar").write_bytes(old + data)
    with tarfile.open(tmp_path / "a.tar", "a", format=tarfile.PAX_FORMAT) as tar:
        add(tar, "y.png", picture(), pax_headers={"GNU.sparse.major": "1", "GNU.sparse.minor": "0"})
    entries, skips = index(tmp_path / "a.tar")
    assert [entry.name for entry in entries] == ["0", "1", "2", "3"]
    assert skips.counts == {"sparse member": 2}


def test_thousands_of_long_name_headers_skip_one_member(tmp_path):
    write_pairs(tmp_path / "a.tar")
    data = (tmp_path / "a.tar").read_bytes()
    long = header(b"././@LongLink", 6, b"L") + b"x.png\0".ljust(512, b"\0")
    for count in (MAX_EXTENSIONS, 3_000):
        (tmp_path / "b.tar").write_bytes(long * count + header(b"short", 4, b"0") + b"data".ljust(512, b"\0") + data)
        entries, skips = index(tmp_path / "b.tar")
        assert len(entries) == 4
        few = count == MAX_EXTENSIONS
        assert skips.counts == ({"no caption": 1} if few else {"member has too many extended headers": 1})


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_members_are_those_that_tarfile_finds(tmp_path, form):
    names = ["a/b.png", "a/b.txt", "d" * 90 + "/" + "e" * 80 + ".png", "ü/ö.json", "x.tar.gz"]
    with tarfile.open(tmp_path / "a.tar", "w", format=form) as tar:
        add(tar, "folder", b"", type=tarfile.DIRTYPE)
        add(tar, "link", b"", type=tarfile.SYMTYPE, linkname="f" * 150 if form != tarfile.USTAR_FORMAT else "f")
        for name in names:
            add(tar, name, name.encode() * 100)
    with tarfile.open(tmp_path / "a.tar") as tar:
        want = [(info.name, info.offset_data, info.size) for info in tar if info.isfile()]
    with (tmp_path / "a.tar").open("rb") as file:
        found = list(scan_tar(file.fileno(), os.path.getsize(file.name), lambda *unused: None))
    assert [tuple(member) for member in found] == want
    assert [member.name for member in found] == names


# -- shards that were cut short ------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", ["between members", "inside a member", "inside a header", "before the end marker"])
def test_a_shard_that_ended_early_is_named_with_the_pairs_read(tmp_path, cut):
    write_pairs(tmp_path / "a.tar", count=40)
    with tarfile.open(tmp_path / "a.tar") as tar:
        members = tar.getmembers()
        place = {
            "between members": members[44].offset, "inside a member": members[44].offset_data + 20,
            "inside a header": members[44].offset + 100, "before the end marker": tar.offset,
        }[cut]  # fmt: skip
    (tmp_path / "a.tar").write_bytes((tmp_path / "a.tar").read_bytes()[:place])
    entries, skips = index(tmp_path / "a.tar")
    pairs = 40 if cut == "before the end marker" else 22
    assert len(entries) == pairs
    assert skips.counts["shard ended early"] == 1
    assert len(skips.notices) == 1
    assert "a.tar ended early" in skips.notices[0]
    assert f"{pairs} pairs were read" in skips.notices[0]


def test_a_header_that_is_damaged_in_the_middle_is_named(tmp_path):
    write_pairs(tmp_path / "a.tar", count=40)
    data = bytearray((tmp_path / "a.tar").read_bytes())
    with tarfile.open(tmp_path / "a.tar") as tar:
        data[tar.getmembers()[44].offset] ^= 1
    (tmp_path / "a.tar").write_bytes(data)
    entries, skips = index(tmp_path / "a.tar")
    assert len(entries) == 22
    assert skips.counts == {"shard is damaged (a header is invalid)": 1}


def test_a_run_says_that_a_shard_ended_early(tmp_path):
    write_pairs(tmp_path / "a.tar", count=12)
    data = (tmp_path / "a.tar").read_bytes()
    (tmp_path / "b.tar").write_bytes(data[: 512 * 4 * 5])
    shown = io.StringIO()
    loop.train(small_run(tmp_path, "data.source=shards", f"data.path={tmp_path}/*.tar"), Console(file=shown, width=300))
    said = " ".join(shown.getvalue().split())
    assert "b.tar ended early (no end marker). 5 pairs were read from it" in said
    assert "1 shard ended early" in said


# -- records -------------------------------------------------------------------------------------------------


def test_deep_json_skips_its_record_only(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for i, content in enumerate(['{"caption": "a cup", "sku": 1}', DEEP, f'{{"caption": {DEEP}, "sku": 2}}']):
            add(tar, f"{i}.png", picture())
            add(tar, f"{i}.json", content.encode())
    for extra in ({}, {"id_column": "sku"}):
        skips = SkipLog()
        rows = source_of(tmp_path / "a.tar", skips, **extra).rows(torch.arange(3), Draw(0, 0, 0, 0, 3), skips)
        assert len(rows.ids) == 1
        assert skips.total == 2
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_json(DEEP)


def test_a_record_above_the_size_limit_is_skipped(tmp_path, monkeypatch):
    monkeypatch.setattr("tilewise.train.data.shards.TEXT_LIMIT", 2**20)
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for i, words in enumerate([b"a cup", b"a cup" * 2**18]):
            add(tar, f"{i}.png", picture())
            add(tar, f"{i}.txt", words)
    skips = SkipLog()
    rows = source_of(tmp_path / "a.tar", skips).rows(torch.arange(2), Draw(0, 0, 0, 0, 2), skips)
    assert len(rows.ids) == 1
    assert skips.counts == {"larger than 1 MiB": 1}


def test_special_files_are_skipped_and_do_not_block(tmp_path):
    (tmp_path / "a.png").write_bytes(picture())
    (tmp_path / "a.txt").write_text("a cup")
    os.mkfifo(tmp_path / "x.png")
    (tmp_path / "y.png").symlink_to("/dev/zero")
    (tmp_path / "z.png").mkdir()
    (tmp_path / "b.png").write_bytes(picture())
    os.mkfifo(tmp_path / "b.txt")
    skips = SkipLog()
    source = open_source(DataConfig(source="folder", path=str(tmp_path), eval_share=0), 8, skips)
    rows = source.rows(torch.arange(len(source)), Draw(0, 0, 0, 0, len(source)), skips)
    assert len(rows.ids) == 1
    assert skips.counts == {"image is not a regular file": 3, "no caption": 1}
    (tmp_path / "t.csv").write_text("image,caption\n/dev/zero,zeros\nx.png,fifo\na.png,a cup\n")
    skips = SkipLog()
    source = open_source(DataConfig(source="table", path=str(tmp_path / "t.csv"), eval_share=0), 8, skips)
    rows = source.rows(torch.arange(3), Draw(0, 0, 0, 0, 3), skips)
    assert len(rows.ids) == 1
    assert skips.counts == {"image is not a regular file": 2}


def test_regular_files_have_a_size_limit(tmp_path):
    with (tmp_path / "large").open("wb") as file:
        file.truncate(2**30)  # a sparse file that takes no disk space
    with pytest.raises(TooLargeError):
        read_regular(tmp_path / "large", 2**20)
    with pytest.raises(NotRegularError):
        read_regular("/dev/zero", 2**20)
    assert read_regular(__file__, 2**20) == Path(__file__).read_bytes()


# -- images --------------------------------------------------------------------------------------------------


def test_decoding_on_threads_leaves_the_warning_filters_alone():
    before = list(warnings.filters)
    data = [picture(), b"no image", picture(mode="P", colour=3, kind="GIF")] * 20

    def attempt(item):
        try:
            return decode(item).size
        except RecordError:
            return None

    with_threads = Workers(8).map(attempt, data)
    assert with_threads == [attempt(item) for item in data]
    assert warnings.filters == before


def test_an_image_with_too_many_pixels_is_refused_before_it_is_decoded():
    head = b"IHDR" + struct.pack(">IIBBBBB", 30_000, 3_000, 8, 0, 0, 0, 0)
    data = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + head + struct.pack(">I", zlib.crc32(head))
    data += struct.pack(">I", 100) + b"IDAT" + bytes(100)
    with pytest.raises(RecordError, match="more than 89,478,485 pixels"):
        decode(data)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # and no warning is emitted
        with pytest.raises(RecordError, match="more than 89,478,485 pixels"):
            decode(data)


@pytest.mark.slow
def test_two_thousand_mutated_files(tmp_path):
    """TILEWISE_HOSTILE_FILES sets another number of files. `python -m tests.train.hostile_files` prints the counts."""
    count = int(os.environ.get("TILEWISE_HOSTILE_FILES", "2000"))
    found = hostile_files.check(count, 1, tmp_path)
    assert sum(sum(results.values()) for results in found.values()) == count
    assert all(results["read"] and results["refused"] for results in found.values())


# -- a stop signal while a read blocks -----------------------------------------------------------------------


def small_run(tmp_path, *overrides):
    return load_config(None, [
        "model.name=clip-tiny", "loop.batch_size=4", "loop.chunk_size=4", "loop.threads=1", "loop.device=cpu",
        "loop.steps=3", f"output.folder={tmp_path / 'run'}", "output.report=false", "output.tensorboard=false",
        "data.eval_share=0", *overrides,
    ])  # fmt: skip


@pytest.mark.parametrize("prefetch, first", [(1, 2), (0, 2), (1, 0)])
def test_a_stop_signal_is_obeyed_while_a_read_blocks(tmp_path, monkeypatch, prefetch, first):
    """The read blocks from batch `first` on. The run saves the steps that are done, stops, and continues later."""
    monkeypatch.setattr(signals, "GRACE_S", 0.2)
    for i in range(4):
        Image.new("RGB", (8, 8), (60 * i, 0, 0)).save(tmp_path / f"{i}.png")
    config = small_run(tmp_path, "data.source=folder", f"data.path={tmp_path}", f"data.prefetch={prefetch}")
    release, lock, count = threading.Event(), threading.Lock(), [0]

    def block(path, limit):
        with lock:
            count[0] += 1
            late = count[0] > 4 * first
        if late:
            release.wait(600)
            raise OSError("released")
        return read_regular(path, limit)

    monkeypatch.setattr("tilewise.train.data.table.read_regular", lambda path, limit: read_regular(path, limit))
    steps_done = threading.Event()  # from then on the trainer looks for a signal only while it waits for data
    train, after_step = loop.Trainer._train, loop.Trainer._after_step

    def watched(self, *args):
        monkeypatch.setattr("tilewise.train.data.table.read_regular", block)
        if first == 0:
            steps_done.set()
        return train(self, *args)

    def watched_step(self, *args):
        if self.step == first:
            steps_done.set()
        return after_step(self, *args)

    monkeypatch.setattr(loop.Trainer, "_train", watched)
    monkeypatch.setattr(loop.Trainer, "_after_step", watched_step)

    def stop_it():
        steps_done.wait(600)
        while count[0] <= 4 * first:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop_it, daemon=True).start()
    shown = io.StringIO()
    result = loop.train(config, Console(file=shown, width=300))
    release.set()
    assert result.signal_number == signal.SIGTERM
    assert result.step == first
    assert f"the data of step {first + 1} cannot be read" in shown.getvalue()
    kept = [path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*")]
    assert kept == ([f"step-{first:08d}"] if first else [])
    monkeypatch.undo()
    assert loop.train(config).finished


def test_an_evaluation_whose_read_blocks_can_be_given_up(monkeypatch):
    monkeypatch.setattr(workers, "BLOCKED_S", 0.2)
    pool, release = Workers(2), threading.Event()
    pool.give_up = lambda: True
    assert pool.map(lambda x: x + 1, range(5)) == [1, 2, 3, 4, 5]  # calls that return in time are never given up
    with pytest.raises(workers.CancelledError):
        pool.map(lambda x: release.wait(600), range(3))
    release.set()


def test_workers_raise_the_first_error_and_end_with_their_pool():
    def work(x):
        if x == 3:
            raise KeyError(x)
        return x

    pool = Workers(3)
    with pytest.raises(KeyError):
        pool.map(work, range(8))
    before = threading.active_count()
    del pool
    gc.collect()  # the traceback of the error refers to the pool
    end = time.monotonic() + 60
    while threading.active_count() > before - 3 and time.monotonic() < end:
        time.sleep(0.02)
    assert threading.active_count() <= before - 3
