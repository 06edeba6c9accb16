"""Words out of icon names: "arrow-left-circle-bold" -> "arrow left circle", style "bold"."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Set

# How an icon is drawn. Taken off a name only where the family declares it or has the plain name as well:
# "fill" is a style in "heart-fill" and a meaning in "format-color-fill".
COMMON_STYLES = (
    "filled", "fill", "outline", "outlined", "solid", "duotone", "twotone", "two-tone", "line", "bold",
    "thin", "light", "sharp", "rounded", "regular", "alt",
)  # fmt: skip
DIRECTIONS = frozenset(("left", "right", "up", "down", "top", "bottom"))
MOST_TAGS = 12
LONGEST_TAG = 40


def words(text: str) -> str:
    """Lower-case ASCII words, one space between them.

    >>> words("3D-Cursor--alt"), words("Alpha / Numeric"), words("emoji_people"), words("C++")
    ('3d cursor alt', 'alpha numeric', 'emoji people', 'c++')
    """
    return " ".join(re.findall(r"[a-z0-9+#&.]*[a-z0-9][a-z0-9+#&.]*", text.lower().replace("'", "")))


def split_style(name: str, declared: Iterable[str] = (), known: Collection[str] = ()) -> tuple[str, str]:
    """The name without its style, and the style.

    An ending in ``declared`` is always a style; one of ``COMMON_STYLES`` is if the plain name is ``known``.

    >>> split_style("heart-fill", ["fill"]), split_style("color-fill", [], {"color-fill", "heart"})
    (('heart', 'fill'), ('color-fill', ''))
    >>> split_style("add--alt-filled", ["filled", "alt-filled"])
    ('add', 'alt-filled')
    """
    for style in sorted(declared, key=len, reverse=True):
        if style and name.endswith("-" + style):
            base = name[: -len(style)].rstrip("-")
            if base:
                return base, style
    for style in COMMON_STYLES:
        base = name.removesuffix("-" + style)
        if base != name and base in known:
            return base, style
    return name, ""


def drop_variant_number(base: str, known: Set[str]) -> str:
    """Take off a number that only tells drawings of the same thing apart.

    That is so if the family has the plain name and begins to count at 2: "trash", "trash-2". Where there
    is a number 1, as in "battery-1", the numbers mean something.

    >>> drop_variant_number("trash-2", {"trash", "trash-2"})
    'trash'
    >>> drop_variant_number("easel3", {"easel", "easel2", "easel3"})
    'easel'
    >>> drop_variant_number("heading-2", {"heading", "heading-1", "heading-2"})
    'heading-2'
    """
    match = re.fullmatch(r"(.+?)(-*)[2-9]", base)
    if match and match[1] in known and known.isdisjoint(f"{match[1]}{match[2]}{first}" for first in "01"):
        return match[1]
    return base


def clean_tags(tags: Iterable[str], caption: str) -> list[str]:
    """Tags that say more than the caption: in words, once each, at most ``MOST_TAGS``.

    >>> clean_tags(["*new*", "Trolley / Basket", "cart", "shopping-cart", "trolley"], "shopping cart")
    ['trolley', 'basket']
    """
    said = set(caption.split())
    kept: dict[str, None] = {}
    for tag in tags:
        if tag.startswith("*"):
            continue
        for part in re.split(r"[/,&]| [+] | and ", tag):
            text = words(part)
            if text and len(text) <= LONGEST_TAG and not said.issuperset(text.split()):
                kept[text] = None
    return [tag for tag in kept if tag not in COMMON_STYLES][:MOST_TAGS]


def same_name(caption: str) -> str:
    """A key that is equal for captions that say the same: the words in any order.

    Where two directions are named, their order is part of the meaning and kept.

    >>> same_name("arrow left circle") == same_name("circle arrow left")
    True
    >>> same_name("arrow left right") == same_name("arrow right left")
    False
    """
    found = caption.split()
    if len(DIRECTIONS.intersection(found)) >= 2:
        return caption
    return " ".join(sorted(set(found)))
