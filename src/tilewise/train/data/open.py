"""Open the source of training pairs and the held-out pairs that the settings name."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tilewise.errors import DataError
from tilewise.train.config import DataConfig, source_of
from tilewise.train.data.files import Preparation
from tilewise.train.data.icons import IconSource
from tilewise.train.data.images import centre_box, decode, to_tensor
from tilewise.train.data.order import permutation
from tilewise.train.data.records import Record, RecordError, SkipLog, Source, plain_text
from tilewise.train.data.shards import ShardSource, expand_shards
from tilewise.train.data.table import Columns, Entry, FileSource, read_folder, read_table
from tilewise.train.icons import IconSet, load_icons
from tilewise.train.untrusted import is_same_file

Watch = Callable[[int, int], None]  # how many are done, of how many
AUTO_HELD_OUT = 1000  # most images that are held out if the settings leave the share open


@functools.lru_cache(maxsize=2)
def _icons(path: str) -> IconSet:
    """Load an icon set. It is cached, because a run uses it more than once."""
    return load_icons(path or None)


def _check_side(icons: IconSet, image_size: int) -> None:
    if image_size != icons.side:
        raise DataError(
            f"the icons are {icons.side} pixels wide, the model reads {image_size}. Set model.image_size={icons.side} "
            "for a new run, or give icons of the model's size"
        )


def open_source(config: DataConfig, image_size: int, skips: SkipLog, watch: Watch | None = None) -> Source:
    """Open the training pairs. `watch` is called with the number of shards counted so far."""
    if config.source == "icons":
        icons = _icons(config.path).split("train")
        _check_side(icons, image_size)
        return IconSource(icons, augment=config.augment in ("auto", "icon"))
    crop = config.crop_scale if config.augment in ("auto", "crop") else None
    how = Preparation(image_size, crop, config.crop_ratio)
    if config.source == "shards":
        return ShardSource(
            expand_shards(config.path), how, shuffle_shards=config.shuffle_shards, records=config.records,
            workers=config.workers, skips=skips, id_name=config.id_column, on_progress=watch,
        )  # fmt: skip
    return FileSource(_split(config)[0], how, config.workers)


def _split(config: DataConfig) -> tuple[list[Entry], list[Entry]]:
    """Return the training and held-out entries of a folder or table. The split does not depend on the seed."""
    columns = Columns(config.image_column, config.text_column, config.id_column)
    path = Path(config.path)
    entries = read_folder(path) if config.source == "folder" else read_table(path, config.image_root, columns)
    if not config.eval_share or config.eval_path or len(entries) < 2:
        return entries, []
    share = 0.1 if config.eval_share < 0 else config.eval_share
    count = max(1, round(share * len(entries)))
    if config.eval_share < 0:
        count = min(count, AUTO_HELD_OUT)
    chosen = set(permutation(len(entries), "held-out")[:count].tolist())
    train = [entry for number, entry in enumerate(entries) if number not in chosen]
    return train, [entry for number, entry in enumerate(entries) if number in chosen]


def open_train_pairs(config: DataConfig, image_size: int, skips: SkipLog, watch: Watch | None = None) -> EvalPairs:
    """Open the training pairs of a run as `open_eval_pairs` opens the held-out ones: in order, without changes."""
    source = open_source(config, image_size, skips)
    if isinstance(source, IconSource):
        return pairs_of_icons(source.icons)
    assert isinstance(source, FileSource | ShardSource)
    return pairs_of_files(source, skips, config.eval_memory_mib, watch)


@dataclass(frozen=True)
class EvalPairs:
    """Held-out images with their captions. The ids say which caption belongs to which image.

    Args:
        images: chunks of uint8 (n, channels, size, size).
        image_ids: int64 (N,).
        texts: all captions.
        text_ids: int64 (T,). A caption and an image with the same id are right answers for each other.
        icons: the icon set of the images, if they are icons.
    """

    images: EvalImages
    image_ids: Tensor
    texts: list[str]
    text_ids: Tensor
    icons: IconSet | None = None


class EvalImages:
    """Images in chunks, so that a large evaluation never has all of them in memory.

    Args:
        everything: all images, if they are in memory anyway.
        source, keys: otherwise, the source and keys from which they are read for every evaluation.
        first: decoded images of the first keys, which are not read again.
    """

    def __init__(self, everything: Tensor | None = None, source: FileSource | ShardSource | None = None,
                 keys: list[int] | None = None, first: list[Tensor] | None = None) -> None:  # fmt: skip
        self.everything, self.source, self.keys, self.first = everything, source, keys or [], first or []

    def give_up_when(self, give_up: Callable[[], bool] | None) -> None:
        """Raise ``CancelledError`` from `take` if a read blocks and `give_up` returns true. None: never."""
        if self.source is not None:
            self.source.pool.give_up = give_up

    def __len__(self) -> int:
        return len(self.keys) if self.everything is None else len(self.everything)

    def chunks(self, size: int, watch: Watch | None = None) -> Iterator[Tensor]:
        """Yield consecutive chunks. `watch` is called with the number of images so far."""
        for start in range(0, len(self), size):
            end = min(start + size, len(self))
            yield self.take(range(start, end))
            if watch is not None:
                watch(end, len(self))

    def name(self, number: int) -> str:
        """Return the path of an image, or where else it is."""
        if self.source is None:
            return f"image {number}"
        return self.source.describe(self.keys[number])

    def number_of(self, file: Path) -> int | None:
        """Return the number of the image with this path, or None if there is none."""
        if not isinstance(self.source, FileSource):
            return None
        names = (self.source.entries[key].image for key in self.keys)
        return next((n for n, name in enumerate(names) if isinstance(name, str) and is_same_file(name, file)), None)

    def take(self, numbers: range | list[int]) -> Tensor:
        """Return the images with these numbers."""
        if self.everything is not None:
            return self.everything[list(numbers)]
        assert self.source is not None
        return torch.stack(list(self.source.pool.map(self._one, numbers)))

    def _one(self, number: int) -> Tensor:
        assert self.source is not None
        if number < len(self.first):
            return self.first[number]
        try:
            return prepare(self.source, self.keys[number])[1]
        except RecordError as error:  # it could be read when the pairs were opened
            raise DataError(
                f"the held-out image {plain_text(self.name(number))} can no longer be used: {error}. Put the image "
                "back. With data.eval_path you can also leave it out and start again"
            ) from error


def prepare(source: FileSource | ShardSource, key: int) -> tuple[Record, Tensor]:
    """Read a record and decode the centre of its image: uint8 (3, size, size)."""
    record = source.read(key)
    image = decode(record.image)
    return record, to_tensor(image, centre_box(*image.size), source.preparation.size)


def open_eval_pairs(
    config: DataConfig, image_size: int, skips: SkipLog, path: str = "", watch: Watch | None = None,
    trained_on: int | None = None,
) -> EvalPairs | None:  # fmt: skip
    """Open the held-out pairs of a run, or None if it has none. `path` overrides the setting.

    Every image is decoded once, so that broken ones are found. `watch` is called with the number of images so far.
    `trained_on` is the number of training pairs of a saved run. Pairs that are no longer split in the same way are
    refused, because they would include images that the run was trained on.
    """
    path = path or config.eval_path
    if config.source == "icons":
        icons = _icons(path or config.path).split("test")
        _check_side(icons, image_size)
        return pairs_of_icons(icons)
    how = Preparation(image_size)
    if not path and config.eval_share and config.source in ("folder", "table"):
        train, held_out = _split(config)
        if trained_on is not None and len(train) != trained_on:
            raise DataError(
                f"the run was trained on {trained_on} pairs of {config.path}, which now gives {len(train)}. Other "
                "images would be held out, and some of them were used for training. Restore the data as it was, or "
                "give other pairs with --pairs"
            )
        if not held_out:  # a single image
            return None
        return pairs_of_files(FileSource(held_out, how, config.workers), skips, config.eval_memory_mib, watch)
    if not path:
        return None
    if config.source == "shards" and not os.path.isdir(path) and source_of(path) == "shards":
        source: FileSource | ShardSource = ShardSource(
            expand_shards(path), how, shuffle_shards=1, records=0, workers=config.workers, skips=skips,
            id_name=config.id_column,
        )  # fmt: skip
    else:
        if not Path(path).exists():
            raise DataError(
                f"the held-out pairs {path} do not exist; set data.eval_path (or --pairs) to a folder or a table"
            )
        folder = Path(path).is_dir()
        columns = Columns(config.image_column, config.text_column, config.id_column)
        source = FileSource(
            read_folder(Path(path)) if folder else read_table(Path(path), config.image_root, columns),
            how,
            config.workers,
        )
    return pairs_of_files(source, skips, config.eval_memory_mib, watch)


def pairs_of_icons(icons: IconSet) -> EvalPairs:
    """Return every icon with its caption. All icons of the same name are right answers."""
    images = EvalImages(icons.images.unsqueeze(1))
    return EvalPairs(images, icons.name_ids, list(icons.captions), icons.name_ids, icons)


TRIED_TOGETHER = 256


def try_images(
    source: FileSource | ShardSource, skips: SkipLog, keep_mib: int, watch: Watch | None = None,
    found: Callable[[Record, int], None] | None = None,
) -> EvalImages:  # fmt: skip
    """Return the images that can be decoded. Each is read once on the threads of the source; the others are logged.

    Args:
        source: the source of the images.
        skips: log of skipped records.
        keep_mib: memory for decoded images. The first images are kept in it and are not decoded again.
        watch: is called with the number of images tried so far.
        found: is called with each usable record and its index.
    """

    def attempt(key: int) -> tuple[Record, Tensor] | RecordError:
        try:
            return prepare(source, key)
        except RecordError as error:
            return error

    keys = source.all_keys()
    usable: list[int] = []
    first: list[Tensor] = []
    room, full = keep_mib * 2**20, False
    for start in range(0, len(keys), TRIED_TOGETHER):
        some = keys[start : start + TRIED_TOGETHER]
        for key, made in zip(some, source.pool.map(attempt, some), strict=True):
            if isinstance(made, RecordError):
                skips.add(str(made), source.describe(key))
                continue
            record, image = made
            if found is not None:
                found(record, len(usable))
            usable.append(key)
            room -= image.numel()
            full = full or room < 0
            if not full:
                first.append(image)
        if watch is not None:
            watch(min(start + TRIED_TOGETHER, len(keys)), len(keys))
    return EvalImages(source=source, keys=usable, first=first)


def pairs_of_files(
    source: FileSource | ShardSource, skips: SkipLog, keep_mib: int, watch: Watch | None = None
) -> EvalPairs:
    """Return every usable image with all of its captions."""
    texts: list[str] = []
    ids: list[int] = []
    owners: list[int] = []

    def found(record: Record, number: int) -> None:
        texts.extend(record.captions)
        ids.append(record.id)
        owners.extend([number] * len(record.captions))

    images = try_images(source, skips, keep_mib, watch, found)
    if not len(images):
        raise DataError(f"no usable held-out pairs: {skips.summary()}. First: {''.join(skips.examples[:1])}")
    image_ids = torch.tensor(ids).unique(return_inverse=True)[1]
    return EvalPairs(images, image_ids, texts, image_ids[owners])
