"""Every kernel compiles for all cards of the size table, has enough registers, and its shared memory fits the card."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

triton = pytest.importorskip("triton", reason="triton is not installed on this platform")

# Shared memory in bytes: of one program at most, and of a multiprocessor
SMALL, LARGE = (101376, 102400), (232448, 233472)
LIMITS = {80: (166912, 167936), 86: SMALL, 89: SMALL, 90: LARGE, 100: LARGE, 120: SMALL}
REGISTERS = 65536  # of a multiprocessor
ROOT = Path(__file__).resolve().parents[2]


SCRIPTS = {
    "compile_two_pass": {
        *("forward_kernel", "repair_kernel", "merge_kernel", "gradient_kernel", "positive_kernel"),
        *("positive_gradient_kernel", "factor_kernel", "check_kernel", "row_product_kernel"),
        "saved_gradient_kernel",
    },
    "compile_filtered": {
        *("mass_kernel", "probe_kernel", "choose_kernel", "pair_kernel", "column_kernel", "gather_kernel"),
        "top_kernel",
    },
    "compile_ranks": {"count_kernel", "best_kernel", "diagonal_kernel", "search_kernel", "select_kernel"},
    "compile_guided": {"guided_forward_kernel", "guided_gradient_kernel", "stored_jsd_kernel"},
    "compile_one_pass": {
        *("exponents of cross entropy", "sigmoid", "rows", "finish", "finish, only scaled rows", "positives", "runs"),
        "times",
    },
    "compile_small": {
        *("rows_kernel", "both_kernel", "share_kernel", "finish_kernel", "columns_kernel", "gradient_kernel"),
        *("stats_kernel", "stats_gradient_kernel"),
    },
}
FEW = {
    "compile_two_pass": {"forward_kernel", "merge_kernel", "gradient_kernel"},
    "compile_filtered": {"mass_kernel", "pair_kernel", "column_kernel"},
    "compile_ranks": {"count_kernel", "search_kernel"},
    "compile_guided": {"guided_forward_kernel", "guided_gradient_kernel", "stored_jsd_kernel"},
    "compile_one_pass": {"sigmoid"},
    "compile_small": {"rows_kernel", "both_kernel"},
}
MOST_STACK = 64  # bytes per thread to which registers spill: a few numbers that no inner loop needs
# Kernels and losses that may spill more: the most of Triton 3.6, 3.7.1 and 3.9 on all cards, rounded up. Newer versions
# spill more. These mostly return at once, or run once for a ranking.
SPILLS = {"repaired sigmoid": 2560, "repair_kernel": 3328, "best_kernel": 768, "count_kernel": 448}
SPILLS["search_kernel"] = 640  # on Ampere with ids, limits and exclusions; else none
# Every statistic, bias and soft cap at once. What spills is used after the products.
SPILLS |= {"tokens": 832, "tokens, picked": 1024, "tokens, saved": 1024, "supcon": 512, "cross entropy": 256}
SPILLS |= {"cross entropy, bias": 192, "info_nce with ids": 128, "exponents of info_nce with ids": 192}
SPILLS |= {"guided_forward_kernel": 1664, "guided_gradient_kernel": 2112, "pair_kernel": 216, "mass_kernel": 296}
SPILLS |= {"exponents, bias and softcap": 128, "all but the picked": 320}
# A tile of 64 scores per thread and no loop. The most of Triton 3.7.1 is 200, of G with ids or several positives.
SPILLS |= {"both_kernel": 256}
# Wide features on Hopper: 176 bytes with Triton 3.9, columns that each tile reads again after its products; 0 with 3.6.
SPILLS |= {"sigmoid": 192}
# Common losses. On Hopper, Triton 3.6, with which the sizes were measured, does not spill here. An A100 spills most.
SPILLS |= {"forward_kernel": 128, "log-probability and entropy": 576}


def lines_of(script: str, extent: str) -> list[dict]:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-m", f"tests.kernels.{script}", extent]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def check(lines: list[dict]) -> None:
    """Each kernel, and as many programs as shall be resident, fit a multiprocessor of the card."""
    assert {line["capability"] for line in lines} == set(LIMITS)
    wrong = [(line, exceeded) for line in lines if (exceeded := limits_exceeded(line))]
    assert not wrong, "\n".join(f"{exceeded}: {line}" for line, exceeded in wrong)
    for line in lines:  # a thread that repeated the work of another one would append its keys twice
        assert line.get("reserved") == line.get("scores"), line


def check_recorded(lines: list[dict]) -> None:
    """On Hopper no kernel needs more registers, or spills more, than `registers.json` says for this version of Triton.

    The file has [registers, bytes of stack], the most of narrow and wide features, from lines of ``compile_* full``.
    """
    recorded = json.loads(Path(__file__).with_name("registers.json").read_text()).get(triton.__version__, {})
    for line in lines:
        most = recorded.get(f"{line['kernel']} | {line.get('loss', '')} | {line.get('dtype', '')}")
        if line["capability"] == 90 and most is not None:
            assert line["registers"] <= most[0], (line, most)
            assert line["stack"] <= most[1], (line, most)


def check_operands(lines: list[dict]) -> None:
    """In half types on Hopper, these kernels alone have products with an operand in registers.

    Assemblers before ptxas 13.3 may use such registers again too early. In TF32 nearly all kernels have such products.
    """
    half = [line for line in lines if line["capability"] == 90 and line.get("dtype") in ("bf16", "fp16")]
    found = {line["kernel"] for line in half if line["in_registers"]}
    assert found == {"pair_kernel"} & {line["kernel"] for line in half}


def limits_exceeded(line: dict) -> list[str]:
    """What does not fit, with the limit."""
    most, together = LIMITS[line["capability"]]
    spills = [SPILLS[name] for name in (line["kernel"], line.get("loss")) if name in SPILLS]
    found = {
        "shared": (line["shared"], most),
        "shared of all programs": (line["programs"] * (line["shared"] + 1024), together),
        "registers": (line["registers"], 255),
        "registers of all programs": (line["programs"] * line["threads"] * line["registers"], REGISTERS),
        "stack": (line["stack"], max([MOST_STACK, *spills])),
    }
    return [f"{name} {size} > {limit}" for name, (size, limit) in found.items() if size > limit]


SECOND = ("compile_ranks", "compile_guided", "compile_one_pass")  # in `make test-cards`, to keep `make test` short


@pytest.mark.parametrize(
    "script", [pytest.param(script, marks=[pytest.mark.cards] * (script in SECOND)) for script in FEW]
)
def test_the_largest_kernels_fit_every_card(script):
    lines = lines_of(script, "quick")
    assert {line["kernel"] for line in lines} == FEW[script]
    check(lines)
    check_recorded(lines)
    check_operands(lines)


@pytest.mark.cards
@pytest.mark.parametrize("script", SCRIPTS)
def test_all_kernels_fit_every_card(script):
    lines = lines_of(script, "full")
    assert {line["kernel"] for line in lines} >= SCRIPTS[script]
    check(lines)


def test_the_check_sees_what_does_not_fit():
    good = {"kernel": "k", "shared": 1024, "programs": 2, "threads": 128, "registers": 128, "stack": 0}
    lines = [good | {"capability": capability} for capability in LIMITS]
    check(lines)
    # In Triton 3.9 a float32 kernel of the filter with tiles of 64 x 256 x 32 takes 122,880 bytes.
    for wrong in ({"shared": 122_880}, {"shared": 60_000}, {"registers": 255, "threads": 256}, {"stack": 512}):
        with pytest.raises(AssertionError):
            check([*lines, good | {"capability": 89} | wrong])
    with pytest.raises(AssertionError):
        check(lines[:-1])


def test_the_check_sees_operands_in_registers():
    pair = {"capability": 90, "kernel": "pair_kernel", "dtype": "bf16", "in_registers": 16}
    other = {"capability": 90, "kernel": "forward_kernel", "dtype": "bf16", "in_registers": 0}
    check_operands([pair, other, other | {"dtype": "fp32", "in_registers": 8}])
    for wrong in ([pair, other | {"in_registers": 1}], [pair | {"in_registers": 0}, other]):
        with pytest.raises(AssertionError):
            check_operands(wrong)


def test_the_comparison_sees_more_registers():
    line = {"capability": 90, "kernel": "forward_kernel", "loss": "clip", "dtype": "bf16"}
    recorded = json.loads(Path(__file__).with_name("registers.json").read_text())
    registers, stack = recorded.get(triton.__version__, recorded["3.7.1"])["forward_kernel | clip | bf16"]
    check_recorded([line | {"registers": registers, "stack": stack}])
    if triton.__version__ in recorded:
        for more in (1, 0), (0, 8):
            with pytest.raises(AssertionError):
                check_recorded([line | {"registers": registers + more[0], "stack": stack + more[1]}])
