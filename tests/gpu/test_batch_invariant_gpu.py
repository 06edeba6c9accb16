"""Batch invariance on a CUDA device: 1,000 and more (batch, position) pairs, no bit differs."""

import pytest
import torch
from tests.compare import assert_close
from tests.losses.invariance import Pool, different

import tilewise as tw
from tilewise.errors import BackendError

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
HALF_AND_SINGLE = [torch.bfloat16, torch.float16, torch.float32]


def check(backend, dtype, d, v, n=2500):
    options = tw.TileOptions(backend=backend, batch_invariant=True)
    pool = Pool(dtype, n=n, v=v, d=d, options=options, device="cuda")
    pairs, wrong = different(pool, pool.batches(12, (4, 300, n)))
    assert pairs >= 1000
    assert wrong == 0


@pytest.mark.parametrize("dtype", HALF_AND_SINGLE, ids=str)
@pytest.mark.parametrize("d", [264, 1100])  # narrow and wide tiles, not whole ones
def test_triton(dtype, d):
    check("triton", dtype, d, v=9003)


def test_triton_with_several_macro_tiles():
    check("triton", torch.bfloat16, 1024, v=70_001)


def test_products_of_cublas_are_refused():
    """With the torch backend 1,600 of 1,800 rows differed: cuBLAS does not treat all rows of a product alike."""
    hidden, head = torch.ones(8, 64, device="cuda"), torch.ones(32, 64, device="cuda")
    options = tw.TileOptions(backend="torch", batch_invariant=True)
    with pytest.raises(BackendError, match="batch_invariant"):
        tw.linear_token_stats(hidden, head, options=options)
    with pytest.raises(BackendError, match="no backend"):
        tw.linear_token_stats(hidden.double(), head.double(), options=tw.TileOptions(batch_invariant=True))


def test_without_the_option_bits_differ():
    pool = Pool(torch.bfloat16, n=2500, v=9003, d=264, options=tw.TileOptions(), device="cuda")
    assert different(pool, pool.batches(4, (4, 300)), say=lambda _: None)[1] > 0


@pytest.mark.parametrize("rows, classes, width", [(0, 20, 8), (5, 20, 0), (5, 20, 1), (5, 1, 8)])
def test_empty_and_narrow_calls(rows, classes, width):
    options = tw.TileOptions(batch_invariant=True)
    hidden = torch.randn(rows, width, device="cuda", requires_grad=True)
    head = torch.randn(classes, width, device="cuda", requires_grad=True)
    target = torch.arange(rows, device="cuda") % classes
    for ignored in (target, torch.full_like(target, -100)):
        results = []
        for how in (options, tw.TileOptions(backend="torch")):
            loss = tw.linear_cross_entropy(hidden, head, ignored, reduction="sum", options=how)
            results.append((loss, *torch.autograd.grad(loss, (hidden, head))))
        for got, want in zip(*results, strict=True):
            assert_close(got, want, 1e-5)
