"""Gradients formed in forward, on a CUDA device: accuracy, no waiting, torch.compile, CUDA graphs, memory."""

from types import SimpleNamespace

import pytest
import torch
from reproductions.lm_cases import LmCase, make_inputs
from tests.compare import assert_close, assert_no_worse, relative_error
from tests.gpu import checks
from tests.gpu.checks import Place
from tests.losses.loss_cases import converted, problem, solve

import tilewise as tw
from tilewise.kernels.triton_impl.one_pass import strategy as kernels

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
GPU, MIB = Place(), 2**20
SERVED = [
    *("siglip", "info_nce", "info_nce_ids_one_way", "cross_entropy", "cross_entropy_bias", "cross_entropy_weighted"),
    *("cross_entropy_softcap", "cross_entropy_z_loss"),
]


@pytest.fixture(autouse=True)
def always(monkeypatch, set_limits):
    """One pass however small a call or a block is. Compiled graphs know the strategy, so none is taken from a cache."""
    monkeypatch.setattr("torch._inductor.config.force_disable_caches", True)
    set_limits(small=0, worth_one_pass=0, smallest_gpu_block=0)


@pytest.mark.usefixtures("nan_filled_empty")
@pytest.mark.parametrize("mib", [256, 1])
@pytest.mark.parametrize("name", SERVED)
def test_bfloat16(name, mib, seed):
    checks.check_loss(GPU, name, torch.bfloat16, n=1003, d=72, seed=seed, gradients="forward", workspace_mib=mib)


@pytest.mark.usefixtures("nan_filled_empty")
@pytest.mark.parametrize("name", ["siglip", "info_nce", "cross_entropy_bias", "cross_entropy_softcap"])
def test_float32(name, seed):
    checks.check_loss(GPU, name, torch.float32, n=1003, d=72, seed=seed, gradients="forward")


@pytest.mark.usefixtures("nan_filled_empty")
@pytest.mark.parametrize("name", ["siglip", "cross_entropy_bias"])
def test_float16(name, seed):
    checks.check_loss(GPU, name, torch.float16, n=1003, d=72, seed=seed, gradients="forward")


@pytest.mark.usefixtures("nan_filled_empty")
@pytest.mark.parametrize("name", ["siglip", "cross_entropy_bias"])
def test_wide_features(name, seed):
    """From 1,024 features on tiles are larger."""
    checks.check_loss(GPU, name, torch.bfloat16, n=700, d=1100, seed=seed, gradients="forward")


@pytest.mark.parametrize("name", ["siglip", "info_nce", "cross_entropy_bias"])
def test_any_scale_from_upstream(name, seed):
    """Gradients are rounded once, after what comes in is multiplied."""
    made = problem(name, torch.bfloat16, n=700, d=72, seed=seed, device="cuda")
    options = GPU.options(gradients="forward")
    _, exact = solve(made.dense, converted(made.leaves, torch.float64))
    _, once = solve(made.ours, made.leaves, options=options)
    for k in (3.0, 1.0 + 2.0**-9, 65536.0):
        _, grads = solve(lambda p, k=k: k * made.ours(p, options=options), made.leaves)
        for leaf in exact:
            ours, theirs = relative_error(grads[leaf], k * exact[leaf]), relative_error(once[leaf], exact[leaf])
            assert ours <= 1.15 * theirs + (1e-6 if exact[leaf].dim() == 2 else 4e-3), (leaf, k)


@pytest.fixture
def waited(monkeypatch):
    """How often exponentials were kept for backward."""
    calls = []
    real = kernels.exponentials
    monkeypatch.setattr(kernels, "exponentials", lambda *arguments: calls.append(1) or real(*arguments))
    return calls


# 400 rows are one block of a workspace of 1 MiB, and a float32 gradient of the columns takes more than a quarter of it.
LARGE = {"gradients": "forward", "workspace_mib": 1}


@pytest.mark.usefixtures("nan_filled_empty")
@pytest.mark.parametrize("name", ["cross_entropy_bias", "cross_entropy_softcap", "info_nce"])
def test_exponentials_that_wait(name, seed, waited):
    checks.check_loss(GPU, name, torch.bfloat16, n=400, d=200, seed=seed, **LARGE)
    assert waited


def test_gradients_of_exponentials_are_rounded_once(seed, waited):
    """The error is the same whatever comes in: 1.5 times that of a dense loss at most, as everywhere."""
    made = problem("cross_entropy_bias", torch.bfloat16, n=400, d=200, seed=seed, device="cuda")
    options = GPU.options(**LARGE)
    _, exact = solve(made.dense, converted(made.leaves, torch.float64))
    _, once = solve(made.ours, made.leaves, options=options)
    for k in (3.0, 1.0 / 3.0, 1.0 + 2.0**-9, 65536.0):
        _, grads = solve(lambda p, k=k: k * made.ours(p, options=options), made.leaves)
        _, dense = solve(lambda p, k=k: k * made.dense(p), made.leaves)
        for leaf in ("hidden", "classifier"):
            assert relative_error(grads[leaf], k * exact[leaf]) <= 1.05 * relative_error(once[leaf], exact[leaf])
            assert_no_worse(grads[leaf], dense[leaf], k * exact[leaf], leaf)
    assert len(waited) == 5


def lm_problem(kind, seed, n=2048, m=32_768, d=512):
    """Hidden states, classes and targets, in bfloat16. Of n, a power of two, a dense loss rounds -1 / n to itself."""
    case = LmCase(table="1", model="", tokens=n, vocabulary=m, hidden=d, decay=1.8 * (kind == "peaked"))
    made = make_inputs(case, torch.device(GPU.device), torch.bfloat16, seed)
    hidden, classes, target = made["a"].detach(), made["b"].detach(), made["target"]
    if kind == "sure":
        own = classes[target].float()
        hidden = (hidden + 14.0 * own / own.square().sum(1, keepdim=True)).bfloat16()
    elif kind == "one class":
        target = torch.where(torch.arange(n, device=GPU.device) % 8 > 0, 7, target)
    elif kind == "ignored":
        target = torch.where(torch.arange(n, device=GPU.device) % 3 > 0, target, -100)
    return hidden, classes, target


@pytest.mark.parametrize("mib", [192, 1], ids=["waits", "float32"])
@pytest.mark.parametrize("kind", ["flat", "peaked", "sure", "one class", "ignored"])
def test_the_positives_share_is_as_exact_as_that_of_a_dense_loss(kind, mib, seed, waited):
    """Where scores are flat it is all that counts, and a dense loss has it exactly."""
    *features, target = lm_problem(kind, seed)
    options = GPU.options(gradients="forward", workspace_mib=mib)

    def solved(loss, k, dtype=torch.bfloat16):
        leaves = [x.to(dtype).requires_grad_() for x in features]
        return torch.autograd.grad(k * loss(*leaves), leaves)

    def dense(hidden, classes):
        logits = hidden @ classes.T
        return torch.nn.functional.cross_entropy(logits if logits.dtype == torch.float64 else logits.float(), target)

    exact = solved(dense, 1.0, torch.float64)
    for k in (1.0, 3.0):
        grads = solved(lambda *leaves: tw.linear_cross_entropy(*leaves, target, options=options), k)
        again = solved(lambda *leaves: tw.linear_cross_entropy(*leaves, target, options=options), k)
        assert all(torch.equal(one, other) for one, other in zip(grads, again, strict=True))
        for side, got, theirs, want in zip(("rows", "classes"), grads, solved(dense, k), exact, strict=True):
            assert_no_worse(got, theirs, k * want, f"{kind}, {side}, times {k}")
    assert len(waited) == (4 if mib > 1 else 0)


def test_exponentials_wait_in_a_compiled_graph(seed, waited):
    torch._dynamo.reset()
    made = problem("cross_entropy_bias", torch.bfloat16, n=400, d=200, seed=seed, device="cuda")
    options = GPU.options(**LARGE)

    def whole(p):
        return torch.compile(lambda: 3.0 * made.ours(p, options=options), fullgraph=True)()

    loss, grads = solve(whole, made.leaves)
    want, want_grads = solve(lambda p: 3.0 * made.ours(p, options=options), made.leaves)
    assert len(waited) == 2
    assert_close(loss, want, 1e-5)
    for leaf in want_grads:
        assert_close(grads[leaf], want_grads[leaf], 5e-3, leaf)


def test_backward_twice_through_exponentials(seed, waited):
    made = problem("cross_entropy", torch.bfloat16, n=400, d=200, seed=seed, device="cuda")
    leaves = list(made.leaves.values())
    loss = 3.0 * made.ours(SimpleNamespace(**made.leaves), options=GPU.options(**LARGE))
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    second = torch.autograd.grad(loss, leaves)
    assert len(waited) == 2
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("scale", [300.0, 1000.0])
def test_losses_of_hundreds_of_nats(scale, dtype):
    """Exponentials leave their range, and blocks are done again without the host hearing of it."""
    generator = torch.Generator("cuda").manual_seed(1)
    a, b = (torch.randn(n, 64, device="cuda", generator=generator).div_(8).to(dtype) for n in (700, 900))
    target = torch.randint(0, 900, (700,), device="cuda", generator=generator)
    leaves = [x.requires_grad_() for x in (a, b)]

    def solved(options, leaves):
        loss = tw.linear_cross_entropy(*leaves, target, logit_scale=scale, options=options)
        return loss.detach(), torch.autograd.grad(loss, leaves)

    with GPU.no_waiting():
        loss, grads = solved(GPU.options(gradients="forward", workspace_mib=1), leaves)
    want, exact = solved(tw.TileOptions(backend="torch"), [x.detach().double().requires_grad_() for x in leaves])
    assert want.item() > 100.0
    assert_close(loss, want, 1e-5)
    for one, other in zip(grads, exact, strict=True):
        assert_close(one, other, 1e-2 if dtype == torch.bfloat16 else 1e-3)


@pytest.mark.parametrize("scale", [0.0, 300.0])
def test_sigmoid_scores_of_zero_and_of_hundreds(scale):
    generator = torch.Generator("cuda").manual_seed(2)
    a, b = (torch.randn(600, 64, device="cuda", generator=generator).div_(8).requires_grad_() for _ in range(2))
    loss = tw.siglip_loss(a, b, scale, 0.0, options=GPU.options(gradients="forward"))
    exact = [x.detach().double().requires_grad_() for x in (a, b)]
    want = tw.siglip_loss(*exact, scale, 0.0, options=tw.TileOptions(backend="torch"))
    assert_close(loss, want, 1e-6)
    if scale:
        for one, other in zip(torch.autograd.grad(loss, (a, b)), torch.autograd.grad(want, exact), strict=True):
            assert_close(one, other, 1e-4)


def test_a_target_out_of_range_is_not_a_number():
    hidden, classes = (torch.randn(n, 16, device="cuda", requires_grad=True) for n in (50, 70))
    target = torch.arange(50, device="cuda")
    target[7] = 70
    assert tw.linear_cross_entropy(hidden, classes, target, options=GPU.options(gradients="forward")).isnan()


def test_a_bias_that_is_not_a_number_is_seen_in_every_gradient():
    """The smaller of NaN and a number is the number, unless asked otherwise."""
    image, text = (torch.randn(50, 16, device="cuda", requires_grad=True) for _ in range(2))
    bias = torch.tensor(torch.nan, device="cuda", requires_grad=True)
    loss = tw.siglip_loss(image, text, 2.0, bias, options=GPU.options(gradients="forward"))
    assert loss.isnan()
    assert all(grad.isnan().all() for grad in torch.autograd.grad(loss, (image, text, bias)))


@pytest.mark.parametrize("name", ["siglip", "info_nce", "cross_entropy_bias"])
def test_torch_compile_makes_one_graph(name, seed):
    checks.check_compiled(GPU, name, torch.bfloat16, n=600, d=72, seed=seed)


@pytest.mark.parametrize("name", ["siglip", "info_nce", "cross_entropy_z_loss"])
def test_cuda_graphs(name, seed):
    checks.check_captured(name, torch.bfloat16, n=1003, d=72, seed=seed)


@pytest.mark.parametrize("name", ["siglip", "cross_entropy"])
def test_backward_twice_through_one_forward(name, seed):
    made = problem(name, torch.bfloat16, n=300, d=72, seed=seed, device="cuda")
    leaves = list(made.leaves.values())
    loss = 3.0 * made.ours(SimpleNamespace(**made.leaves), options=GPU.options(gradients="forward"))
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    second = torch.autograd.grad(loss, leaves)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def features(n, d, seed):
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(n, d, device="cuda", generator=generator).div_(d**0.5).bfloat16().requires_grad_()


def test_memory_of_a_classifier():
    """Above the two gradients: the scores of a block, no more than the workspace; float32 rows until backward."""
    n, m, d, mib = 4096, 32_000, 512, 300
    a, b, target = features(n, d, 1), features(m, d, 2), torch.randint(0, m, (n,), device="cuda")
    options = tw.TileOptions(gradients="forward", workspace_mib=mib)
    gradients = (n + m) * d * 4  # float32, from forward to backward
    peak = checks.peak_bytes(
        lambda: torch.autograd.grad(tw.linear_cross_entropy(a, b, target, options=options), (a, b))
    )
    assert peak <= gradients + mib * MIB + 8 * MIB


def test_memory_of_a_large_classifier(waited):
    """Above the two gradients in bfloat16: exponentials, in both passes; a copy of the rows, float32 in between."""
    n, m, d = 2048, 32_000, 2048
    a, b, target = features(n, d, 1), features(m, d, 2), torch.randint(0, m, (n,), device="cuda")
    options = tw.TileOptions(gradients="forward", workspace_mib=300)
    peak = checks.peak_bytes(
        lambda: torch.autograd.grad(3.0 * tw.linear_cross_entropy(a, b, target, options=options), (a, b))
    )
    assert waited
    assert peak <= 2 * (n + m) * d + 2 * n * m + 6 * n * d + 8 * MIB


def test_memory_of_the_sigmoid_loss():
    n, d = 32_768, 256
    a, b = features(n, d, 1), features(n, d, 2)
    options = tw.TileOptions(gradients="forward", workspace_mib=64)
    peak = checks.peak_bytes(lambda: torch.autograd.grad(tw.siglip_loss(a, b, 10.0, -10.0, options=options), (a, b)))
    assert peak <= 2 * n * d * 4 + 64 * MIB + 8 * MIB  # float32 gradients, and the workspace
