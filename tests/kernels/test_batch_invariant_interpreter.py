"""Batch invariance of the Triton kernels, in Triton's interpreter."""

import pytest
import torch
from tests.compare import assert_close
from tests.kernels.interpreted import IN_THE_INTERPRETER, TYPES, run_steps
from tests.losses.invariance import Pool, different

import tilewise as tw
from tilewise.kernels.spec import Pair, PairSpec
from tilewise.kernels.triton_impl.two_pass.row_product import row_product
from tilewise.ops import row_blocks

pytestmark = IN_THE_INTERPRETER
INVARIANT = tw.TileOptions(backend="triton", precision="highest", batch_invariant=True)


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch):
    monkeypatch.setattr(row_blocks, "CPU_ROWS", 32)


@pytest.mark.parametrize("dtype", TYPES.values(), ids=TYPES)
def test_a_row_has_the_same_bits_in_every_batch(dtype):
    pool = Pool(dtype, n=40, v=90, d=24, options=INVARIANT)
    pairs, wrong = different(pool, iter([torch.tensor([5, 39, 17]), torch.arange(1, 40).flip(0)]))
    assert (pairs, wrong) == (42, 0)


@pytest.mark.usefixtures("tiny_workspace")
@pytest.mark.parametrize("dtype", TYPES.values(), ids=TYPES)
def test_the_results_are_those_of_the_torch_backend(dtype):
    """With several macro-tiles, whose products are added up."""
    rows = torch.arange(1, 36)
    got, want = (
        Pool(dtype, n=36, v=150, d=24, options=tw.TileOptions(backend=name, batch_invariant=True)).results(rows)
        for name in ("triton", "torch")
    )
    for name in want:
        assert_close(got[name], want[name], 1e-5 if dtype == torch.float32 else 2e-3, name)


@pytest.mark.parametrize("first", [True, False])
def test_row_product(first):
    g, b, out = torch.randn(70, 140), torch.randn(140, 52), torch.randn(70, 52)
    want = g.double() @ b.double() + (0.0 if first else out.double())
    pair = Pair(a=torch.zeros(70, 52), b=b, scale=torch.ones(()))

    def build(scores, more):
        row_product(scores, more["out"], more["g"], scores.b, first)
        return []

    run_steps(build, pair, PairSpec(row_lse=True), INVARIANT, out=out, g=g)
    assert_close(out, want, 1e-6)


def test_small_float16_gradients_survive_beside_large_ones():
    """G is float16. Each row has a factor of its own, otherwise the second row's G, about 2e-7, would have 2 bits."""
    hidden, head = 0.1 * torch.randn(2, 16).half(), 1.0 + torch.randn(500, 16).half()
    results = []
    for dtype, backend in ((torch.float16, "triton"), (torch.float64, "torch")):
        leaf, how = hidden.to(dtype).requires_grad_(), tw.TileOptions(backend=backend, batch_invariant=True)
        lse = tw.linear_logsumexp(leaf, head.to(dtype), options=how)
        results.append(torch.autograd.grad(lse, leaf, torch.tensor([100.0, 1e-4], dtype=lse.dtype))[0][1])
    assert_close(*results, 2e-3)
