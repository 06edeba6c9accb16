"""Every loss and every gradient against its oracle: float64, float32 and the half types, all reductions."""

from types import SimpleNamespace

import pytest
import torch
from tests.compare import assert_close, assert_no_worse
from tests.losses.loss_cases import CASES, converted, problem, solve, upstream_like

pytestmark = pytest.mark.usefixtures("nan_filled_empty", "small_tiles")
HALVES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("name", CASES)
def test_float64(name, reduction):
    made = problem(name)
    upstream = upstream_like(made.dense(SimpleNamespace(**made.leaves), reduction=reduction))
    loss, grads = solve(made.ours, made.leaves, upstream, reduction=reduction)
    want, want_grads = solve(made.dense, made.leaves, upstream, reduction=reduction)
    assert loss.dtype == torch.float64
    assert_close(loss, want, 1e-12, "loss")
    for leaf in want_grads:
        assert_close(grads[leaf], want_grads[leaf], 1e-12, leaf)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("name", CASES)
def test_float32(name, reduction):
    made = problem(name, torch.float32)
    exact = converted(made.leaves, torch.float64)
    upstream = upstream_like(made.dense(SimpleNamespace(**exact), reduction=reduction)).abs()
    loss, grads = solve(made.ours, made.leaves, upstream, reduction=reduction)
    want, want_grads = solve(made.dense, exact, upstream, reduction=reduction)
    assert loss.dtype == torch.float32
    assert_close(loss, want, 2e-6, "loss")
    for leaf in want_grads:
        assert grads[leaf].dtype == torch.float32
        assert_close(grads[leaf], want_grads[leaf], 1e-5, leaf)


@pytest.mark.parametrize("dtype", HALVES.values(), ids=HALVES)
@pytest.mark.parametrize("name", CASES)
def test_half_types_lose_no_more_than_dense(name, dtype):
    made = problem(name, dtype)
    exact = converted(made.leaves, torch.float64)
    loss, grads = solve(made.ours, made.leaves)
    dense, dense_grads = solve(made.dense, made.leaves)
    want, want_grads = solve(made.dense, exact)
    assert loss.dtype == torch.float32
    assert_no_worse(loss, dense, want, "loss")
    for leaf in want_grads:
        assert grads[leaf].dtype == made.leaves[leaf].dtype
        assert_no_worse(grads[leaf], dense_grads[leaf], want_grads[leaf], leaf)


# Hardness is a constant without a gradient by definition, so finite differences see another function.
@pytest.mark.parametrize("name", [name for name in CASES if "hardness" not in name])
def test_gradcheck(name):
    made = problem(name, n=6, d=3)
    upstream = upstream_like(made.ours(SimpleNamespace(**made.leaves), reduction="none"))

    def weighted_loss(*leaves):
        arguments = SimpleNamespace(**dict(zip(made.leaves, leaves, strict=True)))
        return (made.ours(arguments, reduction="none") * upstream).sum()

    assert torch.autograd.gradcheck(
        weighted_loss, tuple(made.leaves.values()), eps=1e-6, atol=1e-8, rtol=1e-6, fast_mode=True
    )
