"""Figures 3 and 4 of "Cut Your Losses in Large-Vocabulary Language Models" from a small model that is trained for real.

    python -m benchmarks.lm_figures                      train, write benchmarks/results/lm-figures-<device>.json, draw
    python -m benchmarks.lm_figures --prepare FILE       only read and tokenize the text, for a machine without it
    python -m benchmarks.lm_figures --data FILE          train on what --prepare wrote
    python -m benchmarks.lm_figures --draw --docs        draw again from the file, update the documentation

The model is the one of examples/train_lm.py. First it learns the sources of Python's standard library and of
transformers, for about half of --max-seconds. Figure 3 is then the mean probability of its i-th most likely next token
on held-out text. For figure 4 the same weights are fine-tuned on other text, the sources of torch, several times:

    exact              the loss as it is
    filter 1e-3, 1e-2  with that `filter_tolerance`, which skips by itself where it pays, or not at all
    dense              torch's own loss from all logits: the same numbers, rounded elsewhere
    exact, again       the same once more: what a GPU's order of sums does
    exact, other masks the same batches, with other dropout masks
    exact, other batches

How far do runs with a tolerance get from the exact run of the same batches and masks, and how far do the others get?
The file is written after every run; a run that would not fit the time is named and left out.
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
from examples import train_lm
from examples.train_lm import Settings
from torch import Tensor, nn

import tilewise as tw
from benchmarks import lm_pictures, lm_text, measure, run
from tilewise.ops.filtered import record_filtering

THRESHOLD = 2.0**-12
TOLERANCES = (1e-3, 1e-2)
DROPOUT = 0.1  # of the attention, in fine-tuning only
GENEROUS = 5.0  # seconds for each step: nobody need measure how many fit
Report = dict[str, Any]

# (pretraining, fine-tuning) by machine. Steps are at most so many, fewer where the time is short.
CUDA = (
    Settings(steps=4000, batch=64, length=512, hidden=512, layers=8, lr=1e-3, warmup=150, held_out=32_768),
    Settings(steps=200, batch=32, length=512, hidden=512, layers=8, lr=3e-4, warmup=10, held_out=16_384),
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


EXACT = Variant(name="exact")
VARIANTS = (  # most important first
    EXACT,
    *(Variant(name=f"filter {tolerance:g}", tolerance=tolerance) for tolerance in reversed(TOLERANCES)),
    Variant(name="dense", tolerance=None),
    Variant(name="exact, other masks", masks=2),
    Variant(name="exact, other batches", batches=2),
    Variant(name="exact, again"),
    *(Variant(name=f"filter {t:g}, other batches", tolerance=t, batches=2) for t in reversed(TOLERANCES)),
)


class Clock:
    """How much time is left, and who gets how much of it."""

    def __init__(self, seconds: float) -> None:
        self.start, self.seconds = time.perf_counter(), seconds

    @property
    def left(self) -> float:
        return self.seconds - (time.perf_counter() - self.start)

    @property
    def spent(self) -> float:
        return time.perf_counter() - self.start


# Figure 3


def probability_by_rank(hidden: Tensor, head: Tensor, rows: int = 128) -> Tensor:
    """(v,): the probability of the i-th most likely token, averaged over all positions."""
    total = torch.zeros(len(head), dtype=torch.float64, device=head.device)
    for block in hidden.split(rows):
        p = (block.float() @ head.float().T).softmax(1)
        total += p.sort(1, descending=True).values.double().sum(0)
    return total / len(hidden)


def figure_3(model: nn.Module, held_out: Tensor, settings: Settings) -> Report:
    """The curve at ranks that are even on a logarithmic axis, and where it crosses the paper's threshold."""
    hidden, target = train_lm.hidden_states(model, held_out, settings)
    head = model.get_output_embeddings().weight.detach()
    curve = probability_by_rank(hidden, head).cpu()
    ranks = torch.logspace(0, torch.log10(torch.tensor(float(len(curve)))), 200).round().long().clamp(1, len(curve))
    ranks = ranks.unique()
    return {
        "tokens": len(hidden),
        "rank": ranks.tolist(),
        "probability": curve[ranks - 1].tolist(),
        "first_rank_below_2^-12": int((curve >= THRESHOLD).sum()) + 1,
        "mass_below_2^-12": float(curve[curve < THRESHOLD].sum()),
        "skipping": {f"{t:g}": left_out(hidden, head, target, t, settings) for t in TOLERANCES},
    }


def left_out(hidden: Tensor, head: Tensor, target: Tensor, tolerance: float, settings: Settings) -> Report:
    """What backward would leave out of the loss of these tokens, in the type that training has."""
    dtype = torch.bfloat16 if settings.device == "cuda" else torch.float32
    hidden, head = hidden.detach().to(dtype).requires_grad_(), head.detach().to(dtype)
    with record_filtering() as found:
        tw.linear_cross_entropy(hidden, head, target, options=tw.TileOptions(filter_tolerance=tolerance))
    return seen_of(found)


def seen_of(found: Any) -> Report:
    """The one call that was recorded; one that was exact has kept everything."""
    if not len(found):
        return {"kept_share": 1.0, "skips": False, "mean_dropped": 0.0, "largest_dropped": 0.0}
    dropped = {"mean_dropped": found.mean_dropped[0], "largest_dropped": found.largest_dropped[0]}
    return {"kept_share": found.kept_share[0], "skips": not found.dense[0], **dropped}


# Training


def pace(model: nn.Module, text: Tensor, settings: Settings, steps: int = 12) -> float:
    """Seconds of a step, from the second half of a few with a copy of the model: the first ones compile."""
    marks: list[float] = []

    def watch(step: int, loss: Tensor) -> None:
        if step in (steps // 2 - 1, steps - 1):
            loss.item()  # waits
            marks.append(time.perf_counter())

    train_lm.train(copy.deepcopy(model), text, replace(settings, steps=steps), watch)
    return (marks[1] - marks[0]) / (steps - steps // 2)


def pretrain(model: nn.Module, text: Tensor, settings: Settings, clock: Clock, seconds: float) -> Report:
    """As many steps as fit the seconds, at most those of the settings."""
    if seconds < GENEROUS * settings.steps:
        settings = replace(settings, steps=max(2, min(settings.steps, int(seconds / pace(model, text, settings)))))
    start, last = clock.spent, clock.seconds - 0.2 * seconds

    with lm_pictures.progress("pretraining", settings.steps) as tick:

        def watch(step: int, loss: Tensor) -> bool:
            tick(lambda: f"loss {loss:.3f}")
            return clock.spent > last  # the pace was wrong: leave something for the figures

        losses = train_lm.train(model, text, settings, watch)
    taken = clock.spent - start
    return {"steps": len(losses), "seconds": taken, "step_ms": 1e3 * taken / len(losses), "losses": losses}


def fine_tune(model: nn.Module, text: Tensor, held_out: Tensor, settings: Settings, variant: Variant) -> Report:
    """Losses of a copy of the model, on its batches and on held-out text, and what its backward left out."""
    model = copy.deepcopy(model)
    for part in model.modules():
        if hasattr(part, "attention_dropout"):
            part.attention_dropout = DROPOUT
    options = None if variant.tolerance is None else tw.TileOptions(filter_tolerance=variant.tolerance)
    settings = replace(settings, seed=variant.batches, options=options)
    step_now = 0

    def seed_masks(*_: Any) -> None:
        """The masks of a step are those of its number, whatever else has drawn random numbers before."""
        torch.manual_seed(1000 * variant.masks + step_now)

    model.register_forward_pre_hook(seed_masks)
    held: list[tuple[int, float]] = [(0, held_out_loss(model, held_out, settings))]
    seen: list[Report] = []
    looks = steps_to_look_at(settings.steps)
    marks: list[tuple[int, float]] = []
    times: list[float] = []

    with ExitStack() as recording, lm_pictures.progress(f"fine-tuning: {variant.name}", settings.steps) as tick:

        def record() -> Any:
            return recording.enter_context(record_filtering())

        found = record() if variant.tolerance else None

        def watch(step: int, loss: Tensor) -> None:
            nonlocal found, step_now
            step_now = step + 1
            tick(lambda: f"loss {loss:.3f}")
            if found is not None:
                recording.close()
                seen.append({"step": step, **seen_of(found)})
                found = None
            if step_now in looks:
                measure.synchronize(loss.device)
                if marks:
                    times.append((time.perf_counter() - marks[-1][1]) / (step_now - marks[-1][0]))
                held.append((step_now, held_out_loss(model, held_out, settings)))
                model.train()
                found = record() if variant.tolerance and step_now < settings.steps else None
                marks.append((step_now, time.perf_counter()))

        model.train()
        losses = train_lm.train(model, text, settings, watch)
    return {
        "name": variant.name,
        "tolerance": variant.tolerance,
        "batches": variant.batches,
        "masks": variant.masks,
        "losses": losses,
        "held_out": held,
        "step_ms": 1e3 * statistics.median(times) if times else None,
        "skipping": seen,
    }


def steps_to_look_at(steps: int, times: int = 12) -> list[int]:
    """After which steps the held-out loss is taken.

    >>> steps_to_look_at(24, 6)
    [4, 8, 12, 16, 20, 24]
    >>> steps_to_look_at(3, 6)
    [1, 2, 3]
    """
    return sorted({max(1, round(steps * i / times)) for i in range(1, times + 1)})


def held_out_loss(model: nn.Module, tokens: Tensor, settings: Settings) -> float:
    """In float32, so that a difference of two runs is one of their weights."""
    hidden, target = train_lm.hidden_states(model, tokens, settings)
    with torch.no_grad():
        return tw.linear_cross_entropy(hidden, model.get_output_embeddings().weight, target).item()


def differences(runs: Sequence[Report]) -> Report:
    """How far each run gets from the exact one of the same batches (or, with other batches, from the first).

    The largest difference of the held-out losses, and that at the end; of the runs that see the same batches and masks
    also the largest one of the losses of a step.
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
    """Train everything; the file is written after every run."""
    cuda = torch.cuda.is_available() and not arguments.small
    clock = Clock(arguments.max_seconds or (200.0 if cuda else 3600.0))
    pretraining, tuning = SMALL if arguments.small else CUDA if cuda else CPU
    if arguments.steps:
        pretraining, tuning = (replace(s, steps=n) for s, n in zip((pretraining, tuning), arguments.steps, strict=True))
    tokens, described = lm_text.read_tokens(arguments, (pretraining, tuning))
    report = run.describe(
        "lm-figures", torch.device("cuda" if cuda else "cpu"), command_of(arguments), 1, clock.seconds
    )
    report |= {"commit": report["commit"] or arguments.commit or "unknown", "threshold": THRESHOLD, "text": described}
    del report["results"], report["repeats"]
    shown = ("steps", "batch", "length", "vocabulary", "hidden", "layers", "lr", "held_out")
    for name, s in zip(lm_text.TEXTS, (pretraining, tuning), strict=True):
        report[name] = {key: getattr(s, key) for key in shown}

    model = train_lm.build_model(pretraining)
    held_out, text = tokens[0][: pretraining.held_out], tokens[0][pretraining.held_out :]
    report["pretraining"] |= pretrain(model, text, pretraining, clock, seconds=0.45 * clock.left)
    report["pretraining"]["found"] = train_lm.evaluate(model, held_out, pretraining)
    report["figure_3"] = figure_3(model, held_out, pretraining)
    save(report)

    held_out, text = tokens[1][: tuning.held_out], tokens[1][tuning.held_out :]
    if clock.left < GENEROUS * len(VARIANTS) * tuning.steps:
        each = 0.8 * clock.left / len(VARIANTS)  # the rest: copies, held-out text, and what compiles
        tuning = replace(tuning, steps=max(2, min(tuning.steps, int(each / pace(model, text, tuning)))))
    report["tuning"] |= {"steps": tuning.steps, "dropout": DROPOUT}
    report["figure_4"] = {"runs": [], "differences": {}, "no_time_for": []}
    longest = 0.0
    for variant in VARIANTS:
        if 1.1 * longest > clock.left:
            report["figure_4"]["no_time_for"].append(variant.name)
            continue
        start = clock.spent
        found = fine_tune(model, text, held_out, tuning, variant)
        longest = max(longest, clock.spent - start)
        report["figure_4"]["runs"].append(found)
        report["figure_4"]["differences"] = differences(report["figure_4"]["runs"])
        report["seconds"] = clock.spent
        save(report)
        lm_pictures.say(f"{variant.name}: held-out loss {found['held_out'][-1][1]:.5f}, {clock.left:.0f} s left")
    save(report)
    return report


def command_of(arguments: argparse.Namespace) -> str:
    """What to type to get this again."""
    return arguments.command or shlex.join(["python", "-m", "benchmarks.lm_figures", *arguments.given])


def parse(given: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lm_figures", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--prepare", type=Path, help="write the tokens of both texts to this file, and train nothing")
    parser.add_argument("--data", type=Path, help="such a file, instead of text")
    parser.add_argument("--draw", action="store_true", help="train nothing: draw and write words from the file")
    parser.add_argument("--docs", action="store_true", help="put words and pictures into the documentation, too")
    parser.add_argument("--small", action="store_true", help="a tiny model for a moment: does it run at all?")
    parser.add_argument("--max-seconds", type=float, help="all in all; 200 with a CUDA device, 3,600 without")
    parser.add_argument("--steps", type=int, nargs=2, help="of pretraining and of fine-tuning, at most")
    parser.add_argument("--tokens", type=int, nargs=2, default=(20_000_000, 4_000_000), help="of each text, at most")
    parser.add_argument("--megabytes", type=float, default=90.0, help="of each text, at most")
    parser.add_argument("--text", type=Path, nargs=2, help="folders to learn and to fine-tune on")
    parser.add_argument("--cache", type=Path, default=Path("runs/lm-figures"), help="folder that keeps the tokenizer")
    parser.add_argument("--out", type=Path, help="the JSON file, instead of one in benchmarks/results")
    parser.add_argument("--commit", help="the commit to record, where the files came without their repository")
    parser.add_argument("--command", help="the command to record, where it was another one that started this")
    return parser.parse_args(given, argparse.Namespace(given=given))


def main(argv: Sequence[str] | None = None) -> Path:
    """Train, write and draw; the path of the JSON file."""
    arguments = parse(list(sys.argv[1:] if argv is None else argv))
    if arguments.prepare:
        return lm_text.prepare(arguments, SMALL if arguments.small else CUDA)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else run.cpu_name()
    path = arguments.out or run.RESULTS / f"lm-figures-{run.slug(device)}.json"

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
        written.append(lm_pictures.write_docs(report, path))
    for target in written:
        print(f"wrote {target}")
    return path


if __name__ == "__main__":
    main()
