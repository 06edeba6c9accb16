"""The plan of a loss over sharded tensors, from placements alone: no tensor and no group."""

import pytest
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from tilewise.errors import ConfigError
from tilewise.ops.distributed.sharded import Plan, plan, plan_pairs, symbol


def test_symbols():
    placements = Replicate(), Shard(0), Shard(2), _StridedShard(0, split_factor=2), Partial()
    assert [symbol(placement) for placement in placements] == ["R", "S0", "S2", "T0", "P"]


# Placements of the classifier and of the hidden states (None: plain), and the kinds of the dimensions.
KINDS = [
    ("S0", None, "rows"),
    ("R", None, "rows"),
    ("S1", None, "rows"),
    ("R S0", None, "rows rows"),
    ("T0 S0", None, "rows vocabulary"),
    ("S0 S0", None, "rows rows"),
    ("R", "R", "replicated"),
    ("S0", "R", "vocabulary"),
    ("S1", "R", "features"),
    ("R", "S0", "rows"),
    ("S0", "S0", "rows"),
    ("S0", "S1", "vocabulary"),
    ("R", "S1", "rows"),
    ("T0 S0", "S0 R", "rows vocabulary"),
    ("T0 S0", "R R", "replicated vocabulary"),
    ("S0 S0", "R R", "vocabulary replicated"),
    ("R S0", "S0 S1", "rows vocabulary"),
]


@pytest.mark.parametrize("columns, rows, kinds", KINDS)
def test_kinds(columns, rows, kinds):
    rows = None if rows is None else rows.split()
    found = plan(columns.split(), rows, features=2)
    assert found.kinds == tuple(kinds.split())
    assert plan(columns.split(), rows, features=2, keep_shards=False).vocabulary is None
    # A gradient is summed exactly over the ranks with different rows, unless each keeps its own shard.
    for i, kind in enumerate(found.kinds):
        assert (found.column_gradients[i] == "P") == (kind == "rows")
        assert found.columns[i] == ("S0" if kind == "vocabulary" else "R")
        assert rows is None or found.rows[i] == (rows[i] if kind == "rows" else "R")


def test_the_gradient_is_an_average_only_for_plain_rows():
    assert plan(["R", "S0"]).average((2, 3)) == 1 / 6
    assert plan(["T0", "S0"]).average((2, 3)) == 1 / 2
    assert plan(["S0"], ["S0"]).average((3,)) == 1.0


@pytest.mark.parametrize(
    "columns, rows, ring",
    [
        ("S0", None, 0),
        ("S0", "S0", 0),
        ("R S0", None, 1),
        ("R S0", "S0 S0", 1),
        ("R", "S0", None),  # nothing is sharded
        ("S0", "R", None),  # all ranks have the same rows
        ("S0 S0", None, None),  # a ring is one dimension
        ("T0 S0", None, None),  # the classes are sharded over the other dimension
    ],
)
def test_ring(columns, rows, ring):
    found = plan(columns.split(), None if rows is None else rows.split(), large=True)
    assert found.ring == ring
    assert ring is None or found.columns[ring] == found.column_gradients[ring] == "S0"
    assert plan(columns.split(), large=False).ring is None


@pytest.mark.parametrize(
    "find, message",
    [
        (lambda: plan(["P"]), r"linear_weight is a sum that is not reduced yet \(Partial\) on dimension 0"),
        (lambda: plan(["R", "R"], ["R", "P"]), r"input is a sum that is not reduced yet \(Partial\) on dimension 1"),
        (lambda: plan(["S0"], ["S2"], features=2), "input is sharded along its features on dimension 0"),
        (lambda: plan_pairs({"features": ["S1"]}), "features is not sharded along its rows on dimension 0"),
        (lambda: plan_pairs({"features": ["P"]}), "features is a sum that is not reduced yet"),
        (lambda: plan_pairs({"features": ["S0", "S0"]}), "sharded over one dimension of the mesh, got 2 dimensions"),
    ],
)
def test_refusals_say_what_to_do(find, message):
    with pytest.raises(ConfigError, match=f"{message}.*redistribute"):
        find()


def test_pairs_are_sharded_together():
    found = plan_pairs({"image_features": ["S0", "R"], "text_features": ["R", "R"]})
    assert found.rows == ("S0", "R")
    assert found.sums == ("P", "R")


def test_the_plan_in_words():
    def words(found: Plan, rows: str | None, columns: str | None) -> str:
        placed = None if columns is None else tuple(columns.split())
        return found.describe(["dp", "tp"], [2, 4], None if rows is None else tuple(rows.split()), placed)

    text = words(plan(["T0", "S0"]), None, "T0 S0")
    assert "dp (2 ranks)  rows: the classifier is gathered once per pass, and its gradient is reduce-scattered" in text
    assert "tp (4 ranks)  vocabulary: vectors of the rows and the gradient of the hidden states are all-reduced" in text
    text = words(plan(["R", "S0"], large=True), None, "R S0")
    assert "rows: the classifier's gradient is all-reduced" in text
    assert "rows: classifier shards move around a ring with their float32 gradients" in text
    text = words(plan(["S1", "S0"], ["R", "S1"], features=2), "R S1", "S1 S0")
    assert "features: the classifier is gathered once per pass, and each rank keeps its part of the gradient" in text
    assert "gradient of the hidden states is reduce-scattered; the hidden states are gathered" in text
    text = words(plan_pairs({"a": ["S0", "R"]}), "S0 R", None)
    assert "rows: blocks of columns move around a ring with their gradients" in text
    assert "replicated: nothing is sent" in text
