"""Memory: activations and inputs of one chunk, for any batch size."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from tests.compare import assert_close
from torch import Tensor, nn

from tilewise.cache import BatchSource, GradientCache, HostBatch, LazyBatch, cached_encode, cached_step
from tilewise.errors import DeviceError, GradientError, ShapeError


class SavedBytes(torch.autograd.graph.saved_tensors_hooks):
    """Bytes that graphs save for backward: current and peak."""

    def __init__(self) -> None:
        self.now = self.peak = 0

        class Held:
            def __init__(held, tensor: Tensor) -> None:
                held.tensor, held.size = tensor, tensor.numel() * tensor.element_size()
                self.now += held.size
                self.peak = max(self.peak, self.now)

            def __del__(held) -> None:
                self.now -= held.size

        super().__init__(Held, lambda held: held.tensor)


def deep_tower() -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(6):
        layers += [nn.Linear(32, 32), nn.GELU(), nn.Dropout(0.1)]
    return nn.Sequential(*layers, nn.Linear(32, 2))


def sum_of_squares(z: Tensor) -> Tensor:
    return z.square().sum()


def peak_bytes(rows: int, chunk_size: int | None) -> int:
    tower, x = deep_tower(), torch.randn(rows, 32)
    saved = SavedBytes()
    with saved:
        if chunk_size is None:
            sum_of_squares(tower(x)).backward()
        else:
            cached_step(tower, [x], sum_of_squares, chunk_size=chunk_size)
    assert saved.now == 0
    return saved.peak


def test_activations_are_those_of_one_chunk():
    representation = 2 * 4  # bytes of a row, saved by the loss
    small, large = peak_bytes(64, 16), peak_bytes(512, 16)
    assert large - small <= (512 - 64) * representation
    assert large < 1.5 * small
    assert peak_bytes(512, None) > 7 * peak_bytes(64, None)  # the measurement includes activations
    assert peak_bytes(64, None) > 2.5 * small  # not 4 times, because the weights are saved too


def test_representations_keep_no_graph_of_the_encoder():
    tower = deep_tower()
    saved = SavedBytes()
    with saved:
        z = cached_encode(tower, torch.randn(64, 32), chunk_size=16)
        assert z.requires_grad
        assert saved.now == 0


def test_a_step_keeps_no_memory():
    """No reference cycle keeps representations or the batch alive."""
    tower, x = deep_tower(), torch.randn(64, 32)
    gc.collect()
    gc.disable()
    try:
        step = GradientCache(tower, sum_of_squares, chunk_size=16)
        z = step.encode(x)[0]
        alive = [weakref.ref(z), weakref.ref(x)]
        z.sum().backward()
        del z, x
        assert [ref() for ref in alive] == [None, None]
        y = torch.randn(64, 32)
        z = step.encode(y)[0]  # never differentiated
        alive = [weakref.ref(z), weakref.ref(y)]
        del z, y
        assert [ref() for ref in alive] == [None, None]
    finally:
        gc.enable()


class Images:
    """Rows made on demand, with random augmentation. Counts the chunks that are alive."""

    def __init__(self, rows: int) -> None:
        self.pixels, self.loads, self.alive, self.most = torch.randn(rows, 32), [], 0, 0

    def decode(self, first: int, last: int) -> Tensor:
        self.loads.append((first, last))
        chunk = self.pixels[first:last] + 0.1 * torch.randn(last - first, 32)
        self.alive += 1
        self.most = max(self.most, self.alive)
        weakref.finalize(chunk, self.freed)
        return chunk

    def freed(self) -> None:
        self.alive -= 1


def gradients(module: nn.Module) -> list[Tensor]:
    grads = [p.grad.clone() for p in module.parameters()]
    module.zero_grad()
    return grads


def test_a_lazy_batch_is_made_twice_with_the_same_augmentation():
    torch.manual_seed(0)
    tower, images = deep_tower(), Images(40)
    torch.manual_seed(5)
    reps = torch.cat([tower(images.decode(first, first + 8)) for first in range(0, 40, 8)])
    want_loss, stream = (reps @ reps.T).logsumexp(1).mean(), torch.rand(3)
    want_loss.backward()
    want = gradients(tower)
    del reps, want_loss
    images.loads.clear()
    torch.manual_seed(5)
    cached_step(tower, [LazyBatch(40, images.decode)], lambda z: (z @ z.T).logsumexp(1).mean(), chunk_size=8)
    assert torch.equal(torch.rand(3), stream)
    for got, wanted in zip(gradients(tower), want, strict=True):
        assert_close(got, wanted, 1e-6)
    assert images.loads == 2 * [(first, first + 8) for first in range(0, 40, 8)]


@pytest.mark.parametrize("device", [None, "cpu"])
def test_only_one_chunk_of_a_lazy_batch_is_alive(device):
    images = Images(64)
    cached_step(deep_tower(), [LazyBatch(64, images.decode, device)], sum_of_squares, chunk_size=8)
    assert len(images.loads) == 16
    assert images.most == 1
    assert images.alive == 0


def test_a_frozen_encoder_loads_each_chunk_once():
    images, free = Images(16), deep_tower()
    GradientCache([deep_tower().requires_grad_(False), free], lambda a, b: (a * b).sum(), chunk_size=8)(
        LazyBatch(16, images.decode), torch.randn(16, 32)
    )
    assert len(images.loads) == 2


@pytest.mark.parametrize("pin", ["chunk", "batch"])
def test_a_host_batch_gives_the_same_step(pin):
    torch.manual_seed(0)
    tower, x = deep_tower(), torch.randn(20, 32)
    results = []
    for batch, offload in [(x, None), (HostBatch(x, "cpu", pin=pin), None), (x, "cpu"), ((x,), "cpu")]:
        torch.manual_seed(1)
        loss = cached_step(tower, [batch], sum_of_squares, chunk_size=6, offload=offload)
        results.append([loss, *gradients(tower)])
    for result in results[1:]:
        assert all(torch.equal(got, want) for got, want in zip(result, results[0], strict=True))


def test_a_host_batch_on_the_cpu_copies_nothing():
    tree = {"pixels": torch.randn(6, 4), "name": "kept"}
    chunk = HostBatch(tree, "cpu").load(slice(2, 4))
    assert chunk["pixels"].data_ptr() == tree["pixels"][2].data_ptr()
    assert chunk["name"] == "kept"
    assert isinstance(HostBatch(tree, "cpu"), BatchSource)


def test_a_custom_source():
    class Memory:
        rows, device = 10, None

        def load(self, rows: slice) -> Tensor:
            return torch.arange(rows.start, rows.stop)[:, None].float().expand(-1, 32)

    assert cached_encode(lambda x: x[:, 0], Memory(), chunk_size=3).tolist() == list(range(10))


def test_an_encoder_that_writes_into_a_host_batch_is_refused():
    tower, x = deep_tower(), torch.randn(6, 32)
    with pytest.raises(GradientError, match="changed in place"):
        cached_step(lambda x: tower(x.mul_(2)), [x], sum_of_squares, chunk_size=2, offload="cpu")


def test_what_cannot_be_a_host_batch():
    x = torch.randn(4, 2)
    with pytest.raises(ShapeError, match="same number of rows"):
        HostBatch((x, x[:2]), "cpu")
    if not torch.cuda.is_available():
        with pytest.raises(DeviceError, match=r"finds no CUDA device\. Use device='cpu'"):
            HostBatch(x, "cuda")
