"""Long-lived ranks of gloo groups that run one job after another. Starting a process is the slow part of a test."""

from __future__ import annotations

import atexit
import functools
import importlib
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.processes import IMPORTED, forked

Job = Callable[..., Any]


@dataclass(frozen=True)
class Failed:
    """The error of a rank, and the time until it was raised."""

    kind: str
    message: str
    trace: str
    seconds: float


def _serve(rank: int, world: int, path: str, timeout_s: float, pipe: Any) -> None:
    torch.set_num_threads(1)
    for name in IMPORTED:  # a forked process has them already
        importlib.import_module(name)
    store = dist.FileStore(path, world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=timeout_s))
    groups = {size: dist.new_group(list(range(size))) for size in range(1, world)}
    groups[world] = dist.group.WORLD
    pipe.send_bytes(b"ready")
    while True:
        try:
            job, size, args = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        started = time.monotonic()
        try:
            result = job(groups[size], *args)
        except Exception as error:
            trace = traceback.format_exc()
            result = Failed(type(error).__name__, str(error), trace, time.monotonic() - started)
        pipe.send_bytes(pickle.dumps(result))


class Crew:
    """``world`` processes in one gloo group, with a sub-group of the first 1, 2, ... of them."""

    def __init__(self, world: int, *, timeout_s: float = 300.0) -> None:
        context = forked()
        self.folder = tempfile.TemporaryDirectory()
        self.world, self.ranks = world, []
        for rank in range(world):
            here, there = context.Pipe()
            args = (rank, world, os.path.join(self.folder.name, "store"), timeout_s, there)
            process = context.Process(target=_serve, args=args, daemon=True)
            process.start()
            there.close()
            self.ranks.append((process, here))
        for _, pipe in self.ranks:
            assert pipe.poll(600)
            assert pipe.recv_bytes() == b"ready"

    def start(self, job: Job, *args: Any, world: int | None = None) -> None:
        """Give the first ``world`` ranks ``job(group, *args)`` to do."""
        size = world or self.world
        for _, pipe in self.ranks[:size]:
            pipe.send_bytes(pickle.dumps((job, size, args)))

    def collect(self, rank: int, limit_s: float = 600.0) -> Any:
        """The result or the failure of a rank."""
        process, pipe = self.ranks[rank]
        assert pipe.poll(limit_s), f"rank {rank} did not answer within {limit_s} s"
        try:
            return pickle.loads(pipe.recv_bytes())
        except EOFError:
            process.join(5)
            return Failed("Died", f"exit code {process.exitcode}", "", 0.0)

    def outcomes(self, job: Job, *args: Any, world: int | None = None) -> list[Any]:
        """The result or the failure of each rank."""
        self.start(job, *args, world=world)
        return [self.collect(rank) for rank in range(world or self.world)]

    def run(self, job: Job, *args: Any, world: int | None = None) -> list[Any]:
        """The result of each rank; fails if one of them did."""
        found = self.outcomes(job, *args, world=world)
        failures = [(rank, result) for rank, result in enumerate(found) if isinstance(result, Failed)]
        # The error of the rank that failed first explains more than the GroupErrors of the others.
        failures.sort(key=lambda failure: failure[1].kind == "GroupError")
        assert not failures, f"rank {failures[0][0]}: {failures[0][1].trace}"
        return found

    def close(self) -> None:
        """End the processes."""
        for process, pipe in self.ranks:
            pipe.close()
            process.join(5)
            if process.is_alive():
                process.kill()
        self.folder.cleanup()


@functools.cache
def shared_crew() -> Crew:
    """Four ranks for all test modules of this session."""
    crew = Crew(4)
    atexit.register(crew.close)
    return crew


@pytest.fixture(scope="module")
def crew() -> Crew:
    """Four ranks."""
    return shared_crew()
