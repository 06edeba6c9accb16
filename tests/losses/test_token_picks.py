"""Log-probabilities of given classes of each token, and a temperature of each token, against dense logits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.compare import assert_close, assert_no_worse
from tests.losses.test_token_stats import SMOOTH, leaves, ours, solved, tokens
from tests.ring.virtual import run_virtual
from torch import Tensor

import tilewise as tw
from tilewise.errors import ConfigError, DtypeError, GradientError, GroupError, RangeError, ShapeError

pytestmark = pytest.mark.usefixtures("nan_filled_empty", "small_tiles")
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "capped": {"bias": True, "softcap": 5.0},
    "shifted": {"shift": 1, "bias": True},
    "hot": {"bias": True, "temperature": 1.7},
    "a temperature each": {"each": True},
    "a temperature each, capped and shifted": {"each": True, "bias": True, "softcap": 4.0, "shift": 2},
}
FIELDS = (*SMOOTH, "picked")


def picks(x: Any, count: int = 5) -> Tensor:
    """Classes of each token; some twice, some equal to the target. Those of ignored tokens are anything."""
    random = torch.Generator().manual_seed(5)
    ids = torch.randint(x.head.shape[0], (*x.target.shape, count), generator=random)
    ids[..., 3] = torch.where(x.target % 2 == 0, ids[..., 0], ids[..., 3])
    ids[..., 1] = torch.where(x.target % 3 == 0, x.target, ids[..., 1])
    return torch.where((x.target == -100)[..., None], torch.randint(-9, 10**6, ids.shape, generator=random), ids)


def temperatures(x: Any) -> Tensor:
    random = torch.Generator().manual_seed(6)
    each = torch.exp2(4.0 * torch.rand(x.target.shape, generator=random, dtype=torch.float64) - 2.0)
    return torch.where(x.target == -100, 0.0, each).to(x.scale.dtype)


def dense(x: Any, ids: Tensor, bias: bool = False, softcap: float | None = None, shift: int = 0, **how: Any) -> Any:
    """All fields with a gradient. ``temperature``: a number, or one for each token."""
    hidden, target, ids = x.hidden[..., : x.hidden.shape[-2] - shift, :], x.target[..., shift:], ids[..., shift:, :]
    valid, temperature = target != -100, how.get("temperature", 1.0)
    if isinstance(temperature, Tensor):
        temperature = torch.where(valid, temperature[..., shift:], 1.0)[..., None].to(hidden.dtype)
    logits = x.scale.to(hidden.dtype) * hidden @ x.head.T + (x.bias if bias else 0.0)
    logits = (softcap * torch.tanh(logits / softcap) if softcap else logits) / temperature
    log_p = logits.log_softmax(-1)
    found = {
        "log_prob": log_p.gather(-1, target.clamp(min=0)[..., None])[..., 0],
        "entropy": -(log_p.exp() * log_p).sum(-1),
        "logsumexp": logits.logsumexp(-1),
        "log_sum_sq_prob": (2.0 * log_p).logsumexp(-1),
        "mean_logit": logits.mean(-1),
        "picked": log_p.gather(-1, ids.clamp(0, x.head.shape[0] - 1)),
    }
    return SimpleNamespace(
        **{name: torch.where(valid.view(*valid.shape, *[1] * (v.dim() - 2)), v, 0.0) for name, v in found.items()}
    )


def both(x: Any, how: dict[str, Any]) -> tuple[Any, Any]:
    how = dict(how)
    if how.pop("each", False):
        how["temperature"] = temperatures(x)
    return ours(x, pick=picks(x), **how), dense(x, picks(x), **how)


@pytest.mark.parametrize("setting", SETTINGS)
def test_float64(setting):
    x, how = tokens(), SETTINGS[setting]
    got, want = both(x, how)
    for name in FIELDS:
        assert_close(getattr(got, name), getattr(want, name), 1e-12, name)
    inputs = leaves(x, how.get("bias", False))
    for fields in (FIELDS, ("picked",), ("log_prob", "picked")):
        for one, other in zip(solved(got, inputs, fields), solved(want, inputs, fields), strict=True):
            assert_close(one, other, 1e-12)
        got, want = both(x, how)


def test_pick_gives_picked_whether_want_names_it_or_not():
    x = tokens()
    ids = picks(x)
    every = ours(x, pick=ids)
    for want in ("picked", ("picked",), ("entropy", "picked"), ("entropy",), ()):
        stats = ours(x, pick=ids, want=want)
        assert_close(stats.picked, every.picked, 1e-13)
        assert (stats.entropy is not None) == ("entropy" in want)
        assert stats.log_prob is None
    with pytest.raises(ConfigError, match=r"no pick was passed\. Pass pick, \(\.\.\., K\) class ids, or remove"):
        ours(x, want=("picked",))
    with pytest.raises(ConfigError, match=r"use picked\[valid\]\.mean\(0\)"):
        every.mean("picked")


@pytest.mark.parametrize("target", [True, False], ids=["target", "none"])
def test_gradcheck(target):
    x = tokens(n=10, classes=7, d=3)
    ids, each = picks(x, 4), temperatures(x)
    if not target:
        x.target, ids, each = None, ids.clamp(0, 6), each.clamp(min=0.5)

    def picked(hidden: Tensor, head: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
        y = SimpleNamespace(hidden=hidden, head=head, scale=scale, bias=bias, target=x.target)
        return ours(y, bias=True, softcap=3.0, want=(), pick=ids, temperature=each).picked

    assert torch.autograd.gradcheck(picked, leaves(x, True), eps=1e-6, atol=1e-8, rtol=1e-6, fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("setting", ["plain", "a temperature each"])
def test_low_precision_is_no_worse_than_dense(setting, dtype):
    x = tokens(dtype)
    exact = SimpleNamespace(
        **{key: value.detach().double().requires_grad_() for key, value in vars(x).items() if key != "target"},
        target=x.target,
    )
    (got, yardstick), (_, want) = both(x, SETTINGS[setting]), both(exact, SETTINGS[setting])
    for name in FIELDS:
        assert getattr(got, name).dtype == torch.float32
        assert_no_worse(getattr(got, name), getattr(yardstick, name), getattr(want, name), name)
    found = [solved(s, leaves(y, False), FIELDS) for s, y in ((got, x), (yardstick, x), (want, exact))]
    for mine, theirs, right in zip(*found, strict=True):
        assert_no_worse(mine, theirs, right)


def test_the_target_picked_is_its_log_probability_bit_for_bit():
    x = tokens(torch.float32)
    stats = ours(x, pick=x.target[..., None])
    assert torch.equal(stats.picked[..., 0], stats.log_prob)


def test_all_classes_picked_are_probabilities():
    x = tokens(n=10, classes=9)
    every = torch.arange(9).expand(*x.target.shape, 9)
    stats = ours(x, pick=every, want=("entropy",))
    p = stats.picked.exp()
    assert_close(p.sum(-1)[stats.valid], torch.ones(int(stats.valid.sum()), dtype=p.dtype), 1e-14)
    assert_close(-(p * stats.picked).sum(-1), stats.entropy, 1e-13)


def test_one_temperature_is_the_same_for_all():
    x = tokens()
    got, want = (ours(x, softcap=4.0, bias=True, temperature=t) for t in (torch.tensor(1.7, dtype=torch.float64), 1.7))
    for name in SMOOTH:
        assert_close(getattr(got, name), getattr(want, name), 1e-13, name)


def test_torch_compile_makes_one_graph():
    torch._dynamo.reset()
    x = tokens(torch.float32)
    ids, each = picks(x), temperatures(x)

    def loss(hidden: Tensor, head: Tensor) -> Tensor:
        stats = tw.linear_token_stats(hidden, head, x.target, pick=ids, temperature=each)
        return (stats.log_prob + stats.picked.square().sum(-1)).sum()

    want, got = loss(x.hidden, x.head), torch.compile(loss, fullgraph=True, backend="aot_eager")(x.hidden, x.head)
    assert_close(got, want, 1e-6)
    for one, other in zip(*(torch.autograd.grad(y, [x.hidden, x.head]) for y in (got, want)), strict=True):
        assert_close(one, other, 1e-5)


@pytest.mark.parametrize("slices", [[100, 71], [60, 0, 111]], ids=str)
@pytest.mark.parametrize("targets", [True, False], ids=["targets", "without"])
def test_over_slices_of_the_vocabulary(slices, targets):
    """Ids are global. Every rank has all log-probabilities, and its slice of the classifier's gradient."""
    x = tokens()
    ids, each = picks(x), temperatures(x)
    if not targets:
        x.target, ids, each = None, ids.clamp(0, 170), each.clamp(min=0.5)
    names = ("entropy", "picked")

    def work(group: Any) -> tuple[Any, list[Tensor]]:
        own = slice(sum(slices[: group.rank()]), sum(slices[: group.rank() + 1]))
        parts = {key: getattr(x, key).detach().clone().requires_grad_() for key in ("hidden", "scale")}
        parts |= {key: getattr(x, key).detach()[own].clone().requires_grad_() for key in ("head", "bias")}
        mine = SimpleNamespace(**parts, target=x.target)
        stats = ours(mine, bias=True, softcap=5.0, pick=ids, temperature=each, group=group)
        return stats.picked, solved(stats, leaves(mine, True), names)

    whole = ours(x, bias=True, softcap=5.0, pick=ids, temperature=each)
    hidden, head, scale, bias = solved(whole, leaves(x, True), names)
    ranks = run_virtual(len(slices), work, timeout_s=300)
    for picked, grads in ranks:
        assert_close(picked, whole.picked.detach(), 1e-12)
        assert_close(grads[0], hidden, 1e-12)
        assert_close(grads[2], scale, 1e-12)
    assert_close(torch.cat([grads[1] for _, grads in ranks]), head, 1e-12)
    assert_close(torch.cat([grads[3] for _, grads in ranks]), bias, 1e-12)


@pytest.mark.parametrize("how", ["other ids", "fewer ids", "other temperatures"])
def test_ranks_that_disagree_raise(how):
    x = tokens()
    ids, each = picks(x).clamp(0, 170), temperatures(x).clamp(min=0.5)

    def work(group: Any) -> None:
        mine, hot = ids, each
        if group.rank() == 1:
            mine = {"other ids": (ids + 1) % 171, "fewer ids": ids[..., :3]}.get(how, ids)
            hot = 2.0 * each if how == "other temperatures" else each
        ours(x, pick=mine, temperature=hot, group=group)

    with pytest.raises(GroupError, match={"fewer ids": "pick", "other ids": "picked ids"}.get(how, "temperature")):
        run_virtual(2, work, timeout_s=300)


def test_explain_and_meta_know_the_sizes():
    x = tokens(torch.float32)
    found = tw.explain(tw.linear_token_stats, x.hidden, x.head, x.target, pick=picks(x), temperature=temperatures(x))
    assert [call.strategy for call in found.calls] == ["two_pass"]
    meta = {key: getattr(x, key).to("meta") for key in ("hidden", "head", "target")}
    stats = tw.linear_token_stats(*meta.values(), pick=picks(x).to("meta"), temperature=temperatures(x).to("meta"))
    assert stats.picked.shape == (12, 5, 5)


@pytest.mark.parametrize("change, error, message", [
    (lambda ids: {"pick": ids[..., 0]}, ShapeError, r"pick has K class ids.*\(12, 5, K\), got \(12, 5\)"),
    (lambda ids: {"pick": ids[..., :0]}, ShapeError, "at least one class id"),
    (lambda ids: {"pick": ids.float()}, DtypeError, r"pick holds integers, got torch.float32"),
    (lambda ids: {"pick": ids.tolist()}, DtypeError, "pick is a tensor of class ids, got list"),
    (lambda ids: {"pick": ids.masked_fill(ids == ids.max(), 171)}, RangeError, r"in \[0, 171\), got 171 \(\d+ out"),
    (lambda ids: {"pick": ids - 200}, RangeError, r"in \[0, 171\), got -"),
    (lambda ids: {"temperature": torch.ones(12, 5).requires_grad_()}, GradientError, r"temperature.detach\(\)"),
    (lambda ids: {"temperature": torch.ones(12)}, ShapeError, r"one number for each.*\(12, 5\), got \(12,\)"),
    (lambda ids: {"temperature": torch.zeros(12, 5)}, RangeError, r"positive and finite, got 0.0 \(40 of 60 tokens\)"),
    (lambda ids: {"temperature": torch.ones(12, 5).long()}, DtypeError, "temperature"),
])  # fmt: skip
def test_errors_say_what_to_do(change, error, message):
    x = tokens()
    ids = torch.where((x.target == -100)[..., None], 0, picks(x))
    with pytest.raises(error, match=message):
        ours(x, **change(ids))
