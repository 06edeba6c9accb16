"""One pass over both directions of a small batch: made for a GPU, here in Triton's interpreter."""

import pytest
import torch
from tests.compare import assert_close
from tests.kernels.interpreted import INTERPRETED
from tests.kernels.quick_interpreter import make_quick
from torch._dynamo import compiled_autograd

import tilewise as tw
from tilewise.errors import GradientError
from tilewise.kernels.spec import Needs, PairShape, PairSpec, RowWeights
from tilewise.kernels.triton_impl.launch import call as launch
from tilewise.kernels.triton_impl.launch import replay
from tilewise.kernels.triton_impl.one_pass import products as one_pass_products
from tilewise.kernels.triton_impl.two_pass import gradient_sum, products
from tilewise.ops.autograd import pair_loss
from tilewise.ops.route import route
from tilewise.options import TileOptions

pytestmark = INTERPRETED
OPTIONS = TileOptions(backend="triton", precision="highest", gradients="forward")
SPEC = PairSpec(row_lse=True, col_lse=True, positive="one")
CLOSE = 2e-6  # of float32


@pytest.fixture(autouse=True)
def tapes(monkeypatch):
    make_quick(monkeypatch)
    fresh = {}
    monkeypatch.setattr(replay, "_recordings", fresh)
    return fresh


def symmetric_loss(a, b, scale, share, options):
    return pair_loss(a, b, scale, weights=RowWeights(share=share), spec=SPEC, options=options)


def exact(a, b, scale, **settings):
    return tw.clip_loss(a.double(), b.double(), scale.double(), **settings)


def leaves(dtype=torch.float32, n=37, d=12):
    generator = torch.Generator().manual_seed(3)
    a, b = (torch.randn(n, d, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for _ in range(2))
    return a, b, torch.tensor(0.7, dtype=torch.float64).to(torch.promote_types(dtype, torch.float32)).requires_grad_()


def share_of(reduction, a):
    return 1.0 if reduction == "sum" else 1.0 / a.shape[0]


@pytest.mark.parametrize("precision, other", [("highest", "high"), ("high", "highest")])
@pytest.mark.parametrize("loss", ["both directions", "softmax", "sigmoid"])
def test_products_have_the_precision_of_the_options(loss, precision, other, monkeypatch):
    """The kernels of the scores had it, and the products by cuBLAS followed the setting of torch."""
    seen, plain = [], products.product

    def watched(*args):
        seen.append(torch.get_float32_matmul_precision())
        plain(*args)

    for module in (gradient_sum, one_pass_products):
        monkeypatch.setattr(module, "product", watched)
    options = TileOptions(backend="triton", precision=precision, gradients="forward")
    a, b, scale = leaves()
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision(other)
        for _ in range(2):  # recorded, and replayed
            if loss == "both directions":
                symmetric_loss(a, b, scale, 1.0, options).backward()
            elif loss == "softmax":
                tw.info_nce(a, b, options=options).backward()
            else:
                tw.siglip_loss(a, b, scale, -1.0, options=options).backward()
        assert torch.get_float32_matmul_precision() == other
    finally:
        torch.set_float32_matmul_precision(before)
    assert seen == [precision] * 4


@pytest.mark.parametrize("upstream", [1.0, 3.7])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_it_is_the_loss(reduction, upstream):
    a, b, scale = leaves()
    got = symmetric_loss(a, b, scale, share_of(reduction, a), OPTIONS)
    want = exact(a, b, scale, reduction=reduction)
    assert got.shape == ()
    assert_close(got, want, CLOSE, "loss")
    for one, other, name in zip(
        torch.autograd.grad(upstream * got, (a, b, scale)),
        torch.autograd.grad(upstream * want, (a, b, scale)),
        ("a", "b", "scale"),
        strict=True,
    ):
        assert_close(one, other, CLOSE, name)


@pytest.mark.parametrize("upstream", [1.0, 3.0])
def test_half_gradients_are_rounded_once(upstream):
    """The error of float16 is that of G, rounded once, and of the result, rounded once."""
    a, b, scale = leaves(torch.float16)
    got = torch.autograd.grad(upstream * symmetric_loss(a, b, scale, 1 / 37, OPTIONS), (a, b, scale))
    want = torch.autograd.grad(upstream * exact(a, b, scale), (a, b, scale))
    assert [value.dtype for value in got] == [torch.float16, torch.float16, torch.float32]
    for one, other in zip(got[:2], want[:2], strict=True):
        assert (one.double() - other.double()).norm() <= 5e-4 * other.double().norm()
    assert_close(got[2], want[2], 1e-3, "scale")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("n", [1, 37, 200])
def test_later_steps_are_one_tape(dtype, n, tapes, monkeypatch):
    """Other numbers, the same launches: nothing is set up again, and the result is that of a first call."""
    steps = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        a, b = (torch.randn(n, 16).to(dtype).requires_grad_() for _ in range(2))
        scale = torch.tensor(0.5 + seed, requires_grad=True)
        steps.append((a, b, scale))

    def step(a, b, scale):
        loss = symmetric_loss(a, b, scale, 1 / n, OPTIONS)
        return loss, *torch.autograd.grad(3.0 * loss, (a, b, scale))

    fresh = step(*steps[1])
    tapes.clear()
    step(*steps[0])
    assert {kind[0]: made is not None for kind, made in tapes.items()} == {"small batch": True, "times": True}
    monkeypatch.setattr(launch.Call, "__init__", None)
    for one, other in zip(step(*steps[1]), fresh, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_frozen_sides_get_nothing(frozen):
    inputs = list(leaves())
    inputs[frozen] = inputs[frozen].detach()
    symmetric_loss(*inputs, 1 / 37, OPTIONS).backward()
    want = [value.detach().requires_grad_(value.requires_grad) for value in inputs]
    exact(*want).backward()
    for index, (one, other) in enumerate(zip(inputs, want, strict=True)):
        assert (one.grad is None) == (index == frozen)
        if one.grad is not None:
            assert_close(one.grad, other.grad, CLOSE, str(index))


def test_twice_through_the_same_graph():
    a, b, scale = leaves()
    loss = symmetric_loss(a, b, scale, 1 / 37, OPTIONS)
    first = torch.autograd.grad(loss, (a, b, scale), retain_graph=True)
    copies = [value.clone() for value in first]
    second = torch.autograd.grad(2.0 * loss, (a, b, scale))
    for one, other, before in zip(first, second, copies, strict=True):
        assert torch.equal(one, before), "the first gradients are their receiver's"
        assert_close(other, 2.0 * one, CLOSE, "again")


def test_no_second_derivative():
    a, b, scale = leaves()
    (grad,) = torch.autograd.grad(symmetric_loss(a, b, scale, 1 / 37, OPTIONS), a, create_graph=True)
    with pytest.raises(GradientError, match="first derivatives only"):
        grad.sum().backward()


def test_a_compiler_of_backward_passes_sees_operators():
    """Compiled autograd hands stand-ins to backward, which no kernel can be launched with."""
    a, b, scale = leaves()
    for upstream in (1.0, 3.0):
        want = torch.autograd.grad(upstream * symmetric_loss(a, b, scale, 1 / 37, OPTIONS), (a, b, scale))
        loss = upstream * symmetric_loss(a, b, scale, 1 / 37, OPTIONS)
        with compiled_autograd._enable(torch.compile(backend="eager", fullgraph=True)):
            got = torch.autograd.grad(loss, (a, b, scale))
        for one, other, name in zip(got, want, ("a", "b", "scale"), strict=True):
            assert_close(one, other, CLOSE, name)


def test_features_changed_in_place_are_noticed():
    a, b, scale = leaves()
    loss = symmetric_loss(a, b, scale, 1 / 37, OPTIONS)
    with torch.no_grad():
        b.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_loss_scale_too_large_for_half_overflows():
    a, b, scale = leaves(torch.float16)
    (2.0**20 * symmetric_loss(a, b, scale, 1.0, OPTIONS)).backward()
    assert a.grad.isinf().any()
    assert not a.grad.isnan().any()


@pytest.mark.parametrize("gradients", ["auto", "backward"])
def test_it_takes_two_passes_on_the_cpu(gradients):
    shape = PairShape(37, 37, 12, torch.float32, torch.device("cpu"))
    options = TileOptions(backend="triton", gradients=gradients)
    assert route(shape, SPEC, options, Needs(), scalar=True).strategy == "two_pass"


def test_large_batches_take_two_passes():
    shape = PairShape(16_385, 16_385, 12, torch.float32, torch.device("cpu"))
    assert route(shape, SPEC, OPTIONS, Needs(), scalar=True).strategy == "two_pass"
