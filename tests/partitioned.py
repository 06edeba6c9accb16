"""A layer whose parameters are partitioned as by DeepSpeed's ZeRO-3: empty until a module reads them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class _Gathering(dict[str, Any]):
    """Parameters by name. Reading one gathers it."""

    def __getitem__(self, name: str) -> Any:
        value = super().__getitem__(name)
        if value is not None and not value.numel():
            value.data = value.whole
        return value


def partition(layer: nn.Module) -> nn.Module:
    """Free the parameters of a layer, now and after each forward."""
    for value in layer.parameters(recurse=False):
        value.ds_id, value.whole = id(value), value.data

    def free(*_: Any) -> None:
        for value in dict.values(layer._parameters):
            if value is not None:
                value.data = torch.empty(0, dtype=value.dtype)

    layer._parameters = _Gathering(layer._parameters)
    layer.register_forward_hook(free)
    free()
    return layer
