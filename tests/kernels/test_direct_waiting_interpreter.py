"""Exponentials that wait for backward instead of a large gradient in float32; in Triton's interpreter, on the CPU."""

from types import SimpleNamespace

import pytest
import torch
from tests.compare import assert_close
from tests.losses.loss_cases import converted, problem, solve

pytest.importorskip("triton", reason="triton is not installed on this platform")

from tests.kernels.direct_pairs import EARLY, LATE, SOFTMAX
from tests.kernels.interpreted import IN_THE_INTERPRETER

from tilewise.errors import GradientError
from tilewise.kernels.spec import Pair
from tilewise.kernels.torch_impl import one_pass as kernels
from tilewise.kernels.triton_impl.launch import replay
from tilewise.kernels.triton_impl.one_pass import softmax as direct

pytestmark = IN_THE_INTERPRETER


@pytest.fixture
def waiting(monkeypatch):
    """Exponentials wait, however small a call is; how many were made, and how many gradients of them."""
    counts = {"exponentials": 0, "gradients": 0, "direct": 0}

    def counted(name, real):
        def call(*arguments, only_if=None):
            counts[name] += only_if is None or bool(only_if)  # not what was launched in vain
            return real(*arguments) if only_if is None else real(*arguments, only_if=only_if)

        return call

    for name in counts:
        monkeypatch.setattr(kernels, name, counted(name, getattr(kernels, name)))
    monkeypatch.setattr(kernels, "waits", lambda pair, needs, spec, options: needs.b and spec.row_lse)
    return counts


WAITING = ["info_nce_ids_one_way", "cross_entropy_bias", "cross_entropy_weighted", "cross_entropy_softcap"]


@pytest.mark.parametrize("k", [1.0, 3.0, -1e-12])
@pytest.mark.parametrize("name", [*WAITING, "cross_entropy_z_loss"])
def test_exponentials_that_wait(name, k, waiting):
    """Every gradient is made in backward, with what comes in; ignored rows are left out of both passes."""
    made = problem(name, torch.float32)
    loss, grads = solve(lambda p: k * made.ours(p, options=EARLY), made.leaves)
    want, want_grads = solve(lambda p: k * made.dense(p), converted(made.leaves, torch.float64))
    assert waiting == {"exponentials": 1, "gradients": 1, "direct": 0}
    assert_close(loss, want, 1e-6)
    for leaf in want_grads:
        assert_close(grads[leaf], want_grads[leaf], 2e-6, leaf)


@pytest.mark.parametrize("name", ["cross_entropy_z_loss", "cross_entropy_bias"])
def test_exponentials_that_wait_leave_a_tape(name, monkeypatch):
    """Other numbers, the same launches: nothing is set up again, and the result is that of a first call."""
    monkeypatch.setattr(kernels, "waits", lambda pair, needs, spec, options: needs.b and spec.row_lse)
    first, second = (problem(name, torch.float32, n=70, seed=seed) for seed in (0, 1))
    fresh = solve(second.ours, second.leaves, options=EARLY)
    replay._recordings.clear()
    solve(first.ours, first.leaves, options=EARLY)
    tapes = [made is not None for kind, made in replay._recordings.items() if kind[0] == "exponentials"]
    assert tapes == [True, True], "of all rows, in vain, and of those that count"
    monkeypatch.setattr(direct.Softmax, "__init__", None)
    again = solve(second.ours, second.leaves, options=EARLY)
    assert torch.equal(again[0], fresh[0])
    assert all(torch.equal(again[1][leaf], value) for leaf, value in fresh[1].items())


def test_nothing_is_computed_in_vain():
    """What is launched before it is known whether all rows count touches no score where they do not."""
    made = problem("cross_entropy_bias", torch.float32)
    leaves = {name: value.detach() for name, value in made.leaves.items()}
    pair = Pair(
        a=leaves["hidden"],
        b=leaves["classifier"],
        scale=torch.ones(()),
        row_key=torch.arange(len(leaves["hidden"])) % len(leaves["classifier"]),
    )
    weights = kernels.RowWeights(each=torch.ones(len(pair.a)))
    held = {}
    for go in (0, 1):
        only_if = torch.tensor(go, dtype=torch.int32)
        _, held[go] = kernels.exponentials(pair, weights, SOFTMAX, EARLY, len(pair.a), only_if=only_if)
    columns = torch.arange(len(pair.b)) != pair.row_key[:, None]
    assert held[0].e[:, : len(pair.b)][columns].isnan().all(), "memory as it was"
    want = (pair.a @ pair.b.T - (pair.a * pair.b[pair.row_key]).sum(1, keepdim=True)).exp()
    assert_close(held[1].e[:, : len(pair.b)][columns], want[columns], 1e-5)


def test_exponentials_are_given_away(waiting):
    made = problem("cross_entropy_bias", torch.float32)
    leaves = list(made.leaves.values())
    loss = 3.0 * made.ours(SimpleNamespace(**made.leaves), options=EARLY)
    node = loss.grad_fn.next_functions[0][0].next_functions[0][0]
    assert node.held is not None
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    assert node.held is None
    second = torch.autograd.grad(loss, leaves)
    assert waiting == {"exponentials": 2, "gradients": 2, "direct": 0}
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_a_frozen_classifier_keeps_no_exponentials(waiting):
    made = problem("cross_entropy_bias", torch.float32)
    _, want = solve(made.ours, made.leaves, options=LATE)
    frozen = {leaf: value.detach().requires_grad_(leaf != "classifier") for leaf, value in made.leaves.items()}
    _, grads = solve(made.ours, frozen, options=EARLY)
    assert waiting == {"exponentials": 0, "gradients": 0, "direct": 1}
    assert_close(grads["hidden"], want["hidden"], 2e-6)


def test_a_second_derivative_of_what_waited_is_refused(waiting):
    made = problem("cross_entropy", torch.float32, n=8, d=4)
    loss = made.ours(SimpleNamespace(**made.leaves), options=EARLY)
    grads = torch.autograd.grad(loss, list(made.leaves.values()), create_graph=True)
    with pytest.raises(GradientError, match="first derivatives only"):
        sum(grad.square().sum() for grad in grads).backward()


@pytest.mark.parametrize("name", ["info_nce", "cross_entropy_bias"])
def test_exponentials_wait_in_a_compiled_graph(name, waiting):
    """The operator announces memory for all rows, also where fewer count."""
    torch._dynamo.reset()
    made = problem(name, torch.float32)

    def whole(p):
        return torch.compile(lambda: 3.0 * made.ours(p, options=EARLY), fullgraph=True, backend="aot_eager")()

    loss, grads = solve(whole, made.leaves)
    assert waiting == {"exponentials": 1, "gradients": 1, "direct": 0}
    want, want_grads = solve(lambda p: 3.0 * made.ours(p, options=EARLY), made.leaves)
    assert_close(loss, want, 1e-6)
    for leaf in want_grads:
        assert_close(grads[leaf], want_grads[leaf], 1e-6, leaf)
