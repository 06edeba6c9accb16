"""Exponentials that one pass saves instead of a large float32 gradient; in Triton's interpreter, on the CPU."""

from types import SimpleNamespace

import pytest
import torch
from tests.compare import assert_close
from tests.losses.loss_cases import converted, problem, solve

pytest.importorskip("triton", reason="triton is not installed on this platform")

from tests.kernels.interpreted import IN_THE_INTERPRETER
from tests.kernels.one_pass_pairs import ONE_PASS, TWO_PASS

from tilewise.errors import GradientError
from tilewise.kernels.triton_impl import program, scores
from tilewise.kernels.triton_impl.one_pass import strategy

pytestmark = IN_THE_INTERPRETER


@pytest.fixture
def always_saved(monkeypatch):
    """Exponentials are saved however small a call is."""
    monkeypatch.setattr(strategy, "saves_exponentials", lambda shape, needs, spec, options: needs.b and spec.row_lse)


@pytest.fixture
def counts(monkeypatch, always_saved):
    """How often exponentials, gradients from them, and gradients in forward were computed."""
    counts = {"exponentials": 0, "gradients": 0, "loss_and_gradients": 0}

    def counted(name, real):
        def call(*arguments):
            counts[name] += 1
            return real(*arguments)

        return call

    for name in counts:
        monkeypatch.setattr(strategy, name, counted(name, getattr(strategy, name)))
    return counts


SOFTMAX_LOSSES = ["info_nce_ids_one_way", "cross_entropy_bias", "cross_entropy_weighted", "cross_entropy_softcap"]


@pytest.mark.parametrize("k", [1.0, 3.0, -1e-12])
@pytest.mark.parametrize("name", [*SOFTMAX_LOSSES, "cross_entropy_z_loss"])
def test_exponentials_are_saved(name, k, counts):
    """Backward computes every gradient, multiplied by `grad_output`. Ignored rows are dropped in both passes."""
    made = problem(name, torch.float32)
    loss, grads = solve(lambda p: k * made.ours(p, options=ONE_PASS), made.leaves)
    want, want_grads = solve(lambda p: k * made.dense(p), converted(made.leaves, torch.float64))
    assert counts == {"exponentials": 1, "gradients": 1, "loss_and_gradients": 0}
    assert_close(loss, want, 1e-6)
    for leaf in want_grads:
        assert_close(grads[leaf], want_grads[leaf], 2e-6, leaf)


@pytest.mark.parametrize("name", ["cross_entropy_z_loss", "cross_entropy_bias"])
@pytest.mark.usefixtures("always_saved")
def test_exponentials_of_a_second_call(name, monkeypatch):
    """Other values, same programs: none is written, and the result equals that of a first call."""
    first, second = (problem(name, torch.float32, n=70, seed=seed) for seed in (0, 1))
    fresh = solve(second.ours, second.leaves, options=ONE_PASS)
    scores.forget_programs()
    solve(first.ours, first.leaves, options=ONE_PASS)
    monkeypatch.setattr(program.Program, "__init__", None)
    again = solve(second.ours, second.leaves, options=ONE_PASS)
    assert torch.equal(again[0], fresh[0])
    assert all(torch.equal(again[1][leaf], value) for leaf, value in fresh[1].items())


def test_exponentials_are_used_once(counts):
    made = problem("cross_entropy_bias", torch.float32)
    leaves = list(made.leaves.values())
    loss = 3.0 * made.ours(SimpleNamespace(**made.leaves), options=ONE_PASS)
    node = loss.grad_fn.next_functions[0][0]
    assert node.once is not None
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    assert node.once is None
    second = torch.autograd.grad(loss, leaves)
    assert counts == {"exponentials": 2, "gradients": 2, "loss_and_gradients": 0}
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_a_frozen_classifier_keeps_no_exponentials(counts):
    made = problem("cross_entropy_bias", torch.float32)
    _, want = solve(made.ours, made.leaves, options=TWO_PASS)
    frozen = {leaf: value.detach().requires_grad_(leaf != "classifier") for leaf, value in made.leaves.items()}
    _, grads = solve(made.ours, frozen, options=ONE_PASS)
    assert counts == {"exponentials": 0, "gradients": 0, "loss_and_gradients": 1}
    assert_close(grads["hidden"], want["hidden"], 2e-6)


def test_a_second_derivative_is_refused(counts):
    made = problem("cross_entropy", torch.float32, n=8, d=4)
    loss = made.ours(SimpleNamespace(**made.leaves), options=ONE_PASS)
    grads = torch.autograd.grad(loss, list(made.leaves.values()), create_graph=True)
    with pytest.raises(GradientError, match="first derivatives only"):
        sum(grad.square().sum() for grad in grads).backward()


@pytest.mark.parametrize("name", ["info_nce", "cross_entropy_bias"])
def test_exponentials_in_a_compiled_graph(name, counts):
    """The operator declares memory for all rows, also where fewer count."""
    torch._dynamo.reset()
    made = problem(name, torch.float32)

    def whole(p):
        return torch.compile(lambda: 3.0 * made.ours(p, options=ONE_PASS), fullgraph=True, backend="aot_eager")()

    loss, grads = solve(whole, made.leaves)
    assert counts == {"exponentials": 1, "gradients": 1, "loss_and_gradients": 0}
    want, want_grads = solve(lambda p: 3.0 * made.ours(p, options=ONE_PASS), made.leaves)
    assert_close(loss, want, 1e-6)
    for leaf in want_grads:
        assert_close(grads[leaf], want_grads[leaf], 1e-6, leaf)
