"""Build a model from its settings."""

from __future__ import annotations

from typing import Any

from tilewise.errors import ConfigError
from tilewise.train.config import RunConfig
from tilewise.train.models.icon import IconBody, WordsBody
from tilewise.train.models.towers import ImageTower, Pixels, Scale, TextTower, TwoTowers
from tilewise.train.models.words import PartsTokenizer

ICON_EMBED_DIM = 128


def build_model(config: RunConfig) -> TwoTowers:
    """Build the model of a run on the CPU. Its weights are loaded, or drawn from torch's current random state."""
    settings = config.model
    bias = config.loss.initial_bias if config.loss.kind == "siglip" else None
    scale = Scale(config.loss.initial_scale, bias, config.loss.max_scale)
    if settings.name == "icon":
        sizes = {
            "embed_dim": settings.embed_dim or ICON_EMBED_DIM, "size": settings.image_size or 32,
            "width": settings.width, "depth": settings.depth, "dropout": settings.dropout,
            "text_buckets": settings.text_buckets,
        }  # fmt: skip
        return build_icon_model(sizes, scale)
    from tilewise.train.models import pretrained

    arch = pretrained.ARCHITECTURES["clip-vit-b-32" if settings.name == "clip" else settings.name]
    kind = "clip" if settings.name.startswith("clip") else "vit-bert"
    towers = pretrained.clip_towers(settings, arch) if kind == "clip" else pretrained.vit_bert_towers(settings, arch)
    if towers.scale is not None:
        scale = Scale(min(towers.scale, config.loss.max_scale), bias, config.loss.max_scale)
    tokenizer = pretrained.choose_tokenizer(settings, arch, towers.positions)
    model = TwoTowers(towers.image, towers.text, scale, towers.pixels, tokenizer, kind, towers.configs)
    if settings.lock_image:
        model.lock_image()
    return model


def build_icon_model(sizes: dict[str, Any], scale: Scale) -> TwoTowers:
    """Build the model of the demo.

    Args:
        sizes: embed_dim, size (of an icon), width, depth, dropout, text_buckets.
        scale: logit scale and bias.
    """
    dim, size, dropout, buckets = (sizes[name] for name in ("embed_dim", "size", "dropout", "text_buckets"))
    if size % 8:
        raise ConfigError(f"model.image_size must be a multiple of 8 for the icon model, got {size}")
    pixels = Pixels(size, 1, (1.0,), (-1.0,))  # ink: 0 is paper, 1 is black
    image = ImageTower(IconBody(dim, sizes["width"], sizes["depth"], dropout, size), pixels)
    text = TextTower(WordsBody(dim, buckets, dropout))
    return TwoTowers(image, text, scale, pixels, PartsTokenizer(buckets), "icon", dict(sizes))
