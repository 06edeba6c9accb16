"""Distillation from K stored log-probabilities of each token: divergences, tails, padding, groups, errors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.compare import assert_close
from tests.oracles import sparse_distillation_dense
from tests.ring.virtual import run_virtual
from torch import Tensor

import tilewise as tw
from tilewise.errors import ConfigError, DtypeError, GradientError, GroupError, RangeError, ShapeError

pytestmark = pytest.mark.usefixtures("nan_filled_empty", "small_tiles")
DIVERGENCES = ("forward", "reverse", "cross_entropy", "total_variation", "log_acceptance")
TAILS = ("ignore", "renormalize", "bucket")
CLASSES = 43


def problem(dtype: torch.dtype = torch.float64, seed: int = 0, d: int = 8, classes: int = CLASSES) -> Any:
    """Four sequences of seven tokens. Ids are distinct; some are padding, and one token has none."""
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64).to(dtype).requires_grad_()

    ids = torch.stack([torch.randperm(classes, generator=random)[:5] for _ in range(28)]).reshape(4, 7, 5)
    t = torch.randn(4, 7, 8, generator=random, dtype=torch.float64).log_softmax(-1)[..., :5]
    ids[0, :, 1:], ids[1, 3], ids[2, ::2, 0] = -1, -100, -1
    mask = torch.rand(4, 7, generator=random) > 0.2
    each = 0.5 + torch.rand(4, 7, generator=random, dtype=torch.float64)
    leaves = {"hidden": normal(4, 7, d), "head": normal(classes, d), "bias": normal(classes)}
    return SimpleNamespace(**leaves, scale=torch.tensor(0.8, dtype=torch.float64, requires_grad=True), ids=ids, t=t,
                           mask=mask, each=each)  # fmt: skip


def leaves(x: Any) -> list[Tensor]:
    return [x.hidden, x.head, x.scale, x.bias]


def ours(x: Any, **how: Any) -> Tensor:
    return tw.linear_sparse_distillation_loss(
        x.hidden, x.head, x.ids, x.t, linear_bias=x.bias, logit_scale=x.scale, **how
    )


def dense(x: Any, **how: Any) -> Tensor:
    return sparse_distillation_dense(x.hidden, x.head, x.ids, x.t, bias=x.bias, scale=x.scale, **how)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("how", ["plain", "masked, capped and hot", "shifted", "a temperature each"])
@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_float64(divergence, tail, how, reduction):
    x = problem()
    more: dict[str, Any] = {
        "plain": {},
        "masked, capped and hot": {"mask": x.mask, "softcap": 3.0, "temperature": 1.7},
        "shifted": {"mask": x.mask, "shift": 2},
        "a temperature each": {"temperature": x.each, "softcap": 5.0, "shift": 1},
    }[how]
    got, want = (f(x, divergence=divergence, tail=tail, reduction=reduction, **more) for f in (ours, dense))
    assert_close(got, want, 1e-12)
    upstream = torch.randn(want.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    grads = (torch.autograd.grad(loss, leaves(x), upstream) for loss in (got, want))
    for one, other in zip(*grads, strict=True):
        assert_close(one, other, 1e-11)


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_gradcheck(divergence, tail):
    x = problem(d=3, classes=9)

    def loss(hidden: Tensor, head: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
        y = SimpleNamespace(hidden=hidden, head=head, scale=scale, bias=bias, ids=x.ids, t=x.t)
        return ours(y, divergence=divergence, tail=tail, mask=x.mask, reduction="none")

    assert torch.autograd.gradcheck(loss, leaves(x), eps=1e-6, atol=1e-8, rtol=1e-6, fast_mode=True)


@pytest.mark.parametrize("temperature", [0.1, 1.0, 10.0])
@pytest.mark.parametrize("divergence", ["forward", "reverse"])
def test_a_teacher_equal_to_the_student_gives_nothing(divergence, temperature):
    """The largest five classes of the student itself: zero divergence and zero gradient, with the tail in a bucket."""
    x = problem()
    with torch.no_grad():
        logits = (x.scale * x.hidden @ x.head.T + x.bias) / temperature
        x.t, x.ids = logits.log_softmax(-1).topk(5)
    loss = ours(x, divergence=divergence, tail="bucket", temperature=temperature)
    assert loss.abs() < 1e-10
    assert max(grad.abs().max() for grad in torch.autograd.grad(loss, leaves(x))) < 1e-9


def test_all_classes_are_a_dense_divergence():
    x = problem(classes=9)
    t = torch.randn(4, 7, 9, generator=torch.Generator().manual_seed(1), dtype=torch.float64).log_softmax(-1)
    x.ids, x.t = torch.arange(9).expand(4, 7, 9), t
    s = (x.scale * x.hidden @ x.head.T + x.bias).log_softmax(-1)
    for tail in ("ignore", "renormalize"):
        want = torch.nn.functional.kl_div(s, t, log_target=True, reduction="none").sum(-1)
        assert_close(ours(x, tail=tail, reduction="none"), want, 1e-12)
        want = torch.nn.functional.kl_div(t, s, log_target=True, reduction="none").sum(-1)
        assert_close(ours(x, tail=tail, divergence="reverse", reduction="none"), want, 1e-12)


def test_the_acceptance_of_a_draft_model():
    """With all classes, the exact one; the acceptance of a few is between that of "ignore" and that of "bucket"."""
    x = problem(classes=9)
    t = torch.randn(4, 7, 9, generator=torch.Generator().manual_seed(1), dtype=torch.float64).log_softmax(-1)
    s = (x.scale * x.hidden @ x.head.T + x.bias).log_softmax(-1)
    variation = (s.exp() - t.exp()).abs().sum(-1) / 2
    x.ids, x.t = torch.arange(9).expand(4, 7, 9), t
    assert_close(ours(x, divergence="total_variation", reduction="none"), variation, 1e-12)
    x.t, x.ids = t.topk(4)
    most, least = (ours(x, divergence="total_variation", tail=tail, reduction="none") for tail in ("ignore", "bucket"))
    assert (least <= variation + 1e-12).all()
    assert (most >= variation - 1e-12).all()
    assert (most - least).max() > 0.05
    cut = t.masked_fill(t < x.t[..., 3:], -torch.inf).log_softmax(-1)  # the target model samples from its 4 best
    exact = (s.exp() - cut.exp()).abs().sum(-1) / 2
    assert_close(ours(x, divergence="total_variation", tail="renormalize", reduction="none"), exact, 1e-12)


def test_a_teacher_without_probability_is_never_accepted():
    x = problem(classes=9)
    x.ids, x.t = torch.tensor([[[2, 5]]]).expand(4, 7, 2), torch.full((4, 7, 2), -torch.inf)
    assert (ours(x, divergence="total_variation", reduction="none") == 1).all()
    assert (ours(x, divergence="log_acceptance", reduction="none") == torch.inf).all()
    grads = torch.autograd.grad(ours(x, divergence="total_variation"), leaves(x))
    assert all((grad == 0).all() for grad in grads)


def test_one_certain_class_is_cross_entropy():
    x = problem()
    target = torch.where(x.mask, x.ids.amax(-1), -100)
    x.ids, x.t = target[..., None], torch.zeros(4, 7, 1)
    want = tw.linear_cross_entropy(
        x.hidden, x.head, torch.where(target < 0, -100, target), linear_bias=x.bias, logit_scale=x.scale
    )
    for tail in ("ignore", "renormalize"):
        assert_close(ours(x, tail=tail, divergence="cross_entropy"), want, 1e-13)
        assert_close(ours(x, tail=tail, divergence="log_acceptance"), want, 1e-13)


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("sure", [1.0, 20.0, 90.0])
def test_the_rest_of_a_student_that_is_sure(divergence, sure):
    """Its other classes have a probability of exp(-20) or exp(-90): 1 less a sum would be 0 in float32."""
    x = problem(torch.float32)
    hidden, head = x.hidden.detach()[0], torch.cat([x.head, torch.zeros_like(x.head[:, :1])], 1).detach()
    ids, t = torch.tensor([[5, 2]]).expand(7, 2), torch.tensor([[0.5, 0.3]]).log().expand(7, 2)
    hidden = torch.cat([hidden, torch.ones(7, 1)], 1).requires_grad_()
    head[ids[0], -1] = sure
    kind = {"divergence": divergence, "tail": "bucket"}
    loss = tw.linear_sparse_distillation_loss(hidden, head, ids, t, **kind)
    exact = hidden.detach().double().requires_grad_()
    want = sparse_distillation_dense(exact, head.double(), ids, t.double(), **kind)
    assert_close(loss, want, 2e-6)
    assert_close(torch.autograd.grad(loss, hidden)[0], torch.autograd.grad(want, exact)[0], 5e-5)


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_ids_of_all_classes_leave_nothing_for_the_bucket(divergence):
    x = problem(classes=9)
    t = torch.randn(4, 7, 9, generator=torch.Generator().manual_seed(1), dtype=torch.float64).log_softmax(-1)
    x.ids, x.t = torch.arange(9).expand(4, 7, 9), t
    bucket, ignored = (ours(x, divergence=divergence, tail=tail) for tail in ("bucket", "ignore"))
    assert_close(bucket, ignored, 1e-12)
    for got, want in zip(*(torch.autograd.grad(loss, leaves(x)) for loss in (bucket, ignored)), strict=True):
        assert_close(got, want, 1e-11)


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_nan_is_seen(divergence, tail):
    """In the hidden states, and in a class outside of the ids."""
    x = problem()
    y = SimpleNamespace(**{**vars(x), "hidden": torch.full_like(x.hidden, torch.nan)})
    assert ours(y, divergence=divergence, tail=tail).isnan()
    x.head = x.head.detach().clone()
    x.head[(x.ids[0, 0].max() + 1) % x.head.shape[0]] = torch.nan
    assert ours(x, divergence=divergence, tail=tail).isnan()


def test_probabilities_of_zero():
    """A class that the teacher rules out adds nothing to "forward"; one that a bias rules out is infinite."""
    x = problem()
    x.t = x.t.clone()
    x.t[..., 0] = -torch.inf
    for tail in TAILS:
        got = ours(x, tail=tail, reduction="none")
        if tail != "bucket":  # to which the class would belong
            y, some = SimpleNamespace(**{**vars(x), "ids": x.ids.clone()}), (x.ids[..., 1:] >= 0).any(-1)
            y.ids[..., 0] = torch.where(some, -1, y.ids[..., 0])
            assert_close(got[some], ours(y, tail=tail, reduction="none")[some], 1e-12, tail)
        assert got.isfinite().all()
        assert all(grad.isfinite().all() for grad in torch.autograd.grad(got.sum(), leaves(x)))
    x = problem()
    x.bias = x.bias.detach().clone().index_fill_(0, x.ids[3, 0, :1], -torch.inf)
    loss = ours(x, divergence="reverse", tail="bucket", reduction="none")
    assert loss.isfinite().all()
    assert torch.autograd.grad(loss.sum(), x.hidden)[0].isfinite().all()
    assert ours(x, reduction="none")[3, 0] == torch.inf


def test_padding_and_masked_tokens_reach_nothing():
    x = problem(torch.float32)
    y = SimpleNamespace(**vars(x))
    y.t = torch.where((x.ids >= 0) & x.mask[..., None], x.t, torch.nan)
    y.ids = torch.where(x.mask[..., None], x.ids, 10**9)
    for divergence in DIVERGENCES:
        one, other = (ours(z, divergence=divergence, tail="bucket", mask=x.mask) for z in (x, y))
        assert torch.equal(one, other)
        for a, b in zip(torch.autograd.grad(one, leaves(x)), torch.autograd.grad(other, leaves(x)), strict=True):
            assert torch.equal(a, b)


def test_nothing_counts():
    x = problem()
    none = torch.zeros(4, 7, dtype=torch.bool)
    assert ours(x, mask=none).isnan()
    loss = ours(x, mask=none, reduction="sum", tail="bucket")
    assert loss == 0
    assert not any(grad.any() for grad in torch.autograd.grad(loss, leaves(x)))


def test_torch_compile_makes_one_graph():
    torch._dynamo.reset()
    x = problem(torch.float32)

    def loss(hidden: Tensor, head: Tensor) -> Tensor:
        how = {"tail": "bucket", "temperature": x.each, "mask": x.mask}
        return tw.linear_sparse_distillation_loss(hidden, head, x.ids, x.t, **how)

    want, got = loss(x.hidden, x.head), torch.compile(loss, fullgraph=True, backend="aot_eager")(x.hidden, x.head)
    assert_close(got, want, 1e-6)
    for one, other in zip(*(torch.autograd.grad(y, [x.hidden, x.head]) for y in (got, want)), strict=True):
        assert_close(one, other, 1e-5)


@pytest.mark.parametrize("slices", [[20, 23], [13, 0, 30], [10, 11, 12, 10]], ids=str)
def test_over_slices_of_the_vocabulary(slices):
    x = problem()
    how = {"divergence": "reverse", "tail": "bucket", "temperature": x.each, "softcap": 6.0}

    def work(group: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
        own = slice(sum(slices[: group.rank()]), sum(slices[: group.rank() + 1]))
        parts = {key: getattr(x, key).detach().clone().requires_grad_() for key in ("hidden", "scale")}
        parts |= {key: getattr(x, key).detach()[own].clone().requires_grad_() for key in ("head", "bias")}
        mine = SimpleNamespace(**parts, ids=x.ids, t=x.t)
        loss = ours(mine, group=group, **how)
        return loss.detach(), torch.autograd.grad(loss, leaves(mine))

    want = dense(x, **how)
    hidden, head, scale, bias = torch.autograd.grad(want, leaves(x))
    ranks = run_virtual(len(slices), work, timeout_s=300)
    for loss, grads in ranks:
        assert_close(loss, want.detach(), 1e-12)
        assert_close(grads[0], hidden, 1e-11)
        assert_close(grads[2], scale, 1e-11)
    assert_close(torch.cat([grads[1] for _, grads in ranks]), head, 1e-11)
    assert_close(torch.cat([grads[3] for _, grads in ranks]), bias, 1e-11)


def test_ranks_that_disagree_raise():
    x = problem()
    with pytest.raises(GroupError, match=r"tail=ignore.*tail=bucket"):
        run_virtual(2, lambda group: ours(x, group=group, tail=("ignore", "bucket")[group.rank()]), timeout_s=300)


@pytest.mark.parametrize("change, error, message", [
    (lambda x: {"divergence": "kl"}, ConfigError, "no divergence 'kl'; choose one of forward, reverse, cross_entropy"),
    (lambda x: {"tail": None}, ConfigError, "no tail None; choose one of ignore, renormalize, bucket"),
    (lambda x: {"t": x.t[..., :3]}, ShapeError, r"one number for each id, got \(4, 7, 3\) numbers.*Pass K of both"),
    (lambda x: {"t": x.t[0]}, ShapeError, r"teacher_log_probs has K numbers for each hidden state, \(4, 7, K\)"),
    (lambda x: {"t": x.t.clone().requires_grad_()}, GradientError, r"Pass teacher_log_probs.detach\(\)"),
    (lambda x: {"t": x.t.exp()}, RangeError, r"natural logarithms.*got a sum of [1-9].*log_softmax"),
    (lambda x: {"t": torch.full_like(x.t, torch.nan)}, RangeError, "got a sum of nan"),
    (lambda x: {"t": x.ids}, DtypeError, "teacher_log_probs"),
    (lambda x: {"ids": x.ids.double()}, DtypeError, "teacher_ids holds integers"),
    (lambda x: {"ids": x.ids + CLASSES}, RangeError, r"teacher_ids holds class ids in \[0, 43\), got"),
    (lambda x: {"mask": x.mask.long()}, DtypeError, r"mask is a bool tensor.*\.bool\(\)"),
    (lambda x: {"mask": x.mask[0]}, ShapeError, r"mask has one entry for each hidden state, \(4, 7\), got \(7,\)"),
])  # fmt: skip
def test_errors_say_what_to_do(change, error, message):
    x = problem()
    given = change(x)
    for name in ("t", "ids"):
        setattr(x, name, given.pop(name, getattr(x, name)))
    with pytest.raises(error, match=message):
        ours(x, **given)
