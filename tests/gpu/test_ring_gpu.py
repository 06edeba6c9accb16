"""The ring on one GPU: virtual ranks with side streams and events, and a process group of one over NCCL."""

from __future__ import annotations

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from tests.compare import assert_close
from tests.gpu.checks import peak_bytes
from tests.ring import virtual_checks
from tests.ring.cases import cut, joined, loss_and_gradients, make_tensors
from tests.ring.virtual import run_virtual
from torch.nn import functional as F

import tilewise as tw
from tilewise.ring.exchange import GroupExchange

pytestmark = pytest.mark.gpu
SPLITS = [([40], [8]), ([33, 18], [3, 9]), ([20, 0, 31], [6, 5, 0]), ([5, 17, 9, 12], [1, 0, 7, 3])]


@pytest.mark.parametrize("rows, negatives", SPLITS)
@pytest.mark.parametrize("backend", ["torch", "auto"])
def test_losses_over_virtual_ranks(rows, negatives, backend):
    how = {"options": tw.TileOptions(backend=backend, precision="highest")}
    virtual_checks.check_losses("cuda", torch.float32, 1e-5, rows=rows, negatives=negatives, **how)


@pytest.mark.parametrize("rows, negatives", SPLITS[1:3])
def test_losses_over_virtual_ranks_in_float64(rows, negatives):
    virtual_checks.check_losses("cuda", torch.float64, 1e-12, rows=rows, negatives=negatives)


def test_steps_in_a_row_without_waiting_for_the_device():
    virtual_checks.check_two_steps("cuda", world=4, rows=500)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_vocabulary_parallel_head(dtype, tolerance):
    virtual_checks.check_head("cuda", dtype, tolerance)


@pytest.mark.parametrize("loss", ["clip", "siglip", "nt_xent", "supcon"])
def test_large_bfloat16_shards_equal_one_process(loss):
    rows, width = [3000, 2500, 2692], 256
    tensors = make_tensors(sum(rows), 4, torch.bfloat16, "cuda")
    random = torch.Generator(device="cuda").manual_seed(1)
    for name in "ab":
        wide = torch.randn(sum(rows), width, device="cuda", generator=random)
        tensors[name] = F.normalize(wide, dim=1).bfloat16()
    want = loss_and_gradients(loss, tensors)

    def work(group):
        return loss_and_gradients(loss, cut(tensors, group.rank(), rows, [4, 0, 0]), group=group)

    got = joined([{name: value.float() for name, value in part.items()} for part in run_virtual(len(rows), work)])
    assert_close(got["loss"], want["loss"], 1e-5, "loss")
    for name in {"a", "b", "scale"} & want.keys():
        assert_close(got[name], want[name], 1e-2, name)  # bfloat16 gradients are rounded at 4e-3


def test_memory_of_a_virtual_rank_does_not_grow_with_their_number():
    rows, width = 4096, 1024

    def peak(world: int) -> float:
        features = [
            [F.normalize(torch.randn(rows, width, device="cuda"), dim=1).bfloat16() for _ in range(2)]
            for _ in range(world)
        ]

        def work(group):
            a, b = (x.clone().requires_grad_() for x in features[group.rank()])
            tw.clip_loss(a, b, 20.0, group=group, options=tw.TileOptions(workspace_mib=16)).backward()

        # ranks are threads: in one run their peaks need not meet
        return peak_bytes(lambda: run_virtual(world, work), times=6) / world

    peak(2)
    two, four = peak(2), peak(4)
    assert four <= 1.1 * two, f"{two / 2**20:.0f} and {four / 2**20:.0f} MiB per rank"


def test_a_group_of_one_over_nccl_is_no_group_and_gloo_is_refused(set_limits):
    set_limits(small=0)  # over a group a batch takes two passes, so the bits are those of two passes
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=60))
    try:
        tensors = make_tensors(33, 4, torch.float32, "cuda")
        want = loss_and_gradients("clip", tensors)
        got = loss_and_gradients("clip", tensors, group=dist.group.WORLD)
        assert all(torch.equal(got[name], want[name]) for name in want if name != "loss")
        exchange = GroupExchange(dist.group.WORLD)
        assert exchange.gather([3, -4]) == [[3, -4]]
        assert exchange.refuses(torch.device("cuda")) is None
        assert "not on cpu" in (exchange.refuses(torch.device("cpu")) or "")
        gloo = dist.new_group([0], backend="gloo")
        assert "gloo cannot send CUDA tensors" in (GroupExchange(gloo).refuses(torch.device("cuda")) or "")
    finally:
        dist.destroy_process_group()
