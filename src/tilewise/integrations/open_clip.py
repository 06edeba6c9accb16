"""`ClipLoss`, `SigLipLoss`, `CoCaLoss` and `DistillClipLoss` with OpenCLIP's signatures.

    - from open_clip import ClipLoss
    + from tilewise.integrations.open_clip import ClipLoss

One process: the same loss and gradients. Several processes: always the gradients of ``gather_with_grad=True``. After
DDP's averaging, the towers and ``logit_scale`` have the gradient of the global mean. The returned loss is this rank's
share, as with ``local_loss=True``. Its average over the ranks is the global loss.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tilewise import _check
from tilewise.errors import ConfigError, GradientError
from tilewise.integrations._groups import world_group
from tilewise.losses.clip import clip_loss
from tilewise.losses.clip_distillation import clip_distillation_loss
from tilewise.losses.siglip import siglip_loss
from tilewise.options import TileOptions

EXCHANGES = ("bidir", "shift", "reduce", "gather")


class ClipLoss(nn.Module):
    """OpenCLIP's ``ClipLoss``, computed by `tilewise.clip_loss`.

    Args:
        local_loss, gather_with_grad: accepted without effect. OpenCLIP without ``gather_with_grad`` drops the gradient
            through other ranks' features. This loss never drops it.
        cache_labels: accepted without effect. There are no labels.
        rank, world_size: with ``world_size > 1`` the pairs are sharded over all ranks of ``torch.distributed``, and
            both numbers are checked against it.
        use_horovod: refused.
        options: how to compute it. No option changes the result beyond rounding.

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
            raise ConfigError("use_horovod=True is not supported. Use torch.distributed, for example with torchrun")
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

    def get_logits(self, *args: Any, **kwargs: Any) -> None:
        """Refused: the result in OpenCLIP is the whole score matrix."""
        raise _no_logits()


class CoCaLoss(ClipLoss):
    """OpenCLIP's ``CoCaLoss``: `ClipLoss` and the cross-entropy of captions, each multiplied by its weight.

    The caption logits are an argument, (batch, tokens, vocabulary). To avoid them, use `tilewise.linear_cross_entropy`
    with hidden states and the head.

    Args:
        caption_loss_weight, clip_loss_weight: weights of the two losses. With a ``clip_loss_weight`` of 0 the
            contrastive loss is not computed.
        pad_id: label of padding, which is ignored.
        local_loss, gather_with_grad, cache_labels, rank, world_size, use_horovod, options: as for `ClipLoss`.

    >>> x, logits = torch.eye(4), torch.zeros(4, 3, 8)
    >>> parts = CoCaLoss(2.0, 1.0)(x, x, logits, torch.ones(4, 3, dtype=torch.long), 1.0)
    >>> [round(part.item(), 4) for part in parts]
    [0.7437, 4.1589]
    """

    def __init__(
        self,
        caption_loss_weight: float,
        clip_loss_weight: float,
        pad_id: int = 0,
        local_loss: bool = False,
        gather_with_grad: bool = False,
        cache_labels: bool = False,
        rank: int = 0,
        world_size: int = 1,
        use_horovod: bool = False,
        *,
        options: TileOptions | None = None,
    ) -> None:
        super().__init__(
            local_loss, gather_with_grad, cache_labels, rank, world_size, use_horovod=use_horovod, options=options
        )
        _check.check_number("caption_loss_weight", caption_loss_weight)
        _check.check_number("clip_loss_weight", clip_loss_weight)
        self.clip_loss_weight, self.caption_loss_weight = clip_loss_weight, caption_loss_weight
        self.caption_loss = nn.CrossEntropyLoss(ignore_index=pad_id)

    def forward(  # type: ignore[override]
        self,
        image_features: Tensor,
        text_features: Tensor,
        logits: Tensor,
        labels: Tensor,
        logit_scale: float | Tensor,
        output_dict: bool = False,
    ) -> tuple[Tensor, Tensor] | dict[str, Tensor]:
        """The contrastive loss and the caption loss."""
        contrastive = torch.tensor(0, device=logits.device)
        if self.clip_loss_weight:
            alone = super().forward(image_features, text_features, logit_scale)
            assert isinstance(alone, Tensor)
            contrastive = self.clip_loss_weight * alone
        caption = self.caption_loss_weight * self.caption_loss(logits.permute(0, 2, 1), labels)
        return {"contrastive_loss": contrastive, "caption_loss": caption} if output_dict else (contrastive, caption)


class DistillClipLoss(ClipLoss):
    """OpenCLIP's ``DistillClipLoss``, computed by `tilewise.clip_loss` and `tilewise.clip_distillation_loss`.

    Let x and y be the scores of student and teacher, images by texts. The second loss is half the sum over both
    directions of ``-(y.softmax(1) * x.log_softmax(1)).sum(1).mean()``. Neither matrix is stored.

    Args:
        local_loss, gather_with_grad, cache_labels, rank, world_size, use_horovod, options: as for `ClipLoss`. Both
            losses are this rank's shares. The teacher's features are converted to the type of the student's.

    >>> x = torch.eye(4)
    >>> [round(part.item(), 4) for part in DistillClipLoss()(x, x, 1.0, x, x, 0.0)]
    [0.7437, 1.4937]
    """

    def forward(  # type: ignore[override]
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: float | Tensor,
        dist_image_features: Tensor,
        dist_text_features: Tensor,
        dist_logit_scale: float | Tensor,
        output_dict: bool = False,
    ) -> tuple[Tensor, Tensor] | dict[str, Tensor]:
        """The contrastive loss and the distillation loss. The teacher must not require a gradient."""
        for teacher in (dist_image_features, dist_text_features, dist_logit_scale):
            if isinstance(teacher, Tensor) and teacher.requires_grad and torch.is_grad_enabled():
                raise GradientError(
                    "the teacher requires a gradient, but the loss has none for it. Run it under torch.no_grad()"
                )
        contrastive = super().forward(image_features, text_features, logit_scale)
        assert isinstance(contrastive, Tensor)
        names = ("dist_image_features", "dist_text_features")
        for name, theirs in zip(names, (dist_image_features, dist_text_features), strict=True):
            _check.check_features(name, theirs)
            _check.check_same_rows((name, name.removeprefix("dist_")), theirs, image_features)
        distill = clip_distillation_loss(
            image_features,
            text_features,
            logit_scale,
            dist_image_features.to(image_features.dtype),
            dist_text_features.to(image_features.dtype),
            dist_logit_scale,
            teacher_entropy=True,
            group=world_group(self.world_size, self.rank),
            options=self.options,
        )
        return {"contrastive_loss": contrastive, "distill_loss": distill} if output_dict else (contrastive, distill)


class SigLipLoss(nn.Module):
    """OpenCLIP's ``SigLipLoss``, computed by `tilewise.siglip_loss`.

    Args:
        cache_labels: accepted without effect. There are no labels.
        rank, world_size: as for `ClipLoss`.
        dist_impl: one of OpenCLIP's names, or None. Accepted without effect.
        chunk_size: accepted without effect. ``options.workspace_mib`` bounds the memory, in forward and backward.
        options: how to compute it. No option changes the result beyond rounding.

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
        """See `tilewise.siglip_loss`. A bias of None means 0, as in OpenCLIP."""
        loss = siglip_loss(
            image_features,
            text_features,
            logit_scale,
            0.0 if logit_bias is None else logit_bias,
            group=world_group(self.world_size, self.rank),
            options=self.options,
        )
        return {"contrastive_loss": loss} if output_dict else loss

    def get_logits(self, *args: Any, **kwargs: Any) -> None:
        """Refused: the result in OpenCLIP is the whole score matrix."""
        raise _no_logits()


def _no_logits() -> ConfigError:
    return ConfigError(
        "get_logits returns the whole score matrix, which is never computed here. To get it, write "
        "logit_scale * image_features @ text_features.T. To rank, call tilewise.retrieval_ranks"
    )
