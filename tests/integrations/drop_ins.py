"""What the tests of the drop-ins share: inputs in float64, and a comparison of losses and gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tests.compare import assert_close

N, D = 37, 12
EXACT = 1e-12


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def normal(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def scalar(value):
    return torch.tensor(value, dtype=torch.float64, requires_grad=True)


def assert_same(got, want, leaves):
    """Compare the loss and every gradient, with a grad_output of 3."""
    assert_close(got, want, EXACT, "loss")
    ours, theirs = torch.autograd.grad(3 * got, leaves), torch.autograd.grad(3 * want, leaves)
    for index, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        assert other.norm() > 0
        assert_close(mine, other, EXACT, f"gradient {index}")


def cosines(a, b):
    return F.normalize(a, dim=1) @ F.normalize(b, dim=1).T
