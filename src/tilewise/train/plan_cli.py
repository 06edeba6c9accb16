"""The commands ``tilewise plan lm`` and ``plan clip``: options and tables. `plan_lm` and `plan_clip` compute."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from tilewise.train.plan_clip import ClipShape
    from tilewise.train.plan_lm import Cluster, LmPlan, ModelShape

plan_app = typer.Typer(no_args_is_help=True, help="Compute what fits into memory, before anything is trained.")


@plan_app.callback()
def _plan() -> None:
    """Compute what fits into memory, before anything is trained."""


Gpus = Annotated[
    int,
    typer.Option(
        help="number of devices; default: those of this machine, or 16 if it has none", min=0, show_default=False
    ),
]
Memory = Annotated[
    str,
    typer.Option(help="memory of one device, such as 80GiB or 24GB; default: that of this machine's devices, or 80GiB"),
]
Reserve = Annotated[float, typer.Option(help="GiB of each device that are left to libraries")]
Workspace = Annotated[
    int, typer.Option(help="MiB of workspace of tilewise on each device; tw.explain shows that of a call")
]


@plan_app.command()
def lm(
    model: Annotated[
        str,
        typer.Argument(help="a known model, such as 'gemma 2 2b', or a config.json or its folder; none: all known"),
    ] = "",
    vocab: Annotated[int, typer.Option(help="classes of the head", show_default=False)] = 0,
    hidden: Annotated[int, typer.Option(help="features of a hidden state", show_default=False)] = 0,
    layers: Annotated[int, typer.Option(help="blocks of the model", show_default=False)] = 0,
    parameters: Annotated[str, typer.Option(help="parameters of the whole model: 8030261248, 8.03B or 137M")] = "",
    gpus: Gpus = 0,
    memory: Memory = "",
    reserve_gib: Reserve = 5.0,
    tokens: Annotated[int, typer.Option(help="tokens of the batch whose memory is shown, over all devices")] = 65_536,
    sequence_length: Annotated[
        int, typer.Option(help="also show the largest batches in whole sequences", show_default=False)
    ] = 0,
    workspace_mib: Workspace = 256,
    parameter_bytes: Annotated[
        int, typer.Option(help="bytes of a parameter with its gradient and optimizer state")
    ] = 8,
) -> None:
    """Show the memory of a language model's logits, and the largest batch with and without them.

    The numbers are computed as in table A3 of the Cut Cross-Entropy paper. On a machine without a GPU, the default is
    16 devices of 80 GiB, as in that table.
    """
    from tilewise.errors import RangeError
    from tilewise.train.plan_lm import plan_lm
    from tilewise.train.terminal import Terminal, say

    if sequence_length < 0:
        raise RangeError(
            f"--sequence-length is a number of tokens, got {sequence_length}. Leave it out to see tokens only"
        )
    if tokens < 1:
        raise RangeError(f"--tokens is a whole number, at least 1, got {tokens}")
    shapes = chosen_shapes(model, {"vocabulary": vocab, "hidden": hidden, "layers": layers}, parameters)
    cluster = chosen_cluster(gpus, memory, reserve_gib, workspace_mib, parameter_bytes)
    plans: list[LmPlan] = []
    left_out: list[str] = []
    for shape in shapes:
        try:
            plans.append(plan_lm(shape, cluster, tokens))
        except ValueError as error:
            if len(shapes) == 1:
                raise
            left_out.append(str(error))
    console = Terminal()
    console.print(plan_table(plans, sequence_length))
    for line in left_out:
        say(console, f"left out: {line}")
    console.print(
        f"{described(cluster)}. Logits: float32, once. Activations: one 16-bit hidden state a layer (checkpointed). "
        f"Weights: {parameter_bytes} bytes a parameter, with gradient and optimizer. Everything is sharded."
    )


@plan_app.command()
def clip(
    model: Annotated[str, typer.Argument(help="a value of model.name, such as clip-vit-b-16")] = "clip-vit-b-16",
    batch_size: Annotated[int, typer.Option(help="pairs of the batch whose memory is shown, over all devices")] = 32768,
    chunk_size: Annotated[int, typer.Option(help="pairs that an encoder processes at once (loop.chunk_size)")] = 256,
    precision: Annotated[str, typer.Option(help="float32, bf16 or fp16 (loop.precision)")] = "bf16",
    image_size: Annotated[
        int, typer.Option(help="pixels along a side; default: the model's own", show_default=False)
    ] = 0,
    gpus: Gpus = 0,
    memory: Memory = "",
    reserve_gib: Reserve = 5.0,
    workspace_mib: Workspace = 256,
) -> None:
    """Show the memory of image-text training on each device, and the largest batch, for each way to compute the loss.

    The model is built with fake tensors, which have no data, and the activations of single rows are counted.
    """
    from tilewise.errors import RangeError
    from tilewise.train.plan_clip import check_batch, measure_shape
    from tilewise.train.terminal import Terminal

    check_batch(batch_size, chunk_size)
    if precision not in ("float32", "bf16", "fp16"):
        raise RangeError(f"--precision is one of float32, bf16, fp16, got {precision!r}")
    cluster = chosen_cluster(gpus, memory, reserve_gib, workspace_mib)
    shape = measure_shape(model, precision, image_size)
    console = Terminal()
    console.print(clip_table(shape, cluster, batch_size, chunk_size))
    console.print(
        f"{described(cluster)}. {shape.parameters:,} weights, 16 bytes each with gradient and AdamW. Activations: "
        f"{chunk_size} rows of {shape.row_bytes / 2**20:,.1f} MiB. With offload, the batch is in host memory: "
        f"{shape.pair_bytes:,} bytes a pair. These are lower bounds."
    )


def chosen_cluster(gpus: int, memory: str, reserve_gib: float, workspace_mib: int, parameter_bytes: int = 8) -> Cluster:
    """Return the devices that the options describe, or those of this machine."""
    from tilewise.errors import RangeError
    from tilewise.train.plan_lm import GIB, MIB, Cluster
    from tilewise.train.plan_memory import choose_devices

    if not math.isfinite(reserve_gib):
        raise RangeError(f"--reserve-gib is a finite number of GiB, got {reserve_gib}")
    devices = choose_devices(gpus, memory)
    return Cluster(
        gpus=devices.number,
        memory_bytes=devices.memory_bytes,
        reserve_bytes=round(reserve_gib * GIB),
        workspace_bytes=workspace_mib * MIB,
        parameter_bytes=parameter_bytes,
    )


def described(cluster: Cluster) -> str:
    """Return the devices in words."""
    from tilewise.train.plan_lm import GIB, MIB

    return (
        f"{cluster.gpus} x {cluster.memory_bytes / GIB:.4g} GiB, {cluster.reserve_bytes / GIB:g} GiB of each reserved; "
        f"{cluster.workspace_bytes // MIB} MiB of workspace on each with tilewise"
    )


def chosen_shapes(model: str, sizes: dict[str, int], parameters: str) -> list[ModelShape]:
    """Return the named model or that of a config.json with the given sizes applied, or all known models.

    Without a name, all sizes describe a model.
    """
    from dataclasses import replace

    from tilewise.errors import ConfigError
    from tilewise.train.plan_lm import MODELS, ModelShape, find_model
    from tilewise.train.plan_lm_file import read_shape

    given = {name: size for name, size in sizes.items() if size}
    if parameters:
        given["parameters"] = parse_count(parameters)
    if model:
        path = Path(os.path.expanduser(model))  # a user who does not exist stays as it is
        if os.path.exists(path) or path.suffix == ".json":
            return [read_shape(path, given)]
        shape = find_model(model)
        return [replace(shape, name=f"{shape.name}, changed", **given)] if given else [shape]
    if not given:
        return list(MODELS.values())
    missing = [name for name in (*sizes, "parameters") if name not in given]
    if missing:
        options = " and ".join("--vocab" if name == "vocabulary" else f"--{name}" for name in missing)
        raise ConfigError(
            f"a model without a name needs --vocab, --hidden, --layers and --parameters; add {options}, or name a model"
        )
    return [ModelShape(name="this model", **given)]


def parse_count(text: str) -> int:
    """Parse a number of parameters, with or without a unit.

    >>> parse_count("8.03B"), parse_count("137m"), parse_count("8_030_261_248")
    (8030000000, 137000000, 8030261248)
    """
    from tilewise.errors import RangeError

    units = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
    plain = text.strip().upper().replace("_", "").replace(",", "")
    unit = units.get(plain[-1:], 1)
    try:
        value = round(float(plain[:-1] if unit > 1 else plain) * unit)
    except (ValueError, OverflowError):
        value = 0
    if value < 1:
        raise RangeError(f"--parameters is a positive number such as 8030261248, 8.03B or 137M, got {text!r}")
    return value


def clip_table(shape: ClipShape, cluster: Cluster, batch: int, chunk_size: int) -> Table:
    """The memory of one device and the largest batch, for each way to compute the loss."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from tilewise.train.plan_clip import METHODS, backbone_bytes, largest_batch, loss_bytes, peak_bytes
    from tilewise.train.plan_lm import GIB

    title = f"{shape.name}: GiB a device for {batch:,} pairs; largest batch"
    table = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1), collapse_padding=True, pad_edge=False)
    table.add_column("loss", no_wrap=True)
    for head in ("of the loss", "of weights and\nactivations", "peak", "fits", "largest batch"):
        table.add_column(head, justify="right", no_wrap=True)
    chunk = min(chunk_size, -(-batch // cluster.gpus))
    for method in METHODS:
        peak = peak_bytes(shape, cluster, method, batch, chunk_size)
        sizes = (loss_bytes(shape, cluster, method, batch), backbone_bytes(shape, chunk), peak)
        fits = "yes" if peak <= cluster.usable_bytes else "no"
        most = largest_batch(shape, cluster, method, chunk_size)
        table.add_row(method, *(f"{size / GIB:,.1f}" for size in sizes), fits, f"{most:,}")
    return table


def plan_table(plans: list[LmPlan], sequence_length: int = 0) -> Table:
    """Table A3."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from tilewise.train.plan_lm import MIB, whole_sequences
    from tilewise.train.terminal import one_cell

    title = f"memory of {plans[0].tokens:,} tokens in MiB; largest batch in tokens" if plans else None
    table = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1), collapse_padding=True, pad_edge=False)
    table.add_column("model", no_wrap=True)
    for head in ("logits", "activ-\nations", "weights +\nopt + grad", "batch\nbefore", "batch\nafter", "gain"):
        table.add_column(head, justify="right", no_wrap=True)
    for plan in plans:
        batches = [f"{size:,}" for size in (plan.before_tokens, plan.after_tokens)]
        if sequence_length:
            counts = (
                whole_sequences(size, sequence_length, plan.cluster.gpus)
                for size in (plan.before_tokens, plan.after_tokens)
            )
            batches = [f"{size}\n{count:,} seq." for size, count in zip(batches, counts, strict=True)]
        memory = (f"{size / MIB:,.0f}" for size in (plan.logits_bytes, plan.activations_bytes, plan.model_bytes))
        table.add_row(one_cell(plan.shape.name), *memory, *batches, f"{plan.gain:.1f} x")
    return table
