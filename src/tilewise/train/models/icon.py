"""The model of the demo: an MLP over edges and pixels of a 32-pixel icon, and an MLP over bags of word parts.

Axes: n icons, s rows and columns of a picture, k edge directions.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DIRECTIONS = 8


class IconFeatures(nn.Module):
    """Fixed features of a drawing: the amount of ink in each direction, on grids of two sizes, and the ink itself.

    The strength of direction k at a pixel is ``relu(gx cos t_k + gy sin t_k)`` with ``t_k = 2 pi k / 8``. Its average
    over overlapping windows depends little on the exact position and width of a stroke, which differ between icon
    families.
    """

    filters: Tensor

    def __init__(self, size: int = 32) -> None:
        super().__init__()
        self.size = size
        angles = torch.arange(DIRECTIONS) * (2 * math.pi / DIRECTIONS)
        gx = torch.tensor([[-1.0, 0, 1], [-2, 0, 2], [-1, 0, 1]]) / 4
        filters = angles.cos().view(-1, 1, 1) * gx + angles.sin().view(-1, 1, 1) * gx.T
        self.register_buffer("filters", filters.unsqueeze(1), persistent=False)
        self.width = DIRECTIONS * ((size // 4) ** 2 + (size // 8) ** 2) + (size // 2) ** 2

    def forward(self, ink: Tensor) -> Tensor:
        """(n, 1, s, s) to (n, width)."""
        edges = F.relu(F.conv2d(ink, self.filters, padding=1))
        fine = F.avg_pool2d(edges, 6, stride=4, padding=1)
        coarse = F.avg_pool2d(edges, 12, stride=8, padding=2)
        shape = F.avg_pool2d(ink, 2)
        return torch.cat([(4 * part).flatten(1) for part in (fine, coarse)] + [shape.flatten(1)], dim=1)


class Residual(nn.Module):
    """``x + W2 gelu(W1 norm(x))``, with dropout."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)
        nn.init.zeros_(self.down.weight)

    def forward(self, x: Tensor) -> Tensor:
        """(n, width)."""
        return x + self.down(self.dropout(F.gelu(self.up(self.norm(x)))))


class IconBody(nn.Module):
    """Ink to features (n, embed_dim)."""

    def __init__(self, embed_dim: int, width: int, depth: int, dropout: float, size: int = 32) -> None:
        super().__init__()
        self.features = IconFeatures(size)
        self.stem = nn.Sequential(nn.LayerNorm(self.features.width), nn.Linear(self.features.width, width), nn.GELU())
        self.blocks = nn.Sequential(*(Residual(width, dropout) for _ in range(depth)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Dropout(dropout), nn.Linear(width, embed_dim, bias=False))

    def forward(self, ink: Tensor) -> Tensor:
        """(n, 1, s, s) to (n, embed_dim)."""
        return self.head(self.blocks(self.stem(self.features(ink))))


class WordsBody(nn.Module):
    """Bags of words and word parts to features (n, embed_dim)."""

    def __init__(self, embed_dim: int, buckets: int, dropout: float) -> None:
        super().__init__()
        width = embed_dim
        self.table = nn.Embedding(buckets, width, padding_idx=0)
        nn.init.normal_(self.table.weight, std=width**-0.5)
        with torch.no_grad():
            self.table.weight[0].zero_()
        self.blocks = nn.Sequential(nn.LayerNorm(width), nn.Dropout(dropout), Residual(width, dropout))
        self.head = nn.Linear(width, embed_dim, bias=False)

    def forward(self, words: Tensor, parts: Tensor) -> Tensor:
        """(n, most_words) and (n, most_parts) to (n, embed_dim)."""
        return self.head(self.blocks(self._mean(words) + self._mean(parts)))

    def _mean(self, numbers: Tensor) -> Tensor:
        count = (numbers != 0).sum(1, keepdim=True).clamp(min=1)
        return F.embedding_bag(numbers, self.table.weight, mode="sum", padding_idx=0) / count.sqrt()
