"""The ring over threads: what the GPU tests run on a GPU, on the CPU; and the loop of blocks by itself."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from typing import Any

import pytest
import torch
from tests.ring import virtual_checks
from torch import Tensor

from tilewise.errors import GroupError, RangeError
from tilewise.kernels.spec import PairSpec
from tilewise.ops.distributed.vocab_parallel import _merge
from tilewise.ring.blocks import Field, go_round
from tilewise.ring.exchange import find_exchange
from tilewise.ring.virtual import VirtualGroup, run_virtual


@pytest.mark.parametrize(
    "rows, negatives", [([40], [8]), ([33, 18], [3, 9]), ([20, 0, 31], [6, 5, 0]), ([5, 17, 9, 12], [1, 0, 7, 3])]
)
def test_losses_over_virtual_ranks(rows, negatives):
    virtual_checks.check_losses("cpu", torch.float32, 2e-6, rows=rows, negatives=negatives)


def test_steps_in_a_row():
    virtual_checks.check_two_steps("cpu")


def test_vocabulary_parallel_head():
    virtual_checks.check_head("cpu", torch.float64, 1e-12)


def test_a_target_that_two_slices_have_spoils_its_row():
    """On a GPU targets are not compared. Ranks with other targets find a row's target twice, or nowhere."""
    zero, found = torch.zeros(3), torch.tensor([[1.0, 0.0, 1.0], [1.0, 0.0, 0.0]])
    ranks = [torch.stack([zero, 5.0 * positives, positives]) for positives in found]  # in the order of the table
    merged = _merge(torch.stack(ranks).double(), PairSpec(row_lse=True, positive="one"), torch.float32)
    assert (merged.row_pos / merged.num_positives).isnan().tolist() == [True, True, False]


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_every_block_is_met_once_and_collects_from_everyone(world):
    sizes = [(3 * rank + 1) % 4 for rank in range(world)]  # an empty one among them

    def work(group: VirtualGroup) -> tuple[list[tuple[int, list[int]]], dict[str, Tensor]]:
        rank, met = group.rank(), []

        def visit(owner: int, block: dict[str, Tensor]) -> dict[str, Tensor]:
            assert block["features"].shape == (sizes[owner], 2)
            met.append((owner, block["key"].tolist()))
            return {"sum": block["features"].float() * (rank + 1), "who": torch.full((sizes[owner],), 10**rank)}

        def join(held: dict[str, Tensor], added: Any) -> None:
            for name, value in held.items():
                value.add_(added[name])

        mine = {
            "features": torch.full((sizes[rank], 2), rank + 1.0, dtype=torch.bfloat16),
            "key": torch.arange(sizes[rank]) + 100 * rank,
        }
        credits = [Field("sum", torch.float32, 2), Field("who", torch.int64)]
        home = go_round(find_exchange(group.group_name), sizes, mine, visit, credits=credits, join=join)
        return met, {name: value.clone() for name, value in home.items()}

    for rank, (met, home) in enumerate(run_virtual(world, work)):
        assert [owner for owner, _ in met] == [(rank - step) % world for step in range(world)]
        assert all(keys == list(range(100 * owner, 100 * owner + sizes[owner])) for owner, keys in met)
        assert torch.equal(home["sum"], torch.full((sizes[rank], 2), (rank + 1.0) * sum(range(1, world + 1))))
        assert torch.equal(home["who"], torch.full((sizes[rank],), int("1" * world)))


@pytest.mark.parametrize("where", ["work", "join"])
def test_failures_in_the_work_spoil_credits_and_are_raised_at_the_end(where):
    met: list[list[int]] = [[], [], []]
    spoiled: list[Any] = [None] * 3

    def work(group: VirtualGroup) -> None:
        rank = group.rank()

        def visit(owner: int, block: dict[str, Tensor]) -> dict[str, Tensor]:
            met[rank].append(owner)
            if where == "work" and rank == 1 and owner == 0:
                raise MemoryError("no room")
            return {"sum": torch.ones(2)}

        def join(held: dict[str, Tensor], added: Any) -> None:
            if where == "join" and rank == 1:
                raise MemoryError("no room")
            held["sum"].add_(added["sum"])

        home = go_round(
            find_exchange(group.group_name),
            [2, 2, 2],
            {"x": torch.zeros(2)},
            visit,
            credits=[Field("sum", torch.float32)],
            join=join,
        )
        spoiled[rank] = home["sum"].isnan().all().item()

    started = time.monotonic()
    with pytest.raises(MemoryError, match="no room"):
        run_virtual(3, work)
    assert time.monotonic() - started < 20  # far inside the 60 s that a rank waits for another
    assert met == [[0, 2, 1], [1, 0], [2, 1, 0]]  # rank 1 stops working, and goes on passing blocks
    assert spoiled == [True, None, True]


class NoRoom(Exception):
    """As an error of memory, of which there can be weak references."""


def test_a_failure_that_was_handled_holds_no_memory():
    """A rank out of memory that skips the batch has its blocks back at once, not when cycles are collected."""

    def work(group: VirtualGroup) -> bool:
        def visit(owner: int, block: dict[str, Tensor]) -> None:
            raise NoRoom

        try:
            go_round(find_exchange(group.group_name), [2, 2], {"x": torch.zeros(2)}, visit)
        except NoRoom as error:
            raised = weakref.ref(error)
        return raised() is None

    gc.disable()
    try:
        assert run_virtual(2, work) == [True, True]
    finally:
        gc.enable()


def test_a_rank_that_hangs_does_not_hang_its_caller():
    """It may hang anywhere: in a lock, an import, a driver. The others miss it, and the error says where it is."""
    never = threading.Event()

    def work(group: VirtualGroup) -> None:
        if group.rank() == 1:
            never.wait()
        find_exchange(group.group_name).gather([group.rank()])

    try:
        with pytest.raises(GroupError, match="in vain") as caught:
            run_virtual(3, work, timeout_s=0.2)
    finally:
        never.set()
    (note,) = caught.value.__notes__
    assert "virtual rank 1 has not come back" in note
    assert "never.wait()" in note


class Stop(BaseException):
    """What no rank catches."""


@pytest.mark.parametrize("how", ["stops", "is done"])
@pytest.mark.parametrize("where", ["before a gathering", "with a parcel under way"])
def test_a_rank_that_is_gone_is_not_waited_for(how, where):
    """The others are told at once, instead of after the time limit."""
    raised: list[BaseException] = []

    def work(group: VirtualGroup) -> None:
        exchange = find_exchange(group.group_name)
        try:
            if where == "before a gathering":
                _leave(group.rank() == 1, how)
                exchange.gather([1])
            else:
                under_way = exchange.shift([torch.ones(2)], [torch.ones(2)])
                _leave(group.rank() == 1, how)
                under_way.wait()
        except _Done:
            return
        except GroupError as error:
            raised.append(error)
            raise

    started = time.monotonic()
    with pytest.raises(Stop if how == "stops" else GroupError):
        run_virtual(3, work, timeout_s=60)
    assert time.monotonic() - started < 20
    assert any(f"rank 1 {'failed' if how == 'stops' else 'is done'}" in str(error) for error in raised)


class _Done(Exception):
    pass


def _leave(mine: bool, how: str) -> None:
    if mine:
        raise Stop if how == "stops" else _Done


def test_ranks_run_under_the_modes_of_their_caller():
    def modes(group: VirtualGroup) -> tuple[bool, bool, torch.dtype]:
        return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), (torch.ones(2, 2) @ torch.ones(2, 2)).dtype

    assert run_virtual(2, modes) == [(True, False, torch.float32)] * 2
    # On CUDA autograd has one thread for a device: a rank's backward would wait there for another's behind it.
    assert run_virtual(2, lambda group: torch._C._is_multithreading_enabled()) == [False] * 2
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert run_virtual(2, modes) == [(False, False, torch.bfloat16)] * 2
    with torch.inference_mode():
        assert run_virtual(2, modes) == [(False, True, torch.float32)] * 2


def test_groups_that_cannot_be_or_are_over_say_so():
    with pytest.raises(RangeError, match="at least one rank, got world=0"):
        run_virtual(0, lambda group: None)
    name = run_virtual(1, lambda group: group.group_name)[0]
    with pytest.raises(GroupError, match="is over"):
        find_exchange(name)
