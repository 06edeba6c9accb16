"""Backward that leaves out what carries no probability: when nothing is left out, and what it is as an operator."""

import dataclasses

import pytest
import torch
from tests.compare import assert_close
from tests.dense_filter import DenseFilter
from tests.ops.filtered_cases import COLS, SCORES, Head, random, worst

import tilewise as tw
from tilewise.errors import GradientError
from tilewise.kernels.spec import Needs, PairShape, PairSpec
from tilewise.kernels.torch_impl.backend import TorchBackend
from tilewise.ops import filter_report
from tilewise.ops.call import TENSORS, Settings, encode
from tilewise.ops.route import route
from tilewise.options import TileOptions

pytestmark = pytest.mark.usefixtures("filter_on_cpu")

# When nothing is left out -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("tolerance", [1e-2, "rounding"])
def test_without_a_filter_the_gradients_are_exact_and_the_report_says_so(backend, tolerance, monkeypatch):
    """As on every CPU."""
    monkeypatch.setattr(TorchBackend, "filtered", None)
    head = Head(torch.bfloat16)
    target = head.target.clone()
    target[::4] = -100
    options = TileOptions(backend=backend, filter_tolerance=tolerance)
    with tw.record_filtering() as report:
        got = head.grads(options=options, target=target)
    want = head.grads(options=TileOptions(gradients="backward"), target=target)
    assert all(torch.equal(got[name], want[name]) for name in want)
    assert (report.dense, report.kept_share, report.largest_dropped) == ([True], [1.0], [0.0])
    x = head.leaves
    stats = tw.explain(tw.linear_token_stats, x["input"], x["weight"], target, options=options).calls[0]
    assert stats.strategy == "two_pass"
    assert stats.reason == "nothing is dropped: this backend has no filter; the Triton backend has one"


def test_tolerance_zero_takes_the_exact_operator(monkeypatch, set_limits):
    set_limits(small_cpu=0)
    head = Head(torch.float32)
    default = head.grads(options=TileOptions())
    monkeypatch.setattr(DenseFilter, "forward", None)  # would fail if called
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
        (10, COLS, {"mask_self": True}, {}),
        (10**6, 10**6, {}, {"workspace_mib": 1}),
        (10, COLS, {}, {"filter_tolerance": 0.0}),
    ],
)
def test_reasons_to_be_exact(n, m, spec, options):
    how = TileOptions(**{"filter_tolerance": 1e-2, **options})
    what = PairSpec(**{"row_lse": True, "positive": "one", **spec})
    assert not is_filtered(n, m, what, how)
    assert is_filtered(10, COLS, PairSpec(row_lse=True, positive="one"), TileOptions(filter_tolerance=0.1))


def is_filtered(n, m, spec, options, **more):
    shape = PairShape(n, m, 24, torch.float32, torch.device("cpu"), has_row_key=True)
    return route(shape, spec, options, Needs(), **more).strategy == "filtered"


def test_no_filter_over_a_group_in_a_captured_graph_or_without_a_gradient():
    spec, options = PairSpec(row_lse=True, positive="one", drop_rows=True), TileOptions(filter_tolerance=0.1)
    assert not is_filtered(10, COLS, spec, options, over_group=True)
    assert not is_filtered(10, COLS, spec, options, capturing=True)
    shape = PairShape(10, COLS, 24, torch.float32, torch.device("cpu"), has_row_key=True)
    assert route(shape, spec, options, Needs(a=False, b=False)).strategy == "two_pass"


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(PairSpec)])
def test_what_the_filter_does_not_know_is_exact(name):
    """A statistic that is added to the spec is refused until the filter learns it."""
    plain = PairSpec(row_lse=True, positive="one", drop_rows=True)
    value = getattr(plain, name)
    other = {"positive": "many", "softcap": 3.0, "guide": "kl"}.get(name, not value)
    served = is_filtered(10, COLS, dataclasses.replace(plain, **{name: other}), TileOptions(filter_tolerance=0.1))
    without_effect = ("guide_softcap", "beta", "in_range", "ignored")  # without a guide; of small calls
    known = "softcap", "drop_rows", "row_entropy", "row_top", "row_picked", "same_rows"
    assert served == (name in (*known, *without_effect))


def test_flat_rows_take_the_dense_path():
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
    assert repr(inner).startswith(f"FilterReport(tolerance=[0.01], kept_share={inner.kept_share}, mean_dropped=[")
    assert "tensor" not in repr(outer)
    assert not filter_report.is_recording()


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
    keys = {"row_key": head.target % 100, "row_shift": torch.zeros(20)}
    leaves, loss = (x["input"], x["weight"], x["scale"], x["bias"]), {"weight": torch.full((20,), 0.05)}
    tokens = {"row_entropy": True, "row_top": True}
    for operator, weights, more in (("pair_stats", {}, {}), ("pair_stats", {}, tokens), ("pair_loss", loss, {})):
        spec = PairSpec(row_lse=True, positive="one", drop_rows=True, **more)
        settings = encode(Settings(spec, TileOptions(filter_tolerance=1e-2), needs=Needs(True, True, True, True)))
        inputs = (*leaves, *((keys | weights).get(name) for name in TENSORS[len(leaves) :]), settings)
        registered = getattr(torch.ops.tilewise, operator).default
        torch.library.opcheck(registered, inputs, test_utils=("test_schema", "test_faketensor"))


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
