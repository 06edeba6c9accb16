"""Would a filter save work in contrastive losses? Which (row, tile) pairs of a trained model's batch matter.

    tilewise demo loop.steps=400 output.folder=runs/demo
    python -m reproductions.contrastive_skipping runs/demo

Writes reproductions/results/contrastive-skipping.json. The study applies the gradient filter of "Cut Your Losses in
Large-Vocabulary Language Models" to the softmax of each image over the texts of its batch. Texts are put in several
orders and cut into tiles of several widths. For each combination the study reports

- the share of (row, tile) pairs that are needed when each row may drop at most `tolerance` of its probability;
- the error of the gradients, plain and with every dropped tile replaced by its mean;
- for the symmetric loss, the share that is needed by the row or by a column of the tile, by the same rule.

Two lower bounds stand beside them: the share of single scores that are needed, and the share of tiles if each row
could have an order of its own.

The learned scale grows throughout training. The study is repeated with the same features at CLIP's largest scale, 100.

Axes: n images (rows), m texts (columns), d features, k tiles of w columns.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import run
from reproductions.records import RESULTS

WIDTHS = (32, 64, 128, 256)
TOLERANCES = (3e-2, 1e-2, 1e-3)


# Orders of the columns: permutations that put similar columns next to each other.


def random_order(x: Tensor) -> Tensor:
    """A random order, like that of a batch."""
    return torch.randperm(len(x), generator=torch.Generator().manual_seed(0))


def component_order(x: Tensor) -> Tensor:
    """Sorted by the first principal component."""
    return (x @ first_component(x)).argsort()


def bisection_order(x: Tensor, leaf: int = 8) -> Tensor:
    """Balanced clusters: halved at the median of the first principal component, recursively, down to `leaf` columns."""
    parts = [torch.arange(len(x))]
    while max(map(len, parts)) > leaf:
        halves = []
        for part in parts:
            ordered = part[component_order(x[part])] if len(part) > leaf else part
            halves += [ordered] if len(part) <= leaf else list(ordered.tensor_split(2))
        parts = halves
    return torch.cat(parts)


def chain_order(x: Tensor) -> Tensor:
    """A greedy chain: from each column to the most similar one that is not yet in it."""
    left = torch.ones(len(x), dtype=torch.bool)
    chain = [0]
    left[0] = False
    for _ in range(len(x) - 1):
        near = (x @ x[chain[-1]]).masked_fill_(~left, -torch.inf).argmax().item()
        chain.append(int(near))
        left[near] = False
    return torch.tensor(chain)


def first_component(x: Tensor, turns: int = 20) -> Tensor:
    """The first principal component, by power iteration."""
    centred = x - x.mean(0)
    v = torch.ones(x.shape[1], dtype=x.dtype) / x.shape[1] ** 0.5
    for _ in range(turns):
        v = F.normalize(centred.T @ (centred @ v), dim=0)
    return v


ORDERS: dict[str, Callable[[Tensor], Tensor]] = {
    "random": random_order,
    "first component": component_order,
    "bisection": bisection_order,
    "chain": chain_order,
}


# What a tolerance keeps


def needed_tiles(mass: Tensor, tolerance: float, positive: Tensor) -> Tensor:
    """(n, k) bool: the tiles that a row keeps when it drops the lightest ones, up to `tolerance` in sum.

    Args:
        mass: (n, k), probability of each row in each tile.
        tolerance: the largest probability that a row may drop.
        positive: (n,), the tile of the row's own column, which is never dropped.
    """
    own = F.one_hot(positive, mass.shape[1]).bool()
    ascending, index = mass.masked_fill(own, torch.inf).sort(1)
    kept = ascending.double().cumsum(1) > tolerance
    return torch.zeros_like(own).scatter_(1, index, kept)


def tile_sums(p: Tensor, width: int) -> Tensor:
    """(n, k): sums over tiles of `width` columns. The last tile may be narrower."""
    missing = -p.shape[1] % width
    return F.pad(p, (0, missing)).view(len(p), -1, width).sum(2)


def needed_scores(p: Tensor, tolerance: float) -> Tensor:
    """(n,): the smallest number of columns that hold all but `tolerance` of a row."""
    return (p.sort(1).values.double().cumsum(1) > tolerance).sum(1)


def needed_of_columns(p: Tensor, tolerance: float) -> Tensor:
    """(n, m) bool: the smallest set of scores of each column that holds all but `tolerance` of it."""
    ascending, index = p.sort(0)
    kept = ascending.double().cumsum(0) > tolerance
    return torch.zeros_like(kept).scatter_(0, index, kept)


def gradient_errors(p: Tensor, keep: Tensor, width: int, a: Tensor, b: Tensor, own: Tensor) -> dict[str, float]:
    """Errors of dA and dB of the mean loss, relative to their norm, if only the kept tiles are computed.

    In the compensated variant the mass of a dropped (row, tile) pair is spread evenly over the columns of the tile.
    """
    m = p.shape[1]
    tile = torch.arange(m) // width
    g = p.clone()
    g[torch.arange(len(p)), own] -= 1
    wanted = g @ b, g.T @ a
    errors = {}
    lost = p.masked_fill(keep[:, tile], 0.0)
    counts = torch.bincount(tile)
    for name, replacement in (("", None), ("_compensated", tile_sums(lost, width) / counts)):
        change = lost if replacement is None else lost - replacement[:, tile].masked_fill(keep[:, tile], 0.0)
        for side, off, want in zip(("dA", "dB"), (change @ b, change.T @ a), wanted, strict=True):
            errors[f"error_{side}{name}"] = float(off.norm() / want.norm())
    return errors


def study(a: Tensor, b: Tensor, scale: float, ids: Tensor) -> dict[str, Any]:
    """All orders, widths and tolerances for one batch. Pairs with equal ids are excluded, as in the demo."""
    n, m = len(a), len(b)
    same = ids[:, None] == ids
    same.fill_diagonal_(False)
    scores = (scale * a @ b.T).masked_fill_(same, -torch.inf)
    p, columns = scores.softmax(1), scores.softmax(0)
    rows: list[dict[str, Any]] = []
    report = {
        "rows": n,
        "scale": scale,
        "loss": float(-p.diagonal().clamp(min=1e-38).log().mean()),
        "accuracy": float((p.argmax(1) == torch.arange(n)).double().mean()),
        "score_deviation": float((scale * a @ b.T).std()),
        "above_2^-12": float((p > 2**-12).double().mean()),
        "results": rows,
    }
    single = {t: needed_scores(p, t) for t in TOLERANCES}
    report["single_scores_needed"] = {f"{t:g}": float(count.double().mean() / m) for t, count in single.items()}
    by_columns = {t: needed_of_columns(columns, t).float() for t in TOLERANCES}
    for name, order_of in ORDERS.items():
        order = order_of(b)
        place = order.argsort()
        ordered, sorted_b = p[:, order], b[order]
        for width in WIDTHS:
            mass = tile_sums(ordered, width)
            for t in TOLERANCES:
                keep = needed_tiles(mass, t, place // width)
                columns_need = tile_sums(by_columns[t][:, order], width) > 0
                rows.append(
                    {
                        "order": name,
                        "width": width,
                        "tolerance": t,
                        "needed": float(keep.double().mean()),
                        "needed_symmetric": float((keep | columns_need).double().mean()),
                        "needed_best_order": float((single[t] / width).ceil().mean() / mass.shape[1]),
                        "largest_dropped": float(mass.masked_fill(keep, 0.0).double().sum(1).max()),
                        **gradient_errors(ordered, keep, width, a, sorted_b, place),
                    }
                )
        print(f"  {name}: done", file=sys.stderr, flush=True)
    return report


# A trained run


@torch.inference_mode()
def features_of(folder: Path, rows: int) -> tuple[Tensor, Tensor, float, Tensor, dict[str, Any]]:
    """Images, texts, scale and ids of a training batch, from the best checkpoint of a run."""
    from tilewise.train.data import BatchStream, Position, SkipLog, open_source
    from tilewise.train.load_run import load_run

    config, encoders, choice = load_run(folder, "cpu", "best")
    skips = SkipLog()
    stream = BatchStream(
        open_source(config.data, encoders.model.pixels.size, skips),
        encoders.model.tokenizer,
        seed=1,
        batch_size=rows,
        rank=0,
        world=1,
        skips=skips,
        prefetch=0,
    )
    batch = stream.make(Position(), 0)
    image = encoders.images(batch.images.split(512))
    text = torch.cat(
        [
            encoders.model.text(**{name: value[start : start + 512] for name, value in batch.tokens.items()}).float()
            for start in range(0, rows, 512)
        ]
    )
    about = {"step": choice.step, "features": image.shape[1], "trained_with": config.loop.batch_size}
    return image, text, float(encoders.model.scale()), batch.ids, about


def table(report: dict[str, Any]) -> str:
    """The results as a text table."""
    columns = {
        "needed": "needed",
        "symmetric": "needed_symmetric",
        "own order": "needed_best_order",
        "dA": "error_dA",
        "dB": "error_dB",
        "dA comp.": "error_dA_compensated",
        "dB comp.": "error_dB_compensated",
    }
    lines = [f"{'order':16s} tile tolerance " + "".join(f"{name:>10s}" for name in columns)]
    for r in report["results"]:
        cells = "".join(f"{100 * r[name]:9.2f}%" for name in columns.values())
        lines.append(f"{r['order']:16s} {r['width']:4d} {r['tolerance']:9g} {cells}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> Path:
    """Study the batches, print and write the results. Returns the path."""
    parser = argparse.ArgumentParser(prog="python -m reproductions.contrastive_skipping", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("run", type=Path, help="the folder of a run on icons")
    parser.add_argument("--rows", type=int, nargs="*", default=[2048, 4096], help="batch sizes")
    parser.add_argument("--scales", type=float, nargs="*", default=[100.0], help="further scales")
    parser.add_argument("--out", type=Path, default=RESULTS / "contrastive-skipping.json")
    parser.add_argument("--commit", help=run.COMMIT_HELP)
    arguments = parser.parse_args(argv)
    report: dict[str, Any] = {
        "command": "python -m reproductions.contrastive_skipping runs/demo",
        "commit": run.commit_of(arguments.commit),
        "torch": torch.__version__,
        "batches": [],
    }
    for rows in arguments.rows:
        print(f"{rows} pairs", file=sys.stderr, flush=True)
        image, text, scale, ids, about = features_of(arguments.run, rows)
        for looked_at in dict.fromkeys((scale, *arguments.scales)):
            found = about | {"learned_scale": scale} | study(image, text, looked_at, ids)
            report["batches"].append(found)
            words = f"{rows} pairs, step {about['step']}, scale {looked_at:.1f} (learned: {scale:.1f})"
            print(f"{words}, loss {found['loss']:.3f}\n{table(found)}")
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    print(f"wrote {arguments.out}")
    return Path(arguments.out)


if __name__ == "__main__":
    main()
