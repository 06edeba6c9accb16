"""filter_tolerance="rounding": what it resolves to, and errors that stay within those of a dense path in a half type.

A GPU rounds G to the features' type before its products, also without a filter. The dense filter of these tests does
not. So the error of the filter alone is measured with features in float32, and added to a gradient with a rounded G.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from tests.compare import relative_error

import tilewise as tw
from tilewise.kernels import filter_plan as plans
from tilewise.kernels.registry import forget_choices
from tilewise.kernels.spec import PairSpec
from tilewise.ops.call import Settings, decode, encode
from tilewise.options import TileOptions

pytestmark = pytest.mark.usefixtures("filter_on_cpu")
ROUNDING = TileOptions(filter_tolerance="rounding", gradients="backward")


@pytest.mark.parametrize(
    "dtype, number",
    [(torch.bfloat16, 2.0**-7), (torch.float16, 2.0**-10), (torch.float32, 0.0), (torch.float64, 0.0)],
    ids=["bfloat16", "float16", "float32", "float64"],
)
def test_what_it_resolves_to(dtype, number):
    assert plans.tolerance_of(ROUNDING, dtype) == number
    hidden, classes = torch.randn(40, 16).to(dtype).requires_grad_(), torch.randn(500, 16).to(dtype)
    target = torch.arange(40)
    for loss in (tw.linear_cross_entropy, tw.linear_token_stats):
        with tw.record_filtering() as report:
            loss(hidden, classes, target, options=ROUNDING)
        assert report.tolerance == ([number] if number else [])
        found = tw.explain(loss, hidden, classes, target, options=ROUNDING).calls[0]
        assert (found.strategy == "filtered") == (number > 0)
        assert ('filter_tolerance is "rounding": ' in found.reason) == (number > 0)


def test_it_travels_as_text():
    for tolerance in ("rounding", 0.0, 0.1, 1e-7):
        options = TileOptions(filter_tolerance=tolerance)
        assert decode(encode(Settings(PairSpec(row_lse=True), options))).options == options


def head(n=192, d=48, classes=32768, slope=1.8, noise=2.0, boost=7.0, cluster=0.0, seed=0):
    """-slope ln(rank) + noise, the target raised by boost; features that bfloat16 holds exactly."""
    g = torch.Generator().manual_seed(seed)
    a, b = torch.randn(n, d, generator=g), noise * torch.randn(classes, d, generator=g) / math.sqrt(d)
    target = ((classes + 1.0) ** torch.rand(n, generator=g)).long() - 1
    own = b[target]
    a += boost * own / own.square().sum(1, keepdim=True)
    a[:, 0], b[:, 0] = 1.0, -slope * torch.arange(1, classes + 1).log()
    b[64:, 1] += cluster * (torch.rand(classes - 64, generator=g) < 0.05)
    return a.bfloat16().float(), b.bfloat16().float(), target


def with_scores(scores, target):
    """A head whose scores are these."""
    return scores, torch.eye(scores.shape[1]), target


def own_scores(n=256, classes=1024):
    g = torch.Generator().manual_seed(1)
    return torch.randn(n, classes, generator=g), torch.randint(0, classes, (n,), generator=g)


def heavy_tail(n=256, classes=1024):
    x, target = own_scores(n, classes)
    g = torch.Generator().manual_seed(2)
    common = torch.randn(classes, generator=g) / torch.randn(classes, generator=g).abs()
    return with_scores(x + common.clamp(-8, 8), target)


def one_heavy_column_in_each_tile(n=256, classes=1024):
    """Everything that a row may drop in a tile is in one column of it, so that the mean is no good stand-in."""
    x, target = own_scores(n, classes)
    lone = torch.arange(classes) % 16 == 3
    return with_scores(torch.where(lone, 2.0 * x - 5.0, x - 30.0) + 9.3 * F.one_hot(target, classes), target)


SCORES = {
    "peaked": head,
    "less peaked": lambda: head(slope=1.5),
    "very peaked": lambda: head(slope=3.0),
    "flat": lambda: head(slope=0.0, noise=1.0, boost=0.0),
    "heavy tail": heavy_tail,
    "each row its own": lambda: with_scores(8.0 * own_scores()[0], own_scores()[1]),
    "confident": lambda: head(boost=15.0),
    "very confident": lambda: head(boost=25.0),
    "tail with a direction of its own": lambda: head(cluster=2.0),
    "one heavy column in each tile": one_heavy_column_in_each_tile,
}


@pytest.fixture
def as_if(monkeypatch):
    """float32 features have the tolerance of a half type, and the filter is used however many entries are kept."""

    def patch(dtype):
        monkeypatch.setattr(plans, "ROUNDING_SHARE", 1e9)
        monkeypatch.setattr(plans, "tolerance_of", lambda options, _: torch.finfo(dtype).eps)
        forget_choices()

    yield patch
    monkeypatch.undo()
    forget_choices()


def total(log_prob, entropy, kind, seed=5):
    g = torch.Generator().manual_seed(seed)
    advantage, bonus = (torch.randn(len(log_prob), generator=g).to(log_prob) for _ in range(2))
    if kind == "loss":
        return -log_prob.sum()
    value = 0.0 if kind == "entropy" else (advantage * log_prob).sum()
    return value if kind == "log_prob" else value + (bonus * entropy).sum()


def dense(a, b, target, kind, dtype):
    """G and both gradients; with ``dtype``, logits and G are rounded to it."""
    logits = a @ b.T
    if dtype is not None:
        logits = logits.to(dtype).to(a.dtype)
    logits.requires_grad_()
    log_p = logits.log_softmax(1)
    log_prob, entropy = log_p.gather(1, target[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(1)
    (g,) = torch.autograd.grad(total(log_prob, entropy, kind), logits)
    g = g if dtype is None else g.to(dtype).to(a.dtype)
    return g, g @ b, g.T @ a


def filtered(a, b, target, kind, options):
    a, b = a.clone().requires_grad_(), b.clone().requires_grad_()
    want = ("log_prob",) if kind in ("loss", "log_prob") else ("log_prob", "entropy")
    stats = tw.linear_token_stats(a, b, target, want=want, options=options)
    return torch.autograd.grad(total(stats.log_prob, stats.entropy, kind), (a, b))


def check_errors(problem, kind, dtype):
    """At most 1.05 times the errors of the dense path, or of exact gradients whose G is rounded. Returns the report."""
    a, b, target = problem
    _, *want = dense(a.double(), b.double(), target, kind, None)
    _, *rival = dense(a, b, target, kind, dtype)
    g, *exact = dense(a, b, target, kind, None)
    g = g.to(dtype).float()
    rounded = g @ b, g.T @ a
    with tw.record_filtering() as report:
        got = filtered(a, b, target, kind, ROUNDING)
    assert report.largest_dropped[0] <= torch.finfo(dtype).eps
    for right, other, plain, mine, alone in zip(want, rival, rounded, got, exact, strict=True):
        theirs = max(relative_error(value.to(dtype), right) for value in (other, plain))
        assert relative_error((plain + (mine - alone)).to(dtype), right) <= 1.05 * theirs
    return report


@pytest.mark.parametrize("name", SCORES)
def test_errors_of_the_loss_within_those_of_a_dense_path(name, as_if):
    as_if(torch.bfloat16)
    report = check_errors(SCORES[name](), "loss", torch.bfloat16)
    assert report.dense == [name in ("less peaked", "flat", "heavy tail")]


@pytest.mark.usefixtures("never_dense")
@pytest.mark.parametrize("kind", ["log_prob", "entropy", "both"])
@pytest.mark.parametrize("name", ["peaked", "confident", "heavy tail", "tail with a direction of its own"])
def test_errors_of_tokens_within_those_of_a_dense_path(name, kind, as_if):
    """However many entries are kept."""
    as_if(torch.bfloat16)
    settings = {"peaked": {}, "confident": {"boost": 15.0}, "tail with a direction of its own": {"cluster": 2.0}}
    problem = heavy_tail() if name == "heavy tail" else head(n=256, d=64, classes=4000, **settings[name])
    assert check_errors(problem, kind, torch.bfloat16).kept_share[0] < 0.95


@pytest.mark.usefixtures("never_dense")
@pytest.mark.parametrize("kind", ["loss", "both"])
def test_errors_within_those_of_a_dense_path_in_float16(kind, as_if):
    as_if(torch.float16)
    assert check_errors(head(n=256, d=64, classes=4000), kind, torch.float16).kept_share[0] < 0.95


def test_a_number_is_not_enough_for_confident_rows(as_if):
    """A tolerance that does not know how small a row's gradient is has larger errors than the dense path."""
    a, b, target = head(boost=25.0)
    as_if(torch.bfloat16)
    got = filtered(a, b, target, "loss", TileOptions(filter_tolerance=2.0**-7))
    _, *exact = dense(a, b, target, "loss", None)
    fine = filtered(a, b, target, "loss", ROUNDING)
    for coarse, close, right in zip(got, fine, exact, strict=True):
        assert relative_error(coarse, right) > 2 * relative_error(close, right)
