"""WebDataset tar shards (the LAION layout), read by seeking.

For each key, a shard has an image file and its caption: ``000012.jpg`` and ``000012.txt``, or ``caption`` in
``000012.json``. The headers of a shard are read once, when the shard is first used. Every rank then reads only the
bytes of its own rows, and a run continues in the middle of an epoch without reading earlier records.
"""

from __future__ import annotations

import glob
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tilewise.errors import DataError
from tilewise.train.data.files import Preparation, prepare_rows
from tilewise.train.data.order import permutation
from tilewise.train.data.records import Draw, Record, RecordError, Rows, SkipLog, captions_of, id_of
from tilewise.train.data.table import IMAGE_SUFFIXES
from tilewise.train.data.tar import Member, TarDamage, TarEndedEarly, scan_tar
from tilewise.train.data.workers import Workers
from tilewise.train.untrusted import IMAGE_LIMIT, TEXT_LIMIT, parse_json

SHARD = 2**32  # a key is shard * SHARD + record


@dataclass(frozen=True)
class Entry:
    """One pair inside a shard."""

    key: str
    image: Member
    text: Member | None
    json: Member | None


def expand_shards(pattern: str) -> list[str]:
    """Expand a pattern with ``{00000..00041}``, ``{a,b}`` and ``*`` to paths. ``::`` joins several patterns.

    >>> expand_shards("x-{08..10}.tar")
    ['x-08.tar', 'x-09.tar', 'x-10.tar']
    """
    paths: list[str] = []
    for part in pattern.split("::"):
        for path in _braces(part):
            paths += sorted(glob.glob(path)) if any(c in path for c in "*?[") else [path]
    return paths


def _braces(text: str) -> list[str]:
    found = re.search(r"\{([^{}]*)\}", text)
    if not found:
        return [text]
    span = re.fullmatch(r"(\d+)\.\.(\d+)", found[1])
    if span:
        width = len(span[1])
        options = [str(n).zfill(width) for n in range(int(span[1]), int(span[2]) + 1)]
    else:
        options = found[1].split(",")
    return [text[: found.start()] + option + rest for option in options for rest in _braces(text[found.end() :])]


def index_shard(path: str, skips: SkipLog) -> list[Entry]:
    """Return the pairs of a shard from its headers. Damage and incomplete pairs are logged and never raise."""
    files: OrderedDict[str, dict[str, Member]] = OrderedDict()
    damage = reason = ""
    try:
        with open(path, "rb") as file:
            for member in scan_tar(file.fileno(), os.fstat(file.fileno()).st_size, _logged(path, skips)):
                folder, _, name = member.name.rpartition("/")
                stem, _, suffix = name.partition(".")
                files.setdefault(f"{folder}/{stem}", {})[f".{suffix.lower()}"] = member
    except TarEndedEarly as error:
        reason, damage = "shard ended early", f"ended early ({error})"
    except TarDamage as error:
        reason, damage = f"shard is damaged ({error})", f"is damaged ({error})"
    except OSError as error:
        reason = damage = f"shard cannot be read ({error.strerror or type(error).__name__})"
    entries = []
    for key, members in files.items():
        image = next((members[s] for s in IMAGE_SUFFIXES if s in members), None)
        if image is None:
            skips.add("no image", f"{path}:{key.lstrip('/')} ({', '.join(sorted(members))})")
        elif ".txt" not in members and ".json" not in members:
            skips.add("no caption", f"{path}:{key.lstrip('/')} ({', '.join(sorted(members))})")
        else:
            entries.append(Entry(key, image, members.get(".txt"), members.get(".json")))
    if reason:
        skips.add(reason, path)
        skips.notice(
            f"{path} {damage}. {len(entries)} pairs were read from it; any pairs after that are missing. "
            "Copy or download the shard again"
        )
    return entries


def _logged(path: str, skips: SkipLog) -> Callable[[str, str], None]:
    return lambda reason, name: skips.add(reason, f"{path}:{name}")


class ShardSource:
    """Pairs in tar shards. A few shards at a time are shuffled together.

    Args:
        paths: paths of the shards.
        how: preparation of an image.
        shuffle_shards: number of shards in one window.
        records: total number of pairs. 0: count them from the headers of all shards.
        workers: number of decoding threads.
        skips: log of the run.
        id_name: entry of the .json that is the id of a pair. Empty: each pair has its own id.
        watch: is called with the number of shards counted and their total.
    """

    def __init__(
        self, paths: list[str], how: Preparation, *, shuffle_shards: int, records: int, workers: int, skips: SkipLog,
        id_name: str = "", watch: Callable[[int, int], None] | None = None,
    ) -> None:  # fmt: skip
        missing = [path for path in paths if not os.path.isfile(path)]
        if not paths or missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            what = f"missing: {missing[0]}{more}" if missing else "the pattern matches nothing"
            if missing and os.path.isdir(missing[0]):
                what = f"{missing[0]} is a folder; write {missing[0].rstrip('/')}/*.tar"
            raise DataError(f"data.path must name tar shards that exist; {what}")
        self.paths, self.how, self.shuffle_shards, self.skips = paths, how, shuffle_shards, skips
        self.id_name = id_name
        self.pool = Workers(workers)
        self._index: OrderedDict[int, list[Entry]] = OrderedDict()
        self._lock = threading.Lock()
        self._records = records or self._count(watch)
        if not self._records:
            raise DataError(
                f"no usable pairs in {len(paths)} shards: {skips.summary()}. First: {''.join(skips.examples[:1])}. "
                f"A pair is an image ({', '.join(IMAGE_SUFFIXES)}) and, with the same key, .txt or .json with 'caption'"
            )

    def _count(self, watch: Callable[[int, int], None] | None) -> int:
        total = 0
        for number in range(len(self.paths)):
            total += len(self.entries(number))
            if watch is not None:
                watch(number + 1, len(self.paths))
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
        return torch.cat([shard * SHARD + torch.arange(len(self.entries(shard))) for shard in chosen])

    def entries(self, shard: int) -> list[Entry]:
        """Return the index of a shard. The indices of a few windows are cached, and damage is logged once."""
        with self._lock:
            if shard not in self._index:
                log = self.skips if self.skips.first_time(self.paths[shard]) else SkipLog()
                self._index[shard] = index_shard(self.paths[shard], log)
                while len(self._index) > 4 * self.shuffle_shards:
                    self._index.popitem(last=False)
            self._index.move_to_end(shard)
            return self._index[shard]

    def all_keys(self) -> list[int]:
        """Return all keys in the order of the shards."""
        return [shard * SHARD + i for shard in range(len(self.paths)) for i in range(len(self.entries(shard)))]

    def rows(self, keys: Tensor, draw: Draw, skips: SkipLog) -> Rows:
        """Return the usable rows of these keys."""
        return prepare_rows(self, keys, self.how, draw, skips, self.pool)

    def read(self, key: int) -> Record:
        """Read one record at its offsets."""
        shard, number = divmod(key, SHARD)
        entry = self.entries(shard)[number]
        try:
            with open(self.paths[shard], "rb") as file:
                image = _bytes_at(file.fileno(), entry.image, IMAGE_LIMIT)
                captions = _captions(file.fileno(), entry)
                own = _id(file.fileno(), entry, self.id_name) if self.id_name else key
        except OSError as error:
            raise RecordError(f"shard cannot be read ({type(error).__name__})") from error
        if not captions:
            raise RecordError("no caption")
        return Record(image, captions, own)

    def describe(self, key: int) -> str:
        """Return the shard and the key."""
        shard, number = divmod(key, SHARD)
        return f"{self.paths[shard]}:{self.entries(shard)[number].key}"


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
    except (ValueError, AttributeError):
        value = None
    if value in (None, ""):
        raise RecordError(f"no {name!r} in its .json (data.id_column)")
    try:
        return id_of(value)
    except RecursionError:
        raise RecordError(f"{name!r} in its .json is nested too deeply (data.id_column)") from None


def _captions(file: int, entry: Entry) -> tuple[str, ...]:
    try:
        if entry.text is not None:
            return tuple(captions_of(_bytes_at(file, entry.text, TEXT_LIMIT).decode("utf-8-sig")))
        assert entry.json is not None
        return tuple(captions_of(parse_json(_bytes_at(file, entry.json, TEXT_LIMIT)).get("caption")))
    except RecordError:
        raise
    except (ValueError, AttributeError, RecursionError) as error:
        raise RecordError(f"caption cannot be read ({type(error).__name__})") from error
