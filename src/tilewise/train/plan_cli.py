"""The command ``tilewise plan lm``: arguments in, a table out. The arithmetic is in `plan_lm`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from tilewise.train.plan_lm import LmPlan, ModelShape

plan_app = typer.Typer(no_args_is_help=True, help="What fits into memory, before anything is trained.")


@plan_app.callback()
def _plan() -> None:
    """What fits into memory, before anything is trained."""


@plan_app.command()
def lm(
    model: Annotated[str, typer.Argument(help="a model by name, such as 'gemma 2 2b'; none: all that are known")] = "",
    vocab: Annotated[int, typer.Option(help="classes of the head")] = 0,
    hidden: Annotated[int, typer.Option(help="features of a hidden state")] = 0,
    layers: Annotated[int, typer.Option(help="blocks of the model")] = 0,
    parameters: Annotated[str, typer.Option(help="of the whole model: 8030261248, 8.03B or 137M")] = "",
    gpus: Annotated[int, typer.Option(help="devices that share the model and the batch")] = 16,
    memory_gib: Annotated[float, typer.Option(help="memory of one device")] = 80.0,
    reserve_gib: Annotated[float, typer.Option(help="of that, left to libraries")] = 5.0,
    tokens: Annotated[int, typer.Option(help="of the batch whose memory is shown, over all devices")] = 65_536,
    sequence_length: Annotated[int, typer.Option(help="show the largest batches in whole sequences, too")] = 0,
    workspace_mib: Annotated[int, typer.Option(help="scratch memory of tilewise on each device; the paper: 0")] = 256,
    parameter_bytes: Annotated[int, typer.Option(help="of a parameter with gradient and optimizer state")] = 8,
) -> None:
    """Memory of a language model's logits, and the largest batch with them and without (table A3 of the CCE paper)."""
    from rich.console import Console

    from tilewise.errors import RangeError
    from tilewise.train.plan_lm import GIB, MIB, Cluster, plan_lm

    if sequence_length < 0:
        raise RangeError(
            f"--sequence-length is a number of tokens, got {sequence_length}. Leave it out to see tokens only"
        )
    if tokens < 1:
        raise RangeError(f"--tokens is a whole number, at least 1, got {tokens}")
    for name, value in {"--memory-gib": memory_gib, "--reserve-gib": reserve_gib}.items():
        if not math.isfinite(value):
            raise RangeError(f"{name} is a finite number of GiB, got {value}")
    cluster = Cluster(
        gpus=gpus,
        memory_bytes=round(memory_gib * GIB),
        reserve_bytes=round(reserve_gib * GIB),
        workspace_bytes=workspace_mib * MIB,
        parameter_bytes=parameter_bytes,
    )
    shapes = chosen_shapes(model, {"vocabulary": vocab, "hidden": hidden, "layers": layers}, parameters)
    plans: list[LmPlan] = []
    left_out: list[str] = []
    for shape in shapes:
        try:
            plans.append(plan_lm(shape, cluster, tokens))
        except ValueError as error:
            if len(shapes) == 1:
                raise
            left_out.append(str(error))
    console = Console()
    console.print(plan_table(plans, sequence_length), highlight=False)
    for line in left_out:
        console.print(f"left out: {line}", highlight=False, markup=False)
    console.print(
        f"{gpus} x {memory_gib:g} GiB, {reserve_gib:g} GiB of each reserved; {workspace_mib} MiB of workspace on each "
        "with tilewise. Logits: float32, once. Activations: one 16-bit hidden state a layer (checkpointed). "
        f"Weights: {parameter_bytes} bytes a parameter, with gradient and optimizer. Everything is sharded.",
        highlight=False,
    )


def chosen_shapes(model: str, sizes: dict[str, int], parameters: str) -> list[ModelShape]:
    """Return the named model with the given sizes applied, a model described by sizes alone, or all known models."""
    from dataclasses import replace

    from tilewise.errors import ConfigError
    from tilewise.train.plan_lm import MODELS, ModelShape, find_model

    given = {name: size for name, size in sizes.items() if size}
    if parameters:
        given["parameters"] = parse_count(parameters)
    if model:
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
    """A number of parameters as people write it.

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


def plan_table(plans: list[LmPlan], sequence_length: int = 0) -> Table:
    """Table A3."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from tilewise.train.plan_lm import MIB, whole_sequences

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
        table.add_row(plan.shape.name, *memory, *batches, f"{plan.gain:.1f} x")
    return table
