"""Towers, a loss, and the comparison of a cached step with an uncached step."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from tests.compare import assert_close, relative_error
from torch import Tensor, nn

from tilewise.cache.chunks import row_ranges, take_rows, tensors_of

EXACT = 1e-6


def tower(features: int = 12, dropout: float = 0.3) -> nn.Module:
    return nn.Sequential(nn.Linear(features, 24), nn.GELU(), nn.Dropout(dropout), nn.Linear(24, 8), nn.Dropout(dropout))


class Contrast(nn.Module):
    """An oracle of a symmetric loss with a learnable scale. Counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.tensor(1.3))
        self.calls = 0

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        self.calls += 1
        scores = self.log_scale.exp() * F.normalize(a, dim=1) @ F.normalize(b, dim=1).T
        answers = torch.arange(len(a))
        return (F.cross_entropy(scores, answers) + F.cross_entropy(scores.T, answers)) / 2


def encode_chunks(encoder, batch, chunk_size):
    """The uncached step: the graphs of all chunks are in memory."""
    rows = len(tensors_of(batch)[0])
    return torch.cat([encoder(take_rows(batch, part)) for part in row_ranges(rows, chunk_size)])


def gradients(*modules: nn.Module) -> list[Tensor]:
    grads = [p.grad.clone() for module in modules for p in module.parameters() if p.grad is not None]
    for module in modules:
        module.zero_grad()
    return grads


def assert_same(got: list[Tensor], want: list[Tensor]) -> None:
    assert len(got) == len(want) > 0
    for one, other in zip(got, want, strict=True):
        assert_close(one, other, EXACT)


def both(step, uncached, *modules):
    """Run both from the same random state. Loss, gradients and the random state afterwards must be equal."""
    torch.manual_seed(7)
    want = uncached()
    want.backward()
    want_next = torch.rand(3)
    want_grads = gradients(*modules)
    torch.manual_seed(7)
    got = step()
    got_next = torch.rand(3)
    assert relative_error(got.detach(), want.detach()) <= EXACT
    assert_same(gradients(*modules), want_grads)
    assert torch.equal(got_next, want_next)
    return got
