"""Measure the memory of one step of a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tilewise.train.config import RunConfig
from tilewise.train.data import Batch
from tilewise.train.memory import (
    CudaMemory,
    MemoryUse,
    activation_bytes,
    dense_loss_bytes,
    process_peak_bytes,
    tiled_loss_bytes,
    weight_bytes,
)
from tilewise.train.objective import Objective
from tilewise.train.run_state import RunState


@contextmanager
def memory_counted(state: RunState, objective: Objective, config: RunConfig, batch: Batch) -> Iterator[None]:
    """Wrap a step. Fills ``state.memory`` once, in the second step, because the optimizer has no state before."""
    if state.memory is not None or state.step == 0:
        yield
        return
    rows, cols, device = len(batch.ids), config.loop.batch_size, objective.world.device
    if device.type == "cuda":
        counter = CudaMemory(device)
        objective.watch = counter.watch
        counter.start()
        yield
        objective.watch = None
        data = 0 if config.loss.offload else batch.bytes
        state.memory = counter.finish(data, rows, cols, _width(state, batch, device))
        return
    yield
    state.memory = added_up(state, config, batch, rows, cols, _width(state, batch, device))


def added_up(state: RunState, config: RunConfig, batch: Batch, rows: int, cols: int, width: int) -> MemoryUse:
    """Return the parts of equation 10 as sums of tensor sizes, for the CPU."""
    chunk = slice(0, config.loop.chunk_size)
    tokens = {name: value[chunk] for name, value in batch.tokens.items()}
    activations = max(
        activation_bytes(lambda: state.model.image(batch.images[chunk])),
        activation_bytes(lambda: state.model.text(**tokens)),
    )
    backbone = weight_bytes(state.model, state.optimizer) + activations
    dense = dense_loss_bytes(rows, cols, width)
    workspace = min(config.loss.workspace_mib * 2**20, 4 * rows * cols)
    own = tiled_loss_bytes(rows, cols, width, workspace) if config.loss.name == "tilewise" else dense
    return MemoryUse(batch.bytes, own, backbone, dense, measured=False)


@torch.no_grad()
def _width(state: RunState, batch: Batch, device: torch.device) -> int:
    one = {name: value[:1].to(device) for name, value in batch.tokens.items()}
    return int(state.model.text(**one).shape[-1])


def memory_now(device: torch.device) -> int:
    """Return the peak memory of the device so far. On the CPU it is that of the process."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else process_peak_bytes()
