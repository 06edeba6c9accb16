"""Read the icons of a family, with names, styles and tags, out of an unpacked package."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tools.icons.captions import clean_tags, drop_variant_number, split_style, words
from tools.icons.sources import DOUBTFUL, ICONIFY_SUFFIXES, PERMISSIVE, Family

Tags = dict[str, list[str]]  # by name
Entry = tuple[str, str, str, str, list[str]]  # name, name without style, style, svg, tags


@dataclass
class Icon:
    """One drawing before it is rendered."""

    family: str
    name: str
    caption: str
    style: str
    svg: str
    tags: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Collection:
    """What the manifest says about a family."""

    key: str
    title: str
    licence: str
    source: str
    author: str
    url: str


def read_family(family: Family, root: Path) -> tuple[Collection, list[Icon]]:
    """All icons of a family of the set that ships, sorted by name and style."""
    found = [
        (path.stem, style, path.read_text(encoding="utf-8"))
        for folder, style in family.folders
        for path in sorted((root / folder).rglob("*.svg"))
    ]
    tags = read_tags(family.key, root)
    entries = []
    for name, style, svg in found:
        base, ending = split_style(name, family.suffixes)
        entries.append((name, base, ending or style, svg, [*tags.get(name, ()), *tags.get(base, ())]))
    about = Collection(
        family.key, family.title, family.licence, f"npm {family.package.spec}", family.author, family.url
    )
    return about, _icons(family.key, entries)


def read_iconify(root: Path, version: str, tags: dict[str, Tags]) -> Iterator[tuple[Collection, list[Icon]]]:
    """The permissive collections of Iconify, one after another. ``tags``: by prefix, where there are any."""
    listing = json.loads((root / "collections.json").read_text(encoding="utf-8"))
    for prefix in sorted(listing):
        info = listing[prefix]
        licence = info["license"].get("spdx")
        if licence not in PERMISSIVE or prefix in DOUBTFUL:
            continue
        data = json.loads((root / "json" / f"{prefix}.json").read_text(encoding="utf-8"))
        about = Collection(
            prefix,
            info["name"],
            licence,
            f"npm @iconify/json@{version}, {prefix}",
            info["author"]["name"],
            info["author"].get("url", ""),
        )
        yield about, _icons(prefix, _iconify_entries(data, tags.get(prefix, {})))


def _iconify_entries(data: dict, more: Tags) -> list[Entry]:
    tags: Tags = {}
    for category, names in data.get("categories", {}).items():
        for name in names:
            tags.setdefault(name, []).append(category)
    for alias, entry in data.get("aliases", {}).items():
        # Further names of the same drawing; a turned or mirrored one is another drawing.
        if not {"rotate", "hFlip", "vFlip"}.intersection(entry):
            tags.setdefault(entry["parent"], []).append(alias)
    declared = [*data.get("suffixes", {}), *ICONIFY_SUFFIXES.get(data["prefix"], ())]
    prefixes = [prefix for prefix in data.get("prefixes", {}) if prefix]
    known = data["icons"].keys()
    entries = []
    for name, icon in data["icons"].items():
        if icon.get("hidden"):  # withdrawn by its family
            continue
        base, style = split_style(name, declared, known)
        for prefix in prefixes:
            if base.startswith(prefix + "-"):
                base, style = base.removeprefix(prefix + "-"), prefix
                break
        left, top, width, height = (
            icon.get(key, data.get(key, default))
            for key, default in (("left", 0), ("top", 0), ("width", 16), ("height", 16))
        )
        svg = (
            f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
            f'viewBox="{left} {top} {width} {height}">{icon["body"]}</svg>'
        )
        entries.append((name, base, style, svg, [*more.get(name, more.get(base, ())), *tags.get(name, ())]))
    return entries


def _icons(key: str, entries: list[Entry]) -> list[Icon]:
    known = {base for _, base, _, _, _ in entries}
    icons = []
    for name, base, style, svg, tags in entries:
        caption = words(drop_variant_number(base, known))
        if caption:
            icons.append(Icon(key, name, caption, style, svg, clean_tags(tags, caption)))
    return sorted(icons, key=lambda icon: (icon.caption, icon.name, icon.style))


def read_tags(key: str, root: Path) -> Tags:
    """The tags of a family of the set that ships, by icon name; empty if its package has none."""
    return TAGS[key](root) if key in TAGS else {}


def _mdi_tags(root: Path) -> Tags:
    meta = json.loads((root / "meta.json").read_text(encoding="utf-8"))
    return {entry["name"]: [*entry["aliases"], *entry["tags"]] for entry in meta}


def _tabler_tags(root: Path) -> Tags:
    meta = json.loads((root / "icons.json").read_text(encoding="utf-8"))
    return {name: [*map(str, entry["tags"]), entry["category"]] for name, entry in meta.items()}


def _lucide_tags(root: Path) -> Tags:
    return json.loads((root / "tags.json").read_text(encoding="utf-8"))


def _phosphor_tags(root: Path) -> Tags:
    text = (root / "dist" / "index.mjs").read_text(encoding="utf-8")
    entries = re.findall(r'\bname: "([^"]+)",.*?\btags: \[(.*?)\]', text, flags=re.DOTALL)
    return {name: re.findall(r'"([^"]+)"', tags) for name, tags in entries}


def _carbon_tags(root: Path) -> Tags:
    meta = json.loads((root / "metadata.json").read_text(encoding="utf-8"))
    return {entry["name"]: entry.get("aliases", []) for entry in meta["icons"]}


def _ionicons_tags(root: Path) -> Tags:
    meta = json.loads((root / "dist" / "ionicons.json").read_text(encoding="utf-8"))
    return {entry["name"]: entry["tags"] for entry in meta["icons"]}


def _octicons_tags(root: Path) -> Tags:
    meta = json.loads((root / "build" / "data.json").read_text(encoding="utf-8"))
    return {name: entry["keywords"] for name, entry in meta.items()}


TAGS: dict[str, Callable[[Path], Tags]] = {
    "mdi": _mdi_tags,
    "tabler": _tabler_tags,
    "lucide": _lucide_tags,
    "phosphor": _phosphor_tags,
    "carbon": _carbon_tags,
    "ionicons": _ionicons_tags,
    "octicons": _octicons_tags,
}
