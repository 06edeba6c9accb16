"""OpenCLIP's `open_clip.loss`, with our losses. Its tests of chunks call a private method of the sigmoid loss."""

from __future__ import annotations

from typing import Any

from tools.peer_adapters.stand_in import module
from torch import Tensor

from tilewise.errors import ConfigError
from tilewise.integrations import open_clip


class SigLipLoss(open_clip.SigLipLoss):
    """With the private `_loss` of OpenCLIP."""

    def _loss(self, *arguments: Any, negative_only: bool = False) -> Tensor:
        if negative_only:
            raise ConfigError("negative_only is a step of OpenCLIP's exchange between ranks. Pass world_size instead")
        result = self(*arguments)
        assert isinstance(result, Tensor)
        return result


module("open_clip", loss=module("open_clip.loss", ClipLoss=open_clip.ClipLoss, SigLipLoss=SigLipLoss))
