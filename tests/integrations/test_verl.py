"""verl's head: values and gradients against logits in float64, alone and with the vocabulary split over two ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.compare import assert_close
from tests.processes import run_ranks
from torch import Tensor

from tilewise.errors import ConfigError, RangeError
from tilewise.integrations.verl import linear_cross_entropy

B, T, D, V = 2, 5, 7, 12
TEMPERATURE = 1.5


def inputs() -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    labels = torch.randint(0, V, (B, T), generator=generator)
    return draw(B, T, D).requires_grad_(), draw(V, D).requires_grad_(), labels, draw(B * T), draw(B * T)


def naive(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    log_p = (hidden.reshape(-1, D) @ weight.T / TEMPERATURE).log_softmax(-1)
    return log_p.gather(1, labels.reshape(-1, 1))[:, 0], -(log_p.exp() * log_p).sum(-1)


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_values_and_gradients(reduction: str) -> None:
    hidden, weight, labels, g, h = inputs()
    log_prob, entropy = linear_cross_entropy(hidden, weight, labels, TEMPERATURE, reduction)
    want, want_entropy = naive(hidden, weight, labels)
    if reduction != "none":
        want, g = getattr(want, reduction)(), torch.tensor(1.0)
    assert_close(log_prob, want, 1e-12)
    assert_close(entropy, want_entropy, 1e-12)
    got = torch.autograd.grad((log_prob * g).sum() + (entropy * h).sum(), (hidden, weight))
    exact = torch.autograd.grad((want * g).sum() + (want_entropy * h).sum(), (hidden, weight))
    for ours, theirs in zip(got, exact, strict=True):
        assert_close(ours, theirs, 1e-10)


def test_bad_arguments() -> None:
    hidden, weight, labels, *_ = inputs()
    with pytest.raises(RangeError, match="temperature is positive, got 0"):
        linear_cross_entropy(hidden, weight, labels, 0.0)
    with pytest.raises(ConfigError, match="no reduction 'avg'; choose one of none, sum, mean"):
        linear_cross_entropy(hidden, weight, labels, 1.0, "avg")


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=2)
    hidden, weight, labels, g, h = inputs()
    shard = weight.detach()[:5] if rank == 0 else weight.detach()[5:]
    shard.requires_grad_()
    log_prob, entropy = linear_cross_entropy(hidden, shard, labels, TEMPERATURE, "none", dist.group.WORLD)
    ((log_prob * g).sum() + (entropy * h).sum()).backward()
    torch.save([log_prob.detach(), entropy.detach(), hidden.grad, shard.grad], f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.group
def test_vocabulary_over_two_ranks(tmp_path: Path) -> None:
    """The gradients of the hidden states are parts: their sum is the whole, as verl expects."""
    run_ranks(work, (str(tmp_path),), 2)
    ranks = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2)]
    hidden, weight, labels, g, h = inputs()
    want, want_entropy = naive(hidden, weight, labels)
    ((want * g).sum() + (want_entropy * h).sum()).backward()
    for log_prob, entropy, _, _ in ranks:
        assert_close(log_prob, want, 1e-12)
        assert_close(entropy, want_entropy, 1e-12)
    assert_close(ranks[0][2] + ranks[1][2], hidden.grad, 1e-10)
    assert_close(torch.cat([ranks[0][3], ranks[1][3]]), weight.grad, 1e-10)
