"""Derivatives of gradients: those with respect to grad_output are exact, true second derivatives raise an error."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from tests import oracles
from tests.compare import assert_close
from tests.losses.loss_cases import CASES, along_all_leaves, converted, problem, upstream_like

import tilewise as tw
from tilewise.errors import GradientError
from tilewise.options import TileOptions

pytestmark = pytest.mark.usefixtures("nan_filled_empty", "small_tiles")
ONE_OF_EACH = ("clip", "siglip", "nt_xent", "supcon", "info_nce_own_negatives", "cross_entropy_everything", "logsumexp")
WORDS = r"first derivatives only.*[Dd]etach"


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("name", CASES)
def test_derivative_along_a_direction(name, reduction):
    made = problem(name, n=60, d=8)
    got, want = (along_all_leaves(loss, made.leaves, reduction=reduction) for loss in (made.ours, made.dense))
    assert want.any()
    assert_close(got, want, 1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_derivative_in_other_types(name, reduction, dtype):
    """Not rounded to a half type, not even on the way: the gradient of a mean over many rows may be 0 there."""
    made = problem(name, dtype, n=60, d=8)
    got = along_all_leaves(made.ours, made.leaves, reduction=reduction)
    want = along_all_leaves(made.dense, converted(made.leaves, torch.float64), reduction=reduction)
    assert_close(got, want, 1e-4)


@pytest.mark.parametrize("how", [
    {"gradients": "forward"},
    {"gradients": "backward"},
    {"batch_invariant": True},
    {"workspace_mib": 1},
    {"filter_tolerance": 0.01},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_derivative_with_every_strategy(how, reduction):
    """The filter changes gradients, not this derivative."""
    made = problem("cross_entropy_bias", n=60, d=8)
    got = along_all_leaves(made.ours, made.leaves, reduction=reduction, options=TileOptions(**how))
    assert_close(got, along_all_leaves(made.dense, made.leaves, reduction=reduction), 1e-10)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_derivative_of_registered_operators(name, reduction, monkeypatch):
    """They serve compilers and exporters."""
    made = problem(name, n=60, d=8)
    want = along_all_leaves(made.dense, made.leaves, reduction=reduction)
    for module in ("autograd", "paired_scores"):
        monkeypatch.setattr(f"tilewise.ops.{module}.holds_numbers", lambda features: False)
    assert_close(along_all_leaves(made.ours, made.leaves, reduction=reduction), want, 1e-10)


@pytest.mark.parametrize("name", ["clip", "cross_entropy", "info_nce_own_negatives"])
def test_derivative_of_a_compiled_loss(name):
    """With a compiler that leaves backward to torch. AOTAutograd itself has no second backward, and says so."""
    torch._dynamo.reset()
    made = problem(name, n=20, d=8)
    want = along_all_leaves(made.dense, made.leaves, reduction="none")
    for backend in ("eager", "aot_eager"):
        compiled = torch.compile(lambda p, **how: made.ours(p, **how), backend=backend, fullgraph=True)
        if backend == "eager":
            assert_close(along_all_leaves(compiled, made.leaves, reduction="none"), want, 1e-10)
            continue
        with pytest.raises(RuntimeError, match="double backward"):
            along_all_leaves(compiled, made.leaves, reduction="none")


@pytest.mark.parametrize("name", CASES)
def test_gradient_is_differentiable_in_grad_output(name):
    made = problem(name, n=6, d=3)
    loss = made.ours(SimpleNamespace(**made.leaves), reduction="none")
    upstream = upstream_like(loss).requires_grad_()

    def gradients(upstream):
        return torch.autograd.grad(loss, list(made.leaves.values()), upstream, create_graph=True)

    assert torch.autograd.gradcheck(gradients, (upstream,), atol=1e-8, rtol=1e-6, fast_mode=True)


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_the_derivative_in_grad_output_is_differentiable_again(name):
    """In the direction, in which it is linear, and in grad_output once more. In the leaves it raises an error."""
    made = problem(name, n=20, d=5)
    found = []
    for loss in (made.ours, made.dense):
        value = loss(SimpleNamespace(**made.leaves), reduction="none")
        upstream = upstream_like(value).requires_grad_()
        grads = torch.autograd.grad(value, list(made.leaves.values()), upstream, create_graph=True)
        along = [torch.ones_like(grad, requires_grad=True) for grad in grads]
        weighted = [grad * upstream.square().sum() for grad in grads]
        (first,) = torch.autograd.grad(weighted, upstream, along, create_graph=True)
        total = (first * torch.arange(len(first))).sum()
        found.append(torch.autograd.grad(total, [upstream, *along], retain_graph=True))
    for got, want in zip(*found, strict=True):
        assert_close(got, want, 1e-10)
    leaf = next(iter(made.leaves.values()))
    value = made.ours(SimpleNamespace(**made.leaves), reduction="none")
    grads = torch.autograd.grad(value, list(made.leaves.values()), upstream, create_graph=True)
    (first,) = torch.autograd.grad(grads, upstream, along, create_graph=True)
    with pytest.raises(GradientError, match=WORDS):
        torch.autograd.grad(first.sum(), leaf)


def second_derivatives_exist(name, leaf, value):
    """Whether all second derivatives with respect to this leaf are available.

    They are for scores of given pairs: of a query with negatives of its own, and, without in-batch negatives, with its
    own key. A bias of `clip_loss` has no effect.
    """
    own_negatives = leaf == "negatives" and value.dim() == 3
    own_key = leaf == "key" and name == "info_nce_only_shared_negatives"
    unused = leaf == "bias" and name == "clip_with_bias"
    return own_negatives or own_key or unused or name == "info_nce_only_own_negatives"


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("name", CASES)
def test_second_derivative_raises_an_error(name, reduction):
    """For each leaf by itself, and beside the derivative with respect to grad_output."""
    made = problem(name, n=8, d=4)
    loss = made.ours(SimpleNamespace(**made.leaves), reduction=reduction)
    upstream = upstream_like(loss).requires_grad_()
    grads = torch.autograd.grad(loss, list(made.leaves.values()), upstream, create_graph=True)
    total = sum(grad.square().sum() for grad in grads)
    for leaf, value in made.leaves.items():
        if not second_derivatives_exist(name, leaf, value):
            for inputs in ([value], [upstream, value]):
                with pytest.raises(GradientError, match=WORDS):
                    torch.autograd.grad(total, inputs, retain_graph=True)
    (of_upstream,) = torch.autograd.grad(total, upstream, retain_graph=True)
    assert of_upstream.any()
    if name != "info_nce_only_own_negatives":
        with pytest.raises(GradientError, match=WORDS):
            total.backward()


def second_derivatives(loss, leaves):
    """That of each leaf's gradient (of its squared norm) with respect to each leaf; None where it raises an error."""
    value, found = loss(SimpleNamespace(**leaves), reduction="none"), {}
    grads = torch.autograd.grad(value, list(leaves.values()), upstream_like(value), create_graph=True)
    for of, grad in zip(leaves, grads, strict=True):
        for leaf, by in leaves.items():
            size = grad.square().sum() + 0.0 * by.sum()  # some gradients depend on nothing
            try:
                (found[of, leaf],) = torch.autograd.grad(size, by, retain_graph=True)
            except GradientError:
                found[of, leaf] = None
    return found


@pytest.mark.parametrize("name", CASES)
def test_a_second_derivative_is_never_wrong(name):
    """It is right or raises an error."""
    made = problem(name, n=8, d=4)
    ours, dense = (second_derivatives(loss, made.leaves) for loss in (made.ours, made.dense))
    for (of, leaf), got in ours.items():
        if got is not None:
            assert_close(got, dense[of, leaf], 1e-10, f"gradient of {of} with respect to {leaf}")
        else:
            assert not second_derivatives_exist(name, leaf, made.leaves[leaf])


# Weights of examples -------------------------------------------------------------------------------------------------


def learned_weights(dense, *, steps=1):
    """The loss after steps with weighted examples, and the weights. The models are linear, as are a head's classes."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    x, y, other, label = random(30, 6), torch.randint(0, 9, (30,), generator=generator), random(20, 6), torch.arange(20)
    image, text, head = ((random(6, size) / 3).requires_grad_() for size in (5, 5, 9))
    weight = random(30).exp().requires_grad_()
    clip, classes = (oracles.clip_dense, F.cross_entropy) if dense else (tw.clip_loss, None)

    def losses(image, text, head, x, y, reduction):
        contrast = clip(F.normalize(x @ image, dim=1), F.normalize(x.sin() @ text, dim=1), 4.0, reduction=reduction)
        if dense:
            return contrast + classes(x @ head, y, reduction=reduction)
        return contrast + tw.linear_cross_entropy(x, head.T, y, reduction=reduction)

    parameters = [image, text, head]
    for _ in range(steps):
        inner = (weight * losses(*parameters, x, y, "none")).mean()
        grads = torch.autograd.grad(inner, parameters, create_graph=True)
        parameters = [p - 0.5 * grad for p, grad in zip(parameters, grads, strict=True)]
    return losses(*parameters, other, label % 9, "mean"), weight, [image, text, head]


def test_weights_of_examples_can_be_learned():
    """The gradient of a validation loss with respect to the weights of the training examples, through a step."""
    value, weight, _ = learned_weights(False)
    want_value, want_weight, _ = learned_weights(True)
    assert_close(value, want_value, 1e-12)
    (got,), (want,) = torch.autograd.grad(value, weight), torch.autograd.grad(want_value, want_weight)
    assert_close(got, want, 1e-10)


def test_weights_of_examples_need_no_second_derivative_of_parameters():
    """A backward that reaches the parameters needs it, and so does a second step."""
    value, _, parameters = learned_weights(False)
    with pytest.raises(GradientError, match=WORDS):
        value.backward()
    assert all(p.grad is None for p in parameters)
    value, weight, _ = learned_weights(False, steps=2)
    with pytest.raises(GradientError, match=WORDS):
        torch.autograd.grad(value, weight)


# Other transforms ----------------------------------------------------------------------------------------------------


def test_forward_mode_raises_an_error():
    x, y = torch.randn(4, 3), torch.randn(4, 3)
    with pytest.raises(RuntimeError, match="setup_context"):
        torch.func.jvp(lambda x: tw.clip_loss(x, y, 1.0), (x,), (y,))
    with torch.autograd.forward_ad.dual_level(), pytest.raises(NotImplementedError, match="jvp"):
        tw.clip_loss(torch.autograd.forward_ad.make_dual(x, y), y, 1.0)
