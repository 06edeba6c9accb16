"""CLIP over several processes: each holds a shard of the batch, and the loss is that of the whole batch.

torchrun --nproc-per-node 2 examples/several_processes.py     # two CPU cores; GPUs need no other code
"""

import argparse
import os

import torch
import torch.distributed as dist
from contrastive import Towers, tensors
from torch.nn.parallel import DistributedDataParallel

import tilewise as tw
from tilewise.train.icons import load_icons


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=150)
    steps = parser.parse_args(argv).steps
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group()  # NCCL for GPUs, gloo for CPUs
    rank, world, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    torch.manual_seed(0)  # every rank starts from the same weights and draws the same batches
    icons = load_icons()
    (pictures, words), new = tensors(icons.split("train")), [t.to(device) for t in tensors(icons.split("test"))]
    model = DistributedDataParallel(Towers().to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(steps + 1):
        batch = torch.randint(len(words), (1024,))
        own = batch.chunk(world)[rank]  # this rank's shard; each row still meets all 1024 columns
        features = model(pictures[own].to(device), words[own].to(device))
        loss = tw.clip_loss(*features, group=group)
        if step % max(1, steps // 3) == 0:
            shown = loss.detach().clone()
            dist.all_reduce(shown, dist.ReduceOp.SUM)
            with torch.no_grad():
                image, text, _ = model.module(*new)
                whole = tw.clip_loss(*model.module(pictures[batch].to(device), words[batch].to(device)))
            ranks = tw.retrieval_ranks(text.chunk(world)[rank], image.chunk(world)[rank], group=group)
            hits = torch.stack([(ranks < 10).sum(), torch.tensor(len(ranks), device=device)])
            dist.all_reduce(hits)
            if rank == 0:
                print(f"step {step}: loss {shown / world:.4f} of {world} ranks, {whole:.4f} in one process; "
                      f"recall at 10: {hits[0] / hits[1]:.1%}", flush=True)  # fmt: skip
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    del model  # DDP keeps the group until it is gone
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
