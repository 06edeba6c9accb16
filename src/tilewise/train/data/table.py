"""Read folders, CSV, TSV, JSON lines, Parquet and COCO caption files as one list of (image, captions)."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.errors import DataError
from tilewise.train.data.files import Preparation, prepare_rows
from tilewise.train.data.records import Draw, Record, RecordError, Rows, SkipLog, captions_of, id_of, is_of_macos
from tilewise.train.data.workers import Workers
from tilewise.train.untrusted import (
    IMAGE_LIMIT,
    TEXT_LIMIT,
    NotRegularError,
    TooLargeError,
    parse_json,
    read_regular,
)

IMAGE_SUFFIXES = (
    ".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".avif", ".jp2", ".ppm", ".pgm", ".pbm", ".tga",
    ".ico",
)  # fmt: skip


class Entry(NamedTuple):
    """An image path (or the image bytes), its captions, and its id if the data has ids."""

    image: str | bytes
    captions: list[str]
    id: int | None = None


def read_folder(folder: Path) -> list[Entry]:
    """Return the images below a folder. Captions come from the text file of the same name, or else from the name."""
    if not folder.is_dir():
        came, advice = "does not exist", "Set data.path"
        if folder.exists():
            came, advice = "is not a folder", "For a table set data.source='table', for tar shards 'shards'"
        raise DataError(f"{folder} {came}; data.source='folder' needs a folder of images. {advice}")
    entries: list[Entry] = []
    for path in image_files(folder):
        beside = path.with_suffix(".txt")
        try:
            lines = read_regular(beside, TEXT_LIMIT).decode("utf-8-sig").splitlines()
        except FileNotFoundError:
            lines = [words_of(path.stem)]
        except (OSError, ValueError):
            lines = []
        entries.append(Entry(str(path), captions_of(lines)))
    if not entries:
        raise DataError(f"no images below {folder}; their names must end in {', '.join(IMAGE_SUFFIXES)}")
    return entries


def image_files(folder: Path) -> list[Path]:
    """Return the paths below a folder that end like images, sorted."""
    paths = (path for path in folder.rglob("*") if path.suffix.lower() in IMAGE_SUFFIXES)
    return sorted(path for path in paths if not is_of_macos(path.name))


def words_of(stem: str) -> str:
    """Return a file name as words.

    >>> words_of("red-car_01")
    'red car 01'
    """
    return " ".join(stem.replace("-", " ").replace("_", " ").split())


class Columns(NamedTuple):
    """Names of the columns of a table. Without `id`, every image has an id of its own."""

    image: str
    text: str
    id: str = ""


def read_table(path: Path, image_root: str, columns: Columns) -> list[Entry]:
    """Read a table or COCO captions file. Rows that share an image become one entry with the first id."""
    readers = {
        ".csv": _csv_rows, ".tsv": _csv_rows, ".jsonl": _jsonl_rows, ".parquet": _parquet_rows, ".json": _coco_rows,
    }  # fmt: skip
    if path.suffix.lower() not in readers:
        advice = ". It is a folder: set data.source='folder' to read the images below it" if path.is_dir() else ""
        raise DataError(f"{path}: the name of a table must end in one of {', '.join(readers)}{advice}")
    if not path.is_file():
        raise DataError(f"there is no file {path}")
    root = Path(image_root) if image_root else path.parent
    together: dict[str | bytes, list[str]] = {}
    ids: dict[str | bytes, int] = {}
    for image, cell, value in readers[path.suffix.lower()](path, columns):
        key = image if isinstance(image, bytes) else str(root / ("" if image is None else str(image)))
        try:
            together.setdefault(key, []).extend(captions_of(cell))
        except RecordError as error:
            raise DataError(f"{path}: {error} in the column {columns.text!r}. Write text or a list of texts") from error
        if value not in (None, ""):
            ids.setdefault(key, id_of(value))
    if not together:
        raise DataError(f"{path} has no rows")
    return [Entry(image, captions, ids.get(image)) for image, captions in together.items()]


Row = tuple[Any, Any, Any]  # image, caption or a list of them, id


def _check_columns(path: Path, columns: Columns, there: Iterable[str]) -> None:
    missing = [name for name in columns if name and name not in there]
    if missing:
        raise DataError(
            f"{path} has no column {missing[0]!r}; it has {', '.join(there)}. "
            f"Set data.image_column, data.text_column{' and data.id_column' if columns.id else ''}"
        )


def _csv_rows(path: Path, columns: Columns) -> Iterable[Row]:
    with path.open(newline="", encoding="utf-8-sig", errors="replace") as file:  # spreadsheets write a byte order mark
        rows = csv.DictReader(file, delimiter="\t" if path.suffix.lower() == ".tsv" else ",")
        try:
            _check_columns(path, columns, rows.fieldnames or [])
            for row in rows:
                yield row[columns.image], row[columns.text], row.get(columns.id)
        except csv.Error as error:
            raise DataError(f"{path}, after line {rows.line_num}: {error}. Is a quotation mark left open?") from error


def _jsonl_rows(path: Path, columns: Columns) -> Iterable[Row]:
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        checked = False
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = parse_json(line)
            except ValueError:
                row = None
            if not isinstance(row, dict):
                like = json.dumps({columns.image: "a.jpg", columns.text: "a red car"})
                raise DataError(f"{path}, line {number} is no JSON object; every line must be one, such as {like}")
            if not checked:
                _check_columns(path, columns, row)
                checked = True
            yield row.get(columns.image), row.get(columns.text), row.get(columns.id)


def _parquet_rows(path: Path, columns: Columns) -> Iterable[Row]:
    import pyarrow
    import pyarrow.parquet as parquet

    try:
        file = parquet.ParquetFile(path)
        names = file.schema_arrow.names
    except Exception as error:  # pyarrow raises its own types
        raise DataError(f"{path} is not a Parquet file: {error}") from error
    _check_columns(path, columns, names)
    try:
        for part in file.iter_batches(columns=sorted({name for name in columns if name})):
            held = {name: part[name].to_pylist() for name in part.schema.names}
            ids = held[columns.id] if columns.id else [None] * len(part)
            for image, text, number in zip(held[columns.image], held[columns.text], ids, strict=True):
                yield image.get("bytes") or image.get("path") if isinstance(image, dict) else image, text, number
    except (OSError, ValueError, TypeError, AttributeError, pyarrow.ArrowException) as error:
        raise DataError(f"{path} is damaged: {error}") from error


def _coco_rows(path: Path, columns: Columns) -> Iterable[Row]:
    try:
        content: dict[str, Any] = parse_json(path.read_text(encoding="utf-8-sig"))
        names = {image["id"]: image["file_name"] for image in content["images"]}
        pairs = [(names[a["image_id"]], a["caption"], a.get(columns.id)) for a in content["annotations"]]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path} is not a COCO captions file (lists 'images' and 'annotations'): {type(error).__name__} {error}"
        ) from error
    if columns.id and pairs and all(value is None for _, _, value in pairs):
        raise DataError(f"no annotation of {path} has {columns.id!r}, which data.id_column names")
    return pairs


class FileSource:
    """Images in files (or in the table itself) with their captions. The whole set is one window.

    Args:
        entries: images and captions from `read_folder` or `read_table`.
        how: preparation of an image.
        workers: number of decoding threads.
    """

    def __init__(self, entries: list[Entry], how: Preparation, workers: int = 2) -> None:
        self.entries = entries
        self.preparation = how
        self.pool = Workers(workers)

    def __len__(self) -> int:
        return len(self.entries)

    def window_count(self) -> int:
        """Return 1: everything is shuffled together."""
        return 1

    def window_keys(self, seed: int, epoch: int, window: int) -> Tensor:
        """Return all keys."""
        return torch.arange(len(self.entries))

    def all_keys(self) -> list[int]:
        """Return all keys, not shuffled."""
        return list(range(len(self.entries)))

    def rows(self, keys: Tensor, draw: Draw, skips: SkipLog) -> Rows:
        """Return the usable rows of these keys."""
        return prepare_rows(self, keys, self.preparation, draw, skips, self.pool)

    def read(self, key: int) -> Record:
        """Read one record from its file."""
        image, captions, own = self.entries[key]
        own = key if own is None else own
        if not captions:
            raise RecordError("no caption")
        if isinstance(image, bytes):
            return Record(image, tuple(captions), own)
        try:
            return Record(read_regular(image, IMAGE_LIMIT), tuple(captions), own)
        except NotRegularError as error:
            raise RecordError("image is not a regular file") from error
        except TooLargeError as error:
            raise RecordError(f"image is larger than {IMAGE_LIMIT // 2**20} MiB") from error
        except (OSError, ValueError) as error:  # ValueError: a path with a zero byte or half a character
            raise RecordError(f"image cannot be read ({type(error).__name__})") from error

    def describe(self, key: int) -> str:
        """Return the path."""
        image = self.entries[key].image
        return image if isinstance(image, str) else f"row {key}"
