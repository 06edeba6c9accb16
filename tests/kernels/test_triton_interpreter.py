"""The Triton kernels in Triton's interpreter, on the CPU: every case, every switch, scores that need repair."""

import dataclasses
import math

import pytest
import torch
from tests.compare import assert_close, assert_no_worse
from tests.kernels.interpreted import BACKEND, FLOOR, IN_THE_INTERPRETER, OPTIONS, TYPES, check, run_steps
from tests.kernels.pair_cases import CASES, HARD, make_case
from tests.kernels.pair_checks import all_needs, check_forward, dense_grads, grads_asked, incoming_gradients, leaves_of
from tests.kernels.pair_maker import Maker

from tilewise.kernels.spec import GradStats, Pair, PairSpec
from tilewise.kernels.triton_impl import sizes
from tilewise.kernels.triton_impl.scores import forget_programs
from tilewise.kernels.triton_impl.sizes import Sizes
from tilewise.kernels.triton_impl.two_pass.backward import Backward, backward_tensors
from tilewise.kernels.triton_impl.two_pass.forward import Forward

pytestmark = IN_THE_INTERPRETER
SERVED = [name for name in CASES if name != "siglip_many"]


@pytest.mark.parametrize("dtype", TYPES.values(), ids=TYPES)
@pytest.mark.parametrize("name", SERVED)
def test_every_case(name, dtype):
    check(*make_case(name, dtype), hard=name in HARD)


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
        row_shift=make.vector(n, 3.0),
        col_shift=make.vector(m, 3.0),
        col_start=5,
        row_start=9,
    )
    check(pair, PairSpec(row_lse=True, col_lse=True, positive="one", softcap=4.0, mask_self=True))
    # A weighted sum of excluded scores is infinite: no loss needs both.
    keys = {"row_skip": make.integers(4, n), "col_skip": make.integers(4, m)}
    check(dataclasses.replace(pair, **keys), PairSpec(row_lse=True, col_lse=True, positive="one", softcap=4.0))
    weighted = dataclasses.replace(pair, col_weight=make.vector(m))
    check(weighted, PairSpec(row_lse=True, col_lse=True, row_sum=True, positive="one", softcap=4.0))


@pytest.mark.parametrize("name", ["cross_entropy", "siglip"])
def test_the_gradient_of_a_bias_at_a_scale_of_zero(name):
    pair, spec = make_case(name, torch.float32)
    pair = dataclasses.replace(pair, scale=torch.zeros(()), row_shift=None)
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
    pair = dataclasses.replace(pair, scale=torch.tensor(scale), row_shift=None, col_shift=None)
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


def needs_repair(pair, spec) -> bool:
    return bool(run_steps(lambda scores, _: flag_after(Forward(scores)), pair, spec)[0])


def flag_after(work):
    """Whether something was computed again, and the statistics."""
    stats = work.run()
    return [work.needs_repair, *stats.values()]


@pytest.mark.parametrize("dtype", TYPES.values(), ids=TYPES)
def test_only_hard_inputs_are_done_again(dtype):
    for name in ("clip", "nt_xent", "supcon", "cross_entropy"):
        assert not needs_repair(*make_case(name, dtype)), name
    for name in ("scores_1000", "rows_of_unlike_size", "a_row_that_meets_nobody"):
        assert needs_repair(*make_case(name, dtype)), name


@pytest.mark.parametrize("shift", [-3000.0, 3000.0])
@pytest.mark.parametrize("col_lse", [False, True])
def test_a_guess_that_knows_nothing_of_the_bias_is_repaired(shift, col_lse):
    """float16 guesses its shift from products alone; here the bias moves all scores far from them."""
    make = Maker(torch.float16)
    bias = make.vector(90) + shift
    pair = Pair(a=make.features(70, 16), b=make.features(90, 16), scale=make.number(5.0), bias=bias)
    pair = dataclasses.replace(pair, row_key=make.index(70), row_shift=torch.full((70,), shift))
    spec = PairSpec(row_lse=True, col_lse=col_lse, positive="one")
    assert needs_repair(pair, spec)
    stats = BACKEND.forward(pair, spec, OPTIONS)
    without = dataclasses.replace(pair, bias=bias - shift, row_shift=torch.zeros(70))
    assert not needs_repair(without, spec)
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
    repaired, softplus = run_steps(lambda scores, _: flag_after(Forward(scores)), pair, spec)
    assert_close(softplus, torch.full((20,), 150 * math.log(2)), 1e-6)
    assert repaired.item()


def spans(pair, spec):
    stats = BACKEND.forward(pair, spec, OPTIONS)
    needs, more = all_needs(pair), backward_tensors(stats, incoming_gradients(stats), spec)
    (span,) = run_steps(
        lambda scores, more: [Backward(scores, more, needs, scores.dtype).span], pair, spec, OPTIONS, **more
    )
    return None if span is None else span[0].item()


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

    def far(self):
        span = self.scores.empty("span", 2)
        self.scores.program.call(lambda out: out.fill_(1e3), span)
        return span

    monkeypatch.setattr(Backward, "_span", far)
    forget_programs()
    wide = BACKEND.backward(pair, stats, grad, all_needs(pair), spec, OPTIONS)
    for name, value in grads_asked(narrow).items():
        assert_close(getattr(wide, name), value, 1e-5 if dtype == torch.float32 else 1e-3, name)


@pytest.mark.parametrize("columns", [(3,), (40, 7), (90, 60, 20)], ids=str)
def test_the_largest_score_is_the_first_nan_as_in_torch(columns):
    """In one tile, in several tiles, and where larger numbers come before and after."""
    g = torch.Generator().manual_seed(0)
    a, b = torch.randn(9, 16, generator=g), torch.randn(100, 16, generator=g)
    b[list(columns), 2] = torch.nan
    pair = Pair(a=a, b=b, scale=torch.tensor(1.0))
    stats = BACKEND.forward(pair, PairSpec(row_lse=True, row_top=True), OPTIONS)
    assert torch.equal(stats.row_top_col, (a @ b.T).argmax(1))
    assert (stats.row_top_col == min(columns)).all()
    assert stats.row_top.isnan().all()


@pytest.mark.parametrize("infinite, nan", [((30,), ()), ((30,), (60,)), ((60,), (30,)), ((30, 31), (32,))])
def test_nan_is_larger_than_infinity_as_in_torch(infinite, nan):
    g = torch.Generator().manual_seed(0)
    a, b = torch.rand(9, 16, generator=g) + 0.1, torch.randn(100, 16, generator=g)
    b[list(infinite), 2], b[list(nan), 2] = torch.inf, torch.nan
    stats = BACKEND.forward(
        Pair(a=a, b=b, scale=torch.tensor(1.0)), PairSpec(row_lse=True, row_top=True, row_entropy=True), OPTIONS
    )
    scores = a @ b.T
    assert torch.equal(stats.row_top_col, scores.argmax(1))
    assert torch.equal(stats.row_top, scores.amax(1)) if not nan else stats.row_top.isnan().all()


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
