"""The kernels under several versions of Triton, or several assemblers: speed, and bits of results.

    python -m benchmarks.compilers --out FILE          measure with the Triton of this process
    python -m benchmarks.compilers --beside A B        print the ratios of two files, and which results differ in bits

A Triton is chosen with PYTHONPATH, an assembler with TRITON_PTXAS_PATH; both need a TRITON_CACHE_DIR of their own.
Times are divided by that of as many operations at the rate of a plain product in the same process, so that files of two
processes can be compared. With --turns 0 kernels are only compiled and run once.

Bits: inputs are small integers, so that every product of features is exact in any order. The calls are those that need
kernels with matrix products whose operands are in registers: float32 features in TF32, and the filter in half types.
The file names the kernels with such operands that were compiled.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import os
import re
import subprocess
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import tilewise as tw
from benchmarks import cases, distillation, heads, measure
from benchmarks.cases import square, vocabulary
from benchmarks.measure import Step
from benchmarks.run import COMMIT_HELP, commit_of, describe, write
from tilewise.kernels.precision import matmul_precision

Row = dict[str, Any]
HEAD = (8192, 4096, 128256)
FILTER = tw.TileOptions(filter_tolerance=1e-2)
# A product of tiles with its first operand in registers: a list of them follows the list of the sums.
IN_REGISTERS = re.compile(r"wgmma\.mma_async[^;]*?\{[^}]*\},\s*\{")


def timed(device: torch.device, quick: bool) -> Iterator[tuple[str, int, Callable[[], Step]]]:
    """Name, operations and a function that builds the step, for each case."""
    peaked = vocabulary(8192, 2304, 256000, "bf16", scores="peaked")
    for case, method in (
        (square("clip", 65536, 512, "bf16"), "tilewise"),
        (square("siglip", 65536, 768, "bf16"), "tilewise"),
        (square("nt_xent", 65536, 256, "bf16"), "tilewise"),
        (peaked, "tilewise-filter"),
    ):
        shape = cases.shrunk(case, 256) if quick else case
        build = partial(lambda shape, method: cases.build_step(shape, method, cases.make_inputs(shape, device)))
        yield case.name, shape.flops, partial(build, shape, method)
    n, d, classes = heads.QUICK[0] if quick else HEAD
    case = vocabulary(n, d, classes, "bf16")
    yield "token head", case.flops, partial(token_step, case, device)
    yield "distillation, KL", 5 * case.unit_flops, partial(distillation_step, case, device)


def token_step(case: cases.Case, device: torch.device) -> Step:
    """Log-probabilities and entropies, with a gradient of its own for each token."""
    x = cases.make_inputs(case, device)
    x["advantage"], x["bonus"] = torch.randn(2, case.rows, device=device)
    return Step(lambda: heads.total(*heads.tilewise_head(x["a"], x["b"], x["target"]), x), [x["a"], x["b"]])


def distillation_step(case: cases.Case, device: torch.device) -> Step:
    """KL divergence of a student from a teacher of the same size."""
    student, teacher = (cases.make_inputs(case, device, seed) for seed in (0, 1))
    divergence = distillation.tilewise_divergence(0.0)
    leaves = [student["a"], student["b"]]
    return Step(lambda: divergence(*leaves, teacher["a"].detach(), teacher["b"].detach()).mean(), leaves)


def measured(device: torch.device, turns: int, quick: bool) -> list[Row]:
    """Time of each case, and its share of the time that a plain product would need for the operations."""
    rows = []
    for name, operations, build in timed(device, quick):
        step = build()
        row: Row = {"case": name}
        if turns == 0:
            step()
            measure.synchronize(device)
        else:
            before = measure.sustained_rate(device)
            found = measure.time_in_turns({name: step}, device, repeats=turns, budget_s=60.0)[name]
            rate = (before + measure.sustained_rate(device)) / 2
            if isinstance(found, measure.Failure):
                row |= {"status": found.status, "reason": found.reason}
            else:
                row |= {"status": "ok", "ms": found.median_ms, "rate_tflops": rate / 1e12}
                row["share_of_rate"] = operations / (1e-3 * found.median_ms) / rate
        rows.append(row)
        print(json.dumps(row), flush=True)
        del step
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return rows


def exact_calls(device: torch.device, quick: bool) -> Iterator[tuple[str, Callable[[], list[Tensor]]]]:
    """Name of each call on integers, and a function that returns its results and gradients."""
    n, classes, d = (300, 700, 64) if quick else (16384, 24000, 256)
    kinds = {"TF32": torch.float32} | ({} if quick else {"bf16": torch.bfloat16, "fp16": torch.float16})
    for name, dtype in kinds.items():
        chance = torch.Generator(device).manual_seed(7)

        def integers(rows: int, chance: Any = chance, dtype: torch.dtype = dtype) -> Tensor:
            found = torch.randint(-2, 3, (rows, d), generator=chance, device=device)
            return found.to(dtype).requires_grad_()

        a, b, weight, other = integers(n), integers(n), integers(classes), integers(n).detach()
        target = torch.randint(classes, (n,), generator=chance, device=device)
        with torch.no_grad():  # few likely classes, so that the filter leaves out the others
            weight[:, 0] = -4 * torch.arange(classes, device=device).div(256, rounding_mode="floor").clamp(max=8)
            a[:, 0] = 4
        small = torch.tensor(1 / 64, device=device)
        head = partial(tw.linear_cross_entropy, a, weight, target)
        yield f"linear_cross_entropy, filter, {name}", partial(results, partial(head, options=FILTER), [a, weight])
        if dtype == torch.float32:
            yield f"linear_cross_entropy, {name}", partial(results, head, [a, weight])
            yield f"clip_loss, {name}", partial(results, partial(tw.clip_loss, a, b, small), [a, b])
            yield f"siglip_loss, {name}", partial(results, partial(tw.siglip_loss, a, b, small, -small), [a, b])
            yield f"nt_xent, {name}", partial(results, partial(tw.nt_xent, a, temperature=64.0), [a])
            yield f"retrieval_ranks, {name}", lambda a=a, b=b: [tw.retrieval_ranks(a.detach(), b.detach())]
            kl = partial(tw.linear_distillation_loss, a, weight, other, weight.detach())
            yield f"linear_distillation_loss, {name}", partial(results, kl, [a, weight])


def results(loss: Callable[[], Tensor], leaves: list[Tensor]) -> list[Tensor]:
    """The loss and its gradients."""
    value = loss()
    return [value.detach(), *torch.autograd.grad(value, leaves)]


def digests(device: torch.device, quick: bool) -> list[Row]:
    """A digest of the bits of each result of each call, and its norm, which says how far two results are apart."""
    rows = []
    for name, call in exact_calls(device, quick):
        found = call()
        digest = [hashlib.sha256(t.flatten().view(torch.uint8).cpu().numpy().tobytes()).hexdigest()[:16] for t in found]
        rows.append({"case": name, "digests": digest, "norms": [t.double().norm().item() for t in found]})
        print(json.dumps(rows[-1]), flush=True)
    return rows


def assembler(device: torch.device) -> str:
    """Version of the assembler that Triton uses for this card."""
    if device.type != "cuda":
        return "none"
    from triton.backends.nvidia.compiler import get_ptxas

    major, minor = torch.cuda.get_device_capability(device)
    path = get_ptxas(10 * major + minor).path
    shown = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"V([\d.]+)", shown)
    return found.group(1) if found else shown.strip()


def kernels_in_registers() -> list[str]:
    """Names of kernels in TRITON_CACHE_DIR that have a product with an operand in registers."""
    folder = Path(os.environ.get("TRITON_CACHE_DIR", "unset"))
    return sorted({path.stem for path in folder.rglob("*.ptx") if IN_REGISTERS.search(path.read_text())})


def compared(first: Row, second: Row) -> str:
    """Ratios of the times, and which results differ, as Markdown."""
    words = [f"Triton {report['triton']}, ptxas {report['assembler']}" for report in (first, second)]
    lines = [f"| case | {words[0]} | {words[1]} | ratio |", "|---|---:|---:|---:|"]
    other = {row["case"]: row for row in second["results"]}
    for row in first["results"]:
        mine, theirs = row.get("share_of_rate"), other.get(row["case"], {}).get("share_of_rate")
        if mine and theirs:
            cells = [f"{r['ms']:.2f} ms, {r['share_of_rate']:.3f} R" for r in (row, other[row["case"]])]
            lines.append(f"| {row['case']} | {' | '.join(cells)} | {mine / theirs:.3f} |")
    lines += ["", "| call on integers | bits |", "|---|---|"]
    other = {row["case"]: row for row in second["bits"]}
    for row in first["bits"]:
        theirs = other.get(row["case"])
        if theirs:
            apart = max(abs(a - b) / max(abs(a), 1e-30) for a, b in zip(row["norms"], theirs["norms"], strict=True))
            same = row["digests"] == theirs["digests"]
            lines.append(f"| {row['case']} | {'the same' if same else f'differ; norms by {apart:.1e}'} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, or compare two files."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compilers", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--out", type=Path, help="file to write")
    parser.add_argument("--beside", type=Path, nargs=2, help="compare two files")
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--quick", action="store_true", help="small sizes on any device: checks that everything runs")
    parser.add_argument("--commit", help=COMMIT_HELP)
    given = parser.parse_args(argv)
    if given.beside:
        print(compared(*(json.loads(path.read_text()) for path in given.beside)))
        return
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if given.out is None or (device.type != "cuda" and not given.quick):
        raise SystemExit("this benchmark needs --out FILE and a CUDA device. Pass --quick to try it out on a CPU")
    report = describe(
        "compilers", device, "python -m benchmarks.compilers", given.turns, 60.0, commit=commit_of(given.commit)
    )
    with matmul_precision("high"):
        report |= {"assembler": assembler(device), "bits": digests(device, given.quick)}
        report["in_registers"] = kernels_in_registers()
        report["results"] = measured(device, given.turns, given.quick)
    write(given.out, report)


if __name__ == "__main__":
    main()
