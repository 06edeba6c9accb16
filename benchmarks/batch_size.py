"""Recall against batch size on the large icon set, and the loss curves of dense and tilewise.

    PYTHONPATH=src python3 -m benchmarks.batch_size table icons-large.zip --max-seconds 230
    PYTHONPATH=src python3 -m benchmarks.batch_size curves icons-large.zip --max-seconds 60
    python -m benchmarks.batch_size plot benchmarks/results/batch-size-*.json

As in the paper's table S2, everything but the batch (and the learning rate, scaled with its root) stays the same: the
data, the epochs, the model. As in its figure S2, the same seed and data give both losses' curves. Images and tokens
live on the device, so that the time is that of the model.

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
from torch import Tensor

from benchmarks.run import describe, slug, write
from tilewise.cache import GradientCache
from tilewise.train.config import RunConfig, load_config
from tilewise.train.data.icons import augment_icons
from tilewise.train.data.open import EvalPairs, pairs_of_icons
from tilewise.train.evaluate import Encoders, evaluate_retrieval
from tilewise.train.icons import IconSet, load_icons
from tilewise.train.models import TwoTowers, build_model
from tilewise.train.objective import pair_loss
from tilewise.train.optim import build_optimizer, learning_rate, set_learning_rate

RESULTS = Path(__file__).parent / "results"
BASE_BATCH = 4096  # the batch whose learning rate is --lr


@dataclass
class Data:
    """The training set on the device: images (N, 1, s, s), two texts of each icon, ids (N,)."""

    images: Tensor
    texts: list[dict[str, Tensor]]
    ids: Tensor
    held_out: EvalPairs

    @classmethod
    def load(cls, icons: IconSet, model: TwoTowers, device: torch.device) -> Data:
        train = icons.split("train")
        with_tags = [" ".join([c, *t[:4]]) for c, t in zip(train.captions, train.tags, strict=True)]
        texts = [
            {name: value.to(device) for name, value in model.tokenizer(kind).items()}
            for kind in (train.captions, with_tags)
        ]
        return cls(
            train.images.unsqueeze(1).to(device), texts, train.name_ids.to(device), pairs_of_icons(icons.split("test"))
        )

    def batches(self, size: int, steps: int, seed: int) -> Iterator[tuple[Tensor, dict[str, Tensor], Tensor]]:
        """Shuffled, augmented batches; the same for the same seed."""
        device = self.images.device
        generator = torch.Generator(device).manual_seed(seed)
        order, place = torch.empty(0, dtype=torch.int64, device=device), 0
        for _ in range(steps):
            if place + size > len(order):
                order, place = torch.randperm(len(self.ids), device=device, generator=generator), 0
            keys = order[place : place + size]
            place += size
            noise = torch.rand(size, 8, device=device, generator=generator)
            parts = zip(self.images[keys].split(8192), noise.split(8192), strict=True)
            images = torch.cat([augment_icons(*part) for part in parts])
            tagged = noise[:, 7:] < 0.5
            tokens = {k: torch.where(tagged, self.texts[1][k][keys], self.texts[0][k][keys]) for k in self.texts[0]}
            yield images, tokens, self.ids[keys]


def configure(args: argparse.Namespace, batch: int, seed: int, loss: str = "tilewise") -> RunConfig:
    lr = min(args.lr * math.sqrt(batch / BASE_BATCH), 6 * args.lr)
    return load_config(
        None,
        [f"model.width={args.width}", f"model.depth={args.depth}", f"model.embed_dim={args.dim}",
         f"loss.name={loss}", "loss.mask_same_id=true", f"optim.lr={lr}", "optim.weight_decay=0.05",
         f"loop.batch_size={batch}", f"loop.chunk_size={min(batch, 8192)}", f"loop.seed={seed}"],
    )  # fmt: skip


def train(data: Data, config: RunConfig, steps: int, device: torch.device) -> tuple[TwoTowers, list[float]]:
    """The losses of all steps."""
    torch.manual_seed(config.loop.seed)
    model = build_model(config).to(device).train()
    optimizer = build_optimizer(model, config.optim)
    loss = pair_loss(config.loss)
    cache = GradientCache(
        [model.image, model.text],
        lambda image, text, ids: loss(image, text, model.scale(), None, ids),
        chunk_size=config.loop.chunk_size,
    )
    losses = []
    warmup = max(1, steps // 20)
    for step, (images, tokens, ids) in enumerate(data.batches(config.loop.batch_size, steps, config.loop.seed)):
        share = min(1.0, (step + 1) / warmup)
        set_learning_rate(optimizer, share * learning_rate(step, steps, config.optim))
        optimizer.zero_grad(set_to_none=True)
        losses.append(cache(images, tokens, ids=ids))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        model.scale.clamp()
    return model, torch.stack(losses).tolist()


def table(args: argparse.Namespace, device: torch.device, report: dict[str, Any]) -> None:
    """Recall for each batch size, as many seeds as the time allows."""
    torch.set_float32_matmul_precision("high")
    icons = load_icons(args.icons)
    data = Data.load(icons, build_model(configure(args, BASE_BATCH, 0)), device)
    report |= {"pairs": len(data.ids), "held_out": len(data.held_out.texts), "epochs": args.epochs}
    deadline, slowest = time.monotonic() + args.max_seconds, 0.0
    for seed in range(args.seeds):
        for batch in [b for b in args.batches if b <= len(data.ids)]:
            if time.monotonic() + slowest > deadline:
                print("no time left", flush=True)
                return
            start = time.monotonic()
            config, steps = configure(args, batch, seed), max(1, round(args.epochs * len(data.ids) / batch))
            model, losses = train(data, config, steps, device)
            found = evaluate_retrieval(Encoders(model, device, chunk_size=4096), data.held_out)
            seconds = time.monotonic() - start
            slowest = max(slowest, seconds)
            row = {"batch": batch, "seed": seed, "steps": steps, "lr": config.optim.lr, "seconds": seconds,
                   "last_loss": losses[-1], **found}  # fmt: skip
            report["results"].append(row)
            recalls = f"t2i@1 {found['t2i_r1']:.4f} @10 {found['t2i_r10']:.4f}"
            print(f"batch {batch:>7} seed {seed}: {recalls} ({seconds:.1f} s)", flush=True)


def curves(args: argparse.Namespace, device: torch.device, report: dict[str, Any]) -> None:
    """Loss curves of dense and tilewise: same weights, same batches."""
    icons = load_icons(args.icons)
    data = Data.load(icons, build_model(configure(args, BASE_BATCH, 0)), device)
    batch, steps = min(args.curve_batch, len(data.ids)), args.curve_steps
    for name in ("dense", "tilewise"):
        start = time.monotonic()
        model, losses = train(data, configure(args, batch, 0, name), steps, device)
        found = evaluate_retrieval(Encoders(model, device, chunk_size=4096), data.held_out)
        report["results"].append({"loss": name, "batch": batch, "losses": losses, "seconds": time.monotonic() - start,
                                  "t2i_r10": found["t2i_r10"]})  # fmt: skip
    dense, ours = (torch.tensor(row["losses"], dtype=torch.float64) for row in report["results"])
    report["largest_relative_difference"] = ((dense - ours).abs() / dense).max().item()
    print(f"largest relative difference over {steps} steps: {report['largest_relative_difference']:.2e}", flush=True)


def markdown(report: dict[str, Any]) -> str:
    """Mean over seeds for each batch size."""
    lines = [
        f"{report['pairs']:,} pairs, {report['epochs']:g} epochs, {report['held_out']:,} held-out icons, on "
        f"{report['device']}. Text to image; the mean over seeds.", "",
        "| batch | steps | learning rate | recall at 1 | recall at 5 | recall at 10 | times chance | seeds |",
        "|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for batch in sorted({row["batch"] for row in report["results"]}):
        rows = [row for row in report["results"] if row["batch"] == batch]
        r1, r5, r10, chance = (
            sum(row[key] for row in rows) / len(rows) for key in ("t2i_r1", "t2i_r5", "t2i_r10", "t2i_chance10")
        )
        lines.append(
            f"| {batch:,} | {rows[0]['steps']:,} | {rows[0]['lr']:.2g} | {100 * r1:.1f} % | {100 * r5:.1f} % | "
            f"{100 * r10:.1f} % | {r10 / chance:.0f} | {len(rows)} |"
        )
    return "\n".join(lines) + "\n"


def plot(paths: Sequence[Path]) -> list[Path]:
    """Pictures of results, beside them."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    made = []
    for path in paths:
        report = json.loads(path.read_text())
        figure, axes = pyplot.subplots(figsize=(6, 3.6), layout="constrained")
        if report["suite"] == "loss-curves":
            for row, style in zip(report["results"], ("-", "--"), strict=True):
                axes.plot(row["losses"], style, label=row["loss"])
            axes.set(xlabel="step", ylabel="loss", title=f"batch {report['results'][0]['batch']:,}: largest relative "
                     f"difference {report['largest_relative_difference']:.1e}")  # fmt: skip
            axes.legend()
        else:
            for key, name in (("t2i_r1", "at 1"), ("t2i_r5", "at 5"), ("t2i_r10", "at 10")):
                sizes = sorted({row["batch"] for row in report["results"]})
                means = [
                    100 * sum(r[key] for r in rows) / len(rows)
                    for rows in ([r for r in report["results"] if r["batch"] == size] for size in sizes)
                ]
                axes.plot(sizes, means, "o-", label=name)
            axes.set_xscale("log", base=2)
            axes.set(xlabel="batch", ylabel="text-to-image recall, %", title=f"{report['pairs']:,} pairs")
            axes.legend()
        made.append(path.with_suffix(".png"))
        figure.savefig(made[-1], dpi=150)
        pyplot.close(figure)
    return made


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("table", "curves", "plot"))
    parser.add_argument("icons", nargs="+", help="the icon file (table, curves) or results (plot)")
    parser.add_argument("--batches", type=lambda text: [int(part) for part in text.split(",")],
                        default=[1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072])  # fmt: skip
    parser.add_argument("--epochs", type=float, default=12.0)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--curve-batch", type=int, default=16384)
    parser.add_argument("--curve-steps", type=int, default=200)
    parser.add_argument("--max-seconds", type=float, default=230.0)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--commit", help="the commit to record, where the files came without their repository")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> list[Path]:
    args = parse(argv)
    if args.what == "plot":
        return plot([Path(path) for path in args.icons])
    args.icons = args.icons[0]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    suite = "batch-size" if args.what == "table" else "loss-curves"
    report = describe(
        suite, device, " ".join(["python -m benchmarks.batch_size", *sys.argv[1:]]), args.seeds, args.max_seconds
    )
    report["commit"] = report["commit"] or args.commit or "unknown"
    (table if args.what == "table" else curves)(args, device, report)
    path = args.out or RESULTS / f"{suite}-{slug(report['device'])}.json"
    write(path, report)
    if args.what == "table":
        path.with_suffix(".md").write_text(markdown(report), encoding="utf-8")
        print(markdown(report))
    return [path]


if __name__ == "__main__":
    main()
