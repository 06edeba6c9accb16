"""The public functions: a training step that needs the activations of one chunk only.

    loss = GradientCache([image_tower, text_tower], clip, chunk_size=256)(images, tokens)

gives the same loss and gradients as

    loss = clip(image_tower(images), text_tower(tokens));  loss.backward()
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor

from tilewise.cache.chunks import ChunkSize, Tree, map_tensors
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
    """A training step in chunks: the loss is that of the whole batch, the memory is that of one chunk.

    Encodes all chunks without a graph. Computes the loss and its gradient on all representations. Then encodes each
    chunk again, with the same random numbers, and runs backward with its part of the gradient. The result equals the
    step without chunks. It costs one more forward pass.

    Args:
        encoders: one per input, or a single one for all inputs: modules or functions. Use `Encoder` for a function
            whose modules cannot be found automatically. A frozen encoder runs once, without a graph.
        loss: ``loss(*representations, **loss_kwargs)`` returns a scalar, a tuple that starts with a scalar, or a
            mapping with the key "loss". It is called once per step, on all rows.
        chunk_size: number of rows per call of an encoder: one number, or one per encoder. For chunks of different
            sizes, a function that gets an input and returns the number of rows of each chunk.
        offload: a device. The inputs stay in host memory, and each chunk is copied to this device.
        sync: "last" makes DDP and FSDP reduce gradients once per step, "every" in each chunk.
        buffers: "once" keeps the running statistics (batch norm) of the first pass. With "twice", both passes update
            them.
        progress: called as ``progress(chunk, chunks, phase)`` after every chunk. ``chunk`` starts at 0 and ``phase`` is
            "encode" or "replay".

    A representation is a tensor, or a tuple, list, mapping or dataclass of tensors, joined by rows. A 0-d tensor in it,
    such as a temperature that the model returns, is passed to the loss unchanged.
    An encoder gets a mapping as keywords, and a tuple or list as positional arguments.

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
        chunk_size: ChunkSize | Sequence[ChunkSize],
        **settings: Unpack[CacheSettings],
    ) -> None:
        if not callable(loss):
            raise DtypeError(f"loss is a function of the representations, got {loss!r:.60}. Pass a function")
        self.encoders = encoders
        self.loss_fn = loss
        self.settings = Settings(chunk_size=chunk_size, **settings)

    def encode(self, *inputs: Any) -> tuple[Tree, ...]:
        """The representations of each input. They are differentiable, and their graph saves no activations."""
        return encode(self.encoders, inputs, self.settings)

    def loss(self, *inputs: Any, **loss_kwargs: Any) -> Any:
        """The result of the loss function, with a graph. Call ``.backward()`` on it."""
        result = self.loss_fn(*self.encode(*inputs), **loss_kwargs)
        loss_of(result)
        return result

    def __call__(
        self, *inputs: Any, scaler: Any = None, backward_scale: float | Tensor = 1.0, **loss_kwargs: Any
    ) -> Any:
        """Run one step. Adds gradients to ``.grad`` and returns the detached result of the loss.

        Args:
            inputs: one per encoder.
            scaler: a ``torch.amp.GradScaler``, which scales the gradients.
            backward_scale: multiplies the gradients but not the returned loss. Use ``1 / steps`` to accumulate.
            loss_kwargs: passed to the loss.
        """
        if scaler is not None and not callable(getattr(scaler, "scale", None)):
            raise DtypeError(f"scaler is a torch.amp.GradScaler, got {type(scaler).__name__}. Pass one, or None")
        backward_scale = _check_backward_scale(backward_scale)
        if not torch.is_grad_enabled():
            raise GradientError("a step needs gradients, but they are disabled (no_grad). Use .encode instead")
        result = self.loss(*inputs, **loss_kwargs)
        scaled = loss_of(result) * backward_scale
        if not scaled.requires_grad:
            raise GradientError(
                "nothing to train in this step: no encoder, input or parameter of the loss requires a gradient. Was "
                "everything frozen?"
            )
        (scaled if scaler is None else scaler.scale(scaled)).backward()
        return map_tensors(Tensor.detach, result)


def _check_backward_scale(scale: float | Tensor) -> float | Tensor:
    """Check a number, of Python or NumPy, or a real tensor of one element."""
    if isinstance(scale, numbers.Real):
        return float(scale)
    if not isinstance(scale, Tensor) or scale.numel() != 1 or scale.is_complex():
        shape = f" of shape {tuple(scale.shape)}" if isinstance(scale, Tensor) else ""
        raise DtypeError(
            f"backward_scale is one real number, got {type(scale).__name__}{shape}. Pass 1 / steps to accumulate"
        )
    return scale.reshape(())


def _check_inputs(inputs: Sequence[Any]) -> None:
    """Check a sequence of inputs. Rows of a tensor are no inputs."""
    if not isinstance(inputs, Sequence) or isinstance(inputs, str):
        raise DtypeError(
            f"inputs is a list with one input for each encoder, got {type(inputs).__name__}. Pass [batch] for one input"
        )


def loss_of(result: Any) -> Tensor:
    """The scalar in the result of a loss function: the result, the first of a tuple, or the key "loss"."""
    loss = result
    if isinstance(result, tuple | list) and result:
        loss = result[0]
    elif isinstance(result, Mapping):
        loss = result.get("loss")
    if not isinstance(loss, Tensor):
        raise DtypeError(
            "a loss function returns a scalar tensor, a tuple that starts with one, or a mapping with the "
            f"key 'loss', got {type(result).__name__}. Return a tensor, without .item()"
        )
    if loss.numel() != 1:
        raise ShapeError(f"the loss must be a scalar, got shape {tuple(loss.shape)}. Take its mean")
    return loss


def cached_step(
    encoders: Any,
    inputs: Sequence[Any],
    loss: Callable[..., Any],
    *,
    chunk_size: ChunkSize | Sequence[ChunkSize],
    scaler: Any = None,
    backward_scale: float | Tensor = 1.0,
    **settings: Unpack[CacheSettings],
) -> Any:
    """Forward and backward of a whole batch in chunks. Returns the detached loss. See `GradientCache`.

    >>> tower = torch.nn.Linear(4, 2)
    >>> loss = cached_step(tower, [torch.ones(6, 4)], lambda z: z.square().mean(), chunk_size=2)
    >>> tower.bias.grad.shape
    torch.Size([2])
    """
    _check_inputs(inputs)
    cache = GradientCache(encoders, loss, chunk_size=chunk_size, **settings)
    return cache(*inputs, scaler=scaler, backward_scale=backward_scale)


def cached_loss(
    encoders: Any,
    inputs: Sequence[Any],
    loss: Callable[..., Any],
    *,
    chunk_size: ChunkSize | Sequence[ChunkSize],
    **settings: Unpack[CacheSettings],
) -> Any:
    """The loss of a whole batch, encoded in chunks. Call ``.backward()`` on it. See `GradientCache`.

    >>> tower = torch.nn.Linear(4, 2)
    >>> loss = cached_loss(tower, [torch.ones(6, 4)], lambda z: z.square().mean(), chunk_size=2)
    >>> (3 * loss).backward()
    >>> tower.bias.grad.shape
    torch.Size([2])
    """
    _check_inputs(inputs)
    return GradientCache(encoders, loss, chunk_size=chunk_size, **settings).loss(*inputs)


def cached_encode(encoder: Any, batch: Any, *, chunk_size: ChunkSize, **settings: Unpack[CacheSettings]) -> Tree:
    """``encoder(batch)`` in chunks, differentiable, with the activations of one chunk. See `GradientCache`.

    Use one `GradientCache` for encoders that share a DDP wrapper, so that gradients are reduced once. Separate calls of
    this function reduce separately.

    >>> tower = torch.nn.Linear(4, 2)
    >>> cached_encode(tower, torch.ones(6, 4), chunk_size=4).shape
    torch.Size([6, 2])
    """
    return encode([encoder], [batch], Settings(chunk_size=chunk_size, **settings))[0]
