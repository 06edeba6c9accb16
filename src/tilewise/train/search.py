"""Find images by words in a trained run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from tilewise.errors import DataError, RangeError
from tilewise.train.data import EvalPairs, SkipLog, Watch
from tilewise.train.evaluate import Encoders
from tilewise.train.evaluate_run import open_pairs
from tilewise.train.load_run import load_run
from tilewise.train.pictures import contact_sheet, terminal_picture
from tilewise.train.progress import counted

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True)
class Hit:
    """A search result: number of the image in the gallery, score, caption and picture."""

    number: int
    score: float
    label: str
    image: Tensor


class Gallery:
    """Images to search in. They are encoded once.

    Args:
        encoders: the model.
        pairs: the images with their captions.
        watch: is called with the number of images encoded so far.
    """

    def __init__(self, encoders: Encoders, pairs: EvalPairs, watch: Watch | None = None) -> None:
        self.encoders, self.pairs = encoders, pairs
        self.features = encoders.images(pairs.images.chunks(encoders.chunk_size, watch))
        self._caption: dict[int, str] = {}
        for text, owner in zip(pairs.texts, pairs.text_ids.tolist(), strict=True):
            self._caption.setdefault(owner, text)

    def search(self, queries: Sequence[str], top: int = 10) -> list[list[Hit]]:
        """Return the best images for each query."""
        if top < 1:
            raise RangeError(f"top must be at least 1, got {top}")
        if not all(query.strip() for query in queries):
            raise RangeError(f"a query must have words, got {list(queries)}. Leave the empty one out")
        text = self.encoders.texts(list(queries))
        results = []
        for row in text:  # one query at a time: (images,) scores
            scores, numbers = (self.features @ row).topk(min(top, len(self.features)))
            images = self.pairs.images.take(numbers.tolist())
            results.append(
                [
                    Hit(number, score, self._label(number), image)
                    for number, score, image in zip(numbers.tolist(), scores.tolist(), images, strict=True)
                ]
            )
        return results

    def _label(self, number: int) -> str:
        return self._caption.get(int(self.pairs.image_ids[number]), "")


def open_gallery(
    folder: str | Path, device: str = "auto", console: Console | None = None, path: str = "", image_root: str = "",
    which: str = "best",
) -> Gallery:  # fmt: skip
    """Encode the held-out images of a run, or the images at a path, for searching."""
    config, encoders, _ = load_run(folder, device, which)
    with counted(console, "reading images") as watch:
        pairs = open_pairs(config.data, encoders.model.pixels.size, path, image_root, SkipLog(), watch)
    if pairs is None:
        raise DataError("this run has no held-out images to search in. Give other images with --pairs")
    with counted(console, "encoding images") as watch:
        return Gallery(encoders, pairs, watch)


def show_hits(console: Console, query: str, hits: Sequence[Hit], columns: int = 5) -> None:
    """Print a query and its best images."""
    from rich.table import Table
    from rich.text import Text

    console.print(Text(query, style="bold"))  # brackets in a query are markup to rich
    if not console.is_terminal:
        for hit in hits:
            console.print(f"  {hit.score:.3f}  {hit.label}", highlight=False, markup=False)
        return

    table = Table.grid(padding=(0, 2))
    shown = hits[: max(1, min(columns, console.width // 18))]
    table.add_row(*(Text("\n").join(terminal_picture(hit.image)) for hit in shown))
    table.add_row(*(Text(f"{hit.label[:16]}\n{hit.score:.3f}", style="dim") for hit in shown))
    console.print(table)


def save_sheet(path: str | Path, queries: Sequence[str], results: Sequence[Sequence[Hit]]) -> Path:
    """Write queries and their best images as one PNG."""
    rows = [[(hit.image, hit.label) for hit in hits] for hits in results]
    target = Path(path)
    try:
        contact_sheet(queries, rows).save(target, "PNG")
    except OSError as error:
        raise DataError(f"cannot write the sheet {target}: {error.strerror or error}") from error
    return target
