"""Checks of batch invariance: a row's results in any batch have the bits that they have in one reference batch.

Axes: n rows of the pool, v classes, d features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import tilewise as tw
from tilewise.losses.token_stats import WANT

CAPPED: dict[str, Any] = {"softcap": 20.0, "z_loss": 1e-3, "label_smoothing": 0.1}
SMOOTH = ("log_prob", "entropy", "log_sum_sq_prob", "mean_logit", "logsumexp")


class Pool:
    """Rows of very different sizes and with very different gradients, and a classifier. Every seventh row is ignored.

    ``results`` of some of the rows are a loss, statistics, and gradients of the hidden states, one row each.
    """

    def __init__(
        self, dtype: torch.dtype, n: int, v: int, d: int, options: tw.TileOptions, device: str = "cpu"
    ) -> None:
        random = torch.Generator().manual_seed(3)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=random, dtype=torch.float64)

        self.n, self.options, self.random = n, options, random
        hidden = normal(n, d) * torch.logspace(-2, 1, n, dtype=torch.float64)[torch.randperm(n, generator=random), None]
        head, target = normal(v, d) / 2, torch.randint(v, (n,), generator=random)
        target[::3] = (hidden @ head.T).argmax(1)[::3]
        target[::7] = -100
        # Gradients from 1e-6 to 100: no common factor brings all of them into the range of float16.
        incoming = normal(n) * torch.logspace(-6, 2, n, dtype=torch.float64)[torch.randperm(n, generator=random)]
        self.hidden, self.head, self.bias = (x.to(device, dtype) for x in (hidden, head, normal(v)))
        self.target = target.to(device)
        self.incoming = incoming.to(device, torch.float64 if dtype == torch.float64 else torch.float32)

    def results(self, rows: Tensor) -> dict[str, Tensor]:
        rows = rows.to(self.hidden.device)
        hidden, target, how = self.hidden[rows].requires_grad_(), self.target[rows], {"options": self.options}
        each = {"reduction": "none"} | how
        stats = tw.linear_token_stats(hidden, self.head, target, want=WANT, temperature=0.7, **how)
        found = {
            "loss": tw.linear_cross_entropy(hidden, self.head, target, **each),
            "capped": tw.linear_cross_entropy(hidden, self.head, target, linear_bias=self.bias, **CAPPED, **each),
            "lse": tw.linear_logsumexp(hidden, self.head, bias=self.bias, **how),
        }
        roots = found | {"tokens": sum(getattr(stats, name) for name in SMOOTH)}
        found |= {name: getattr(stats, name) for name in WANT}
        for name, value in roots.items():
            found[f"gradient of {name}"] = torch.autograd.grad(value, hidden, self.incoming[rows].to(value.dtype))[0]
        return {name: value.detach() for name, value in found.items()}

    def batches(self, count: int, sizes: tuple[int, ...]) -> Iterator[Tensor]:
        """Random rows in random order; the sizes take turns, up to the number of rows of the pool."""
        for turn in range(count):
            most = sizes[turn % len(sizes)]
            size = int(torch.randint(1, most + 1, (), generator=self.random))
            yield torch.randperm(self.n, generator=self.random)[:size]


def different(pool: Pool, batches: Iterator[Tensor], say: Callable[..., None] = print) -> tuple[int, int]:
    """(number of compared (batch, position) pairs, how many of them have a bit that differs from the reference)."""
    want = pool.results(torch.arange(pool.n))
    assert all(value.isfinite().all() and value.count_nonzero() for value in want.values())
    pairs = wrong = 0
    for rows in batches:
        got = pool.results(rows)
        there = rows.to(pool.hidden.device)
        unequal = torch.zeros(len(rows), dtype=torch.bool, device=pool.hidden.device)
        for name, value in got.items():
            here = (value != want[name][there]).reshape(len(rows), -1).any(1)
            if here.any():
                say(f"{name}: {int(here.sum())} of {len(rows)} rows differ")
            unequal |= here
        pairs, wrong = pairs + len(rows), wrong + int(unequal.sum())
    return pairs, wrong
