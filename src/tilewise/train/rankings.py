"""Files about a retrieval evaluation: the rank of every right answer, and the formats of TREC and BEIR."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from tilewise.retrieval import nearest, write_beir, write_trec
from tilewise.train.data import EvalPairs
from tilewise.train.data.records import plain_text
from tilewise.train.evaluate import Ranking
from tilewise.train.writing import make_folder, one_sentence, write_atomically

DEPTH = 100  # items of each query in a run of TREC
KINDS = ("caption", "image")
FOLDERS = {"t2i": "text-to-image", "i2t": "image-to-text"}


def export_rankings(
    folder: Path, pairs: EvalPairs, features: tuple[Tensor, Tensor], rankings: dict[str, Ranking]
) -> None:
    """Write a sub-folder for each direction, with ``ranks.tsv`` and the files of `write_trec` and `write_beir`.

    ``ranks.tsv`` has a line for each query and right answer: the names of both, and the rank, counted from 1.

    Args:
        folder: an empty folder, or one that does not exist.
        pairs: the captions and images.
        features: those of the captions and of the images.
        rankings: of both directions.
    """
    names = [[f"{kind}-{number}" for number in range(len(rows))] for kind, rows in zip(KINDS, features, strict=True)]
    texts = [pairs.texts, [plain_text(pairs.images.name(number)) for number in range(len(pairs.images))]]
    for (direction, ranking), order in zip(rankings.items(), ((0, 1), (1, 0)), strict=True):
        target, (query, gallery) = folder / FOLDERS[direction], order
        found = nearest(features[query], features[gallery], min(DEPTH, ranking.items))
        lines = ["query-id\titem-id\trank"]
        for name, right, ranks in zip(names[query], ranking.right.tolist(), ranking.ranks.tolist(), strict=True):
            answers = [(item, rank) for item, rank in zip(right, ranks, strict=True) if item >= 0]
            lines += [f"{name}\t{names[gallery][item]}\t{rank + 1}" for item, rank in answers]
        with one_sentence(target):
            make_folder(target)
            write_trec(target, names[query], names[gallery], found, ranking.right)
            write_beir(target, names[query], names[gallery], texts[query], texts[gallery], ranking.right)
        write_atomically(target / "ranks.tsv", "\n".join(lines) + "\n")
