"""Copy files of the repository into the pages that show them whole.

    python -m tools.docs_code

A block that begins with ```` ```python title="examples/retrieval.py" ```` shows that file. A test compares them.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SHOWN = re.compile(r'^```\w+ title="(?P<path>[^"]+/[^"]+)"\n(?P<body>.*?)^```$', re.MULTILINE | re.DOTALL)


def updated(page: str) -> str:
    """The page with the present content of the files that it shows."""

    def block(match: re.Match[str]) -> str:
        head = match[0].partition("\n")[0]
        return f"{head}\n{(ROOT / match['path']).read_text(encoding='utf-8')}```"

    return SHOWN.sub(block, page)


def main() -> None:
    """Update all pages."""
    for page in sorted(ROOT.glob("docs/**/*.md")):
        page.write_text(updated(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
