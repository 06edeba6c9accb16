"""`InfoNCE` and `info_nce` with the signatures of info-nce-pytorch. Like that package, they normalize the features.

- from info_nce import InfoNCE
+ from tilewise.integrations.info_nce_pytorch import InfoNCE
"""

from __future__ import annotations

from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from tilewise import _check
from tilewise.errors import DtypeError, ShapeError
from tilewise.losses import info_nce as tiled
from tilewise.options import TileOptions, check_choice

Reduction = Literal["none", "sum", "mean"]
DIMS = {"unpaired": 2, "paired": 3}


class InfoNCE(nn.Module):
    """info-nce-pytorch's ``InfoNCE``, computed by `tilewise.info_nce`.

    Args:
        temperature: divides the cosines; a tensor that requires grad gets its exact gradient.
        reduction: "none", "sum" or "mean".
        negative_mode: "unpaired" means negatives (M, D) that all queries share, "paired" means (N, M, D), M per query.
        options: how to compute it. No option changes the result beyond rounding.

    >>> import torch
    >>> x = torch.eye(4)
    >>> round(InfoNCE(temperature=1.0)(x, x).item(), 4)
    0.7437
    """

    def __init__(
        self,
        temperature: float | Tensor = 0.1,
        reduction: Reduction = "mean",
        negative_mode: Literal["unpaired", "paired"] = "unpaired",
        *,
        options: TileOptions | None = None,
    ) -> None:
        super().__init__()
        self.temperature = temperature  # an nn.Parameter registers itself and is learned
        self.reduction: Reduction = reduction
        self.negative_mode, self.options = negative_mode, options

    def forward(self, query: Tensor, positive_key: Tensor, negative_keys: Tensor | None = None) -> Tensor:
        """See `info_nce`."""
        return info_nce(
            query,
            positive_key,
            negative_keys,
            temperature=self.temperature,
            reduction=self.reduction,
            negative_mode=self.negative_mode,
            options=self.options,
        )


def info_nce(
    query: Tensor,
    positive_key: Tensor,
    negative_keys: Tensor | None = None,
    temperature: float | Tensor = 0.1,
    reduction: Reduction = "mean",
    negative_mode: str = "unpaired",
    *,
    options: TileOptions | None = None,
) -> Tensor:
    """Cross-entropy of cosines: each query against its key and the negatives, or against all keys without negatives.

    With ``negative_keys``, the keys of other queries are *not* negatives, as in info-nce-pytorch.
    `tilewise.info_nce` supports both.
    """
    check_choice("negative_mode", negative_mode, tuple(DIMS))
    for name, rows in (("query", query), ("positive_key", positive_key), ("negative_keys", negative_keys)):
        if rows is not None and not isinstance(rows, Tensor):
            number = isinstance(rows, (int, float))
            raise DtypeError(
                f"{name} is a tensor, got {type(rows).__name__}. "
                + ("Pass a temperature by keyword, temperature=..." if number else _check.tensor_of(rows))
            )
    if negative_keys is not None and negative_keys.dim() != DIMS[negative_mode]:
        raise ShapeError(
            f"negative_mode={negative_mode!r} takes negative_keys of {DIMS[negative_mode]} dimensions, "
            f"got {tuple(negative_keys.shape)}. (M, D) is unpaired, (N, M, D) is paired"
        )
    return tiled.info_nce(
        F.normalize(query, dim=-1),
        F.normalize(positive_key, dim=-1),
        None if negative_keys is None else F.normalize(negative_keys, dim=-1),
        temperature=temperature,
        in_batch=negative_keys is None,
        reduction=reduction,
        options=options,
    )
