"""Ranks that disagree, fail, die or stop responding: every rank raises in time."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tests.ring.cases import loss_and_gradients, make_tensors
from tests.ring.crew import Crew, Failed, crew  # noqa: F401

import tilewise as tw
from tilewise.errors import GroupError
from tilewise.kernels.torch_impl.backend import TorchBackend
from tilewise.ring.exchange import GroupExchange, find_exchange

pytestmark = pytest.mark.group
TIMEOUT_S = 6.0


def features(width: int = 8, dtype: torch.dtype = torch.float32, rows: int = 5) -> torch.Tensor:
    return torch.randn(rows, width, dtype=dtype, requires_grad=True)


def reductions(odd: int) -> str:
    return ("sum", "none")[odd]


# Each takes features, 1 on the rank that differs and 0 elsewhere, and the group.
LOSSES: dict[str, Callable[..., Any]] = {
    "nt_xent": lambda x, odd, group: tw.nt_xent(x[:4], reduction=reductions(odd), group=group),
    "supcon_loss": lambda x, odd, group: tw.supcon_loss(
        x, torch.zeros(5, dtype=torch.long), reduction=reductions(odd), group=group
    ),
    "siglip_loss": lambda x, odd, group: tw.siglip_loss(x, x, 1.0, -1.0 - odd, group=group),
    "info_nce": lambda x, odd, group: tw.info_nce(x, x, temperature=(0.1, 0.2)[odd], group=group),
    "hardness": lambda x, odd, group: tw.info_nce(x, x, hardness=(3.0, 5.0)[odd], group=group),
    "own negatives": lambda x, odd, group: tw.info_nce(
        x, x, x[:, None], in_batch=False, reduction=("mean", "none")[odd], group=group
    ),
    "kind of negatives": lambda x, odd, group: tw.info_nce(x, x, (None, x[:, None])[odd], group=group),
    "logsumexp": lambda x, odd, group: tw.linear_logsumexp(x, x, scale=1.0 + odd, group=group),
    "class weights": lambda x, odd, group: tw.linear_cross_entropy(
        x, x, torch.arange(5), weight=(None, torch.ones(5))[odd], group=group
    ),
    "ignored": lambda x, odd, group: tw.linear_cross_entropy(
        x, x, torch.arange(5), ignore_index=(-100, 0)[odd], group=group
    ),
    "distillation": lambda x, odd, group: tw.linear_distillation_loss(
        x, x, x, x, reduction=reductions(odd), group=group
    ),
    "target weight": lambda x, odd, group: tw.linear_distillation_loss(
        x, x, x, x, torch.arange(5), target_weight=(1.0, 0.5)[odd], group=group
    ),
    "beta": lambda x, odd, group: tw.linear_distillation_loss(x, x, x, x, beta=(0.2, 0.5)[odd], group=group),
    "margin": lambda x, odd, group: tw.info_nce(
        x, x, guide=tw.Guide(query=x, key=x, margin=(0.0, 0.1)[odd]), group=group
    ),
    "margin strategy": lambda x, odd, group: tw.info_nce(
        x, x, guide=tw.Guide(query=x, key=x, margin_strategy=("absolute", "relative")[odd]), group=group
    ),
    "guide": lambda x, odd, group: tw.info_nce(x, x, guide=(None, tw.Guide(query=x, key=x))[odd], group=group),
}


def odd_one_out(group: Any, how: str) -> None:
    """Rank 1 makes another call than the other ranks."""
    odd = group.rank() == 1
    wide = features(16 if odd and how == "width" else 8, torch.float64 if odd and how == "type" else torch.float32)
    options = tw.TileOptions(workspace_mib=64 if odd and how == "options" else 128)
    if odd and how == "loss":
        tw.siglip_loss(wide, wide, 1.0, 0.0, group=group)
    elif odd and how == "another loss":
        tw.linear_cross_entropy(wide, wide, torch.zeros(5, dtype=torch.long), group=group)
    elif how in ("targets", "smoothing"):
        target = torch.arange(5) + int(odd and how == "targets")
        share = 0.2 if odd and how == "smoothing" else 0.1
        tw.linear_cross_entropy(wide, wide, target, label_smoothing=share, group=group)
    elif how in LOSSES:
        LOSSES[how](wide, 1 if odd else 0, group)
    elif odd and how == "tokens":
        tw.linear_cross_entropy(features(rows=4), wide, torch.zeros(4, dtype=torch.long), group=group)
    elif how == "tokens":
        tw.linear_cross_entropy(wide, wide, torch.zeros(5, dtype=torch.long), group=group)
    else:
        reduction = "none" if odd and how == "reduction" else "mean"
        text = wide.detach() if odd and how == "frozen" else wide * 1
        if odd and how == "no gradient":
            wide, text = wide.detach(), text.detach()
        with torch.set_grad_enabled(not (odd and how == "no_grad")):
            loss = tw.clip_loss(wide, text, 1.0, reduction=reduction, group=group, options=options).sum()
        loss.backward()


def still_works(group: Any) -> float:
    value = torch.tensor(float(group.rank() + 1))
    dist.all_reduce(value, group=group)
    own = torch.eye(3)
    return value.item() + tw.clip_loss(own, own, 1.0, group=group).item()


SAYS = {
    "width": "width: 8 on ranks 0, 2 but 16 on rank 1",
    "type": "type: float32 on ranks 0, 2 but float64 on rank 1",
    "options": "workspace_mib=64",
    "loss": "softplus=True",
    "another loss": "shards of a classifier on rank 1",
    "tokens": "shape: [5] on ranks 0, 2 but [4] on rank 1",
    "reduction": "loss: reduction=mean on ranks 0, 2 but reduction=none on rank 1",
    "nt_xent": "loss: reduction=sum on ranks 0, 2 but reduction=none on rank 1",
    "supcon_loss": "loss: reduction=sum on ranks 0, 2 but reduction=none on rank 1",
    "siglip_loss": "loss: logit_bias=-1.0 on ranks 0, 2 but logit_bias=-2.0 on rank 1",
    "hardness": "loss: hardness=3.0 on ranks 0, 2 but hardness=5.0 on rank 1",
    "info_nce": "loss: temperature=0.1 on ranks 0, 2 but temperature=0.2 on rank 1",
    "own negatives": "loss: reduction=mean on ranks 0, 2 but reduction=none on rank 1",
    "kind of negatives": "loss: negatives=none on ranks 0, 2 but negatives=own on rank 1",
    "logsumexp": "loss: scale=1.0 on ranks 0, 2 but scale=2.0 on rank 1",
    "class weights": "loss: weight=None on ranks 0, 2 but weight=tensor on rank 1",
    "ignored": "loss: ignore_index=-100 on ranks 0, 2 but ignore_index=0 on rank 1",
    "distillation": "loss: reduction=sum on ranks 0, 2 but reduction=none on rank 1",
    "target weight": "loss: target_weight=1.0 on ranks 0, 2 but target_weight=0.5 on rank 1",
    "beta": "beta=0.2",
    "margin": "loss: margin=0.0 on ranks 0, 2 but margin=0.1 on rank 1",
    "margin strategy": "loss: margin_strategy=absolute on ranks 0, 2 but margin_strategy=relative on rank 1",
    "guide": "keys: row_shift col_shift on ranks 0, 2 but row_shift guide_a row_limit col_shift",
    "frozen": "requires_grad: rows columns on ranks 0, 2 but rows on rank 1",
    "no gradient": "requires_grad: rows columns on ranks 0, 2 but none on rank 1",
    "no_grad": "requires_grad: rows columns on ranks 0, 2 but none on rank 1",
    "targets": "on targets (every rank has all tokens; data parallelism needs no group): checksum",
    "smoothing": "loss: label_smoothing=0.1 on ranks 0, 2 but label_smoothing=0.2 on rank 1",
}


@pytest.mark.parametrize("how", SAYS)
def test_ranks_that_disagree_all_learn_who_differs_and_the_group_lives_on(crew: Crew, how):  # noqa: F811
    found = crew.outcomes(odd_one_out, how, world=3)
    for result in found:
        assert isinstance(result, Failed), "every rank must raise"
        assert result.kind == "GroupError", result.trace
        assert SAYS[how] in result.message
        assert result.seconds < 100  # far below the timeout of 300 s
    after = crew.run(still_works, world=3)
    assert len(set(after)) == 1


@contextlib.contextmanager
def trouble(group: Any, phase: str, when: int, strike: Callable[[], None]) -> Iterator[None]:
    """Call ``strike`` on rank 1 before its ``when``-th call of a kernel's ``phase``."""
    calls, real = 0, getattr(TorchBackend, phase)

    def call(self: Any, *args: Any, **more: Any) -> Any:
        nonlocal calls
        calls += 1
        if group.rank() == 1 and calls == when:
            strike()
        return real(self, *args, **more)

    with mock.patch.object(TorchBackend, phase, call):
        yield


def no_room() -> None:
    raise MemoryError("no room for a tile")


def own_trouble(group: Any, phase: str, when: int) -> tuple[str, bool]:
    """Rank 1's kernel fails at its ``when``-th block. Returns how each rank ended.

    Forward runs without backward: the other ranks would block there without the failed rank.
    """
    a, b = features(), features()
    with trouble(group, phase, when, no_room), torch.set_grad_enabled(phase == "backward"):
        try:
            loss = tw.clip_loss(a, b, 3.0, reduction="none", group=group)
            if phase == "backward":
                loss.sum().backward()
        except MemoryError as error:
            return str(error), False
    values = loss.detach() if phase == "forward" else b.grad
    return "finished", bool(values.isnan().all())


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("when", [1, 2, 3])
def test_a_rank_that_fails_neither_hangs_the_others_nor_gives_them_wrong_values(crew: Crew, phase, when):  # noqa: F811
    found = crew.outcomes(own_trouble, phase, when, world=3)
    assert found[1] == ("no room for a tile", False)
    assert {found[0][0], found[2][0]} == {"finished"}
    # Blocks that lack the values of rank 1 contain NaN.
    all_nan = [found[rank][1] for rank in (0, 2)]
    assert all_nan == {1: [True, True], 2: [True, True], 3: [False, True]}[when]
    assert len(set(crew.run(still_works, world=3))) == 1


def skip_a_step(group: Any) -> str:
    """Rank 1 fails in forward and continues with the next batch while the others compute the mean."""
    with trouble(group, "forward", 2, no_room):
        for _ in range(2):
            with contextlib.suppress(MemoryError):
                tw.clip_loss(features(), features(), 3.0, group=group).backward()
    return "finished"


def test_a_rank_that_skips_a_failed_batch_is_detected(crew: Crew):  # noqa: F811
    for result in crew.outcomes(skip_a_step, world=3):
        assert isinstance(result, Failed)
        assert "call: mean of a loss on ranks 0, 2 but forward of a loss on rank 1. " in result.message
        assert result.seconds < 100
    assert len(set(crew.run(still_works, world=3))) == 1


def head_trouble(group: Any, phase: str) -> tuple[str, list[list[float]]]:
    """Rank 1's kernel fails on its shard of a classifier. Returns the results of each rank."""
    hidden, head, target = features(), features(rows=4), torch.arange(5)
    with trouble(group, phase, 1, no_room):
        try:
            stats = tw.linear_token_stats(hidden, head, target, group=group)
            found = [stats.log_prob, stats.entropy, stats.logsumexp, stats.argmax]
            if phase == "backward":
                stats.log_prob.sum().backward()
                found = [hidden.grad]
        except MemoryError as error:
            return str(error), []
    return "finished", [value.detach().float().nan_to_num(-7.0).flatten().unique().tolist() for value in found]


@pytest.mark.parametrize("phase, expected", [("forward", [[-7.0], [-7.0], [-7.0], [-1.0]]), ("backward", [[-7.0]])])
def test_a_rank_whose_classifier_shard_fails_gives_the_others_nan(crew: Crew, phase, expected):  # noqa: F811
    found = crew.outcomes(head_trouble, phase, world=3)
    assert found == [("finished", expected), ("no room for a tile", []), ("finished", expected)]
    assert len(set(crew.run(still_works, world=3))) == 1


@pytest.fixture
def short_crew() -> Iterator[Crew]:
    short = Crew(3, timeout_s=TIMEOUT_S)
    short.run(still_works)  # the first call in a process is slow and must not count
    short.run(vanish, "backward", 0)
    yield short
    os.kill(short.ranks[1][0].pid, signal.SIGKILL) if short.ranks[1][0].is_alive() else None
    short.close()


def vanish(group: Any, phase: str, way: int) -> str:
    """Rank 1 dies or stops during its second block."""
    a, b = features(), features()
    with trouble(group, phase, 2, lambda: os.kill(os.getpid(), way)):
        tw.clip_loss(a, b, 3.0, group=group).backward()
    return "finished"


@pytest.mark.parametrize(
    "phase, way", [("forward", signal.SIGKILL), ("backward", signal.SIGKILL), ("backward", signal.SIGSTOP)]
)
def test_a_dead_rank_ends_the_others_within_the_timeout(short_crew: Crew, phase, way):
    started = time.monotonic()
    short_crew.start(vanish, phase, way)
    survivors = [short_crew.collect(rank, limit_s=3 * TIMEOUT_S) for rank in (0, 2)]
    took = time.monotonic() - started
    for result in survivors:
        assert isinstance(result, Failed)
        assert result.kind == "GroupError", result.trace
        assert "a rank of the group has exited" in result.message
        assert result.seconds < 2 * TIMEOUT_S  # one timeout, not one after another, on a busy machine
    assert took < 2.5 * TIMEOUT_S


def wrong_names(group: Any) -> list[str]:
    messages: list[str] = []
    mine = dist.new_group([0])  # called by all ranks, because the names of groups are numbered
    if group.rank() != 0:
        return [refusal(mine)]
    name = mine.group_name
    dist.destroy_process_group(mine)
    for wrong in (name, "nobody"):
        try:
            find_exchange(wrong)
        except GroupError as error:
            messages.append(str(error))
    reason = GroupExchange(group).refuses(torch.device("meta"))
    return [*messages, reason or ""]


def refusal(group: Any) -> str:
    try:
        tw.clip_loss(features(), features(), 1.0, group=group)
    except tw.TilewiseError as error:
        return str(error)
    return "none"


def test_a_group_that_does_not_exist_is_named(crew: Crew):  # noqa: F811
    (first, second, reason), (outside,), *_ = crew.run(wrong_names)
    assert "outside of the group" in outside
    assert "was it destroyed?" in first
    assert "'nobody'" in second
    assert "not on meta" in reason


def test_without_torch_distributed_the_error_says_what_to_call():
    with pytest.raises(GroupError, match="init_process_group"):
        find_exchange("0")


@pytest.fixture
def restarted(tmp_path: Path) -> Iterator[tuple[Any, Any]]:
    """Handles of two groups, from before torch.distributed was initialized again."""

    def start(name: str) -> tuple[Any, Any]:
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/{name}", rank=0, world_size=1)
        return dist.group.WORLD, dist.new_group([0])

    old = start("first")
    dist.destroy_process_group()
    start("second")
    yield old
    dist.destroy_process_group()


def test_a_group_from_before_a_restart_is_refused(restarted: tuple[Any, Any]):
    """Groups are found by name, and names start again: the old handle would silently mean the new group."""
    a, b = features(), features()
    for old in restarted:
        with pytest.raises(GroupError, match=r"before torch\.distributed was initialized again"):
            tw.clip_loss(a, b, 1.0, group=old)
        with pytest.raises(GroupError, match="after init_process_group"):
            tw.retrieval_ranks(a.detach(), b.detach(), group=old)
    assert tw.clip_loss(a, b, 1.0, group=dist.group.WORLD).isfinite()


def test_a_group_of_one_gives_the_result_without_a_group(crew: Crew, set_limits):  # noqa: F811
    set_limits(small_cpu=0)  # over a group a batch takes two passes, so the bits are those of two passes
    want = loss_and_gradients("clip", make_tensors(6, 2, torch.float32))
    got = crew.run(group_of_one, world=1)[0]
    assert all(torch.equal(got[name], want[name]) for name in want if name != "loss")


def group_of_one(group: Any) -> dict[str, torch.Tensor]:
    return loss_and_gradients("clip", make_tensors(6, 2, torch.float32), group=group)
