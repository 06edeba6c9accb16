"""The file with tuned tile sizes of a card, in the cache folder of the user.

A file belongs to one card, one version of tilewise and one version of Triton. Another file is never used.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from tilewise._version import __version__
from tilewise.kernels.known_faults import triton_version

Parsed = TypeVar("Parsed")
MOST_BYTES = 2**20  # bytes; `tilewise tune` writes no larger file


def folder() -> Path:
    """``$XDG_CACHE_HOME/tilewise``, or ``~/.cache/tilewise``."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "tilewise"


def path_for(card: str) -> Path:
    """The file for a card.

    >>> path_for("NVIDIA H200").name.startswith("nvidia-h200-tilewise-")
    True
    """
    name = re.sub(r"[^a-z0-9.]+", "-", f"{card}-tilewise-{__version__}-triton-{triton_version()}".lower())
    return folder() / f"{name}.json"


def identity(card: str) -> dict[str, Any]:
    """The entries of the file that identify the card and the versions."""
    return {"card": card, "tilewise": __version__, "triton": triton_version()}


def read(card: str, parse: Callable[[Any], Parsed]) -> tuple[Parsed | None, str | None]:
    """The sizes for a card, and what is wrong with its file. Both are None if there is no file."""
    path = None
    try:
        path = path_for(card)
        with path.open("rb") as file:
            contents = json.loads(file.read(MOST_BYTES))
        found = {name: contents.get(name) for name in identity(card)}
        if found != identity(card):
            return None, _problem(path, f"it is for {found}, and {identity(card)} is wanted")
        return parse(contents["sizes"]), None
    except FileNotFoundError:
        return None, None
    except Exception as error:  # for any invalid file, the sizes of the table are used
        return None, _problem(path, f"{type(error).__name__}: {error}")


def _problem(path: Path | None, what: str) -> str:
    return f"the file with tuned sizes {path} is ignored ({what}). Run `tilewise tune` again, or delete the file"


def write(card: str, sizes: dict[str, dict[str, list[int]]]) -> Path:
    """Write the file. A process that reads meanwhile sees the old file or the new one."""
    path = path_for(card)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, new = tempfile.mkstemp(dir=path.parent, suffix=".new")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(identity(card) | {"sizes": sizes}, file, indent=1)
        os.replace(new, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(new)
        raise
    return path
