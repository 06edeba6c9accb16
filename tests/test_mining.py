"""Hard negatives against all scores in float64. Features are whole numbers, with many ties."""

from __future__ import annotations

import pytest
import torch
from tests.ring.virtual import run_virtual
from tests.test_retrieval import whole_numbers

import tilewise as tw
from tilewise.retrieval import HardNegatives

SETTINGS = {
    "closest": {},
    "range": {"range_min": 3, "range_max": 9},
    "absolute margin": {"absolute_margin": 2.0},
    "relative margin": {"relative_margin": 0.5},
    "scores": {"max_score": 4.0, "min_score": -1.0},
    "all": {"range_min": 1, "max_score": 5.0, "min_score": 0.0, "absolute_margin": 1.0, "relative_margin": 0.25},
}


def candidates(scores, positives, *, range_min=0, range_max=None, max_score=torch.inf, min_score=-torch.inf,
               absolute_margin=0.0, relative_margin=0.0, margins=False):  # fmt: skip
    """The candidates of each query in order, as lists."""
    found = []
    for row, right in zip(scores, positives.tolist(), strict=True):
        right = [p for p in right if p >= 0]
        lowest = min([row[p].item() for p in right], default=torch.inf) if margins else torch.inf
        most = min(max_score, lowest - absolute_margin)
        if lowest < torch.inf:
            most = min(most, lowest - abs(lowest) * relative_margin)
        order = row.argsort(descending=True, stable=True).tolist()
        found.append([j for j in order if j not in right and min_score <= row[j] <= most][range_min:range_max])
    return found


def problem(seed=0, n=20, m=60, p=2):
    generator = torch.Generator().manual_seed(seed)
    queries, gallery = (whole_numbers(generator, rows, 6, torch.float32) for rows in (n, m))
    return queries, gallery, torch.randint(-1, m, (n, p), generator=generator)


@pytest.mark.parametrize("name", SETTINGS)
def test_closest_candidates(name):
    queries, gallery, positives = problem()
    more = SETTINGS[name]
    found = tw.mine_hard_negatives(queries, gallery, positives, num_negatives=4, **more)
    scores = queries.double() @ gallery.double().T
    want = candidates(scores, positives, margins=any("margin" in key for key in more), **more)
    assert [[j for j in row if j >= 0] for row in found.indices.tolist()] == [row[:4] for row in want]
    held = found.indices >= 0
    assert torch.equal(found.scores.double()[held], scores.gather(1, found.indices.clamp(min=0))[held])
    assert (found.scores[~held] == -torch.inf).all()
    assert torch.equal(found.positives, positives)
    right = positives >= 0
    assert torch.equal(found.positive_scores[right].double(), scores.gather(1, positives.clamp(min=0))[right])


def test_item_i_answers_query_i_and_ids_leave_out_more():
    queries, gallery, _ = problem(n=20, m=20)
    ids = torch.arange(20) % 7
    found = tw.mine_hard_negatives(queries, gallery, query_ids=ids, gallery_ids=ids)
    scores = queries.double() @ gallery.double().T
    alike = [(ids == one).nonzero().squeeze(1).tolist() for one in ids]
    want = candidates(scores, torch.tensor([row + [-1] * (3 - len(row)) for row in alike]))
    assert found.indices.tolist() == [row[:3] for row in want]
    assert torch.equal(found.positive_scores[:, 0], scores.diagonal().float())


def test_a_random_choice_takes_each_candidate_as_often():
    queries, gallery, positives = problem(n=2)
    scores = queries.double() @ gallery.double().T
    pool = candidates(scores, positives, range_min=2, range_max=8)
    counts = torch.zeros(2, 60)
    for seed in range(100):
        found = tw.mine_hard_negatives(
            queries,
            gallery,
            positives,
            num_negatives=3,
            range_min=2,
            range_max=8,
            sampling_strategy="random",
            seed=seed,
        )
        assert (found.scores.diff(dim=1) <= 0).all()
        counts.scatter_add_(1, found.indices, torch.ones(2, 3))
    for row, items in zip(counts, pool, strict=True):
        assert sorted(row.nonzero().squeeze(1).tolist()) == sorted(items)
        assert (row[items] > 30).all()  # 50 of each are expected
        assert (row[items] < 70).all()
    again = [
        tw.mine_hard_negatives(queries, gallery, positives, seed=seed, sampling_strategy="random").indices
        for seed in (9, 9, 8)
    ]
    assert torch.equal(again[0], again[1])
    assert not torch.equal(again[0], again[2])


def test_over_ranks_equals_one_process():
    queries, gallery, positives = problem(n=9)
    more = {"num_negatives": 4, **SETTINGS["all"]}

    def part(group):
        rows, cols = (slice(size * group.rank(), size * (group.rank() + 1)) for size in (3, 20))
        return tw.mine_hard_negatives(queries[rows], gallery[cols], positives[rows], **more, group=group)

    want = tw.mine_hard_negatives(queries, gallery, positives, **more)
    for got, one in zip(zip(*run_virtual(3, part), strict=True), want, strict=True):
        assert torch.equal(torch.cat(got), one)


MINED = HardNegatives(
    indices=torch.tensor([[2, 3], [0, -1]]),
    scores=torch.tensor([[0.5, 0.25], [0.75, -torch.inf]]),
    positives=torch.tensor([[0, 1], [3, -1]]),
    positive_scores=torch.tensor([[1.0, 0.875], [0.5, torch.inf]]),
)


@pytest.mark.parametrize(
    "form, scores, want",
    [
        ("triplet", True, {
            "anchor": ["p", "p", "p", "p", "q"], "positive": ["a", "a", "b", "b", "d"],
            "negative": ["c", "d", "c", "d", "a"],
            "scores": [[1.0, 0.5], [1.0, 0.25], [0.875, 0.5], [0.875, 0.25], [0.5, 0.75]],
        }),
        ("n-tuple", False, {
            "anchor": ["p", "p"], "positive": ["a", "b"], "negative_1": ["c", "c"], "negative_2": ["d", "d"],
        }),
        ("n-tuple", True, {
            "anchor": ["p", "p"], "positive": ["a", "b"], "negative_1": ["c", "c"], "negative_2": ["d", "d"],
            "scores": [[1.0, 0.5, 0.25], [0.875, 0.5, 0.25]],
        }),
        ("labeled-pair", False, {
            "anchor": ["p"] * 4 + ["q"] * 2, "positive": ["a", "b", "c", "d", "d", "a"], "label": [1, 1, 0, 0, 1, 0],
        }),
        ("labeled-list", False, {
            "anchor": ["p", "p", "q"], "positive": [["a", "c", "d"], ["b", "c", "d"], ["d", "a"]],
            "labels": [[1, 0, 0], [1, 0, 0], [1, 0]],
        }),
    ],
)  # fmt: skip
def test_columns_of_a_training_set(form, scores, want):
    assert MINED.columns(["p", "q"], list("abcd"), form, output_scores=scores) == want
