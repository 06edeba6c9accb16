"""The icon set in memory: small grey images, their captions and their families.

Axes: N icons, S rows and S columns of a picture.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from tilewise.errors import DataError
from tilewise.train.icons.pack import Pack, read_pack

SplitName = Literal["train", "test"]
SHIPPED = "icons.zip"


@dataclass(frozen=True)
class IconFamily:
    """Icons of one project, and their licence."""

    key: str  # "lucide"
    title: str
    licence: str  # SPDX identifier
    source: str  # package and version
    author: str
    url: str
    count: int


@dataclass(frozen=True, eq=False)
class IconSet:
    """Icons with their texts. Entry i of every field belongs to icon i.

    Attributes:
        images: uint8 (N, S, S), grey: 255 is paper, 0 is ink.
        captions: the name in words, without the style: "arrow left circle". The text to train with.
        names: the name in its family: "arrow-left-circle-bold".
        tags: further words from the family, such as synonyms; often empty.
        families: the key of the icon's family.
        styles: the family's name of the drawing style: "", "bold", "filled", ...
        name_ids: int64 (N,). Icons with equivalent captions share a number, in both splits. They are no negatives of
            one another in training, and each is a right answer in evaluation.
        about: the families by key, with their licences.
        test_families: the held-out families.
    """

    images: Tensor
    captions: list[str]
    names: list[str]
    tags: list[tuple[str, ...]]
    families: list[str]
    styles: list[str]
    name_ids: Tensor
    about: dict[str, IconFamily] = field(repr=False)
    test_families: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.captions)

    def __repr__(self) -> str:
        return f"IconSet({len(self)} icons of {self.side} x {self.side}, {len(set(self.families))} families)"

    @property
    def side(self) -> int:
        """Rows and columns of a picture."""
        return int(self.images.shape[-1])

    @property
    def licences(self) -> dict[str, str]:
        """SPDX identifier of every family in this set.

        >>> load_icons().licences["lucide"]
        'ISC'
        """
        return {key: self.about[key].licence for key in dict.fromkeys(self.families)}

    def select(self, positions: Sequence[int] | Tensor) -> IconSet:
        """Return the icons at these positions, in this order.

        >>> load_icons().select([0, 5]).images.shape
        torch.Size([2, 32, 32])
        """
        index = torch.as_tensor(positions, dtype=torch.int64)
        picks: list[int] = index.tolist()
        return IconSet(
            images=self.images[index],
            captions=[self.captions[i] for i in picks],
            names=[self.names[i] for i in picks],
            tags=[self.tags[i] for i in picks],
            families=[self.families[i] for i in picks],
            styles=[self.styles[i] for i in picks],
            name_ids=self.name_ids[index],
            about=self.about,
            test_families=self.test_families,
        )

    def split(self, which: SplitName) -> IconSet:
        """Return the training icons, or those of the held-out family. No picture is in both.

        >>> icons = load_icons()
        >>> len(icons.split("train")) + len(icons.split("test")) == len(icons)
        True
        """
        if which not in get_args(SplitName):
            raise DataError(f"no split {which!r}; there are: {', '.join(get_args(SplitName))}")
        held_out = set(self.test_families)
        return self.select([i for i, f in enumerate(self.families) if (f in held_out) == (which == "test")])

    def texts(self, position: int) -> list[str]:
        """Return all texts of one icon: its caption, then its tags.

        >>> icons = load_icons()
        >>> icons.texts(icons.names.index("shopping-cart"))[0]
        'shopping cart'
        """
        return [self.captions[position], *self.tags[position]]


def load_icons(path: str | Path | None = None) -> IconSet:
    """Read an icon set: the one that ships, or a file made by ``python -m tools.icons.make``.

    >>> icons = load_icons()
    >>> len(icons) > 15_000, icons.images.shape[1:], icons.images.dtype
    (True, torch.Size([32, 32]), torch.uint8)
    >>> sorted(set(icons.split("test").families))
    ['lucide']
    """
    if path is not None:
        return _from_pack(read_pack(path), path)
    with as_file(files("tilewise.train.icons").joinpath(SHIPPED)) as shipped:
        return _from_pack(read_pack(shipped), shipped)


def _from_pack(pack: Pack, path: str | Path) -> IconSet:
    columns: dict[str, list[Any]] = pack.columns
    try:
        entries = [IconFamily(**entry) for entry in pack.manifest["families"]]
        styles = pack.manifest["styles"]
        return IconSet(
            images=pack.levels * 17,  # 0..15 -> 0..255, exactly
            captions=columns["caption"],
            names=columns["name"],
            tags=[tuple(tags) for tags in columns["tags"]],
            families=[entries[i].key for i in columns["family"]],
            styles=[styles[i] for i in columns["style"]],
            name_ids=torch.tensor(columns["name_id"], dtype=torch.int64),
            about={entry.key: entry for entry in entries},
            test_families=tuple(pack.manifest["test_families"]),
        )
    except (KeyError, IndexError, TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"the table of {path} does not fit its manifest: {error!r}. Make the file again") from error
