"""Log-probability, entropy, argmax and accuracy of tokens against dense logits; what is asked for, and over slices."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.compare import assert_close, assert_no_worse
from tests.ring.virtual import run_virtual
from torch import Tensor

import tilewise as tw
from tilewise.errors import ConfigError, RangeError
from tilewise.kernels.torch_impl.backend import TorchBackend
from tilewise.losses.token_stats import DEFAULT, NEED_TARGET, WANT

pytestmark = pytest.mark.usefixtures("nan_filled_empty", "small_tiles")
SMOOTH = ("log_prob", "entropy", "logsumexp", "log_sum_sq_prob", "mean_logit")
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias": {"bias": True},
    "capped": {"bias": True, "softcap": 5.0},
    "shifted": {"shift": 1},
    "hot": {"bias": True, "temperature": 1.7},
    "cold and capped": {"bias": True, "softcap": 5.0, "temperature": 0.6},
}


def tokens(dtype: torch.dtype = torch.float64, n: int = 60, classes: int = 171, d: int = 24, seed: int = 0) -> Any:
    """Hidden states (n / 5, 5, d), a classifier and targets, every third of them ignored."""
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64).to(dtype).requires_grad_()

    target = torch.randint(classes, (n // 5, 5), generator=random)
    target.view(-1)[::3] = -100
    stat = torch.float64 if dtype == torch.float64 else torch.float32
    scale = torch.tensor(0.6, dtype=stat, requires_grad=True)
    return SimpleNamespace(
        hidden=normal(n // 5, 5, d), head=normal(classes, d), bias=normal(classes), scale=scale, target=target
    )


def leaves(x: Any, bias: bool) -> list[Tensor]:
    return [x.hidden, x.head, x.scale, *([x.bias] if bias else [])]


def ours(x: Any, bias: bool = False, **settings: Any) -> tw.TokenStats:
    if "want" not in settings:
        settings["want"] = [name for name in WANT if x.target is not None or name not in NEED_TARGET]
    return tw.linear_token_stats(
        x.hidden, x.head, x.target, linear_bias=x.bias if bias else None, logit_scale=x.scale, **settings
    )


def dense(
    x: Any, bias: bool = False, softcap: float | None = None, shift: int = 0, temperature: float = 1.0
) -> tw.TokenStats:
    hidden, target = x.hidden[..., : x.hidden.shape[-2] - shift, :], x.target[..., shift:]
    logits = x.scale.to(hidden.dtype) * hidden @ x.head.T + (x.bias if bias else 0.0)
    logits = (softcap * torch.tanh(logits / softcap) if softcap else logits) / temperature
    log_p, valid = logits.log_softmax(-1), target != -100
    log_prob = log_p.gather(-1, target.clamp(min=0)[..., None])[..., 0]
    return tw.TokenStats(
        log_prob=torch.where(valid, log_prob, 0.0),
        entropy=torch.where(valid, -(log_p.exp() * log_p).sum(-1), 0.0),
        argmax=torch.where(valid, logits.argmax(-1), -1),
        correct=(logits.argmax(-1) == target) & valid,
        logsumexp=torch.where(valid, logits.logsumexp(-1), 0.0),
        log_sum_sq_prob=torch.where(valid, (2.0 * log_p).logsumexp(-1), 0.0),
        mean_logit=torch.where(valid, logits.mean(-1), 0.0),
        valid=valid,
    )


def solved(stats: tw.TokenStats, inputs: list[Tensor], names: tuple[str, ...] = SMOOTH) -> list[Tensor]:
    """Gradients of a mixture of the statistics."""
    random = torch.Generator().manual_seed(3)
    total = 0.0
    for name in names:
        value = getattr(stats, name)
        total = total + (value * torch.randn(value.shape, generator=random, dtype=torch.float64).to(value.dtype)).sum()
    return list(torch.autograd.grad(total, inputs))


@pytest.mark.parametrize("setting", SETTINGS)
def test_float64(setting):
    x, how = tokens(), SETTINGS[setting]
    got, want = ours(x, **how), dense(x, **how)
    for name in SMOOTH:
        assert_close(getattr(got, name), getattr(want, name), 1e-12, name)
    for name in ("argmax", "correct", "valid"):
        assert torch.equal(getattr(got, name), getattr(want, name)), name
    assert got.accuracy == want.correct.sum() / want.valid.sum()
    inputs = leaves(x, how.get("bias", False))
    for one, other in zip(solved(got, inputs), solved(want, inputs), strict=True):
        assert_close(one, other, 1e-12)


@pytest.mark.parametrize(
    "names", [("entropy",), ("log_prob", "entropy"), ("log_sum_sq_prob", "mean_logit")], ids="+".join
)
def test_gradcheck(names):
    x = tokens(n=10, classes=7, d=3)

    def total(hidden: Tensor, head: Tensor, scale: Tensor, bias: Tensor) -> list[Tensor]:
        y = SimpleNamespace(hidden=hidden, head=head, scale=scale, bias=bias, target=x.target)
        stats = ours(y, bias=True, softcap=3.0, want=names)
        return [getattr(stats, name) for name in names]

    assert torch.autograd.gradcheck(total, leaves(x, True), eps=1e-6, atol=1e-8, rtol=1e-6, fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
def test_low_precision_is_no_worse_than_dense(dtype):
    x = tokens(dtype)
    exact = SimpleNamespace(
        **{key: value.detach().double().requires_grad_() for key, value in vars(x).items() if key != "target"},
        target=x.target,
    )
    got, want, yardstick = ours(x), dense(exact), dense(x)
    for name in SMOOTH:
        assert getattr(got, name).dtype == torch.float32
        assert_no_worse(getattr(got, name), getattr(yardstick, name), getattr(want, name), name)
    found = (solved(got, leaves(x, False)), solved(yardstick, leaves(x, False)), solved(want, leaves(exact, False)))
    for ours_, theirs, right in zip(*found, strict=True):
        assert_no_worse(ours_, theirs, right)


def test_one_pass_gives_the_loss_too():
    x = tokens()
    stats = ours(x, want=("log_prob", "entropy"))
    loss = -stats.log_prob.sum() / stats.valid.sum()
    want = tw.linear_cross_entropy(x.hidden, x.head, x.target, logit_scale=x.scale)
    assert_close(loss, want, 1e-14)
    for one, other in zip(
        torch.autograd.grad(loss, [x.hidden, x.head]), torch.autograd.grad(want, [x.hidden, x.head]), strict=True
    ):
        assert_close(one, other, 1e-12)


def test_only_what_is_asked_for_is_computed(monkeypatch):
    seen, plain = [], TorchBackend.forward

    def spy(self: Any, pair: Any, spec: Any, options: Any) -> Any:
        seen.append((spec.row_entropy, spec.row_top, spec.positive))
        return plain(self, pair, spec, options)

    monkeypatch.setattr(TorchBackend, "forward", spy)
    x = tokens()
    for want in ("log_prob", ["entropy"], ("argmax",), ("correct", "entropy")):
        stats = ours(x, want=want)
        asked = {want} if isinstance(want, str) else set(want)
        assert {name for name in WANT if getattr(stats, name) is not None} == asked
    assert seen == [(False, False, "one"), (True, False, "none"), (False, True, "none"), (True, True, "none")]


def test_without_targets_every_token_counts():
    x = tokens()
    stats = tw.linear_token_stats(x.hidden, x.head)
    log_p = (x.hidden @ x.head.T).log_softmax(-1)
    assert_close(stats.entropy, -(log_p.exp() * log_p).sum(-1), 1e-12)
    assert torch.equal(stats.argmax, log_p.argmax(-1))
    assert stats.log_prob is stats.correct is stats.valid is None
    assert not stats.argmax.requires_grad


@pytest.mark.parametrize("columns", [(3,), (40, 7), (90, 60, 20)], ids=str)
def test_a_class_of_nan_is_the_argmax_as_in_torch(columns):
    g = torch.Generator().manual_seed(0)
    hidden, classifier = torch.randn(9, 16, generator=g), torch.randn(100, 16, generator=g)
    classifier[list(columns), 2] = torch.nan
    stats = tw.linear_token_stats(hidden, classifier, torch.full((9,), min(columns)))
    assert torch.equal(stats.argmax, (hidden @ classifier.T).argmax(1))
    assert (stats.argmax == min(columns)).all()
    assert stats.correct.all()


def test_equal_logits_have_the_lowest_class_as_argmax():
    hidden = torch.ones(3, 2, dtype=torch.float64)
    stats = tw.linear_token_stats(hidden, torch.ones(301, 2, dtype=torch.float64), torch.tensor([0, 5, 300]))
    assert stats.argmax.tolist() == [0, 0, 0]
    assert stats.correct.tolist() == [True, False, False]
    assert_close(stats.entropy, torch.full((3,), 301.0, dtype=torch.float64).log(), 1e-14)


def test_a_certain_token_has_an_entropy_of_its_own_size():
    """Logits near 500 in float32 are known to 3e-5: a difference of lse and mean would be no better."""
    hidden, head = torch.tensor([[1.0, 0.0]]), torch.tensor([[500.0, 0.0], [490.0, 0.0]])
    got = tw.linear_token_stats(hidden, head, want=("entropy",)).entropy
    p = torch.tensor([-10.0], dtype=torch.float64).sigmoid()
    want = -(p * p.log()) - (1 - p) * torch.log1p(-p)
    assert 4e-4 < want < 6e-4
    assert (got - want).abs() < 2e-7


def test_nothing_counts():
    x = tokens(torch.float32)
    x.target = torch.full_like(x.target, -100)
    stats = ours(x)
    assert stats.accuracy.isnan()
    assert stats.argmax.eq(-1).all()
    assert not any(getattr(stats, name).any() for name in (*SMOOTH, "correct", "valid"))
    assert not any(grad.any() for grad in solved(stats, [x.hidden, x.head]))


def test_empty():
    stats = tw.linear_token_stats(torch.zeros(0, 4), torch.zeros(9, 4), torch.zeros(0, dtype=torch.long))
    assert all(getattr(stats, name).shape == (0,) for name in DEFAULT)


def test_means_leave_out_ignored_tokens():
    x = tokens()
    stats, valid = ours(x), x.target != -100
    for name in (*SMOOTH, "correct"):
        values, digits = getattr(stats, name).double(), 1e-7 if name == "correct" else 1e-14
        assert_close(stats.mean(name), values[valid].mean(), digits, name)
        rows = torch.stack([values[i][valid[i]].mean() for i in range(len(valid))])
        assert_close(stats.mean(name, dim=-1), rows, digits, name)
    assert_close(stats.mean("correct"), stats.accuracy, 0.0)
    assert torch.equal(stats.top1, stats.correct)
    every = tw.linear_token_stats(x.hidden, x.head)
    assert_close(every.mean("entropy"), every.entropy.mean(), 1e-14)
    with pytest.raises(ConfigError, match=r"mean of 'mean_logit' is not available.*Computed were: entropy"):
        every.mean("mean_logit")


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan")])
def test_temperature_is_positive(temperature):
    with pytest.raises(RangeError, match="temperature"):
        ours(tokens(), temperature=temperature)


@pytest.mark.parametrize("call, message", [
    (lambda x: ours(x, want=("entropy", "rank")), r"want is a sequence of names.*log_prob, entropy.*got 'rank'"),
    (lambda x: tw.linear_token_stats(x.hidden, x.head, want="log_prob"), r"log_prob needs a target.*Pass target"),
    (lambda x: ours(x, want=("entropy",)).accuracy, r'accuracy requires "correct".*want=\("correct",\)'),
])  # fmt: skip
def test_errors_say_what_to_do(call, message):
    with pytest.raises(ConfigError, match=message):
        call(tokens())


def test_torch_compile_makes_one_graph():
    torch._dynamo.reset()
    x = tokens(torch.float32)

    def bonus(hidden: Tensor, head: Tensor) -> tuple[Tensor, Tensor]:
        stats = tw.linear_token_stats(hidden, head, x.target)
        return (stats.log_prob + 0.1 * stats.entropy).sum(), stats.accuracy

    compiled = torch.compile(bonus, fullgraph=True, backend="aot_eager")
    (want, right), (got, share) = bonus(x.hidden, x.head), compiled(x.hidden, x.head)
    assert_close(got, want, 1e-6)
    assert share == right
    for one, other in zip(*(torch.autograd.grad(y, [x.hidden, x.head]) for y in (got, want)), strict=True):
        assert_close(one, other, 1e-5)


@pytest.mark.parametrize("slices", [[100, 71], [60, 0, 111]], ids=str)
@pytest.mark.parametrize("targets", [True, False], ids=["targets", "without"])
def test_over_slices_of_the_vocabulary(slices, targets):
    """Every rank has the statistics and the gradient of the hidden states, and its slice of the classifier's."""
    x = tokens()
    if not targets:
        x.target = None
    names = SMOOTH if targets else SMOOTH[1:]

    def work(group: Any) -> tuple[tw.TokenStats, list[Tensor]]:
        rank = group.rank()
        own = slice(sum(slices[:rank]), sum(slices[: rank + 1]))
        parts = {key: getattr(x, key).detach().clone().requires_grad_() for key in ("hidden", "scale")}
        parts |= {key: getattr(x, key).detach()[own].clone().requires_grad_() for key in ("head", "bias")}
        mine = SimpleNamespace(**parts, target=x.target)
        stats = ours(mine, bias=True, group=group)
        return stats, solved(stats, leaves(mine, True), names)

    whole = ours(x, bias=True)
    hidden, head, scale, bias = solved(whole, leaves(x, True), names)
    ranks = run_virtual(len(slices), work, timeout_s=300)
    for stats, grads in ranks:
        for field in dataclasses.fields(stats):
            got, want = getattr(stats, field.name), getattr(whole, field.name)
            assert (got is None) == (want is None)
            if want is not None:
                assert_close(got.double(), want.detach().double(), 1e-12, field.name)
        assert_close(grads[0], hidden, 1e-12)
        assert_close(grads[2], scale, 1e-12)
    assert_close(torch.cat([grads[1] for _, grads in ranks]), head, 1e-12)
    assert_close(torch.cat([grads[3] for _, grads in ranks]), bias, 1e-12)
