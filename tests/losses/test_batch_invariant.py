"""`TileOptions(batch_invariant=True)`: bits that do not depend on the batch, exact values, and what is refused."""

from types import SimpleNamespace

import pytest
import torch
from tests.compare import assert_close, assert_no_worse
from tests.losses.invariance import Pool, different
from tests.losses.loss_cases import CASES, converted, problem, solve, upstream_like

import tilewise as tw
from tilewise.errors import BackendError
from tilewise.kernels import known_faults
from tilewise.kernels.registry import choose_backend
from tilewise.kernels.spec import Needs, PairShape, PairSpec
from tilewise.kernels.torch_impl.backend import TorchBackend
from tilewise.ops import row_blocks
from tilewise.ops.paired_scores import positive_shift
from tilewise.ops.route import route

INVARIANT = tw.TileOptions(batch_invariant=True)
ALONE = sorted(name for name in CASES if name.startswith(("cross_entropy", "logsumexp", "tokens")))
TYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture
def short_blocks(monkeypatch):
    """So that a hundred rows take several blocks."""
    monkeypatch.setattr(row_blocks, "CPU_ROWS", 32)


@pytest.mark.usefixtures("nan_filled_empty", "short_blocks")
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_row_has_the_same_bits_in_every_batch(dtype):
    pool = Pool(dtype, n=100, v=157, d=40, options=INVARIANT)
    pairs, wrong = different(pool, pool.batches(60, (3, 20, 100)))
    assert pairs >= 1000
    assert wrong == 0


@pytest.fixture
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("threads", [1, 3], indirect=True)
def test_blocks_of_the_usual_size_and_several_threads():
    pool = Pool(torch.float32, n=300, v=515, d=72, options=INVARIANT)
    pairs, wrong = different(pool, pool.batches(6, (2, 300)))
    assert pairs >= 300
    assert wrong == 0


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("threads", [3], indirect=True)
def test_shifts_of_wide_rows():
    """Torch adds up a single long row with several threads, and several rows with one thread each."""
    a, b, index = torch.randn(9, 70_001), torch.randn(9, 70_001), torch.arange(9)

    def shifts(rows, options):
        return positive_shift(a[rows], b, torch.ones(()), index[rows], options)

    def same(options):
        return all(torch.equal(shifts(index[i : i + 1], options), shifts(index, options)[i : i + 1]) for i in range(9))

    assert same(INVARIANT)
    assert not same(tw.TileOptions())


def test_without_the_option_bits_differ():
    pool = Pool(torch.float32, n=100, v=157, d=40, options=tw.TileOptions())
    assert different(pool, pool.batches(10, (3, 20)), say=lambda _: None)[1] > 0


@pytest.mark.usefixtures("nan_filled_empty", "short_blocks", "small_tiles")
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("name", ALONE)
def test_float64(name, reduction):
    made = problem(name)
    upstream = upstream_like(made.dense(SimpleNamespace(**made.leaves), reduction=reduction))
    loss, grads = solve(made.ours, made.leaves, upstream, reduction=reduction, options=INVARIANT)
    want, want_grads = solve(made.dense, made.leaves, upstream, reduction=reduction)
    assert_close(loss, want, 1e-12, "loss")
    for leaf in want_grads:
        assert_close(grads[leaf], want_grads[leaf], 1e-12, leaf)


@pytest.mark.usefixtures("nan_filled_empty", "short_blocks")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["cross_entropy_everything", "tokens_with_entropy"])
def test_half_types_lose_no_more_than_dense(name, dtype):
    made = problem(name, dtype)
    exact = converted(made.leaves, torch.float64)
    loss, grads = solve(made.ours, made.leaves, options=INVARIANT)
    dense, dense_grads = solve(made.dense, made.leaves)
    want, want_grads = solve(made.dense, exact)
    assert_no_worse(loss, dense, want, "loss")
    for leaf in want_grads:
        assert_no_worse(grads[leaf], dense_grads[leaf], want_grads[leaf], leaf)


SIZES = [(0, 20, 8), (1, 20, 8), (256, 20, 8), (257, 20, 8), (5, 20, 1), (5, 20, 0), (0, 20, 0)]


@pytest.mark.parametrize("rows, classes, width", SIZES)
def test_sizes(rows, classes, width):
    hidden = torch.randn(rows, width, dtype=torch.float64, requires_grad=True)
    head, target = torch.randn(classes, width, dtype=torch.float64, requires_grad=True), torch.arange(rows) % classes
    results = []
    for options in (INVARIANT, tw.TileOptions()):
        loss = tw.linear_cross_entropy(hidden, head, target, reduction="sum", options=options)
        results.append((loss, *torch.autograd.grad(loss, (hidden, head))))
    for got, want in zip(*results, strict=True):
        assert_close(got, want, 1e-12)


def test_no_columns():
    hidden = torch.randn(5, 8, requires_grad=True)
    lse = tw.linear_logsumexp(hidden, torch.randn(0, 8), options=INVARIANT)
    assert torch.equal(lse, torch.full((5,), -torch.inf))
    assert not torch.autograd.grad(lse.sum(), hidden)[0].any()


@pytest.fixture
def hopper(monkeypatch):
    """The choice of a backend asks a card only for its capability."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(known_faults, "triton_version", lambda: None)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("sizes", [(0, 20, 8), (5, 0, 8), (5, 20, 0)], ids=str)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_without_scores_the_torch_backend_serves_a_gpu(sizes, dtype):
    """As after a batch whose targets are all ignored: 0 rows stay."""
    shape = PairShape(*sizes, dtype=dtype, device=torch.device("cuda", 0))
    for spec in (PairSpec(row_lse=True), PairSpec(row_lse=True, row_top=True, positive="one", drop_rows=True)):
        assert choose_backend(shape, spec, INVARIANT).name == "torch"
        assert route(shape, spec, INVARIANT, Needs(True, True)).backend.name == "torch"


@pytest.mark.usefixtures("hopper")
def test_products_of_cublas_are_refused_with_what_to_do():
    shape = PairShape(rows=5, cols=20, width=8, dtype=torch.float64, device=torch.device("cuda", 0))
    with pytest.raises(BackendError, match=r"5 x 20 scores.*torch: batch_invariant.*\. Pass batch_invariant=False$"):
        choose_backend(shape, PairSpec(row_lse=True), INVARIANT)
    assert choose_backend(shape, PairSpec(row_lse=True), tw.TileOptions()).name == "torch"


def test_rows_that_are_all_ignored():
    hidden = torch.randn(5, 8, requires_grad=True)
    loss = tw.linear_cross_entropy(
        hidden, torch.randn(20, 8), torch.full((5,), -100), reduction="none", options=INVARIANT
    )
    assert not loss.any()
    assert not torch.autograd.grad(loss.sum(), hidden)[0].any()


@pytest.mark.usefixtures("short_blocks")
def test_the_registered_operator():
    """What a compiled graph calls; it saves rounded statistics, so its gradients have other bits than eager ones."""
    torch._dynamo.reset()
    hidden, head, target = torch.randn(70, 16), torch.randn(90, 16), torch.arange(70)

    def gradients(rows, run):
        leaf = hidden[rows].requires_grad_()
        loss = run(leaf, target[rows])
        return loss.detach(), torch.autograd.grad(loss.sum(), leaf)[0]

    def eager(hidden, target):
        return tw.linear_cross_entropy(hidden, head, target, reduction="none", options=INVARIANT)

    compiled = torch.compile(eager, fullgraph=True, backend="eager", dynamic=True)
    rows = torch.tensor([69, 3, 40])
    for want, got, few in zip(
        gradients(slice(None), eager), gradients(slice(None), compiled), gradients(rows, compiled), strict=True
    ):
        assert_close(got, want, 1e-6)
        assert torch.equal(got[rows], few)


def test_explain_names_the_reason():
    x = torch.empty(4096, 64, requires_grad=True)
    found = tw.explain(tw.linear_cross_entropy, x, torch.empty(500, 64), torch.zeros(4096).long(), options=INVARIANT)
    assert (found.calls[0].strategy, found.calls[0].backend) == ("two_pass", "torch")
    assert "batch_invariant" in found.calls[0].reason


def test_frozen_columns_cost_no_second_pass(monkeypatch):
    """Columns, scale and bias have a backward pass of their own, which runs only if they need a gradient."""
    passes = []
    plain = TorchBackend.backward
    monkeypatch.setattr(
        TorchBackend, "backward", lambda self, *job, **more: passes.append(job[3]) or plain(self, *job, **more)
    )
    hidden, head = torch.randn(9, 8, requires_grad=True), torch.randn(20, 8)
    for needed in (False, True):
        head.requires_grad_(needed)
        loss = tw.linear_cross_entropy(hidden, head, torch.arange(9), reduction="none", options=INVARIANT)
        loss.sum().backward()
    assert passes == [Needs(a=True, b=False), Needs(a=False, b=True), Needs(a=True, b=False)]
