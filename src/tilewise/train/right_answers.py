"""Which images are right for a caption, and which captions for an image.

Axes: N images, T captions, p most right answers of a query.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.train.data import EvalPairs


class RightAnswers(NamedTuple):
    """Right answers in both directions, as indices padded with -1."""

    images: Tensor  #: (T, p): the images that are right for each caption
    captions: Tensor  #: (N, p): the captions that are right for each image


def right_answers(pairs: EvalPairs, own_captions: bool = False) -> RightAnswers:
    """Return the right answers of every caption and image.

    A caption is right for an image if both have the same id, and for the images of equal captions: if three images have
    the caption "a dog", all three are right for it, and all three captions for each of them. The other captions of
    these images stay their own.

    Args:
        pairs: images and captions with their ids.
        own_captions: only the ids count, as in the usual scores of Flickr30k and COCO.
    """
    with_id: dict[int, list[int]] = defaultdict(list)
    for image, own in enumerate(pairs.image_ids.tolist()):
        with_id[own].append(image)
    text_ids = pairs.text_ids.tolist()
    keys: Sequence[str | int] = text_ids if own_captions else pairs.texts
    owners: dict[str | int, set[int]] = defaultdict(set)
    for key, own in zip(keys, text_ids, strict=True):
        owners[key].add(own)
    images_of = {key: sorted(image for own in ids for image in with_id[own]) for key, ids in owners.items()}
    images = [images_of[key] for key in keys]
    captions: list[list[int]] = [[] for _ in range(len(pairs.image_ids))]
    for caption, right in enumerate(images):
        for image in right:
            captions[image].append(caption)
    return RightAnswers(_padded(images), _padded(captions))


def _padded(lists: Sequence[list[int]]) -> Tensor:
    """Lists of indices as one tensor, padded with -1."""
    width = max((len(one) for one in lists), default=0)
    return torch.tensor([one + [-1] * (width - len(one)) for one in lists], dtype=torch.int64)


def distinct_captions(pairs: EvalPairs, right: RightAnswers) -> tuple[EvalPairs, RightAnswers]:
    """Return the pairs with each caption once, as its first occurrence. The right answers are those of `pairs`."""
    first: dict[str, int] = {}
    for number, text in enumerate(pairs.texts):
        first.setdefault(text, number)
    kept = torch.tensor([*first.values()])
    place = torch.full((len(pairs.texts) + 1,), -1)
    place[kept] = torch.arange(len(kept))  # other captions, and padding, become -1
    captions = place[right.captions]
    width = int((captions >= 0).sum(1).max())
    captions = captions.sort(dim=1, descending=True, stable=True).values[:, :width]
    once = dataclasses.replace(pairs, texts=list(first), text_ids=pairs.text_ids[kept])
    return once, RightAnswers(right.images[kept], captions)
