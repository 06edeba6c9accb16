"""A classifier whose classes are sharded over ranks that have the same rows: the whole engine, over virtual ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from tests.compare import assert_close
from tests.ring.crew import Crew, crew  # noqa: F401
from tests.ring.virtual import run_virtual
from tests.ring.wrapped import wrapped
from torch import Tensor

import tilewise as tw
from tilewise.kernels.torch_impl.backend import TorchBackend
from tilewise.ring.exchange import find_exchange

SHARDS = (40, 0, 33)


def shard(value: Tensor, group: Any, sizes: Sequence[int] = SHARDS) -> Tensor:
    return value.split(sizes)[group.rank()].clone().requires_grad_()


class Saving(TorchBackend):
    """Forward saves a token, which backward must get."""

    def __init__(self) -> None:
        super().__init__()
        self.used = 0

    def forward_saving(self, pair: Any, spec: Any, options: Any) -> tuple[Any, object]:
        return self.forward(pair, spec, options), (self, pair.col_start)

    def backward(self, pair: Any, *args: Any, saved: object = None, **more: Any) -> Any:
        self.used += saved == (self, pair.col_start)
        return super().backward(pair, *args, **more)


@pytest.mark.parametrize("with_bias", [False, True])
def test_what_forward_saves_is_used_by_backward(with_bias):
    """Saved exponentials are one product less. With a bias nothing is saved: its gradient needs all of G."""
    backend = Saving()

    def work(group: Any) -> int:
        hidden, head = torch.randn(9, 8, requires_grad=True), shard(torch.randn(73, 8), group)
        bias = shard(torch.randn(73), group) if with_bias else None
        tw.linear_cross_entropy(hidden, head, torch.arange(9), linear_bias=bias, group=group).backward()
        return backend.used

    with mock.patch("tilewise.ops.distributed.vocab_parallel.choose_backend", return_value=backend):
        run_virtual(3, work)
    assert backend.used == (0 if with_bias else 3)


SOME = torch.tensor([290, 3, 15, 4])


def batches(
    group: Any,
    dtype: torch.dtype,
    sizes: Sequence[int] = SHARDS,
    device: str = "cpu",
    *,
    classes: int = 73,
    kind: torch.dtype | None = None,
) -> list[dict[str, Tensor]]:
    """Results of 301 rows, and of SOME of them alone, where a row has the same bits. Targets are below ``classes``.

    Values are rounded to ``dtype``, and then get the type ``kind``, if it is given.
    """
    random = torch.Generator().manual_seed(4)
    hidden, head = (torch.randn(n, 24, generator=random).to(dtype).to(device, kind) for n in (301, 73))
    target, coming = torch.randint(classes, (301,), generator=random), torch.randn(301, generator=random)
    target[::7] = -100
    target, coming = target.to(device), coming.to(device)
    options = tw.TileOptions(batch_invariant=True)

    def results(rows: Tensor) -> dict[str, Tensor]:
        a, c = hidden[rows].requires_grad_(), shard(head, group, sizes) if group else head.clone().requires_grad_()
        how = {"group": group, "options": options}
        loss = tw.linear_cross_entropy(a, c, target[rows], reduction="none", **how)
        (grad,) = torch.autograd.grad((loss * coming[rows]).sum(), a)
        stats = tw.linear_token_stats(a.detach(), c.detach(), target[rows], want=("entropy", "log_prob"), **how)
        return {"loss": loss.detach(), "grad": grad, "entropy": stats.entropy, "log_prob": stats.log_prob}

    return [results(torch.arange(301)), results(SOME)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_in_every_batch(dtype):
    def work(group: Any) -> Any:
        with wrapped(group) as (name, counted):
            found = batches(name, dtype)
            assert counted.orders == {False, True}  # statistics in any order, and the gradient in rank order
            return found

    want, _ = batches(None, dtype)
    for whole, few in run_virtual(3, work):
        for key, value in want.items():
            assert_close(whole[key], value, 1e-5 if dtype == torch.float32 else 8e-3, key)
            assert torch.equal(few[key], whole[key][SOME]), key
            assert few[key].any()


def sums(group: Any) -> tuple[Tensor, Tensor, Tensor]:
    mine = torch.randn(3, 5, generator=torch.Generator().manual_seed(group.rank()))
    exchange, ordered, plain = find_exchange(group.group_name), mine.clone(), mine.clone()
    exchange.sum_(ordered, in_order=True)
    exchange.sum_(plain)
    return mine, ordered, plain


@pytest.mark.group
def test_a_sum_in_rank_order_over_processes(crew: Crew):  # noqa: F811
    found = crew.run(sums)
    want = found[0][0]
    for mine, *_ in found[1:]:
        want = want + mine
    for _, ordered, plain in found:
        assert torch.equal(ordered, want)
        assert_close(plain, want, 1e-6, "all-reduce")


def test_backward_sends_the_gradient_of_the_rows_and_a_number():
    tokens, width = 12, 64

    def work(group: Any) -> tuple[int, int]:
        hidden, head = torch.randn(tokens, width, requires_grad=True), shard(torch.randn(73, width), group)
        scale, target = torch.tensor(0.5, requires_grad=True), torch.arange(tokens)
        target[3] = -100
        with wrapped(group) as (name, counted):
            loss = tw.linear_cross_entropy(hidden, head, target, logit_scale=scale, group=name)
            forward = counted.reduced_bytes
            loss.backward()
            return counted.sent, counted.reduced_bytes - forward

    for sent, reduced in run_virtual(3, work):
        assert sent == 0
        assert reduced == (tokens - 1) * width * 4 + 8  # not of the ignored row; and the scale, in float64


def statistics(x: dict[str, Tensor], group: Any) -> Tensor:
    found = tw.linear_token_stats(x["hidden"], x["head"], x["target"], pick=x["ids"], group=group)
    assert found.log_prob is not None
    assert found.entropy is not None
    assert found.picked is not None
    return (found.log_prob - 0.3 * found.entropy + found.picked.sum(1)).sum()


def distillation(x: dict[str, Tensor], group: Any, **how: Any) -> Tensor:
    return tw.linear_distillation_loss(x["hidden"], x["head"], x["teacher"], x["teacher_head"], group=group, **how)


def sparse(x: dict[str, Tensor], group: Any) -> Tensor:
    log_prob = torch.tensor([0.5, 0.3]).log().expand_as(x["ids"])
    return tw.linear_sparse_distillation_loss(x["hidden"], x["head"], x["ids"], log_prob, tail="bucket", group=group)


# Vectors of the rows that forward gathers, in float64, and all-reduces in float32.
LOSSES = {
    "statistics with picks": (statistics, 8, 1),
    "distillation": (distillation, 3, 0),
    "distillation, jsd": (lambda x, group: distillation(x, group, beta=0.5), 6, 0),
    "sparse distillation": (sparse, 5, 1),
}


@pytest.mark.parametrize("name", LOSSES)
def test_only_vectors_travel(name):
    """What is sent depends on the rows and, in backward, on the features; never on the number of classes."""
    loss, gathered, reduced = LOSSES[name]
    tokens = 12
    sent = {}
    for classes, width in ((73, 8), (730, 8), (73, 64)):
        cut = tuple(size * classes // sum(SHARDS) for size in SHARDS)

        def work(group: Any, cut: tuple[int, ...] = cut, width: int = width) -> tuple[int, int, int]:
            random = torch.Generator().manual_seed(1)
            x = {
                "hidden": torch.randn(tokens, width, generator=random).requires_grad_(),
                "head": torch.randn(sum(cut), width, generator=random).split(cut)[group.rank()].requires_grad_(),
                "teacher": torch.randn(tokens, 5, generator=random),
                "teacher_head": torch.randn(sum(cut), 5, generator=random).split(cut)[group.rank()],
                "target": torch.arange(tokens),
                "ids": torch.arange(2 * tokens).view(tokens, 2),
            }
            with wrapped(group) as (name, counted):
                value = loss(x, name)
                forward = counted.reduced_bytes
                value.backward()
            return forward, counted.reduced_bytes - forward, counted.sent

        (sent[classes, width],) = set(run_virtual(3, work))
    for (_, width), (forward, backward, hops) in sent.items():
        assert hops == 0
        assert forward == tokens * (8 * 3 * gathered + 4 * reduced)
        assert backward == tokens * width * 4
