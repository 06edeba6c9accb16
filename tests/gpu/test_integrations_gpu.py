"""Drop-ins on a CUDA device."""

import sys
from types import SimpleNamespace

import pytest
import torch
from tests.compare import assert_close, assert_no_worse
from tests.integrations.test_gist import check_precision
from tests.integrations.test_open_clip_more import distill_dense, student, teacher

from tilewise.integrations import open_clip
from tilewise.integrations.trl import Divergence
from tilewise.options import TileOptions

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gist(dtype):
    check_precision(dtype, "cuda", rows=503, width=72)


def test_distillation_of_clip():
    runs = []
    for kind, compute in (
        (torch.float64, distill_dense),
        (torch.bfloat16, distill_dense),
        (torch.bfloat16, lambda *given: open_clip.DistillClipLoss()(*given)[1]),
    ):
        constants = [value.to("cuda", kind) for value in teacher(torch.bfloat16, rows=503)[:2]]
        leaves = [value.detach().to("cuda", kind).requires_grad_() for value in student(torch.bfloat16, rows=503)[:2]]
        loss = compute(*leaves, 14.0, *constants, 20.0)
        runs.append((loss, *torch.autograd.grad(loss, leaves)))
    for exact, dense, ours in zip(*runs, strict=True):
        assert_no_worse(ours, dense, exact)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_divergence_of_trl(beta):
    """Against TRL's own kernels, in bfloat16."""
    module = pytest.importorskip("trl.kernels.chunked_divergence")
    sizes = ((300, 64), (1003, 64), (1003,), (300, 96), (1003, 96), (1003,))
    torch.manual_seed(0)
    tensors = [(0.3 * torch.randn(size, device="cuda")).bfloat16() for size in sizes]
    runs = []
    for compute in (
        Divergence(SimpleNamespace(_compute_loss=None), sys, TileOptions()).apply,
        module.ChunkedDivergenceFunction.apply,
    ):
        leaves = [value.clone().requires_grad_() for value in tensors[:3]]
        divergence, entropy = compute(*leaves, *tensors[3:], beta, 0.9, 0.7, 5.0, 1.3, 4.0)
        runs.append((divergence, entropy, *torch.autograd.grad(divergence.mean(), leaves)))
    for index, (ours, theirs) in enumerate(zip(*runs, strict=True)):
        assert_close(ours, theirs, 1e-3 if index < 2 else 2e-2)
