"""The streaming estimate of how often an item is in a batch."""

import pytest
import torch
import torch.nn.functional as F
from tests.compare import assert_close

import tilewise as tw


def test_an_item_of_every_k_th_batch():
    estimate = tw.StreamingLogQ(20, momentum=0.01)
    for step in range(1, 121):
        ids = torch.tensor([k for k in range(1, 9) if step % k == 0])
        found = estimate(ids)
        assert_close(found, -ids.double().log(), 1e-6)
    estimate.eval()
    assert_close(estimate(torch.arange(1, 9)), -torch.arange(1.0, 9.0).double().log(), 1e-6)


def test_the_first_intervals_have_equal_weights_and_later_ones_follow_a_change():
    estimate = tw.StreamingLogQ(2, momentum=0.25)
    steps, want, last = [2, 3, 7, 8, 9, 14, 15], None, 0
    seen = 0
    for step in range(1, 16):
        if step in steps:
            seen += 1
            gap, rate = step - last, max(0.25, 1 / seen)
            want = gap if want is None else want + rate * (gap - want)
            last = step
            assert_close(estimate(torch.tensor([1])).exp(), torch.tensor([1 / want]).double(), 1e-6)
        else:
            estimate(torch.tensor([0]))


def test_a_random_stream_converges_to_the_probability_of_being_in_a_batch():
    generator = torch.Generator().manual_seed(0)
    share = torch.tensor([0.5, 0.25, 0.15, 0.1])
    estimate = tw.StreamingLogQ(4, momentum=0.002)
    for _ in range(4000):
        estimate(torch.multinomial(share, 3, replacement=True, generator=generator))
    want = 1 - (1 - share) ** 3
    assert (estimate.eval()(torch.arange(4)).exp() / want - 1).abs().max() < 0.1


def test_repeated_negative_and_unseen_ids():
    estimate = tw.StreamingLogQ(10)
    once, twice = tw.StreamingLogQ(10), tw.StreamingLogQ(10)
    for _ in range(3):
        estimate(torch.tensor([0]))
        once(torch.tensor([-7, 5]))  # bucket 3
        twice(torch.tensor([-7, 5, 5, -7]))
    assert all(torch.equal(a, b) for a, b in zip(once.buffers(), twice.buffers(), strict=True))
    assert once.last[3] == 3
    estimate.eval()
    before = [buffer.clone() for buffer in estimate.buffers()]
    assert_close(estimate(torch.tensor([8])).exp(), torch.tensor([0.25]).double(), 1e-6)  # as if it came in step 4
    assert all(torch.equal(a, b) for a, b in zip(before, estimate.buffers(), strict=True))
    assert estimate(torch.empty(0, dtype=torch.int64)).shape == (0,)


def test_a_resumed_estimate_continues_to_the_bit():
    generator = torch.Generator().manual_seed(1)
    batches = torch.randint(50, (40, 8), generator=generator)
    whole, first = tw.StreamingLogQ(30), tw.StreamingLogQ(30)
    want = [whole(ids) for ids in batches]
    for ids in batches[:20]:
        first(ids)
    second = tw.StreamingLogQ(30)
    second.load_state_dict(first.state_dict())
    assert all(torch.equal(second(ids), found) for ids, found in zip(batches[20:], want[20:], strict=True))


@pytest.mark.parametrize("symmetric", [False, True])
def test_it_corrects_info_nce(symmetric):
    generator = torch.Generator().manual_seed(2)
    query, key = (F.normalize(torch.randn(16, 8, generator=generator, dtype=torch.float64), dim=1) for _ in "ab")
    query.requires_grad_()
    estimate = tw.StreamingLogQ(40)
    for _ in range(5):
        log_q = estimate(torch.randint(20, (16,), generator=generator))
    loss = tw.info_nce(query, key, log_q=log_q, symmetric=symmetric)
    logits = query @ key.T / 0.07
    target = torch.arange(16)
    want = F.cross_entropy(logits - log_q, target)
    if symmetric:
        want = (want + F.cross_entropy(logits.T, target)) / 2
    assert_close(loss.detach(), want.detach(), 1e-7)
    assert not log_q.requires_grad
    assert_close(*(torch.autograd.grad(value, query)[0] for value in (loss, want)), 1e-7)
