"""The symmetric loss whose gradients are launched in forward: meant for a GPU, the same arithmetic here."""

import pytest
import torch
from tests.compare import assert_close

import tilewise as tw
from tilewise.errors import GradientError
from tilewise.kernels.spec import Pair
from tilewise.ops.early import _incoming, launches_early, symmetric_loss
from tilewise.options import TileOptions

OPTIONS = TileOptions()


def leaves(dtype=torch.float64, n=37, d=12):
    generator = torch.Generator().manual_seed(3)
    a, b = (torch.randn(n, d, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for _ in range(2))
    return a, b, torch.tensor(0.7, dtype=torch.float64).to(torch.promote_types(dtype, torch.float32)).requires_grad_()


def share_of(reduction, a):
    return 1.0 if reduction == "sum" else 1.0 / a.shape[0]


@pytest.mark.parametrize("upstream", [1.0, 3.7])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_it_is_the_loss(reduction, upstream):
    a, b, scale = leaves()
    got = symmetric_loss(a, b, scale, share_of(reduction, a), OPTIONS)
    want = tw.clip_loss(a, b, scale, reduction=reduction)
    assert_close(got, want, 1e-12, "loss")
    for one, other, name in zip(
        torch.autograd.grad(upstream * got, (a, b, scale)),
        torch.autograd.grad(upstream * want, (a, b, scale)),
        ("a", "b", "scale"),
        strict=True,
    ):
        assert_close(one, other, 1e-12, name)


def test_half_gradients_are_rounded_once():
    a, b, scale = leaves(torch.bfloat16)
    exact = [value.detach().double().requires_grad_() for value in (a, b, scale)]
    got = torch.autograd.grad(3.0 * symmetric_loss(a, b, scale, 1 / 37, OPTIONS), (a, b, scale))
    want = torch.autograd.grad(3.0 * tw.clip_loss(*exact), exact)
    assert [value.dtype for value in got] == [torch.bfloat16, torch.bfloat16, torch.float32]
    for one, other in zip(got[:2], want[:2], strict=True):
        assert (one.double() - other).norm() <= 3e-3 * other.norm()


@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_frozen_sides_get_nothing(frozen):
    inputs = list(leaves())
    inputs[frozen] = inputs[frozen].detach()
    symmetric_loss(*inputs, 1 / 37, OPTIONS).backward()
    want = [value.detach().requires_grad_(value.requires_grad) for value in inputs]
    tw.clip_loss(*want).backward()
    for index, (one, other) in enumerate(zip(inputs, want, strict=True)):
        assert (one.grad is None) == (index == frozen)
        if one.grad is not None:
            assert_close(one.grad, other.grad, 1e-12, str(index))


def test_twice_through_the_same_graph():
    a, b, scale = leaves()
    loss = symmetric_loss(a, b, scale, 1 / 37, OPTIONS)
    first = torch.autograd.grad(loss, (a, b, scale), retain_graph=True)
    copies = [value.clone() for value in first]
    second = torch.autograd.grad(2.0 * loss, (a, b, scale))
    for one, other, before in zip(first, second, copies, strict=True):
        assert torch.equal(one, before), "the first gradients are their receiver's"
        assert_close(other, 2.0 * one, 1e-12, "again")


def test_no_second_derivative():
    a, b, scale = leaves()
    (grad,) = torch.autograd.grad(symmetric_loss(a, b, scale, 1 / 37, OPTIONS), a, create_graph=True)
    with pytest.raises(GradientError, match="first derivatives only"):
        grad.sum().backward()


@pytest.mark.parametrize("n", [1, 37, 64])
def test_what_comes_in_needs_no_copy(n):
    """A copy to an aligned address would keep the launches of such a batch from being repeated."""
    a, b, scale = leaves(torch.float32, n)
    coming = _incoming(Pair(a=a, b=b, scale=scale), 0.5)
    for part, value in ((coming.row_lse, 0.25), (coming.col_lse, 0.25), (coming.row_pos, -0.5)):
        assert torch.equal(part, torch.full((n,), value))
        assert part.is_contiguous()
        assert part.data_ptr() % 16 == 0


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


def test_nothing_on_the_cpu_launches_early():
    a, b, scale = leaves(torch.bfloat16)
    assert not launches_early(a, b, scale, OPTIONS, "")
