"""The examples in the documentation of the cache run, in order."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs" / "concepts"


@pytest.mark.parametrize("name", ["gradient-cache.md", "offload.md"])
def test_examples_run(name):
    blocks = re.findall(r"^```python\n(.*?)^```", (DOCS / name).read_text(), flags=re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 2
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, name, "exec"), names)
