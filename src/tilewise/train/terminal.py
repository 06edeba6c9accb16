"""Everything that the commands print goes through this module.

Captions, file names, class names and error messages may hold characters that a terminal obeys, such as those that set
its title or clear the screen. They are printed as escapes, for example ``\\x1b``.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from tilewise.train.untrusted import one_line, visible


class Terminal(Console):
    """A console that obeys only its own styles. Text is no markup, and characters that a terminal obeys are shown."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render as rich does. This is called for everything that is printed, cells of tables and bars included."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(visible(segment.text), segment.style)


def say(console: Console | None, line: str) -> None:
    """Print one line without wrapping, so that long paths stay in one piece. Without a console nothing is printed."""
    if console is not None:
        console.print(one_line(line), highlight=False, markup=False, emoji=False, soft_wrap=True)


def one_cell(text: str, style: str = "") -> Text:
    """Return text of a user's data for a cell or the title of a table. It is no markup, and has no line breaks."""
    return Text(one_line(text), style)


def say_error(sentence: object) -> None:
    """Print the sentence of an error to standard error."""
    print(f"tilewise: {one_line(str(sentence))}", file=sys.stderr)


def accept_any_text() -> None:
    """Print characters that the encoding of the output does not have as escapes, instead of raising an error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
