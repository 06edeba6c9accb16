"""The model of a run is loaded in Python and exported by a command."""

import subprocess
import sys

import pytest
import torch
from PIL import Image
from tests.train.small_icons import write_small_icons
from tests.train.small_weights import write_clip
from tests.train.test_train_portable import invoke, settings, write_colours

from tilewise.errors import CheckpointError, ConfigError, DataError, RangeError, ShapeError
from tilewise.train import ImageTextModel, load_model
from tilewise.train.config import load_config
from tilewise.train.load_run import load_run
from tilewise.train.loop import train
from tilewise.train.models.pretrained import transformers
from tilewise.train.run_folder import RunFolder


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inference")
    data, weights = write_colours(folder / "data"), write_clip(folder / "clip")
    more = ["model.name=clip-tiny", f"model.weights={weights}", "loop.steps=4", "optim.ema_decay=0.5"]
    train(settings(data, folder / "run", *more))
    weights.rename(folder / "gone")
    return folder / "run"


def test_features_are_those_of_the_evaluation(run):
    model = load_model(run, device="cpu", chunk_size=4)
    assert isinstance(model, ImageTextModel)
    paths = sorted((run.parent / "data").rglob("*.png"))
    pictures = [Image.open(p) for p in paths[:2]] + [p.read_bytes() for p in paths[2:4]] + paths[4:]
    image, text = model.encode_image(pictures), model.encode_text(["a red cat", "a blue cat", "dog"])
    assert image.shape == (len(paths), 24)
    assert image.dtype == torch.float32
    assert torch.allclose(image.norm(dim=1), torch.ones(len(paths)), atol=1e-5)
    _, encoders, checkpoint = load_run(run, "cpu")
    want = encoders.images([torch.stack([model.preprocess(p) for p in paths])])
    assert torch.allclose(image, want, atol=1e-6)
    assert torch.equal(text, encoders.texts(["a red cat", "a blue cat", "dog"]))
    assert f"step {checkpoint.step}" in model.origin
    assert model.logit_scale == pytest.approx(float(encoders.model.scale().detach()))
    assert model.logit_bias == 0.0
    tokens = model.tokenizer(["a red cat"])
    with torch.no_grad():
        assert torch.allclose(model.text_tower(**tokens), text[:1], atol=1e-6)
        assert torch.allclose(model.image_tower(model.preprocess(paths[0])[None]), image[:1], atol=1e-6)
    assert not model.image_tower.training
    probe = torch.nn.Linear(24, 1)
    probe(torch.cat([image, text])).sum().backward()  # features are plain tensors
    assert probe.weight.grad is not None


def test_empty_and_wrong_inputs_are_answered(run):
    model = load_model(run, device="cpu")
    assert model.encode_text([]).shape == model.encode_image([]).shape == (0, 24)
    assert model.encode_image(torch.empty(0, 3, 16, 16, dtype=torch.uint8)).shape == (0, 24)
    with pytest.raises(ShapeError, match="give a list"):
        model.encode_text("a cat")
    with pytest.raises(ShapeError, match="give a list"):
        model.encode_image("a.png")
    with pytest.raises(ShapeError, match=r"uint8 of shape \(n, 3, 16, 16\), got torch.float32"):
        model.encode_image(torch.rand(2, 3, 16, 16))
    with pytest.raises(DataError, match=r"cannot read the image .*none\.png"):
        model.encode_image([run / "none.png"])
    with pytest.raises(DataError, match="got int"):
        model.encode_image([3])
    with pytest.raises(ShapeError, match="give a list"):
        model.encode_image(Image.new("RGB", (8, 8)))
    with pytest.raises(DataError, match="got int at index 1"):
        model.encode_text(["a cat", 3])
    with pytest.raises(DataError, match=r"config\.toml: image cannot be decoded"):
        model.encode_image([run / "config.toml"])
    with pytest.raises(RangeError, match="chunk_size must be at least 1, got 0"):
        load_model(run, chunk_size=0)


def test_a_damaged_picture_is_named_by_its_place(run, tmp_path):
    path = tmp_path / "cut.png"
    Image.effect_noise((64, 64), 50).save(path)
    path.write_bytes(path.read_bytes()[:-500])
    whole = Image.new("RGB", (9, 9))
    with Image.open(path) as opened:
        for damaged in (opened, path.read_bytes()):
            with pytest.raises(DataError, match=r"image 1: .*Is it a complete image file"):
                load_model(run, device="cpu").encode_image([whole, damaged])
    with pytest.raises(DataError, match="image 2 must be a path, bytes or a Pillow image, got int"):
        load_model(run, device="cpu").encode_image([whole, whole, 7])


def test_pictures_of_a_generator_are_not_all_held(run):
    model, read, seen = load_model(run, device="cpu", chunk_size=2), [], []
    images = model._encoders.images

    def pictures():
        for number in range(7):
            read.append(number)
            yield Image.new("RGB", (9, 9), (number, 0, 0))

    def watched(chunks):
        return images(seen.append(len(read)) or chunk for chunk in chunks)

    model._encoders.images = watched
    assert model.encode_image(pictures()).shape[0] == 7
    assert seen == [2, 4, 6, 7]


def test_checkpoints_are_chosen(run):
    assert "step 4" in load_model(run, checkpoint="last").origin
    assert "step 2" in load_model(run, checkpoint=2).origin
    with pytest.raises(CheckpointError, match=r"no checkpoint 3; there are auto, best, last, 2, 4"):
        load_model(run, checkpoint=3)


def test_an_exported_run_gives_the_same_features(run, tmp_path):
    result = invoke("export", run, tmp_path / "out", "--checkpoint", "last")
    said = result.output.replace("\n", "")
    assert "exported" in said
    assert "CLIPModel.from_pretrained" in said
    want, got = load_model(run, device="cpu", checkpoint="last"), load_model(tmp_path / "out", device="cpu")
    paths = sorted((run.parent / "data").rglob("*.png"))
    assert torch.equal(got.encode_image(paths), want.encode_image(paths))
    assert torch.equal(got.encode_text(["a red cat"]), want.encode_text(["a red cat"]))
    clip = transformers().CLIPModel.from_pretrained(tmp_path / "out")
    average = dict(want.image_tower.body.model.named_parameters())
    assert all(torch.equal(p, average[n]) for n, p in clip.vision_model.named_parameters())
    with pytest.raises(CheckpointError, match="exists already"):
        invoke("export", run, tmp_path / "out")
    with pytest.raises(ConfigError, match=r"exported model: tilewise\.train\.load_model"):
        invoke("evaluate", tmp_path / "out")
    with pytest.raises(ConfigError, match=r"exported model: tilewise\.train\.load_model"):
        invoke("status", tmp_path / "out")
    again = invoke("export", tmp_path / "out", tmp_path / "again").output
    assert f"exported {tmp_path / 'out'}, an exported model, to {tmp_path / 'again'}\n" in again  # no path is wrapped
    with pytest.raises(CheckpointError, match="exists already"):
        want.export(run.parent / "data")


def test_the_icon_model_reads_pictures_of_any_kind(tmp_path):
    icons = write_small_icons(tmp_path / "small.zip")
    train(load_config(None, [
        "model.width=32", "model.text_buckets=512", "model.embed_dim=16", "loop.batch_size=64", "loop.chunk_size=32",
        "loop.steps=1", "loop.threads=1", f"data.path={icons}", f"output.folder={tmp_path / 'run'}",
        "output.report=false", "output.tensorboard=false",
    ]))  # fmt: skip
    model = load_model(tmp_path / "run")
    assert model.encode_image([Image.new("RGBA", (50, 70))]).shape == (1, 16)
    assert model.preprocess(Image.new("RGBA", (50, 70))).tolist() == [[[255] * 32] * 32]  # transparent is paper
    model.export(tmp_path / "out")
    assert torch.equal(load_model(tmp_path / "out").encode_text(["bell"]), model.encode_text(["bell"]))
    assert not list(RunFolder(tmp_path / "run").model.rglob("*.safetensors"))


@pytest.mark.parametrize("mode", ["CMYK", "YCbCr", "F", "I", "RGBa", "La"])
def test_a_picture_of_a_kind_that_png_has_not(run, mode):
    model = load_model(run, device="cpu")
    picture = Image.new(mode, (9, 7), 0)
    if mode in ("RGBa", "La"):  # a fully transparent picture, which becomes white
        assert model.preprocess(picture).min() == 255
    assert model.preprocess(picture).shape == (3, model.pixels.size, model.pixels.size)


def test_a_folder_that_is_neither_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"no run of tilewise.*no config\.toml"):
        load_model(tmp_path)


def test_the_package_names_them_without_importing_torch():
    program = "import sys, tilewise.train as t; assert 'torch' not in sys.modules; print(t.load_model.__name__); t.none"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=600)
    assert done.stdout.strip() == "load_model"
    assert "no attribute 'none'" in done.stderr


def test_a_pillow_image_is_read_as_its_file_is(run, tmp_path):
    model = load_model(run, device="cpu")
    for mode, value in [("I;16", 20_000), ("LA", (90, 128)), ("P", 3), ("RGB", (1, 2, 3))]:
        picture = Image.new(mode, (9, 7), value)
        if mode == "P":
            picture.putpalette([7 * i % 256 for i in range(768)])
            picture.info["transparency"] = bytes(range(256))
        picture.save(tmp_path / "a.png")
        assert torch.equal(model.preprocess(picture), model.preprocess(tmp_path / "a.png")), mode
    with pytest.raises(DataError, match=r"the given image: .*32-bit numbers"):
        model.preprocess(Image.new("I", (9, 7), 70_000))
