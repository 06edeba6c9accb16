"""Models in folders: built without their initial weights, exported, and read by transformers."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from tests.compare import relative_error
from tests.train.small_weights import write_bert, write_clip, write_vit

from tilewise.errors import CheckpointError, ConfigError
from tilewise.train.config import load_config
from tilewise.train.models import build_described, build_model, describe_model, export_model, load_exported
from tilewise.train.models.plain_clip import read_config
from tilewise.train.models.pretrained import load_tokenizer, load_weights_as, transformers

ICON = ["model.name=icon", "model.width=32", "model.text_buckets=256"]
FILES = ["data.source=folder", "data.path=x"]
KINDS = ["icon", "clip", "clip hashed siglip", "vit-bert", "lit"]


def make(kind, folder):
    if kind == "icon":
        overrides = ICON
    elif kind == "clip":
        overrides = [*FILES, "model.name=clip-tiny", f"model.weights={write_clip(folder / 'clip')}"]
    elif kind == "clip hashed siglip":
        overrides = [*FILES, "model.name=clip-tiny", "loss.kind=siglip"]
    else:
        overrides = [
            *FILES, "model.name=vit-bert-tiny", f"model.image_weights={write_vit(folder / 'vit')}",
            f"model.text_weights={write_bert(folder / 'bert')}", f"model.lock_image={str(kind == 'lit').lower()}",
        ]  # fmt: skip
    torch.manual_seed(1)
    return build_model(load_config(None, overrides)).eval()


def features(model):
    generator = torch.Generator().manual_seed(2)
    pixels = model.pixels
    images = torch.randint(
        0, 256, (3, pixels.channels, pixels.size, pixels.size), dtype=torch.uint8, generator=generator
    )
    tokens = model.tokenizer(["a red cat", "dog", "a blue dog and more words than any caption of this model has had"])
    with torch.no_grad():
        return torch.cat([model.image(images), model.text(**tokens)])


@pytest.mark.parametrize("kind", KINDS)
def test_a_described_model_with_the_same_weights_is_the_same(tmp_path, kind):
    model = make(kind, tmp_path)
    describe_model(model, tmp_path / "model")
    assert not list((tmp_path / "model").rglob("*.safetensors"))
    for name in ("clip", "vit", "bert"):
        if (tmp_path / name).exists():
            (tmp_path / name).rename(tmp_path / f"{name}-moved")
    again = build_described(tmp_path / "model").eval()
    again.load_state_dict(model.state_dict())
    assert torch.equal(features(again), features(model))
    assert again.scale.max_scale == model.scale.max_scale
    assert again.pixels == model.pixels


def edit(file, part, **values):
    config = json.loads(file.read_text())
    config[part] |= values
    file.write_text(json.dumps(config))


@pytest.mark.parametrize("activation", ["quick_gelu", "gelu"])
@pytest.mark.parametrize("kind", ["clip", "clip hashed siglip"])
def test_clip_without_transformers_gives_the_same_features(tmp_path, kind, activation):
    describe_model(make(kind, tmp_path), tmp_path / "model")
    for part in ("vision_config", "text_config"):
        edit(tmp_path / "model" / "config.json", part, hidden_act=activation)
    torch.manual_seed(3)
    model = build_described(tmp_path / "model").eval()
    for weights in model.parameters():  # zeros and ones of a new model would hide an error
        torch.nn.init.normal_(weights, std=0.3)
    plain = build_described(tmp_path / "model", for_training=False).eval()
    plain.load_state_dict(model.state_dict())
    assert type(plain.image.body.model).__module__ == "tilewise.train.models.plain_clip"
    assert relative_error(features(plain), features(model)) < 1e-5
    assert plain.pixels == model.pixels
    export_model(model, tmp_path / "a")
    export_model(plain, tmp_path / "b")
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == (tmp_path / "b" / "model.safetensors").read_bytes()
    assert torch.equal(features(load_exported(tmp_path / "b").eval()), features(model))


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_that_is_not_trained_draws_no_random_weights(tmp_path, kind):
    model = make(kind, tmp_path)
    describe_model(model, tmp_path / "model")
    before = torch.get_rng_state()
    again = build_described(tmp_path / "model", for_training=False).eval()
    if kind in ("icon", "clip", "clip hashed siglip"):  # transformers may draw some for others
        assert torch.equal(torch.get_rng_state(), before)
    again.load_state_dict(model.state_dict())
    assert relative_error(features(again), features(model)) < 1e-5


def test_an_end_token_of_old_configurations(tmp_path):
    """Number 2 is wrong there: the end token is the largest number of a row."""
    describe_model(make("clip", tmp_path), tmp_path / "model")
    edit(tmp_path / "model" / "config.json", "text_config", eos_token_id=2)
    model = build_described(tmp_path / "model").eval()
    plain = build_described(tmp_path / "model", for_training=False).eval()
    plain.load_state_dict(model.state_dict())
    tokens = torch.tensor([[5, 2, 7, 3], [4, 9, 2, 2]])
    with torch.no_grad():
        assert relative_error(plain.text(input_ids=tokens), model.text(input_ids=tokens)) < 1e-5


@pytest.mark.parametrize(
    "part, values",
    [
        ("text_config", {"hidden_act": "relu"}),
        ("vision_config", {"attention_dropout": 0.1}),
        ("text_config", {"eos_token_id": [1, 2]}),
        ("vision_config", {"layer_norm_eps": None}),
    ],
)
def test_another_configuration_is_left_to_transformers(tmp_path, part, values):
    describe_model(make("clip hashed siglip", tmp_path), tmp_path / "model")
    assert read_config(tmp_path / "model") is not None
    edit(tmp_path / "model" / "config.json", part, **values)
    assert read_config(tmp_path / "model") is None
    (tmp_path / "model" / "config.json").write_text("{")
    assert read_config(tmp_path / "model") is None


@pytest.mark.parametrize("kind", KINDS)
def test_an_exported_model_comes_back(tmp_path, kind):
    model = make(kind, tmp_path)
    with torch.no_grad():
        model.scale.log_scale.fill_(2.5)
    export_model(model, tmp_path / "out")
    again = load_exported(tmp_path / "out").eval()
    assert torch.equal(features(again), features(model))
    assert again.scale().item() == pytest.approx(model.scale().item())
    assert (again.scale.bias is None) == (model.scale.bias is None)
    suffixes = {path.suffix for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert suffixes <= {".json", ".safetensors", ".txt"}


def test_an_exported_clip_is_a_clip_of_transformers(tmp_path):
    from PIL import Image

    model = make("clip", tmp_path)
    export_model(model, tmp_path / "out")
    hf = transformers()
    clip, found = hf.CLIPModel.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not found["missing_keys"]
    assert not found["unexpected_keys"]
    tokens = hf.AutoTokenizer.from_pretrained(tmp_path / "out")(["a red cat"], return_tensors="pt")
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    from tilewise.train.data.images import centre_box, to_tensor

    picture = Image.radial_gradient("L").convert("RGB").resize((96, 64))
    prepared = CLIPImageProcessorPil.from_pretrained(tmp_path / "out")(picture, return_tensors="pt")["pixel_values"]
    own = to_tensor(picture, centre_box(*picture.size), model.pixels.size)[None]
    assert relative_error(prepared, (own - model.image.shift) / model.image.spread) < 0.02  # their rounding differs
    with torch.no_grad():
        output = clip(input_ids=tokens["input_ids"], pixel_values=prepared, attention_mask=tokens["attention_mask"])
        assert relative_error(output.text_embeds, model.text(**model.tokenizer(["a red cat"]))) < 1e-5
        assert relative_error(output.image_embeds, model.image(own)) < 0.02
    assert clip.logit_scale.item() == pytest.approx(model.scale.log_scale.item())


def test_exported_towers_are_those_of_transformers_and_start_a_new_run(tmp_path):
    model = make("lit", tmp_path)
    export_model(model, tmp_path / "out")
    hf = transformers()
    vit = hf.ViTModel.from_pretrained(tmp_path / "out" / "image", add_pooling_layer=False)
    assert all(torch.equal(p, model.image.body.model.get_parameter(n)) for n, p in vit.named_parameters())
    again = build_model(load_config(None, [
        *FILES, "model.name=vit-bert-tiny", f"model.image_weights={tmp_path / 'out' / 'image'}",
        f"model.text_weights={tmp_path / 'out' / 'text'}",
    ]))  # fmt: skip
    assert again.tokenizer(["a cat"])["input_ids"][0, :4].tolist() == [2, 5, 6, 3]


def test_an_export_with_hashed_words_starts_a_new_run(tmp_path):
    model = make("clip hashed siglip", tmp_path)
    export_model(model, tmp_path / "out")
    again = build_model(load_config(None, [*FILES, "model.name=clip-tiny", f"model.weights={tmp_path / 'out'}"]))
    assert torch.equal(features(again.eval()), features(model))


def test_captions_are_cut_to_the_places_of_the_text_tower(tmp_path):
    folder = write_clip(tmp_path / "clip", positions=6)
    model = build_model(load_config(None, [*FILES, "model.name=clip-tiny", f"model.weights={folder}"]))
    assert model.text(**model.tokenizer(["a red cat " * 9])).isfinite().all()


def test_a_damaged_folder_is_named(tmp_path):
    model = make("icon", tmp_path)
    export_model(model, tmp_path / "out")
    about = json.loads((tmp_path / "out" / "tilewise.json").read_text())
    (tmp_path / "out" / "model.safetensors").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"cannot read.*model\.safetensors"):
        load_exported(tmp_path / "out")
    (tmp_path / "out" / "tilewise.json").write_text(json.dumps({**about, "format": 9}))
    with pytest.raises(CheckpointError, match="format 9"):
        load_exported(tmp_path / "out")
    with pytest.raises(CheckpointError, match="has no model"):
        load_exported(tmp_path)
    (tmp_path / "out" / "tilewise.json").write_text(json.dumps({**about, "logit_scale": -1.0}))
    with pytest.raises(CheckpointError, match="cannot be built: ValueError"):
        load_exported(tmp_path / "out")


def test_a_tower_that_is_missing_is_not_asked_of_the_hub(tmp_path, monkeypatch):
    export_model(make("vit-bert", tmp_path), tmp_path / "out")
    shutil.rmtree(tmp_path / "out" / "text")
    asked = []
    monkeypatch.setattr("huggingface_hub.model_info", lambda name, **_: asked.append(name))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="there is no folder"):
        load_exported(Path("out"))  # out/text could be taken for a hub id
    assert not asked


def test_an_export_goes_to_an_empty_folder_and_removes_no_files(tmp_path, monkeypatch):
    model = make("icon", tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("x")
    with pytest.raises(CheckpointError, match="not empty"):
        export_model(model, tmp_path / "full")
    assert [p.name for p in tmp_path.rglob("*")] == ["full", "thesis.txt"]
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    export_model(model, Path("."))
    assert Path("model.safetensors").is_file()  # the current folder is still this one
    assert sorted(p.name for p in tmp_path.iterdir()) == ["full", "here"]
    assert load_exported(Path(".")).kind == "icon"


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "hashed_words.json"])
@pytest.mark.parametrize("text", ["[]", "nonsense", '{"model": {"type": "Foo"}}'])
def test_damaged_tokenizers_of_others_are_one_sentence(tmp_path, name, text):
    folder = write_bert(tmp_path / "bert")
    (folder / name).write_text(text)
    with pytest.raises(ConfigError, match="cannot load the tokenizer"):
        load_tokenizer(str(folder), 8)


@pytest.mark.parametrize("text", ["[]", "nonsense"])
def test_a_damaged_configuration_of_others_is_one_sentence(tmp_path, text):
    folder = write_bert(tmp_path / "bert")
    (folder / "config.json").write_text(text)
    with pytest.raises(ConfigError, match="cannot load weights"):
        load_weights_as(transformers().BertModel, str(folder), add_pooling_layer=False)


def test_code_beside_a_tokenizer_is_neither_run_nor_asked_for(tmp_path, monkeypatch):
    folder = write_bert(tmp_path / "bert")
    (folder / "config.json").unlink()
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "own.py").write_text("raise SystemExit('it was run')")
    asked = []
    monkeypatch.setattr("builtins.input", lambda text="": asked.append(text) or "y")
    with pytest.raises(ConfigError, match="cannot load the tokenizer"):
        load_tokenizer(str(folder), 8)
    assert not asked


# -- locked towers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, advice", [("clip-tiny", "Set weights"), ("vit-bert-tiny", "Set image_weights"), ("icon", "Choose a clip")]
)
def test_a_random_tower_is_not_locked(name, advice):
    with pytest.raises(ConfigError, match=rf"model\.lock_image=true.*random weights.*{advice}"):
        load_config(None, [*(FILES if name != "icon" else []), f"model.name={name}", "model.lock_image=true"])


def test_a_locked_vit_has_no_untrained_projection(tmp_path):
    model = make("lit", tmp_path).train()
    assert model.image.body.project is None
    assert not any(p.requires_grad for p in model.image.parameters())
    assert not model.image.training
    assert model.text.training
    assert model.text.body.project.weight.requires_grad
    assert model.text.body.project.out_features == 32  # the width of the ViT
    free = make("vit-bert", tmp_path)
    assert free.image.body.project.weight.requires_grad
    with pytest.raises(ConfigError, match=r"32 features.*model\.embed_dim is 24.*Set it to 0 or 32"):
        build_model(load_config(None, [
            *FILES, "model.name=vit-bert-tiny", f"model.image_weights={tmp_path / 'vit'}", "model.lock_image=true",
            "model.embed_dim=24",
        ]))  # fmt: skip


# -- names of the hub --------------------------------------------------------------------------------------------------


def test_a_hub_that_does_not_answer_is_asked_once(monkeypatch, capfd):
    import huggingface_hub

    asked = []

    def unreachable(name, **unused):
        asked.append(name)
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub, "model_info", unreachable)
    overrides = [*FILES, "model.name=clip-tiny", "model.weights=nobody/nothing-here"]
    with pytest.raises(ConfigError, match=r"it is not a local folder\. As a hub id: the hub cannot be reached"):
        build_model(load_config(None, overrides))
    assert asked == ["nobody/nothing-here"]
    said = capfd.readouterr()
    assert "Retrying" not in said.err + said.out


@pytest.mark.parametrize("answer", ["GatedRepoError", "HfHubHTTPError"])
def test_a_hub_that_answers_otherwise_is_asked_for_the_files(monkeypatch, answer):
    import huggingface_hub

    kind = getattr(huggingface_hub.errors, answer)

    def other(name, **unused):
        raise kind.__new__(kind)

    monkeypatch.setattr(huggingface_hub, "model_info", other)
    from tilewise.train.models.hub import find_place

    assert find_place("some/model", "weights").extra == {}


def test_a_name_that_the_hub_does_not_know_is_refused(monkeypatch):
    import huggingface_hub

    def not_a_name(name, **unused):
        raise huggingface_hub.errors.HFValidationError("not a name")

    monkeypatch.setattr(huggingface_hub, "model_info", not_a_name)
    with pytest.raises(ConfigError, match=r"no local folder 'nothing here'.*the hub has no such model: not a name"):
        build_model(load_config(None, [*FILES, "model.name=clip-tiny", "model.weights=nothing here"]))
