"""Read files, JSON and text that may be damaged or hostile.

`read_regular` never blocks on a special file and never reads without a limit. `parse_json` never raises anything but
``ValueError``. `visible` and `one_line` return text that a terminal only shows.
"""

from __future__ import annotations

import json
import os
import re
import stat
from pathlib import Path
from typing import Any

IMAGE_LIMIT = 256 * 2**20  # bytes of one image file, or of one image in a shard
TEXT_LIMIT = 16 * 2**20  # bytes of one file of captions, or of one .txt or .json in a shard
STATE_LIMIT = 256 * 2**20  # bytes of one JSON file of a run
BREAKS = re.compile(r"[\t\v\f\r\x85\u2028\u2029]+")  # all white space that moves the cursor, but "\n"
# Control characters (C0 without "\n", DEL and C1), marks that change the direction of text, halves of characters.
OBEYED = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


class NotRegularError(OSError):
    """The path names a FIFO, a device, a socket or a folder."""


class TooLargeError(OSError):
    """The file is larger than the limit."""


def read_regular(path: str | Path, limit: int) -> bytes:
    """Return the content of a regular file.

    Args:
        path: the file. Links are followed.
        limit: the largest accepted size in bytes.

    Raises:
        NotRegularError: the path is a FIFO, a device, a socket or a folder. These are never read.
        TooLargeError: the file is larger than `limit`.
        OSError: any other failure to open or read the file.
        ValueError: the path itself is invalid, for example because it contains a zero byte.
    """
    _check_regular(os.stat(path), limit)  # opening a device can have side effects, so look first
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # O_NONBLOCK: a FIFO does not block open
    with open(handle, "rb") as file:
        _check_regular(os.fstat(handle), limit)
        data = file.read(limit + 1)
    if len(data) > limit:
        raise TooLargeError(f"larger than {limit} bytes")
    return data


def is_same_file(one: str | Path, other: str | Path) -> bool:
    """Return whether two paths name the same file or folder: through links, or in other letters if case is ignored."""
    try:
        return os.path.samefile(one, other)
    except (OSError, ValueError):  # one of them does not exist, or cannot
        return False


def _check_regular(found: os.stat_result, limit: int) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise NotRegularError("not a regular file")
    if found.st_size > limit:
        raise TooLargeError(f"{found.st_size} bytes, more than the limit of {limit}")


def parse_json(text: str | bytes) -> Any:
    """Parse JSON. Every kind of damage raises ``ValueError``, deep nesting included.

    >>> parse_json('{"step": 3}')
    {'step': 3}
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def visible(text: str) -> str:
    r"""Return text with escapes in the place of characters that a terminal obeys or cannot print.

    Line breaks stay. Tabs and other white space that moves the cursor become a space.

    >>> print(visible("red car \x1b]0;title\x07\tand\rmore"))
    red car \x1b]0;title\x07 and more
    """
    return OBEYED.sub(lambda found: escape(found[0]), BREAKS.sub(" ", text))


def one_line(text: str) -> str:
    r"""Return text as `visible` does, in one line.

    >>> one_line("two\nlines")
    'two lines'
    """
    return visible(re.sub(r"\s*\n\s*", " ", text.strip("\n")))


def escape(character: str) -> str:
    r"""Return the escape of a character.

    >>> print(escape("\x1b"), escape("\u202e"))
    \x1b \u202e
    """
    return f"\\x{ord(character):02x}" if ord(character) < 256 else f"\\u{ord(character):04x}"
