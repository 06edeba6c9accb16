"""Predicted cost of a contrastive loss over many GPUs, and the loss memory of table 1 of the Inf-CL paper.

    python -m reproductions.cost_model                      writes reproductions/results/ring/cost_model.{json,md,png}
    python -m reproductions.cost_model --rate-tflops 600    with another single-GPU rate

This is a model, not a measurement: nothing here has run on more than one GPU. Its parts are checked elsewhere.
tests/ring/test_ring_cost.py counts the bytes per hop and the memory per rank, and tests the overlap with a slowed link.
The GPU benchmarks measure the single-GPU rate.

Each of W ranks has n = N / W rows of width d; features have f bytes, gradients g bytes. Teams of G ranks gather their
blocks, where these are small (`tilewise.ops.budget.ring_team` says how many). Each of W / G steps does

    forward    work  G * 2 n^2 d / rate    beside  hop of G n d f          (W / G - 1 hops)
    backward   work  G * 6 n^2 d / rate    beside  hop of G n d (f + g)    (W / G - 1 of features, W / G of gradients)

A step takes the longer of work and hop. No work is left to hide the last hop, which returns the gradients to their
owner, nor the log2(G) exchanges of n d f, 2 n d f, ... by which a team gathers its blocks, nor those of the gradients
by which it adds them.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from reproductions.records import RESULTS
from tilewise.kernels.spec import PairShape
from tilewise.ops.budget import ring_team
from tilewise.options import TileOptions
from tilewise.ring.schedule import partners

OUT = RESULTS / "ring"
GIB = 2**30
WORLDS = (8, 32, 128, 512, 1024)
BATCHES = tuple(2**k for k in (16, 18, 20, 22, 24))  # 64k to 16M
BACKWARD_VECTOR_BYTES = 8  # per column: its log-sum-exp and the incoming gradient of that
CREDIT_VECTOR_BYTES = 8  # the running log-sum-exp


def forward_bytes(
    world: int, cols: int, width: int, feature_bytes: int, *, vectors: int = 0, accumulators: int = 0, team: int = 1
) -> int:
    """Bytes that a rank sends in forward, with equal shards: ``(W - 1) m (d f + vectors) + W m accumulators``.

    Teams of G ranks send accumulators of G - 1 blocks more; a single team sends those of W - 1 blocks.
    ``vectors`` counts the bytes per column of ids, shifts and biases, which the last rank does not send on.
    ``accumulators`` counts those of the running column statistics, which return to the owner.
    """
    returns = (world if world > team else 0) + team - 1
    return cols * ((world - 1) * (width * feature_bytes + vectors) + returns * accumulators)


def backward_bytes(
    world: int, cols: int, width: int, feature_bytes: int, gradient_bytes: int, *, vectors: int = 0, team: int = 1
) -> int:
    """Bytes that a rank sends in backward, with equal shards: ``(W - 1) m (d f + vectors) + W m d g``; see forward."""
    accumulators = width * gradient_bytes
    return forward_bytes(world, cols, width, feature_bytes, vectors=vectors, accumulators=accumulators, team=team)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Rates of one GPU and of its links."""

    name: str = "H200, 8 per node"
    rate_tflops: float = 530.0  # forward + backward over 4 products of 2 n^2 d, one H200, n >= 131,072 (results/gpu-*)
    # Assumed: launches and merges of one block, in forward or backward; also what an exchange inside a team takes.
    block_overhead_s: float = 150e-6
    ranks_per_node: int = 8
    node_gb_s: float = 360.0  # one direction: 80 % of NVLink 4's 450
    net_gb_s: float = 40.0  # one direction and GPU: 80 % of 400 Gbit/s
    hop_latency_s: float = 20e-6
    agreement_s: float = 100e-6  # one small all-gather; a step has three

    def link_gb_s(self, ranks: int) -> float:
        """Rate of the slowest link between consecutive ranks. All hops of a step happen at once, so it decides."""
        return self.node_gb_s if ranks <= self.ranks_per_node else self.net_gb_s


@dataclass(frozen=True, kw_only=True)
class Loss:
    """A symmetric contrastive loss."""

    width: int = 512
    feature_bytes: int = 2
    gradient_bytes: int = 4
    workspace_bytes: int = 256 * 2**20


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """One step of one rank, forward and backward."""

    world: int
    batch: int
    team: int  # ranks whose blocks are computed at once
    step_s: float
    work_s: float  # products and overhead
    overhead_s: float
    link_s: float  # time of all hops
    exposed_s: float
    sent_bytes: int
    memory_bytes: int  # above the features

    @property
    def hidden_share(self) -> float:
        """Share of the time on the link that is hidden by work."""
        return 1.0 if self.link_s == 0 else 1.0 - self.exposed_s / self.link_s


def predict(world: int, batch: int, machine: Machine, loss: Loss) -> Prediction:
    """Predict one step over ``world`` ranks with ``batch / world`` rows each."""
    n, d = batch / world, loss.width
    rows = -(-batch // world)
    team = team_of(world, rows, loss)
    unit_s = 2 * n * n * d / (machine.rate_tflops * 1e12)

    def hop_s(size: float, ranks: int = world) -> float:
        return 0.0 if size == 0 else machine.hop_latency_s + size / (machine.link_gb_s(ranks) * 1e9)

    cargo_forward = n * d * loss.feature_bytes
    cargo_backward = n * (d * loss.feature_bytes + BACKWARD_VECTOR_BYTES)
    gradient = n * d * loss.gradient_bytes
    step_s = work_s = link_s = overhead_s = 0.0
    for products, cargo, credit in (
        (1, cargo_forward, n * CREDIT_VECTOR_BYTES),
        (3, cargo_backward, gradient),
    ):
        for _, held, _ in partners(0, team):  # gathered before, and added after the loop
            moved = [hop_s(len(held) * size, 2 * len(held)) for size in (cargo, credit)]
            overhead_s += 2 * machine.block_overhead_s
            work_s += 2 * machine.block_overhead_s
            step_s += sum(moved) + 2 * machine.block_overhead_s
            link_s += sum(moved)
        block_s = team * products * unit_s + machine.block_overhead_s
        overhead_s += world // team * machine.block_overhead_s
        for step in range(world // team):
            moved = team * ((cargo if (step + 1) * team < world else 0.0) + (credit if step > 0 else 0.0))
            step_s += max(block_s, hop_s(moved))
            work_s += block_s
            link_s += hop_s(moved)
        if world > team:  # the last hop, which returns the gradients to their owner
            step_s += hop_s(team * credit)
            link_s += hop_s(team * credit)
    agreements = 3 * machine.agreement_s if world > 1 else 0.0
    sent = forward_bytes(world, rows, d, loss.feature_bytes, accumulators=CREDIT_VECTOR_BYTES, team=team)
    sent += backward_bytes(
        world, rows, d, loss.feature_bytes, loss.gradient_bytes, vectors=BACKWARD_VECTOR_BYTES, team=team
    )
    return Prediction(
        world=world,
        batch=batch,
        team=team,
        step_s=step_s + agreements,
        work_s=work_s,
        overhead_s=overhead_s,
        link_s=link_s + agreements,
        exposed_s=step_s + agreements - work_s,
        sent_bytes=sent,
        memory_bytes=memory_bytes(world, rows, loss),
    )


def team_of(world: int, rows: int, loss: Loss) -> int:
    """The number of ranks whose blocks are computed at once."""
    if world == 1:
        return 1
    dtype = {2: torch.bfloat16, 4: torch.float32}[loss.feature_bytes]
    options = TileOptions(workspace_mib=loss.workspace_bytes // 2**20)
    return ring_team(options, PairShape(rows, rows, loss.width, dtype, torch.device("cuda")), rows, world)[0]


def memory_bytes(world: int, rows: int, loss: Loss) -> int:
    """Peak memory of a rank above its features. It is the same for every world > 1.

    It holds two travelling blocks of features and two of gradients, the gradient of the rows and that of the current
    block, about 16 vectors, and the workspace. The gradient of the current columns is part of the workspace, unless it
    fits a quarter of that. The blocks of teams are part of the workspace.
    """
    block = rows * loss.width
    travelling = 2 * (loss.feature_bytes + loss.gradient_bytes) * block if world > 1 else 0
    columns = loss.gradient_bytes * block
    if world > 1 and columns > loss.workspace_bytes // 4:
        columns = 0
    if team_of(world, rows, loss) > 1:
        travelling = columns = 0
    rest = (1 + (world > 1)) * loss.gradient_bytes * block + rows * 16 * 8
    return travelling + columns + rest + loss.workspace_bytes


# Table 1 of the Inf-CL paper (ViT-L/14, width 768): memory of the loss in GB, by number of GPUs and batch.
PAPER_GB = {
    8: {
        "CLIP": {32: 16.67, 64: 66.11},
        "OpenCLIP": {32: 2.27, 64: 8.63, 128: 33.64},
        "Inf-CL": {32: 0.18, 64: 0.36, 128: 0.72, 256: 1.45, 1024: 6.53},
    },
    32: {
        "CLIP": {32: 16.66, 64: 66.11},
        "OpenCLIP": {32: 0.71, 64: 2.45, 128: 8.98, 256: 34.35},
        "Inf-CL": {32: 0.05, 64: 0.09, 128: 0.18, 256: 0.35, 1024: 1.44},
    },
}
PAPER_WIDTH = 768
DENSE_BYTES_PER_PAIR = 16  # float32 logits of both directions and their gradients
INF_CL_BLOCKS = 15.4  # float32 tensors of the size of a rank's features, fitted to one cell: 128k on 8 GPUs


def paper_model_gib(method: str, world: int, batch: int) -> float:
    """Memory of the paper's methods by the laws b^2 (CLIP), b^2 / W (OpenCLIP) and b / W (Inf-CL)."""
    if method == "CLIP":
        return DENSE_BYTES_PER_PAIR * batch**2 / GIB
    if method == "OpenCLIP":
        return DENSE_BYTES_PER_PAIR * batch**2 / world / GIB
    return INF_CL_BLOCKS * 4 * PAPER_WIDTH * batch / world / GIB


def paper_table() -> list[str]:
    """The loss column of table 1: the paper's figures, the laws, and the memory of this library."""
    lines = [
        "| GPUs | batch | CLIP: paper, 16 b^2 | OpenCLIP: paper, 16 b^2 / W | Inf-CL: paper, linear law | tilewise |",
        "|---|---|---|---|---|---|",
    ]
    ours = Loss(width=PAPER_WIDTH)
    for world, methods in PAPER_GB.items():
        for thousands in (32, 64, 128, 256, 1024):
            batch = thousands * 1024
            cells = []
            for method, figures in methods.items():
                told = f"{figures[thousands]:.2f}" if thousands in figures else "does not fit"
                cells.append(f"{told}, {paper_model_gib(method, world, batch):.2f}")
            plain = (memory_bytes(world, batch // world, ours) - ours.workspace_bytes) / GIB
            cells.append(f"{plain:.2f} + {ours.workspace_bytes / GIB:.2f} workspace")
            lines.append(f"| {world} | {thousands}k | " + " | ".join(cells) + " |")
    return lines


def short(batch: int) -> str:
    """Format a batch size: 65536 is 64k."""
    return f"{batch // 2**20}M" if batch >= 2**20 else f"{batch // 2**10}k"


def step_table(predictions: Sequence[Prediction]) -> list[str]:
    """A row for each world and batch."""
    lines = [
        "| W | batch N | rows per rank | blocks at once | step | work | of it overhead | on the link | hidden | "
        "sent per rank | memory per rank |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for p in predictions:
        lines.append(
            f"| {p.world} | {short(p.batch)} | {p.batch // p.world:,} | {p.team} | {_time(p.step_s)} | "
            f"{_time(p.work_s)} | {_time(p.overhead_s)} | {_time(p.link_s)} | "
            f"{100 * p.hidden_share:.0f} % | {p.sent_bytes / 1e9:.2f} GB | "
            f"{p.memory_bytes / GIB:.2f} GiB |"
        )
    return lines


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.1f} ms"


def plot(predictions: Sequence[Prediction], machine: Machine, path: Path) -> None:
    """Draw step time and hidden share against the global batch, with a line for each world."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2))
    for world in sorted({p.world for p in predictions}):
        own = [p for p in predictions if p.world == world]
        batches = [p.batch for p in own]
        line = left.plot(batches, [p.step_s for p in own], marker="o", label=f"W = {world}")[0]
        left.plot(batches, [p.work_s for p in own], linestyle=":", color=line.get_color())
        right.plot(batches, [100 * p.hidden_share for p in own], marker="o", color=line.get_color())
    left.set(xscale="log", yscale="log", xlabel="global batch", ylabel="step, s (dotted: work alone)")
    right.set(xscale="log", xlabel="global batch", ylabel="time on the link that is hidden, %", ylim=(0, 103))
    for axes in (left, right):
        axes.set_xticks(BATCHES, [short(batch) for batch in BATCHES])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    left.legend()
    figure.suptitle(
        f"Modelled: contrastive loss over a ring ({machine.name}, {machine.rate_tflops:.0f} TFLOP/s per GPU)"
    )
    figure.tight_layout()
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)


def markdown(predictions: Sequence[Prediction], machine: Machine, loss: Loss) -> str:
    """The page."""
    return "\n".join(
        [
            "# The ring, modelled",
            "",
            "Written by `python -m reproductions.cost_model`. This is a model, fed with a measured single-GPU rate and",
            "stated link speeds. Nothing here was run on more than one GPU.",
            "",
            f"{machine.name}: {machine.rate_tflops:.0f} TFLOP/s per GPU, {machine.node_gb_s:.0f} GB/s inside a node, "
            f"{machine.net_gb_s:.0f} GB/s per GPU between nodes, {1e6 * machine.hop_latency_s:.0f} us per hop. Width "
            f"{loss.width}, features of {loss.feature_bytes} bytes, travelling gradients of {loss.gradient_bytes}.",
            "",
            "Step: forward and backward. Blocks at once: those of so many ranks are gathered before the work.",
            "Overhead: launches (assumed). On the link: the time of all hops if none of it were hidden by work.",
            "Memory: above the features; gradients are included.",
            "",
            *step_table(predictions),
            "",
            "![step time and hidden share](cost_model.png)",
            "",
            "## Memory of the loss beside the paper's table 1 (GiB, width 768)",
            "",
            *paper_table(),
            "",
        ]
    )


def main(argv: Sequence[str] | None = None) -> list[Path]:
    """Write the page, the plot and the JSON file. Returns their paths."""
    parser = argparse.ArgumentParser(description="Model the ring over many GPUs.")
    parser.add_argument("--rate-tflops", type=float, default=Machine.rate_tflops, help="rate of one GPU")
    parser.add_argument("--out", type=Path, default=OUT, help="folder to write to")
    arguments = parser.parse_args(argv)
    machine, loss = Machine(rate_tflops=arguments.rate_tflops), Loss()
    predictions = [predict(world, batch, machine, loss) for world in WORLDS for batch in BATCHES]
    arguments.out.mkdir(parents=True, exist_ok=True)
    base = arguments.out / "cost_model"
    rows = [{**asdict(p), "hidden_share": p.hidden_share} for p in predictions]
    told = {"machine": asdict(machine), "loss": asdict(loss), "predictions": rows}
    base.with_suffix(".json").write_text(json.dumps(told, indent=1) + "\n")
    base.with_suffix(".md").write_text(markdown(predictions, machine, loss))
    written = [base.with_suffix(".json"), base.with_suffix(".md")]
    if importlib.util.find_spec("matplotlib"):
        plot(predictions, machine, base.with_suffix(".png"))
        written.append(base.with_suffix(".png"))
    for path in written:
        print(f"wrote {path}")
    return written


if __name__ == "__main__":
    main()
