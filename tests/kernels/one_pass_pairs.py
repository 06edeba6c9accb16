"""Options, a spec and random pairs for the tests of the one-pass kernels."""

import torch

import tilewise as tw
from tilewise.kernels.spec import Needs, Pair, PairSpec
from tilewise.kernels.triton_impl.one_pass.softmax import Softmax
from tilewise.kernels.triton_impl.two_pass import macro_tile

ONE_PASS, TWO_PASS = (
    tw.TileOptions(backend="triton", precision="highest", gradients=when) for when in ("forward", "backward")
)
SOFTMAX, ALL = PairSpec(row_lse=True, positive="one"), Needs(a=True, b=True, scale=True, bias=False)


def softmax_pair(n, m, d, scale, seed=0):
    generator = torch.Generator().manual_seed(seed)
    a, b = (torch.randn(rows, d, generator=generator) / d**0.5 for rows in (n, m))
    key = torch.randint(0, m, (n,), generator=generator)
    return Pair(a=a, b=b, scale=torch.tensor(scale), row_key=key), SOFTMAX


def take_several_blocks(monkeypatch):
    """So little memory that a hundred rows need several blocks, and their gradients several pieces."""
    monkeypatch.setattr(Softmax, "_block_rows", lambda self: 128)
    monkeypatch.setattr(tw.TileOptions, "workspace_bytes", 2**14)
    monkeypatch.setattr(macro_tile, "ONE_MACRO", 50)
