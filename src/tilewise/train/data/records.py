"""One pair, the protocol of sources, and the log of skipped records."""

from __future__ import annotations

import hashlib
import random
import threading
from collections import Counter
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from tilewise.errors import DataError


@dataclass(frozen=True)
class Record:
    """A pair before decoding.

    Args:
        image: the encoded file (PNG, JPEG, ...) as bytes.
        captions: one or more. Training draws one of them.
        id: pairs with the same id are not negatives of each other, if loss.mask_same_id is set.
    """

    image: bytes
    captions: tuple[str, ...]
    id: int


def id_of(value: object) -> int:
    """Return a 63-bit hash of an id of any type. It is the same on every rank and machine.

    >>> id_of("shoe-7") == id_of("shoe-7") != id_of("shoe-8")
    True
    """
    return (
        int.from_bytes(hashlib.blake2b(str(value).encode(errors="surrogatepass"), digest_size=8).digest(), "big") >> 1
    )


def is_of_macos(name: str) -> bool:
    """Return whether a file is one that macOS adds to folders and archives. It is no part of the data.

    >>> is_of_macos("._a.png"), is_of_macos(".DS_Store"), is_of_macos("a.png")
    (True, True, False)
    """
    return name.startswith("._") or name == ".DS_Store"


def plain_text(value: object) -> str:
    """Return a caption or path as valid text, without spaces around it. What is not valid becomes ``?`` or U+FFFD.

    >>> plain_text("caf\\udce9 "), plain_text(b"a cup"), plain_text(7), plain_text(None)
    ('caf?', 'a cup', '7', '')
    """
    if value is None:
        return ""
    text = value.decode("utf-8-sig", "replace") if isinstance(value, bytes) else str(value)
    return text.encode("utf-8", "replace").decode().strip()


def captions_of(value: object) -> list[str]:
    """Return the captions in a cell. A cell holds one caption or a list of captions; NaN is an empty cell.

    >>> captions_of(["a cup", " ", None]), captions_of("tea"), captions_of(float("nan"))
    (['a cup'], ['tea'], [])
    """
    cells = value if isinstance(value, list | tuple) else [value]
    if wrong := [cell for cell in cells if isinstance(cell, dict | list | tuple | set)]:
        raise RecordError(f"a caption must be text, got a {type(wrong[0]).__name__}")
    texts = (plain_text(cell) for cell in cells if cell == cell)  # NaN differs from itself
    return [text for text in texts if text]


class RecordError(DataError):
    """One record cannot be used. The run continues without it."""


class Source(Protocol):
    """Pairs that can be read one by one. They are grouped in windows, and each window is shuffled as a whole.

    The window of a table is the whole table. The window of a set of shards is a few of them. Keys are 64-bit numbers
    whose meaning is private to the source.
    """

    def __len__(self) -> int:
        """Return the number of pairs in one epoch."""

    def window_count(self) -> int:
        """Return the number of windows in one epoch."""

    def window_keys(self, seed: int, epoch: int, window: int) -> Tensor:
        """Return the keys (m,) of one window, not shuffled."""

    def rows(self, keys: Tensor, draw: Draw, skips: SkipLog) -> Rows:
        """Return images, captions and ids for these keys. Records that cannot be used are left out and logged."""


@dataclass
class Rows:
    """Usable rows of a batch: uint8 images (n, channels, size, size), n captions, ids (n,), and the number left out."""

    images: Tensor
    texts: list[str]
    ids: Tensor
    left_out: int = 0


@dataclass(frozen=True)
class Draw:
    """The random choices of a batch. They do not depend on the rank, the thread or the order in which rows are read.

    Args:
        seed: seed of the run.
        epoch: epoch, counted from 0.
        step: step, counted from 0 over the whole run.
        first_row: place in the global batch of the first row that this rank reads.
        rows: size of the global batch.
        unwanted: is set when the batch is no longer needed.
    """

    seed: int
    epoch: int
    step: int
    first_row: int
    rows: int
    unwanted: threading.Event | None = None

    def for_key(self, key: int) -> random.Random:
        """Return a random generator for one record in this epoch."""
        return random.Random(f"{self.seed}/{self.epoch}/{key}")

    def for_batch(self, purpose: str) -> int:
        """Return a seed for random numbers of the whole global batch."""
        return random.Random(f"{self.seed}/{self.step}/{purpose}").getrandbits(62)


class SkipLog:
    """Counts skipped records by reason and keeps a few examples."""

    def __init__(self, counts: dict[str, int] | None = None, examples: int = 20) -> None:
        self.counts: Counter[str] = Counter(counts or {})
        self.examples: list[str] = []
        self.notices: list[str] = []  # sentences for the user; at most `examples` of them
        self._seen: set[str] = set()
        self._limit = examples
        self._lock = threading.Lock()

    def add(self, reason: str, what: str) -> None:
        """Record that `what` was skipped."""
        with self._lock:
            self.counts[reason] += 1
            if len(self.examples) < self._limit:
                self.examples.append(f"{plain_text(what)}: {reason}")

    def notice(self, sentence: str) -> None:
        """Keep a sentence that the user must see, for example that a shard ended early."""
        with self._lock:
            if len(self.notices) < self._limit:
                self.notices.append(plain_text(sentence))

    def take_notices(self) -> list[str]:
        """Return the sentences that were kept, and forget them."""
        with self._lock:
            taken, self.notices = self.notices, []
            return taken

    def first_time(self, what: str) -> bool:
        """Return whether `what` is seen for the first time, so that a shard that is read again is not counted again."""
        with self._lock:
            new = what not in self._seen
            self._seen.add(what)
            return new

    @property
    def total(self) -> int:
        """Number of skipped records; a damaged shard counts as one."""
        return sum(self.counts.values())

    def summary(self) -> str:
        """Return the counts as one line.

        >>> log = SkipLog()
        >>> log.add("no caption", "a.png"); log.add("no caption", "b.png")
        >>> log.summary()
        '2 skipped (2 no caption)'
        """
        return f"{self.total} skipped ({', '.join(f'{n} {reason}' for reason, n in self.counts.most_common())})"

    def state(self) -> dict[str, Any]:
        """Plain values for a checkpoint."""
        with self._lock:
            return {"counts": dict(self.counts), "once": sorted(self._seen)}

    def restore(self, state: dict[str, Any]) -> None:
        """Replace the counts by those of a checkpoint."""
        with self._lock:
            self.counts, self._seen = Counter(state["counts"]), set(state["once"])
