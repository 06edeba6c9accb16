"""Batches of ordinary size, where most people train: every loss beside a few lines of dense PyTorch.

    python -m benchmarks.ordinary count            # calls of a step of 64 rows: without noise, the same on any machine
    python -m benchmarks.ordinary time             # wall time of a step, ours / dense (and / torch.compile on a GPU)
    python -m benchmarks.ordinary sizes            # the same from 64 to 65,536 rows, for benchmarks.charts
    python -m benchmarks.ordinary busy             # what two threads of a CPU lose beside two busy loops

A step is forward and backward. A time is that of a sequence of steps without a synchronization inside, as in training,
the median of shuffled turns. Results: benchmarks/results/{ordinary,sizes,busy}-<device>.json, and counts in
ordinary-counts.json.

Axes: n rows, d features, V classes, k own negatives of a row.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import tilewise as tw
from benchmarks.run import COMMIT_HELP, RESULTS, commit_of, device_name

Forward = Callable[[dict[str, Tensor]], Tensor]
TEMPERATURE, CLASSES, OWN, LABELS = 0.07, 32768, 8, 16
PACKAGE = str(Path(tw.__file__).parent)
COUNTS = RESULTS / "ordinary-counts.json"
TYPES = {"float32": torch.float32, "bf16": torch.bfloat16}
SIZES = 64, 256, 1024, 4096, 16384, 65536
IN_CHARTS = "clip", "info_nce", "cross_entropy"
BUSY_ROWS = 1024


def clip_dense(x: dict[str, Tensor]) -> Tensor:
    logits = x["scale"] * x["a"] @ x["b"].T
    target = torch.arange(len(logits), device=logits.device)
    return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2


def siglip_dense(x: dict[str, Tensor]) -> Tensor:
    logits = x["scale"] * x["a"] @ x["b"].T + x["bias"]
    sign = 2 * torch.eye(len(logits), device=logits.device, dtype=logits.dtype) - 1
    return -F.logsigmoid(sign * logits).sum() / len(logits)


def info_nce_dense(x: dict[str, Tensor]) -> Tensor:
    logits = x["a"] @ x["b"].T / TEMPERATURE
    return F.cross_entropy(logits, torch.arange(len(logits), device=logits.device))


def own_negatives_dense(x: dict[str, Tensor]) -> Tensor:
    own = torch.einsum("nd,nkd->nk", x["a"], x["own"])
    logits = torch.cat([x["a"] @ x["b"].T, own], 1) / TEMPERATURE
    return F.cross_entropy(logits, torch.arange(len(logits), device=logits.device))


def nt_xent_dense(x: dict[str, Tensor]) -> Tensor:
    n = len(x["a"])
    index = torch.arange(n, device=x["a"].device)
    logits = (x["a"] @ x["a"].T / TEMPERATURE).fill_diagonal_(-torch.inf)
    return F.cross_entropy(logits, (index + n // 2) % n)


def supcon_dense(x: dict[str, Tensor]) -> Tensor:
    labels = x["labels"]
    logits = (x["a"] @ x["a"].T / TEMPERATURE).fill_diagonal_(-torch.inf)
    positive = (labels[:, None] == labels[None, :]).fill_diagonal_(False)
    log_p = F.log_softmax(logits, 1).masked_fill(~positive, 0.0)
    return (-log_p.sum(1) / positive.sum(1).clamp(min=1)).mean()


def cross_entropy_dense(x: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(x["a"] @ x["classifier"].T, x["target"])


def tokens_dense(x: dict[str, Tensor]) -> Tensor:
    log_p = F.log_softmax((x["a"] @ x["classifier"].T).float(), 1)
    picked = log_p.gather(1, x["target"][:, None]).squeeze(1)
    entropy = -(log_p.exp() * log_p).sum(1)
    return picked.mean() + entropy.mean()


def tokens_ours(x: dict[str, Tensor]) -> Tensor:
    stats = tw.linear_token_stats(x["a"], x["classifier"], x["target"])
    return stats.log_prob.mean() + stats.entropy.mean()


# name: (ours, dense, the leaves)
LOSSES: dict[str, tuple[Forward, Forward, tuple[str, ...]]] = {
    "clip": (lambda x: tw.clip_loss(x["a"], x["b"], x["scale"]), clip_dense, ("a", "b", "scale")),
    "siglip": (
        lambda x: tw.siglip_loss(x["a"], x["b"], x["scale"], x["bias"]),
        siglip_dense,
        ("a", "b", "scale", "bias"),
    ),
    "info_nce": (lambda x: tw.info_nce(x["a"], x["b"], temperature=TEMPERATURE), info_nce_dense, ("a", "b")),
    "own_negatives": (
        lambda x: tw.info_nce(x["a"], x["b"], x["own"], temperature=TEMPERATURE),
        own_negatives_dense,
        ("a", "b", "own"),
    ),
    "nt_xent": (lambda x: tw.nt_xent(x["a"], temperature=TEMPERATURE), nt_xent_dense, ("a",)),
    "supcon": (lambda x: tw.supcon_loss(x["a"], x["labels"], temperature=TEMPERATURE), supcon_dense, ("a",)),
    "cross_entropy": (
        lambda x: tw.linear_cross_entropy(x["a"], x["classifier"], x["target"]),
        cross_entropy_dense,
        ("a", "classifier"),
    ),
    "tokens": (tokens_ours, tokens_dense, ("a", "classifier")),
}


def make_inputs(n: int, d: int, classes: int, dtype: torch.dtype, device: str) -> dict[str, Tensor]:
    generator = torch.Generator(device).manual_seed(n)

    def unit(*shape: int) -> Tensor:
        values = torch.randn(*shape, generator=generator, device=device)
        return F.normalize(values, dim=-1).to(dtype)

    x = {"a": unit(n, d), "b": unit(n, d), "own": unit(n, OWN, d), "classifier": 8.0 * unit(classes, d)}
    x["a"].add_(0.5 * x["b"])
    x["target"] = torch.randint(classes, (n,), generator=generator, device=device)
    x["labels"] = torch.randint(LABELS, (n,), generator=generator, device=device)
    x |= {"scale": torch.tensor(1 / TEMPERATURE, device=device), "bias": torch.tensor(-5.0, device=device)}
    return x


def stepper(forward: Forward, x: dict[str, Tensor], leaves: tuple[str, ...]) -> Callable[[], Tensor]:
    """A training step: forward and backward with fresh gradients."""
    inputs = dict(x)
    for name in leaves:
        inputs[name] = x[name].detach().clone().requires_grad_()
    wanted = [inputs[name] for name in leaves]

    def step() -> Tensor:
        for leaf in wanted:
            leaf.grad = None
        loss = forward(inputs)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    return step


# -- counts --


def count(step: Callable[[], Any]) -> dict[str, int]:
    """Calls of one step: of torch's operators ("aten", nested ones too), and from Python."""
    for _ in range(3):
        step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step()
    aten = sum(event.name.startswith("aten::") for event in profile.events() or ())
    found = {"aten": aten, "python": 0, "frames": 0}

    def seen(frame: Any, event: str, _: Any) -> None:
        found["python"] += event in ("call", "c_call")
        found["frames"] += event == "call" and frame.f_code.co_filename.startswith(PACKAGE)

    sys.setprofile(seen)
    try:
        step()
    finally:
        sys.setprofile(None)
    return found


def counts(name: str, method: str) -> dict[str, int]:
    """Calls of a step of 64 rows on the CPU. ``method``: "tilewise" or "dense"."""
    ours, dense, leaves = LOSSES[name]
    x = make_inputs(64, 64, 512, torch.float32, "cpu")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return count(stepper(ours if method == "tilewise" else dense, x, leaves))
    finally:
        torch.set_num_threads(threads)


def count_all() -> None:
    table = {name: {method: counts(name, method) for method in ("tilewise", "dense")} for name in LOSSES}
    for name, row in table.items():
        ours, dense = row["tilewise"], row["dense"]
        parts = [
            f"{kind} {ours[kind]:4} / {dense[kind]:4} = {ours[kind] / dense[kind]:4.1f}" for kind in ("aten", "python")
        ]
        print(f"{name:14}", *parts, f"frames {ours['frames']}", sep="   ")
    COUNTS.write_text(json.dumps({"torch": torch.__version__, "rows": 64, "counts": table}, indent=1) + "\n")


# -- times --


def seconds(step: Callable[[], Any], steps: int, cuda: bool) -> float:
    """Wall time of one of ``steps`` steps without a synchronization inside."""
    if cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    if cuda:
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / steps


def time_case(
    name: str, n: int, d: int, dtype: torch.dtype, device: str, compiled: bool, turns: int
) -> dict[str, float]:
    """Milliseconds of a step of each method."""
    cuda = device == "cuda"
    ours, dense, leaves = LOSSES[name]
    x = make_inputs(n, d, CLASSES if cuda else CLASSES // 8, dtype, device)
    steps = {"tilewise": stepper(ours, x, leaves), "dense": stepper(dense, x, leaves)}
    if compiled:
        torch._dynamo.reset()
        steps["compile"] = stepper(torch.compile(dense), x, leaves)
    for step in steps.values():
        for _ in range(5):
            step()
    one = max(seconds(steps["dense"], 3, cuda), 1e-5)
    many = max(1, min(30, int(0.3 / one)))
    found: dict[str, list[float]] = {method: [] for method in steps}
    for _ in range(turns):
        for method in random.sample(list(steps), len(steps)):
            found[method].append(seconds(steps[method], many, cuda))
    return {method: 1000 * statistics.median(times) for method, times in found.items()}


def time_all(arguments: argparse.Namespace, device: str) -> None:
    rows_out: list[dict[str, Any]] = []
    for dtype in arguments.dtypes.split(","):
        for name in arguments.losses.split(","):
            for n in map(int, arguments.rows.split(",")):
                kind = TYPES[dtype]
                ms = time_case(name, n, arguments.width, kind, device, arguments.compile, arguments.turns)
                row = {"loss": name, "rows": n, "dtype": dtype, "ms": {k: round(v, 4) for k, v in ms.items()}}
                rows_out.append(row)
                more = f"   / compile {ms['tilewise'] / ms['compile']:5.2f}" if "compile" in ms else ""
                ratio = ms["tilewise"] / ms["dense"]
                print(f"{dtype:8} {name:14} {n:6}   {ms['tilewise']:8.3f} ms   / dense {ratio:5.2f}{more}", flush=True)
    write("ordinary", "cases", rows_out, arguments, device)


def write(kind: str, field: str, rows: list[dict[str, Any]], arguments: argparse.Namespace, device: str) -> None:
    """The file of results, one line for each case."""
    name = device_name(torch.device(device))
    about = {"device": name, "torch": torch.__version__, "commit": commit_of(arguments.commit)}
    about |= {"width": arguments.width, "threads": torch.get_num_threads(), "note": arguments.note}
    out = arguments.out or RESULTS / f"{kind}-{name.lower().replace('(r)', '').replace(' ', '-')}.json"
    cases = ",\n  ".join(json.dumps(row) for row in rows)
    Path(out).write_text(json.dumps(about, indent=1)[:-2] + f',\n "{field}": [\n  {cases}\n ]\n}}\n')


# -- sizes --


def time_sizes(arguments: argparse.Namespace, device: str) -> None:
    """Time against the number of rows. torch.compile is last, and left out where the time is over."""
    start, cuda, rows = time.perf_counter(), device == "cuda", []
    kind = "bf16" if cuda else "float32"
    chosen = [name for name in arguments.losses.split(",") if name in IN_CHARTS]
    for method in ("tilewise", "dense", "compile"):
        for n in SIZES:
            for name in chosen:
                row = {"loss": name, "rows": n, "method": method, "dtype": kind}
                if time.perf_counter() - start > arguments.seconds:
                    row["status"] = "skipped"
                else:
                    row |= time_size(name, n, arguments, method, device)
                rows.append(row)
                print(f"{name:14} {n:6} {method:9} {row['status']:8} {row.get('median_ms', '')}", flush=True)
    write("sizes", "results", rows, arguments, device)


def time_size(name: str, n: int, arguments: argparse.Namespace, method: str, device: str) -> dict[str, Any]:
    """Milliseconds of one method, or that the memory does not hold its scores."""
    cuda = device == "cuda"
    ours, dense, leaves = LOSSES[name]
    scores = n * (CLASSES if name == "cross_entropy" else n)
    if method != "tilewise" and not cuda and scores > 2**28:  # a machine may have no limit of its own
        return {"status": "oom"}
    try:
        x = make_inputs(n, arguments.width, CLASSES, TYPES["bf16" if cuda else "float32"], device)
        forward = ours if method == "tilewise" else dense
        if method == "compile":
            torch._dynamo.reset()
            forward = torch.compile(dense)
        step = stepper(forward, x, leaves)
        for _ in range(3):
            step()
        many = max(1, min(50, int(0.1 / max(seconds(step, 2, cuda), 1e-5))))
        ms = 1000 * statistics.median(seconds(step, many, cuda) for _ in range(arguments.turns))
        return {"status": "ok", "median_ms": round(ms, 4)}
    except torch.OutOfMemoryError:
        return {"status": "oom"}
    finally:
        if cuda:
            torch.cuda.empty_cache()


# -- busy cores --


def ranks_dense(x: dict[str, Tensor]) -> Tensor:
    scores = x["a"] @ x["b"].T
    return (scores > scores.diagonal()[:, None]).sum(1)


def time_busy(arguments: argparse.Namespace) -> None:
    """Two threads beside two loops that never wait, which run in every second turn."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    rows_out = []

    def pause(*, paused: bool) -> None:
        for loop in loops:
            loop.send_signal(signal.SIGSTOP if paused else signal.SIGCONT)

    try:
        for name in (*arguments.losses.split(","), "retrieval_ranks"):
            pause(paused=True)
            x = make_inputs(BUSY_ROWS, arguments.width, CLASSES // 8, torch.float32, "cpu")
            if name == "retrieval_ranks":
                steps = {
                    "tilewise": lambda x=x: tw.retrieval_ranks(x["a"], x["b"]),
                    "dense": lambda x=x: ranks_dense(x),
                }
            else:
                ours, dense, leaves = LOSSES[name]
                steps = {"tilewise": stepper(ours, x, leaves), "dense": stepper(dense, x, leaves)}
            for step in steps.values():
                step()
            found: dict[str, list[float]] = {f"{method}, {how}": [] for method in steps for how in ("quiet", "busy")}
            for _ in range(arguments.turns):
                for how in ("quiet", "busy"):
                    pause(paused=how == "quiet")
                    for method in random.sample(list(steps), len(steps)):
                        found[f"{method}, {how}"].append(seconds(steps[method], 3, False))
            ms = {key: round(1000 * statistics.median(times), 3) for key, times in found.items()}
            lost = {method: ms[f"{method}, busy"] / ms[f"{method}, quiet"] for method in steps}
            ratio = round(lost["tilewise"] / lost["dense"], 3)
            rows_out.append({"loss": name, "rows": BUSY_ROWS, "ms": ms, "lost over that of dense": ratio})
            print(
                f"{name:16} lost {lost['tilewise']:5.2f}   dense {lost['dense']:5.2f}   ratio {ratio:5.2f}", flush=True
            )
    finally:
        for loop in loops:
            loop.kill()
    write("busy", "cases", rows_out, arguments, "cpu")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("count", "time", "sizes", "busy"))
    parser.add_argument("--rows", default="64,256,1024,2048,4096")
    parser.add_argument("--losses", default=",".join(LOSSES))
    parser.add_argument("--dtypes", default="bf16,float32" if torch.cuda.is_available() else "float32")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--threads", type=int, default=1, help="of a CPU; busy: always 2")
    parser.add_argument("--seconds", type=float, default=100, help="sizes: nothing is begun after so many seconds")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--compile", action="store_true", help="torch.compile of the dense loss as well")
    parser.add_argument("--note", default="")
    parser.add_argument("--commit", help=COMMIT_HELP)
    parser.add_argument("--out", help="another file for the results")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() and arguments.what != "busy" else "cpu"
    if device == "cpu":
        torch.set_num_threads(2 if arguments.what == "busy" else arguments.threads)
    if arguments.what == "count":
        count_all()
    elif arguments.what == "busy":
        time_busy(arguments)
    else:
        (time_sizes if arguments.what == "sizes" else time_all)(arguments, device)


if __name__ == "__main__":
    main()
