"""Marks of tests in Triton's interpreter, for modules that also have tests without Triton."""

import importlib.util

import pytest
import torch

NEEDS_TRITON = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed on this platform"
)
# NumPy warns where a GPU does not: for log2(0), or for sums of undefined memory whose result is not used.
INTERPRETED = [
    NEEDS_TRITON,
    pytest.mark.skipif(torch.cuda.is_available(), reason="here the kernels are compiled: make test-gpu"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*"),
    pytest.mark.filterwarnings("ignore:.* encountered in reduce:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),  # the interpreter's own
    pytest.mark.usefixtures("nan_filled_empty", "one_parser"),
]
