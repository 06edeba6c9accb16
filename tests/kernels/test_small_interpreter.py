"""The programs and kernels of small batches in Triton's interpreter, on the CPU."""

from types import SimpleNamespace

import pytest
import torch
from tests.compare import assert_close
from tests.losses.loss_cases import converted, problem, solve, upstream_like

pytest.importorskip("triton", reason="triton is not installed on this platform")

from tests.kernels.interpreted import IN_THE_INTERPRETER

import tilewise as tw
from tilewise.kernels.backend import SmallKey
from tilewise.kernels.spec import Needs, PairShape, PairSpec
from tilewise.kernels.triton_impl.backend import TritonBackend
from tilewise.kernels.triton_impl.small import programs, stats
from tilewise.kernels.triton_impl.small.strategy import TritonJob

pytestmark = IN_THE_INTERPRETER
OPTIONS = tw.TileOptions(backend="triton", precision="highest")
SERVED = [
    *("clip", "siglip", "nt_xent", "supcon", "supcon_lonely_rows", "info_nce", "info_nce_symmetric", "info_nce_ids"),
    *("info_nce_ids_one_way", "cross_entropy", "cross_entropy_bias", "cross_entropy_weighted"),
    *("cross_entropy_ignoring_a_class", "cross_entropy_softcap", "cross_entropy_z_loss"),
]
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1.2 * 2**-10}


@pytest.fixture(params=["one_tile", "several_tiles"])
def tiles(request, monkeypatch):
    """Rows in one piece, or a loop over columns with ragged ends."""
    if request.param == "several_tiles":
        for module in (programs, stats):
            monkeypatch.setattr(module, "tile_of", lambda n, m: (4, 16))
        monkeypatch.setattr(programs, "BOTH_COLS", 16)


@pytest.mark.usefixtures("tiles", "nan_filled_empty")
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", SERVED)
def test_equals_the_oracle(name, dtype):
    made = problem(name, dtype, n=26)
    loss, grads = solve(made.ours, made.leaves, options=OPTIONS)
    want, want_grads = solve(made.dense, converted(made.leaves, torch.float64))
    assert_close(loss, want, 3e-6, "loss")
    for leaf in want_grads:
        assert_close(grads[leaf], want_grads[leaf], TOLERANCE[dtype], leaf)


@pytest.mark.usefixtures("tiles", "nan_filled_empty")
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", ["siglip", "cross_entropy_weighted", "info_nce_hardness_ids"])
def test_each_row_equals_the_oracle(name, dtype, monkeypatch):
    monkeypatch.setattr(TritonBackend, "forward", None)  # the strategy of large calls
    made = problem(name, dtype, n=14, d=8)
    exact = converted(made.leaves, torch.float64)
    upstream = upstream_like(made.dense(SimpleNamespace(**exact), reduction="none"))
    loss, grads = solve(made.ours, made.leaves, upstream, reduction="none", options=OPTIONS)
    want, want_grads = solve(made.dense, exact, upstream, reduction="none")
    assert_close(loss, want, 3e-6, "loss")
    for leaf in want_grads:
        assert_close(grads[leaf], want_grads[leaf], max(TOLERANCE[dtype], 1e-5 * (want_grads[leaf].dim() == 0)), leaf)


@pytest.mark.usefixtures("tiles", "nan_filled_empty")
@pytest.mark.parametrize("used", [("log_prob", "entropy"), ("entropy",), ("logsumexp",)], ids="+".join)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_token_statistics_equal_the_oracle(dtype, used):
    """The lowest of equal logits is the largest one; an ignored token has none."""
    generator = torch.Generator().manual_seed(4)
    a, c, bias = (torch.randn(*size, generator=generator, dtype=torch.float64) for size in ((11, 8), (37, 8), (37,)))
    c[20], bias[20] = c[3], bias[3]
    a[5] = 9.0 * c[3]
    target = torch.randint(37, (11,), generator=generator)
    target[[2, 7]] = -100
    leaves = {"a": a.to(dtype), "c": c.to(dtype), "bias": bias.float(), "scale": torch.tensor(0.7)}
    leaves = {name: leaf.requires_grad_() for name, leaf in leaves.items()}

    def ours(p):
        how = {"linear_bias": p.bias, "logit_scale": p.scale, "options": OPTIONS, "softcap": 8.0}
        stats = tw.linear_token_stats(p.a, p.c, target, **how)
        assert torch.equal(stats.argmax, torch.where(target == -100, -1, logits(p).argmax(1)))
        return torch.cat([getattr(stats, name) for name in used])

    def logits(p):
        return 8.0 * torch.tanh((p.scale * p.a.double() @ p.c.double().T + p.bias) / 8.0)

    def dense(p):
        log_p = logits(p).log_softmax(1)
        each = {"log_prob": log_p[range(11), target.clamp(min=0)], "entropy": -(log_p.exp() * log_p).sum(1)}
        each["logsumexp"] = logits(p).logsumexp(1)
        return torch.cat([torch.where(target == -100, 0.0, each[name]) for name in used])

    upstream = upstream_like(torch.zeros(11 * len(used)))
    want, want_grads = solve(dense, converted(leaves, torch.float64), upstream)
    found, grads = solve(ours, leaves, upstream)
    assert_close(found, want, 3e-6)
    for leaf in want_grads:
        assert_close(grads[leaf], want_grads[leaf], max(TOLERANCE[dtype], 1e-5 * (leaf == "scale")), leaf)


def job(spec, n, m, d, *, has_row_key=False, kept=False):
    shape = PairShape(n, m, d, torch.float32, torch.device("cpu"), has_row_key=has_row_key)
    present = frozenset({"row_key"} if has_row_key else ())
    return TritonJob(SmallKey(shape, spec, Needs(), "torch", present, False, kept))


@pytest.mark.parametrize("counted", [0, 2048])
@pytest.mark.parametrize("target", ["some", "out", "none"])
def test_ignored_rows_and_targets_out_of_range(target, counted, monkeypatch):
    """A GPU's host cannot look: a target out of range gives NaN, an ignored one nothing. No row: NaN, gradient 0."""
    monkeypatch.setattr(programs, "COUNTED_ROWS", counted)  # by a kernel of its own, or by each program
    spec = PairSpec(row_lse=True, positive="one", ignored=-100, drop_rows=True)
    generator = torch.Generator().manual_seed(1)
    a, b = torch.randn(5, 8, generator=generator), torch.randn(9, 8, generator=generator)
    key = {"some": [3, -100, 8, 0, -100], "out": [3, -100, 9, 0, -5], "none": [-100] * 5}[target]
    key = torch.tensor(key)
    made = job(spec, 5, 9, 8, has_row_key=True, kept=True)
    facts = key, None, None, None, None, None
    loss, saved = made.forward(a, b, 2.0, None, facts, 1.0)
    grad_a, grad_b, *_ = made.backward(saved, torch.tensor(1.0), overwrite=True)
    if target == "some":
        x, y = a.double().requires_grad_(), b.double().requires_grad_()
        want = torch.nn.functional.cross_entropy(2.0 * x @ y.T, key)
        wants = torch.autograd.grad(want, (x, y))
        assert_close(loss, want, 1e-6)
        assert_close(grad_a, wants[0], 1e-6)
        assert_close(grad_b, wants[1], 1e-6)
        assert (grad_a[[1, 4]] == 0).all()
        return
    assert loss.isnan()
    if target == "out":
        assert grad_a[[2, 4]].isnan().all()
        assert not grad_a[[0, 1, 3]].isnan().any()
    else:
        assert (grad_a == 0).all()
        assert (grad_b == 0).all()


def test_a_second_backward_keeps_what_forward_saved():
    made = job(PairSpec(row_lse=True, positive="one"), 6, 6, 4)
    x = torch.randn(6, 4)
    _, saved = made.forward(x, x, 3.0, None, (None,) * 6, 1 / 6)
    kept = [None if value is None else value.clone() for value in saved]
    twice = made.backward(saved, torch.tensor(2.0), overwrite=False)
    assert all(one is None or torch.equal(one, other) for one, other in zip(saved, kept, strict=True))
    assert_close(twice[0], 2.0 * kept[0], 1e-6)
    for grad in made.backward(saved, torch.tensor(2.0), overwrite=True)[:2]:
        assert any(grad is value for value in saved)  # in place


def test_features_of_scores_1000():
    """Late in training: nothing overflows, and a loss near 0 keeps its digits."""
    a = torch.nn.functional.normalize(torch.randn(12, 16, generator=torch.Generator().manual_seed(2)), dim=1)
    x, y = a.clone().requires_grad_(), (a + 0.01 * a.flip(0)).requires_grad_()
    loss = tw.info_nce(x, y, temperature=0.001, options=OPTIONS)
    got = torch.autograd.grad(loss, (x, y))
    p, q = x.detach().double().requires_grad_(), y.detach().double().requires_grad_()
    want = torch.nn.functional.cross_entropy(p @ q.T / 0.001, torch.arange(12))
    wants = torch.autograd.grad(want, (p, q))
    assert abs(loss.item() - want.item()) <= 1e-6
    for one, other in zip(got, wants, strict=True):
        assert (one - other).abs().max() <= 1e-4 * max(other.abs().max().item(), 1e-3)
