"""Numbers that settings cannot be are refused with a sentence, by functions, modules and integrations alike."""

from __future__ import annotations

import math

import pytest
import torch

import tilewise as tw
from tilewise.errors import RangeError

X, Y = torch.eye(4), torch.arange(4)


@pytest.mark.parametrize("value", [-1e-4, -1, math.nan, math.inf])
@pytest.mark.parametrize("name", ["z_loss", "label_smoothing", "softcap"])
def test_settings_of_cross_entropy(name, value):
    for call in (
        lambda: tw.linear_cross_entropy(X, X, Y, **{name: value}),
        lambda: tw.LinearCrossEntropyLoss(**{name: value})(X, X, Y),
    ):
        with pytest.raises(RangeError, match=rf"^{name} .* got {value}"):
            call()


def test_zero_is_no_z_loss():
    assert tw.linear_cross_entropy(X, X, Y, z_loss=0) == tw.linear_cross_entropy(X, X, Y)
