"""The ring as arithmetic, the packing of blocks, and the words of a disagreement. No process group."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tilewise.errors import GroupError, RangeError
from tilewise.ring import schedule
from tilewise.ring.agree import TEXT_WORDS, agree, disagreement, from_words, telling, to_words
from tilewise.ring.blocks import Field, Layout
from tilewise.ring.schedule import held_block, next_rank, previous_rank, starts
from tilewise.ring.shards import Shards


@given(st.integers(1, 64), st.data())
def test_every_rank_meets_every_block_once_and_blocks_move_one_hop(world, data):
    rank = data.draw(st.integers(0, world - 1))
    assert held_block(rank, 0, world) == rank
    assert {held_block(rank, step, world) for step in range(world)} == set(range(world))
    for step in range(world):
        assert held_block(next_rank(rank, world), step + 1, world) == held_block(rank, step, world)
    assert previous_rank(next_rank(rank, world), world) == rank
    assert held_block(rank, world - 1, world) == next_rank(rank, world)  # whose home the last hop is


@given(st.lists(st.integers(0, 9), min_size=1, max_size=9), st.data())
def test_shards_tile_the_whole(rows, data):
    cols = data.draw(st.lists(st.integers(0, 9), min_size=len(rows), max_size=len(rows)))
    covered = []
    for rank in range(len(rows)):
        shards = Shards(rank, tuple(rows), tuple(cols))
        covered += range(shards.row_start, shards.row_start + rows[rank])
        assert shards.col_start(rank) == sum(cols[:rank])
    assert covered == list(range(sum(rows)))
    assert starts(rows) == [sum(rows[:k]) for k in range(len(rows))]


def test_nothing_moves_in_a_group_of_one():
    assert schedule.forward_bytes(1, 100, 8, 4, vectors=8, credits=8) == 0
    assert schedule.backward_bytes(1, 100, 8, 4, 4, vectors=8) == 0


def test_a_block_is_packed_into_one_buffer_per_type_of_vector_and_comes_out_whole():
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
    room = layout.empty(9, torch.device("cpu"))  # a larger buffer, as uneven shards need
    for part, target in zip(packed, layout.cut(room, 5), strict=True):
        target.copy_(part)
    out = layout.open(room, 5)
    assert out.keys() == tensors.keys()
    assert all(torch.equal(out[name], value) for name, value in tensors.items())


@pytest.mark.parametrize("size", [0, 1, 4])
def test_strided_features_travel_too(size):
    features = torch.randn(6, size).T
    layout = Layout([Field.of("features", features)])
    assert torch.equal(layout.open(layout.pack({"features": features}), size)["features"], features)


@given(st.text(max_size=200))
def test_text_survives_as_integers(text):
    words = to_words(text)
    assert len(words) == TEXT_WORDS
    assert all(-(2**63) <= word < 2**63 for word in words)
    assert from_words(words) == text


def test_a_disagreement_names_every_point_and_every_rank():
    calls = [{"width": "8", "type": "float32"}, {"width": "8", "type": "float64"}, {"width": "9", "type": "float32"}]
    said = disagreement(calls)
    assert "width: 8 on ranks 0, 1 but 9 on rank 2" in said
    assert "type: float32 on ranks 0, 2 but float64 on rank 1" in said


def test_a_disagreement_shows_no_more_than_what_differs():
    said = disagreement([{"call": "forward", "options": "backend=auto mib=1"}, {"call": "mean"}])
    assert "on call: forward on rank 0 but mean on rank 1. " in said  # the options of another call say nothing
    calls = [{"options": f"backend=auto mib={size} exact=True", "loss": "row_lse=True"} for size in (64, 128)]
    said = disagreement(calls)
    assert "on options: mib=64 on rank 0 but mib=128 on rank 1. " in said


def test_what_a_rank_refuses_finds_room_whatever_it_says():
    heard = []

    class Listening(Recorded):
        def gather(self, numbers):
            heard.append(from_words(list(numbers)[2:]))
            return super().gather(numbers)

    with pytest.raises(RangeError), telling(Listening([[0, 0, *to_words("{}")]])):
        raise RangeError("a\u0000name " + "\x07\n\u00e9" * 999)
    assert heard[0].startswith('{"call": "RangeError: a name')


class Recorded:
    """An exchange whose other ranks said something once."""

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
