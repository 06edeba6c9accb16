"""Batches in order, prepared ahead on a thread. Each has the position from which the run continues."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tilewise.errors import ConfigError, DataError
from tilewise.train.data.order import Order, Position
from tilewise.train.data.records import Draw, SkipLog, Source
from tilewise.train.data.workers import POLL_S

Tokens = dict[str, Tensor]
Tokenizer = Callable[[list[str]], Tokens]


@dataclass(frozen=True)
class Batch:
    """This rank's rows of a global batch.

    Args:
        images: uint8 (n, channels, size, size).
        tokens: tokens of the captions. Every tensor has n rows.
        ids: int64 (n,). Pairs that show the same thing have equal ids.
        skips: the state of this rank's `SkipLog` when the batch was made. The log itself may already contain records of
            later batches.
        after: the position of the next batch.
        epoch: the epoch of this batch.
    """

    images: Tensor
    tokens: Tokens
    ids: Tensor
    skips: dict[str, Any]
    after: Position
    epoch: int

    @property
    def bytes(self) -> int:
        """Size of the batch: M_data in equation 10 of the papers."""
        return sum(t.numel() * t.element_size() for t in (self.images, self.ids, *self.tokens.values()))


class BatchStream:
    """Batches from a position on.

    The rows of a global batch do not depend on the number of ranks: rank r of W takes the r-th of W equal parts. A
        record
    that cannot be used makes its batch one row shorter. The losses accept parts of different sizes.

    Args:
        source: the source of pairs.
        tokenizer: captions to tensors.
        seed: seed of order and augmentation.
        batch_size: rows over all ranks.
        rank, world: rank of this process, and number of ranks.
        skips: log of skipped records.
        prefetch: number of batches prepared ahead. 0: each batch is prepared when it is needed.
    """

    def __init__(
        self,
        source: Source,
        tokenizer: Tokenizer,
        *,
        seed: int,
        batch_size: int,
        rank: int,
        world: int,
        skips: SkipLog,
        prefetch: int = 1,
    ) -> None:
        self.source, self.tokenizer, self.skips = source, tokenizer, skips
        self.order = Order(source, seed)
        self.seed, self.batch_size, self.rank, self.world, self.prefetch = seed, batch_size, rank, world, prefetch
        if batch_size < world:
            raise ConfigError(
                f"loop.batch_size counts the pairs of all ranks, and each rank needs at least one: at least {world}, "
                f"got {batch_size}"
            )
        if len(source) < batch_size:
            raise DataError(
                f"a batch of {batch_size} pairs needs at least as many pairs, the data has {len(source)}. "
                "Lower loop.batch_size, or give more data"
            )

    @property
    def steps_per_epoch(self) -> int:
        """Number of full batches in one epoch."""
        return len(self.source) // self.batch_size

    def make(self, position: Position, step: int, unwanted: threading.Event | None = None) -> Batch:
        """Make the batch of a step from a position on. Raises ``CancelledError`` once `unwanted` is set."""
        keys, epoch, after = self.order.take(position, self.batch_size)
        first = self.rank * self.batch_size // self.world
        last = (self.rank + 1) * self.batch_size // self.world
        draw = Draw(self.seed, epoch, step, first, self.batch_size, unwanted)
        rows = self.source.rows(keys[first:last], draw, self.skips)
        if not len(rows.ids):
            raise DataError(
                f"none of the {last - first} records of step {step + 1} can be used: {self.skips.summary()}. "
                f"First: {self.skips.examples[0]}"
            )
        return Batch(rows.images, self.tokenizer(rows.texts), rows.ids, self.skips.state(), after, epoch)

    def batches(
        self, position: Position, step: int, last_step: int, give_up: Callable[[], bool] | None = None
    ) -> Iterator[Batch]:
        """Yield the batches of steps ``step .. last_step - 1``. They are made on a thread of their own.

        Args:
            position: where the first batch starts.
            step: the first step.
            last_step: the step after the last one.
            give_up: is called while the next batch is not ready. Once it returns true, the iteration ends, even if a
                read blocks for ever.
        """
        ready: queue.Queue[Batch | BaseException] = queue.Queue(max(1, self.prefetch))
        wanted = threading.Semaphore(0)
        stopped = threading.Event()

        def fill(position: Position) -> None:
            try:
                for number in range(step, last_step):
                    if not self.prefetch:
                        wanted.acquire()  # nothing is prepared ahead
                    batch = self.make(position, number, stopped)
                    position = batch.after
                    if not _put(ready, batch, stopped):
                        return
            except BaseException as error:  # passed to the main thread, which raises it
                _put(ready, error, stopped)

        thread = threading.Thread(target=fill, args=(position,), daemon=True, name="tilewise-batches")
        thread.start()
        try:
            for _ in range(step, last_step):
                wanted.release()
                item = _get(ready, give_up)
                if item is None:
                    return
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            stopped.set()
            wanted.release()
            while thread.is_alive():
                thread.join(POLL_S)
                if give_up is not None and give_up():  # a read blocks; the thread is a daemon
                    break


def _get(ready: queue.Queue[Batch | BaseException], give_up: Callable[[], bool] | None) -> Batch | BaseException | None:
    """Return the next item, or None once `give_up` returns true."""
    while True:
        try:
            return ready.get(timeout=POLL_S)
        except queue.Empty:
            if give_up is not None and give_up():
                return None


def _put(ready: queue.Queue[Batch | BaseException], item: Batch | BaseException, stopped: threading.Event) -> bool:
    while not stopped.is_set():
        try:
            ready.put(item, timeout=POLL_S)
            return True
        except queue.Full:
            continue
    return False
