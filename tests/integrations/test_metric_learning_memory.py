"""The drop-in losses inside of PyTorch Metric Learning's CrossBatchMemory, where the package is installed."""

from __future__ import annotations

import pytest
import torch
from tests.compare import assert_close

from tilewise.integrations import pytorch_metric_learning as ours

losses = pytest.importorskip("pytorch_metric_learning.losses")
N, D = 12, 8


@pytest.mark.parametrize("name", ["NTXentLoss", "SupConLoss"])
@pytest.mark.parametrize("enqueue", [False, True], ids=["all rows", "enqueue_mask"])
def test_the_same_loss_and_gradients_over_steps(name, enqueue):
    """Six batches fill the memory of 40 entries and start to overwrite it."""
    torch.manual_seed(0)
    memories = [losses.CrossBatchMemory(kind(), D, 40) for kind in (getattr(losses, name), getattr(ours, name))]
    for _ in range(6):
        values, labels = torch.randn(N, D, dtype=torch.float64), torch.randint(0, 5, (N,))
        mask = torch.arange(N) % 2 == 0 if enqueue else None
        results = []
        for memory in memories:
            z = values.clone().requires_grad_()
            loss = memory(z, labels, enqueue_mask=mask)
            loss.backward()
            results.append((loss.detach(), z.grad))
        assert results[0][0] > 0
        assert_close(results[1][0], results[0][0], 1e-12, "loss")
        assert_close(results[1][1], results[0][1], 1e-12, "gradient")


def test_pairs_of_a_miner_are_refused():
    miners = pytest.importorskip("pytorch_metric_learning.miners")
    memory = losses.CrossBatchMemory(ours.SupConLoss(), D, 40, miner=miners.MultiSimilarityMiner())
    with pytest.raises(ours.ConfigError, match="without a miner"):
        memory(torch.randn(N, D), torch.arange(N) % 3)
