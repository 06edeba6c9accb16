"""Small problems in which forward saves columns, in Triton's interpreter: what their test files share."""

import pytest
import torch
from tests.kernels.quick_interpreter import make_quick

from tilewise.kernels.spec import Needs, Pair, PairSpec
from tilewise.kernels.triton_impl import scores
from tilewise.kernels.triton_impl.backend import TritonBackend
from tilewise.kernels.triton_impl.two_pass import backward as gradients
from tilewise.kernels.triton_impl.two_pass import forward as statistics
from tilewise.kernels.triton_impl.two_pass import saved as saving
from tilewise.options import TileOptions

BACKEND, OPTIONS = TritonBackend(), TileOptions(backend="triton", precision="highest", gradients="backward")
SPEC = PairSpec(row_lse=True, positive="one", drop_rows=True)
NEEDS = Needs(a=True, b=True, scale=True)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Save float32 in chunks of one tile. The interpreter does not support bfloat16."""
    make_quick(monkeypatch)
    monkeypatch.setattr(scores, "_programs", {})
    monkeypatch.setattr(saving, "DTYPES", (torch.float32,))
    monkeypatch.setattr(saving, "WORTH_IT", 0)
    monkeypatch.setattr(saving, "COLS", 64)
    monkeypatch.setattr(saving, "CHUNK_ENTRIES", 0)
    monkeypatch.setattr(saving, "FULL_TILES", 32)
    monkeypatch.setattr(saving, "NARROWEST", 8)
    g_of(monkeypatch, 96)


def g_of(monkeypatch, cols):
    """A workspace whose G has all rows and that many columns, and which has no room for more."""
    monkeypatch.setattr(statistics.Forward, "_room", lambda self, saved: 0)
    for module in (gradients, statistics):
        monkeypatch.setattr(module, "macro_tile", lambda shape, *rest: (-(-shape.rows // 64) * 64, cols))


def pair_of(n=48, m=400, d=32, spread=1.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    a, b = torch.randn(n, d, generator=generator) * spread, torch.randn(m, d, generator=generator)
    key = torch.randint(0, m, (n,), generator=generator)
    key[::5] = -1
    bias = torch.randn(m, generator=generator)
    return Pair(a=a, b=b, scale=torch.tensor(0.3), bias=bias, row_key=key)
