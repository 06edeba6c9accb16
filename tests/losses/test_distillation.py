"""`linear_distillation_loss` where the general tests do not look: temperatures, equal models, padding, masks."""

import pytest
import torch
from tests.compare import assert_close
from tests.oracles import distillation_dense

import tilewise as tw

N, D, E, V = 29, 12, 20, 77
BETAS = (0.0, 0.3, 1.0)


def made(seed=0, dtype=torch.float64):
    random = torch.Generator().manual_seed(seed)

    def features(*shape):
        return torch.randn(*shape, generator=random, dtype=torch.float64).to(dtype)

    student = features(N, D).requires_grad_(), (features(V, D) / 2).requires_grad_()
    return student, (features(N, E), features(V, E) / 3), torch.randint(V, (N,), generator=random)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("temperature", [0.1, 0.5, 3.0, 10.0])
def test_temperatures(beta, temperature):
    student, teacher, _ = made()
    loss = tw.linear_distillation_loss(*student, *teacher, beta=beta, temperature=temperature)
    logits = [x @ w.T for x, w in (student, teacher)]
    want = distillation_dense(*logits, beta, temperature).mean()
    assert_close(loss, want, 1e-12, "loss")
    for got, right in zip(torch.autograd.grad(loss, student), torch.autograd.grad(want, student), strict=True):
        assert_close(got, right, 1e-10, "gradient")


@pytest.mark.parametrize("dtype, bound", [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 1e-6)])
@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("temperature", [0.1, 1.0, 10.0])
def test_equal_models_have_no_divergence_and_no_gradient(dtype, bound, beta, temperature):
    (hidden, head), _, _ = made(dtype=dtype)
    stats = tw.linear_distillation_stats(hidden, head, hidden, head, beta=beta, temperature=temperature)
    assert stats.divergence.abs().max() <= bound
    grads = torch.autograd.grad(stats.divergence.sum(), (hidden, head))
    assert all(grad.abs().max() <= 10 * bound / temperature for grad in grads)


def test_the_teacher_gets_no_gradient():
    student, teacher, _ = made()
    teacher = [part.requires_grad_() for part in teacher]
    tw.linear_distillation_loss(*student, *teacher).backward()
    assert all(part.grad is None for part in teacher)
    assert all(part.grad is not None for part in student)


@pytest.mark.parametrize("beta", BETAS)
def test_padding_of_either_classifier_is_cut(beta):
    (hidden, head), (teacher, teacher_head), target = made()
    padded = torch.cat([head, 50.0 * torch.ones(3, D, dtype=head.dtype)])
    more = torch.cat([teacher_head, 50.0 * torch.ones(7, E, dtype=head.dtype)])
    bias = torch.randn(V + 3, dtype=torch.float64)
    loss = tw.linear_distillation_loss(hidden, padded, teacher, more, target, beta=beta, classes=V, linear_bias=bias)
    want = tw.linear_distillation_loss(hidden, head, teacher, teacher_head, target, beta=beta, linear_bias=bias[:V])
    assert_close(loss, want, 1e-14)
    got, right = torch.autograd.grad(loss, (hidden, head)), torch.autograd.grad(want, (hidden, head))
    for one, other in zip(got, right, strict=True):
        assert_close(one, other, 1e-12)


def test_each_token_counts_where_its_mask_and_its_target_say():
    student, teacher, target = made()
    mask = torch.arange(N) % 3 > 0
    target = torch.where(torch.arange(N) % 4 > 0, target, -100)
    stats = tw.linear_distillation_stats(*student, *teacher, target, mask=mask, temperature=2.0)
    full = tw.linear_distillation_stats(*student, *teacher, target.clamp(min=0), mask=mask | True, temperature=2.0)
    assert torch.equal(stats.valid, mask)
    assert torch.equal(stats.has_target, mask & (target != -100))
    for name, where in (("divergence", mask), ("entropy", mask), ("log_prob", stats.has_target)):
        got, all_of_them = getattr(stats, name), getattr(full, name)
        assert_close(got[where], all_of_them[where], 1e-12, name)
        assert (got[~where] == 0).all(), name
    logits = student[0] @ student[1].T
    assert_close(full.log_prob, logits.log_softmax(1).gather(1, target.clamp(min=0)[:, None])[:, 0], 1e-12)
    log_p = (logits / 2.0).log_softmax(1)
    assert_close(full.entropy, -(log_p.exp() * log_p).sum(1), 1e-12)
    assert not stats.entropy.requires_grad
    alone = tw.linear_distillation_stats(*student, *teacher, target)  # without a mask, targets say which tokens count
    assert torch.equal(alone.valid, target != -100)


def test_a_mean_over_no_tokens_is_nan():
    student, teacher, target = made()
    assert tw.linear_distillation_loss(*student, *teacher, mask=target < 0).isnan()
    none = tw.linear_distillation_loss(*student, *teacher, torch.full_like(target, -100), mask=target >= 0)
    assert none.isnan()


def test_classes_that_both_models_exclude_add_nothing():
    """A bias of -inf on both sides; on the student's side alone the divergence is infinite, as its equation says."""
    student, teacher, _ = made()
    bias = torch.zeros(V, dtype=torch.float64)
    bias[::5] = -torch.inf
    kept = bias == 0
    for beta in BETAS:
        both = tw.linear_distillation_loss(*student, *teacher, beta=beta, linear_bias=bias, teacher_bias=bias)
        want = tw.linear_distillation_loss(student[0], student[1][kept], teacher[0], teacher[1][kept], beta=beta)
        assert_close(both, want, 1e-12)
        assert all(grad.isfinite().all() for grad in torch.autograd.grad(both, student))
    assert tw.linear_distillation_loss(*student, *teacher, linear_bias=bias).isposinf()
    assert tw.linear_distillation_loss(*student, *teacher, linear_bias=bias, beta=1.0).isfinite()


def test_shift_moves_targets_and_mask():
    student, teacher, target = made()
    states = [part.view(1, N, -1) for part in (student[0], teacher[0])]
    mask = torch.arange(N)[None] % 3 > 0
    loss = tw.linear_distillation_loss(
        states[0], student[1], states[1], teacher[1], target[None], mask=mask, shift=2, reduction="none"
    )
    want = tw.linear_distillation_loss(
        states[0][:, :-2],
        student[1],
        states[1][:, :-2],
        teacher[1],
        target[None, 2:],
        mask=mask[:, 2:],
        reduction="none",
    )
    assert loss.shape == (1, N - 2)
    assert torch.equal(loss, want)
