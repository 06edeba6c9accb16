"""``tilewise mine``: find hard negatives for a run or for two files of features, and write a training set."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewise.errors import DataError
from tilewise.retrieval import mine_hard_negatives
from tilewise.train.data import SkipLog
from tilewise.train.data.open import open_train_pairs
from tilewise.train.data.records import plain_text
from tilewise.train.evaluate import encode_pairs
from tilewise.train.evaluate_run import open_pairs
from tilewise.train.load_run import load_run
from tilewise.train.progress import counted
from tilewise.train.right_answers import distinct_captions, right_answers
from tilewise.train.terminal import say
from tilewise.train.writing import make_folder, one_sentence, replacing

if TYPE_CHECKING:
    from rich.console import Console

READERS = {".jsonl": "json", ".parquet": "parquet"}  # what datasets.load_dataset calls them


@dataclass(frozen=True)
class Search:
    """Queries and a gallery: their features, their names or texts, and the right answers.

    Args:
        features: (n, d) of the queries and (m, d) of the gallery.
        texts: of the n queries and the m items.
        positives: gallery indices, (n,) or (n, p) padded with -1; None: item i answers query i.
    """

    features: tuple[Tensor, Tensor]
    texts: tuple[list[str], list[str]]
    positives: Tensor | None


def mine(
    console: Console | None, what: Search, target: Path, output_format: str = "triplet", output_scores: bool = False,
    **limits: Any,
) -> int:  # fmt: skip
    """Mine hard negatives and write them as rows of JSON or as Parquet. Returns the number of rows.

    Args:
        console: output; None shows nothing.
        what: what is searched.
        target: the file to write.
        output_format, output_scores: as in `tilewise.retrieval.HardNegatives.columns`.
        limits: arguments of `tilewise.mine_hard_negatives`.
    """
    with counted(console, "pairs compared") as watch:
        found = mine_hard_negatives(*what.features, what.positives, progress=watch or False, **limits)
    columns = found.columns(*what.texts, output_format, output_scores=output_scores)  # type: ignore[arg-type]
    count = len(next(iter(columns.values()), []))
    if not count:
        raise DataError(
            "no query has a right answer and enough hard negatives within these limits, so nothing was written. Lower "
            "the margins or --num-negatives, or raise --max-score"
        )
    with one_sentence(target):
        make_folder(target.parent)
    with replacing(target) as aside:
        _write(aside, target.suffix, columns)
    few = int((found.indices < 0).any(1).sum())
    note = f"; {few:,} of them have fewer negatives than --num-negatives" if few else ""
    say(console, f"written: {target}, {count:,} rows ({', '.join(columns)}) from {len(found.indices):,} queries{note}")
    reader = READERS[target.suffix]
    say(console, f"in Python: datasets.load_dataset({reader!r}, data_files={str(target)!r}, split='train')")
    return count


def check_target(target: Path) -> None:
    """Refuse a file that exists, or whose ending is unknown."""
    if target.suffix not in READERS:
        raise DataError(f"the file of hard negatives must end in .jsonl or .parquet, got {target}. Try {target}.jsonl")
    if target.exists():
        raise DataError(f"{target} exists already, and is not overwritten. Choose another name, or remove it first")


def _write(path: Path, ending: str, columns: dict[str, list[Any]]) -> None:
    if ending == ".parquet":
        import pyarrow
        import pyarrow.parquet as parquet

        parquet.write_table(pyarrow.table(columns), path)
        return
    with path.open("w", encoding="utf-8") as file:
        for row in zip(*columns.values(), strict=True):
            file.write(json.dumps(dict(zip(columns, row, strict=True)), ensure_ascii=False) + "\n")


def search_of_run(
    console: Console | None, run: Path, to_text: bool = False, path: str = "", image_root: str = "",
    which: str = "auto", device: str = "auto",
) -> Search:  # fmt: skip
    """Encode the training pairs of a run, or the pairs at a path. Each caption is used once.

    Args:
        console: output; None shows nothing.
        run: the folder of the run.
        to_text: the images are the queries, and the captions the gallery; otherwise the other way round.
        path, image_root: other pairs, and the folder of their images.
        which, device: checkpoint and device.
    """
    config, encoders, choice = load_run(run, device, which, console)
    skips, pixels = SkipLog(), encoders.model.pixels
    with counted(console, "reading images") as watch:
        if path:
            pairs = open_pairs(config.data, pixels, choice.checkpoint, path, image_root, skips, watch)
            assert pairs is not None
        else:
            pairs = open_train_pairs(config.data, pixels.size, skips, watch)
    pairs, right = distinct_captions(pairs, right_answers(pairs))
    with counted(console, "encoding images") as watch:
        text, image = encode_pairs(encoders, pairs, watch)
    if skips.total:
        say(console, f"{skips.summary()}. First: {skips.examples[0]}")
    names = [plain_text(pairs.images.name(number)) for number in range(len(pairs.images))]
    if to_text:
        return Search((image, text), (names, pairs.texts), right.captions.to(image.device))
    return Search((text, image), (pairs.texts, names), right.images.to(image.device))


def search_of_files(queries: Path, gallery: Path, positives: Path | None = None, normalize: bool = False) -> Search:
    """Read features (.npy or .safetensors), and the texts beside them: lines of a .txt, or a list in a .json.

    Args:
        queries, gallery: the files of features.
        positives: a file of gallery indices; None: item i answers query i.
        normalize: scale every row to length 1, for cosine scores.
    """
    features = [_tensor(path) for path in (queries, gallery)]
    texts = [_texts(path, len(rows)) for path, rows in zip((queries, gallery), features, strict=True)]
    if normalize:
        features = [F.normalize(rows, dim=1) for rows in features]
    right = None if positives is None else _tensor(positives)
    return Search((features[0], features[1]), (texts[0], texts[1]), right)


def _tensor(path: Path) -> Tensor:
    """The only array of a file."""
    try:
        if path.suffix == ".npy":
            import numpy

            return torch.from_numpy(numpy.load(path, allow_pickle=False))
        if path.suffix != ".safetensors":
            raise DataError(f"{path}: a file of features ends in .npy or .safetensors. Save it in one of these formats")
        from safetensors.torch import load_file

        found = load_file(path)
    except DataError:
        raise
    except Exception as error:  # safetensors raises its own type
        raise DataError(f"cannot read the features {path}: {error}. Check the path, or write the file again") from error
    if len(found) != 1:
        raise DataError(f"{path} must have one tensor, it has {', '.join(found) or 'none'}. Save each in its own file")
    return next(iter(found.values()))


def _texts(features: Path, rows: int) -> list[str]:
    """The texts of the rows of a file of features."""
    there = [path for ending in (".txt", ".json") if (path := features.with_suffix(ending)).is_file()]
    if len(there) != 1:
        came = "neither exists" if not there else "both exist"
        raise DataError(
            f"the texts of {features} must be in {features.with_suffix('.txt')} (one per line) or in "
            f"{features.with_suffix('.json')} (a list), and {came}. Write one of them"
        )
    try:
        content = there[0].read_text(encoding="utf-8")
        texts: Sequence[str] = content.split("\n") if there[0].suffix == ".txt" else json.loads(content)
    except ValueError as error:
        raise DataError(f"cannot read the texts {there[0]}: {error}. Write the file again as UTF-8") from error
    if there[0].suffix == ".txt" and texts[-1] == "":
        texts = texts[:-1]
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts) or len(texts) != rows:
        came = f"{len(texts)} entries" if isinstance(texts, list) else type(texts).__name__
        raise DataError(f"{there[0]} must have {rows} texts, one for each row of {features}, got {came}")
    return texts
