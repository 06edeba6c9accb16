"""Extension of griffe: docstrings as Markdown, for the reference of the site (mkdocs.yml).

Docstrings end a line with ``::`` before a formula, have examples of ``>>>`` without a heading, and name pages by their
path in the repository.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"(?:^>>> .*\n(?:^\S.*\n?)*)+", re.MULTILINE)
PAGE = re.compile(r"\bdocs/((?:\w+/)*([\w-]+)\.md)\b")


def to_markdown(docstring: str) -> str:
    """Return a docstring as Markdown.

    >>> to_markdown("Equals::\\n\\n    a\\n\\n>>> 1 + 1\\n2")
    'Equals:\\n\\n    a\\n\\n```pycon\\n>>> 1 + 1\\n2\\n```\\n'
    >>> to_markdown("see docs/concepts/ring.md.")
    'see [ring](concepts/ring.md).'
    """
    text = re.sub(r"::$", ":", docstring, flags=re.MULTILINE)
    text = PAGE.sub(r"[\2](\1)", text)
    return EXAMPLE.sub(lambda match: f"```pycon\n{match[0].rstrip()}\n```\n", text)


class DocstringsAsMarkdown(griffe.Extension):
    """Changes each docstring as it is read."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Change the docstring of one object."""
        if obj.docstring:
            obj.docstring.value = to_markdown(obj.docstring.value)
