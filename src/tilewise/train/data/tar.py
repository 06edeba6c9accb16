"""List the members of a tar shard from its headers.

`scan_tar` is a loop without recursion in which every step moves forward. So no header can cause deep recursion or an
endless loop. Supported: ustar, GNU long names and pax headers. Sparse members are refused.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from tilewise.train.data.records import plain_text

BLOCK = 512
MAX_EXTENSIONS = 8  # extended headers in front of one member
MAX_EXTENSION_BYTES = 2**20  # size of one extended header
MAX_MEMBER_BYTES = 2**60  # a larger size means a damaged header, and not a shard that was cut short
REGULAR = b"0\x007"
EXTENSIONS = b"LKxXg"
DIRECTORY = b"5"
SPARSE = b"S"


class Member(NamedTuple):
    """One regular file in a shard: its name, and where its bytes are."""

    name: str
    start: int
    size: int


class TarDamage(Exception):
    """The rest of a shard cannot be read. The message says why."""


class TarEndedEarly(TarDamage):
    """The shard has no end marker: it was cut short."""


def scan_tar(file: int, size: int, skip: Callable[[str, str], None]) -> Iterator[Member]:
    """Yield the regular files of a shard, with ascending offsets.

    Args:
        file: an open file descriptor.
        size: the size of the shard in bytes.
        skip: is called with a reason and a name for each member that is refused.

    Raises:
        TarEndedEarly: the shard ended before its end marker.
        TarDamage: a header is invalid.
    """
    offset = 0
    while True:
        offset, header, extended = _next_header(file, size, offset)
        if header is None:
            if _has_data_after(file, size, offset):
                raise TarEndedEarly("data follows an end marker")
            return
        kind, name = header[156:157], extended.get("path") or _name(header)
        stored = _pax_size(extended) if "size" in extended else _number(header[124:136])
        if not 0 <= stored <= MAX_MEMBER_BYTES:
            raise TarDamage(f"a member has {stored} bytes")
        is_sparse = kind == SPARSE or any(key.startswith("GNU.sparse.") for key in extended)
        if kind == SPARSE:
            offset = _after_sparse_headers(file, size, offset, header)
        has_data = kind in REGULAR or is_sparse or not (b"1" <= kind <= b"6")
        end = offset + (-(-stored // BLOCK) * BLOCK if has_data else 0)
        if has_data and offset + stored > size:
            raise TarEndedEarly(f"inside {plain_text(name)!r}")
        if "too many" in extended:
            skip("member has too many extended headers", name)
        elif is_sparse:
            skip("sparse member", name)
        elif kind in REGULAR and not name.endswith("/"):
            yield Member(name, offset, stored)
        elif kind not in REGULAR and kind != DIRECTORY:
            skip("member is a link or a special file", name)
        offset = end


def _next_header(file: int, size: int, offset: int) -> tuple[int, bytes | None, dict[str, str]]:
    """Return the offset after the next member's header, the header, and what extended headers say about it."""
    extended: dict[str, str] = {}
    count = 0
    while True:
        header = os.pread(file, BLOCK, offset)
        if len(header) < BLOCK:
            raise TarEndedEarly("no end marker")
        if not header.strip(b"\0"):
            if count:
                raise TarDamage("an extended header has no member")
            return offset, None, extended
        if not _checksum_holds(header):
            raise TarDamage("a header is invalid" if offset else "it is not an uncompressed tar file")
        offset += BLOCK
        kind = header[156:157]
        if kind not in EXTENSIONS:
            return offset, header, extended
        length = _number(header[124:136])
        if not 0 <= length <= MAX_EXTENSION_BYTES:
            raise TarDamage(f"an extended header has {length} bytes")
        data = os.pread(file, length, offset)
        if len(data) < length:
            raise TarEndedEarly("inside a header")
        count += 1
        if count > MAX_EXTENSIONS:
            extended["too many"] = "yes"
        elif kind == b"L":
            extended["path"] = _text(data.split(b"\0")[0])
        elif kind in b"xX":
            extended |= _pax_fields(data)
        offset += -(-length // BLOCK) * BLOCK


def _has_data_after(file: int, size: int, offset: int) -> bool:
    """Return whether anything but zeros follows. A proper shard ends with some blocks of zeros."""
    while offset < size:
        block = os.pread(file, 2**20, offset)
        if not block:
            return False
        if block.strip(b"\0"):
            return True
        offset += len(block)
    return False


def _after_sparse_headers(file: int, size: int, offset: int, header: bytes) -> int:
    """Return the offset after the extra blocks that describe an old GNU sparse member."""
    more = header[482]
    while more:
        block = os.pread(file, BLOCK, offset)
        if len(block) < BLOCK:
            raise TarEndedEarly("inside a header")
        more, offset = block[504], offset + BLOCK
    return offset


def _checksum_holds(header: bytes) -> bool:
    try:
        want = _number(header[148:156])
    except TarDamage:
        return False
    rest = header[:148] + b" " * 8 + header[156:]
    # Some old programs add signed bytes.
    return want == sum(rest) or want == sum(rest) - 256 * sum(byte > 127 for byte in rest)


def _number(field: bytes) -> int:
    """Return a number field: octal text, or base 256 where the first byte is 128 or 255."""
    if field[0] in (128, 255):
        return int.from_bytes(field[1:], "big") - (256 ** (len(field) - 1) if field[0] == 255 else 0)
    digits = field.split(b"\0")[0].strip()
    if not re.fullmatch(rb"[0-7]*", digits):
        raise TarDamage("a header has an invalid number")
    return int(digits or b"0", 8)


def _name(header: bytes) -> str:
    name, prefix = header[:100].split(b"\0")[0], header[345:500].split(b"\0")[0]
    has_prefix = header[257:263] == b"ustar\0" and prefix
    return _text(prefix + b"/" + name if has_prefix else name)


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


def _pax_fields(data: bytes) -> dict[str, str]:
    """Return the records ``length key=value`` of a pax header."""
    fields: dict[str, str] = {}
    place = 0
    while found := re.compile(rb"(\d{1,7}) ([^=]+)=").match(data, place):
        end = place + int(found[1])
        if end <= found.end():
            raise TarDamage("a pax header is invalid")
        fields[_text(found[2])] = _text(data[found.end() : end - 1])
        place = end
    return fields


def _pax_size(extended: dict[str, str]) -> int:
    if not re.fullmatch(r"[0-9]{1,18}", extended["size"]):
        raise TarDamage("a pax header has an invalid size")
    return int(extended["size"])
