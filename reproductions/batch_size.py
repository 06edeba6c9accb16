"""Table S2 and figure S2 of the Inf-CL paper on icons: recall against batch size, and two loss curves.

    PYTHONPATH=src python3 -m reproductions.batch_size all icons-large.zip --max-seconds 240
    PYTHONPATH=src python3 -m reproductions.batch_size table icons-large.zip --max-seconds 200
    PYTHONPATH=src python3 -m reproductions.batch_size curves icons-large.zip
    python -m reproductions.batch_size plot RESULT.json [RESULT.json ...]

The table (S2) varies the batch size. Data, epochs and model stay the same; the learning rate is scaled with the square
root of the batch size. The number of epochs is the largest one, up to --epochs, at which all batch sizes and seeds fit
the time.

The figure (S2) shows the loss curves of dense and tilewise from the same seed and the same data. A third curve is the
dense loss on the same batches with their rows reversed: it differs from the first only by rounding.

All data is on the device. Files are written after every row.

Axes: N icons, n pairs of a batch, d features.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from benchmarks.run import COMMIT_HELP, describe, repeatable, slug, write
from torch import Tensor

from reproductions.records import RESULTS
from tilewise.cache import GradientCache
from tilewise.train.config import RunConfig, load_config
from tilewise.train.data.icons import augment_icons
from tilewise.train.data.open import EvalPairs, pairs_of_icons
from tilewise.train.evaluate import Encoders, evaluate_retrieval
from tilewise.train.icons import load_icons
from tilewise.train.models import TwoTowers, build_model
from tilewise.train.objective import pair_loss
from tilewise.train.optim import build_optimizer, learning_rate, set_learning_rate

BASE_BATCH = 4096  # --lr is the learning rate of this batch size
CHUNK = 16_384  # pairs that are encoded, and augmented, at a time
SUITES = {"table": "batch-size", "curves": "loss-curves"}
Tokens = dict[str, Tensor]
Pairs = tuple[Tensor, Tokens, Tensor]
Report = dict[str, Any]


def tokenize(model: TwoTowers, texts: Sequence[str], device: torch.device) -> tuple[Tokens, dict[str, int]]:
    """The tokens of every distinct text, and the row of each. Icons of several styles share their texts."""
    different = list(dict.fromkeys(texts))
    tokens = {name: value.to(device) for name, value in model.tokenizer(different).items()}
    return tokens, {text: row for row, text in enumerate(different)}


@dataclass
class Data:
    """The data, on the device: images (N, 1, s, s), tokens of all texts, rows (N, 2) of each icon's texts, ids (N,)."""

    images: Tensor
    tokens: Tokens
    text_rows: Tensor
    ids: Tensor
    held_out: EvalPairs
    held_out_tokens: Tokens

    @classmethod
    def load(cls, path: str, model: TwoTowers, device: torch.device) -> Data:
        start = time.monotonic()
        icons = load_icons(path)
        train, held_out = icons.split("train"), pairs_of_icons(icons.split("test"))
        with_tags = [" ".join([c, *t[:4]]) for c, t in zip(train.captions, train.tags, strict=True)]
        tokens, rows = tokenize(model, [*train.captions, *with_tags], device)
        text_rows = torch.tensor([[rows[text] for text in texts] for texts in (train.captions, with_tags)]).T
        own, own_rows = tokenize(model, held_out.texts, device)
        held_out_rows = torch.tensor([own_rows[text] for text in held_out.texts], device=device)
        data = cls(
            train.images.unsqueeze(1).to(device), tokens, text_rows.contiguous().to(device), train.name_ids.to(device),
            held_out, {name: value[held_out_rows] for name, value in own.items()},
        )  # fmt: skip
        print(f"{len(data):,} icons in {time.monotonic() - start:.1f} s", flush=True)
        return data

    def __len__(self) -> int:
        return len(self.ids)

    def batches(self, size: int, steps: int, seed: int) -> Iterator[Pairs]:
        """Shuffled, augmented batches; the same for the same seed. Several small batches are made at a time.

        Every icon is used once before any is used again. A batch may hold the end of one epoch and the start of the
        next.
        """
        device = self.ids.device
        generator = torch.Generator(device).manual_seed(seed)
        many = max(1, CHUNK // size)
        order = torch.empty(0, dtype=torch.int64, device=device)
        for first in range(0, steps, many):
            count = size * min(many, steps - first)
            while len(order) < count:
                order = torch.cat([order, torch.randperm(len(self), device=device, generator=generator)])
            keys, order = order[:count], order[count:]
            images, tokens = self._augmented(keys, torch.rand(count, 8, device=device, generator=generator))
            for start in range(0, count, size):
                rows = slice(start, start + size)
                yield images[rows], {name: value[rows] for name, value in tokens.items()}, self.ids[keys[rows]]

    def _augmented(self, keys: Tensor, noise: Tensor) -> tuple[Tensor, Tokens]:
        parts = zip(keys.split(CHUNK), noise.split(CHUNK), strict=True)
        images = torch.cat([augment_icons(self.images[part], own) for part, own in parts])
        texts = self.text_rows[keys].gather(1, (noise[:, 7:] < 0.5).long()).squeeze(1)
        return images, {name: value[texts] for name, value in self.tokens.items()}


class KnownTexts(Encoders):
    """Encoders whose texts are already tokenized on the device."""

    def __init__(self, model: TwoTowers, data: Data) -> None:
        super().__init__(model, data.ids.device, chunk_size=CHUNK)
        self.tokens = data.held_out_tokens

    @torch.inference_mode()
    def texts(self, texts: Sequence[str]) -> Tensor:
        return self.model.text(**self.tokens).float()


def evaluate(model: TwoTowers, data: Data) -> dict[str, float]:
    return evaluate_retrieval(KnownTexts(model, data), data.held_out)


def configure(args: argparse.Namespace, batch: int, seed: int, loss: str = "tilewise") -> RunConfig:
    return load_config(
        None,
        [f"model.width={args.width}", f"model.depth={args.depth}", f"model.embed_dim={args.dim}",
         f"loss.name={loss}", "loss.mask_same_id=true", f"optim.lr={args.lr * math.sqrt(batch / BASE_BATCH)}",
         "optim.weight_decay=0.05", f"loop.batch_size={batch}", f"loop.chunk_size={min(batch, CHUNK)}",
         f"loop.seed={seed}"],
    )  # fmt: skip


class Run:
    """A model in training. A step never waits for the device.

    Args:
        config: settings of the run.
        device: where to train.
        steps: number of steps.
        warmup: number of steps with a rising learning rate.
        low: compute the loss from bfloat16 features.
    """

    def __init__(self, config: RunConfig, device: torch.device, steps: int, warmup: int, low: bool) -> None:
        torch.manual_seed(config.loop.seed)
        with torch.device(device):
            self.model = build_model(config).to(device).train()
        self.config, self.steps, self.warmup, self.low = config, steps, warmup, low
        self.optimizer = build_optimizer(self.model, config.optim)
        for group in self.optimizer.param_groups:
            group.update(fused=True, foreach=False)
        self.pair_loss = pair_loss(config.loss)
        self.cache = GradientCache([self.model.image, self.model.text], self._loss, chunk_size=config.loop.chunk_size)
        self.losses: list[Tensor] = []

    def _loss(self, image: Tensor, text: Tensor, ids: Tensor) -> Tensor:
        if self.low:
            image, text = image.bfloat16(), text.bfloat16()
        return self.pair_loss(image, text, self.model.scale(), None, ids)

    def step(self, images: Tensor, tokens: Tokens, ids: Tensor) -> None:
        done = len(self.losses)
        share = min(1.0, (done + 1) / self.warmup)
        set_learning_rate(self.optimizer, share * learning_rate(done, self.steps, self.config.optim))
        self.optimizer.zero_grad(set_to_none=True)
        if len(ids) <= self.config.loop.chunk_size:  # one chunk: the cache would encode it twice for nothing
            loss = self._loss(self.model.image(images), self.model.text(**tokens), ids)
            loss.backward()
        else:
            loss = self.cache(images, tokens, ids=ids)
        self.losses.append(loss.detach())
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.model.scale.clamp()


def start_run(data: Data, args: argparse.Namespace, batch: int, seed: int, epochs: float) -> Run:
    """A run of the table, with a warm-up of --warmup-epochs."""
    steps, warmup = (max(1, round(amount * len(data) / batch)) for amount in (epochs, args.warmup_epochs))
    return Run(configure(args, batch, seed), data.ids.device, steps, warmup, low=args.loss_type == "bf16")


def finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def epoch_seconds(data: Data, args: argparse.Namespace, batch: int) -> float:
    """Seconds of an epoch at this batch size, estimated from a few steps after the first."""
    steps = min(17, max(3, 2 * CHUNK // batch + 1))
    run = start_run(data, args, batch, 0, steps * batch / len(data))
    start = 0.0
    for number, pairs in enumerate(data.batches(batch, steps, 0)):
        if number == 1:
            finish(data.ids.device)
            start = time.monotonic()
        run.step(*pairs)
    finish(data.ids.device)
    return (time.monotonic() - start) / (steps - 1) * len(data) / batch


def choose_epochs(data: Data, args: argparse.Namespace, batches: Sequence[int], left: float) -> float:
    """The largest number of epochs at which all batch sizes and seeds fit the time; at least one."""
    start = time.monotonic()
    seconds = {batch: epoch_seconds(data, args, batch) for batch in batches}
    print("seconds of an epoch: " + ", ".join(f"{b}: {s:.2f}" for b, s in seconds.items()), flush=True)
    left -= time.monotonic() - start + 0.7 * args.seeds * len(batches)  # to build and evaluate the models
    return float(max(1, min(args.epochs, math.floor(0.9 * left / (args.seeds * sum(seconds.values()))))))


def table(data: Data, args: argparse.Namespace, report: Report, path: Path, deadline: float) -> None:
    """Train and evaluate each batch size and seed."""
    torch.set_float32_matmul_precision("high")
    batches = [b for b in args.batches if b <= len(data)]
    epochs = choose_epochs(data, args, batches, deadline - time.monotonic())
    report |= {"pairs": len(data), "held_out": len(data.held_out.texts), "epochs": epochs,
               "warmup_epochs": args.warmup_epochs, "loss_type": args.loss_type}  # fmt: skip
    print(f"{epochs:g} epochs, {args.seeds} seeds", flush=True)
    took: dict[int, float] = {}
    for seed in range(args.seeds):
        for batch in batches:
            if time.monotonic() + took.get(batch, 0.0) > deadline:
                print(f"batch {batch:>7} seed {seed}: no time left", flush=True)
                continue
            start = time.monotonic()
            run = start_run(data, args, batch, seed, epochs)
            for pairs in data.batches(batch, run.steps, seed):
                run.step(*pairs)
            found, last = evaluate(run.model, data), run.losses[-1].item()
            took[batch] = time.monotonic() - start
            report["results"].append(
                {"batch": batch, "seed": seed, "steps": run.steps, "lr": run.config.optim.lr, "last_loss": last,
                 "seconds": took[batch], **found}
            )  # fmt: skip
            save(path, report)
            recalls = f"t2i@1 {found['t2i_r1']:.4f} @10 {found['t2i_r10']:.4f} i2t@10 {found['i2t_r10']:.4f}"
            print(f"batch {batch:>7} seed {seed}: {recalls}, loss {last:.3f} ({took[batch]:.1f} s)", flush=True)


def curves(data: Data, args: argparse.Namespace, report: Report, path: Path, deadline: float) -> None:
    """Loss curves of dense and tilewise in float32, from the same weights and batches."""
    torch.set_float32_matmul_precision("highest")
    batch, steps = min(args.curve_batch, len(data)), args.curve_steps
    report |= {"pairs": len(data), "loss_type": "float32", "matmul_precision": "highest"}
    for name in ("dense", "tilewise", "dense, rows reversed"):
        start = time.monotonic()
        config = configure(args, batch, 0, name.split(",")[0])
        run = Run(config, data.ids.device, steps, max(1, steps // 20), low=False)
        for images, tokens, ids in data.batches(batch, steps, 0):
            if "reversed" in name:
                images, ids = images.flip(0), ids.flip(0)
                tokens = {key: value.flip(0) for key, value in tokens.items()}
            run.step(images, tokens, ids)
            if len(run.losses) % 100 == 0:
                print(f"{name} step {len(run.losses)}: loss {run.losses[-1].item():.4f}", flush=True)
                if time.monotonic() > deadline:
                    break
        losses = torch.stack(run.losses).tolist()
        report["results"].append({"loss": name, "batch": batch, "losses": losses, **evaluate(run.model, data)})
        report["results"][-1]["seconds"] = time.monotonic() - start
        compare_curves(report)
        save(path, report)
    for key in ("largest_relative_difference", "rounding_relative_difference"):
        print(f"{key} over {steps} steps: {report.get(key, math.nan):.2e}", flush=True)


def compare_curves(report: Report) -> None:
    """Largest difference of tilewise from dense, and of dense from dense with its rows reversed."""
    losses = {row["loss"]: row["losses"] for row in report["results"]}
    dense = losses["dense"]
    for name, key in (("tilewise", "largest"), ("dense, rows reversed", "rounding")):
        if name in losses:
            apart = [abs(a - b) / abs(b) for a, b in zip(losses[name], dense, strict=False)]
            report[f"{key}_relative_difference"] = max(apart)
            report[f"{key}_relative_difference_of_10_steps"] = max(apart[:10])


def save(path: Path, report: Report) -> None:
    write(path, report)
    if report["suite"] == SUITES["table"]:
        path.with_suffix(".md").write_text(markdown(report), encoding="utf-8")


def markdown(report: Report) -> str:
    """The page: mean over seeds for each batch size."""
    lines = [
        f"{report['pairs']:,} pairs, {report['epochs']:g} epochs, {report['held_out']:,} held-out icons, on "
        f"{report['device']}. Recall in %, the mean over seeds.", "",
        "| batch | steps | learning rate | text to image: at 1 | at 5 | at 10 | image to text: at 1 | at 5 | at 10 | "
        "text to image at 10, times chance | seeds |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for batch in sorted({row["batch"] for row in report["results"]}):
        rows = [row for row in report["results"] if row["batch"] == batch]
        keys = [f"{side}_r{k}" for side in ("t2i", "i2t") for k in (1, 5, 10)]
        recalls = [f"{100 * mean(rows, key):.1f}" for key in keys]
        times = mean(rows, "t2i_r10") / mean(rows, "t2i_chance10")
        lines.append(
            f"| {batch:,} | {rows[0]['steps']:,} | {rows[0]['lr']:.2g} | {' | '.join(recalls)} | {times:.0f} | "
            f"{len(rows)} |"
        )
    return "\n".join(lines) + "\n"


def mean(rows: Sequence[Report], key: str) -> float:
    return sum(row[key] for row in rows) / len(rows)


def plot(paths: Sequence[Path]) -> list[Path]:
    """Draw each result. Returns the paths of the pictures, beside the results."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    made = []
    for path in paths:
        report = json.loads(path.read_text())
        if report["suite"] == SUITES["curves"]:
            figure, axes = pyplot.subplots(figsize=(6, 3.6), layout="constrained")
            for row, style in zip(report["results"], ("-", "--", ":"), strict=False):
                axes.plot(row["losses"], style, label=row["loss"])
            axes.set(xlabel="step", ylabel="loss", title=f"batch {report['results'][0]['batch']:,}: largest relative "
                     f"difference {report['largest_relative_difference']:.1e}")  # fmt: skip
            axes.legend()
        else:
            figure, panels = pyplot.subplots(1, 2, figsize=(9, 3.6), layout="constrained", sharey=True)
            for axes, side, title in zip(panels, ("t2i", "i2t"), ("text to image", "image to text"), strict=True):
                plot_recall(axes, report["results"], side)
                axes.set(xlabel="batch", title=f"{title}, {report['epochs']:g} epochs of {report['pairs']:,} pairs")
            panels[0].set_ylabel("recall, %")
            panels[0].legend()
        made.append(path.with_suffix(".png"))
        figure.savefig(made[-1], dpi=150)
        pyplot.close(figure)
    return made


def plot_recall(axes: Any, results: Sequence[Report], side: str) -> None:
    """Draw recall at 1, 5 and 10 against the batch size: the mean as a line, every seed as a dot."""
    sizes = sorted({row["batch"] for row in results})
    for k in (1, 5, 10):
        key = f"{side}_r{k}"
        means = [100 * mean([row for row in results if row["batch"] == size], key) for size in sizes]
        (line,) = axes.plot(sizes, means, label=f"at {k}")
        axes.plot([row["batch"] for row in results], [100 * row[key] for row in results], ".", color=line.get_color())
    axes.set_xscale("log", base=2)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("all", "table", "curves", "plot"), help="all: the curves, then the table")
    parser.add_argument("icons", nargs="+", help="the icon file (table, curves) or results (plot)")
    parser.add_argument("--batches", type=lambda text: [int(part) for part in text.split(",")],
                        default=[1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072])  # fmt: skip
    parser.add_argument("--epochs", type=float, default=40.0, help="most epochs; fewer if the time is short")
    parser.add_argument("--warmup-epochs", type=float, default=2.0, help="epochs with a rising learning rate")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument(
        "--lr", type=float, default=1e-3, help=f"learning rate at a batch of {BASE_BATCH}; scaled with its root"
    )
    parser.add_argument(
        "--loss-type", choices=("bf16", "float32"), default="bf16", help="type of the features, in the table"
    )
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--curve-batch", type=int, default=4096)
    parser.add_argument("--curve-steps", type=int, default=400)
    parser.add_argument("--max-seconds", type=float, default=240.0, help="limit for the whole run")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the folder to write to")
    parser.add_argument("--commit", help=COMMIT_HELP)
    argv = sys.argv[1:] if argv is None else argv
    return parser.parse_args(argv, argparse.Namespace(argv=list(argv)))


def main(argv: Sequence[str] | None = None) -> list[Path]:
    args = parse(argv)
    if args.what == "plot":
        return plot([Path(path) for path in args.icons])
    deadline = time.monotonic() + args.max_seconds
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    data = Data.load(args.icons[0], build_model(configure(args, BASE_BATCH, 0)), device)
    paths = []
    for what, work in (("curves", curves), ("table", table)):
        if args.what not in (what, "all"):
            continue
        command = repeatable("reproductions.batch_size", args.argv)
        report = describe(SUITES[what], device, command, args.seeds, args.max_seconds, commit=args.commit)
        paths.append(args.out / f"{SUITES[what]}-{slug(report['device'])}.json")
        work(data, args, report, paths[-1], deadline)
        if what == "table":
            print(markdown(report))
    return paths


if __name__ == "__main__":
    main()
