"""The schedule of the ring, the packing of blocks, and the messages of disagreement. Needs no process group."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reproductions.cost_model import backward_bytes, forward_bytes

from tilewise.errors import GroupError, RangeError
from tilewise.ring.agree import TEXT_WORDS, agree, disagreement, from_words, propagate_errors, to_words
from tilewise.ring.blocks import Field, Layout
from tilewise.ring.schedule import Shards, held_block, next_rank, partners, previous_rank, team_size


@given(st.integers(1, 64), st.data())
def test_every_rank_gets_every_block_once_and_blocks_move_one_hop(world, data):
    rank = data.draw(st.integers(0, world - 1))
    assert held_block(rank, 0, world) == rank
    assert {held_block(rank, step, world) for step in range(world)} == set(range(world))
    for step in range(world):
        assert held_block(next_rank(rank, world), step + 1, world) == held_block(rank, step, world)
    assert previous_rank(next_rank(rank, world), world) == rank
    assert held_block(rank, world - 1, world) == next_rank(rank, world)  # the last hop returns it to its owner


@given(st.integers(1, 4096), st.integers(0, 4096))
def test_teams_are_powers_of_two_that_divide_the_ranks(world, most):
    team = team_size(world, most)
    assert world % team == 0
    assert team & (team - 1) == 0
    assert team <= max(most, 1)
    assert 2 * team > most or world % (2 * team)  # none is larger


@given(st.integers(0, 6), st.integers(0, 300))
def test_a_team_gathers_each_block_once_from_partners_that_gather_from_it(power, rank):
    team = 2**power
    held = {rank}
    for k, (partner, own, theirs) in enumerate(partners(rank, team)):
        assert set(own) == held
        assert partners(partner, team)[k] == (rank, theirs, own)
        assert abs(partner - rank) == 2**k  # neighbours first
        assert not held & set(theirs)
        held |= set(theirs)
    assert held == set(range(rank // team * team, rank // team * team + team))


@given(st.lists(st.integers(0, 9), min_size=1, max_size=9), st.data())
def test_shards_tile_the_whole(rows, data):
    cols = data.draw(st.lists(st.integers(0, 9), min_size=len(rows), max_size=len(rows)))
    covered = []
    for rank in range(len(rows)):
        shards = Shards(rank, tuple(rows), tuple(cols))
        covered += range(shards.row_start, shards.row_start + rows[rank])
        assert shards.col_start(rank) == sum(cols[:rank])
    assert covered == list(range(sum(rows)))


def test_a_group_of_one_sends_nothing():
    assert forward_bytes(1, 100, 8, 4, vectors=8, accumulators=8) == 0
    assert backward_bytes(1, 100, 8, 4, 4, vectors=8) == 0


def test_packing_a_block_and_unpacking_it_gives_the_same_tensors():
    tensors = {
        "features": torch.randn(5, 3, dtype=torch.bfloat16),
        "key": torch.arange(5),
        "zero": torch.randn(5),
        "skip": torch.arange(5) * 7,
        "weight": torch.randn(5),
    }
    layout = Layout([Field.of(name, value) for name, value in tensors.items()])
    packed = layout.pack(tensors)
    assert [part.dtype for part in packed] == [torch.bfloat16, torch.int64, torch.float32]
    assert packed[0].data_ptr() == tensors["features"].data_ptr()  # contiguous features are not copied
    room = layout.empty(9, torch.device("cpu"))  # a larger buffer, as for unequal shards
    for part, target in zip(packed, layout.cut(room, 5), strict=True):
        target.copy_(part)
    out = layout.unpack(room, 5)
    assert out.keys() == tensors.keys()
    assert all(torch.equal(out[name], value) for name, value in tensors.items())


@pytest.mark.parametrize("size", [0, 1, 4])
def test_strided_features_are_packed(size):
    features = torch.randn(6, size).T
    layout = Layout([Field.of("features", features)])
    assert torch.equal(layout.unpack(layout.pack({"features": features}), size)["features"], features)


@given(st.text(max_size=200))
def test_text_survives_as_integers(text):
    words = to_words(text)
    assert len(words) == TEXT_WORDS
    assert all(-(2**63) <= word < 2**63 for word in words)
    assert from_words(words) == text


def test_a_disagreement_names_every_value_and_every_rank():
    calls = [{"width": "8", "type": "float32"}, {"width": "8", "type": "float64"}, {"width": "9", "type": "float32"}]
    message = disagreement(calls)
    assert "width: 8 on ranks 0, 1 but 9 on rank 2" in message
    assert "type: float32 on ranks 0, 2 but float64 on rank 1" in message


def test_a_disagreement_shows_only_what_differs():
    message = disagreement([{"call": "forward", "options": "backend=auto mib=1"}, {"call": "mean"}])
    assert (
        "on call: forward on rank 0 but mean on rank 1. " in message
    )  # the options of another call are not comparable
    calls = [{"options": f"backend=auto mib={size} exact=True", "loss": "row_lse=True"} for size in (64, 128)]
    message = disagreement(calls)
    assert "on options: mib=64 on rank 0 but mib=128 on rank 1. " in message


def test_an_error_message_of_any_length_and_content_fits():
    sent = []

    class Recording(Recorded):
        def gather(self, numbers):
            sent.append(from_words(list(numbers)[2:]))
            return super().gather(numbers)

    with pytest.raises(RangeError), propagate_errors(Recording([[0, 0, *to_words("{}")]])):
        raise RangeError("a\u0000name " + "\x07\n\u00e9" * 999)
    assert sent[0].startswith('{"call": "RangeError: a name')


class Recorded:
    """An exchange in which the values of the other ranks are fixed."""

    def __init__(self, others):
        self.rank, self.others = 0, others
        self.world = len(others) + 1

    def gather(self, numbers):
        return [list(numbers), *self.others]


def test_agreement_returns_sizes_or_raises():
    same = [4, 2, *to_words('{"width": "8"}')]
    shards = agree(Recorded([same]), 3, 5, {"width": 8})
    assert (shards.rows, shards.cols) == ((3, 4), (5, 2))
    with pytest.raises(GroupError, match="width: 9 on rank 0 but 8 on rank 1"):
        agree(Recorded([same]), 3, 5, {"width": 9})
