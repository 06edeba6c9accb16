"""The strategy `small`: scalar losses of small batches from one block of scores, on the CPU."""

import threading
from types import SimpleNamespace

import pytest
import torch
from tests.compare import assert_close, assert_no_worse, relative_error
from tests.losses.loss_cases import CASES, converted, problem, solve, upstream_like
from torch.utils.checkpoint import checkpoint

import tilewise as tw
from tilewise.errors import GradientError
from tilewise.kernels import registry
from tilewise.kernels.spec import Needs, PairShape, PairSpec
from tilewise.kernels.torch_impl.small import TorchSmall
from tilewise.ops import limits, small
from tilewise.ops.route import route

SERVED = [
    *("clip", "clip_with_bias", "siglip", "nt_xent", "supcon", "supcon_lonely_rows"),
    *("info_nce", "info_nce_symmetric", "info_nce_ids", "info_nce_ids_one_way"),
    *("cross_entropy", "cross_entropy_bias", "cross_entropy_ignoring_a_class", "cross_entropy_weighted"),
    *("cross_entropy_softcap", "cross_entropy_z_loss", "cross_entropy_shift"),
]
TILES = {"small": 0, "small_cpu": 0}
# Divergences from a teacher, and columns without positives
TILED = ("distillation_kl", "distillation_reverse", "distillation_jsd", "clip_distillation")
ALL = [name for name in CASES if not any(part in name for part in TILED) and name != "info_nce_decoupled"]
EACH_ROW = ["clip", "siglip", "nt_xent", "supcon", "info_nce_ids", "cross_entropy", "cross_entropy_smoothed_weighted"]


@pytest.fixture
def no_tiles(monkeypatch):
    """The tile loops of the other strategies fail."""
    for name in ("two_pass", "one_pass"):
        monkeypatch.setattr(f"tilewise.kernels.torch_impl.{name}.Tiles", None)


@pytest.mark.usefixtures("no_tiles")
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("name", ALL)
def test_equals_the_oracle(name, reduction):
    made = problem(name, torch.float64)
    upstream = upstream_like(made.dense(SimpleNamespace(**made.leaves), reduction=reduction))
    loss, grads = solve(made.ours, made.leaves, upstream, reduction=reduction)
    want, want_grads = solve(made.dense, made.leaves, upstream, reduction=reduction)
    assert_close(loss, want, 1e-12, "loss")
    for leaf in want_grads:
        assert_close(grads[leaf], want_grads[leaf], 1e-10, leaf)


@pytest.mark.usefixtures("no_tiles")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", SERVED)
def test_half_types_round_the_gradients_once(name, dtype):
    made = problem(name, dtype)
    loss, grads = solve(made.ours, made.leaves)
    want, want_grads = solve(made.dense, converted(made.leaves, torch.float64))
    assert_close(loss, want, 3e-6, "loss")
    for leaf, values in grads.items():
        assert_close(values, want_grads[leaf], 1.2 * torch.finfo(dtype).eps, leaf)


@pytest.mark.usefixtures("no_tiles")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", EACH_ROW)
def test_each_row_in_half_types(name, dtype):
    made = problem(name, dtype)
    exact = converted(made.leaves, torch.float64)
    upstream = upstream_like(made.dense(SimpleNamespace(**exact), reduction="none"))
    _, grads = solve(made.ours, made.leaves, upstream, reduction="none")
    _, dense = solve(made.dense, made.leaves, upstream, reduction="none")
    _, want = solve(made.dense, exact, upstream, reduction="none")
    for leaf in want:
        assert_no_worse(grads[leaf], dense[leaf], want[leaf], leaf)


FLOAT32 = [*((name, "mean") for name in SERVED), *((name, "none") for name in EACH_ROW)]


@pytest.mark.parametrize(("name", "reduction"), FLOAT32)
def test_float32_is_as_close_as_the_tiles(name, reduction):
    """Over several problems, at most 1.1 times the error of the other strategies, and 1e-7."""
    worst = {"small": 0.0, "tiles": 0.0}
    for seed in range(6):
        made = problem(name, torch.float32, seed=seed)
        exact = converted(made.leaves, torch.float64)
        upstream = upstream_like(made.dense(SimpleNamespace(**exact), reduction=reduction)).abs()
        want, want_grads = solve(made.dense, exact, upstream, reduction=reduction)
        for way, values in (("small", {}), ("tiles", TILES)):
            with limits.changed(**values):
                loss, grads = solve(made.ours, made.leaves, upstream, reduction=reduction)
            errors = [relative_error(loss, want), *(relative_error(grads[leaf], want_grads[leaf]) for leaf in grads)]
            worst[way] = max(worst[way], *errors)
    assert worst["small"] <= 1.1 * worst["tiles"] + 2e-7


def strategy(n, m=None, d=64, dtype=torch.float32, device="cpu", spec=None, **settings):
    spec = spec or PairSpec(row_lse=True, positive="one")
    shape = PairShape(n, m or n, d, dtype, torch.device(device))
    return route(shape, spec, tw.TileOptions(**settings), Needs(), scalar=True).strategy


def test_which_calls_are_small():
    assert strategy(64) == strategy(1448) == "small"
    assert strategy(1449) != "small"  # tiles are as fast, and take less memory
    assert strategy(1448, workspace_mib=8) != "small"  # a number limits it
    assert strategy(64, gradients="backward") == "two_pass"
    assert strategy(64, filter_tolerance=1e-3) != "small"
    assert strategy(64, batch_invariant=True) == "two_pass"
    assert strategy(64, spec=PairSpec(row_lse=True, row_sum=True, positive="one")) != "small"
    assert strategy(64, spec=PairSpec(row_lse=True, guide="kl")) != "small"
    assert strategy(0) != "small"


def test_a_known_call_is_one_lookup(monkeypatch):
    x, y = (torch.randn(6, 3, requires_grad=True) for _ in range(2))
    tw.info_nce(x, y, temperature=0.1).backward()
    monkeypatch.setattr(small, "route_of", None)
    tw.info_nce(x, y, temperature=0.2).backward()  # a number is no part of the kind of a call
    with pytest.raises(TypeError):
        tw.linear_logsumexp(x, y)
    monkeypatch.undo()
    tw.linear_logsumexp(x, y).sum().backward()
    monkeypatch.setattr(small, "route_of", None)
    tw.linear_logsumexp(x, y).sum().backward()
    with pytest.raises(TypeError):
        tw.info_nce(x[:5], y[:5])


def test_calls_with_other_tensors_are_of_another_kind(monkeypatch):
    """A compiled kernel takes a pointer or a number, never both."""
    from tilewise.kernels.torch_impl.small import TorchSmall

    kinds = []
    job = TorchSmall.job
    monkeypatch.setattr(TorchSmall, "job", lambda self, key: kinds.append(key) or job(self, key))
    x, y = (torch.randn(11, 3, requires_grad=True) for _ in range(2))
    ids, target, wide = torch.arange(11), torch.arange(11), torch.randn(13, 3)
    one = torch.ones(13)
    for call in (
        lambda: tw.info_nce(x, y, temperature=0.1),
        lambda: tw.info_nce(x, y, temperature=torch.tensor(0.1)),
        lambda: tw.info_nce(x, y, temperature=torch.tensor(0.1, requires_grad=True)),
        lambda: tw.info_nce(x, y, query_ids=ids),
        lambda: tw.linear_cross_entropy(x, wide, target),
        lambda: tw.linear_cross_entropy(x, wide, target, z_loss=0.1),
        lambda: tw.linear_cross_entropy(x, wide, target, weight=one),
        lambda: tw.linear_cross_entropy(x, wide, target, linear_bias=one),
    ):
        before = len(kinds)
        call()
        call()
        assert len(kinds) == before + 1
    assert len(set(kinds)) == len(kinds)


def test_other_limits_hold_for_known_calls():
    x = torch.randn(6, 3, requires_grad=True)
    tw.clip_loss(x, x, 1.0).backward()
    with limits.changed(**TILES):
        (call,) = tw.explain(tw.clip_loss, x, x, 1.0).calls
        assert call.strategy != "small"
    (call,) = tw.explain(tw.clip_loss, x, x, 1.0).calls
    assert call.strategy == "small"


@pytest.mark.parametrize("name", ["clip", "siglip", "nt_xent", "supcon", "info_nce_ids", "cross_entropy_z_loss"])
def test_backward_twice_and_by_parts(name):
    made = problem(name, torch.float64)
    leaves = {leaf: values.clone().requires_grad_() for leaf, values in made.leaves.items()}
    loss = made.ours(type("Leaves", (), leaves))
    inputs = list(leaves.values())
    first = torch.autograd.grad(loss, inputs, torch.tensor(3.0, dtype=torch.float64), retain_graph=True)
    second = torch.autograd.grad(loss, inputs, torch.tensor(-0.5, dtype=torch.float64))
    _, want = solve(made.dense, made.leaves)
    assert any(values.abs().max() > 0 for values in first)
    ones = solve(made.ours, made.leaves)[1]
    for leaf, one, other in zip(leaves, first, second, strict=True):
        assert_close(one, 3.0 * ones[leaf], 1e-12, leaf)
        assert_close(other, -0.5 * ones[leaf], 1e-10, leaf)
    assert want.keys() == ones.keys()


def test_statistics_are_computed_again_in_backward():
    """Twice, and with only some of them used."""
    hidden, classifier = (torch.randn(rows, 4, dtype=torch.float64, requires_grad=True) for rows in (9, 7))
    stats = tw.linear_token_stats(hidden, classifier, torch.arange(hidden.shape[0]) % classifier.shape[0])
    log_p = (hidden @ classifier.T).log_softmax(1)
    entropy = -(log_p.exp() * log_p).sum(1)
    for _ in range(2):
        got = torch.autograd.grad(stats.entropy.sum(), (hidden, classifier), retain_graph=True)
        want = torch.autograd.grad(entropy.sum(), (hidden, classifier), retain_graph=True)
        for one, other in zip(got, want, strict=True):
            assert_close(one, other, 1e-12)
    assert not stats.argmax.requires_grad
    (again,) = torch.autograd.grad(stats.entropy.sum(), hidden, create_graph=True)
    with pytest.raises(GradientError):
        again.sum().backward()
    with torch.no_grad():
        assert not tw.linear_token_stats(hidden, classifier).entropy.requires_grad


@pytest.mark.parametrize("positive", [None, -torch.inf, 3.0])
def test_a_bias_of_minus_infinity_and_rows_without_scores(positive):
    """A class that is excluded has no gradient, a target that is excluded the loss inf, as in PyTorch."""
    a, b = (torch.randn(rows, 4, dtype=torch.float64, requires_grad=True) for rows in (5, 6))
    bias = torch.zeros(6, dtype=torch.float64)
    bias[2] = -torch.inf
    target = torch.tensor([0, 1, 2 if positive == -torch.inf else 3, 4, 5])
    want = torch.nn.functional.cross_entropy(a @ b.T + bias, target, reduction="none")
    got = tw.linear_cross_entropy(a, b, target, linear_bias=bias, reduction="none")
    assert torch.allclose(got, want, rtol=1e-12)
    counted = want.isfinite()
    pairs = (torch.autograd.grad(loss[counted].sum(), (a, b)) for loss in (got, want))
    for one, other in zip(*pairs, strict=True):
        assert_close(one, other, 1e-11)
    alone = tw.info_nce(a[:1], b[:1], b[1:3], hardness=0.5)  # a query without other keys
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(alone, (a, b)))


def test_a_frozen_side_has_no_gradient():
    x, y = torch.randn(6, 3, requires_grad=True), torch.randn(6, 3)
    scale = torch.tensor(2.0, requires_grad=True)
    for image, factor in ((x, 2.0), (x, scale), (x.detach(), scale)):
        needed = [leaf for leaf in (image, factor) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        got = torch.autograd.grad(tw.clip_loss(image, y, factor), needed)
        want = torch.autograd.grad(clip_dense(image, y, factor), needed)
        for one, other in zip(got, want, strict=True):
            assert_close(one, other, 2e-6)
    with torch.no_grad():
        assert not tw.clip_loss(x, y, scale).requires_grad


def clip_dense(x, y, scale):
    logits = scale * x @ y.T
    target = torch.arange(len(x))
    cross = torch.nn.functional.cross_entropy
    return (cross(logits, target) + cross(logits.T, target)) / 2


def test_inputs_changed_in_place_raise():
    x, y = torch.randn(6, 3, requires_grad=True), torch.randn(6, 3)
    moved = x * 1.0
    loss = tw.info_nce(moved, y)
    moved.data_ptr()
    with torch.no_grad():
        moved.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_loss_may_be_changed_in_place():
    x = torch.randn(6, 3, requires_grad=True)
    want = torch.autograd.grad(tw.nt_xent(x) / 4, x)[0]
    loss = tw.nt_xent(x)
    loss /= 4
    assert_close(torch.autograd.grad(loss, x)[0], want, 1e-6)


def test_checkpointing_and_autocast():
    x, y = (torch.randn(6, 3, requires_grad=True) for _ in range(2))
    want = torch.autograd.grad(tw.info_nce(x, y), (x, y))
    got = torch.autograd.grad(checkpoint(tw.info_nce, x, y, use_reentrant=False), (x, y))
    assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))
    with torch.autocast("cpu", torch.bfloat16):
        loss = tw.info_nce(x, y)
    assert loss.dtype == torch.float32
    assert_close(loss, tw.info_nce(x.bfloat16(), y.bfloat16()), 1e-6)
    loss.backward()
    assert x.grad.dtype == torch.float32


def test_a_second_derivative_raises():
    x = torch.randn(6, 3, requires_grad=True)
    (grad,) = torch.autograd.grad(tw.nt_xent(x), x, create_graph=True)
    with pytest.raises(GradientError):
        grad.sum().backward()


@pytest.mark.parametrize("share", [0, 0.4, 1])
def test_ignored_rows_take_no_part(share):
    """Whatever lies in them: NaN as well. A mean over no rows is NaN, and its gradient 0, as in PyTorch."""
    generator = torch.Generator().manual_seed(3)
    hidden, head = (torch.randn(rows, 5, generator=generator, dtype=torch.float64) for rows in (10, 7))
    target = torch.randint(7, (10,), generator=generator)
    ignored = torch.arange(10) < round(10 * share)
    target[ignored], hidden[ignored] = -100, torch.nan
    hidden.requires_grad_()
    loss = tw.linear_cross_entropy(hidden, head.requires_grad_(), target)
    grads = torch.autograd.grad(loss, (hidden, head))
    if share == 1:
        assert loss.isnan()
        assert all((grad == 0).all() for grad in grads)
        return
    kept = hidden.detach()[~ignored].requires_grad_()
    want = torch.nn.functional.cross_entropy(kept @ head.T, target[~ignored])
    want_grads = torch.autograd.grad(want, (kept, head))
    assert_close(loss, want, 1e-12)
    assert_close(grads[0][~ignored], want_grads[0], 1e-12)
    assert (grads[0][ignored] == 0).all()
    assert_close(grads[1], want_grads[1], 1e-12)


def test_threads_share_the_jobs():
    """Calls of four kinds from four threads at once give what each gives alone."""
    made = [problem(name, torch.float64) for name in ("clip", "nt_xent", "info_nce_ids", "siglip")]
    want = [solve(one.ours, one.leaves) for one in made]
    wrong = []

    def work(first):
        for turn in range(40):
            place = (first + turn) % 4
            loss, grads = solve(made[place].ours, made[place].leaves)
            same = torch.equal(loss, want[place][0])
            same &= all(torch.equal(grads[leaf], want[place][1][leaf]) for leaf in grads)
            if not same:
                wrong.append(place)

    threads = [threading.Thread(target=work, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("name", ["clip", "nt_xent", "supcon", "siglip", "cross_entropy", "info_nce_ids"])
def test_compiled_in_one_graph(name):
    made = problem(name, torch.float32)
    reduction = "none" if name == "cross_entropy" else "mean"
    upstream = upstream_like(made.dense(SimpleNamespace(**made.leaves), reduction=reduction)).float()
    compiled = torch.compile(made.ours, fullgraph=True, backend="aot_eager")
    loss, grads = solve(compiled, made.leaves, upstream, reduction=reduction)
    want, want_grads = solve(made.ours, made.leaves, upstream, reduction=reduction)
    assert_close(loss, want, 1e-6)
    for leaf in want_grads:
        assert_close(grads[leaf], want_grads[leaf], 3e-6, leaf)


def test_eager_and_registered_calls_share_a_job(monkeypatch):
    """A job loads its kernels once. A second backward is a registered call."""
    made, jobs = [], TorchSmall.job
    monkeypatch.setattr(TorchSmall, "job", lambda self, key: made.append(key) or jobs(self, key))
    x, y = (torch.randn(6, 3, requires_grad=True) for _ in range(2))
    loss = tw.info_nce(x, y, temperature=torch.tensor(0.1))  # a registered call has no numbers
    first = torch.autograd.grad(loss, (x, y), retain_graph=True)
    second = torch.autograd.grad(loss, (x, y))
    assert len(made) == 1
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    tw.info_nce(x[:5], y[:5], temperature=torch.tensor(0.1))
    assert len(made) == 2


NO_PROGRAM = {
    "columns": {"col_lse": True, "positive": "one"},
    "several positives": {"positive": "many"},
    "symmetric": {"symmetric": True, "mask_self": True},
    "sums of scores": {"row_sum": True},
    "squared probabilities": {"row_sum_sq": True},
    "a scale of each row": {},
}


@pytest.mark.parametrize("name", NO_PROGRAM)
def test_statistics_without_a_program_take_operators_on_a_gpu(name, monkeypatch):
    """Only "auto" chooses them, and only for few scores."""
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(registry, "faults_on", lambda device: [])
    spec = PairSpec(row_lse=True, **NO_PROGRAM[name])

    def way(n, backend):
        shape = PairShape(n, n, 64, torch.bfloat16, torch.device("cuda", 0), has_row_scale="each" in name)
        found = route(shape, spec, tw.TileOptions(backend=backend), Needs())
        return found.strategy, found.backend.name

    registry.forget_choices()
    try:
        assert way(4096, "auto") == ("small", "torch")
        assert way(4104, "auto") == way(64, "triton") == ("two_pass", "triton")
        with limits.changed(small_operators=0):
            assert way(64, "auto") == ("two_pass", "triton")
    finally:
        registry.forget_choices()
