"""Find images by words, and captions by an image, in a trained run."""

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
from tilewise.train.terminal import one_cell, say
from tilewise.train.untrusted import one_line
from tilewise.train.writing import replacing

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

RIGHT = "*"  # printed with an answer that is known to be right


@dataclass(frozen=True)
class Hit:
    """A search result.

    Args:
        number: number of the image or caption in the gallery.
        score: cosine similarity.
        label: the caption.
        image: the picture; None for a caption.
        right: whether the gallery pairs the result with the query, so that it is known to be right.
    """

    number: int
    score: float
    label: str
    image: Tensor | None = None
    right: bool = False


class Gallery:
    """Images to search in, with their captions. They are encoded once.

    Args:
        encoders: the model.
        pairs: the images with their captions.
        watch: is called with the number of images encoded so far.
    """

    def __init__(self, encoders: Encoders, pairs: EvalPairs, watch: Watch | None = None) -> None:
        self.encoders, self.pairs = encoders, pairs
        self.features = encoders.images(pairs.images.chunks(encoders.chunk_size, watch))
        self._first_caption: dict[int, str] = {}
        self._owners: dict[str, set[int]] = {}  # each caption once, with the ids of the images that it belongs to
        for text, owner in zip(pairs.texts, pairs.text_ids.tolist(), strict=True):
            self._first_caption.setdefault(owner, text)
            self._owners.setdefault(text, set()).add(owner)
        self._text_features: Tensor | None = None

    def search(self, queries: Sequence[str], top: int = 10) -> list[list[Hit]]:
        """Return the best images for each query. If a query is a caption of the gallery, its images are right."""
        _check_top(top)
        if not all(query.strip() for query in queries):
            raise RangeError(f"a query must have words, got {list(queries)}. Leave the empty one out")
        features = self.encoders.texts(list(queries))
        return [self._images_for(query, row, top) for query, row in zip(queries, features, strict=True)]

    def _images_for(self, query: str, row: Tensor, top: int) -> list[Hit]:
        right = self._owners.get(query.strip(), set())
        scores, numbers = (self.features @ row).topk(min(top, len(self.features)))
        images = self.pairs.images.take(numbers.tolist())
        hits = []
        for number, score, image in zip(numbers.tolist(), scores.tolist(), images, strict=True):
            owner = int(self.pairs.image_ids[number])
            hits.append(Hit(number, score, self._first_caption.get(owner, ""), image, owner in right))
        return hits

    def captions(self, files: Sequence[Path], top: int = 10) -> list[list[Hit]]:
        """Return the best captions for each image file. If a file is in the gallery, its captions are right."""
        _check_top(top)
        from tilewise.train.inference import ImageTextModel

        features = ImageTextModel(self.encoders, "").encode_image(files)
        texts = list(self._owners)
        if self._text_features is None:
            self._text_features = self.encoders.texts(texts)
        results = []
        for file, row in zip(files, features, strict=True):
            number = self.pairs.images.number_of(file)
            own = None if number is None else int(self.pairs.image_ids[number])
            scores, numbers = (self._text_features @ row).topk(min(top, len(texts)))
            results.append(
                [
                    Hit(number, score, texts[number], right=own in self._owners[texts[number]])
                    for number, score in zip(numbers.tolist(), scores.tolist(), strict=True)
                ]
            )
        return results


def _check_top(top: int) -> None:
    if top < 1:
        raise RangeError(f"top must be at least 1, got {top}")


def open_gallery(
    folder: str | Path, device: str = "auto", console: Console | None = None, path: str = "", image_root: str = "",
    which: str = "auto",
) -> Gallery:  # fmt: skip
    """Encode the held-out images of a run, or the images at a path, for searching."""
    config, encoders, choice = load_run(folder, device, which, console)
    with counted(console, "reading images") as watch:
        pixels = encoders.model.pixels
        pairs = open_pairs(config.data, pixels, choice.checkpoint, path, image_root, SkipLog(), watch)
    if pairs is None:
        raise DataError("this run has no held-out images to search in. Give other images with --pairs")
    with counted(console, "encoding images") as watch:
        return Gallery(encoders, pairs, watch)


def show_hits(console: Console, query: str, hits: Sequence[Hit], columns: int = 5) -> None:
    """Print a query and its results: pictures in a terminal, lines elsewhere and for captions."""
    from rich.table import Table
    from rich.text import Text

    console.print(one_cell(query, "bold"), soft_wrap=True)
    pictures = [hit.image for hit in hits if hit.image is not None]
    if not console.is_terminal or not pictures:
        for hit in hits:
            mark = RIGHT if hit.right else " "
            say(console, f"{mark} {hit.score:.3f}  {hit.label}")
        return
    count = max(1, min(columns, console.width // 18))
    table = Table.grid(padding=(0, 2))
    for _ in range(count):
        table.add_column(width=16, overflow="fold")
    table.add_row(*(Text("\n").join(terminal_picture(image)) for image in pictures[:count]))
    table.add_row(*(_under(hit) for hit in hits[:count]))
    console.print(table)


def _under(hit: Hit) -> Text:
    from rich.text import Text

    mark = f" {RIGHT}" if hit.right else ""
    return Text(f"{hit.score:.3f}{mark}\n{one_line(hit.label)}", style="bold green" if hit.right else "dim")


def save_sheet(path: str | Path, queries: Sequence[str], results: Sequence[Sequence[Hit]]) -> Path:
    """Write queries and their best images as one PNG. Right answers have a green frame."""
    rows = [[(hit.image, hit.label, hit.right) for hit in hits if hit.image is not None] for hits in results]
    target = Path(path)
    with replacing(target) as aside:
        contact_sheet(queries, rows).save(aside, "PNG")
    return target
