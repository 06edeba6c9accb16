"""Two ranks: each has half of the head, half of the batch (DDP), or half of every weight (FSDP2).

The model is a small one of our own: ranks start faster.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tests.compare import assert_close
from tests.partitioned import partition
from tests.processes import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard

from tilewise.errors import ConfigError
from tilewise.integrations.transformers import use_linear_cross_entropy

V, D, CUT = 101, 8, 37


class Model(nn.Module):
    """The smallest model that `use_linear_cross_entropy` accepts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(V, D, dtype=torch.float64)
        self.body = nn.Linear(D, D, dtype=torch.float64)
        self.head = nn.Linear(D, V, dtype=torch.float64)

    def get_input_embeddings(self):
        return self.embedding

    def get_output_embeddings(self):
        return self.head

    def forward(self, input_ids, labels=None):
        logits = 2.0 * self.head(torch.tanh(self.body(self.embedding(input_ids))))
        loss = None if labels is None else F.cross_entropy(logits[:, :-1].reshape(-1, V), labels[:, 1:].flatten())
        return {"loss": loss, "logits": logits}


def steps(model):
    ids = torch.randint(V, (2, 9), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[1, 5:] = -100
    loss = model(ids, labels=labels)["loss"]
    loss.backward()
    return loss


def body_gradients(model):
    return torch.cat([model.embedding.weight.grad.flatten(), model.body.weight.grad.flatten()])


def rank_of_two(rank: int, path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    try:
        whole, model = Model(), Model()
        want = steps(whole)
        rows = slice(0, CUT) if rank == 0 else slice(CUT, V)
        model.head = nn.Linear(D, rows.stop - rows.start, dtype=torch.float64)
        with torch.no_grad():
            model.head.weight.copy_(whole.head.weight[rows])
            model.head.bias.copy_(whole.head.bias[rows])
        use_linear_cross_entropy(model, group=dist.group.WORLD)
        assert_close(steps(model), want, 1e-12, "loss")
        assert_close(body_gradients(model), body_gradients(whole), 1e-12, "body")
        assert_close(model.head.weight.grad, whole.head.weight.grad[rows], 1e-12, "weight")
        assert_close(model.head.bias.grad, whole.head.bias.grad[rows], 1e-12, "bias")
    finally:
        dist.destroy_process_group()


def test_the_model_alone():
    whole, model = Model(), Model()
    want = steps(whole)
    use_linear_cross_entropy(model)
    assert_close(steps(model), want, 1e-12, "loss")
    assert_close(body_gradients(model), body_gradients(whole), 1e-12, "body")


def test_a_head_that_is_partitioned_until_it_is_read():
    """As by DeepSpeed's ZeRO-3, which frees it between the head's forward and the loss."""
    whole, model = Model(), Model()
    want = steps(whole)
    use_linear_cross_entropy(model)
    partition(model.head)
    assert_close(steps(model), want, 1e-12, "loss")
    assert_close(body_gradients(model), body_gradients(whole), 1e-12, "body")
    assert_close(model.head.weight.grad, whole.head.weight.grad, 1e-12, "weight")


@pytest.mark.group
def test_a_head_sharded_over_two_ranks(tmp_path):
    run_ranks(rank_of_two, (str(tmp_path / "store"),), 2)


def all_gradients(model: nn.Module) -> torch.Tensor:
    found = [p.grad for p in model.parameters()]
    return torch.cat([(g.full_tensor() if hasattr(g, "full_tensor") else g).flatten() for g in found])


def half_of_the_batch(model: nn.Module, rank: int) -> torch.Tensor:
    ids = torch.randint(V, (2, 9), generator=torch.Generator().manual_seed(1 + rank))
    loss = model(ids, labels=ids)["loss"]
    loss.backward()
    return loss.detach()


def sharded(model: nn.Module, **head: object) -> nn.Module:
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(model.body, mesh=mesh)
    if head:
        fully_shard(model.head, mesh=mesh, **head)
    return fully_shard(model, mesh=mesh)


WRAPPED: dict[str, Callable[[nn.Module], nn.Module]] = {
    "DDP": nn.parallel.DistributedDataParallel,
    "FSDP2": sharded,
    "FSDP2, the head is a unit": lambda model: sharded(model, reshard_after_forward=True),
    "FSDP2, the head is a unit that keeps its weight": lambda model: sharded(model, reshard_after_forward=False),
}


def free(head: nn.Module, *_: object) -> None:
    """As FSDP's first version does, which leaves no shard in the module."""
    head.weight.data.untyped_storage().resize_(0)


def rank_with_half_of_the_batch(rank: int, path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    try:
        for name, wrap in WRAPPED.items():
            plain = Model()
            want_loss = half_of_the_batch(wrap(plain), rank)
            for after in (False, True):
                model = Model()
                if not after:
                    use_linear_cross_entropy(model)
                wrapped = wrap(model)
                if after:
                    use_linear_cross_entropy(model)
                assert_close(half_of_the_batch(wrapped, rank), want_loss, 1e-12, f"{name}, loss, {after}")
                assert_close(all_gradients(model), all_gradients(plain), 1e-12, f"{name}, {after}")
                assert model.forward.head_calls == 1
        model = Model()
        use_linear_cross_entropy(model)
        model.head.register_forward_hook(free)
        with pytest.raises(ConfigError, match="Use FSDP2 or ZeRO-3, or keep the head in the outermost FSDP unit"):
            half_of_the_batch(model, rank)
    finally:
        dist.destroy_process_group()


@pytest.mark.group
def test_data_parallel_and_fully_sharded(tmp_path):
    """Installed before or after wrapping. A head whose weight is freed before the loss, without shards, is an error."""
    run_ranks(rank_with_half_of_the_batch, (str(tmp_path / "store"),), 2)


class Style:
    """As a tensor-parallel style of transformers, which replaces the head's forward."""

    def __init__(self, input_layouts: object) -> None:
        self.input_layouts = input_layouts

    def install(self, head: nn.Module) -> None:
        forward = head.forward

        def tp_forward(hidden):
            assert self.input_layouts is not None
            return forward(hidden)

        tp_forward.__module__ = "transformers.distributed.tensor_parallel"
        head.forward = tp_forward


@pytest.mark.parametrize(
    ("layout", "words"),
    [(Shard(1), r"sharded hidden states \(S.*colwise_gather_output"), (Replicate(), "is a DTensor, got a plain")],
)
def test_other_heads_of_a_tp_plan_are_refused(layout, words):
    """`test_transformers_sharded` has the usual ones."""
    model = Model()
    Style(layout).install(model.head)
    with pytest.raises(ConfigError, match=words):
        use_linear_cross_entropy(model)
