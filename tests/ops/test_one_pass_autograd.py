"""The one-pass strategy of the torch backend under autograd and compilers."""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from tests.compare import assert_close, relative_error
from tests.losses.loss_cases import converted, problem, solve
from tests.ops.one_pass_cases import FEW, ONE_PASS, SERVED, TWO_PASS, count_calls
from torch._dynamo import compiled_autograd

import tilewise as tw
from tilewise.errors import GradientError
from tilewise.kernels.torch_impl import one_pass as kernels


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch, set_limits, small_tiles):
    """Several blocks of rows, the last one ragged."""
    monkeypatch.setattr(kernels, "LARGEST_BLOCK", 48)
    set_limits(smallest_block=1, small_cpu=0)


@pytest.fixture
def calls(monkeypatch):
    """What was asked of the kernels, and what they gave."""
    return count_calls(monkeypatch)


@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize("k", [3.0, -0.25, 1e-12, 0.0])
def test_any_scale_from_upstream(name, k):
    made = problem(name)
    _, grads = solve(lambda p: k * made.ours(p, options=ONE_PASS), made.leaves)
    _, want = solve(lambda p: k * made.ours(p, options=TWO_PASS), made.leaves)
    for leaf in want:
        assert_close(grads[leaf], want[leaf], 1e-12, leaf)


@pytest.mark.parametrize("name", FEW)
def test_gradients_are_rounded_once_after_upstream(name):
    """The error in bfloat16 is the same for a factor that it does not hold, and for one whose product it rounds."""
    made = problem(name, torch.bfloat16)
    _, exact = solve(made.dense, converted(made.leaves, torch.float64))
    _, once = solve(made.ours, made.leaves, options=ONE_PASS)
    for k in (3.0, 1.0 + 2.0**-9):
        _, grads = solve(lambda p, k=k: k * made.ours(p, options=ONE_PASS), made.leaves)
        for leaf in once:
            ours, theirs = relative_error(grads[leaf], k * exact[leaf]), relative_error(once[leaf], exact[leaf])
            assert ours <= 1.15 * theirs + 1e-6, (leaf, k)


def test_a_loss_scale_lifts_gradients_out_of_what_float16_cannot_hold():
    generator = torch.Generator().manual_seed(3)
    hidden, classes = (torch.randn(n, 16, generator=generator).half().requires_grad_() for n in (40, 60))
    bias = torch.zeros(60).half().requires_grad_()
    target, weight = torch.randint(0, 60, (40,), generator=generator), torch.full((60,), 1e-8)
    leaves = {"hidden": hidden, "classes": classes, "bias": bias}

    def loss(p, options=ONE_PASS):
        scaled = weight.to(p.hidden.dtype) if p.hidden.dtype == torch.float64 else weight
        settings = {"linear_bias": p.bias, "weight": scaled, "reduction": "sum", "options": options}
        return 2.0**20 * tw.linear_cross_entropy(p.hidden, p.classes, target, **settings)

    _, grads = solve(loss, leaves)
    _, want = solve(loss, converted(leaves, torch.float64))
    for leaf in want:
        assert_close(grads[leaf], want[leaf], 2e-3, leaf)


@pytest.mark.parametrize("name", FEW)
def test_backward_twice_through_one_forward(name, calls):
    made = problem(name)
    loss = 2.0 * made.ours(SimpleNamespace(**made.leaves), options=ONE_PASS)
    leaves = list(made.leaves.values())
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    kept = [grad.clone() for grad in first]
    second = torch.autograd.grad(loss, leaves, retain_graph=True)
    third = torch.autograd.grad(3.0 * loss, leaves)
    assert len(calls) == 3
    for one, held, two, three in zip(first, kept, second, third, strict=True):
        assert torch.equal(one, held)  # what was given away is not written to again
        assert torch.equal(one, two)
        assert_close(three, 3.0 * one, 1e-14)


@pytest.mark.parametrize("name", FEW)
def test_a_compiler_of_backward_passes_sees_operators(name):
    """Compiled autograd hands stand-ins to backward, whose numbers nobody can look at."""
    made = problem(name)
    leaves = list(made.leaves.values())
    for upstream in (1.0, 3.0):
        want = torch.autograd.grad(upstream * made.ours(SimpleNamespace(**made.leaves), options=ONE_PASS), leaves)
        loss = upstream * made.ours(SimpleNamespace(**made.leaves), options=ONE_PASS)
        with compiled_autograd._enable(torch.compile(backend="eager", fullgraph=True)):
            got = torch.autograd.grad(loss, leaves, retain_graph=True)
            again = torch.autograd.grad(loss, leaves)
        for one, two, other in zip(got, again, want, strict=True):
            assert_close(one, other, 1e-12)
            assert torch.equal(one, two)


def test_gradients_accumulate(calls):
    made = problem("cross_entropy_bias")
    _, once = solve(made.ours, made.leaves, options=TWO_PASS)
    for _ in range(3):
        (made.ours(SimpleNamespace(**made.leaves), options=ONE_PASS) / 3.0).backward()
    assert len(calls) == 3
    for leaf, value in made.leaves.items():
        assert_close(value.grad, once[leaf], 1e-12, leaf)


@pytest.mark.parametrize("name", FEW)
def test_backward_gives_away_what_forward_made(name, calls):
    made = problem(name, torch.float32)
    first, second = list(made.leaves.values())[:2]
    grads = torch.autograd.grad(3.0 * made.ours(SimpleNamespace(**made.leaves), options=ONE_PASS), (first, second))
    assert grads[0].data_ptr() == calls[0].grads.a.data_ptr() or name.startswith("cross_entropy")  # rows put back
    assert grads[1].data_ptr() == calls[0].grads.b.data_ptr()


def test_nothing_is_held_after_backward():
    made = problem("info_nce", torch.float32)
    loss = made.ours(SimpleNamespace(**made.leaves), options=ONE_PASS)
    node = loss.grad_fn
    assert node.once is not None
    loss.backward()
    assert node.once is None


def test_a_loss_that_is_dropped_frees_its_gradients_at_once():
    """Without the garbage collector: the node of the graph does not hold its own output."""
    made = problem("info_nce", torch.float32)
    gc.collect()
    gc.disable()
    try:
        loss = made.ours(SimpleNamespace(**made.leaves), options=ONE_PASS)
        held = weakref.ref(loss.grad_fn.once.saved[0])
        del loss
        assert held() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("name", SERVED)
def test_nothing_is_formed_where_nobody_asks(name, calls, monkeypatch):
    made = problem(name)
    with torch.no_grad():
        made.ours(SimpleNamespace(**made.leaves), options=ONE_PASS)
    made.ours(SimpleNamespace(**{leaf: value.detach() for leaf, value in made.leaves.items()}), options=ONE_PASS)
    solve(lambda p, **how: made.ours(p, reduction="none", **how).sum(), made.leaves, options=ONE_PASS)
    solve(made.ours, made.leaves, options=TWO_PASS)
    assert not calls


@pytest.mark.parametrize("name", ["siglip", "info_nce", "cross_entropy_bias"])
def test_a_frozen_side_costs_nothing(name, calls):
    made = problem(name)
    _, together = solve(made.ours, made.leaves, options=ONE_PASS)
    for leaf in made.leaves:
        alone = {other: value.detach() for other, value in made.leaves.items()}
        alone[leaf].requires_grad_()
        _, grads = solve(made.ours, alone, options=ONE_PASS)
        assert_close(grads[leaf], together[leaf], 1e-12, leaf)
        assert sum(calls[-1].needs) == 1
        made_for = [field for field in ("a", "b", "scale", "bias") if getattr(calls[-1].grads, field) is not None]
        assert len(made_for) == 1


@pytest.mark.parametrize("name", FEW)
def test_a_second_derivative_is_refused_with_words(name):
    made = problem(name, n=8, d=4)
    loss = made.ours(SimpleNamespace(**made.leaves), options=ONE_PASS)
    grads = torch.autograd.grad(loss, list(made.leaves.values()), create_graph=True)
    with pytest.raises(GradientError, match=r"first derivatives only.*[Dd]etach"):
        sum(grad.square().sum() for grad in grads).backward()


@pytest.mark.parametrize(
    "name, dtype", [*((name, torch.float32) for name in FEW), ("siglip", torch.bfloat16), ("siglip", torch.float16)]
)
def test_compile_in_one_graph(name, dtype, calls):
    torch._dynamo.reset()
    made = problem(name, dtype)

    def whole(p):
        return torch.compile(lambda: 3.0 * made.ours(p, options=ONE_PASS), fullgraph=True, backend="aot_eager")()

    loss, grads = solve(whole, made.leaves)
    assert len(calls) == 1
    want, want_grads = solve(lambda p: 3.0 * made.ours(p, options=ONE_PASS), made.leaves)
    assert_close(loss, want, 1e-6)
    for leaf in want_grads:
        assert grads[leaf].dtype == made.leaves[leaf].dtype
        assert_close(grads[leaf], want_grads[leaf], 1e-6, leaf)


def test_compile_sees_new_sizes():
    torch._dynamo.reset()
    whole = torch.compile(tw.siglip_loss, fullgraph=True, backend="aot_eager")
    for n in (12, 30, 77):
        made = problem("siglip", n=n)
        _, grads = solve(lambda p: whole(p.image, p.text, p.scale, p.bias), made.leaves)
        _, want = solve(made.ours, made.leaves)
        assert_close(grads["image"], want["image"], 1e-12)


@pytest.mark.parametrize("dynamic", [True, None])
def test_compile_sees_new_options(dynamic):
    """Their numbers are no sizes: they become part of the graph, and others make another graph."""
    torch._dynamo.reset()
    made = problem("siglip", torch.float32)
    whole = torch.compile(tw.siglip_loss, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    _, want = solve(made.ours, made.leaves)
    for mib in (64, 32):
        for when in ("forward", "backward"):
            options = tw.TileOptions(workspace_mib=mib, gradients=when)
            _, grads = solve(lambda p, how=options: whole(p.image, p.text, p.scale, p.bias, options=how), made.leaves)
            assert_close(grads["image"], want["image"], 1e-6)


@pytest.mark.slow
@pytest.mark.usefixtures("cpp_compiler")
def test_compile_with_inductor():
    torch._dynamo.reset()
    made = problem("cross_entropy_bias", torch.float32)

    def whole(p):
        return torch.compile(lambda: 3.0 * made.ours(p, options=ONE_PASS), fullgraph=True)()

    _, grads = solve(whole, made.leaves)
    _, want = solve(lambda p: 3.0 * made.ours(p, options=ONE_PASS), made.leaves)
    for leaf in want:
        assert_close(grads[leaf], want[leaf], 1e-6, leaf)
