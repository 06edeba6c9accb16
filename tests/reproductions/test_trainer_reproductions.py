"""The reproductions that train run at tiny sizes, and their reports say what was measured."""

import json

import pytest
import torch
from tests.train.small_icons import write_small_icons
from torch import nn

from reproductions import batch_size, train_step, train_step_pages

TINY = ["--model", "clip-tiny", "--chunk", "4"]
SMALL = ["--width", "32", "--depth", "1", "--dim", "16"]


@pytest.fixture
def float32(monkeypatch):
    """Where precision shows nothing: a CPU without bfloat16 takes twenty times as long for a product."""
    monkeypatch.setattr(train_step, "PRECISION", "float32")


@pytest.mark.slow
@pytest.mark.usefixtures("float32")
def test_a_step_is_measured_for_every_loss(tmp_path, capsys):
    small = [*TINY, "--batches", "4,8", "--max-seconds", "9999"]
    path = train_step.main([*small, "--out", str(tmp_path / "t.json")])
    report = json.loads(path.read_text())
    assert len(report["results"]) == 8
    assert all(row["step_measured"] and row["step_s"] > row["loss_s"] > 0 for row in report["results"])
    assert [len(row["steps_s"]) for row in report["results"]] == [2] * 4 + [1] * 4
    assert all(row["step_s"] == pytest.approx(sum(row["steps_s"]) / len(row["steps_s"])) for row in report["results"])
    pair_bytes = 3 * 32 * 32 + 2 * 16 * 8 + 8  # an image, two rows of tokens, an id
    for row in report["results"]:
        assert row["data_bytes"] == (0 if row["method"] == "tilewise+offload" else row["batch"] * pair_bytes)
    assert set(report["step_ratios"]) == {"4", "8"}
    text = path.with_suffix(".md").read_text()
    assert "| 8 | dense |" in text
    assert "divided by that of the faster baseline" in text


@pytest.mark.usefixtures("float32")
def test_steps_are_added_to_an_earlier_file(tmp_path):
    """Other rows are kept, with the commit of their run. Ratios are within one run."""
    common = [*TINY, "--max-seconds", "9999", "--turns"]
    first = train_step.main([*common, "1", "--batches", "4,8", "--out", str(tmp_path / "a.json")])
    earlier = json.loads(first.read_text())
    again = [*common, "2", "--batches", "8", "--methods", "dense,tilewise", "--add-to", str(first)]
    report = json.loads(train_step.main([*again, "--out", str(tmp_path / "b.json")]).read_text())
    rows = {(row["batch"], row["method"]): row for row in report["results"]}
    assert len(rows) == len(report["results"]) == 8
    for row in earlier["results"]:
        name = row["batch"], row["method"]
        kept = row["batch"] == 4 or row["method"] not in ("dense", "tilewise")
        assert (rows[name]["steps_s"] == row["steps_s"]) == kept
        assert rows[name].get("command") == (earlier["command"] if kept else None)
        assert len(rows[name]["steps_s"]) == (1 if kept else 2)
    wanted = rows[8, "tilewise"]["step_s"] / rows[8, "dense"]["step_s"]
    assert report["step_ratios"]["8"] == pytest.approx(wanted)
    assert report["step_ratios"]["4"] == earlier["step_ratios"]["4"]


def test_without_time_steps_are_estimated_and_say_so(tmp_path, capsys):
    small = [*TINY, "--chunk", "2", "--batches", "8", "--max-seconds", "0", "--methods", "tilewise"]
    report = json.loads(train_step.main([*small, "--out", str(tmp_path / "t.json")]).read_text())
    assert report["precision"] == "bf16"
    assert report["results"][0]["step_measured"] is False
    assert "from parts" in (tmp_path / "t.md").read_text()
    assert "step_ratios" not in report or not report["step_ratios"]


def tiny_bench():
    settings = ["data.source=folder", "data.path=synthetic", "model.name=clip-tiny", "loop.chunk_size=8"]
    config = train_step.load_config(None, [*settings, f"loop.precision={train_step.PRECISION}", "loop.batch_size=32"])
    torch.manual_seed(0)
    model = train_step.build_model(config)
    optimizer = train_step.build_optimizer(model, config.optim)
    return train_step.Bench(config, model, optimizer, torch.device("cpu"), 0.0)


def test_an_offloaded_batch_gives_the_same_rows_again(monkeypatch):
    monkeypatch.setattr(train_step, "POOL", 24)
    bench = tiny_bench()
    batch = train_step.synthetic_batch(bench, 40, offload=True)
    assert batch.images.rows == len(batch.ids) == len(batch.tokens["input_ids"]) == 40
    chunk = batch.images.load(slice(20, 36))
    assert chunk.dtype == torch.uint8
    assert torch.equal(chunk, batch.images.load(slice(20, 36)))
    assert torch.equal(chunk, torch.cat([bench.pool[20:], bench.pool[:12]]))
    assert len(bench.pool.flatten(1).unique(dim=0)) == 24
    assert train_step.synthetic_batch(bench, 40, offload=False).images.shape == (40, 3, 32, 32)


def test_random_pixels_are_spread_evenly():
    pixels = train_step.random_images(16, 32, torch.device("cpu"))
    counts = torch.bincount(pixels.flatten().long(), minlength=256)
    assert 100 < counts.min() < 192 < counts.max() < 300
    assert len(pixels.flatten(1).unique(dim=0)) == 16


def test_running_out_of_memory_is_a_result(tmp_path):
    bench = tiny_bench()

    def fails():
        raise RuntimeError("CUDA out of memory. Tried to allocate")

    def other():
        raise RuntimeError("other")

    assert train_step.attempt(bench, fails) == {"oom": True}
    with pytest.raises(RuntimeError, match="other"):
        train_step.attempt(bench, other)


def test_a_step_that_runs_out_of_memory_is_shown_so(monkeypatch, capsys):
    bench = tiny_bench()
    bench.deadline, bench.pairs_per_s = float("inf"), 100.0
    row = {"batch": 32, "method": "dense", "data_bytes": 0, "loss_s": 0.1, "step_s": 0.5, "step_measured": False}
    monkeypatch.setattr(train_step, "measure_step", lambda *_: (_ for _ in ()).throw(MemoryError("out of memory")))
    train_step.take_step(bench, {(32, "dense"): row}, 32, "dense")
    assert row["oom"]
    assert not row["step_measured"]
    assert "out of memory" in capsys.readouterr().out


def test_what_was_not_measured_follows_the_latest_step(monkeypatch, capsys):
    bench = tiny_bench()
    bench.deadline, bench.pairs_per_s = float("inf"), 100.0
    rows = {
        (batch, "tilewise"): {"batch": batch, "method": "tilewise", "data_bytes": 10 * batch, "loss_s": 1.0,
                              "loss_bytes": 60 * batch, "step_s": 9.0, "step_measured": False}
        for batch in (32, 64)
    }  # fmt: skip
    made = {"step_s": 5.0, "data_bytes": 320, "backbone_bytes": 3000, "peak_bytes": 3320, "loss_bytes": 1}
    monkeypatch.setattr(train_step, "measure_step", lambda *_: dict(made))
    train_step.take_step(bench, rows, 32, "tilewise")
    assert rows[32, "tilewise"]["step_s"] == 5.0
    assert rows[64, "tilewise"]["step_s"] == 64 / (32 / 4.0) + 1.0
    assert rows[64, "tilewise"]["peak_bytes"] == 640 + 60 * 64  # more than the backbone's 3,000
    report = {"model": "m", "chunk": 8, "precision": "bf16", "device": "d", "results": list(rows.values())}
    assert "| 64 | tilewise | 9.00 (from parts) | 0 |" in train_step_pages.markdown(report)
    assert "0.00 (from parts) |\n" in train_step_pages.markdown(report)


@pytest.mark.usefixtures("float32")
@pytest.mark.parametrize("which", ["activations", "layers"])
def test_a_compiler_that_fails_leaves_the_model_as_it_was(monkeypatch, capsys, which):
    bench = tiny_bench()
    bench.pairs_per_s = 5.0

    def compile_fails(self, **_):
        self._compiled_call_impl = lambda *_, **__: (_ for _ in ()).throw(RuntimeError("no compiler here"))

    monkeypatch.setattr(nn.Module, "compile", compile_fails)
    parts = train_step.parts_to_compile(bench.model, which)
    assert len(parts) == 4  # two layers of two towers, an activation in each
    found = train_step.compile_parts(bench, which, ["tilewise"], 8)
    assert found["compiled"] == ""
    assert "no compiler here" in capsys.readouterr().out
    assert bench.pairs_per_s == 5.0
    assert train_step.measure_step(bench, "tilewise", 16)["step_s"] > 0


@pytest.fixture(scope="module")
def small_data(tmp_path_factory):
    path = str(write_small_icons(tmp_path_factory.mktemp("icons") / "small.zip"))
    args = batch_size.parse(["table", path, *SMALL])
    model = batch_size.build_model(batch_size.configure(args, 64, 0))
    return path, args, model, batch_size.Data.load(path, model, torch.device("cpu"))


def test_every_icon_has_its_own_texts(small_data):
    path, _, model, data = small_data
    train = batch_size.load_icons(path).split("train")
    for kind, texts in enumerate((train.captions, [" ".join([c, *t[:4]]) for c, t in zip(train.captions, train.tags)])):  # noqa: B905
        want = model.tokenizer(texts)
        assert all(torch.equal(data.tokens[name][data.text_rows[:, kind]], want[name]) for name in want)
    want = model.tokenizer(data.held_out.texts)
    assert all(torch.equal(data.held_out_tokens[name], want[name]) for name in want)
    again = batch_size.evaluate_retrieval(batch_size.Encoders(model, torch.device("cpu")), data.held_out)
    assert batch_size.evaluate(model, data) == again


@pytest.mark.parametrize("size", [7, 64])
def test_every_icon_is_seen_once_before_one_is_seen_again(small_data, monkeypatch, size):
    data = small_data[3]
    monkeypatch.setattr(batch_size, "CHUNK", 32)
    steps = -(-len(data) // size)
    marked = batch_size.Data(**{**vars(data), "ids": torch.arange(len(data))})
    made = list(marked.batches(size, steps, 3))
    assert [len(ids) for _, _, ids in made] == [len(images) for images, _, _ in made] == [size] * steps
    seen = torch.cat([ids for _, _, ids in made])
    assert seen[: len(data)].sort().values.equal(torch.arange(len(data)))
    for images, tokens, ids in made[:3]:
        either = [(tokens["parts"] == data.tokens["parts"][data.text_rows[ids, kind]]).all(1) for kind in (0, 1)]
        assert (either[0] | either[1]).all()
        assert images.dtype == torch.uint8
    again = list(marked.batches(size, steps, 3))
    assert all(torch.equal(a[0], b[0]) and torch.equal(a[2], b[2]) for a, b in zip(made, again, strict=True))
    assert not torch.equal(made[0][2], next(iter(marked.batches(size, steps, 4)))[2])


def test_epochs_fit_the_time(small_data, monkeypatch):
    _, args, _, data = small_data
    monkeypatch.setattr(batch_size, "epoch_seconds", lambda data, args, batch: 0.5 if batch == 64 else 1.5)
    args.seeds, args.epochs = 2, 40.0
    assert batch_size.choose_epochs(data, args, [64, 128], 2 * 2 * 0.7 + 40 / 0.9 + 0.1) == 10.0
    assert batch_size.choose_epochs(data, args, [64, 128], 1e6) == 40.0
    assert batch_size.choose_epochs(data, args, [64, 128], 0.0) == 1.0


@pytest.mark.slow
def test_batch_sizes_and_curves(tmp_path, capsys, small_data, monkeypatch):
    monkeypatch.setattr(batch_size, "CHUNK", 64)  # a batch of 128 then goes through the cache
    options = ["--batches", "64,128,9999", "--epochs", "2", "--seeds", "1", "--curve-batch", "64", "--curve-steps", "6"]
    curves, table = batch_size.main(["all", small_data[0], *SMALL, *options, "--out", str(tmp_path)])
    rows = json.loads(table.read_text())["results"]
    assert [(row["batch"], row["steps"]) for row in rows] == [(64, 12), (128, 6)]
    assert rows[1]["lr"] == pytest.approx(rows[0]["lr"] * 2**0.5)
    assert "| 128 | 6 |" in table.with_suffix(".md").read_text()
    report = json.loads(curves.read_text())
    assert report["command"].startswith("python -m reproductions.batch_size all small.zip --width 32")
    assert str(tmp_path) not in report["command"]
    assert 0 < report["largest_relative_difference"] < 1e-4
    assert 0 < report["rounding_relative_difference"] < 1e-4
    assert [len(row["losses"]) for row in report["results"]] == [6] * 3
    for picture in batch_size.main(["plot", str(table), str(curves)]):
        assert picture.stat().st_size > 5000
