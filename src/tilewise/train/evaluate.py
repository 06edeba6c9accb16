"""Recall in both directions, and zero-shot classification. Both rank without a stored score matrix.

Axes: N images, T captions, c classes, d features.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewise.errors import RangeError
from tilewise.retrieval import recall_at_k, retrieval_ranks, retrieval_ranks_both
from tilewise.train.data import EvalPairs, Watch
from tilewise.train.models import TwoTowers
from tilewise.train.objective import AUTOCAST

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


def evaluate_retrieval(
    encoders: Encoders, pairs: EvalPairs, ks: Sequence[int] = KS, watch: Watch | None = None
) -> dict[str, float]:
    """Return recall at k from text to image (``t2i_r10``) and from image to text (``i2t_r10``), with chance levels.

    An image and a caption with the same id are right answers for each other. An image can have several captions, and a
    caption several images.
    """
    image = encoders.images(pairs.images.chunks(encoders.chunk_size, watch))
    text = encoders.texts(pairs.texts)
    text_ids, image_ids = pairs.text_ids.to(image.device), pairs.image_ids.to(image.device)
    ranks = retrieval_ranks_both(text, image, query_ids=text_ids, gallery_ids=image_ids)
    result: dict[str, float] = {}
    sides = (
        ("t2i", ranks.query_to_gallery, pairs.text_ids, pairs.image_ids),
        ("i2t", ranks.gallery_to_query, pairs.image_ids, pairs.text_ids),
    )
    for name, found, query_ids, gallery_ids in sides:
        for k, recall in recall_at_k(found, ks).items():
            result[f"{name}_r{k}"] = recall
            result[f"{name}_chance{k}"] = chance_recall(query_ids, gallery_ids, k)
    return result


def telling_k(metrics: dict[str, float]) -> int:
    """Return the k of the recall that is shown first: the largest at which chance finds at most a quarter.

    With few held-out images, recall at 10 is nearly 100 % whatever the model has learned.

    >>> telling_k({"t2i_chance1": 0.08, "t2i_chance5": 0.4, "t2i_chance10": 0.8})
    1
    """
    return max([k for k in KS if metrics.get(f"t2i_chance{k}", 1.0) <= 0.25], default=KS[0])


def chance_recall(query_ids: Tensor, gallery_ids: Tensor, k: int) -> float:
    """Return recall at k of a random order: ``mean_i 1 - C(m - p_i, k) / C(m, k)`` with p_i right answers among m.

    >>> chance_recall(torch.arange(100), torch.arange(100), 10)
    0.1
    """
    m = len(gallery_ids)
    values, counts = gallery_ids.unique(return_counts=True)
    place = torch.searchsorted(values, query_ids).clamp(max=len(values) - 1)
    right = torch.where(values[place] == query_ids, counts[place], 0)
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
