"""The kernels of all strategies are tested with few rows, which would else be a small batch."""

import pytest


@pytest.fixture(autouse=True)
def no_small_batches(request, set_limits):
    """Calls take the strategies of large ones, except in the tests of small batches."""
    if "small" not in request.module.__name__:
        set_limits(small=0, small_cpu=0)
