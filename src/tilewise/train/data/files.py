"""Reading, cropping and counting of broken records, shared by all sources of image files."""

from __future__ import annotations

from concurrent.futures import CancelledError
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from tilewise.train.data.images import centre_box, decode, random_box, to_tensor
from tilewise.train.data.records import Draw, Record, RecordError, Rows, SkipLog
from tilewise.train.data.workers import Workers


@dataclass(frozen=True)
class Preparation:
    """Settings for converting an image to a tensor: its size, and the limits of the random crop (None: the centre)."""

    size: int
    crop_scale: tuple[float, float] | None = None
    crop_ratio: tuple[float, float] = (0.75, 4 / 3)


class Reader(Protocol):
    """Reads records by their keys."""

    def read(self, key: int) -> Record:
        """Return the record of a key, or raise `RecordError`."""

    def describe(self, key: int) -> str:
        """Return the location of the record, for messages."""


def prepare_rows(reader: Reader, keys: Tensor, how: Preparation, draw: Draw, skips: SkipLog, pool: Workers) -> Rows:
    """Read and decode the records of these keys on the threads of the pool. The rows keep the order of the keys.

    Raises ``CancelledError`` once the batch is no longer needed, so that a run can stop without decoding it to the end.
    """

    def one(key: int) -> tuple[Tensor, str, int] | None:
        if draw.unwanted is not None and draw.unwanted.is_set():
            raise CancelledError
        try:
            record = reader.read(key)
            rng = draw.for_key(key)
            caption = rng.choice(record.captions)
            image = decode(record.image)
            box = (
                random_box(*image.size, how.crop_scale, how.crop_ratio, rng)
                if how.crop_scale
                else centre_box(*image.size)
            )
            return to_tensor(image, box, how.size), caption, record.id
        except RecordError as error:
            skips.add(str(error), reader.describe(key))
            return None

    made = pool.map(one, keys.tolist(), None if draw.unwanted is None else draw.unwanted.is_set)
    good = [row for row in made if row is not None]
    images = torch.stack([row[0] for row in good]) if good else torch.empty(0, 3, how.size, how.size, dtype=torch.uint8)
    ids = torch.tensor([row[2] for row in good], dtype=torch.int64)
    return Rows(images, [row[1] for row in good], ids, left_out=len(made) - len(good))
