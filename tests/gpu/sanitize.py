"""Small calls of every kernel, for a memory checker:

    PYTHONPATH=src compute-sanitizer --tool memcheck python3 -m tests.gpu.sanitize

Every tensor gets an allocation of its own, so that a step over its end is seen.
"""

import os

import torch
import torch.nn.functional as F
from tests.gpu.checks import Place
from tests.losses.loss_cases import converted, problem, solve

from tilewise.retrieval import retrieval_ranks_both

CALLS = ("clip", "siglip", "nt_xent", "supcon", "cross_entropy_everything", "info_nce_ids")


def main(device: str = "cuda", backend: str = "triton", dtype: torch.dtype = torch.bfloat16) -> None:
    """Loss and gradients of each call; a rough look at the result, the rest is the checker's."""
    options = Place(device, backend).options(workspace_mib=1)
    for name in CALLS:
        made = problem(name, dtype, n=301, d=40, device=device)
        loss, grads = solve(made.ours, made.leaves, options=options)
        want, _ = solve(made.dense, converted(made.leaves, torch.float64))
        assert abs(loss.item() - want.item()) <= 1e-2 * abs(want.item()), (name, loss.item(), want.item())
        assert all(grad.isfinite().all() for grad in grads.values()), name
        print(f"{name}: {loss.item():.5f}", flush=True)
    features = F.normalize(torch.randn(2, 301, 40, device=device), dim=2).to(dtype)
    ids = torch.arange(301, device=device) // 3
    for name, answers in {"ranks": {}, "ranks by id": {"query_ids": ids, "gallery_ids": ids}}.items():
        ranks = retrieval_ranks_both(*features, exclude=(ids * 3 + 5) % 301, **answers, options=options)
        assert 0 <= min(x.min() for x in ranks) <= max(x.max() for x in ranks) < 301, name
        print(f"{name}: {ranks.query_to_gallery.double().mean():.5f}", flush=True)


if __name__ == "__main__":
    os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")  # read when the first tensor is made
    main()
