"""The checks of the filter in tests/gpu, here with the dense filter."""

import dataclasses

import pytest
import torch
from tests import dense_filter
from tests.gpu import filtering
from tests.gpu.checks import Place

from tilewise.kernels import filter_plan as plans

pytestmark = pytest.mark.usefixtures("filter_on_cpu")
CPU = Place("cpu", "torch")


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["float32", "float16", "bfloat16"]
)
@pytest.mark.parametrize("settings", [{}, {"bias": True}, {"bias": True, "softcap": 60.0}])
def test_gradients_and_bound(dtype, settings):
    share = filtering.check_filtered(CPU, dtype, 100, 72, 4000, 3, **settings)
    assert 0.001 < share < 0.2


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["float32", "float16", "bfloat16"]
)
def test_statistics_of_tokens(dtype):
    share = filtering.check_tokens(CPU, dtype, 100, 72, 4000, 3)
    assert 0.001 < share < 0.2


def test_errors_of_rounding():
    filtering.check_rounding(CPU, torch.bfloat16, 64, 40, 8192, 3)


def test_flat_scores():
    filtering.check_flat(CPU, torch.float32, 60, 40, 1000)


def test_wrong_gradients_are_found(monkeypatch):
    """Were the dropped mass forgotten, the oracle would say so."""
    plain = dense_filter.score_gradient

    def forgetful(pair, stats, plan, *rest):
        nothing = torch.where(plan.mass < 0, plan.mass, 0.0)
        return plain(pair, stats, dataclasses.replace(plan, mass=nothing), *rest)

    monkeypatch.setattr(dense_filter, "score_gradient", forgetful)
    with pytest.raises(AssertionError, match="input"):
        filtering.check_filtered(CPU, torch.float32, 100, 72, 4000, 3)


def test_a_broken_bound_is_found(monkeypatch):
    monkeypatch.setattr("tilewise.kernels.filter_plan.MARGIN", 1.2)
    with pytest.raises(AssertionError):
        filtering.check_filtered(CPU, torch.float32, 100, 72, 4000, 3)
    assert plans.MARGIN == 1.2
