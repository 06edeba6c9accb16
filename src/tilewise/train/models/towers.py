"""Two encoders and the scale between them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Tokens = dict[str, Tensor]
Tokenizer = Callable[[list[str]], Tokens]


@dataclass(frozen=True)
class Pixels:
    """The input of an image tower: uint8 (n, channels, size, size), normalized with `mean` and `std`."""

    size: int
    channels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]


CLIP_PIXELS = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))


class ImageTower(nn.Module):
    """uint8 images (n, channels, size, size) to unit features (n, d)."""

    body: Any
    shift: Tensor
    spread: Tensor

    def __init__(self, body: nn.Module, pixels: Pixels) -> None:
        super().__init__()
        self.body = body
        mean, std = torch.tensor(pixels.mean), torch.tensor(pixels.std)
        self.register_buffer("shift", (255 * mean).view(-1, 1, 1), persistent=False)
        self.register_buffer("spread", (255 * std).view(-1, 1, 1), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        """Unit features, float32."""
        return F.normalize(self.body((images.float() - self.shift) / self.spread).float(), dim=-1)


class TextTower(nn.Module):
    """Tokens (named tensors with n rows) to unit features (n, d)."""

    body: Any

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, **tokens: Tensor) -> Tensor:
        """Unit features, float32."""
        return F.normalize(self.body(**tokens).float(), dim=-1)


class Scale(nn.Module):
    """The learnable logit scale, stored as its logarithm, and the bias of the sigmoid loss."""

    def __init__(self, scale: float, bias: float | None, max_scale: float) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.tensor(math.log(scale)))
        self.bias = nn.Parameter(torch.tensor(bias)) if bias is not None else None
        self.max_scale, self.max_log = max_scale, math.log(max_scale)

    def forward(self) -> Tensor:
        """The logit scale."""
        return self.log_scale.exp()

    @torch.no_grad()
    def clamp(self) -> None:
        """Clamp the scale to [1, max_scale] after an optimizer step."""
        self.log_scale.clamp_(0.0, self.max_log)


class TwoTowers(nn.Module):
    """An image tower, a text tower, the scale, and how captions become tokens.

    Args:
        image: images to unit features.
        text: tokens to unit features.
        scale: logit scale and bias.
        pixels: the input of the image tower.
        tokenizer: captions to tokens.
        kind: "icon", "clip" or "vit-bert".
        configs: sizes of the demo model, or the configurations of `transformers` by sub-folder. They are needed to
            build the towers again.
    """

    def __init__(
        self,
        image: ImageTower,
        text: TextTower,
        scale: Scale,
        pixels: Pixels,
        tokenizer: Tokenizer,
        kind: str,
        configs: dict[str, Any],
    ) -> None:
        super().__init__()
        self.image, self.text, self.scale = image, text, scale
        self.pixels, self.tokenizer = pixels, tokenizer
        self.kind, self.configs = kind, configs

    def lock_image(self) -> None:
        """Freeze the weights of the image tower (LiT)."""
        self.image.requires_grad_(False)

    def train(self, mode: bool = True) -> TwoTowers:
        """Set the training mode. A locked image tower stays in evaluation mode, without dropout."""
        super().train(mode)
        if not any(p.requires_grad for p in self.image.parameters()):
            self.image.eval()
        return self
