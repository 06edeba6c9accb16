"""Frames of the package in a known step of the Triton backend: without noise, with launches replaced by nothing."""

import sys

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed on this platform")

from benchmarks.ordinary import PACKAGE, make_inputs
from tests.kernels.interpreted import IN_THE_INTERPRETER

import tilewise as tw
from tilewise.kernels.triton_impl import buffers, program

pytestmark = IN_THE_INTERPRETER
CPU, OPTIONS = (torch.float32, "cpu"), tw.TileOptions(backend="triton")


def clip(x):
    return tw.clip_loss(x["a"], x["b"], x["scale"], options=OPTIONS)


def cross_entropy(x):
    return tw.linear_cross_entropy(x["a"], x["classifier"], x["target"], options=OPTIONS)


@pytest.fixture
def no_launches(monkeypatch):
    """Kernels do nothing, and their arguments are addresses, as on a card."""
    monkeypatch.setattr(buffers, "is_card", lambda device: True)
    monkeypatch.setattr(program, "compiled_launch", lambda *_: lambda *arguments: None)


def frames(call):
    """The result of a call, and how many frames of the package it had."""
    count = 0

    def seen(frame, event, _):
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(PACKAGE)

    sys.setprofile(seen)
    try:
        return call(), count
    finally:
        sys.setprofile(None)


@pytest.mark.usefixtures("no_launches")
@pytest.mark.parametrize(("loss", "most"), [(clip, (36, 11)), (cross_entropy, (42, 11))])
def test_a_known_step_has_few_frames(loss, most):
    x = {name: value.requires_grad_(value.is_floating_point()) for name, value in make_inputs(8, 8, 16, *CPU).items()}
    for _ in range(2):
        result, forward = frames(lambda: loss(x))
        _, backward = frames(result.backward)
    assert 10 < forward <= most[0]
    assert 3 < backward <= most[1]
