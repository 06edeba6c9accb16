"""Tuned sizes: written once, read once per process, and never used if anything about the file is wrong."""

import dataclasses
import json
import warnings

import pytest
import torch

from tilewise.kernels import tuned_file
from tilewise.kernels.triton_impl import sizes

CARD, DEVICE = "NVIDIA Test Card (8 GB)", torch.device("cuda", 0)
TUNED = sizes.MORE["gradient"][3]
VALUES = {"2": {"gradient": list(dataclasses.astuple(TUNED))}}


@pytest.fixture(autouse=True)
def card(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: CARD)
    sizes.forget_tuned()
    yield
    sizes.forget_tuned()


def test_tuned_fields_replace_those_of_the_table():
    path = tuned_file.write(CARD, VALUES)
    assert path.parent.name == "tilewise"
    assert path.name.startswith("nvidia-test-card-8-gb-tilewise-")
    assert sizes.gradient_sizes(DEVICE, torch.bfloat16, 64) == TUNED
    assert sizes.forward_sizes(DEVICE, torch.bfloat16, 64, columns=True) == sizes.TABLE["sm_80", 2].forward
    assert sizes.gradient_sizes(DEVICE, torch.float32, 64) == sizes.TABLE["sm_80", 4].gradient


def test_the_file_is_read_once(monkeypatch):
    reads = []
    monkeypatch.setattr(tuned_file, "read", lambda *args: (reads.append(args), (None, None))[1])
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for index in range(3):
            sizes.gradient_sizes(torch.device("cuda", index), dtype, 64)
    assert len(reads) == 1


def test_without_a_file_the_table_is_used():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert sizes.row_of(DEVICE, 2) == sizes.TABLE["sm_80", 2]


def good():
    return tuned_file.identity(CARD) | {"sizes": VALUES}


DAMAGED = {
    "empty": "",
    "cut": json.dumps(good())[:-9],
    "a list": "[]",
    "binary": "\x00\x01",
    "deep": "[" * 100_000,
    "another card": json.dumps(good() | {"card": "NVIDIA Other"}),
    "another version": json.dumps(good() | {"tilewise": "0.0.1"}),
    "another Triton": json.dumps(good() | {"triton": "1.0"}),
    "no sizes": json.dumps(tuned_file.identity(CARD)),
    "unknown field": json.dumps(good() | {"sizes": {"2": {"colour": [1]}}}),
    "unknown type": json.dumps(good() | {"sizes": {"3": VALUES["2"]}}),
    "no candidate": json.dumps(good() | {"sizes": {"2": {"gradient": [3, 5, 7, 1, 1, 1, 1, 1, 1]}}}),
    "huge": json.dumps(good() | {"sizes": {"2": {"gradient": [1048576] * 9}}}),
    "words": json.dumps(good() | {"sizes": {"2": {"gradient": "large"}}}),
}


@pytest.mark.parametrize("text", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_or_foreign_file_is_ignored_with_one_warning(text):
    path = tuned_file.path_for(CARD)
    path.parent.mkdir(parents=True)
    path.write_text(text)
    with pytest.warns(RuntimeWarning, match=r"tuned sizes .* is ignored .*tilewise tune") as seen:
        rows = [sizes.row_of(DEVICE, item) for item in (2, 4)]
    assert rows == [sizes.TABLE["sm_80", 2], sizes.TABLE["sm_80", 4]]
    assert len(seen) == 1


def test_a_folder_in_place_of_the_file_is_ignored():
    tuned_file.path_for(CARD).mkdir(parents=True)
    with pytest.warns(RuntimeWarning, match="is ignored"):
        assert sizes.row_of(DEVICE, 2) == sizes.TABLE["sm_80", 2]


def test_another_row_is_tried_and_forgotten():
    other = sizes.TABLE["sm_90", 2]
    with sizes.trying(DEVICE, 2, other):
        assert sizes.row_of(DEVICE, 2) is other
    assert sizes.row_of(DEVICE, 2) == sizes.TABLE["sm_80", 2]
    with sizes.trying(DEVICE, 2, other):
        assert sizes.row_of(DEVICE, 2) is other
    assert sizes.row_of(DEVICE, 2) == sizes.TABLE["sm_80", 2]


@pytest.mark.parametrize("item", [2, 4])
def test_the_sizes_of_every_card_are_candidates(item):
    for (_, size), row in sizes.TABLE.items():
        for field in sizes.MORE:
            if size == item and getattr(row, field) is not None:
                assert getattr(row, field) in sizes.candidates(field, item)
