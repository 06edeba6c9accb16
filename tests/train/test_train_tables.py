"""Pairs from tables and folders: reading, skipping, held-out pairs, refusals and ids."""

import io
import json
import os

import pytest
import torch
from rich.console import Console
from tests.train.small_pictures import picture, stream

from tilewise.errors import ConfigError, DataError
from tilewise.train.config import DataConfig, load_config
from tilewise.train.data import Position, SkipLog, open_eval_pairs, open_source
from tilewise.train.data.records import Draw
from tilewise.train.data.table import Columns, read_table
from tilewise.train.loop import train


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
    source = open_source(DataConfig(source="table", path=path, eval_share=0), 8, skips)
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
    config = DataConfig(source="table", path=str(tmp_path / "t.parquet"), eval_share=0)
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
        open_source(DataConfig(source="table", path=str(tmp_path / (name or "gone.csv")), eval_share=0), 8, SkipLog())
    for word in words:
        assert word in str(caught.value)


def test_folders_and_tables_given_for_one_another_say_so(tmp_path):
    path = make_table(tmp_path, "csv")
    with pytest.raises(DataError, match=r"It is a folder: set data\.source='folder'"):
        open_source(DataConfig(source="table", path=str(tmp_path), eval_share=0), 8, SkipLog())
    with pytest.raises(DataError, match=r"is not a folder.*For a table set data\.source='table'"):
        open_source(DataConfig(source="folder", path=path, eval_share=0), 8, SkipLog())


def test_a_table_of_a_spreadsheet_begins_with_a_mark(tmp_path):
    (tmp_path / "0.png").write_bytes(picture())
    (tmp_path / "t.csv").write_text("\ufeffimage,caption\n0.png,a café\n", encoding="utf-8")
    source = open_source(DataConfig(source="table", path=str(tmp_path / "t.csv"), eval_share=0), 8, SkipLog())
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
    assert held_out != [f"{i:02d}" for i in range(4)]  # whatever the order of the pairs
    assert open_eval_pairs(config, 8, SkipLog()).texts == held_out
    assert len(open_eval_pairs(config, 8, SkipLog(), config.path).texts) == 20  # of other pairs, all are used
    assert open_eval_pairs(DataConfig(**where, eval_share=0), 8, SkipLog()) is None
    assert len(open_eval_pairs(DataConfig(**where), 8, SkipLog()).texts) == 2  # a tenth, if the settings say nothing
    assert len(open_source(DataConfig(**where), 8, SkipLog())) == 18


@pytest.mark.parametrize("mask", ["true", "false"])
def test_an_id_column_without_a_mask_is_a_warning(tmp_path, mask):
    for i in range(4):
        (tmp_path / f"{i}.png").write_bytes(picture((40 * i, 0, 0)))
    (tmp_path / "t.csv").write_text("image,caption,sku\n" + "".join(f"{i}.png,cup {i},{i % 2}\n" for i in range(4)))
    config = load_config(None, [
        "data.source=table", f"data.path={tmp_path / 't.csv'}", "data.id_column=sku", f"loss.mask_same_id={mask}",
        "model.name=clip-tiny", "loop.batch_size=4", "loop.chunk_size=4", "loop.steps=1", "loop.threads=1",
        f"output.folder={tmp_path / 'run'}", "output.report=false", "output.tensorboard=false",
    ])  # fmt: skip
    shown = io.StringIO()
    train(config, Console(file=shown, width=400))
    assert ("warning: data.id_column='sku' is set" in shown.getvalue()) == (mask == "false")


@pytest.mark.parametrize(
    "other",
    [{"source": "icons"}, {"source": "shards", "path": "x.tar"}, {"source": "folder", "path": "x", "eval_path": "y"}],
)
def test_a_share_is_refused_where_it_would_do_nothing(other):
    with pytest.raises(ConfigError, match="Set only one of eval_share and eval_path"):
        DataConfig(**other, eval_share=0.1)


def test_a_batch_without_any_usable_record_is_an_error(tmp_path):
    for i in range(4):
        (tmp_path / f"{i}.png").write_bytes(b"broken")
    source = open_source(DataConfig(source="folder", path=str(tmp_path), eval_share=0), 8, SkipLog())
    with pytest.raises(DataError, match="none of the 4 records"):
        stream(source, 4).make(Position(), 0)


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
        config = DataConfig(source="table", path=str(tmp_path / name), id_column="product", eval_share=0)
        rows = open_source(config, 8, SkipLog()).rows(torch.arange(4), Draw(0, 0, 0, 0, 4), SkipLog())
        assert rows.ids[0] == rows.ids[2]  # the first id of an image counts
        assert len(rows.ids.unique()) == 3  # an empty cell gets its own id
        assert rows.ids[3] == 3
    with pytest.raises(DataError, match=r"no column 'colour'.*data\.id_column"):
        open_source(
            DataConfig(source="table", path=str(tmp_path / "t.csv"), eval_share=0, id_column="colour"), 8, SkipLog()
        )
    plain = open_source(DataConfig(source="table", path=str(tmp_path / "t.csv"), eval_share=0), 8, SkipLog())
    assert plain.rows(torch.arange(4), Draw(0, 0, 0, 0, 4), SkipLog()).ids.tolist() == [0, 1, 2, 3]


def test_ids_of_coco_annotations(tmp_path):
    (tmp_path / "0.png").write_bytes(picture())
    content = {"images": [{"id": 7, "file_name": "0.png"}], "annotations": [{"image_id": 7, "caption": "a", "kind": 5}]}
    (tmp_path / "c.json").write_text(json.dumps(content))
    open_source(DataConfig(source="table", path=str(tmp_path / "c.json"), eval_share=0, id_column="kind"), 8, SkipLog())
    with pytest.raises(DataError, match=r"no annotation of .* has 'product'"):
        open_source(
            DataConfig(source="table", path=str(tmp_path / "c.json"), eval_share=0, id_column="product"), 8, SkipLog()
        )


@pytest.mark.parametrize("source", ["folder", "table", "shards"])
def test_masking_without_ids_is_refused(source):
    from tilewise.train.config import load_config

    given_ = [f"data.source={source}", "data.path=x", "model.name=clip-tiny", "loss.mask_same_id=true"]
    with pytest.raises(ConfigError, match=r"would have no effect.*set data\.id_column"):
        load_config(None, given_)
    if source == "folder":
        with pytest.raises(ConfigError, match=r"data\.id_column needs source 'table'"):
            load_config(None, [*given_, "data.id_column=x"])
    else:
        assert load_config(None, [*given_, "data.id_column=x"]).loss.mask_same_id


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet", "json"])
def test_cells_of_any_kind_are_read_or_skipped_and_never_end_a_run(tmp_path, kind):
    """Zero bytes and half characters in paths, numbers and bytes as captions, empty lists: each affects one row."""
    (tmp_path / "0.png").write_bytes(picture())
    (tmp_path / "7").write_bytes(picture())
    half = "" if kind == "parquet" else "\ud83d"  # Parquet holds none
    texts = [f"half a face {half}", 7, b"of bytes", [], None]
    images = ["0.png", 7, "a\0.png", f"{half}.png", None]
    rows = [("0.png", text) for text in texts] + [(image, "a cup") for image in images] + [("none.png", [])]
    path = tmp_path / f"t.{kind}"
    if kind == "csv":
        lines = ["image,caption"] + [f"{'' if i is None else i},{t if isinstance(t, str) else 7}" for i, t in rows]
        path.write_text("\n".join(lines), encoding="utf-8", errors="surrogatepass")
    elif kind == "parquet":
        import pyarrow
        import pyarrow.parquet

        held = {"image": [7, 7, 5], "caption": [b"of bytes", b"a cup", None]}
        pyarrow.parquet.write_table(pyarrow.table(held), path)
    else:
        rows = [(image, text.decode() if isinstance(text, bytes) else text) for image, text in rows]
        found = [{"image": image, "caption": text} for image, text in rows]
        coco = {
            "images": [{"id": i, "file_name": image} for i, (image, _) in enumerate(rows)],
            "annotations": [{"image_id": i, "caption": text} for i, (_, text) in enumerate(rows)],
        }
        path.write_text("\n".join(map(json.dumps, found)) if kind == "jsonl" else json.dumps(coco))
    skips = SkipLog()
    source = open_source(DataConfig(source="table", path=str(path), eval_share=0), 8, skips)
    batch = stream(source, len(source), skips=skips).make(Position(), 0)
    assert len(batch.ids) == (1 if kind == "parquet" else 2)  # 0.png and the one that is called 7
    assert len(batch.ids) + skips.total == len(source) == (2 if kind == "parquet" else 6)
    texts = [text for key in range(len(source)) for text in source.entries[key].captions]
    "".join([*texts, *skips.examples]).encode()  # all captions can be written and tokenized
    assert {"parquet": "of bytes"}.get(kind, "half a face") in " ".join(texts)


def test_a_damaged_parquet_file_is_named(tmp_path):
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "t.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"image": [f"{i}.png" for i in range(99)], "caption": ["a"] * 99}), path)
    data = bytearray(path.read_bytes())
    data[4:200] = bytes(196)
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"t\.parquet is damaged"):
        open_source(DataConfig(source="table", path=str(path), eval_share=0), 8, SkipLog())


def test_names_and_captions_of_other_encodings(tmp_path):
    (tmp_path / "a.png").write_bytes(picture())
    (tmp_path / "a.txt").write_bytes("\ufeffa boat".encode())  # some editors write a byte order mark
    for name, data in [(b"caf\xe9.png", picture()), (b"br\xfccke.png", b"broken")]:
        (tmp_path / os.fsdecode(name)).write_bytes(data)
    skips = SkipLog()
    pairs = open_eval_pairs(DataConfig(source="folder", path=str(tmp_path)), 8, skips, str(tmp_path))
    assert sorted(pairs.texts) == ["a boat", "caf?"]
    assert "br?cke.png: image cannot be decoded" in skips.examples[0]


def test_held_out_pairs_none_of_which_is_there_name_the_first(tmp_path):
    path = make_table(tmp_path, "csv")
    with pytest.raises(DataError, match=r"no usable held-out pairs: .*First: .*elsewhere.0\.png: image cannot be read"):
        open_eval_pairs(
            DataConfig(source="table", path=path, image_root=str(tmp_path / "elsewhere")), 8, SkipLog(), path
        )


def test_a_caption_that_is_no_text_is_refused(tmp_path):
    (tmp_path / "t.jsonl").write_text('{"image": "a.png", "caption": {"en": "a cup"}}\n')
    with pytest.raises(DataError, match=r"t\.jsonl: a caption must be text, got a dict in the column 'caption'"):
        read_table(tmp_path / "t.jsonl", "", Columns("image", "caption"))
