"""Hooks of mkdocs: they turn the Markdown of this repository into the site (mkdocs.yml).

The same pages are read on a code host, so they link to files of the repository by relative paths. For the site,

- a linked file outside of docs/ is copied to the site, under ``repository/``, and links to it are changed; a link to a
  folder without a README becomes text;
- a drawing of docs/drawings becomes part of the page, so that it follows the light or dark scheme that is chosen there;
- ``no-run: reason`` is removed from the first line of a code block;
- ``losses/*.md`` in the navigation stands for all pages of that folder;
- the search shows the page "Which loss" first, and decisions last.
"""

from __future__ import annotations

import os
import posixpath
import re
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
COPIED = "repository"
FENCE = re.compile(r"^(?P<indent> *)```(?P<info>[^\n`]*)\n(?P<body>.*?)^(?P=indent)```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?P<text>\[[^\]]*\]\()(?P<target>[^)\s]+)\)")
DRAWING = re.compile(r"^!\[(?P<alt>[^\]]*)\]\((?P<target>[^)\s]*drawings/[^)\s]+\.svg)\)$", re.MULTILINE)
# Pages that the search shows before and after the others. Decisions and results explain, but answer few questions.
# A page about one loss comes before the recipes that build it from statistics.
SEARCH = {
    "which-loss.md": 4,
    "losses/pair_stats.md": 0.5,
    "decisions/*": 0.05,
    f"{COPIED}/*": 0.3,
    "benchmarks.md": 0.5,
}
PAGE_STYLE = re.compile(r"<style>.*?</style>\s*", re.DOTALL)


def on_config(config: Any) -> Any:
    """Expand patterns in the navigation."""
    config["nav"] = _expand(config["nav"])
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add every file outside of docs/ that a page links to, also through other added pages."""
    waiting = [DOCS / file.src_uri for file in files if file.src_uri.endswith(".md")]
    while waiting:
        page = waiting.pop()
        for target in _targets(page.read_text(encoding="utf-8")):
            path = _place(page, target.partition("#")[0])
            uri = _uri(path)
            if not uri.startswith(COPIED) or files.get_file_from_path(uri):
                continue
            if path.is_dir():
                continue
            if not path.is_file():
                raise PluginError(f"{page.relative_to(ROOT)} links to {target}, which does not exist")
            files.append(File.generated(config, uri, abs_src_path=str(path)))
            if path.suffix == ".md":
                waiting.append(path)
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Change links and code blocks of one page, and put drawings into it."""
    uri = page.file.src_uri
    for pattern, boost in SEARCH.items():
        if fnmatch(uri, pattern):
            page.meta.setdefault("search", {"boost": boost})
    source = ROOT / uri.removeprefix(COPIED + "/") if uri.startswith(COPIED + "/") else DOCS / uri

    def link(match: re.Match[str]) -> str:
        target, hash_, anchor = match["target"].partition("#")
        if not target or re.match(r"[a-z]+:", target):
            return match[0]
        place = _place(source, target)
        if place.is_dir():
            return match["text"][1:-2]
        path = posixpath.relpath(_uri(place), posixpath.dirname(uri) or ".")
        return f"{match['text']}{path}{hash_}{anchor})"

    def prose(text: str) -> str:
        return LINK.sub(link, DRAWING.sub(lambda match: _drawing(source, match), text))

    done, end = [], 0
    for block in FENCE.finditer(markdown):
        info = re.sub(r" no-run: .*", "", block["info"])
        done += [
            prose(markdown[end : block.start()]),
            f"{block['indent']}```{info}\n{block['body']}{block['indent']}```",
        ]
        end = block.end()
    return "".join([*done, prose(markdown[end:])])


def _expand(entry: Any) -> Any:
    if isinstance(entry, list):
        return [part for item in entry for part in _several(_expand(item))]
    if isinstance(entry, dict):
        return {title: _expand(below) for title, below in entry.items()}
    if "*" in entry:
        return [path.relative_to(DOCS).as_posix() for path in sorted(DOCS.glob(entry))]
    return entry


def _several(entry: Any) -> list[Any]:
    return entry if isinstance(entry, list) else [entry]


def _targets(markdown: str) -> list[str]:
    found = [match["target"] for match in LINK.finditer(FENCE.sub("", markdown))]
    return [target for target in found if not re.match(r"[a-z]+:|#", target)]


def _place(page: Path, target: str) -> Path:
    """The file of the repository that a link leads to. A folder stands for its README, if it has one."""
    path = Path(os.path.normpath(page.parent / target))
    return path / "README.md" if (path / "README.md").is_file() else path


def _uri(path: Path) -> str:
    """Where the site has a file of the repository."""
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS).as_posix()
    return f"{COPIED}/{path.relative_to(ROOT).as_posix()}"


def _drawing(page: Path, match: re.Match[str]) -> str:
    # The style inside of the file is for the code host, where the drawing is an image of its own.
    drawing = PAGE_STYLE.sub("", _place(page, match["target"]).read_text(encoding="utf-8"))
    return f'<div class="drawing" role="img" aria-label="{match["alt"]}">\n{drawing.strip()}\n</div>'
