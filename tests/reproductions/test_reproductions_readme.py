"""The README of the reproductions names what is there, and examples in docstrings are right."""

import doctest
import importlib
from pathlib import Path

import pytest
from tests.test_docs import broken_links

ROOT = Path(__file__).parents[2]
README = ROOT / "reproductions" / "README.md"


def test_links_lead_somewhere():
    assert broken_links(README) == []


def test_every_command_and_every_result_is_named():
    text = README.read_text()
    commands = [path for path in (ROOT / "reproductions").glob("*.py") if "__main__" in path.read_text()]
    assert len(commands) >= 6
    assert all(f"`python -m reproductions.{path.stem}" in text for path in commands)
    kinds = {path.name.removesuffix(".json") for path in (ROOT / "reproductions" / "results").rglob("*.json")}
    assert {name for name in kinds if name not in text} == set()


@pytest.mark.parametrize(
    "name",
    [
        "benchmarks.measure", "benchmarks.report", "benchmarks.run", "reproductions.records",
        "reproductions.train_step_order", "reproductions.lm_figures", "reproductions.lm_text",
    ],
)  # fmt: skip
def test_examples_in_docstrings_are_right(name):
    if "lm_" in name:
        pytest.importorskip("transformers")
    found = doctest.testmod(importlib.import_module(name), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert found.attempted > 0
    assert found.failed == 0
