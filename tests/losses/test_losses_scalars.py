"""Numbers that settings cannot be are refused with a sentence, by functions, modules and integrations alike."""

from __future__ import annotations

import math

import pytest
import torch

import tilewise as tw
from tilewise.errors import RangeError
from tilewise.integrations.open_clip import CoCaLoss

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


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_of_classes(value):
    weight = torch.tensor([1.0, 2.0, value, 0.0])
    for call in (
        lambda: tw.linear_cross_entropy(X, X, Y, weight=weight),
        lambda: tw.LinearCrossEntropyLoss(weight=weight)(X, X, Y),
    ):
        with pytest.raises(RangeError, match=rf"^weight, .* got {value} \(1 of 4\)"):
            call()


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("place", [0, 1])
def test_weights_of_losses(place, value):
    weights = [1.0, 1.0]
    weights[place] = value
    with pytest.raises(RangeError, match="loss_weight must be finite"):
        CoCaLoss(*weights)
