"""The margin loss where others fail: angles near 0 and pi, sampled classes, a weight of its own."""

import math

import pytest
import torch
import torch.nn.functional as F
from tests.compare import assert_close
from tests.oracles import margin_softmax_dense

import tilewise as tw

MARGINS = {
    "arcface": {"m2": 0.5},
    "cosface": {"m2": 0.0, "m3": 0.35},
    "sphereface": {"m1": 1.35, "m2": 0.0},
    "all": {"m1": 0.9, "m2": 0.4, "m3": 0.15},
}


def at_angle(angle: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Three rows, of lengths that are no powers of two, at this angle from the weight of their class; float32."""
    basis = torch.linalg.qr(torch.randn(12, 6, generator=torch.Generator().manual_seed(0)).double())[0].T
    axis, across = basis[:3], basis[3:]
    weight = torch.randn(7, 12, generator=torch.Generator().manual_seed(1))
    weight[[1, 4, 5]] = (torch.tensor([[0.3], [1.7], [5.0]]) * axis).float()
    rows = (torch.tensor([[1.1], [0.7], [3.0]]) * (math.cos(angle) * axis + math.sin(angle) * across)).float()
    return rows, weight, torch.tensor([1, 4, 5])


@pytest.mark.parametrize("margin", MARGINS)
@pytest.mark.parametrize("angle", [2e-3, 0.03, math.pi - 0.03, math.pi - 2e-3])
def test_float32_gradients_at_angles_near_0_and_pi_are_those_of_float64(margin, angle):
    """The cosine of 2e-3 has three digits of the angle in float32."""
    rows, weight, target = at_angle(angle)
    how = {"scale": 4.0, "reduction": "sum", **MARGINS[margin]}
    leaves = [part.clone().requires_grad_() for part in (rows, weight)]
    exact = [part.double().requires_grad_() for part in (rows, weight)]
    loss = tw.margin_softmax_loss(*leaves, target, logit_scale=how.pop("scale"), **how)
    want = margin_softmax_dense(*exact, target, scale=4.0, **how)
    assert_close(loss, want, 1e-6)
    for got, grad in zip(torch.autograd.grad(loss, leaves), torch.autograd.grad(want, exact), strict=True):
        assert_close(got, grad, 1e-4)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("margin", MARGINS)
@pytest.mark.parametrize("angle", [0.0, math.pi])
def test_gradients_at_0_and_pi_are_finite_and_no_larger_than_those_nearby(margin, angle, dtype):
    rows, weight, target = (part.to(dtype) if part.is_floating_point() else part for part in at_angle(angle))
    leaves = [part.requires_grad_() for part in (rows, weight)]
    loss = tw.margin_softmax_loss(*leaves, target, logit_scale=16.0, reduction="sum", **MARGINS[margin])
    nearby = [part.double().requires_grad_() for part in at_angle(abs(angle - 0.2))[:2]]
    close = margin_softmax_dense(*nearby, target, scale=16.0, reduction="sum", **MARGINS[margin])
    assert loss.isfinite()
    for got, near in zip(torch.autograd.grad(loss, leaves), torch.autograd.grad(close, nearby), strict=True):
        assert got.norm() < 2 * near.norm() + 1e-3


def test_sampled_classes_are_all_targets_and_random_others():
    """The rows of a sparse gradient are the sampled classes. The loss is that of these classes alone."""
    torch.manual_seed(0)
    x, weight = torch.randn(20, 8, dtype=torch.float64), torch.randn(100, 8, dtype=torch.float64)
    target = torch.randint(100, (20,))
    target[3] = -100
    drawn = []
    for seed, sparse in ((0, True), (0, False), (1, True)):
        torch.manual_seed(seed)
        leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
        loss = tw.margin_softmax_loss(*leaves, target, sample_rate=0.4, sparse_grad=sparse, logit_scale=9.0)
        grads = torch.autograd.grad(loss, leaves)
        assert grads[1].is_sparse == sparse
        if sparse:
            drawn.append(grads[1].coalesce().indices()[0])
        exact = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
        place = torch.searchsorted(drawn[-1], target)
        want = margin_softmax_dense(exact[0], exact[1][drawn[-1]], torch.where(target < 0, -100, place), scale=9.0)
        assert_close(loss, want, 1e-12)
        for got, grad in zip(grads, torch.autograd.grad(want, exact), strict=True):
            assert_close(got.to_dense(), grad, 1e-12)
    for index in drawn:
        assert len(index.unique()) == 40
        assert torch.isin(target[target >= 0], index).all()
    assert not torch.equal(*drawn)


def test_sparse_gradients_train_with_sparse_adam():
    module = tw.MarginSoftmaxLoss(8, 50, sample_rate=0.2, sparse_grad=True, logit_scale=4.0)
    before, target = module.weight.detach().clone(), torch.tensor([3, 8])
    optimizer = torch.optim.SparseAdam(module.parameters(), lr=0.1)
    module(torch.randn(2, 8), target).backward()
    optimizer.step()
    assert int((module.weight != before).any(1).sum()) == 10


def test_one_class_and_rows_of_zeros():
    x, weight = torch.zeros(3, 4).requires_grad_(), torch.randn(5, 4).requires_grad_()
    loss = tw.margin_softmax_loss(x, weight, torch.tensor([0, 1, 2]))
    grads = torch.autograd.grad(loss, [x, weight])
    assert loss.isfinite()
    assert all(grad.isfinite().all() for grad in grads)
    one = torch.ones(2, 4, requires_grad=True)
    loss = tw.margin_softmax_loss(one, weight[:1], torch.zeros(2, dtype=torch.int64))
    loss.backward()
    assert loss == 0
    assert (one.grad == 0).all()
    assert tw.margin_softmax_loss(x, weight, torch.full((3,), -100)).isnan()


def test_the_module_keeps_its_settings_and_a_weight():
    torch.manual_seed(0)
    settings = {"m1": 1.2, "m2": 0.1, "m3": 0.2, "logit_scale": 8.0, "reduction": "sum"}
    module = tw.MarginSoftmaxLoss(6, 9, **settings).double()
    x, target = torch.randn(2, 5, 6, dtype=torch.float64), torch.randint(9, (2, 5))
    assert module.weight.shape == (9, 6)
    assert torch.equal(module(x, target), tw.margin_softmax_loss(x, module.weight, target, **settings))
    learned = tw.MarginSoftmaxLoss(6, 9, logit_scale=torch.nn.Parameter(torch.tensor(8.0)))
    assert [name for name, _ in learned.named_parameters()] == ["logit_scale", "weight"]
    torch.manual_seed(0)
    first, second = (tw.MarginSoftmaxLoss(6, 9).weight for _ in range(2))
    assert not torch.equal(first, second)
    torch.manual_seed(0)
    assert torch.equal(tw.MarginSoftmaxLoss(6, 9).weight, first)
    with torch.device("meta"):
        assert tw.MarginSoftmaxLoss(6, 10_000_000).weight.shape == (10_000_000, 6)


def test_a_target_out_of_range_gives_nan_where_nobody_may_read():
    x, weight = F.normalize(torch.randn(2, 4)), torch.randn(3, 4)
    loss = torch.compile(tw.margin_softmax_loss, fullgraph=True, backend="aot_eager")
    found = loss(x, weight, torch.tensor([1, 7]), reduction="none")
    assert found.isnan().tolist() == [False, True]
