"""Drop-ins over two ranks with unequal shards: the averaged gradient equals that of one process on all rows."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from tests.compare import assert_close
from tests.integrations.test_gist import gist_dense
from tests.processes import run_ranks
from torch import nn

from tilewise.errors import GroupError, ShapeError
from tilewise.integrations import lightly, open_clip
from tilewise.integrations import sentence_transformers as st

pytestmark = pytest.mark.group
SIZES, D = (3, 8), 6
FOUR = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(5, D, dtype=torch.float64) for _ in range(3))
        self.scale = nn.Parameter(torch.tensor(3.0, dtype=torch.float64))
        self.bias = nn.Parameter(torch.tensor(-2.0, dtype=torch.float64))


def clip(towers, rows, world, rank):
    loss = open_clip.ClipLoss(rank=rank, world_size=world)
    return loss(towers.layers[0](rows[0]), towers.layers[1](rows[1]), towers.scale)


def distilled(towers, rows, world, rank):
    loss = open_clip.DistillClipLoss(rank=rank, world_size=world)
    student = towers.layers[0](rows[0]), towers.layers[1](rows[1]), towers.scale
    contrastive, distill = loss(*student, rows[1], rows[2], 2.0)
    return contrastive + 3 * distill


def siglip(towers, rows, world, rank):
    loss = open_clip.SigLipLoss(rank=rank, world_size=world)
    return loss(towers.layers[0](rows[0]), towers.layers[1](rows[1]), towers.scale, towers.bias)


def views(towers, rows, world, rank):
    loss = lightly.NTXentLoss(0.3, gather_distributed=world > 1)
    return loss(towers.layers[0](rows[0]), towers.layers[0](rows[1]))


def ranking(directions, partition_mode="joint", **more):
    def run(towers, rows, world, rank):
        settings = {"directions": directions, "partition_mode": partition_mode, "gather_across_devices": True, **more}
        loss = st.MultipleNegativesRankingLoss(nn.Identity(), towers.scale, **settings)
        columns = [layer(part) for layer, part in zip(towers.layers, rows, strict=True)]
        return loss.compute_loss_from_embeddings(columns)

    return run


def gist(anchors, cached=False):
    """Guided by the inputs. Anchors are compared within a rank only, so with them one process has another loss."""

    def run(towers, rows, world, rank):
        kind = st.CachedGISTEmbedLoss if cached else st.GISTEmbedLoss
        model, guide = Columns(towers.layers), Columns([nn.Identity()] * 3)
        loss = kind(model, guide, 0.2, margin=0.1, contrast_anchors=anchors, gather_across_devices=world > 1)
        return loss([{"rows": part, "layer": index} for index, part in enumerate(rows)])

    return run


class Columns(nn.Module):
    """A layer for each column, as a model of sentence-transformers."""

    tokenizer = SimpleNamespace(get_vocab=dict, batch_decode=list)

    def __init__(self, layers) -> None:
        super().__init__()
        self.layers = layers if isinstance(layers, nn.ModuleList) else nn.ModuleList(layers)

    def forward(self, features):
        return {"sentence_embedding": self.layers[features["layer"]](features["rows"])}


CASES = {
    "ClipLoss": clip,
    "DistillClipLoss": distilled,
    "GIST": gist(anchors=False),
    "GIST, cached": gist(anchors=False, cached=True),
    "SigLipLoss": siglip,
    "lightly NTXentLoss": views,
    "ranking": ranking(("query_to_doc",)),
    "ranking, both directions": ranking(("query_to_doc", "doc_to_query"), "per_direction"),
    "ranking, all four directions": ranking(FOUR),
    "ranking, hardness": ranking(FOUR, hardness_mode="in_batch_negatives", hardness_strength=3.0),
    "ranking, hardness of hard negatives": ranking(
        ("query_to_doc",), hardness_mode="hard_negatives", hardness_strength=3.0
    ),
}


def gradients(case, rows, world, rank):
    towers = Towers()
    case(towers, rows, world, rank).backward()
    found = [p.grad if p.grad is not None else torch.zeros_like(p) for p in towers.parameters()]
    return torch.cat([grad.flatten() for grad in found])


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    world = len(SIZES)
    torch.manual_seed(1)
    every = torch.randn(3, sum(SIZES), 5, dtype=torch.float64)
    alone = {name: gradients(case, every, 1, 0) for name, case in CASES.items()}  # before the group exists
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world)
    start = sum(SIZES[:rank])
    for name, case in CASES.items():
        got = gradients(case, every[:, start : start + SIZES[rank]], world, rank)
        dist.all_reduce(got)
        assert_close(got / world, alone[name], 1e-12, name)
    check_anchors(every, start, rank)
    check_stored_scores(every, start, rank)
    check_bank(rank)
    with pytest.raises(GroupError, match=f"this process is rank {rank}"):
        clip(Towers(), every, world, 1 - rank)
    dist.destroy_process_group()


def check_anchors(every: torch.Tensor, start: int, rank: int) -> None:
    """GIST with anchors against anchors of the same rank: the mean over all rows, with all similarities."""
    towers = Towers()
    columns = [layer(part) for layer, part in zip(towers.layers, every, strict=True)]
    shard = torch.arange(len(SIZES)).repeat_interleave(torch.tensor(SIZES))
    gist_dense(columns, list(every), 0.2, "absolute", 0.1, True, True, shard).backward()
    want = torch.cat([layer.weight.grad.flatten() for layer in towers.layers])
    towers = Towers()
    gist(anchors=True)(towers, every[:, start : start + SIZES[rank]], len(SIZES), rank).backward()
    got = torch.cat([layer.weight.grad.flatten() for layer in towers.layers])
    dist.all_reduce(got)
    assert_close(got / len(SIZES), want, 1e-12)


def check_stored_scores(every: torch.Tensor, start: int, rank: int) -> None:
    """A cross-entropy of the user gets the scores with rows of all ranks. The batches must have one size."""
    rows = every[:, 3 * rank : 3 * rank + 3]
    loss = st.GISTEmbedLoss(Columns([nn.Identity()]), Columns([nn.Identity()]), 0.2, gather_across_devices=True)
    leaves = [column.clone().requires_grad_() for column in rows]
    want = loss.compute_loss_from_embeddings(leaves, list(rows))
    want_grads = torch.autograd.grad(want, leaves)
    del loss.cross_entropy_loss
    loss.cross_entropy_loss = lambda scores, labels: nn.functional.cross_entropy(scores, labels)
    got = loss.compute_loss_from_embeddings(leaves, list(rows))
    assert_close(got, want, 1e-12)
    for grad, want_grad in zip(torch.autograd.grad(got, leaves), want_grads, strict=True):
        assert_close(grad, want_grad, 1e-12)
    shard = list(every[:, start : start + SIZES[rank]])
    with pytest.raises(ShapeError, match="all ranks need batches of one size, got 3 to 8 rows"):
        loss.compute_loss_from_embeddings(shard, shard)


def check_bank(rank: int) -> None:
    """The second views of all ranks are added to the memory bank, in the same order on every rank."""
    loss = lightly.NTXentLoss(0.3, (10, D), gather_distributed=True).double()
    torch.manual_seed(rank)
    first, second = torch.randn(2, 4, D, dtype=torch.float64, requires_grad=True)
    loss(first, second).backward()
    parts = [torch.empty(4, D, dtype=torch.float64) for _ in SIZES]
    dist.all_gather(parts, nn.functional.normalize(second.detach(), dim=1))
    assert torch.equal(loss.bank[:8], torch.cat(parts))
    assert loss.place == 8


def test_two_ranks_have_the_gradient_of_one_process(tmp_path: Path) -> None:
    run_ranks(work, (str(tmp_path),), len(SIZES))
