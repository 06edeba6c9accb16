"""Derivatives of gradients: those with respect to grad_output are exact, true second derivatives raise an error."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from tests.compare import assert_close
from tests.losses.loss_cases import CASES, problem, upstream_like
from torch import nn

import tilewise as tw
from tilewise.errors import GradientError

pytestmark = pytest.mark.usefixtures("nan_filled_empty", "small_tiles")
# Scores of a query with negatives of its own are computed in O(n d), and have all derivatives.
TWICE_DIFFERENTIABLE = {name: ("negatives",) for name in CASES if "own" in name}


def as_function(loss, leaves, **how):
    """The loss as a function of its leaves."""
    return lambda *values: loss(SimpleNamespace(**dict(zip(leaves, values, strict=True))), **how)


def directions(leaves, seed=3):
    """A random direction for each leaf."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(leaf.shape, generator=generator, dtype=torch.float64) for leaf in leaves.values())


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("name", CASES)
def test_derivative_along_a_direction(name, reduction):
    """`jvp` differentiates a gradient with respect to grad_output. Along each leaf, and along all of them."""
    made = problem(name)
    leaves, along = tuple(leaf.detach() for leaf in made.leaves.values()), directions(made.leaves)
    ours, dense = (as_function(loss, made.leaves, reduction=reduction) for loss in (made.ours, made.dense))
    alone = [tuple(v if i == k else torch.zeros_like(v) for k, v in enumerate(along)) for i in range(len(along))]
    for some, what in zip((*alone, along), (*made.leaves, "all"), strict=True):
        got, want = (torch.autograd.functional.jvp(loss, leaves, some)[1] for loss in (ours, dense))
        assert_close(got, want, 1e-10, what)


@pytest.mark.parametrize("name", CASES)
def test_gradient_is_differentiable_in_grad_output(name):
    made = problem(name, n=6, d=3)
    loss = made.ours(SimpleNamespace(**made.leaves), reduction="none")
    upstream = upstream_like(loss).requires_grad_()

    def gradients(upstream):
        return torch.autograd.grad(loss, list(made.leaves.values()), upstream, create_graph=True)

    assert torch.autograd.gradcheck(gradients, (upstream,), atol=1e-8, rtol=1e-6)
    assert torch.autograd.gradgradcheck(lambda w: [g * w.sum() for g in gradients(w)], (upstream,), atol=1e-8)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("name", CASES)
def test_second_derivative_raises_an_error(name, reduction):
    """For each leaf by itself, whatever the gradient is that depends on it, and also beside grad_output."""
    made = problem(name, n=8, d=4)
    leaves = made.leaves
    loss = made.ours(SimpleNamespace(**leaves), reduction=reduction)
    upstream = upstream_like(loss).requires_grad_()
    grads = torch.autograd.grad(loss, list(leaves.values()), upstream, create_graph=True)
    dense_loss = made.dense(SimpleNamespace(**leaves), reduction=reduction)
    dense = torch.autograd.grad(dense_loss, list(leaves.values()), upstream, create_graph=True)
    for of, grad, want in zip(leaves, grads, dense, strict=True):
        if not grad.requires_grad:
            continue
        for name_of_leaf, leaf in leaves.items():
            how = {"retain_graph": True, "allow_unused": True}
            (right,) = torch.autograd.grad(want.square().sum(), leaf, **how) if want.requires_grad else (None,)
            try:
                (got,) = torch.autograd.grad(grad.square().sum(), leaf, **how)
                print("RIGHT", name, of, name_of_leaf, got is None)
                if right is None or not right.any():
                    assert got is None or not got.any(), (of, name_of_leaf)
                else:
                    assert_close(got, right, 1e-8, (of, name_of_leaf))
            except GradientError:
                pass
