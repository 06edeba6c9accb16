"""Calls of a step of a small batch, counted: without noise, the same on any machine."""

import json

import pytest
import torch
from benchmarks.ordinary import COUNTS, LOSSES, counts

# Dense PyTorch does the loss in fewer operators there: its cross-entropy ignores targets inside of one.
MOST_ATEN = {"cross_entropy": 1.6}
# Statistics have more arguments, and own negatives are composed of two operators.
MOST_PYTHON = {"tokens": 4.0, "own_negatives": 4.0}
MOST_FRAMES = {"tokens": 52, "own_negatives": 78}
KNOWN = json.loads(COUNTS.read_text())


def dense_counts(name):
    """Those of the file, or counted now with another torch."""
    return KNOWN["counts"][name]["dense"] if torch.__version__ == KNOWN["torch"] else counts(name, "dense")


@pytest.mark.parametrize("name", LOSSES)
def test_a_small_step_makes_few_calls(name):
    """At most 1.5 times dense PyTorch's operators, and 4 times its calls from Python, mostly 3.3 times."""
    dense, ours = dense_counts(name), counts(name, "tilewise")
    assert ours["aten"] <= MOST_ATEN.get(name, 1.5) * dense["aten"]
    assert ours["python"] <= MOST_PYTHON.get(name, 3.3) * dense["python"]
    assert ours["frames"] <= MOST_FRAMES.get(name, 36)


@pytest.mark.skipif(torch.__version__ != KNOWN["torch"], reason="counts of this torch are not in the file")
def test_the_dense_baseline_is_that_of_the_file():
    for name in ("clip", "info_nce", "cross_entropy"):
        assert counts(name, "dense")["aten"] == KNOWN["counts"][name]["dense"]["aten"]
