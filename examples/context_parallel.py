"""A small Llama with context parallelism: each rank has a part of every sequence. Its losses are those of one process.

python examples/context_parallel.py                                              # one process
torchrun --nproc-per-node 2 examples/context_parallel.py --layout zigzag         # or contiguous, ulysses
"""

import argparse
import os
from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from language_model import read_tokens
from llama import Llama, causal, shown_loss
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.nn.functional import all_to_all

import tilewise as tw


def positions(length: int, rank: int, world: int, layout: str) -> Tensor:
    """The positions of this rank. "zigzag" pairs an early with a late piece, so that all ranks attend equally often."""
    if layout == "zigzag":
        pieces = torch.arange(length).chunk(2 * world)
        return torch.cat([pieces[rank], pieces[-1 - rank]])
    return torch.arange(length).chunk(world)[rank]


def ring(q: Tensor, k: Tensor, v: Tensor, position: Tensor) -> Tensor:
    """The keys of all ranks, gathered. Ring attention has the same result and meets them one block at a time."""
    world = dist.get_world_size()
    k, v, others = (torch.cat(sent([x] * world), dim) for x, dim in ((k, 2), (v, 2), (position, 0)))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=others <= position[:, None])


def ulysses(q: Tensor, k: Tensor, v: Tensor, position: Tensor) -> Tensor:
    """Whole sequences and some of the heads on each rank, while it attends."""
    world = dist.get_world_size()
    q, k, v = (torch.cat(sent(x.chunk(world, 1)), 2) for x in (q, k, v))
    return torch.cat(sent(causal(q, k, v, position).chunk(world, 2)), 1)


def sent(parts: Sequence[Tensor]) -> Sequence[Tensor]:
    """One part to each rank, and one from each, with gradients."""
    parts = [part.contiguous() for part in parts]
    return all_to_all([torch.empty_like(part) for part in parts], parts)


def main(argv: list[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--layout", default="contiguous", choices=["contiguous", "zigzag", "ulysses"])
    options = parser.parse_args(argv)
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)  # every rank starts from the same weights and draws the same batches
    pieces, words = read_tokens(vocabulary=2_000)
    model, losses = Llama(len(words)).to(device), []
    if world > 1:
        dist.init_process_group(device_id=device if device != "cpu" else None)
        for block in model.blocks:
            block.attend = ulysses if options.layout == "ulysses" else ring
        fully_shard(model.head)
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    own = positions(pieces.shape[1], rank, world, options.layout).to(device)
    for step in range(options.steps):
        tokens = pieces[torch.randint(len(pieces), (8,))].to(device)
        targets = F.pad(tokens[:, 1:], (0, 1), value=-100)  # shifted before they are cut
        targets[targets == 0] = -100  # rare words are not learned, so ranks have different numbers of tokens
        loss = tw.linear_cross_entropy(model(tokens[:, own], own), model.head.weight, targets[:, own], reduction="sum")
        loss = loss / (targets != -100).sum()  # of the whole batch
        optimizer.zero_grad()
        (world * loss).backward()  # FSDP2 averages gradients over the ranks
        optimizer.step()
        losses.append(shown_loss(loss, step, options.steps, rank, world))
    if world > 1:
        dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main()
