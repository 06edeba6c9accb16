"""The registered operators of backward and of directional derivatives."""

import pytest
import torch
from tests.compare import assert_close
from tests.kernels.pair_cases import make_case
from tests.kernels.pair_checks import leaves_of
from tests.losses.loss_cases import problem, solve

import tilewise as tw
from tilewise.errors import GradientError
from tilewise.kernels.spec import Needs, Pair, PairSpec, wanted_stats
from tilewise.ops.call import KEYS, Settings, encode
from tilewise.options import TileOptions

TYPICAL = ("clip", "nt_xent", "supcon", "siglip", "cross_entropy_smoothed_and_capped", "tokens")


def call_of(pair: Pair, spec: PairSpec, group_name: str = ""):
    """The tensors of an operator, and its settings."""
    settings = Settings(spec, TileOptions(), group_name, needs=Needs(True, True, True, True))
    tensors = pair.a, None if spec.symmetric else pair.b, pair.scale, pair.bias
    return (*tensors, *(getattr(pair, name) for name in KEYS), None, None), encode(settings)


def random_like(values):
    return [
        torch.randn(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(i)) for i, x in enumerate(values)
    ]


@pytest.mark.parametrize("name", TYPICAL)
def test_opcheck(name):
    """Schema, fake tensors, autograd registration, and tracing, as torch.library checks them."""
    pair, spec = make_case(name, torch.float64)
    tensors, settings = call_of(pair, spec)
    wanted = wanted_stats(spec)
    outputs = torch.ops.tilewise.pair_stats(*tensors, settings)
    coming = [stat.gradient for stat in wanted]
    grads = [g.requires_grad_() for g in random_like([x for x, come in zip(outputs, coming, strict=True) if come])]
    needs = [True, not spec.symmetric, True, pair.bias is not None]
    leaves = [leaf if need else None for leaf, need in zip(tensors[:4], needs, strict=True)]
    along = [leaf if leaf is None else torch.randn_like(leaf).requires_grad_() for leaf in leaves]
    checked = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    backward, jvp = torch.ops.tilewise.pair_stats_backward.default, torch.ops.tilewise.pair_stats_jvp.default
    torch.library.opcheck(backward, (*tensors, [], grads, coming, needs, settings), test_utils=checked)
    torch.library.opcheck(jvp, (*tensors, *along, coming, settings), test_utils=checked)


@pytest.mark.parametrize("name", TYPICAL)
def test_jvp_is_the_transpose_of_backward(name):
    """<g, jvp(v)> = <backward(g), v>, for each output alone too."""
    pair, spec = make_case(name, torch.float64)
    tensors, settings = call_of(leaves_of(pair), spec)
    outputs = torch.ops.tilewise.pair_stats(*tensors, settings)
    leaves = [leaf for leaf in tensors[:4] if leaf is not None]
    along = random_like(leaves)
    spread = iter(along)
    directions = [None if leaf is None else next(spread) for leaf in tensors[:4]]
    for index, stat in enumerate(wanted_stats(spec)):
        if not stat.gradient:
            continue
        (grad,) = random_like([outputs[index]])
        coming = [i == index for i in range(len(outputs))]
        (change,) = torch.ops.tilewise.pair_stats_jvp(*tensors, *directions, coming, settings)
        grads = torch.autograd.grad(outputs[index], leaves, grad, retain_graph=True, materialize_grads=True)
        want = sum((g * v).sum() for g, v in zip(grads, along, strict=True))
        assert_close((grad * change).sum(), want, 1e-11, stat.name)


def test_first_backward_does_not_use_the_registered_operator(monkeypatch):
    """An ordinary step costs nothing for derivatives that nobody needs."""
    made = problem("clip")
    monkeypatch.setattr("tilewise.ops.autograd.registered_backward", None)
    for reduction in ("mean", "none"):
        loss = made.ours(type("Leaves", (), made.leaves), reduction=reduction)
        assert all(grad.any() for grad in torch.autograd.grad(loss.sum(), list(made.leaves.values())))


def test_create_graph_changes_no_gradient():
    made = problem("cross_entropy_everything")
    _, want = solve(made.ours, made.leaves)
    loss = made.ours(type("Leaves", (), made.leaves))
    grads = torch.autograd.grad(loss, list(made.leaves.values()), create_graph=True)
    for grad, (leaf, right) in zip(grads, want.items(), strict=True):
        assert_close(grad, right, 1e-13, leaf)


def test_a_gradient_of_a_constant_side_needs_no_node():
    """Only a leaf that requires a gradient raises an error, and only if its gradient is asked for."""
    image, text = torch.randn(5, 3, dtype=torch.float64, requires_grad=True), torch.randn(5, 3, dtype=torch.float64)
    upstream = torch.ones(5, dtype=torch.float64, requires_grad=True)
    loss = tw.clip_loss(image, text, 2.0, reduction="none")
    (grad,) = torch.autograd.grad(loss, image, upstream, create_graph=True)
    grad.square().sum().backward(inputs=[upstream])
    assert upstream.grad.any()
    assert image.grad is None
    loss = tw.clip_loss(image, text, 2.0, reduction="none")
    (grad,) = torch.autograd.grad(loss, image, upstream, create_graph=True)
    with pytest.raises(GradientError, match="grad_output"):
        grad.square().sum().backward()


def test_a_group_has_no_directional_derivatives():
    pair, spec = make_case("clip", torch.float64)
    tensors, settings = call_of(pair, spec, "a group")
    with pytest.raises(GradientError, match=r"over a process group.*without group="):
        torch.ops.tilewise.pair_stats_jvp(
            *tensors, torch.ones_like(pair.a), None, None, None, [True, False, False, False], settings
        )
