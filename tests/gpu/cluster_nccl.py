"""Everything that runs over several ranks, over real NCCL on one card, compared with one process.

    PYTHONPATH=src python -m tests.gpu.cluster_nccl [--ranks 2 3 4] [--device cuda] [--json FILE] [--max-seconds 200]

All ranks use the first card, which NCCL 2.31 and newer can do with NCCL_MULTI_RANK_GPU_ENABLE=1. Groups of all these
numbers of ranks run beside each other, and beside them the runs of `tests.train.rank_runs`. A group whose rank fails is
ended and started again for the checks that are left. It prints a table last and ends with 0 only if every check ran and
every error is within its bound. `--device cpu` runs the same over gloo, and `--only` some of the checks.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests import test_sharded_arguments
from tests.compare import relative_error
from tests.processes import children
from tests.ring import cases, test_ring_head, test_ring_retrieval, test_vocabulary_group
from tests.ring import test_sharded_losses as sharded
from tests.test_sharded_arguments import Place
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import tilewise as tw
from tilewise.ops import limits
from tilewise.ops.distributed.collectives import RowsGroup

ROOT = Path(__file__).parents[2]
# Above 1.5 times the error of the same call in one process: sums over ranks have another order.
SLACK = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2**-7}
TIMEOUT_S = 60  # of a collective
GRACE_S = 5.0  # for the other ranks of one that failed, to say what they know
Tensors = dict[str, Tensor]


class Worst:
    """The largest error beyond what the same call in one process has, and the number of comparisons."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.bound, self.excess, self.where, self.compared = SLACK[dtype], -torch.inf, "nothing", 0

    def add(self, where: str, got: Tensor, plain: Tensor, want: Tensor) -> None:
        if want.numel() == 0 or not want.is_floating_point():
            return
        own, ours = relative_error(plain, want), relative_error(got, want)
        self.compared += 1
        if not ours - 1.5 * own <= self.excess:  # NaN is the worst
            self.excess, self.where = ours - 1.5 * own, f"{where}: {ours:.2e}, in one process {own:.2e}"

    def same(self, where: str, got: Tensor, want: Tensor) -> None:
        """Must be equal, bit by bit."""
        assert torch.equal(got.cpu(), want.cpu()), where
        self.compared += want.numel()
        if self.where == "nothing":
            self.excess, self.where = 0.0, f"{where}: equal bits"


def gathered(value: Any) -> list[Any]:
    """The objects of all ranks."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def on_cpu(parts: Tensors) -> Tensors:
    return {name: value.cpu() for name, value in parts.items()}


def cast(x: Tensors, dtype: torch.dtype, device: str) -> Tensors:
    """Numbers that are added to features get the type of the statistics."""
    narrow = {"hidden", "states", "weight", "teacher_hidden", "teacher_weight"}
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    types = {name: dtype if name in narrow else wide for name in x}
    return {name: (v.to(types[name]) if v.is_floating_point() else v).to(device) for name, v in x.items()}


def exactly(x: Tensors) -> Tensors:
    return {name: v.cpu().double() if v.is_floating_point() else v.cpu() for name, v in x.items()}


def check_layouts(device: str, world: int, dtype: torch.dtype, worst: Worst) -> None:
    """Every loss with a classifier over every layout of DTensors, among them sequence parallel and strided shards."""
    rounded = cast(sharded.head_tensors(), dtype, device)
    wants = {name: sharded.results(case, exactly(rounded)) for name, case in sharded.HEADS.items()}
    plain = {name: sharded.results(case, rounded) for name, case in sharded.HEADS.items()}
    for shape in ((world,), (2, 2)) if world == 4 else ((world,),):
        mesh = init_device_mesh(device, shape)
        for layout, (of, rows, columns, ring) in sharded.LAYOUTS.items():
            if len(of) != len(shape):
                continue
            x = sharded.head_shards(mesh, rows, columns, rounded)
            with limits.changed(ring_head=0 if ring else 2**30):
                for name, case in sharded.HEADS.items():
                    got = sharded.results(case, x)
                    for key, want in wants[name].items():
                        where = f"{layout}, {name}, {key}"
                        worst.add(where, sharded.whole(got[key]), plain[name][key], want)


def check_units(device: str, world: int, dtype: torch.dtype, worst: Worst) -> None:
    """Heads in FSDP2 units of their own over three steps; accumulation, HSDP, (dp, tp), a tied embedding."""
    place = Place(device, dtype)
    for where, got, want in test_sharded_arguments.unit_results(place):
        worst.add(where, got, want(place), want(test_sharded_arguments.EXACT))


def check_ring_chunks(device: str, world: int, dtype: torch.dtype, worst: Worst) -> None:
    """A classifier in a ring, with gradients in chunks of columns; the first rank has no valid token."""
    sizes, rows = [0, 130, 256, 300], [3, 4, 0, 9]
    for travelling in ("float32", "features") if dtype == torch.bfloat16 else ("float32",):
        options = tw.TileOptions(workspace_mib=1, ring_gradients=travelling)
        of = sizes[-world:], rows[:world], 1024, dtype
        step = test_ring_head.head_case(*of, device=device, options=options)
        exact = test_ring_head.head_case(*of, kind=torch.float64)
        parts = gathered([value.cpu() for value in step(dist.get_rank(), RowsGroup(dist.group.WORLD.group_name))[1:]])
        plain, want = step()[1:], exact()[1:]
        worst.add(f"{travelling}, loss", sum(part[0] for part in parts), plain[0], want[0])
        for k, name in enumerate(("hidden", "head", "bias"), 1):
            worst.add(f"{travelling}, {name}", torch.cat([part[k] for part in parts]), plain[k], want[k])


def check_vocabulary(device: str, world: int, dtype: torch.dtype, worst: Worst) -> None:
    """A vocabulary group: losses and token statistics, with the same bits of a row in every batch.

    Then only the first shard has targets, so that the other ranks have no valid one.
    """
    sizes = [40, 0, 33] if world == 3 else [40, 33] if world == 2 else [30, 0, 3, 40]
    some = test_vocabulary_group.SOME.to(device)
    for classes in (73, sizes[0]):
        whole, few = test_vocabulary_group.batches(dist.group.WORLD, dtype, sizes, device, classes=classes)
        plain, _ = test_vocabulary_group.batches(None, dtype, device=device, classes=classes)
        exact, _ = test_vocabulary_group.batches(None, dtype, classes=classes, kind=torch.float64)
        for key, want in exact.items():
            worst.add(f"targets below {classes}, {key}", whole[key], plain[key], want)
            worst.same(f"{key} in another batch", few[key], whole[key][some])


def check_contrastive(device: str, world: int, dtype: torch.dtype, worst: Worst) -> None:
    """The contrastive losses with `group=`, one rank without rows: blocks alone, in teams of two, and in one team."""
    rows, negatives = [33, 18, 0, 12][:world], [3, 0, 9, 4][:world]
    tensors = cases.make_tensors(sum(rows), sum(negatives), dtype, device)
    numbers = {"scale", "bias", "weights", "a_log_q", "c_log_q"}
    if dtype == torch.bfloat16:
        tensors |= {name: tensors[name].float() for name in numbers}
    mine = cases.cut(tensors, dist.get_rank(), rows, negatives)
    for name in ("clip", "siglip", "info_nce", "info_nce-shared", "nt_xent", "supcon"):
        plain, wants = (cases.loss_and_gradients(name, x) for x in (tensors, exactly(tensors)))
        for columns in (0, 2 * max(rows), 8192):
            with limits.changed(ring_columns=columns):
                got = cases.joined(gathered(on_cpu(cases.loss_and_gradients(name, mine, group=dist.group.WORLD))))
            for key, want in wants.items():
                worst.add(f"{name}, {key}, up to {columns} columns at once", got[key], plain[key], want)


def check_search(device: str, world: int, dtype: torch.dtype, worst: Worst) -> None:
    """Ranks and nearest items, with ties: integers."""
    rows, cols = test_ring_retrieval.SPLITS[world - 1]
    for kind in test_ring_retrieval.KINDS:
        found = test_ring_retrieval.run_ranks(dist.group.WORLD, kind, rows, cols, dtype, device)
        parts = gathered([value.cpu() for value in found])
        test_ring_retrieval.check([test_ring_retrieval.BothRanks(*part) for part in parts], kind, rows, cols, dtype)
        worst.same(kind, found.query_to_gallery, found.query_to_gallery)
    rows, cols = test_ring_retrieval.SEARCHES[world - 1]
    work, (arguments, more) = test_ring_retrieval.search_over_ranks(rows, cols, dtype, device)
    want = tw.nearest(*arguments, **more)
    parts = gathered([value.cpu() for value in work(dist.group.WORLD)])
    for k, name in enumerate(("scores", "indices")):
        worst.same(f"nearest, {name}", torch.cat([part[k] for part in parts]), getattr(want, name))


CHECKS: dict[str, Callable[[str, int, torch.dtype, Worst], None]] = {
    "units": check_units,
    "ring in chunks": check_ring_chunks,
    "vocabulary": check_vocabulary,
    "contrastive": check_contrastive,
    "search": check_search,
    "layouts": check_layouts,
}
TYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
JOBS = [f"{name}, {kind}" for kind in TYPES for name in CHECKS]


def in_order(world: int) -> list[str]:
    """The checks of a group. Groups begin at different ones: they share the cache of compiled kernels."""
    first = (world - 2) * len(JOBS) // 3 % len(JOBS)
    return JOBS[first:] + JOBS[:first]


def serve(args: argparse.Namespace) -> None:
    """One rank: runs the checks and writes a line for each."""
    torch.set_num_threads(1)
    how: dict[str, Any] = {"timeout": timedelta(seconds=TIMEOUT_S)}
    if args.device == "cuda":
        torch.cuda.set_device(0)
        how["device_id"] = torch.device("cuda:0")
    backend = "nccl" if args.device == "cuda" else "gloo"
    dist.init_process_group(
        backend, init_method=f"file://{args.folder}/store", rank=args.serve, world_size=args.world, **how
    )
    with (Path(args.folder) / f"rank-{args.serve}").open("a", buffering=1) as out:
        for job in args.only:
            name, kind = job.rsplit(", ", 1)
            began, worst = time.monotonic(), Worst(TYPES[kind])
            said: dict[str, Any] = {"job": job}
            try:
                CHECKS[name](args.device, args.world, TYPES[kind], worst)
                assert worst.compared > 0
                said |= {"worst": worst.where, "excess": worst.excess, "compared": worst.compared}
                said["passed"] = worst.excess <= worst.bound
            except Exception as error:
                traceback.print_exc()
                said |= {"passed": False, "worst": f"{type(error).__name__}: {error}"[:400], "broken": True}
            out.write(json.dumps(said | {"seconds": round(time.monotonic() - began, 1)}) + "\n")
            if said.get("broken"):
                os._exit(1)  # the other ranks may be in a collective
    dist.destroy_process_group()


class Group:
    """The ranks of one number, as processes, and what they have written."""

    def __init__(self, world: int, device: str, jobs: list[str]) -> None:
        self.world, self.device, self.left = world, device, jobs
        self.results: list[dict[str, Any]] = []
        self.failed_at: float | None = None
        self.start()

    def start(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        command = [
            sys.executable,
            "-m",
            "tests.gpu.cluster_nccl",
            "--device",
            self.device,
            "--folder",
            self.folder.name,
        ]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "LOCAL_RANK": "0"}
        self.ranks = [
            subprocess.Popen(
                [*command, "--world", str(self.world), "--serve", str(rank), "--only", *self.left],
                cwd=ROOT,
                env=environment,
                stderr=(Path(self.folder.name) / f"errors-{rank}").open("w"),
            )
            for rank in range(self.world)
        ]

    def poll(self, *, over: bool = False) -> bool:
        """Whether the group is done. Starts it again for the checks after one that broke."""
        codes = [process.poll() for process in self.ranks]
        if any(codes) and self.failed_at is None:
            self.failed_at = time.monotonic()
        broken = self.failed_at is not None and time.monotonic() > self.failed_at + GRACE_S
        if None in codes and not over and not broken:
            return False
        for process in self.ranks:
            process.kill()
            process.wait()
        self.collect(over=over)
        if self.left and not over:
            self.failed_at = None
            self.start()
            return False
        return True

    def collect(self, *, over: bool) -> None:
        """Read the lines of all ranks. A check counts if every rank has one; the first without one was broken."""
        said: list[dict[str, dict[str, Any]]] = []
        for rank in range(self.world):
            path = Path(self.folder.name) / f"rank-{rank}"
            lines = path.read_text().splitlines() if path.exists() else []
            said.append({one["job"]: one for one in map(json.loads, lines)})
        for job in list(self.left):
            found = [lines[job] for lines in said if job in lines]
            whole = len(found) == self.world
            if not whole and over:
                self.results.append(
                    {"job": job, "passed": False, "worst": "not run to its end in time", "seconds": 0.0}
                )
                continue
            if not whole and not found:
                found = [{"job": job, "passed": False, "worst": self.last_words(), "seconds": 0.0}]
            bad = [one for one in found if not one["passed"]]
            self.results.append(max(bad or found, key=lambda one: one.get("excess", torch.inf)))
            self.results[-1]["passed"] = whole and not bad
            self.left.remove(job)
            if not whole:
                return
        if over:
            self.left = []

    def last_words(self) -> str:
        """The last line of the errors of the first rank that failed."""
        for rank, process in enumerate(self.ranks):
            text = (Path(self.folder.name) / f"errors-{rank}").read_text(errors="replace").strip()
            if process.returncode not in (0, -9) and text:
                return f"rank {rank}: {text.splitlines()[-1]}"[:400]
        return f"a rank ended with {[process.returncode for process in self.ranks]}"


class Trainer:
    """Runs of `tests.train.rank_runs`, and what they have written."""

    def __init__(self, device: str, path: Path, *arguments: str) -> None:
        command = [sys.executable, "-m", "tests.train.rank_runs", "--device", device, "--lines", str(path)]
        self.process, self.path = subprocess.Popen([*command, *arguments], cwd=ROOT), path

    def results(self) -> list[dict[str, Any]]:
        """Runs that did not end in time are ended, and one that has failed."""
        code = self.process.poll()
        if code is None:
            for process in [*descendants(self.process.pid), self.process.pid]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            self.process.wait()
        found = [json.loads(line) for line in self.path.read_text().splitlines()] if self.path.exists() else []
        if code is None or (code and all(one["passed"] for one in found)):
            why = "did not end in time" if code is None else f"ended with {code}"
            found.append({"job": self.path.name, "passed": False, "worst": why, "seconds": 0.0})
        return found


def descendants(parent: int) -> list[int]:
    """The processes that a process has started, and those that they have."""
    return [one for child in children(parent) for one in (child, *descendants(child))]


def rows_of(results: dict[str, list[dict[str, Any]]]) -> Iterator[str]:
    for group, found in results.items():
        for one in found:
            mark = "passed" if one["passed"] else "FAILED"
            yield f"{group:10} {one['job']:28} {mark}  {one['seconds']:6.1f} s  {one.get('worst', '')}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 3, 4])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--max-seconds", type=float, default=200.0)
    parser.add_argument("--only", nargs="+", help="names of checks, such as 'units, float32'")
    parser.add_argument("--no-trainer", action="store_true")
    parser.add_argument("--kills", type=int, default=3, help="runs of the trainer in which a rank is killed")
    for inner in ("--serve", "--world"):
        parser.add_argument(inner, type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve is not None:
        serve(args)
        return 0
    began = time.monotonic()
    results: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as name:
        trainers = []
        if not args.no_trainer:
            runs = [["--only", "sharded"], ["--only", "numbers"]]
            runs += [["--only", "kills", "--kills", "1", "--seed", str(seed)] for seed in range(args.kills)]
            trainers = [Trainer(args.device, Path(name) / "-".join(run[1::2]), *run) for run in runs]
        jobs = {n: [job for job in in_order(n) if not args.only or job in args.only] for n in args.ranks}
        groups = [Group(n, args.device, jobs[n]) for n in args.ranks]
        running: list[Any] = list(groups)
        while running or any(trainer.process.poll() is None for trainer in trainers):
            over = time.monotonic() - began > args.max_seconds
            running = [group for group in running if not group.poll(over=over)]
            if over:
                break
            time.sleep(0.2)
        results = {f"{group.world} ranks": group.results for group in groups}
        if trainers:
            results["trainer"] = [one for trainer in trainers for one in trainer.results()]
    everything = [one for found in results.values() for one in found]
    failed = sum(not one["passed"] for one in everything)
    summary = {
        "device": torch.cuda.get_device_name() if args.device == "cuda" else "cpu",
        "transport": f"nccl {'.'.join(map(str, torch.cuda.nccl.version()))}" if args.device == "cuda" else "gloo",
        "torch": torch.__version__,
        "passed": len(everything) - failed,
        "failed": failed,
        "seconds": round(time.monotonic() - began, 1),
        "results": results,
    }
    if args.json is not None:
        args.json.write_text(json.dumps(summary, indent=1) + "\n")
    print("\n".join(rows_of(results)))
    print(f"{len(everything) - failed} passed, {failed} failed, {summary['seconds']:g} s")
    return 1 if failed or not everything else 0


if __name__ == "__main__":
    sys.exit(main())
