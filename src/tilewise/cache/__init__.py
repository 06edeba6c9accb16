"""Gradient cache and data offload: for batches whose activations do not fit, with any encoder and any loss."""

from tilewise.cache.chunks import BatchSource
from tilewise.cache.encoders import Encoder
from tilewise.cache.offload import HostBatch, LazyBatch
from tilewise.cache.step import GradientCache, cached_encode, cached_loss, cached_step

__all__ = [
    "BatchSource",
    "Encoder",
    "GradientCache",
    "HostBatch",
    "LazyBatch",
    "cached_encode",
    "cached_loss",
    "cached_step",
]
