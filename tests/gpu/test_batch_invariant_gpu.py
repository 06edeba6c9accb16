"""Batch invariance on a CUDA device: 1,000 and more (batch, position) pairs, no bit differs."""

import pytest
import torch
from tests.losses.invariance import Pool, different

import tilewise as tw

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


@pytest.mark.parametrize("dtype", [*HALF_AND_SINGLE, torch.float64], ids=str)
def test_torch_backend(dtype):
    """Products of cuBLAS with a fixed shape: this holds as long as cuBLAS treats all rows of a product alike."""
    check("torch", dtype, 264, v=9003)


def test_without_the_option_bits_differ():
    pool = Pool(torch.bfloat16, n=2500, v=9003, d=264, options=tw.TileOptions(), device="cuda")
    assert different(pool, pool.batches(4, (4, 300)), say=lambda _: None)[1] > 0
