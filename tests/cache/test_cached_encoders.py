"""Encoders of a cached step: frozen, functions, with buffers, checkpointed, and those that change between passes."""

from __future__ import annotations

import pytest
import torch
from tests.cache.step_cases import Contrast, assert_same, both, encode_chunks, gradients, tower
from torch import nn

from tilewise.cache import Encoder, GradientCache, cached_encode, cached_loss, cached_step
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


def _constant_square(z):
    return z.square().mean()


def _two_losses(a, x):
    return [cached_loss(a, [part], _constant_square, chunk_size=2) for part in x.chunk(2)]


@pytest.mark.parametrize(
    "change",
    {
        "an optimizer": lambda a: torch.optim.SGD(a.parameters(), 0.1).step(),
        "an optimizer of several tensors at once": lambda a: torch.optim.AdamW(a.parameters(), foreach=True).step(),
        "other weights": lambda a: a.load_state_dict({name: 2 * value for name, value in a.state_dict().items()}),
        "a buffer": lambda a: a[1].table.add_(1.0),
    }.items(),
    ids=lambda item: item[0],
)
def test_weights_that_change_before_backward_are_refused(change):
    """Without a cache torch refuses it too; here the second loss would get the gradient of other weights."""
    torch.manual_seed(0)
    a, x = nn.Sequential(nn.Linear(12, 8), nn.Module(), nn.Linear(8, 8)), torch.randn(8, 12)
    a[1].forward = lambda z: z + a[1].table
    a[1].register_buffer("table", torch.ones(8))
    first, second = _two_losses(a, x)
    first.backward()
    before = [p.grad.clone() for p in a.parameters()]
    change[1](a)
    name = "1.table" if change[0] == "a buffer" else "0.weight"
    with pytest.raises(GradientError, match=f"'{name}' of Sequential was changed in place .* optimizer.step"):
        second.backward()
    assert all(torch.equal(p.grad, grad) for p, grad in zip(a.parameters(), before, strict=True))


class Renormed(nn.Module):
    """Its forward changes a parameter, its running statistics and another buffer."""

    def __init__(self):
        super().__init__()
        self.rows, self.norm = nn.Embedding(12, 8, max_norm=1.0), nn.BatchNorm1d(8)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls.add_(1)
        return self.norm(self.rows(x.argmax(1)))


def test_state_that_the_encoder_changes_itself_may_change():
    """So may gradients, and modules that no encoder runs. Two losses wait for one backward."""
    torch.manual_seed(0)
    a, other, x = Renormed(), nn.Linear(2, 2), torch.randn(8, 12)
    with torch.no_grad():
        a.rows.weight.mul_(5.0)
    optimizer = torch.optim.SGD([*a.parameters(), *other.parameters()], 0.1)
    for _ in range(2):
        optimizer.zero_grad()
        losses = _two_losses(a, x)
        other(torch.ones(2)).sum().backward()
        torch.optim.SGD(other.parameters(), 0.1).step()
        sum(losses).backward()
        optimizer.step()
    assert a.norm.weight.grad.norm() > 0
