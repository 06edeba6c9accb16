"""A head whose vocabulary is spread over two ranks. The model is a small one of our own: ranks start faster."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from tests.compare import assert_close
from torch import nn

from tilewise.integrations.transformers import use_linear_cross_entropy

V, D, CUT = 101, 8, 37


class Model(nn.Module):
    """What `use_linear_cross_entropy` needs of a model, and no more."""

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


@pytest.mark.group
def test_a_head_spread_over_two_ranks(tmp_path):
    mp.spawn(rank_of_two, args=(str(tmp_path / "store"),), nprocs=2)
