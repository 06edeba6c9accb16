"""Tables 1, A1 and A2 of "Cut Your Losses in Large-Vocabulary Language Models" on this machine, in one run.

    python -m reproductions.lm_tables --max-seconds 300 --peers FOLDER      on a machine with a CUDA device
    python -m reproductions.lm_tables --small                               tiny sizes on any machine
    python -m reproductions.lm_tables --only 'table 1,*'                    some blocks
    python -m reproductions.lm_tables --add-to FILE                         measure what FILE lacks, keep the rest
    python -m reproductions.lm_tables --docs                                only write the summary to the documentation

Writes reproductions/results/lm-<device>.json and .md after each step. Within a block the methods warm up one after the
other; memory and gradient errors are measured then. For their times the methods take turns in shuffled orders. A row
that had no turn before --max-seconds says so. Running out of memory is a result.

With --add-to a block is measured completely or not at all. Blocks that are not measured again keep the commit and the
date of their own run. --warm 8 first compiles the shapes in 8 processes, which fill the compilers' caches on disk.
"""

from __future__ import annotations

import argparse
import fnmatch
import gc
import multiprocessing
import shlex
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import measure, peers, run
from reproductions import lm_cases, lm_pages
from reproductions.lm_cases import LmCase
from reproductions.records import RESULTS
from tilewise.ops.filter_report import record_filtering

Row = dict[str, Any]
BASELINES = ("torch.compile", "torch.compile, filtered")


@dataclass
class Session:
    """A run: its report, its file, and its time limit."""

    report: dict[str, Any]
    path: Path
    device: torch.device
    dtype: torch.dtype
    repeats: int
    max_seconds: float
    chosen: list[LmCase] = field(default_factory=list)
    earlier: list[Row] = field(default_factory=list)  # rows of the file given by --add-to
    rows: list[Row] = field(default_factory=list)
    start: float = field(default_factory=time.perf_counter)

    @property
    def over(self) -> bool:
        """Whether the time is up."""
        return time.perf_counter() - self.start > self.max_seconds

    def save(self) -> None:
        """Write the JSON file and the page."""
        self.report["seconds"] = round(time.perf_counter() - self.start, 1)
        self.report["results"] = merged(self.earlier, self.rows)
        there = {row["case"] for row in self.report["results"]}
        self.report["not_reached"] = [case.name for case in self.chosen if case.name not in there]
        run.write(self.path, self.report)
        self.path.with_suffix(".md").write_text(lm_pages.markdown(self.report))

    @contextmanager
    def spending(self, case: LmCase, what: str) -> Iterator[None]:
        """Add the time of the body to the report, under the name `what`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            spent = self.report.setdefault("spent_s", {}).setdefault(case.name, {})
            spent[what] = round(spent.get(what, 0.0) + time.perf_counter() - start, 2)


def main(argv: Sequence[str] | None = None) -> Path:
    """Measure and write. Returns the path of the JSON file."""
    arguments = parse(argv)
    if arguments.docs:
        return lm_pages.write_docs(arguments.out or RESULTS / "lm-nvidia-h200.json")
    for folder in arguments.peers:
        sys.path.insert(0, str(folder.resolve()))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not arguments.small:
        raise SystemExit("torch finds no CUDA device. The full sizes need one; --small runs anywhere")
    chosen = choose(arguments.only or "*", arguments.methods, arguments.small)
    if not chosen:
        raise SystemExit(f"no block matches {arguments.only!r} with methods that match {arguments.methods!r}")
    earlier = run.rows_of_file(arguments.add_to, run.device_name(device))
    if arguments.add_to and arguments.methods != "*":
        raise SystemExit("--add-to measures whole blocks, and --methods would leave rows out: give only one of them")
    if arguments.add_to and arguments.only is None:
        chosen = [case for case in chosen if lacking(case, earlier)]
    command = arguments.command or shlex.join(["python", "-m", "reproductions.lm_tables", *(argv or sys.argv[1:])])
    report = run.describe("lm", device, command, arguments.repeats, arguments.max_seconds, commit=arguments.commit)
    name = f"lm-{'small-' if arguments.small else ''}{run.slug(report['device'])}.json"
    session = Session(
        report=report,
        path=arguments.out or RESULTS / name,
        device=device,
        dtype=torch.bfloat16 if device.type == "cuda" else torch.float32,
        repeats=arguments.repeats,
        max_seconds=arguments.max_seconds,
        chosen=chosen,
        earlier=earlier,
    )
    if arguments.warm:
        compiled = compile_ahead(chosen, arguments.warm, arguments.peers, seconds=arguments.max_seconds / 3)
        report["compiled_ahead_s"] = round(time.perf_counter() - session.start, 1)
        print(f"compiled {compiled} shapes in {report['compiled_ahead_s']} s", file=sys.stderr, flush=True)
    for case in chosen:
        if session.over:
            break
        print(f"measuring {case.name}", file=sys.stderr, flush=True)
        run_block(case, session)
    session.save()
    print(f"wrote {session.path}")
    return session.path


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m reproductions.lm_tables", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--max-seconds", type=float, default=300.0, help="start nothing after this many seconds")
    parser.add_argument("--repeats", type=int, default=3, help="turns of each method")
    parser.add_argument("--only", help="measure blocks whose name matches this pattern")
    parser.add_argument("--methods", default="*", help="measure methods whose name matches this pattern")
    parser.add_argument(
        "--add-to", type=Path, help="measure the blocks that this file lacks (or --only), and keep its other blocks"
    )
    parser.add_argument("--warm", type=int, default=0, help="first compile, in this many processes")
    parser.add_argument("--small", action="store_true", help="tiny shapes, any machine")
    parser.add_argument("--peers", type=Path, nargs="*", default=[], help="folders that hold other libraries")
    parser.add_argument("--out", type=Path, help="the JSON file, instead of one in reproductions/results")
    parser.add_argument(
        "--docs", action="store_true", help="do not measure; write the summary of the file to the documentation"
    )
    parser.add_argument("--commit", help=run.COMMIT_HELP)
    parser.add_argument("--command", help="the command to record, instead of this one")
    return parser.parse_args(argv)


def choose(only: str, methods: str, small: bool) -> list[LmCase]:
    """The blocks and methods that match."""
    chosen = []
    for case in lm_cases.all_cases():
        kept = tuple(method for method in case.methods if fnmatch.fnmatchcase(method, methods))
        if kept and fnmatch.fnmatchcase(case.name, only):
            case = lm_cases.replace(case, methods=kept)
            chosen.append(lm_cases.shrunk(case) if small else case)
    return chosen


# An earlier file


def lacking(case: LmCase, rows: Sequence[Row]) -> bool:
    """Whether a method of the case has no row, or a row without times."""
    there = {row["method"] for row in rows if row["case"] == case.name and measured([row])}
    return not there.issuperset(case.methods)


def merged(earlier: Sequence[Row], rows: Sequence[Row]) -> list[Row]:
    """All blocks in the order of the tables. Each is from one run: the later one, unless that measured fewer rows."""
    blocks: dict[str, list[Row]] = {}
    for some in (earlier, rows):
        named: dict[str, list[Row]] = {}
        for row in some:
            named.setdefault(row["case"], []).append(row)
        for name, block in named.items():
            if measured(block) >= measured(blocks.get(name, [])):
                blocks[name] = block
    order = [case.name for case in lm_cases.all_cases()]
    known = sorted(blocks, key=lambda name: order.index(name) if name in order else len(order))
    return [row for name in known for row in blocks[name]]


def measured(block: Sequence[Row]) -> int:
    """Number of rows with a result."""
    return sum(row.get("status", "not reached") not in ("not reached", "warm") for row in block)


# Compiling


def compile_ahead(chosen: Sequence[LmCase], processes: int, folders: Sequence[Path], seconds: float) -> int:
    """Run every shape once in a process of its own, some at a time. Returns how many finished.

    The compilers keep their results in caches on disk. Processes that are not done after `seconds` are terminated.
    """
    context = multiprocessing.get_context("spawn")
    waiting = list({(c.vocabulary, c.hidden, c.counted, c.tokens): c for c in reversed(chosen)}.values())
    running: list[Any] = []
    done, end = 0, time.perf_counter() + seconds
    while (waiting or running) and time.perf_counter() < end:
        while waiting and len(running) < processes:
            process = context.Process(target=compile_block, args=(waiting.pop(), folders, 0.9 / processes))
            process.start()
            running.append(process)
        wait([process.sentinel for process in running], timeout=max(0.0, end - time.perf_counter()))
        ended = [
            process for process in running if process.exitcode is not None
        ]  # read once: a process may end between two reads
        done += sum(process.exitcode == 0 for process in ended)
        running = [process for process in running if process not in ended]
    for process in running:
        process.terminate()
        process.join()
    return done


def compile_block(case: LmCase, folders: Sequence[Path], memory_share: float) -> None:
    """Run one step of every method that compiles something. Failures are reported when the method is measured."""
    sys.path[:0] = [str(folder.resolve()) for folder in folders]
    torch.set_num_threads(1)
    torch._inductor.config.compile_threads = 1
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(memory_share)
    inputs = lm_cases.make_inputs(case, device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    for method in case.methods:
        if method.startswith("eager"):
            continue
        try:
            step = lm_cases.build_step(method, inputs)
            step()
            step.clear()
        except Exception as error:
            print(f"{case.name}, {method}: {measure.failure_of(error).reason}", file=sys.stderr, flush=True)


# Measuring


def run_block(case: LmCase, session: Session) -> None:
    """Measure all methods of a case. Rows are added to the report as soon as something is known."""
    gc.collect()
    gc.freeze()  # keeps later collections from traversing everything that the compilers have loaded
    with session.spending(case, "rate"):
        rate = measure.sustained_rate(session.device)
    with session.spending(case, "inputs and reference"):
        inputs = lm_cases.make_inputs(case, session.device, session.dtype)
        want = lm_cases.exact_gradients(inputs)
        measure.synchronize(session.device)
    grads = sum(inputs[name].numel() * inputs[name].element_size() for name in ("a", "b"))
    rows: dict[str, Row] = {"lower bound": describe_row(case, "lower bound", rate)}
    rows["lower bound"] |= {"status": "ok", "loss_bytes": 4, "gradient_bytes": grads, "both_bytes": grads}
    settle_rate(case, rows, (rate, rate))
    session.rows.append(rows["lower bound"])
    steps: dict[str, measure.Step] = {}
    for method in case.methods:
        row = rows[method] = describe_row(case, method, rate)
        session.rows.append(row)
        if session.over:
            row |= {"status": "not reached", "reason": "the time was up"}
            continue
        try:
            with session.spending(case, "first looks"):
                steps[method] = lm_cases.build_step(method, inputs)
                row |= first_look(steps[method], session.device, want)
        except Exception as error:
            absent = isinstance(error, peers.PeerAbsent)
            failure = measure.Failure("absent", str(error)) if absent else measure.failure_of(error)
            row |= {"status": failure.status, "reason": failure.reason}
            steps.pop(method, None)
        session.save()
    with session.spending(case, "turns"):
        take_turns({method: (steps[method], rows[method]) for method in steps}, case, session)
    with session.spending(case, "rate"):
        settle_rate(case, rows, (rate, measure.sustained_rate(session.device)))
    session.save()
    del steps, inputs, want
    gc.unfreeze()
    gc.collect()
    if session.device.type == "cuda":
        torch.cuda.empty_cache()


def describe_row(case: LmCase, method: str, rate: float) -> Row:
    """The fields of a row that are known before it is measured."""
    sizes = {name: value for name, value in asdict(case).items() if name != "methods"}
    return {"case": case.name, "method": method, **sizes, "rate_tflops": rate / 1e12}


def settle_rate(case: LmCase, rows: dict[str, Row], rates: tuple[float, float]) -> None:
    """Set R of a block, the mean of the rates before and after it, and the lower bound: three products at R."""
    before, after = rates
    rate = (before + after) / 2
    for row in rows.values():
        row["rate_tflops"] = rate / 1e12
        row |= {"rate_before_tflops": before / 1e12, "rate_after_tflops": after / 1e12}
    for part, units in zip(lm_pages.PARTS, (1, 2, 3), strict=True):
        rows["lower bound"][f"{part}_ms"] = 1e3 * units * case.unit_flops / rate


def first_look(step: measure.Step, device: torch.device, want: tuple[Tensor, Tensor]) -> Row:
    """Warm up, and measure the loss, the error of both gradients, and the memory."""
    start = time.perf_counter()
    with record_filtering() as filtered:
        step()
        measure.synchronize(device)
        row: Row = {"status": "warm", "first_s": round(time.perf_counter() - start, 2)}
        if len(filtered):
            row |= {"kept_share": filtered.kept_share[0], "dense": filtered.dense[0]}
            row["largest_dropped"] = filtered.largest_dropped[0]
    del filtered  # it holds tensors, and memory is measured next
    row["loss_value"] = float(step.value) if step.value is not None else None
    for name, leaf, exact in zip(("dE", "dC"), step.leaves, want, strict=True):
        assert leaf.grad is not None
        row[f"error_{name}"] = relative_error(leaf.grad, exact)
    if device.type == "cuda":
        row |= cuda_parts_bytes(step, device)
    step.clear()
    return row


def relative_error(got: Tensor, want: Tensor) -> float:
    """||got - want|| / ||want||, computed in blocks of rows to save memory."""
    lost = whole = 0.0
    for g, w in zip(got.split(16384), want.split(16384), strict=True):
        lost += float((g.float() - w).double().square().sum())
        whole += float(w.double().square().sum())
    return float((lost / whole) ** 0.5)


def cuda_parts_bytes(step: measure.Step, device: torch.device) -> Row:
    """Peak memory of the loss, of the gradient (above what the loss left), and of both."""
    step.clear()
    gc.collect()
    measure.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    loss = step.forward()
    measure.synchronize(device)
    first, held = torch.cuda.max_memory_allocated(device), torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    loss.backward()
    measure.synchronize(device)
    second = torch.cuda.max_memory_allocated(device)
    return {"loss_bytes": first - before, "gradient_bytes": second - held, "both_bytes": max(first, second) - before}


def timed_parts_ms(step: measure.Step, device: torch.device) -> tuple[float, float]:
    """Milliseconds of the loss and of its gradient in one step. On a GPU an untimed step before it fills the queue."""
    if device.type != "cuda":
        step.clear()
        times = [time.perf_counter()]
        loss = step.forward()
        times.append(time.perf_counter())
        loss.backward()
        times.append(time.perf_counter())
        return 1e3 * (times[1] - times[0]), 1e3 * (times[2] - times[1])
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
    step()
    step.clear()
    marks[0].record()
    loss = step.forward()
    marks[1].record()
    loss.backward()
    marks[2].record()
    measure.synchronize(device)
    return float(marks[0].elapsed_time(marks[1])), float(marks[1].elapsed_time(marks[2]))


def take_turns(steps: dict[str, tuple[measure.Step, Row]], case: LmCase, session: Session) -> None:
    """Time all steps in turns. Nothing is written between turns, because the card would cool down meanwhile."""
    samples: dict[str, list[tuple[float, float]]] = {method: [] for method in steps}
    for order in measure.orders(steps, session.repeats):
        for method in order:
            step, row = steps[method]
            if row["status"] not in ("ok", "warm") or (session.over and samples[method]):
                continue
            try:
                samples[method].append(timed_parts_ms(step, session.device))
            except Exception as error:
                failure = measure.failure_of(error)
                row |= {"status": failure.status, "reason": failure.reason}
                continue
            finally:
                step.clear()
            row |= times_of(samples[method], case)
    timed = {method: row for method, (_, row) in steps.items() if "both_ms" in row}
    base = next((timed[name] for name in BASELINES if name in timed), None)
    if base is not None:
        for row in timed.values():
            row["time_ratio"] = row["both_ms"] / base["both_ms"]


def times_of(samples: list[tuple[float, float]], case: LmCase) -> Row:
    """Medians, the spread of the sum, and the rate, counted as three products."""
    both = [sum(sample) for sample in samples]
    median = statistics.median(both)
    return {
        "status": "ok",
        "loss_ms": statistics.median(sample[0] for sample in samples),
        "gradient_ms": statistics.median(sample[1] for sample in samples),
        "both_ms": median,
        "low_ms": min(both),
        "high_ms": max(both),
        "repeats": len(samples),
        "turns_ms": [round(ms, 3) for ms in both],
        "three_products_tflops": 3 * case.unit_flops / (1e-3 * median) / 1e12,
    }


if __name__ == "__main__":
    main()
