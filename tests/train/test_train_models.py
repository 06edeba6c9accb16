import pytest
import torch
from tests.compare import relative_error
from tests.train.small_weights import write_clip, write_vit

from tilewise.errors import ConfigError
from tilewise.train.config import load_config
from tilewise.train.models import build_model
from tilewise.train.models.words import HashedTokenizer, PartsTokenizer


def model_of(*overrides):
    source = [] if "model.name=icon" in overrides else ["data.source=folder", "data.path=x"]
    torch.manual_seed(0)
    return build_model(load_config(None, [*source, *overrides]))


ICON = ("model.name=icon", "model.width=32", "model.text_buckets=256")


@pytest.mark.parametrize(
    "overrides, channels", [(ICON, 1), (("model.name=clip-tiny",), 3), (("model.name=vit-bert-tiny",), 3)]
)
def test_towers_give_unit_features_that_depend_on_their_input(overrides, channels):
    model = model_of(*overrides).eval()
    size = model.pixels.size
    images = torch.randint(
        0, 256, (3, channels, size, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)
    )
    image, text = model.image(images), model.text(**model.tokenizer(["a cart", "an arrow left", "arrow left, an"]))
    assert image.shape == text.shape
    for features in (image, text):
        assert relative_error(features.norm(dim=1), torch.ones(3)) < 1e-5
        assert (features[0] - features[1]).norm() > 1e-3
    for parameter in model.parameters():
        parameter.grad = None
    (image @ torch.randn_like(text).T + text @ torch.randn_like(image).T).sum().backward()
    unused = [n for n, p in model.named_parameters() if p.grad is None and not n.startswith("scale")]
    assert unused == []  # DDP would block on unused parameters


def test_padding_does_not_reach_the_features():
    model = model_of("model.name=clip-tiny").eval()
    alone = model.text(**model.tokenizer(["cart"]))
    beside = model.text(**model.tokenizer(["cart", "a much longer caption of many words"]))
    assert relative_error(beside[:1], alone) < 1e-6


@pytest.mark.parametrize(
    "name, millions",
    [("clip-vit-b-32", 151.3), ("clip-vit-b-16", 149.6), ("clip-vit-l-14", 427.6), ("vit-bert", 196.0)],
)
def test_the_large_models_have_the_sizes_of_the_originals(name, millions):
    with torch.device("meta"):
        model = model_of(f"model.name={name}")
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, rel=0.01)


def test_weights_come_from_a_local_folder_of_safetensors_only(tmp_path):
    from tilewise.train.models.pretrained import transformers

    hf = transformers()
    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = hf.CLIPConfig(
        text_config={**small, "vocab_size": 1024, "max_position_embeddings": 16, "eos_token_id": 1023,
                     "bos_token_id": 1022, "pad_token_id": 0},
        vision_config={**small, "image_size": 16, "patch_size": 8}, projection_dim=24,
    )  # fmt: skip
    from transformers import CLIPModel

    saved = CLIPModel(config)
    saved.save_pretrained(tmp_path)
    # The folder has no tokenizer, so one must be named. The error says so.
    with pytest.raises(ConfigError, match="tokenizer"):
        model_of("model.name=clip-tiny", f"model.weights={tmp_path}")
    from tilewise.train.config import ModelConfig
    from tilewise.train.models.pretrained import ARCHITECTURES, clip_towers

    image, _, pixels, scale, _ = clip_towers(
        ModelConfig(name="clip-tiny", weights=str(tmp_path)), ARCHITECTURES["clip-tiny"]
    )
    assert pixels.size == 16
    assert scale == pytest.approx(saved.logit_scale.exp().item())
    assert torch.equal(image.body.project.weight, saved.visual_projection.weight)
    from safetensors.torch import load_file, save_file

    weights = load_file(tmp_path / "model.safetensors")
    save_file({k: v for k, v in weights.items() if k != "visual_projection.weight"}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"visual_projection\.weight"):
        clip_towers(ModelConfig(name="clip-tiny", weights=str(tmp_path)), ARCHITECTURES["clip-tiny"])
    (tmp_path / "model.safetensors").unlink()
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"model\.safetensors"):
        clip_towers(ModelConfig(name="clip-tiny", weights=str(tmp_path)), ARCHITECTURES["clip-tiny"])


def test_scale_is_clamped():
    model = model_of(*ICON)
    with torch.no_grad():
        model.scale.log_scale.fill_(9.0)
    model.scale.clamp()
    assert model.scale().item() == pytest.approx(100.0)
    with torch.no_grad():
        model.scale.log_scale.fill_(-3.0)
    model.scale.clamp()
    assert model.scale().item() == 1.0


def test_parts_let_words_share_meaning():
    made = PartsTokenizer(512)(["arrows", "arrow", ""])
    first, second = set(made["parts"][0].tolist()) - {0}, set(made["parts"][1].tolist()) - {0}
    assert len(first & second) >= 4
    assert made["words"][0, 0] != made["words"][1, 0]
    assert made["words"][2].sum() == 0
    assert made["words"].max() < 256 <= min(first)
    assert PartsTokenizer(512)([])["words"].shape == (0, 12)


def test_hashed_sequences_are_cut_and_closed():
    ids = HashedTokenizer(100, 4)(["one two three four"])["input_ids"][0]
    assert ids[0] == 98
    assert ids[-1] == 99
    assert HashedTokenizer(100, 4)([])["input_ids"].shape == (0, 4)


def test_lit_from_local_folders_without_a_network(tmp_path):
    """A locked ViT and a BERT with its tokenizer, all from disk; half-precision weights become float32."""
    from tilewise.train.models.pretrained import transformers

    hf = transformers()
    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    vit = hf.ViTModel(hf.ViTConfig(**small, image_size=16, patch_size=8)).half()
    vit.save_pretrained(tmp_path / "vit")
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "cat", "dog", "red"]
    bert = hf.BertModel(hf.BertConfig(**small, vocab_size=len(vocabulary), max_position_embeddings=128))
    bert.save_pretrained(tmp_path / "bert")
    (tmp_path / "bert" / "vocab.txt").write_text("\n".join(vocabulary))
    model = model_of(
        "model.name=vit-bert-tiny", f"model.image_weights={tmp_path / 'vit'}", "model.lock_image=true",
        f"model.text_weights={tmp_path / 'bert'}",
    )  # fmt: skip
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    tokens = model.tokenizer(["a red cat", "dog"])
    assert tokens["input_ids"][0, :5].tolist() == [2, 5, 8, 6, 3]
    text, image = model.text(**tokens), model.image(torch.zeros(2, 3, 16, 16, dtype=torch.uint8))
    assert text.shape == image.shape == (2, 32)
    assert not image.requires_grad
    assert text.requires_grad


def test_sizes_that_differ_from_the_weights_are_refused(tmp_path):
    clip = f"model.weights={write_clip(tmp_path / 'clip')}"
    for name, size in (("embed_dim", 24), ("image_size", 16)):
        assert model_of(clip, f"model.{name}={size}").pixels.size == 16
        with pytest.raises(ConfigError, match=rf"model\.{name} must be {size}, .*got 32\. Set it to 0 or {size}"):
            model_of(clip, f"model.{name}=32")
    vit = f"model.image_weights={write_vit(tmp_path / 'vit')}"
    with pytest.raises(ConfigError, match=r"model\.image_size must be 16, .*got 32"):
        model_of("model.name=vit-bert-tiny", vit, "model.image_size=32")
    assert model_of("model.name=vit-bert-tiny", vit, "model.embed_dim=48").text.body.project.out_features == 48


def test_weights_that_are_no_folder_of_transformers_are_named_at_once(tmp_path):
    with pytest.raises(ConfigError, match="there is no folder '~nosuch/x'"):
        model_of("model.name=clip-tiny", "model.weights=~nosuch/x")
    with pytest.raises(ConfigError, match="there is no folder"):  # without a request to the hub
        model_of("model.name=clip-tiny", f"model.weights={tmp_path / 'none'}")
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        model_of("model.name=clip-tiny", f"model.weights={tmp_path}")
