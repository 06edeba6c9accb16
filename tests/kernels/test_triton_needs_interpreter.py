"""The Triton kernels in Triton's interpreter: tile sizes, gradients that are needed or not, whole losses."""

import dataclasses
import math

import pytest
import torch
from tests.compare import assert_close, relative_error
from tests.gpu.checks import Place, check_tokens
from tests.kernels.interpreted import BACKEND, FLOOR, IN_THE_INTERPRETER, OPTIONS, TYPES, check, scores_of
from tests.kernels.pair_cases import make_case
from tests.kernels.pair_checks import (
    all_needs,
    check_backward,
    dense_grads,
    grads_asked,
    incoming_gradients,
    leaves_of,
    stats_asked,
)
from tests.losses.loss_cases import converted, problem, solve

from tilewise.kernels.spec import GradStats, Needs, Pair, PairSpec
from tilewise.kernels.triton_impl import sizes
from tilewise.kernels.triton_impl.program import Product
from tilewise.kernels.triton_impl.sizes import Sizes
from tilewise.options import TileOptions

pytestmark = IN_THE_INTERPRETER


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
    seen, plain = [], Product.run

    def counted(self, values):
        seen.append(self)
        plain(self, values)

    monkeypatch.setattr(Product, "run", counted)
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


ASKED = [("row_lse",), ("row_entropy",), ("row_entropy", "row_pos"), ("row_picked",), ("row_lse", "row_picked")]


@pytest.mark.parametrize("asked", ASKED, ids="+".join)
def test_gradients_of_entropies_and_picks_alone_and_with_others(asked):
    pair, spec = make_case("tokens_picked", torch.float32)
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
    pair = dataclasses.replace(pair, row_shift=torch.randn(9), col_start=11)
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
    assert scores_of(pair, spec, TileOptions(precision="highest")).exact == "tf32x3"
    assert scores_of(pair, spec, TileOptions(precision="high")).exact == "tf32"
    want = "tf32x3" if torch.get_float32_matmul_precision() == "highest" else "tf32"
    assert scores_of(pair, spec, TileOptions()).exact == want
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"  # after this, asking as above is an error
    try:
        assert scores_of(pair, spec, TileOptions()).exact == "tf32"
        assert BACKEND.forward(pair, spec, TileOptions(backend="triton")).row_lse is not None
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
