"""``tilewise embed``: write the features of images and captions to a safetensors file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from tilewise.errors import DataError
from tilewise.train.data import SkipLog
from tilewise.train.data.records import plain_text
from tilewise.train.evaluate_run import open_pairs
from tilewise.train.load_run import load_run
from tilewise.train.progress import counted
from tilewise.train.terminal import say
from tilewise.train.writing import make_folder, one_sentence, replacing, sync

if TYPE_CHECKING:
    from rich.console import Console


def embed_pairs(
    console: Console | None, run: Path, target: Path, path: str = "", image_root: str = "", which: str = "auto",
    device: str = "auto",
) -> tuple[Path, Path]:  # fmt: skip
    """Encode the held-out pairs of a run, or those at a path, and write two files.

    The safetensors file has ``image`` (N, d) and ``text`` (T, d), unit features in float32, and ``text_image`` (T,),
    int64, the row of ``image`` that each caption belongs to. For icons it is the first of those with the same name. The
    JSON file of the same name has the lists ``images`` (paths) and ``texts`` (captions), in the same order.
    """
    if target.suffix != ".safetensors":
        raise DataError(f"the file of features must end in .safetensors, got {target}. Try {target}.safetensors")
    import torch
    from safetensors.torch import save_file

    config, encoders, choice = load_run(run, device, which, console)
    checkpoint = choice.checkpoint
    skips = SkipLog()
    with counted(console, "reading images") as watch:
        pairs = open_pairs(config.data, encoders.model.pixels, checkpoint, path, image_root, skips, watch)
    if pairs is None:
        raise DataError("this run has no held-out images. Give images with --pairs")
    with counted(console, "encoding images") as watch:
        image = encoders.images(pairs.images.chunks(encoders.chunk_size, watch)).cpu()
    text = encoders.texts(pairs.texts).cpu()
    first: dict[int, int] = {}
    for number, own in enumerate(pairs.image_ids.tolist()):
        first.setdefault(own, number)
    rows = torch.tensor([first[own] for own in pairs.text_ids.tolist()])
    names = {"images": [plain_text(pairs.images.name(n)) for n in range(len(pairs.images))], "texts": pairs.texts}
    beside = target.with_suffix(".json")
    about = {"model": plain_text(str(run)), "step": str(checkpoint.step)}
    with one_sentence(target):
        make_folder(target.parent)
    with replacing(beside) as lists, replacing(target) as features:
        with one_sentence(beside):  # on the disk, too, before one of the two files is replaced
            lists.write_text(json.dumps({**about, **names}, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
            sync(lists)
        save_file({"image": image.contiguous(), "text": text.contiguous(), "text_image": rows}, features, about)
    if skips.total:
        say(console, f"{skips.summary()}. First: {skips.examples[0]}")
    return target, beside
