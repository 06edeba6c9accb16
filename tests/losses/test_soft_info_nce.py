"""Soft labels: what the table of cases does not vary. `tests/losses/loss_cases.py` has values, gradients and types."""

import pytest
import torch
import torch.nn.functional as F
from tests.compare import assert_close
from tests.losses.loss_cases import Maker
from tests.oracles import info_nce_dense, soft_info_nce_dense, supcon_dense

import tilewise as tw

MAKE = Maker(torch.float64, n=40, d=8)
QUERY, KEY, TARGET, WEIGHT = MAKE.unit(40), MAKE.unit(40), MAKE.integers(40, 40, 3), MAKE.random(40, 3).abs()
EACH = 0.05 + MAKE.random(40).abs()  # a temperature of each query


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("settings", [{}, {"label_smoothing": 0.3}, {"exclude_self": True}])
def test_gradients_of_weights_and_of_a_temperature_of_each_query(settings):
    found = []
    for loss in (tw.soft_info_nce, soft_info_nce_dense):
        leaves = [x.clone().requires_grad_() for x in (QUERY, KEY, WEIGHT, EACH)]
        query, key, weight, temperature = leaves
        target = torch.where(torch.arange(40)[:, None] == TARGET, -1, TARGET)  # not the query itself
        value = loss(query, key, target, weight, temperature=temperature, **settings, reduction="none")
        found.append([value, *torch.autograd.grad((value * torch.linspace(1, 2, 40)).sum(), leaves)])
    for got, want in zip(*found, strict=True):
        assert_close(got, want, 1e-12)


def test_one_target_with_all_weight_is_info_nce():
    smoothed = F.cross_entropy(QUERY @ KEY.T / 0.2, torch.arange(40), label_smoothing=0.1)
    assert_close(tw.soft_info_nce(QUERY, KEY, temperature=0.2, label_smoothing=0.1), smoothed, 1e-12)
    assert_close(tw.soft_info_nce(QUERY, KEY, temperature=0.2), tw.info_nce(QUERY, KEY, temperature=0.2), 1e-13)


def test_equal_weights_are_supcon_and_the_row_itself_is_padding():
    labels = MAKE.integers(15, 40)
    target = torch.where(labels[:, None] == labels, torch.arange(40), -1)
    loss = tw.soft_info_nce(QUERY, QUERY, target, temperature=0.1, exclude_self=True, reduction="none")
    assert_close(loss, supcon_dense(QUERY, labels, 0.1, reduction="none"), 1e-12)
    lonely = (labels[:, None] == labels).sum(1) == 1
    assert lonely.any()
    assert (loss[lonely] == 0).all()


def test_late_in_training_float32_keeps_the_digits():
    """The loss is 7e-5, a difference of two numbers near 50: without a shift of the row, 5 % of it would be wrong."""
    near = F.normalize(torch.eye(40, 48) + 0.22, dim=1)
    target = torch.stack([torch.full((40,), -1), torch.arange(40)], 1)
    want = info_nce_dense(near.double(), near.double(), temperature=0.02, reduction="none")
    assert_close(tw.soft_info_nce(near, near, target, temperature=0.02, reduction="none"), want, 5e-3)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("more", [{}, {"symmetric": True, "negatives": "shared"}, {"negatives": "own"}])
def test_info_nce_with_a_temperature_of_each_query(dtype, more):
    query, key, each = QUERY.to(dtype), KEY.to(dtype), EACH.to(torch.promote_types(dtype, torch.float32))
    negatives = {"shared": MAKE.unit(9), "own": MAKE.unit(40, 3), None: None}[more.get("negatives")]
    given = {} if negatives is None else {"negative_keys": negatives.to(dtype)}
    symmetric = more.get("symmetric", False)

    def dense(query, key, each):
        """Each query is divided by its temperature, in the type of the call."""
        mine = query / each.to(query.dtype)[:, None]
        wide = None if negatives is None else negatives.to(query.dtype)
        return info_nce_dense(mine, key, wide, temperature=1.0, symmetric=symmetric)

    found = []
    for loss, inputs in (
        (lambda q, k, t: tw.info_nce(q, k, temperature=t, symmetric=symmetric, **given), (query, key, each)),
        (dense, (query, key, each)),
        (dense, [x.double() for x in (query, key, each)]),
    ):
        leaves = [x.detach().clone().requires_grad_() for x in inputs]
        value = loss(*leaves)
        found.append([value, *torch.autograd.grad(value, leaves)])
    for got, plain, want in zip(*found, strict=True):
        if dtype == torch.float64:
            assert_close(got, want, 1e-12)
        else:
            error = ((got.double() - want).norm() / want.norm(), (plain.double() - want).norm() / want.norm())
            assert error[0] <= 1.5 * error[1] + 1e-6
