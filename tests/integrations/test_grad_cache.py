"""The interface of GradCache: the same arguments, the gradients of the uncached step, and none of its known faults."""

from __future__ import annotations

import inspect
from collections import UserDict
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from tests.compare import assert_close
from torch import Tensor, nn

from tilewise.errors import ConfigError, DtypeError, GradientError
from tilewise.integrations.grad_cache import GradCache, cached, cat_input_tensor, gather_input_tensor


class Model(nn.Module):
    def __init__(self, dropout: float = 0.3) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Dropout(dropout), nn.Linear(10, 4))

    def forward(self, x: Tensor, shift: Tensor | None = None) -> Tensor:
        return self.body(x if shift is None else x + shift)


def contrast(x: Tensor, y: Tensor, reduction: str = "mean") -> Tensor:
    scores = F.normalize(x, dim=1) @ F.normalize(y, dim=1).T
    return F.cross_entropy(5 * scores, torch.arange(len(x)), reduction=reduction)


def gradients(*models: nn.Module) -> list[Tensor]:
    grads = [p.grad.clone() for model in models for p in model.parameters()]
    for model in models:
        model.zero_grad()
    return grads


def assert_same(got: list[Tensor], want: list[Tensor]) -> None:
    assert len(got) == len(want) > 0
    for one, other in zip(got, want, strict=True):
        assert_close(one, other, 1e-6)


@pytest.fixture
def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(7, 6), torch.randn(7, 6)


def uncached(a, b, x, y, sizes=(2, 3), **loss_kwargs):
    torch.manual_seed(9)
    reps = [torch.cat([m(part) for part in side.split(n)]) for m, side, n in zip((a, b), (x, y), sizes, strict=True)]
    loss = contrast(*reps, **loss_kwargs)
    loss.backward()
    return loss.detach()


def test_the_signatures_are_theirs():
    assert list(inspect.signature(GradCache).parameters) == (
        ["models", "chunk_sizes", "loss_fn", "split_input_fn", "get_rep_fn", "fp16", "scaler"]
    )
    step = inspect.signature(GradCache.cache_step).parameters
    assert list(step) == ["self", "model_inputs", "no_sync_except_last", "loss_kwargs"]
    assert step["no_sync_except_last"].default is False


INPUTS = {
    "tensor": lambda x: x,
    "list": lambda x: [x],
    "dict": lambda x: {"x": x},
    "user dict": lambda x: UserDict(x=x),
    "list and dict": lambda x: ([x - 1], {"shift": torch.ones(len(x), 1)}),
}


@pytest.mark.parametrize("wrap", INPUTS.values(), ids=INPUTS.keys())
def test_step_equals_the_uncached_step_with_dropout(batch, wrap):
    a, b = Model(), Model()
    want = uncached(a, b, *batch, reduction="sum")
    want_grads = gradients(a, b)
    torch.manual_seed(9)
    got = GradCache([a, b], [2, 3], contrast)(wrap(batch[0]), wrap(batch[1]), reduction="sum")
    assert not got.requires_grad
    assert_close(got, want, 1e-6)
    assert_same(gradients(a, b), want_grads)


def test_tied_encoders_and_get_rep_fn(batch):
    a = Model()
    want = uncached(a, a, *batch, sizes=(3, 3))
    want_grads = gradients(a)

    class Wrapped(nn.Module):
        inner = a

        def forward(self, x):
            return SimpleNamespace(pooler_output=a(x))

    model = Wrapped()
    torch.manual_seed(9)
    got = GradCache([model, model], 3, contrast, get_rep_fn=lambda out: out.pooler_output)(*batch)
    assert_close(got, want, 1e-6)
    assert_same(gradients(a), want_grads)


def test_split_input_fn_takes_what_is_no_tensor(batch):
    a = Model(dropout=0.0)
    vectors = {f"text {i}": row for i, row in enumerate(batch[0])}

    class Reader(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = a

        def forward(self, *texts):
            return self.inner(torch.stack([vectors[text] for text in texts]))

    def split(texts, size):
        return [texts[i : i + size] for i in range(0, len(texts), size)]

    contrast(a(batch[0]), a(batch[0])).backward()
    want = gradients(a)
    reader = Reader()
    GradCache([reader, reader], 3, contrast, split_input_fn=split)(list(vectors), list(vectors))
    assert_same(gradients(a), want)


def test_subclass_hooks_are_used(batch):
    class Mine(GradCache):
        def get_reps(self, model_out):
            return 2 * model_out

        def compute_loss(self, *reps, **loss_kwargs):
            return 3 * super().compute_loss(*reps, **loss_kwargs)

    a = Model(dropout=0.0)
    (3 * contrast(2 * a(batch[0]), 2 * a(batch[1]))).backward()
    want = gradients(a)
    Mine([a, a], 2, contrast)(*batch)
    assert_same(gradients(a), want)


class Scaler:
    def scale(self, loss: Tensor) -> Tensor:
        return 64.0 * loss


def test_fp16_uses_autocast_and_the_scaler(batch):
    a, types = Model(dropout=0.0), []
    a.body[0].register_forward_hook(lambda module, args, out: types.append(out.dtype))
    GradCache([a, a], 3, contrast, fp16=True, scaler=Scaler())(*batch)
    got = gradients(a)
    assert set(types) == {torch.float16}
    contrast(a(batch[0]), a(batch[1])).backward()
    for one, other in zip(got, gradients(a), strict=True):
        assert_close(one, 64.0 * other, 2e-2)
    with pytest.raises(ConfigError, match="GradScaler"):
        GradCache([a, a], 3, contrast, fp16=True)


def test_errors(batch):
    a = Model()
    with pytest.raises(ConfigError, match="needs every model wrapped"):
        GradCache([a, a], 3, contrast)(*batch, no_sync_except_last=True)
    with pytest.raises(ConfigError, match="one per model, got 1 for 2"):
        GradCache([a, a], [3], contrast)
    with pytest.raises(ConfigError, match="one input per model"):
        GradCache([a, a], 3, contrast)(batch[0])


def test_functional_api_replays_dropout(batch):
    """GradCache's functional API does not record the random state of the device."""
    a = Model()
    want = uncached(a, a, *batch, sizes=(3, 3))
    want_grads, stream = gradients(a), torch.rand(2)

    @cached
    def call_model(model, x):
        return model(x)

    loss_of = cat_input_tensor(contrast)
    torch.manual_seed(9)
    sides = [[call_model(a, part) for part in side.split(3)] for side in batch]
    # GradCache fails on lists passed by keyword.
    loss = loss_of(x=[rep for rep, _ in sides[0]], y=[rep for rep, _ in sides[1]])
    loss.backward()
    for rep, push in sides[0] + sides[1]:
        push(rep)
    assert_close(loss.detach(), want, 1e-6)
    assert_same(gradients(a), want_grads)
    assert torch.equal(torch.rand(2), stream)


def test_functional_api_with_several_representations_and_without_a_gradient(batch):
    a = Model()
    first, second, push = cached(lambda x: (a(x), a(x + 1)))(batch[0])
    with pytest.raises(GradientError, match="Call backward on the loss first"):
        push((first, second))
    (first * second).sum().backward()
    push((first, second))
    assert all(p.grad is not None for p in a.parameters())


def test_gather_passes_keywords_and_leaves_other_arguments(monkeypatch):
    import torch.distributed as dist

    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(dist, "all_gather", lambda parts, value: [part.copy_(value) for part in parts])
    x = torch.ones(3, 2, requires_grad=True)

    @gather_input_tensor
    def total(rows, *, weight, name):
        assert (len(rows), len(weight), name) == (6, 6, "kept")
        return (rows * weight).sum()

    total(x, weight=torch.ones(3, 1), name="kept").backward()
    assert torch.equal(x.grad, torch.ones(3, 2))


@pytest.mark.parametrize("models", [None, [None], [nn.Linear(2, 2), "bert"], nn.Linear(2, 2), nn.Sequential()])
def test_models_that_are_no_list_of_modules_are_refused_at_once(models):
    with pytest.raises(DtypeError, match="a list of modules, one for each input"):
        GradCache(models, 2, lambda x: x.sum())


def test_a_loss_that_is_no_function_is_refused_at_once():
    with pytest.raises(DtypeError, match="loss_fn is a function"):
        GradCache(nn.ModuleList([nn.Linear(2, 2)]), 2, None)


def test_an_input_that_learns_before_a_frozen_model():
    """Such as a soft prompt: its gradient goes through the frozen model."""
    frozen, trained = nn.Linear(4, 3).requires_grad_(False), nn.Linear(4, 3)
    x, y = torch.randn(6, 4, requires_grad=True), torch.randn(6, 4)
    GradCache([frozen, trained], 2, lambda a, b: (a * b).sum())(x, y)
    (want,) = torch.autograd.grad((frozen(x) * trained(y)).sum(), x)
    assert_close(x.grad, want, 1e-6)


def test_keywords_of_the_loss_may_have_any_name():
    model, x = nn.Linear(4, 3), torch.randn(6, 4)
    got = GradCache([model], 2, lambda z, backward_scale, scaler: backward_scale * z.sum() + scaler)(
        x, backward_scale=3.0, scaler=1.0
    )
    assert_close(got, 3.0 * model(x).sum() + 1.0, 1e-6)
    assert_close(model.weight.grad, torch.autograd.grad(3.0 * model(x).sum(), model.weight)[0], 1e-6)


def test_one_of_several_representations_may_be_constant():
    learned, constant, x = nn.Linear(4, 3), nn.Linear(4, 3).requires_grad_(False), torch.randn(6, 4)
    first, second, push = cached(lambda a: (learned(a), constant(a)))(x)
    (first * second).sum().backward()
    with pytest.raises(GradientError, match="2 representations, got 1"):
        push(first)
    push((first, second))
    (want,) = torch.autograd.grad((learned(x) * constant(x)).sum(), learned.weight)
    assert_close(learned.weight.grad, want, 1e-6)


def test_weights_that_change_before_the_push_are_refused():
    model, x = nn.Linear(4, 3), torch.randn(6, 4)
    rows, push = cached(model)(x)
    rows.square().sum().backward()
    with torch.no_grad():
        model.weight.mul_(2.0)
    with pytest.raises(GradientError, match="'weight' of Linear was changed in place"):
        push(rows)
