"""The one-pass strategy of the torch backend: numbers, ignored rows, when it is chosen, and memory."""

import functools

import pytest
import torch
from tests.compare import assert_close, assert_no_worse
from tests.kernels.marks import NEEDS_TRITON
from tests.losses.loss_cases import converted, problem, solve
from tests.ops.one_pass_cases import FEW, ONE_PASS, SERVED, TWO_PASS, count_calls
from tests.processes import peak_bytes
from torch.nn.functional import normalize

import tilewise as tw
from tilewise.kernels.registry import forget_choices
from tilewise.kernels.spec import Needs, PairShape, PairSpec
from tilewise.kernels.torch_impl import one_pass as kernels
from tilewise.kernels.torch_impl.backend import TorchBackend
from tilewise.ops.limits import Limits
from tilewise.ops.route import route

MIB = 2**20
NOT_SERVED = ["clip", "info_nce_symmetric", "info_nce_shared_negatives", "cross_entropy_smoothed", "nt_xent", "supcon"]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch, set_limits, small_tiles):
    """Several blocks of rows, the last one ragged."""
    monkeypatch.setattr(kernels, "LARGEST_BLOCK", 48)
    set_limits(smallest_block=1, small_cpu=0)


@pytest.fixture
def calls(monkeypatch):
    """What was asked of the kernels, and what they gave."""
    return count_calls(monkeypatch)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("name", SERVED)
def test_equals_the_oracle(name, reduction, calls, nan_filled_empty):
    made = problem(name)
    loss, grads = solve(made.ours, made.leaves, reduction=reduction, options=ONE_PASS)
    want, want_grads = solve(made.dense, made.leaves, reduction=reduction)
    assert len(calls) == 1
    assert_close(loss, want, 1e-14)
    for leaf in want_grads:
        assert_close(grads[leaf], want_grads[leaf], 1e-12, leaf)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("name", SERVED)
def test_half_types_are_no_worse_than_dense(name, dtype, calls):
    made = problem(name, dtype)
    loss, grads = solve(made.ours, made.leaves, options=ONE_PASS)
    dense, dense_grads = solve(made.dense, made.leaves)
    want, want_grads = solve(made.dense, converted(made.leaves, torch.float64))
    assert len(calls) == 1
    assert_no_worse(loss, dense, want)
    for leaf in want_grads:
        assert grads[leaf].dtype == made.leaves[leaf].dtype
        assert_no_worse(grads[leaf], dense_grads[leaf], want_grads[leaf], leaf)


@pytest.mark.parametrize("scale", [1000.0, 0.0])
def test_scores_of_a_thousand_and_of_nothing(scale, calls):
    generator = torch.Generator().manual_seed(1)
    a, b = (normalize(torch.randn(70, 9, generator=generator, dtype=torch.float64)).requires_grad_() for _ in range(2))
    s = torch.tensor(scale, dtype=torch.float64, requires_grad=True)
    target = torch.randint(0, 70, (70,), generator=generator)

    def loss(options):
        return tw.linear_cross_entropy(a, b, target, logit_scale=s, options=options)

    got, want = (torch.autograd.grad(loss(options), (a, b, s)) for options in (ONE_PASS, TWO_PASS))
    assert len(calls) == 1
    assert_close(loss(ONE_PASS), loss(TWO_PASS), 1e-14)
    for one, other in zip(got, want, strict=True):
        assert_close(one, other, 1e-12)


def test_a_z_loss_that_cancels_the_weight_of_a_row():
    """w + 2 z lse = 0, as a bias makes lse negative: nothing may be divided by it."""
    hidden = torch.zeros(3, 4, dtype=torch.float64, requires_grad=True)
    classes = torch.randn(5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()
    target, bias = torch.tensor([0, 3, 4]), torch.full((5,), -4.0, dtype=torch.float64)
    settings = {"linear_bias": bias, "z_loss": -0.5 / bias.logsumexp(0).item()}
    got, want = (
        torch.autograd.grad(tw.linear_cross_entropy(hidden, classes, target, **settings, options=options), hidden)[0]
        for options in (ONE_PASS, TWO_PASS)
    )
    assert_close(got, want, 1e-12)


# Rows that do not count ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_all_rows_ignored(reduction):
    hidden, classes = torch.randn(5, 4, requires_grad=True), torch.randn(6, 4, requires_grad=True)
    target = torch.full((5,), -100)
    loss = tw.linear_cross_entropy(hidden, classes, target, reduction=reduction, options=ONE_PASS)
    loss.backward()
    assert loss.isnan() if reduction == "mean" else loss.item() == 0.0
    assert not hidden.grad.any()
    assert not classes.grad.any()


def test_ignored_rows_meet_no_column(calls):
    """Even NaN in them reaches nothing."""
    hidden = torch.randn(50, 4, dtype=torch.float64)
    hidden[::2] = torch.nan
    hidden.requires_grad_()
    classes, target = torch.randn(6, 4, dtype=torch.float64, requires_grad=True), torch.arange(50) % 6
    target[::2] = -100
    tw.linear_cross_entropy(hidden, classes, target, options=ONE_PASS).backward()
    assert len(calls[0].pair.a) == 25
    assert not hidden.grad[::2].any()
    assert hidden.grad.isfinite().all()
    assert classes.grad.isfinite().all()


@pytest.mark.parametrize("options", [ONE_PASS, TWO_PASS])
@pytest.mark.parametrize("z_loss", [0.0, 0.1])
def test_weights_of_classes_that_add_up_to_nothing(options, z_loss):
    """0 / 0 in the loss and in its gradients, as in torch: no gradient that looks like one."""
    hidden, classes = torch.randn(5, 4, requires_grad=True), torch.randn(6, 4, requires_grad=True)
    target, weight = torch.tensor([1, 2, 1, -100, 2]), torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 1.0])
    settings = {"weight": weight, "z_loss": z_loss, "options": options}
    loss = tw.linear_cross_entropy(hidden, classes, target, **settings)
    loss.backward()
    assert loss.isnan()
    assert hidden.grad[target >= 0].isnan().all()
    assert not hidden.grad[3].any()
    assert tw.linear_cross_entropy(hidden, classes, target, reduction="sum", **settings).isfinite()


@pytest.mark.parametrize("options", [ONE_PASS, TWO_PASS, tw.TileOptions(filter_tolerance=1e-9)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_target_that_a_bias_rules_out(options, dtype):
    """An infinite loss, and the gradients of the dense loss, which are finite."""
    hidden, classes = torch.randn(9, 4).to(dtype).requires_grad_(), torch.randn(40, 4).to(dtype).requires_grad_()
    bias, target = torch.zeros(40, dtype=dtype), torch.arange(9)
    bias[2] = -torch.inf
    bias.requires_grad_()
    leaves = hidden, classes, bias
    loss = tw.linear_cross_entropy(hidden, classes, target, linear_bias=bias, options=options)
    assert loss == torch.inf
    got = torch.autograd.grad(loss, leaves)
    dense = torch.nn.functional.cross_entropy(hidden.double() @ classes.double().T + bias.double(), target)
    for grad, want in zip(got, torch.autograd.grad(dense, leaves), strict=True):
        assert_close(grad, want, {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 1e-2}[dtype])


@pytest.mark.parametrize("options", [ONE_PASS, TWO_PASS, tw.TileOptions(filter_tolerance=1e-9)])
@pytest.mark.parametrize("settings", [{}, {"z_loss": 0.1}, {"weight": torch.rand(40)}, {"label_smoothing": 0.1}])
@pytest.mark.parametrize("wrong", [43, -5])
@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_a_wrong_target_where_the_host_may_not_look(options, settings, wrong, reduction, monkeypatch):
    """As on a GPU: NaN as loss, and as gradient of the row and of all classes, and nothing else changes."""
    monkeypatch.setattr("tilewise._check.can_read", lambda values: False)
    hidden, classes = torch.randn(9, 4, requires_grad=True), torch.randn(40, 4, requires_grad=True)
    target, row = torch.arange(9), torch.arange(9) == 2
    target[5] = -100

    def solved(target):
        loss = tw.linear_cross_entropy(hidden, classes, target, reduction=reduction, options=options, **settings)
        return loss.sum(), *torch.autograd.grad(loss.sum(), (hidden, classes))

    _, right, _ = solved(target)
    target[2] = wrong
    loss, of_hidden, of_classes = solved(target)
    assert loss.isnan()
    assert of_hidden[row].isnan().all()
    assert_close(of_hidden[~row], right[~row], 1e-6)
    assert of_classes.isnan().all()


@pytest.mark.parametrize("options", [ONE_PASS, TWO_PASS])
@pytest.mark.parametrize(("score", "at"), [(torch.inf, 0), (torch.inf, 30), (-torch.inf, slice(None))])
def test_a_score_that_makes_the_dense_loss_nan(options, score, at):
    """Then so are its gradients, and ours."""
    hidden, classes = torch.randn(9, 4, requires_grad=True), torch.randn(40, 4, requires_grad=True)
    bias, target = torch.zeros(40), torch.arange(9)
    bias[at] = score
    leaves = hidden, classes, bias.requires_grad_()
    loss = tw.linear_cross_entropy(hidden, classes, target, linear_bias=bias, options=options)
    assert loss.isnan()
    assert all(grad.isnan().all() for grad in torch.autograd.grad(loss, leaves))


@pytest.mark.parametrize("options", [ONE_PASS, TWO_PASS, tw.TileOptions(filter_tolerance=1e-3)])
@pytest.mark.parametrize("changed", range(4))
def test_inputs_that_change_before_backward_are_noticed(options, changed):
    leaves = torch.randn(9, 4), torch.randn(40, 4), torch.randn(40), torch.ones(())
    hidden, classes, bias, scale = inputs = [1.0 * leaf.requires_grad_() for leaf in leaves]
    loss = tw.linear_cross_entropy(
        hidden, classes, torch.arange(9), linear_bias=bias, logit_scale=scale, options=options
    )
    with torch.no_grad():
        inputs[changed].mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# When ------------------------------------------------------------------------------------------------------------

SOFTMAX, SIGMOID = PairSpec(row_lse=True, positive="one"), PairSpec(softplus=True, positive="one")


@pytest.mark.parametrize("name", NOT_SERVED)
def test_losses_that_cannot_do_it_do_as_before(name, calls):
    made = problem(name)
    loss, grads = solve(made.ours, made.leaves, options=ONE_PASS)
    want, want_grads = solve(made.ours, made.leaves, options=TWO_PASS)
    assert not calls
    assert torch.equal(loss, want)
    assert all(torch.equal(grads[leaf], want_grads[leaf]) for leaf in want_grads)


def early(n, m, d, dtype=torch.float32, device="cpu", spec=SOFTMAX, group="", **settings):
    forget_choices()
    shape, options = PairShape(n, m, d, dtype, torch.device(device)), tw.TileOptions(**settings)
    way = route(shape, spec, options, Needs(), scalar=True, over_group=bool(group))
    return way.strategy == "one_pass"


def test_auto_goes_by_the_workspace(monkeypatch, set_limits):
    monkeypatch.setattr(kernels, "LARGEST_BLOCK", 1024)
    set_limits(smallest_block=64)
    assert early(8192, 8192, 256)
    assert early(2048, 128_256, 64)
    assert not early(2048, 4_000_000, 64)  # 64 rows of scores take more than the workspace
    assert not early(2048, 4_000_000, 64, gradients="forward")  # it would be slower
    assert early(2048, 4_000_000, 64, spec=SIGMOID)  # which holds tiles only
    assert early(2048, 4_000_000, 64, workspace_mib=2048)
    assert not early(2048, 128_256, 4096, dtype=torch.bfloat16)  # all classes as float32
    assert not early(8192, 8192, 256, gradients="backward")
    assert not early(8192, 8192, 256, group="0")
    assert not early(8192, 8192, 256, filter_tolerance=0.1)
    assert not early(0, 8192, 256)


@NEEDS_TRITON
def test_auto_on_a_gpu(monkeypatch, set_limits):
    set_limits(small=0)
    from tilewise.kernels.triton_impl.backend import TritonBackend
    from tilewise.kernels.triton_impl.two_pass.macro_tile import ONE_MACRO

    assert Limits().many == ONE_MACRO  # beyond it two passes have a float32 sum of the column gradients
    gpu = functools.lru_cache(lambda shape, spec, options: TritonBackend())  # there is none here, and none is needed
    monkeypatch.setattr("tilewise.ops.route.choose_backend", gpu)
    bf16 = {"dtype": torch.bfloat16, "device": "cuda"}
    assert not early(8192, 128_256, 4096, **bf16)  # needs a float32 accumulator of 2 GiB, or 2 GiB of scores
    assert early(8192, 128_256, 4096, workspace_mib=2100, **bf16)
    assert early(65_536, 65_536, 512, workspace_mib=512, **bf16)  # backward has the accumulator too
    assert early(65_536, 65_536, 768, spec=SIGMOID, **bf16)
    assert early(512, 512, 512, spec=SIGMOID, **bf16)
    assert not early(512, 512, 512, **bf16)  # the host is the limit
    assert not early(8192, 128_256, 4096, workspace_mib=2000, **bf16)
    for mib in (256, 1024, 2000):  # one pass in small blocks would be slower than two passes
        assert not early(8192, 128_256, 4096, gradients="forward", workspace_mib=mib, **bf16)
    assert early(8192, 151_936, 1024, workspace_mib=1400, **bf16)
    assert early(20_000, 100_000, 1024, workspace_mib=160, **bf16)  # 807 rows
    assert not early(20_000, 100_000, 1024, workspace_mib=150, **bf16)  # 757 rows
    assert not early(20_000, 16_384, 1024, workspace_mib=100, **bf16)  # two passes have no float32 sum
    assert early(20_000, 16_384, 1024, workspace_mib=200, **bf16)  # 3,835 rows beside it
    assert early(65_536, 65_536, 384, **bf16)
    assert not early(65_536, 65_536, 256, **bf16)  # narrow, and in several blocks
    assert early(65_536, 65_536, 256, gradients="forward", **bf16)
    assert early(16_384, 16_384, 256, workspace_mib=1024, **bf16)  # in one block
    assert early(512, 512, 512, gradients="forward", **bf16)


@NEEDS_TRITON
def test_exponentials_are_saved_where_a_large_classifier_would_be():
    """As float32 its gradient would take as much memory as all scores of the call."""
    from tilewise.kernels.triton_impl.one_pass.products import saves_exponentials

    def waits(n, m, d, dtype=torch.bfloat16, spec=SOFTMAX, mib=2100, **needs):
        shape = PairShape(n, m, d, dtype, torch.device("cuda"))
        return saves_exponentials(shape, Needs(**needs), spec, tw.TileOptions(workspace_mib=mib))

    assert waits(8192, 128_256, 4096)
    assert not waits(8192, 128_256, 4096, mib=256)  # several blocks, added up in float32
    assert waits(900, 128_256, 4096, mib=256)  # a part of a batch whose gradients are accumulated
    assert not waits(16_384, 16_384, 512)  # small
    assert not waits(8192, 128_256, 4096, b=False)  # the rows' gradient is small
    assert not waits(8192, 128_256, 4096, spec=SIGMOID)
    assert not waits(8192, 128_256, 4096, dtype=torch.float32)  # waits in its own type


def test_a_workspace_too_small_for_a_row_takes_two_passes(monkeypatch):
    made = problem("cross_entropy_z_loss")
    monkeypatch.setattr(kernels, "block_rows", lambda *_: 0)
    _, grads = solve(made.ours, made.leaves, options=ONE_PASS)
    _, want = solve(made.dense, made.leaves)
    for leaf in want:
        assert_close(grads[leaf], want[leaf], 1e-12, leaf)


def test_products_are_three(monkeypatch):
    """Counted by the backend's own passes: neither of them runs."""
    monkeypatch.setattr(TorchBackend, "forward", None)
    monkeypatch.setattr(TorchBackend, "backward", None)
    for name in FEW:
        made = problem(name)
        solve(made.ours, made.leaves, options=ONE_PASS)


# Memory ----------------------------------------------------------------------------------------------------------


def measured(n, m, d, workspace_mib):
    """A small step and the one that counts; see `peak_bytes`."""

    def step(n, m, mib):
        a, b = (torch.randn(rows, d).requires_grad_() for rows in (n, m))
        target, options = torch.arange(n) % m, tw.TileOptions(workspace_mib=mib, gradients="forward")
        return lambda: torch.autograd.grad(3.0 * tw.linear_cross_entropy(a, b, target, options=options), (a, b))

    return step(256, 256, 1), step(n, m, workspace_mib)


def test_scratch_stays_within_the_workspace():
    """Peak = the two gradients + vectors + the workspace; all scores would take 256 MiB."""
    n, m, d, mib = 4096, 16_384, 64, 16
    arguments = {"n": n, "m": m, "d": d, "workspace_mib": mib}
    gradients, vectors = (n + m) * d * 4, 24 * (n + m) * 8
    peak = peak_bytes("tests.ops.test_one_pass:measured", arguments)
    assert peak <= mib * MIB + gradients + vectors + MIB


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=["fp64", "fp32", "bf16"])
@pytest.mark.parametrize("mib", [1, 16, 256])
def test_blocks_are_cut_to_the_workspace(dtype, mib, monkeypatch):
    monkeypatch.setattr(kernels, "LARGEST_BLOCK", 1024)
    spec = PairSpec(row_lse=True, positive="one", softcap=30.0)
    for n, m, d in [(1, 1, 1), (5000, 300, 512), (300, 70_000, 64), (8192, 256_000, 2304)]:
        rows = kernels.block_rows(PairShape(n, m, d, dtype, torch.device("cpu")), spec, mib * MIB)
        item = 8 if dtype == torch.float64 else 4
        assert rows <= n
        assert rows * m * item * 2 <= mib * MIB
