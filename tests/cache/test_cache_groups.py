"""Cached steps over ranks: gradients equal one process on the whole batch, and are reduced once per step.

The ranks are processes with gloo on the CPU. One start per world size runs all cases, for starting is slow.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tests.compare import assert_close
from tests.processes import run_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils._python_dispatch import TorchDispatchMode

import tilewise
from tilewise.cache import Encoder, GradientCache
from tilewise.errors import ConfigError, GradientError

EXACT = 1e-6
pytestmark = pytest.mark.group


class GatherRows(torch.autograd.Function):
    """Gather the rows of all ranks, in rank order. Shards may have different lengths."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sizes: list[int]) -> Tensor:
        first = sum(sizes[: dist.get_rank()])
        ctx.own = slice(first, first + len(rows))
        full = rows.new_zeros(sum(sizes), *rows.shape[1:])
        full[ctx.own] = rows
        dist.all_reduce(full)
        return full

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        total = grad.clone()
        dist.all_reduce(total)  # every rank has the whole loss, so the sum is W times its gradient
        return total[ctx.own], None


class Contrast(nn.Module):
    def __init__(self, sizes: list[int] | None = None) -> None:
        super().__init__()
        self.log_scale, self.sizes, self.calls = nn.Parameter(torch.tensor(1.0)), sizes, 0

    def forward(self, a: Tensor, b: Tensor, scale: Tensor | None = None) -> Tensor:
        self.calls += 1
        if self.sizes is not None:
            a, b = GatherRows.apply(a, self.sizes), GatherRows.apply(b, self.sizes)
        scale = self.log_scale.exp() if scale is None else scale
        a, b = F.normalize(a, dim=1), F.normalize(b, dim=1)  # otherwise the gradient of the last bias is zero
        return F.cross_entropy(scale * a @ b.T, torch.arange(len(a)))


def tower(seed: int, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Dropout(dropout), nn.Linear(10, 4))


class Counter:
    """A DDP communication hook that averages and counts."""

    def __init__(self, module: DDP) -> None:
        self.reductions = 0
        module.register_comm_hook(self, Counter.hook)

    @staticmethod
    def hook(self, bucket):
        self.reductions += 1
        work = dist.all_reduce(bucket.buffer() / dist.get_world_size(), async_op=True)
        return work.get_future().then(lambda future: future.value()[0])


def grads_of(*modules: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for module in modules for p in module.parameters()]


def assert_same(got: list[Tensor], want: list[Tensor]) -> None:
    assert len(got) == len(want) > 0
    for one, other in zip(got, want, strict=True):
        assert_close(one, other, EXACT)


def averaged(grads: list[Tensor]) -> list[Tensor]:
    for grad in grads:
        dist.all_reduce(grad)
        grad /= dist.get_world_size()
    return grads


def shards(sizes: list[int]) -> tuple[Tensor, Tensor, slice]:
    """The whole batch, equal on all ranks, and the rows of this rank."""
    torch.manual_seed(3)
    x, y = torch.randn(sum(sizes), 6), torch.randn(sum(sizes), 6)
    first = sum(sizes[: dist.get_rank()])
    return x, y, slice(first, first + sizes[dist.get_rank()])


def case_two_towers_on_uneven_shards(rank: int, world: int) -> None:
    sizes = [5 + 3 * r for r in range(world)]  # the ranks also have different numbers of chunks
    x, y, own = shards(sizes)
    a, b, loss = tower(1), tower(2), Contrast()
    want_loss = loss(a(x), b(y))
    want_loss.backward()
    want = grads_of(a, b, loss)

    da, db, loss = DDP(tower(1)), DDP(tower(2)), Contrast(sizes)
    counters = [Counter(da), Counter(db)]
    got_loss = GradientCache([da, db], loss, chunk_size=[2, 3])(x[own], y[own])
    assert_close(got_loss, want_loss, EXACT)
    assert_same(grads_of(da, db) + averaged(grads_of(loss)), want)
    assert [c.reductions for c in counters] == [1, 1]
    assert loss.calls == 1


def wrappings(module: nn.Module) -> dict[str, Any]:
    return {
        "module": module,
        "function": [lambda x: module(x), lambda x, inner=module: inner(x)],
        "described": Encoder(lambda x: module(x), (module,)),
    }


def case_shared_tower_and_functions(rank: int, world: int) -> None:
    sizes = [4] * world
    x, y, own = shards(sizes)
    a, loss = tower(1), Contrast()
    loss(a(x), a(y)).backward()
    want = grads_of(a)
    for wrap in ("module", "function", "described"):
        shared, loss = DDP(tower(1)), Contrast(sizes)
        counter = Counter(shared)
        encoders = wrappings(shared)[wrap]
        for step in range(2):  # the second step checks the state of DDP after the first
            shared.zero_grad()
            GradientCache(encoders, loss, chunk_size=2)(x[own], y[own])
            assert_same(grads_of(shared), want)
            assert counter.reductions == step + 1, wrap


def case_settings_of_ddp(rank: int, world: int) -> None:
    sizes = [5] * world
    x, y, own = shards(sizes)
    a, loss = tower(1), Contrast()
    loss(a(x), a(y)).backward()
    for setting in ("find_unused_parameters", "gradient_as_bucket_view", "static_graph"):
        shared = DDP(tower(1), **{setting: True})
        step = GradientCache(shared, Contrast(sizes), chunk_size=2)
        if setting == "static_graph":
            with pytest.raises(ConfigError, match="in its first backward"):
                step(x[own], y[own])
            GradientCache(shared, Contrast(sizes), chunk_size=2, sync="every")(x[own], y[own])
        for _ in range(3):
            shared.zero_grad()
            step(x[own], y[own])
            assert_same(grads_of(shared), grads_of(a))


def case_sync_in_every_chunk(rank: int, world: int) -> None:
    sizes = [4] * world
    x, y, own = shards(sizes)
    a, loss = tower(1), Contrast()
    loss(a(x), a(y)).backward()
    shared = DDP(tower(1))
    counter = Counter(shared)
    GradientCache(shared, Contrast(sizes), chunk_size=2, sync="every")(x[own], y[own])
    assert_same(grads_of(shared), grads_of(a))
    assert counter.reductions == 4


def case_accumulation_under_no_sync(rank: int, world: int) -> None:
    sizes = [4] * world
    x, y, own = shards(sizes)
    a, loss = tower(1), Contrast()
    for swap in (False, True):
        (loss(*((a(y), a(x)) if swap else (a(x), a(y)))) / 2).backward()
    shared, loss = DDP(tower(1)), Contrast(sizes)
    counter = Counter(shared)
    step = GradientCache(shared, loss, chunk_size=2)
    with shared.no_sync():
        step(x[own], y[own], backward_scale=0.5)
    assert counter.reductions == 0
    step(y[own], x[own], backward_scale=0.5)
    assert counter.reductions == 1
    assert_same(grads_of(shared), grads_of(a))


class WithScale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.log_scale = tower(1), nn.Parameter(torch.tensor(0.5))

    def forward(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.body(left), self.body(right), self.log_scale.exp()


def case_scale_inside_the_model_and_a_later_backward(rank: int, world: int) -> None:
    sizes = [4] * world
    x, y, own = shards(sizes)
    model = WithScale()
    Contrast()(*model(x, y)).backward()
    wrapped, loss = DDP(WithScale()), Contrast(sizes)
    loss.log_scale.requires_grad_(False)
    counter = Counter(wrapped)
    for step in range(2):
        wrapped.zero_grad()
        value = GradientCache(wrapped, lambda rep: loss(*rep), chunk_size=3).loss((x[own], y[own]))
        (2 * value).backward()
        assert_same(grads_of(wrapped), [2 * g for g in grads_of(model)])
        assert counter.reductions == step + 1


def case_dropout_differs_by_rank_and_is_replayed(rank: int, world: int) -> None:
    sizes = [5] * world
    x, y, own = shards(sizes)
    plain, loss = tower(1, dropout=0.4), Contrast(sizes)
    torch.manual_seed(100 + rank)
    reps = [torch.cat([plain(part) for part in side[own].split(2)]) for side in (x, y)]
    loss(*reps).backward()
    want, stream = averaged(grads_of(plain)), torch.rand(3)
    shared, loss = DDP(tower(1, dropout=0.4)), Contrast(sizes)
    torch.manual_seed(100 + rank)
    GradientCache(shared, loss, chunk_size=2)(x[own], y[own])
    assert_same(grads_of(shared), want)
    assert torch.equal(torch.rand(3), stream)


def case_batch_norm_under_ddp(rank: int, world: int) -> None:
    torch.manual_seed(4)
    model = DDP(nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)))
    step = GradientCache(model, lambda z: (z @ z.T).logsumexp(1).mean(), chunk_size=3)
    for _ in range(2):
        step(torch.randn(9, 6))
    assert model.module[1].num_batches_tracked == 6


def case_reduction_that_would_not_run_is_refused(rank: int, world: int) -> None:
    wrapped = DDP(tower(1))
    x = torch.randn(4, 6)
    x[2:] = -100

    def encoder(x: Tensor) -> Tensor:
        return wrapped(x) if x.mean() > -50 else torch.zeros(len(x), 4)

    with pytest.raises(GradientError, match="reduction would not run"):
        GradientCache(encoder, lambda z: z.square().mean(), chunk_size=2)(x)


def case_the_ring_under_the_loss(rank: int, world: int) -> None:
    """The loss communicates in forward and in backward."""

    def clip(a: Tensor, b: Tensor, group: Any) -> Tensor:
        return tilewise.clip_loss(F.normalize(a, dim=1), F.normalize(b, dim=1), 5.0, group=group)

    sizes = [5 + 2 * r for r in range(world)]
    x, y, own = shards(sizes)
    a, b = tower(1), tower(2)
    clip(a(x), b(y), None).backward()
    da, db = DDP(tower(1)), DDP(tower(2))
    counters = [Counter(da), Counter(db)]
    GradientCache([da, db], clip, chunk_size=3)(x[own], y[own], group=dist.group.WORLD)
    assert_same(grads_of(da, db), grads_of(a, b))
    assert [c.reductions for c in counters] == [1, 1]


class Reductions(TorchDispatchMode):
    """Count the reduce-scatters that are started inside."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += "reduce_scatter" in str(func)
        return func(*args, **(kwargs or {}))


def case_fsdp2(rank: int, world: int) -> None:
    from torch.distributed.fsdp import fully_shard

    sizes = [6] * world
    x, y, own = shards(sizes)
    a, b, loss = tower(1), tower(2), Contrast()
    for _ in range(2):
        loss(a(x), b(y)).backward()
    want = grads_of(a, b)

    mesh = dist.device_mesh.init_device_mesh("cpu", (world,))

    def run(sync: str, accumulate: str) -> tuple[list[Tensor], int]:
        fa, fb = tower(1), tower(2)
        for module in (fa[0], fa, fb):  # nested and plain
            fully_shard(module, mesh=mesh)
        step = GradientCache([fa, fb], Contrast(sizes), chunk_size=2, sync=sync)
        with Reductions() as traffic:
            for module in (fa, fb):
                module.set_requires_gradient_sync(accumulate == "reduce in both steps")
            step(x[own], y[own])
            for module in (fa, fb):
                module.set_requires_gradient_sync(True)
            step(x[own], y[own])
        return [p.grad.full_tensor() for module in (fa, fb) for p in module.parameters()], traffic.count

    # Three groups of parameters, three chunks.
    for sync, accumulate, reductions in [
        ("last", "reduce in both steps", 3 * 2),
        ("last", "reduce in the second", 3),
        ("every", "reduce in both steps", 3 * 3 * 2),
    ]:
        got, counted = run(sync, accumulate)
        assert_same(got, want)
        assert counted == reductions, (sync, accumulate, counted)


def case_steps_of_optimizers(rank: int, world: int) -> None:
    """Steps between backward and the next loss are accepted, those between a loss and its backward are not."""
    from torch.distributed.fsdp import fully_shard

    x, y, own = shards([6] * world)
    mesh = dist.device_mesh.init_device_mesh("cpu", (world,))

    def plain() -> nn.Module:
        return nn.Sequential(tower(1), nn.BatchNorm1d(4))

    def sharded(**how: bool) -> nn.Module:
        module = tower(1)
        for part in (module[0], module):
            fully_shard(part, mesh=mesh, **how)
        return module

    for make in (
        lambda: DDP(plain()),
        lambda: DDP(plain(), gradient_as_bucket_view=True),
        sharded,
        lambda: sharded(reshard_after_forward=False),
        lambda: sharded(reshard_after_forward=True),
    ):
        model = make()
        optimizer = torch.optim.AdamW(model.parameters(), 0.1)

        def loss(z: Tensor) -> Tensor:
            return (z @ z.T).logsumexp(1).mean()

        cache = GradientCache(model, loss, chunk_size=2)
        for step in range(3):
            optimizer.zero_grad()
            losses = [cache.loss(part) for part in (x[own], y[own])]
            sum(losses).backward() if step else [value.backward() for value in losses]
            optimizer.step()
            with torch.no_grad():
                model(x[own])  # an evaluation leaves FSDP's root gathered
        late = cache.loss(x[own])
        cache(y[own])
        optimizer.step()
        with pytest.raises(GradientError, match="changed in place"):
            late.backward()


CASES: list[Callable[[int, int], None]] = [value for name, value in list(globals().items()) if name.startswith("case_")]


def one_rank(rank: int, world: int, folder: str) -> None:
    torch.set_num_threads(1)
    patience = timedelta(seconds=300)  # a rank that blocks fails the test
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world, timeout=patience)
    for case in CASES:
        try:
            case(rank, world)
        except Exception as error:
            raise AssertionError(f"{case.__name__} on rank {rank} of {world}: {error}") from error
        Path(folder, f"{case.__name__}.{rank}").touch()
    with contextlib.suppress(RuntimeError):
        dist.destroy_process_group()


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_agree_with_one_process(world, tmp_path):
    run_ranks(one_rank, (world, str(tmp_path)), world)
    passed = {path.name for path in tmp_path.iterdir()} - {"meet"}
    assert passed == {f"{case.__name__}.{rank}" for case in CASES for rank in range(world)}
