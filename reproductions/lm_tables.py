"""Tables 1, A1 and A2 of "Cut Your Losses in Large-Vocabulary Language Models" on this machine, in one run.

    python -m reproductions.lm_tables --max-seconds 300 --peers FOLDER      on a machine with a CUDA device
    python -m reproductions.lm_tables --small                               anywhere: does it run at all?
    python -m reproductions.lm_tables --only 'table 1,*'                    some blocks
    python -m reproductions.lm_tables --add-to reproductions/results/lm-X.json what that file lacks, beside what it has
    python -m reproductions.lm_tables --docs                                only the summary in the documentation

Writes reproductions/results/lm-<device>.json and .md as it goes. Within a block the methods warm up one after the
other (then memory and gradient error are taken), and take turns for their times, each time in another order. A row
that did not get its turn before --max-seconds says so; out of memory is a result. With --add-to a block is measured
whole or not at all, and blocks that are not measured again are kept with the commit and the date of their time.
--warm 8 compiles the shapes side by side first, in processes that leave their results in the caches on disk.
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
    """A run: where it writes, and how much time is left."""

    report: dict[str, Any]
    path: Path
    device: torch.device
    dtype: torch.dtype
    repeats: int
    max_seconds: float
    chosen: list[LmCase] = field(default_factory=list)
    earlier: list[Row] = field(default_factory=list)  # rows of another run's file
    rows: list[Row] = field(default_factory=list)
    start: float = field(default_factory=time.perf_counter)

    @property
    def over(self) -> bool:
        """The time is up."""
        return time.perf_counter() - self.start > self.max_seconds

    def save(self) -> None:
        """Both files, whole at any time."""
        self.report["seconds"] = round(time.perf_counter() - self.start, 1)
        self.report["results"] = merged(self.earlier, self.rows)
        there = {row["case"] for row in self.report["results"]}
        self.report["not_reached"] = [case.name for case in self.chosen if case.name not in there]
        run.write(self.path, self.report)
        self.path.with_suffix(".md").write_text(lm_pages.markdown(self.report))

    @contextmanager
    def spending(self, case: LmCase, what: str) -> Iterator[None]:
        """Add the time of this to the report: where does a block's time go?"""
        start = time.perf_counter()
        try:
            yield
        finally:
            spent = self.report.setdefault("spent_s", {}).setdefault(case.name, {})
            spent[what] = round(spent.get(what, 0.0) + time.perf_counter() - start, 2)


def main(argv: Sequence[str] | None = None) -> Path:
    """Measure, write, and return the path of the JSON file."""
    arguments = parse(argv)
    if arguments.docs:
        return lm_pages.write_docs(arguments.out or RESULTS / "lm-nvidia-h200.json")
    for folder in arguments.peers:
        sys.path.insert(0, str(folder.resolve()))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not arguments.small:
        raise SystemExit("torch sees no CUDA device. The full sizes need one; --small runs anywhere")
    chosen = choose(arguments.only or "*", arguments.methods, arguments.small)
    if not chosen:
        raise SystemExit(f"no block is called like {arguments.only!r} with methods like {arguments.methods!r}")
    earlier = run.rows_of_file(arguments.add_to, run.device_name(device))
    if arguments.add_to and arguments.methods != "*":
        raise SystemExit("--methods leaves rows out, and --add-to takes whole blocks: give one of them")
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
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m reproductions.lm_tables", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--max-seconds", type=float, default=300.0, help="begin nothing after this long")
    parser.add_argument("--repeats", type=int, default=3, help="turns of each method")
    parser.add_argument("--only", help="blocks whose name matches this pattern")
    parser.add_argument("--methods", default="*", help="methods whose name matches this pattern")
    parser.add_argument(
        "--add-to", type=Path, help="measure what this file lacks (or --only), and keep its other blocks"
    )
    parser.add_argument("--warm", type=int, default=0, help="compile first, in this many processes side by side")
    parser.add_argument("--small", action="store_true", help="tiny shapes, any machine")
    parser.add_argument("--peers", type=Path, nargs="*", default=[], help="folders that hold other libraries")
    parser.add_argument("--out", type=Path, help="the JSON file, instead of one in reproductions/results")
    parser.add_argument("--docs", action="store_true", help="measure nothing; sum up the file in the documentation")
    parser.add_argument("--commit", help=run.COMMIT_HELP)
    parser.add_argument("--command", help="the command to record, where it was another one that started this")
    return parser.parse_args(argv)


def choose(only: str, methods: str, small: bool) -> list[LmCase]:
    """The blocks that were asked for, with the methods that were asked for."""
    chosen = []
    for case in lm_cases.all_cases():
        kept = tuple(method for method in case.methods if fnmatch.fnmatchcase(method, methods))
        if kept and fnmatch.fnmatchcase(case.name, only):
            case = lm_cases.replace(case, methods=kept)
            chosen.append(lm_cases.shrunk(case) if small else case)
    return chosen


# An earlier file


def lacking(case: LmCase, rows: Sequence[Row]) -> bool:
    """Whether a method of the case has no row, or one that was not reached or not timed."""
    there = {row["method"] for row in rows if row["case"] == case.name and measured([row])}
    return not there.issuperset(case.methods)


def merged(earlier: Sequence[Row], rows: Sequence[Row]) -> list[Row]:
    """All blocks in the order of the tables: each from one run, the later one unless it got less far."""
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
    """Rows that say something."""
    return sum(row.get("status", "not reached") not in ("not reached", "warm") for row in block)


# Compiling


def compile_ahead(chosen: Sequence[LmCase], processes: int, folders: Sequence[Path], seconds: float) -> int:
    """Run every shape once in a process of its own, some at a time: how many came to their end.

    What they compile stays in the caches on disk. Those that are not done after `seconds` are ended.
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
        ended = [process for process in running if process.exitcode is not None]  # once: it may end between two looks
        done += sum(process.exitcode == 0 for process in ended)
        running = [process for process in running if process not in ended]
    for process in running:
        process.terminate()
        process.join()
    return done


def compile_block(case: LmCase, folders: Sequence[Path], memory_share: float) -> None:
    """One step of every method that compiles something; what fails here fails again when it is measured."""
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
    """All methods of a case; its rows are in the report as soon as there is something to say."""
    gc.collect()
    gc.freeze()  # or every look for garbage, before memory is measured, goes through all that compilers have loaded
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
    """What is known before anything runs."""
    sizes = {name: value for name, value in asdict(case).items() if name != "methods"}
    return {"case": case.name, "method": method, **sizes, "rate_tflops": rate / 1e12}


def settle_rate(case: LmCase, rows: dict[str, Row], rates: tuple[float, float]) -> None:
    """R of a block is the mean of the machine's rate before and after it; three products at R are its lower bound."""
    before, after = rates
    rate = (before + after) / 2
    for row in rows.values():
        row["rate_tflops"] = rate / 1e12
        row |= {"rate_before_tflops": before / 1e12, "rate_after_tflops": after / 1e12}
    for part, units in zip(lm_pages.PARTS, (1, 2, 3), strict=True):
        rows["lower bound"][f"{part}_ms"] = 1e3 * units * case.unit_flops / rate


def first_look(step: measure.Step, device: torch.device, want: tuple[Tensor, Tensor]) -> Row:
    """Warm up; then the loss, the error of both gradients, and the memory."""
    start = time.perf_counter()
    with record_filtering() as filtered:
        step()
        measure.synchronize(device)
        row: Row = {"status": "warm", "first_s": round(time.perf_counter() - start, 2)}
        if len(filtered):
            row |= {"kept_share": filtered.kept_share[0], "dense": filtered.dense[0]}
            row["largest_dropped"] = filtered.largest_dropped[0]
    del filtered  # it holds what it counts, and memory is measured next
    row["loss_value"] = float(step.value) if step.value is not None else None
    for name, leaf, exact in zip(("dE", "dC"), step.leaves, want, strict=True):
        assert leaf.grad is not None
        row[f"error_{name}"] = relative_error(leaf.grad, exact)
    if device.type == "cuda":
        row |= cuda_parts_bytes(step, device)
    step.clear()
    return row


def relative_error(got: Tensor, want: Tensor) -> float:
    """||got - want|| / ||want||, a block of rows at a time: the gradient of a large head has a float32 copy already."""
    lost = whole = 0.0
    for g, w in zip(got.split(16384), want.split(16384), strict=True):
        lost += float((g.float() - w).double().square().sum())
        whole += float(w.double().square().sum())
    return float((lost / whole) ** 0.5)


def cuda_parts_bytes(step: measure.Step, device: torch.device) -> Row:
    """Peak memory: of the loss and of both above what was there before, of the gradient above what the loss left."""
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
    """Milliseconds of the loss and of its gradient, in one step, with the queue filled by a step before it."""
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
    """Times of all steps, a round at a time. Nothing is written between rounds, or the card would rest there."""
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
    """Medians, the spread of the sum, and the rate if it were three products."""
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
