"""Shared by the tests in Triton's interpreter: marks, the backend, and a check of one pair."""

import pytest
import torch
from tests.kernels.marks import INTERPRETED
from tests.kernels.pair_checks import check_backward, check_forward

from tilewise.kernels.triton_impl.backend import TritonBackend
from tilewise.kernels.triton_impl.two_pass import macro_tile
from tilewise.kernels.triton_impl.two_pass.forward import Forward
from tilewise.options import TileOptions

IN_THE_INTERPRETER = [*INTERPRETED, pytest.mark.usefixtures("quick")]
BACKEND, OPTIONS = TritonBackend(), TileOptions(backend="triton", precision="highest")
TYPES = {"float32": torch.float32, "float16": torch.float16}
FLOOR = 5e-4  # float16 rounds an entry of G by up to 2**-11


def check(pair, spec, *, hard=False):
    check_forward(BACKEND, pair, spec, OPTIONS, hard=hard)
    check_backward(BACKEND, pair, spec, OPTIONS, hard=hard, floor=FLOOR)


def take_tiny_workspace(monkeypatch):
    """A workspace so small that a hundred rows need several macro-tiles in both axes."""
    monkeypatch.setattr(TileOptions, "workspace_bytes", 2**14)
    monkeypatch.setattr(macro_tile, "ONE_MACRO", 50)
    monkeypatch.setattr(Forward, "_macro", lambda self: (64, 64))  # otherwise at least 256
