"""The icons that ship as a source. They are in memory and are augmented one batch at a time.

Axes: n icons of a batch, s rows and columns of a picture.
"""

from __future__ import annotations

import random

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewise.train.data.records import Draw, Rows, SkipLog
from tilewise.train.icons import IconSet


class IconSource:
    """Icons in memory. The whole set is one window.

    Args:
        icons: the set.
        augment: shift, rotate and scale the drawings, change their strokes, and draw captions from names and tags.
    """

    def __init__(self, icons: IconSet, augment: bool) -> None:
        self.icons = icons
        self.augment = augment

    def __len__(self) -> int:
        return len(self.icons)

    def window_count(self) -> int:
        """Return 1: everything is shuffled together."""
        return 1

    def window_keys(self, seed: int, epoch: int, window: int) -> Tensor:
        """Return all keys."""
        return torch.arange(len(self.icons))

    def rows(self, keys: Tensor, draw: Draw, skips: SkipLog) -> Rows:
        """Return pictures (n, 1, s, s), one text for each, and the ids of their names."""
        images = self.icons.images[keys].unsqueeze(1)
        if not self.augment:
            return Rows(images, [self.icons.captions[k] for k in keys.tolist()], self.icons.name_ids[keys])
        generator = torch.Generator().manual_seed(draw.for_batch("icons"))
        noise = torch.rand(draw.rows, 8, generator=generator)[draw.first_row : draw.first_row + len(keys)]
        texts = [drawn_text(self.icons, key, draw.for_key(key)) for key in keys.tolist()]
        parts = [augment_icons(*part) for part in zip(images.split(512), noise.split(512), strict=True)]
        return Rows(torch.cat(parts), texts, self.icons.name_ids[keys])


def drawn_text(icons: IconSet, key: int, rng: random.Random) -> str:
    """Return the caption, the caption with some tags, or tags alone."""
    caption, tags = icons.captions[key], icons.tags[key]
    kind = rng.random()
    if not tags or kind < 0.5:
        return caption
    some = rng.sample(tags, rng.randint(1, min(4, len(tags))))
    return " ".join([caption, *some] if kind < 0.8 else some)


def augment_icons(images: Tensor, noise: Tensor) -> Tensor:
    """Shift, rotate and scale drawings, and make strokes thinner or thicker: uint8 (n, 1, s, s).

    Args:
        images: uint8 (n, 1, s, s), dark on light.
        noise: (n, 8), uniform in [0, 1).
    """
    ink = 1 - images.float() / 255
    ink = _strokes(ink, noise[:, 6])
    spread = 2 * noise - 1
    angle, size = 0.20 * spread[:, 0], torch.exp(0.22 * spread[:, 1])
    stretch, shear = torch.exp(0.12 * spread[:, 2]), 0.12 * spread[:, 3]
    cos, sin = torch.cos(angle) / size, torch.sin(angle) / size
    shift_x, shift_y = 0.16 * spread[:, 4], 0.16 * spread[:, 5]
    theta = torch.stack([cos * stretch, -sin + shear, shift_x, sin + shear, cos / stretch, shift_y], dim=1).view(
        -1, 2, 3
    )
    grid = F.affine_grid(theta, list(ink.shape), align_corners=False)
    moved = F.grid_sample(ink, grid, align_corners=False, padding_mode="zeros")
    return ((1 - moved) * 255).round_().clamp_(0, 255).to(torch.uint8)


def _strokes(ink: Tensor, choice: Tensor) -> Tensor:
    """Thicken a quarter of the drawings and thin a quarter, each by up to one pixel."""
    thick = F.max_pool2d(ink, 3, stride=1, padding=1)
    thin = -F.max_pool2d(-ink, 3, stride=1, padding=1)
    amount = choice.view(-1, 1, 1, 1)
    up = ((0.25 - amount) * 4).clamp(0, 1) * 0.7
    down = ((amount - 0.75) * 4).clamp(0, 1) * 0.5
    return ink + up * (thick - ink) + down * (thin - ink)
