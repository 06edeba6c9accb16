"""The cached step and the offload on a CUDA device: random state, autocast, prefetching, flat memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.compare import assert_close
from torch import Tensor, nn

from tilewise.cache import GradientCache, HostBatch, LazyBatch, cached_loss, cached_step
from tilewise.cache.offload import on_device

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
EXACT = 1e-6


@pytest.fixture(autouse=True)
def full_float32():
    """The two sides of a comparison multiply different shapes: TF32 would round them differently."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def tower(dropout: float = 0.3) -> nn.Module:
    layers = [nn.Linear(64, 128), nn.GELU(), nn.Dropout(dropout), nn.Linear(128, 32), nn.Dropout(dropout)]
    return nn.Sequential(*layers).cuda()


def contrast(a: Tensor, b: Tensor) -> Tensor:
    a, b = F.normalize(a.float(), dim=1), F.normalize(b.float(), dim=1)
    return F.cross_entropy(5 * a @ b.T, torch.arange(len(a), device=a.device))


def gradients(*modules: nn.Module) -> list[Tensor]:
    grads = [p.grad.clone() for module in modules for p in module.parameters()]
    for module in modules:
        module.zero_grad()
    return grads


def assert_same(got: list[Tensor], want: list[Tensor], tolerance: float = EXACT) -> None:
    assert len(got) == len(want) > 0
    for one, other in zip(got, want, strict=True):
        assert_close(one, other, tolerance)


def in_chunks(module: nn.Module, x: Tensor, size: int) -> Tensor:
    return torch.cat([module(part) for part in x.split(size)])


@pytest.mark.parametrize("where", ["device", "host", "host pinned", "host pins batch", "lazy"])
def test_dropout_on_the_device_is_replayed(where):
    torch.manual_seed(0)
    a, b = tower(), tower()
    x, y = torch.randn(50, 64), torch.randn(50, 64)
    torch.manual_seed(7)
    want = contrast(in_chunks(a, x.cuda(), 16), in_chunks(b, y.cuda(), 16))
    stream = torch.rand(4, device="cuda")
    want.backward()
    want_grads = gradients(a, b)

    inputs: list[Any] = {
        "device": lambda: [x.cuda(), y.cuda()],
        "host": lambda: [HostBatch(x, "cuda"), HostBatch(y, "cuda")],
        "host pinned": lambda: [HostBatch(x.pin_memory(), "cuda"), HostBatch(y.pin_memory(), "cuda")],
        "host pins batch": lambda: [HostBatch(x, "cuda", pin="batch"), HostBatch(y, "cuda", pin="batch")],
        "lazy": lambda: [
            LazyBatch(50, lambda first, last: x[first:last], "cuda"),
            LazyBatch(50, lambda first, last: y[first:last], "cuda"),
        ],
    }[where]()
    torch.manual_seed(7)
    got = cached_step([a, b], inputs, contrast, chunk_size=16)
    assert torch.equal(torch.rand(4, device="cuda"), stream)
    assert_close(got, want.detach(), EXACT)
    assert_same(gradients(a, b), want_grads)


def test_random_state_is_restored_after_a_later_backward():
    a, x = tower(), torch.randn(50, 64, device="cuda")
    value = cached_loss(a, [x, x], contrast, chunk_size=16)
    torch.manual_seed(3)
    want = torch.rand(4, device="cuda"), torch.rand(4)
    torch.manual_seed(3)
    value.backward()
    got = torch.rand(4, device="cuda"), torch.rand(4)
    assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backward_inside", [True, False])
def test_autocast_and_scaler(dtype, backward_inside):
    """Backward runs on another thread, where autocast must be entered again."""
    torch.manual_seed(0)
    a, x, y = tower(), torch.randn(48, 64, device="cuda"), torch.randn(48, 64, device="cuda")
    types = []
    a[0].register_forward_hook(lambda module, args, out: types.append(out.dtype))

    def run(make_loss, scaler):
        torch.manual_seed(7)
        with torch.autocast("cuda", dtype=dtype, cache_enabled=False):
            value = make_loss()
            if backward_inside:
                scaler.scale(value).backward()
        if not backward_inside:
            scaler.scale(value).backward()
        return value.detach(), gradients(a)

    def scaler():
        return torch.amp.GradScaler("cuda", init_scale=1024.0)

    want, want_grads = run(lambda: contrast(in_chunks(a, x, 16), in_chunks(a, y, 16)), scaler())
    got, got_grads = run(lambda: cached_loss(a, [x, y], contrast, chunk_size=16), scaler())
    assert_close(got, want, EXACT)
    assert_same(got_grads, want_grads, 1e-5)
    assert set(types) == {dtype}


def test_chunks_are_pinned_on_their_way_and_land_on_the_device():
    x = torch.randn(40, 64)
    assert not x.is_pinned()
    assert HostBatch(x, "cuda").load(slice(0, 8)).is_pinned()
    assert HostBatch(x, "cuda", pin="batch").tree.is_pinned()
    pinned = x.pin_memory()
    assert HostBatch(pinned, "cuda").load(slice(8, 16)).data_ptr() == pinned[8].data_ptr()  # no second copy
    seen = []

    def encoder(x: Tensor) -> Tensor:
        seen.append(x.device.type)
        return x[:, :4]

    GradientCache(encoder, lambda z: z.sum(), chunk_size=8, offload="cuda").encode(x)
    assert seen == ["cuda"] * 5


def test_the_next_chunk_is_copied_while_this_one_is_in_work(monkeypatch):
    """By the device's clock: the copy of chunk i + 2 ends before the work on chunk i does.

    A copy that waited for the work, or stood in the same queue, never would, however often it is tried. Beside other
    processes a copy may come late once, so the rounds are three.
    """
    copies: list[torch.cuda.Event] = []

    class Spy(torch.cuda.Stream):
        def record_event(self, event=None):
            event = super().record_event(event or torch.cuda.Event(enable_timing=True))
            if self.cuda_stream != 0:  # the default stream is the one that computes
                copies.append(event)
            return event

    monkeypatch.setattr("tilewise.cache.offload.torch.cuda.Stream", Spy)
    batch = HostBatch(torch.randn(64, 1 << 16), "cuda", pin="batch")
    want = batch.tree.double().sum().item()

    def milliseconds_early() -> list[float]:
        copies.clear()
        origin, works = torch.cuda.Event(enable_timing=True), []
        origin.record()
        total = torch.zeros((), device="cuda", dtype=torch.float64)
        for chunk in on_device(4, lambda index: batch.load(slice(16 * index, 16 * index + 16)), batch.device):
            torch.cuda._sleep(500_000_000)  # some tenths of a second of work on this chunk
            total += chunk.sum(dtype=torch.float64)
            works.append(torch.cuda.Event(enable_timing=True))
            works[-1].record()
            del chunk
        assert total.item() == pytest.approx(want, rel=1e-6, abs=1e-3)  # each chunk was there when it was used
        assert len(copies) == 4
        ends = [[origin.elapsed_time(event) for event in events] for events in (works, copies)]
        return [work - copy for work, copy in zip(ends[0][:2], ends[1][2:], strict=True)]

    rounds = []
    while len(rounds) < 3 and not (rounds and min(rounds[-1]) > 0):
        rounds.append(milliseconds_early())
    assert min(rounds[-1]) > 0, f"milliseconds from the copy of chunk i + 2 to the end of the work on chunk i: {rounds}"


def peak_bytes(rows: int, offload: bool) -> int:
    """Of a step on images of 12 KiB with a tower whose activations outweigh them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12_288, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 16)).cuda()
    images = torch.randint(0, 255, (rows, 12_288), dtype=torch.uint8)

    def encode(x: Tensor) -> Tensor:
        return model(x.float() / 255)

    step = GradientCache(encode, lambda z: z.square().mean(), chunk_size=256, offload="cuda" if offload else None)
    batch = images if offload else images.cuda()
    for _ in range(2):  # the first step also allocates gradients
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        step(batch)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def test_peak_memory_does_not_grow_with_an_offloaded_batch():
    rows = 2_048
    small, large = peak_bytes(rows, offload=True), peak_bytes(4 * rows, offload=True)
    representations = 3 * rows * 16 * 4
    # First pass, joined, gradient, and what the loss saves; each allocation is rounded up.
    assert large - small <= 6 * representations + 2**20
    images = 3 * rows * 12_288
    assert peak_bytes(4 * rows, offload=False) - peak_bytes(rows, offload=False) > 0.9 * images


def test_at_most_three_chunks_are_on_the_device():
    chunk = 4 << 20
    batch = HostBatch(torch.zeros(64, chunk // 4), "cuda")
    torch.cuda.synchronize()
    start = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for rows in on_device(64, lambda index: batch.load(slice(index, index + 1)), batch.device):
        torch.cuda._sleep(2_000_000)
        rows.add_(1)
        del rows
    torch.cuda.synchronize()
    assert 2 * chunk <= torch.cuda.memory_stats()["active_bytes.all.peak"] - start <= 3 * chunk
