"""Settings of `linear_cross_entropy` that other packages spell in their own way; z-loss and log-sum-exp apart."""

import pytest
import torch
import torch.nn.functional as F
from tests.compare import assert_close
from tests.oracles import linear_cross_entropy_dense

import tilewise as tw

N, V, D = 24, 40, 8


@pytest.fixture
def head():
    g = torch.Generator().manual_seed(0)
    hidden, classifier = (torch.randn(size, D, generator=g, dtype=torch.float64) for size in (N, V))
    target = torch.randint(0, V, (N,), generator=g)
    target[::5] = -100
    return hidden.requires_grad_(), classifier.requires_grad_(), target


def gradients(loss, hidden, classifier):
    return torch.autograd.grad(loss, [hidden, classifier])


def test_ignore_index_none_is_that_of_pytorch(head):
    """`torch.nn.functional.linear_cross_entropy` has None as its default, and reads it as -100."""
    assert torch.equal(tw.linear_cross_entropy(*head, ignore_index=None), tw.linear_cross_entropy(*head))
    stats = tw.linear_token_stats(*head, ignore_index=None)
    assert torch.equal(stats.valid, head[2] != -100)
    if hasattr(F, "linear_cross_entropy"):
        assert_close(tw.linear_cross_entropy(*head, ignore_index=None), F.linear_cross_entropy(*head), 1e-12)


def test_an_ignore_index_of_numpy(head):
    numpy = pytest.importorskip("numpy")
    assert torch.equal(tw.linear_cross_entropy(*head, ignore_index=numpy.int64(-100)), tw.linear_cross_entropy(*head))


@pytest.mark.parametrize("shift", [True, False])
def test_a_shift_may_be_a_bool(head, shift):
    hidden, classifier, target = head
    sequences = hidden.view(3, 8, D), classifier, target.view(3, 8)
    got = tw.linear_cross_entropy(*sequences, shift=shift)
    assert torch.equal(got, tw.linear_cross_entropy(*sequences, shift=int(shift)))
    assert_close(got, linear_cross_entropy_dense(*sequences, shift=int(shift)), 1e-12)


def test_a_softcap_of_0_is_no_cap(head):
    hidden, classifier, _ = head
    assert torch.equal(tw.linear_cross_entropy(*head, softcap=0), tw.linear_cross_entropy(*head))
    assert torch.equal(tw.linear_logsumexp(hidden, classifier, softcap=0.0), tw.linear_logsumexp(hidden, classifier))


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_the_mean_of_the_z_loss_is_over_tokens_whatever_the_class_weights(head, label_smoothing):
    """As in Liger. Multiplying all class weights by 10 changes neither part of the mean."""
    hidden, classifier, target = head
    weight = torch.rand(V, dtype=torch.float64) + 0.5
    settings = {"z_loss": 0.3, "label_smoothing": label_smoothing}
    got = tw.linear_cross_entropy(*head, weight=weight, **settings)
    logits = hidden @ classifier.T
    z_loss = 0.3 * logits.logsumexp(1)[target != -100].square().mean()
    want = F.cross_entropy(logits, target, weight, label_smoothing=label_smoothing) + z_loss
    assert_close(got, want, 1e-12)
    assert_close(tw.linear_cross_entropy(*head, weight=10 * weight, **settings), want, 1e-12)
    for ours, theirs in zip(gradients(got, *head[:2]), gradients(want, *head[:2]), strict=True):
        assert_close(ours, theirs, 1e-12)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_the_log_sum_exp_comes_from_the_same_pass(head, reduction):
    hidden, classifier, target = head
    calls = 0

    def count(*_):
        nonlocal calls
        calls += 1

    from tilewise.kernels.torch_impl import small_stats

    with pytest.MonkeyPatch.context() as patch:
        real = small_stats.statistics
        patch.setattr(small_stats, "statistics", lambda *args: (count(), real(*args))[1])
        loss, lse = tw.linear_cross_entropy(*head, reduction=reduction, return_lse=True)
    assert calls == 1
    valid = target != -100
    assert lse.shape == target.shape
    assert (lse[~valid] == 0).all()
    assert_close(lse[valid], (hidden @ classifier.T).logsumexp(1)[valid], 1e-12)
    assert_close(loss, tw.linear_cross_entropy(*head, reduction=reduction), 1e-12)
    # The z-loss apart: the same sum and the same gradients as with z_loss.
    apart = 0.01 * lse.square().sum() / (valid.sum() if reduction == "mean" else 1)
    whole = tw.linear_cross_entropy(*head, reduction=reduction, z_loss=0.01)
    assert_close(loss.sum() + apart, whole.sum(), 1e-12)
    ours = gradients(loss.sum() + apart, hidden, classifier)
    for got, want in zip(ours, gradients(whole.sum(), hidden, classifier), strict=True):
        assert_close(got, want, 1e-12)


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_the_z_loss_of_a_sum_is_a_sum_where_no_row_is_ignored(head, reduction):
    hidden, classifier, target = (*head[:2], head[2].clamp(min=0))
    logits = hidden @ classifier.T
    squares = logits.logsumexp(1).square()
    want = F.cross_entropy(logits, target, reduction=reduction) + 0.1 * getattr(squares, reduction)()
    ours = tw.linear_cross_entropy(hidden, classifier, target, z_loss=0.1, reduction=reduction)
    assert_close(ours, want, 1e-12)
    for got, dense in zip(gradients(ours, hidden, classifier), gradients(want, hidden, classifier), strict=True):
        assert_close(got, dense, 1e-12)


def test_a_module_returns_the_log_sum_exp_too(head):
    loss, lse = tw.LinearCrossEntropyLoss(return_lse=True)(*head)
    want, want_lse = tw.linear_cross_entropy(*head, return_lse=True)
    assert torch.equal(loss, want)
    assert torch.equal(lse, want_lse)
