"""Every loss on a CUDA device: accuracy, no waiting, torch.compile, CUDA graphs, autocast, streams."""

import dataclasses

import pytest
import torch
from tests.compare import assert_close, assert_no_worse
from tests.gpu import checks
from tests.gpu.checks import Place
from tests.losses.loss_cases import CASES, along_all_leaves, converted, problem, solve
from tests.ops.test_explain import LOSSES as EXPLAINED

import tilewise as tw
from tilewise.kernels.triton_impl.backend import TritonBackend
from tilewise.kernels.triton_impl.two_pass import saved as saving
from tilewise.ops import rows as drop_rows
from tilewise.ops.rows import PendingRows

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
GPU = Place()
FEW = ["clip", "siglip", "nt_xent", "supcon", "info_nce_ids_of_negatives", "cross_entropy_everything", "logsumexp"]


@pytest.mark.usefixtures("nan_filled_empty")
@pytest.mark.parametrize("name", sorted(CASES))
def test_bfloat16(name, seed):
    checks.check_loss(GPU, name, torch.bfloat16, n=1003, d=72, seed=seed)


@pytest.mark.usefixtures("nan_filled_empty")
@pytest.mark.parametrize("name", FEW)
def test_float32(name, seed):
    checks.check_loss(GPU, name, torch.float32, n=1003, d=72, seed=seed)


@pytest.mark.usefixtures("nan_filled_empty")
@pytest.mark.parametrize("name", ["clip", "nt_xent", "cross_entropy_everything"])
def test_float16(name, seed):
    checks.check_loss(GPU, name, torch.float16, n=1003, d=72, seed=seed)


@pytest.mark.usefixtures("nan_filled_empty")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("name", [*FEW, "info_nce_own_negatives", "distillation_jsd_with_targets", "tokens_picked"])
def test_gradient_is_differentiable_in_grad_output(name, reduction, dtype, seed):
    made = problem(name, dtype, n=1003, d=72, seed=seed, device="cuda")
    got = along_all_leaves(made.ours, made.leaves, reduction=reduction)
    want = along_all_leaves(made.dense, converted(made.leaves, torch.float64), reduction=reduction)
    assert_close(got, want, 1e-3)


@pytest.mark.parametrize("name", ["clip", "nt_xent", "cross_entropy_bias"])
def test_torch_compile_makes_one_graph(name, seed):
    checks.check_compiled(GPU, name, torch.bfloat16, n=600, d=72, seed=seed)


def test_statistics_of_tokens_compile_into_one_graph():
    torch._dynamo.reset()
    hidden = torch.randn(300, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    head, target = torch.randn(500, 64, device="cuda", dtype=torch.bfloat16), torch.arange(300, device="cuda")

    def bonus(hidden):
        stats = tw.linear_token_stats(hidden, head, target, options=GPU.options())
        return (stats.log_prob + 0.1 * stats.entropy).sum(), stats.accuracy

    (want, share), (got, same) = bonus(hidden), torch.compile(bonus, fullgraph=True)(hidden)
    torch.testing.assert_close(same, share, rtol=1e-6, atol=0.0)  # a compiler may multiply by 1 / 300
    torch.testing.assert_close(got, want, rtol=1e-5, atol=0.0)
    want_grad, grad = (torch.autograd.grad(value, hidden)[0] for value in (want, got))
    torch.testing.assert_close(grad, want_grad)


@pytest.mark.parametrize("name", ["clip", "siglip", "nt_xent", "cross_entropy_everything"])
def test_cuda_graphs(name, seed):
    checks.check_captured(name, torch.bfloat16, n=1003, d=72, seed=seed)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
def test_ignored_rows_are_taken_out_where_that_pays(dtype, seed, monkeypatch):
    checks.check_ignored(GPU, dtype, n=1003, d=72, seed=seed, patch=monkeypatch)


@pytest.mark.usefixtures("nan_filled_empty")
@pytest.mark.parametrize("tolerance", [0.0, 1e-2])
@pytest.mark.parametrize("want", [None, ("log_prob", "entropy", "argmax")], ids=["loss", "tokens"])
def test_a_guess_that_no_row_is_dropped_changes_no_number(want, tolerance, monkeypatch, set_limits, seed):
    """The first guess is right, the second is wrong: some rows are ignored then."""
    set_limits(worth_waiting=0, worth_filtering=0, small=0)
    monkeypatch.setattr("tilewise.kernels.triton_impl.filtered.forward.WORTH_PROBING", 0)
    for name, value in {"WORTH_IT": 0, "NARROWEST": 16, "COLS": 256}.items():
        monkeypatch.setattr(f"tilewise.kernels.triton_impl.two_pass.saved.{name}", value)
    generator = torch.Generator("cuda").manual_seed(seed)
    x, w = (torch.randn(rows, 264, generator=generator, device="cuda").bfloat16() for rows in (1000, 20_011))
    leaves, options = (x.requires_grad_(), w.requires_grad_()), GPU.options(gradients="backward")
    options = dataclasses.replace(options, filter_tolerance=tolerance)
    whole = torch.randint(20_011, (1000,), generator=generator, device="cuda")
    padded = torch.where(torch.arange(1000, device="cuda") % 4 == 0, -100, whole)
    guesses, all_stay = [], PendingRows.all_stay
    monkeypatch.setattr(PendingRows, "all_stay", lambda self: guesses.append(all_stay(self)) or guesses[-1])

    def solve(target):
        if want is None:
            values = [tw.linear_cross_entropy(x, w, target, reduction="none", options=options)]
        else:
            stats = tw.linear_token_stats(x, w, target, want=want, options=options)
            values = [stats.log_prob, stats.entropy, stats.argmax]
        return values + list(torch.autograd.grad(sum(value.sum() for value in values[:2]), leaves))

    monkeypatch.setattr(drop_rows, "_all_stayed", {})
    exact = solve(padded), solve(whole)
    assert guesses == []
    found = solve(whole), solve(padded), solve(padded)
    assert [guess.tolist() for guess in guesses] == [[1], [0]]
    for some, right in zip(found, (exact[1], exact[0], exact[0]), strict=True):
        assert all(torch.equal(one, other) for one, other in zip(some, right, strict=True))


def test_ignored_rows_stay_in_a_captured_graph(seed, set_limits):
    set_limits(worth_waiting=0)
    checks.check_captured("cross_entropy_bias", torch.bfloat16, n=1003, d=72, seed=seed)


def test_all_rows_ignored(set_limits):
    set_limits(worth_waiting=0)
    hidden = torch.randn(50, 16, device="cuda", requires_grad=True)
    target = torch.full((50,), -100, device="cuda")
    loss = tw.linear_cross_entropy(hidden, torch.randn(70, 16, device="cuda"), target, reduction="sum")
    loss.backward()
    assert loss.item() == 0.0
    assert not hidden.grad.any()


@pytest.mark.usefixtures("nan_filled_empty")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("d", [72, 1032])  # small and large tiles
@pytest.mark.parametrize("picks", [0, 5])
def test_statistics_of_tokens(dtype, d, picks, seed):
    checks.check_tokens(GPU, dtype, n=1003, d=d, seed=seed, picks=picks)


def test_autocast():
    checks.check_autocast(GPU, n=1003, d=72)


def test_another_stream(seed):
    """Launches go to the current stream: nothing waits for the default one."""
    made = problem("clip", torch.bfloat16, n=1003, d=72, seed=seed, device="cuda")
    want, want_grads = solve(made.ours, made.leaves, options=GPU.options())
    busy = torch.randn(8192, 8192, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    for _ in range(20):
        busy = busy @ busy  # the default stream has much to do
    with torch.cuda.stream(side):
        loss, grads = solve(made.ours, made.leaves, options=GPU.options())
        side.synchronize()
        assert torch.equal(loss, want)
        assert all(torch.equal(grads[leaf], want_grads[leaf]) for leaf in grads)
        side.synchronize()
    torch.cuda.synchronize()


@pytest.fixture
def seen(monkeypatch, set_limits):
    """What each forward saves, of calls of any size."""
    set_limits(small=0)
    found, plain = [], TritonBackend.forward_saving

    def forward_saving(self, *args):
        stats, held = plain(self, *args)
        found.append(dataclasses.replace(held))
        return stats, held

    monkeypatch.setattr(saving, "WORTH_IT", 0)
    monkeypatch.setattr(TritonBackend, "forward_saving", forward_saving)
    return found


@pytest.mark.usefixtures("nan_filled_empty")
@pytest.mark.parametrize("mib", [256, 8], ids=["all saved", "a part saved"])
@pytest.mark.parametrize("spread", [1.0, 6.0, 300.0], ids=["plain", "peaked", "needs repair"])
def test_exponentials_are_saved_in_the_memory_of_the_gradient(spread, mib, seed, seen):
    """Against float64, twice through one graph: the second backward does without them."""
    generator = torch.Generator("cuda").manual_seed(seed)
    hidden = (torch.randn(1000, 1024, device="cuda", generator=generator) * spread).bfloat16().requires_grad_()
    head = (torch.randn(40_000, 1024, device="cuda", generator=generator) / 32).bfloat16().requires_grad_()
    target = torch.randint(0, 40_000, (1000,), device="cuda", generator=generator)
    target[::9] = -100
    options = tw.TileOptions(backend="triton", gradients="backward", workspace_mib=mib)
    loss = tw.linear_cross_entropy(hidden, head, target, z_loss=1e-3, options=options)
    assert len(seen) == 1
    assert bool(seen[0].needs_repair > 0) == (spread > 100.0)
    assert seen[0].behind > 0
    assert (seen[0].end == 40_000) == (mib == 256)
    upstream = torch.tensor(0.7, device="cuda")  # no power of 2
    first = torch.autograd.grad(loss, (hidden, head), upstream, retain_graph=True)
    assert first[1].data_ptr() == seen[0].memory.data_ptr()
    second = torch.autograd.grad(loss, (hidden, head), upstream)

    def dense(dtype):
        leaves = [value.detach().to(dtype).requires_grad_() for value in (hidden, head)]
        logits = leaves[0] @ leaves[1].T
        logits = logits if dtype == torch.float64 else logits.float()
        found = torch.nn.functional.cross_entropy(logits, target)
        found = found + 1e-3 * logits.logsumexp(1)[target >= 0].square().mean()
        return [found, *torch.autograd.grad(found, leaves, upstream.to(found))]

    exact, low = dense(torch.float64), dense(torch.bfloat16)
    assert_close(loss, exact[0], 1e-5, "loss")
    for index in (0, 1):
        assert_no_worse(first[index], low[index + 1], exact[index + 1], f"saved {index}")
        assert_no_worse(second[index], low[index + 1], exact[index + 1], f"without {index}")


@pytest.mark.usefixtures("nan_filled_empty")
@pytest.mark.parametrize("mib", [256, 8], ids=["all saved", "a part saved"])
def test_saved_exponentials_of_flat_scores_round_positives_once(mib, seed, seen):
    """With flat scores the classifier's gradient is that of the targets, whose weight 1/n bfloat16 has exactly."""
    generator = torch.Generator("cuda").manual_seed(seed)
    hidden = torch.randn(1024, 1024, device="cuda", generator=generator).bfloat16().requires_grad_()
    head = (torch.randn(40_000, 1024, device="cuda", generator=generator) / 32).bfloat16().requires_grad_()
    target = torch.randint(0, 40_000, (1024,), device="cuda", generator=generator)
    target[100:300] = 7  # more than one program adds up
    options = tw.TileOptions(backend="triton", gradients="backward", workspace_mib=mib)
    loss = tw.linear_cross_entropy(hidden, head, target, options=options)
    found = torch.autograd.grad(loss, (hidden, head))
    assert len(seen) == 1
    assert bool(seen[0].needs_repair == 0)

    def dense(dtype):
        leaves = [value.detach().to(dtype).requires_grad_() for value in (hidden, head)]
        logits = leaves[0] @ leaves[1].T
        logits = logits if dtype == torch.float64 else logits.float()
        return torch.autograd.grad(torch.nn.functional.cross_entropy(logits, target), leaves)

    for got, low, exact in zip(found, dense(torch.bfloat16), dense(torch.float64), strict=True):
        assert_no_worse(got, low, exact, factor=1.25)  # without the correction of positives: 1.6 and 1.7


@pytest.mark.usefixtures("nan_filled_empty")
@pytest.mark.parametrize("mib", [256, 16], ids=["all saved", "a part saved"])
@pytest.mark.parametrize("spread", [1.0, 6.0, 300.0], ids=["plain", "peaked", "far apart"])
def test_statistics_of_tokens_save_exponentials(spread, mib, seed, seen):
    """Against float64, with a gradient of its own for each token and statistic."""
    generator = torch.Generator("cuda").manual_seed(seed)
    hidden = (torch.randn(1000, 1024, device="cuda", generator=generator) * spread).bfloat16().requires_grad_()
    head = (torch.randn(40_003, 1024, device="cuda", generator=generator) / 32).bfloat16().requires_grad_()
    target = torch.randint(0, 40_003, (1000,), device="cuda", generator=generator)
    target[::9] = -100
    coming = torch.randn(3, 1000, device="cuda", generator=generator)
    options = tw.TileOptions(backend="triton", workspace_mib=mib)
    found = tw.linear_token_stats(
        hidden, head, target, want=("log_prob", "entropy", "log_sum_sq_prob", "correct"), options=options
    )
    assert seen[0].relative
    assert (seen[0].end == 40_003) == (mib == 256)
    values = found.log_prob, found.entropy, found.log_sum_sq_prob
    total = sum((c * v).sum() for c, v in zip(coming, values, strict=True))
    first = torch.autograd.grad(total, (hidden, head), retain_graph=True)
    assert first[1].data_ptr() == seen[0].memory.data_ptr()
    second = torch.autograd.grad(total, (hidden, head))

    def dense(dtype):
        leaves = [leaf.detach().to(dtype).requires_grad_() for leaf in (hidden, head)]
        logits = leaves[0] @ leaves[1].T
        log_p = (logits if dtype == torch.float64 else logits.float()).log_softmax(-1)
        valid = target >= 0
        own = log_p.gather(1, target.clamp(min=0)[:, None])[:, 0]
        values = own, -(log_p.exp() * log_p).sum(-1), (2 * log_p).logsumexp(-1)
        total = sum((c * torch.where(valid, v, 0.0)).sum() for c, v in zip(coming, values, strict=True))
        return torch.autograd.grad(total, leaves)

    exact, low = dense(torch.float64), dense(torch.bfloat16)
    for index in (0, 1):
        assert_no_worse(first[index], low[index], exact[index], f"saved {index}")
        assert_no_worse(second[index], low[index], exact[index], f"computed again {index}")


@pytest.mark.parametrize("mib", [64, 256, 400])
@pytest.mark.parametrize("want", [("log_prob",), ("log_prob", "entropy"), ("divergence",)], ids="+".join)
def test_saved_columns_stay_within_the_workspace(want, mib, monkeypatch):
    """Above the gradients: no more than the workspace, whatever part of the scores it holds."""
    monkeypatch.setattr(saving, "WORTH_IT", 0)
    n, m, d = 2048, 60_000, 1024
    generator = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(n, d, device="cuda", generator=generator).bfloat16().requires_grad_()
    head = (torch.randn(m, d, device="cuda", generator=generator) / 32).bfloat16().requires_grad_()
    target = torch.randint(0, m, (n,), device="cuda", generator=generator)
    options = tw.TileOptions(workspace_mib=mib)

    def step():
        if want == ("divergence",):
            loss = tw.linear_distillation_loss(hidden, head, hidden.detach(), head.detach(), options=options)
            return torch.autograd.grad(loss, (hidden, head))
        found = tw.linear_token_stats(hidden, head, target, want=want, options=options)
        total = found.log_prob.sum() if found.entropy is None else found.log_prob.sum() + found.entropy.sum()
        return torch.autograd.grad(total, (hidden, head))

    assert checks.peak_bytes(step) <= 2 * (n + m) * d + mib * 2**20 + 12 * 2**20


@pytest.mark.parametrize("backend", ["triton", "torch"])
@pytest.mark.parametrize("name", EXPLAINED)
@pytest.mark.parametrize("n, m", [(1024, 1024), (4096, 4096), (3000, 30_000)])
def test_explain_bounds_the_memory_of_the_call(n, m, name, backend):
    """By less than the workspace where the call is small."""
    if n != m and name in ("clip", "siglip", "nt_xent", "info_nce"):
        m = n
    leaves = [torch.randn(rows, 256, device="cuda").bfloat16().requires_grad_() for rows in (n, m)]
    options = tw.TileOptions(backend=backend, filter_tolerance=1e-2 if name == "filtered" else 0.0)
    (found,) = tw.explain(EXPLAINED[name], *leaves, options=options).calls
    peak = checks.peak_bytes(
        lambda: torch.autograd.grad(EXPLAINED[name](*leaves, options=options), leaves, allow_unused=True)
    )
    assert peak <= found.peak_bytes + 24 * (n + m) * 8 + 12 * 2**20
    if n * m <= 2**20:
        assert found.workspace_bytes < options.workspace_bytes // 2


@pytest.mark.parametrize("mib", [8, 64, 256])
def test_jensen_shannon_with_any_memory(mib, seed):
    """Blocks of rows whose scores are stored, or all products twice: as close to float64, within the workspace."""
    n, m, d = 1500, 30_000, 256
    generator = torch.Generator("cuda").manual_seed(seed)
    hidden, head, teacher, other = (
        torch.randn(size, d, device="cuda", generator=generator).div(d**0.25).bfloat16() for size in (n, m, n, m)
    )
    options = tw.TileOptions(workspace_mib=mib)

    def ours(x=hidden, w=head):
        return tw.linear_distillation_loss(x, w, teacher, other, beta=0.3, options=options)

    with torch.no_grad():
        assert checks.peak_bytes(ours) <= mib * 2**20 + 12 * 2**20
    leaves = [leaf.clone().requires_grad_() for leaf in (hidden, head)]
    loss = ours(*leaves)
    got = torch.autograd.grad(loss, leaves)

    def dense(dtype):
        leaves = [leaf.detach().to(dtype).requires_grad_() for leaf in (hidden, head)]
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        log_p = (leaves[0] @ leaves[1].T).to(wide).log_softmax(-1)
        log_q = (teacher.to(dtype) @ other.to(dtype).T).to(wide).log_softmax(-1)
        log_m = (0.7 * log_p.exp() + 0.3 * log_q.exp()).log()
        each = 0.3 * log_q.exp() * (log_q - log_m) + 0.7 * log_p.exp() * (log_p - log_m)
        loss = each.sum(-1).mean()
        return loss.detach(), *torch.autograd.grad(loss, leaves)

    exact, low = dense(torch.float64), dense(torch.bfloat16)
    assert_no_worse(loss.detach()[None], low[0][None], exact[0][None], "loss")
    for index in (0, 1):
        assert_no_worse(got[index], low[index + 1], exact[index + 1], f"gradient {index}")


@pytest.mark.usefixtures("nan_filled_empty")
@pytest.mark.parametrize("mib", [8, 64, 256], ids=["in the gradient", "and in a buffer", "all"])
@pytest.mark.parametrize("beta", [0.0, 1.0])
@pytest.mark.parametrize("apart", [1.0, 1e-3], ids=["apart", "close"])
def test_scores_of_a_divergence_are_saved(apart, beta, mib, seed, seen):
    """Twice through one graph, the second time without them: as close to float64."""
    n, m, d = 500, 40_003, 1024
    generator = torch.Generator("cuda").manual_seed(seed)
    hidden, head, noise, other = (torch.randn(size, d, device="cuda", generator=generator) for size in (n, m, n, m))
    teacher = (hidden + apart * noise).bfloat16()
    teacher_head = ((head + apart * other) / 16).bfloat16()
    leaves = [hidden.bfloat16().requires_grad_(), (head / 16).bfloat16().requires_grad_()]
    coming = torch.randn(n, device="cuda", generator=generator)
    options = tw.TileOptions(workspace_mib=mib)

    each = tw.linear_distillation_loss(*leaves, teacher, teacher_head, beta=beta, reduction="none", options=options)
    loss = (each * coming).sum()
    assert seen[0].scores
    assert (seen[0].behind > 0) == (mib > 8)
    assert (seen[0].end == m) == (mib == 256)
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    assert first[1].data_ptr() == seen.pop().memory.data_ptr()
    second = torch.autograd.grad(loss, leaves)
    for one, again in zip(first, second, strict=True):
        assert_close(one, again, 5e-3, "saved or computed again")  # a product may add parts in bfloat16

    def dense(dtype):
        copies = [leaf.detach().to(dtype).requires_grad_() for leaf in leaves]
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        log_p = (copies[0] @ copies[1].T).to(wide).log_softmax(-1)
        log_q = (teacher.to(dtype) @ teacher_head.to(dtype).T).to(wide).log_softmax(-1)
        high, low = (log_q, log_p) if beta == 0.0 else (log_p, log_q)
        return torch.autograd.grad(((high.exp() * (high - low)).sum(-1) * coming).sum(), copies)

    exact, low = dense(torch.float64), dense(torch.bfloat16)
    for index in (0, 1):
        assert_no_worse(first[index], low[index], exact[index], f"saved {index}")


@pytest.mark.parametrize("beta", [0.0, 0.03, 0.5, 1.0])
def test_distillation_of_a_good_student(beta):
    checks.check_good_student(GPU, beta)
