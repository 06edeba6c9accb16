"""The order in which `train_step` measures steps."""

from __future__ import annotations

from collections.abc import Sequence

METHODS = ("dense", "tilewise", "local", "tilewise+offload")  # ours is between the baselines
BASELINES = ("dense", "local")


def schedule(batches: Sequence[int], methods: Sequence[str]) -> list[tuple[int, str]]:
    """Whole steps, most important first: the smallest batch forth and back, the next, then the largest ones.

    A step that does not fit the time is left out; a smaller one after it may still fit.

    >>> schedule([8, 32], ["dense", "tilewise"])
    [(8, 'dense'), (8, 'tilewise'), (8, 'tilewise'), (8, 'dense'), (32, 'dense'), (32, 'tilewise')]
    >>> schedule([8, 32, 64, 128], ["dense", "tilewise"])[6:]
    [(128, 'tilewise'), (64, 'tilewise'), (128, 'dense'), (64, 'dense')]
    >>> schedule([8, 32, 64, 128], ["tilewise", "tilewise+offload"])[6:]
    [(128, 'tilewise'), (128, 'tilewise+offload'), (64, 'tilewise+offload'), (64, 'tilewise')]
    """
    first, *rest = sorted(batches)
    ours = [method for method in methods if method not in BASELINES]
    turns = [(first, method) for method in [*methods, *reversed(methods)]]
    turns += [(batch, method) for batch in rest[:1] for method in methods]
    theirs = [method for method in methods if method in BASELINES]
    for some in (ours, theirs):
        for batch in reversed(rest[1:]):
            turns += [(batch, method) for method in some]
            some = some[::-1]  # the last method was the least likely to fit
    return turns


def rounds(batches: Sequence[int], methods: Sequence[str], turns: int) -> list[tuple[int, str]]:
    """Every step `turns` times, forth and back.

    >>> rounds([8], ["dense", "tilewise"], 3)
    [(8, 'dense'), (8, 'tilewise'), (8, 'tilewise'), (8, 'dense'), (8, 'dense'), (8, 'tilewise')]
    """
    orders = [methods if turn % 2 == 0 else methods[::-1] for turn in range(turns)]
    return [(batch, method) for batch in batches for order in orders for method in order]
