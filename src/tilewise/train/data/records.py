"""One pair, the sources that give pairs, and the log of those that could not be used."""

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
        captions: one or several; training draws one of them.
        id: pairs with the same id show the same thing.
    """

    image: bytes
    captions: tuple[str, ...]
    id: int


def id_of(value: object) -> int:
    """A 63-bit number for an id of any kind, the same on every rank and machine.

    >>> id_of("shoe-7") == id_of("shoe-7") != id_of("shoe-8")
    True
    """
    return (
        int.from_bytes(hashlib.blake2b(str(value).encode(errors="surrogatepass"), digest_size=8).digest(), "big") >> 1
    )


def plain_text(value: object) -> str:
    """A caption or a path as text that tokenizers and terminals take: half a character becomes a question mark.

    >>> plain_text("caf\\udce9 "), plain_text(b"a cup"), plain_text(7), plain_text(None)
    ('caf?', 'a cup', '7', '')
    """
    if value is None:
        return ""
    text = value.decode("utf-8-sig", "replace") if isinstance(value, bytes) else str(value)
    return text.encode("utf-8", "replace").decode().strip()


def captions_of(value: object) -> list[str]:
    """The captions in a cell, which holds one or a list of them.

    >>> captions_of(["a cup", " ", None]), captions_of("tea"), captions_of([])
    (['a cup'], ['tea'], [])
    """
    texts = map(plain_text, value if isinstance(value, list) else [value])
    return [text for text in texts if text]


class RecordError(DataError):
    """This one record cannot be used; the run goes on without it."""


class Source(Protocol):
    """Pairs that can be read one by one, in windows that are shuffled as a whole.

    A window is what fits in the hands at once: the whole set of a table, a few shards of a large one.
    Keys are 64-bit numbers that mean something to the source alone.
    """

    def __len__(self) -> int:
        """Pairs in one epoch."""

    def window_count(self) -> int:
        """Windows in one epoch."""

    def window_keys(self, seed: int, epoch: int, window: int) -> Tensor:
        """Keys (m,) of one window, in the source's own order."""

    def rows(self, keys: Tensor, draw: Draw, skips: SkipLog) -> Rows:
        """Images, captions and ids for these keys; what cannot be used is left out and logged."""


@dataclass
class Rows:
    """Usable rows of a batch: uint8 images (n, channels, size, size), n captions, ids (n,), rows left out."""

    images: Tensor
    texts: list[str]
    ids: Tensor
    left_out: int = 0


@dataclass(frozen=True)
class Draw:
    """Where the random choices of a batch come from: the same whoever makes them, and in whatever order.

    Args:
        seed: of the run.
        epoch: counted from 0.
        step: counted from 0 over the whole run.
        first_row: place of the first of these keys in the global batch.
        rows: size of the global batch.
        unwanted: set when nobody waits for the batch any longer.
    """

    seed: int
    epoch: int
    step: int
    first_row: int
    rows: int
    unwanted: threading.Event | None = None

    def for_key(self, key: int) -> random.Random:
        """Random numbers for one record in this epoch."""
        return random.Random(f"{self.seed}/{self.epoch}/{key}")

    def for_batch(self, purpose: str) -> int:
        """A seed for random numbers of the whole global batch."""
        return random.Random(f"{self.seed}/{self.step}/{purpose}").getrandbits(62)


class SkipLog:
    """Counts what was skipped, by reason, and keeps a few examples."""

    def __init__(self, counts: dict[str, int] | None = None, examples: int = 20) -> None:
        self.counts: Counter[str] = Counter(counts or {})
        self.examples: list[str] = []
        self.notices: list[str] = []  # sentences for the user; at most `examples` of them
        self._once: set[str] = set()
        self._most = examples
        self._lock = threading.Lock()

    def add(self, reason: str, what: str) -> None:
        """Record that `what` was skipped."""
        with self._lock:
            self.counts[reason] += 1
            if len(self.examples) < self._most:
                self.examples.append(f"{plain_text(what)}: {reason}")

    def notice(self, sentence: str) -> None:
        """Keep a sentence that the user must see, for example that a shard ended early."""
        with self._lock:
            if len(self.notices) < self._most:
                self.notices.append(plain_text(sentence))

    def first_time(self, what: str) -> bool:
        """Whether `what` (a shard, say) is looked at for the first time, so that its faults count once."""
        with self._lock:
            new = what not in self._once
            self._once.add(what)
            return new

    @property
    def total(self) -> int:
        """How many were skipped."""
        return sum(self.counts.values())

    def summary(self) -> str:
        """One line for people.

        >>> log = SkipLog()
        >>> log.add("no caption", "a.png"); log.add("no caption", "b.png")
        >>> log.summary()
        '2 skipped (2 no caption)'
        """
        return f"{self.total} skipped ({', '.join(f'{n} {reason}' for reason, n in self.counts.most_common())})"

    def state(self) -> dict[str, Any]:
        """Plain values for a checkpoint."""
        with self._lock:
            return {"counts": dict(self.counts), "once": sorted(self._once)}

    def restore(self, state: dict[str, Any]) -> None:
        """Be as `state` says, whatever was counted since."""
        with self._lock:
            self.counts, self._once = Counter(state["counts"]), set(state["once"])
