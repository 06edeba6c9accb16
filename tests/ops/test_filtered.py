"""Backward that leaves out what carries no probability: the bound, what stands in, and everything else as it was.

With the identity as classifier the scores are the hidden states, and the gradient of the hidden states is G itself.
"""

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from tests.compare import assert_close, relative_error
from tests.oracles import linear_cross_entropy_dense

import tilewise as tw
from tilewise.errors import GradientError
from tilewise.kernels import filter as plans
from tilewise.kernels.filter_tiled import TorchFilter, _order_and_sample
from tilewise.kernels.spec import Pair, PairSpec
from tilewise.ops import filtered
from tilewise.ops.pair_stats import PairKeys, pair_stats
from tilewise.options import TileOptions

COLS = 500  # 32 tiles of 16, the last one ragged


@pytest.fixture
def never_dense(monkeypatch):
    """However many pairs are kept."""
    monkeypatch.setattr(plans, "DENSE_SHARE", 2.0)


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def ranks(n, slope, noise, seed=0):
    """-slope * ln(rank) + noise, ranks in random order: what a language model's scores look like."""
    order = torch.randperm(COLS, generator=torch.Generator().manual_seed(seed)) + 1
    return -slope * order.double().log() + noise * random(n, COLS, seed=seed)


def with_one_row(scores, row):
    scores[1] = row
    return scores


SCORES = {
    "trained": lambda n: ranks(n, 1.8, 2.0),
    "very peaked": lambda n: ranks(n, 6.0, 1.0),
    "flat": lambda n: random(n, COLS),
    "heavy tail": lambda n: ranks(n, 1.0, 0.5) + random(n, COLS, seed=2) / random(n, COLS, seed=3).abs(),
    "all alike": lambda n: torch.zeros(n, COLS, dtype=torch.float64),
    "spread evenly over all but one": lambda n: torch.cat(
        [torch.full((n, 1), 8.0), torch.zeros(n, COLS - 1)], 1
    ).double(),
    "two levels at the tolerance": lambda n: torch.where(torch.arange(COLS) < 16, 0.0, math.log(1e-2 / 31)).expand(
        n, -1
    ),
    "huge": lambda n: 300.0 * random(n, COLS),
    "ties": lambda n: random(n, COLS).round(),
    "nothing but one": lambda n: torch.where(torch.arange(COLS) == 3, 0.0, -1e4).double().expand(n, -1),
    "one row far below": lambda n: with_one_row(ranks(n, 1.8, 2.0), -1e6 + random(COLS)),
    "every row its own": lambda n: 8.0 * random(n, COLS),
}


def solve(scores, target, tolerance, dtype=torch.float64, **settings):
    """G times the incoming gradient (1 for each row), and the plan of the call."""
    x = scores.to(dtype).detach().clone().requires_grad_()
    options = TileOptions(filter_tolerance=tolerance, **settings)
    with tw.record_filtering() as report:
        loss = tw.linear_cross_entropy(x, torch.eye(COLS, dtype=dtype), target, reduction="sum", options=options)
    loss.backward()
    return x.grad, report


def tiles_of(values_nm, plan):
    """In the order of the plan, cut into tiles: (n, T, W), zeros behind the last column."""
    tiles, width = plan.mass.shape[0], plans.tile_width(values_nm.shape[1])
    ordered = values_nm[:, plan.order.long()]
    return F.pad(ordered, (0, tiles * width - ordered.shape[1])).view(len(values_nm), tiles, width)


def dropped_mass(scores, plan):
    """What each row drops, from all its scores."""
    mass_nt = tiles_of(scores.double().softmax(1), plan).sum(2)
    return (mass_nt * (plan.mass.T >= 0)).sum(1)


def dense_g(scores, target):
    return scores.double().softmax(1) - F.one_hot(target, COLS)


@pytest.mark.usefixtures("never_dense", "nan_filled_empty")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tolerance", [1e-3, 1e-2, 0.3])
@pytest.mark.parametrize("name", SCORES)
def test_the_bound(name, tolerance, dtype):
    n = 40
    scores = SCORES[name](n).to(dtype).double()
    target = torch.randint(0, COLS, (n,), generator=torch.Generator().manual_seed(1))
    got, report = solve(scores, target, tolerance, dtype)
    (plan, _, _), want = report._plans[0], dense_g(scores, target)
    dropped = dropped_mass(scores, plan)
    assert dropped.max() <= tolerance
    # Of float32, what the scores' own size leaves; of bfloat16, what G is rounded to.
    rounding = {torch.float64: 2.0**-50, torch.float32: 2.0**-22, torch.bfloat16: 2.0**-22}[dtype] * (
        8 + scores.abs().amax(1)
    )
    rounding = rounding + (1e-2 if dtype == torch.bfloat16 else 0.0)
    error = (got.double() - want).abs().sum(1)
    assert (error <= 2 * dropped + rounding).all()
    assert (got.double().sum(1).abs() <= rounding).all()
    # The positive is never left out, and nobody's tile is: what is kept is exact.
    kept = tiles_of(torch.ones(n, COLS), plan).bool() & (plan.mass.T < 0)[:, :, None]
    assert kept[tiles_of(F.one_hot(target, COLS), plan).bool()].all()
    assert ((tiles_of(got.double() - want, plan).abs() * kept).sum((1, 2)) <= rounding).all()
    assert math.isclose(report.largest_dropped[0], dropped.max(), rel_tol=1e-2, abs_tol=1e-9)
    assert math.isclose(report.mean_dropped[0], dropped.mean(), rel_tol=1e-2, abs_tol=1e-9)
    assert math.isclose(report.kept_share[0], (plan.mass < 0).double().mean())


@pytest.mark.usefixtures("never_dense")
@pytest.mark.parametrize("tolerance", [1e-3, 1e-2])
def test_as_much_is_dropped_as_may_be(tolerance):
    """No row could drop another of its tiles of least mass, or nearly so."""
    scores, target = SCORES["every row its own"](40), torch.arange(40)
    _, report = solve(scores, target, tolerance)
    plan = report._plans[0][0]
    mass_nt = tiles_of(scores.softmax(1), plan).sum(2)
    own = tiles_of(F.one_hot(target, COLS), plan).sum(2).bool()
    ordered = mass_nt.masked_fill(own, torch.inf).sort(1)[0].cumsum(1)
    most, dropped = (ordered <= tolerance).sum(1), (plan.mass.T >= 0).sum(1)
    assert (dropped <= most).all()
    assert (dropped >= most - 1).all()
    assert dropped.sum() > 0


@given(
    seed=st.integers(0, 10**6),
    tolerance=st.floats(1e-6, 0.9),
    spread=st.floats(0.0, 40.0),
    slope=st.floats(0.0, 8.0),
    levels=st.sampled_from([0, 1, 3]),
    cut=st.floats(0.0, 1.0),
)
def test_nothing_breaks_the_bound(seed, tolerance, spread, slope, levels, cut):
    n = 6
    scores = ranks(n, slope, spread, seed)
    if levels:  # many equal masses, of which none may tip the sum over
        scores = (scores / (spread + slope + 1) * levels).round() * math.log(16 / tolerance) / levels
    scores[:, torch.rand(COLS, generator=torch.Generator().manual_seed(seed)) < cut / 2] -= 1e3
    for dtype in (torch.float32, torch.float64):
        exact = scores.to(dtype).double()
        x = exact.to(dtype).requires_grad_()
        options = TileOptions(filter_tolerance=tolerance)
        with tw.record_filtering() as report:
            tw.linear_cross_entropy(x, torch.eye(COLS, dtype=dtype), torch.arange(n), options=options)
        assert dropped_mass(exact, report._plans[0][0]).max() <= tolerance


def test_the_tile_s_mean_stands_in(never_dense):
    scores, target = SCORES["trained"](40), torch.arange(40)
    got, report = solve(scores, target, 1e-2)
    plan = report._plans[0][0]
    sizes = tiles_of(torch.ones(1, COLS), plan).sum(2).squeeze(0)
    mean = tiles_of(scores.softmax(1), plan).sum(2) / sizes
    dropped = (plan.mass.T >= 0)[:, :, None] & tiles_of(torch.ones(40, COLS), plan).bool()
    assert dropped.any()
    assert_close(tiles_of(got, plan)[dropped], mean[:, :, None].expand(-1, -1, 16)[dropped], 1e-9)


# With features ------------------------------------------------------------------------------------------------------


class Head:
    """A small language model's head with trained-like scores; every argument may require grad."""

    def __init__(self, dtype=torch.float64, n=60, d=24, classes=COLS):
        rank = torch.randperm(classes, generator=torch.Generator().manual_seed(2)) + 1
        rest = 2 * random(classes, d - 1, seed=3) / math.sqrt(d - 1)
        self.target = torch.randint(0, classes, (n,), generator=torch.Generator().manual_seed(4))
        common = torch.full((n, 1), 4.0, dtype=torch.float64)
        hidden = torch.cat([common, random(n, d - 1, seed=5) + 2 * rest[self.target]], 1)
        classifier = torch.cat([(-2.0 * rank.double().log() / 4)[:, None], rest], 1)
        values = {"input": hidden, "weight": classifier, "bias": 0.3 * random(classes, seed=6)}
        self.leaves = {name: value.to(dtype).requires_grad_() for name, value in values.items()}
        self.leaves["scale"] = torch.tensor(1.1, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
        self.leaves["scale"].requires_grad_()

    def loss(self, tolerance=0.0, leaves=None, target=None, options=None, **settings):
        x = leaves or self.leaves
        options = options or TileOptions(filter_tolerance=tolerance)
        target = self.target if target is None else target
        return tw.linear_cross_entropy(
            x["input"], x["weight"], target, linear_bias=x["bias"], logit_scale=x["scale"], options=options, **settings
        )

    def grads(self, *args, upstream=None, **settings):
        loss = self.loss(*args, **settings)
        loss = loss.sum() if upstream is None else (loss * upstream).sum()
        return dict(zip(self.leaves, torch.autograd.grad(loss, list(self.leaves.values())), strict=True))


def worst(got, want):
    return torch.tensor([relative_error(got[name], want[name]) for name in want]).max()  # NaN is seen


SETTINGS = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "none, weighted": {"reduction": "none", "upstream": random(60, seed=7).abs()},
    "none, signs": {"reduction": "none", "upstream": random(60, seed=8)},
    "class weights": {"weight": random(COLS, seed=9).abs()},
    "z-loss": {"z_loss": 1e-2},
    "soft cap": {"softcap": 20.0},
}


@pytest.mark.usefixtures("never_dense", "nan_filled_empty")
@pytest.mark.parametrize("name", SETTINGS)
def test_gradients_near_exact(name):
    """Errors far below the tolerance, and of every argument; wider tolerances make larger errors."""
    head = Head()
    want = head.grads(0.0, **SETTINGS[name])
    errors = [worst(head.grads(t, **SETTINGS[name]), want) for t in (1e-12, 1e-3, 1e-2, 0.2)]
    assert errors[0] < 1e-10
    assert 0 < errors[1] < 2e-3
    assert errors[1] < errors[2] < 2e-2
    assert errors[2] < errors[3]


@pytest.mark.usefixtures("never_dense")
@pytest.mark.parametrize("upstream", [None, random(60, seed=8)], ids=["ones", "signs"])
def test_the_bound_of_the_features_gradient(upstream):
    """|error of dA_i| <= |scale g_i| D_i max_j |b_j - mean of its tile|."""
    head, tolerance = Head(), 1e-2
    with tw.record_filtering() as report:
        got = head.grads(tolerance, reduction="none", upstream=upstream)["input"]
    want = head.grads(0.0, reduction="none", upstream=upstream)["input"]
    plan, b = report._plans[0][0], head.leaves["weight"].detach()
    tile = torch.empty(COLS, dtype=torch.long)
    tile[plan.order.long()] = torch.arange(COLS) // plans.tile_width(COLS)
    radius = (b - plan.mean[tile]).norm(dim=1).max()
    x = head.leaves
    scores = (x["scale"] * x["input"] @ x["weight"].T + x["bias"]).detach()
    dropped = dropped_mass(scores, plan)
    size = 1.0 if upstream is None else upstream.abs()
    assert ((got - want).norm(dim=1) <= x["scale"].detach() * size * dropped * radius * (1 + 1e-9)).all()
    assert (got - want).norm() > 0


@pytest.mark.usefixtures("never_dense")
def test_a_mean_that_all_classes_share_makes_no_error():
    """Were nothing to stand in for what is dropped, the error would be that mean's, times the dropped mass."""
    head = Head()
    small = head.grads(1e-2)["input"] - head.grads(0.0)["input"]
    with torch.no_grad():
        head.leaves["weight"] += 20.0
    large = head.grads(1e-2)["input"] - head.grads(0.0)["input"]
    assert small.norm() > 0
    assert_close(large, small, 1e-6)


@pytest.mark.usefixtures("never_dense")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_other_types(dtype):
    exact, head = Head().grads(0.0), Head(dtype)
    got, plain = head.grads(1e-2), head.grads(0.0)
    for name, value in got.items():
        assert value.dtype == plain[name].dtype
        assert relative_error(value, exact[name]) <= relative_error(plain[name], exact[name]) + 2e-2
        assert relative_error(value, plain[name]) < 2e-2


def test_the_loss_itself_is_exact():
    head = Head()
    x = {name: value.detach() for name, value in head.leaves.items()}
    want = linear_cross_entropy_dense(
        x["input"], x["weight"], head.target, bias=x["bias"], scale=x["scale"], reduction="none"
    )
    assert_close(head.loss(0.2, reduction="none"), want, 1e-12)


@pytest.mark.usefixtures("never_dense", "nan_filled_empty")
def test_ignored_tokens_get_nothing_and_change_nothing():
    head = Head()
    target = head.target.clone()
    target[::3] = -100
    got = head.grads(1e-2, target=target, reduction="sum")
    assert (got["input"][::3] == 0).all()
    few = {**head.leaves, "input": head.leaves["input"][target >= 0]}
    loss = head.loss(1e-2, leaves=few, target=target[target >= 0], reduction="sum")
    want = dict(zip(head.leaves, torch.autograd.grad(loss, list(head.leaves.values())), strict=True))
    assert worst(got, want) < 1e-12


@pytest.mark.usefixtures("never_dense")
def test_what_ignored_tokens_hold_reaches_nothing():
    head = Head()
    target = head.target.clone()
    target[::3] = -100
    want = head.grads(1e-2, target=target)
    with torch.no_grad():
        head.leaves["input"][::3] = torch.nan
    got = head.grads(1e-2, target=target)
    assert all(value.isfinite().all() for value in got.values())
    assert worst(got, want) < 1e-12


def test_all_tokens_ignored():
    head = Head()
    got = head.grads(1e-2, target=torch.full((60,), -100), reduction="sum")
    assert all((value == 0).all() for value in got.values())


@pytest.mark.usefixtures("never_dense")
def test_a_class_that_cannot_be_gets_no_gradient():
    """A bias of -inf: padded vocabularies have some."""
    head = Head()
    with torch.no_grad():
        dead = torch.arange(COLS) % 7 == 3
        dead[head.target] = False
        head.leaves["bias"][dead] = -torch.inf
    got, want = head.grads(1e-2), head.grads(0.0)
    assert (got["weight"][dead] == 0).all()
    assert (got["bias"][dead] == 0).all()
    assert worst(got, want) < 2e-2


@pytest.mark.usefixtures("never_dense")
def test_what_is_not_a_number_is_seen():
    head = Head()
    with torch.no_grad():
        head.leaves["input"][7, 3] = torch.nan
    got = head.grads(1e-2, reduction="sum")
    assert got["input"][7].isnan().all()
    assert not got["input"][8].isnan().any()


@pytest.mark.usefixtures("never_dense")
def test_frozen_sides():
    head = Head()
    want = head.grads(1e-2)
    for name in head.leaves:
        leaves = {other: value.detach() for other, value in head.leaves.items()}
        leaves[name].requires_grad_()
        (got,) = torch.autograd.grad(head.loss(1e-2, leaves=leaves), [leaves[name]])
        assert_close(got, want[name], 1e-10, name)


@pytest.mark.usefixtures("never_dense")
def test_run_twice_and_multiplied():
    head = Head(torch.float32)
    once, again = head.grads(1e-2), head.grads(1e-2)
    assert all(torch.equal(once[name], again[name]) for name in once)
    thrice = head.grads(1e-2, upstream=torch.tensor(3.0))
    assert worst(thrice, {name: 3 * value for name, value in once.items()}) < 1e-6


@pytest.mark.usefixtures("never_dense", "nan_filled_empty")
def test_a_small_workspace_changes_nothing(monkeypatch):
    head = Head(n=300)
    want = head.grads(1e-2)
    monkeypatch.setattr(TileOptions, "workspace_bytes", 2**18)  # of which half holds the plan
    monkeypatch.setattr("tilewise.kernels.filter_tiled.ROWS", 16)
    assert worst(head.grads(1e-2), want) < 1e-10


@pytest.mark.usefixtures("never_dense")
def test_the_order_of_the_vocabulary_does_not_matter():
    """Columns that were moved before get the same gradients, moved: the order is undone exactly."""
    head = Head()
    want = head.grads(1e-2)
    move = torch.randperm(COLS, generator=torch.Generator().manual_seed(11))
    back = torch.empty_like(move)
    back[move] = torch.arange(COLS)
    leaves = {**head.leaves, "weight": head.leaves["weight"][move], "bias": head.leaves["bias"][move]}
    loss = head.loss(1e-2, leaves=leaves, target=back[head.target])
    got = dict(zip(head.leaves, torch.autograd.grad(loss, list(head.leaves.values())), strict=True))
    assert worst(got, want) < 1e-10


# When nothing is left out -------------------------------------------------------------------------------------------


def test_tolerance_zero_takes_the_exact_operator(monkeypatch):
    head = Head(torch.float32)
    default = head.grads(options=TileOptions())
    monkeypatch.setattr(TorchFilter, "forward", None)  # would fail if called
    zero = head.grads(0.0)
    assert all(torch.equal(zero[name], default[name]) for name in zero)
    smooth = {"label_smoothing": 0.1}
    assert worst(head.grads(1e-2, **smooth), head.grads(0.0, **smooth)) == 0.0
    with torch.no_grad():
        assert head.loss(1e-2).item() == head.loss(0.0).item()
    detached = {name: value.detach() for name, value in head.leaves.items()}
    assert head.loss(1e-2, leaves=detached).item() == head.loss(0.0).item()


@pytest.mark.parametrize(
    "n, m, spec, options",
    [
        (0, COLS, {}, {}),
        (10, 20, {}, {}),
        (10, COLS, {"row_sum": True}, {}),
        (10, COLS, {"col_lse": True}, {}),
        (10, COLS, {"positive": "many"}, {}),
        (10, COLS, {"itself": True}, {}),
        (10**6, 10**6, {}, {"workspace_mib": 1}),
        (10, COLS, {}, {"filter_tolerance": 0.0}),
    ],
)
def test_reasons_to_be_exact(n, m, spec, options):
    how = TileOptions(**{"filter_tolerance": 1e-2, **options})
    what = PairSpec(**{"row_lse": True, "positive": "one", **spec})
    assert plans.why_exact(n, m, torch.float32, what, how)
    assert (
        plans.why_exact(
            10, COLS, torch.float32, PairSpec(row_lse=True, positive="one"), TileOptions(filter_tolerance=0.1)
        )
        is None
    )


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(PairSpec)])
def test_what_the_filter_does_not_know_is_exact(name):
    """A statistic that is added to the spec is refused until the filter learns it."""
    plain = PairSpec(row_lse=True, positive="one", drop_rows=True)
    value = getattr(plain, name)
    other = {"positive": "many", "softcap": 3.0}.get(name, not value)
    reason = plans.why_exact(
        10, COLS, torch.float32, dataclasses.replace(plain, **{name: other}), TileOptions(filter_tolerance=0.1)
    )
    assert (reason is None) == (name in ("softcap", "drop_rows"))


def test_flat_rows_take_the_dense_path(monkeypatch):
    """They drop nothing, and their gradients are bitwise those of the exact operator."""
    x = random(40, 24, seed=1).float().requires_grad_()
    c = 0.1 * random(COLS, 24).float()
    target, options = torch.arange(40), TileOptions(filter_tolerance=1e-2)
    with tw.record_filtering() as report:
        (got,) = torch.autograd.grad(tw.linear_cross_entropy(x, c, target, options=options), [x])
    assert report.dense == [True]
    assert report.largest_dropped == [0.0]
    assert report.kept_share[0] > 0.9
    # The log-sum-exps were added up in another order: equal up to the last digit.
    (want,) = torch.autograd.grad(tw.linear_cross_entropy(x, c, target), [x])
    assert_close(got, want, 1e-6)


@pytest.mark.parametrize("share, dense", [(-1.0, True), (10.0, False)], ids=["dense", "skip"])
@pytest.mark.parametrize("name", ["very peaked", "flat"])
def test_whatever_a_sample_of_the_rows_says_the_loss_is_right(name, share, dense, monkeypatch):
    """And where it expected too few pairs, too many are noticed when they are counted."""
    monkeypatch.setattr("tilewise.kernels.filter_tiled.WORTH_PROBING", 0)
    monkeypatch.setattr(plans, "PROBED_SHARE", share)
    scores, target = SCORES[name](80), torch.arange(80)
    target[::7] = -100
    got, report = solve(scores, target, 1e-2)
    dense = dense or name == "flat"
    assert report.dense == [dense]
    valid = target >= 0
    assert (got[~valid] == 0).all()
    assert_close(got[valid], dense_g(scores[valid], target[valid]), 1e-12 if dense else 1e-2)
    if share < 0:
        assert report.kept_share == [1.0]


def test_rows_that_a_sample_does_not_meet(monkeypatch):
    """Its rows are peaked, all others are flat."""
    monkeypatch.setattr("tilewise.kernels.filter_tiled.WORTH_PROBING", 0)
    scores = SCORES["flat"](200)
    index = torch.arange(200)[plans.sample_of(200, plans.sample_size(200, COLS, 32, TileOptions()))]
    scores[index] = SCORES["very peaked"](len(index))
    got, report = solve(scores, torch.arange(200), 1e-2)
    assert report.dense == [True]
    assert report.kept_share[0] < 1.0, "it was counted, not guessed"
    assert_close(got, dense_g(scores, torch.arange(200)), 1e-12)


@pytest.mark.parametrize("tolerance", [1e-46, 5e-324])
def test_a_tolerance_that_float32_cannot_hold_is_none(tolerance):
    """The one is 0 in float32, the other has no logarithm when some of it is kept in reserve."""
    scores = (1000.0 * SCORES["very peaked"](40)).float()
    scores.requires_grad_()
    classes, target, options = torch.eye(COLS), torch.arange(40), TileOptions(filter_tolerance=tolerance)
    with tw.record_filtering() as report:
        (got,) = torch.autograd.grad(tw.linear_cross_entropy(scores, classes, target, options=options), [scores])
    assert len(report) == 0
    exact = TileOptions(gradients="backward")
    assert torch.equal(
        got, torch.autograd.grad(tw.linear_cross_entropy(scores, classes, target, options=exact), [scores])[0]
    )


@pytest.mark.parametrize("softcap", [0.0, 30.0])
@pytest.mark.parametrize("peaked", [False, True])
def test_a_sample_and_the_order_take_one_look_at_the_columns(peaked, softcap, monkeypatch):
    """The mean row is one of the sample. A bias may be all that makes scores peaked."""
    monkeypatch.setattr("tilewise.kernels.filter_tiled.WORTH_PROBING", 0)
    bias = (torch.linspace(20.0, -180.0, COLS, dtype=torch.float64) * peaked).roll(99)
    a, b, key = 0.1 * random(80, 24), 0.1 * random(COLS, 24, seed=1), torch.arange(80)
    pair = Pair(a=a, b=b, scale=torch.tensor(-2.0, dtype=torch.float64), bias=bias, row_key=key)
    spec, options = PairSpec(row_lse=True, positive="one", softcap=softcap), TileOptions(filter_tolerance=1e-2)
    want = plans.order_columns(pair)
    with monkeypatch.context() as once:
        once.setattr(torch, "mv", None)
        order, too_many = _order_and_sample(pair, spec, options)
    assert torch.equal(order, want)
    assert too_many != peaked
    monkeypatch.setattr("tilewise.kernels.filter_tiled.WORTH_PROBING", math.inf)
    assert bool(TorchFilter().forward(pair, spec, options)[1].dense) == too_many, "and that is what counting says"


def test_a_default_device_is_not_where_the_sample_goes(monkeypatch):
    """`torch.set_default_device` says where a program makes its tensors; a sample belongs where the features are."""
    monkeypatch.setattr("tilewise.kernels.filter_tiled.WORTH_PROBING", 0)
    scores, target = SCORES["flat"](80), torch.arange(80)
    want, _ = solve(scores, target, 1e-2)
    hidden, head = scores.clone().requires_grad_(), torch.eye(scores.shape[1], dtype=scores.dtype)
    options = TileOptions(filter_tolerance=1e-2)
    with torch.device("meta"):
        loss = tw.linear_cross_entropy(hidden, head, target, reduction="sum", options=options)
    loss.backward()
    assert_close(hidden.grad, want, 1e-12)


def test_the_rows_that_count_decide():
    """Nine tokens of ten are ignored, and the others keep all their tiles."""
    head = Head(torch.float32, n=200)
    with torch.no_grad():
        head.leaves["input"] *= 0.05
    target = head.target.clone()
    target[torch.arange(200) % 10 != 0] = -100
    with tw.record_filtering() as report:
        got = head.grads(1e-2, target=target)
    assert report.dense == [True]
    assert worst(got, head.grads(0.0, target=target)) < 1e-5


def test_reports_are_only_written_inside():
    head = Head()
    with tw.record_filtering() as outer:
        head.loss(1e-2)
        with tw.record_filtering() as inner:
            head.loss(1e-2)
    head.loss(1e-2)
    assert (len(outer), len(inner)) == (2, 1)
    assert repr(inner).startswith(f"FilterReport(kept_share={inner.kept_share}, mean_dropped=[")
    assert "tensor" not in repr(outer)
    assert not filtered._reports


def test_empty_input():
    x = torch.empty(0, 8, requires_grad=True)
    loss = tw.linear_cross_entropy(
        x,
        torch.randn(COLS, 8),
        torch.empty(0, dtype=torch.long),
        reduction="sum",
        options=TileOptions(filter_tolerance=0.1),
    )
    loss.backward()
    assert x.grad.shape == (0, 8)


# As an operator -----------------------------------------------------------------------------------------------------


def test_compiled():
    head = Head(torch.float32)

    def step(hidden, weight, bias, scale, target):
        leaves = {"input": hidden, "weight": weight, "bias": bias, "scale": scale}
        return head.loss(1e-2, leaves=leaves, target=target)

    whole = torch.compile(step, fullgraph=True, backend="aot_eager")
    loss = whole(*head.leaves.values(), head.target)
    got = dict(zip(head.leaves, torch.autograd.grad(loss, list(head.leaves.values())), strict=True))
    assert loss.item() == head.loss(1e-2).item()
    assert worst(got, head.grads(1e-2)) < 1e-6


@pytest.mark.parametrize("dynamic", [True, None])
def test_compiled_with_one_tolerance_after_another(dynamic):
    torch._dynamo.reset()
    head = Head(torch.float32)
    x = head.leaves

    def step(options):
        return tw.linear_cross_entropy(x["input"], x["weight"], head.target, options=options)

    whole = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    tolerances = 1e-2, 1e-3, 0.3
    with tw.record_filtering() as report:
        for tolerance in tolerances:
            for mib in (64, 32):
                whole(TileOptions(filter_tolerance=tolerance, workspace_mib=mib)).backward()
    assert [tolerance for _, _, tolerance in report._plans] == [value for value in tolerances for _ in range(2)]


def test_the_registered_operators_are_sound():
    head = Head(torch.float32, n=20, classes=100)
    x = head.leaves
    plan = filtered.encode(
        PairSpec(row_lse=True, positive="one", drop_rows=True), TileOptions(filter_tolerance=1e-2), ""
    )
    key, zero = head.target % 100, torch.zeros(20)
    inputs = (x["input"], x["weight"], x["scale"], x["bias"], key, zero, plan)
    torch.library.opcheck(
        torch.ops.tilewise.filtered_stats.default, inputs, test_utils=("test_schema", "test_faketensor")
    )


def test_a_second_derivative_is_refused():
    head = Head()
    (grad,) = torch.autograd.grad(head.loss(1e-2), [head.leaves["input"]], create_graph=True)
    with pytest.raises(GradientError, match="first derivatives"):
        grad.sum().backward()


@pytest.mark.usefixtures("never_dense")
def test_autocast_does_not_reach_the_products():
    head = Head(torch.bfloat16)
    want = head.grads(1e-2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = head.grads(1e-2)
    assert all(torch.equal(got[name], want[name]) for name in want)


def test_over_a_group_it_is_the_exact_operator(monkeypatch):
    asked = []

    def stand_in(*args, **kwargs):
        asked.append(kwargs["group_name"])
        return pair_stats(*args, **{**kwargs, "group_name": ""})

    monkeypatch.setattr(filtered, "pair_stats", stand_in)
    head = Head()
    x = head.leaves
    keys, options = PairKeys(row_key=head.target), TileOptions(filter_tolerance=1e-2)
    spec = PairSpec(row_lse=True, positive="one", drop_rows=True)
    filtered.filtered_stats(
        x["input"], x["weight"], x["scale"], keys=keys, spec=spec, options=options, group_name="a group"
    )
    assert asked == ["a group"]
