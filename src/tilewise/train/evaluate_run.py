"""``tilewise evaluate``: evaluate a run on its own held-out pairs or on others."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from tilewise.errors import DataError
from tilewise.train.checkpoint import Checkpoint
from tilewise.train.config import DataConfig, source_of
from tilewise.train.data import EvalPairs, SkipLog, Watch, open_eval_pairs
from tilewise.train.data.files import Preparation
from tilewise.train.data.open import EvalImages, try_images
from tilewise.train.data.records import plain_text
from tilewise.train.data.table import Entry, FileSource, image_files, words_of
from tilewise.train.evaluate import (
    KS,
    Encoders,
    check_templates,
    encode_pairs,
    evaluate_zero_shot,
    rank_pairs,
    ranking_metrics,
)
from tilewise.train.load_run import load_run
from tilewise.train.models.towers import Pixels
from tilewise.train.progress import counted
from tilewise.train.rankings import export_rankings
from tilewise.train.right_answers import right_answers
from tilewise.train.terminal import one_cell, say
from tilewise.train.writing import check_new_folder, write_atomically


@dataclass(frozen=True)
class Evaluation:
    """What to evaluate a run on, and what to write.

    Args:
        pairs: a path of pairs; empty: the held-out pairs of the run.
        images: base folder of relative image paths in `pairs`.
        image_column, text_column: columns of a table in `pairs`; empty: those of the run.
        id_column: column of a table in `pairs`, or entry of the .json of shards, with ids; empty: none.
        own_captions: captions are right for their own image only, whatever other images have the same caption.
        zero_shot: folder with one sub-folder of images per class.
        templates: sentences with {} for the class.
        export: folder for the ranks and the files of TREC and BEIR.
    """

    pairs: str = ""
    images: str = ""
    image_column: str = ""
    text_column: str = ""
    id_column: str = ""
    own_captions: bool = False
    zero_shot: Path | None = None
    templates: tuple[str, ...] = ("{}",)
    export: Path | None = None

    @property
    def file(self) -> str:
        """The name of the file of results: every set of pairs and classes has its own.

        >>> Evaluation().file
        'evaluation.json'
        """
        sets = [os.path.realpath(one) for one in (self.pairs, self.zero_shot) if one]
        if not sets:
            return "evaluation.json"
        names = "-".join(re.sub(r"[^\w.-]+", "_", plain_text(Path(one).stem))[:40] for one in sets)
        digest = hashlib.blake2b("\0".join(sets).encode(errors="surrogatepass"), digest_size=3).hexdigest()
        return f"evaluation-{names}-{digest}.json"


def evaluate_run(
    console: Console, run: Path, what: Evaluation, device: str = "auto", which: str = "auto"
) -> dict[str, Any]:
    """Evaluate a run, show the result, and write it to a file in the folder of the run."""
    if what.export is not None:
        check_new_folder(what.export)
    config, encoders, choice = load_run(run, device, which, console)
    result: dict[str, Any] = {"step": choice.step}
    skips = SkipLog()
    data = dataclasses.replace(
        config.data,
        image_column=what.image_column or config.data.image_column,
        text_column=what.text_column or config.data.text_column,
    )
    classes = None
    if what.zero_shot is not None:
        with counted(console, "reading images of classes") as watch:
            classes = open_classes(encoders, what.zero_shot, list(what.templates), skips, data, watch)
    held_out = None
    try:
        with counted(console, "reading held-out images") as watch:
            held_out = open_pairs(
                data, encoders.model.pixels, choice.checkpoint, what.pairs, what.images, skips, watch, what.id_column
            )
    except DataError as error:
        if classes is None or what.pairs:  # zero-shot needs none of the run's own pairs, which may have moved
            raise
        say(console, f"no recall: {error}")
    if held_out is not None:
        result |= _retrieve(console, encoders, held_out, what, data)
    elif what.export is not None:
        raise DataError("there are no ranks to write: the run has no held-out pairs. Give --pairs")
    if classes is not None:
        with counted(console, "encoding images of classes") as watch:
            result["zero_shot"] = classify(encoders, classes, list(what.templates), watch)
        result["classes"] = plain_text(os.path.realpath(what.zero_shot or ""))
        _show_zero_shot(console, result["zero_shot"], what.file)
    if len(result) == 1:
        raise DataError("nothing to evaluate on: the run has no held-out pairs. Give --pairs or --zero-shot")
    if skips.total:
        say(console, f"{skips.summary()}. First: {skips.examples[0]}")
    write_atomically(run / what.file, json.dumps(result, indent=1))
    say(console, f"written to {run / what.file}")
    return result


def _retrieve(
    console: Console, encoders: Encoders, pairs: EvalPairs, what: Evaluation, data: DataConfig
) -> dict[str, Any]:
    """Rank in both directions, and show and export the result."""
    with counted(console, "encoding held-out images") as watch:
        features = encode_pairs(encoders, pairs, watch)
    rankings = rank_pairs(*features, right_answers(pairs, what.own_captions))
    found = ranking_metrics(rankings)
    console.print(recall_table(found, f"recall on {what.pairs}" if what.pairs else "held-out recall"))
    if what.export is not None:
        export_rankings(what.export, pairs, features, rankings)
        say(console, f"ranks and files for ir-measures and BEIR: {what.export}")
    name = os.path.realpath(what.pairs) if what.pairs else data.eval_path or f"held out of {data.path or 'the icons'}"
    about = {"pairs": plain_text(name), "images": len(pairs.images), "captions": len(pairs.texts)}
    return {**about, "own_captions": what.own_captions, "retrieval": found}


def _show_zero_shot(console: Console, found: dict[str, Any], file: str) -> None:
    """Print the accuracy, and that of each class."""
    count = found["classes"]
    five = f", top-5 {100 * found['top5']:.1f} % (chance {500 / count:.1f} %)" if count > 5 else ""
    one = f"top-1 {100 * found['top1']:.1f} % (chance {100 / count:.1f} %)"
    say(console, f"zero-shot over {count:.0f} classes: {one}{five}")
    console.print(class_table(found["per_class"], file))


def recall_table(metrics: dict[str, float], title: str = "held-out recall") -> Table:
    """Return a table of recalls in both directions, compared with chance, and of the other metrics."""
    table = Table(title=one_cell(f"{title}, and how many times chance", "table.title"))
    table.add_column("")
    for direction in ("text to image", "image to text"):
        table.add_column(direction, justify="right")
    for k in KS:
        pairs = [(metrics[f"{key}_r{k}"], metrics[f"{key}_chance{k}"]) for key in ("t2i", "i2t")]
        table.add_row(
            f"recall at {k}", *(f"{100 * recall:.1f} % ({recall / chance:.0f} x)" for recall, chance in pairs)
        )
    for key, name in (("mrr", "MRR"), ("map", "MAP"), ("ndcg10", "NDCG at 10")):
        if f"t2i_{key}" in metrics:  # not in the log of a run of an earlier version
            table.add_row(name, *(f"{metrics[f'{side}_{key}']:.3f}" for side in ("t2i", "i2t")))
    return table


def class_table(per_class: dict[str, dict[str, Any]], file: str, most: int = 30) -> Table:
    """Return a table of the results per class, the worst classes first."""
    title = f"the {most} worst classes of {len(per_class)}" if len(per_class) > most else "results per class"
    table = Table(title=f"{title}; all are in {file}")
    table.add_column("class", overflow="fold")
    table.add_column("images", justify="right")
    table.add_column("top-1", justify="right")
    table.add_column("most often taken for", overflow="fold")
    for name, found in sorted(per_class.items(), key=lambda item: item[1]["top1"])[:most]:
        share = f"{100 * found['top1']:.1f} %"
        table.add_row(one_cell(name), f"{found['images']:,}", share, one_cell(found["taken_for"]))
    return table


def open_pairs(
    config: DataConfig, pixels: Pixels, checkpoint: Checkpoint, path: str, image_root: str, skips: SkipLog,
    watch: Watch | None = None, id_column: str = "",
) -> EvalPairs | None:  # fmt: skip
    """Open the held-out pairs of the run, or those at a path. The name of the path determines its kind.

    Args:
        config: the data of the run.
        pixels: input of the model.
        checkpoint: the checkpoint in use. It has the number of training pairs.
        path, image_root: other pairs, and the folder of their images.
        skips: log of skipped records.
        watch: is called with the number of images read so far.
        id_column: column of a table of other pairs, or entry of the .json of their shards, with ids.
    """
    if not path:
        if config.source in ("folder", "table") and not config.eval_path and not Path(config.path).exists():
            raise DataError(
                f"the pairs of the run were in {config.path}, which does not exist here. Start the command in the "
                "folder in which the run was trained, or give pairs with --pairs"
            )
        trained_on = checkpoint.state.get("pairs")  # checkpoints of earlier versions have none
        return open_eval_pairs(config, pixels.size, skips, watch=watch, trained_on=trained_on)
    kind = source_of(path)
    if id_column and kind not in ("table", "shards"):
        raise DataError(f"only a table or shards have ids (--id-column), and {path} is neither. Leave the option out")
    config = dataclasses.replace(config, id_column="", eval_share=0.0)  # of the run's own pairs
    if path.endswith(".zip"):
        if pixels.channels != 1:
            raise DataError(
                f"{path} is an icon file (.zip) with grey pictures, and the model reads colour images. Give a folder, "
                "a table or shards of colour images"
            )
        return open_eval_pairs(dataclasses.replace(config, source="icons"), pixels.size, skips, path)
    if config.source == "icons":
        raise DataError("a model trained on icons is evaluated on an icon file (.zip); it does not read colour images")
    other = dataclasses.replace(
        config, source=kind, path=path, image_root=image_root, augment="none", id_column=id_column
    )
    return open_eval_pairs(other, pixels.size, skips, path, watch)


class Classes(NamedTuple):
    """Usable images, the class of each, and the names of the classes."""

    images: EvalImages
    labels: Tensor
    names: list[str]


def open_classes(
    encoders: Encoders, folder: Path, templates: list[str], skips: SkipLog, config: DataConfig,
    watch: Watch | None = None,
) -> Classes:  # fmt: skip
    """Open images in one sub-folder per class. Problems are found before anything is encoded."""
    check_templates(templates)
    classes: dict[str, Path] = {}
    entries: list[Entry] = []
    labels: list[int] = []
    for path in sorted(p for p in folder.iterdir() if p.is_dir()) if folder.is_dir() else []:
        files = image_files(path)
        if path.name.startswith(".") or not files:
            continue
        name = plain_text(words_of(path.name))
        if name in classes:
            raise DataError(
                f"the folders {classes[name].name!r} and {path.name!r} in {folder} are both the class {name!r}. Every "
                "class needs a name of its own: rename one of them, or merge them"
            )
        entries += [Entry(str(file), [path.name]) for file in files]
        labels += [len(classes)] * len(files)
        classes[name] = path
    if not entries:
        came = "holds no images in sub-folders" if folder.is_dir() else "is not a folder"
        came = came if folder.exists() else "does not exist"
        raise DataError(f"{folder} {came}; zero-shot needs a folder with one sub-folder per class")
    if encoders.model.pixels.channels != 3:
        raise DataError("zero-shot classification of files needs a model that reads colour images, not the icon model")
    if len(classes) < 2:
        raise DataError(
            f"{folder} has only one sub-folder with images, {next(iter(classes.values())).name!r}, so every answer "
            "would be right. Give the folder that contains the folders of the classes"
        )
    source = FileSource(entries, Preparation(encoders.model.pixels.size), config.workers)
    images = try_images(source, skips, config.eval_memory_mib, watch)
    if not len(images):
        raise DataError(f"no usable images below {folder}: {skips.summary()}. First: {skips.examples[0]}")
    return Classes(images, torch.tensor(labels)[images.keys], list(classes))


def classify(encoders: Encoders, classes: Classes, templates: list[str], watch: Watch | None = None) -> dict[str, Any]:
    """Classify images by the names of their classes."""
    chunks = classes.images.chunks(encoders.chunk_size, watch)
    return evaluate_zero_shot(encoders, chunks, classes.labels, classes.names, templates)
