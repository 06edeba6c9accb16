"""The torch backend against the dense oracle: every case, every type."""

import math

import pytest
import torch
from tests.compare import assert_close
from tests.kernels.dense import dense_stats
from tests.kernels.pair_cases import CASES, HARD, make_case
from tests.kernels.pair_checks import (
    all_needs,
    check_backward,
    check_forward,
    finite,
    grads_asked,
    incoming_gradients,
    stats_asked,
)
from torch.utils._python_dispatch import TorchDispatchMode

from tilewise.kernels.precision import float32_precision, matmul_precision
from tilewise.kernels.spec import GradStats, Needs, Pair, PairSpec
from tilewise.kernels.torch_impl import tile_softmax, tiles
from tilewise.kernels.torch_impl import two_pass as tiled
from tilewise.kernels.torch_impl.backend import TorchBackend
from tilewise.options import TileOptions

BACKEND, OPTIONS = TorchBackend(), TileOptions()
pytestmark = pytest.mark.usefixtures("nan_filled_empty", "small_tiles")
TYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@pytest.mark.parametrize("dtype", TYPES.values(), ids=TYPES)
@pytest.mark.parametrize("name", CASES)
def test_statistics(name, dtype):
    pair, spec = make_case(name, dtype)
    check_forward(BACKEND, pair, spec, hard=name in HARD)


@pytest.mark.parametrize("dtype", TYPES.values(), ids=TYPES)
@pytest.mark.parametrize("name", CASES)
def test_gradients(name, dtype):
    pair, spec = make_case(name, dtype)
    check_backward(BACKEND, pair, spec, hard=name in HARD)


@pytest.mark.parametrize("name", ["clip", "nt_xent", "siglip", "supcon_foreign_block"])
def test_a_ring_may_ask_for_wider_gradients(name):
    pair, spec = make_case(name, torch.bfloat16)
    wide = check_backward(BACKEND, pair, spec, grad_dtype=torch.float32)
    narrow = check_backward(BACKEND, pair, spec)
    assert torch.equal(wide.a.bfloat16(), narrow.a)
    assert wide.b is None or torch.equal(wide.b.bfloat16(), narrow.b)


class Products(TorchDispatchMode):
    """Counts the multiply-adds of all matrix products that run inside."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        tensors = [x for x in args if isinstance(x, torch.Tensor)]
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_, torch.ops.aten.bmm):
            left, right = tensors[-2:]
            self.count += left.shape[-2] * left.shape[-1] * right.shape[-1]
        return func(*args, **(kwargs or {}))


NEEDS = {
    "both": (Needs(a=True, b=True, scale=True), 3),
    "b frozen": (Needs(a=True, b=False, scale=True), 2),
    "a frozen": (Needs(a=False, b=True, scale=True), 2),
    "scale only": (Needs(a=False, b=False, scale=True), 2),
    "bias only": (Needs(a=False, b=False, bias=True), 1),
}


@pytest.mark.parametrize("needs, units", NEEDS.values(), ids=NEEDS)
def test_a_frozen_side_costs_no_product(needs, units):
    pair, spec = make_case("siglip", torch.float32)
    with Products() as forward:
        stats = BACKEND.forward(pair, spec, OPTIONS)
    with Products() as backward:
        grads = BACKEND.backward(pair, stats, incoming_gradients(stats), needs, spec, OPTIONS)
    unit = pair.a.shape[0] * pair.b.shape[0] * pair.a.shape[1]
    assert forward.count == unit
    assert backward.count == units * unit
    whole = BACKEND.backward(pair, stats, incoming_gradients(stats), all_needs(pair), spec, OPTIONS)
    for name, value in grads_asked(grads).items():
        assert getattr(needs, name)
        assert_close(value, getattr(whole, name), 1e-6)
    assert grads_asked(grads).keys() == {name for name in ("a", "b", "scale", "bias") if getattr(needs, name)}


def test_symmetric_scores_cost_half(monkeypatch):
    monkeypatch.setattr(tiles, "SYMMETRIC_TILE", 16)
    pair, spec = make_case("nt_xent", torch.float32)
    with Products() as forward:
        stats = BACKEND.forward(pair, spec, OPTIONS)
    with Products() as backward:
        BACKEND.backward(pair, stats, incoming_gradients(stats), Needs(a=True, b=False), spec, OPTIONS)
    n, d = pair.a.shape
    assert forward.count < 0.6 * n * n * d
    assert backward.count < 1.65 * n * n * d


@pytest.mark.parametrize("name", CASES)
def test_unscaled_tiles_are_used_only_where_no_score_is_large(name, monkeypatch):
    """The path without a shift, the path with one for the tile, and the path with one for each row agree."""
    pair, spec = make_case(name, torch.float64)
    stats = BACKEND.forward(pair, spec, OPTIONS)
    grads = BACKEND.backward(pair, stats, incoming_gradients(stats), all_needs(pair), spec, OPTIONS)
    for safe_score, smallest_sum, largest_exponent in ((-1.0, 2.0**-80, 60.0), (-1.0, torch.inf, -torch.inf)):
        monkeypatch.setattr(tiled, "SAFE_SCORE", safe_score)
        monkeypatch.setattr(tile_softmax, "SMALLEST_SUM", smallest_sum)
        monkeypatch.setattr(tile_softmax, "LARGEST_EXPONENT", largest_exponent)
        other = BACKEND.forward(pair, spec, OPTIONS)
        for key, value in stats_asked(stats).items():
            assert_close(finite(getattr(other, key), value), finite(value, value), 1e-12, key)
        other_grads = BACKEND.backward(pair, stats, incoming_gradients(stats), all_needs(pair), spec, OPTIONS)
        for key, value in grads_asked(grads).items():
            assert_close(getattr(other_grads, key), value, 1e-11, key)


def test_a_row_far_below_its_tile_is_done_again():
    """One row's scores are 300 below the rest: with the tile's shift all of its exponentials would be zero."""
    a = torch.ones(4, 2)
    a[1] = -150.0
    pair = Pair(a=a, b=torch.ones(6, 2), scale=torch.tensor(1.0))
    spec = PairSpec(row_lse=True, col_lse=True)
    stats = check_forward(BACKEND, pair, spec)
    assert stats.row_lse[1] == pytest.approx(-300 + math.log(6), abs=1e-4)
    check_backward(BACKEND, pair, spec, hard=True)


@pytest.mark.parametrize("n, m, d", [(0, 5, 3), (4, 0, 3), (0, 0, 3), (4, 5, 0), (0, 0, 0)])
@pytest.mark.parametrize("symmetric", [False, True])
def test_empty_sides(n, m, d, symmetric):
    a = torch.randn(n, d)
    b = a if symmetric else torch.randn(m, d)
    pair = Pair(a=a, b=b, scale=torch.tensor(2.0), row_key=torch.arange(n).flip(0))
    spec = PairSpec(row_lse=True, col_lse=not symmetric, positive="one", symmetric=symmetric, mask_self=symmetric)
    stats = BACKEND.forward(pair, spec, OPTIONS)
    want = dense_stats(pair, spec)
    for name, value in stats_asked(want).items():
        assert torch.allclose(getattr(stats, name).to(value.dtype), value), name
    grads = BACKEND.backward(pair, stats, incoming_gradients(stats), all_needs(pair), spec, OPTIONS)
    assert grads.a.shape == a.shape
    assert grads.a.isfinite().all()
    assert symmetric or (grads.b.shape == b.shape and grads.b.isfinite().all())


@pytest.mark.parametrize("spec", [PairSpec(row_lse=True), PairSpec(row_lse=True, positive="many", symmetric=True)])
@pytest.mark.parametrize("mib", [1, 2, 16, 256])
@pytest.mark.parametrize("d", [1, 512, 8192])
def test_tiles_fit_the_workspace(mib, d, spec):
    a = torch.zeros(5000, d)
    pair = Pair(a=a, b=a, scale=torch.tensor(1.0))
    options = TileOptions(workspace_mib=mib)
    rows, cols = tiles.tile_sizes(pair.shape, spec, options)
    assert rows >= 1
    assert cols >= 1
    if max(rows, cols) > tiles.SMALLEST_TILE:
        assert tiles.scratch_bytes(rows, cols, pair.shape, spec) <= options.workspace_bytes
    if spec.symmetric:
        assert rows == cols


def test_precision_is_set_for_the_call_and_put_back(monkeypatch):
    seen = []
    plain = tiles.Tiles.scores

    def spy(self, i, j):
        seen.append(torch.get_float32_matmul_precision())
        return plain(self, i, j)

    monkeypatch.setattr(tiles.Tiles, "scores", spy)
    pair, spec = make_case("one_pair", torch.float32)
    before = torch.get_float32_matmul_precision()
    for precision, want in (("torch", before), ("high", "high"), ("highest", "highest")):
        BACKEND.forward(pair, spec, TileOptions(precision=precision))
        assert seen.pop() == want
        assert torch.get_float32_matmul_precision() == before

    def broken(self, i, j):
        raise RuntimeError("no memory")

    monkeypatch.setattr(tiles.Tiles, "scores", broken)
    with pytest.raises(RuntimeError, match="no memory"):
        BACKEND.forward(pair, spec, TileOptions(precision="high"))
    assert torch.get_float32_matmul_precision() == before


@pytest.fixture
def told():
    """What `torch.backends` holds of float32 products: nothing at first, and put back afterwards."""
    places = torch.backends, torch.backends.cuda.matmul, torch.backends.mkldnn.matmul
    before = [place.fp32_precision for place in places]
    for place in places:
        place.fp32_precision = "none"
    yield places
    for place, value in zip(places, before, strict=True):
        place.fp32_precision = value


@pytest.mark.parametrize("place", [0, 1, 2], ids=["everywhere", "on a GPU", "on a CPU"])
@pytest.mark.parametrize("precision", ["torch", "high", "highest"])
def test_precision_may_be_told_by_torch_backends(place, precision, told):
    """After which `torch.get_float32_matmul_precision` is an error."""
    told[place].fp32_precision = "tf32"
    before = [each.fp32_precision for each in told]
    pair, spec = make_case("one_pair", torch.float32)
    want = "high" if precision == "torch" and place < 2 else precision.replace("torch", "highest")
    with matmul_precision(precision):
        assert float32_precision() == want
    stats = BACKEND.forward(pair, spec, TileOptions(precision=precision))
    assert stats.row_lse is not None
    assert [each.fp32_precision for each in told] == before


def test_precision_leaves_what_was_not_told_untold(told):
    """Else what is told to all of `torch.backends` later would not reach products."""
    with matmul_precision("high"):
        assert float32_precision() == "high"
    assert [each.fp32_precision for each in told] == ["none", "none", "none"]


def test_a_log_sum_exp_of_1000_is_not_rounded_to_float32():
    """Scores are +-1000 exactly, so a row's probabilities are 1/6; a float32 log-sum-exp would be 3e-5 off."""
    signs = torch.tensor([[1.0, 1.0], [-1.0, -1.0]])
    pair = Pair(a=500.0 * signs, b=torch.ones(6, 2), scale=torch.tensor(1.0), row_shift=torch.tensor([1000.0, -1000.0]))
    spec = PairSpec(row_lse=True, col_lse=True)
    stats = BACKEND.forward(pair, spec, OPTIONS)
    assert_close(stats.row_lse, torch.full((2,), math.log(6)), 1e-6)
    grad = GradStats(row_lse=torch.tensor([1.0, 2.0]), col_lse=torch.zeros(6))
    grads = BACKEND.backward(pair, stats, grad, Needs(), spec, OPTIONS)
    assert_close(grads.a, torch.tensor([[1.0, 1.0], [2.0, 2.0]]), 1e-6)


def test_incoming_gradients_near_the_smallest_float_keep_their_digits():
    """G is computed for gradients of size 1 and multiplied afterwards: 2**-126 times a probability is denormal."""
    make = torch.Generator().manual_seed(0)
    a, b = 1e-3 * torch.randn(60, 8, generator=make), 1e3 * torch.randn(90, 8, generator=make)
    pair = Pair(a=a, b=b, scale=torch.tensor(0.4))
    spec = PairSpec(row_lse=True)
    stats = BACKEND.forward(pair, spec, OPTIONS)
    whole, tiny = (
        BACKEND.backward(pair, stats, GradStats(row_lse=torch.full((60,), k)), Needs(), spec, OPTIONS).a
        for k in (1.0, 2.0**-126)
    )
    assert_close(tiny.double() * 2.0**126, whole, 1e-6)
