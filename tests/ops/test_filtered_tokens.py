"""The filter for statistics of tokens: the bound with a gradient of each row for log-probability and entropy.

With the identity as classifier the scores are the hidden states, and the gradient of the hidden states is G itself.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from tests.compare import assert_close
from tests.ops.filtered_cases import COLS, SCORES, Head, dropped_mass, random, tiles_of, worst
from torch.utils.checkpoint import checkpoint

import tilewise as tw
from tilewise.options import TileOptions

pytestmark = pytest.mark.usefixtures("filter_on_cpu")
FIELDS = ("log_prob", "entropy", "argmax", "correct", "logsumexp")


def dense_g(scores, target, advantage, bonus):
    """G of sum_i advantage_i log_prob_i + bonus_i entropy_i, the entropy of each pair, and v."""
    log_p = scores.double().log_softmax(1)
    pieces = -(log_p.exp() * log_p.clamp(min=-1e6))
    entropy = pieces.sum(1, keepdim=True)
    g = advantage[:, None] * (F.one_hot(target, COLS) - log_p.exp())
    g = g + bonus[:, None] * (pieces - log_p.exp() * entropy)
    return g, pieces, -advantage - bonus * entropy.squeeze(1)


@pytest.mark.usefixtures("never_dense", "nan_filled_empty")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("tolerance", [1e-3, 1e-2, 0.3])
@pytest.mark.parametrize("name", SCORES)
def test_the_bound(name, tolerance, dtype):
    n = 40
    scores = SCORES[name](n).to(dtype).double()
    target = torch.randint(0, COLS, (n,), generator=torch.Generator().manual_seed(1))
    advantage, bonus = random(n, seed=2), random(n, seed=3)
    x = scores.to(dtype).requires_grad_()
    options = TileOptions(filter_tolerance=tolerance)
    with tw.record_filtering() as report:
        stats = tw.linear_token_stats(x, torch.eye(COLS, dtype=dtype), target, options=options)
    (stats.log_prob * advantage + stats.entropy * bonus).sum().backward()
    plan, (want, pieces, v) = report._plans[0][0], dense_g(scores, target, advantage, bonus)
    mass = dropped_mass(scores, plan)
    entropy = (tiles_of(pieces, plan).sum(2) * (plan.mass.T >= 0)).sum(1)
    digits = 2.0**-48 if dtype == torch.float64 else 2.0**-21
    rounding = digits * (8 + scores.abs().amax(1)) * (1 + v.abs() + bonus.abs() * (20 + scores.abs().amax(1)))
    assert mass.max() <= tolerance
    assert (entropy <= tolerance * math.log(COLS)).all()
    error = x.grad.double() - want
    assert (error.abs().sum(1) <= 2 * (v.abs() * mass + bonus.abs() * entropy) + rounding).all()
    assert (error.sum(1).abs() <= rounding).all()
    kept = tiles_of(torch.ones(n, COLS), plan).bool() & (plan.mass.T < 0)[:, :, None]
    assert kept[tiles_of(F.one_hot(target, COLS), plan).bool()].all()
    assert ((tiles_of(error, plan).abs() * kept).sum((1, 2)) <= rounding).all()
    assert report.tolerance == [tolerance]


UPSTREAM = random(60, seed=7), 0.5 * random(60, seed=8), 0.1 * random(60, seed=9)


class Tokens(Head):
    """A head of which the log-probability and the entropy of each token have gradients of their own."""

    def stats(self, options, leaves=None, target=None, want=FIELDS, **settings):
        x = leaves or self.leaves
        more = {"linear_bias": x["bias"], "logit_scale": x["scale"], "want": want, "options": options}
        return tw.linear_token_stats(
            x["input"], x["weight"], self.target if target is None else target, **more, **settings
        )

    def loss(self, tolerance=0.0, leaves=None, target=None, options=None, want=FIELDS, **settings):
        stats = self.stats(options or TileOptions(filter_tolerance=tolerance), leaves, target, want, **settings)
        terms = zip((stats.log_prob, stats.entropy, stats.logsumexp), UPSTREAM, strict=True)
        return sum((value * upstream).sum() for value, upstream in terms if value is not None)


SETTINGS = {
    "all": {},
    "log_prob": {"want": ("log_prob",)},
    "entropy": {"want": ("entropy",)},
    "logsumexp": {"want": ("logsumexp",)},
    "log_prob and entropy": {"want": ("log_prob", "entropy")},
    "soft cap": {"softcap": 20.0},
    "temperature": {"temperature": 1.3},
}


@pytest.mark.usefixtures("never_dense", "nan_filled_empty")
@pytest.mark.parametrize("name", SETTINGS)
def test_gradients_near_exact(name):
    """Of every argument; wider tolerances make larger errors."""
    head = Tokens()
    want = head.grads(0.0, **SETTINGS[name])
    errors = [worst(head.grads(t, **SETTINGS[name]), want) for t in (1e-12, 1e-3, 1e-2, 0.2)]
    assert errors[0] < 1e-9
    assert 0 < errors[1] < 2e-2
    assert errors[1] < errors[2] < 0.2  # of the entropy alone, the gradient of the scale has the largest
    assert errors[2] < errors[3]


@pytest.mark.usefixtures("never_dense", "nan_filled_empty")
@pytest.mark.parametrize("softcap", [None, 20.0])
def test_the_statistics_are_exact(softcap):
    head = Tokens()
    with torch.no_grad():
        head.leaves["input"][5], head.leaves["weight"][::9] = 0.0, head.leaves["weight"][3]  # ties
        head.leaves["bias"][::9] = head.leaves["bias"][3]
        head.leaves["bias"][::50] = -torch.inf
        head.leaves["input"][7, 2] = torch.nan
    target = head.target.clone()
    target[target % 50 == 0] += 1
    target[::6] = -100
    with tw.record_filtering() as report:
        got = head.stats(TileOptions(filter_tolerance=0.2), target=target, softcap=softcap)
    assert report.kept_share[0] < 0.9
    want = head.stats(TileOptions(), target=target, softcap=softcap)
    real = torch.arange(60) != 7
    for name in FIELDS:
        mine, theirs = getattr(got, name), getattr(want, name)
        if mine.is_floating_point():
            assert_close(mine[real], theirs[real], 1e-12, name)
            assert torch.equal(mine.isnan(), theirs.isnan())
        else:
            assert torch.equal(mine, theirs), name


@pytest.mark.usefixtures("never_dense")
def test_the_bound_of_the_features_gradient():
    """|error of dA_i| <= |scale| (|v_i| D_i + |h_i| E_i) max_jk |b_j - b_k|."""
    head = Tokens()
    with tw.record_filtering() as report:
        got = head.grads(1e-2, want=("log_prob", "entropy"))["input"]
    want = head.grads(0.0, want=("log_prob", "entropy"))["input"]
    x, plan = {name: value.detach() for name, value in head.leaves.items()}, report._plans[0][0]
    scores = x["scale"] * x["input"] @ x["weight"].T + x["bias"]
    _, pieces, v = dense_g(scores, head.target, UPSTREAM[0], bonus := UPSTREAM[1])
    entropy = (tiles_of(pieces, plan).sum(2) * (plan.mass.T >= 0)).sum(1)
    farthest = torch.cdist(x["weight"], x["weight"]).max()
    most = x["scale"] * (v.abs() * dropped_mass(scores, plan) + bonus.abs() * entropy) * farthest
    error = (got - want).norm(dim=1)
    assert (error <= most * (1 + 1e-9)).all()
    assert error.norm() > 0


@pytest.mark.usefixtures("never_dense")
def test_a_mean_that_all_classes_share_makes_no_error():
    """The stand-ins of a row have the entropy that it drops. Without that, the error would be the mean's, times it."""
    head = Tokens()
    small = head.grads(1e-2)["input"] - head.grads(0.0)["input"]
    with torch.no_grad():
        head.leaves["weight"] += 20.0
    large = head.grads(1e-2)["input"] - head.grads(0.0)["input"]
    assert small.norm() > 0
    assert_close(large, small, 1e-5)


@pytest.mark.usefixtures("never_dense", "nan_filled_empty")
def test_ignored_tokens_get_nothing_and_change_nothing():
    head = Tokens()
    target = head.target.clone()
    target[::3] = -100
    want = head.grads(1e-2, target=target)
    assert (want["input"][::3] == 0).all()
    with torch.no_grad():
        head.leaves["input"][::3] = torch.nan
    got = head.grads(1e-2, target=target)
    assert worst(got, want) < 1e-12
    few = {**head.leaves, "input": head.leaves["input"][target >= 0]}
    alone = head.stats(TileOptions(filter_tolerance=1e-2), few, target[target >= 0])
    both = head.stats(TileOptions(filter_tolerance=1e-2), target=target)
    assert_close(both.entropy[target >= 0], alone.entropy, 1e-12)


@pytest.mark.usefixtures("never_dense")
def test_frozen_sides():
    head = Tokens()
    want = head.grads(1e-2)
    for name in head.leaves:
        leaves = {other: value.detach() for other, value in head.leaves.items()}
        leaves[name].requires_grad_()
        (got,) = torch.autograd.grad(head.loss(1e-2, leaves=leaves), [leaves[name]])
        assert_close(got, want[name], 1e-10, name)


@pytest.mark.usefixtures("never_dense")
@pytest.mark.parametrize("tolerance", [1e-2, "rounding"])
def test_compiled_checkpointed_and_multiplied(tolerance):
    torch._dynamo.reset()
    head = Tokens(torch.bfloat16)
    leaves = list(head.leaves.values())
    with tw.record_filtering() as report:
        want = torch.autograd.grad(head.loss(tolerance), leaves)
    assert report.kept_share[0] < 0.9
    again = torch.autograd.grad(head.loss(tolerance), leaves)
    assert all(torch.equal(one, other) for one, other in zip(want, again, strict=True))
    value = checkpoint(lambda: head.loss(tolerance), use_reentrant=False)
    whole = torch.compile(lambda: head.loss(tolerance), fullgraph=True, backend="aot_eager")
    for got in (torch.autograd.grad(value, leaves), torch.autograd.grad(whole(), leaves)):
        for one, other in zip(got, want, strict=True):
            assert_close(one, other, 1e-2)
    thrice = torch.autograd.grad(3 * head.loss(tolerance), leaves)
    for one, other in zip(thrice, want, strict=True):
        assert_close(one, 3 * other, 1e-2)


@pytest.mark.parametrize(
    "settings, reason",
    [
        ({"want": ("log_prob", "log_sum_sq_prob")}, "log_sum_sq_prob"),
        ({"want": ("log_prob", "mean_logit")}, "mean_logit"),
        ({"want": ("entropy",), "target": None}, "given by an index"),
    ],
)
def test_what_the_filter_does_not_serve_is_exact(settings, reason, set_limits):
    set_limits(small_cpu=0)
    head = Tokens()
    x = head.leaves

    def stats(options, target=head.target, **more):
        return tw.linear_token_stats(x["input"], x["weight"], target, **more, options=options)

    def solve(options):
        found = stats(options, **settings)
        return torch.autograd.grad(sum(getattr(found, name).sum() for name in settings["want"]), x["input"])[0]

    assert torch.equal(solve(TileOptions(filter_tolerance=0.2)), solve(TileOptions()))
    found = tw.explain(stats, TileOptions(filter_tolerance=0.2), **settings).calls[0]
    assert found.strategy == "two_pass"
    assert found.reason.startswith("nothing is dropped")
    assert reason in found.reason


def picks_of(n, k, target):
    """Random classes, some of them twice, the target, and none."""
    pick = torch.randint(0, COLS, (n, k), generator=torch.Generator().manual_seed(9))
    pick[::2, 1], pick[:, 2] = pick[::2, 0], target
    return pick


@pytest.mark.usefixtures("never_dense", "nan_filled_empty")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("tolerance", [1e-2, 0.3])
@pytest.mark.parametrize("name", SCORES)
def test_the_bound_with_picked_classes(name, tolerance, dtype):
    """Their gradients are exact, and what is dropped is a part of the softmax, as for the log-probability."""
    n, k = 40, 5
    scores = SCORES[name](n).to(dtype).double()
    target = torch.randint(0, COLS, (n,), generator=torch.Generator().manual_seed(1))
    pick, coming, advantage = picks_of(n, k, target), random(n, k, seed=4), random(n, seed=2)
    x = scores.to(dtype).requires_grad_()
    options = TileOptions(filter_tolerance=tolerance)
    with tw.record_filtering() as report:
        stats = tw.linear_token_stats(
            x, torch.eye(COLS, dtype=dtype), target, want=("log_prob",), pick=pick, options=options
        )
    log_p = scores.log_softmax(1)
    assert_close(stats.picked, log_p.gather(1, pick), 1e-10 if dtype == torch.float64 else 1e-5)
    ((stats.log_prob * advantage).sum() + (stats.picked * coming).sum()).backward()
    plan = report._plans[0][0]
    g = (advantage + coming.sum(1))[:, None] * -log_p.exp()
    g = g + advantage[:, None] * F.one_hot(target, COLS) + torch.zeros_like(g).scatter_add_(1, pick, coming.double())
    mass = dropped_mass(scores, plan)
    assert mass.max() <= tolerance
    v = (advantage + coming.sum(1)).abs()
    digits = 2.0**-48 if dtype == torch.float64 else 2.0**-21
    rounding = digits * (8 + scores.abs().amax(1)) * (1 + advantage.abs() + coming.abs().sum(1))
    assert ((x.grad.double() - g).abs().sum(1) <= 2 * v * mass + rounding).all()


@pytest.mark.usefixtures("never_dense")
def test_a_gradient_of_picked_classes_alone_loses_nothing():
    """Gradients that sum to 0 in every row leave none to the softmax, and dropping a part of it changes nothing."""
    n, d, k = 60, 16, 4
    x, w = random(n, d, seed=5).requires_grad_(), (3.0 * random(COLS, d, seed=6)).requires_grad_()
    target = torch.randint(0, COLS, (n,), generator=torch.Generator().manual_seed(1))
    pick, coming = picks_of(n, k, target), random(n, k, seed=7)
    target[::7] = -100
    coming = coming - coming.mean(1, keepdim=True)
    found = {}
    for tolerance in (0.0, 0.3):
        options = TileOptions(filter_tolerance=tolerance)
        with tw.record_filtering() as report:
            stats = tw.linear_token_stats(x, w, target, want=("log_prob",), pick=pick, options=options)
        found[tolerance] = torch.autograd.grad((stats.picked * coming).sum(), (x, w))
        if tolerance:
            assert report.kept_share[0] < 0.9
    for one, other in zip(found[0.3], found[0.0], strict=True):
        assert_close(one, other, 1e-10)


@pytest.mark.usefixtures("never_dense")
def test_a_sparse_teacher_with_the_filter():
    n, d, k = 60, 16, 4
    x, w = random(n, d, seed=5).requires_grad_(), (3.0 * random(COLS, d, seed=6)).requires_grad_()
    ids = torch.stack([torch.randperm(COLS, generator=torch.Generator().manual_seed(i))[:k] for i in range(n)])
    log_q = random(n, k, seed=8).log_softmax(1)
    exact, loose = (
        torch.autograd.grad(tw.linear_sparse_distillation_loss(x, w, ids, log_q, options=options), (x, w))
        for options in (None, TileOptions(filter_tolerance=1e-3))
    )
    for one, other in zip(loose, exact, strict=True):
        assert_close(one, other, 5e-3)
        assert not torch.equal(one, other), "something was dropped"
