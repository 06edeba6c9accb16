"""Encoders of a cached step: frozen, functions, with buffers, checkpointed, and those that change between passes."""

from __future__ import annotations

import pytest
import torch
from tests.cache.step_cases import Contrast, assert_same, both, encode_chunks, gradients, tower
from torch import nn

from tilewise.cache import Encoder, GradientCache, cached_encode, cached_step
from tilewise.errors import GradientError


def test_a_frozen_encoder_runs_once_and_without_a_graph():
    torch.manual_seed(0)
    locked, free, loss = tower().requires_grad_(False), tower(), Contrast()
    runs = []
    locked.register_forward_hook(lambda *_: runs.append(torch.is_grad_enabled()))
    x, y = torch.randn(7, 12), torch.randn(7, 12)
    step = GradientCache([locked, free], loss, chunk_size=3)
    step(x, y)
    assert runs == [False] * 3
    assert not step.encode(x, y)[0].requires_grad
    gradients(free, loss)  # clear the gradients
    both(lambda: step(x, y), lambda: loss(encode_chunks(locked, x, 3), encode_chunks(free, y, 3)), free, loss)


def test_a_function_is_frozen_only_if_declared():
    locked = tower().requires_grad_(False)
    runs = []
    locked.register_forward_hook(lambda *_: runs.append(1))
    x, free = torch.randn(6, 12), tower()
    for encoder, times in [(locked.forward, 1), (Encoder(lambda x: locked(x), (locked,)), 1)]:
        runs.clear()
        cached_step([encoder, free], [x, x], Contrast(), chunk_size=6)
        assert len(runs) == (times if encoder != locked.forward else 0)  # .forward bypasses the hook
    runs.clear()
    cached_step([lambda x: locked(x), free], [x, x], Contrast(), chunk_size=6)
    assert len(runs) == 2


def test_a_hidden_parameter_of_a_function_gets_its_gradient():
    class Holder:  # not a module: the function's variables do not show the parameter
        locked, projection = tower().requires_grad_(False), nn.Linear(8, 4)

    holder, x = Holder(), torch.randn(6, 12)
    cached_step(lambda x: holder.projection(holder.locked(x)), [x], lambda z: z.square().mean(), chunk_size=2)
    assert holder.projection.weight.grad.abs().sum() > 0


def test_inputs_that_require_a_gradient_get_it():
    torch.manual_seed(0)
    a, loss = tower(dropout=0.0).double(), Contrast().double()
    source, y = torch.randn(7, 12).double().requires_grad_(), torch.randn(7, 12)
    shift, y = torch.tensor(0.3, dtype=torch.float64, requires_grad=True), y.double()

    def run(encode):
        z = encode((source.tanh() * 2, shift))
        loss(z, a(y)).backward()
        grads = [source.grad.clone(), shift.grad.clone(), *gradients(a, loss)]
        source.grad = shift.grad = None
        return grads

    want = run(lambda args: a(args[0] + args[1]))
    encoder = Encoder(lambda x, s: a(x + s), (a,))
    assert_same(run(lambda args: cached_encode(encoder, args, chunk_size=3)), want)
    a.requires_grad_(False)  # now only the inputs require a gradient
    got = run(lambda args: cached_encode(encoder, args, chunk_size=3))
    assert_same(got[:2], want[:2])


def test_chunks_and_outputs_without_a_gradient():
    torch.manual_seed(0)
    a, b = tower(dropout=0.0), tower(dropout=0.0)
    x = torch.randn(9, 12)
    x[3:6] = -100.0

    def encoder(x):  # the second chunk does not depend on any parameter
        return (torch.zeros(len(x), 8) if x.mean() < -50 else a(x)), b(x)

    def loss(rep):
        return rep[0].square().mean()  # rep[1] is not used

    cached_step(encoder, [x], loss, chunk_size=3)
    got = gradients(a)
    assert all(p.grad is None for p in b.parameters())
    loss((torch.cat([a(x[:3]), torch.zeros(3, 8), a(x[6:])]),)).backward()
    assert_same(got, gradients(a))


@pytest.mark.parametrize("buffers, updates", [("once", 3), ("twice", 6)])
def test_batch_norm_statistics(buffers, updates):
    torch.manual_seed(0)
    a = nn.Sequential(nn.Linear(12, 8), nn.BatchNorm1d(8))
    x = torch.randn(9, 12)
    start = {name: value.clone() for name, value in a.state_dict().items()}

    def loss(z):
        return (z @ z.T).logsumexp(1).mean()

    loss(encode_chunks(a, x, 3)).backward()
    want, want_grads = {n: b.clone() for n, b in a.named_buffers()}, gradients(a)
    a.load_state_dict(start)
    cached_step(a, [x], loss, chunk_size=3, buffers=buffers)
    assert a[1].num_batches_tracked == updates
    assert_same(gradients(a), want_grads)
    if buffers == "once":
        assert all(torch.equal(b, want[n]) for n, b in a.named_buffers())
    else:
        assert not torch.equal(a[1].running_mean, want["1.running_mean"])


def test_constant_buffers_are_not_written():
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(12, 8)
            self.register_buffer("table", torch.randn(8))

        def forward(self, x):
            return self.linear(x) * self.table

    a = Table()
    before = a.table._version
    cached_step(a, [torch.randn(6, 12)], lambda z: z.square().mean(), chunk_size=3)
    assert a.table._version == before


def test_checkpointed_encoders():
    from torch.utils.checkpoint import checkpoint

    torch.manual_seed(0)
    a, x = tower(), torch.randn(6, 12)

    def loss(z):
        return (z @ z.T).logsumexp(1).mean()

    both(
        lambda: cached_step(Encoder(lambda x: checkpoint(a, x, use_reentrant=False), (a,)), [x], loss, chunk_size=2),
        lambda: loss(encode_chunks(a, x, 2)),
        a,
    )


def test_an_encoder_that_writes_into_its_input_is_refused():
    a, x = tower(), torch.randn(6, 12)
    with pytest.raises(GradientError, match="changed in place"):
        cached_step(lambda x: a(x.div_(2)), [x], lambda z: z.square().mean(), chunk_size=2)


def test_an_encoder_with_another_result_in_the_second_pass_is_refused():
    a, runs = tower(), []

    def encoder(x):
        runs.append(1)
        return a(x)[:, : len(runs) // 4 + 2]

    with pytest.raises(GradientError, match="in the second pass"):
        cached_step(encoder, [torch.randn(6, 12)], lambda z: z.square().mean(), chunk_size=2)
