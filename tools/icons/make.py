"""Make an icon set: ``python -m tools.icons.make --out FILE [--large]``.

Without ``--large``: the set that ships. With it: the permissive collections of Iconify, a quarter of a
million icons. Needs npm, and ``pip install resvg_py==0.5.0 Pillow`` for rendering.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

from tools.icons.build import assemble, drop_seen_in_test, render_family
from tools.icons.fetch import fetch
from tools.icons.read import Collection, Icon, read_family, read_iconify, read_tags
from tools.icons.render import SIDE, render
from tools.icons.sources import FAMILIES, ICONIFY, ICONIFY_TAGS, PERMISSIVE, TEST_FAMILY

from tilewise.train.icons.pack import write_pack


def shipped_families(scratch: Path, licences: Path | None) -> Iterator[tuple[Collection, list[Icon]]]:
    for family in FAMILIES:
        assert family.licence in PERMISSIVE, family
        root = fetch(family.package, scratch)
        if licences:
            shutil.copyfile(root / family.licence_file, licences / f"{family.key}.txt")
        yield read_family(family, root)


def large_families(scratch: Path) -> Iterator[tuple[Collection, list[Icon]]]:
    packages = {family.key: family.package for family in FAMILIES}
    tags = {prefix: read_tags(key, fetch(packages[key], scratch)) for prefix, key in ICONIFY_TAGS.items()}
    return read_iconify(fetch(ICONIFY, scratch), ICONIFY.version, tags)


def make(sources: Iterator[tuple[Collection, list[Icon]]], out: Path, renderer: str) -> dict:
    """Render, split and pack; returns the manifest with the file's size and sha256."""
    removed: Counter[str] = Counter()
    families = []
    for collection, icons in sources:
        drawings = render_family(icons, render, removed)
        print(f"{collection.key:28s}{len(icons):7d} icons {len(drawings):7d} kept", flush=True)
        families.append((collection, drawings))
    test = next(drawings for collection, drawings in families if collection.key == TEST_FAMILY)
    families = [
        (collection, drawings if drawings is test else drop_seen_in_test(drawings, test, removed))
        for collection, drawings in families
        if drawings
    ]
    about = {"rendered_with": renderer, "removed": dict(sorted(removed.items()))}
    levels, columns, entries = assemble(families, TEST_FAMILY, about)
    manifest = write_pack(out, levels, columns, entries)
    data = out.read_bytes()
    return {**manifest, "file": {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.icons.make", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="the file to write, such as icons.zip")
    parser.add_argument("--large", action="store_true", help="all permissive collections of Iconify")
    parser.add_argument("--scratch", type=Path, default=Path("build/icons"), help="where packages are kept")
    parser.add_argument("--licences", type=Path, help="copy the licence texts into this folder")
    parser.add_argument("--manifest", type=Path, help="also write the manifest to this file")
    options = parser.parse_args()
    begun = time.monotonic()
    if options.licences:
        options.licences.mkdir(parents=True, exist_ok=True)
    sources = large_families(options.scratch) if options.large else shipped_families(options.scratch, options.licences)
    manifest = make(sources, options.out, f"resvg_py {version('resvg_py')}, {SIDE} x {SIDE}, 16 greys")
    if options.manifest:
        options.manifest.write_text(json.dumps(manifest, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(json.dumps({"removed": manifest["removed"], **manifest["file"]}, indent=1))
    size_mb, seconds = manifest["file"]["bytes"] / 1e6, time.monotonic() - begun
    print(f"{manifest['count']} icons, {size_mb:.2f} MB, {seconds:.0f} s")


if __name__ == "__main__":
    main()
