"""CLIP's towers in plain PyTorch, for the use of a trained model. Importing `transformers` takes seconds.

Parameters have the names of `transformers`, so that checkpoints of its CLIP fit. For any other configuration,
that library is used.

Axes: n rows, t tokens or patches, d features.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tilewise.train.untrusted import STATE_LIMIT, parse_json, read_regular

COMMON = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
IMAGE = (*COMMON, "image_size", "patch_size", "num_channels")
TEXT = (*COMMON, "vocab_size", "max_position_embeddings", "eos_token_id")
ACTIVATIONS = {"quick_gelu": lambda x: x * torch.sigmoid(1.702 * x), "gelu": F.gelu}
OLD_END = 2  # old configurations have this wrong number for the end token, which is then the largest number of a row


class SavedConfig:
    """The text of a configuration, and its values as attributes. A new folder gets the same text.

    Args:
        values: what the file ``config.json`` holds.
    """

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values

    def save_pretrained(self, folder: Path) -> None:
        """Write ``config.json``."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.values, indent=2) + "\n", encoding="utf-8")


def read_config(folder: Path) -> SavedConfig | None:
    """Return the configuration in a folder if `PlainCLIP` covers it, else None."""
    try:
        values = parse_json(read_regular(folder / "config.json", STATE_LIMIT).decode("utf-8"))
        towers = values["vision_config"], values["text_config"]
        whole = all(
            type(tower[name]) is int for tower, names in zip(towers, (IMAGE, TEXT), strict=True) for name in names
        )
        plain = all(tower["hidden_act"] in ACTIVATIONS and tower["attention_dropout"] == 0 for tower in towers)
        numbers = type(values["projection_dim"]) is int and all(type(t["layer_norm_eps"]) is float for t in towers)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return SavedConfig(values) if whole and plain and numbers else None


class Layer(nn.Module):
    """Attention and two linear layers, each after a norm and with a residual: (n, t, d) to (n, t, d)."""

    def __init__(self, tower: dict[str, Any]) -> None:
        super().__init__()
        d, inner, eps = tower["hidden_size"], tower["intermediate_size"], tower["layer_norm_eps"]
        self.self_attn = nn.ModuleDict({f"{name}_proj": nn.Linear(d, d) for name in ("k", "v", "q", "out")})
        self.layer_norm1, self.layer_norm2 = nn.LayerNorm(d, eps=eps), nn.LayerNorm(d, eps=eps)
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(d, inner), "fc2": nn.Linear(inner, d)})
        self.heads, self.act = tower["num_attention_heads"], ACTIVATIONS[tower["hidden_act"]]

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """``mask`` (n, 1, t, t) is True where a token (row) may attend to another one (column)."""
        normed = self.layer_norm1(x)
        q, k, v = (
            self.self_attn[f"{name}_proj"](normed).unflatten(-1, (self.heads, -1)).transpose(1, 2) for name in "qkv"
        )
        seen = F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)
        x = x + self.self_attn["out_proj"](seen)
        return x + self.mlp["fc2"](self.act(self.mlp["fc1"](self.layer_norm2(x))))


class Layers(nn.Module):
    """The layers of a tower."""

    def __init__(self, tower: dict[str, Any]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(tower) for _ in range(tower["num_hidden_layers"]))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """(n, t, d)."""
        for layer in self.layers:
            x = layer(x, mask)
        return x


class Vision(nn.Module):
    """Normalized images (n, channels, size, size) to vectors (n, d): the output of a class token before the patches."""

    def __init__(self, tower: dict[str, Any]) -> None:
        super().__init__()
        d, patch, eps = tower["hidden_size"], tower["patch_size"], tower["layer_norm_eps"]
        self.embeddings: Any = nn.Module()
        self.embeddings.class_embedding = nn.Parameter(torch.zeros(d))
        self.embeddings.patch_embedding = nn.Conv2d(tower["num_channels"], d, patch, patch, bias=False)
        self.embeddings.position_embedding = nn.Embedding((tower["image_size"] // patch) ** 2 + 1, d)
        self.pre_layrnorm = nn.LayerNorm(d, eps=eps)  # spelled as in the checkpoints
        self.encoder, self.post_layernorm = Layers(tower), nn.LayerNorm(d, eps=eps)

    def forward(self, images: Tensor) -> Tensor:
        """(n, d)."""
        parts = self.embeddings
        patches = parts.patch_embedding(images).flatten(2).mT
        first = parts.class_embedding.expand(len(images), 1, -1)
        x = torch.cat([first, patches], 1) + parts.position_embedding.weight
        return self.post_layernorm(self.encoder(self.pre_layrnorm(x))[:, 0])


class Text(nn.Module):
    """Tokens (n, t) to vectors (n, d): the output at the first end token, which attends to the tokens before it."""

    def __init__(self, tower: dict[str, Any]) -> None:
        super().__init__()
        d = tower["hidden_size"]
        self.embeddings: Any = nn.ModuleDict(
            {
                "token_embedding": nn.Embedding(tower["vocab_size"], d),
                "position_embedding": nn.Embedding(tower["max_position_embeddings"], d),
            }
        )
        self.encoder, self.final_layer_norm = Layers(tower), nn.LayerNorm(d, eps=tower["layer_norm_eps"])
        self.end = tower["eos_token_id"]

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """(n, d)."""
        count = input_ids.shape[1]
        mask = torch.ones(count, count, dtype=torch.bool, device=input_ids.device).tril()[None, None]
        if attention_mask is not None:
            mask = mask & attention_mask.bool()[:, None, None]
        x = self.embeddings["token_embedding"](input_ids) + self.embeddings["position_embedding"].weight[:count]
        x = self.final_layer_norm(self.encoder(x, mask))
        place = (input_ids if self.end == OLD_END else (input_ids == self.end).int()).argmax(1)
        return x[torch.arange(len(x), device=x.device), place]


class PlainCLIP(nn.Module):
    """Both towers with their projections, with random weights.

    Args:
        config: as `read_config` returns it.
    """

    def __init__(self, config: SavedConfig) -> None:
        super().__init__()
        vision, text, dim = (config.values[name] for name in ("vision_config", "text_config", "projection_dim"))
        self.vision_model, self.text_model = Vision(vision), Text(text)
        self.visual_projection = nn.Linear(vision["hidden_size"], dim, bias=False)
        self.text_projection = nn.Linear(text["hidden_size"], dim, bias=False)
        self.image_size: int = vision["image_size"]
