"""Arithmetic of the ring: which rank holds which block at which step, and how many bytes are sent.

Blocks of columns move to the next rank after each step and return to their owner after ``world`` hops. Nothing here
needs a process group.

Axes: m columns of one rank, d features, W ranks (``world``).
"""

from __future__ import annotations


def held_block(rank: int, step: int, world: int) -> int:
    """Owner of the block that ``rank`` computes with at ``step``.

    >>> [held_block(0, step, 4) for step in range(4)]
    [0, 3, 2, 1]
    """
    return (rank - step) % world


def next_rank(rank: int, world: int) -> int:
    """Rank that this rank sends to."""
    return (rank + 1) % world


def previous_rank(rank: int, world: int) -> int:
    """Rank that this rank receives from."""
    return (rank - 1) % world


def starts(sizes: list[int]) -> list[int]:
    """Global index of the first element of each shard.

    >>> starts([3, 0, 5])
    [0, 3, 3]
    """
    found, total = [], 0
    for size in sizes:
        found.append(total)
        total += size
    return found


def payload_hops(world: int) -> int:
    """Hops of a block's read-only tensors. The last rank does not send them on."""
    return world - 1


def accumulator_hops(world: int) -> int:
    """Hops of the tensors that every rank adds to (column statistics, gradients). They return to the owner."""
    return world if world > 1 else 0


def forward_bytes(
    world: int,
    cols: int,
    width: int,
    feature_bytes: int,
    *,
    vectors: int = 0,
    accumulators: int = 0,
) -> int:
    """Bytes that a rank sends in forward, with equal shards.

    ``(W - 1) m (d * feature_bytes + vectors) + W m accumulators``. ``vectors`` counts the bytes per column of ids,
    shifts and biases. ``accumulators`` counts the bytes per column of the running column statistics.

    >>> forward_bytes(4, 1000, 512, 2) == 3 * 1000 * 512 * 2
    True
    """
    accumulated = accumulator_hops(world) * accumulators
    return cols * (payload_hops(world) * (width * feature_bytes + vectors) + accumulated)


def backward_bytes(
    world: int, cols: int, width: int, feature_bytes: int, gradient_bytes: int, *, vectors: int = 0
) -> int:
    """Bytes that a rank sends in backward, with equal shards: ``(W - 1) m (d f + vectors) + W m d g``.

    >>> backward_bytes(4, 1000, 512, 2, 4) == 3 * 1000 * 512 * 2 + 4 * 1000 * 512 * 4
    True
    """
    accumulated = accumulator_hops(world) * width * gradient_bytes
    return cols * (payload_hops(world) * (width * feature_bytes + vectors) + accumulated)
