"""The workspace of a call without a number: the default from its sizes, and "auto", a share of the free memory."""

import itertools

import pytest
import torch
from tests.compare import assert_close
from tests.ring.virtual import run_virtual
from tests.ring.wrapped import wrapped

import tilewise as tw
from tilewise.errors import ConfigError
from tilewise.kernels.spec import Needs, PairShape, PairSpec
from tilewise.kernels.torch_impl.backend import TorchBackend
from tilewise.ops import budget
from tilewise.ops.budget import budget_mib, default_mib, sized, with_budget

AUTO = tw.TileOptions(workspace_mib="auto")
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "free_gib, mib", [(0.01, 64), (1.0, 256), (1.99, 384), (2.0, 512), (30.0, 6144), (500.0, 8192)]
)
def test_a_quarter_rounded_down(free_gib, mib, monkeypatch):
    monkeypatch.setattr(budget, "free_bytes", lambda device: int(free_gib * 2**30))
    assert with_budget(AUTO, CPU, "") == tw.TileOptions(workspace_mib=mib)


def test_it_never_exceeds_the_share():
    for free in range(2**28, 2**36, 2**28 - 12345):
        mib = budget_mib(free)
        assert free / 8 / 2**20 < mib <= free / 4 / 2**20 or mib == 8192


def test_elsewhere_it_is_the_default(monkeypatch):
    monkeypatch.setattr(budget, "free_bytes", lambda device: 2**36)
    assert with_budget(AUTO, CPU, "a group") is AUTO
    assert AUTO.workspace_bytes == tw.TileOptions().workspace_bytes
    monkeypatch.setattr(budget, "free_bytes", lambda device: None)
    assert with_budget(AUTO, CPU, "") is AUTO


def test_a_number_is_kept():
    options = tw.TileOptions(workspace_mib=100)
    assert with_budget(options, CPU, "") is options


def test_the_route_sees_the_number(monkeypatch):
    x, w, y = torch.randn(128, 16, requires_grad=True), torch.randn(400_000, 16), torch.arange(128)
    for free, strategy in ((2**28, "two_pass"), (2**34, "one_pass")):
        monkeypatch.setattr(budget, "free_bytes", lambda device, free=free: free)
        (call,) = tw.explain(tw.linear_cross_entropy, x, w, y, options=AUTO).calls
        assert call.strategy == strategy
        assert call.workspace_bytes <= budget_mib(free) * 2**20


def test_results_with_any_budget(monkeypatch):
    x, w, y = torch.randn(70, 16, requires_grad=True), torch.randn(300, 16, requires_grad=True), torch.arange(70)
    want = torch.autograd.grad(tw.linear_cross_entropy(x, w, y), (x, w))
    for loss in (tw.linear_cross_entropy, torch.compile(tw.linear_cross_entropy, backend="aot_eager", fullgraph=True)):
        got = torch.autograd.grad(loss(x, w, y, options=AUTO), (x, w))
        for one, other in zip(got, want, strict=True):
            assert_close(one, other, 1e-6)


def test_over_a_group(monkeypatch):
    """The free memory of ranks differs, and their options must not."""
    monkeypatch.setattr(budget, "free_bytes", None)  # would fail if called

    def work(group):
        generator = torch.Generator().manual_seed(0)
        a, b = (torch.randn(8, 4, generator=generator) for _ in range(2))
        with wrapped(group) as (name, _):
            return tw.clip_loss(a, b, 10.0, group=name, options=AUTO)

    one, other = run_virtual(2, work)
    assert torch.equal(one, other)


def test_a_wrong_word_is_refused():
    with pytest.raises(ConfigError, match='"auto"'):
        tw.TileOptions(workspace_mib="all")


GPU = torch.device("cuda")
HEAD = PairSpec(row_lse=True, positive="one", drop_rows=True)
BOTH = Needs(a=True, b=True)


def head_shape(n, classes, d, dtype=torch.bfloat16, device=GPU, key=True):
    return PairShape(n, classes, d, dtype, device, has_row_key=key)


@pytest.mark.parametrize(
    "n, classes, d, mib",
    [  # of language models, with 16k and 64k tokens, and of the benchmarks
        (16_384, 128_256, 2048, 2036),
        (16_376, 128_256, 2048, 2036),
        (65_536, 128_256, 2048, 2068),
        (16_384, 151_936, 1024, 1808),
        (65_536, 151_936, 1024, 2428),
        (16_384, 262_144, 1152, 3241),
        (2048, 128_256, 4096, 525),
        (8192, 128_256, 4096, 981),
        (8192, 256_000, 2304, 2280),
        (100, 128_256, 4096, 256),
        (2**20, 262_144, 1152, 4096),
    ],
)
def test_the_default_of_a_head_on_a_gpu(n, classes, d, mib):
    shape = head_shape(n, classes, d)
    assert default_mib(shape) == mib
    assert sized(tw.TileOptions(), shape, HEAD, BOTH).workspace_mib == mib
    logits, gradients = 2 * n * classes, 2 * (n + classes) * d
    if mib > 576:
        assert mib * 2**20 + gradients < 0.67 * (logits + gradients)


SIZES = [1, 100, 1000, 5000, 16_384, 16_385, 65_536, 10**6]


def test_it_never_falls_by_much_with_more_rows():
    """Only where the float32 sum of the classifier's gradient is no longer counted, beyond 16,384 rows."""
    for classes, d, dtype in [(1000, 64, torch.float32), (32_000, 768, torch.bfloat16), (262_144, 4096, torch.float16)]:
        found = [default_mib(head_shape(n, classes, d, dtype)) for n in SIZES]
        sum_mib = 4 * classes * d // 2**20
        assert found[0] == 256
        assert all(256 <= mib <= 4096 for mib in found)
        assert all(more >= fewer - sum_mib for fewer, more in itertools.pairwise(found))


@pytest.mark.parametrize(
    "change, spec, needs",
    [
        ({"device": CPU}, HEAD, BOTH),
        ({}, HEAD, Needs(a=False, b=False)),
        ({}, PairSpec(row_lse=True, col_lse=True, positive="one"), BOTH),
        ({}, PairSpec(row_lse=True, symmetric=True, positive="many"), BOTH),
        ({}, PairSpec(softplus=True, positive="one"), BOTH),
        ({}, PairSpec(row_lse=True, guide="kl", drop_rows=True), BOTH),
        ({"key": False, "d": 512}, PairSpec(row_lse=True, positive="one"), BOTH),
    ],
)
def test_other_calls_have_256(change, spec, needs):
    shape, options = head_shape(**{"n": 16_384, "classes": 128_256, "d": 2048, **change}), tw.TileOptions()
    assert sized(options, shape, spec, needs) is options
    assert options.workspace_bytes == 256 * 2**20
    assert sized(options, head_shape(16_384, 128_256, 2048), HEAD, BOTH).workspace_mib == 2036, "and the head has more"


@pytest.mark.parametrize(
    "settings",
    [{"batch_invariant": True}, {"filter_tolerance": 1e-2}, {"filter_tolerance": "rounding"}, {"workspace_mib": 256}],
    ids=str,
)
def test_other_options_have_256(settings):
    """Bits of invariant rows do not depend on their number; a filter's plan takes the place; a number is a limit."""
    options, shape = tw.TileOptions(**settings), head_shape(65_536, 128_256, 2048)
    assert sized(options, shape, HEAD, BOTH) is options
    assert options.workspace_bytes == 256 * 2**20


def test_rounding_drops_nothing_in_float32():
    shape = head_shape(65_536, 128_256, 2048, torch.float32)
    assert sized(tw.TileOptions(filter_tolerance="rounding"), shape, HEAD, BOTH).workspace_mib == 4096


@pytest.fixture
def numbers(monkeypatch):
    """The ``workspace_mib`` that the kernels get. Here the default of every call, on a CPU too, is 300 + n + 1000 V."""
    seen = []

    def spy(name):
        real = getattr(TorchBackend, name)

        def call(self, *args, **more):
            seen.extend(arg.workspace_mib for arg in args if isinstance(arg, tw.TileOptions))
            return real(self, *args, **more)

        monkeypatch.setattr(TorchBackend, name, call)

    spy("forward"), spy("backward")
    monkeypatch.setattr(budget, "_gains", lambda shape, spec, options, needs: any(needs))
    monkeypatch.setattr(budget, "default_mib", lambda shape: 300 + shape.rows + 1000 * shape.cols)
    monkeypatch.setattr(budget, "free_bytes", None)  # would fail if called
    return seen


def problem(rows=40, classes=7):
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(n, 4, generator=generator, requires_grad=True) for n in (rows, classes))
    return x, w, torch.arange(rows) % classes


def lm_loss(x, w, y):
    return tw.linear_cross_entropy(x, w, y, reduction="none").sum()


@pytest.mark.parametrize("ignored", [0, 9])
@pytest.mark.parametrize("dynamic", [None, False, True], ids=["eager", "static", "dynamic"])
def test_kernels_get_the_number_of_all_rows(dynamic, ignored, numbers, set_limits):
    set_limits(small_cpu=0)
    x, w, y = problem()
    y[:ignored] = -100
    loss = lm_loss if dynamic is None else torch.compile(lm_loss, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    got = torch.autograd.grad(loss(x, w, y), (x, w))
    assert numbers == [300 + 40 + 7000] * 2
    want = torch.autograd.grad(torch.nn.functional.cross_entropy(x @ w.T, y, reduction="sum"), (x, w))
    for one, other in zip(got, want, strict=True):
        assert_close(one, other, 1e-6)


def test_over_a_group_it_is_that_of_the_largest_shard(numbers):
    """All ranks have all rows. 9 ignored rows are dropped, and count."""

    def work(group):
        x, w, y = problem()
        y[:9] = -100
        w = w.detach()[:5] if group.rank() == 0 else w.detach()[5:]
        lm_loss = tw.linear_cross_entropy(x, w.requires_grad_(), y, group=group)
        return torch.autograd.grad(lm_loss, x)[0]

    run_virtual(2, work)
    assert numbers == [300 + 40 + 5000] * 4


def test_explain_tells_the_limit_and_why(numbers, set_limits):
    set_limits(small_cpu=0)
    x, w, y = problem()
    assert "  workspace at most 7,340 MiB: the default for these sizes" in str(tw.explain(lm_loss, x, w, y))
    for options, words in (
        (tw.TileOptions(workspace_mib=5), "at most 5 MiB: workspace_mib"),
        (None, "at most 256 MiB: the default"),
    ):
        (call,) = tw.explain(tw.linear_cross_entropy, x.detach(), w.detach(), y, options=options).calls
        assert call.workspace_limit == words
