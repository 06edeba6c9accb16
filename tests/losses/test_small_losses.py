"""Losses near zero: exactly 0 for a single score, and in float32 the error that docs/concepts/numerics.md states."""

import math

import pytest
import torch
import torch.nn.functional as F
from tests.compare import assert_close
from tests.losses.loss_cases import CASES, Maker, bring_close, converted, solve

import tilewise as tw

ALONE = {
    "nt_xent": lambda a, b, scale, options: tw.nt_xent(torch.cat([a, b]), temperature=1 / scale, options=options),
    "clip": lambda a, b, scale, options: tw.clip_loss(a, b, scale, options=options),
    "info_nce": lambda a, b, scale, options: tw.info_nce(a, b, temperature=1 / scale, options=options),
    "one class": lambda a, b, scale, options: tw.linear_cross_entropy(
        a, b, torch.zeros(1, dtype=torch.long), logit_scale=scale, options=options
    ),
}


@pytest.mark.parametrize("gradients", ["forward", "backward"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ALONE)
def test_a_softmax_over_one_score_has_no_loss_and_no_gradient(name, dtype, gradients):
    for seed in range(20):
        g = torch.Generator().manual_seed(seed)
        a, b = ((seed + 1) * torch.randn(1, 16, generator=g) for _ in range(2))
        leaves = [a.to(dtype).requires_grad_(), b.to(dtype).requires_grad_(), torch.tensor(0.7, requires_grad=True)]
        loss = ALONE[name](*leaves, tw.TileOptions(gradients=gradients))
        assert loss.item() == 0.0
        assert all((grad == 0).all() for grad in torch.autograd.grad(loss, leaves))


PAIRS = {"image": "text", "query": "key"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "name", [name for name, build in CASES.items() if PAIRS.keys() & build(Maker(torch.half)).leaves]
)
def test_gradients_of_close_pairs_in_half_types(name, dtype):
    """Probabilities are near 1. Large terms must cancel before they are rounded; the dense path may be off by 100 %."""
    make = Maker(dtype, n=64, d=48)
    made = CASES[name](make)
    pair = next((one, PAIRS[one]) for one in PAIRS if one in made.leaves)
    bring_close(*(made.leaves[leaf] for leaf in pair), make)
    exact = {leaf: value.requires_grad_() for leaf, value in converted(made.leaves, torch.float64).items()}
    for value in made.leaves.values():
        value.requires_grad_()
    (_, got), (_, want) = (solve(*each, torch.ones(())) for each in ((made.ours, made.leaves), (made.dense, exact)))
    for leaf in pair:
        assert_close(got[leaf], want[leaf], 1e-2, leaf)


OPTIONS = {
    "one-pass": tw.TileOptions(gradients="forward"),
    "two-pass": tw.TileOptions(gradients="backward"),
    "filtered": tw.TileOptions(filter_tolerance=1e-2),
}
LOSSES = {
    "cross entropy": lambda a, c, y, options: tw.linear_cross_entropy(a, c, y, options=options),
    "each token": lambda a, c, y, options: tw.linear_cross_entropy(a, c, y, reduction="none", options=options),
    "clip": lambda a, c, y, options: tw.clip_loss(a, c[y], 1.0, options=options),
    "nt_xent": lambda a, c, y, options: tw.nt_xent(torch.cat([a, c[y]]), temperature=1.0, options=options),
}


@pytest.mark.parametrize("how", OPTIONS)
@pytest.mark.parametrize("name", LOSSES)
def test_the_error_of_a_small_loss_in_float32(name, how):
    """At most 2e-6 of the loss, or 2**-22 of 1 plus the largest score, whichever is larger."""
    small = 0
    for seed in range(6):
        for size in (8.0, 11.0, 12.5, 14.0, 17.0, 20.0, 40.0):
            g = torch.Generator().manual_seed(seed)
            c = F.normalize(torch.randn(600, 32, generator=g), dim=1)
            y = torch.randperm(600, generator=g)[:64]
            a = F.normalize(c[y] + 0.02 * torch.randn(64, 32, generator=g), dim=1)
            a, c = (math.sqrt(size) * a).requires_grad_(), math.sqrt(size) * c
            got = LOSSES[name](a, c, y, OPTIONS[how]).detach().double()
            want = LOSSES[name](a.detach().double(), c.double(), y, None)
            bound = torch.maximum(2e-6 * want, torch.tensor(2.0**-22 * (1 + size)))
            assert ((got - want).abs() <= bound).all(), (seed, size)
            small += int((want.mean() < 0.03) & (want.mean() > 1e-3))
    assert small >= 10  # the losses in question were among them


def test_gradients_of_a_bucket_with_nearly_all_probability_in_float32():
    """Gradients of the student's probabilities cancel there, and float32 would lose two digits."""
    made = CASES["sparse_distillation_reverse"](Maker(torch.float32, n=1000, d=64))
    exact = {leaf: value.requires_grad_() for leaf, value in converted(made.leaves, torch.float64).items()}
    for value in made.leaves.values():
        value.requires_grad_()
    (_, got), (_, want) = (solve(*each, torch.ones(())) for each in ((made.ours, made.leaves), (made.dense, exact)))
    for leaf in want:
        assert_close(got[leaf], want[leaf], 2e-6, leaf)


def test_far_negatives_of_each_query_in_float32():
    """Their small terms must not be lost in a sum with the 1 of the positive."""
    for seed in range(5):
        g = torch.Generator().manual_seed(seed)
        query, noise = (F.normalize(torch.randn(64, 128, generator=g), dim=1) for _ in range(2))
        key, negatives = F.normalize(query + 0.02 * noise, dim=1), torch.randn(64, 3, 128, generator=g)
        given = query, key, F.normalize(negatives, dim=-1)
        got, want = (
            tw.info_nce(*(x.to(dtype) for x in given), in_batch=False, temperature=0.1)
            for dtype in (torch.float32, torch.float64)
        )
        assert 1e-4 < want < 4e-4
        assert_close(got, want, 2e-6)
