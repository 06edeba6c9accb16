"""A training step of ViT-B/16 CLIP at large batches: time and memory of each loss, as tables 1 and 4 of the paper.

    PYTHONPATH=src python3 -m benchmarks.train_step --max-seconds 540

For every batch size and loss the parts of equation 10 are measured by themselves (seconds in all), then whole steps
through the gradient cache as long as the time lasts, small batches first. A step that did not fit the time is
estimated from its parts and says so. Running out of memory is a result.

Axes: n pairs of the batch, c pairs of a chunk, d features.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.run import describe, slug, write
from tilewise.train.config import RunConfig, load_config
from tilewise.train.data import Batch, Position
from tilewise.train.distributed import World
from tilewise.train.memory import CudaMemory, tensor_bytes
from tilewise.train.models import TwoTowers, build_model
from tilewise.train.objective import AUTOCAST, Objective, pair_loss
from tilewise.train.optim import build_optimizer

RESULTS = Path(__file__).parent / "results"
METHODS = ("dense", "local", "tilewise", "tilewise+offload")


@dataclass
class Bench:
    """What all measurements share: the model with its optimizer on the device, and the clock."""

    config: RunConfig
    model: TwoTowers
    optimizer: torch.optim.Optimizer
    device: torch.device
    deadline: float
    pair_bytes: int = 0

    def left(self) -> float:
        return self.deadline - time.monotonic()

    def world(self) -> World:
        return World(0, 1, self.device)

    def with_method(self, method: str) -> RunConfig:
        offload = "true" if method.endswith("+offload") else "false"
        names = [f"loss.name={method.split('+')[0]}", f"loss.offload={offload}"]
        return load_config(None, [*settings(self.config), *names])


def settings(config: RunConfig) -> list[str]:
    loop, model = config.loop, config.model
    return [
        "data.source=folder", "data.path=synthetic", f"model.name={model.name}", f"model.image_size={model.image_size}",
        f"loop.batch_size={loop.batch_size}", f"loop.chunk_size={loop.chunk_size}", f"loop.precision={loop.precision}",
    ]  # fmt: skip


def synthetic_batch(model: TwoTowers, rows: int) -> Batch:
    """Random uint8 images and tokens in host memory; a few thousand different ones, repeated."""
    different = min(rows, 2048)
    size, generator = model.pixels.size, torch.Generator().manual_seed(0)
    few = torch.randint(0, 256, (different, 3, size, size), dtype=torch.uint8, generator=generator)
    tokens = model.tokenizer([f"a picture of number {i}" for i in range(different)])
    times = -(-rows // different)
    images = few.repeat(times, 1, 1, 1)[:rows] if times > 1 else few
    return Batch(
        images, {k: v.repeat(times, 1)[:rows] for k, v in tokens.items()}, torch.arange(rows), {}, Position(), 0
    )


def empty_cache(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def timed(device: torch.device, run: Any) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def measure_step(bench: Bench, method: str, batch: Batch) -> dict[str, Any]:
    """One whole step: encode, loss, encode again with gradients, optimizer."""
    config = bench.with_method(method)
    objective = Objective(config, bench.model, bench.world())
    data = 0 if config.loss.offload else batch.bytes
    counter = CudaMemory(bench.device) if bench.device.type == "cuda" else None

    def step() -> None:
        bench.optimizer.zero_grad(set_to_none=True)
        objective.step(batch)
        torch.nn.utils.clip_grad_norm_(bench.model.parameters(), 1.0)
        bench.optimizer.step()

    if counter is not None:
        objective.watch = counter.watch
        counter.start()
    seconds = timed(bench.device, step)
    found: dict[str, Any] = {"step_s": seconds, "step_measured": True, "data_bytes": data}
    if counter is not None:
        memory = counter.finish(data, len(batch.ids), len(batch.ids), 512)
        found |= {"loss_bytes": memory.loss, "backbone_bytes": memory.backbone, "peak_bytes": memory.peak}
        found["allocated_peak_bytes"] = counter.peak
    return found


def measure_loss(bench: Bench, method: str, rows: int, width: int) -> dict[str, Any]:
    """The loss alone, forward and backward, on random unit features in the encoders' precision."""
    device, dtype = bench.device, AUTOCAST[bench.config.loop.precision]
    loss = pair_loss(bench.with_method(method).loss)
    generator = torch.Generator(device).manual_seed(0)

    def features() -> Tensor:
        return (
            F.normalize(torch.randn(rows, width, device=device, generator=generator), dim=1).to(dtype).requires_grad_()
        )

    image, text = features(), features()
    scale = torch.tensor(14.3, device=device, requires_grad=True)

    def step() -> None:
        image.grad = text.grad = scale.grad = None
        loss(image, text, scale, None, None).backward()

    step()  # compiles kernels
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        image.grad = text.grad = scale.grad = None
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
    seconds = min(timed(device, step) for _ in range(2))
    found: dict[str, Any] = {"loss_s": seconds}
    if device.type == "cuda":
        own = tensor_bytes((image, text))
        found["loss_bytes"] = torch.cuda.max_memory_allocated(device) - before + own
    return found


def out_of_memory(error: Exception) -> bool:
    return isinstance(error, torch.cuda.OutOfMemoryError) or "out of memory" in str(error).lower()


def attempt(bench: Bench, what: Any) -> dict[str, Any]:
    """The measurement, or the fact that memory ran out."""
    try:
        return what()
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        return {"oom": True}
    finally:
        bench.optimizer.zero_grad(set_to_none=True)
        empty_cache(bench.device)


def chunk_seconds(bench: Bench, chunk: int) -> float:
    """Seconds per pair of the encoders and the cache alone, from a step of 16 chunks."""
    batch = synthetic_batch(bench.model, 16 * chunk)
    attempt(bench, lambda: measure_step(bench, "tilewise", batch))  # warms up, makes the optimizer's state
    found = attempt(bench, lambda: measure_step(bench, "tilewise", batch))
    loss = measure_loss(bench, "tilewise", 16 * chunk, 512)["loss_s"]
    return max(1e-9, found["step_s"] - loss) / (16 * chunk)


def run(args: argparse.Namespace) -> dict[str, Any]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = load_config(
        None,
        ["data.source=folder", "data.path=synthetic", f"model.name={args.model}", f"loop.chunk_size={args.chunk}",
         f"loop.batch_size={max(args.batches)}", "loop.precision=bf16", f"model.image_size={args.image_size}"],
    )  # fmt: skip
    torch.manual_seed(0)
    model = build_model(config).to(device).train()
    bench = Bench(config, model, build_optimizer(model, config.optim), device, time.monotonic() + args.max_seconds)
    report = describe(
        "train-step", device, " ".join(["python -m benchmarks.train_step", *sys.argv[1:]]), 1, args.max_seconds
    )
    report["commit"] = report["commit"] or args.commit or "unknown"
    per_pair = chunk_seconds(bench, args.chunk)
    report |= {"model": args.model, "chunk": args.chunk, "precision": "bf16", "encoder_pairs_per_s": 1 / per_pair}
    print(f"encoders with the cache: {1 / per_pair:,.0f} pairs/s", flush=True)
    bench.pair_bytes = synthetic_batch(model, 8).bytes // 8
    results = {
        (batch, method): {
            "batch": batch, "method": method, "data_bytes": 0 if "offload" in method else batch * bench.pair_bytes,
            **attempt(bench, lambda b=batch, m=method: measure_loss(bench, m, b, 512)),
        }
        for batch in args.batches
        for method in args.methods
    }  # fmt: skip
    for (batch, _), found in results.items():
        if "loss_s" in found:
            found |= {"step_s": batch * per_pair + found["loss_s"], "step_measured": False}
    measure_whole_steps(bench, results, args)
    report["results"] = list(results.values())
    return report


def measure_whole_steps(bench: Bench, results: dict[tuple[int, str], dict[str, Any]], args: argparse.Namespace) -> None:
    """As many whole steps as the time allows; small batches first, and our losses before the baselines."""
    first = ("tilewise", "tilewise+offload", "dense", "local")
    for batch in sorted(args.batches):
        data: Batch | None = None
        for method in sorted(args.methods, key=first.index):
            found = results[batch, method]
            making = 0.0 if data is not None else batch * bench.pair_bytes / 1.5e9  # seconds, at a slow copy
            expected = 1.15 * found.get("step_s", 0.0) + making
            if found.get("oom") or expected > bench.left():
                print(
                    f"{batch:>7} {method:<17} not run: {'out of memory' if found.get('oom') else 'no time left'}",
                    flush=True,
                )
                continue
            data = data or synthetic_batch(bench.model, batch)
            for _ in range(3 if batch <= 16384 else 1):  # the fastest: one slow step says little about a loss
                again = attempt(bench, lambda d=data, m=method: measure_step(bench, m, d))
                if again.get("oom") or not found["step_measured"] or again["step_s"] < found["step_s"]:
                    found |= again
            if found.get("oom"):
                found |= {"step_s": None, "step_measured": False}
            print(
                f"{batch:>7} {method:<17} {found.get('step_s')} s, peak {found.get('peak_bytes', 0) / 2**30:.2f} GiB",
                flush=True,
            )
        del data
        gc.collect()


def markdown(report: dict[str, Any]) -> str:
    """The result as a table."""
    lines = [
        f"{report['model']}, chunks of {report['chunk']}, {report['precision']}, on {report['device']}.",
        "",
        "| batch | loss | step s | loss s | M_data GiB | M_loss GiB | M_peak GiB |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in report["results"]:
        gib = [
            f"{row[k] / 2**30:.2f}" if row.get(k) is not None else "-"
            for k in ("data_bytes", "loss_bytes", "peak_bytes")
        ]
        if row.get("oom"):
            lines.append(f"| {row['batch']:,} | {row['method']} | out of memory | - | {gib[0]} | - | - |")
            continue
        step = f"{row['step_s']:.2f}" + ("" if row["step_measured"] else " (from parts)")
        lines.append(f"| {row['batch']:,} | {row['method']} | {step} | {row['loss_s']:.3f} | {' | '.join(gib)} |")
    return "\n".join(lines) + "\n"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = {"type": lambda text: [int(part) for part in text.split(",")]}
    parser.add_argument("--batches", default=[8192, 32768, 65536, 131072], **numbers)
    parser.add_argument("--methods", default=list(METHODS), type=lambda text: text.split(","))
    parser.add_argument("--chunk", type=int, default=256)
    parser.add_argument("--model", default="clip-vit-b-16")
    parser.add_argument("--image-size", type=int, default=0)
    parser.add_argument("--max-seconds", type=float, default=500.0, help="no step is started that would end later")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--commit", help="the commit to record, where the files came without their repository")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> Path:
    args = parse(argv)
    report = run(args)
    path = args.out or RESULTS / f"train-step-{slug(report['device'])}.json"
    write(path, report)
    path.with_suffix(".md").write_text(markdown(report), encoding="utf-8")
    print(markdown(report))
    return path


if __name__ == "__main__":
    main()
