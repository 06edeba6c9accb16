"""`ClipLoss` and `SigLipLoss` with OpenCLIP's signatures.

    - from open_clip import ClipLoss
    + from tilewise.integrations.open_clip import ClipLoss

One process: the same loss and gradients. Several: the gradients of ``gather_with_grad=True``, always. After DDP's
averaging the towers and ``logit_scale`` have the gradient of the global mean; the returned number is this rank's
share of it, as with ``local_loss=True``, and its average over the ranks is the global loss.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from tilewise.errors import ConfigError
from tilewise.integrations._groups import world_group
from tilewise.losses.clip import clip_loss
from tilewise.losses.siglip import siglip_loss
from tilewise.options import TileOptions

EXCHANGES = ("bidir", "shift", "reduce", "gather")


class ClipLoss(nn.Module):
    """OpenCLIP's ``ClipLoss``, computed by `tilewise.clip_loss`.

    Args:
        local_loss, gather_with_grad: accepted; without a score matrix there is nothing to choose. OpenCLIP without
            ``gather_with_grad`` drops the gradient through other ranks' features; here it is always there.
        cache_labels: accepted; there are no labels to keep.
        rank, world_size: with ``world_size > 1`` the pairs are spread over all ranks of ``torch.distributed``, and
            the two numbers are checked against it.
        use_horovod: refused.
        options: how, never what.

    >>> import torch
    >>> x = torch.eye(4)
    >>> round(ClipLoss()(x, x, 1.0, output_dict=True)["contrastive_loss"].item(), 4)
    0.7437
    """

    def __init__(
        self,
        local_loss: bool = False,
        gather_with_grad: bool = False,
        cache_labels: bool = False,
        rank: int = 0,
        world_size: int = 1,
        use_horovod: bool = False,
        *,
        options: TileOptions | None = None,
    ) -> None:
        super().__init__()
        if use_horovod:
            raise ConfigError(
                "use_horovod=True is not supported: the ring speaks torch.distributed. Launch with torchrun"
            )
        self.local_loss, self.gather_with_grad, self.cache_labels = local_loss, gather_with_grad, cache_labels
        self.rank, self.world_size, self.use_horovod = rank, world_size, use_horovod
        self.options = options

    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: float | Tensor,
        logit_bias: float | Tensor | None = None,
        output_dict: bool = False,
    ) -> Tensor | dict[str, Tensor]:
        """See `tilewise.clip_loss`."""
        group = world_group(self.world_size, self.rank)
        loss = clip_loss(image_features, text_features, logit_scale, logit_bias, group=group, options=self.options)
        return {"contrastive_loss": loss} if output_dict else loss


class SigLipLoss(nn.Module):
    """OpenCLIP's ``SigLipLoss``, computed by `tilewise.siglip_loss`.

    Args:
        cache_labels: accepted; there are no labels to keep.
        rank, world_size: as for `ClipLoss`.
        dist_impl: one of OpenCLIP's names, or None; accepted, since there is one ring here.
        chunk_size: accepted; memory is bounded without it, in backward too. ``options.workspace_mib`` says by how much.
        options: how, never what.

    >>> import torch
    >>> x = torch.eye(2)
    >>> round(SigLipLoss()(x, x, 10.0, -5.0).item(), 4)
    0.0134
    """

    def __init__(
        self,
        cache_labels: bool = False,
        rank: int = 0,
        world_size: int = 1,
        dist_impl: str | None = None,
        chunk_size: int = 0,
        *,
        options: TileOptions | None = None,
    ) -> None:
        super().__init__()
        if dist_impl is not None and dist_impl not in EXCHANGES:
            raise ConfigError(f"no dist_impl {dist_impl!r}; OpenCLIP has {', '.join(EXCHANGES)}, or None")
        self.cache_labels, self.rank, self.world_size = cache_labels, rank, world_size
        self.dist_impl, self.chunk_size, self.options = dist_impl, chunk_size, options

    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: float | Tensor,
        logit_bias: float | Tensor | None,
        output_dict: bool = False,
    ) -> Tensor | dict[str, Any]:
        """See `tilewise.siglip_loss`. A bias of None counts as 0, as in OpenCLIP."""
        loss = siglip_loss(
            image_features,
            text_features,
            logit_scale,
            0.0 if logit_bias is None else logit_bias,
            group=world_group(self.world_size, self.rank),
            options=self.options,
        )
        return {"contrastive_loss": loss} if output_dict else loss
