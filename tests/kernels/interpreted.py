"""Shared by the tests in Triton's interpreter: marks, the backend, and a check of one pair."""

import pytest
import torch
from tests.kernels.marks import INTERPRETED
from tests.kernels.pair_checks import check_backward, check_forward

from tilewise.kernels.triton_impl.backend import TritonBackend
from tilewise.kernels.triton_impl.program import Program
from tilewise.kernels.triton_impl.scores import NUMBERS, Scores, numbers_of, run_program, tensors_of
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


def scores_of(pair, spec, options=OPTIONS, device=None):
    """The scores of a pair in a new program, which is not run. ``device``: by default that of the pair."""
    program = Program()
    given = {name: program.given(name, value) for name, value in tensors_of(pair, spec).items()}
    given |= {name: program.given(name) for name in NUMBERS}
    return Scores(program, given, numbers_of(spec)[0], options, device or pair.a.device)


def run_steps(build, pair, spec, options=OPTIONS, **more):
    """What ``build(scores, more)`` returns, with tensors in place of buffers; nothing of an earlier call is used."""
    return run_program((object(),), pair, spec, options, more, build)


def take_tiny_workspace(monkeypatch):
    """A workspace so small that a hundred rows need several macro-tiles in both axes."""
    monkeypatch.setattr(TileOptions, "workspace_bytes", 2**14)
    monkeypatch.setattr(macro_tile, "ONE_MACRO", 50)
    monkeypatch.setattr(Forward, "_macro", lambda self: (64, 64))  # otherwise at least 256
