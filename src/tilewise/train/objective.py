"""The loss of a run, and one training step through the gradient cache."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import tilewise as tw
from tilewise.cache import GradientCache
from tilewise.cache.chunks import count_rows
from tilewise.train import baselines
from tilewise.train.config import LossConfig, RunConfig
from tilewise.train.data import Batch
from tilewise.train.distributed import World
from tilewise.train.models.towers import Scale, TwoTowers
from tilewise.train.sharding import even_chunks

PairLoss = Callable[[Tensor, Tensor, Tensor, "Tensor | None", "Tensor | None"], Tensor]
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def pair_loss(config: LossConfig, group: Any = None) -> PairLoss:
    """Return the configured loss as ``loss(image, text, scale, bias, ids)``.

    The mean of its values over ranks is the global mean loss. The mean of its gradients over ranks is the gradient of
    the global mean loss.
    """
    options = tw.TileOptions(workspace_mib=config.workspace_mib)

    def tilewise_clip(image: Tensor, text: Tensor, scale: Tensor, bias: Tensor | None, ids: Tensor | None) -> Tensor:
        if ids is None:
            return tw.clip_loss(image, text, scale, group=group, options=options)
        return tw.info_nce(
            image, text, temperature=1 / scale, symmetric=True, query_ids=ids, key_ids=ids, group=group, options=options
        )

    def tilewise_siglip(image: Tensor, text: Tensor, scale: Tensor, bias: Tensor | None, ids: Tensor | None) -> Tensor:
        assert bias is not None
        return tw.siglip_loss(image, text, scale, bias, group=group, options=options)

    def baseline(image: Tensor, text: Tensor, scale: Tensor, bias: Tensor | None, ids: Tensor | None) -> Tensor:
        if config.kind == "siglip":
            assert bias is not None
            sigmoid = baselines.dense_siglip_loss if config.name == "dense" else baselines.local_siglip_loss
            return sigmoid(image, text, scale, bias, group=group)
        softmax = baselines.dense_clip_loss if config.name == "dense" else baselines.local_clip_loss
        return softmax(image, text, scale, ids=ids, group=group)

    if config.name == "tilewise":
        return tilewise_clip if config.kind == "clip" else tilewise_siglip
    return baseline


class Objective:
    """Forward and backward of a whole batch: the encoders in chunks, the loss on all pairs.

    Args:
        config: the settings of the run.
        model: both towers. With several ranks they are wrapped in DDP here, or they are sharded already.
        world: the ranks.
    """

    def __init__(self, config: RunConfig, model: TwoTowers, world: World) -> None:
        self.config, self.world, self.scale = config, world, model.scale
        self.loss = pair_loss(config.loss, world.group)
        self.sharded = config.loop.shard and world.group is not None
        towers = (model.image, model.text)
        self.towers = list(towers) if self.sharded else [in_group(tower, world) for tower in towers]
        self.chunks = 1  # of the batch; only for sharded towers
        self.watch: Callable[[Tensor, Tensor], None] | None = None  # is called with the features before the loss
        fp16 = config.loop.precision == "fp16"
        self.scaler = torch.amp.GradScaler(world.device.type, enabled=fp16) if fp16 else None
        self.cache = GradientCache(
            self.towers,
            self._loss,
            chunk_size=self._even_chunks if self.sharded else max(1, config.loop.chunk_size),
            sync="every" if self.sharded else "last",  # otherwise each rank keeps the whole gradient
            offload=world.device if config.loss.offload else None,  # where the chunks are moved from the CPU
        )

    def _loss(self, image: Tensor, text: Tensor, *, ids: Tensor | None) -> Tensor:
        if self.watch is not None:
            self.watch(image, text)
        if self.config.loop.precision in AUTOCAST:  # products in low precision, sums and statistics in float32
            image, text = (x.to(AUTOCAST[self.config.loop.precision]) for x in (image, text))
        with torch.autocast(image.device.type, enabled=False):
            return self.loss(image, text, self.scale(), self.scale.bias, ids)

    def _even_chunks(self, batch: Any) -> list[int]:
        """The rows of each chunk of an input."""
        rows, count = count_rows(batch), self.chunks
        return [(i + 1) * rows // count - i * rows // count for i in range(count)]

    def step(self, batch: Batch) -> Tensor:
        """Add the gradients of a batch to ``.grad`` and return the detached loss of this rank."""
        device, precision = self.world.device, self.config.loop.precision
        images, tokens = batch.images, batch.tokens
        if not self.config.loss.offload:
            images = images.to(device)
            tokens = {name: value.to(device) for name, value in tokens.items()}
        ids = batch.ids.to(device) if self.config.loss.mask_same_id else None
        if self.sharded:
            self.chunks = even_chunks(len(batch.ids), self.config.loop.chunk_size, self.world)
        low = AUTOCAST.get(precision, torch.bfloat16)
        # The cache of autocast would keep a copy of all gathered weights.
        with torch.autocast(device.type, low, enabled=precision in AUTOCAST, cache_enabled=not self.sharded):
            loss: Tensor = self.cache(images, tokens, scaler=self.scaler, ids=ids)
        average_scale_gradients(self.scale, self.world)
        return loss


def in_group(tower: nn.Module, world: World) -> nn.Module:
    """Wrap a tower in DDP if there are several ranks and the tower is trained."""
    if world.group is None or not any(p.requires_grad for p in tower.parameters()):
        return tower
    devices = [world.device] if world.device.type == "cuda" else None
    ddp = nn.parallel.DistributedDataParallel
    new = "forward_sync_buffers" in inspect.signature(ddp.__init__).parameters  # the name since torch 2.13
    buffers: dict[str, Any] = {"forward_sync_buffers" if new else "broadcast_buffers": False}
    return ddp(tower, device_ids=devices, process_group=world.group, gradient_as_bucket_view=True, **buffers)


def average_scale_gradients(scale: Scale, world: World) -> None:
    """Average the gradient of the scale over ranks. The scale is used in the loss, outside DDP."""
    for parameter in scale.parameters():
        if parameter.grad is not None:
            world.average_(parameter.grad)
