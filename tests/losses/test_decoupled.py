"""Decoupled losses and queues at their limits: late in training, without negatives, with an empty queue."""

import pytest
import torch
import torch.nn.functional as F
from tests.compare import assert_close
from tests.losses.loss_cases import Maker
from tests.oracles import info_nce_dense, nt_xent_dense, supcon_dense

import tilewise as tw


def late(dtype=torch.float64):
    """Pairs that are learned: each key is nearly its query, and others are far."""
    query = torch.eye(40, 48, dtype=torch.float64)
    return [F.normalize(query + 0.01 * Maker(torch.float64, d=48, seed=s).unit(40), dim=1).to(dtype) for s in (0, 1)]


LATE = {
    "info_nce": (
        lambda a, b: tw.info_nce(a, b, temperature=0.02, decoupled=True, symmetric=True, reduction="none"),
        lambda a, b: info_nce_dense(a, b, None, 0.02, decoupled=True, symmetric=True, reduction="none"),
    ),
    "nt_xent": (
        lambda a, b: tw.nt_xent(torch.cat([a, b]), temperature=0.02, decoupled=True, reduction="none"),
        lambda a, b: nt_xent_dense(torch.cat([a, b]), 0.02, decoupled=True, reduction="none"),
    ),
}


@pytest.mark.parametrize("name", LATE)
def test_a_decoupled_loss_is_exact_late_in_training(name):
    """Subtracting the positive from the plain loss, log(expm1(loss)), is -inf here."""
    ours, dense = LATE[name]
    leaves, exact = [x.requires_grad_() for x in late(torch.float32)], [x.requires_grad_() for x in late()]
    loss, want = ours(*leaves), dense(*exact)
    assert_close(loss, want, 1e-6)
    assert (loss < -40).all()
    assert tw.info_nce(*leaves, temperature=0.02).expm1().log() == -torch.inf
    grads, wanted = torch.autograd.grad(loss.sum(), leaves), torch.autograd.grad(want.sum(), exact)
    for got, grad in zip(grads, wanted, strict=True):
        assert_close(got, grad, 1e-5)


def test_a_row_without_negatives_has_a_loss_of_0():
    x = [Maker(torch.float64, d=4, seed=seed).unit(3).requires_grad_() for seed in (0, 1)]
    same = torch.zeros(3, dtype=torch.int64)
    own = Maker(torch.float64, d=4, seed=2).unit(3, 2)
    for loss in (
        tw.info_nce(*x, decoupled=True, symmetric=True, query_ids=same),
        tw.info_nce(*x, own, decoupled=True, in_batch=False, negative_mask=torch.zeros(3, 2, dtype=torch.bool)),
        tw.nt_xent(torch.cat([x[0][:1], x[1][:1]]), decoupled=True, queue=x[0][:0]),
    ):
        assert loss == 0
        assert all((grad == 0).all() for grad in torch.autograd.grad(loss, x))


def test_an_empty_queue_changes_nothing_and_one_row_has_its_queue():
    z, labels = Maker(torch.float64).unit(10).requires_grad_(), torch.arange(10) % 4
    assert_close(tw.nt_xent(z, queue=z[:0]), nt_xent_dense(z), 1e-12)
    assert_close(tw.supcon_loss(z, labels, queue=z[:0], queue_labels=labels[:0]), supcon_dense(z, labels, 0.07), 1e-12)
    alone = tw.supcon_loss(z[:1], labels[:1], queue=z[1:], queue_labels=labels[1:])
    want = supcon_dense(z, labels, reduction="none")[0]
    assert_close(alone, want, 1e-12)
    for got, grad in zip(torch.autograd.grad(alone, z), torch.autograd.grad(want, z), strict=True):
        assert_close(got, grad, 1e-12)
    lonely = tw.supcon_loss(z[:1], labels[:1], queue=z[:0], queue_labels=labels[:0])
    assert lonely == 0
    assert (torch.autograd.grad(lonely, z)[0] == 0).all()
