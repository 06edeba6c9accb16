"""What the documentation says is true: its Python blocks run, and its links lead somewhere.

The ``python`` blocks of a page run in order and share their names, as a reader would type them. A block that cannot
run in a test says why, ```` ```python no-run: two processes ````, and still has to compile. A block of ``>>>`` lines
is a doctest.

A ``bash`` block runs in its turn: the commands ``tilewise``, in this process, with few steps. Its other commands
install something or start an example, which tests/test_examples.py does. A block with a title,
```` ```toml title="my.toml" ````, is written to that file, unless the title is the path of a file of the repository.
Then it has to be that file.
"""

from __future__ import annotations

import doctest
import re
import shlex
import sys
import types
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
FENCE = re.compile(r"^(?P<indent> *)```(?P<info>[^\n`]*)\n(?P<body>.*?)^(?P=indent)```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\((?P<target>[^)\s]+)\)")


STARTED_ELSEWHERE = (
    *("pip install", "make ", "python examples/"),
    *(
        "torchrun --nproc-per-node 2 examples/",
        "torchrun --nproc-per-node 4 examples/",
        "torchrun --nproc-per-node 2 -m tilewise.train.cli train ",
    ),
)


@dataclass(frozen=True)
class Block:
    line: int
    source: str
    reason: str | None = None  # why it does not run
    language: str = "python"
    title: str = ""  # a file


def all_blocks(text: str) -> list[Block]:
    """The blocks that a reader copies: Python, commands, and files with a name."""
    found = []
    for match in FENCE.finditer(text):
        language, _, rest = match["info"].strip().partition(" ")
        title = re.fullmatch(r'title="([^"]+)"', rest)
        if language not in ("python", "bash") and not title:
            continue
        reason = re.fullmatch(r"no-run: (\S.*)", rest) if language == "python" else None
        assert not rest or reason or title, f"say why: ```python no-run: reason, got {rest!r}"
        line = text[: match.start()].count("\n") + 2
        found.append(Block(line, match["body"], reason and reason[1], language, title[1] if title else ""))
    return found


def python_blocks(text: str) -> list[Block]:
    return [block for block in all_blocks(text) if block.language == "python"]


def run_commands(block: Block, page: str) -> None:
    """Run the commands of the training system, and check that the other ones are known."""
    for line in block.source.splitlines():
        command = line.partition("#")[0].strip()
        if command.startswith("tilewise "):
            from typer.testing import CliRunner

            from tilewise.train.cli import app

            few = ["loop.steps=6"] if command.startswith("tilewise train") else []
            done = CliRunner().invoke(app, shlex.split(command)[1:] + few)
            assert done.exit_code == 0, f"{page}: {command}\n{done.output}"
            continue
        assert not command or command.startswith(STARTED_ELSEWHERE), f"{page}: no test runs {command!r}"
        for name in re.findall(r"examples/\S+", command):
            assert (ROOT / name).is_file(), f"{page}: there is no {name}"


def run_blocks(blocks: list[Block], page: str) -> None:
    module = types.ModuleType("__docs__")
    sys.modules["__docs__"] = module  # torch.compile looks functions up in their module
    names = vars(module)
    for block in blocks:
        if block.title and (ROOT / block.title).is_file():
            assert block.source == (ROOT / block.title).read_text(), f"{page}: run python -m tools.docs_code"
        elif block.title:
            Path(block.title).write_text(block.source)
        if block.language == "bash":
            run_commands(block, page)
        if block.language != "python":
            continue
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


def page_with_time(page: Path) -> object:
    """The page, marked as slow if it trains."""
    slow = any(re.search(r"^tilewise train", block.source, re.MULTILINE) for block in all_blocks(page.read_text()))
    return pytest.param(page, marks=[pytest.mark.slow] if slow else [])


@pytest.mark.parametrize("page", [page_with_time(page) for page in PAGES], ids=[name(page) for page in PAGES])
def test_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # the pages speak of a machine as users have it
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    run_blocks(all_blocks(page.read_text()), name(page))
    assert Path.cwd().samefile(tmp_path)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    assert broken_links(page) == []


def test_the_readme_has_a_place_for_results() -> None:
    text = (ROOT / "README.md").read_text()
    begin, end = text.index("<!-- results:begin -->"), text.index("<!-- results:end -->")
    assert begin < end


def test_every_loss_has_a_page() -> None:
    import tilewise

    others = ("explain", "mine", "nearest", "recall", "record", "retrieval")
    losses = [word for word in tilewise.__all__ if word.islower() and word.split("_")[0] not in others]
    wanted = {f"{word}.md" for word in losses if not word.startswith("__")}
    assert {page.name for page in (ROOT / "docs/losses").glob("*.md")} == wanted


def test_every_page_is_in_the_navigation() -> None:
    text = (ROOT / "mkdocs.yml").read_text()
    named = re.findall(r"[:-] ([\w/*-]+\.md)$", text[text.index("\nnav:") :], re.MULTILINE)
    found = {page for pattern in named for page in (ROOT / "docs").glob(pattern)}
    assert found == set((ROOT / "docs").glob("**/*.md"))
    assert all(list((ROOT / "docs").glob(pattern)) or pattern.startswith("repository/") for pattern in named)


def test_the_reference_has_every_public_name() -> None:
    import tilewise

    shown = re.findall(r"^::: tilewise\.(\w+)$", (ROOT / "docs/reference.md").read_text(), re.MULTILINE)
    assert sorted(shown) == [word for word in tilewise.__all__ if word != "__version__"]


def test_drawings_can_be_part_of_a_page() -> None:
    """Colours come from the page, and nothing is loaded from elsewhere."""
    drawings = sorted((ROOT / "docs/drawings").glob("*.svg"))
    assert len(drawings) >= 8
    for drawing in drawings:
        text = drawing.read_text()
        assert "prefers-color-scheme: dark" in text or drawing.name == "logo.svg", drawing.name
        assert not re.search(r'href|url\(|<script|(fill|stroke)="(black|white|#)', text) or drawing.name == "logo.svg"


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


@pytest.mark.parametrize("command", ["rm -rf x", "tilewise no-such-command", "python examples/no_such_file.py"])
def test_a_wrong_command_is_found(command: str) -> None:
    with pytest.raises(AssertionError):
        run_blocks(all_blocks(f"```bash\n{command}\n```\n"), "page.md")


def test_a_block_with_a_title_is_that_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_blocks(all_blocks('```toml title="my.toml"\nx = 1\n```\n'), "page.md")
    assert (tmp_path / "my.toml").read_text() == "x = 1\n"
    with pytest.raises(AssertionError, match="docs_code"):
        run_blocks(all_blocks('```python title="examples/retrieval.py"\nx = 1\n```\n'), "page.md")


def test_a_broken_link_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.ROOT", tmp_path)
    (tmp_path / "there.md").write_text("# A `title`, here\n")
    page = tmp_path / "page.md"
    page.write_text("[a](there.md) [b](there.md#a-title-here) [c](gone.md) [d](there.md#gone) [e](../up.md) [f](x:y)\n")
    assert broken_links(page) == ["gone.md", "there.md#gone", "../up.md"]
