"""The probe of the filter: a sample of the rows decides between filter and exact case, in Triton's interpreter."""

import dataclasses
import weakref

import pytest
import torch
import torch.nn.functional as F
from tests import dense_filter
from tests.compare import assert_close
from tests.kernels.interpreted import INTERPRETED
from tests.kernels.quick_interpreter import make_quick
from tests.kernels.test_filtered_interpreter import make_pair

import tilewise as tw
from tilewise.kernels import filter_plan as plans
from tilewise.kernels.host_scalar import HostScalar
from tilewise.kernels.spec import Needs, PairSpec, Stats
from tilewise.kernels.triton_impl import scores
from tilewise.kernels.triton_impl.backend import TritonBackend
from tilewise.kernels.triton_impl.filtered import forward as filter_forward
from tilewise.kernels.triton_impl.filtered.backward import FilterBackward
from tilewise.kernels.triton_impl.filtered.forward import FilterForward, sample_rows
from tilewise.kernels.triton_impl.filtered.strategy import TritonFilter
from tilewise.kernels.triton_impl.two_pass import backward as gradients
from tilewise.kernels.triton_impl.two_pass import saved as saving
from tilewise.kernels.triton_impl.two_pass.saved import SavedColumns
from tilewise.options import TileOptions

pytestmark = INTERPRETED
OPTIONS = TileOptions(backend="triton", precision="highest", filter_tolerance=1e-2)
EXACT = dataclasses.replace(OPTIONS, filter_tolerance=0.0, gradients="backward")
SPEC = PairSpec(row_lse=True, positive="one", drop_rows=True)
TYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
ALWAYS, NEVER = -1.0, 10.0  # shares that no sample falls short of, or exceeds


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Small calls are probed too, and save float32 in chunks of one tile. The interpreter does not support bfloat16."""
    make_quick(monkeypatch)
    monkeypatch.setattr(scores, "_programs", {})
    monkeypatch.setattr(filter_forward, "WORTH_PROBING", 0)
    monkeypatch.setattr(saving, "DTYPES", (torch.float32,))
    monkeypatch.setattr(saving, "WORTH_IT", 0)
    monkeypatch.setattr(saving, "COLS", 64)
    monkeypatch.setattr(saving, "FULL_TILES", 64)
    monkeypatch.setattr(saving, "NARROWEST", 8)


def flat_pair(dtype=torch.float32, **settings):
    pair, grad = make_pair(dtype, **settings)
    return dataclasses.replace(pair, a=pair.a * 0.05), grad


def rule(pair, spec, order, rows, options=OPTIONS):
    """What these rows keep, from all their scores: (T, rows) bool."""
    x = pair.scale.double() * pair.a[rows].double() @ pair.b.double().T
    x = x if pair.bias is None else x + pair.bias.double()
    x = spec.softcap * torch.tanh(x / spec.softcap) if spec.softcap else x
    m, width, tiles = x.shape[1], plans.tile_width(x.shape[1]), plans.tile_count(x.shape[1])
    x = F.pad(x[:, order.long()], (0, tiles * width - m), value=-torch.inf).view(len(rows), tiles, width)
    few = dataclasses.replace(pair, row_key=pair.row_key[rows])
    part = x.logsumexp(2).T
    valid, place, lse = few.row_key >= 0, dense_filter.places_of(order, few), part.logsumexp(0)
    own = x.reshape(len(rows), -1).gather(1, place.clamp(min=0)[:, None]).squeeze(1)
    each = entropy = None
    if spec.row_entropy:
        p = x.softmax(2)
        each = torch.where(p > 0, -p * p.log(), 0.0).nan_to_num().sum(2).T
        entropy = dense_filter.dropped_entropy(part - lse, each).sum(0)
    most = dense_filter.limits(options, m, torch.where(place >= 0, own - lse, -torch.inf), entropy)
    tolerance = plans.tolerance_of(options, pair.a.dtype)
    return dense_filter.choose(part, lse, place[:, None], valid, tolerance, width, most, each) < 0


@TYPES
@pytest.mark.parametrize("softcap", [0.0, 12.0])
@pytest.mark.parametrize("ignored", [0, 25])
@pytest.mark.parametrize("n, m, d", [(70, 331, 24), (1100, 200, 23), (64, 512, 8)])
def test_the_probe_follows_the_rule_for_all_rows(n, m, d, ignored, softcap, dtype, monkeypatch):
    """Ignored rows are not counted."""
    pair, _ = make_pair(dtype, n, m, d, zero=dtype == torch.float32)
    pair.row_key[:ignored] = -1
    asked, plain = [], plans.too_many
    monkeypatch.setattr(plans, "too_many", lambda *args: asked.append(args) or plain(*args))
    spec = dataclasses.replace(SPEC, softcap=softcap)
    forward = FilterForward(pair, spec, OPTIONS)
    assert sample_rows(forward.pair.shape, OPTIONS) == 16
    order, place, keep_all = forward._probe(16)
    ((kept, pairs, share),) = asked
    assert keep_all == plain(kept, pairs, share)
    index = torch.arange(n)[plans.sample_of(n, 16)]
    assert len(index.unique()) == 16
    valid = pair.row_key[index[1:]] >= 0
    want = rule(pair, spec, order, index[1:])[:, valid]
    assert pairs == want.numel() == kept[:, valid].numel()
    assert not kept[:, ~valid].any()
    kept = kept[:, valid]
    assert share == plans.PROBED_SHARE
    # A mass at the threshold may fall on either side of it.
    assert (kept != want).float().mean() < 0.01
    assert 0.01 < want.float().mean() < 0.9
    assert sorted(order.tolist()) == list(range(m))
    assert torch.equal(place[order.long()], torch.arange(m, dtype=torch.int32))
    mean = plans.mean_row(pair).double() @ pair.b.double().T * pair.scale + pair.bias
    falls = mean[order.long()].diff()
    assert not (falls > 0.01).any()


@pytest.mark.parametrize("tolerance", [1e-2, "rounding"])
@pytest.mark.parametrize("entropy", [False, True])
def test_the_probe_of_tokens_and_of_rounding_follows_the_rule(entropy, tolerance, monkeypatch):
    dtype = torch.float16 if tolerance == "rounding" else torch.float32
    pair, _ = make_pair(dtype, 70, 600, 24, zero=dtype == torch.float32)
    if tolerance == "rounding":
        pair.a.add_(pair.b[pair.row_key])  # confident rows, which drop less
    options, spec = (
        dataclasses.replace(OPTIONS, filter_tolerance=tolerance),
        dataclasses.replace(SPEC, row_entropy=entropy),
    )
    asked, plain = [], plans.too_many
    monkeypatch.setattr(plans, "too_many", lambda *args: asked.append(args) or plain(*args))
    order, _, _ = FilterForward(pair, spec, options)._probe(16)
    index = torch.arange(70)[plans.sample_of(70, 16)][1:]
    valid = pair.row_key[index] >= 0
    kept, want = asked[0][0][:, valid], rule(pair, spec, order, index, options)[:, valid]
    assert (kept != want).float().mean() < 0.01
    assert 0.01 < want.float().mean() < 0.98
    if tolerance == "rounding":
        other = rule(pair, spec, order, index, dataclasses.replace(options, filter_tolerance=2.0**-10))[:, valid]
        assert (kept != other).float().mean() > 0.01


def test_no_probe_without_memory_for_a_sample(monkeypatch):
    pair, _ = make_pair(torch.float32)
    monkeypatch.setattr(TileOptions, "workspace_bytes", 2 * 331 * 15 * 4)
    forward = FilterForward(pair, SPEC, OPTIONS)
    assert sample_rows(forward.pair.shape, OPTIONS) == 0
    forward.run()
    assert torch.equal(forward.order, plans.order_columns(pair))
    assert forward.keep_all.tolist() == [0]
    monkeypatch.setattr(TileOptions, "workspace_bytes", 2 * 331 * 16 * 4)
    assert sample_rows(pair.shape, OPTIONS) == 16


@TYPES
@pytest.mark.parametrize("n, m, d", [(70, 331, 24), (130, 400, 40)])
def test_flat_rows_take_the_exact_case(n, m, d, dtype):
    pair, grad = flat_pair(dtype, n=n, m=m, d=d, zero=False)
    stats, plan, held = TritonFilter().forward_saving(pair, SPEC, OPTIONS)
    assert plan.keep_all.tolist() == [1]
    valid = pair.row_key >= 0
    assert (plan.mass[:, valid] == plans.KEPT).all()
    assert (plan.mass[:, ~valid] == 0).all()
    assert (plan.kept == valid.sum()).all()
    assert plan.mean.isfinite().all()
    assert (held is None) == (dtype == torch.float16)
    want, want_held = TritonBackend().forward_saving(pair, SPEC, EXACT)
    for name in ("row_lse", "row_pos", "num_positives"):
        assert torch.equal(getattr(stats, name), getattr(want, name)), name
    needs = Needs(a=True, b=True, scale=True)
    assert TritonFilter().backward(pair, stats, plan, grad, needs, SPEC, OPTIONS, saved=held) is None
    assert held is None or held.needs_repair == 0
    got = TritonBackend().backward(pair, stats, grad, needs, SPEC, OPTIONS, saved=held)
    right = TritonBackend().backward(pair, want, grad, needs, SPEC, EXACT, saved=want_held)
    for name in ("a", "b", "scale"):
        assert torch.equal(getattr(got, name), getattr(right, name)), name


@TYPES
@pytest.mark.parametrize("n, m, d", [(66, 331, 24)])
def test_peaked_rows_are_filtered(n, m, d, dtype, monkeypatch):
    """Same result as without a probe. dB is written to the memory of the saved exponentials."""
    monkeypatch.setattr(plans, "DENSE_SHARE", 0.8)  # a small vocabulary has few tiles
    pair, grad = make_pair(dtype, n, m, d, zero=False)
    needs = Needs(a=True, b=True, scale=True)
    stats, plan, held = TritonFilter().forward_saving(pair, SPEC, OPTIONS)
    assert plan.keep_all.tolist() == [0]
    assert (held is None) == (dtype == torch.float16)
    assert held is None or held.needs_repair > 0
    got = TritonFilter().backward(pair, stats, plan, grad, needs, SPEC, OPTIONS, saved=held)
    assert held is None or (got.b.data_ptr() == held.memory.data_ptr() and held.buffer is None)
    monkeypatch.setattr(plans, "order_columns", lambda pair: plan.order)
    monkeypatch.setattr(filter_forward, "WORTH_PROBING", torch.inf)
    want_stats, want = TritonFilter().forward(pair, SPEC, OPTIONS)
    for name in ("row_lse", "row_pos", "num_positives"):
        assert torch.equal(getattr(stats, name), getattr(want_stats, name)), name
    for name in ("order", "mass", "mean", "kept", "keep_all"):
        assert torch.equal(getattr(plan, name), getattr(want, name)), name
    right = TritonFilter().backward(pair, want_stats, want, grad, needs, SPEC, OPTIONS)
    for name in ("a", "b", "scale"):
        assert torch.equal(getattr(got, name), getattr(right, name)), name


@pytest.mark.parametrize("n, m, d", [(70, 331, 24), (130, 400, 40)])
def test_a_sample_that_was_wrong(n, m, d, monkeypatch):
    """The probe expects few pairs, but many are kept: backward computes all and ignores what was not saved."""
    monkeypatch.setattr(plans, "PROBED_SHARE", NEVER)
    pair, grad = flat_pair(n=n, m=m, d=d, zero=False)
    needs = Needs(a=True, b=True, scale=True)
    stats, plan, held = TritonFilter().forward_saving(pair, SPEC, OPTIONS)
    assert plan.keep_all.tolist() == [1]
    assert held.needs_repair > 0
    assert TritonFilter().backward(pair, stats, plan, grad, needs, SPEC, OPTIONS, saved=held) is None
    got = TritonBackend().backward(pair, stats, grad, needs, SPEC, OPTIONS, saved=held)
    assert got.b.data_ptr() == held.memory.data_ptr()
    want = TritonBackend().backward(pair, TritonBackend().forward(pair, SPEC, EXACT), grad, needs, SPEC, EXACT)
    for name in ("a", "b"):
        assert_close(getattr(got, name), getattr(want, name), 2e-6, name)


def test_several_blocks_of_rows_and_chunks_of_columns(monkeypatch):
    """Both cases in a small workspace."""
    monkeypatch.setattr(TileOptions, "workspace_bytes", 2**15)
    pair, grad = make_pair(torch.float32, n=66, m=203)
    for share, dense in ((ALWAYS, 1), (NEVER, 0)):
        monkeypatch.setattr(plans, "PROBED_SHARE", share)
        monkeypatch.setattr(plans, "DENSE_SHARE", 1.0)
        stats, plan = TritonFilter().forward(pair, SPEC, OPTIONS)
        assert plan.keep_all.tolist() == [dense]
        want = TritonBackend().forward(pair, SPEC, EXACT)
        assert_close(stats.row_lse, want.row_lse, 1e-5, "lse")
        got = TritonFilter().backward(
            pair, Stats(row_lse=want.row_lse), plan, grad, Needs(a=True, b=True), SPEC, OPTIONS
        )
        assert (got is None) == bool(dense)


class Problem:
    """A call of the public function, and what float64 says."""

    def __init__(self, spread, ignored=0, dtype=torch.float32, softcap=None):
        g = torch.Generator().manual_seed(1)
        rank = torch.randperm(300, generator=g) + 1
        hidden = torch.cat([torch.full((72, 1), 4.0), torch.randn(72, 31, generator=g)], 1)
        classifier = torch.cat([(-rank.log() / 4)[:, None], torch.randn(300, 31, generator=g) / 8], 1)
        self.leaves = [x.to(dtype).requires_grad_() for x in (spread * hidden, classifier)]
        self.target, self.softcap = torch.randint(0, 300, (72,), generator=g), softcap
        self.target[:ignored] = -100

    def loss(self, options=OPTIONS):
        return tw.linear_cross_entropy(*self.leaves, self.target, softcap=self.softcap, options=options)

    def dense(self):
        hidden, classifier = (x.detach().double().requires_grad_() for x in self.leaves)
        x = hidden @ classifier.T
        x = x if self.softcap is None else self.softcap * torch.tanh(x / self.softcap)
        return torch.autograd.grad(F.cross_entropy(x, self.target), (hidden, classifier))


@pytest.fixture
def no_shift(monkeypatch):
    """As in bfloat16, where rows have no shift."""
    monkeypatch.setattr("tilewise.losses.cross_entropy.target_scores", lambda *args: None)


@pytest.mark.usefixtures("no_shift")
@pytest.mark.parametrize(
    "spread, ignored, share",
    [(0.1, 0, None), (0.1, 7, None), (0.1, 0, NEVER), (5.0, 7, None), (5.0, 0, ALWAYS)],
    ids=["flat", "flat, some ignored", "flat, filtered", "peaked, some ignored", "peaked, exact"],
)
def test_the_loss_twice_through_one_graph(spread, ignored, share, monkeypatch):
    """The first backward uses the saved memory, the second recomputes. Gradients are right in both cases."""
    if share is not None:
        monkeypatch.setattr(plans, "PROBED_SHARE", share)
    dense = spread < 1 or share == ALWAYS
    problem = Problem(spread, ignored)
    saved, products, plain = [], [], gradients.Backward._gradient

    def watched(self, g, desc, i, j):
        flag = None if self.saved is None else self.saved.needs_repair
        self.scores.program.call(lambda flag: products.append(flag is not None and bool(flag == 0)), flag)
        plain(self, g, desc, i, j)

    monkeypatch.setattr(gradients.Backward, "_gradient", watched)
    of = SavedColumns.of
    monkeypatch.setattr(SavedColumns, "of", staticmethod(lambda *args: saved.append(of(*args)) or saved[-1]))
    with tw.record_filtering() as report:
        loss = problem.loss()
    assert report.dense == [dense]
    assert len(saved) == 1
    assert (report.largest_dropped[0] == 0.0) == dense
    if dense and share != NEVER:
        assert report.kept_share == [1.0]
    first = torch.autograd.grad(loss, problem.leaves, retain_graph=True)
    assert bool(products) == dense
    assert any(products) == (dense and share != NEVER), "exponentials are used where they were saved, and only there"
    assert first[1].data_ptr() == saved[0].memory.data_ptr()
    products.clear()
    second = torch.autograd.grad(loss, problem.leaves)
    assert not any(products)
    for one, other, want in zip(first, second, problem.dense(), strict=True):
        assert_close(one, want, 5e-6 if dense else 1e-2, "first")
        assert_close(other, one, 2e-6, "second")
    exact = torch.autograd.grad(problem.loss(EXACT), problem.leaves)
    if dense and share != NEVER:
        assert all(torch.equal(one, want) for one, want in zip(first, exact, strict=True))


@pytest.mark.parametrize("spread", [0.1, 5.0], ids=["flat", "peaked"])
@pytest.mark.parametrize("settings", [{}, {"dtype": torch.float16}, {"softcap": 20.0}], ids=str)
def test_where_nothing_can_be_saved(settings, spread):
    problem = Problem(spread, **settings)
    with tw.record_filtering() as report:
        loss = problem.loss()
    assert report.dense == [spread < 1]
    got = torch.autograd.grad(loss, problem.leaves)
    for one, want in zip(got, problem.dense(), strict=True):
        assert_close(one, want, 1e-2 if spread > 1 else 3e-3 if settings.get("dtype") else 5e-6)


@pytest.mark.usefixtures("no_shift")
@pytest.mark.parametrize("how", ["only the rows", "a second derivative", "dropped"])
def test_memory_is_not_held_longer_than_needed(how, monkeypatch):
    problem, memory, of = Problem(0.1), [], SavedColumns.of

    def watched(*args):
        found = of(*args)
        memory.append(weakref.ref(found.memory))
        return found

    monkeypatch.setattr(SavedColumns, "of", staticmethod(watched))
    if how == "only the rows":
        problem.leaves[1].requires_grad_(False)
    loss = problem.loss()
    if how == "only the rows":
        assert not memory
    elif how == "a second derivative":
        grads = torch.autograd.grad(loss, problem.leaves, create_graph=True)
        assert memory[0]() is None
        assert_close(grads[0], problem.dense()[0], 5e-6)
    else:
        assert memory[0]() is not None
        del loss
        assert memory[0]() is None


def test_host_scalars_lie_on_the_host_whatever_the_default_device(monkeypatch):
    """Memory that no device can reach cannot be pinned: a default device of "cuda" was an error."""

    class Event:
        record = synchronize = lambda self: None

    plain = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, pin_memory, **how: plain(*args, **how))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    number = torch.ones(1, dtype=torch.int32)
    with torch.device("meta"):
        copy = HostScalar(number)
    assert copy() == 1


def test_entries_are_sorted_by_row_whatever_the_default_device():
    """The ends of the parts are pinned, so they lie on the host. The keys of the sort have 64 bits."""
    work = object.__new__(FilterBackward)
    work.n, work.device = 2**31 - 1, torch.device("cpu")
    work.rows = torch.tensor([5, 2, 5, 9, 1, 0], dtype=torch.int32)
    with torch.device("meta"):
        rows, pairs = work._by_row([slice(0, 2), slice(2, 4), slice(4, 6)])
    assert rows.tolist() == [2, 5, 5, 9, 0, 1]
    assert pairs.tolist() == [1, 0, 2, 3, 5, 4]


def test_host_scalars_wait_for_the_device_of_their_tensor(monkeypatch):
    """The copy runs on a stream of that device. The current device may be another."""

    class Event:
        def record(self, stream="of the current device"):
            seen.append(stream)

        def synchronize(self):
            seen.append("waited")

    class OnAnotherCard:
        is_cuda, device = True, torch.device("cuda", 1)
        shape, dtype = (), torch.float32

    class Host:
        def copy_(self, number, non_blocking):
            seen.append("copied")

        def item(self):
            return 3.0

    seen = []
    monkeypatch.setattr(torch, "empty", lambda *args, **how: Host())
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: f"of {device}")
    assert HostScalar(OnAnotherCard())() == 3.0
    assert seen == ["copied", "of cuda:1", "waited"]


@TYPES
@pytest.mark.parametrize("n, m, d", [(70, 331, 24), (9, 400, 300)])
@pytest.mark.parametrize("what", ["scale", "a row", "an ignored row", "a column", "bias", "infinite bias", "nothing"])
def test_scores_that_are_rounded_too_coarsely(n, m, d, what, dtype):
    """As the torch backend finds it, just below the limit and just above."""
    found = []
    for factor in (0.9, 1.1):
        pair, _ = make_pair(dtype, n, m, d, zero=dtype == torch.float32)
        pair.row_key[3] = -1
        pair.bias[7:] = 0.0
        size = pair.a[pair.row_key >= 0].float().norm(dim=1).amax() * pair.b.float().norm(dim=1).amax()
        limit = plans.ROUNDING_SHARE * 1e-2 / torch.finfo(torch.float32).eps
        scale = torch.full_like(pair.scale, 0.9 * limit / size)
        if what == "scale":
            scale *= factor / 0.9
        row = {"a row": 2, "an ignored row": 3}.get(what)
        if row is not None:
            counted = pair.a[pair.row_key >= 0]
            pair.a[row] = counted[counted.float().norm(dim=1).argmax()] * factor / 0.9
        if what == "a column":
            pair.b[5] = pair.b[pair.b.float().norm(dim=1).argmax()] * factor / 0.9
        if "bias" in what:
            pair.bias[9] = -torch.inf if what == "infinite bias" else (factor - 0.9) * limit
        pair = dataclasses.replace(pair, scale=scale)
        exceeds = FilterForward(pair, SPEC, OPTIONS)._rounding_exceeds()
        assert exceeds.tolist() == dense_filter.rounding_exceeds(pair, 1e-2).tolist()
        found += exceeds.tolist()
    assert found == [0, what in ("scale", "a row", "a column", "bias")]
