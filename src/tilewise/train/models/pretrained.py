"""Towers from `transformers`: CLIP, and ViT with BERT, from a configuration or from safetensors weights."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tilewise.errors import ConfigError
from tilewise.train.config import PATCHES, ModelConfig
from tilewise.train.models.hub import find_place
from tilewise.train.models.towers import CLIP_PIXELS, ImageTower, Pixels, TextTower, Tokenizer, Tokens
from tilewise.train.models.words import HashedTokenizer


@dataclass(frozen=True)
class Size:
    """Width, layers and heads of a transformer."""

    width: int
    layers: int
    heads: int


@dataclass(frozen=True)
class Architecture:
    """The sizes of both towers and of their inputs."""

    image: Size
    text: Size
    patch: int
    pixels: int
    embed_dim: int
    vocabulary: int
    length: int


ARCHITECTURES = {
    "clip-vit-b-32": Architecture(Size(768, 12, 12), Size(512, 12, 8), PATCHES["clip-vit-b-32"], 224, 512, 49408, 77),
    "clip-vit-b-16": Architecture(Size(768, 12, 12), Size(512, 12, 8), PATCHES["clip-vit-b-16"], 224, 512, 49408, 77),
    "clip-vit-l-14": Architecture(Size(1024, 24, 16), Size(768, 12, 12), PATCHES["clip-vit-l-14"], 224, 768, 49408, 77),
    "clip-tiny": Architecture(Size(64, 2, 2), Size(64, 2, 2), PATCHES["clip-tiny"], 32, 64, 1024, 16),
    "vit-bert": Architecture(Size(768, 12, 12), Size(768, 12, 12), PATCHES["vit-bert"], 224, 512, 30522, 77),
    "vit-bert-tiny": Architecture(Size(64, 2, 2), Size(64, 2, 2), PATCHES["vit-bert-tiny"], 32, 64, 1024, 16),
}


class Towers(NamedTuple):
    """Two towers, the input of the image tower, the pretrained logit scale, and the configurations by sub-folder."""

    image: ImageTower
    text: TextTower
    pixels: Pixels
    scale: float | None
    configs: dict[str, Any]

    @property
    def positions(self) -> int:
        """The maximum number of tokens of the text tower."""
        return int(self.text.body.model.config.max_position_embeddings)


@contextmanager
def _without_torchvision() -> Iterator[None]:
    """Import `transformers` as if torchvision were not installed, unless it is imported already.

    Nothing here needs torchvision, and a version that does not fit the installed torch breaks the import.
    """
    hidden = "torchvision" not in sys.modules
    if hidden:
        sys.modules["torchvision"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        if hidden:
            del sys.modules["torchvision"]


def transformers() -> Any:
    """Return the library. It is imported on first use and without torchvision."""
    try:
        with _without_torchvision():
            import transformers as library
            from transformers import (  # noqa: F401  imported here, while torchvision is hidden
                AutoTokenizer,
                BertModel,
                CLIPModel,
                ViTModel,
            )
    except ImportError as error:
        raise ConfigError("this model needs transformers. In a clone: pip install '.[train]'") from error
    return library


class Body(nn.Module):
    """A model of `transformers` that gives one vector per row.

    Args:
        model: the model.
        pick: returns that vector (n, width) from the model's output.
        project: a projection after it, if the model itself has none.
    """

    def __init__(self, model: nn.Module, pick: Callable[[Any], Tensor], project: nn.Module | None = None) -> None:
        super().__init__()
        self.model, self.pick, self.project = model, pick, project

    def forward(self, *args: Tensor, **inputs: Tensor) -> Tensor:
        """(n, d)."""
        vector = self.pick(self.model(*args, **inputs))
        return vector if self.project is None else self.project(vector)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence the tables, hints and progress bars of `transformers`. Every rank would print them."""
    logging = transformers().logging
    before, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if bars:
            logging.enable_progress_bar()


DAMAGED = (OSError, ValueError, RuntimeError, TypeError, KeyError, AttributeError)  # errors that damaged files cause


def _reason(error: Exception) -> str:
    """Return the first line of an error, with its type if that is more informative."""
    line = (str(error).strip().splitlines() or [""])[0].rstrip(".")
    return line if isinstance(error, OSError | ValueError | RuntimeError) and line else f"{type(error).__name__} {line}"


def load_weights_as(cls: Any, weights: str, **extra: Any) -> Any:
    """Load weights from a local folder or the hub. Only safetensors are read, and no weight may be missing."""
    place = find_place(weights, "config.json and model.safetensors")
    if Path(place.name).is_dir() and not (Path(place.name) / "config.json").is_file():
        raise ConfigError(f"the folder {weights!r} has no config.json, so it is not a model saved by transformers")
    try:
        with quiet_transformers():  # its table of missing tensors; we say below what matters
            model, found = cls.from_pretrained(
                place.name, use_safetensors=True, output_loading_info=True, **place.extra, **extra
            )
    except DAMAGED as error:
        reason = place.caveat + _reason(error)
        raise ConfigError(
            f"cannot load weights {weights!r} as {cls.__name__}: {reason}. "
            "Give a folder with config.json and model.safetensors, or a hub id where there is a network"
        ) from error
    absent = sorted(str(key) for kind in ("missing_keys", "mismatched_keys") for key in found[kind])
    if absent:
        raise ConfigError(
            f"weights {weights!r} lack {len(absent)} tensors that {cls.__name__} needs, such as {absent[0]}; "
            "they would start from random weights. Is it another kind of model?"
        )
    return model.float()  # weights may be stored in half precision; autocast rounds where it helps


def name_mismatch(config: ModelConfig, configs: dict[str, Any]) -> str:
    """Return a sentence if the sizes of the given weights are not those of the model's name, else an empty string.

    Args:
        config: settings of the model.
        configs: configurations of the towers by sub-folder, as in `Towers`.
    """
    given = config.weights or config.image_weights or config.text_weights
    if not given or config.name in ("clip", "vit-bert"):  # with weights, these names have no sizes of their own
        return ""
    if config.weights:
        towers = {"image": configs[""].vision_config, "text": configs[""].text_config}
    else:
        weights = {"image": config.image_weights, "text": config.text_weights}
        towers = {name: configs[name] for name, folder in weights.items() if folder}
    found = _tower_sizes(towers)
    wanted = _named_sizes(config.name, towers)
    different = [f"{name} {found[name]} instead of {wanted[name]}" for name in found if found[name] != wanted[name]]
    if not different:
        return ""
    kind = "clip" if config.weights else "vit-bert"
    names = [name for name in ARCHITECTURES if name.startswith(kind) and _named_sizes(name, towers) == found]
    return (
        f"model.name={config.name!r} does not match the weights {given!r}, which have {', '.join(different)}. "
        f"The sizes of the weights are used. Set model.name={(names or [kind])[0]}"
    )


def _tower_sizes(towers: dict[str, Any]) -> dict[str, int]:
    """Width and layers of each tower, and patch and picture of the image tower, in pixels."""
    sizes: dict[str, int] = {}
    for name, tower in towers.items():
        sizes |= {f"{name} width": tower.hidden_size, f"{name} layers": tower.num_hidden_layers}
    if "image" in towers:
        sizes |= {"patch size": towers["image"].patch_size, "image size": towers["image"].image_size}
    return sizes


def _named_sizes(model: str, towers: Iterable[str]) -> dict[str, int]:
    """The same sizes of a named model."""
    arch = ARCHITECTURES[model]
    sizes: dict[str, int] = {}
    for name in towers:
        size: Size = getattr(arch, name)
        sizes |= {f"{name} width": size.width, f"{name} layers": size.layers}
    if "image" in towers:
        sizes |= {"patch size": arch.patch, "image size": arch.pixels}
    return sizes


def _numbers(size: Size) -> dict[str, int]:
    return {
        "hidden_size": size.width,
        "intermediate_size": 4 * size.width,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
    }


def clip_towers(config: ModelConfig, arch: Architecture) -> Towers:
    """CLIP's two towers with their projections."""
    hf = transformers()
    dim, size = config.embed_dim or arch.embed_dim, config.image_size or arch.pixels
    if config.weights:
        model = load_weights_as(hf.CLIPModel, config.weights)
        _check_size("embed_dim", config.embed_dim, model.config.projection_dim, config.weights)
        _check_size("image_size", config.image_size, model.config.vision_config.image_size, config.weights)
    else:
        vision = {**_numbers(arch.image), "image_size": size, "patch_size": arch.patch}
        text = {
            **_numbers(arch.text), "vocab_size": arch.vocabulary, "max_position_embeddings": arch.length,
            "pad_token_id": 0, "bos_token_id": arch.vocabulary - 2, "eos_token_id": arch.vocabulary - 1,
        }  # fmt: skip
        model = hf.CLIPModel(hf.CLIPConfig(text_config=text, vision_config=vision, projection_dim=dim))
    return split_clip(model, model.logit_scale.exp().item() if config.weights else None)


def _check_size(name: str, given: int, found: int, weights: str) -> None:
    """Refuse a size that differs from that of the weights."""
    if given not in (0, found):
        raise ConfigError(
            f"model.{name} must be {found}, that of the weights {weights!r}, got {given}. Set it to 0 or {found}"
        )


def split_clip(model: Any, scale: float | None = None) -> Towers:
    """The towers of a CLIPModel."""
    pixels = Pixels(model.config.vision_config.image_size, 3, *CLIP_PIXELS)
    image = ImageTower(Body(model.vision_model, _pooled, model.visual_projection), pixels)
    text = TextTower(Body(model.text_model, _pooled, model.text_projection))
    return Towers(image, text, pixels, scale, {"": model.config})


def _pooled(output: Any) -> Tensor:
    return output.pooler_output


def vit_bert_towers(config: ModelConfig, arch: Architecture) -> Towers:
    """Return a ViT and a BERT, each with a linear projection. A locked ViT has no projection (LiT)."""
    hf = transformers()
    dim, size = config.embed_dim or arch.embed_dim, config.image_size or arch.pixels
    if config.image_weights:
        vision = load_weights_as(hf.ViTModel, config.image_weights, add_pooling_layer=False)
        _check_size("image_size", config.image_size, vision.config.image_size, config.image_weights)
    else:
        vision = hf.ViTModel(
            hf.ViTConfig(**_numbers(arch.image), image_size=size, patch_size=arch.patch), add_pooling_layer=False
        )
    if config.text_weights:
        text = load_weights_as(hf.BertModel, config.text_weights, add_pooling_layer=False)
    else:
        text = hf.BertModel(hf.BertConfig(**_numbers(arch.text), vocab_size=arch.vocabulary), add_pooling_layer=False)
    if config.lock_image:
        width = vision.config.hidden_size
        if config.embed_dim not in (0, width):
            raise ConfigError(
                f"model.lock_image=true keeps the {width} features of the locked image tower, since a projection "
                f"behind them would be random and never learn; model.embed_dim is {config.embed_dim}. "
                f"Set it to 0 or {width}, or unlock the tower"
            )
        dim = width
    return join_vit_bert(vision, text, dim, project_image=not config.lock_image)


def join_vit_bert(vision: Any, text: Any, dim: int, project_image: bool) -> Towers:
    """Return the towers of a ViTModel and a BertModel with random projections to `dim` features."""
    pixels = Pixels(vision.config.image_size, 3, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    image_head = nn.Linear(vision.config.hidden_size, dim, bias=False) if project_image else None
    text_head = nn.Linear(text.config.hidden_size, dim, bias=False)
    image = ImageTower(Body(vision, _first_token, image_head), pixels)
    configs = {"image": vision.config, "text": text.config}
    return Towers(image, TextTower(Body(text, _first_token, text_head)), pixels, None, configs)


def _first_token(output: Any) -> Tensor:
    return output.last_hidden_state[:, 0]


class ModelTokenizer:
    """A tokenizer of `transformers`. Captions are cut or padded to one length.

    Args:
        tokenizer: of `transformers`.
        length: tokens of a sequence.
    """

    def __init__(self, tokenizer: Any, length: int) -> None:
        self.tokenizer, self.length = tokenizer, length

    def __call__(self, texts: list[str]) -> Tokens:
        """``input_ids`` and ``attention_mask``, int64 (n, length)."""
        if not texts:
            empty = torch.empty(0, self.length, dtype=torch.int64)
            return {"input_ids": empty, "attention_mask": empty}
        made = self.tokenizer(
            texts, padding="max_length", truncation=True, max_length=self.length, return_tensors="pt"
        )  # fmt: skip
        return {"input_ids": made["input_ids"], "attention_mask": made["attention_mask"]}


def choose_tokenizer(config: ModelConfig, arch: Architecture, positions: int) -> Tokenizer:
    """Return the tokenizer of the weights, or hashed words for a model without pretrained weights.

    Args:
        config: settings of the model.
        arch: sizes of the model.
        positions: maximum number of tokens of the text tower.
    """
    name = config.tokenizer or config.weights or config.text_weights
    if not name:
        return HashedTokenizer(arch.vocabulary, arch.length)
    return load_tokenizer(name, min(arch.length, positions))


HASHED = "hashed_words.json"  # stored with the weights of a model that has no other tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write a tokenizer in a form that `load_tokenizer` reads."""
    if isinstance(tokenizer, ModelTokenizer):
        tokenizer.tokenizer.save_pretrained(folder)
    elif isinstance(tokenizer, HashedTokenizer):
        sizes = {"size": tokenizer.size, "length": tokenizer.length}
        (folder / HASHED).write_text(json.dumps(sizes) + "\n", encoding="utf-8")


def load_tokenizer(name: str, length: int) -> Tokenizer:
    """Load a tokenizer from a folder or the hub. One that gives the same tokens for all words is refused."""
    place = find_place(name, "a tokenizer")
    hashed = Path(place.name) / HASHED
    hf = None if hashed.is_file() else transformers()
    try:
        if hf is None:
            return HashedTokenizer(**json.loads(hashed.read_text(encoding="utf-8")))
        with quiet_transformers():
            # Explicit, because transformers would otherwise prompt whether to run code from the repository.
            tokenizer = hf.AutoTokenizer.from_pretrained(place.name, trust_remote_code=False, **place.extra)
        tells_apart = tokenizer("cat")["input_ids"] != tokenizer("dog")["input_ids"]
        reason = "it has no vocabulary"
    except Exception as error:  # the tokenizers library has no error types of its own
        tells_apart, reason = False, place.caveat + _reason(error)
    if not tells_apart:
        raise ConfigError(f"cannot load the tokenizer {name!r}: {reason}. Set model.tokenizer to a folder or hub id")
    return ModelTokenizer(tokenizer, length)
