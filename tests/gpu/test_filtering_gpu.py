"""Skipping on a CUDA device: the bound, the gradients, waiting, memory, CUDA graphs, torch.compile."""

import pytest
import torch
from tests.compare import assert_close
from tests.gpu import filtering
from tests.gpu.checks import Place, peak_bytes

import tilewise as tw
from tilewise.kernels.triton_impl.filtered import forward as skipping_forward
from tilewise.kernels.triton_impl.two_pass import saved as saving
from tilewise.kernels.triton_impl.two_pass.saved import SavedColumns

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
GPU = Place()
TYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@pytest.fixture(autouse=True)
def small_calls_too(request, set_limits):
    if "small_calls_as_they_are" not in request.fixturenames:
        set_limits(worth_filtering=0)


@pytest.fixture
def small_calls_as_they_are():
    pass


@pytest.mark.usefixtures("nan_filled_empty", "small_calls_as_they_are")
@pytest.mark.parametrize("n, d, m", [(300, 72, 40_000), (6144, 1024, 65_536)])
def test_a_small_call_leaves_nothing_out(n, d, m, seed):
    """Number by number the exact one."""
    head = filtering.make_head(GPU, torch.bfloat16, n, d, m, seed)
    _, want = head.solve(GPU.options(gradients="backward", workspace_mib=256))
    with tw.record_filtering() as report:
        _, grads = head.solve(GPU.options(filter_tolerance=1e-2, workspace_mib=256))
    assert report.dense == [True]
    assert report.kept_share == [1.0]
    assert all(torch.equal(grads[name], value) for name, value in want.items())


@pytest.mark.usefixtures("nan_filled_empty")
@pytest.mark.parametrize("dtype", TYPES.values(), ids=TYPES)
@pytest.mark.parametrize("n, d, m", [(300, 72, 40_000), (1003, 200, 20_011), (130, 1032, 33_000)])
def test_gradients_and_bound(n, d, m, dtype, seed):
    filtering.check_filtered(GPU, dtype, n, d, m, seed)


@pytest.mark.usefixtures("nan_filled_empty")
@pytest.mark.parametrize("size", [1e2, 1e3, 1e4, 1e5])
@pytest.mark.parametrize("dtype", TYPES.values(), ids=TYPES)
def test_large_scores_keep_the_bound_or_take_the_exact_path(dtype, size, seed):
    """The error of each row of the hidden states' gradient, in units of |scale| max |c|."""
    tolerance, draw = 1e-3, torch.Generator("cuda").manual_seed(seed)
    hidden, classifier = (torch.randn(rows, 128, device="cuda", generator=draw) for rows in (512, 40_000))
    hidden = hidden / (hidden @ classifier.T).amax(1, keepdim=True)
    target = torch.randint(0, 40_000, (512,), device="cuda", generator=draw)
    a, c = hidden.to(dtype), classifier.to(dtype)

    def gradient(a, c, solve, **settings):
        a = a.clone().requires_grad_()
        solve(a, c, target, size, **settings).backward()
        return a.grad.double() / (size * c.double().norm(dim=1).max())

    def ours(a, c, target, size, **settings):
        how = {"logit_scale": size, "reduction": "sum", "options": GPU.options(**settings)}
        return tw.linear_cross_entropy(a, c, target, **how)

    def dense(a, c, target, size):
        return torch.nn.functional.cross_entropy(size * a @ c.T, target, reduction="sum")

    got = gradient(a, c, ours, filter_tolerance=tolerance)
    want, plain = gradient(a.double(), c.double(), dense), gradient(a, c, ours, gradients="backward")
    assert (got - want).norm(dim=1).max() <= tolerance + 1.5 * (plain - want).norm(dim=1).max()


@pytest.mark.usefixtures("nan_filled_empty")
@pytest.mark.parametrize("dtype", TYPES.values(), ids=TYPES)
def test_bias_and_soft_cap(dtype, seed):
    filtering.check_filtered(GPU, dtype, 300, 72, 40_000, seed, bias=True)
    filtering.check_filtered(GPU, dtype, 300, 72, 40_000, seed, bias=True, softcap=60.0)


@pytest.mark.usefixtures("nan_filled_empty")
def test_a_small_workspace(seed):
    """Several chunks of columns, groups of tiles and batches of pairs."""
    filtering.check_filtered(GPU, torch.bfloat16, 300, 72, 40_000, seed, workspace_mib=1)


@pytest.mark.usefixtures("nan_filled_empty")
@pytest.mark.parametrize("dtype", TYPES.values(), ids=TYPES)
@pytest.mark.parametrize("n, d, m", [(300, 72, 40_000), (130, 1032, 33_000)])
def test_statistics_of_tokens(n, d, m, dtype, seed):
    filtering.check_tokens(GPU, dtype, n, d, m, seed)


@pytest.mark.usefixtures("probing", "nan_filled_empty")
def test_statistics_of_tokens_after_a_probe(seed):
    filtering.check_tokens(GPU, torch.bfloat16, 300, 72, 40_000, seed)
    filtering.check_tokens(GPU, torch.bfloat16, 300, 72, 40_000, seed, workspace_mib=8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_errors_of_rounding(dtype, seed):
    filtering.check_rounding(GPU, dtype, 1024, 256, 65_536, seed)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
def test_flat_scores(dtype):
    filtering.check_flat(GPU, dtype, 300, 72, 20_000)


@pytest.fixture
def probing(monkeypatch):
    """Small calls ask a sample of their rows too, and carry exponentials where the exact loss would."""
    monkeypatch.setattr(skipping_forward, "WORTH_PROBING", 0)
    monkeypatch.setattr(saving, "WORTH_IT", 0)


SHAPES = pytest.mark.parametrize("n, d, m", [(300, 72, 40_000), (1003, 200, 20_011), (130, 1032, 33_000)])


@pytest.mark.usefixtures("probing", "nan_filled_empty")
@pytest.mark.parametrize("dtype", TYPES.values(), ids=TYPES)
@SHAPES
def test_peaked_scores_after_a_probe(n, d, m, dtype, seed):
    filtering.check_filtered(GPU, dtype, n, d, m, seed)


@pytest.mark.usefixtures("probing", "nan_filled_empty")
def test_bias_and_soft_cap_after_a_probe(seed):
    filtering.check_filtered(GPU, torch.bfloat16, 300, 72, 40_000, seed, bias=True, softcap=60.0)
    filtering.check_filtered(GPU, torch.bfloat16, 300, 72, 40_000, seed, workspace_mib=8)


@pytest.mark.usefixtures("probing", "nan_filled_empty")
@pytest.mark.parametrize("dtype", TYPES.values(), ids=TYPES)
@SHAPES
def test_flat_scores_after_a_probe(n, d, m, dtype):
    filtering.check_probed_flat(GPU, dtype, n, d, m)


@pytest.mark.parametrize("flat", [True, False], ids=["flat", "peaked"])
def test_a_large_call_probes_and_carries(flat, seed, monkeypatch):
    """The memory of the classifier's gradient carries exponentials, or nothing; it is the gradient's either way."""
    n, d, m, workspace = 6144, 1024, 65_536, 256  # worth a probe with a fifth of the rows ignored, too
    made, of = [], SavedColumns.of
    monkeypatch.setattr(SavedColumns, "of", staticmethod(lambda *args: made.append(of(*args)) or made[-1]))
    make = filtering.flat_head if flat else lambda *args: filtering.make_head(*args, seed)
    head = make(GPU, torch.bfloat16, n, d, m)
    _, want = head.solve(GPU.options(gradients="backward"))
    made.clear()
    with tw.record_filtering() as report:
        _, grads = head.solve(GPU.options(filter_tolerance=1e-2, workspace_mib=workspace))
    assert report.dense == [flat]
    assert (report.kept_share == [1.0]) == flat
    assert bool(made[0].needs_repair == 0) == flat
    assert grads["weight"].data_ptr() == made[0].memory.data_ptr()
    made.clear()
    for name, value in want.items():
        # A flat call is exact; beside the filter's plan there is room for fewer saved columns.
        assert_close(grads[name], value, 1e-1 if name == "scale" else 3e-3 if flat else 1e-2, name)
    del grads, want, report
    peak = peak_bytes(lambda: (made.clear(), head.solve(GPU.options(filter_tolerance=1e-2, workspace_mib=workspace))))
    assert peak <= 2 * (n + m) * d + 4 * n * d + (workspace + 32) * 2**20


def test_memory(seed):
    """Gradients, one float32 sum of the row gradients, and the workspace."""
    n, d, m, workspace = 2048, 512, 65_536, 64
    head = filtering.make_head(GPU, torch.bfloat16, n, d, m, seed)
    options = GPU.options(filter_tolerance=1e-2, workspace_mib=workspace)
    peak = peak_bytes(lambda: head.solve(options))
    assert peak <= 2 * (n + m) * d + 4 * n * d + (workspace + 8) * 2**20


def test_torch_compile_makes_one_graph(seed):
    torch._dynamo.reset()
    head = filtering.make_head(GPU, torch.bfloat16, 300, 72, 20_000, seed)
    options = GPU.options(filter_tolerance=1e-2)
    whole = torch.compile(lambda: head.loss(options), fullgraph=True)
    grads = torch.autograd.grad(whole(), list(head.leaves.values()))
    _, want = head.solve(options)
    for value, (name, expected) in zip(grads, want.items(), strict=True):
        assert_close(value, expected, 1e-5, name)


def test_a_captured_graph_computes_everything(seed):
    head = filtering.make_head(GPU, torch.bfloat16, 300, 72, 20_000, seed)
    options = GPU.options(filter_tolerance=0.5)
    _, want = head.solve(GPU.options(gradients="backward"))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        head.solve(options)
        head.solve(GPU.options(gradients="backward"))  # compiled before the capture
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), tw.record_filtering() as report:
        _, grads = head.solve(options)
    graph.replay()
    torch.cuda.synchronize()
    assert len(report) == 0
    for name, value in want.items():
        assert torch.equal(grads[name], value)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_picked_classes(dtype, seed, set_limits):
    """Gradients of picked classes that sum to 0 in every row leave none to the softmax: nothing is lost."""
    set_limits(worth_filtering=0)
    n, d, m, k = 1024, 256, 40_000, 6
    head = filtering.make_head(GPU, dtype, n, d, m, seed)
    leaves = [head.leaves["input"], head.leaves["weight"]]
    generator = torch.Generator(GPU.device).manual_seed(seed)
    pick = torch.randint(0, m, (n, k), device=GPU.device, generator=generator)
    pick[::2, 1] = pick[::2, 0]
    coming = torch.randn(n, k, device=GPU.device, generator=generator)
    coming = coming - coming.mean(1, keepdim=True)

    def solved(dtype, **settings):
        x, w = (leaf.detach().to(dtype).requires_grad_() for leaf in leaves)
        found = tw.linear_token_stats(x, w, head.target, want=("log_prob",), pick=pick, options=GPU.options(**settings))
        return torch.autograd.grad((found.picked * coming).sum(), (x, w))

    with tw.record_filtering() as report:
        got = solved(dtype, filter_tolerance=1e-2)
    assert report.kept_share[0] < 0.5
    x, w = (leaf.detach().double().requires_grad_() for leaf in leaves)
    valid = (head.target >= 0)[:, None]
    own = (x[:, None] * w[pick]).sum(2)
    exact = torch.autograd.grad((torch.where(valid, own, 0.0) * coming).sum(), (x, w))
    for index in (0, 1):
        assert_close(got[index], exact[index], 4e-3 if dtype == torch.bfloat16 else 1e-4, f"gradient {index}")
