"""Tables 1 and 4 of the Inf-CL paper: time and memory of a training step of ViT-B/16 at large batches, per loss.

    PYTHONPATH=src python3 -m reproductions.train_step --max-seconds 330

First each loss is measured alone, with the model and the batch of a whole step in memory. A loss that does not fit
there is out of memory.

Then whole steps through the gradient cache are measured, as long as there is time: all losses at the smallest batch,
forth and back, so that a drift of the card cancels; all losses at the next batch; our losses at the large batches; the
baselines at the large batches. A step that did not fit the time is estimated from its parts and marked. The file is
written after every step.

With --turns k every step is measured k times, forth and back. With --add-to FILE the other rows of the file are kept:

    PYTHONPATH=src python3 -m reproductions.train_step --batches 65536 --turns 2 --add-to train-step-X.json

Batches are random. On the device they are whole tensors, made before the clock starts. With offload, the rows of a
batch come from a smaller pool in host memory, and every chunk is copied as it would be from a whole batch.

Axes: n pairs of the batch, c pairs of a chunk, d features.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from benchmarks.run import COMMIT_HELP, describe, repeatable, slug, write
from torch import Tensor, nn

from reproductions.records import RESULTS
from reproductions.train_step_order import METHODS, rounds, schedule
from reproductions.train_step_pages import markdown, step_ratios
from tilewise.cache import LazyBatch
from tilewise.train.config import RunConfig, load_config
from tilewise.train.data import Batch, Position
from tilewise.train.distributed import World
from tilewise.train.memory import CudaMemory, tensor_bytes
from tilewise.train.models import TwoTowers, build_model
from tilewise.train.objective import AUTOCAST, Objective, pair_loss
from tilewise.train.optim import build_optimizer

POOL = 2048  # distinct images in host memory
PRECISION = "bf16"  # of the encoders
Row = dict[str, Any]


@dataclass
class Bench:
    """State that all measurements share: model and optimizer on the device, images in host memory, the deadline."""

    config: RunConfig
    model: TwoTowers
    optimizer: torch.optim.Optimizer
    device: torch.device
    deadline: float
    pool: Tensor = field(default_factory=lambda: torch.empty(0))
    tokens: dict[str, Tensor] = field(default_factory=dict)
    pairs_per_s: float = 0.0

    def left(self) -> float:
        return self.deadline - time.monotonic()

    def with_method(self, method: str) -> RunConfig:
        offload = "true" if method.endswith("+offload") else "false"
        names = [f"loss.name={method.split('+')[0]}", f"loss.offload={offload}"]
        return load_config(None, [*settings(self.config), *names])

    def expected_s(self, rows: int, found: Row) -> float:
        return rows / self.pairs_per_s + found.get("loss_s", 0.0)


def settings(config: RunConfig) -> list[str]:
    loop, model = config.loop, config.model
    return [
        "data.source=folder", "data.path=synthetic", f"model.name={model.name}", f"model.image_size={model.image_size}",
        f"loop.batch_size={loop.batch_size}", f"loop.chunk_size={loop.chunk_size}", f"loop.precision={loop.precision}",
    ]  # fmt: skip


def random_images(rows: int, size: int, device: torch.device) -> Tensor:
    """Random uint8 images (rows, 3, size, size), drawn eight bytes at a time."""
    generator = torch.Generator(device).manual_seed(0)
    words = torch.empty(-(-rows * 3 * size * size // 8), dtype=torch.int64, device=device)
    pixels = words.random_(-(2**63), None, generator=generator).view(torch.uint8)
    return pixels[: rows * 3 * size * size].view(rows, 3, size, size)


def synthetic_batch(bench: Bench, rows: int, offload: bool) -> Batch:
    """A random batch: on the device, or in host memory and loaded in chunks."""
    size, on_cuda = bench.model.pixels.size, bench.device.type == "cuda"
    if not bench.tokens:
        bench.tokens = bench.model.tokenizer([f"a picture of number {i}" for i in range(POOL)])
    tokens = {name: value.repeat(-(-rows // POOL), 1)[:rows] for name, value in bench.tokens.items()}
    if not offload:
        tokens = {name: value.to(bench.device) for name, value in tokens.items()}
        images: Any = random_images(rows, size, bench.device)
        return Batch(images, tokens, torch.arange(rows, device=bench.device), {}, Position(), 0)
    if not len(bench.pool):
        bench.pool = random_images(POOL, size, torch.device("cpu"))

    def load(first: int, last: int) -> Tensor:
        chunk = torch.empty(last - first, 3, size, size, dtype=torch.uint8, pin_memory=on_cuda)
        return torch.index_select(bench.pool, 0, torch.arange(first, last) % len(bench.pool), out=chunk)

    images = LazyBatch(rows, load, bench.device)
    return Batch(images, tokens, torch.arange(rows), {}, Position(), 0)


def empty_cache(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def timed(device: torch.device, run: Callable[[], Any]) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def measure_step(bench: Bench, method: str, rows: int) -> Row:
    """Measure one whole step: encode, loss, encode again with gradients, clip, optimizer."""
    config = bench.with_method(method)
    objective = Objective(config, bench.model, World(0, 1, bench.device))
    batch = synthetic_batch(bench, rows, config.loss.offload)
    data = 0 if config.loss.offload else batch.bytes
    counter = CudaMemory(bench.device) if bench.device.type == "cuda" else None

    def step() -> None:
        bench.optimizer.zero_grad(set_to_none=True)
        objective.step(batch)
        torch.nn.utils.clip_grad_norm_(bench.model.parameters(), 1.0)
        bench.optimizer.step()

    bench.optimizer.zero_grad(set_to_none=True)
    if counter is not None:
        objective.watch = counter.watch
        counter.start()
    found: Row = {"step_s": timed(bench.device, step), "data_bytes": data}
    if counter is not None:
        memory = counter.finish(data, rows, rows, 512)
        found |= {"loss_bytes": memory.loss, "backbone_bytes": memory.backbone, "peak_bytes": memory.peak}
        found["allocated_peak_bytes"] = counter.peak
    return found


def measure_loss(bench: Bench, method: str, rows: int, width: int) -> Row:
    """Measure the loss alone, forward and backward, on random unit features in the encoders' precision.

    Model and optimizer are on the device, and so is the batch unless it is offloaded. A loss that is out of memory here
    would be out of memory in a step.
    """
    device, config = bench.device, bench.with_method(method)
    dtype, loss = AUTOCAST.get(config.loop.precision, torch.float32), pair_loss(config.loss)
    held = None if config.loss.offload else synthetic_batch(bench, rows, False)
    generator = torch.Generator(device).manual_seed(0)

    def features() -> Tensor:
        drawn = torch.randn(rows, width, device=device, generator=generator)
        return F.normalize(drawn, dim=1).to(dtype).requires_grad_()

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
    found: Row = {"loss_s": min(timed(device, step) for _ in range(2))}
    if device.type == "cuda":
        found["loss_bytes"] = torch.cuda.max_memory_allocated(device) - before + tensor_bytes((image, text))
    del held
    return found


def out_of_memory(error: Exception) -> bool:
    return isinstance(error, torch.cuda.OutOfMemoryError) or "out of memory" in str(error).lower()


def attempt(bench: Bench, what: Callable[[], Row]) -> Row:
    """The measurement, or ``{"oom": True}`` if memory ran out."""
    try:
        return what()
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
    finally:
        bench.optimizer.zero_grad(set_to_none=True)
    empty_cache(bench.device)  # only now: until the error is released, its frames hold tensors
    return {"oom": True}


def warm_up(bench: Bench, methods: Sequence[str], chunk: int) -> None:
    """Run a few chunks with every loss, to compile kernels and make the optimizer's state. Then estimate the rate."""
    for method in methods:
        attempt(bench, lambda m=method: measure_step(bench, m, 4 * chunk))
    bench.pairs_per_s = 4 * chunk / measure_step(bench, methods[0], 4 * chunk)["step_s"]


def parts_to_compile(model: nn.Module, which: str) -> list[nn.Module]:
    """The layers of the transformers, or only their activations, which compile quickly but gain less."""
    if which == "activations":
        return [part for part in model.modules() if type(part).__module__ == "transformers.activations"]
    return [layer for part in model.modules() if isinstance(part, nn.ModuleList) for layer in part]


def compile_parts(bench: Bench, which: str, methods: Sequence[str], chunk: int) -> Row:
    """Compile parts of the towers, and keep that if it works and is faster. All layers of a tower share one graph."""
    parts = parts_to_compile(bench.model, which)
    eager, start = bench.pairs_per_s, time.monotonic()
    failure = ""
    try:
        for part in parts:
            part.compile(dynamic=False)
        warm_up(bench, methods[:1], chunk)
    except Exception as error:  # without a working compiler, measure uncompiled
        failure = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    kept = not failure and bench.pairs_per_s > eager
    found = {"compiled": which if kept else "", "eager_pairs_per_s": eager, "compiled_pairs_per_s": bench.pairs_per_s,
             "compile_s": time.monotonic() - start}  # fmt: skip
    if not kept:
        for part in parts:
            part._compiled_call_impl = None
        bench.pairs_per_s = eager
        bench.optimizer.zero_grad(set_to_none=True)
        empty_cache(bench.device)
    print(f"compiled {which}: {failure or found}", flush=True)
    return found


def run(args: argparse.Namespace, save: Callable[[Row], None]) -> Row:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = load_config(
        None,
        ["data.source=folder", "data.path=synthetic", f"model.name={args.model}", f"loop.chunk_size={args.chunk}",
         f"loop.batch_size={max(args.batches)}", f"loop.precision={PRECISION}", f"model.image_size={args.image_size}"],
    )  # fmt: skip
    deadline = time.monotonic() + args.max_seconds
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True  # every chunk has the same shape
    model = build_model(config).to(device).train()
    bench = Bench(config, model, build_optimizer(model, config.optim), device, deadline)
    command = repeatable("reproductions.train_step", args.argv)
    report = describe("train-step", device, command, 1, args.max_seconds, commit=args.commit)
    report |= {"model": args.model, "chunk": args.chunk, "precision": PRECISION, "compiled": ""}
    methods = [method for method in METHODS if method in args.methods]
    warm_up(bench, methods, args.chunk)
    if args.compile:
        report |= compile_parts(bench, args.compile, methods, args.chunk)
    report["encoder_pairs_per_s"] = bench.pairs_per_s
    print(f"encoders with the cache: {bench.pairs_per_s:,.0f} pairs/s", flush=True)
    pair_bytes = synthetic_batch(bench, 8, False).bytes // 8
    results: dict[tuple[int, str], Row] = {}
    for batch in args.batches:
        for method in methods:
            found = attempt(bench, lambda b=batch, m=method: measure_loss(bench, m, b, 512))
            if not found.get("oom"):
                found |= {"step_s": bench.expected_s(batch, found), "step_measured": False}
            data = 0 if "offload" in method else batch * pair_bytes
            results[batch, method] = {"batch": batch, "method": method, "data_bytes": data, **found}
    earlier = other_rows(args.add_to, set(results))
    report["results"] = [*earlier, *results.values()]
    save(report)
    for batch, method in (
        schedule(args.batches, methods) if not args.turns else rounds(args.batches, methods, args.turns)
    ):
        take_step(bench, results, batch, method)
        report["step_ratios"] = step_ratios(report["results"])
        save(report)
    return report


def other_rows(path: Path | None, measured: set[tuple[int, str]]) -> list[Row]:
    """The rows of an earlier file that are not measured here, each with its commit and date."""
    if path is None:
        return []
    report = json.loads(path.read_text(encoding="utf-8"))
    origin = {name: report[name] for name in ("commit", "date", "command") if name in report}
    return [{**origin, **row} for row in report["results"] if (row["batch"], row["method"]) not in measured]


def take_step(bench: Bench, results: dict[tuple[int, str], Row], batch: int, method: str) -> None:
    """Measure one step, if there is time. Several steps of a method are averaged."""
    found = results[batch, method]
    if found.get("oom") or 1.03 * bench.expected_s(batch, found) > bench.left():
        why = "out of memory" if found.get("oom") else "no time left"
        print(f"{batch:>7} {method:<17} not run: {why}", flush=True)
        return
    again = attempt(bench, lambda: measure_step(bench, method, batch))
    if again.get("oom"):
        found |= {"oom": True, "step_s": None, "step_measured": False}
    else:
        found["steps_s"] = [*found.get("steps_s", []), again["step_s"]]
        found |= {**again, "step_s": sum(found["steps_s"]) / len(found["steps_s"]), "step_measured": True}
        bench.pairs_per_s = batch / max(1e-9, again["step_s"] - found.get("loss_s", 0.0))
    for other in results.values():
        if not other.get("oom") and not other["step_measured"]:
            other |= estimate(bench, other, again.get("backbone_bytes"))
    shown = "out of memory" if found.get("oom") else f"{again['step_s']:.3f} s"
    print(f"{batch:>7} {method:<17} {shown}, peak {found.get('peak_bytes', 0) / 2**30:.2f} GiB, "
          f"{bench.left():.0f} s left", flush=True)  # fmt: skip


def estimate(bench: Bench, row: Row, backbone_bytes: int | None) -> Row:
    """Estimate a step from the latest rate of the encoders and its loss; its memory by equation 10 of the paper."""
    made: Row = {"step_s": bench.expected_s(row["batch"], row)}
    if backbone_bytes is not None:
        made["peak_bytes"] = row["data_bytes"] + max(row["loss_bytes"], backbone_bytes)
    return made


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = {"type": lambda text: [int(part) for part in text.split(",")]}
    parser.add_argument("--batches", default=[8192, 32768, 65536, 131072], **numbers)
    parser.add_argument("--methods", default=list(METHODS), type=lambda text: text.split(","))
    parser.add_argument("--chunk", type=int, default=256)
    parser.add_argument("--model", default="clip-vit-b-16")
    parser.add_argument("--image-size", type=int, default=0)
    parser.add_argument(
        "--compile", choices=("activations", "layers"), help="compile these parts, if it works and is faster"
    )
    parser.add_argument("--max-seconds", type=float, default=500.0, help="start no step that would end later")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--turns", type=int, default=0, help="how often to measure every step; 0: as the time allows")
    parser.add_argument("--add-to", type=Path, help="keep the rows of this file that are not measured now")
    parser.add_argument("--commit", help=COMMIT_HELP)
    argv = sys.argv[1:] if argv is None else argv
    return parser.parse_args(argv, argparse.Namespace(argv=list(argv)))


def main(argv: Sequence[str] | None = None) -> Path:
    args = parse(argv)
    path = args.out

    def save(report: Row) -> None:
        nonlocal path
        path = path or RESULTS / f"train-step-{slug(report['device'])}.json"
        write(path, report)
        path.with_suffix(".md").write_text(markdown(report), encoding="utf-8")

    print(markdown(run(args, save)))
    assert path is not None
    return path


if __name__ == "__main__":
    main()
