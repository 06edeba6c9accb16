"""Figures 3 and 4 of "Cut Your Losses in Large-Vocabulary Language Models" from a small model that is trained for real.

    python -m reproductions.lm_figures                      train, write the results, draw
    python -m reproductions.lm_figures --prepare FILE       only tokenize the text, for a machine without it
    python -m reproductions.lm_figures --data FILE          train on a file that --prepare wrote
    python -m reproductions.lm_figures --draw --docs        draw again from the file, update the documentation

Results go to reproductions/results/lm-figures-<device>.json. The model is that of examples/train_lm.py. It is first
trained for about half of --max-seconds on the sources of Python's standard library and most of those of transformers.

Figure 3 is the mean probability of the i-th most likely next token on held-out text: files of transformers that are
not in the training text.

For figure 4 the trained weights are fine-tuned several times on more files of transformers. `VARIANTS` lists the runs,
most important first:

    exact              the exact loss
    filter 1e-3, 1e-2  with that `filter_tolerance`; a step computes everything where the filter would not save time
    exact, other masks the same batches, other dropout masks
    exact, other batches
    exact, again       the same run once more: shows nondeterminism of the GPU
    dense              torch's own loss from all logits: the same values with other rounding

The question is whether a tolerance moves a run further from the exact run of the same batches and masks than the other
changes do. The file is written after every run. A run that would not fit the time is named in the file and not started.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from examples.train_lm import Settings
from torch import Tensor, nn

import tilewise as tw
from benchmarks import measure, run
from examples import train_lm
from reproductions import lm_pictures, lm_text
from reproductions.lm_held_out import THRESHOLD, TOLERANCES, figure_3, held_out_loss, seen_of
from reproductions.records import RESULTS
from tilewise.ops.filter_report import record_filtering

DROPOUT = 0.1  # of the attention, in fine-tuning only
LOOKS = 10  # evaluations on held-out text in a run of fine-tuning
PRETRAINING_SHARE = 0.58  # of the time
GENEROUS = 5.0  # with this many seconds per step, all steps fit and their time is not measured
Report = dict[str, Any]

# (pretraining, fine-tuning) by machine. The numbers of steps are upper limits; fewer if the time is short.
CUDA = (
    Settings(steps=4000, batch=64, length=512, hidden=512, layers=8, lr=1e-3, warmup=150, held_out=32_768),
    Settings(steps=120, batch=64, length=512, hidden=512, layers=8, lr=3e-4, warmup=10, held_out=32_768),
)
CPU = (
    Settings(steps=200, batch=8, length=128, held_out=4096),
    Settings(steps=24, batch=4, length=128, lr=5e-4, warmup=5, held_out=4096),
)
TINY = {"batch": 2, "length": 16, "vocabulary": 500, "hidden": 32, "layers": 1, "held_out": 64, "device": "cpu"}
SMALL = (Settings(steps=4, **TINY), Settings(steps=4, **TINY))


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One fine-tuning run."""

    name: str
    tolerance: float | None = 0.0  # None: the dense loss
    batches: int = 1  # seed of their order
    masks: int = 1  # seed of dropout


LOOSE, TIGHT = max(TOLERANCES), min(TOLERANCES)
VARIANTS = (  # most important first
    Variant(name="exact"),
    Variant(name=f"filter {LOOSE:g}", tolerance=LOOSE),
    Variant(name="exact, other masks", masks=2),
    Variant(name="exact, other batches", batches=2),
    Variant(name=f"filter {TIGHT:g}", tolerance=TIGHT),
    Variant(name="exact, again"),
    Variant(name=f"filter {LOOSE:g}, other batches", tolerance=LOOSE, batches=2),
    Variant(name="dense", tolerance=None),
)


class Clock:
    """Time that is spent and left."""

    def __init__(self, seconds: float) -> None:
        self.start, self.seconds = time.perf_counter(), seconds

    @property
    def left(self) -> float:
        return self.seconds - (time.perf_counter() - self.start)

    @property
    def spent(self) -> float:
        return time.perf_counter() - self.start


# Training


def pace(model: nn.Module, text: Tensor, settings: Settings) -> float:
    """Seconds of a step. Runs a few steps with a copy of the model; times the second half, since the first compile."""
    steps = 12 if settings.device == "cuda" else 4
    marks: list[float] = []

    def watch(step: int, loss: Tensor) -> None:
        if step in (steps // 2 - 1, steps - 1):
            loss.item()  # waits for the device
            marks.append(time.perf_counter())

    train_lm.train(copy.deepcopy(model), text, replace(settings, steps=steps), watch)
    return (marks[1] - marks[0]) / (steps - steps // 2)


def pretrain(model: nn.Module, text: Tensor, settings: Settings, clock: Clock, seconds: float) -> Report:
    """Train as many steps as fit the seconds, at most those of the settings."""
    if seconds < GENEROUS * settings.steps:
        settings = replace(settings, steps=max(2, min(settings.steps, int(seconds / pace(model, text, settings)))))
    start = clock.spent

    with lm_pictures.progress("pretraining", settings.steps) as tick:

        def watch(step: int, loss: Tensor) -> bool:
            tick(lambda: f"loss {loss:.3f}")
            return clock.spent > start + 1.1 * seconds  # slower than estimated: keep time for the figures

        losses = train_lm.train(model, text, settings, watch)
    taken = clock.spent - start
    return {"steps": len(losses), "seconds": taken, "step_ms": 1e3 * taken / len(losses), "losses": losses}


def with_dropout(model: nn.Module) -> nn.Module:
    """A copy of the model, with dropout in its attention."""
    model = copy.deepcopy(model)
    for part in model.modules():
        if hasattr(part, "attention_dropout"):
            part.attention_dropout = DROPOUT
    return model


def that_fits(
    model: nn.Module, text: Tensor, held_out: Tensor, settings: Settings, clock: Clock
) -> tuple[Settings, Tensor]:
    """Settings with as many steps as let all runs fit the time that is left, and the held-out text to evaluate.

    Evaluation takes at most a quarter of the time. If it is slow, it uses a part of the held-out text.
    """
    if clock.left > GENEROUS * len(VARIANTS) * settings.steps:
        return settings, held_out
    model = with_dropout(model)
    options = (tw.TileOptions(filter_tolerance=tolerance) for tolerance in (0.0, LOOSE))
    step = max(pace(model, text, replace(settings, options=one)) for one in options)
    held_out_loss(model, held_out[: settings.length], settings)  # warm-up
    start = clock.spent
    held_out_loss(model, held_out, settings)
    looks = (LOOKS + 1) * (clock.spent - start)
    each = max(0.0, 0.9 * clock.left / len(VARIANTS))
    part = min(1.0, each / 4 / looks)
    held_out = held_out[: max(1, int(part * len(held_out)) // settings.length) * settings.length]
    return replace(settings, steps=max(2, min(settings.steps, int((each - part * looks) / step)))), held_out


def fine_tune(model: nn.Module, text: Tensor, held_out: Tensor, settings: Settings, variant: Variant) -> Report:
    """Fine-tune a copy of the model: its losses, its held-out losses, and what its backward dropped."""
    began = time.perf_counter()
    model = with_dropout(model)
    options = None if variant.tolerance is None else tw.TileOptions(filter_tolerance=variant.tolerance)
    settings = replace(settings, seed=variant.batches, options=options)
    looks = steps_to_look_at(settings.steps)
    held: list[tuple[int, float]] = []
    seen: list[Report] = []
    times: list[float] = []
    step_now, looking, mark = 0, 0.0, (0, 0.0)
    recording, found = ExitStack(), None

    def seed_masks(*_: Any) -> None:
        """Make the dropout masks depend only on the number of the step."""
        torch.manual_seed(1000 * variant.masks + step_now)

    def look() -> None:
        """Evaluate on held-out text. The next step is recorded and not timed."""
        nonlocal looking, found
        start = time.perf_counter()
        held.append((step_now, held_out_loss(model, held_out, settings)))
        model.train()
        looking += time.perf_counter() - start
        if variant.tolerance and step_now < settings.steps:
            found = recording.enter_context(record_filtering())

    def watch(step: int, loss: Tensor) -> None:
        nonlocal step_now, mark, found
        step_now = step + 1
        tick(lambda: f"loss {loss:.3f}")
        if step == held[-1][0]:  # the first step after an evaluation
            recording.close()
            if found is not None:
                seen.append({"step": step, **seen_of(found)})
                found = None
            measure.synchronize(loss.device)
            mark = step_now, time.perf_counter()
        if step_now in looks:
            measure.synchronize(loss.device)
            if step_now > mark[0]:
                times.append((time.perf_counter() - mark[1]) / (step_now - mark[0]))
            look()

    model.register_forward_pre_hook(seed_masks)
    with recording, lm_pictures.progress(f"fine-tuning: {variant.name}", settings.steps) as tick:
        look()
        losses = train_lm.train(model, text, settings, watch)
    return {
        "name": variant.name,
        "tolerance": variant.tolerance,
        "batches": variant.batches,
        "masks": variant.masks,
        "losses": losses,
        "held_out": held,
        "step_ms": 1e3 * statistics.median(times) if times else None,
        "seconds": time.perf_counter() - began,
        "held_out_seconds": looking,
        "skipping": seen,
    }


def steps_to_look_at(steps: int, times: int = LOOKS) -> list[int]:
    """The steps after which the held-out loss is evaluated.

    >>> steps_to_look_at(24, 6)
    [4, 8, 12, 16, 20, 24]
    >>> steps_to_look_at(3, 6)
    [1, 2, 3]
    """
    return sorted({max(1, round(steps * i / times)) for i in range(1, times + 1)})


def differences(runs: Sequence[Report]) -> Report:
    """Differences of each run from the exact run of the same batches; of exact runs, from the first one.

    For the held-out losses: the largest difference and that at the end. For runs with the same batches and masks, also
    the largest difference of the training losses of a step.
    """
    exact = {run["batches"]: run for run in reversed(runs) if run["tolerance"] == 0.0 and run["masks"] == 1}
    found: Report = {}
    for one in runs:
        against = exact.get(one["batches"])
        if against is one:
            against = exact[1]
        if against is None or against is one:
            continue
        apart = [abs(x - y) for (_, x), (_, y) in zip(one["held_out"], against["held_out"], strict=True)]
        found[one["name"]] = {"against": against["name"], "final": apart[-1], "largest": max(apart)}
        if (one["batches"], one["masks"]) == (against["batches"], against["masks"]):
            steps = zip(one["losses"], against["losses"], strict=True)
            found[one["name"]]["largest_of_a_step"] = max(abs(x - y) for x, y in steps)
    return found


# The program


def work(arguments: argparse.Namespace, path: Path, save: Callable[[Report], None]) -> Report:
    """Train everything. The file is written after every run."""
    cuda = torch.cuda.is_available() and not arguments.small
    clock = Clock(arguments.max_seconds or (330.0 if cuda else 3600.0))
    pretraining, tuning = SMALL if arguments.small else CUDA if cuda else CPU
    if arguments.steps:
        pretraining, tuning = (replace(s, steps=n) for s, n in zip((pretraining, tuning), arguments.steps, strict=True))
    tokens, described = lm_text.read_tokens(arguments, (pretraining, tuning))
    report = run.describe(
        "lm-figures",
        torch.device("cuda" if cuda else "cpu"),
        command_of(arguments),
        1,
        clock.seconds,
        commit=arguments.commit,
    )
    report |= {"threshold": THRESHOLD, "text": described}
    del report["results"], report["repeats"]
    shown = ("steps", "batch", "length", "vocabulary", "hidden", "layers", "lr")
    for name, one in (("pretraining", pretraining), ("tuning", tuning)):
        report[name] = {key: getattr(one, key) for key in shown}

    model = train_lm.build_model(pretraining)
    held_out, other = (tokens[name][: pretraining.held_out] for name in ("held_out", "other"))
    seconds = PRETRAINING_SHARE * clock.left
    report["pretraining"] |= pretrain(model, tokens["pretraining"], pretraining, clock, seconds)
    start = clock.spent
    report["figure_3"] = figure_3(model, held_out, other, pretraining)
    report["figure_3"]["seconds"] = clock.spent - start
    save(report)
    lm_pictures.say(f"held-out loss {report['figure_3']['loss']:.4f}, {clock.left:.0f} s left")

    tuning, held_out = that_fits(model, tokens["tuning"], held_out, tuning, clock)
    report["tuning"] |= {"steps": tuning.steps, "dropout": DROPOUT, "held_out": len(held_out)}
    report["figure_4"] = {"runs": [], "differences": {}, "no_time_for": []}
    longest = 0.0
    for variant in VARIANTS:
        if 1.1 * longest > clock.left:
            report["figure_4"]["no_time_for"].append(variant.name)
            continue
        start = clock.spent
        found = fine_tune(model, tokens["tuning"], held_out, tuning, variant)
        longest = max(longest, clock.spent - start)
        report["figure_4"]["runs"].append(found)
        report["figure_4"]["differences"] = differences(report["figure_4"]["runs"])
        report["seconds"] = clock.spent
        save(report)
        lm_pictures.say(f"{variant.name}: held-out loss {found['held_out'][-1][1]:.5f}, {clock.left:.0f} s left")
    report["seconds"] = clock.spent
    save(report)
    return report


def command_of(arguments: argparse.Namespace) -> str:
    """The command to record."""
    return arguments.command or shlex.join(["python", "-m", "reproductions.lm_figures", *arguments.given])


def parse(given: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m reproductions.lm_figures", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--prepare", type=Path, help="write the tokens of all texts to this file; do not train")
    parser.add_argument("--data", type=Path, help="train on a file that --prepare wrote")
    parser.add_argument(
        "--draw", action="store_true", help="do not train: draw figures and write the page from the file"
    )
    parser.add_argument("--docs", action="store_true", help="also write text and figures to the documentation")
    parser.add_argument("--small", action="store_true", help="train a tiny model for a moment, to check that it runs")
    parser.add_argument(
        "--max-seconds", type=float, help="limit for the whole run; 330 with a CUDA device, 3,600 without"
    )
    parser.add_argument("--steps", type=int, nargs=2, help="most steps of pretraining and of fine-tuning")
    parser.add_argument(
        "--tokens",
        type=int,
        nargs=2,
        default=(20_000_000, 4_000_000),
        help="most tokens of pretraining and of fine-tuning",
    )
    parser.add_argument("--megabytes", type=float, default=90.0, help="most text of each kind")
    parser.add_argument("--text", type=Path, nargs=2, help="folders of text for pretraining and for fine-tuning")
    parser.add_argument("--cache", type=Path, default=Path("runs/lm-figures"), help="folder that keeps the tokenizer")
    parser.add_argument("--out", type=Path, help="the JSON file, instead of one in reproductions/results")
    parser.add_argument("--commit", help=run.COMMIT_HELP)
    parser.add_argument("--command", help="the command to record, instead of this one")
    return parser.parse_args(given, argparse.Namespace(given=given))


def main(argv: Sequence[str] | None = None) -> Path:
    """Train, write and draw. Returns the path of the JSON file."""
    arguments = parse(list(sys.argv[1:] if argv is None else argv))
    if arguments.prepare:
        return lm_text.prepare(arguments, SMALL if arguments.small else CUDA)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else run.cpu_name()
    path = arguments.out or RESULTS / f"lm-figures-{run.slug(device)}.json"

    def save(report: Report) -> None:
        run.write(path, report)
        path.with_suffix(".md").write_text(lm_pictures.page(report, path.stem))

    if arguments.draw:
        report = json.loads(path.read_text())
        path.with_suffix(".md").write_text(lm_pictures.page(report, path.stem))
    else:
        report = work(arguments, path, save)
    written = [path, path.with_suffix(".md")]
    if importlib.util.find_spec("matplotlib"):
        written += lm_pictures.draw(report, path)
    if arguments.docs:
        written += lm_pictures.write_docs(report, path)
    for target in written:
        print(f"wrote {target}")
    return path


if __name__ == "__main__":
    main()
