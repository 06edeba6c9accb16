"""All thresholds of size of the choice of a strategy (`route`), and of dropping ignored rows (`rows`)."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The thresholds. Times are of an H200, unless noted.

    Args:
        small, small_cpu: the most scores that are computed all at once, on a GPU and on a CPU.
        small_operators: up to so many scores, PyTorch's operators compute statistics without a program on a GPU.
        smallest_block: one pass on a CPU: with fewer rows in a block its products are thin, and computing the scores
            twice is faster.
        worth_one_pass: one pass of a softmax on a GPU: below so many multiply-adds of a product the host takes longer
            than the device.
        smallest_gpu_block, smallest_of_many: one pass on a GPU in several blocks of rows: each block reads and writes a
            float32 sum of the column gradients. That saves time if a block has so many rows. With more than ``many``
            rows and columns, two passes need such a sum too, and smaller blocks of one pass are faster: 1.09 instead
            of 1.21 of torch.compile's time (32,768 x 2,048 x 128,256).
        narrowest_in_blocks: with fewer features a block's products are so short that nothing is gained. With 16,384 to
            65,536 rows and columns: 0.96 to 1.08 of the time of two passes at width 256 and below, 0.92 to 0.95 at 384,
            0.89 at 512.
        worth_filtering: the filter on a GPU: below so many multiply-adds its launches cost more than it saves.
        worth_waiting: dropping ignored rows on a GPU: multiply-adds of one product from which the host waits for their
            number; forward and backward then take 3 ms.
        ring_head: a classifier that is sharded over ranks with different rows: bytes of the whole classifier from which
            its shards move around a ring. A smaller one is gathered once per pass, which sends the same bytes with
            fewer launches, and takes memory for all of it and of its gradient.
        ring_columns: the most columns of several ranks that form one block of a ring. Modelled, not measured: with so
            many, the products of a block take as long as its launches or fill the workspace.
    """

    small: int = 2**27
    small_cpu: int = 2**21
    small_operators: int = 2**24
    smallest_block: int = 64
    worth_one_pass: int = 2**34
    smallest_gpu_block: int = 2048
    smallest_of_many: int = 768
    many: int = 16384
    narrowest_in_blocks: int = 384
    worth_filtering: int = 2**40
    worth_waiting: int = 2**38
    ring_head: int = 2**30
    ring_columns: int = 8192


_now = Limits()
_forgetters: list[Callable[[], None]] = []


def current() -> Limits:
    """The limits that calls use now."""
    return _now


def forget_with_limits(clear: Callable[[], None]) -> None:
    """Call ``clear``, which empties a cache of what depends on the limits, whenever they change."""
    _forgetters.append(clear)


def _set(limits: Limits) -> None:
    global _now
    _now = limits
    for clear in _forgetters:
        clear()


@contextlib.contextmanager
def changed(**limits: Any) -> Iterator[None]:
    """Other limits for the calls inside, of all threads: for tests, and for measuring where a threshold belongs."""
    before = _now
    _set(dataclasses.replace(before, **limits))
    try:
        yield
    finally:
        _set(before)
