"""The Triton kernels in Triton's interpreter: macro-tiles within the workspace, refusals, sizes and launches."""

import dataclasses
import doctest
import logging
from types import SimpleNamespace

import pytest
import torch
from tests.kernels.interpreted import IN_THE_INTERPRETER, OPTIONS, TYPES, check
from tests.kernels.pair_cases import HARD, make_case
from tests.kernels.pair_maker import Maker

import tilewise as tw
from tilewise.errors import BackendError
from tilewise.kernels import registry as select
from tilewise.kernels.spec import Pair, PairSpec
from tilewise.kernels.triton_impl import scores, sizes, tune
from tilewise.kernels.triton_impl.sizes import Sizes
from tilewise.kernels.triton_impl.two_pass.backward import Backward
from tilewise.kernels.triton_impl.two_pass.forward import MERGE_BLOCK, Forward
from tilewise.kernels.triton_impl.two_pass.macro_tile import ONE_MACRO
from tilewise.options import TileOptions

pytestmark = IN_THE_INTERPRETER


# Several macro-tiles ---------------------------------------------------------------------------------------------


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
    "tokens_of_many_temperatures": ("float32", "float16"),
    "picked_of_a_slice": ("float32",),
    "picks_left_out": ("float32", "float16"),
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
    work.__dict__ |= {"scores": SimpleNamespace(options=options, shape=pair.shape), "spec": spec, "sizes": sizes}
    work.__dict__ |= {"n": n, "m": m, "d": pair.a.shape[1], "saved": None}
    return work._macro()


TILE_SIZES = {
    size
    for row in sizes.TABLE.values()
    for size in (row.forward, row.gradient, row.forward_wide, row.gradient_wide)
    if size is not None
}
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
        PairSpec(row_lse=True, positive="many", symmetric=True, mask_self=True),
    ):
        if spec.symmetric and n != m:
            continue
        pair = Pair(a=torch.empty(n, d, dtype=dtype, device="meta"), b=torch.empty(m, d, device="meta"), scale=None)
        for size in TILE_SIZES:
            tile = max(size.rows, size.cols)
            rows, cols = macro_of(Forward, pair, spec, options, size)
            rows, cols = min(rows, n), min(cols, m)
            both, many = spec.col_lse or spec.symmetric, spec.positive == "many"
            parts = (
                4
                * rows
                * -(-cols // size.cols)
                * (1 + many + spec.row_sum + spec.row_entropy + spec.row_sum_sq + 2 * spec.row_top)
            )
            parts += both * 4 * cols * -(-rows // size.rows) * (1 + many)
            least = 256 + tile
            assert parts <= 1.2 * options.workspace_bytes / 2 or max(rows, cols) <= least
            rows, cols = macro_of(Backward, pair, spec, options, size)
            rows, cols = min(rows, n), min(cols, m)
            assert rows * cols * dtype.itemsize <= options.workspace_bytes * 3 // 4 or max(rows, cols) <= tile
            if n > ONE_MACRO and not spec.symmetric and (m > ONE_MACRO or dtype == torch.float16):
                assert rows * d * 4 <= options.workspace_bytes // 4 or rows <= tile
            if spec.symmetric:
                assert rows == cols


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
    "many sigmoids": (a_pair(), PairSpec(softplus=True, positive="many"), "one positive in each row"),
    "picks with a guide": (a_pair(), PairSpec(row_lse=True, row_picked=True, guide="kl"), "neither picked columns"),
    "picks among many": (a_pair(), PairSpec(row_picked=True, positive="many"), "at most one positive"),
}


@pytest.mark.parametrize("pair, spec, reason", REFUSED.values(), ids=REFUSED)
def test_a_refusal_has_a_reason(pair, spec, reason):
    with pytest.raises(BackendError, match=rf"backend 'triton' cannot serve .*{reason}.*backend=\"auto\""):
        select.choose_backend(pair.shape, spec, OPTIONS)


def test_auto_takes_torch_and_says_why(caplog):
    with caplog.at_level(logging.DEBUG, logger="tilewise"):
        tw.nt_xent(torch.eye(4, dtype=torch.float64))
    assert "backend triton not chosen: it needs a CUDA device" in caplog.text
    assert "backend torch chosen" in caplog.text
    assert select.choose_backend(a_pair().shape, ROWS, OPTIONS).name == "triton"


# Sizes and launches ----------------------------------------------------------------------------------------------

SHARED_KIB = {"sm_80": 163, "sm_90": 227, "sm_100": 227, "other": 99}  # of one multiprocessor, for programs
CARDS = {(8, 0): "sm_80", (8, 7): "sm_80", (8, 6): "other", (8, 9): "other", (9, 0): "sm_90", (10, 0): "sm_100"}
CARDS |= {(10, 3): "sm_100", (12, 0): "other", (13, 0): "other"}


@pytest.fixture(params=CARDS, ids=str)
def card(request, monkeypatch):
    """A card of this compute capability, and its architecture in the table."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: request.param)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A card that nobody has tuned")
    sizes.forget_tuned()
    yield CARDS[request.param]
    sizes.forget_tuned()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("width", [64, 4096])
@pytest.mark.parametrize("columns", [False, True])
def test_sizes_suit_the_card(card, dtype, width, columns):
    device, row = torch.device("cuda"), sizes.TABLE[card, dtype.itemsize]
    forward = sizes.forward_sizes(device, dtype, width, columns=columns)
    gradient = sizes.gradient_sizes(device, dtype, width)
    wide = row.forward_wide is not None and width == 4096
    assert forward == (row.forward_wide if wide and not columns else row.forward)
    assert gradient == (row.gradient_wide if wide else row.gradient)
    for size in (forward, gradient, *(sizes.mass_sizes(device, dtype, cols) for cols in (16, 128, 256))):
        assert {size.rows, size.cols, size.depth} <= {16, 32, 64, 128, 256}
        block = min(MERGE_BLOCK, size.rows, size.cols)
        assert size.rows % block == size.cols % block == 0
        held = size.programs * size.stages * (size.rows + size.cols) * size.depth * dtype.itemsize
        assert held <= SHARED_KIB[card] * 1024
    if columns:  # 128 x 256 tiles are slow where columns are summed
        assert forward.cols <= 128


@pytest.mark.parametrize("item", [2, 4])
def test_the_masses_fit_100_kib_with_one_stage_more(item):
    """Triton 3.9 takes one stage more than 3.6. The compile tests check all kernels, with the installed version."""
    masses = sizes.TABLE["other", item].filter_masses
    assert (masses.stages + 1) * (masses.rows + masses.cols) * masses.depth * item <= 99 * 1024


@pytest.mark.parametrize("module", [sizes, tune], ids=lambda module: module.__name__)
def test_the_examples_of_the_size_table(module):
    assert doctest.testmod(module).failed == 0


def test_narrow_tiles_of_the_filter_have_their_own_columns():
    cpu = torch.device("cpu")
    assert sizes.mass_sizes(cpu, torch.float32, 16) == Sizes(64, 16, 64, 1, 1, 1, 2)
    assert sizes.row_of(cpu, 4).filter_pairs == sizes.INTERPRETED_PAIRS


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=["float16", "float32"])
def test_features_are_copied_only_where_a_descriptor_cannot_read_them(dtype):
    wide = torch.randn(9, 64).to(dtype)
    step = 16 // dtype.itemsize
    for readable in (wide, wide[::2], wide[:, : 2 * step], wide[:, step : step + 5], wide[3:]):
        assert scores.readable(readable) is readable
    for other in (wide.T, wide[:, 1:9], wide[:, ::2], wide[:1].expand(9, -1), torch.zeros(9, step + 1, dtype=dtype)):
        copy = scores.readable(other)
        assert torch.equal(copy, other)
        assert copy.stride(1) == 1
        assert copy.stride(0) * dtype.itemsize % 16 == 0
        assert copy.data_ptr() % 16 == 0


def test_vectors_lie_at_aligned_addresses():
    values = torch.arange(16.0)
    assert scores.vector(values) is values
    for view in (values[1:], values[::2], values[:1].expand(5)):
        copy = scores.vector(view)
        assert torch.equal(copy, view)
        assert copy.data_ptr() % 16 == 0
        assert copy.is_contiguous()


def test_pieces_cover_everything_once():
    assert scores.pieces(10, 4) == [slice(0, 4), slice(4, 8), slice(8, 10)]
    assert scores.pieces(4, 4) == [slice(0, 4)]
    assert scores.pieces(0, 4) == []
