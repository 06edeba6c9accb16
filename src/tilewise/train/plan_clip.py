"""Memory of image-text training, and the largest batch: ``tilewise plan clip``.

On each of W devices, with b pairs in the batch, r = ceil(b / W) of them on a device, d features and p weights::

    M_peak    = data + max(loss, backbone)
    data      = r * (bytes of an image and its tokens)          with offload: one chunk instead of r
    backbone  = 16 p + activations of one chunk                 float32 weights, gradients and two moments of AdamW
    loss      = dense:     16 b b   + 16 b d                    four float32 score matrices; features and gradients
                local:     16 r b   + 8 (r + b) d
                tilewise:  16 r d + workspace                   W = 1
                           36 r d + workspace                   W > 1, with the blocks of the ring

The activations are the tensors that autograd saves when the model runs on an image or a caption. The result is a lower
bound: backward also allocates temporary tensors, and the allocator reserves some memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tilewise.errors import ConfigError, RangeError
from tilewise.train.plan_lm import Cluster

METHODS = ("dense", "local", "tilewise", "tilewise + offload")
WEIGHT_BYTES = 16


@dataclass(frozen=True, kw_only=True)
class ClipShape:
    """The sizes of an image-text model that determine its memory.

    Args:
        name: the name of the model.
        parameters: weights of both towers.
        width: features of an embedding.
        pair_bytes: an image in uint8 and its tokens.
        row_bytes: activations that the larger tower saves for one row.
        fixed_bytes: bytes that this tower saves once per chunk, such as weights in half precision.
    """

    name: str
    parameters: int
    width: int
    pair_bytes: int
    row_bytes: int
    fixed_bytes: int


def backbone_bytes(shape: ClipShape, chunk_size: int) -> int:
    """Weights, gradients, optimizer state, and the activations of one chunk."""
    return WEIGHT_BYTES * shape.parameters + shape.fixed_bytes + chunk_size * shape.row_bytes


def loss_bytes(shape: ClipShape, cluster: Cluster, method: str, batch: int) -> int:
    """Memory of the loss on one device."""
    rows, width = -(-batch // cluster.gpus), shape.width
    if method == "dense":
        return 16 * batch * batch + 16 * batch * width
    if method == "local":
        return 16 * rows * batch + 8 * (rows + batch) * width
    return (16 if cluster.gpus == 1 else 36) * rows * width + cluster.workspace_bytes


def peak_bytes(shape: ClipShape, cluster: Cluster, method: str, batch: int, chunk_size: int) -> int:
    """Peak memory of one device for a batch over all devices. The equations are at the top of this module."""
    rows = -(-batch // cluster.gpus)
    loaded = min(rows, chunk_size) if method.endswith("offload") else rows
    most = max(loss_bytes(shape, cluster, method, batch), backbone_bytes(shape, min(rows, chunk_size)))
    return loaded * shape.pair_bytes + most


def largest_batch(shape: ClipShape, cluster: Cluster, method: str, chunk_size: int) -> int:
    """Return the largest batch, the same number of pairs on every device, or 0 if nothing fits.

    >>> shape = ClipShape(name="x", parameters=10**6, width=64, pair_bytes=1000, row_bytes=0, fixed_bytes=0)
    >>> cluster = Cluster(gpus=1, memory_bytes=2**30, reserve_bytes=0, workspace_bytes=0)
    >>> largest_batch(shape, cluster, "dense", 64), largest_batch(shape, cluster, "tilewise", 64)
    (8128, 530504)
    """

    def fits(rows: int) -> bool:
        return peak_bytes(shape, cluster, method, rows * cluster.gpus, chunk_size) <= cluster.usable_bytes

    low, high = 0, 1
    while fits(high) and high < 2**50:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low * cluster.gpus


def measure_shape(name: str, precision: str, image_size: int = 0) -> ClipShape:
    """Count the weights of a model and the activations of single rows. The model runs on fake tensors, without data.

    Args:
        name: a value of ``model.name``.
        precision: a value of ``loop.precision``.
        image_size: pixels along a side; 0 means the default of the model.
    """
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from tilewise.train.config import DataConfig, ModelConfig, RunConfig
    from tilewise.train.memory import tensor_bytes
    from tilewise.train.models import build_model

    if name in ("auto", "clip", "icon"):
        raise ConfigError(f"plan clip needs a model with sizes, such as clip-vit-b-16, got {name!r}")
    settings = ModelConfig(name=name, image_size=image_size)  # type: ignore[arg-type]
    config = RunConfig(data=DataConfig(source="folder", path="x"), model=settings)
    with FakeTensorMode(allow_non_fake_inputs=True):
        with _no_redraws():
            model = build_model(config)
        pixels = model.pixels

        def image_inputs(rows: int) -> tuple[Any, dict[str, Any]]:
            return (torch.zeros(rows, pixels.channels, pixels.size, pixels.size, dtype=torch.uint8),), {}

        def text_inputs(rows: int) -> tuple[Any, dict[str, Any]]:
            return (), model.tokenizer(["a caption"] * rows)

        row, fixed = max(
            _activations(model.image, image_inputs, precision), _activations(model.text, text_inputs, precision)
        )
        return ClipShape(
            name=name,
            parameters=sum(p.numel() for p in model.parameters()),
            width=model.text.body.project.out_features,
            pair_bytes=pixels.channels * pixels.size**2 + tensor_bytes(text_inputs(1)[1].values()) + 8,
            row_bytes=row,
            fixed_bytes=fixed,
        )


def _no_redraws() -> Any:
    """Return a context in which `Tensor.any` is False.

    `torch.nn.init.trunc_normal_` draws again while any number is outside of its limits. With fake tensors, that loop
    would never end.
    """
    from torch.overrides import TorchFunctionMode

    class NoRedraws(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return False if getattr(func, "__name__", "") == "any" else func(*args, **(kwargs or {}))

    return NoRedraws()


def _activations(tower: Any, inputs: Callable[[int], tuple[Any, dict[str, Any]]], precision: str) -> tuple[int, int]:
    """Return the bytes that a tower saves for each row, and those that it saves once."""
    import torch

    from tilewise.train.memory import activation_bytes
    from tilewise.train.objective import AUTOCAST

    def saved(rows: int) -> int:
        values, named = inputs(rows)
        with torch.autocast("cpu", AUTOCAST.get(precision), enabled=precision in AUTOCAST):
            return activation_bytes(lambda: tower(*values, **named))

    few, more = saved(2), saved(6)
    row = (more - few) // 4
    return row, max(0, few - 2 * row)


def check_batch(batch: int, chunk_size: int) -> None:
    """Raise `RangeError` for a batch or a chunk that is too small for any run."""
    if batch < 2:
        raise RangeError(f"--batch-size must be at least 2, got {batch}")
    if chunk_size < 1:
        raise RangeError(f"--chunk-size must be at least 1, got {chunk_size}")
