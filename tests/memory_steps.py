"""Steps whose memory is measured, each in a process of its own: (a small one that warms up, the one that counts)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from tests import oracles
from torch import Tensor

import tilewise as tw

Step = Callable[[], object]


def unit(n: int, d: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.nn.functional.normalize(torch.randn(n, d), dim=1).to(dtype).requires_grad_()


def loss_step(name: str, n: int, d: int, dtype: torch.dtype, workspace_mib: int | None) -> Step:
    a, b = unit(n, d, dtype), unit(n, d, dtype)
    options = None if workspace_mib is None else tw.TileOptions(workspace_mib=workspace_mib)
    labels = torch.arange(n) % (n // 4)
    weight = torch.ones(n)
    teacher, head = unit(n, 32, dtype).detach(), unit(n, 32, dtype).detach()
    losses: dict[str, Callable[[], Tensor]] = {
        "clip": lambda: tw.clip_loss(a, b, 14.0, options=options),
        "clip_hot": lambda: tw.clip_loss(a, b, 300.0, options=options),
        "siglip": lambda: tw.siglip_loss(a, b, 10.0, -5.0, options=options),
        "info_nce_ids": lambda: tw.info_nce(a, b, query_ids=labels, symmetric=True, options=options),
        "nt_xent": lambda: tw.nt_xent(a, options=options),
        "supcon": lambda: tw.supcon_loss(a, labels, options=options),
        "cross_entropy": lambda: tw.linear_cross_entropy(
            a, b, labels, softcap=30.0, label_smoothing=0.1, weight=weight, options=options
        ),
        "margin": lambda: tw.margin_softmax_loss(a, b, labels, options=options),
        "jsd": lambda: tw.linear_distillation_loss(
            a, b, teacher, head, labels, beta=0.4, temperature=2.0, softcap=30.0, options=options
        ),
        "dense_clip": lambda: oracles.clip_dense(a, b, 14.0),
    }
    leaves = [a] if name in ("nt_xent", "supcon") else [a, b]
    return lambda: torch.autograd.grad(losses[name](), leaves)


def measured(name: str, n: int, d: int, dtype: str = "float32", workspace_mib: int | None = None) -> tuple[Step, Step]:
    """Forward and backward of one loss."""
    kind = getattr(torch, dtype)
    return loss_step(name, 600, d, kind, 1), loss_step(name, n, d, kind, workspace_mib)  # the first is not small either
