"""Students that learn from a teacher on the CPU, with tilewise and with stored logits: curves, time and memory.

    python -m benchmarks.students            writes the results, then the charts and the page that show them
    python -m benchmarks.students --quick    small batches and few steps: checks that everything runs

The models and the data are those of examples/distillation.py and examples/clip_distillation.py, with larger batches.
For each case, two students start from the same weights, see the same batches, and take turns: one step with tilewise,
one with stored logits. Time is that of a training step, and so is memory: the forward pass of the student, the loss and
the gradients. The teacher's hidden states or features are computed before. torch uses one thread, and time is the CPU
time of the process, so that other programs of the machine disturb it little. Memory is measured in a process of its own
for each method (see benchmarks.measure). Results: benchmarks/results/students-<device>.json.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tilewise as tw
from benchmarks import charts
from benchmarks.measure import ROOT, Step, cpu_peak_bytes, orders, summarize
from benchmarks.run import RESULTS, describe, repeatable, slug, write

sys.path.append(str(ROOT / "examples"))

from contrastive import WORDS, Towers, tensors
from language_model import Model, read_tokens

TARGET_WEIGHT = 0.1
OPTIONS = tw.TileOptions(workspace_mib=16)  # the default, 256 MiB, is more than all the logits of these batches
SIZES = {"language": (16, 31), "clip": (2048, 31)}  # sequences or pairs of a batch, steps
QUICK = {"language": (2, 3), "clip": (64, 3)}
TEACHER_STEPS, TEACHER_BATCH = 40, {"language": 8, "clip": 512}
Batch = tuple[Tensor, ...]
Loss = Callable[[Any, Batch, Batch], Tensor]  # student, batch, what the teacher makes of it


def language_tilewise(student: Model, batch: Batch, teacher: Batch) -> Tensor:
    """KL(teacher || student) of each next word, and its cross-entropy."""
    (tokens,) = batch
    return tw.linear_distillation_loss(
        student(tokens),
        student.table.weight,
        *teacher,
        tokens,
        target_weight=TARGET_WEIGHT,
        shift=1,
        options=OPTIONS,
    )


def language_dense(student: Model, batch: Batch, teacher: Batch) -> Tensor:
    """The same from the logits of both models."""
    (tokens,) = batch
    log_p = (student(tokens)[:, :-1].flatten(0, 1) @ student.table.weight.T).log_softmax(1)
    q = (teacher[0][:, :-1].flatten(0, 1) @ teacher[1].T).softmax(1)
    divergence = F.kl_div(log_p, q, reduction="batchmean")
    return divergence + TARGET_WEIGHT * F.nll_loss(log_p, tokens[:, 1:].flatten())


def clip_tilewise(student: Towers, batch: Batch, teacher: Batch) -> Tensor:
    """The contrastive loss of the pairs, and KL(teacher || student) in both directions."""
    image, text, scale = student(*batch)
    loss = tw.clip_loss(image, text, scale, options=OPTIONS)
    return loss + tw.clip_distillation_loss(image, text, scale, *teacher, options=OPTIONS)


def clip_dense(student: Towers, batch: Batch, teacher: Batch) -> Tensor:
    """The same from the scores of all pairs of both models."""
    image, text, scale = student(*batch)
    scores, of_teacher, own = scale * image @ text.T, teacher[2] * teacher[0] @ teacher[1].T, torch.arange(len(image))
    total = torch.zeros(())
    for x, y in ((scores, of_teacher), (scores.T, of_teacher.T)):
        log_p = x.log_softmax(1)
        total = total + F.nll_loss(log_p, own) / 2 + F.kl_div(log_p, y.softmax(1), reduction="batchmean") / 2
    return total


@dataclass(frozen=True)
class Task:
    """Models and losses of a case."""

    model: Callable[[str], nn.Module]  # "teacher" or "student"
    alone: Callable[[Any, Batch], Tensor]  # the loss of the teacher
    taught: Callable[[Any, Batch], Batch]  # what the teacher makes of a batch
    methods: dict[str, Loss]
    any_batch: Callable[[int], Batch]  # random values, for the memory
    lr: float


def language_model(name: str, words: int = 8000) -> Model:
    """The widths of examples/distillation.py."""
    return Model(words, {"teacher": 128, "student": 32}[name])


def clip_model(name: str) -> Towers:
    """The sizes of examples/clip_distillation.py."""
    width = {"teacher": 128, "student": 32}[name]
    model = Towers(width, 4 * width)
    nn.init.normal_(model.text.weight, std=0.1)
    return model


TASKS = {
    "language": Task(
        language_model,
        lambda m, x: tw.linear_cross_entropy(m(x[0]), m.table.weight, x[0], shift=1),
        lambda m, x: (m(x[0]), m.table.weight.detach()),
        {"tilewise": language_tilewise, "dense": language_dense},
        lambda n: (torch.randint(8000, (n, 64)),),
        4e-3,
    ),
    "clip": Task(
        clip_model,
        lambda m, x: tw.clip_loss(*m(*x)),
        lambda m, x: m(*x),
        {"tilewise": clip_tilewise, "dense": clip_dense},
        lambda n: (torch.randn(n, 896), torch.randint(WORDS, (n, 8))),
        1e-2,
    ),
}


def real_data(case: str) -> Batch:
    """All sequences, or all pictures and captions."""
    if case == "language":
        return (read_tokens()[0],)
    from tilewise.train.icons import load_icons

    return tensors(load_icons().split("train"))


def batches(data: Batch, size: int, steps: int, seed: int) -> list[Batch]:
    """Random rows of the data."""
    rows = torch.randint(len(data[0]), (steps, size), generator=torch.Generator().manual_seed(seed))
    return [tuple(x[row] for x in data) for row in rows]


def update(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Callable[[], Tensor]) -> float:
    """One training step. Returns the loss."""
    optimizer.zero_grad()
    value = loss()
    value.backward()
    optimizer.step()
    return value.item()


def curves(case: str, size: int, steps: int, teacher_steps: int) -> dict[str, dict[str, Any]]:
    """Losses and time of a step of both students."""
    task, data = TASKS[case], real_data(case)
    torch.manual_seed(0)
    teacher = task.model("teacher")
    optimizer = torch.optim.AdamW(teacher.parameters(), lr=task.lr)
    for batch in batches(data, TEACHER_BATCH[case], teacher_steps, 0):
        update(teacher, optimizer, lambda batch=batch: task.alone(teacher, batch))
    students, optimizers = {}, {}
    for method in task.methods:
        torch.manual_seed(1)
        students[method] = task.model("student")
        optimizers[method] = torch.optim.AdamW(students[method].parameters(), lr=task.lr)
    losses: dict[str, list[float]] = {method: [] for method in task.methods}
    times: dict[str, list[float]] = {method: [] for method in task.methods}
    for batch, order in zip(batches(data, size, steps, 1), orders(task.methods, steps), strict=True):
        with torch.no_grad():
            known = tuple(x.detach() for x in task.taught(teacher, batch))
        for method in order:
            student, loss = students[method], task.methods[method]
            start = time.process_time()
            losses[method].append(
                update(student, optimizers[method], lambda s=student, f=loss, b=batch, k=known: f(s, b, k))
            )
            times[method].append(1e3 * (time.process_time() - start))
    return {m: {"losses": losses[m], **asdict(summarize(times[m][1:]))} for m in task.methods}


def measured(case: str, method: str, size: int) -> tuple[Step, Step]:
    """Steps for `cpu_peak_bytes`: one that warms up, and the one that counts."""
    torch.set_num_threads(1)
    task, teacher = TASKS[case], TASKS[case].model("teacher")

    def step(n: int) -> Step:
        student, batch = task.model("student"), task.any_batch(n)
        with torch.no_grad():
            known = tuple(x.detach() for x in task.taught(teacher, batch))
        return Step(lambda: task.methods[method](student, batch, known), list(student.parameters()))

    return step(size), step(size)


def main(argv: Sequence[str] | None = None) -> Path:
    """Measure and write. Returns the path of the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="small batches and few steps")
    parser.add_argument("--commit", help="the commit to record")
    parser.add_argument("--out", type=Path, help="file to write, instead of one in benchmarks/results")
    given = parser.parse_args(argv)
    command = repeatable("benchmarks.students", sys.argv[1:] if argv is None else argv)
    torch.set_num_threads(1)
    report = describe("students", torch.device("cpu"), command, 1, 0.0, commit=given.commit)
    path = given.out or RESULTS / f"students-{slug(report['device'])}.json"
    for case, (size, steps) in (QUICK if given.quick else SIZES).items():
        found = curves(case, size, steps, 3 if given.quick else TEACHER_STEPS)
        for method, row in found.items():
            peak = cpu_peak_bytes("benchmarks.students:measured", {"case": case, "method": method, "size": size})
            about = {"case": case, "method": method, "status": "ok", "batch": size, "peak_bytes": peak}
            report["results"].append({**about, **row})
            print(f"{case}, {method}: {row['median_ms']:.0f} ms, {peak / 2**20:.0f} MiB", flush=True)
        write(path, report)
    if not given.out:
        charts.main()
    return path


if __name__ == "__main__":
    print(f"wrote {main()}")
