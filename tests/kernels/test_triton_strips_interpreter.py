"""Strips of tiles whose columns are added up first, and tiles that are written in pieces, in Triton's interpreter."""

import dataclasses

import pytest
import torch
from tests.kernels.interpreted import BACKEND, IN_THE_INTERPRETER, OPTIONS, check, scores_of, take_tiny_workspace
from tests.kernels.pair_cases import HARD, make_case
from tests.kernels.pair_maker import Maker

from tilewise.kernels.spec import Pair, PairSpec
from tilewise.kernels.triton_impl import sizes
from tilewise.kernels.triton_impl.sizes import Sizes
from tilewise.kernels.triton_impl.two_pass import forward as statistics
from tilewise.kernels.triton_impl.two_pass.forward import Forward

pytestmark = IN_THE_INTERPRETER
TWO_SIDED = ["clip", "nt_xent", "ids_excluded", "scores_1000", "rows_of_unlike_size"]


@pytest.fixture
def strips(monkeypatch, request):
    """As many row tiles to a strip as the test says, wherever a strip may be."""
    seen = []

    def strip(self, i, j, columns):
        long = request.param if columns and self.peaks is not None else 1
        seen.append(long)
        return long

    monkeypatch.setattr(Forward, "_strip", strip)
    return seen


@pytest.mark.parametrize("strips, tile", [(4, 16), (2, 64), (4, 64)], indirect=["strips"])
@pytest.mark.parametrize("name", TWO_SIDED)
def test_columns_of_a_strip_are_added_up(strips, tile, name, monkeypatch):
    monkeypatch.setattr(sizes, "INTERPRETED", Sizes(tile, tile, 64, 1, 1, 1, 4))
    if name == "nt_xent":  # only where a macro-tile stands for its mirror image too
        take_tiny_workspace(monkeypatch)
    check(*make_case(name, torch.float16), hard=name in HARD)
    assert max(strips) > 1


@pytest.mark.parametrize("strips", [4], indirect=True)
@pytest.mark.parametrize("shift", [-3000.0, 3000.0])
def test_rows_past_the_end_of_a_strip_count_for_nothing(strips, shift):
    """With a bias of 3000 their exponentials are infinite, and 0 times that is not 0: such columns are done again."""
    make = Maker(torch.float16)
    bias = make.vector(90) + shift
    pair = Pair(a=make.features(70, 16), b=make.features(90, 16), scale=make.number(5.0), bias=bias)
    spec = PairSpec(row_lse=True, col_lse=True, positive="one")
    got = BACKEND.forward(pair, spec, OPTIONS)
    want = BACKEND.forward(dataclasses.replace(pair, bias=bias - shift), spec, OPTIONS)
    assert (got.col_lse - shift - want.col_lse).abs().max() < 1e-3
    assert (got.row_lse - shift - want.row_lse).abs().max() < 1e-3
    assert max(strips) == 4


def long_strip(monkeypatch, rows, cols, programs):
    monkeypatch.setattr(statistics, "multiprocessors", lambda device: programs)
    monkeypatch.setattr(sizes, "INTERPRETED", Sizes(64, 64, 64, 1, 1, 1, 2, strip=8))
    make = Maker(torch.float16)
    pair = Pair(a=make.features(rows, 8), b=make.features(cols, 8), scale=make.number(5.0))
    work = Forward(scores_of(pair, PairSpec(row_lse=True, col_lse=True, positive="one")))
    work.peaks = torch.zeros(1)
    return work._strip(slice(0, rows), slice(0, cols), True)


def test_strips_leave_no_program_without_work(monkeypatch):
    assert long_strip(monkeypatch, 64 * 16, 64 * 16, 8) == 8  # 32 tiles for each program either way
    assert long_strip(monkeypatch, 64 * 8, 64 * 4, 16) == 1  # 32 tiles, but 4 strips for 16 programs
    assert long_strip(monkeypatch, 64 * 9, 64 * 2, 1) == 1  # 7 of 16 row tiles would be empty


@pytest.mark.parametrize("pieces", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["clip", "cross_entropy", "siglip", "supcon"])
def test_tiles_written_in_pieces(pieces, dtype, name, monkeypatch):
    monkeypatch.setattr(sizes, "INTERPRETED", Sizes(64, 64, 64, 1, 1, 1, 2, pieces))
    check(*make_case(name, dtype), hard=name in HARD)


@pytest.mark.parametrize("rows", [64, 100, 128, 320, 350])
def test_symmetric_scores_are_computed_once(rows, monkeypatch):
    """Every tile on the diagonal, and one of each two that mirror each other, but for small blocks on the diagonal."""
    monkeypatch.setattr(sizes, "INTERPRETED", Sizes(16, 16, 64, 1, 1, 1, 2))
    monkeypatch.setattr(Forward, "_macro", lambda self: (128, 128))
    a = Maker(torch.float32).features(rows, 8)
    times, plain = torch.zeros(rows, rows, dtype=torch.int64), Forward._tiles

    def counted(self, i, j, mirrored):
        times[i, j] += 1
        if mirrored:
            times[j, i] += 1
        plain(self, i, j, mirrored)

    monkeypatch.setattr(Forward, "_tiles", counted)
    got = BACKEND.forward(Pair(a=a, b=a, scale=torch.tensor(3.0)), PairSpec(row_lse=True, symmetric=True), OPTIONS)
    assert (times == 1).all()
    want = torch.logsumexp(3.0 * (a.double() @ a.double().T), dim=1)
    assert (got.row_lse - want).abs().max() < 1e-5
