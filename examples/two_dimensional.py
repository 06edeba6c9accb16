"""A small Llama with data and tensor parallelism, whose head stays sharded. Its losses are those of one process.

python examples/two_dimensional.py                            # one process
torchrun --nproc-per-node 4 examples/two_dimensional.py       # 2 x 2 CPU cores; GPUs need no other code
"""

import argparse
import os

import torch
import torch.distributed as dist
from language_model import read_tokens
from llama import Llama, shown_loss
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import tilewise as tw


def shard(model: Llama, mesh: DeviceMesh) -> None:
    """First tensor parallelism, then FSDP2. The head is a unit of its own: its weight is a DTensor on both."""
    columns, rows, tp, dp = ColwiseParallel(), RowwiseParallel(), mesh["tp"], mesh["dp"]
    layers = dict.fromkeys(("q", "k", "v", "gate", "up"), columns) | dict.fromkeys(("o", "down"), rows)
    for block in model.blocks:
        fully_shard(parallelize_module(block, tp, layers), mesh=dp)
    parallelize_module(model, tp, {"table": RowwiseParallel(input_layouts=Replicate()), "head": columns})
    fully_shard(model.head, mesh=dp)
    fully_shard(model, mesh=dp)


def main(argv: list[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--tensor-parallel", type=int, default=2, help="ranks that share each batch")
    options = parser.parse_args(argv)
    rank, local = (int(os.environ.get(name, 0)) for name in ("RANK", "LOCAL_RANK"))  # of torchrun
    world = int(os.environ.get("WORLD_SIZE", 1))
    device = torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.manual_seed(0)  # every rank starts from the same weights and draws the same batches
    pieces, words = read_tokens(vocabulary=2_000)
    model, losses, copies, own = Llama(len(words)).to(device), [], 1, 0
    if world > 1:  # makes the group as well: NCCL for GPUs, gloo for CPUs
        shape = (world // options.tensor_parallel, options.tensor_parallel)
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=("dp", "tp"))
        shard(model, mesh)
        copies, own = mesh["dp"].size(), mesh["dp"].get_local_rank()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, foreach=False)  # norms are on "dp" only, others on both
    for step in range(options.steps):
        batch = pieces[torch.randint(len(pieces), (8,))].chunk(copies)[own].to(device)
        loss = tw.linear_cross_entropy(model(batch), model.head.weight, batch, shift=1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(shown_loss(loss / world, step, options.steps, rank, world))
    if world > 1:
        dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main()
