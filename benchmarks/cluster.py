"""Measure the ring, a sharded head and a training step over the ranks at hand, beside what a cost model predicts.

    torchrun --nproc-per-node 8 -m benchmarks.cluster --out cluster.json
    python -m benchmarks.cluster                     one process: the rate that the model starts from

The model takes two measured numbers: the time of the same work in one process, and the rate of the link, from a send to
the next rank. W ranks, n rows on each, d features, V classes, P weights:

    ring    the model of reproductions/cost_model.py with both rates
    head    work of n rows + (W - 1) / W * V d (bytes of a weight + 4) / link       gather and reduce-scatter
    step    encoders alone + ring + 2 (W - 1) / W * 4 P / link                      all-reduce of DDP
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from reproductions.cost_model import Loss, Machine, predict
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import tilewise as tw

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def seconds(work: Callable[[], Any], device: torch.device, repeats: int) -> float:
    """Median time of the slowest rank."""
    times = []
    for _ in range(repeats + 1):  # the first call compiles
        _wait(device)
        if dist.is_initialized():
            dist.barrier()
        start = time.perf_counter()
        work()
        _wait(device)
        times.append(time.perf_counter() - start)
    median = torch.tensor(times[1:], device=device).median()
    if dist.is_initialized():
        dist.all_reduce(median, dist.ReduceOp.MAX)
    return median.item()


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def link_gb_s(device: torch.device, size: int, repeats: int) -> float:
    """Rate of a send to the next rank while all ranks send."""
    rank, world = dist.get_rank(), dist.get_world_size()
    out, into = torch.zeros(size, device=device), torch.zeros(size, device=device)

    def hop() -> None:
        sends = dist.P2POp(dist.isend, out, (rank + 1) % world), dist.P2POp(dist.irecv, into, (rank - 1) % world)
        for work in dist.batch_isend_irecv(list(sends)):
            work.wait()

    return 4 * size / seconds(hop, device, repeats) / 1e9


def features(rows: int, width: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    return F.normalize(torch.randn(rows, width, device=device), dim=1).to(dtype).requires_grad_()


def measure(options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """All cases, measured and predicted, in milliseconds."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    group = dist.group.WORLD if world > 1 else None
    n, d, v, dtype = options.rows, options.width, options.classes, DTYPES[options.dtype]
    image, text = (features(n, d, device, dtype) for _ in range(2))
    weight, target = features(v, d, device, dtype), torch.randint(v, (n,), device=device)
    tower = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d)).to(device)

    def time_of(work: Callable[[], Any]) -> float:
        return seconds(work, device, options.repeats)

    def step(model: nn.Module, over: Any) -> None:
        tw.clip_loss(model(image.detach().float()), text.detach().float(), 10.0, group=over).backward()

    alone = {
        "ring": time_of(lambda: tw.clip_loss(image, text, 10.0, group=None).backward()),
        "head": time_of(lambda: tw.linear_cross_entropy(image, weight, target).backward()),
        "encoders": time_of(lambda: tower(image.detach().float()).sum().backward()),
    }
    rate = 8 * n * n * d / alone["ring"] / 1e12
    result: dict[str, Any] = {"world": world, "rate_tflops": rate, "alone_ms": {k: 1e3 * t for k, t in alone.items()}}
    if world == 1:
        return result
    link = link_gb_s(device, n * d, options.repeats)
    machine = Machine(
        name=str(device), rate_tflops=rate, block_overhead_s=0.0, ranks_per_node=world, node_gb_s=link, net_gb_s=link
    )
    ring = predict(world, n * world, machine, Loss(width=d, feature_bytes=dtype.itemsize)).step_s
    share = (world - 1) / world / (link * 1e9)
    mesh = init_device_mesh(device.type, (world,))
    sharded = distribute_tensor(weight.detach(), mesh, [Shard(0)]).requires_grad_()
    ddp = nn.parallel.DistributedDataParallel(tower)
    measured = {
        "ring": time_of(lambda: tw.clip_loss(image, text, 10.0, group=group).backward()),
        "head": time_of(lambda: tw.linear_cross_entropy(image, sharded, target).backward()),
        "step": time_of(lambda: step(ddp, group)),
    }
    weights = sum(p.numel() for p in tower.parameters())
    predicted = {
        "ring": ring,
        "head": alone["head"] + share * v * d * (dtype.itemsize + 4),
        "step": alone["encoders"] + ring + 2 * share * 4 * weights,
    }
    cases = {name: {"measured_ms": 1e3 * measured[name], "predicted_ms": 1e3 * predicted[name]} for name in measured}
    return result | {"link_gb_s": link, "cases": cases}


def report(result: dict[str, Any]) -> str:
    """The result as a Markdown table."""
    lines = [f"{result['world']} ranks, {result['transport']}, {result['device']}, {result['rate_tflops']:.3g} TFLOP/s"]
    if "cases" in result:
        lines += [
            f"link: {result['link_gb_s']:.3g} GB/s",
            "",
            "| case | measured ms | predicted ms |",
            "|---|---:|---:|",
        ]
        lines += [f"| {k} | {c['measured_ms']:.3g} | {c['predicted_ms']:.3g} |" for k, c in result["cases"].items()]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"rows": (8192, 512), "width": (512, 64), "classes": (128_000, 4000), "repeats": (10, 3)}  # CUDA, CPU
    cuda = torch.cuda.is_available()
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default[0 if cuda else 1])
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16" if cuda else "float32")
    parser.add_argument("--out", type=Path, help="a JSON file for the result")
    options = parser.parse_args(argv)
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    several = int(os.environ.get("WORLD_SIZE", 1)) > 1
    if several:
        dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
    torch.manual_seed(int(os.environ.get("RANK", 0)))
    about = {
        "device": torch.cuda.get_device_name(device) if cuda else "cpu",
        "transport": ("nccl" if cuda else "gloo") if several else "none",
        "torch": torch.__version__,
        "sizes": {name: getattr(options, name) for name in (*sizes, "dtype")},
    }
    result = about | measure(options, device)
    if int(os.environ.get("RANK", 0)) == 0:
        print(report(result), flush=True)
        if options.out is not None:
            options.out.write_text(json.dumps(result, indent=1) + "\n")
    if several:
        dist.destroy_process_group()
    return result


if __name__ == "__main__":
    main()
