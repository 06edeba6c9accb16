"""The filter over a vocabulary group: virtual ranks, Triton's interpreter, one process in float64."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import pytest
import torch
from tests.compare import assert_close, relative_error
from tests.kernels.marks import INTERPRETED
from tests.ops.filtered_cases import COLS, SCORES, Head, dense_g, dropped_mass
from tests.ring.virtual import run_virtual
from tests.ring.wrapped import wrapped
from torch import Tensor

import tilewise as tw
from tilewise.kernels import filter_plan as plans
from tilewise.kernels.triton_impl.filtered import forward as filter_forward
from tilewise.kernels.triton_impl.filtered.backward import FilterBackward

pytestmark = INTERPRETED
SHARDS = (208, 100, 192)  # of COLS, tiles of 16; the second has a ragged last tile
ROWS, TOLERANCE = 70, 1e-2
OPTIONS = tw.TileOptions(backend="triton", precision="highest", filter_tolerance=TOLERANCE)


@pytest.fixture(autouse=True)
def one_launch_at_a_time(monkeypatch):
    """The interpreter keeps the place in the grid in a global. Filter also where most entries are kept."""
    from tests.kernels.quick_interpreter import make_quick
    from triton.runtime import interpreter

    make_quick(monkeypatch)
    lock, plain = threading.RLock(), interpreter.GridExecutor.__call__

    def launch(self, *args, **kwargs):
        with lock:
            return plain(self, *args, **kwargs)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", launch)
    monkeypatch.setattr(plans, "DENSE_SHARE", 2.0)


def probe_small_calls(monkeypatch):
    monkeypatch.setattr(filter_forward, "WORTH_PROBING", 0)


def of_rank(value: Tensor, rank: int) -> Tensor:
    return value.split(SHARDS)[rank].clone()


def targets(n: int = ROWS) -> Tensor:
    found = torch.randint(0, COLS, (n,), generator=torch.Generator().manual_seed(9))
    found[4] = -100
    return found


def solve(scores: Tensor, options: Any = OPTIONS, target: Tensor | None = None) -> tuple[Tensor, list[Any]]:
    """G of the whole vocabulary, on every rank the same, and the plan of each rank."""
    target = targets(len(scores)) if target is None else target

    def work(group: Any) -> Tensor:
        x = scores.float().clone().requires_grad_()
        head = of_rank(torch.eye(COLS), group.rank())
        tw.linear_cross_entropy(x, head, target, reduction="sum", options=options, group=group).backward()
        assert x.grad is not None
        return x.grad

    with tw.record_filtering() as report:
        found = run_virtual(len(SHARDS), work)
    assert all(torch.equal(found[0], other) for other in found[1:])
    by_size = {len(plan.order): plan for plan, *_ in report._plans}
    return found[0], [by_size.get(size) for size in SHARDS]


def dense(scores: Tensor) -> Tensor:
    target = targets(len(scores))
    return torch.where((target >= 0)[:, None], dense_g(scores, target.clamp(min=0)), 0.0)


def dropped(scores: Tensor, found: list[Any]) -> Tensor:
    """The probability that each row drops on each rank: (ranks, n), from all scores."""
    p, parts = scores.double().softmax(1), []
    for columns, plan in zip(p.split(SHARDS, 1), found, strict=True):
        parts.append(dropped_mass(columns.log(), plan) * columns.sum(1))
    return torch.stack(parts)


@pytest.mark.parametrize("name", ["trained", "very peaked", "flat", "ties", "two levels at the tolerance"])
def test_the_bound_holds_for_every_token_over_the_classes_of_all_ranks(name):
    scores, valid = SCORES[name](ROWS), targets() >= 0
    got, found = solve(scores)
    assert not any(int(plan.keep_all) for plan in found)
    mass = dropped(scores, found)[:, valid]
    assert mass.sum(0).max() <= TOLERANCE
    assert (mass <= TOLERANCE / len(SHARDS)).all()
    error = (got.double() - dense(scores)).abs()
    assert (error.sum(1)[valid] <= 2 * mass.sum(0) + 1e-4).all()
    assert got[~valid].eq(0).all()
    if name != "flat":
        assert mass.sum(0).max() > TOLERANCE / 10  # something is dropped
    for plan in found:  # a rank never drops the entry of a target
        assert len(plan.mass) == plans.tile_count(len(plan.order))


def test_a_rank_with_hardly_any_probability_drops_all_its_columns():
    """By its own log-sum-exp it would keep nearly all of them, because its scores are flat."""
    scores = torch.zeros(ROWS, COLS, dtype=torch.float64)
    scores[:, SHARDS[0] :] -= 20.0
    target = torch.arange(ROWS)
    _, found = solve(scores, target=target)
    assert [int(plan.kept.sum()) for plan in found[1:]] == [0, 0]
    assert int(found[0].kept.sum()) > 0.9 * ROWS * plans.tile_count(SHARDS[0])
    alone = tw.TileOptions(backend="triton", filter_tolerance=TOLERANCE)
    head = torch.eye(COLS)[SHARDS[0] :]
    x = scores.float().clone().requires_grad_()
    with tw.record_filtering() as report:
        tw.linear_cross_entropy(x, head, torch.zeros(ROWS, dtype=torch.long), options=alone).backward()
    assert report.kept_share[0] > 0.9


def token_loss(x: dict[str, Any], target: Tensor, **settings: Any) -> Tensor:
    """A loss of log-probabilities, entropies and scores of picked classes."""
    pick = (target[:, None] + torch.tensor([1, 250])) % COLS
    found = tw.linear_token_stats(
        x["input"],
        x["weight"],
        target,
        linear_bias=x["bias"],
        logit_scale=x["scale"],
        softcap=30.0,
        pick=pick,
        want=("log_prob", "entropy", "picked"),
        **settings,
    )
    return (found.log_prob - 0.3 * found.entropy + 0.1 * found.picked.sum(1))[target >= 0].sum()


@pytest.fixture(scope="module")
def head() -> Head:
    found = Head(n=ROWS)
    found.target[4] = -100
    return found


@pytest.mark.parametrize("probed", [False, True], ids=["", "probed"])
@pytest.mark.parametrize("tolerance", [1e-3, "rounding"], ids=str)
def test_statistics_of_tokens_over_all_ranks(head, tolerance, probed, monkeypatch):
    """Values are exact, and gradients differ from the exact ones by about the tolerance."""
    dtype = torch.float16 if tolerance == "rounding" else torch.float32
    options = dataclasses.replace(OPTIONS, filter_tolerance=tolerance)
    if probed:
        probe_small_calls(monkeypatch)
    start = head.leaves | {"scale": head.leaves["scale"].detach()}
    leaves = {
        name: value.detach().to(dtype if name in ("input", "weight") else torch.float32)
        for name, value in start.items()
    }
    exact = {name: value.double().requires_grad_() for name, value in leaves.items()}
    loss = token_loss(exact, head.target)
    loss.backward()

    def work(group: Any) -> tuple[Tensor, dict[str, Tensor], int]:
        mine = {n: of_rank(v, group.rank()) if n in ("weight", "bias") else v.clone() for n, v in leaves.items()}
        mine = {name: value.requires_grad_() for name, value in mine.items()}
        with wrapped(group) as (name, counted):
            value = token_loss(mine, head.target, options=options, group=name)
            sent = counted.reduced_bytes
            value.backward()
        return value.detach(), {name: value.grad for name, value in mine.items()}, sent

    with tw.record_filtering() as report:
        found = run_virtual(len(SHARDS), work)
    assert report.dense == [False] * len(SHARDS)
    assert 0.0 < max(report.largest_dropped) <= max(report.tolerance) / len(SHARDS)
    joined = {n: torch.cat([g[n] for _, g, _ in found]) for n in ("weight", "bias")}
    joined |= {name: found[0][1][name] for name in ("input", "scale")}
    floor = 2e-3 if dtype == torch.float16 else 1e-5
    for value, grads, sent in found:
        assert_close(value.double(), loss.detach(), floor, "loss")
        assert torch.equal(grads["input"], joined["input"])
        # Log-sum-exp, entropy, positive and their number, two picks; for a sample without picks. Float32 has shifts.
        shifts = 4 * ROWS * (dtype == torch.float32)
        assert sent == 8 * len(SHARDS) * (6 * (ROWS - 1) + 4 * 16 * probed) + shifts
    worst = max(relative_error(joined[name], exact[name].grad) for name in joined)
    assert worst < 20 * max(report.tolerance)
    if tolerance != "rounding":
        assert worst > 1e-5  # something was dropped


def test_backward_again_computes_the_same(head):
    """The second backward runs the registered operators, whose forward makes a plan of its own."""
    leaves = {name: value.detach().float() for name, value in head.leaves.items()}

    def work(group: Any) -> tuple[Tensor, Tensor]:
        x, weight = leaves["input"].clone().requires_grad_(), of_rank(leaves["weight"], group.rank())
        loss = tw.linear_cross_entropy(x, weight, head.target, options=OPTIONS, group=group)
        (first,) = torch.autograd.grad(loss, x, retain_graph=True)
        return first, torch.autograd.grad(loss, x)[0]

    for first, second in run_virtual(len(SHARDS), work):
        assert_close(second, first, 1e-6)


def exact_gradient(head: Head) -> Tensor:
    leaves = {name: value.detach().clone().requires_grad_() for name, value in head.leaves.items()}
    tw.linear_cross_entropy(leaves["input"], leaves["weight"], head.target).backward()
    grad = leaves["input"].grad
    assert grad is not None
    return grad


@pytest.mark.parametrize("why", ["a narrow shard", "no workspace"])
def test_calls_that_are_not_suited_are_exact_on_all_ranks(head, why, monkeypatch):
    shards = (300, 31, 169) if why == "a narrow shard" else SHARDS
    if why == "no workspace":
        monkeypatch.setattr(plans, "fits_at_once", lambda *_: False)
    leaves = {name: value.detach().float() for name, value in head.leaves.items()}

    def work(group: Any) -> Tensor:
        x, weight = leaves["input"].clone().requires_grad_(), leaves["weight"].split(shards)[group.rank()]
        tw.linear_cross_entropy(x, weight, head.target, options=OPTIONS, group=group).backward()
        assert x.grad is not None
        return x.grad

    want = exact_gradient(head)
    with tw.record_filtering() as report:
        found = run_virtual(3, work)
    for got in found:
        assert_close(got.double(), want, 1e-5)
    assert report.kept_share == [1.0] * len(report)


@pytest.mark.parametrize("phase", ["before the merge", "in backward"])
def test_a_rank_that_fails_stops_all(head, phase, monkeypatch):
    probe_small_calls(monkeypatch)
    leaves = {name: value.detach().float() for name, value in head.leaves.items()}
    name = "_probe" if phase == "before the merge" else "_start"
    owner = filter_forward.FilterForward if phase == "before the merge" else FilterBackward
    plain = getattr(owner, name)

    def failing(self, *args):
        if len(self.b) == SHARDS[1]:
            raise MemoryError("no memory")
        return plain(self, *args)

    monkeypatch.setattr(owner, name, failing)
    told = []

    def work(group: Any) -> None:
        x, weight = leaves["input"].clone().requires_grad_(), of_rank(leaves["weight"], group.rank())
        try:
            loss = tw.linear_cross_entropy(x, weight, head.target, options=OPTIONS, group=group)
            if phase == "before the merge":
                told.append(bool(loss.isnan()))
                return
            loss.backward()
            assert x.grad is not None
            told.append(bool(x.grad.isnan().any()))
        except MemoryError:
            told.append("raised")

    run_virtual(3, work, timeout_s=60)
    assert sorted(told, key=str) == [True, True, "raised"]
