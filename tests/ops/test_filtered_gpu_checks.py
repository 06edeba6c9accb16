"""The checks of the filter in tests/gpu, here on the torch backend and the CPU."""

import pytest
import torch
from tests.gpu import filtering
from tests.gpu.checks import Place

from tilewise.kernels import filter_plan as plans

CPU = Place("cpu", "torch")


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["float32", "float16", "bfloat16"]
)
@pytest.mark.parametrize("settings", [{}, {"bias": True}, {"bias": True, "softcap": 60.0}, {"workspace_mib": 1}])
def test_gradients_and_bound(dtype, settings):
    share = filtering.check_filtered(CPU, dtype, 100, 72, 4000, 3, **settings)
    assert 0.001 < share < 0.2


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["float32", "float16", "bfloat16"]
)
@pytest.mark.parametrize("workspace", [256, 1])
def test_statistics_of_tokens(dtype, workspace):
    share = filtering.check_tokens(CPU, dtype, 100, 72, 4000, 3, workspace)
    assert 0.001 < share < 0.2


def test_errors_of_rounding():
    filtering.check_rounding(CPU, torch.bfloat16, 64, 40, 8192, 3)


def test_flat_scores():
    filtering.check_flat(CPU, torch.float32, 60, 40, 1000)


@pytest.fixture
def probing(monkeypatch):
    """Small calls ask a sample of their rows too."""
    monkeypatch.setattr("tilewise.kernels.torch_impl.filtered.WORTH_PROBING", 0)


@pytest.mark.usefixtures("probing", "nan_filled_empty")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_flat_scores_after_a_probe(dtype):
    filtering.check_probed_flat(CPU, dtype, 100, 40, 1000)


@pytest.mark.usefixtures("probing", "nan_filled_empty")
@pytest.mark.parametrize("settings", [{}, {"bias": True, "softcap": 60.0}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_peaked_scores_after_a_probe(dtype, settings):
    filtering.check_filtered(CPU, dtype, 100, 72, 4000, 3, **settings)


@pytest.mark.usefixtures("probing", "nan_filled_empty")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_statistics_of_tokens_after_a_probe(dtype):
    filtering.check_tokens(CPU, dtype, 100, 72, 4000, 3)


def test_a_way_that_is_not_the_exact_one_is_found():
    """Without a probe the log-sum-exps are added up in another order: number by number they are not the same."""
    with pytest.raises(AssertionError):
        filtering.check_probed_flat(CPU, torch.float32, 100, 40, 1000)


def test_wrong_gradients_are_found(monkeypatch):
    """Were the dropped mass forgotten, the oracle would say so."""
    monkeypatch.setattr("tilewise.kernels.torch_impl.filtered._Backward._add_means", lambda *_: None)
    with pytest.raises(AssertionError, match="input"):
        filtering.check_filtered(CPU, torch.float32, 100, 72, 4000, 3)


def test_a_broken_bound_is_found(monkeypatch):
    monkeypatch.setattr("tilewise.kernels.filter_plan.MARGIN", 1.2)
    with pytest.raises(AssertionError):
        filtering.check_filtered(CPU, torch.float32, 100, 72, 4000, 3)
    assert plans.MARGIN == 1.2
