"""From rendered icons to a set: one record per drawing, no picture on both sides of the split.

Axes: N icons, T icons of the test family, S rows and columns of a picture.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass

import numpy as np
import torch
from tools.icons.captions import clean_tags, same_name
from tools.icons.read import Collection, Icon

# Overlap of ink (see ``ink_overlap``) from which two pictures count as the same drawing. Above it lie copies
# with another line width or corner, and some letters in the same frame; dropping those too costs little.
NEAR = 0.94


@dataclass
class Drawing:
    """One picture and its texts."""

    icon: Icon
    levels: np.ndarray


def render_family(
    icons: Iterable[Icon], render: Callable[[str], np.ndarray | None], removed: Counter[str]
) -> list[Drawing]:
    """Render a family; the same picture under several names becomes one drawing, the other names its tags."""
    seen: dict[bytes, Drawing] = {}
    # The name that the family has tags for is its main name; the others are older ones.
    for icon in sorted(icons, key=lambda icon: not icon.tags):
        levels = render(icon.svg)
        if levels is None:
            removed["blank or unreadable"] += 1
        elif (first := seen.setdefault(levels.tobytes(), Drawing(icon, levels))).icon is not icon:
            more = [*first.icon.tags, icon.caption, *icon.tags]
            first.icon.tags = clean_tags(more, first.icon.caption)
            removed["same picture in the same family"] += 1
    return sorted(seen.values(), key=lambda d: (d.icon.caption, d.icon.name, d.icon.style))


def drop_seen_in_test(train: list[Drawing], test: list[Drawing], removed: Counter[str]) -> list[Drawing]:
    """Training drawings that are no copy of a test drawing, exactly or nearly (see ``NEAR``)."""
    exact = {drawing.levels.tobytes() for drawing in test}
    test_tp = _ink(test)
    kept = []
    for first in range(0, len(train), 2048):
        part = train[first : first + 2048]
        nearest = ink_overlap(_ink(part), test_tp).amax(1)
        for drawing, overlap in zip(part, nearest.tolist(), strict=True):
            if drawing.levels.tobytes() in exact:
                removed["same picture as a test icon"] += 1
            elif overlap >= NEAR:
                removed["nearly the same picture as a test icon"] += 1
            else:
                kept.append(drawing)
    return kept


def ink_overlap(a_np: torch.Tensor, b_tp: torch.Tensor) -> torch.Tensor:
    """``2 <a, b> / (<a, a> + <b, b>)`` of every pair (N, T): 1 for equal pictures, 0 for no ink in common.

    Ink is a whole number of 0..15 and the sums stay below 2**24, so the products are exact in float32 and
    the answer does not depend on the machine.
    """
    return 2 * (a_np @ b_tp.T) / (a_np.square().sum(1)[:, None] + b_tp.square().sum(1))


def _ink(drawings: list[Drawing]) -> torch.Tensor:
    return 15 - torch.from_numpy(np.stack([drawing.levels for drawing in drawings])).flatten(1).float()


def assemble(
    families: list[tuple[Collection, list[Drawing]]], test_family: str, about: dict
) -> tuple[torch.Tensor, dict[str, list], dict]:
    """Levels (N, S, S), columns and manifest entries, as ``write_pack`` takes them."""
    drawings = [drawing for _, part in families for drawing in part]
    position = {collection.key: i for i, (collection, _) in enumerate(families)}
    styles = sorted({drawing.icon.style for drawing in drawings})
    style_position = {style: i for i, style in enumerate(styles)}
    ids: dict[str, int] = {}
    columns: dict[str, list] = {
        "family": [position[d.icon.family] for d in drawings],
        "style": [style_position[d.icon.style] for d in drawings],
        "name": [d.icon.name for d in drawings],
        "caption": [d.icon.caption for d in drawings],
        "tags": [d.icon.tags for d in drawings],
        "name_id": [ids.setdefault(same_name(d.icon.caption), len(ids)) for d in drawings],
    }
    entries = [{**asdict(collection), "count": len(part)} for collection, part in families]
    manifest = {"families": entries, "test_families": [test_family], "styles": styles, **about}
    return torch.from_numpy(np.stack([d.levels for d in drawings])), columns, manifest
