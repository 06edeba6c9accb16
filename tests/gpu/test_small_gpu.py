"""Small batches on a CUDA device: accuracy, no waiting, torch.compile, CUDA graphs, threads, memory."""

import threading
from types import SimpleNamespace

import pytest
import torch
from tests.compare import assert_close, relative_error
from tests.gpu import checks
from tests.gpu.checks import GRAD_FLOOR, LOSS_FLOOR, Place, assert_accurate
from tests.losses.loss_cases import converted, problem, solve, upstream_like
from tests.ops.test_small import SERVED

import tilewise as tw
from tilewise.errors import BackendError
from tilewise.kernels.registry import forget_choices
from tilewise.kernels.triton_impl import launch
from tilewise.kernels.triton_impl.small import stats, strategy

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
GPU, MIB = Place(), 2**20
FEW = ["clip", "siglip", "nt_xent", "supcon", "info_nce_ids", "cross_entropy_bias", "cross_entropy_z_loss"]
EACH_ROW = ["info_nce", "siglip", "cross_entropy_bias", "cross_entropy_softcap", "info_nce_shared_masked"]
SIZES = [(7, 5), (300, 33), (1500, 72)]  # rows and features
# A rounded number may hit the truth by luck. Of single numbers in float32, such as the gradient of a scale:
SCALAR_FLOOR = GRAD_FLOOR | {torch.float32: 1e-5}
TYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)


@pytest.fixture(autouse=True)
def ran(monkeypatch):
    """The programs of small batches that ran, in order. Without any, a test has looked at another strategy."""
    found, run = [], strategy.run_small

    def counted(program, key, given):
        found.append(program)
        return run(program, key, given)

    for module in (strategy, stats):
        monkeypatch.setattr(module, "run_small", counted)
    yield found
    assert found


@pytest.mark.usefixtures("nan_filled_empty")
@TYPES
@pytest.mark.parametrize(("n", "d"), SIZES)
@pytest.mark.parametrize("name", SERVED)
def test_equals_the_oracle(name, n, d, dtype, seed):
    """At most 1.5 times the error of a dense loss in the same type. The same bits twice, and the host never waits."""
    made, options = problem(name, dtype, n=n, d=d, seed=seed, device="cuda"), GPU.options()
    loss, grads = solve(made.ours, made.leaves, options=options)
    want, want_grads = solve(made.dense, converted(made.leaves, torch.float64))
    dense, dense_grads = solve(made.dense, made.leaves)
    assert loss.dtype == torch.float32
    assert_accurate(loss, dense, want, LOSS_FLOOR, "loss")
    rounding = torch.finfo(dtype).eps / 2 if n == 7 else 0.0  # so few numbers may be lucky together
    for leaf, exact in want_grads.items():
        assert grads[leaf].dtype == made.leaves[leaf].dtype
        floor = SCALAR_FLOOR[dtype] if exact.dim() < 2 else max(3e-6, rounding)
        assert_accurate(grads[leaf], dense_grads[leaf], exact, floor, leaf)
    with GPU.no_waiting():
        again, again_grads = solve(made.ours, made.leaves, options=options)
    assert torch.equal(again, loss)
    assert all(torch.equal(again_grads[leaf], grads[leaf]) for leaf in grads)


@pytest.mark.usefixtures("nan_filled_empty")
@TYPES
@pytest.mark.parametrize(("n", "d"), SIZES)
@pytest.mark.parametrize("name", EACH_ROW)
def test_each_row_equals_the_oracle(name, n, d, dtype, seed, ran):
    """Two programs, forward and backward: at most 1.5 times the error of a dense loss, and the host never waits."""
    made, options = problem(name, dtype, n=n, d=d, seed=seed, device="cuda"), GPU.options()
    exact = converted(made.leaves, torch.float64)
    upstream = upstream_like(made.dense(SimpleNamespace(**exact), reduction="none")).abs().cuda()
    loss, grads = solve(made.ours, made.leaves, upstream, reduction="none", options=options)
    assert len(ran) >= 2
    want, want_grads = solve(made.dense, exact, upstream, reduction="none")
    dense, dense_grads = solve(made.dense, made.leaves, upstream, reduction="none")
    assert_accurate(loss, dense, want, LOSS_FLOOR, "loss")
    rounding = torch.finfo(dtype).eps / 2 if n == 7 else 0.0
    for leaf, values in want_grads.items():
        floor = SCALAR_FLOOR[dtype] if values.dim() < 2 else max(3e-6, rounding)
        assert_accurate(grads[leaf], dense_grads[leaf], values, floor, leaf)
    with GPU.no_waiting():
        again, again_grads = solve(made.ours, made.leaves, upstream, reduction="none", options=options)
    assert torch.equal(again, loss)
    assert all(torch.equal(again_grads[leaf], grads[leaf]) for leaf in grads)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", FEW)
def test_any_scale_from_upstream(name, dtype, seed):
    """Multiplied by a power of 2, as loss scaling does, gradients are as exact; otherwise they may be rounded again."""
    made, options = problem(name, dtype, n=300, d=72, seed=seed, device="cuda"), GPU.options()
    _, exact = solve(made.dense, converted(made.leaves, torch.float64))
    _, once = solve(made.ours, made.leaves, options=options)
    for k, factor in ((65536.0, 1.05), (3.0, 1.6)):
        _, grads = solve(lambda p, k=k: k * made.ours(p, options=options), made.leaves)
        for leaf, want in exact.items():
            ours, theirs = relative_error(grads[leaf], k * want), relative_error(once[leaf], want)
            assert ours <= factor * theirs + (1e-6 if want.dim() == 2 else GRAD_FLOOR[dtype]), (leaf, k)


@TYPES
@pytest.mark.parametrize("name", ["clip", "siglip", "cross_entropy_bias", "supcon"])
def test_cuda_graphs(name, dtype, seed):
    checks.check_captured(name, dtype, n=300, d=72, seed=seed)


def test_a_graph_cannot_be_captured_before_a_first_call(seed, monkeypatch):
    """A call of other sizes does not help; one call of the same sizes does."""
    monkeypatch.setattr(launch, "_compiled", {})  # other tests load kernels too
    made = problem("clip", torch.bfloat16, n=300, d=72, seed=seed, device="cuda")
    smaller = problem("clip", torch.bfloat16, n=200, d=72, seed=seed, device="cuda")
    options = GPU.options()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())

    def capture():
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            return graph, *solve(made.ours, made.leaves, options=options)

    with torch.cuda.stream(side):  # cuBLAS makes its workspace for the stream
        solve(smaller.ours, smaller.leaves, options=options)
    torch.cuda.synchronize()
    with pytest.raises(
        BackendError, match=r"kernels cannot be loaded.*Call the loss once with tensors of these shapes"
    ):
        capture()
    torch.cuda.synchronize()
    solve(made.ours, made.leaves, options=options)
    torch.cuda.synchronize()
    graph, loss, grads = capture()
    with torch.no_grad():
        for leaf, value in problem("clip", torch.bfloat16, n=300, d=72, seed=seed + 1, device="cuda").leaves.items():
            made.leaves[leaf].copy_(value)
    want, want_grads = solve(made.ours, made.leaves, options=options)
    graph.replay()
    torch.cuda.synchronize()
    assert_close(loss, want, 1e-6, "loss")
    for leaf, grad in want_grads.items():
        assert_close(grads[leaf], grad, GRAD_FLOOR[torch.bfloat16], leaf)


@pytest.mark.parametrize("name", FEW)
def test_torch_compile_makes_one_graph(name, seed):
    checks.check_compiled(GPU, name, torch.bfloat16, n=600, d=72, seed=seed)


def test_torch_compile_captures_graphs_of_its_own(seed):
    """mode="reduce-overhead" captures after a first call, and replays with the numbers of each step."""
    torch._dynamo.reset()
    made = problem("clip", torch.bfloat16, n=300, d=72, seed=seed, device="cuda")
    leaves, options = list(made.leaves.values()), GPU.options()
    compiled = torch.compile(
        lambda image, text, scale: tw.clip_loss(image, text, scale, options=options),
        fullgraph=True,
        mode="reduce-overhead",
    )
    for turn in range(5):
        torch.compiler.cudagraph_mark_step_begin()
        loss = compiled(*leaves)
        grads = [grad.clone() for grad in torch.autograd.grad(loss, leaves)]
        want, want_grads = solve(made.ours, made.leaves, options=options)
        assert_close(loss, want, 1e-5, f"loss {turn}")
        for leaf, grad in zip(made.leaves, grads, strict=True):
            assert_close(grad, want_grads[leaf], GRAD_FLOOR[torch.bfloat16], f"{leaf} {turn}")
        with torch.no_grad():
            leaves[0].copy_(leaves[0].roll(1, 0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", FEW)
def test_a_second_backward(name, dtype, seed):
    """The first one may overwrite what forward saved, and the second computes it again. Powers of 2 are exact."""
    made, options = problem(name, dtype, n=300, d=72, seed=seed, device="cuda"), GPU.options()
    _, once = solve(made.ours, made.leaves, options=options)
    leaves = list(made.leaves.values())
    loss = made.ours(SimpleNamespace(**made.leaves), options=options)
    first = torch.autograd.grad(loss, leaves, torch.tensor(4.0, device="cuda"), retain_graph=True)
    second = torch.autograd.grad(loss, leaves, torch.tensor(-0.5, device="cuda"))
    for leaf, one, other in zip(made.leaves, first, second, strict=True):
        assert once[leaf].abs().max() > 0
        assert_close(one, 4.0 * once[leaf], 1e-6, leaf)
        assert_close(other, -0.5 * once[leaf], 1e-6, leaf)


@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")  # torch says so in each new thread
def test_four_threads_load_and_run_the_same_kernels(seed):
    """Four kinds of calls from four threads at once give what each gives alone."""
    names = ("clip", "nt_xent", "info_nce_ids", "siglip")
    made, options = (
        [problem(name, torch.bfloat16, n=300, d=72, seed=seed, device="cuda") for name in names],
        GPU.options(),
    )
    want = [solve(one.ours, one.leaves, options=options) for one in made]
    forget_choices()  # programs are made and kernels looked up again, now by all threads at once
    start, wrong = threading.Barrier(4), []

    def work(first):
        try:
            start.wait()
            for turn in range(20):
                place = (first + turn) % 4
                loss, grads = solve(made[place].ours, made[place].leaves, options=options)
                same = torch.equal(loss, want[place][0])
                same &= all(torch.equal(grads[leaf], want[place][1][leaf]) for leaf in grads)
                if not same:
                    wrong.append(names[place])
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_another_stream(seed):
    """Launches go to the current stream: nothing waits for the default one."""
    made, options = problem("clip", torch.bfloat16, n=300, d=72, seed=seed, device="cuda"), GPU.options()
    want, want_grads = solve(made.ours, made.leaves, options=options)
    busy = torch.randn(8192, 8192, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    for _ in range(20):
        busy = busy @ busy  # the default stream has much to do
    with torch.cuda.stream(side):
        loss, grads = solve(made.ours, made.leaves, options=options)
        side.synchronize()
        assert torch.equal(loss, want)
        assert all(torch.equal(grads[leaf], want_grads[leaf]) for leaf in grads)
    torch.cuda.synchronize()


def features(n, d, seed):
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(n, d, device="cuda", generator=generator).div_(d**0.5).bfloat16().requires_grad_()


def clip_step():
    a, b = features(4096, 512, 1), features(4096, 512, 2)
    return (tw.clip_loss, a, b, 14.3), (a, b)


def head_step():
    a, b = features(1024, 512, 1), features(32_768, 512, 2)
    return (tw.linear_cross_entropy, a, b, torch.randint(0, 32_768, (1024,), device="cuda")), (a, b)


@pytest.mark.parametrize("make", [clip_step, head_step])
def test_memory_is_that_of_the_program(make, ran):
    """Within 5 % and 2 MiB, and `explain` promises no less."""
    (loss, *inputs), leaves = make()
    options = tw.TileOptions(backend="triton")
    peak = checks.peak_bytes(lambda: torch.autograd.grad(loss(*inputs, options=options), leaves))
    program = ran[0]
    scores = 6 * inputs[0].shape[0] * inputs[1].shape[0]  # float32, and G in bfloat16
    assert program.peak_bytes >= scores
    assert abs(peak - program.peak_bytes) <= 0.05 * program.peak_bytes + 2 * MIB
    (found,) = tw.explain(loss, *inputs, options=options).calls
    assert found.strategy == "small"
    assert f"peak: {program.peak_bytes:,} bytes" in found.program
    assert program.peak_bytes <= found.peak_bytes <= 1.05 * program.peak_bytes + 2 * MIB
