"""The ring as arithmetic: who holds what at which step, and how many bytes move. No process group needed.

Blocks of columns move one rank up per step and are home again after ``world`` hops. Axes: m columns of one rank, d
features, W ranks (``world``).
"""

from __future__ import annotations


def held_block(rank: int, step: int, world: int) -> int:
    """The block that ``rank`` works on at ``step``.

    >>> [held_block(0, step, 4) for step in range(4)]
    [0, 3, 2, 1]
    """
    return (rank - step) % world


def next_rank(rank: int, world: int) -> int:
    """Where a rank sends to."""
    return (rank + 1) % world


def previous_rank(rank: int, world: int) -> int:
    """Where a rank receives from."""
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


def cargo_hops(world: int) -> int:
    """Hops of what a block carries and nobody changes: its last host does not pass it on."""
    return world - 1


def credit_hops(world: int) -> int:
    """Hops of what every host adds to (column statistics, gradients): it comes home, if it ever left."""
    return world if world > 1 else 0


def forward_bytes(world: int, cols: int, width: int, feature_bytes: int, *, vectors: int = 0, credits: int = 0) -> int:
    """Bytes that a rank sends in forward, with even shards.

    ``(W - 1) m (d * feature_bytes + vectors) + W m credits``, where ``vectors`` and ``credits`` are the bytes per
    column of keys, zeros and biases, and of the running column statistics.

    >>> forward_bytes(4, 1000, 512, 2) == 3 * 1000 * 512 * 2
    True
    """
    return cols * (cargo_hops(world) * (width * feature_bytes + vectors) + credit_hops(world) * credits)


def backward_bytes(
    world: int, cols: int, width: int, feature_bytes: int, gradient_bytes: int, *, vectors: int = 0
) -> int:
    """Bytes that a rank sends in backward, with even shards: ``(W - 1) m (d f + vectors) + W m d g``.

    >>> backward_bytes(4, 1000, 512, 2, 4) == 3 * 1000 * 512 * 2 + 4 * 1000 * 512 * 4
    True
    """
    return cols * (cargo_hops(world) * (width * feature_bytes + vectors) + credit_hops(world) * width * gradient_bytes)
