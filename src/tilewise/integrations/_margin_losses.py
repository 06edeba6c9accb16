"""`ArcFaceLoss` and `CosFaceLoss` of PyTorch Metric Learning; the module of that name has them in public."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tilewise.errors import ConfigError
from tilewise.losses.margin_softmax import margin_softmax_loss
from tilewise.options import TileOptions


class _MarginLoss(nn.Module):
    """Base class of both losses: a weight ``W``, (embedding_size, num_classes), and the mean over the rows."""

    def __init__(
        self,
        num_classes: int,
        embedding_size: int,
        margin: float,
        scale: float,
        weight_init_func: Callable[[Tensor], Any] | None,
        options: TileOptions | None,
        refused: dict[str, Any],
    ) -> None:
        super().__init__()
        if named := [name for name, value in refused.items() if value is not None]:
            raise ConfigError(
                f"{', '.join(named)}: only the default distance and reducer without regularizers are supported, got "
                "others. Leave them out, or use the loss of pytorch-metric-learning"
            )
        self.num_classes, self.margin, self.scale, self.options = num_classes, margin, scale, options
        self.W = nn.Parameter(torch.empty(embedding_size, num_classes))
        (weight_init_func or nn.init.normal_)(self.W)

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor,
        indices_tuple: Any = None,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
    ) -> Tensor:
        """The loss of ``embeddings`` (n, d) with the classes ``labels`` (n,)."""
        if not (indices_tuple is ref_emb is ref_labels is None):
            raise ConfigError(
                "indices_tuple, ref_emb and ref_labels are not supported: each embedding is compared with all classes. "
                "Omit them, or use the loss of pytorch-metric-learning"
            )
        if (self.W.dtype, self.W.device) != (embeddings.dtype, embeddings.device):
            self.W.data = self.W.data.to(embeddings)  # as in that package
        m2, m3 = self._margins()
        return margin_softmax_loss(
            embeddings,
            self.W.t(),
            labels,
            logit_scale=float(self.scale),
            m2=m2,
            m3=m3,
            options=self.options,
        )

    def get_logits(self, embeddings: Tensor) -> Tensor:
        """Cosines with all classes, times the scale, without a margin: (n, num_classes)."""
        weight = F.normalize(self.W, dim=0)
        return F.normalize(embeddings, dim=1) @ weight * self.scale

    def _margins(self) -> tuple[float, float]:
        """An angle, and a difference of cosines."""
        raise NotImplementedError


class ArcFaceLoss(_MarginLoss):
    """PyTorch Metric Learning's ``ArcFaceLoss``: `tilewise.margin_softmax_loss` with a margin in degrees.

    >>> import torch
    >>> ArcFaceLoss(num_classes=10, embedding_size=4)(torch.eye(4), torch.arange(4)).dim()
    0
    """

    def __init__(
        self,
        num_classes: int,
        embedding_size: int,
        margin: float = 28.6,
        scale: float = 64,
        *,
        weight_init_func: Callable[[Tensor], Any] | None = None,
        options: TileOptions | None = None,
        **refused: Any,
    ) -> None:
        super().__init__(num_classes, embedding_size, math.radians(margin), scale, weight_init_func, options, refused)

    def _margins(self) -> tuple[float, float]:
        return self.margin, 0.0


class CosFaceLoss(_MarginLoss):
    """PyTorch Metric Learning's ``CosFaceLoss``: `tilewise.margin_softmax_loss` with a margin of the cosine."""

    def __init__(
        self,
        num_classes: int,
        embedding_size: int,
        margin: float = 0.35,
        scale: float = 64,
        *,
        weight_init_func: Callable[[Tensor], Any] | None = None,
        options: TileOptions | None = None,
        **refused: Any,
    ) -> None:
        super().__init__(num_classes, embedding_size, margin, scale, weight_init_func, options, refused)

    def _margins(self) -> tuple[float, float]:
        return 0.0, self.margin
