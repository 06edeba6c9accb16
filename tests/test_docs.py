"""What the documentation says is true: its Python blocks run, and its links lead somewhere.

The ``python`` blocks of a page run in order and share their names, as a reader would type them. A block that cannot
run in a test says why, ```` ```python no-run: two processes ````, and still has to compile. A block of ``>>>`` lines
is a doctest.
"""

from __future__ import annotations

import doctest
import os
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
FENCE = re.compile(r"^(?P<indent> *)```(?P<info>[^\n`]*)\n(?P<body>.*?)^(?P=indent)```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\((?P<target>[^)\s]+)\)")


@dataclass(frozen=True)
class Block:
    line: int
    source: str
    reason: str | None  # why it does not run


def python_blocks(text: str) -> list[Block]:
    found = []
    for match in FENCE.finditer(text):
        language, _, rest = match["info"].strip().partition(" ")
        if language != "python":
            continue
        assert not rest or re.fullmatch(r"no-run: \S.*", rest), f"say why: ```python no-run: reason, got {rest!r}"
        line = text[: match.start()].count("\n") + 2
        found.append(Block(line, match["body"], rest.removeprefix("no-run: ") or None))
    return found


def run_blocks(blocks: list[Block], page: str) -> None:
    names: dict[str, object] = {"__name__": "__docs__"}
    for block in blocks:
        if block.source.lstrip().startswith(">>>"):
            test = doctest.DocTestParser().get_doctest(block.source, names, page, page, block.line - 1)
            runner = doctest.DebugRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
            runner.run(test, clear_globs=False)
            names.update(test.globs)
            continue
        # Blank lines in front make a traceback name the line of the page.
        code = compile("\n" * (block.line - 1) + block.source, page, "exec")
        if block.reason is None:
            exec(code, names)


def slugs(text: str) -> set[str]:
    """The anchors of a page's headings, as they are made on a code host."""
    bare = FENCE.sub("", text)
    titles = re.findall(r"^#+ +(.+?) *$", bare, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def broken_links(page: Path) -> list[str]:
    bare = FENCE.sub("", page.read_text())
    bad = []
    for match in LINK.finditer(bare):
        target, _, anchor = match["target"].partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        place = page if not target else page.parent / target
        inside = place.resolve() == ROOT or ROOT in place.resolve().parents
        if not inside or not place.exists() or (anchor and anchor not in slugs(place.read_text())):
            bad.append(match["target"])
    return bad


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # the pages speak of a machine as users have it
    run_blocks(python_blocks(page.read_text()), name(page))
    assert Path(os.getcwd()) == tmp_path


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    assert broken_links(page) == []


def test_the_readme_has_a_place_for_results() -> None:
    text = (ROOT / "README.md").read_text()
    begin, end = text.index("<!-- results:begin -->"), text.index("<!-- results:end -->")
    assert begin < end


def test_every_loss_has_a_page() -> None:
    import tilewise

    others = ("explain", "recall", "record", "retrieval")
    losses = [word for word in tilewise.__all__ if word.islower() and word.split("_")[0] not in others]
    wanted = {f"{word}.md" for word in losses if not word.startswith("__")}
    assert {page.name for page in (ROOT / "docs/losses").glob("*.md")} == wanted


@pytest.mark.parametrize("source", ["assert 1 == 2", ">>> 1 + 1\n3", "1 +", "import no_such_module"])
def test_a_wrong_block_is_found(source: str) -> None:
    blocks = python_blocks(f"# Page\n\n```python\n{source}\n```\n")
    with pytest.raises((AssertionError, SyntaxError, ImportError, doctest.DocTestFailure)):
        run_blocks(blocks, "page.md")


def test_blocks_share_names_and_a_reason_keeps_one_from_running() -> None:
    text = "```python\nx = 1\n```\n```python no-run: costs money\nx = 2\n```\n```python\nassert x == 1\n```\n"
    blocks = python_blocks(text)
    assert [block.reason for block in blocks] == [None, "costs money", None]
    run_blocks(blocks, "page.md")
    with pytest.raises(AssertionError, match="say why"):
        python_blocks("```python skip\n```\n")


def test_a_broken_link_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.ROOT", tmp_path)
    (tmp_path / "there.md").write_text("# A `title`, here\n")
    page = tmp_path / "page.md"
    page.write_text("[a](there.md) [b](there.md#a-title-here) [c](gone.md) [d](there.md#gone) [e](../up.md) [f](x:y)\n")
    assert broken_links(page) == ["gone.md", "there.md#gone", "../up.md"]
