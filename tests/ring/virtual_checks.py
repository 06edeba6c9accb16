"""Checks of the ring with virtual ranks, for any device: the CPU tests and the GPU tests run them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tests.compare import assert_close
from tests.ring.cases import CASES, Tensors, cut, joined, loss_and_gradients, make_tensors
from tests.ring.virtual import run_virtual

import tilewise as tw


def over_virtual_ranks(
    name: str, tensors: Tensors, rows: Sequence[int], negatives: Sequence[int], **how: Any
) -> Tensors:
    """Run a case over virtual ranks and combine the results as DDP does."""

    def work(group: Any) -> Tensors:
        mine = cut(tensors, group.rank(), rows, negatives)
        return loss_and_gradients(name, mine, group=group, **how)

    return joined(run_virtual(len(rows), work))


def check_losses(
    device: str,
    dtype: torch.dtype,
    tolerance: float,
    *,
    rows: Sequence[int],
    negatives: Sequence[int],
    names: Sequence[str] = tuple(CASES),
    **how: Any,
) -> None:
    """Every loss over virtual ranks equals one process on the same device."""
    tensors = make_tensors(sum(rows), sum(negatives), dtype, device)
    for name in names:
        want = loss_and_gradients(name, tensors, **how)
        got = over_virtual_ranks(name, tensors, rows, negatives, **how)
        assert got.keys() == want.keys()
        for key, value in want.items():
            assert_close(got[key], value, tolerance, f"{name} {key} on {device} over {list(rows)}")


def check_two_steps(device: str, world: int = 3, rows: int = 64) -> None:
    """Two steps without a device synchronization between them: buffers must not be reused too early."""
    tensors = make_tensors(world * rows, 4, torch.float32, device)
    shards = [rows] * world

    def work(group: Any) -> list[Tensors]:
        mine = cut(tensors, group.rank(), shards, [4] + [0] * (world - 1))
        return [loss_and_gradients("clip", mine, group=group) for _ in range(3)]

    found = run_virtual(world, work)
    first, *others = (joined([part[step] for part in found]) for step in range(3))
    want = loss_and_gradients("clip", tensors)
    for key, value in want.items():
        assert_close(first[key], value, 1e-5, key)
        assert all(torch.equal(other[key], first[key]) for other in others)


def check_head(device: str, dtype: torch.dtype, tolerance: float, slices: Sequence[int] = (40, 0, 33)) -> None:
    """A vocabulary-parallel classifier equals the whole one."""
    random = torch.Generator().manual_seed(2)
    classes = sum(slices)
    hidden = torch.randn(50, 32, generator=random).to(device, dtype)
    head = torch.randn(classes, 32, generator=random).to(device, dtype)
    target = torch.randint(classes, (50,), generator=random).to(device)
    target[7] = -100

    def call(own: slice, group: Any) -> Tensors:
        leaves = [hidden.clone().requires_grad_(), head[own].clone().requires_grad_()]
        loss = tw.linear_cross_entropy(*leaves, target, label_smoothing=0.1, group=group)
        grads = torch.autograd.grad(loss, leaves)
        return {"loss": loss.detach(), "hidden": grads[0], "head": grads[1]}

    want = call(slice(None), None)
    parts = run_virtual(
        len(slices), lambda group: call(slice(sum(slices[: group.rank()]), sum(slices[: group.rank() + 1])), group)
    )
    for part in parts:
        assert_close(part["loss"], want["loss"], tolerance, "loss")
        assert_close(part["hidden"], want["hidden"], tolerance, "hidden")
    assert_close(torch.cat([part["head"] for part in parts]), want["head"], tolerance, "head")
