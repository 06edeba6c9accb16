"""From settings to a model."""

from __future__ import annotations

from tilewise.errors import ConfigError
from tilewise.train.config import RunConfig
from tilewise.train.models.icon import IconBody, WordsBody
from tilewise.train.models.towers import ImageTower, Pixels, Scale, TextTower, TwoTowers
from tilewise.train.models.words import PartsTokenizer

ICON_EMBED_DIM = 128


def build_model(config: RunConfig) -> TwoTowers:
    """The model of a run on the CPU, its weights drawn from torch's current random state (or loaded)."""
    settings = config.model
    bias = config.loss.initial_bias if config.loss.kind == "siglip" else None
    scale = Scale(config.loss.initial_scale, bias, config.loss.max_scale)
    if settings.name == "icon":
        dim, size = settings.embed_dim or ICON_EMBED_DIM, settings.image_size or 32
        if size % 8:
            raise ConfigError(f"model.image_size must be a multiple of 8 for the icon model, got {size}")
        pixels = Pixels(size, 1, (1.0,), (-1.0,))  # ink: 0 is paper, 1 is black
        image = ImageTower(IconBody(dim, settings.width, settings.depth, settings.dropout, size), pixels)
        text = TextTower(WordsBody(dim, settings.text_buckets, settings.dropout))
        model = TwoTowers(image, text, scale, pixels, PartsTokenizer(settings.text_buckets))
    else:
        from tilewise.train.models import pretrained

        arch = pretrained.ARCHITECTURES[settings.name]
        towers = pretrained.clip_towers if settings.name.startswith("clip") else pretrained.vit_bert_towers
        image, text, pixels, trained_scale = towers(settings, arch)
        if trained_scale is not None:
            scale = Scale(min(trained_scale, config.loss.max_scale), bias, config.loss.max_scale)
        model = TwoTowers(image, text, scale, pixels, pretrained.load_tokenizer(settings, arch))
    if settings.lock_image:
        model.lock_image()
    return model
