"""Write files whole or not at all. Every failure is a `CheckpointError` with one sentence: the file and a remedy."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from tilewise.errors import CheckpointError, TilewiseError

UNTOUCHED = "The checkpoints are untouched"  # if another file of a run cannot be written
REMEDIES = {
    errno.EISDIR: "Rename or remove the folder of that name",
    errno.ENOSPC: "Free some space",
    errno.EDQUOT: "Free some space",
    errno.ENOENT: "Choose a folder that exists",
    errno.ENOTDIR: "Rename the file in the place of the folder",
    errno.EEXIST: "Rename the file in the place of the folder",
    errno.ENAMETOOLONG: "Choose a shorter name",
    errno.EACCES: "Allow writing to its folder",
    errno.EROFS: "Allow writing to its folder",
}


@contextlib.contextmanager
def one_sentence(what: str | Path, kept: str = "") -> Iterator[None]:
    """Turn any error of a write into one sentence.

    Args:
        what: the file, or another description of what is written.
        kept: a sentence about what the failure does not affect.
    """
    try:
        yield
    except TilewiseError:
        raise
    except Exception as error:  # safetensors wraps a full disk in its own type
        number = error.errno if isinstance(error, OSError) else None
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
        remedy = REMEDIES.get(number or 0, "Free some space or repair the folder")
        kept = f"{kept.rstrip('.')}. " if kept else ""
        raise CheckpointError(
            f"cannot write {what}: {reason.rstrip('.')}. {kept}{remedy}, then start again with the same command"
        ) from error


@contextlib.contextmanager
def replacing(path: Path, kept: str = "") -> Iterator[Path]:
    """Yield a temporary path. At the end of the block its file is flushed to the disk and replaces that of `path`.

    An error leaves the old file unchanged and ends in one sentence.

    Args:
        path: the final path. A link is followed. A device, such as /dev/null, is written directly.
        kept: a sentence about what an error does not affect.
    """
    with one_sentence(path, kept):
        final = Path(os.path.realpath(path))
        if _is_device(final):
            yield final
            return
        # The name of a file has at most 255 bytes, and that of the temporary one is not longer.
        aside = final.with_name(f".writing-{final.name[-40:]}-{os.getpid()}")
        try:
            yield aside
            sync(aside)
            aside.replace(final)
        except BaseException:
            with contextlib.suppress(OSError):
                aside.unlink(missing_ok=True)
            raise


def write_atomically(path: Path, text: str, kept: str = "") -> None:
    """Replace a text file, as `replacing` does."""
    with replacing(path, kept) as aside:
        aside.write_text(text, encoding="utf-8")


def check_new_folder(folder: Path) -> None:
    """Refuse a folder that holds something."""
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise CheckpointError(f"{folder} exists already. Choose a folder that does not exist, or an empty one")


def make_folder(path: Path) -> None:
    """Make a folder and those above it. It may exist."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except RecursionError:
        raise OSError(errno.ENAMETOOLONG, "there are too many folders inside one another", str(path)) from None


def sync(path: Path) -> None:
    """Flush a file or folder to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _is_device(path: Path) -> bool:
    """Return whether a path is a device. Only it and a file that exists or not can be written."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return False
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(mode) and not stat.S_ISCHR(mode):
        raise OSError("it is neither a file nor a device")
    return stat.S_ISCHR(mode)
