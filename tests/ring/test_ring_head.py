"""A classifier whose shards move around a ring: exact in chunks of columns, and its memory. Virtual ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.compare import assert_close
from tests.ring.virtual import run_virtual
from tests.ring.wrapped import Allocated, wrapped

import tilewise as tw
from tilewise.ops.distributed.collectives import RowsGroup

MIB = 2**20


class Nothing:
    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...


def head_case(
    sizes: list[int],
    rows: list[int],
    width: int,
    dtype: torch.dtype,
    make: Any = Nothing,
    *,
    device: str = "cpu",
    kind: torch.dtype | None = None,
    **how: Any,
) -> Callable[..., tuple[Any, ...]]:
    """`linear_cross_entropy` of a rank over shards of the classes that move around a ring, or of one process.

    Values are rounded to ``dtype``, and then get the type ``kind``, if it is given.
    """
    random = torch.Generator().manual_seed(3)
    hidden = torch.randn(sum(rows), width, generator=random).to(dtype)
    head, bias = (torch.randn(sum(sizes), *more, generator=random).to(dtype) / 20 for more in ([width], []))
    target = torch.randint(sum(sizes), (sum(rows),), generator=random)
    target[: rows[0]] = -100  # the first rank has no valid token

    def step(rank: int | None = None, group: Any = None) -> tuple[Any, ...]:
        own, of = (
            slice(None) if rank is None else slice(sum(parts[:rank]), sum(parts[: rank + 1])) for parts in (rows, sizes)
        )
        leaves = [
            value.to(device, kind or dtype, copy=True).requires_grad_() for value in (hidden[own], head[of], bias[of])
        ]
        with make() as measured:
            loss = tw.linear_cross_entropy(
                leaves[0], leaves[1], target[own].to(device), linear_bias=leaves[2], reduction="sum", group=group, **how
            )
            return measured, loss.detach(), *torch.autograd.grad(loss, leaves)

    return step


def ring_head(sizes: list[int], rows: list[int], *args: Any, **how: Any) -> Any:
    """The results of all virtual ranks with their hops, and of one process."""
    step = head_case(sizes, rows, *args, **how)

    def work(group: Any) -> Any:
        with wrapped(group) as (name, counted):
            return counted.hops, *step(group.rank(), RowsGroup(name.group_name))

    return run_virtual(len(rows), work), step()


@pytest.mark.parametrize(
    "dtype, travelling, tolerance",
    [(torch.float64, "float32", 1e-12), (torch.bfloat16, "float32", 6e-3), (torch.bfloat16, "features", 9e-3)],
)
def test_gradients_in_chunks_of_columns_are_exact(dtype, travelling, tolerance):
    """The smallest chunk has 128 columns: blocks of no chunk, of one and a part, of two whole ones, and of three."""
    options = tw.TileOptions(workspace_mib=1, ring_gradients=travelling)
    parts, (_, loss, *want) = ring_head([0, 130, 256, 300], [3, 4, 0, 9], 1024, dtype, Nothing, options=options)
    assert_close(sum(part[2] for part in parts), loss, tolerance, "loss")
    for k, name in enumerate(("hidden", "head", "bias")):
        assert_close(torch.cat([part[3 + k] for part in parts]), want[k], tolerance, name)


def test_the_memory_of_a_ring_is_two_shards_and_the_workspace():
    """The peak with 8 ranks: 2/8 of the classifier, 2/8 of its float32 gradient, the workspace, and rows."""
    world, cols, width, rows = 8, 384, 512, 4
    parts, _ = ring_head(
        [cols] * world, [rows] * world, width, torch.float32, Allocated, options=tw.TileOptions(workspace_mib=1)
    )
    shard = 4 * cols * width
    for hops, measured, *_ in parts:
        assert measured.largest <= shard  # never a tensor of all classes
        assert 4 * shard < measured.peak <= 2 * (shard + shard) + MIB / 2 + 40 * rows * width * 4, measured.peak / shard
        # Of whole shards: forward sends W - 1, backward W - 1 of the classifier, and W of its gradient, in chunks.
        assert sum(hops) // shard == 3 * world - 2
