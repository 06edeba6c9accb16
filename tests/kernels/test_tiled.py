"""The torch backend against the dense oracle: every case, every type."""

import pytest
import torch
from tests.kernels.pair_cases import CASES, HARD, check_backward, check_forward, make_case

from tilewise.kernels.tiled import TorchBackend

BACKEND = TorchBackend()
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
