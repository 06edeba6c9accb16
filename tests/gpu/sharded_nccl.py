"""Losses over sharded tensors (DTensor) with several ranks over real NCCL, compared with one process in float64.

    PYTHONPATH=src python -m tests.gpu.sharded_nccl [--ranks 2 3 4] [--device cuda] [--max-seconds 90]

All ranks use the first card, which NCCL 2.31 and newer can do with NCCL_MULTI_RANK_GPU_ENABLE=1. It checks every loss
with a classifier over every layout of `tests.ring.test_sharded_losses`, and a head that is an FSDP2 unit of its own, in
float32 and bfloat16. It prints the largest errors and ends with 0 only if all are within the bound. `--device cpu` runs
the same over gloo.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from tests.compare import relative_error
from tests.ring import test_sharded_losses as sharded
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import tilewise as tw
from tilewise.ops import limits

# Above 1.5 times the error of the same call in one process: sums over ranks have another order.
SLACK = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2**-7}
Tensors = dict[str, Tensor]


def cast(x: Tensors, dtype: torch.dtype, device: str) -> Tensors:
    """Numbers that are added to features get the type of the statistics."""
    narrow = {"hidden", "states", "weight", "teacher_hidden", "teacher_weight"}
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    types = {name: dtype if name in narrow else wide for name in x}
    return {name: (v.to(types[name]) if v.is_floating_point() else v).to(device) for name, v in x.items()}


class Worst:
    """The largest error beyond what the same call in one process has."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self.error, self.where, self.compared = dtype, 0.0, "nothing", 0

    def add(self, where: str, got: Tensor, plain: Tensor, want: Tensor) -> None:
        if want.numel() == 0 or not want.is_floating_point():
            return
        own, ours = relative_error(plain.cpu().double(), want), relative_error(got.cpu().double(), want)
        excess = ours - 1.5 * own
        self.compared += 1
        if not excess <= self.error:  # NaN is the worst
            self.error, self.where = excess, f"{where}: {ours:.2e}, in one process {own:.2e}"


def check_losses(device: str, world: int, dtype: torch.dtype) -> Worst:
    worst = Worst(dtype)
    rounded = cast(sharded.head_tensors(), dtype, device)
    exact = {name: v.cpu().double() if v.is_floating_point() else v.cpu() for name, v in rounded.items()}
    wants = {name: sharded.results(case, exact) for name, case in sharded.HEADS.items()}
    plain = {name: sharded.results(case, rounded) for name, case in sharded.HEADS.items()}
    for shape in ((world,), (2, 2)):
        if torch.Size(shape).numel() != world:
            continue
        mesh = init_device_mesh(device, shape)
        for layout, (of, rows, columns, ring) in sharded.LAYOUTS.items():
            if len(of) != len(shape):
                continue
            x = sharded.head_shards(mesh, rows, columns, rounded)
            with limits.changed(ring_head=0 if ring else 2**30):
                for name, case in sharded.HEADS.items():
                    got = sharded.results(case, x)
                    for key, want in wants[name].items():
                        where = f"{layout}, {name}, {key}"
                        worst.add(where, sharded.whole(got[key]), plain[name][key], want)
    return worst


def check_unit(device: str, world: int, dtype: torch.dtype) -> Worst:
    """Three steps of a head in a unit of its own, each rank with other tokens; one rank has ignored ones."""
    worst, rank, mesh = Worst(dtype), dist.get_rank(), init_device_mesh(device, (world,))
    draw = torch.Generator().manual_seed(0)
    head = nn.Linear(16, 37, bias=False)
    nn.init.normal_(head.weight, generator=draw)
    rows = torch.randn(3, world, 300, 16, generator=draw).to(dtype)
    target = torch.randint(37, (3, world, 300), generator=draw)
    target[:, 0, :100] = -100

    def gradient(weight: Tensor, hidden: Tensor, kind: torch.dtype) -> Tensor:
        leaf = weight.detach().requires_grad_()
        losses = [
            nn.functional.cross_entropy(hidden[i, j].to(kind) @ leaf.to(kind).T, target[i, j].to(hidden.device))
            for i in range(3)
            for j in range(world)
        ]
        (sum(losses) / world).backward()
        assert leaf.grad is not None
        return leaf.grad.cpu()

    want = gradient(head.weight.double(), rows.double(), torch.float64)
    plain = gradient(head.weight.to(device), rows.to(device), dtype)
    for ring_head in (0, 2**30):
        unit = nn.Linear(16, 37, bias=False)
        unit.load_state_dict(head.state_dict())
        fully_shard(unit.to(device), mesh=mesh)
        with limits.changed(ring_head=ring_head):
            for i in range(3):
                hidden = rows[i, rank].to(device)
                tw.linear_cross_entropy(hidden, unit.weight, target[i, rank].to(device)).backward()
        worst.add(f"unit, ring_head={ring_head}", unit.weight.grad.full_tensor(), plain, want)
    return worst


def rank_of(rank: int, world: int, device: str, path: str) -> None:
    os.environ["LOCAL_RANK"] = "0"
    torch.set_num_threads(1)
    how: dict[str, Any] = {"timeout": timedelta(seconds=60)}
    if device == "cuda":
        torch.cuda.set_device(0)
        how["device_id"] = torch.device("cuda:0")
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{path}", rank=rank, world_size=world, **how)
    try:
        for dtype in (torch.float32, torch.bfloat16):
            for name, check in (("losses", check_losses), ("unit", check_unit)):
                worst = check(device, world, dtype)
                assert worst.compared > 0
                kind = str(dtype).removeprefix("torch.")
                if rank == 0:
                    print(f"{world} ranks, {kind}, {name}: {worst.compared} results, worst {worst.where}", flush=True)
                assert worst.error <= SLACK[dtype], worst.where
    finally:
        dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--max-seconds", type=float, default=90.0, help="no further number of ranks is started then")
    args = parser.parse_args()
    began = time.monotonic()
    for world in args.ranks:
        if time.monotonic() - began > args.max_seconds:
            print(f"{world} ranks: not run, {args.max_seconds:g} s are over")
            return 1
        with tempfile.TemporaryDirectory() as folder:
            mp.start_processes(rank_of, (world, args.device, f"{folder}/store"), nprocs=world, start_method="spawn")
    print(f"all within the bound, {time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
