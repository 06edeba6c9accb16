"""Tests of a GPU machine, spread over processes: kernels compile on the CPU, several seconds for each.

GPU_SHARD="i/n"   this process is number i of n. Alone it takes every n-th test.
GPU_CLAIMS=folder the processes share the tests: each begins at a place of its own and takes what nobody has claimed,
                  so that neighbours, which use the same kernels, mostly meet in one process.
                  A file there holds the name of a test that is not done, and nothing of one that is.
GPU_STACKS=file   where all threads are, of a test that takes longer than LONG_S.
GPU_SEED=number   of the random inputs; otherwise they are fresh every time. The header tells it.
"""

import faulthandler
import hashlib
import os
import time
from pathlib import Path

import pytest
from _pytest.runner import runtestprotocol

LONG_S = 100.0
os.environ.setdefault("GPU_SEED", str(time.time_ns() % 2**31))


def pytest_report_header() -> str:
    return f"GPU_SEED={os.environ['GPU_SEED']}"


def shard() -> tuple[int, int]:
    index, count = (int(part) for part in os.environ.get("GPU_SHARD", "0/1").split("/"))
    assert 0 <= index < count, f"GPU_SHARD is i/n with 0 <= i < n, got {index}/{count}"
    return index, count


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    index, count = shard()
    if "GPU_CLAIMS" in os.environ:
        start = index * len(items) // count
        items[:] = items[start:] + items[:start]
    else:
        items[:] = items[index::count]


def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    """True, "it has been taken care of": by another process that has the test, or here."""
    claims = os.environ.get("GPU_CLAIMS")
    if claims is None:
        return None
    claim = Path(claims) / hashlib.sha256(item.nodeid.encode()).hexdigest()
    try:
        with claim.open("x") as file:
            file.write(item.nodeid)
    except FileExistsError:
        return True
    with Path(os.environ["GPU_STACKS"]).open("a") as stacks:
        faulthandler.dump_traceback_later(LONG_S, file=stacks)
        try:
            run_claimed(item)
        finally:
            faulthandler.cancel_dump_traceback_later()
    claim.write_text("")
    return True


def run_claimed(item: pytest.Item) -> None:
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    runtestprotocol(item, nextitem=None)  # which test is next is not known yet: tear everything down
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)


@pytest.fixture
def seed() -> int:
    return int(os.environ["GPU_SEED"])
