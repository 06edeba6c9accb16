"""The one comparator. Error is relative to the size of the answer: gradients of a mean are 1e-6, so an absolute
tolerance would accept zeros. tests/test_compare.py has seen it reject them."""

import math

from torch import Tensor


def relative_error(got: Tensor, want: Tensor) -> float:
    """||got - want|| / ||want||, in float64; where the answer is exactly zero, ||got||. NaN never compares small."""
    assert got.shape == want.shape, (tuple(got.shape), tuple(want.shape))
    got, want = got.detach().double().cpu(), want.detach().double().cpu()
    if got.numel() == 0:
        return 0.0
    size = want.norm().item()
    error = (got - want).norm().item()
    return error / size if size > 0 or math.isnan(size) else error


def assert_close(got: Tensor, want: Tensor, tolerance: float, what: str = "") -> None:
    """Fails, with the error, unless `relative_error` is at most ``tolerance``."""
    error = relative_error(got, want)
    assert error <= tolerance, f"{what} relative error {error:.3g} > {tolerance:.3g}"


def assert_no_worse(got: Tensor, dense: Tensor, exact: Tensor, what: str = "", factor: float = 1.5) -> None:
    """Low precision: at most ``factor`` times the error that the dense path makes in the same precision."""
    ours, theirs = relative_error(got, exact), relative_error(dense, exact)
    assert ours <= factor * theirs + 1e-6, f"{what} error {ours:.3g}, dense {theirs:.3g}"
