"""TF32 in Triton's interpreter: what reaches a product is the nearest number of TF32.

The interpreter multiplies in float32. So a call in TF32 has the bits of the same call with features that were rounded
here, and other bits than a call in full float32.
"""

import dataclasses

import pytest
import torch
from tests.kernels import one_pass_pairs
from tests.kernels.interpreted import BACKEND, IN_THE_INTERPRETER, run_steps, take_tiny_workspace
from tests.kernels.pair_cases import CASES, HARD, make_case
from tests.kernels.pair_checks import (
    all_needs,
    check_backward,
    check_forward,
    grads_asked,
    incoming_gradients,
    stats_asked,
)
from tests.kernels.test_filtered_interpreter import make_pair

import tilewise as tw
from tilewise.kernels import filter_plan as plans
from tilewise.kernels.spec import Needs, PairSpec, RowWeights
from tilewise.kernels.triton_impl import tf32
from tilewise.kernels.triton_impl.filtered.strategy import TritonFilter
from tilewise.kernels.triton_impl.two_pass.row_product import row_product
from tilewise.options import TileOptions

pytestmark = IN_THE_INTERPRETER
HIGH, FULL = (TileOptions(backend="triton", precision=precision) for precision in ("high", "highest"))
FEATURES = "a", "b", "guide_a", "guide_b"
SERVED = [name for name in CASES if name != "siglip_many"]


def nearest(values):
    """The nearest number of TF32, which has 11 significant bits; of two the even one."""
    part, power = torch.frexp(values.double())
    return torch.ldexp(torch.round(part * 2**11) / 2**11, power).float()


def low_bits(values):
    return (values.contiguous().view(torch.int32) & 0x1FFF).abs().max().item()


def rounded(pair):
    """The pair with rounded features."""
    found = {name: nearest(getattr(pair, name)) for name in FEATURES if getattr(pair, name) is not None}
    if pair.b is pair.a:
        found["b"] = found["a"]
    return dataclasses.replace(pair, **found)


def results(pair, spec, options):
    stats = BACKEND.forward(pair, spec, options)
    grads = BACKEND.backward(pair, stats, incoming_gradients(stats), all_needs(pair), spec, options)
    return {**stats_asked(stats), **grads_asked(grads)}


def same(one, other):
    return all(torch.equal(one[name], other[name]) for name in one)


def check(ours, pair, *more):
    """``ours(pair, *more, options)`` rounds in TF32, and only in TF32."""
    high = ours(pair, *more, HIGH)
    assert same(high, ours(rounded(pair), *more, HIGH))
    assert not same(high, ours(pair, *more, FULL))


@pytest.mark.parametrize("name", SERVED)
def test_every_case_of_two_passes(name):
    pair, spec = make_case(name, torch.float32)
    check(results, pair, spec)
    if pair.row_norm is None:  # those of a case are of unrounded features
        check_forward(BACKEND, rounded(pair), spec, HIGH, hard=name in HARD)
        check_backward(BACKEND, rounded(pair), spec, HIGH, hard=name in HARD, floor=1e-5)


@pytest.mark.parametrize("name", ["clip", "nt_xent", "cross_entropy", "siglip"])
def test_several_macro_tiles(name, monkeypatch):
    take_tiny_workspace(monkeypatch)
    check(results, *make_case(name, torch.float32))


@pytest.mark.parametrize("softplus", [False, True])
def test_one_pass(softplus, monkeypatch):
    pair, spec = one_pass_pairs.softmax_pair(130, 70, 33, 5.0)
    if softplus:
        spec, pair = PairSpec(softplus=True, positive="one"), dataclasses.replace(pair, row_key=None)
    else:
        one_pass_pairs.take_several_blocks(monkeypatch)
    weights, needs = RowWeights(share=1 / 130), Needs(a=True, b=True, scale=True)

    def ours(pair, options):
        loss, saved = BACKEND.one_pass.forward(pair, weights, needs, spec, options, 130)
        return {"loss": loss} | {str(place): value for place, value in enumerate(saved) if value is not None}

    check(ours, pair)


@pytest.mark.usefixtures("never_dense")
def test_the_filter(monkeypatch):
    pair, grad = make_pair(torch.float32)
    order = plans.order_columns(pair)  # from unrounded features
    monkeypatch.setattr(plans, "order_columns", lambda pair: order)
    spec = PairSpec(row_lse=True, positive="one", drop_rows=True)

    def ours(pair, options):
        options = dataclasses.replace(options, filter_tolerance=1e-2)
        stats, plan = TritonFilter().forward(pair, spec, options)
        valid = pair.row_key >= 0
        assert 0.01 < (plan.mass[:, valid] < 0).float().mean() < 0.9
        grads = TritonFilter().backward(pair, stats, plan, grad, all_needs(pair), spec, options)
        return {"row_lse": stats.row_lse[valid], "row_pos": stats.row_pos[valid], **grads_asked(grads)}

    check(ours, pair)


def test_the_product_of_a_batch_invariant_gradient():
    """G is computed in a kernel and read by another one, so it is rounded as well."""
    pair, spec = make_case("cross_entropy", torch.float32)
    n, m = pair.a.shape[0], pair.b.shape[0]
    g = torch.randn(n, -(-m // 4) * 4, generator=torch.Generator().manual_seed(0))
    want = nearest(g[:, :m]).double() @ nearest(pair.b).double()

    def build(scores, more):
        out = scores.empty("out", n, scores.d)
        row_product(scores, out, more["g"][:, :m], scores.b, True)
        return [out]

    before = g.clone()
    (full,) = run_steps(build, pair, spec, FULL, g=g)
    assert torch.equal(g, before)
    (got,) = run_steps(build, pair, spec, HIGH, g=g)
    assert low_bits(g[:, :m]) == 0
    assert (got.double() - want).norm() <= 1e-6 * want.norm()
    assert (full.double() - want).norm() > 1e-5 * want.norm()


@pytest.mark.parametrize("d", [3, 70])
def test_ranks_and_nearest(d):
    generator = torch.Generator().manual_seed(d)
    queries, gallery = torch.randn(90, d, generator=generator), torch.randn(200, d, generator=generator)
    ids, gallery_ids = torch.randint(9, (90,), generator=generator), torch.randint(9, (200,), generator=generator)
    answers = torch.randint(200, (90,), generator=generator)

    def found(q, g, options):
        scores, items = tw.nearest(q, g, k=7, options=options)
        with_ids = tw.retrieval_ranks(q, g, query_ids=ids, gallery_ids=gallery_ids, options=options)
        return {
            "scores": scores,
            "items": items,
            "ids": with_ids,
            "r": tw.retrieval_ranks(q, g, answers, options=options),
        }

    high, full = found(queries, gallery, HIGH), found(queries, gallery, FULL)
    assert same(high, found(nearest(queries), nearest(gallery), FULL))
    assert not torch.equal(high["scores"], full["scores"])


def test_a_rounded_copy():
    values = torch.randn(70, 40, generator=torch.Generator().manual_seed(1)) * 10.0 ** torch.arange(-20, 20)
    values[0, :6] = torch.tensor([torch.inf, -torch.inf, 0.0, 1 + 2**-11, 1 + 3 * 2**-11, -(2 - 2**-20)])
    got = tf32.rounded(values, "tf32")
    assert torch.equal(got, nearest(values).nan_to_num(nan=0, posinf=torch.inf, neginf=-torch.inf))
    assert got[0, 3:6].tolist() == [1, 1 + 2**-9, -2]
    assert low_bits(got) == 0
    assert got is not values
    for features, exact in ((values, "tf32x3"), (values.half(), "tf32")):
        assert tf32.rounded(features, exact) is features


def test_explain_shows_the_copy():
    made = torch.randn(300, 40, requires_grad=True)
    steps = {
        options.precision: tw.explain(tw.nt_xent, made, options=dataclasses.replace(options, gradients="backward"))
        for options in (HIGH, FULL)
    }
    assert "in TF32" in str(steps["high"])
    assert "in TF32" not in str(steps["highest"])


@pytest.mark.skipif(tf32.VERSION < (3, 7), reason="loads cannot round")
def test_loads_round_where_they_can():
    values = torch.zeros(32, 32)
    assert tf32.tensor_descriptor(values, (16, 16), "tf32", loads_round=True).round_f32_to_tf32
    for tensor, exact in ((values, "tf32x3"), (values, None), (values.half(), "tf32")):
        assert not tf32.tensor_descriptor(tensor, (16, 16), exact, loads_round=True).round_f32_to_tf32
