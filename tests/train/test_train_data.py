import io
import json
import random
import tarfile
import threading
import time

import pytest
import torch
import webdataset
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tilewise.errors import ConfigError, DataError
from tilewise.train.config import DataConfig
from tilewise.train.data import BatchStream, Order, Position, SkipLog, open_eval_pairs, open_source
from tilewise.train.data.files import Preparation
from tilewise.train.data.icons import IconSource, augment_icons
from tilewise.train.data.images import centre_box, decode, random_box, to_tensor
from tilewise.train.data.records import Draw, RecordError
from tilewise.train.data.shards import ShardSource, expand_shards
from tilewise.train.icons import load_icons


def picture(colour=(200, 10, 10), size=(24, 16), kind="PNG", mode="RGB"):
    buffer = io.BytesIO()
    Image.new(mode, size, colour).save(buffer, kind)
    return buffer.getvalue()


def tokens(texts):
    return {"ids": torch.tensor([[len(t)] for t in texts], dtype=torch.int64).view(-1, 1)}


def stream(source, batch_size, **extra):
    given_ = {"seed": 0, "rank": 0, "world": 1, "skips": SkipLog(), "prefetch": 0, **extra}
    return BatchStream(source, tokens, batch_size=batch_size, **given_)


class Numbers:
    """A source of numbers, in windows of `size`."""

    def __init__(self, total, size):
        self.total, self.size = total, size

    def __len__(self):
        return self.total

    def window_count(self):
        return -(-self.total // self.size)

    def window_keys(self, seed, epoch, window):
        return torch.arange(window * self.size, min(self.total, (window + 1) * self.size))


# -- order ---------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=40)
@given(st.integers(5, 60), st.integers(1, 20), st.integers(1, 5))
def test_an_epoch_meets_every_pair_at_most_once_and_a_restart_changes_nothing(total, window, batch):
    order, position = Order(Numbers(total, window), seed=3), Position()
    seen, restarted = {}, []
    for _ in range(2 * (total // batch)):
        again, _, _ = Order(Numbers(total, window), seed=3).take(position, batch)  # as after a restart
        keys, epoch, position = order.take(position, batch)
        restarted.append(torch.equal(keys, again))
        seen.setdefault(epoch, []).append(keys)
    assert all(restarted)
    assert sorted(seen) == [0, 1]
    for parts in seen.values():
        keys = torch.cat(parts)
        assert len(keys) == len(keys.unique()) == batch * (total // batch)
    assert min(total, window) < 10 or not torch.equal(torch.cat(seen[0]), torch.cat(seen[1]))


def test_order_depends_on_the_seed():
    first = Order(Numbers(100, 100), 0).take(Position(), 50)[0]
    assert torch.equal(first, Order(Numbers(100, 100), 0).take(Position(), 50)[0])
    assert not torch.equal(first, Order(Numbers(100, 100), 1).take(Position(), 50)[0])


def test_a_batch_larger_than_the_data_is_refused():
    with pytest.raises(DataError, match="batch of 11"):
        Order(Numbers(10, 4), 0).take(Position(), 11)
    with pytest.raises(DataError, match=r"loop\.batch_size"):
        stream(Numbers(10, 4), 11)


# -- images --------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.integers(1, 300), st.integers(1, 300), st.integers(0, 10**6))
def test_random_boxes_lie_inside_and_keep_their_limits(width, height, seed):
    left, top, right, bottom = random_box(width, height, (0.08, 1.0), (0.75, 4 / 3), random.Random(seed))
    assert 0 <= left < right <= width
    assert 0 <= top < bottom <= height


def test_random_boxes_have_the_papers_areas_and_ratios():
    rng = random.Random(0)
    boxes = [random_box(400, 400, (0.08, 1.0), (0.75, 4 / 3), rng) for _ in range(3000)]
    areas = torch.tensor([(r - l) * (b - t) / 160000 for l, t, r, b in boxes])
    ratios = torch.tensor([(r - l) / (b - t) for l, t, r, b in boxes])
    assert areas.min() > 0.07
    assert areas.max() <= 1.0
    assert areas.min() < 0.1
    assert abs(areas[areas < 0.75].mean() - 0.415) < 0.015  # uniform from 0.08 to 0.75; larger ones may not fit
    assert ratios.min() > 0.73
    assert ratios.max() < 1.36
    assert abs(ratios.log().mean()) < 0.02


def test_decoding_lays_transparency_on_white_and_keeps_colours():
    clear = decode(picture((0, 0, 0, 0), mode="RGBA"))
    assert clear.getpixel((0, 0)) == (255, 255, 255)
    tensor = to_tensor(decode(picture()), centre_box(24, 16), 8)
    assert tensor.shape == (3, 8, 8)
    assert tensor[:, 3, 3].tolist() == [200, 10, 10]


@pytest.mark.parametrize("data", [b"", b"not an image", picture()[:40], picture(kind="JPEG")[:200]])
def test_damaged_images_are_record_errors(data):
    with pytest.raises(RecordError, match="cannot be decoded"):
        decode(data)


# -- tables and folders --------------------------------------------------------------------------------------


def make_table(folder, kind):
    for i in range(6):
        (folder / f"{i}.png").write_bytes(picture((40 * i, 0, 0)))
    (folder / "5.png").write_bytes(b"broken")
    rows = [(f"{i}.png", f"caption {i}") for i in range(6)] + [("0.png", "another"), ("gone.png", "x"), ("1.png", " ")]
    if kind in ("csv", "tsv"):
        mark = "," if kind == "csv" else "\t"
        (folder / f"t.{kind}").write_text("\n".join([f"image{mark}caption"] + [mark.join(row) for row in rows]))
    elif kind == "parquet":
        import pyarrow
        import pyarrow.parquet

        columns = {"image": [r[0] for r in rows], "caption": [r[1] for r in rows]}
        pyarrow.parquet.write_table(pyarrow.table(columns), folder / "t.parquet")
    elif kind == "jsonl":
        lines = [{"image": image, "caption": [text] if text == "another" else text} for image, text in rows]
        (folder / "t.jsonl").write_text("\n\n".join(json.dumps(line) for line in lines))
    else:
        names = sorted({r[0] for r in rows})
        coco = {
            "images": [{"id": i, "file_name": n} for i, n in enumerate(names)],
            "annotations": [{"image_id": names.index(r[0]), "caption": r[1]} for r in rows],
        }
        (folder / "t.json").write_text(json.dumps(coco))
    return str(folder / f"t.{kind}")


@pytest.mark.parametrize("kind", ["csv", "tsv", "jsonl", "parquet", "json"])
def test_tables_skip_count_and_report_what_is_broken(tmp_path, kind):
    path = make_table(tmp_path, kind)
    skips = SkipLog()
    source = open_source(DataConfig(source="table", path=path), 8, skips)
    assert len(source) == 7  # rows that share an image are one entry
    batch = stream(source, 7, skips=skips).make(Position(), 0)
    assert batch.images.shape == (5, 3, 8, 8)
    assert batch.tokens["ids"].shape == (5, 1)
    assert skips.total == 2
    assert {reason.split(" (")[0] for reason in skips.counts} == {"image cannot be decoded", "image cannot be read"}
    pairs = open_eval_pairs(DataConfig(source="table", path=path), 8, SkipLog(), path)
    assert len(pairs.images) == 5
    assert sorted(pairs.texts) == ["another"] + [f"caption {i}" for i in range(5)]
    assert pairs.text_ids.bincount().sort().values.tolist() == [1, 1, 1, 1, 2]


def test_parquet_with_bytes_and_lists_of_captions(tmp_path):
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table(
        {"image": [{"bytes": picture()}, {"bytes": picture((1, 2, 3))}], "caption": [["a", "b"], ["c"]]}
    )
    pyarrow.parquet.write_table(table, tmp_path / "t.parquet")
    config = DataConfig(source="table", path=str(tmp_path / "t.parquet"))
    pairs = open_eval_pairs(config, 8, SkipLog(), config.path)
    assert pairs.texts == ["a", "b", "c"]
    assert pairs.images.take([1])[0, :, 4, 4].tolist() == [1, 2, 3]


def test_folders_read_captions_beside_images_or_their_names(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "red-car_01.png").write_bytes(picture())
    (tmp_path / "in" / "b.png").write_bytes(picture())
    (tmp_path / "in" / "b.txt").write_text("a blue boat\nat sea\n")
    pairs = open_eval_pairs(DataConfig(source="folder", path=str(tmp_path)), 8, SkipLog(), str(tmp_path))
    assert pairs.texts == ["a blue boat", "at sea", "red car 01"]


@pytest.mark.parametrize(
    "name, content, words",
    [
        ("t.csv", "picture,caption\na,b\n", ["no column 'image'", "picture, caption"]),
        ("t.csv", "image,caption\n", ["no rows"]),
        ("t.csv", f"image,caption\na,{'b' * 140_000}\n", ["after line 1: field larger than", "quotation mark"]),
        ("t.jsonl", '{"image": "a", "text": "b"}', ["no column 'caption'", "it has image, text", "data.text_column"]),
        ("t.jsonl", '{"image": "a", "caption": "b"}\n["a", "b"]\n', ["line 2 is no JSON object", '"a red car"']),
        ("t.jsonl", '{"image": "a", "capti', ["line 1 is no JSON object"]),
        ("t.json", '{"images": []}', ["not a COCO captions file"]),
        ("t.parquet", "nonsense", ["not a Parquet file"]),
        ("t.xls", "", [".parquet"]),
        (None, "", ["no file"]),
    ],
)
def test_unusable_tables_say_what_is_wrong(tmp_path, name, content, words):
    if name:
        (tmp_path / name).write_text(content)
    with pytest.raises(DataError) as caught:
        open_source(DataConfig(source="table", path=str(tmp_path / (name or "gone.csv"))), 8, SkipLog())
    for word in words:
        assert word in str(caught.value)


def test_folders_and_tables_given_for_one_another_say_so(tmp_path):
    path = make_table(tmp_path, "csv")
    with pytest.raises(DataError, match=r"It is a folder: set data\.source='folder'"):
        open_source(DataConfig(source="table", path=str(tmp_path)), 8, SkipLog())
    with pytest.raises(DataError, match=r"is not a folder.*For a table set data\.source='table'"):
        open_source(DataConfig(source="folder", path=path), 8, SkipLog())


def test_a_table_of_a_spreadsheet_begins_with_a_mark(tmp_path):
    (tmp_path / "0.png").write_bytes(picture())
    (tmp_path / "t.csv").write_text("\ufeffimage,caption\n0.png,a café\n", encoding="utf-8")
    source = open_source(DataConfig(source="table", path=str(tmp_path / "t.csv")), 8, SkipLog())
    assert source.read(0).captions == ("a café",)


@pytest.mark.parametrize("kind", ["folder", "csv"])
def test_a_share_of_the_pairs_is_held_out_of_training(tmp_path, kind):
    for i in range(20):
        (tmp_path / f"{i:02d}.png").write_bytes(picture((10 * i, 0, 0)))
    (tmp_path / "t.csv").write_text("image,caption\n" + "".join(f"{i:02d}.png,{i:02d}\n" for i in range(20)))
    where = {"source": "folder", "path": str(tmp_path)}
    if kind == "csv":
        where = {"source": "table", "path": str(tmp_path / "t.csv")}
    config = DataConfig(**where, eval_share=0.2)
    source = open_source(config, 8, SkipLog())
    held_out = open_eval_pairs(config, 8, SkipLog()).texts
    trained = [source.read(i).captions[0] for i in range(len(source))]
    assert len(held_out) == 4
    assert sorted(trained + held_out) == [f"{i:02d}" for i in range(20)]
    assert held_out != [f"{i:02d}" for i in range(4)]  # no matter how the pairs are sorted
    assert open_eval_pairs(config, 8, SkipLog()).texts == held_out
    assert len(open_eval_pairs(config, 8, SkipLog(), config.path).texts) == 20  # other pairs are taken whole
    assert open_eval_pairs(DataConfig(**where), 8, SkipLog()) is None


@pytest.mark.parametrize(
    "other",
    [{"source": "icons"}, {"source": "shards", "path": "x.tar"}, {"source": "folder", "path": "x", "eval_path": "y"}],
)
def test_a_share_is_refused_where_it_would_do_nothing(other):
    with pytest.raises(ConfigError, match="set one of eval_share and eval_path"):
        DataConfig(**other, eval_share=0.1)


def test_a_batch_without_any_usable_record_is_an_error(tmp_path):
    for i in range(4):
        (tmp_path / f"{i}.png").write_bytes(b"broken")
    source = open_source(DataConfig(source="folder", path=str(tmp_path)), 8, SkipLog())
    with pytest.raises(DataError, match="none of the 4 records"):
        stream(source, 4).make(Position(), 0)


# -- shards --------------------------------------------------------------------------------------------------


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
    assert torch.equal(torch.cat([p.images for p in parts]), alone.images)  # the same random crops, too
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


# -- icons ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def some_icons():
    icons = load_icons()
    return icons.select(range(0, len(icons), len(icons) // 64))


def test_icon_batches_do_not_depend_on_ranks(some_icons):
    alone = stream(IconSource(some_icons, True), 32).make(Position(), 5)
    parts = [stream(IconSource(some_icons, True), 32, rank=r, world=3).make(Position(), 5) for r in range(3)]
    assert torch.equal(torch.cat([p.images for p in parts]), alone.images)
    assert torch.equal(torch.cat([p.ids for p in parts]), alone.ids)
    assert torch.equal(torch.cat([p.tokens["ids"] for p in parts]), alone.tokens["ids"])
    other = stream(IconSource(some_icons, True), 32).make(Position(), 6)
    assert not torch.equal(other.images, alone.images)  # another step, other turns


def test_augmentation_moves_but_does_not_destroy(some_icons):
    images = some_icons.images.unsqueeze(1)
    still = augment_icons(images, torch.full((len(images), 8), 0.5))
    assert (still.int() - images.int()).abs().max() <= 1
    moved = augment_icons(images, torch.rand(len(images), 8, generator=torch.Generator().manual_seed(0)))
    assert moved.shape == images.shape
    ink, before = (255 - moved.float()).mean((1, 2, 3)), (255 - images.float()).mean((1, 2, 3))
    assert ((ink / before) > 0.3).all()
    assert not torch.equal(moved, images)


def test_plain_icons_keep_their_captions(some_icons):
    rows = IconSource(some_icons, False).rows(torch.tensor([3, 1]), Draw(0, 0, 0, 0, 2), SkipLog())
    assert rows.texts == [some_icons.captions[3], some_icons.captions[1]]
    assert torch.equal(rows.images[:, 0], some_icons.images[[3, 1]])


def test_a_run_that_stops_does_not_decode_another_batch_first(tmp_path, monkeypatch):
    for i in range(40):
        Image.new("RGB", (8, 8)).save(tmp_path / f"{i}.png")
    source = open_source(DataConfig(source="folder", path=str(tmp_path)), 8, SkipLog())
    read, seen, second = source.read, [], threading.Event()

    def slowly(key):
        seen.append(key)
        if len(seen) > 20:
            second.set()
            time.sleep(0.1)
        return read(key)

    monkeypatch.setattr(source, "read", slowly)
    batches = stream(source, 20, prefetch=1).batches(Position(), 0, 9)
    next(batches)
    assert second.wait(60)
    batches.close()
    assert len(seen) < 35, "the second batch was made to its end"
    assert not [thread for thread in threading.enumerate() if thread.name == "tilewise-batches"]


def test_a_thread_that_fails_hands_its_error_over(some_icons):
    source = IconSource(some_icons, False)
    source.rows = None  # type: ignore[assignment]
    with pytest.raises(TypeError):
        list(stream(source, 8, prefetch=1).batches(Position(), 0, 3))


def test_a_folder_of_shards_and_other_keys_are_explained(tmp_path):
    how = Preparation(8)
    with pytest.raises(DataError, match=r"is a folder; write .*/\*\.tar"):
        ShardSource([str(tmp_path)], how, shuffle_shards=1, records=0, workers=1, skips=SkipLog())
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        tar.addfile(tarfile.TarInfo("7.picture"), io.BytesIO())
    with pytest.raises(DataError, match=r"x\.tar:7 \(\.picture\): no image\. A pair is an image"):
        ShardSource([str(tmp_path / "x.tar")], how, shuffle_shards=1, records=0, workers=1, skips=SkipLog())


# -- ids -----------------------------------------------------------------------------------------------------


def test_ids_of_a_table_mark_what_shows_the_same(tmp_path):
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    for i in range(4):
        (tmp_path / f"{i}.png").write_bytes(picture((40 * i, 0, 0)))
    values = ["shoe", "hat", "shoe", ""]
    rows = [f"{i}.png,word {i},{value}" for i, value in enumerate(values)]
    (tmp_path / "t.csv").write_text("\n".join(["image,caption,product", *rows, "0.png,again,hat"]))
    columns = {"image": [f"{i}.png" for i in range(4)], "caption": ["w"] * 4, "product": values}
    parquet.write_table(arrow.table(columns), tmp_path / "t.parquet")
    for name in ("t.csv", "t.parquet"):
        config = DataConfig(source="table", path=str(tmp_path / name), id_column="product")
        rows = open_source(config, 8, SkipLog()).rows(torch.arange(4), Draw(0, 0, 0, 0, 4), SkipLog())
        assert rows.ids[0] == rows.ids[2]  # the first id of an image counts
        assert len(rows.ids.unique()) == 3  # an empty one is its own
        assert rows.ids[3] == 3
    with pytest.raises(DataError, match=r"no column 'colour'.*data\.id_column"):
        open_source(DataConfig(source="table", path=str(tmp_path / "t.csv"), id_column="colour"), 8, SkipLog())
    plain = open_source(DataConfig(source="table", path=str(tmp_path / "t.csv")), 8, SkipLog())
    assert plain.rows(torch.arange(4), Draw(0, 0, 0, 0, 4), SkipLog()).ids.tolist() == [0, 1, 2, 3]


def test_ids_of_coco_annotations(tmp_path):
    (tmp_path / "0.png").write_bytes(picture())
    content = {"images": [{"id": 7, "file_name": "0.png"}], "annotations": [{"image_id": 7, "caption": "a", "kind": 5}]}
    (tmp_path / "c.json").write_text(json.dumps(content))
    open_source(DataConfig(source="table", path=str(tmp_path / "c.json"), id_column="kind"), 8, SkipLog())
    with pytest.raises(DataError, match=r"no annotation of .* has 'product'"):
        open_source(DataConfig(source="table", path=str(tmp_path / "c.json"), id_column="product"), 8, SkipLog())


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


@pytest.mark.parametrize("source", ["folder", "table", "shards"])
def test_masking_without_ids_is_refused(source):
    from tilewise.train.config import load_config

    given_ = [f"data.source={source}", "data.path=x", "model.name=clip-tiny", "loss.mask_same_id=true"]
    with pytest.raises(ConfigError, match=r"would have no effect.*set data\.id_column"):
        load_config(None, given_)
    if source == "folder":
        with pytest.raises(ConfigError, match=r"data\.id_column is for source 'table'"):
            load_config(None, [*given_, "data.id_column=x"])
    else:
        assert load_config(None, [*given_, "data.id_column=x"]).loss.mask_same_id
