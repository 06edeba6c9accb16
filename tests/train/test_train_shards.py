"""Pairs from shards: complete, reshuffled each epoch, divided among ranks; damage is counted; ids."""

import io
import tarfile

import pytest
import torch
import webdataset
from tests.train.small_pictures import picture, stream

from tilewise.errors import DataError
from tilewise.train.config import DataConfig
from tilewise.train.data import Position, SkipLog, open_source
from tilewise.train.data.files import Preparation
from tilewise.train.data.records import Draw
from tilewise.train.data.shards import ShardSource, expand_shards


def make_shards(folder, shards=3, records=5):
    for shard in range(shards):
        with webdataset.TarWriter(str(folder / f"{shard:05d}.tar")) as writer:
            for i in range(records):
                number = shard * records + i
                text = {"txt": f"caption {number}"} if i % 2 else {"json": {"caption": f"caption {number}"}}
                writer.write({"__key__": f"{number:06d}", "png": picture((number, 0, 0)), **text})
    return str(folder / f"{{00000..{shards - 1:05d}}}.tar")


def shard_source(pattern, skips, shuffle_shards=2):
    return ShardSource(
        expand_shards(pattern), Preparation(8), shuffle_shards=shuffle_shards, records=0, workers=2, skips=skips
    )


def numbers_in(batch):
    return batch.images[:, 0, 4, 4].tolist()


def test_shards_written_by_webdataset_are_read_shuffled_and_complete(tmp_path):
    pattern = make_shards(tmp_path)
    source = shard_source(pattern, SkipLog())
    assert len(source) == 15
    batches = list(stream(source, 5).batches(Position(), 0, 6))
    first, second = [n for b in batches[:3] for n in numbers_in(b)], [n for b in batches[3:] for n in numbers_in(b)]
    assert sorted(first) == sorted(second) == list(range(15))
    assert first != second
    assert first != sorted(first)
    assert batches[0].epoch == 0
    assert batches[3].epoch == 1


def test_a_stream_continues_in_mid_epoch_where_it_was(tmp_path):
    source = shard_source(make_shards(tmp_path), SkipLog())
    whole = list(stream(source, 4, prefetch=2).batches(Position(), 0, 7))
    for cut in (1, 2, 4):
        fresh = shard_source(str(tmp_path / "*.tar"), SkipLog())
        rest = list(stream(fresh, 4).batches(whole[cut - 1].after, cut, 7))
        assert [numbers_in(b) for b in rest] == [numbers_in(b) for b in whole[cut:]]
        assert all(torch.equal(a.images, b.images) for a, b in zip(rest, whole[cut:], strict=True))


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_share_the_global_batch_of_one_process(tmp_path, world):
    config = DataConfig(source="shards", path=make_shards(tmp_path))
    alone = stream(open_source(config, 8, SkipLog()), 7).make(Position(), 0)
    parts = [
        stream(open_source(config, 8, SkipLog()), 7, rank=r, world=world).make(Position(), 0) for r in range(world)
    ]
    assert torch.equal(torch.cat([p.images for p in parts]), alone.images)  # the random crops are the same as well
    assert all(p.after == alone.after for p in parts)


def test_damaged_shards_and_records_are_skipped_and_counted(tmp_path):
    pattern = make_shards(tmp_path)
    with tarfile.open(tmp_path / "00000.tar", "a") as tar:
        for name, data in {
            "a.png": picture(),
            "b.txt": b"words",
            "c.png": b"no",
            "c.txt": b"x",
            "d.png": picture(),
            "d.txt": b"",
        }.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    cut = (tmp_path / "00002.tar").read_bytes()
    (tmp_path / "00002.tar").write_bytes(cut[: len(cut) // 2])
    skips = SkipLog()
    source = shard_source(pattern, skips, shuffle_shards=3)
    batch = stream(source, len(source), skips=skips).make(Position(), 0)
    assert skips.counts["no image"] == 1
    assert skips.counts["no caption"] == 3  # one without a file, one empty, one cut off
    assert any("decoded" in reason for reason in skips.counts)
    assert 10 <= len(batch.ids) < 15
    assert set(range(10)) <= set(numbers_in(batch))


@pytest.mark.parametrize("size", [-512, -1024, 2**80])
def test_a_shard_with_an_impossible_size_is_damaged_and_does_not_hang(tmp_path, size):
    pattern = make_shards(tmp_path, shards=2)
    path = tmp_path / "00001.tar"
    with tarfile.open(path) as tar:
        start = tar.getmembers()[2].offset
    data = bytearray(path.read_bytes())
    head = data[start : start + 512]
    head[124:136] = (size % 2**88 | (255 if size < 0 else 128) << 88).to_bytes(12, "big")
    head[148:156] = b"%06o\0 " % (sum(head[:148]) + 8 * 32 + sum(head[156:]))
    data[start : start + 512] = head
    path.write_bytes(data)
    skips = SkipLog()
    assert len(shard_source(pattern, skips)) == 6
    assert "shard is damaged" in skips.summary()


def test_counting_shards_can_be_watched(tmp_path):
    told = []
    open_source(
        DataConfig(source="shards", path=make_shards(tmp_path)), 8, SkipLog(), watch=lambda *now: told.append(now)
    )
    assert told == [(1, 3), (2, 3), (3, 3)]


def test_missing_shards_are_named(tmp_path):
    with pytest.raises(DataError, match=r"00007\.tar"):
        shard_source(str(tmp_path / "{00007..00008}.tar"), SkipLog())


def test_patterns():
    assert expand_shards("a-{0..2}-{x,y}.tar::b.tar") == [
        "a-0-x.tar", "a-0-y.tar", "a-1-x.tar", "a-1-y.tar", "a-2-x.tar", "a-2-y.tar", "b.tar",
    ]  # fmt: skip


def test_patterns_name_each_shard_once_and_none_vanishes(tmp_path):
    for name in ("a1.tar", "a2.tar", "b[1].tar"):
        (tmp_path / name).write_bytes(b"")
    here = f"{tmp_path}/"
    assert expand_shards(f"{here}a1.tar::{here}a*.tar") == [here + "a1.tar", here + "a2.tar"]
    assert expand_shards(here + "b[1].tar") == [here + "b[1].tar"], "a file of that name, not a pattern"
    with pytest.raises(DataError, match=r"c-\*\.tar matches nothing"):
        shard_source(f"{here}a1.tar::{here}c-*.tar", SkipLog())
    with pytest.raises(DataError, match=r"braces in data\.path cannot be nested"):
        expand_shards("x-{a,{b,c}}.tar")


def test_a_shard_that_changes_during_a_run_loses_only_its_own_pairs(tmp_path):
    """Its index is read again after other shards have been, and has become shorter."""
    skips = SkipLog()
    source = shard_source(make_shards(tmp_path, shards=6), skips, shuffle_shards=1)
    keys = source.all_keys()
    (tmp_path / "00000.tar").write_bytes(b"")
    rows = source.rows(torch.tensor(keys), Draw(0, 0, 0, 0, 30), skips)
    assert len(rows.texts) == 25
    assert rows.left_out == 5
    assert skips.counts == {"shard has changed since it was first read": 5}
    assert len(skips.examples) == 5
    assert all("00000.tar:pair " in example for example in skips.examples)
    assert source.all_keys() == keys


def test_shards_without_files_are_named(tmp_path):
    with tarfile.open(tmp_path / "x.tar", "w"):
        pass
    with pytest.raises(DataError, match=r"no usable pairs in 1 shards: they are empty\. A pair is an image"):
        shard_source(str(tmp_path / "x.tar"), SkipLog())


def test_the_reason_of_a_missing_id_is_the_real_one(tmp_path):
    deep = b'{"sku": ' + b"[" * 5000 + b"]" * 5000 + b"}"
    with webdataset.TarWriter(str(tmp_path / "0.tar"), encoder=False) as writer:
        for i, about in enumerate([b'{"sku": "x"}', b"{", deep, b'{"sku": "' + b"x" * 2**20 * 17 + b'"}']):
            writer.write({"__key__": f"{i}", "png": picture(), "txt": b"a", "json": about})
    skips = SkipLog()
    source = open_source(DataConfig(source="shards", path=str(tmp_path / "0.tar"), id_column="sku"), 8, skips)
    assert len(source.rows(torch.arange(4), Draw(0, 0, 0, 0, 4), skips).ids) == 1
    assert sum("its .json cannot be read" in reason for reason in skips.counts) >= 1
    assert not any("no 'sku'" in reason for reason in skips.counts)
    assert any("larger than" in reason for reason in skips.counts)


def test_an_empty_text_leaves_the_caption_of_the_json(tmp_path):
    with webdataset.TarWriter(str(tmp_path / "0.tar")) as writer:
        for i, caption in enumerate(["from json", {"en": "no text"}, ("a", "b"), float("nan")]):
            writer.write({"__key__": f"{i}", "png": picture(), "txt": " ", "json": {"caption": caption}})
    skips = SkipLog()
    rows = shard_source(str(tmp_path / "0.tar"), skips).rows(torch.arange(4), Draw(0, 0, 0, 0, 4), skips)
    assert rows.texts[0] == "from json"
    assert rows.texts[1] in "ab"
    assert skips.counts == {"a caption must be text, got a dict": 1, "no caption": 1}


def test_a_folder_of_shards_and_other_keys_are_explained(tmp_path):
    how = Preparation(8)
    with pytest.raises(DataError, match=r"is a folder; write .*/\*\.tar"):
        ShardSource([str(tmp_path)], how, shuffle_shards=1, records=0, workers=1, skips=SkipLog())
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        tar.addfile(tarfile.TarInfo("7.picture"), io.BytesIO())
    with pytest.raises(DataError, match=r"x\.tar:7 \(\.picture\): no image\. A pair is an image"):
        ShardSource([str(tmp_path / "x.tar")], how, shuffle_shards=1, records=0, workers=1, skips=SkipLog())


def test_ids_of_shards_come_from_their_json_and_a_pair_without_is_counted(tmp_path):
    with webdataset.TarWriter(str(tmp_path / "0.tar")) as writer:
        for i, about in enumerate([{"sku": "x"}, {"sku": 4}, {"sku": "x"}, {}]):
            writer.write({"__key__": f"{i}", "png": picture(), "txt": "a", "json": about})
        writer.write({"__key__": "4", "png": picture(), "txt": "no json"})
    skips = SkipLog()
    source = open_source(DataConfig(source="shards", path=str(tmp_path / "0.tar"), id_column="sku"), 8, skips)
    rows = source.rows(torch.arange(5), Draw(0, 0, 0, 0, 5), skips)
    assert len(rows.ids) == 3
    assert rows.ids[0] == rows.ids[2] != rows.ids[1]
    assert skips.counts == {"no 'sku' in its .json (data.id_column)": 2}


def test_captions_of_a_json_may_be_a_list_and_hold_half_a_character(tmp_path):
    with webdataset.TarWriter(str(tmp_path / "0.tar")) as writer:
        for i, caption in enumerate(["cut \ud83d", ["a cup", "tea"], [], None]):
            writer.write({"__key__": f"{i}", "png": picture(), "json": {"caption": caption, "sku": "\ud83d"}})
    skips = SkipLog()
    source = open_source(DataConfig(source="shards", path=str(tmp_path / "0.tar"), id_column="sku"), 8, skips)
    assert [source.read(key).captions for key in range(2)] == [("cut ?",), ("a cup", "tea")]
    rows = source.rows(torch.arange(4), Draw(0, 0, 0, 0, 4), skips)
    assert len(rows.ids) == 2
    assert skips.counts == {"no caption": 2}
