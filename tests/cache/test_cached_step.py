"""A cached step equals the same step without a cache: loss, gradients, and the random stream after it."""

from __future__ import annotations

import random
from collections import OrderedDict, UserDict
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from tests.compare import assert_close, relative_error
from torch import Tensor, nn

from tilewise.cache import Encoder, GradientCache, LazyBatch, cached_encode, cached_loss, cached_step
from tilewise.cache.chunks import row_ranges, take_rows, tensors_of
from tilewise.errors import ConfigError, DtypeError, GradientError, ShapeError

EXACT = 1e-6


def tower(features: int = 12, dropout: float = 0.3) -> nn.Module:
    return nn.Sequential(nn.Linear(features, 24), nn.GELU(), nn.Dropout(dropout), nn.Linear(24, 8), nn.Dropout(dropout))


class Contrast(nn.Module):
    """A dense symmetric loss with a learnable scale; counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.tensor(1.3))
        self.calls = 0

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        self.calls += 1
        scores = self.log_scale.exp() * F.normalize(a, dim=1) @ F.normalize(b, dim=1).T
        answers = torch.arange(len(a))
        return (F.cross_entropy(scores, answers) + F.cross_entropy(scores.T, answers)) / 2


def encode_chunks(encoder, batch, chunk_size):
    """The uncached step: every chunk with its graph, all graphs at once in memory."""
    rows = len(tensors_of(batch)[0])
    return torch.cat([encoder(take_rows(batch, part)) for part in row_ranges(rows, chunk_size)])


def gradients(*modules: nn.Module) -> list[Tensor]:
    grads = [p.grad.clone() for module in modules for p in module.parameters() if p.grad is not None]
    for module in modules:
        module.zero_grad()
    return grads


def assert_same(got: list[Tensor], want: list[Tensor]) -> None:
    assert len(got) == len(want) > 0
    for one, other in zip(got, want, strict=True):
        assert_close(one, other, EXACT)


def both(step, uncached, *modules):
    """Run the two from the same random state; they must agree in loss, gradients and the state they leave."""
    torch.manual_seed(7)
    want = uncached()
    want.backward()
    want_next = torch.rand(3)
    want_grads = gradients(*modules)
    torch.manual_seed(7)
    got = step()
    got_next = torch.rand(3)
    assert relative_error(got.detach(), want.detach()) <= EXACT
    assert_same(gradients(*modules), want_grads)
    assert torch.equal(got_next, want_next)
    return got


@pytest.mark.parametrize("chunk_size", [1, 3, 5, 10, 64])
@pytest.mark.parametrize("rows", [1, 10])
def test_two_towers_with_dropout_and_a_learnable_scale(rows, chunk_size):
    torch.manual_seed(0)
    a, b, loss = tower(), tower(9), Contrast()
    x, y = torch.randn(rows, 12), torch.randn(rows, 9)
    step = GradientCache([a, b], loss, chunk_size=chunk_size)
    if rows == 1:  # one row has loss 0 and gradient 0: only the plumbing can be seen
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
    """They come after those of the encoders, and the second pass does not wind them back."""
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


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


@dataclass(frozen=True)
class Record:
    left: Tensor
    right: Tensor
    note: str = "kept"


class Nested(nn.Module):
    """Takes x and y in many wrappings, returns two representations, a mask and a note."""

    def __init__(self) -> None:
        super().__init__()
        self.body = tower()

    def forward(self, left=None, right=None, flag: bool = True, temperature: Tensor | None = None):
        if isinstance(left, Pair | Record):
            left, right = left.left, left.right
        assert flag
        z = self.body(left + right)
        if temperature is not None:
            z = z / temperature
        return {"z": z, "parts": (z[:, :3].tanh(), left > 0), "note": "row"}


WRAPPINGS = {
    "positional tuple": lambda x, y: (x, y),
    "positional list": lambda x, y: [x, y],
    "keywords": lambda x, y: {"left": x, "right": y, "flag": True, "temperature": torch.tensor(2.0)},
    "ordered dict": lambda x, y: OrderedDict(left=x, right=y),
    "user dict": lambda x, y: UserDict(left=x, right=y),
    "named tuple": lambda x, y: Pair(x, y),
    "frozen dataclass": lambda x, y: Record(x, y),
    "argument of its own": lambda x, y: ({"left": x, "right": y}["left"], {"right": y}["right"]),
}


@pytest.mark.parametrize("wrap", WRAPPINGS.values(), ids=WRAPPINGS.keys())
def test_nested_inputs_and_outputs(wrap):
    torch.manual_seed(0)
    model = Nested()
    x, y = torch.randn(7, 12), torch.randn(7, 12)

    def loss(rep):
        assert rep["note"] == "row"
        weights = rep["parts"][1].float().mean(1)
        return ((rep["z"] @ rep["z"].T).logsumexp(1) * weights).mean() + rep["parts"][0].square().sum()

    def uncached():
        from tilewise.cache.chunks import call_with

        reps = [call_with(model, take_rows(wrap(x, y), part)) for part in row_ranges(7, 3)]
        return loss(
            {
                "z": torch.cat([r["z"] for r in reps]),
                "parts": tuple(torch.cat([r["parts"][i] for r in reps]) for i in (0, 1)),
                "note": "row",
            }
        )

    both(lambda: cached_step(model, [wrap(x, y)], loss, chunk_size=3), uncached, model)


def test_batch_encoding_and_model_output_of_transformers():
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_outputs import BaseModelOutputWithPooling

    class TextModel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.body = nn.Embedding(50, 12), tower()

        def forward(self, input_ids, attention_mask):
            hidden = self.body(self.embed(input_ids)) * attention_mask[..., None]
            return BaseModelOutputWithPooling(last_hidden_state=hidden, pooler_output=hidden.mean(1))

    torch.manual_seed(0)
    model, ids = TextModel(), torch.randint(0, 50, (7, 5))
    tokens = transformers.BatchEncoding({"input_ids": ids, "attention_mask": (ids > 10).long()})

    def loss(output):
        assert isinstance(output, BaseModelOutputWithPooling)
        z = output.pooler_output
        return (z @ z.T).logsumexp(1).mean() + output["last_hidden_state"].square().mean()

    def uncached():
        outputs = [model(**take_rows(tokens, part)) for part in row_ranges(7, 3)]
        return loss(
            BaseModelOutputWithPooling(
                last_hidden_state=torch.cat([o.last_hidden_state for o in outputs]),
                pooler_output=torch.cat([o.pooler_output for o in outputs]),
            )
        )

    both(lambda: cached_step(model, [tokens], loss, chunk_size=3), uncached, model)


def test_a_chunk_may_give_another_number_of_rows_than_it_got():
    torch.manual_seed(0)
    a = tower()

    def two_views(x):
        return torch.cat([a(x), a(x.flip(1))])

    x = torch.randn(7, 12)

    def loss(z):
        return (z @ z.T).logsumexp(1).mean()

    both(
        lambda: cached_step(two_views, [x], loss, chunk_size=3),
        lambda: loss(encode_chunks(two_views, x, 3)),
        a,
    )


@pytest.mark.parametrize("of_scale", [torch.exp, lambda scale: scale], ids=["computed", "the parameter itself"])
def test_a_temperature_that_the_model_returns_gets_its_gradient_once(of_scale):
    class WithScale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.log_scale = tower(dropout=0.0), nn.Parameter(torch.tensor(0.7))

        def forward(self, left, right):
            return self.body(left), self.body(right), of_scale(self.log_scale)

    def loss(rep):
        a, b, scale = rep
        return F.cross_entropy(scale * a @ b.T, torch.arange(len(a)))

    torch.manual_seed(0)
    # In float64, for the gradient of a lone number here is a sum that nearly cancels.
    model, x, y = WithScale().double(), torch.randn(7, 12).double(), torch.randn(7, 12).double()
    loss(model(x, y)).backward()
    want = gradients(model)
    cached_step(model, [(x, y)], loss, chunk_size=3)
    assert model.log_scale.is_leaf
    assert_same(gradients(model), want)


@pytest.mark.parametrize("factor", [1.0, 3.0, -0.5])
def test_the_incoming_gradient_is_honoured(factor):
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
    """What a GradScaler does to the loss; powers of two are exact."""

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


def test_gradients_add_to_what_is_there():
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

    # Autocast keeps a weight's bfloat16 copy, and without the cache the chunks' gradients meet there, rounded.
    # Here every chunk adds to the float32 gradient, which is what one gets without keeping the copies.
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
    gradients(free, loss)  # forget them
    both(lambda: step(x, y), lambda: loss(encode_chunks(locked, x, 3), encode_chunks(free, y, 3)), free, loss)


def test_a_function_is_frozen_only_when_it_says_so():
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


def test_a_function_with_a_hidden_parameter_still_learns():
    class Holder:  # no module: the function's variables do not show what learns
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
    a.requires_grad_(False)  # now only the inputs ask for a gradient
    got = run(lambda args: cached_encode(encoder, args, chunk_size=3))
    assert_same(got[:2], want[:2])


def test_chunks_and_outputs_that_no_gradient_reaches():
    torch.manual_seed(0)
    a, b = tower(dropout=0.0), tower(dropout=0.0)
    x = torch.randn(9, 12)
    x[3:6] = -100.0

    def encoder(x):  # the second chunk does not depend on any parameter
        return (torch.zeros(len(x), 8) if x.mean() < -50 else a(x)), b(x)

    def loss(rep):
        return rep[0].square().mean()  # nobody uses rep[1]

    cached_step(encoder, [x], loss, chunk_size=3)
    got = gradients(a)
    assert all(p.grad is None for p in b.parameters())
    loss((torch.cat([a(x[:3]), torch.zeros(3, 8), a(x[6:])]),)).backward()
    assert_same(got, gradients(a))


def test_what_the_loss_returns_beside_the_loss_comes_back_detached():
    a, x = tower(), torch.randn(6, 12)

    def with_metrics(z):
        return z.square().mean(), {"norm": z.norm(), "rows": len(z)}

    loss, metrics = cached_step(a, [x], with_metrics, chunk_size=4)
    assert loss.dim() == 0
    assert not loss.requires_grad
    assert not metrics["norm"].requires_grad
    assert metrics["rows"] == 6
    named = cached_step(a, [x], lambda z: {"loss": z.square().mean(), "z": z}, chunk_size=4)
    assert not named["z"].requires_grad


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


def test_python_and_numpy_randomness_is_replayed():
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


def test_buffers_that_do_not_move_are_not_touched():
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


def test_progress_is_told_of_every_chunk():
    told = []
    step = GradientCache(
        [tower(), tower().requires_grad_(False)],
        Contrast(),
        chunk_size=[2, 3],
        progress=lambda *event: told.append(event),
    )
    step(torch.randn(6, 12), torch.randn(6, 12))
    assert told == [(i, 5, "encode") for i in range(5)] + [(i, 3, "replay") for i in range(3)]


def test_under_no_grad_encoding_is_plain_and_a_step_is_refused():
    a, x = tower().eval(), torch.randn(6, 12)
    with torch.no_grad():
        z = cached_encode(a, x, chunk_size=4)
        assert not z.requires_grad
        assert relative_error(z, a(x)) <= EXACT
        with pytest.raises(GradientError, match="no_grad"):
            cached_step(a, [x], lambda z: z.mean(), chunk_size=4)


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


def test_errors_say_what_to_do():
    a, x = tower(), torch.randn(6, 12)

    def loss(*z):
        return sum(part.square().mean() for part in z)

    refused = [
        (ShapeError, "same number of rows", lambda: cached_step(a, [(x, x[:5])], loss, chunk_size=2)),
        (ShapeError, "has no rows", lambda: cached_step(a, [x[:0]], loss, chunk_size=2)),
        (DtypeError, "LazyBatch", lambda: cached_step(a, [["a", "b"]], loss, chunk_size=2)),
        (DtypeError, "2 inputs for 3 encoders", lambda: cached_step([a, a, a], [x, x], loss, chunk_size=2)),
        (DtypeError, "an encoder is a module", lambda: cached_step([3], [x], loss, chunk_size=2)),
        (ConfigError, "at least 1, got 0", lambda: cached_step(a, [x], loss, chunk_size=0)),
        (ConfigError, "got True", lambda: cached_step(a, [x], loss, chunk_size=True)),
        (ConfigError, "2 numbers for 1", lambda: cached_step(a, [x], loss, chunk_size=[2, 2])),
        (ConfigError, "sync is one of", lambda: cached_step(a, [x], loss, chunk_size=2, sync="never")),
        (ConfigError, "buffers is one of", lambda: cached_step(a, [x], loss, chunk_size=2, buffers="no")),
        (ShapeError, "needs to be a scalar", lambda: cached_step(a, [x], lambda z: z, chunk_size=2)),
        (DtypeError, "returns a scalar tensor", lambda: cached_step(a, [x], lambda z: 1.0, chunk_size=2)),
        (DtypeError, "at least one tensor", lambda: cached_step(lambda x: "no", [x], loss, chunk_size=2)),
        (DtypeError, "loss is a function", lambda: cached_step(a, [x], None, chunk_size=2)),
        (
            ShapeError,
            "equal shapes but for their rows",
            lambda: cached_step(lambda x: x[:, : len(x)], [x[:5]], loss, chunk_size=2),
        ),
        (
            GradientError,
            "nothing learns",
            lambda: cached_step(tower().requires_grad_(False), [x], loss, chunk_size=2),
        ),
        (ShapeError, "at least one row", lambda: LazyBatch(0, lambda first, last: x)),
    ]
    for error, words, call in refused:
        with pytest.raises(error, match=words):
            call()


def test_an_encoder_that_writes_into_its_input_is_refused():
    a, x = tower(), torch.randn(6, 12)
    with pytest.raises(GradientError, match="changed in place"):
        cached_step(lambda x: a(x.div_(2)), [x], lambda z: z.square().mean(), chunk_size=2)


def test_an_encoder_that_changes_its_mind_is_refused():
    a, runs = tower(), []

    def encoder(x):
        runs.append(1)
        return a(x)[:, : len(runs) // 4 + 2]

    with pytest.raises(GradientError, match="run again"):
        cached_step(encoder, [torch.randn(6, 12)], lambda z: z.square().mean(), chunk_size=2)


def test_derivatives_that_are_not_available_are_refused():
    a, x = tower(), torch.randn(6, 12)
    value = cached_loss(a, [x], lambda z: z.square().mean(), chunk_size=2)
    with pytest.raises(GradientError, match="second derivative"):
        value.backward(create_graph=True)
    value = cached_loss(a, [x.requires_grad_()], lambda z: z.square().mean(), chunk_size=2)
    with pytest.raises(GradientError, match=r"arrive in \.grad"):
        torch.autograd.grad(value, [x])
