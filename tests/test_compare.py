"""The comparator has been seen to fail: zeros, a wrong sign, 1.1 times the answer, NaN, a wrong shape."""

import math

import pytest
import torch
from tests.compare import assert_close, assert_no_worse, relative_error

SPOILERS = {
    "zeros": torch.zeros_like,
    "sign": torch.neg,
    "ten percent": lambda g: 1.1 * g,
    "nan": lambda g: g * math.nan,
    "one nan": lambda g: torch.cat([g[:-1], g[-1:] * math.nan]),
    "infinite": lambda g: g + math.inf,
    "one row lost": lambda g: torch.cat([torch.zeros_like(g[:1]), g[1:]]),
    "rows swapped": lambda g: g.flip(0),
}


@pytest.mark.parametrize("spoil", SPOILERS.values(), ids=SPOILERS)
@pytest.mark.parametrize("size", [1.0, 1e-6, 1e-30, 1e6])
def test_comparator_rejects(spoil, size):
    want = size * torch.randn(64, 32, dtype=torch.float64)
    assert not relative_error(spoil(want), want) < 1e-2
    with pytest.raises(AssertionError, match="relative error"):
        assert_close(spoil(want), want, 1e-2)


@pytest.mark.parametrize("spoil", SPOILERS.values(), ids=SPOILERS)
def test_no_worse_rejects(spoil):
    exact = 1e-6 * torch.randn(64, 32, dtype=torch.float64)
    dense = exact.bfloat16()
    with pytest.raises(AssertionError, match="dense"):
        assert_no_worse(spoil(exact), dense, exact)


def test_accepts_the_answer_and_its_rounding():
    want = 1e-6 * torch.randn(64, 32, dtype=torch.float64)
    assert relative_error(want.clone(), want) == 0.0
    assert 0 < relative_error(want.float(), want) < 1e-7
    assert_no_worse(want.bfloat16(), want.bfloat16(), want)


def test_no_worse_knows_one_and_a_half_from_two():
    exact = torch.randn(64, 32, dtype=torch.float64)
    dense = exact + 1e-3
    assert_no_worse(exact + 1.4e-3, dense, exact)
    with pytest.raises(AssertionError):
        assert_no_worse(exact + 2e-3, dense, exact)


def test_an_answer_of_zero_is_compared_absolutely():
    assert relative_error(torch.full((4,), 1e-3), torch.zeros(4)) == pytest.approx(2e-3)


def test_shapes_must_agree():
    with pytest.raises(AssertionError):
        relative_error(torch.zeros(3), torch.zeros(3, 1))


@pytest.mark.usefixtures("nan_filled_empty")
def test_unwritten_memory_is_nan_in_tests():
    like = torch.zeros(3)
    for tensor in (torch.empty(3), torch.empty_like(like), like.new_empty(3), torch.empty_strided((3,), (1,))):
        assert tensor.isnan().all()
    assert torch.empty(3, dtype=torch.int64).shape == (3,)
