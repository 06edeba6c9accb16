"""Scores, a small language model's head and what is asked of them: for the tests of a backward that leaves things out.

With the identity as classifier the scores are the hidden states, and the gradient of the hidden states is G itself.
"""

import math

import torch
import torch.nn.functional as F
from tests.compare import relative_error

import tilewise as tw
from tilewise.kernels import filter_plan as plans
from tilewise.options import TileOptions

COLS = 500  # 32 tiles of 16, the last one ragged


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def ranks(n, slope, noise, seed=0):
    """-slope * ln(rank) + noise, ranks in random order: what a language model's scores look like."""
    order = torch.randperm(COLS, generator=torch.Generator().manual_seed(seed)) + 1
    return -slope * order.double().log() + noise * random(n, COLS, seed=seed)


def with_one_row(scores, row):
    scores[1] = row
    return scores


SCORES = {
    "trained": lambda n: ranks(n, 1.8, 2.0),
    "very peaked": lambda n: ranks(n, 6.0, 1.0),
    "flat": lambda n: random(n, COLS),
    "heavy tail": lambda n: ranks(n, 1.0, 0.5) + random(n, COLS, seed=2) / random(n, COLS, seed=3).abs(),
    "all alike": lambda n: torch.zeros(n, COLS, dtype=torch.float64),
    "spread evenly over all but one": lambda n: torch.cat(
        [torch.full((n, 1), 8.0), torch.zeros(n, COLS - 1)], 1
    ).double(),
    "two levels at the tolerance": lambda n: torch.where(torch.arange(COLS) < 16, 0.0, math.log(1e-2 / 31)).expand(
        n, -1
    ),
    "huge": lambda n: 300.0 * random(n, COLS),
    "ties": lambda n: random(n, COLS).round(),
    "nothing but one": lambda n: torch.where(torch.arange(COLS) == 3, 0.0, -1e4).double().expand(n, -1),
    "one row far below": lambda n: with_one_row(ranks(n, 1.8, 2.0), -1e6 + random(COLS)),
    "every row its own": lambda n: 8.0 * random(n, COLS),
}


def solve(scores, target, tolerance, dtype=torch.float64, **settings):
    """G times the incoming gradient (1 for each row), and the plan of the call."""
    x = scores.to(dtype).detach().clone().requires_grad_()
    options = TileOptions(filter_tolerance=tolerance, **settings)
    with tw.record_filtering() as report:
        loss = tw.linear_cross_entropy(x, torch.eye(COLS, dtype=dtype), target, reduction="sum", options=options)
    loss.backward()
    return x.grad, report


def tiles_of(values_nm, plan):
    """In the order of the plan, cut into tiles: (n, T, W), zeros behind the last column."""
    tiles, width = plan.mass.shape[0], plans.tile_width(values_nm.shape[1])
    ordered = values_nm[:, plan.order.long()]
    return F.pad(ordered, (0, tiles * width - ordered.shape[1])).view(len(values_nm), tiles, width)


def dropped_mass(scores, plan):
    """What each row drops, from all its scores."""
    mass_nt = tiles_of(scores.double().softmax(1), plan).sum(2)
    return (mass_nt * (plan.mass.T >= 0)).sum(1)


def dense_g(scores, target):
    return scores.double().softmax(1) - F.one_hot(target, COLS)


class Head:
    """A small language model's head with trained-like scores; every argument may require grad."""

    def __init__(self, dtype=torch.float64, n=60, d=24, classes=COLS):
        rank = torch.randperm(classes, generator=torch.Generator().manual_seed(2)) + 1
        rest = 2 * random(classes, d - 1, seed=3) / math.sqrt(d - 1)
        self.target = torch.randint(0, classes, (n,), generator=torch.Generator().manual_seed(4))
        common = torch.full((n, 1), 4.0, dtype=torch.float64)
        hidden = torch.cat([common, random(n, d - 1, seed=5) + 2 * rest[self.target]], 1)
        classifier = torch.cat([(-2.0 * rank.double().log() / 4)[:, None], rest], 1)
        values = {"input": hidden, "weight": classifier, "bias": 0.3 * random(classes, seed=6)}
        self.leaves = {name: value.to(dtype).requires_grad_() for name, value in values.items()}
        self.leaves["scale"] = torch.tensor(1.1, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
        self.leaves["scale"].requires_grad_()

    def loss(self, tolerance=0.0, leaves=None, target=None, options=None, **settings):
        x = leaves or self.leaves
        options = options or TileOptions(filter_tolerance=tolerance)
        target = self.target if target is None else target
        return tw.linear_cross_entropy(
            x["input"], x["weight"], target, linear_bias=x["bias"], logit_scale=x["scale"], options=options, **settings
        )

    def grads(self, *args, upstream=None, **settings):
        loss = self.loss(*args, **settings)
        loss = loss.sum() if upstream is None else (loss * upstream).sum()
        return dict(zip(self.leaves, torch.autograd.grad(loss, list(self.leaves.values())), strict=True))


def worst(got, want):
    return torch.tensor([relative_error(got[name], want[name]) for name in want]).max()  # NaN is seen
