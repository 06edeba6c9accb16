"""Processes for tests, forked from a server that has imported torch. The import takes longer than most jobs.

macOS's own libraries may not be used in a forked process. There each process is a new one.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import runpy
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import forkserver
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks import measure

START = "spawn" if sys.platform == "darwin" else "forkserver"
# The host's own name often leads nowhere on macOS.
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]

# Freed memory is returned, so that resident memory is allocated memory. New memory is filled with 0xfe (a huge float),
# so that reads of uninitialized memory show. Set for these processes only; macOS ignores it.
ENVIRONMENT = {**measure.RETURNS_MEMORY, "MALLOC_PERTURB_": "1"}
IMPORTED = ["torch.distributed", "torch._dynamo", "tilewise", "tilewise.train.loop"]


def forked() -> BaseContext:
    """The context of such processes. A pytest process has one server, and its first caller starts it."""
    context = multiprocessing.get_context(START)
    if START == "spawn":
        return context
    context.set_forkserver_preload(IMPORTED)
    with mock.patch.dict(os.environ, ENVIRONMENT | dict(os.environ)):
        forkserver.ensure_running()
    return context


def run_ranks(work: Callable[..., None], args: tuple[Any, ...], world: int) -> None:
    """Run ``work(rank, *args)`` in ``world`` processes. Raises the error of the first that fails."""
    import torch.multiprocessing as mp

    forked()
    mp.start_processes(work, args, nprocs=world, start_method=START)


def peak_bytes(target: str, arguments: dict[str, Any]) -> int:
    """`benchmarks.measure.cpu_peak_bytes` in a forked process."""
    measure.require_counter()
    with ProcessPoolExecutor(1, forked()) as pool:
        return pool.submit(_peak_bytes, target, arguments).result(600)


def _peak_bytes(target: str, arguments: dict[str, Any]) -> int:
    m_perturb = -6
    ctypes.CDLL(None).mallopt(m_perturb, 0)  # it writes to memory that the step does not touch
    return measure.peak_bytes_of(target, arguments)


Command = tuple[dict[str, str], list[str]]  # environment and arguments


def start_command(
    main: Callable[[], object], output: Path, environment: dict[str, str], arguments: list[str]
) -> BaseProcess:
    """Start ``main`` with these arguments in a forked process, which writes to the file ``output``."""
    process = forked().Process(target=_command, args=(main, str(output), environment, arguments))
    process.start()
    return process


def run_commands(main: Callable[[], object], folder: Path, commands: list[Command]) -> list[tuple[int, str]]:
    """Run ``main`` for each command, side by side. Returns exit codes and outputs."""
    outputs = [folder / f"output-{index}" for index in range(len(commands))]
    running = [start_command(main, output, *command) for output, command in zip(outputs, commands, strict=True)]
    for process in running:
        process.join(300)
        assert process.exitcode is not None, "a process did not end within 300 s"
    return [(process.exitcode, output.read_text()) for process, output in zip(running, outputs, strict=True)]


def run_script() -> None:
    """Run the script that is the first argument as Python would; for `run_commands`."""
    del sys.argv[0]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    runpy.run_path(sys.argv[0], run_name="__main__")


def free_port() -> int:
    """A port of this machine that nothing listens to."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def rank_environments(world: int) -> list[dict[str, str]]:
    """The variables that torchrun sets, of each rank."""
    port = str(free_port())
    common = {"OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(world)}
    return [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world)]


def _command(main: Callable[[], object], output: str, environment: dict[str, str], arguments: list[str]) -> None:
    os.environ.update(environment)
    sys.argv = ["tilewise", *arguments]
    target = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(target, 1)
    os.dup2(target, 2)
    main()


def children(parent: int) -> list[int]:
    """Ids of the processes that a process has started, oldest first."""
    listed = Path(f"/proc/{parent}/task/{parent}/children")
    if listed.exists():
        return [int(child) for child in listed.read_text().split()]
    pairs = subprocess.run(["ps", "-A", "-o", "ppid=,pid="], capture_output=True, text=True, check=True).stdout
    return sorted(int(child) for one, child in map(str.split, pairs.splitlines()) if int(one) == parent)
