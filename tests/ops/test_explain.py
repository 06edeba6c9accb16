"""`tw.explain`: the decision that the call itself takes, without computing anything, and a memory bound that holds."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from tests.losses.loss_cases import problem, solve
from tests.processes import peak_bytes
from tests.ring.virtual import run_virtual
from torch._subclasses.fake_tensor import FakeTensorMode

import tilewise as tw
from tilewise.errors import ConfigError
from tilewise.kernels.backend import SmallKey
from tilewise.kernels.spec import Needs, PairShape, PairSpec
from tilewise.kernels.torch_impl.backend import TorchBackend
from tilewise.ops import route
from tilewise.ops.call import KEYS, WEIGHTS, Call, Settings
from tilewise.ops.explain import _listening, note

MIB = 2**20


def head(n, m, d, dtype=torch.float32):
    return torch.empty(n, d, dtype=dtype, requires_grad=True), torch.empty(m, d, dtype=dtype, requires_grad=True)


@pytest.mark.parametrize(
    "settings, strategy, reason",
    [
        ({}, "one_pass", "scalar"),
        ({"gradients": "backward"}, "two_pass", "backward"),
        ({"filter_tolerance": 0.01}, "two_pass", "this backend has no filter"),
        ({"filter_tolerance": 1e-35}, "two_pass", "too small for float32"),
        ({"workspace_mib": 1}, "two_pass", "rows"),
    ],
)
def test_strategies_and_reasons(settings, strategy, reason):
    hidden, classes = head(4096, 50_000, 16)
    options = tw.TileOptions(**settings)
    (found,) = tw.explain(tw.linear_cross_entropy, hidden, classes, torch.zeros(4096).long(), options=options).calls
    assert (found.backend, found.strategy) == ("torch", strategy)
    assert reason in found.reason
    assert f"strategy  {strategy}: {found.reason}" in str(found)


def test_every_operator_call_is_listed():
    query, keys = head(64, 64, 8)
    negatives = torch.empty(100, 8, requires_grad=True)
    found = tw.explain(tw.info_nce, query, keys, negatives)
    assert [(call.operator, call.rows, call.cols) for call in found.calls] == [
        ("pair_stats", 64, 64),
        ("pair_stats", 64, 100),
    ]
    assert str(found).count("backend") == 2


def test_modules_and_no_grad(set_limits):
    set_limits(small_cpu=0)
    x, y = head(64, 64, 8)
    (with_grad,) = tw.explain(tw.ClipLoss(), x, y, 3.0).calls
    with torch.no_grad():
        (without,) = tw.explain(tw.ClipLoss(), x, y, 3.0).calls
    assert with_grad.gradient_bytes == 2 * 64 * 8 * 4
    assert without.gradient_bytes == without.accumulator_bytes == 0
    assert "no gradient" in without.reason


def test_it_computes_nothing(monkeypatch):
    monkeypatch.setattr(TorchBackend, "forward", None)
    x, y = head(64, 64, 8)
    tw.explain(tw.nt_xent, x)
    tw.explain(tw.siglip_loss, x, y, 2.0, 1.0)


def small_calls():
    x, y = (torch.randn(40, 8, requires_grad=True) for _ in range(2))
    target = torch.arange(40)
    return {
        "clip": lambda f: f(tw.clip_loss, x, y, 2.0),
        "cross_entropy": lambda f: f(tw.linear_cross_entropy, x, y, target),
    }


@pytest.mark.parametrize("name, strategy", [("clip", "two_pass"), ("cross_entropy", "one_pass")])
def test_the_call_takes_the_strategy_that_was_explained(name, strategy, monkeypatch, set_limits):
    set_limits(small_cpu=0)
    call = small_calls()[name]
    (told,) = call(tw.explain).calls
    assert told.strategy == strategy
    taken = []

    def spy(*args, real=route._route, **more):
        found = real(*args, **more)
        taken.append(found.strategy)
        return found

    monkeypatch.setattr(route, "_route", spy)
    call(lambda loss, *args, **settings: loss(*args, **settings)).backward()
    assert set(taken) == {told.strategy}


def measured(n, m, d, dtype, workspace_mib, ignored=0, gradients="auto"):
    """A small step and the one that counts; see `peak_bytes`."""

    def step(n, m, mib):
        kind = getattr(torch, dtype)
        a, b = (torch.randn(rows, d).to(kind).requires_grad_() for rows in (n, m))
        options = tw.TileOptions(workspace_mib=mib, gradients=gradients)
        target = torch.arange(n) % m
        if ignored:
            target[::ignored] = -100
        return lambda: torch.autograd.grad(tw.linear_cross_entropy(a, b, target, options=options), (a, b))

    return step(600, 600, 1), step(n, m, workspace_mib)  # neither is a small batch


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_bound_holds(dtype):
    n, m, d, mib = 4096, 16_384, 64, 16
    options = tw.TileOptions(workspace_mib=mib)
    hidden, classes = head(n, m, d, getattr(torch, dtype))
    (found,) = tw.explain(tw.linear_cross_entropy, hidden, classes, torch.zeros(n).long(), options=options).calls
    arguments = {"n": n, "m": m, "d": d, "dtype": dtype, "workspace_mib": mib}
    vectors = 24 * (n + m) * 8
    peak = peak_bytes("tests.ops.test_explain:measured", arguments)
    assert peak <= found.peak_bytes + vectors + 2 * MIB
    assert found.peak_bytes < 4 * n * m, "far below the scores"


@pytest.mark.parametrize("gradients, ignored", [("forward", 2), ("backward", 16)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_bound_holds_with_ignored_tokens(dtype, gradients, ignored):
    """Every second or every sixteenth: the others are copied, and so is their gradient. Both are large here."""
    n, m, d, mib = 8192, 512, 512, 4
    options = tw.TileOptions(workspace_mib=mib, gradients=gradients)
    hidden, classes = head(n, m, d, getattr(torch, dtype))
    (found,) = tw.explain(tw.linear_cross_entropy, hidden, classes, torch.zeros(n).long(), options=options).calls
    assert found.copy_bytes == 2 * hidden.nbytes
    arguments = {"n": n, "m": m, "d": d, "dtype": dtype, "workspace_mib": mib}
    arguments |= {"ignored": ignored, "gradients": gradients}
    peak = peak_bytes("tests.ops.test_explain:measured", arguments)
    assert peak <= found.peak_bytes + 24 * (n + m) * 8 + 2 * MIB


def test_the_shift_of_each_row_stays_within_the_workspace():
    """The picked columns of all rows would take 16 MiB, and so would their products."""
    n, m, d, mib = 8192, 512, 512, 4
    arguments = {"n": n, "m": m, "d": d, "dtype": "float32", "workspace_mib": mib}
    gradients = 4 * (n + m) * d
    peak = peak_bytes("tests.ops.test_explain:measured", arguments)
    assert peak <= gradients + 24 * (n + m) * 8 + (mib + 2) * MIB


LOSSES = {
    "clip": lambda x, y, **how: tw.clip_loss(x, y, 14.3, **how),
    "siglip": lambda x, y, **how: tw.siglip_loss(x, y, 10.0, -10.0, **how),
    "nt_xent": lambda x, y, **how: tw.nt_xent(x, **how),
    "info_nce": lambda x, y, **how: tw.info_nce(x, y, **how),
    "cross entropy": lambda x, y, **how: tw.linear_cross_entropy(x, y, labels(x, y), **how),
    "token stats": lambda x, y, **how: tw.linear_token_stats(x, y, labels(x, y), **how).entropy.sum(),
    "distillation": lambda x, y, **how: tw.linear_distillation_loss(x, y, x.detach(), y.detach(), beta=0.3, **how),
}


def labels(x, y):
    return torch.arange(len(x), device=x.device) % len(y)


def measured_loss(name, n, m, d, dtype):
    """A small step and the one that counts; see `peak_bytes`."""

    def step(n, m):
        leaves = [torch.randn(rows, d).to(getattr(torch, dtype)).requires_grad_() for rows in (n, m)]
        return lambda: torch.autograd.grad(LOSSES[name](*leaves), leaves, allow_unused=True)

    few, more = (
        step(512, 512),
        step(1500, 1500),
    )  # a small batch and tiles: the library of products has its buffers then
    return lambda: (few(), more()), step(n, m)


@pytest.mark.parametrize(
    "name, n, m, d, dtype",
    [
        ("clip", 1024, 1024, 512, "float32"),
        ("clip", 512, 512, 512, "bfloat16"),
        ("siglip", 2048, 2048, 64, "float32"),
        ("nt_xent", 3000, 0, 128, "float32"),
        ("info_nce", 1024, 1024, 256, "float64"),
        ("cross entropy", 500, 8000, 128, "float32"),
        ("cross entropy", 500, 8000, 128, "bfloat16"),
        ("token stats", 4096, 20_000, 32, "float32"),
        ("distillation", 300, 1000, 64, "float32"),
    ],
)
def test_the_bound_is_that_of_the_call(name, n, m, d, dtype):
    """Far below the workspace of 256 MiB, of which these calls use little."""
    leaves = [torch.empty(rows, d, dtype=getattr(torch, dtype), requires_grad=True) for rows in (n, m)]
    (found,) = tw.explain(LOSSES[name], *leaves).calls
    arguments = {"name": name, "n": n, "m": m, "d": d, "dtype": dtype}
    peak = peak_bytes("tests.ops.test_explain:measured_loss", arguments)
    assert peak <= found.peak_bytes + 24 * (n + m) * 8 + MIB
    assert found.peak_bytes <= 2 * peak + 2 * MIB


def test_the_bound_of_kernels_is_that_of_the_call():
    """Grows with the scores up to the workspace. Nothing is measured: the interpreter takes memory of its own."""
    pytest.importorskip("triton", reason="triton is not installed on this platform")
    bounds = []
    for n in (256, 1024, 8192):
        x, y = head(n, n, 64)
        (found,) = tw.explain(tw.clip_loss, x, y, 2.0, options=tw.TileOptions(backend="triton")).calls
        assert found.workspace_bytes >= min(4 * n * n, 192 * MIB), "G"
        bounds.append(found.workspace_bytes)
    assert bounds[0] < 2 * MIB < bounds[1] < 32 * MIB < bounds[2] <= 256 * MIB


def test_copies_are_counted_where_rows_can_be_dropped():
    x, y = head(64, 64, 8)
    assert tw.explain(tw.clip_loss, x, y, 2.0).calls[0].copy_bytes == 0
    with torch.no_grad():
        (found,) = tw.explain(tw.linear_cross_entropy, x, y, torch.zeros(64).long()).calls
    assert found.copy_bytes == x.nbytes
    assert "copies 1," in str(found)


def measured_ring(n, d, workspace_mib):
    """Two ranks in one process; see `peak_bytes`."""

    def step(n, mib):
        shards = [[torch.randn(n, d, requires_grad=True) for _ in range(2)] for _ in range(2)]
        options = tw.TileOptions(workspace_mib=mib)
        return lambda: run_virtual(2, lambda group: ring_gradients(*shards[group.rank()], group, options))

    return step(64, 1), step(n, workspace_mib)


def ring_gradients(a, b, group, options):
    return torch.autograd.grad(tw.clip_loss(a, b, 2.0, group=group, options=options), (a, b))


def test_the_bound_holds_over_a_group():
    n, d, mib = 3072, 256, 2
    x, y = head(n, n, d)
    options = tw.TileOptions(workspace_mib=mib)

    def of_one_rank(group):
        return tw.explain(tw.clip_loss, x, y, 2.0, group=group, options=options) if group.rank() == 0 else None

    (found,) = run_virtual(2, of_one_rank)[0].calls
    (alone,) = tw.explain(tw.clip_loss, x, y, 2.0, options=options).calls
    peak = peak_bytes("tests.ops.test_explain:measured_ring", {"n": n, "d": d, "workspace_mib": mib})
    assert 2 * alone.peak_bytes < peak <= 2 * found.peak_bytes + 2 * MIB


@pytest.mark.parametrize("columns, launches", [(0, 4), (16, 2), (8192, 1)])
def test_the_launches_of_a_ring_are_those_that_run(columns, launches, set_limits):
    set_limits(ring_columns=columns)
    x, y = head(8, 8, 16)

    def of_one_rank(group):
        return tw.explain(tw.clip_loss, x, y, 2.0, group=group) if group.rank() == 0 else None

    (found,) = run_virtual(4, of_one_rank)[0].calls
    words = {4: "each block of columns is", 2: "the blocks of 2 ranks are gathered and", 1: "the blocks of 4 ranks are"}
    assert found.ring.startswith(f"4 ranks: {words[launches]}")
    assert found.ring.endswith(f"{launches} launches in each direction")
    assert f"\n  ring      {found.ring}" in str(found)
    sizes = {"forward": [], "backward": []}  # of the columns of each launch of all ranks

    def noting(name):
        real = getattr(TorchBackend, name)

        def call(backend, pair, *args, **more):
            sizes[name].append(pair.b.shape[0])
            return real(backend, pair, *args, **more)

        return call

    def step(group):
        a, b = (value.detach().requires_grad_() for value in (x, y))
        tw.clip_loss(a, b, 2.0, group=group).backward()

    with mock.patch.multiple(TorchBackend, forward=noting("forward"), backward=noting("backward")):
        run_virtual(4, step)
    assert sizes["forward"] == sizes["backward"] == [8 * 4 // launches] * (4 * launches)


def test_retrieval_is_refused():
    x, y = head(8, 8, 4)
    with pytest.raises(ConfigError, match=r"retrieval_ranks reads values.*nothing to explain"):
        tw.explain(tw.retrieval_ranks, x, y)


def test_other_functions_are_refused():
    with pytest.raises(ConfigError, match=r"explain is for losses.*tilewise"):
        tw.explain(torch.nn.functional.normalize, torch.ones(3, 3))


SMALL_CALLS = ["clip", "siglip", "nt_xent", "supcon", "info_nce_ids", "info_nce_ids_one_way"]


@pytest.mark.usefixtures("quick")
@pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")  # Triton 3.6 with NumPy from 1.25 on
@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*")
@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter runs on the CPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", SMALL_CALLS)
def test_the_program_of_a_small_call_is_that_which_runs(name, dtype, monkeypatch):
    pytest.importorskip("triton", reason="the torch backend has no programs")
    from tilewise.kernels.triton_impl.program import Program

    made, options = problem(name, dtype, n=20), tw.TileOptions(backend="triton")
    (found,) = tw.explain(lambda **leaves: made.ours(SimpleNamespace(**leaves), options=options), **made.leaves).calls
    assert found.strategy == "small"
    ran, run = [], Program.run
    monkeypatch.setattr(Program, "run", lambda self, *given: ran.append(self) or run(self, *given))
    solve(made.ours, made.leaves, options=options)
    program = ran[0]  # the second is that of backward
    assert found.program == str(program)
    assert found.peak_bytes >= program.peak_bytes
    saved = sum(buffer.used_bytes for buffer in program.outputs if buffer.shape)
    assert found.workspace_bytes == program.peak_bytes - saved > 0


def test_the_program_is_printed_below_the_decision():
    pytest.importorskip("triton", reason="the torch backend has no programs")
    x, y = head(64, 64, 32)
    found = tw.explain(tw.clip_loss, x, y, 3.0, options=tw.TileOptions(backend="triton"))
    lines = str(found).splitlines()
    assert lines[3].startswith("  memory  ")
    assert lines[4] == "  workspace at most 768 MiB: the default of a small batch"
    assert lines[5:7] == ["  program", "    1. x = a @ b'"]
    assert "\n    4. both_kernel x 2: x," in str(found)
    assert lines[-1] == "    peak: 37,888 bytes"
    options = tw.TileOptions(backend="triton", gradients="backward")
    (other,) = tw.explain(tw.clip_loss, x, y, 3.0, options=options).calls
    assert other.program.startswith("forward\n  1. positive_kernel x 1: a, b,")
    assert "\nbackward\n  1. span_kernel" in other.program
    (other,) = tw.explain(tw.clip_loss, x, y, 3.0, options=tw.TileOptions(backend="torch")).calls
    assert (other.strategy, other.program) == ("small", "")
    assert "program" not in str(other)


def test_the_program_of_a_gpu_is_told_without_one():
    """A build of torch without CUDA has fake tensors on such a device, if they do not require grad."""
    pytest.importorskip("triton", reason="the torch backend has no programs")
    from tilewise.kernels.triton_impl.backend import TritonBackend
    from tilewise.kernels.triton_impl.small.programs import loss_program

    n, m, d = 4096, 2048, 512
    spec, options = PairSpec(row_lse=True, positive="one"), tw.TileOptions(backend="triton")
    with FakeTensorMode():
        a, b = (torch.empty(rows, d, dtype=torch.bfloat16, device="cuda") for rows in (n, m))
    settings = Settings(spec, options, needs=Needs(a=True, b=True))
    call = Call((a, b, 2.0, None), (None,) * (len(KEYS) + len(WEIGHTS)), settings)
    with _listening() as found:
        note("pair_loss", call, route.Route("small", "a test", TritonBackend(), forms_gradients=True))
    shape = PairShape(n, m, d, torch.bfloat16, torch.device("cuda", 0))
    program = loss_program(SmallKey(shape, spec, Needs(), "torch", frozenset(), False, False))
    (decision,) = found
    assert decision.program == str(program)
    features = 2 * (n + m) * d
    assert decision.peak_bytes == program.peak_bytes == 6 * n * m + 4 * n, "scores, G, losses of rows"
    assert decision.peak_bytes == decision.workspace_bytes + features
