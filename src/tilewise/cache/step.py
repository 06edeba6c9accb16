"""The public entry: a training step whose activations are those of one chunk.

    loss = GradientCache([image_tower, text_tower], clip, chunk_size=256)(images, tokens)

equals, in the loss and in every gradient,

    loss = clip(image_tower(images), text_tower(tokens));  loss.backward()
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor

from tilewise.cache.chunks import Tree, map_tensors
from tilewise.cache.encode import encode
from tilewise.cache.settings import Buffers, Progress, Settings
from tilewise.cache.sync import Sync
from tilewise.errors import DtypeError, GradientError, ShapeError


class CacheSettings(TypedDict, total=False):
    """The keywords that `GradientCache`, `cached_step`, `cached_loss` and `cached_encode` share."""

    offload: torch.device | str | None
    sync: Sync
    buffers: Buffers
    progress: Progress | None


class GradientCache:
    """A training step in chunks: the loss sees the whole batch, the memory sees one chunk.

    Encodes all chunks without a graph, takes the loss and its gradient on all representations at once, then
    encodes each chunk again, with the same random numbers, and pushes its part of the gradient through. Equal
    to the step without chunks, and costs one forward pass more.

    Args:
        encoders: one per input, or a single one for all inputs. Modules or functions; `Encoder` describes
            a function whose modules cannot be seen. A frozen encoder runs once, without a graph.
        loss: ``loss(*representations, **loss_kwargs)`` gives a scalar, or a tuple that begins with it, or a
            mapping with the key "loss". It is called once per step, on all rows.
        chunk_size: rows that an encoder sees at once; one number, or one per encoder.
        offload: a device. The inputs stay in host memory, and chunk by chunk goes to this device.
        sync: "last" lets DDP and FSDP reduce gradients once per step, "every" in each chunk.
        buffers: "once" keeps the running statistics (batch norm) of the first pass, "twice" lets both passes
            update them.
        progress: called as ``progress(chunk, chunks, phase)`` after every chunk, with ``chunk`` from 0 and
            ``phase`` "encode" or "replay".

    A representation is a tensor, or a tuple, list, mapping or dataclass of tensors, joined by rows. A tensor
    of no dimensions in it (a temperature that the model returns) is passed on as it is.
    An input that is a mapping reaches its encoder as keywords, a tuple or list as positional arguments.

    >>> _ = torch.manual_seed(0)
    >>> tower, rows = torch.nn.Linear(4, 2), torch.randn(6, 4)
    >>> step = GradientCache(tower, lambda a, b: (a @ b.T).logsumexp(1).mean(), chunk_size=4)
    >>> loss = step(rows, 2 * rows)
    >>> loss.requires_grad, tower.weight.grad.shape
    (False, torch.Size([2, 4]))
    """

    def __init__(
        self,
        encoders: Any,
        loss: Callable[..., Any],
        *,
        chunk_size: int | Sequence[int],
        **settings: Unpack[CacheSettings],
    ) -> None:
        if not callable(loss):
            raise DtypeError(f"loss is a function of the representations, got {loss!r}")
        self.encoders = encoders
        self.loss_fn = loss
        self.settings = Settings(chunk_size=chunk_size, **settings)

    def encode(self, *inputs: Any) -> tuple[Tree, ...]:
        """The representations of each input. Differentiable; their graph holds no activations."""
        return encode(self.encoders, inputs, self.settings)

    def loss(self, *inputs: Any, **loss_kwargs: Any) -> Any:
        """What the loss function returns, with a graph: call ``.backward()`` on it when you like."""
        result = self.loss_fn(*self.encode(*inputs), **loss_kwargs)
        loss_of(result)
        return result

    def __call__(
        self, *inputs: Any, scaler: Any = None, backward_scale: float | Tensor = 1.0, **loss_kwargs: Any
    ) -> Any:
        """One step: gradients are added to ``.grad``; returns what the loss returned, detached.

        Args:
            inputs: one per encoder.
            scaler: a ``torch.amp.GradScaler``; gradients come out scaled by it.
            backward_scale: multiplies the gradients, not the returned loss: ``1 / steps`` when accumulating.
            loss_kwargs: handed to the loss.
        """
        if not torch.is_grad_enabled():
            raise GradientError("a step needs gradients, but they are disabled here (no_grad). Use .encode instead")
        result = self.loss(*inputs, **loss_kwargs)
        scaled = loss_of(result) * backward_scale
        if not scaled.requires_grad:
            raise GradientError(
                "nothing learns in this step: no encoder, input or parameter of the loss requires a gradient"
            )
        (scaled if scaler is None else scaler.scale(scaled)).backward()
        return map_tensors(Tensor.detach, result)


def loss_of(result: Any) -> Tensor:
    """The scalar in what a loss function returned: itself, the first of a tuple, or the key "loss"."""
    loss = result
    if isinstance(result, tuple | list) and result:
        loss = result[0]
    elif isinstance(result, Mapping):
        loss = result.get("loss")
    if not isinstance(loss, Tensor):
        raise DtypeError(
            "a loss function returns a scalar tensor, a tuple that begins with one, or a mapping with the "
            f"key 'loss', got {type(result).__name__}"
        )
    if loss.numel() != 1:
        raise ShapeError(f"the loss needs to be a scalar, got shape {tuple(loss.shape)}. Take its mean")
    return loss


def cached_step(
    encoders: Any,
    inputs: Sequence[Any],
    loss: Callable[..., Any],
    *,
    chunk_size: int | Sequence[int],
    scaler: Any = None,
    backward_scale: float | Tensor = 1.0,
    **settings: Unpack[CacheSettings],
) -> Any:
    """Forward and backward of a whole batch in chunks; returns the detached loss. See `GradientCache`.

    >>> tower = torch.nn.Linear(4, 2)
    >>> loss = cached_step(tower, [torch.ones(6, 4)], lambda z: z.square().mean(), chunk_size=2)
    >>> tower.bias.grad.shape
    torch.Size([2])
    """
    cache = GradientCache(encoders, loss, chunk_size=chunk_size, **settings)
    return cache(*inputs, scaler=scaler, backward_scale=backward_scale)


def cached_loss(
    encoders: Any,
    inputs: Sequence[Any],
    loss: Callable[..., Any],
    *,
    chunk_size: int | Sequence[int],
    **settings: Unpack[CacheSettings],
) -> Any:
    """The loss of a whole batch, encoded in chunks; ``.backward()`` works on it. See `GradientCache`.

    >>> tower = torch.nn.Linear(4, 2)
    >>> loss = cached_loss(tower, [torch.ones(6, 4)], lambda z: z.square().mean(), chunk_size=2)
    >>> (3 * loss).backward()
    >>> tower.bias.grad.shape
    torch.Size([2])
    """
    return GradientCache(encoders, loss, chunk_size=chunk_size, **settings).loss(*inputs)


def cached_encode(encoder: Any, batch: Any, *, chunk_size: int, **settings: Unpack[CacheSettings]) -> Tree:
    """``encoder(batch)`` in chunks, differentiable, at the memory of one chunk. See `GradientCache`.

    Several calls make several nodes; encoders that share a DDP wrapper belong into one `GradientCache`, so
    that it reduces once.

    >>> tower = torch.nn.Linear(4, 2)
    >>> cached_encode(tower, torch.ones(6, 4), chunk_size=4).shape
    torch.Size([6, 2])
    """
    return encode([encoder], [batch], Settings(chunk_size=chunk_size, **settings))[0]
