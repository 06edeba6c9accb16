"""Encode a batch in chunks, so that backward needs the activations of one chunk only.

    forward    for each chunk: record the random state; encode without a graph
    backward   for each chunk: restore the random state; encode with a graph; run backward with its gradient

The representations of all encoders are outputs of one autograd node. Its backward runs when all their gradients are
complete. It runs over encoders and chunks in forward order, which is the same on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from tilewise.cache.autocast import Autocast
from tilewise.cache.chunks import (
    BatchSource,
    ChunkSize,
    Joined,
    Tree,
    count_rows,
    map_tensors,
    row_ranges,
    take_rows,
    tensors_of,
)
from tilewise.cache.encoders import Encoder, WatchedState, as_encoders, preserve_buffers, version_of
from tilewise.cache.offload import HostBatch, on_device
from tilewise.cache.randomness import RandomState, preserve_random_state, random_devices
from tilewise.cache.settings import Phase, Progress, Settings
from tilewise.cache.sync import SyncPlan
from tilewise.errors import GradientError


@dataclass
class EncoderInput:
    """One encoder with its input, and the state that the first pass records."""

    index: int
    encoder: Encoder
    batch: Tree | BatchSource
    ranges: tuple[slice, ...]
    devices: tuple[torch.device, ...]
    leaves: list[Tensor]  # the tensors of the input, if it is a tree
    watched: list[Tensor]  # the leaves, or the tensors of a source; must not change until backward
    learns: bool
    load_states: list[RandomState] = field(default_factory=list)
    encode_states: list[RandomState] = field(default_factory=list)

    @classmethod
    def open(cls, index: int, encoder: Encoder, batch: Any, chunk_size: ChunkSize, offload: Any) -> EncoderInput:
        """Read the rows, chunks and devices of an input, and whether anything requires a gradient."""
        given = batch
        if offload is not None and not isinstance(batch, BatchSource):
            batch = HostBatch(batch, offload)
        if isinstance(batch, BatchSource):
            rows, leaves, device = batch.rows, [], batch.device
            watched = getattr(batch, "tensors", [])
        else:
            rows, leaves, device = count_rows(batch, f"input {index}"), tensors_of(batch), None
            watched = leaves
        devices = random_devices(watched, encoder.modules, [device] if device is not None else [])
        learns = encoder.learns or any(tensor.requires_grad for tensor in watched)
        return cls(index, encoder, batch, row_ranges(rows, chunk_size, given), devices, leaves, watched, learns)

    def first_pass(self) -> Iterator[Tree]:
        """Yield every chunk. The random state is recorded before loading and before encoding."""
        for chunk in self._chunks(self._load_first):
            if self.learns:
                self.encode_states.append(RandomState.record(self.devices))
            yield chunk
            del chunk  # free it before the next one is loaded; enumerate or zip would keep a reference

    def second_pass(self) -> Iterator[Tree]:
        """Yield the same chunks, with the random state of the first pass restored."""
        chunks = self._chunks(self._load_again)
        for state in self.encode_states:
            chunk = next(chunks)
            state.restore()
            yield chunk
            del chunk

    def _chunks(self, load: Callable[[int], Tree]) -> Iterator[Tree]:
        device = self.batch.device if isinstance(self.batch, BatchSource) else None
        return on_device(len(self.ranges), load, device)

    def _load_first(self, index: int) -> Tree:
        if not isinstance(self.batch, BatchSource):
            return take_rows(self.batch, self.ranges[index])
        if self.learns:
            self.load_states.append(RandomState.record(self.devices))
        return self.batch.load(self.ranges[index])

    def _load_again(self, index: int) -> Tree:
        if isinstance(self.batch, BatchSource):
            self.load_states[index].restore()
            return self.batch.load(self.ranges[index])
        chunk = take_rows(map_tensors(Tensor.detach, self.batch), self.ranges[index])
        for leaf, part in zip(self.leaves, tensors_of(chunk), strict=True):
            part.requires_grad_(leaf.requires_grad)
        return chunk


class Encoding:
    """All encoders of one step: the first pass, and the second pass with the gradients."""

    def __init__(self, encoders: Any, inputs: Sequence[Any], settings: Settings) -> None:
        described = as_encoders(encoders, len(inputs))
        sizes = settings.chunk_sizes(len(described))
        self.settings = settings
        self.sides = [
            EncoderInput.open(index, encoder, batch, size, settings.offload)
            for index, (encoder, batch, size) in enumerate(zip(described, inputs, sizes, strict=True))
        ]
        self.devices = tuple(dict.fromkeys(device for side in self.sides for device in side.devices))
        self.autocast = Autocast.record({"cpu", *(device.type for device in self.devices)})
        self.modules = [module for side in self.sides if side.learns for module in side.encoder.modules]
        self.state = WatchedState(self.modules if torch.is_grad_enabled() else ())
        self.input_versions = [version_of(tensor) for tensor in self._watched()]
        self.joined: list[Joined] = []

    def _watched(self) -> Iterator[Tensor]:
        for side in self.sides:
            if side.learns:
                yield from side.watched

    def first_pass(self) -> list[list[Tensor]]:
        """The representations of every encoder, without a graph and joined by rows."""
        report = Reporter(self.settings.progress, "encode", self.sides)
        with torch.no_grad():
            for side in self.sides:
                outputs = []
                for chunk in side.first_pass():
                    outputs.append(side.encoder(chunk))
                    del chunk
                    report.chunk_done()
                self.joined.append(Joined(outputs, f"encoder {side.index}"))
        self.autocast.clear_cache()
        self.state.keep_constant()
        return [joined.take() for joined in self.joined]

    def second_pass(self, grads: list[list[Tensor | None]]) -> list[Tensor | None]:
        """Run backward through the encoders with these gradients of the representations.

        Gradients of parameters are added to ``.grad``, as in any backward. Returns the gradients of the input tensors
        that require one, in order.
        """
        self._check_unchanged()
        active = [side for side in self.sides if side.learns and any(g is not None for g in grads[side.index])]
        plan = SyncPlan([(side.encoder.modules, len(side.ranges)) for side in active], self.settings.sync)
        report = Reporter(self.settings.progress, "replay", active)
        leaf_grads = [[None] * len(side.leaves) for side in self.sides]
        once = self.settings.buffers == "once"
        with (
            preserve_random_state(self.devices),
            preserve_buffers(self.modules, self.state.buffers) if once else nullcontext(),
        ):
            for user, side in enumerate(active):
                chunks = side.second_pass()
                for index in range(len(side.ranges)):
                    chunk = next(chunks)
                    parts = tensors_of(chunk)  # before the encoder may write into the chunk
                    with plan.chunk(user, index) as reduces:
                        reached = self._replay_chunk(side, index, chunk, grads[side.index])
                    _check_reduced(reduces, reached, side, index)
                    _collect(leaf_grads[side.index], side, index, parts)
                    del chunk, parts
                    report.chunk_done()
        return [
            grad
            for side, of_side in zip(self.sides, leaf_grads, strict=True)
            for leaf, grad in zip(side.leaves, of_side, strict=True)
            if leaf.requires_grad
        ]

    def _replay_chunk(self, side: EncoderInput, index: int, chunk: Tree, grads: list[Tensor | None]) -> bool:
        """Encode with a graph, then run backward. Returns whether any output required a gradient."""
        with torch.enable_grad(), self.autocast.active():
            outputs = tensors_of(side.encoder(chunk))
        joined = self.joined[side.index]
        if len(outputs) != len(grads):
            raise _changed(side, index, f"{len(outputs)} tensors instead of {len(grads)}")
        tensors, parts = [], []
        for which, (output, grad) in enumerate(zip(outputs, grads, strict=True)):
            part = None if grad is None else joined.part(which, index, grad)
            if part is None or not output.requires_grad:
                continue
            if part.shape != output.shape:
                raise _changed(side, index, f"shape {tuple(output.shape)} instead of {tuple(part.shape)}")
            tensors.append(output)
            parts.append(part)
        if tensors:
            torch.autograd.backward(tensors, parts)
        self.autocast.clear_cache()
        return bool(tensors)

    def _check_unchanged(self) -> None:
        if self.input_versions != [version_of(tensor) for tensor in self._watched()]:
            raise GradientError(
                "the inputs were changed in place after they were encoded, so they cannot be encoded again. "
                "An encoder must not write into its input (use x = x / 255 instead of x /= 255), "
                "and a batch must not change until backward has finished"
            )
        self.state.check()


def _changed(side: EncoderInput, index: int, what: str) -> GradientError:
    return GradientError(
        f"encoder {side.index} returned {what} for chunk {index} in the second pass. "
        "An encoder must return the same result twice. Does it have state that the first pass changed?"
    )


def _check_reduced(reduces: bool, reached: bool, side: EncoderInput, index: int) -> None:
    if reduces and not reached:
        raise GradientError(
            f"gradients are reduced over ranks in chunk {index} of encoder {side.index}, but its output "
            "depends on no parameter, so the reduction would not run. If the encoder is frozen, pass "
            "Encoder(call, modules, frozen=True). If only this chunk is, use sync='every'"
        )


def _collect(grads: list[Any], side: EncoderInput, index: int, parts: list[Tensor]) -> None:
    """Add the gradients of this chunk's tensors to those of the whole input."""
    if not any(leaf.requires_grad for leaf in side.leaves):
        return
    for which, (leaf, part) in enumerate(zip(side.leaves, parts, strict=True)):
        if leaf.requires_grad and part.grad is not None:
            if grads[which] is None:
                grads[which] = torch.zeros_like(leaf)
            rows = side.ranges[index] if leaf.dim() > 0 else ...
            grads[which][rows] += part.grad


class Reporter:
    """Calls ``progress(chunk index, chunks in total, phase)`` after each chunk."""

    def __init__(self, progress: Progress | None, phase: Phase, sides: Sequence[EncoderInput]) -> None:
        self.progress, self.phase, self.done = progress, phase, 0
        self.total = sum(len(side.ranges) for side in sides)

    def chunk_done(self) -> None:
        """Report one more finished chunk."""
        if self.progress is not None:
            self.progress(self.done, self.total, self.phase)
        self.done += 1


class Replay(torch.autograd.Function):
    """Autograd node between the encoders and the loss. Its backward runs the second pass."""

    @staticmethod
    def forward(ctx: Any, encoding: Encoding, outputs: list[Tensor], *leaves: Tensor) -> tuple[Tensor, ...]:  # noqa: D102
        ctx.encoding = encoding
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(t for t in outputs if not _takes_gradient(t)))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # noqa: D102
        if torch.is_grad_enabled():
            raise GradientError(
                "a cached step has no second derivative (create_graph=True). Encode without the cache to get one"
            )
        if not torch.autograd._is_checkpoint_valid():
            raise GradientError(
                "the gradients of cached encoders are added to .grad. Call loss.backward() without inputs=, "
                "and not torch.autograd.grad"
            )
        encoding: Encoding = ctx.encoding
        rest = iter(grads)
        of_sides = [
            [next(rest) for _ in joined.ranges] if side.learns else []
            for side, joined in zip(encoding.sides, encoding.joined, strict=True)
        ]
        return (None, None, None, *encoding.second_pass(of_sides))


def _takes_gradient(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def encode(encoders: Any, inputs: Sequence[Any], settings: Settings) -> tuple[Tree, ...]:
    """The representations of every input, with a graph that saves no activations."""
    encoding = Encoding(encoders, inputs, settings)
    outputs = encoding.first_pass()
    learning = [tensor for side, own in zip(encoding.sides, outputs, strict=True) if side.learns for tensor in own]
    if torch.is_grad_enabled() and any(_takes_gradient(tensor) for tensor in learning):
        anchor = torch.empty(0, requires_grad=True)  # requires a gradient even if no input does
        leaves = [leaf for side in encoding.sides for leaf in side.leaves if leaf.requires_grad]
        joined = iter(cast(tuple[Tensor, ...], Replay.apply(encoding, learning, anchor, *leaves)))
        outputs = [
            [next(joined) for _ in own] if side.learns else own
            for side, own in zip(encoding.sides, outputs, strict=True)
        ]
    return tuple(joined.tree(own) for joined, own in zip(encoding.joined, outputs, strict=True))
