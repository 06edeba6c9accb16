"""The ring over virtual ranks on the CPU (the GPU tests run the same checks on a GPU), and the loop over blocks."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from typing import Any

import pytest
import torch
from tests.ring import virtual_checks
from tests.ring.virtual import VirtualGroup, run_virtual
from torch import Tensor

from tilewise.errors import GroupError, RangeError
from tilewise.kernels.spec import Pair, PairSpec, Stats, wanted_stats
from tilewise.ops.distributed.vocab_parallel import _Merge
from tilewise.ring.blocks import Field, rotate_blocks
from tilewise.ring.exchange import find_exchange


@pytest.mark.parametrize(
    "rows, negatives", [([40], [8]), ([33, 18], [3, 9]), ([20, 0, 31], [6, 5, 0]), ([5, 17, 9, 12], [1, 0, 7, 3])]
)
def test_losses_over_virtual_ranks(rows, negatives):
    virtual_checks.check_losses("cpu", torch.float32, 2e-6, rows=rows, negatives=negatives)


@pytest.mark.parametrize("gathered", [0, 15, 30, 60])
def test_losses_in_teams(gathered, set_limits):
    """Eight ranks in teams of one, two, four and eight; unequal and empty shards. Shared negatives are columns, too."""
    set_limits(ring_columns=gathered)
    rows, negatives = [3, 0, 4, 1, 0, 2, 4, 2], [3, 0, 0, 2, 1, 0, 0, 1]
    virtual_checks.check_losses("cpu", torch.float64, 1e-12, rows=rows, negatives=negatives)


def test_many_ranks(set_limits):
    """64 ranks with one row each, in 16 teams of four, and in one of 64."""
    rows = [1] * 64
    for gathered in (4, 64):
        set_limits(ring_columns=gathered)
        virtual_checks.check_losses(
            "cpu", torch.float64, 1e-12, rows=rows, negatives=[0] * 64, names=("clip", "siglip", "supcon")
        )


def test_steps_in_a_row():
    virtual_checks.check_two_steps("cpu")


def test_vocabulary_parallel_head():
    virtual_checks.check_head("cpu", torch.float64, 1e-12)


def test_a_target_in_two_shards_of_the_vocabulary_gives_nan():
    """Targets on a GPU are not compared between ranks. If they differ, a row's target is found twice or not at all."""
    found = torch.tensor([[1.0, 0.0, 1.0], [1.0, 0.0, 0.0]])
    pair, spec = Pair(torch.zeros(3, 2), torch.zeros(1, 2), torch.ones(())), PairSpec(row_lse=True, positive="one")

    def work(group: VirtualGroup) -> Stats:
        positives = found[group.rank()]
        local = Stats(row_lse=torch.zeros(3), row_pos=5.0 * positives, num_positives=positives)
        return _Merge(find_exchange(group.group_name), pair, wanted_stats(spec))(local, 3)

    merged, _ = run_virtual(2, work)
    assert (merged.row_pos / merged.num_positives).isnan().tolist() == [True, True, False]


TEAMS = [(1, 1), (2, 1), (3, 1), (5, 1), (2, 2), (6, 2), (8, 2), (8, 4), (8, 8), (12, 4)]


@pytest.mark.parametrize("world, team", TEAMS)
def test_every_rank_gets_every_block_once_and_adds_to_it(world, team):
    sizes = [(3 * rank + 1) % 4 for rank in range(world)]  # includes an empty block

    def work(group: VirtualGroup) -> tuple[list[tuple[int, list[int]]], dict[str, Tensor]]:
        rank, met = group.rank(), []

        def visit(owner: int, block: dict[str, Tensor]) -> dict[str, Tensor]:
            count = sum(sizes[owner : owner + team])
            assert block["features"].shape == (count, 2)
            met.append((owner, block["key"].tolist()))
            return {"sum": block["features"].float() * (rank + 1), "who": torch.full((count,), 10**rank)}

        def merge(accumulated: dict[str, Tensor], added: Any) -> None:
            for name, value in accumulated.items():
                value.add_(added[name])

        mine = {
            "features": torch.full((sizes[rank], 2), rank + 1.0, dtype=torch.bfloat16),
            "key": torch.arange(sizes[rank]) + 100 * rank,
        }
        fields = [Field("sum", torch.float32, 2), Field("who", torch.int64)]
        exchange = find_exchange(group.group_name)
        own = rotate_blocks(exchange, sizes, mine, visit, accumulators=fields, merge=merge, team=team)
        return met, {name: value.clone() for name, value in own.items()}

    for rank, (met, own) in enumerate(run_virtual(world, work)):
        teams, own_team = world // team, rank // team
        assert [owner for owner, _ in met] == [team * ((own_team - step) % teams) for step in range(teams)]
        for owner, keys in met:
            assert keys == [100 * one + k for one in range(owner, owner + team) for k in range(sizes[one])]
        assert torch.equal(own["sum"], torch.full((sizes[rank], 2), (rank + 1.0) * sum(range(1, world + 1))))
        assert torch.equal(own["who"], torch.full((sizes[rank],), int("1" * world)))


@pytest.mark.parametrize("team", [2, 4])
@pytest.mark.parametrize("where", ["work", "merge"])
def test_an_error_in_a_team_gives_nan_and_is_raised_at_the_end(where, team):
    """No rank hangs, and no rank has a sum without the values of rank 1."""
    all_nan: list[Any] = [None] * 4

    def work(group: VirtualGroup) -> None:
        rank = group.rank()

        def visit(owner: int, block: dict[str, Tensor]) -> dict[str, Tensor]:
            if where == "work" and rank == 1:
                raise MemoryError("no room")
            return {"sum": torch.ones(len(block["x"]))}

        def merge(accumulated: dict[str, Tensor], added: Any) -> None:
            if where == "merge" and rank == 1:
                raise MemoryError("no room")
            accumulated["sum"].add_(added["sum"])

        fields = [Field("sum", torch.float32)]
        exchange = find_exchange(group.group_name)
        own = rotate_blocks(
            exchange, [2] * 4, {"x": torch.zeros(2)}, visit, accumulators=fields, merge=merge, team=team
        )
        all_nan[rank] = own["sum"].isnan().all().item()

    with pytest.raises(MemoryError, match="no room"):
        run_virtual(4, work, timeout_s=600)
    # A failed merge spoils the sums that rank 1 was merging; the others are complete.
    assert all_nan[1] is None
    if where == "work":
        assert all_nan == [True, None, True, True]


@pytest.mark.parametrize("where", ["work", "merge"])
def test_an_error_in_the_work_gives_nan_and_is_raised_at_the_end(where):
    met: list[list[int]] = [[], [], []]
    all_nan: list[Any] = [None] * 3

    def work(group: VirtualGroup) -> None:
        rank = group.rank()

        def visit(owner: int, block: dict[str, Tensor]) -> dict[str, Tensor]:
            met[rank].append(owner)
            if where == "work" and rank == 1 and owner == 0:
                raise MemoryError("no room")
            return {"sum": torch.ones(2)}

        def merge(accumulated: dict[str, Tensor], added: Any) -> None:
            if where == "merge" and rank == 1:
                raise MemoryError("no room")
            accumulated["sum"].add_(added["sum"])

        own = rotate_blocks(
            find_exchange(group.group_name),
            [2, 2, 2],
            {"x": torch.zeros(2)},
            visit,
            accumulators=[Field("sum", torch.float32)],
            merge=merge,
        )
        all_nan[rank] = own["sum"].isnan().all().item()

    started = time.monotonic()
    with pytest.raises(MemoryError, match="no room"):
        run_virtual(3, work, timeout_s=600)
    assert time.monotonic() - started < 300  # no rank waits until the timeout
    assert met == [[0, 2, 1], [1, 0], [2, 1, 0]]  # rank 1 stops computing but sends all blocks on
    assert all_nan == [True, None, True]


class NoRoom(Exception):
    """Stands in for MemoryError, which does not allow weak references."""


def test_a_handled_error_keeps_no_memory():
    """A rank that runs out of memory and skips the batch frees its blocks at once, without garbage collection."""

    def work(group: VirtualGroup) -> bool:
        def visit(owner: int, block: dict[str, Tensor]) -> None:
            raise NoRoom

        try:
            rotate_blocks(find_exchange(group.group_name), [2, 2], {"x": torch.zeros(2)}, visit)
        except NoRoom as error:
            raised = weakref.ref(error)
        return raised() is None

    gc.disable()
    try:
        assert run_virtual(2, work) == [True, True]
    finally:
        gc.enable()


def test_a_rank_that_hangs_does_not_hang_its_caller():
    """The other ranks time out, and the error contains the stack trace of the rank that hangs."""
    never = threading.Event()

    def work(group: VirtualGroup) -> None:
        if group.rank() == 1:
            never.wait()
        find_exchange(group.group_name).gather([group.rank()])

    try:
        with pytest.raises(GroupError, match="cannot go on without rank") as caught:
            run_virtual(3, work, timeout_s=0.2)
    finally:
        never.set()
    (note,) = caught.value.__notes__
    assert "virtual rank 1 has not returned" in note
    assert "never.wait()" in note


class Stop(BaseException):
    """An exception that no rank catches."""


@pytest.mark.parametrize("how", ["fails", "returns"])
@pytest.mark.parametrize("where", ["before a gather", "with a pending transfer"])
def test_other_ranks_do_not_wait_for_a_rank_that_has_ended(how, where):
    """They raise at once, before the timeout."""
    raised: list[BaseException] = []

    def work(group: VirtualGroup) -> None:
        exchange = find_exchange(group.group_name)
        try:
            if where == "before a gather":
                _leave(group.rank() == 1, how)
                exchange.gather([1])
            else:
                pending = exchange.shift([torch.ones(2)], [torch.ones(2)])
                _leave(group.rank() == 1, how)
                pending.wait()
        except _Done:
            return
        except GroupError as error:
            raised.append(error)
            raise

    started = time.monotonic()
    with pytest.raises(Stop if how == "fails" else GroupError):
        run_virtual(3, work, timeout_s=600)
    assert time.monotonic() - started < 300  # no rank waits until the timeout
    assert any(f"rank 1 {'failed' if how == 'fails' else 'has finished'}" in str(error) for error in raised)


class _Done(Exception):
    pass


def _leave(mine: bool, how: str) -> None:
    if mine:
        raise Stop if how == "fails" else _Done


def test_ranks_run_under_the_modes_of_their_caller():
    def modes(group: VirtualGroup) -> tuple[bool, bool, torch.dtype]:
        return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), (torch.ones(2, 2) @ torch.ones(2, 2)).dtype

    assert run_virtual(2, modes) == [(True, False, torch.float32)] * 2
    # On CUDA autograd has one thread per device: the backward of one rank would block that of another.
    assert run_virtual(2, lambda group: torch._C._is_multithreading_enabled()) == [False] * 2
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert run_virtual(2, modes) == [(False, False, torch.bfloat16)] * 2
    with torch.inference_mode():
        assert run_virtual(2, modes) == [(False, True, torch.float32)] * 2


def test_invalid_and_ended_virtual_groups_are_refused():
    with pytest.raises(RangeError, match="at least one rank, got world=0"):
        run_virtual(0, lambda group: None)
    name = run_virtual(1, lambda group: group.group_name)[0]
    with pytest.raises(GroupError, match="no process group"):
        find_exchange(name)
