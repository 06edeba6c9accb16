"""The file format of an icon set: one zip file that holds text and compressed arrays, nothing executable.

    manifest.json   what the set is, where it came from, the licence of every family, sizes and checksums
    table.xz        JSON: one list per column (family, style, name, caption, tags, name id)
    images.xz       N * S * S grey levels of 4 bits, two to a byte, the left pixel in the high half

The members are stored with fixed dates in a fixed order, so that the same icons always give the same bytes. Nothing is
unpickled, and no member is unpacked beyond the size in the manifest.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tilewise.errors import DataError

FORMAT = "tilewise-icons"
VERSION = 1
COLUMNS = ("family", "style", "name", "caption", "tags", "name_id")
MOST_BYTES = 4 * 2**30  # size limit of an unpacked member: 8 million icons
_EPOCH = (1980, 1, 1, 0, 0, 0)
# Icons are rows of bytes. The previous byte and row predict the next byte better than the alignment does.
_FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "lc": 4, "lp": 0, "pb": 0}]


@dataclass(frozen=True)
class Pack:
    """The content of an icon file. Axes of ``levels``: N icons, S rows, S columns."""

    manifest: dict[str, Any]
    columns: dict[str, list[Any]]
    levels: Tensor  # uint8 (N, S, S), 0 (black) to 15 (white)


def write_pack(
    path: str | Path, levels: Tensor, columns: Mapping[str, list[Any]], about: Mapping[str, Any]
) -> dict[str, Any]:
    """Write an icon set and return its manifest. The same arguments give the same bytes.

    Args:
        path: the file to write.
        levels: uint8 (N, S, S) with values 0 (black) to 15 (white); S is even.
        columns: the lists named in ``COLUMNS``, each of length N.
        about: further entries of the manifest. "families" and "test_families" are required.
    """
    _check_columns(columns, len(levels))
    if levels.dtype != torch.uint8 or levels.ndim != 3 or levels.shape[1] != levels.shape[2]:
        raise DataError(f"levels are uint8 (N, S, S), got {levels.dtype} {tuple(levels.shape)}")
    if levels.shape[2] % 2 or (levels.numel() and int(levels.max()) > 15):
        raise DataError(f"levels are 0..15 with an even side, got side {levels.shape[2]}, most {int(levels.max())}")
    raw = {
        "table.xz": json.dumps({k: columns[k] for k in COLUMNS}, separators=(",", ":")).encode(),
        "images.xz": (levels[..., 0::2] << 4 | levels[..., 1::2]).contiguous().numpy().tobytes(),
    }
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "count": len(levels),
        "side": levels.shape[2],
        "unpacked": {k: {"bytes": len(v), "sha256": hashlib.sha256(v).hexdigest()} for k, v in raw.items()},
        **about,
    }
    with zipfile.ZipFile(path, "w") as file:
        _store(file, "manifest.json", json.dumps(manifest, indent=1).encode())
        for name, data in raw.items():
            _store(file, name, lzma.compress(data, format=lzma.FORMAT_XZ, filters=_FILTERS))
    return manifest


def read_pack(path: str | Path) -> Pack:
    """Read an icon set and check sizes and checksums. A damaged file raises ``DataError``."""
    if Path(path).exists() and not Path(path).is_file() and not Path(path).is_dir():
        raise DataError(f"{path} is not a regular file, and an icon set is one. Give a file or leave the path out")
    try:
        with zipfile.ZipFile(path) as file:
            manifest = json.loads(_member(file, "manifest.json"))
            _check_manifest(manifest, path)
            count, side = int(manifest["count"]), int(manifest["side"])
            table, images = (_unpack(_member(file, name), name, manifest) for name in ("table.xz", "images.xz"))
        columns = json.loads(table)
    except IsADirectoryError as error:
        raise DataError(
            f"{path} is a folder, and an icon set is one file. For a folder of images set data.source=folder"
        ) from error
    except FileNotFoundError as error:
        raise DataError(f"no icon set at {path}. Leave the path out to take the set that ships") from error
    except DataError:
        raise
    except Exception as error:  # damaged files make zipfile, lzma and json raise many types
        raise DataError(
            f"{path} is not a whole icon set: {error}. Copy the file again, or make it with python -m tools.icons.make"
        ) from error
    _check_columns(columns, count)
    if len(images) * 2 != count * side * side:
        raise DataError(f"{path} announces {count} icons of {side} x {side} but holds {len(images) * 2} pixels")
    halves = torch.frombuffer(images, dtype=torch.uint8) if images else torch.empty(0, dtype=torch.uint8)
    levels = torch.stack((halves >> 4, halves & 15), dim=1).view(count, side, side)
    return Pack(manifest, columns, levels)


def _store(file: zipfile.ZipFile, name: str, data: bytes) -> None:
    entry = zipfile.ZipInfo(name, date_time=_EPOCH)
    entry.external_attr = 0o644 << 16
    entry.create_system = 3
    file.writestr(entry, data, compress_type=zipfile.ZIP_STORED)


def _check_manifest(manifest: Any, path: str | Path) -> None:
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise DataError(f"{path} is no icon set: its manifest has no format {FORMAT!r}")
    if manifest.get("version") != VERSION:
        raise DataError(
            f"{path} is an icon set of version {manifest.get('version')}, "
            f"this release reads version {VERSION}. "
            "Make it again with python -m tools.icons.make"
        )


def _member(file: zipfile.ZipFile, name: str) -> bytes:
    size = file.getinfo(name).file_size
    if size > MOST_BYTES:
        raise DataError(f"{name} announces {size} bytes; at most {MOST_BYTES} are read")
    return file.read(name)


def _unpack(data: bytes, name: str, manifest: dict[str, Any]) -> bytearray:
    want, digest = int(manifest["unpacked"][name]["bytes"]), manifest["unpacked"][name]["sha256"]
    if not 0 <= want <= MOST_BYTES:
        raise DataError(f"{name} announces {want} bytes; at most {MOST_BYTES} are read")
    unpacked = bytearray(lzma.LZMADecompressor(lzma.FORMAT_XZ).decompress(data, max_length=want + 1))
    if len(unpacked) != want or hashlib.sha256(unpacked).hexdigest() != digest:
        raise DataError(f"{name} should unpack to {want} bytes with sha256 {digest}, got {len(unpacked)} others")
    return unpacked


def _check_columns(columns: Any, count: int) -> None:
    if not isinstance(columns, Mapping):
        raise DataError(f"the table is a mapping of columns, got {type(columns).__name__}")
    for name in COLUMNS:
        if not isinstance(columns.get(name), list) or len(columns[name]) != count:
            length = len(columns[name]) if isinstance(columns.get(name), list) else "none"
            raise DataError(f"the table needs a column {name!r} of {count} entries, got {length}")
