"""Recall in both directions, and zero-shot classification. Both rank without a stored score matrix.

Axes: N images, T captions, c classes, d features.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewise.errors import RangeError
from tilewise.retrieval import recall_at_k, retrieval_metrics, retrieval_ranks
from tilewise.train.data import EvalPairs, Watch
from tilewise.train.models import TwoTowers
from tilewise.train.objective import AUTOCAST
from tilewise.train.right_answers import RightAnswers, right_answers

KS = (1, 5, 10)


class Encoders:
    """A model that encodes in chunks, without a graph.

    Args:
        model: both towers. They are set to evaluation mode.
        device: device of the model.
        precision: precision of the encoders, as in training.
        chunk_size: rows that are encoded at once.
    """

    def __init__(
        self, model: TwoTowers, device: torch.device, precision: str = "float32", chunk_size: int = 512
    ) -> None:
        self.model = model.eval()
        self.device, self.precision, self.chunk_size = device, precision, chunk_size

    def _autocast(self) -> Any:
        dtype = AUTOCAST.get(self.precision, torch.bfloat16)
        return torch.autocast(self.device.type, dtype, enabled=self.precision in AUTOCAST)

    @torch.inference_mode()
    def images(self, chunks: Iterable[Tensor]) -> Tensor:
        """Return unit features (N, d)."""
        with self._autocast():
            return torch.cat([self.model.image(chunk.to(self.device)).float() for chunk in chunks])

    @torch.inference_mode()
    def texts(self, texts: Sequence[str]) -> Tensor:
        """Return unit features (T, d)."""
        parts = []
        with self._autocast():
            for start in range(0, len(texts), self.chunk_size):
                tokens = self.model.tokenizer(list(texts[start : start + self.chunk_size]))
                tokens = {name: value.to(self.device) for name, value in tokens.items()}
                parts.append(self.model.text(**tokens).float())
        return torch.cat(parts)


class Ranking(NamedTuple):
    """The right answers of the queries of one direction, and their ranks among the n items of the gallery."""

    right: Tensor  #: (q, p): their indices, padded with -1
    ranks: Tensor  #: (q, p): their ranks, from 0; -1 for padding
    items: int  #: n


def rank_pairs(text: Tensor, image: Tensor, right: RightAnswers) -> dict[str, Ranking]:
    """Rank the right images of each caption (``t2i``) and the right captions of each image (``i2t``).

    Args:
        text: unit features of the captions, (T, d).
        image: unit features of the images, (N, d).
        right: their right answers.
    """
    t2i = retrieval_ranks(text, image, right.images.to(text.device)).cpu()
    i2t = retrieval_ranks(image, text, right.captions.to(text.device)).cpu()
    return {"t2i": Ranking(right.images, t2i, len(image)), "i2t": Ranking(right.captions, i2t, len(text))}


def ranking_metrics(rankings: dict[str, Ranking], ks: Sequence[int] = KS) -> dict[str, float]:
    """Return recalls (``t2i_r10``) with those of a random order (``t2i_chance10``), and ``mrr``, ``map``, ``ndcg10``.

    Recall at k is the share of queries with a right answer among the first k.
    """
    result: dict[str, float] = {}
    for name, (right, ranks, items) in rankings.items():
        for k, recall in recall_at_k(ranks, ks).items():
            result[f"{name}_r{k}"] = recall
            result[f"{name}_chance{k}"] = chance_recall((right >= 0).sum(1), items, k)
        found = retrieval_metrics(ranks, ks=(10,))
        result |= {f"{name}_mrr": found["mrr"], f"{name}_map": found["map"], f"{name}_ndcg10": found["ndcg@10"]}
    return result


def evaluate_retrieval(
    encoders: Encoders, pairs: EvalPairs, ks: Sequence[int] = KS, watch: Watch | None = None
) -> dict[str, float]:
    """Encode pairs and return `ranking_metrics` in both directions. Equal captions are right answers of one another."""
    text, image = encode_pairs(encoders, pairs, watch)
    return ranking_metrics(rank_pairs(text, image, right_answers(pairs)), ks)


def encode_pairs(encoders: Encoders, pairs: EvalPairs, watch: Watch | None = None) -> tuple[Tensor, Tensor]:
    """Return unit features of the captions (T, d) and of the images (N, d)."""
    image = encoders.images(pairs.images.chunks(encoders.chunk_size, watch))
    return encoders.texts(pairs.texts), image


def telling_k(metrics: dict[str, float]) -> int:
    """Return the k of the recall that is shown first: the largest at which chance finds at most a quarter.

    With few held-out images, recall at 10 is nearly 100 % whatever the model has learned.

    >>> telling_k({"t2i_chance1": 0.08, "t2i_chance5": 0.4, "t2i_chance10": 0.8})
    1
    """
    return max([k for k in KS if metrics.get(f"t2i_chance{k}", 1.0) <= 0.25], default=KS[0])


def chance_recall(right: Tensor, m: int, k: int) -> float:
    """Return recall at k of a random order: ``mean_i 1 - C(m - p_i, k) / C(m, k)``.

    Args:
        right: (n,), p_i: how many of the m items are right for each query. A query without one is left out.
        m: the number of items.
        k: how many of them are found.

    >>> chance_recall(torch.ones(100), 100, 10)
    0.1
    """
    right = right[right > 0].double()
    missed = torch.ones_like(right)
    for i in range(min(k, m)):
        missed *= ((m - right - i) / (m - i)).clamp(min=0)
    return round(float((1 - missed).mean()), 12)


def check_templates(templates: Sequence[str]) -> None:
    """Refuse templates without a place for the class."""
    wrong = [t for t in templates if "{}" not in t]
    if wrong:
        raise RangeError(f"a template must have {{}} in the place of the class, got {wrong[0]!r}")


def class_features(encoders: Encoders, classes: Sequence[str], templates: Sequence[str]) -> Tensor:
    """Return the mean feature of each class over templates such as "a photo of a {}": unit rows (c, d)."""
    if not classes or not templates:
        raise RangeError(f"zero-shot needs classes and templates, got {len(classes)} and {len(templates)}")
    check_templates(templates)
    texts = [template.replace("{}", name) for name in classes for template in templates]
    features = encoders.texts(texts).view(len(classes), len(templates), -1)
    return F.normalize(features.mean(1), dim=-1)


def evaluate_zero_shot(
    encoders: Encoders,
    images: Iterable[Tensor],
    labels: Tensor,
    classes: Sequence[str],
    templates: Sequence[str] = ("{}",),
) -> dict[str, Any]:
    """Return the share of images whose class ranks first (``top1``) and among the first five (``top5``).

    ``top1_chance`` and ``top5_chance`` are the values of a random order. ``per_class`` has one entry per class: its
    number of images, its ``top1``, and the other class that its images are most often taken for ("" if there is none).

    Args:
        images: chunks of uint8 images, N in total.
        labels: (N,), indices into `classes`.
        classes: names of the classes.
        templates: sentences with {} in the place of the name.
    """
    image, text = encoders.images(images), class_features(encoders, classes, templates)
    ranks = retrieval_ranks(image, text, labels.to(image.device))
    found = recall_at_k(ranks, (1, 5))
    count = len(classes)
    chance = {"top1_chance": 1 / count, "top5_chance": min(1.0, 5 / count)}
    chosen = torch.cat([(rows @ text.T).argmax(1) for rows in image.split(encoders.chunk_size)]).cpu()
    per_class = {name: _class_result(number, labels.cpu(), chosen, classes) for number, name in enumerate(classes)}
    return {"top1": found[1], "top5": found[5], "classes": float(count), **chance, "per_class": per_class}


def _class_result(number: int, labels: Tensor, chosen: Tensor, classes: Sequence[str]) -> dict[str, Any]:
    taken = chosen[labels == number]
    wrong = taken[taken != number]
    other = classes[int(wrong.mode().values)] if len(wrong) else ""
    return {"images": len(taken), "top1": 1 - len(wrong) / len(taken) if len(taken) else 0.0, "taken_for": other}
