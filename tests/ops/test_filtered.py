"""Backward that leaves out what carries no probability: the bound, what stands in, and gradients near the exact ones.

With the identity as classifier the scores are the hidden states, and the gradient of the hidden states is G itself.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from tests.compare import assert_close, relative_error
from tests.dense_filter import DenseFilter
from tests.ops.filtered_cases import COLS, SCORES, Head, dense_g, dropped_mass, random, ranks, solve, tiles_of, worst
from tests.oracles import linear_cross_entropy_dense
from torch.utils.checkpoint import checkpoint

import tilewise as tw
from tilewise.kernels import filter_plan as plans
from tilewise.ops import route
from tilewise.options import TileOptions

pytestmark = pytest.mark.usefixtures("filter_on_cpu")


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
    rounding = {torch.float64: 2.0**-49, torch.float32: 2.0**-22, torch.bfloat16: 2.0**-22}[dtype] * (
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


@pytest.mark.parametrize("size", [1e2, 1e3, 1e4, 1e5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_large_scores_keep_the_bound_or_take_the_exact_path(dtype, size):
    """Backward multiplies other shapes than forward. Where that rounding is not small, nothing is dropped."""
    tolerance, classifier, hidden = 1e-3, random(4096, 64, seed=1), random(256, 64, seed=2)
    target = torch.randint(0, 4096, (256,), generator=torch.Generator().manual_seed(3))
    hidden, scale = hidden / (hidden @ classifier.T).amax(1, keepdim=True), torch.tensor(size)
    a, c = hidden.to(dtype), classifier.to(dtype)

    def gradient(a, c, **settings):
        a = a.clone().requires_grad_()
        settings = {"logit_scale": scale, "reduction": "sum", "options": TileOptions(**settings)}
        tw.linear_cross_entropy(a, c, target, **settings).backward()
        return a.grad.double() / (size * c.double().norm(dim=1).max())

    with tw.record_filtering() as report:
        got = gradient(a, c, filter_tolerance=tolerance)
    assert report.dense == [size >= 1e3]
    want, plain = gradient(a.double(), c.double()), gradient(a, c, gradients="backward")
    rounding = (plain - want).norm(dim=1).max()  # of the exact path, and of half gradients
    assert (got - want).norm(dim=1).max() <= tolerance + rounding
    if size >= 1e3:
        assert torch.equal(got, plain)


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


@pytest.fixture
def only_large_calls(monkeypatch):
    """The filter takes calls of more than 10 rows, and counts those that it gets."""
    asked, plain = [], DenseFilter.forward

    def forward(self, pair, spec, options):
        asked.append(pair.a.shape[0])
        return plain(self, pair, spec, options)

    def why_not(shape, *rest, real=route._why_not_filtered):
        return real(shape, *rest) or (route.TOO_SMALL if shape.rows <= 10 else None)

    monkeypatch.setattr(route, "_why_not_filtered", why_not)
    monkeypatch.setattr(DenseFilter, "forward", forward)
    return asked


@pytest.fixture
def eight_of_64():
    """A head, with targets for 8 of 64 rows, and what gives the loss with a tolerance."""
    hidden, classifier = random(64, 8).requires_grad_(), random(COLS, 8).requires_grad_()
    target = torch.full((64,), -100)
    target[::8] = torch.arange(8)
    options = TileOptions(filter_tolerance=1e-2)
    return hidden, classifier, target, lambda: tw.linear_cross_entropy(hidden, classifier, target, options=options)


def test_a_call_too_small_without_its_ignored_rows_is_exact(only_large_calls, eight_of_64, monkeypatch):
    """Forward decides by the rows that are left; backward sees all rows, and must not decide anew."""

    def backward(self, *args, **kwargs):
        raise AssertionError("it was decided in forward")

    monkeypatch.setattr(DenseFilter, "backward", backward)
    hidden, classifier, target, loss = eight_of_64
    loss().backward()
    assert only_large_calls == []
    want = [x.detach().double().requires_grad_() for x in (hidden, classifier)]
    linear_cross_entropy_dense(*want, target).backward()
    for got, exact in zip((hidden, classifier), want, strict=True):
        assert_close(got.grad, exact.grad, 1e-5)
    target[:] = torch.arange(64)
    with pytest.raises(AssertionError, match="decided in forward"):
        loss().backward()
    assert only_large_calls == [64]


@pytest.mark.usefixtures("only_large_calls")
def test_a_small_call_is_recorded_and_checkpointed(eight_of_64):
    """It has no plan to save; recording it must not change that, or checkpointing would find other tensors."""
    hidden, classifier, _, loss = eight_of_64
    want = torch.autograd.grad(loss(), (hidden, classifier))
    with tw.record_filtering() as report:
        value = checkpoint(loss, use_reentrant=False)
    assert report.dense == [True]
    assert report.kept_share == [1.0]
    assert report.largest_dropped == [0.0]
    for got, exact in zip(torch.autograd.grad(value, (hidden, classifier)), want, strict=True):
        assert torch.equal(got, exact)
    first = torch.autograd.grad(loss(), (hidden, classifier), create_graph=True)
    assert torch.equal(first[0], want[0])
    with pytest.raises(tw.TilewiseError, match="first derivatives only"):
        first[0].sum().backward()
