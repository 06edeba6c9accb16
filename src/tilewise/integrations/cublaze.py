"""`InfoNCELoss` with CuBlaze's signature: two stacked views, normalized by the caller.

- from cublaze import InfoNCELoss
+ from tilewise.integrations.cublaze import InfoNCELoss
"""

from __future__ import annotations

from torch import Tensor, nn

from tilewise.losses.nt_xent import nt_xent
from tilewise.options import TileOptions


class InfoNCELoss(nn.Module):
    """CuBlaze's ``InfoNCELoss``, computed by `tilewise.nt_xent`, on any device.

    Args:
        temperature: divides the scores; a tensor that requires grad gets its exact gradient.
        use_cublas: True selects the "torch" backend, which uses cuBLAS on a GPU. False selects the fastest backend
            that supports the call.

    >>> import torch
    >>> round(InfoNCELoss()(torch.eye(2).repeat(2, 1)).item(), 4)
    0.2395
    """

    def __init__(self, temperature: float | Tensor = 0.5, use_cublas: bool = False) -> None:
        super().__init__()
        self.temperature = temperature  # an nn.Parameter registers itself and is learned
        self.use_cublas = use_cublas

    def forward(self, features: Tensor) -> Tensor:
        """See `tilewise.nt_xent`."""
        options = TileOptions(backend="torch" if self.use_cublas else "auto")
        return nt_xent(features, temperature=self.temperature, options=options)
