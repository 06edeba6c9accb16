"""The Triton kernels in Triton's interpreter, on the CPU: every case, every kernel, every switch."""

import dataclasses
import logging
import math
from types import SimpleNamespace

import pytest
import torch
from tests.compare import assert_close, assert_no_worse, relative_error
from tests.gpu.checks import Place, check_tokens
from tests.kernels.pair_cases import CASES, HARD, make_case
from tests.kernels.pair_checks import (
    all_needs,
    check_backward,
    check_forward,
    dense_grads,
    grads_asked,
    incoming_gradients,
    leaves_of,
    stats_asked,
)
from tests.kernels.pair_maker import Maker
from tests.kernels.quick_interpreter import make_quick
from tests.losses.loss_cases import converted, problem, solve

import tilewise as tw
from tilewise.errors import BackendError
from tilewise.kernels import select
from tilewise.kernels.spec import GradStats, Needs, Pair, PairSpec
from tilewise.kernels.triton_impl import gradients, launch, sizes, tape
from tilewise.kernels.triton_impl.backend import TritonBackend
from tilewise.kernels.triton_impl.gradients import Backward
from tilewise.kernels.triton_impl.launch import Call
from tilewise.kernels.triton_impl.sizes import Sizes
from tilewise.kernels.triton_impl.statistics import MERGE_BLOCK, Forward
from tilewise.options import TileOptions

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="here the kernels are compiled: make test-gpu"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*"),  # NumPy speaks where a GPU is silent: log2(0)
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),  # the interpreter's own
    pytest.mark.usefixtures("nan_filled_empty", "quick"),
]
BACKEND, OPTIONS = TritonBackend(), TileOptions(backend="triton", precision="highest")
TYPES = {"float32": torch.float32, "float16": torch.float16}
SERVED = [name for name in CASES if name != "siglip_many"]
FLOOR = 5e-4  # float16 rounds an entry of G by up to 2**-11


@pytest.fixture
def quick(monkeypatch):
    make_quick(monkeypatch)
    monkeypatch.setattr(tape, "_tapes", {})  # sizes and products change from test to test, tapes would keep them


def check(pair, spec, *, hard=False):
    check_forward(BACKEND, pair, spec, OPTIONS, hard=hard)
    check_backward(BACKEND, pair, spec, OPTIONS, hard=hard, floor=FLOOR)


@pytest.mark.parametrize("dtype", TYPES.values(), ids=TYPES)
@pytest.mark.parametrize("name", SERVED)
def test_every_case(name, dtype):
    check(*make_case(name, dtype), hard=name in HARD)


# Several macro-tiles ---------------------------------------------------------------------------------------------


@pytest.fixture
def tiny_workspace(monkeypatch):
    """So little that a hundred rows need several macro-tiles in both axes."""
    monkeypatch.setattr(TileOptions, "workspace_bytes", 2**14)
    monkeypatch.setattr(gradients, "ONE_MACRO", 50)
    monkeypatch.setattr(Forward, "_macro", lambda self: (64, 64))  # left alone it takes 256 at the least


MACRO = {
    "clip": ("float32", "float16"),
    "clip_by_position": ("float32",),
    "cross_entropy_smoothed_and_capped": ("float32", "float16"),
    "nt_xent": ("float32", "float16"),
    "supcon": ("float32", "float16"),
    "ids_excluded_many": ("float32",),
    "siglip": ("float32",),
    "scores_1000": ("float16",),
    "rows_of_unlike_size": ("float32",),
    "tokens": ("float16",),
    "tokens_masked_and_twice": ("float32",),
}


@pytest.mark.usefixtures("tiny_workspace")
@pytest.mark.parametrize("name, dtype", [(name, dtype) for name, dtypes in MACRO.items() for dtype in dtypes])
def test_several_macro_tiles_in_both_axes(name, dtype):
    pair, spec = make_case(name, TYPES[dtype])
    rows, cols = macro_of(Backward, pair, spec)
    assert rows < pair.a.shape[0]
    assert cols < pair.b.shape[0]
    check(pair, spec, hard=name in HARD)


@pytest.mark.usefixtures("tiny_workspace")
@pytest.mark.parametrize("n, m", [(140, 40), (40, 140)])
@pytest.mark.parametrize("dtype", TYPES.values(), ids=TYPES)
def test_a_side_of_one_macro_tile_needs_no_accumulator(n, m, dtype):
    make = Maker(dtype)
    pair = Pair(a=make.features(n, 20), b=make.features(m, 20), scale=make.number(6.0), bias=make.vector(m))
    rows, cols = macro_of(Backward, pair, PairSpec(row_lse=True))
    assert (rows >= n) == (n < m)
    assert (cols >= m) == (m < n)
    check(pair, PairSpec(row_lse=True, col_lse=True))


def macro_of(kind, pair, spec, options=OPTIONS, sizes=sizes.INTERPRETED):
    """Rows and columns of a macro-tile, nothing allocated."""
    work = object.__new__(kind)
    n, m = pair.a.shape[0], pair.b.shape[0]
    work.__dict__ |= {"call": SimpleNamespace(options=options), "pair": pair, "spec": spec, "sizes": sizes}
    work.__dict__ |= {"n": n, "m": m, "d": pair.a.shape[1]}
    return work._macro()


SHAPES = [(300, 70_000), (70_000, 300), (16_384, 16_384), (16_384, 1_000_000), (1_000_000, 1_000_000), (5000, 5000)]


@pytest.mark.parametrize("mib", [1, 16, 256, 4096])
@pytest.mark.parametrize("n, m", SHAPES)
@pytest.mark.parametrize("d", [1, 512, 8192])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"])
def test_a_call_allocates_what_it_says(n, m, d, dtype, mib):
    """Forward: parts of at most half the workspace. Backward: G of at most three quarters, one tile at the least."""
    options = TileOptions(workspace_mib=mib)
    for spec in (
        PairSpec(row_lse=True, col_lse=True, positive="one"),
        PairSpec(row_lse=True, row_sum=True, positive="one"),
        PairSpec(row_lse=True, row_entropy=True, row_top=True, positive="one"),
        PairSpec(row_lse=True, positive="many", symmetric=True, itself=True),
    ):
        if spec.symmetric and n != m:
            continue
        pair = Pair(a=torch.empty(n, d, dtype=dtype, device="meta"), b=torch.empty(m, d, device="meta"), scale=None)
        for size in [row for pairs in sizes.TABLE.values() for row in pairs] + list(sizes.WIDE_TABLE[9, 2]):
            tile = max(size.rows, size.cols)
            rows, cols = macro_of(Forward, pair, spec, options, size)
            rows, cols = min(rows, n), min(cols, m)
            both, many = spec.col_lse or spec.symmetric, spec.positive == "many"
            parts = 4 * rows * -(-cols // size.cols) * (1 + many + spec.row_sum + spec.row_entropy + 2 * spec.row_top)
            parts += both * 4 * cols * -(-rows // size.rows) * (1 + many)
            least = 256 + tile
            assert parts <= 1.2 * options.workspace_bytes / 2 or max(rows, cols) <= least
            rows, cols = macro_of(Backward, pair, spec, options, size)
            rows, cols = min(rows, n), min(cols, m)
            assert rows * cols * dtype.itemsize <= options.workspace_bytes * 3 // 4 or max(rows, cols) <= tile
            if n > gradients.ONE_MACRO and not spec.symmetric and (m > gradients.ONE_MACRO or dtype == torch.float16):
                assert rows * d * 4 <= options.workspace_bytes // 4 or rows <= tile
            if spec.symmetric:
                assert rows == cols


# Switches that the cases do not reach ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", TYPES.values(), ids=TYPES)
@pytest.mark.parametrize("row_start, col_start", [(0, 0), (50, 20), (20, 60), (1000, 0)])
def test_one_bias_for_all_columns(dtype, row_start, col_start):
    """The sigmoid loss's own call: no keys, an expanded bias. Only the sum of the bias gradients means anything."""
    make = Maker(dtype)
    pair = Pair(
        a=make.features(70, 24),
        b=make.features(90, 24),
        scale=make.number(10.0),
        bias=make.number(-4.0).expand(90),
        row_start=row_start,
        col_start=col_start,
    )
    spec = PairSpec(softplus=True, positive="one")
    stats = check_forward(BACKEND, pair, spec, OPTIONS)
    grad = incoming_gradients(stats)
    got = BACKEND.backward(pair, stats, grad, all_needs(pair), spec, OPTIONS)
    wide = GradStats(row_softplus=grad.row_softplus.double())
    want = dense_grads(leaves_of(pair, torch.float64), spec, wide)
    dense = dense_grads(leaves_of(pair), spec, grad)
    size = want.bias.abs().sum()  # the sum may cancel
    assert (got.bias.sum() - want.bias.sum()).abs() <= 2e-6 * size
    for name in ("a", "b"):
        if dtype == torch.float32:
            assert_close(getattr(got, name), getattr(want, name), 1e-5, name)
        else:
            assert_no_worse(getattr(got, name), getattr(dense, name), getattr(want, name), name)
    terms = pair.a.double().norm() * want.a.norm() / 10.0
    assert (got.scale - want.scale).abs() <= (FLOOR if dtype == torch.float16 else 1e-5) * terms


@pytest.mark.parametrize("bias", ["each", "shared"])
def test_sigmoid_without_positives(bias):
    make = Maker(torch.float32)
    values = make.vector(70) if bias == "each" else make.number(-2.0).expand(70)
    pair = Pair(a=make.features(20, 16), b=make.features(70, 16), scale=make.number(5.0), bias=values)
    spec = PairSpec(softplus=True)
    if bias != "shared":
        check(pair, spec)
        return
    stats = check_forward(BACKEND, pair, spec, OPTIONS)
    grad = incoming_gradients(stats)
    got = BACKEND.backward(pair, stats, grad, all_needs(pair), spec, OPTIONS)
    want = dense_grads(leaves_of(pair), spec, grad)
    assert_close(got.bias.sum(), want.bias.sum(), 1e-5)


@pytest.mark.parametrize("d", [1, 3, 70, 129])
@pytest.mark.parametrize("dtype", TYPES.values(), ids=TYPES)
def test_widths(d, dtype):
    make = Maker(dtype)
    pair = Pair(a=make.features(75, d), b=make.features(67, d), scale=make.number(5.0), row_key=make.index(75))
    check(pair, PairSpec(row_lse=True, col_lse=True, positive="one"))


def test_every_score_switch_at_once():
    """Bias, softcap, exclusion, weighted sums, zeros of both sides, keys that point elsewhere."""
    make = Maker(torch.float32)
    n, m = 131, 70
    pair = Pair(
        a=make.features(n, 33),
        b=make.features(m, 33),
        scale=make.number(6.0),
        bias=make.vector(m),
        row_key=make.integers(3 * m, n) - m,
        row_zero=make.vector(n, 3.0),
        col_zero=make.vector(m, 3.0),
        col_start=5,
        row_start=9,
    )
    check(pair, PairSpec(row_lse=True, col_lse=True, positive="one", softcap=4.0, itself=True))
    # A weighted sum of excluded scores is -inf times something: nobody asks for both.
    keys = {"row_skip": make.integers(4, n), "col_skip": make.integers(4, m)}
    check(dataclasses.replace(pair, **keys), PairSpec(row_lse=True, col_lse=True, positive="one", softcap=4.0))
    weighted = dataclasses.replace(pair, col_weight=make.vector(m))
    check(weighted, PairSpec(row_lse=True, col_lse=True, row_sum=True, positive="one", softcap=4.0))


@pytest.mark.parametrize("name", ["cross_entropy", "siglip"])
def test_the_gradient_of_a_bias_at_a_scale_of_zero(name):
    pair, spec = make_case(name, torch.float32)
    pair = dataclasses.replace(pair, scale=torch.zeros(()), row_zero=None)
    stats = BACKEND.forward(pair, spec, OPTIONS)
    grad = incoming_gradients(stats)
    got = BACKEND.backward(pair, stats, grad, all_needs(pair), spec, OPTIONS)
    want = dense_grads(leaves_of(pair, torch.float64), spec, grad)
    assert_close(got.bias.sum(), want.bias.sum(), 1e-5, "sum")
    if name == "cross_entropy":
        assert_close(got.bias, want.bias, 1e-5, "bias")


@pytest.mark.parametrize("scale", [0.0, -7.0])
@pytest.mark.parametrize("dtype", TYPES.values(), ids=TYPES)
def test_a_scale_of_zero_or_below(scale, dtype):
    """G is multiplied by the scale and the scale's gradient divided by it: zero must survive."""
    pair, spec = make_case("clip", dtype)
    pair = dataclasses.replace(pair, scale=torch.tensor(scale), row_zero=None, col_zero=None)
    stats = check_forward(BACKEND, pair, spec, OPTIONS)
    grad = incoming_gradients(stats)
    got = BACKEND.backward(pair, stats, grad, all_needs(pair), spec, OPTIONS)
    wide = GradStats(**{name: None if value is None else value.double() for name, value in vars(grad).items()})
    want = dense_grads(leaves_of(pair, torch.float64), spec, wide)
    assert_close(got.scale, want.scale, 1e-5 if dtype == torch.float32 else 2e-3)
    for name in ("a", "b"):
        if scale == 0.0:
            assert getattr(got, name).float().abs().max() < 1e-20
        else:
            assert_close(getattr(got, name), getattr(want, name), 1e-5 if dtype == torch.float32 else 1e-3)


# Doubt, repair and span ------------------------------------------------------------------------------------------


def doubted(pair, spec) -> bool:
    work = Forward(Call.of(pair, spec, OPTIONS))
    work.run()
    return bool(work.doubt.item())


@pytest.mark.parametrize("dtype", TYPES.values(), ids=TYPES)
def test_only_hard_inputs_are_done_again(dtype):
    for name in ("clip", "nt_xent", "supcon", "cross_entropy"):
        assert not doubted(*make_case(name, dtype)), name
    for name in ("scores_1000", "rows_of_unlike_size", "a_row_that_meets_nobody"):
        assert doubted(*make_case(name, dtype)), name


@pytest.mark.parametrize("shift", [-3000.0, 3000.0])
@pytest.mark.parametrize("col_lse", [False, True])
def test_a_guess_that_knows_nothing_of_the_bias_is_repaired(shift, col_lse):
    """float16 guesses its shift from products alone; here the bias moves all scores far from them."""
    make = Maker(torch.float16)
    bias = make.vector(90) + shift
    pair = Pair(a=make.features(70, 16), b=make.features(90, 16), scale=make.number(5.0), bias=bias)
    pair = dataclasses.replace(pair, row_key=make.index(70), row_zero=torch.full((70,), shift))
    spec = PairSpec(row_lse=True, col_lse=col_lse, positive="one")
    assert doubted(pair, spec)
    stats = BACKEND.forward(pair, spec, OPTIONS)
    without = dataclasses.replace(pair, bias=bias - shift, row_zero=torch.zeros(70))
    assert not doubted(without, spec)
    want = BACKEND.forward(without, spec, OPTIONS)
    assert (stats.row_lse - want.row_lse).abs().max() < 1e-3
    if col_lse:
        assert (stats.col_lse - shift - want.col_lse).abs().max() < 1e-3


@pytest.mark.parametrize("keyed", [False, True])
def test_a_product_of_sigmoids_that_overflows_is_done_again(keyed, monkeypatch):
    """128 scores of zero in one tile: the product of their (1 + e) is 2**128."""
    monkeypatch.setattr(sizes, "INTERPRETED", Sizes(64, 128, 64, 1, 1, 1, 2))
    pair = Pair(a=torch.zeros(20, 8), b=torch.zeros(150, 8), scale=torch.tensor(3.0))
    pair = dataclasses.replace(pair, row_key=torch.arange(20) if keyed else None)
    spec = PairSpec(softplus=True, positive="one")
    work = Forward(Call.of(pair, spec, OPTIONS))
    assert_close(work.run().row_softplus, torch.full((20,), 150 * math.log(2)), 1e-6)
    assert work.doubt.item()


def spans(pair, spec):
    stats = BACKEND.forward(pair, spec, OPTIONS)
    work = Backward(Call.of(pair, spec, OPTIONS), stats, incoming_gradients(stats), all_needs(pair), pair.a.dtype)
    return None if work.span is None else work.span.item()


def test_the_span_of_log_sum_exps_decides_how_many_exponentials():
    assert spans(*make_case("clip", torch.float32)) < 60.0
    assert spans(*make_case("rows_of_unlike_size", torch.float32)) > 60.0
    assert spans(*make_case("nt_xent", torch.float32)) < 60.0
    assert spans(*make_case("cross_entropy", torch.float32)) is None


@pytest.mark.parametrize("dtype", TYPES.values(), ids=TYPES)
def test_both_ways_to_share_exponentials_agree(dtype, monkeypatch):
    """The wide branch on inputs for which the narrow one is meant."""
    pair, spec = make_case("ids_excluded", dtype)
    stats = BACKEND.forward(pair, spec, OPTIONS)
    grad = incoming_gradients(stats)
    narrow = BACKEND.backward(pair, stats, grad, all_needs(pair), spec, OPTIONS)
    monkeypatch.setattr(Backward, "_span", lambda self: torch.tensor([1e3]))
    wide = BACKEND.backward(pair, stats, grad, all_needs(pair), spec, OPTIONS)
    for name, value in grads_asked(narrow).items():
        assert_close(getattr(wide, name), value, 1e-5 if dtype == torch.float32 else 1e-3, name)


@pytest.mark.parametrize("name", ["clip", "siglip", "supcon", "cross_entropy"])
@pytest.mark.parametrize("dtype", TYPES.values(), ids=TYPES)
def test_nan_stays_where_it_belongs(name, dtype):
    """One row of NaN: its own statistics are NaN, those of other rows are not (unless they meet it as a column)."""
    pair, spec = make_case(name, dtype)
    a = pair.a.clone()
    a[5, 2] = torch.nan
    b = a if spec.symmetric else pair.b
    pair = dataclasses.replace(pair, a=a, b=b)
    stats = BACKEND.forward(pair, spec, OPTIONS)
    row = stats.row_softplus if spec.softplus else stats.row_lse
    assert row[5].isnan()
    others = torch.cat([row[:5], row[6:]])
    if spec.symmetric:
        assert others.isnan().all()
    else:
        assert not others.isnan().any()
    if stats.col_lse is not None:
        assert stats.col_lse.isnan().all()


# How, not what ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["clip_wide", "supcon_foreign_block", "cross_entropy_smoothed_and_capped"])
@pytest.mark.parametrize("size", [Sizes(32, 64, 16, 1, 1, 1, 3), Sizes(128, 64, 32, 1, 1, 3, 1)], ids=str)
def test_tile_sizes_do_not_matter(name, size, monkeypatch):
    pair, spec = make_case(name, torch.float32)
    monkeypatch.setattr(sizes, "INTERPRETED", size)
    check(pair, spec)


@pytest.mark.parametrize("name", ["clip", "supcon"])
def test_the_same_twice(name):
    pair, spec = make_case(name, torch.float16)

    def once():
        stats = BACKEND.forward(pair, spec, OPTIONS)
        grads = BACKEND.backward(pair, stats, incoming_gradients(stats), all_needs(pair), spec, OPTIONS)
        return [*stats_asked(stats).values(), *grads_asked(grads).values()]

    assert all(torch.equal(one, other) for one, other in zip(once(), once(), strict=True))


NEEDS = {
    "both": (Needs(a=True, b=True, scale=True, bias=True), 2),
    "b frozen": (Needs(a=True, b=False, scale=True), 1),
    "a frozen": (Needs(a=False, b=True, scale=True), 1),
    "features only": (Needs(a=True, b=True), 2),
    "scale only": (Needs(a=False, b=False, scale=True), 1),
    "bias only": (Needs(a=False, b=False, bias=True), 0),
}


@pytest.mark.parametrize("dtype", TYPES.values(), ids=TYPES)
@pytest.mark.parametrize("needs, products", NEEDS.values(), ids=NEEDS)
def test_a_frozen_side_costs_no_product(needs, products, dtype, monkeypatch):
    pair, spec = make_case("cross_entropy", dtype)
    stats = BACKEND.forward(pair, spec, OPTIONS)
    grad = incoming_gradients(stats)
    whole = BACKEND.backward(pair, stats, grad, all_needs(pair), spec, OPTIONS)
    seen, plain = [], gradients.product

    def counted(*args):
        seen.append(args[0].shape)
        plain(*args)

    monkeypatch.setattr(gradients, "product", counted)
    grads = BACKEND.backward(pair, stats, grad, needs, spec, OPTIONS)
    assert len(seen) == products
    assert grads_asked(grads).keys() == {name for name in ("a", "b", "scale", "bias") if getattr(needs, name)}
    for name, value in grads_asked(grads).items():
        assert_close(value, getattr(whole, name), 1e-5 if name != "scale" else 1e-3, name)


@pytest.mark.parametrize("needs", [Needs(a=True, b=False), Needs(a=False, b=False, scale=True)], ids=["z", "scale"])
def test_needs_of_symmetric_scores(needs):
    pair, spec = make_case("nt_xent", torch.float32)
    stats = BACKEND.forward(pair, spec, OPTIONS)
    grad = incoming_gradients(stats)
    whole = BACKEND.backward(pair, stats, grad, all_needs(pair), spec, OPTIONS)
    grads = grads_asked(BACKEND.backward(pair, stats, grad, needs, spec, OPTIONS))
    assert grads.keys() == {name for name in ("a", "scale") if getattr(needs, name)}
    assert all(torch.equal(value, getattr(whole, name)) for name, value in grads.items())


@pytest.mark.usefixtures("tiny_workspace")
@pytest.mark.parametrize("name", ["clip", "nt_xent"])
def test_a_ring_may_ask_for_wider_gradients(name):
    pair, spec = make_case(name, torch.float16)
    wide = check_backward(BACKEND, pair, spec, OPTIONS, grad_dtype=torch.float32, floor=FLOOR)
    narrow = check_backward(BACKEND, pair, spec, OPTIONS, floor=FLOOR)
    assert_close(narrow.a, wide.a, 4e-4)  # one rounding
    assert not torch.equal(narrow.a.float(), wide.a)


@pytest.mark.parametrize("incoming", [None, "row_lse", "row_pos", "col_lse"])
def test_statistics_that_nobody_asks_the_gradient_of(incoming):
    pair, spec = make_case("clip", torch.float32)
    stats = BACKEND.forward(pair, spec, OPTIONS)
    grad = incoming_gradients(stats)
    grad = GradStats(**({} if incoming is None else {incoming: getattr(grad, incoming)}))
    got = BACKEND.backward(pair, stats, grad, all_needs(pair), spec, OPTIONS)
    if incoming is None:
        assert all(not value.any() for value in grads_asked(got).values())
        return
    wide = GradStats(**{incoming: getattr(grad, incoming).double()})
    want = dense_grads(leaves_of(pair, torch.float64), spec, wide)
    assert_close(got.a, want.a, 1e-5)
    assert_close(got.b, want.b, 1e-5)


@pytest.mark.parametrize("asked", [("row_lse",), ("row_entropy",), ("row_entropy", "row_pos")], ids="+".join)
def test_gradients_of_entropies_alone_and_with_others(asked):
    pair, spec = make_case("tokens", torch.float32)
    stats = BACKEND.forward(pair, spec, OPTIONS)
    grad = incoming_gradients(stats)
    got = BACKEND.backward(
        pair, stats, GradStats(**{name: getattr(grad, name) for name in asked}), all_needs(pair), spec, OPTIONS
    )
    wide = GradStats(**{name: getattr(grad, name).double() for name in asked})
    want = dense_grads(leaves_of(pair, torch.float64), spec, wide)
    assert_close(got.a, want.a, 1e-5)
    assert_close(got.b, want.b, 1e-5)


@pytest.mark.parametrize("row_entropy, row_top", [(True, False), (False, True)])
def test_entropies_and_largest_scores_apart(row_entropy, row_top):
    pair, spec = make_case("tokens", torch.float32)
    check(pair, dataclasses.replace(spec, row_entropy=row_entropy, row_top=row_top))


@pytest.mark.usefixtures("tiny_workspace")
def test_of_equal_scores_in_different_tiles_the_first_is_the_largest():
    """All columns are the same; a zero that is subtracted must not make one larger than another."""
    pair = Pair(a=torch.randn(9, 16), b=torch.randn(1, 16).expand(300, -1), scale=torch.tensor(3.1))
    pair = dataclasses.replace(pair, row_zero=torch.randn(9), col_start=11)
    stats = BACKEND.forward(pair, PairSpec(row_lse=True, row_entropy=True, row_top=True), OPTIONS)
    assert stats.row_top_col.tolist() == [11] * 9
    assert_close(stats.row_entropy, torch.full((9,), math.log(300)), 1e-6)


LOSSES = ["clip", "siglip", "nt_xent", "supcon", "info_nce_ids_of_negatives", "cross_entropy_everything", "logsumexp"]


@pytest.mark.parametrize("name", LOSSES)
def test_losses_from_end_to_end(name):
    made = problem(name, torch.float32, n=70)
    loss, grads = solve(made.ours, made.leaves, options=OPTIONS)
    want, want_grads = solve(made.dense, converted(made.leaves, torch.float64))
    assert_close(loss, want, 2e-6)
    for leaf in want_grads:
        assert_close(grads[leaf], want_grads[leaf], 1e-5, leaf)
    other, _ = solve(made.ours, made.leaves, options=dataclasses.replace(OPTIONS, backend="torch"))
    assert relative_error(other, loss) < 2e-6


def test_statistics_of_tokens_from_end_to_end():
    check_tokens(Place("cpu", "triton"), torch.float32, n=70, d=24, seed=2)


def test_precision_reaches_the_kernels():
    pair, spec = make_case("one_pair", torch.float32)
    assert Call.of(pair, spec, TileOptions(precision="highest")).exact == "tf32x3"
    assert Call.of(pair, spec, TileOptions(precision="high")).exact == "tf32"
    want = "tf32x3" if torch.get_float32_matmul_precision() == "highest" else "tf32"
    assert Call.of(pair, spec, TileOptions()).exact == want
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"  # after this, asking as above is an error
    try:
        assert Call.of(pair, spec, TileOptions()).exact == "tf32"
        assert BACKEND.forward(pair, spec, TileOptions(backend="triton")).row_lse is not None
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


# Refusals --------------------------------------------------------------------------------------------------------


def a_pair(n=4, m=4, d=4, dtype=torch.float32):
    return Pair(a=torch.zeros(n, d, dtype=dtype), b=torch.zeros(m, d, dtype=dtype), scale=torch.tensor(1.0))


ROWS = PairSpec(row_lse=True)
REFUSED = {
    "bfloat16 here": (a_pair(dtype=torch.bfloat16), ROWS, "interpreter gets bfloat16 products wrong"),
    "float64": (a_pair(dtype=torch.float64), ROWS, "float16, bfloat16 and float32, not torch.float64"),
    "wide": (a_pair(d=8193), ROWS, "at most 8192 features, not 8193"),
    "no rows": (a_pair(n=0), ROWS, "empty side"),
    "no columns": (a_pair(m=0), ROWS, "empty side"),
    "no features": (a_pair(d=0), ROWS, "empty side"),
    "far away": (dataclasses.replace(a_pair(), row_start=2**31), ROWS, "32 bits"),
    "labels of tokens": (
        a_pair(),
        PairSpec(row_lse=True, row_entropy=True, positive="many"),
        "entropies and largest scores beside one positive",
    ),
    "many sigmoids": (a_pair(), PairSpec(softplus=True, positive="many"), "one positive in each row"),
}


@pytest.mark.parametrize("pair, spec, reason", REFUSED.values(), ids=REFUSED)
def test_a_refusal_has_a_reason(pair, spec, reason):
    with pytest.raises(BackendError, match=rf"backend 'triton' cannot serve .*{reason}.*backend=\"auto\""):
        select.choose_backend(pair, spec, OPTIONS)


def test_auto_takes_torch_and_says_why(caplog):
    with caplog.at_level(logging.DEBUG, logger="tilewise"):
        tw.nt_xent(torch.eye(4, dtype=torch.float64))
    assert "backend triton not chosen: it needs a CUDA device" in caplog.text
    assert "backend torch chosen" in caplog.text
    assert select.choose_backend(a_pair(), ROWS, OPTIONS).name == "triton"


# Sizes and launches ----------------------------------------------------------------------------------------------

SHARED_KIB = {8: 163, 9: 227, 10: 227}  # of one multiprocessor, for programs


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0), (13, 0)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("width", [64, 4096])
@pytest.mark.parametrize("columns", [False, True])
def test_sizes_suit_the_card(capability, dtype, width, columns, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    pair = sizes.sizes_for(torch.device("cuda"), dtype, width, columns=columns)
    small = capability in ((8, 6), (8, 9), (12, 0)) or capability[0] not in SHARED_KIB
    assert (pair == sizes.SAFE[dtype.itemsize]) == small
    limit = 99 if small else SHARED_KIB[capability[0]]
    for size in pair:
        assert {size.rows, size.cols, size.depth} <= {16, 32, 64, 128, 256}
        block = min(MERGE_BLOCK, size.rows, size.cols)
        assert size.rows % block == size.cols % block == 0
        held = size.programs * size.stages * (size.rows + size.cols) * size.depth * dtype.itemsize
        assert held <= limit * 1024
    if columns and not small:  # 128 x 256 tiles are slow where columns are summed
        assert pair[0].cols <= 128


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=["float16", "float32"])
def test_features_are_copied_only_where_a_descriptor_cannot_read_them(dtype):
    wide = torch.randn(9, 64).to(dtype)
    step = 16 // dtype.itemsize
    for readable in (wide, wide[::2], wide[:, : 2 * step], wide[:, step : step + 5], wide[3:]):
        assert launch.readable(readable) is readable
    for other in (wide.T, wide[:, 1:9], wide[:, ::2], wide[:1].expand(9, -1), torch.zeros(9, step + 1, dtype=dtype)):
        copy = launch.readable(other)
        assert torch.equal(copy, other)
        assert copy.stride(1) == 1
        assert copy.stride(0) * dtype.itemsize % 16 == 0
        assert copy.data_ptr() % 16 == 0


def test_vectors_lie_at_aligned_addresses():
    values = torch.arange(16.0)
    assert launch.vector(None) is None
    assert launch.vector(values) is values
    for view in (values[1:], values[::2], values[:1].expand(5)):
        copy = launch.vector(view)
        assert torch.equal(copy, view)
        assert copy.data_ptr() % 16 == 0
        assert copy.is_contiguous()


def test_pieces_cover_everything_once():
    assert launch.pieces(10, 4) == [slice(0, 4), slice(4, 8), slice(8, 10)]
    assert launch.pieces(4, 4) == [slice(0, 4)]
    assert launch.pieces(0, 4) == []
