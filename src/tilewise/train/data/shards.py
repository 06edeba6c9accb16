"""WebDataset tar shards (the LAION layout), read by seeking.

For each name, a shard has an image file and its caption: ``000012.jpg`` and ``000012.txt``, or, if that is missing or
empty, ``caption`` in ``000012.json``. The headers of a shard are read once, when the shard is first used. Every rank
then reads only the bytes of its own rows, and a run continues in the middle of an epoch without reading earlier
records.
"""

from __future__ import annotations

import glob
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tilewise.errors import DataError
from tilewise.train.data.files import Preparation, prepare_rows
from tilewise.train.data.order import permutation
from tilewise.train.data.records import Draw, Record, RecordError, Rows, SkipLog, captions_of, id_of, is_of_macos
from tilewise.train.data.table import IMAGE_SUFFIXES
from tilewise.train.data.tar import Member, TarDamage, TarEndedEarly, scan_tar
from tilewise.train.data.workers import Workers
from tilewise.train.untrusted import IMAGE_LIMIT, TEXT_LIMIT, parse_json

MOST_SHARDS = 10**6  # that one pattern names
RECORDS_PER_SHARD = 2**32  # at most; the key of a pair is shard * RECORDS_PER_SHARD + record


@dataclass(frozen=True)
class Entry:
    """One pair inside a shard."""

    name: str  # path in the shard, without the suffix
    image: Member
    text: Member | None
    json: Member | None


def expand_shards(pattern: str) -> list[str]:
    """Expand a pattern with ``{00000..00041}``, ``{a,b}`` and ``*`` to paths. ``::`` joins several patterns.

    A path that several patterns match is returned once. A pattern with ``*`` that matches nothing is returned as it is.

    >>> expand_shards("x-{08..10}.tar")
    ['x-08.tar', 'x-09.tar', 'x-10.tar']
    """
    paths: list[str] = []
    for part in pattern.split("::"):
        for path in _braces(part):
            plain = os.path.exists(path) or not any(c in path for c in "*?[")
            paths += [path] if plain else sorted(glob.glob(path)) or [path]
    return list(dict.fromkeys(paths))


def _braces(text: str) -> list[str]:
    if re.search(r"\{[^{}]*\{", text):
        raise DataError(f"braces in data.path cannot be nested, got {text}. Join several patterns with ::")
    found = re.search(r"\{([^{}]*)\}", text)
    if not found:
        return [text]
    span = re.fullmatch(r"(\d+)\.\.(\d+)", found[1])
    options: Sequence[str] | range = found[1].split(",")
    if span:
        width = len(span[1])
        first, last = (int(end) if len(end) <= 9 else 10**9 for end in span.groups())
        options = range(first, last + 1)
    rests = _braces(text[found.end() :])
    if len(options) * len(rests) > MOST_SHARDS:
        raise DataError(f"the braces in data.path name more than {MOST_SHARDS:,} shards, got {text}. Name fewer")
    names = (str(option).zfill(width) for option in options) if span else options
    return [f"{text[: found.start()]}{name}{rest}" for name in names for rest in rests]


def index_shard(path: str, skips: SkipLog) -> list[Entry]:
    """Return the pairs of a shard from its headers. Damage and incomplete pairs are logged and never raise."""
    files: OrderedDict[str, dict[str, Member]] = OrderedDict()
    damage = reason = ""
    try:
        with open(path, "rb") as file:
            for member in scan_tar(file.fileno(), os.fstat(file.fileno()).st_size, _logged(path, skips)):
                folder, _, name = member.name.rpartition("/")
                if is_of_macos(name):
                    continue
                stem, _, suffix = name.partition(".")
                files.setdefault(f"{folder}/{stem}".lstrip("/"), {})[f".{suffix.lower()}"] = member
    except TarEndedEarly as error:
        reason, damage = "shard ended early", f"ended early ({error})"
    except TarDamage as error:
        reason, damage = f"shard is damaged ({error})", f"is damaged ({error})"
    except OSError as error:
        why = error.strerror or type(error).__name__
        reason, damage = f"shard cannot be read ({why})", f"cannot be read ({why})"
    entries = []
    for name, members in files.items():
        image = next((members[s] for s in IMAGE_SUFFIXES if s in members), None)
        if image is None:
            skips.add("no image", f"{path}:{name} ({', '.join(sorted(members))})")
        elif ".txt" not in members and ".json" not in members:
            skips.add("no caption", f"{path}:{name} ({', '.join(sorted(members))})")
        else:
            entries.append(Entry(name, image, members.get(".txt"), members.get(".json")))
    if reason:
        skips.add(reason, path)
        skips.notice(
            f"{path} {damage}. {len(entries)} pairs were read from it; any further pairs are missing. "
            "Copy or download the shard again"
        )
    return entries


def _logged(path: str, skips: SkipLog) -> Callable[[str, str], None]:
    return lambda reason, name: skips.add(reason, f"{path}:{name}")


class ShardSource:
    """Pairs in tar shards. A few shards at a time are shuffled together.

    Args:
        paths: paths of the shards.
        preparation: of an image.
        shuffle_shards: number of shards in one window.
        records: total number of pairs. 0: count them from the headers of all shards.
        workers: number of decoding threads.
        skips: log of the run.
        id_name: name of the .json field that holds the id of a pair. Empty: each pair has its own id.
        on_progress: is called with the number of shards counted and their total.
    """

    def __init__(
        self, paths: list[str], preparation: Preparation, *, shuffle_shards: int, records: int, workers: int,
        skips: SkipLog, id_name: str = "", on_progress: Callable[[int, int], None] | None = None,
    ) -> None:  # fmt: skip
        missing = [path for path in paths if not os.path.isfile(path)]
        if not paths or missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            what = f"missing: {missing[0]}{more}" if missing else "it is empty"
            if missing and any(c in missing[0] for c in "*?["):
                what = f"{missing[0]} matches nothing"
            if missing and os.path.isdir(missing[0]):
                what = f"{missing[0]} is a folder; write {missing[0].rstrip('/')}/*.tar"
            raise DataError(f"data.path must name tar shards that exist; {what}")
        self.paths, self.preparation, self.shuffle_shards, self.skips = paths, preparation, shuffle_shards, skips
        self.id_name = id_name
        self.pool = Workers(workers)
        self._index: OrderedDict[int, list[Entry]] = OrderedDict()
        self._sizes: dict[int, int] = {}  # pairs of each shard when it was first read
        self._lock = threading.Lock()
        self._records = records or self._count(on_progress)
        if not self._records:
            why = f"{skips.summary()}. First: {''.join(skips.examples[:1])}" if skips.total else "they are empty"
            raise DataError(
                f"no usable pairs in {len(paths)} shards: {why}. "
                f"A pair is an image ({', '.join(IMAGE_SUFFIXES)}) and, with the same key, .txt or .json with 'caption'"
            )

    def _count(self, on_progress: Callable[[int, int], None] | None) -> int:
        total = 0
        for number in range(len(self.paths)):
            total += self._size(number)
            if on_progress is not None:
                on_progress(number + 1, len(self.paths))
        return total

    def __len__(self) -> int:
        return self._records

    def window_count(self) -> int:
        """Return the number of groups of `shuffle_shards` shards."""
        return -(-len(self.paths) // self.shuffle_shards)

    def window_keys(self, seed: int, epoch: int, window: int) -> Tensor:
        """Return the keys of a group of shards. The grouping changes with the epoch."""
        order = permutation(len(self.paths), f"shards/{seed}/{epoch}")
        chosen = order[window * self.shuffle_shards : (window + 1) * self.shuffle_shards].tolist()
        return torch.cat([shard * RECORDS_PER_SHARD + torch.arange(self._size(shard)) for shard in chosen])

    def entries(self, shard: int) -> list[Entry]:
        """Return the index of a shard. The indices of a few windows are cached, and damage is logged once."""
        with self._lock:
            if shard not in self._index:
                log = self.skips if self.skips.first_time(self.paths[shard]) else SkipLog()
                self._index[shard] = index_shard(self.paths[shard], log)
                self._sizes.setdefault(shard, len(self._index[shard]))
                while len(self._index) > 4 * self.shuffle_shards:
                    self._index.popitem(last=False)
            self._index.move_to_end(shard)
            return self._index[shard]

    def _size(self, shard: int) -> int:
        """Return the number of pairs of a shard. It stays the same for the whole run, even if the file changes."""
        return self._sizes[shard] if shard in self._sizes else len(self.entries(shard))

    def all_keys(self) -> list[int]:
        """Return all keys in the order of the shards."""
        return [shard * RECORDS_PER_SHARD + i for shard in range(len(self.paths)) for i in range(self._size(shard))]

    def rows(self, keys: Tensor, draw: Draw, skips: SkipLog) -> Rows:
        """Return the usable rows of these keys."""
        return prepare_rows(self, keys, self.preparation, draw, skips, self.pool)

    def read(self, key: int) -> Record:
        """Read one record at its offsets."""
        shard, number = divmod(key, RECORDS_PER_SHARD)
        entries = self.entries(shard)
        if number >= len(entries):
            raise RecordError("shard has changed since it was first read")
        entry = entries[number]
        try:
            with open(self.paths[shard], "rb") as file:
                image = _bytes_at(file.fileno(), entry.image, IMAGE_LIMIT)
                captions = _captions(file.fileno(), entry)
                record_id = _id(file.fileno(), entry, self.id_name) if self.id_name else key
        except OSError as error:
            raise RecordError(f"shard cannot be read ({type(error).__name__})") from error
        if not captions:
            raise RecordError("no caption")
        return Record(image, captions, record_id)

    def describe(self, key: int) -> str:
        """Return the shard and the name of a pair, for messages."""
        shard, number = divmod(key, RECORDS_PER_SHARD)
        entries = self.entries(shard)
        return f"{self.paths[shard]}:{entries[number].name if number < len(entries) else f'pair {number}'}"


def _bytes_at(file: int, member: Member, limit: int) -> bytes:
    if member.size > limit:
        raise RecordError(f"larger than {limit // 2**20} MiB")
    data = os.pread(file, member.size, member.start)
    if len(data) != member.size:
        raise RecordError("shard ends inside a record")
    return data


def _id(file: int, entry: Entry, name: str) -> int:
    try:
        value = parse_json(_bytes_at(file, entry.json, TEXT_LIMIT)).get(name) if entry.json is not None else None
    except RecordError:
        raise
    except (ValueError, AttributeError) as error:
        raise RecordError(f"its .json cannot be read ({type(error).__name__}), and data.id_column needs it") from error
    if value in (None, ""):
        raise RecordError(f"no {name!r} in its .json (data.id_column)")
    try:
        return id_of(value)
    except RecursionError:  # a value that `parse_json` accepts may still be too deep for str()
        raise RecordError(f"{name!r} in its .json is nested too deeply (data.id_column)") from None


def _captions(file: int, entry: Entry) -> tuple[str, ...]:
    try:
        captions: list[str] = []
        if entry.text is not None:
            captions = captions_of(_bytes_at(file, entry.text, TEXT_LIMIT).decode("utf-8-sig"))
        if not captions and entry.json is not None:
            captions = captions_of(parse_json(_bytes_at(file, entry.json, TEXT_LIMIT)).get("caption"))
        return tuple(captions)
    except RecordError:
        raise
    except (ValueError, AttributeError, RecursionError) as error:
        raise RecordError(f"caption cannot be read ({type(error).__name__})") from error
