"""Figures 3 and 4 of "Cut Your Losses in Large-Vocabulary Language Models" from a small model that is trained for real.

    python -m benchmarks.lm_figures              train, write benchmarks/results/lm-figures-<device>.json, draw
    python -m benchmarks.lm_figures --draw       draw again from the file

The model is the one of examples/train_lm.py: first it learns the standard library. Figure 3 is then the mean
probability of its i-th most likely next token on held-out text. For figure 4 the same weights are fine-tuned on other
text (the sources of torch), with `filter_tolerance` 0, 1e-3 and 1e-2 and several seeds of the batches: does leaving
probability out of backward change the loss on held-out text by more than the seed does? Left to itself, backward
computes everything where too many tiles matter for skipping to be faster; here it always skips, so that something is
left out whatever the model has learned, and the file says what would have been chosen.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import importlib.util
import json
import shlex
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from examples import train_lm
from examples.train_lm import Settings
from torch import Tensor, nn

import tilewise as tw
from benchmarks import run
from tilewise.kernels import filter as filter_plans
from tilewise.kernels import filter_tiled
from tilewise.ops.filtered import record_filtering

TOLERANCES = (0.0, 1e-3, 1e-2)
THRESHOLD = 2.0**-12
Report = dict[str, Any]

# (pretraining, fine-tuning) by machine: what takes some minutes there.
CUDA = (
    Settings(steps=2000, batch=32, length=256, hidden=512, layers=6, lr=1.5e-3, warmup=100, held_out=16_384),
    Settings(steps=200, batch=16, length=256, hidden=512, layers=6, lr=3e-4, warmup=10, held_out=16_384),
)
CPU = (
    Settings(steps=200, batch=8, length=128, held_out=4096),
    Settings(steps=24, batch=4, length=128, lr=5e-4, warmup=5, held_out=4096),
)
TINY = {"batch": 2, "length": 16, "vocabulary": 500, "hidden": 32, "layers": 1, "held_out": 64, "device": "cpu"}
SMALL = (Settings(steps=4, **TINY), Settings(steps=4, **TINY))


def probability_by_rank(hidden: Tensor, head: Tensor, rows: int = 128) -> Tensor:
    """(v,): the probability of the i-th most likely token, averaged over all positions."""
    total = torch.zeros(len(head), dtype=torch.float64, device=head.device)
    for block in hidden.split(rows):
        p = (block.float() @ head.float().T).softmax(1)
        total += p.sort(1, descending=True).values.double().sum(0)
    return total / len(hidden)


def figure_3(model: nn.Module, held_out: Tensor, settings: Settings) -> Report:
    """The curve at ranks that are even on a logarithmic axis, and where it crosses the paper's threshold."""
    hidden, _ = train_lm.hidden_states(model, held_out, settings)
    curve = probability_by_rank(hidden, model.get_output_embeddings().weight.detach()).cpu()
    ranks = torch.logspace(0, torch.log10(torch.tensor(float(len(curve)))), 200).round().long().clamp(1, len(curve))
    ranks = ranks.unique()
    return {
        "tokens": len(hidden),
        "rank": ranks.tolist(),
        "probability": curve[ranks - 1].tolist(),
        "first_rank_below_2^-12": int((curve >= THRESHOLD).sum()) + 1,
        "mass_below_2^-12": float(curve[curve < THRESHOLD].sum()),
    }


def fine_tune(model: nn.Module, text: Tensor, held_out: Tensor, settings: Settings, every: int) -> Report:
    """Losses of a copy of the model, on its batches and on held-out text, and what backward left out."""
    model = copy.deepcopy(model)
    held: list[tuple[int, float]] = [(0, train_lm.evaluate(model, held_out, settings)["loss"])]

    def watch(step: int, loss: float) -> None:
        if (step + 1) % every == 0 or step + 1 == settings.steps:
            held.append((step + 1, train_lm.evaluate(model, held_out, settings)["loss"]))
            model.train()

    start = time.perf_counter()
    with always_skipping():
        losses = train_lm.train(model, text, settings, watch)
    return {
        "tolerance": settings.options.filter_tolerance,
        "seed": settings.seed,
        "losses": losses,
        "held_out": held,
        "seconds": time.perf_counter() - start,
        **left_out(model, held_out, settings),
    }


@contextlib.contextmanager
def always_skipping() -> Iterator[None]:
    """Backward leaves out what it may, however little that is."""
    places = (filter_plans, filter_tiled)  # the second has a copy of the name
    share = filter_plans.DENSE_SHARE
    try:
        for place in places:
            place.DENSE_SHARE = 1.0
        yield
    finally:
        for place in places:
            place.DENSE_SHARE = share


def left_out(model: nn.Module, tokens: Tensor, settings: Settings) -> Report:
    """The share of (row, tile) pairs that backward would compute on these tokens, and the most that a row drops."""
    hidden, target = train_lm.hidden_states(model, tokens, settings)
    dtype = torch.bfloat16 if settings.device == "cuda" else torch.float32
    hidden, head = (t.detach().to(dtype) for t in (hidden, model.get_output_embeddings().weight))
    with record_filtering() as found:
        tw.linear_cross_entropy(hidden.requires_grad_(), head, target, options=settings.options)
    if not len(found):
        return {"kept_share": 1.0, "would_skip": False, "largest_dropped": 0.0, "mean_dropped": 0.0}
    would_skip = not found.dense[0]
    with always_skipping():
        dropped = {"largest_dropped": found.largest_dropped[0], "mean_dropped": found.mean_dropped[0]}
    return {"kept_share": found.kept_share[0], "would_skip": would_skip, **dropped}


def noise(runs: list[Report]) -> Report:
    """How far tolerances move the final held-out loss, beside how far seeds do.

    For each tolerance: the largest difference to the exact run of the same seed. For seeds: the deviation of the
    exact runs, and the largest difference of two of them. The same for the largest difference anywhere on the curves.
    """
    curves = {(r["tolerance"], r["seed"]): [loss for _, loss in r["held_out"]] for r in runs}
    seeds = sorted({seed for _, seed in curves if (0.0, seed) in curves})
    exact = [curves[0.0, seed] for seed in seeds]

    def apart(one: list[float], two: list[float]) -> float:
        return max(abs(x - y) for x, y in zip(one, two, strict=True))

    pairs = [(one, two) for i, one in enumerate(exact) for two in exact[i + 1 :]]
    found: Report = {
        "seeds": {
            "final_deviation": statistics.stdev(curve[-1] for curve in exact) if len(exact) > 1 else None,
            "final_apart": max((abs(one[-1] - two[-1]) for one, two in pairs), default=None),
            "curve_apart": max((apart(one, two) for one, two in pairs), default=None),
        }
    }
    for tolerance in sorted({t for t, _ in curves if t}):
        both = [(curves[tolerance, s], curves[0.0, s]) for s in seeds if (tolerance, s) in curves]
        found[f"{tolerance:g}"] = {
            "final_apart": max(abs(one[-1] - two[-1]) for one, two in both),
            "curve_apart": max(apart(one, two) for one, two in both),
        }
    return found


def work(arguments: argparse.Namespace, path: Path) -> Report:
    """Train everything; the file is written after every run."""
    cuda = torch.cuda.is_available()
    pretraining, tuning = SMALL if arguments.small else CUDA if cuda else CPU
    if arguments.steps:
        pretraining, tuning = (replace(s, steps=n) for s, n in zip((pretraining, tuning), arguments.steps, strict=True))
    library, other = arguments.text or train_lm.default_folders()[:2]
    texts = [train_lm.read_texts([folder], arguments.megabytes) for folder in (library, other)]
    tokenizer = train_lm.open_tokenizer([*texts[0], *texts[1]], pretraining.vocabulary, arguments.cache)
    settings = (pretraining, tuning)
    wanted = [min(3 * s.steps * s.batch * s.length, arguments.tokens) + s.held_out for s in settings]
    tokens = [train_lm.encode(part, tokenizer, count) for part, count in zip(texts, wanted, strict=True)]
    report = run.describe("lm-figures", torch.device("cuda" if cuda else "cpu"), command_of(arguments), 1, 0.0)
    report |= {"commit": report["commit"] or arguments.commit or "unknown", "threshold": THRESHOLD}
    del report["results"], report["repeats"], report["budget_s"]
    shown = ("steps", "batch", "length", "vocabulary", "hidden", "layers", "lr", "held_out")
    for name, s, part in zip(("pretraining", "tuning"), settings, tokens, strict=True):
        report[name] = {key: getattr(s, key) for key in shown} | {"tokens": len(part)}

    def say(words: str) -> None:
        print(words, file=sys.stderr, flush=True)

    def watch(step: int, loss: float) -> None:
        if (step + 1) % max(1, pretraining.steps // 20) == 0:
            say(f"pretraining: step {step + 1}, loss {loss:.3f}")

    model = train_lm.build_model(pretraining)
    held_out, text = tokens[0][: pretraining.held_out], tokens[0][pretraining.held_out :]
    report["pretraining"]["losses"] = train_lm.train(model, text, pretraining, watch)
    report["pretraining"]["found"] = train_lm.evaluate(model, held_out, pretraining)
    report["figure_3"] = figure_3(model, held_out, pretraining)
    run.write(path, report)
    held_out, text = tokens[1][: tuning.held_out], tokens[1][tuning.held_out :]
    report["figure_4"] = {"runs": [], "noise": {}}
    for seed in range(arguments.seeds):
        for tolerance in TOLERANCES:
            one = replace(tuning, seed=seed + 1, options=tw.TileOptions(filter_tolerance=tolerance))
            found = fine_tune(model, text, held_out, one, max(1, tuning.steps // 6))
            say(
                f"fine-tuning: tolerance {tolerance:g}, seed {seed + 1}: held-out loss {found['held_out'][-1][1]:.4f}, "
                f"{100 * found['kept_share']:.1f} % of the pairs kept, {found['seconds']:.0f} s"
            )
            report["figure_4"]["runs"].append(found)
            report["figure_4"]["noise"] = noise(report["figure_4"]["runs"])
            run.write(path, report)
    return report


def command_of(arguments: argparse.Namespace) -> str:
    """What to type to get this again."""
    return arguments.command or shlex.join(["python", "-m", "benchmarks.lm_figures", *arguments.given])


# Drawing


def draw(report: Report, path: Path) -> list[Path]:
    """Both figures, as SVG and PNG beside the file."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "tilewise"
    from matplotlib import pyplot

    written = []
    for name, paint in (("figure-3", draw_probabilities), ("figure-4", draw_curves)):
        if name.replace("-", "_") not in report:
            continue
        figure, axes = pyplot.subplots(figsize=(6.4, 4.2), constrained_layout=True)
        paint(axes, report)
        axes.grid(alpha=0.3)
        for suffix in ("svg", "png"):
            target = path.with_name(f"{path.stem}-{name}.{suffix}")
            figure.savefig(target, dpi=130, metadata={"Date": None} if suffix == "svg" else None)
            written.append(target)
        pyplot.close(figure)
    return written


def draw_probabilities(axes: Any, report: Report) -> None:
    """Figure 3."""
    found = report["figure_3"]
    axes.plot(found["rank"], found["probability"], label="mean probability of the i-th most likely token")
    axes.axhline(THRESHOLD, color="0.4", linestyle="--", linewidth=1, label="$2^{-12}$")
    axes.axvline(found["first_rank_below_2^-12"], color="0.4", linestyle=":", linewidth=1)
    axes.set(xscale="log", yscale="log", xlabel="rank", ylabel="probability")
    trained = report["pretraining"]
    axes.set_title(
        f"vocabulary {trained['vocabulary']:,}; below $2^{{-12}}$ from rank {found['first_rank_below_2^-12']:,}, with "
        f"{100 * found['mass_below_2^-12']:.0f} % of the probability",
        fontsize=9,
    )
    axes.legend(frameon=False)


def draw_curves(axes: Any, report: Report) -> None:
    """Figure 4: the loss on held-out text, the mean of the seeds, with the seeds of the exact runs around it."""
    runs = report["figure_4"]["runs"]
    styles = {0.0: ("C0", "-", 3.5), 1e-3: ("C1", "--", 1.8), 1e-2: ("C2", ":", 1.8)}
    for tolerance in sorted({r["tolerance"] for r in runs}):
        mine = [r["held_out"] for r in runs if r["tolerance"] == tolerance]
        steps = [step for step, _ in mine[0]]
        values = [[loss for _, loss in curve] for curve in mine]
        mean = [statistics.mean(column) for column in zip(*values, strict=True)]
        color, line, width = styles.get(tolerance, ("C3", "-.", 1.8))
        label = f"filter_tolerance {tolerance:g}" if tolerance else "exact"
        axes.plot(steps, mean, color=color, linestyle=line, linewidth=width, label=label)
        if tolerance == 0.0:
            low, high = ([pick(column) for column in zip(*values, strict=True)] for pick in (min, max))
            axes.fill_between(steps, low, high, color=color, alpha=0.2, label="exact, all seeds")
    axes.set(xlabel="step of fine-tuning", ylabel="loss on held-out text")
    axes.set_title(f"mean of {len({r['seed'] for r in runs})} seeds", fontsize=9)
    axes.legend(frameon=False)


def main(argv: Sequence[str] | None = None) -> Path:
    """Train and draw; the path of the JSON file."""
    given = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lm_figures", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--draw", action="store_true", help="only draw, from the file")
    parser.add_argument("--small", action="store_true", help="a tiny model for a moment: does it run at all?")
    parser.add_argument("--steps", type=int, nargs=2, help="of pretraining and of fine-tuning")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=8_000_000, help="of each text, at most")
    parser.add_argument("--megabytes", type=float, default=30.0, help="of each text, at most")
    parser.add_argument("--text", type=Path, nargs=2, help="folders to learn and to fine-tune on")
    parser.add_argument("--cache", type=Path, default=Path("runs/lm-figures"), help="folder that keeps the tokenizer")
    parser.add_argument("--out", type=Path, help="the JSON file, instead of one in benchmarks/results")
    parser.add_argument("--commit", help="the commit to record, where the files came without their repository")
    parser.add_argument("--command", help="the command to record, where it was another one that started this")
    arguments = parser.parse_args(given)
    arguments.given = given
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else run.cpu_name()
    path = arguments.out or run.RESULTS / f"lm-figures-{run.slug(device)}.json"
    report = json.loads(path.read_text()) if arguments.draw else work(arguments, path)
    print(f"wrote {path}")
    if importlib.util.find_spec("matplotlib"):
        for target in draw(report, path):
            print(f"wrote {target}")
    return path


if __name__ == "__main__":
    main()
