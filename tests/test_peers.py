"""The committed counts of other packages' tests agree with the list of peers and with the pages."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RECORD = {entry["peer"]: entry for entry in json.loads((ROOT / "tests/results/peers.json").read_text())["peers"]}


@pytest.fixture
def peers(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    yield __import__("peer_list").PEERS
    sys.modules.pop("peer_list")


def families(cases):
    """The families of cases like "causal llama"."""
    return {case.split()[1] for case in cases}


def test_each_peer_has_a_record(peers):
    assert {peer.name for peer in peers} == set(RECORD)
    for peer in peers:
        entry = RECORD[peer.name]
        assert entry["commit"] == peer.commit or not peer.commit
        assert entry["tests"] == ([peer.ours] if peer.ours else list(peer.tests))
        assert set(entry["failed"]) <= {*peer.reasons.values(), "fails with the peer's own losses too"}, peer.name


@pytest.mark.parametrize("name", RECORD)
def test_the_counts_add_up(name):
    entry = RECORD[name]
    assert 0 < entry["passed"] <= entry["ran"] == entry["passed"] + sum(entry["failed"].values())
    if "passed cases" in entry:
        assert len(set(entry["passed cases"])) == entry["passed"]


def test_the_pages_have_the_counts():
    entry, page = RECORD["transformers"], (ROOT / "docs/concepts/transformers.md").read_text()
    cases = entry["passed cases"]
    assert len(families(cases)) >= 57
    assert f"{entry['passed']} of {entry['ran']} models ({len(families(cases))} families)" in page
    entry, page = RECORD["open_clip_trainer"], (ROOT / "docs/concepts/drop-ins.md").read_text()
    assert f"{entry['passed']} of {entry['ran']} runs agree" in page
    entry = RECORD["sentence_transformers"]
    assert f"**sentence-transformers**: {entry['passed']} of {entry['ran']} tests pass" in page
