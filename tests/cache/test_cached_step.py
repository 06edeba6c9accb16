"""A cached step equals the uncached step: loss, gradients, and the random state after it."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from tests.cache.step_cases import EXACT, Contrast, assert_same, both, encode_chunks, gradients, tower
from tests.compare import relative_error
from torch import Tensor

from tilewise.cache import GradientCache, cached_encode, cached_loss, cached_step
from tilewise.errors import ConfigError, GradientError


@pytest.mark.parametrize("chunk_size", [1, 3, 5, 10, 64])
@pytest.mark.parametrize("rows", [1, 10])
def test_two_towers_with_dropout_and_a_learnable_scale(rows, chunk_size):
    torch.manual_seed(0)
    a, b, loss = tower(), tower(9), Contrast()
    x, y = torch.randn(rows, 12), torch.randn(rows, 9)
    step = GradientCache([a, b], loss, chunk_size=chunk_size)
    if rows == 1:  # one row has loss 0 and gradient 0, so only the shapes can be checked
        assert step(x, y).item() == pytest.approx(0.0, abs=1e-6)
        return
    got = both(
        lambda: step(x, y),
        lambda: loss(encode_chunks(a, x, chunk_size), encode_chunks(b, y, chunk_size)),
        *(a, b, loss),
    )
    assert not got.requires_grad


def test_without_dropout_the_chunk_size_does_not_matter():
    torch.manual_seed(0)
    a, loss = tower(dropout=0.0), Contrast()
    x, y = torch.randn(11, 12), torch.randn(11, 12)
    loss(a(x), a(y)).backward()
    want = gradients(a, loss)
    for chunk_size in (1, 2, 4, 11, 100):
        GradientCache(a, loss, chunk_size=chunk_size)(x, y)
        assert_same(gradients(a, loss), want)


def test_a_loss_that_draws_random_numbers():
    """They follow those of the encoders, and the second pass does not rewind them."""
    torch.manual_seed(0)
    a, loss, x, y = tower(), Contrast(), torch.randn(7, 12), torch.randn(7, 12)

    def noisy(p, q):
        return loss(F.dropout(p, 0.3), F.dropout(q, 0.3))

    both(
        lambda: cached_step(a, [x, y], noisy, chunk_size=3),
        lambda: noisy(encode_chunks(a, x, 3), encode_chunks(a, y, 3)),
        *(a, loss),
    )


def test_dropout_masks_differ_from_step_to_step():
    a, loss = tower(), Contrast()
    x, y = torch.randn(8, 12), torch.randn(8, 12)
    step = GradientCache(a, loss, chunk_size=4)
    assert step(x, y) != step(x, y)


def test_one_encoder_serves_three_inputs_of_different_lengths():
    torch.manual_seed(0)
    a = tower()
    q, pos, neg = torch.randn(6, 12), torch.randn(6, 12), torch.randn(15, 12)

    def loss(query, positive, negative):
        scores = query @ torch.cat([positive, negative]).T
        return F.cross_entropy(scores, torch.arange(len(query)))

    both(
        lambda: cached_step(a, [q, pos, neg], loss, chunk_size=[2, 3, 4]),
        lambda: loss(encode_chunks(a, q, 2), encode_chunks(a, pos, 3), encode_chunks(a, neg, 4)),
        a,
    )


@pytest.mark.parametrize("factor", [1.0, 3.0, -0.5])
def test_gradients_are_multiplied_by_grad_output(factor):
    torch.manual_seed(0)
    a, loss, x, y = tower(dropout=0.0), Contrast(), torch.randn(7, 12), torch.randn(7, 12)
    (factor * loss(a(x), a(y))).backward()
    want = gradients(a, loss)
    value = cached_loss(a, [x, y], loss, chunk_size=3)
    assert all(p.grad is None for p in [*a.parameters(), *loss.parameters()])  # nothing before backward
    (factor * value).backward()
    assert_same(gradients(a, loss), want)
    plain = cached_step(a, [x, y], loss, chunk_size=3, backward_scale=factor)
    assert relative_error(plain, value.detach()) <= EXACT  # the returned loss is not scaled
    assert_same(gradients(a, loss), want)


class PowerScaler:
    """Scales the loss as a GradScaler does. Powers of two are exact."""

    def scale(self, loss: Tensor) -> Tensor:
        return loss * 1024.0


def test_a_scaler_scales_every_gradient_and_not_the_returned_loss():
    torch.manual_seed(0)
    a, loss, x, y = tower(dropout=0.0), Contrast(), torch.randn(7, 12), torch.randn(7, 12)
    plain = cached_step(a, [x, y], loss, chunk_size=3)
    want = [1024.0 * g for g in gradients(a, loss)]
    scaled = cached_step(a, [x, y], loss, chunk_size=3, scaler=PowerScaler())
    assert torch.equal(plain, scaled)
    assert_same(gradients(a, loss), want)


def test_torch_grad_scaler_steps_an_optimizer():
    torch.manual_seed(0)
    a, loss, x, y = tower(dropout=0.0), Contrast(), torch.randn(7, 12), torch.randn(7, 12)
    cached_step(a, [x, y], loss, chunk_size=3)
    want = [p.detach() - 0.1 * p.grad for p in a.parameters()]
    a.zero_grad()
    optimizer, scaler = torch.optim.SGD(a.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=256.0)
    GradientCache(a, loss, chunk_size=3)(x, y, scaler=scaler)
    scaler.step(optimizer)
    scaler.update()
    assert_same([p.detach() for p in a.parameters()], want)


def test_gradients_are_added_to_existing_ones():
    torch.manual_seed(0)
    a, loss = tower(dropout=0.0), Contrast()
    batches = [(torch.randn(7, 12), torch.randn(7, 12)) for _ in range(3)]
    for x, y in batches:
        (loss(a(x), a(y)) / 3).backward()
    want = gradients(a, loss)
    step = GradientCache(a, loss, chunk_size=3)
    for x, y in batches:
        step(x, y, backward_scale=1 / 3)
    assert_same(gradients(a, loss), want)


@pytest.mark.parametrize("keep_casts", [True, False])
@pytest.mark.parametrize("backward_inside", [True, False])
def test_autocast_is_the_same_in_both_passes(backward_inside, keep_casts):
    torch.manual_seed(0)
    a, loss, x, y = tower(), Contrast(), torch.randn(8, 12), torch.randn(8, 12)
    types = []
    a[0].register_forward_hook(lambda module, args, out: types.append(out.dtype))

    def run(make_loss, **autocast):
        with torch.autocast("cpu", dtype=torch.bfloat16, **autocast):
            value = make_loss()
            if backward_inside:
                value.backward()
        if not backward_inside:
            value.backward()
        return value

    # Autocast caches a bfloat16 copy of a weight, and without our cache the gradients of the chunks are added there.
    # Here every chunk adds to the float32 gradient, as without autocast's cache.
    torch.manual_seed(7)
    want = run(lambda: loss(encode_chunks(a, x, 4), encode_chunks(a, y, 4)), cache_enabled=False)
    want_grads = gradients(a, loss)
    torch.manual_seed(7)
    got = run(lambda: cached_loss(a, [x, y], loss, chunk_size=4), cache_enabled=keep_casts)
    assert relative_error(got.detach(), want.detach()) <= EXACT
    assert_same(gradients(a, loss), want_grads)
    assert set(types) == {torch.bfloat16}
    assert len(types) == 4 + 8


def test_encoding_stays_in_float32_when_only_backward_is_under_autocast():
    torch.manual_seed(0)
    a, loss, x, y = tower(), Contrast(), torch.randn(8, 12), torch.randn(8, 12)
    types = []
    a[0].register_forward_hook(lambda module, args, out: types.append(out.dtype))
    value = cached_loss(a, [x, y], loss, chunk_size=4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value.backward()
    assert types == [torch.float32] * 8


def test_loss_keywords_and_one_call_per_step():
    a, loss = tower(), Contrast()
    step = GradientCache(a, lambda x, y, *, weight: weight * loss(x, y), chunk_size=2)
    step(torch.randn(6, 12), torch.randn(6, 12), weight=2.0)
    assert loss.calls == 1


def test_backward_twice_with_retained_graph_doubles_the_gradient():
    torch.manual_seed(0)
    a, loss, x = tower(), Contrast(), torch.randn(6, 12)
    value = cached_loss(a, [x, x], loss, chunk_size=4)
    value.backward(retain_graph=True)
    once = [p.grad.clone() for p in a.parameters()]
    value.backward()
    assert_same([p.grad for p in a.parameters()], [2 * g for g in once])


def test_the_states_of_python_and_numpy_are_restored():
    numpy = pytest.importorskip("numpy")
    a, seen = tower(dropout=0.0), []

    def encoder(x):
        draw = (random.random(), numpy.random.rand(), torch.rand(()).item())
        seen.append(draw)
        return a(x) * sum(draw)

    cached_step(encoder, [torch.randn(6, 12)], lambda z: z.square().mean(), chunk_size=2)
    assert seen[:3] == seen[3:]
    assert len(set(seen)) == 3


def test_random_state_is_restored_when_an_encoder_fails_in_the_second_pass():
    a, runs = tower(), []

    def encoder(x):
        runs.append(1)
        if len(runs) == 4:
            raise RuntimeError("out of memory")
        return a(x)

    value = cached_loss(encoder, [torch.randn(6, 12)], lambda z: z.square().mean(), chunk_size=2)
    before = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="out of memory"):
        value.backward()
    assert torch.equal(torch.get_rng_state(), before)


def test_progress_is_called_for_every_chunk():
    events = []
    step = GradientCache(
        [tower(), tower().requires_grad_(False)],
        Contrast(),
        chunk_size=[2, 3],
        progress=lambda *event: events.append(event),
    )
    step(torch.randn(6, 12), torch.randn(6, 12))
    assert events == [(i, 5, "encode") for i in range(5)] + [(i, 3, "replay") for i in range(3)]


def test_under_no_grad_encoding_is_plain_and_a_step_is_refused():
    a, x = tower().eval(), torch.randn(6, 12)
    with torch.no_grad():
        z = cached_encode(a, x, chunk_size=4)
        assert not z.requires_grad
        assert relative_error(z, a(x)) <= EXACT
        with pytest.raises(GradientError, match="no_grad"):
            cached_step(a, [x], lambda z: z.mean(), chunk_size=4)


@pytest.mark.parametrize("offload", [None, "cpu"])
def test_a_function_gives_the_rows_of_each_chunk(offload):
    torch.manual_seed(0)
    linear, rows, seen = torch.nn.Linear(4, 3), torch.randn(7, 4), []
    loss = lambda z: z.square().sum(1).logsumexp(0)  # noqa: E731
    (want,) = torch.autograd.grad(loss(linear(rows)), linear.weight)
    linear.register_forward_pre_hook(lambda _, inputs: seen.append(len(inputs[0])))
    cached_step(linear, [rows], loss, chunk_size=lambda batch: [1, 4, len(batch) - 5], offload=offload)
    assert seen == [1, 4, 2] * 2
    torch.testing.assert_close(linear.weight.grad, want)
    with pytest.raises(ConfigError, match=r"rows of each chunk, 7 together, got \[3, 3\]"):
        cached_step(linear, [rows], loss, chunk_size=lambda batch: [3, 3], offload=offload)
